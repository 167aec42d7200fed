"""An answer whose router dies is picked up where it stopped, by any router, at a target of the same identity, and its
reader sees one answer."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.fleet import free_port
from router_service.admission import FollowedAnswer
from router_service.dialects.openai import Options, Plan
from router_service.text.deltas import TextDelta
from router_service.text.tokens import BRIEF_TEXT, Completion, Detokenizer, TextCodec
from slipstream.base.config import WireSection
from slipstream.base.errors import InvalidRequest, ModelChanged, Unavailable
from slipstream.client import AsyncClient, Client
from slipstream.protocol.chat import Delta, PartialAnswer
from slipstream.protocol.identity import Identity
from slipstream.protocol.requests import Piece, Request, Sampling
from slipstream.wire import client as wire_client
from slipstream.wire.server import GrpcServer
from slipstream.wire.target import TargetServicer
from tests.echo import EchoTarget, answer_bytes
from tests.routing import COMPLETIONS, READS, Routing, routing, stream

pytestmark = pytest.mark.usefixtures("servers_end")
TEXT = "one ∑ two €€ three END of it"
STREAMS = 24


class Given:
    """An Answer of these tokens, one a piece, by targets that had so many of what they were asked."""

    def __init__(self, tokens: list[int], *cached: int) -> None:
        self._tokens = tokens
        self._cached = cached

    async def __aiter__(self) -> AsyncIterator[Piece]:
        for token, cached in itertools.zip_longest(self._tokens[:-1], self._cached, fillvalue=0):
            yield Piece((token,), cached_tokens=cached)
        yield Piece(tuple(self._tokens[-1:]), finish="length")

    def set_speculation(self, allowed: bool) -> None:
        pass

    async def aclose(self) -> None:
        pass


async def deltas_of(codec: TextCodec, request: Request, tokens: list[int], stops: list[str]) -> list[TextDelta]:
    return [delta async for delta in Completion(request, Given(tokens), Detokenizer(codec), stops, 260)]


@pytest.mark.parametrize(("answered", "cached", "told"), [
    (0, (2, 0, 7), 2), (0, (0, 5), 0), (4, (6,), 3), (4, (2,), 2)])
async def test_what_was_answered_is_no_cached_prompt(tiny_folder: Path, answered: int, cached: tuple[int, ...],
                                                     told: int) -> None:
    tokens = list(TEXT.encode())
    request = Request("r", (1, 2, 3), Sampling(), len(tokens)).after(tokens[:answered])
    completion = Completion(request, Given(tokens[answered:], *cached), Detokenizer(TextCodec(tiny_folder)), [], 260)
    assert [delta async for delta in completion] and completion.tally.cached_tokens == told


@pytest.mark.parametrize("stops", [[], ["END"], ["END of me", "twx"], ["€€!" * 30, " th"]], ids=str)
@pytest.mark.parametrize("least", [0, 20, 40])
async def test_text_goes_on_from_every_cut(tiny_folder: Path, stops: list[str], least: int) -> None:
    """In the middle of a character, and of what may become a stop string, too."""
    codec, tokens = TextCodec(tiny_folder), list(TEXT.encode())
    request = Request("r", (1, 2, 3), Sampling(min_tokens=least), len(tokens))
    whole = await deltas_of(codec, request, tokens, stops)
    for cut in range(1, len(whole)):
        told = [token.id for delta in whole[:cut] for token in delta.tokens]
        if not told:
            continue
        rest = await deltas_of(codec, request.after(told), tokens[len(told) :], stops)
        for side in (lambda delta: delta.text, lambda delta: delta.tokens):
            assert _joined(whole[:cut] + rest, side) == _joined(whole, side)
        assert rest[-1].finish == whole[-1].finish


def _joined(deltas: list[TextDelta], side: Any) -> Any:
    return [part for delta in deltas for part in side(delta)]


@asynccontextmanager
async def two(folder: Path, *targets: EchoTarget, **section: Any) -> AsyncIterator[tuple[Routing, Routing, list[str]]]:
    """Two routers over the same targets, and their addresses."""
    async with routing(folder, *targets, **section) as one, routing(folder, *targets, **section) as other:
        yield one, other, [f"127.0.0.1:{router.service.grpc_port}" for router in (one, other)]


def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_client, "RETRY_PAUSE_S", 0.01)


async def answered(client: AsyncClient, prompt: str, **options: Any) -> list[Delta]:
    return [delta async for delta in client.complete(prompt, max_tokens=60, **options)]


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0, "stop": "w9"}, {"seed": 7, "top_logprobs": 0},
                                     {"echo": True}], ids=str)
async def test_a_router_that_goes_away_is_not_missed(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch,
                                                     options: dict[str, Any]) -> None:
    fast(monkeypatch)
    target = EchoTarget(end=50, accepted=0, stall_after=10)
    async with two(tiny_folder, target) as (one, _, addresses):
        async with AsyncClient(addresses) as client:
            seen: list[Delta] = []
            async for delta in client.complete("hello", max_tokens=60, **options):
                seen.append(delta)
                if len(seen) == 5:
                    await leave(one, target)
            usage = seen[-1].usage
        seed = target.requests[0].sampling.seed
        assert len(target.requests) == 2 and target.requests[1].sampling.seed == seed
        assert target.requests[1].answered >= 5 and target.requests[1].identity == target.identity
        async with AsyncClient(addresses[1]) as client:
            alone = await answered(client, "hello", **{**options, "seed": seed % 2**63})
    assert text(seen) == text(alone) and [t for d in seen for t in d.tokens] == [t for d in alone for t in d.tokens]
    assert usage is not None and alone[-1].usage is not None
    assert usage.completion_tokens == alone[-1].usage.completion_tokens
    assert usage.rounds >= alone[-1].usage.rounds - 1


async def leave(router: Routing, target: EchoTarget) -> None:
    """End the router while its answers stand still, however slowly they are read; those that follow do not."""
    target.stall_after = -1
    await router.service.drain(0)


def text(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


async def test_two_targets_of_other_models_do_not_go_on_with_each_others_answers(
        tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast(monkeypatch)
    target = EchoTarget(end=50, accepted=0, stall_after=10)
    async with two(tiny_folder, target) as (one, _, addresses), AsyncClient(addresses) as client:
        seen = []
        with pytest.raises(ModelChanged):
            async for delta in client.complete("hello", max_tokens=60):
                seen.append(delta)
                if len(seen) == 5:
                    target.identity = Identity("other", "float32", "none", "echo")
                    await leave(one, target)
    assert text(seen) and not seen[-1].finish


@pytest.mark.parametrize(("begun", "field"), [
    (PartialAnswer("", (5,)), None), (PartialAnswer("0" * 32, (5,)), None),
    (PartialAnswer("own", (5,) * 60), "begun.tokens"), (PartialAnswer("own", (260,)), "begun.tokens"),
    (PartialAnswer("own", (-1,)), "begun.tokens"), (PartialAnswer("own", (257,)), "begun.tokens"),
    (PartialAnswer("own", tuple(b"a stop")), "begun.tokens")], ids=str)
async def test_what_nobody_began_is_refused(tiny_folder: Path, begun: PartialAnswer, field: str | None) -> None:
    target = EchoTarget()
    assert target.identity is not None
    if begun.identity == "own":
        begun = replace(begun, identity=target.identity.tag)
    async with (routing(tiny_folder, target) as router,
                AsyncClient(f"127.0.0.1:{router.service.grpc_port}") as client):
        with pytest.raises(ModelChanged if field is None else InvalidRequest) as raised:
            await answered(client, "hello", stop="stop", begun=begun)
    assert field is None or getattr(raised.value, "field", None) == field
    assert not target.requests


async def test_what_is_refused_leaves_nothing_behind(tiny_folder: Path) -> None:
    """A pool's policy would count it with those whose pieces it waits for, and try drafts on it, for ever."""
    target = EchoTarget()
    assert target.identity is not None
    begun = PartialAnswer(target.identity.tag, tuple(b"a stop"))
    async with (routing(tiny_folder, target) as router,
                AsyncClient(f"127.0.0.1:{router.service.grpc_port}") as client):
        for _ in range(20):
            with pytest.raises(InvalidRequest, match="stop string"):
                await answered(client, "hello", stop="stop", begun=begun)
        gc.collect()
        left = sum(type(found) is FollowedAnswer for found in gc.get_objects())
    assert left < 10, "gRPC keeps the frames of the newest few"


def test_tokens_that_were_begun_count_as_a_text() -> None:
    """So many are looked at beside the event loop."""
    begun = PartialAnswer("", (5,) * BRIEF_TEXT)
    asked = Plan("completions", "tiny", Options(Sampling()), prompts=["abc"], begun=begun)
    assert asked.size == BRIEF_TEXT + 3


async def test_nobody_is_asked_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    fast(monkeypatch)
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    async with AsyncClient(addresses) as client:
        with pytest.raises(Unavailable):
            await answered(client, "hello")

    def use() -> None:
        with Client(addresses) as client, pytest.raises(Unavailable):
            list(client.chat("hello"))

    await asyncio.to_thread(use)


async def test_no_answer_is_lost_with_one_of_two_routers(tiny_folder: Path, tmp_path: Path) -> None:
    """Processes, and a signal that none of them hears; our client, and one that knows nothing but HTTP."""
    target = EchoTarget(end=200, accepted=0, stall_after=5)  # all of them stand still in mid-answer
    server = GrpcServer("127.0.0.1:0", WireSection(), [TargetServicer(target)])
    await server.start()
    routers = [Process(tiny_folder, server.port, tmp_path / f"{name}.log") for name in ("one", "other")]
    begun = asyncio.Semaphore(0)
    try:
        async with AsyncClient([router.address for router in routers]) as client, httpx.AsyncClient(timeout=60) as http:
            await until_answers(client, routers)

            async def kill() -> None:
                for _ in range(2 * STREAMS):
                    await begun.acquire()
                target.stall_after = -1
                routers[0].kill()

            asking = [over_grpc(client, prompt(number), begun) for number in range(STREAMS)]
            asking += [over_http(http, routers, prompt(number), begun) for number in range(STREAMS, 2 * STREAMS)]
            *seen, _ = await asyncio.gather(*asking, kill())
    finally:
        for router in routers:
            router.kill()
        await server.drain(0)
    assert len(target.requests) == 4 * STREAMS and sum(bool(request.answered) for request in target.requests) == STREAMS
    first = {len(request.tokens): request for request in reversed(target.requests) if not request.answered}
    for number, said in enumerate(seen):
        assert said == bytes(answer_bytes(first[len(prompt(number))])[:200]).decode()


def prompt(number: int) -> str:
    return "x" * (1 + number)


async def over_grpc(client: AsyncClient, prompt: str, begun: asyncio.Semaphore) -> str:
    seen: list[Delta] = []
    async for delta in client.complete(prompt, max_tokens=220):
        seen.append(delta)
        if len(seen) == 5:
            begun.release()
    assert seen[-1].finish == "stop"
    return text(seen)


async def over_http(client: httpx.AsyncClient, routers: list[Process], prompt: str, begun: asyncio.Semaphore) -> str:
    seen, last = "", ""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 220, "stream": True}
    for router in routers:
        headers = {"last-event-id": last} if last else READS
        try:
            async for event in stream(client, f"http://{router.listen}{COMPLETIONS}", body, headers):
                if event.data == "[DONE]":
                    return seen
                last, (choice,) = event.id, json.loads(event.data)["choices"]
                seen += choice["text"]
                if len(seen) == 5 and router is routers[0]:
                    begun.release()
        except httpx.TransportError:
            assert router is routers[0] and seen
    raise AssertionError(f"lost after {len(seen)} characters")


class Process:
    """A router of its own, without torch."""

    def __init__(self, folder: Path, target: int, log: Path) -> None:
        self.address, self.listen = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        settings = (f"model.path={folder}", f"router.targets=[127.0.0.1:{target}]",
                    f"router.grpc_listen={self.address}", f"router.listen={self.listen}",
                    f"router.metrics_listen=127.0.0.1:{free_port()}")
        flags = [part for setting in settings for part in ("--set", setting)]
        self.process = subprocess.Popen([sys.executable, "-m", "router_service", *flags], stdin=subprocess.DEVNULL,
                                        stdout=log.open("wb"), stderr=subprocess.STDOUT, env=dict(os.environ))

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


async def until_answers(client: AsyncClient, routers: list[Process]) -> None:
    for router in reversed(routers):
        async with AsyncClient(router.address) as one:
            while True:
                try:
                    await one.models()
                    break
                except Unavailable:
                    assert router.process.poll() is None
                    await asyncio.sleep(0.1)
    assert await client.models()
