"""Anthropic's SDK for Python: messages, streams, forced tools, counts, errors."""

import anthropic
from checks import MODEL, begin, check

CLIENT = anthropic.Anthropic()
ASKED = [{"role": "user", "content": "What colour is the sky?"}]
TOOL = {"name": "paint", "description": "Paint something.", "input_schema": {
    "type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}}

begin("anthropic")


@check("messages")
def _() -> None:
    answer = CLIENT.messages.create(model=MODEL, max_tokens=8, messages=ASKED, system="Be short.")
    assert answer.content[0].type == "text" and answer.usage.output_tokens > 0


@check("stream")
def _() -> None:
    with CLIENT.messages.stream(model=MODEL, max_tokens=8, messages=ASKED) as stream:
        text = "".join(stream.text_stream)
    assert stream.get_final_message().content[0].text == text


@check("tools")
def _() -> None:
    answer = CLIENT.messages.create(model=MODEL, max_tokens=300, messages=ASKED, tools=[TOOL],
                                    tool_choice={"type": "tool", "name": "paint"})
    call = answer.content[-1]
    assert call.type == "tool_use" and call.input["colour"] in ("red", "blue") and answer.stop_reason == "tool_use"
    history = [*ASKED, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": call.id, "content": "done"}]}]
    assert CLIENT.messages.create(model=MODEL, max_tokens=4, messages=history, tools=[TOOL]).content is not None


@check("streamed tools")
def _() -> None:
    with CLIENT.messages.stream(model=MODEL, max_tokens=300, messages=ASKED, tools=[TOOL],
                                tool_choice={"type": "any", "disable_parallel_tool_use": True}) as stream:
        final = stream.get_final_message()
    assert final.content[-1].input["colour"] in ("red", "blue")


@check("count_tokens")
def _() -> None:
    assert CLIENT.messages.count_tokens(model=MODEL, messages=ASKED).input_tokens > 0


@check("errors")
def _() -> None:
    try:
        CLIENT.messages.create(model=MODEL, max_tokens=0, messages=ASKED)
    except anthropic.BadRequestError as error:
        assert error.body["error"]["message"]
    try:
        anthropic.Anthropic(api_key="wrong").messages.create(model=MODEL, max_tokens=4, messages=ASKED)
    except anthropic.AuthenticationError:
        return
    raise AssertionError("a wrong key was taken")
