"""Other dialects are translations onto chat: what they ask is asked of the same code, and streamed equals whole."""

from __future__ import annotations

import asyncio
import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from router_service.dialects import messages, responses
from router_service.dialects.blocks import AnswerHead, Blocks
from router_service.dialects.messages import MessagesReply, error_of
from router_service.dialects.problems import Problem
from router_service.dialects.responses import ResponsesReply
from router_service.text.deltas import TextDelta
from router_service.text.marks import REASONING_MARKS, Style
from router_service.text.markup import Markup
from slipstream.base.errors import InvalidRequest, Unavailable
from slipstream.protocol.chat import Usage
from tests.echo import CONTEXT, EchoTarget
from tests.loop import eventually
from tests.routing import CHAT, COMPLETIONS, HELLO, Routing, blocks_of, routing
from tests.routing import events as chat_events

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
CALL = 'So:\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
THEIRS = {"name": "weather", "description": "tells", "input_schema": SCHEMA}
FUNCTION: Any = {"type": "function", "name": "weather", "parameters": SCHEMA}


def named_events(text: str) -> list[Any]:
    """Those of a stream whose events have names."""
    blocks = [block.split("\n") for block in blocks_of(text)]
    found = [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in blocks]
    assert all(name == data["type"] for name, data in found)
    return [data for _, data in found]


def caller() -> EchoTarget:
    target = EchoTarget()
    target.says, target.context = CALL, 4096
    return target


def message_of(events: list[Any]) -> dict[str, Any]:
    """What a client of Anthropic makes of a stream."""
    assert [events[0]["type"], events[-1]["type"]] == ["message_start", "message_stop"]
    message: dict[str, Any] = events[0]["message"]
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"] | {"json": ""})
        elif event["type"] == "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            if delta["type"] == "input_json_delta":
                block["json"] += delta["partial_json"]
            else:
                block[delta["type"].removesuffix("_delta")] += next(v for k, v in delta.items() if k != "type")
        elif event["type"] == "message_delta":
            message |= event["delta"] | {"usage": event["usage"]}
    for block in message["content"]:
        written = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(written)
    return message


async def both(r: Routing, path: str, **body: Any) -> tuple[Any, list[Any]]:
    whole = await r.post(path, **body)
    assert whole.status_code == 200, whole.text
    return whole.json(), named_events((await r.post(path, stream=True, **body)).text)


def alike(message: dict[str, Any]) -> dict[str, Any]:
    """Less what is another one's of every answer."""
    blocks = [{k: v for k, v in block.items() if k != "id"} for block in message["content"]]
    return {**message, "id": "", "content": blocks}


async def test_messages_are_told_whole_and_in_events(tiny_folder: Path) -> None:
    async with routing(tiny_folder, caller()) as r:
        whole, events = await both(r, MESSAGES, max_tokens=200, seed=1, messages=HELLO, tools=[THEIRS], system="Brief.")
        assert whole["stop_reason"] == "tool_use" and whole["type"] == "message"
        assert alike(whole)["content"] == [{"type": "text", "text": "So:"},
                                           {"type": "tool_use", "name": "weather", "input": {"city": "Paris"}}]
        assert alike(message_of(events)) == alike(whole)
    async with routing(tiny_folder, EchoTarget()) as r:
        for extra, reason in (({}, "end_turn"), ({"max_tokens": 5}, "max_tokens"),
                              ({"stop_sequences": ["w1"]}, "stop_sequence")):
            whole, events = await both(r, MESSAGES, **{"max_tokens": 200, "seed": 1, "messages": HELLO, **extra})
            begun = events[0]["message"]["usage"]
            assert begun["cache_read_input_tokens"] > 0, "half a prompt is, here"
            assert {**begun, "output_tokens": 0} == {**whole["usage"], "output_tokens": 0}
            assert whole["stop_reason"] == reason and alike(message_of(events)) == alike(whole)
            assert whole["usage"]["output_tokens"] > 0 and whole["usage"]["input_tokens"] > 0
        count = (await r.post(f"{MESSAGES}/count_tokens", messages=HELLO)).json()
        usage = whole["usage"]
        assert count == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
        refused = await r.post(MESSAGES, messages=HELLO, temperature=-1)
        assert refused.status_code == 400 and refused.json()["type"] == "error"
        assert refused.json()["error"]["type"] == "invalid_request_error"
        assert "temperature" in refused.json()["error"]["message"]


def test_blocks_are_alike_however_an_answer_is_cut() -> None:
    said = "<think>Hm.</think>So:" + CALL[3:] + "Then" + CALL[3:] + " and that was it."
    wanted = [("reasoning", "Hm."), ("text", "So:"), ("call", '{"city": "Paris"}'), ("text", "Then"),
              ("call", '{"city": "Paris"}'), ("text", "and that was it.")]

    def told(*pieces: str) -> list[tuple[str, str]]:
        blocks = Blocks("a", Markup(Style(reasoning_marks=REASONING_MARKS[0]), {"weather": SCHEMA}))
        for i, piece in enumerate(pieces):
            list(blocks.push_delta(TextDelta(piece, finish="stop" if i == len(pieces) - 1 else "")))
        return [(block.kind, block.text) for block in blocks.all]

    assert told(*said) == told(said) == wanted
    for at in range(len(said)):
        assert told(said[:at], said[at:]) == told(*said[:at], said[at:]) == wanted, at


def test_no_block_is_empty() -> None:
    blocks = Blocks("a", Markup(Style(reasoning_marks=REASONING_MARKS[0])))
    list(blocks.push_delta(TextDelta("So.<think>Hm.</think>\n", finish="stop")))
    assert [(block.kind, block.text) for block in blocks.all] == [("text", "So."), ("reasoning", "Hm.")]


async def test_the_assistants_last_words_are_continued(tiny_folder: Path) -> None:
    target = EchoTarget()
    begun = [*HELLO, {"role": "assistant", "content": "So I say"}]
    async with routing(tiny_folder, target) as r:
        assert (await r.post(MESSAGES, max_tokens=5, messages=begun)).status_code == 200
        prompt = target.requests[-1].tokens
        assert bytes(token for token in prompt if token < 256).decode().endswith("So I say") and prompt[-1] < 256
        refused = await r.post(MESSAGES, messages=HELLO, tool_choice={"type": "any"})
        assert refused.status_code == 400 and "needs tools" in refused.json()["error"]["message"]


async def test_the_system_is_heard_and_calls_are_one_if_asked(tiny_folder: Path) -> None:
    target = caller()
    target.says = CALL * 2
    async with routing(tiny_folder, target) as r:
        for single, count in ((False, 2), (True, 1)):
            message = (await r.post(MESSAGES, max_tokens=200, messages=HELLO, tools=[THEIRS], system="Be brief.",
                                    tool_choice={"type": "auto", "disable_parallel_tool_use": single})).json()
            assert [block["type"] for block in message["content"]].count("tool_use") == count
            assert "Be brief." in target.prompt


def test_each_status_has_the_kind_that_clients_of_messages_know() -> None:
    kinds = {403: "permission_error", 413: "request_too_large", 429: "rate_limit_error", 500: "api_error",
             503: "overloaded_error", 504: "timeout_error"}
    assert {status: error_of(Problem(status, "", ""))["error"]["type"] for status in kinds} == kinds


def test_tokens_that_were_cached_or_written_to_a_cache_are_numbers() -> None:
    (told := MessagesReply(AnswerHead("a", 0, "tiny", None))).events(TextDelta("So.", finish="stop"))
    assert told.body(Usage(10, 2, cached_tokens=4), None)["usage"] == {
        "input_tokens": 6, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 0, "output_tokens": 2}
    response = ResponsesReply(AnswerHead("a", 0, "tiny", None)).body(Usage(10, 2, cached_tokens=4), None)
    assert response["usage"]["input_tokens_details"] == {"cached_tokens": 4, "cache_write_tokens": 0}


async def test_a_message_has_the_very_numbers_that_a_model_wrote(tiny_folder: Path) -> None:
    """A whole one rounded what a stream told: 123456789012345678901 was sent as 1.2345678901234568e20."""
    target = caller()
    target.says = CALL.replace('"Paris"', "[123456789012345678901, 0.10, -0]")
    async with routing(tiny_folder, target) as r:
        whole, events = await both(r, MESSAGES, max_tokens=200, seed=1, messages=HELLO, tools=[THEIRS])
        assert alike(message_of(events)) == alike(whole)
        assert whole["content"][1]["input"] == {"city": [123456789012345678901, 0.1, 0]}


async def test_refusals_are_in_the_words_of_the_page(tiny_folder: Path, tmp_path: Path) -> None:
    async with routing(tiny_folder, EchoTarget()) as r:
        for method, path, status, kind in (("GET", MESSAGES, 405, "invalid_request_error"),
                                           ("POST", f"{MESSAGES}/none", 404, "not_found_error"),
                                           ("POST", f"{MESSAGES}/count_tokens", 400, "invalid_request_error")):
            refused = await r.http.request(method, path)
            assert (refused.status_code, refused.json()["type"], refused.json()["error"]["type"]) == (
                status, "error", kind)
        assert "type" not in (await r.http.get("/v1/messagesother")).json()
        asked = await r.post(RESPONSES, input="hello", messages=HELLO)
        assert asked.json()["error"]["param"] == "messages", "which of the two is asked?"
    keys = tmp_path / "keys"
    keys.write_text("a-key-of-mine\n")
    async with routing(tiny_folder, EchoTarget(), api_keys_file=str(keys)) as r:
        refused = await r.post(MESSAGES, messages=HELLO)
        assert refused.status_code == 401 and refused.json()["error"]["type"] == "authentication_error"
        assert refused.json()["type"] == "error"


async def test_responses_are_told_whole_and_in_events(tiny_folder: Path) -> None:
    async with routing(tiny_folder, caller()) as r:
        answer = await r.openai.responses.create(model="tiny", input="hello", instructions="Brief.", tools=[FUNCTION])
        assert answer.status == "completed" and answer.output_text == "So:" and answer.incomplete_details is None
        assert answer.instructions == "Brief."
        assert [tool.model_dump(exclude_none=True) for tool in answer.tools] == [FUNCTION], "what was given"
        call: Any = answer.output[1]
        assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", {"city": "Paris"})
        async with r.openai.responses.stream(model="tiny", input="hello", tools=[FUNCTION]) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert final.output_text == "So:" and kinds[0] == "response.created" and kinds[-1] == "response.completed"
        assert "response.function_call_arguments.delta" in kinds and "response.output_text.done" in kinds
        whole, events = await both(r, RESPONSES, input="hello", tools=[FUNCTION])
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert {event["content_index"] for event in events if "content_index" in event} == {0}
        told = events[-1]["response"]
        for response in (whole, told):
            for item in response["output"]:
                del item["id"]
                item.pop("call_id", None)
        assert told["output"] == whole["output"] and told["usage"] == whole["usage"]
        short = (await r.post(RESPONSES, input="hello", max_output_tokens=3, truncation="auto")).json()
        assert (short["status"], short["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        for most, statuses in ((62, ["completed", "incomplete"]), (75, ["completed", "completed"])):
            whole, events = await both(r, RESPONSES, input="hello", tools=[FUNCTION], max_output_tokens=most)
            for response in (whole, events[-1]["response"]):
                assert [item["status"] for item in response["output"]] == statuses, "an open call is not to be made"
        refused = (await r.post(RESPONSES, input="hello", previous_response_id="resp_1")).json()["error"]
        assert refused["param"] == "previous_response_id"
        theirs = await r.post(RESPONSES, input="hello", max_output_tokens=1, tools=[FUNCTION, {"type": "web_search"}])
        assert theirs.status_code == 200 and theirs.headers["x-slipstream-ignored"] == "tools[].web_search"
        assert theirs.json()["tools"] == [FUNCTION], "those that are run here"
        refused = (await r.post(RESPONSES, input="x", tools=[{"type": "mcp"}], tool_choice="required")).json()["error"]
        assert refused["param"] == "tool_choice", "only what is run here can be forced"


async def test_messages_are_bound_to_a_schema(tiny_folder: Path) -> None:
    target = EchoTarget()
    target.takes, form = ("grammar",), {"type": "json_schema", "schema": SCHEMA}
    async with routing(tiny_folder, target) as r:
        for fields in ({"output_config": {"format": form}}, {"output_format": form}):
            assert (await r.post(MESSAGES, max_tokens=5, messages=HELLO, **fields)).status_code == 200
            grammar = target.requests.pop().grammar
            assert grammar is not None and json.loads(grammar.source) == SCHEMA
        free = await r.post(MESSAGES, max_tokens=5, messages=HELLO, output_config={"effort": "low"})
        assert free.status_code == 200
        assert target.requests.pop().grammar is None


@pytest.mark.parametrize(("path", "fields", "named"), [
    (RESPONSES, {"text": {"verbosity": "low", "format": None}}, "text.verbosity"),
    (RESPONSES, {"reasoning": {"effort": "low", "summary": "auto", "max": 1}}, "reasoning.max"),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}}, "thinking.display"),
    (MESSAGES, {"output_config": {"effort": "low", "task_budget": {}}}, "output_config.task_budget"),
    (MESSAGES, {"mcp_servers": [{"url": "http://x"}]}, "mcp_servers"),
])
async def test_parts_that_nobody_knows_are_named_too(tiny_folder: Path, path: str, fields: Any, named: str) -> None:
    body: Any = {"messages": HELLO, "max_tokens": 4} if path == MESSAGES else {"input": "hello"}
    async with routing(tiny_folder, EchoTarget()) as r:
        taken = await r.post(path, **body, **fields)
        assert taken.status_code == 200 and taken.headers["x-slipstream-ignored"] == named
    async with routing(tiny_folder, EchoTarget(), strict=True) as r:
        refused = await r.post(path, **body, **fields)
        assert refused.status_code == 400 and named in refused.text


def test_what_a_dialect_says_in_its_own_words_is_not_said_again_otherwise() -> None:
    chat = messages.chat_of({"messages": HELLO, "thinking": {"type": "disabled"}, "output_config": {"effort": "low"},
                             "chat_template_kwargs": {"mine": 1}, "stop": None, "stop_sequences": ["a"]})
    assert chat["chat_template_kwargs"] == {"enable_thinking": False, "thinking": False, "mine": 1}, "both"
    assert (chat["reasoning_effort"], chat["stop"]) == ("low", ["a"])
    begun = messages.chat_of({"messages": [*HELLO, {"role": "assistant", "content": "So"}],
                              "continue_final_message": False, "add_generation_prompt": True})
    assert not begun["continue_final_message"] and begun["add_generation_prompt"]
    form = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
    for translate, body, field in (
            (responses.chat_of, {"input": "x", "text": form, "response_format": {"type": "text"}}, "response_format"),
            (responses.chat_of, {"input": "x", "max_output_tokens": 9, "max_completion_tokens": 3},
             "max_completion_tokens"),
            (messages.chat_of, {"messages": HELLO, "output_config": form, "response_format": {"type": "text"}},
             "response_format"),
            (messages.chat_of, {"messages": HELLO, "stop_sequences": ["a"], "stop": ["b"]}, "stop")):
        with pytest.raises(InvalidRequest, match="send one of them") as caught:
            translate(body)
        assert caught.value.field == field


async def test_a_response_tells_what_was_asked(tiny_folder: Path) -> None:
    asked = {"metadata": {"a": "b"}, "temperature": 0.5, "top_p": 0.9, "max_output_tokens": 4,
             "parallel_tool_calls": False, "tool_choice": {"type": "function", "name": "weather"}}
    target = caller()
    target.takes = ("grammar",)
    async with routing(tiny_folder, target) as r:
        whole, events = await both(r, RESPONSES, input="hello", tools=[FUNCTION], **asked)
        for response in (whole, events[0]["response"], events[-1]["response"]):
            assert {name: response[name] for name in asked} == asked
        plain = (await r.post(RESPONSES, input="hello", max_output_tokens=1)).json()
        assert (plain["tool_choice"], plain["metadata"], plain["parallel_tool_calls"]) == ("auto", {}, True)


async def test_an_answer_that_breaks_off_ends_with_an_error_event(tiny_folder: Path) -> None:
    target = EchoTarget(fail_after=3, error=Unavailable("gone"))
    async with routing(tiny_folder, target) as r:
        for path, body in ((MESSAGES, {"messages": HELLO}), (RESPONSES, {"input": "hello"})):
            told = named_events((await r.post(path, stream=True, max_tokens=50, **body)).text)
            assert [event["type"] for event in told].count("error") == 1
            if path == MESSAGES:
                assert told[-1]["type"] == "error"
        assert [event["type"] for event in told[-2:]] == ["error", "response.failed"], "or clients wait for an end"
        failed, begun = told[-1]["response"], told[0]["response"]
        assert (failed["id"], failed["status"]) == (begun["id"], "failed")
        assert failed["error"]["message"] == told[-2]["message"] and failed["error"]["code"]
        assert [item["status"] for item in failed["output"]] == ["incomplete"]
        await eventually(lambda: r.service.gateway.admission.in_flight == 0)


def test_who_sends_a_chat_to_the_responses_is_told_what_is_called_otherwise() -> None:
    with pytest.raises(InvalidRequest, match=r"messages: .* send them as input"):
        responses.chat_of({"messages": HELLO})


async def test_refusals_say_what_to_do_in_the_responses_own_words(tiny_folder: Path) -> None:
    """Vercel's SDK refers to what was kept unless it is told otherwise; a chat's form of a choice was asked for."""
    async with routing(tiny_folder, EchoTarget()) as r:
        for fields, words in (
                ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "store: false"),
                ({"input": [{"content": "hello"}]}, "role: must be"),
                ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, '"name": "..."}'),
                ({"tool_choice": "weather"}, '"name": "..."}'),
                ({"tool_choice": {"type": "function", "name": "other"}}, "no function among tools is called 'other'")):
            refused = await r.post(RESPONSES, **{"input": "hello", "tools": [FUNCTION], **fields})
            told = refused.json()["error"]["message"]
            assert refused.status_code == 400 and words in told and '"function": {' not in told, told


def test_calls_of_either_kind_have_their_arguments() -> None:
    call, custom = (message["tool_calls"][0]["function"] for message in responses.chat_of({"input": [
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": '{"x": 1}'},
        {"type": "function_call_output", "call_id": "a", "output": "y"},
        {"type": "custom_tool_call", "call_id": "b", "name": "g", "input": "z"}]})["messages"][::2])
    assert (call, custom) == ({"name": "f", "arguments": '{"x": 1}'}, {"name": "g", "arguments": {"input": "z"}})
    blocks = [{"type": "text", "text": "So:"}, {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}}]
    said = messages.chat_of({"messages": [{"role": "assistant", "content": blocks}]})["messages"]
    assert said == [{"role": "assistant", "content": "So:", "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]}]


@pytest.mark.parametrize(("translate", "body", "field"), [
    (messages.chat_of, {}, "messages"), (messages.chat_of, {"messages": [], "system": "Brief."}, "messages"),
    (messages.chat_of, {"messages": [1]}, "messages[0].role"),
    (messages.chat_of, {"messages": [{"role": "system", "content": 1}]}, "messages[0].content"),
    (messages.chat_of, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
    (messages.chat_of, {"messages": HELLO, "tools": [{"name": "x"}]}, "tools"),
    (messages.chat_of, {"messages": HELLO, "tools": [1]}, "tools"),
    (messages.chat_of, {"messages": [{"role": "user", "content": [{"type": "server_tool_use"}]}]},
     "messages[0].content[0]"),
    (messages.chat_of, {"messages": HELLO, "tools": [THEIRS], "tool_choice": {"type": []}}, "tool_choice.type"),
    (messages.chat_of, {"messages": HELLO, "tools": [THEIRS], "tool_choice": "any"}, "tool_choice.type"),
    (messages.chat_of, {"messages": HELLO, "output_config": 1}, "output_config"),
    (messages.chat_of, {"messages": HELLO, "tools": [THEIRS], "tool_choice": {
        "type": "auto", "disable_parallel_tool_use": 1}}, "tool_choice.disable_parallel_tool_use"),
    (messages.chat_of, {"messages": HELLO, "thinking": {"type": 5}}, "thinking.type"),
    (messages.chat_of, {"messages": HELLO, "output_config": {"format": {"type": "text"}}}, "output_config.format"),
    (messages.chat_of, {"messages": HELLO, "output_format": "json"}, "output_format"),
    (responses.chat_of, {"input": "x", "text": {"format": "json_object"}}, "text.format"),
    (messages.chat_of, {"messages": HELLO, "thinking": "enabled"}, "thinking"),
    (responses.chat_of, {"input": "x", "instructions": ["Be brief."]}, "instructions"),
    (responses.chat_of, {"input": "x", "instructions": 0}, "instructions"),
    (responses.chat_of, {"input": "x", "text": "json"}, "text"), (responses.chat_of, {"input": "x", "reasoning": "low"},
                                                                 "reasoning"),
    (responses.chat_of, {"input": "x", "metadata": {"a": 1}}, "metadata"),
    (responses.chat_of, {"input": "x", "metadata": {str(i): "" for i in range(17)}}, "metadata"),
    (messages.chat_of, {"messages": HELLO * 5000}, "messages"), (messages.chat_of, {"messages": HELLO, "system": 1},
                                                                 "system"),
    (responses.chat_of, {}, "input"), (responses.chat_of, {"input": [1]}, "input[0].type"),
    (responses.chat_of, {"input": [{"type": "item_reference"}]}, "input[0].type"),
    (responses.chat_of, {"input": "x", "tools": [1]}, "tools"),
    (responses.chat_of, {"input": "x", "tools": [{"type": "namespace", "name": "n", "tools": [1]}]}, "tools[0].tools"),
    (responses.chat_of, {"input": [{"type": "web_search_call"}]}, "input"),
    (responses.chat_of, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
])
def test_what_they_cannot_ask_is_refused_by_name(translate: Any, body: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        translate(body)
    assert caught.value.field == field


@pytest.mark.parametrize(("path", "fields", "named"), [
    (MESSAGES, {"messages": [*HELLO, {"role": "user", "content": [{"type": "tool_result", "content": [
        {"type": "text", "text": "So:"}, {"type": "image"}]}]}]}, "messages[].content[].content[].image"),
    (RESPONSES, {"input": [*HELLO, {"type": "function_call_output", "output": [
        {"text": "So:"}, {"type": "input_image"}]}]}, "input[].output[].input_image")])
async def test_an_image_that_a_tool_gave_ends_no_talk(tiny_folder: Path, path: str, fields: Any, named: str) -> None:
    """Claude Code and Codex look at files, and send what they got with every request from then on."""
    target = EchoTarget()
    async with routing(tiny_folder, target) as r:
        answer = await r.post(path, **fields)
        assert answer.status_code == 200 and answer.headers["x-slipstream-ignored"] == named, answer.text
        assert "So:\n(an image, which cannot be seen here)" in target.prompt


async def test_a_body_is_an_object_wherever_it_goes(tiny_folder: Path) -> None:
    async with routing(tiny_folder, EchoTarget()) as r:
        for path in (CHAT, COMPLETIONS, MESSAGES, f"{MESSAGES}/count_tokens", RESPONSES, "/tokenize", "/detokenize"):
            for body in ("[]", "1", "null", "\"messages\""):
                refused = await r.http.post(path, content=body)
                assert refused.status_code == 400 and "body" in refused.text and "JSON object" in refused.text, path


@pytest.mark.parametrize(("path", "fields", "param"), [
    (MESSAGES, {"logprobs": True}, "logprobs"), (MESSAGES, {"return_token_ids": True}, "return_token_ids"),
    (RESPONSES, {"return_token_ids": True}, "return_token_ids"),
    (RESPONSES, {"return_tokens_as_token_ids": True}, "return_tokens_as_token_ids"),
    (RESPONSES, {"include": ["message.output_text.logprobs"]}, "include"), (RESPONSES, {"top_logprobs": 2},
                                                                           "top_logprobs"),
])
async def test_what_their_answers_do_not_tell_is_refused(tiny_folder: Path, path: str, fields: Any, param: str) -> None:
    body: Any = {"messages": HELLO, "max_tokens": 4} if path == MESSAGES else {"input": "hello"}
    async with routing(tiny_folder, EchoTarget()) as r:
        refused = await r.post(path, **body, **fields)
        assert refused.status_code == 400 and param in refused.text and "completions" in refused.text
        quiet = {name: [] if isinstance(value, list) else None for name, value in fields.items()}
        assert (await r.post(path, **body, **quiet)).status_code == 200


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
async def test_what_a_chat_is_asked_of_how_it_is_told_counts_here_too(thinking_folder: Path, path: str) -> None:
    body: Any = {"messages": HELLO, "thinking": {"type": "adaptive"}} if path == MESSAGES else {"input": "hello"}
    target = EchoTarget()
    target.says = "~</think>So."
    async with routing(thinking_folder, target) as r:
        for quiet in (False, True):
            whole, events = await both(r, path, **body, request_id="mine", include_reasoning=not quiet)
            assert whole["id"].endswith("_mine")
            assert "So." in json.dumps(whole)
            for told in (json.dumps(whole), json.dumps(events)):
                assert ("~" not in told) == quiet


async def test_messages_are_answered_without_thinking_unless_it_is_asked_for(thinking_folder: Path) -> None:
    """As that API has it: whoever takes the first block for text had a thinking one."""
    target = EchoTarget()
    target.says = "So."
    async with routing(thinking_folder, target) as r:
        for fields, kinds in (({}, ["text"]), ({"thinking": None}, ["text"]),
                              ({"thinking": {"type": "disabled"}}, ["text"]),
                              ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, ["thinking"]),
                              ({"chat_template_kwargs": {"enable_thinking": True}}, ["thinking"])):
            whole, events = await both(r, MESSAGES, messages=HELLO, max_tokens=40, **fields)
            assert [block["type"] for block in whole["content"]] == kinds, fields
            assert [block["type"] for block in message_of(events)["content"]] == kinds, fields


def test_a_thought_bears_a_signature_whole_and_in_events() -> None:
    """Clients send no other again as a thought: Vercel's AI SDK drops it, and Pydantic AI makes it words."""
    reply = MessagesReply(AnswerHead("a", 0, "tiny", Markup(Style(reasoning_marks=REASONING_MARKS[0]), {})))
    begun, *events = named_events(reply.events(TextDelta("<think>Hm.</think>So.", finish="stop")).decode())
    assert begun["content_block"]["signature"] == "" and [event.get("delta", {}).get("type") for event in events] == [
        "thinking_delta", "signature_delta", None, None, "text_delta", None]
    told = reply.body(Usage(1, 1), None)["content"][0]
    assert events[1]["delta"]["signature"] == told["signature"] != ""


@pytest.mark.parametrize("kept", ["content", "encrypted_content"])
def test_a_thought_comes_back_by_either_of_its_contents(kept: str) -> None:
    """Codex sends the encrypted one alone; without it Vercel's AI SDK sends no thought where nothing is stored."""
    reply = ResponsesReply(AnswerHead("a", 0, "tiny", Markup(Style(reasoning_marks=REASONING_MARKS[0]), {})))
    events = named_events(reply.events(TextDelta("<think>Hm.</think>So.", finish="stop")).decode())
    done = next(event["item"] for event in events if event["type"] == "response.output_item.done")
    assert "encrypted_content" not in events[0]["item"] and done == reply.body(Usage(1, 1), None)["output"][0]
    thought = {name: done[name] for name in ("type", "id", "summary", kept)}
    said = [{"role": "user", "content": "x"}, thought, {"role": "assistant", "content": "So."}]
    assert responses.chat_of({"input": said})["messages"][1] == {**said[2], "reasoning_content": "Hm."}
    theirs = thought | {"content": None, "encrypted_content": "gAAAAABo"}
    assert len(responses.chat_of({"input": [said[0], theirs]})["messages"]) == 1


async def test_a_response_and_a_chat_count_their_tokens_of_reasoning(thinking_folder: Path) -> None:
    target = EchoTarget()
    async with routing(thinking_folder, target) as r:
        for said, most, count in (("Hm.</think>So.", 40, 11), ("Hm.</think>So.", 3, 3), ("</think>So.", 40, 8)):
            target.says = said
            for speculate in (True, False):
                whole, events = await both(r, RESPONSES, input="hello", max_output_tokens=most, speculate=speculate)
                for response in (whole, events[-1]["response"]):
                    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": count}
                asked = {"messages": HELLO, "max_tokens": most, "speculate": speculate}
                chat = (await r.post(CHAT, **asked)).json()
                chunks = await r.post(CHAT, stream=True, stream_options={"include_usage": True}, **asked)
                for told in (chat, chat_events(chunks.text)[-1]):
                    assert told["usage"]["completion_tokens_details"]["reasoning_tokens"] == count
        quiet = await r.post(RESPONSES, input="hello", reasoning={"effort": "none"})
        assert quiet.json()["usage"]["output_tokens_details"] == {"reasoning_tokens": 0}


BAD = {"type": "json_schema", "name": "bad", "schema": {"type": "array", "uniqueItems": True}}


@pytest.mark.parametrize(("path", "fields", "named"), [
    (MESSAGES, {"stop_sequences": 1}, "stop_sequences"),
    (MESSAGES, {"output_config": {"format": BAD | {"schema": 1}}}, "output_config.format.schema"),
    (RESPONSES, {"max_output_tokens": "x"}, "max_output_tokens"),
    (RESPONSES, {"max_output_tokens": 100_000}, "max_output_tokens"),
    (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens"),
    (RESPONSES, {"text": {"format": BAD | {"schema": 1}}}, "text.format.schema"),
    (RESPONSES, {"text": {"format": BAD}}, "text.format"),
    (RESPONSES, {"reasoning": {"effort": 7}}, "reasoning.effort"),
    (RESPONSES, {"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice"),
    (MESSAGES, {"output_config": {"effort": 7}}, "output_config.effort"),
])
async def test_refusals_name_the_dialects_own_fields(tiny_folder: Path, path: str, fields: Any, named: str) -> None:
    body: Any = {"messages": HELLO, "max_tokens": 4} if path == MESSAGES else {"input": "hello"}
    async with routing(tiny_folder, EchoTarget()) as r:
        refused = await r.post(path, **body, **fields)
        assert refused.status_code == 400
        assert refused.json()["error"]["message"].startswith(f"{named}: "), refused.text


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_agents_know_a_full_context_by_its_words(tiny_folder: Path, path: str) -> None:
    """Theirs, to the letter: Claude Code asks for fewer tokens, opencode and others shorten the conversation. Messages
    have no code for it."""
    most = "max_output_tokens" if path == RESPONSES else "max_tokens"
    async with routing(tiny_folder, EchoTarget()) as r:
        for text, asked, pattern in (("hello", 32_000, r"input length and `max_tokens` exceed context limit: "
                                      rf"\d+ \+ 32000 > {CONTEXT}\b"), ("x" * CONTEXT, 1, "prompt is too long")):
            body: Any = {"input": text} if path == RESPONSES else {"messages": [{"role": "user", "content": text}]}
            refused = await r.post(path, **body, **{most: asked})
            assert refused.status_code == 400
            told = refused.json()["error"]["message"]
            assert re.search(pattern, told) and f"maximum context length is {CONTEXT} tokens" in told, told
            assert told.startswith((f"{most}: ", "input: " if path == RESPONSES else "messages: ")), told


async def test_tokens_are_counted_as_messages_are_answered(tiny_folder: Path) -> None:
    """The same refusals, and the same fields that are left out."""
    for strict in (False, True):
        async with routing(tiny_folder, EchoTarget(), strict=strict) as r:
            for fields in ({"stop_sequences": [5]}, {"output_config": {"format": BAD | {"schema": 1}}},
                           {"made_up": 1}, {"max_tokens": -1}):
                answer, counted = [await r.post(path, messages=HELLO, **{"max_tokens": 4, **fields})
                                   for path in (MESSAGES, f"{MESSAGES}/count_tokens")]
                assert counted.status_code == answer.status_code == (200 if "made_up" in fields and not strict else 400)
                assert counted.headers.get("x-slipstream-ignored") == answer.headers.get("x-slipstream-ignored")
                assert counted.json().get("error") == answer.json().get("error")
            counted = await r.post(f"{MESSAGES}/count_tokens", messages=HELLO, stop_sequences=[5])
            assert counted.json()["error"]["message"].startswith("stop_sequences[0]: ")


async def test_tools_that_nobody_here_runs_are_left_out_by_name(tiny_folder: Path) -> None:
    target = EchoTarget()
    async with routing(tiny_folder, target) as r:
        for tools in ([{"type": "web_search_20250305", "name": "web_search"}],
                      [{"type": "web_search_20250305", "name": "web_search"}, {**THEIRS, "type": "custom"}]):
            target.context = 4096
            answer = await r.post(MESSAGES, messages=HELLO, max_tokens=4, tools=tools)
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-slipstream-ignored"] == "tools[].web_search_20250305"
            told = target.prompt
            assert ('"weather"' in told) == (len(tools) > 1) and "web_search" not in told
        refused = (await r.post(MESSAGES, messages=HELLO, tools=[{"name": "weather"}])).json()["error"]["message"]
        assert "input_schema" in refused


def test_many_tools_are_not_compared_with_one_another() -> None:
    """Sixteen thousand that nobody here runs held the event loop for seven seconds."""
    class Tool(dict[str, Any]):
        def __eq__(self, other: object) -> bool:
            raise AssertionError("compared")

        __hash__ = None  # type: ignore[assignment]

    tools = [Tool(type="web_search", name=str(i)) for i in range(3)]
    chat = messages.chat_of({"messages": HELLO, "max_tokens": 4, "tools": [*tools, Tool(THEIRS)]})
    assert [tool["function"]["name"] for tool in chat["tools"]] == ["weather"] and chat["tools[].web_search"]


async def test_tokens_and_back(tiny_folder: Path) -> None:
    async with routing(tiny_folder, EchoTarget()) as r:
        told = (await r.post("/tokenize", prompt="naïve")).json()
        assert told == {"count": 6, "max_model_len": CONTEXT, "tokens": list("naïve".encode())}
        assert (await r.http.post("/detokenize", json={"tokens": told["tokens"]})).json() == {"prompt": "naïve"}
        assert (await r.post("/tokenize", messages=HELLO)).json()["count"] > 5
        for tokens in ([260], [-1], "x", [1] * 9999, [True], None):
            assert (await r.http.post("/detokenize", json={"tokens": tokens})).json()["error"]["param"] == "tokens"
        assert (await r.post("/tokenize", prompt=["a", "b"])).status_code == 400
        for prompt in ([260], [-1]):
            assert (await r.post("/tokenize", prompt=prompt)).json()["error"]["param"] == "prompt"
        assert r.service.gateway.admission.in_flight == 0
        other = await r.http.post("/detokenize", json={"model": "other", "tokens": [97], "made_up": 1})
        assert other.status_code == 404 and "it is 'tiny'" in other.text
        taken = await r.http.post("/detokenize", json={"model": "tiny", "tokens": [97], "made_up": 1})
        assert taken.json() == {"prompt": "a"} and taken.headers["x-slipstream-ignored"] == "made_up"


@pytest.mark.parametrize("body", [{"tokens": [97]}, {"prompt": "a"}])
async def test_who_only_counts_has_no_more_places_than_who_asks(body: Any, tiny_folder: Path, tmp_path: Path) -> None:
    """One key had its tokens spelt a thousand times at once, and others' prompts waited behind that."""
    keys = tmp_path / "keys"
    keys.write_text("a-key-of-mine requests=1\n")
    target = EchoTarget()
    target.go.clear()
    async with routing(tiny_folder, target, api_keys_file=str(keys)) as r:
        r.http.headers["authorization"] = "Bearer a-key-of-mine"
        admission = r.service.gateway.admission
        first = asyncio.create_task(r.post("/v1/chat/completions", messages=HELLO, max_tokens=1))
        await eventually(lambda: admission.in_flight == 1)
        counted = asyncio.create_task(r.post("/detokenize" if "tokens" in body else "/tokenize", **body))
        await eventually(lambda: admission.queued == 1)
        target.go.set()
        assert [(await task).status_code for task in (first, counted)] == [200, 200]
        assert admission.in_flight == admission.queued == 0


async def test_pages_for_others(tiny_folder: Path, tmp_path: Path) -> None:
    async with routing(tiny_folder, EchoTarget()) as r:
        for path in ("/health", "/live", "/ping", "/", "/v1/models"):
            assert (await r.http.head(path)).status_code == 200 == (await r.http.get(path)).status_code
        assert (await r.http.get("/load")).json() == {"server_load": 0}
        lost = (await r.http.post("/v1/chat/completion")).json()["error"]["message"]
        assert "did you mean /v1/chat/completions?" in lost
        for path, near in (("/v1/chat", "/v1/chat/completions"), ("/v1/message", MESSAGES), ("/v1/embeddings", ""),
                           ("/v1/engines", ""), ("/docs", "")):
            lost = (await r.http.get(path)).json()["error"]["message"]
            assert f"did you mean {near}?" in lost if near else MESSAGES in lost, (path, lost)
        model = (await r.http.get("/v1/models/")).json()["data"][0]
        assert model["id"] == model["display_name"] == "tiny" and model["object"] == model["type"] == "model"
        assert datetime.fromisoformat(model["created_at"]).timestamp() == model["created"]
        assert model["lifecycle"] == "active" and model["max_input_tokens"] == CONTEXT, "as Anthropic's clients know it"
        for answer in (await r.http.get("/v1/models/other"), await r.post(MESSAGES, messages=HELLO, model="other")):
            assert answer.status_code == 404 and "it is 'tiny'" in answer.text
            assert answer.headers["request-id"] == answer.headers["x-request-id"]
        for path, body, hint in ((MESSAGES.replace("messages", "chat/completions"), {"prompt": "a"}, "/v1/completions"),
                                 ("/v1/completions", {"messages": HELLO}, "/v1/chat/completions")):
            assert f"is required; {next(iter(body))} is for {hint}" in (await r.post(path, **body)).text
    keys = tmp_path / "keys"
    keys.write_text("a-key-of-mine\n")
    async with routing(tiny_folder, EchoTarget(), api_keys_file=str(keys)) as r:
        async def asked(**headers: str) -> httpx.Response:
            return await r.http.get("/v1/models", headers=headers)

        assert (await asked(**{"x-api-key": "a-key-of-mine"})).status_code == 200
        for other in ("Basic dXNlcjpwYXNz", "Bearer", "a-key-of-mine"):
            beside = await asked(**{"x-api-key": "a-key-of-mine", "authorization": other})
            assert beside.status_code == 200, "which is a proxy's on the way, or nothing"
            assert (await asked(authorization=other)).status_code == 401
        assert (await asked(**{"x-api-key": "a-key-of-mine", "authorization": "Bearer other"})).status_code == 401
        refused = await asked(**{"x-api-key": "another"})
        assert refused.status_code == 401 and refused.headers["www-authenticate"] == "Bearer"
        assert (await r.http.get("/ping")).status_code == 200
