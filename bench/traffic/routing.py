"""``make bench-router``: what the router adds, against asking the target directly.

Behind it is a target that computes nothing: each step takes a set time (``simulate.timed``). What is measured:
1. ``first_ms``: from the request to the first token, one request at a time while the other streams run; the router's
   share is the difference of the medians. Lone requests go all ways in turn. Connections are open before, as clients
   keep them.
2. ``router_us_a_token``: processor time of the router's process by tokens, while all streams run, the ways in turn:
   each piece brings one token, the dearest case.
3. Direct is gRPC to the target, a call for each answer; the router, whose answers share a call with the target, is
   asked over HTTP with server-sent events, as most would, over the same with ids of events, and over gRPC.
Prompts are token ids, or one word: what tokenizing a text takes is not here. Client and services share the cores.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from bench.completions import Server
from bench.fleet import LOGS, Process, cpu_s, free_port, resident, running, service
from bench.report import Row, finished, number, write
from bench.timed import deployed, text
from slipstream.cli.process import kept_up
from slipstream.protocol.requests import Request, Sampling
from slipstream.simulate.timed import Timing
from slipstream.wire.client import AsyncClient

LONG = 60_000  # tokens of an answer that never ends here
FIRST = 36  # stream of the timed target: from here on the default tokenizer has whole characters for its tokens
TEXT = " to"  # one token of that stream
STEP_MS = 25.0  # of the target
ROUNDS = 4  # parts of each load
WARM, APART_S = 3, 0.015  # lone requests that are not counted, and the pause after each

Ask = Callable[[int, int, list[float]], Coroutine[None, None, None]]  # (stream, tokens, when each piece came)


@dataclass(slots=True)
class Rig:
    """A timed target, a router before it, and the ways to ask."""

    target: Process
    router: Process
    grpc: str  # the router's address
    ways: dict[str, Ask]


@asynccontextmanager
async def routed(step_ms: float, settings: Sequence[str] = ("target.max_sessions=128",),
                 bound: bool = False) -> AsyncIterator[Rig]:
    """``settings`` go to all. bound: answers may be. Raises Unavailable."""
    async with deployed(Timing(step_s=step_ms / 1e3), drafts=0, settings=settings, bound=bound) as timed:
        (target,), (client,), grpc = timed.targets, timed.clients, free_port()
        router = service("router", "routing-router", LOGS, (f"router.grpc_listen=127.0.0.1:{grpc}",
                         f"router.targets=['{target.address}']", *settings))
        http = Server(int(router.address.rpartition(":")[2]), "timed", kept=[])
        with_ids = replace(http, kept=[], ids=True)

        async def direct(stream: int, tokens: int, came: list[float]) -> None:
            async for _ in client.submit(Request(f"direct-{stream}", text(stream, FIRST), Sampling(), tokens)):
                came.append(time.perf_counter())

        async def over_http(stream: int, tokens: int, came: list[float]) -> None:
            await http.ask(text(stream, FIRST), tokens, {"ignore_eos": True}, came)

        async def over_http_with_ids(stream: int, tokens: int, came: list[float]) -> None:
            await with_ids.ask(text(stream, FIRST), tokens, {"ignore_eos": True}, came)

        async def over_grpc(stream: int, tokens: int, came: list[float]) -> None:
            async for _ in caller.complete(TEXT, model="timed", max_tokens=tokens, temperature=0.0, ignore_eos=True):
                came.append(time.perf_counter())

        async with running(router), AsyncClient(f"127.0.0.1:{grpc}") as caller:
            ways: dict[str, Ask] = {"direct": direct, "router, HTTP": over_http, "router, gRPC": over_grpc,
                                    "router, HTTP with ids": over_http_with_ids}
            yield Rig(target, router, f"127.0.0.1:{grpc}", ways)


async def alone(ways: dict[str, Ask], times: int) -> dict[str, list[float]]:
    """Seconds to the first token of ``times`` requests each way, in turn, with nobody else there."""
    firsts: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(-WARM, times):
        for name, ask in ways.items():
            came: list[float] = []
            began_s = time.perf_counter()
            await ask(0, 1, came)
            if turn >= 0:
                firsts[name].append(came[0] - began_s)
            await asyncio.sleep(APART_S)
    return firsts


async def probe(ask: Ask, streams: int, times: int) -> list[float]:
    """Seconds to the first token of ``times`` requests, while ``streams`` others run."""
    firsts = []
    async with kept_up(*(ask(stream, LONG, []) for stream in range(streams))):
        await asyncio.sleep(0.5 + streams / 100)
        for _ in range(times):
            came: list[float] = []
            began_s = time.perf_counter()
            await ask(streams, 1, came)
            firsts.append(came[0] - began_s)
    return firsts


@dataclass(slots=True)
class Load:
    """What was seen of one way while all its streams ran."""

    tokens: int = 0
    seconds: float = 0.0
    spent_s: dict[str, float] = field(default_factory=lambda: {"router": 0.0, "target": 0.0})

    def told(self) -> dict[str, float]:
        return {"tokens_per_s": self.tokens / self.seconds,
                **{f"{name}_us_a_token": 1e6 * spent / max(1, self.tokens) for name, spent in self.spent_s.items()}}


async def load(rig: Rig, way: str, streams: int, seconds: float, seen: Load) -> None:
    """All streams for so long: what each process takes for its tokens."""
    came, pids = [list[float]() for _ in range(streams)], {"router": rig.router.pid, "target": rig.target.pid}
    async with kept_up(*(rig.ways[way](stream, LONG, came[stream]) for stream in range(streams))):
        await asyncio.sleep(0.4 + streams / 100)
        before, began_s = {name: cpu_s(pid) for name, pid in pids.items()}, time.perf_counter()
        await asyncio.sleep(seconds)
        for name, pid in pids.items():
            seen.spent_s[name] += cpu_s(pid) - before[name]
        ended_s = time.perf_counter()
    seen.tokens += sum(began_s <= at_s <= ended_s for each in came for at_s in each)
    seen.seconds += ended_s - began_s


async def loads(rig: Rig, streams: int, seconds: float) -> dict[str, Load]:
    """Each way for so long, in turn and a part at a time: the speed of a machine drifts."""
    seen = {way: Load() for way in rig.ways}
    for _ in range(ROUNDS):
        for way in rig.ways:
            await load(rig, way, streams, seconds / ROUNDS, seen[way])
    return seen


async def measure(streams: int, seconds: float, times: int) -> list[Row]:
    rows: list[Row] = []
    async with routed(STEP_MS) as rig:
        lone = await alone(rig.ways, times)
        loaded = {count: await loads(rig, count, seconds) for count in (1, streams)}
        for name, ask in rig.ways.items():
            for count in (1, streams):
                firsts = sorted(lone[name] if count == 1 else await probe(ask, count - 1, times))
                rows.append({"way": name, "streams": count, "first_ms": 1e3 * statistics.median(firsts),
                             "first_p99_ms": 1e3 * firsts[int(0.99 * len(firsts))], **loaded[count][name].told()})
        print(f"memory: router {resident(rig.router.pid):.0f} MiB, target {resident(rig.target.pid):.0f} MiB")
    return rows


def verdict(rows: list[Row]) -> list[str]:
    """What the router adds, for each way and number of streams."""
    direct = {row["streams"]: row for row in rows if row["way"] == "direct"}
    lines = []
    for row in rows:
        if row["way"] != "direct":
            added = number(row, "first_ms") - number(direct[row["streams"]], "first_ms")
            lines.append(f"{row['way']}, {row['streams']} streams: {added:+.2f} ms to the first token (goal 1), "
                         f"{number(row, 'router_us_a_token'):.0f} µs of the router a token (goal 50)")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each load")
    parser.add_argument("--times", type=int, default=60, help="requests for the time to the first token")
    arguments = parser.parse_args()
    rows = finished(measure(arguments.streams, arguments.seconds, arguments.times))
    write("router", rows, f"bench-router: a timed target, {STEP_MS:g} ms a step")
    print("\n".join(verdict(rows)))


if __name__ == "__main__":
    main()
