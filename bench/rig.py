"""Rig: one row of a sweep: a deployment of timed devices as processes, with a delay between them, and its readers.

It knows nothing about which rows a sweep has, or what is claimed of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from bench.claims import KEYS
from bench.fleet import Process, free_port, joined, service
from bench.readers import Reader
from bench.report import FOLDER as REPORTS
from bench.report import Row
from slipstream.cli.process import kept_up
from slipstream.simulate.simulation import RUN_AHEAD
from slipstream.simulate.timed import Timing
from slipstream.wire.target_client import TargetClient

FOLDER = REPORTS / "logs"
USUAL, GOOD = (0.75, 0.12, 0.05), (0.95, 0.03, 0.015)  # chances of a node's children


@dataclass(frozen=True, slots=True)
class Cell:
    """One row to measure."""

    schedule: str
    rtt_ms: float
    draft_ms: float
    batch: int
    acceptance: tuple[float, ...] = USUAL

    @property
    def key(self) -> Row:
        return dict(zip(KEYS, (self.schedule, self.rtt_ms, self.draft_ms, self.batch,
                               " ".join(f"{chance:g}" for chance in self.acceptance)), strict=True))

    @staticmethod
    def of(row: Row) -> Cell:
        """Where ``row`` was measured."""
        schedule, rtt_ms, draft_ms, batch, acceptance = (row[key] for key in KEYS)
        assert isinstance(rtt_ms, float) and isinstance(draft_ms, float) and isinstance(batch, int)
        return Cell(str(schedule), rtt_ms, draft_ms, batch, tuple(float(part) for part in str(acceptance).split()))

    @property
    def tokens(self) -> tuple[int, int]:
        """Of each stream: those that are not counted, while the policy learns what an exchange takes; and the rest.
        Every schedule answers the same text, so it meets the same luck."""
        return 20 if self.schedule == "plain" else 150, max(150, 800 // self.batch)


def timing_of(step_ms: float, draft_ms: float, acceptance: tuple[float, ...]) -> Timing:
    """The devices of a row."""
    return Timing(step_ms / 1e3, draft_s=draft_ms / 1e3, acceptance=acceptance, width=len(acceptance))


@dataclass(slots=True)
class Rig:
    """A running deployment."""

    client: TargetClient
    target: Process


@asynccontextmanager
async def deployed(schedule: str, rtt_ms: float, timing: Timing) -> AsyncIterator[Rig]:
    """Target, relay and draft as processes; ready when it ends its first line."""
    role = "colocated" if schedule == "colocated" else "target"
    file, relay_at = str(timing.save(FOLDER / "timing.json")), f"127.0.0.1:{free_port()}"

    def process(role: str, *own: str) -> Process:
        return service("draft" if role == "draft" else "target", f"timed-{role}", FOLDER, own,
                       "bench.timed_service", (role, file))

    run_ahead = f"draft.run_ahead={RUN_AHEAD if schedule == 'run-ahead' else 0}"
    draft = process("draft", run_ahead)
    target = process(role, run_ahead, f"target.drafts=['{relay_at}']", "target.slots=65536")
    relay = Process("bench.delayed", (), 0, FOLDER / "relay.log",
                    (relay_at, draft.address, "--delay-ms", str(rtt_ms / 2)))
    client = TargetClient(target.address)
    parts = [target] if schedule in ("colocated", "plain") else [draft, relay, target]
    try:
        for part in parts:
            part.start()
        for part in parts:
            if part is not relay:
                await part.ready()
        if schedule != "plain":
            await joined(client, target.log)
        yield Rig(client, target)
    finally:
        await client.aclose()
        for part in reversed(parts):
            part.stop()


async def measure(rig: Rig, cell: Cell, seconds: float) -> Row:
    """Answer ``batch`` streams side by side, for ``seconds`` at most."""
    begin, count = cell.tokens
    readers = [Reader(number, begin, begin + count) for number in range(cell.batch)]
    async with kept_up(*(reader.read(rig.client, cell.schedule != "plain") for reader in readers)):
        began_s = time.perf_counter()
        while not all(reader.began for reader in readers) and time.perf_counter() < began_s + seconds:
            await asyncio.sleep(0.01)
        opened_s, busy_s = time.perf_counter(), await rig.target.metric("step_seconds_sum", phase="verify")
        while not all(reader.ended for reader in readers) and time.perf_counter() < began_s + seconds:
            await asyncio.sleep(0.01)
        busy_s = await rig.target.metric("step_seconds_sum", phase="verify") - busy_s
        took_s = time.perf_counter() - opened_s
    pieces = [piece for reader in readers for piece in reader.counted]
    rounds = max(1, len(pieces))
    hits = [ms for reader in readers for ms in reader.hits_ms]
    return {**cell.key, "tokens_per_s": sum(reader.tokens_per_s for reader in readers), "hit_rate": len(hits) / rounds,
            "waiting_share": max(0.0, 1.0 - busy_s / took_s), "hit_round_ms": sum(hits) / max(1, len(hits)),
            "acceptance_length": sum(len(piece.tokens) for piece in pieces) / rounds,
            "drafted": sum(piece.drafted for piece in pieces) / rounds,
            "wait_ms": 1e3 * sum(piece.wait_s for piece in pieces) / rounds,
            "verify_ms": 1e3 * sum(piece.verify_s for piece in pieces) / rounds,
            "speculating": sum(piece.state == "speculate" for piece in pieces) / rounds}
