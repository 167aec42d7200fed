"""The past of a conversation in other dialects becomes one of a chat, as templates take it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from router_service.dialects import messages, responses
from router_service.dialects.blocks import AnswerHead
from router_service.dialects.chat import ChatBody
from router_service.dialects.messages import MessagesReply
from router_service.dialects.openai import parse
from router_service.dialects.responses import ResponsesReply
from router_service.text.deltas import TextDelta
from router_service.text.marks import Style
from router_service.text.markup import Markup
from slipstream.base.errors import InvalidRequest
from slipstream.protocol.chat import Usage
from tests.echo import EchoTarget
from tests.routing import HELLO, routing
from tests.test_dialects import CALL, RESPONSES, SCHEMA
from tests.tiny import with_template


def test_a_past_of_theirs_becomes_one_of_a_chat() -> None:
    call = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    wanted = [{"role": "user", "content": "hello"},
              {"role": "assistant", "content": "", "tool_calls": [call]},
              {"role": "tool", "tool_call_id": "t1", "content": "sunny"}]
    chat = messages.chat_of({"messages": [
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "weather",
                                           "input": {"city": "Rome"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [
            {"type": "text", "text": "sunny"}]}]}], "thinking": {"type": "disabled"}, "made_up": 1})
    assert chat["messages"] == wanted and chat["made_up"] == 1
    assert chat["chat_template_kwargs"] == {"enable_thinking": False, "thinking": False}
    chat = responses.chat_of({"input": [
        {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "t1", "name": "weather", "arguments": {"city": "Rome"}},
        {"type": "function_call_output", "call_id": "t1", "output": "sunny"}], "reasoning": {"effort": "low"},
        "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}})
    assert chat["messages"] == wanted and chat["reasoning_effort"] == "low"
    assert chat["response_format"] == {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


@pytest.mark.parametrize(("result", "told"), [
    ({"is_error": True}, "Error: "), ({"is_error": True, "content": "no such city"}, "Error: no such city"),
    ({"is_error": False, "content": "sunny"}, "sunny"), ({"is_error": None}, "")])
def test_a_model_is_told_that_a_tool_failed(result: dict[str, Any], told: str) -> None:
    block = {"type": "tool_result", "tool_use_id": "t1", **result}
    chat = messages.chat_of({"messages": [{"role": "user", "content": [block]}]})
    assert chat["messages"] == [{"role": "tool", "tool_call_id": "t1", "content": told}]


def test_what_claude_code_says_as_the_system_is_taken_and_leaves_prompts_alike() -> None:
    """Each of its requests has a message of the system in mid-conversation, and begins with another number."""
    said: Any = [*HELLO, {"role": "system", "content": [{"type": "text", "text": "Tools: a"}]},
                 {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "more"}]

    def chat(number: str) -> Any:
        words = (f"x-anthropic-billing-header: cc_version=2.1.240.1ab; cch={number};", "You are Claude Code.")
        return messages.chat_of({"messages": said, "system": [{"type": "text", "text": text} for text in words]})

    assert chat("a1b2c") == chat("d3e4f")
    assert chat("a1b2c")["messages"] == [
        {"role": "system", "content": "You are Claude Code."},
        {"role": "user", "content": "hello\n<system-reminder>\nTools: a\n</system-reminder>"},
        {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "more"}]
    first = messages.chat_of({"system": "Brief.", "messages": [said[1], said[0]]})["messages"]
    assert first == [{"role": "system", "content": "Brief.\nTools: a"}, {"role": "user", "content": "hello"}]
    alone = messages.chat_of({"system": "x-anthropic-billing-header: cch=1;", "messages": HELLO})
    assert alone["messages"] == HELLO


def test_turns_of_one_role_are_one_as_that_api_has_it() -> None:
    """Many templates refuse two."""
    words = [("user", "one"), ("user", "two"), ("assistant", "three"), ("assistant", "four"), ("user", "five")]
    given = [{"role": role, "content": content} for role, content in words]
    assert messages.chat_of({"system": "Brief.", "messages": given})["messages"] == [
        {"role": "system", "content": "Brief."}, {"role": "user", "content": "one\ntwo"},
        {"role": "assistant", "content": "three\nfour"}, {"role": "user", "content": "five"}]
    use = {"type": "tool_use", "id": "t1", "name": "now", "input": {}}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1"}]}
    told = messages.chat_of({"messages": [*given[:3], {"role": "assistant", "content": [use]}, result, *given[:2]]})
    assert [(message["role"], message["content"]) for message in told["messages"]] == [
        ("user", "one\ntwo"), ("assistant", "three"), ("tool", ""), ("user", "one\ntwo")]
    assert [call["id"] for call in told["messages"][1]["tool_calls"]] == ["t1"]


async def test_templates_that_take_one_system_message_and_turns_in_turn_take_what_codex_says(
        tmp_path: Path, tiny_folder: Path) -> None:
    """Instructions, a developer's words, two messages of a user: as Qwen3.5's and Mistral's templates refused them."""
    folder = with_template(
        "{% for m in messages %}{% set wanted = ['assistant', 'user'][loop.index0 % 2] if loop.index0 else 'system' %}"
        "{% if m.role != wanted %}{{ raise_exception('roles') }}{% endif %}[{{ m.role }}: {{ m.content }}]{% endfor %}",
        tiny_folder, tmp_path / "strict")
    said = [{"type": "message", "role": role, "content": [{"type": "input_text", "text": role * 2}]}
            for role in ("developer", "user", "user")]
    async with routing(folder, target := EchoTarget()) as r:
        answer = await r.post(RESPONSES, instructions="Brief.", input=said)
        assert answer.status_code == 200, answer.text
        assert target.prompt == "[system: Brief.\ndeveloperdeveloper][user: useruser\nuseruser]"


def test_what_a_model_thought_between_its_calls_comes_back_to_its_template() -> None:
    """Left out, a model that calls one tool after the other forgot why, and its prompt was computed anew each time."""
    def thinks(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}

    call = {"type": "function_call", "call_id": "t1", "name": "now", "arguments": "{}"}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Noon."}]}
    result = {"type": "function_call_output", "call_id": "t1", "output": "12:00"}
    empty = {"type": "reasoning", "summary": [], "content": None}
    chat = responses.chat_of({"input": [*HELLO, thinks("Hm."), call, result, thinks("So."), said, empty, call]})
    told = [(message["role"], message["content"], message.get("reasoning_content", ""),
             len(message.get("tool_calls", ()))) for message in chat["messages"]]
    assert told == [("user", "hello", "", 0), ("assistant", "", "Hm.", 1), ("tool", "12:00", "", 0),
                    ("assistant", "Noon.", "So.", 1)]
    late = responses.chat_of({"input": [*HELLO, call, said, result]})["messages"]
    assert [(message["role"], message["content"], len(message.get("tool_calls", ()))) for message in late] == [
        ("user", "hello", 0), ("assistant", "Noon.", 1), ("tool", "12:00", 0)], "words behind a call are of its turn"
    assert responses.chat_of({"input": [thinks("a"), said, thinks("b"), said]})["messages"] == [
        {"role": "assistant", "content": "Noon.", "reasoning_content": thought} for thought in "ab"]
    assert [message["content"] for message in responses.chat_of({"input": [thinks("a"), said, said]})["messages"]] == [
        "Noon.\nNoon."]
    with pytest.raises(InvalidRequest, match=r"input\[0\].content"):
        responses.chat_of({"input": [{"type": "reasoning", "content": 5}]})


@pytest.mark.parametrize(("said", "comes"), [
    ({"reasoning": "Hm."}, "Hm."), ({"reasoning": None}, None),
    ({"reasoning": "Hm.", "reasoning_content": "So."}, "So.")])
def test_what_others_call_reasoning_comes_back_to_the_template(said: dict[str, Any], comes: str | None) -> None:
    turns = [*HELLO, {"role": "assistant", "content": "Noon.", **said}, *HELLO]
    body = parse(ChatBody, {"model": "m", "messages": turns})
    assert body.messages[1].for_template().get("reasoning_content") == comes


def test_reasoning_that_is_no_text_is_a_field_that_nobody_knows() -> None:
    with pytest.raises(InvalidRequest, match=r"messages\[0\]\.reasoning: is not a known field"):
        parse(ChatBody, {"model": "m", "messages": [{**HELLO[0], "reasoning": {"effort": "low"}}]})


def test_ids_of_calls_come_back_as_templates_take_them() -> None:
    """Those of Mistral take nine characters and no others."""
    def told(kind: type[MessagesReply | ResponsesReply]) -> Any:
        reply = kind(AnswerHead("a" * 32, 0, "tiny", Markup(Style(("<tool_call>",)), {"weather": SCHEMA})))
        reply.events(TextDelta(CALL + CALL, finish="stop"))
        return reply.body(Usage(10, 2), None)

    uses = [block for block in told(MessagesReply)["content"] if block["type"] == "tool_use"]
    items = [item for item in told(ResponsesReply)["output"] if item["type"] == "function_call"]
    for made, ids in ((uses, [use["id"] for use in uses]), (items, [item["call_id"] for item in items])):
        assert len(made) == len(set(ids)) == 2
    uses.append({**uses[0], "id": "toolu_01A09q90qw90lq917835lq9"})
    items.append({**items[0], "call_id": "call_abc"})
    results = [{"type": "tool_result", "tool_use_id": use["id"], "content": "sunny"} for use in uses]
    outputs = [{"type": "function_call_output", "call_id": item["call_id"], "output": "sunny"} for item in items]
    for chat, foreign in (
            (messages.chat_of({"messages": [{"role": "assistant", "content": uses},
                                            {"role": "user", "content": results}]}), uses[2]["id"]),
            (responses.chat_of({"input": [*items, *outputs]}), items[2]["call_id"])):
        ids = [call["id"] for call in chat["messages"][0]["tool_calls"]]
        assert ids == [message["tool_call_id"] for message in chat["messages"][1:]]
        assert [re.fullmatch("[a-zA-Z0-9]{9}", id_) is not None for id_ in ids] == [True, True, False]
        assert ids[2] == foreign, "those of others are theirs"
