"""The public gRPC service beside HTTP: what is asked is the same request, what is told the same answer."""

from __future__ import annotations

import asyncio
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from router_service.dialects.fields import GRPC_DIFFERENCES, HONOURED
from router_service.dialects.openai import MAX_CONTAINERS
from slipstream.base.errors import DeadlineExceeded, InvalidRequest, SlipstreamError, TooLarge
from slipstream.client import AsyncClient, Client, Function, Grammar, Message, ToolCall, whole
from slipstream.protocol.chat import MAX_BODY_BYTES, MAX_CALLS, MAX_ITEMS, MAX_TOOLS, ChatOptions, Delta, PartialAnswer
from slipstream.wire.inference import decode_chat, decode_delta, encode_chat, encode_delta
from tests.echo import EchoTarget
from tests.routing import CHAT, COMPLETIONS, HELLO, Routing, routing
from tests.test_answer_stream import SPAN
from tests.test_tools import NAMED, NOW, PAST, TWO, WEATHER
from tests.tiny import EOS

THOUGHT = "Hm <b.\n</think>\n\n" + TWO + "\nThat is all."


def client_of(router: Routing) -> AsyncClient:
    return AsyncClient(f"127.0.0.1:{router.service.grpc_port}")


async def told(client: AsyncClient, messages: Any, **options: Any) -> list[Delta]:
    return [delta async for delta in client.chat(messages, seed=7, **options)]


def short(value: object) -> str:
    return str(value)[:40]


def test_every_field_is_an_option_or_said_otherwise() -> None:
    options = {field.name for field in fields(ChatOptions)} - {"begun", "grammar", "function"}
    assert options | GRPC_DIFFERENCES.keys() | {"model", "messages", "prompt"} == HONOURED.keys()
    assert not options & GRPC_DIFFERENCES.keys()


@pytest.mark.parametrize("body", [
    {"temperature": 0, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": -1,
     "repetition_penalty": 1.5, "logit_bias": {"5": 2}, "min_tokens": 2, "ignore_eos": True, "max_tokens": 9},
    {"stop": ["w7"], "include_stop_str_in_output": True, "stop_token_ids": [50], "skip_special_tokens": False},
    {"truncate_prompt_tokens": 5, "cache_salt": "mine", "speculate": False},
    {"add_generation_prompt": False, "messages": [*HELLO, {"role": "assistant", "content": "I"}]},
    {"continue_final_message": True, "messages": [*HELLO, {"role": "assistant", "content": "I"}]},
    {"tools": [WEATHER, NOW]}, {"tools": [WEATHER, NOW], "tool_choice": "none"}, {"messages": PAST, "tools": [WEATHER]},
    {"tools": [WEATHER, NOW], "tool_choice": "required", "parallel_tool_calls": False},
    {"tools": [WEATHER], "tool_choice": NAMED}, {"allowed_token_ids": [70, 71]}, {"bad_words": ["no"]},
    {"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}], ids=short)
async def test_a_request_is_the_same_over_both(thinking_folder: Path, body: dict[str, Any]) -> None:
    target = EchoTarget()
    target.takes, target.context = ("grammar", "allowed_token_ids", "bad_words"), 4096
    (thinking_folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}"
        "as:{{ enable_thinking | default(true) }}{{ reasoning_effort | default('') }}{% endif %}")
    async with routing(thinking_folder, target) as r, client_of(r) as client:
        asked = {"messages": HELLO, **body}
        assert (await r.post(CHAT, seed=7, **asked)).status_code == 200
        await told(client, asked.pop("messages"), **asked)
    over_http, over_grpc = (replace(request, request_id="") for request in target.requests)
    assert over_http == over_grpc


@pytest.mark.parametrize(("stop", "text", "ids"), [((), "one, two", [*b"one, two", EOS]),
                                                   ((", t",), "one", list(b"one, t"))])
async def test_each_token_that_was_said_is_told(tiny_folder: Path, stop: tuple[str, ...], text: str,
                                                ids: list[int]) -> None:
    target = EchoTarget(accepted=2)
    target.says = "one, two"
    async with routing(tiny_folder, target) as r, client_of(r) as client:
        deltas = await told(client, "hello", stop=stop, max_tokens=40)
    assert "".join(delta.text for delta in deltas) == text and deltas[-1].usage is not None
    assert not any(delta.usage or delta.finish for delta in deltas[:-1])
    assert [token.id for delta in deltas for token in delta.tokens] == ids
    assert deltas[-1].usage.completion_tokens == len(ids)


async def test_alternatives_are_told_as_over_http(tiny_folder: Path) -> None:
    async with routing(tiny_folder, EchoTarget(accepted=2)) as r, client_of(r) as client:
        for top in (0, 2):
            asked = {"messages": HELLO, "seed": 7, "max_tokens": 9, "logprobs": True, "top_logprobs": top}
            entries = (await r.post(CHAT, **asked)).json()["choices"][0]["logprobs"]["content"]
            deltas = await told(client, HELLO, max_tokens=9, top_logprobs=top)
            tokens = [token for delta in deltas for token in delta.tokens]
            assert [token.logprob for token in tokens] == [entry["logprob"] for entry in entries]
            assert [[(text, value) for _, text, value in token.top] for token in tokens] == [
                [(likely["token"], likely["logprob"]) for likely in entry["top_logprobs"]] for entry in entries]
            assert all(len(token.top) == top for token in tokens)
    assert [i for i, _, _ in tokens[0].top] == [tokens[0].id, tokens[0].id + 1]


async def test_a_prompt_may_be_token_ids(tiny_folder: Path) -> None:
    target, ids = EchoTarget(), [72, 105, EOS]
    async with routing(tiny_folder, target) as r, client_of(r) as client:
        right = (await r.post(COMPLETIONS, prompt=ids, seed=7, max_tokens=9)).json()["choices"][0]["text"]
        deltas = [delta async for delta in client.complete(ids, seed=7, max_tokens=9)]
        assert "".join(delta.text for delta in deltas) == right
        assert [list(request.tokens) for request in target.requests] == [ids] * 2
        for wrong in ([], [260], [-1], [1 << 40], ["a"], 5, [70] * ((1 << 20) + 1)):
            with pytest.raises(InvalidRequest) as caught:
                [delta async for delta in client.complete(wrong)]  # type: ignore[arg-type]
            assert caught.value.field == "prompt", short(wrong)


async def test_calls_and_reasoning_are_told_as_over_http(thinking_folder: Path) -> None:
    target = EchoTarget(accepted=2)
    target.says, target.context, target.takes = THOUGHT, 4096, ("grammar",)
    async with routing(thinking_folder, target) as r, client_of(r) as client:
        for body in ({}, {"parallel_tool_calls": False}, {"include_reasoning": False}, {"separate_reasoning": False},
                     {"tool_choice": "none"}, {"tool_choice": "required"}, {"tool_choice": NAMED}, {"stop": ["Par"]}):
            choice = (await r.post(CHAT, messages=HELLO, tools=[WEATHER, NOW], seed=7, **body)).json()["choices"][0]
            message = choice["message"]
            deltas = await told(client, "hello", tools=[WEATHER, NOW], **body)
            found = whole(deltas)
            assert found.message.content == (message["content"] or ""), body
            assert found.message.reasoning_content == message.get("reasoning_content", ""), body
            assert [(call.name, call.arguments) for call in found.message.tool_calls] == [
                (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
            assert found.finish == choice["finish_reason"] and found.usage == deltas[-1].usage
            assert len({call.id for call in found.message.tool_calls}) == len(found.message.tool_calls)
        deltas = await told(client, "hello", tools=[WEATHER, NOW])
        pieces = [call for delta in deltas for call in delta.tool_calls]
        assert [bool(piece.id) for piece in pieces].count(True) == 2 < len(pieces) - 3, "as they come"
        told_again = [*HELLO, whole(deltas).message, Message("tool", "sunny", tool_call_id="c")]
        assert (await told(client, told_again, tools=[WEATHER]))[-1].finish


@pytest.mark.parametrize("body", [{"tools": [WEATHER, NOW]}, {}, {"tools": [WEATHER, NOW], "tool_choice": NAMED}],
                         ids=str)
async def test_an_answer_that_goes_on_is_told_apart_as_the_whole_one(thinking_folder: Path,
                                                                     body: dict[str, Any]) -> None:
    target = EchoTarget(accepted=0)
    target.says, target.context, target.takes = "é" + THOUGHT, 4096, ("grammar",)
    if "tool_choice" in body:
        target.says = '{"city": "Paré"}'
    assert target.identity is not None
    async with routing(thinking_folder, target) as r, client_of(r) as client:
        deltas = await told(client, "hello", **body)
        right = whole(deltas)
        for cut in range(1, len(deltas) - 1, 5):
            had = [token.id for delta in deltas[:cut] for token in delta.tokens]
            rest = await told(client, "hello", begun=PartialAnswer(target.identity.tag, tuple(had)), **body)
            found = whole([*deltas[:cut], *rest])
            for side in (lambda message: message.content, lambda message: message.reasoning_content, calls_of):
                assert side(found.message) == side(right.message), cut
            assert found.finish == right.finish


def calls_of(message: Message) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in message.tool_calls]


@pytest.mark.parametrize(("options", "field"), [
    ({"tools": [NOW], "function": "now", "tool_choice": "auto"}, "function"),
    ({"function": "now"}, "function"), ({"tools": [NOW], "function": "then"}, "function"),
    ({"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": None}}}, "tool_choice"),
    ({"tools": [NOW], "tool_choice": "always"}, "tool_choice"), ({"tools": [NOW, NOW]}, "tools"),
    ({"tools": (Function("a", "", "{"),)}, "tools[0].function.parameters"),
    ({"tools": (Function("a", "", "[]x"),)}, "tools[0].function.parameters"),
    ({"tools": (Function("a b"),)}, "tools[0].function.name"),
    ({"tools": (Function("a"),) * (MAX_TOOLS + 1)}, "tools"),
    ({"tools": (Function("a", "", '{"enum": [%s1]}' % ("[]," * (MAX_CONTAINERS // 2))),) * 2}, "tools"),
    ({"chat_template_kwargs": "[1]"}, "chat_template_kwargs"), ({"chat_template_kwargs": "{"}, "chat_template_kwargs"),
    ({"chat_template_kwargs": '{"tools": 1}'}, "chat_template_kwargs.tools"),
    ({"stop_token_ids": [1] * 49}, "stop_token_ids"), ({"stop_token_ids": ["x"]}, "stop_token_ids"),
    ({"add_special_tokens": True}, "add_special_tokens"), ({"echo": True}, "echo")], ids=short)
async def test_what_is_wrong_is_refused_by_name(tiny_folder: Path, options: dict[str, Any], field: str) -> None:
    async with routing(tiny_folder, EchoTarget()) as r, client_of(r) as client:
        with pytest.raises(InvalidRequest) as caught:
            await told(client, "hello", **options)
    assert caught.value.field == field


@pytest.mark.parametrize(("prompt", "kind"), [("hello", DeadlineExceeded), ("x" * MAX_BODY_BYTES, TooLarge)], ids=short)
async def test_what_the_server_will_not_do_is_asked_once(tiny_folder: Path, prompt: str,
                                                         kind: type[SlipstreamError]) -> None:
    """Longer than it allows, or larger: a client that took it for a server that is not there asked again and again."""
    target = EchoTarget(hang=True)
    async with routing(tiny_folder, target, request_timeout_s=0.2) as r, client_of(r) as client:
        with pytest.raises(kind):
            await told(client, prompt)
    assert len(target.requests) == (1 if kind is DeadlineExceeded else 0)


async def test_options_that_are_none_take_the_servers_defaults(tiny_folder: Path) -> None:
    async with routing(tiny_folder, EchoTarget()) as r, client_of(r) as client:
        none = dict.fromkeys(("stop", "bad_words", "allowed_token_ids", "stop_token_ids", "logit_bias", "tools",
                              "tool_choice", "temperature"))
        assert await told(client, HELLO, max_tokens=3, **none) == await told(client, HELLO, max_tokens=3)


def test_a_call_of_a_negative_number_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="messages"):
        encode_chat("", (Message("assistant", "", (ToolCall("now", "{}", "a", -1),)),), ChatOptions())


async def test_refusals_bear_the_names_of_options(tiny_folder: Path) -> None:
    target = EchoTarget()
    target.takes = ("grammar",)
    async with routing(tiny_folder, target) as r, client_of(r) as client:
        for options, field in (({"grammar": Grammar("regex", "(")}, "grammar"), ({"top_logprobs": 21}, "top_logprobs"),
                               ({"grammar": Grammar("json_schema", "x")}, "grammar")):
            for ask in (client.chat, client.complete):
                with pytest.raises(InvalidRequest) as caught:
                    [delta async for delta in ask("hello", **options)]
                assert caught.value.field == field


@pytest.mark.parametrize("begun", [0, 2])
async def test_a_grammar_that_a_target_gives_up_bears_the_clients_name(tiny_folder: Path, begun: int) -> None:
    target = EchoTarget(fail_after=begun, error=InvalidRequest("grammar", "takes more work to follow than it may"))
    target.takes = ("grammar",)
    async with routing(tiny_folder, target) as r, client_of(r) as client:
        for fields in ({"guided_regex": "a"}, {"response_format": {"type": "json_object"}}):
            answer = await r.post(CHAT, messages=HELLO, **fields)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(fields)))
        with pytest.raises(InvalidRequest) as caught:
            await told(client, "hello", grammar=Grammar("regex", "a"))
        assert caught.value.field == "grammar"


async def test_an_answer_that_breaks_off_counts_once(tiny_folder: Path) -> None:
    target = EchoTarget(fail_after=2, error=InvalidRequest("tokens", "no more"))
    async with routing(tiny_folder, target) as r, client_of(r) as client:
        with pytest.raises(InvalidRequest):
            await told(client, HELLO)
        assert await r.codes() == {400: 1}


async def test_completions_take_no_tools(tiny_folder: Path) -> None:
    async with routing(tiny_folder, EchoTarget()) as r, client_of(r) as client:
        for name, value in (("tools", [NOW]), ("reasoning_effort", "low"), ("tool_choice", NAMED)):
            with pytest.raises(InvalidRequest) as caught:
                [delta async for delta in client.complete("hello", **{name: value})]
            assert caught.value.field == ("function" if name == "tool_choice" else name)
            assert "is for Chat alone" in str(caught.value)
        assert (await r.post(COMPLETIONS, prompt="hello")).status_code == 200


def test_all_options_cross_the_wire() -> None:
    options = ChatOptions(
        include_stop_str_in_output=True, stop_token_ids=(3, 4), skip_special_tokens=False, truncate_prompt_tokens=-1,
        cache_salt="s", add_special_tokens=False, add_generation_prompt=False, continue_final_message=True,
        chat_template_kwargs="{}", reasoning_effort="low", include_reasoning=False, separate_reasoning=False,
        tools=(Function("a", "b", "{}"), Function("c")), tool_choice="none", function="a", parallel_tool_calls=False,
        grammar=Grammar("regex", "a"))
    calls = (ToolCall("a", "{}", "i", 3), ToolCall("b", ""))
    messages = (Message("assistant", "", calls, reasoning_content="r", name="n"), Message("tool", "x", (), "i"))
    assert decode_chat(encode_chat("m", messages, options)) == ("m", messages, options)
    delta = Delta("a", finish="tool_calls", reasoning="r", tool_calls=calls)
    assert decode_delta(encode_delta(delta)) == delta


@pytest.mark.parametrize("count", [MAX_CALLS + 1, MAX_CALLS])
def test_calls_of_a_conversation_are_bounded(count: int) -> None:
    """Of one message, and of all."""
    messages = (Message("assistant", "", (ToolCall("a", "{}"),) * count),) * (MAX_ITEMS // MAX_CALLS + 1)
    with pytest.raises(InvalidRequest) as caught:
        decode_chat(encode_chat("m", messages, ChatOptions()))
    assert caught.value.field == "messages"


@pytest.mark.parametrize(("messages", "field"), [
    ([{"role": "assistant", "tool_calls": [1]}], "messages[0].tool_calls[0]"),
    ([{"role": "assistant", "tool_calls": 1}], "messages[0].tool_calls"),
    ([{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "a"}}]}], "messages[0].tool_calls[0]"),
    ([{"role": "tool", "content": "x", "tool_call_id": 1}], "messages[0]")])
def test_a_client_says_what_is_no_call(messages: Any, field: str) -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(InvalidRequest) as caught:
        client.chat(messages)
    assert caught.value.field == field


def test_a_client_says_what_is_no_tool() -> None:
    for tools, field in (([NOW, {"name": "x"}], "tools[1]"), (5, "tools"),
                         ([{"function": {"name": "a", "parameters": {"x": {1}}}}], "tools[0].function.parameters")):
        with Client("127.0.0.1:1") as client, pytest.raises(InvalidRequest) as caught:
            client.chat("x", tools=tools)
        assert caught.value.field == field


def test_pieces_of_calls_are_joined_by_their_index() -> None:
    pieces = [ToolCall("a", "{", "1"), ToolCall("b", "{", "2", 1), ToolCall("", "}"), ToolCall("", "}", "", 1)]
    found = whole([Delta(tool_calls=(piece,)) for piece in pieces])
    assert found.message.tool_calls == (ToolCall("a", "{}", "1", 0), ToolCall("b", "{}", "2", 1))
    assert json.loads(found.message.tool_calls[0].arguments) == {}


class Followed:
    """Spans, and each one; all of it remembered."""

    parent = SPAN

    def __init__(self) -> None:
        self.parents = list[str]()

    def begin(self, name: str, parent: str = "", **values: Any) -> Followed:
        self.parents.append(parent)
        return self

    def event(self, name: str, **values: Any) -> None: ...

    def end(self, **values: Any) -> None: ...


async def test_the_trace_of_a_client_goes_on(tiny_folder: Path) -> None:
    target, spans = EchoTarget(), Followed()
    shown, asked = SPAN.replace("7", "8"), encode_chat("", (Message("user", "hello"),), ChatOptions(max_tokens=3))
    async with (routing(tiny_folder, target) as r,
                grpc.aio.insecure_channel(f"127.0.0.1:{r.service.grpc_port}") as channel):
        r.service.gateway.spans = spans
        assert (await r.http.post(CHAT, json={"model": "tiny", "messages": HELLO, "max_tokens": 3},
                                    headers={"traceparent": shown})).status_code == 200
        for trace in (shown, "nonsense"):
            call: Any = channel.unary_stream("/slipstream.v1.InferenceService/Chat")
            assert [1 async for _ in call(asked, metadata=(("traceparent", trace),))]
    assert spans.parents == [shown, shown, ""] and {request.trace for request in target.requests} == {SPAN}


async def test_a_router_of_this_machine_tells_what_it_offers(tiny_folder: Path) -> None:
    async with routing(tiny_folder, EchoTarget()) as r:
        def offered() -> tuple[list[str], list[str]]:
            with grpc.insecure_channel(f"127.0.0.1:{r.service.grpc_port}") as channel:
                asked = ProtoReflectionDescriptorDatabase(channel)
                file = asked.FindFileContainingSymbol("slipstream.v1.InferenceService")
                return list(asked.get_services()), [method.name for method in file.service[0].method]

        services, methods = await asyncio.to_thread(offered)
        assert "slipstream.v1.InferenceService" in services and "Chat" in methods
