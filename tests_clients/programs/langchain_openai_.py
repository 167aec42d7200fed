"""LangChain over its OpenAI package: chat, stream, structured output each way, tools."""

from typing import Literal

from checks import MODEL, begin, check
from langchain_core.messages import ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

MODEL_OF_CHAT = ChatOpenAI(model=MODEL, max_tokens=100)


class Sky(BaseModel):
    """What the sky is like."""

    colour: Literal["blue", "grey"]
    clouds: bool


@tool
def paint(colour: Literal["red", "blue"]) -> str:
    """Paint the wall."""
    return f"the wall is {colour}"


begin("langchain-openai")


@check("chat")
def _() -> None:
    answer = MODEL_OF_CHAT.invoke("Say something.", max_tokens=8)
    assert answer.usage_metadata["output_tokens"] > 0


@check("stream")
def _() -> None:
    assert len(list(MODEL_OF_CHAT.stream("Say something.", max_tokens=8))) > 1


for method in ("json_schema", "function_calling"):
    @check(f"structured by {method}")
    def _() -> None:
        found = MODEL_OF_CHAT.with_structured_output(Sky, method=method).invoke("What is the sky like?")
        assert isinstance(found, Sky), found


@check("tools")
def _() -> None:
    bound = MODEL_OF_CHAT.bind_tools([paint], tool_choice="required", parallel_tool_calls=False)
    answer = bound.invoke("Paint the wall red.")
    call = answer.tool_calls[0]
    assert call["args"]["colour"] in ("red", "blue")
    result = ToolMessage(paint.invoke(call["args"]), tool_call_id=call["id"])
    history = [("user", "Paint the wall red."), answer, result]
    assert MODEL_OF_CHAT.bind_tools([paint]).invoke(history, max_tokens=8)


@check("responses")
def _() -> None:
    answer = ChatOpenAI(model=MODEL, max_tokens=16, use_responses_api=True).invoke("Say something.")
    assert answer.usage_metadata["output_tokens"] > 0
