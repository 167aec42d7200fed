"""outlines over OpenAI's client: text, stream, an object."""

import json
from typing import Literal

import openai
import outlines
from checks import MODEL, begin, check
from pydantic import BaseModel

LLM = outlines.from_openai(openai.OpenAI(), MODEL)
VLLM = outlines.from_vllm(openai.OpenAI(), MODEL)


class Sky(BaseModel, extra="forbid"):  # an open object a small model seldom ends
    colour: Literal["blue", "grey"]
    clouds: bool


begin("outlines")


@check("text")
def _() -> None:
    assert isinstance(LLM("Say something.", max_tokens=8), str)


@check("stream")
def _() -> None:
    assert list(LLM.stream("Say something.", max_tokens=8))


@check("object")
def _() -> None:
    Sky(**json.loads(LLM("What is the sky like?", Sky, max_tokens=300)))


@check("object as of vLLM")
def _() -> None:
    Sky(**json.loads(VLLM("What is the sky like?", Sky, max_tokens=300)))


@check("choice as of vLLM")
def _() -> None:
    assert VLLM("What is the sky like?", Literal["blue", "grey"], max_tokens=20) in ("blue", "grey")


@check("regex as of vLLM")
def _() -> None:
    assert len(VLLM("Say a number.", outlines.types.Regex(r"[0-9]{3}"), max_tokens=20)) == 3
