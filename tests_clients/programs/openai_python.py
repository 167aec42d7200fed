"""openai-python: chat, streams, completions, tools, parsed objects, logprobs, responses, models, errors."""

import json
from typing import Literal

import openai
from checks import MODEL, begin, check
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

CLIENT = OpenAI()
ASKED = [{"role": "user", "content": "What colour is the sky? Answer with one word."}]
TOOL = {"type": "function", "function": {"name": "paint", "description": "Paint something.", "parameters": {
    "type": "object", "properties": {"colour": {"enum": ["red", "blue"]}, "coats": {"type": "integer", "minimum": 1,
                                                                                      "maximum": 9}},
    "required": ["colour", "coats"], "additionalProperties": False}}}


class Sky(BaseModel):
    colour: Literal["blue", "grey"]
    clouds: bool


begin("openai")


@check("chat")
def _() -> None:
    answer = CLIENT.chat.completions.create(model=MODEL, messages=ASKED, max_tokens=8, seed=1)
    assert answer.choices[0].finish_reason in ("stop", "length") and answer.usage.completion_tokens > 0


@check("stream")
def _() -> None:
    chunks = list(CLIENT.chat.completions.create(model=MODEL, messages=ASKED, max_tokens=8, stream=True,
                                                 stream_options={"include_usage": True}))
    assert chunks[-1].usage.completion_tokens > 0 and chunks[-2].choices[0].finish_reason
    whole = CLIENT.chat.completions.create(model=MODEL, messages=ASKED, max_tokens=8, temperature=0)
    pieces = CLIENT.chat.completions.create(model=MODEL, messages=ASKED, max_tokens=8, temperature=0, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in pieces if chunk.choices)
    assert text == whole.choices[0].message.content, (text, whole)


@check("async")
async def _() -> None:
    async with AsyncOpenAI() as client:
        answer = await client.chat.completions.create(model=MODEL, messages=ASKED, max_tokens=4)
    assert answer.choices


@check("completions")
def _() -> None:
    answer = CLIENT.completions.create(model=MODEL, prompt=["One, two,", "Red, green,"], max_tokens=4, n=2, logprobs=2)
    assert len(answer.choices) == 4 and answer.choices[0].logprobs.token_logprobs


@check("logprobs")
def _() -> None:
    answer = CLIENT.chat.completions.create(model=MODEL, messages=ASKED, max_tokens=4, logprobs=True, top_logprobs=3)
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) >= 3


@check("tools")
def _() -> None:
    answer = CLIENT.chat.completions.create(model=MODEL, messages=ASKED, tools=[TOOL], tool_choice="required",
                                            parallel_tool_calls=False, max_tokens=100)
    call = answer.choices[0].message.tool_calls[0]
    assert call.function.name == "paint" and 1 <= json.loads(call.function.arguments)["coats"] <= 9
    assert answer.choices[0].finish_reason == "tool_calls"
    history = [*ASKED, answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "done"}]
    assert CLIENT.chat.completions.create(model=MODEL, messages=history, tools=[TOOL], max_tokens=4).choices


@check("streamed tools")
def _() -> None:
    named = {"type": "function", "function": {"name": "paint"}}
    with CLIENT.chat.completions.stream(model=MODEL, messages=ASKED, tools=[TOOL], tool_choice=named,
                                        max_tokens=300) as stream:
        for _ in stream:
            pass
    call = stream.get_final_completion().choices[0].message.tool_calls[0]
    assert json.loads(call.function.arguments)["colour"] in ("red", "blue")


@check("parse")
def _() -> None:
    answer = CLIENT.chat.completions.parse(model=MODEL, messages=ASKED, response_format=Sky, max_tokens=300)
    assert isinstance(answer.choices[0].message.parsed, Sky)


@check("responses")
def _() -> None:
    answer = CLIENT.responses.create(model=MODEL, input="Say something.", max_output_tokens=16)
    assert answer.status in ("completed", "incomplete") and answer.usage.output_tokens > 0
    events = list(CLIENT.responses.create(model=MODEL, input="Say something.", max_output_tokens=16, stream=True))
    assert events[0].type == "response.created" and events[-1].type in ("response.completed", "response.incomplete")
    parsed = CLIENT.responses.parse(model=MODEL, input="What is the sky like?", text_format=Sky, max_output_tokens=300)
    assert isinstance(parsed.output_parsed, Sky)


@check("models")
def _() -> None:
    assert [model.id for model in CLIENT.models.list()] == [MODEL]
    assert CLIENT.models.retrieve(MODEL).id == MODEL


@check("errors")
def _() -> None:
    for wrong, kind in (({"temperature": -1}, openai.BadRequestError), ({"model": "none"}, openai.NotFoundError)):
        try:
            CLIENT.chat.completions.create(**{"model": MODEL, "messages": ASKED, **wrong})
        except kind as error:
            assert error.body["message"], error
        else:
            raise AssertionError(f"{wrong} was taken")
    try:
        OpenAI(api_key="wrong").models.list()
    except openai.AuthenticationError:
        return
    raise AssertionError("a wrong key was taken")
