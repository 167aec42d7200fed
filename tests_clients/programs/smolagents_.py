"""smolagents: its model for servers that speak OpenAI's API: text, stream, a required tool, a schema."""

from checks import API, KEY, MODEL, begin, check
from smolagents import OpenAIServerModel, tool

LLM = OpenAIServerModel(MODEL, api_base=API, api_key=KEY, max_tokens=80)
ASKED = [{"role": "user", "content": [{"type": "text", "text": "Paint the wall."}]}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "sky", "strict": True, "schema": {
    "type": "object", "properties": {"clouds": {"type": "boolean"}}, "required": ["clouds"],
    "additionalProperties": False}}}


@tool
def paint(times: int) -> str:
    """Paint the wall.

    Args:
        times: how often
    """
    return "done"


begin("smolagents")


@check("text")
def _() -> None:
    assert LLM.generate(ASKED).role == "assistant"


@check("stop")
def _() -> None:
    LLM.generate(ASKED, stop_sequences=["Observation:", "Calling tools:"])


@check("stream")
def _() -> None:
    assert list(LLM.generate_stream(ASKED))


@check("tool")
def _() -> None:
    answer = LLM.generate(ASKED, tools_to_call_from=[paint])
    assert answer.tool_calls[0].function.name == "paint"


@check("schema")
def _() -> None:
    assert "clouds" in LLM.generate(ASKED, response_format=SCHEMA).content
