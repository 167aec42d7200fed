"""LlamaIndex over its package for servers that speak OpenAI's API: chat, completion, streams, tools, structured."""

from typing import Literal

from checks import API, KEY, MODEL, begin, check
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

LLM = OpenAILike(model=MODEL, api_base=API, api_key=KEY, is_chat_model=True, is_function_calling_model=True,
                 max_tokens=100)
ASKED = [ChatMessage(role="user", content="What is the sky like?")]


class Sky(BaseModel):
    """What the sky is like."""

    colour: Literal["blue", "grey"]
    clouds: bool


def paint(colour: Literal["red", "blue"]) -> str:
    """Paint the wall."""
    return colour


begin("llama-index-llms-openai-like")


@check("chat")
def _() -> None:
    assert LLM.chat(ASKED, max_tokens=8).message.role == "assistant"


@check("stream")
def _() -> None:
    assert list(LLM.stream_chat(ASKED, max_tokens=8))


@check("completions")
def _() -> None:
    plain = OpenAILike(model=MODEL, api_base=API, api_key=KEY, is_chat_model=False, max_tokens=4)
    assert plain.complete("One, two,").text


@check("tools")
def _() -> None:
    answer = LLM.chat_with_tools([FunctionTool.from_defaults(paint)], user_msg="Paint it.", tool_required=True)
    calls = LLM.get_tool_calls_from_response(answer)
    assert calls[0].tool_kwargs["colour"] in ("red", "blue")


@check("structured")
def _() -> None:
    found = LLM.as_structured_llm(Sky).chat(ASKED)
    assert isinstance(found.raw, Sky)
