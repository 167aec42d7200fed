"""The client: what it refuses before it asks anybody, and when it has all of an answer."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from slipstream import client as client_module
from slipstream.base.errors import CapacityError, InvalidRequest, RemoteProtocolError, TooLarge, Unavailable
from slipstream.client import AsyncClient, Client, Function, Grammar
from slipstream.protocol.chat import ChatOptions, Delta, PartialAnswer, PromptToken, TextToken, Usage
from slipstream.v1.common_pb2 import LOGPROBS_MODE_PROCESSED, LOGPROBS_MODE_TEMPERED
from slipstream.v1.inference_pb2 import CompleteRequest
from slipstream.wire import client as wire_client
from slipstream.wire.channel import INFERENCE_SERVICE, RULES
from slipstream.wire.inference import decode_complete, encode_complete, encode_delta
from slipstream.wire.status import ERROR_TYPES, abort
from tests.loop import eventually
from tests.names import Names


@pytest.fixture
def client() -> Iterator[Client]:
    with Client("127.0.0.1:1") as client:
        yield client


@pytest.mark.parametrize(("messages", "told"), [
    (3, "messages: must be a string or a list of messages"),
    ({"role": "user", "content": "x"}, "messages: must be a string or a list of messages"),
    ([{"rol": "user", "content": "x"}], "messages[0]: must have role and content, both text, and else nothing but "),
    ([{"role": "user", "content": "x", "names": "y"}], "messages[0]: must have role and content"),
    (["x"], "messages[0]: must have role and content, both text, and else nothing but "),
    ([{"role": "user", "content": None}], "messages[0]: must have role and content, both text, and else nothing but "),
])
def test_messages_that_are_none_are_refused(client: Client, messages: Any, told: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        client.chat(messages)
    assert str(caught.value).startswith(told)


def test_an_unknown_option_is_named(client: Client) -> None:
    with pytest.raises(InvalidRequest) as caught:
        client.chat("x", max_token=4)
    assert caught.value.field == "max_token" and "max_tokens" in str(caught.value)


@pytest.mark.parametrize(("name", "value"), [
    ("logit_bias", {"abc": 1.0}), ("logit_bias", {5: "x"}), ("logit_bias", 5), ("logit_bias", {1 << 40: 1.0}),
    ("logprobs_mode", "loud"), ("logprobs_mode", ["raw"]), ("begun", 5), ("grammar", "x"), ("temperature", "hot"),
    ("stop", [5]), ("seed", 1 << 70), ("bad_words", "no"), ("model", 5),
    ("tools[0]", [Function("f", parameters={})])], ids=str)  # type: ignore[arg-type]
def test_an_option_that_cannot_be_is_refused_by_name(client: Client, name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        client.chat("x", **{name.removesuffix("[0]"): value})
    assert caught.value.field == name


@pytest.mark.parametrize(("grammar", "told"), [
    ({"json": {"type": "object"}}, "must be as in Grammar("),
    (lambda: Grammar("json", "{}"), "known: json_schema, regex, choice, lark, ebnf")])  # type: ignore[arg-type]
def test_a_grammar_in_another_form_is_told_how_it_is_written(client: Client, grammar: Any, told: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        client.chat("x", grammar=grammar() if callable(grammar) else grammar)
    assert caught.value.field == "grammar" and told in str(caught.value)


async def test_modes_of_log_probabilities_have_the_names_that_they_have_over_http_too() -> None:
    asked = []

    async def complete(request: bytes, context: Any) -> AsyncIterator[bytes]:
        asked.append(CompleteRequest.FromString(request).options.logprobs_mode)
        yield encode_delta(Delta("hi", (TextToken(5, "hi", False, None),), "length", Usage(1, 1), "ab" * 16))

    modes = {LOGPROBS_MODE_TEMPERED: "tempered", LOGPROBS_MODE_PROCESSED: "processed"}
    async with served(complete) as address, AsyncClient(address) as client:
        for name in modes.values():
            for mode in (name, f"{name}_logprobs"):
                assert [delta async for delta in client.complete("x", logprobs_mode=mode)]
    assert asked == [mode for mode in modes for _ in range(2)]


def test_what_grpc_does_not_send_is_refused_at_once(client: Client) -> None:
    """It was taken for a router that is not there, and asked for again for eight seconds."""
    for prompt in ("x" * RULES.message_bytes, [1 << 20] * (RULES.message_bytes // 3)):
        with pytest.raises(TooLarge):
            client.complete(prompt)
    for key in ("Kx7w\n", "clé"):
        with pytest.raises(InvalidRequest) as caught:
            Client(api_key=key)
        assert caught.value.field == "api_key" and key not in str(caught.value)


@asynccontextmanager
async def served(complete: Any) -> AsyncIterator[str]:
    """The address of a server that answers by ``complete``."""
    server = grpc.aio.server()
    handlers: Any = {"Complete": grpc.unary_stream_rpc_method_handler(complete)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(INFERENCE_SERVICE, handlers),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)


@pytest.mark.parametrize("blocks", [False, True])
async def test_a_router_that_has_another_address_is_found_behind_its_name(blocks: bool) -> None:
    """As a container has that is made anew. gRPC by itself asks for a name's address once in half a minute."""
    async def complete(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield encode_delta(Delta("hi", (TextToken(5, "hi", False, None),), "length", Usage(1, 1), "ab" * 16))

    names = await Names.serving("127.0.0.2")
    async with served(complete) as address:
        name = names.behind(int(address.rpartition(":")[2]))
        with Client(name) as blocking:
            async with AsyncClient(name) as client:
                reading = asyncio.ensure_future(asyncio.to_thread(list, blocking.complete("x")) if blocks else
                                                anext(client.complete("x")))
                await eventually(lambda: names.asked > 0)
                await asyncio.sleep(0.1)
                names.host = "127.0.0.1"
                assert await reading
    names.transport.close()


async def test_an_answer_that_is_whole_is_not_asked_for_again() -> None:
    """Its router dies between the last delta and the end of the call."""
    asked = 0

    async def complete(request: bytes, context: Any) -> AsyncIterator[bytes]:
        nonlocal asked
        asked += 1
        yield encode_delta(Delta("hi", (TextToken(5, "hi", False, None),), "length", Usage(1, 1), "ab" * 16))
        await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    async with served(complete) as address:
        async with AsyncClient(address) as client:
            assert [delta.text async for delta in client.complete("x", max_tokens=1)] == ["hi"]
        with Client(address) as blocking:
            found = await asyncio.to_thread(lambda: [delta.text for delta in blocking.complete("x", max_tokens=1)])
    assert found == ["hi"] and asked == 2


def test_the_errors_of_a_call_come_with_the_client() -> None:
    told = {name for name, kind in ERROR_TYPES.items() if not issubclass(kind, RemoteProtocolError)}
    assert told <= set(client_module.__all__)


async def test_a_prompt_whose_scores_break_off_is_told_once() -> None:
    prompt = [PromptToken(number, str(number), None if number == 0 else -1.0, 1) for number in range(5)]
    asked = 0

    async def complete(request: bytes, context: Any) -> AsyncIterator[bytes]:
        nonlocal asked
        asked += 1
        for part in (prompt[:2], prompt[2:3]):
            yield encode_delta(Delta(prompt=tuple(part)))
        if asked < 3:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        yield encode_delta(Delta(prompt=tuple(prompt[3:])))
        yield encode_delta(Delta("hi", (TextToken(5, "hi", False, None),), "length", Usage(1, 1, rounds=1), "ab" * 16))

    async with served(complete) as address, AsyncClient(address) as client:
        deltas = [delta async for delta in client.complete("x", max_tokens=1, prompt_logprobs=0)]
    assert [token.id for delta in deltas for token in delta.prompt] == [0, 1, 2, 3, 4] and asked == 3
    assert deltas[-1].usage == Usage(1, 1, rounds=1), "scores of a prompt are no rounds"


@pytest.mark.parametrize(("told", "tries"), [(Delta(identity="ab" * 16), wire_client.MAX_TRIES), (Delta("x"), 1)],
                         ids=str)
async def test_calls_that_bring_no_token_are_counted(monkeypatch: pytest.MonkeyPatch, told: Delta, tries: int) -> None:
    """A prompt's text that was echoed is not told again."""
    monkeypatch.setattr(wire_client, "RETRY_PAUSE_S", 0.01)
    asked = 0

    async def complete(request: bytes, context: Any) -> AsyncIterator[bytes]:
        nonlocal asked
        asked += 1
        yield encode_delta(told)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    async with served(complete) as address, AsyncClient(address) as client:
        with pytest.raises(Unavailable):
            async with asyncio.timeout(20):
                _ = [delta async for delta in client.complete("x", max_tokens=1)]
    assert asked == tries


def test_what_is_asked_again_and_when() -> None:
    def asked() -> ChatOptions:
        return decode_complete(answer.request())[2]

    def token(number: int, drafted: bool) -> Delta:
        return Delta("x", (TextToken(number, "x", drafted, None),), identity="ab" * 16 if number == 1 else "")

    answer = wire_client.ResumableAnswer("Complete", lambda options: encode_complete("", "x", options),
                                         ChatOptions(seed=-1, echo=True, prompt_logprobs=0), 0.0)
    seed, pause_s, gone = asked().seed, wire_client.RETRY_PAUSE_S, Unavailable("gone")
    assert seed not in (None, -1) and asked().begun is None
    assert [answer.pause_after(gone) for _ in range(2)] == [pause_s, 2 * pause_s]
    for number, drafted in ((1, True), (2, True), (3, False)):
        answer.receive(token(number, drafted))
        assert answer.pause_after(gone) == pause_s, "a call that brings tokens begins to count anew"
    assert asked() == ChatOptions(seed=seed, begun=PartialAnswer("ab" * 16, array("i", [1, 2, 3])))
    for told_s, waits_s in ((0.0, 2 * pause_s), (5.0, 5.0), (1000.0, wire_client.MAX_BUSY_WAIT_S)):
        assert answer.pause_after(CapacityError("busy", told_s)) == waits_s
    last = answer.receive(Delta("", finish="stop", usage=Usage(1, 5, 1, rounds=2)))
    assert last.usage == Usage(1, 5, 3, rounds=5) and answer.finished


def test_an_answer_whose_model_is_not_known_is_not_asked_for_again() -> None:
    answer = wire_client.ResumableAnswer("Complete", lambda options: encode_complete("", "x", options), ChatOptions(),
                                         0.0)
    answer.receive(Delta("x", (TextToken(1, "x", False, None),)))
    with pytest.raises(Unavailable):
        answer.pause_after(Unavailable("gone"))


@pytest.mark.parametrize("begun", [True, False])
async def test_who_has_a_part_of_an_answer_waits_for_room_for_the_rest(begun: bool) -> None:
    """Whose router dies has others before him at the next one; who has nothing yet is told."""
    told = iter([*([Unavailable("gone")] if begun else []), CapacityError("busy", 0.01), CapacityError("busy", 0.01)])

    async def complete(request: bytes, context: Any) -> AsyncIterator[bytes]:
        error = next(told, None)
        if not isinstance(error, CapacityError):
            yield encode_delta(Delta("hi", (TextToken(5, "hi", False, None),), "" if error else "length",
                                     None if error else Usage(1, 2), "ab" * 16))
        if error is not None:
            await abort(context, error)

    async with served(complete) as address, AsyncClient(address) as client:
        deltas = client.complete("x", max_tokens=2)
        if begun:
            assert [delta.text async for delta in deltas] == ["hi", "hi"]
        else:
            with pytest.raises(CapacityError):
                await anext(aiter(deltas))


@pytest.mark.parametrize("busy", [40, 1 << 30])
async def test_who_says_how_long_waits_for_room_for_all_of_an_answer(busy: int,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer starts hundreds of answers at once, and wants all of them."""
    monkeypatch.setattr(wire_client, "RETRY_PAUSE_S", 0.01)
    asked = 0

    async def complete(request: bytes, context: Any) -> AsyncIterator[bytes]:
        nonlocal asked
        asked += 1
        if asked <= busy:
            await abort(context, CapacityError("busy", 0.01))
        yield encode_delta(Delta("hi", (TextToken(5, "hi", False, None),), "length", Usage(1, 1), "ab" * 16))

    patience_s = 50.0 if busy == 40 else 1.0
    async with served(complete) as address, AsyncClient(address, patience_s=patience_s) as client:
        if busy == 40:
            assert [delta.text async for delta in client.complete("x", max_tokens=1)] == ["hi"] and asked == 41
        else:
            with pytest.raises(CapacityError):
                await anext(aiter(client.complete("x", max_tokens=1)))
            assert asked >= 2, "when patience ends it is asked for once more"


async def test_what_a_proxy_finds_too_large_is_not_sent_again() -> None:
    """nginx takes a megabyte, where nobody told it otherwise, and answers with a page."""
    frames, asked = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00", 0  # settings: as they are

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        await reader.readexactly(24)
        writer.write(frames)
        while head := await reader.read(9):
            await reader.readexactly(int.from_bytes(head[:3]))
            if head[3] == 1:  # a call's headers: the answer's are :status 413, the last of its stream
                asked += 1
                writer.write(b"\x00\x00\x05\x01\x05" + head[5:9] + b"\x08\x03413")
            elif head[3] == 4 and not head[4]:
                writer.write(b"\x00\x00\x00\x04\x01\x00\x00\x00\x00")

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    async with server, AsyncClient(f"127.0.0.1:{server.sockets[0].getsockname()[1]}") as client:
        with pytest.raises(TooLarge):
            _ = [delta async for delta in client.complete("x")]
    assert asked == 1
