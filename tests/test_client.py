"""The client: what it refuses before it asks anybody, and when it has all of an answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from slipstream.base.errors import InvalidRequest, Unavailable
from slipstream.client import AsyncClient, Client
from slipstream.protocol.chat import Delta, PromptToken, TextToken, Usage
from slipstream.wire import client as wire_client
from slipstream.wire.channel import INFERENCE_SERVICE
from slipstream.wire.inference import encode_delta


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
    ("stop", [5]), ("seed", 1 << 70)], ids=str)
def test_an_option_that_cannot_be_is_refused_by_name(client: Client, name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        client.chat("x", **{name: value})
    assert caught.value.field == name


@asynccontextmanager
async def lost_behind(delta: Delta) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A router that says so much of each answer and is gone: its address, and what it is asked."""
    asked = list[bytes]()

    async def complete(request: bytes, context: Any) -> AsyncIterator[bytes]:
        asked.append(request)
        yield encode_delta(delta)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    server = grpc.aio.server()
    handlers = {"Complete": grpc.unary_stream_rpc_method_handler(complete)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(INFERENCE_SERVICE, handlers),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield address, asked
    finally:
        await server.stop(None)


async def test_an_answer_that_is_whole_is_not_asked_for_again() -> None:
    """Its router dies between the last delta and the end of the call."""
    last = Delta("hi", (TextToken(5, "hi", False, None),), "length", Usage(1, 1), "ab" * 16)
    async with lost_behind(last) as (address, asked):
        async with AsyncClient(address) as client:
            assert [delta.text async for delta in client.complete("x", max_tokens=1)] == ["hi"]
        with Client(address) as blocking:
            found = await asyncio.to_thread(lambda: [delta.text for delta in blocking.complete("x", max_tokens=1)])
    assert found == ["hi"] and len(asked) == 2


@pytest.mark.parametrize("told", [Delta(prompt=(PromptToken(120, "x"),)), Delta("x", identity="ab" * 16)], ids=str)
async def test_a_prompt_that_was_told_is_not_told_again(told: Delta) -> None:
    """Its router dies between the prompt and the first token."""
    seen = list[Delta]()
    async with lost_behind(told) as (address, asked), AsyncClient(address) as client:
        with pytest.raises(Unavailable):
            async for delta in client.complete("x", max_tokens=1, echo=True):
                seen.append(delta)
    assert seen == [told] and len(asked) == 1


async def test_calls_that_bring_no_token_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_client, "PAUSE_S", 0.01)
    async with lost_behind(Delta(identity="ab" * 16)) as (address, asked), AsyncClient(address) as client:
        with pytest.raises(Unavailable):
            async with asyncio.timeout(20):
                _ = [delta async for delta in client.complete("x", max_tokens=1)]
    assert len(asked) == wire_client.TRIES
