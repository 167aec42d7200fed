"""DSPy, which asks through LiteLLM: a signature in its own words, and one by JSON."""

from typing import Literal

import dspy
from checks import API, KEY, MODEL, begin, check

LM = dspy.LM(f"openai/{MODEL}", api_base=API, api_key=KEY, max_tokens=120, cache=False, temperature=0.0)
dspy.configure(lm=LM)


class Sky(dspy.Signature):
    """Say what the sky is like."""

    question: str = dspy.InputField()
    colour: Literal["blue", "grey"] = dspy.OutputField()


begin("dspy")


@check("text")
def _() -> None:
    assert LM("Say something.")


@check("json")
def _() -> None:
    with dspy.context(adapter=dspy.JSONAdapter()):
        assert dspy.Predict(Sky)(question="What is the sky like?").colour in ("blue", "grey")
