"""``make bench-network``: what a schedule makes of a network, on timed devices between real processes.

Each row is one target (20 ms a step) with a drafter, over a relay with a set round trip: serial (one growth a
commit), run-ahead (growth is streamed while the target verifies), colocated (drafter and target on one device, no
network) and plain. Streams are answered side by side; the policy is the default one. Nothing is computed, so the
figures are those of the schedule, the wire and the host's work, not of a model.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from bench.fleet import Process, free_port
from bench.report import Row, write
from bench.simulation import RUN_AHEAD, SCHEDULES, Deployment, of_schedule, simulate
from bench.timed import STREAMS, SYMBOLS, Timing
from slipstream.config import WireSection
from slipstream.errors import Unavailable
from slipstream.messages import Sampling
from slipstream.requests import Piece, Request
from slipstream.trace import merge
from slipstream.wire.target import TargetClient

FOLDER = Path("build/bench/logs")


@dataclass(frozen=True, slots=True)
class Cell:
    """One row to measure."""

    schedule: str
    rtt_ms: float
    draft_ms: float
    batch: int


@dataclass(slots=True)
class Rig:
    """A running deployment."""

    client: TargetClient
    target: Process


@asynccontextmanager
async def deployed(schedule: str, rtt_ms: float, timing: Timing, traced: bool = False,
                   settings: Sequence[str] = ()) -> AsyncIterator[Rig]:
    """Target, relay and draft as processes; ready when it ends its first line."""
    file = timing.save(FOLDER / "timing.json")
    address = {name: f"127.0.0.1:{free_port()}" for name in ("draft", "draft metrics", "relay", "target", "metrics")}
    shared = (f"draft.listen={address['draft']}", f"draft.metrics_listen={address['draft metrics']}",
              f"target.listen={address['target']}", f"target.metrics_listen={address['metrics']}",
              f"target.drafts=['{address['relay']}']", "target.slots=16384",
              f"draft.run_ahead={RUN_AHEAD if schedule == 'run-ahead' else 0}", *settings)

    def process(role: str, port: str) -> Process:
        own = (*shared, f"log.trace={FOLDER / role}.trace") if traced else shared
        return Process("bench.timed_service", own, int(address[port].rpartition(":")[2]),
                       FOLDER / f"timed-{role}.log", (role, str(file)))

    relay = Process("bench.delayed", (), 0, FOLDER / "relay.log",
                    (address["relay"], address["draft"], "--delay-ms", str(rtt_ms / 2)))
    draft = process("draft", "draft metrics")
    target = process("colocated" if schedule == "colocated" else "target", "metrics")
    client = TargetClient(address["target"], WireSection())
    parts = [target] if schedule == "colocated" else [draft, relay, target]
    try:
        for part in parts:
            part.start()
        for part in parts:
            if part is not relay:
                await part.ready()
        await connected(client)
        yield Rig(client, target)
    finally:
        await client.aclose()
        for part in reversed(parts):
            part.stop()
    if traced:
        merge([FOLDER / f"{part.arguments[0]}.trace" for part in parts if part is not relay],
              FOLDER.parent / f"trace-{schedule}-{rtt_ms:g}ms.json")


async def connected(client: TargetClient, within_s: float = 30.0) -> None:
    """Wait until the target has its draft. Raises Unavailable."""
    deadline_s = time.monotonic() + within_s
    while not all(draft.connected for draft in (await client.info()).drafts):
        if time.monotonic() > deadline_s:
            raise Unavailable(f"the target does not find its draft; see {FOLDER}")
        await asyncio.sleep(0.05)


async def measure(rig: Rig, cell: Cell, seconds: float, timing: Timing) -> Row:
    """Answer ``batch`` streams side by side for so long, and say what the simulation expects of it."""
    window = Window()
    streams = [asyncio.create_task(stream(rig.client, number, cell.schedule != "plain", window))
               for number in range(cell.batch)]
    await asyncio.sleep(1.0)  # the policy learns what an exchange takes
    busy_s = await rig.target.metric("step_seconds_sum", phase="verify")
    window.open()
    await asyncio.sleep(seconds)
    window.close()
    busy_s = await rig.target.metric("step_seconds_sum", phase="verify") - busy_s
    for task in streams:
        task.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    rounds = max(1, len(window.pieces))
    hits = sum(piece.drafted > 0 and piece.wait_s == 0.0 for piece in window.pieces)
    took_s = window.closed_s - window.opened_s
    expected = Deployment(timing, rtt_s=cell.rtt_ms / 1e3, batch=cell.batch)
    predicted = simulate(of_schedule(cell.schedule, expected), 10.0).tokens_per_s
    return {"schedule": cell.schedule, "rtt_ms": cell.rtt_ms, "draft_ms": cell.draft_ms, "batch": cell.batch,
            "tokens_per_s": sum(len(piece.tokens) for piece in window.pieces) / took_s, "hit_rate": hits / rounds,
            "waiting_share": max(0.0, 1.0 - busy_s / took_s),
            "acceptance_length": sum(len(piece.tokens) for piece in window.pieces) / rounds,
            "drafted": sum(piece.drafted for piece in window.pieces) / rounds,
            "predicted": predicted,
            "wait_ms": 1e3 * sum(piece.wait_s for piece in window.pieces) / rounds,
            "verify_ms": 1e3 * sum(piece.verify_s for piece in window.pieces) / rounds,
            "speculating": sum(piece.state == "speculate" for piece in window.pieces) / rounds}


class Window:
    """The pieces that came while it was open."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.opened_s = self.closed_s = float("inf")

    def open(self) -> None:
        self.opened_s = time.perf_counter()

    def close(self) -> None:
        self.closed_s = time.perf_counter()

    def take(self, piece: Piece) -> None:
        if self.opened_s <= time.perf_counter() < self.closed_s:
            self.pieces.append(piece)


async def stream(client: TargetClient, number: int, speculate: bool, window: Window) -> None:
    """One endless reader: an answer after the other, each of another text."""
    for turn in itertools.count():
        first = (number + 37 * turn) % STREAMS * SYMBOLS
        request = Request(f"{number}-{turn}", (first, first), Sampling(), 4000, None, speculate)
        async for piece in client.submit(request):
            window.take(piece)


async def sweep(cells: Sequence[Cell], seconds: float, timing: Timing, traced: bool = False) -> list[Row]:
    """All cells; those that differ in the batch alone share a deployment."""
    rows: list[Row] = []
    for (schedule, rtt_ms, draft_ms), group in itertools.groupby(cells, lambda c: (c.schedule, c.rtt_ms, c.draft_ms)):
        timed = replace(timing, draft_s=draft_ms / 1e3)
        async with deployed(schedule, rtt_ms, timed, traced) as rig:
            for cell in group:
                rows.append(await measure(rig, cell, seconds, timed))
                print({key: round(value, 3) if isinstance(value, float) else value for key, value in rows[-1].items()},
                      file=sys.stderr)
    return rows


def cells_of(schedules: Sequence[str], rtts_ms: Sequence[float], drafts_ms: Sequence[float],
             batches: Sequence[int]) -> list[Cell]:
    """The sweep; where the network (or the drafter) does not matter, it is measured once."""
    cells = []
    for schedule in schedules:
        for draft_ms in drafts_ms[:1] if schedule == "plain" else drafts_ms:
            for rtt_ms in rtts_ms[:1] if schedule in ("plain", "colocated") else rtts_ms:
                cells += [Cell(schedule, rtt_ms, draft_ms, batch) for batch in batches]
    return cells


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", default=",".join(SCHEDULES))
    parser.add_argument("--rtts-ms", type=numbers, default=[0.0, 1.0, 5.0])
    parser.add_argument("--drafts-ms", type=numbers, default=[5.0])
    parser.add_argument("--batches", type=numbers, default=[1.0, 8.0])
    parser.add_argument("--seconds", type=float, default=4.0, help="of each row")
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--acceptance", type=numbers, default=[0.75, 0.12, 0.05],
                        help="chance that a node's first, second, ... child is right")
    parser.add_argument("--trace", action="store_true", help="leave a trace of each deployment beside the rows")
    parser.add_argument("--full", action="store_true", help="RTT 0 to 20 ms, trees of 2 to 10 ms, batch 1 to 32")
    arguments = parser.parse_args()
    if arguments.full:
        arguments.rtts_ms, arguments.drafts_ms = [0.0, 0.1, 1.0, 5.0, 20.0], [2.0, 5.0, 10.0]
        arguments.batches = [1.0, 2.0, 8.0, 32.0]
    FOLDER.mkdir(parents=True, exist_ok=True)
    timing = Timing(step_s=arguments.step_ms / 1e3, acceptance=tuple(arguments.acceptance))
    cells = cells_of(arguments.schedules.split(","), arguments.rtts_ms, arguments.drafts_ms,
                     [int(batch) for batch in arguments.batches])
    write("network", asyncio.run(sweep(cells, arguments.seconds, timing, arguments.trace)),
          f"bench-network: timed devices, a target step takes {arguments.step_ms:g} ms")


if __name__ == "__main__":
    main()
