"""What a peer costs that floods: ``python -m tests.flooding [--turns N] [--kinds …]``. Prints; asserts nothing.

A target on a core of its own answers eight readers, in turns with and without a draft on the other core that does its
worst. For each kind the target is a fresh one, so that it has not learned to leave the draft alone. ``goodput``: tokens
a second, the median of turns, by that without any draft. "target: …" is a target with an honest draft that another
target floods; "target: nothing" shows what that draft gives when nobody does.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

import grpc
import numpy as np
import psutil
from grpc import aio

from bench.fleet import LOGS, Process, free_port, running, service
from slipstream.base.errors import SlipstreamError
from slipstream.observe.vitals import background_tasks
from slipstream.protocol.messages import (
    PROTOCOL_VERSION,
    Close,
    Commit,
    DraftHello,
    Drop,
    Growth,
    Open,
    TargetBound,
    TargetHello,
)
from slipstream.protocol.requests import Request, Sampling
from slipstream.v1 import draft_pb2
from slipstream.wire.codec import (
    FrameLimits,
    decode_target_frame,
    decode_target_hello,
    encode_draft_frames,
    encode_draft_hello,
    encode_target_frames,
    encode_target_hello,
)
from slipstream.wire.target import TargetClient
from tests.tiny import write_tiny_model

READERS, TOKENS, WARM_S, TURN_S = 8, 100, 2.0, 10.0
DRAFT = DraftHello(PROTOCOL_VERSION, 0, "flood", 0, "", None, 0, 1 << 16, 63, 64)
MANY = 90_000  # items of a frame of up to four megabytes
EXCHANGE = "/slipstream.v1.DraftService/Exchange"


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def growth(session: int = 1, base: int = 3, nodes: int = 1) -> Growth:
    """A chain."""
    return Growth(session, base, ints(*range(1, nodes + 1)), ints(-base, *range(1, nodes)), ints(*[7] * nodes),
                  np.zeros(nodes, np.float32))


def repeated(message: draft_pb2.ExchangeResponse | draft_pb2.ExchangeRequest, times: int) -> bytes:
    """Its only item so often."""
    items = [message.frame.items[0]] * times
    del message.frame.items[:]
    message.frame.items.extend(items)
    return message.SerializeToString()


def frame(incarnation: int, item: TargetBound, times: int) -> bytes:
    """One frame, however long."""
    (one,), _ = encode_draft_frames(incarnation, [item], 1 << 22)
    return repeated(draft_pb2.ExchangeResponse.FromString(one), times)


UNASKED: dict[str, tuple[TargetBound, int]] = {
    "bad growths": (Growth.empty(1, 1 << 20), MANY), "drops": (Drop(1, "gap"), MANY),
    "unknown sessions": (growth(1 << 40, 9, 4), 3000), "stale bases": (growth(1, 1, 1), 1000),
    "whole frames": (growth(1, 9, 63), 3700), "drip": (growth(1, 9, 1), 1)}
ASKED = ("answers", "drops asked", "bad answers")  # as much as may be said, all of it useless


class Flood:
    """A draft service that does its worst while it is up."""

    def __init__(self, kind: str) -> None:
        self.kind, self.port, self.streams = kind, free_port(), 0

    @asynccontextmanager
    async def up(self) -> AsyncIterator[None]:
        server = aio.server()
        handler = grpc.stream_stream_rpc_method_handler(self._exchange)
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("slipstream.v1.DraftService", {"Exchange": handler})])
        server.add_insecure_port(f"127.0.0.1:{self.port}")
        await server.start()
        try:
            yield
        finally:
            await server.stop(0)

    async def _exchange(self, _requests: object, context: aio.ServicerContext) -> None:
        target = decode_target_hello(await context.read())
        await context.write(encode_draft_hello(replace(DRAFT, incarnation=target.incarnation)))
        self.streams += 1
        if self.kind in ASKED:
            await self._answers(context, target)
            return
        item, times = UNASKED[self.kind]
        data = frame(target.incarnation, item, times)
        while True:
            await context.write(data)
            await asyncio.sleep(0.001 if times == 1 else 0)

    async def _answers(self, context: aio.ServicerContext, target: TargetHello) -> None:
        limits, bases = FrameLimits.of(target, DRAFT), dict[int, int]()
        while isinstance(data := await context.read(), bytes):
            for item in decode_target_frame(data, target.incarnation, limits)[0]:
                if isinstance(item, Open | Commit):
                    bases[item.session] = len(item.tokens) + (item.base if isinstance(item, Commit) else 0)
                    if item.wanted or self.kind == "drops asked":
                        await context.write(frame(target.incarnation, self._useless(item.session, bases), 1))
                elif isinstance(item, Close):
                    bases.pop(item.session, None)

    def _useless(self, session: int, bases: dict[int, int]) -> TargetBound:
        if self.kind == "drops asked":
            return Drop(session, "gap")
        return growth(session, bases[session] + (9 if self.kind == "bad answers" else 0), 63)


class Answered:
    """What readers got in one turn: tokens, and requests that failed."""

    def __init__(self) -> None:
        self.tokens = self.failed = 0

    async def read(self, client: TargetClient) -> None:
        """One answer after another, for ever."""
        for number in NUMBERS:
            prompt = tuple((37 * number + 5 * at) % 200 for at in range(64))
            try:
                async with aclosing(client.submit(Request(f"{number}", prompt, Sampling(), TOKENS))) as answer:
                    async for piece in answer:
                        self.tokens += len(piece.tokens)
            except SlipstreamError:
                self.failed += 1


NUMBERS = count()


async def turn(client: TargetClient) -> tuple[float, int]:
    """Tokens a second, and how many requests failed. What comes after its time is not counted: the last answers have
    the target for themselves."""
    answered = Answered()
    readers = [asyncio.ensure_future(answered.read(client)) for _ in range(READERS)]
    await asyncio.sleep(WARM_S)
    before, began_s = answered.tokens, time.perf_counter()
    await asyncio.sleep(TURN_S)
    rate = (answered.tokens - before) / (time.perf_counter() - began_s)
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    return rate, answered.failed


def pin(process: Process, core: int) -> None:
    one = psutil.Process(process.pid)
    for thread in one.threads():
        psutil.Process(thread.id).cpu_affinity([core])


def target_of(model: str, drafts: Sequence[str]) -> Process:
    return service("target", "flooded", LOGS, (f"target.drafts={list(drafts)}", "target.prompt_lookup=false",
                                               f"model.path={model}", "model.threads=1", "target.slots=8192"))


async def alternately(client: TargetClient, without: TargetClient, hostile: Callable[[], AbstractAsyncContextManager],
                      turns: int, name: str) -> None:
    """Prints the line of ``name``."""
    rates, failed = dict[bool, list[float]]({False: [], True: []}), 0
    for _ in range(turns):
        for floods in (True, False):
            if floods:
                async with hostile():
                    rate, lost = await turn(client)
            else:
                rate, lost = await turn(without)
            rates[floods].append(rate)
            failed += lost
    flooded, plain = statistics.median(rates[True]), statistics.median(rates[False])
    print(f"{name:26} goodput {flooded / plain:.2f}  worst turn {min(rates[True]) / plain:.2f}  plain {plain:.0f} "
          f"tokens/s  failed {failed}", flush=True)


async def draft_floods(model: str, kind: str, turns: int) -> None:
    flood = Flood(kind)
    target = target_of(model, [f"127.0.0.1:{flood.port}"])
    client = TargetClient(target.address)
    async with running(target), aclosing(client):
        pin(target, 0)
        await turn(client)
        await alternately(client, client, flood.up, turns, f"draft: {kind}")


def requests_of(kind: str, incarnation: int) -> list[bytes]:
    text = np.arange(2000, dtype=np.int32) % 900 + 5
    items = {"closes": Close(1), "commits": Commit(1, 2000, ints(5)), "openings": Open(1, text, 2000, Sampling())}
    (one,), _ = encode_target_frames(incarnation, [items[kind]], 1 << 22)
    return [repeated(draft_pb2.ExchangeRequest.FromString(one), 500 if kind == "openings" else 1000)]


async def target_floods(model: str, kind: str, turns: int) -> None:
    """A hostile target that keeps within what a frame may hold, for ever."""
    draft = service("draft", "flooded-draft", LOGS, ("draft.drafter=ngram", f"model.path={model}", "model.threads=1"))
    async with running(draft):
        pin(draft, 1)
        target, alone = target_of(model, [draft.address]), target_of(model, [])
        async with running(target, alone):
            clients = TargetClient(target.address), TargetClient(alone.address)
            for process in (target, alone):
                pin(process, 0)
            for client in clients:
                await turn(client)
            hello = TargetHello(PROTOCOL_VERSION, 3, "hostile", 1 << 16, "", 64, 2, 8192)

            @asynccontextmanager
            async def hostile() -> AsyncIterator[None]:
                if kind == "nothing":
                    yield
                    return

                async def flood() -> None:
                    async with aio.insecure_channel(draft.address) as channel:
                        call = channel.stream_stream(EXCHANGE)()
                        await call.write(encode_target_hello(hello))
                        await call.read()
                        (data,) = requests_of(kind, 3)
                        while True:
                            await call.write(data)
                            await asyncio.sleep(0)

                async with background_tasks(flood()):
                    yield

            await alternately(clients[0], clients[1], hostile, turns, f"target: {kind}")
            for client in clients:
                await client.aclose()


async def run(model: str, kinds: Sequence[str], turns: int) -> None:
    LOGS.mkdir(parents=True, exist_ok=True)
    psutil.Process().cpu_affinity([1])
    for kind in kinds:
        side, _, name = kind.partition(":")
        await (draft_floods if side == "draft" else target_floods)(model, name, turns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [*(f"draft:{kind}" for kind in (*UNASKED, *ASKED)),
             *(f"target:{kind}" for kind in ("nothing", "closes", "commits", "openings"))]
    parser.add_argument("--model", default="", help='name or folder; "": two layers of 64 numbers')
    parser.add_argument("--kinds", nargs="*", default=known, choices=known)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if not options.model:
            write_tiny_model(Path(folder))
        asyncio.run(run(options.model or folder, options.kinds, options.turns))


if __name__ == "__main__":
    main()
