"""``make bench-network``: what a schedule makes of a network, on timed devices between real processes.

Each row is one target (20 ms a step) with a drafter, over a relay with a set round trip: serial (one growth a
commit), run-ahead (growth is streamed while the target verifies), colocated (drafter and target on one device, no
network) and plain. The policy is the default one and chooses within each. Nothing is computed, so the figures are
those of the schedule, the wire and the host's work, not of a model.

``ARGS=--full`` is the whole sweep; it ends after ``--minutes`` and goes on where it stopped with ``--resume``. The
claims that the rows bear out, or do not, are printed below them (``bench.claims``).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from bench import real
from bench.claims import verdicts
from bench.fleet import Process, free_port
from bench.readers import Reader
from bench.report import FOLDER as REPORTS
from bench.report import Row, save, write
from bench.simulation import RUN_AHEAD, SCHEDULES, Deployment, of_schedule, simulate
from bench.timed import Timing
from slipstream.config import WireSection
from slipstream.errors import Unavailable
from slipstream.process import kept_up
from slipstream.trace import merge
from slipstream.wire.target import TargetClient

FOLDER = REPORTS / "logs"
USUAL, GOOD = (0.75, 0.12, 0.05), (0.95, 0.03, 0.015)  # chances of a node's children
KEYS = ("schedule", "rtt_ms", "draft_ms", "batch", "acceptance")


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

    @property
    def tokens(self) -> tuple[int, int]:
        """Of each stream: those that are not counted, while the policy learns what an exchange takes; and the rest.
        Every schedule answers the same text, so it meets the same luck."""
        return 20 if self.schedule == "plain" else 150, max(150, 800 // self.batch)


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
              f"target.drafts=['{address['relay']}']", "target.slots=65536",
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
    parts = [target] if schedule in ("colocated", "plain") else [draft, relay, target]
    try:
        for part in parts:
            part.start()
        for part in parts:
            if part is not relay:
                await part.ready()
        if schedule != "plain":
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


def predicted(cell: Cell, timing: Timing) -> float:
    """Tokens a second by the simulation."""
    expected = Deployment(timing, rtt_s=cell.rtt_ms / 1e3, batch=cell.batch)
    return simulate(of_schedule(cell.schedule, expected), 10.0 / cell.batch).tokens_per_s


@dataclass(frozen=True, slots=True)
class Sweep:
    """How cells are measured."""

    seconds: float
    step_ms: float
    minutes: float  # no deployment is begun later
    traced: bool
    predicts: bool

    async def run(self, cells: Sequence[Cell], rows: list[Row]) -> None:
        """Add a row for each cell; those that differ in the batch alone share a deployment."""
        until_s = time.monotonic() + 60 * self.minutes
        for (schedule, rtt_ms, draft_ms, acceptance), group in itertools.groupby(
                cells, lambda c: (c.schedule, c.rtt_ms, c.draft_ms, c.acceptance)):
            if time.monotonic() > until_s:
                return
            timing = Timing(self.step_ms / 1e3, draft_s=draft_ms / 1e3, acceptance=acceptance, width=len(acceptance))
            async with deployed(schedule, rtt_ms, timing, self.traced) as rig:
                for cell in group:
                    row = await measure(rig, cell, self.seconds)
                    rows.append({**row, "predicted": predicted(cell, timing)} if self.predicts else row)
                    save("network", rows)
                    print({key: round(value, 3) if isinstance(value, float) else value
                           for key, value in rows[-1].items()}, file=sys.stderr)


def cells_of(schedules: Sequence[str], rtts_ms: Sequence[float], drafts_ms: Sequence[float],
             batches: Sequence[int], acceptance: tuple[float, ...] = USUAL) -> list[Cell]:
    """The sweep; where the network (or the drafter) does not matter, it is measured once."""
    cells = []
    for schedule in schedules:
        for draft_ms in drafts_ms[:1] if schedule == "plain" else drafts_ms:
            for rtt_ms in rtts_ms[:1] if schedule in ("plain", "colocated") else rtts_ms:
                cells += [Cell(schedule, rtt_ms, draft_ms, batch, acceptance) for batch in batches]
    return cells


def full() -> list[Cell]:
    """The whole sweep, and a drafter that is nearly always right."""
    return [*cells_of(("colocated", "run-ahead"), (0.0, 1.0), (5.0, 10.0), (1,), GOOD),
            *cells_of(SCHEDULES, (0.0, 0.1, 1.0, 5.0, 20.0), (2.0, 5.0, 10.0), (1, 2, 8, 32))]


def numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def arguments_of(parser: argparse.ArgumentParser) -> argparse.Namespace:
    parser.add_argument("--schedules", default=",".join(SCHEDULES))
    parser.add_argument("--rtts-ms", type=numbers, default=(0.0, 1.0, 5.0))
    parser.add_argument("--drafts-ms", type=numbers, default=(5.0,))
    parser.add_argument("--batches", type=numbers, default=(1.0, 8.0))
    parser.add_argument("--seconds", type=float, default=10.0, help="of a row at most")
    parser.add_argument("--minutes", type=float, default=8.0, help="no deployment is begun after so many")
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--acceptance", type=numbers, default=USUAL,
                        help="chance that a node's first, second, ... child is right")
    parser.add_argument("--trace", action="store_true", help="leave a trace of each deployment beside the rows")
    parser.add_argument("--full", action="store_true", help="RTT 0 to 20 ms, trees of 2 to 10 ms, batch 1 to 32")
    parser.add_argument("--predict", action="store_true", help="a column of what the simulation says")
    parser.add_argument("--resume", action="store_true", help="keep the rows that are there, measure those that miss")
    parser.add_argument("--real", action="store_true", help="the default model instead (see bench.real)")
    parser.add_argument("--prompts", help="for --real: folder of JSONL question sets; our own prompts without")
    parser.add_argument("--sets", default="mt_bench,gsm8k,humaneval,alpaca", help="for --real: names in that folder")
    parser.add_argument("--count", type=int, default=2, help="for --real: questions of each set")
    parser.add_argument("--tokens", type=int, default=96, help="for --real: of an answer at most")
    return parser.parse_args()


def known() -> list[Row]:
    """Rows of an earlier run; none if there was none."""
    try:
        return list(json.loads((REPORTS / "network.json").read_text())["rows"])
    except (OSError, ValueError, KeyError):
        return []


def main() -> None:
    arguments = arguments_of(argparse.ArgumentParser(description=__doc__))
    if arguments.real:
        real.run(arguments.prompts, arguments.sets.split(","), arguments.count, arguments.tokens, arguments.rtts_ms)
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    cells = full() if arguments.full else cells_of(
        arguments.schedules.split(","), arguments.rtts_ms, arguments.drafts_ms,
        [int(batch) for batch in arguments.batches], arguments.acceptance)
    rows = known() if arguments.resume else []
    done = [{key: row[key] for key in KEYS} for row in rows]
    missing = [cell for cell in cells if cell.key not in done]
    sweep = Sweep(arguments.seconds, arguments.step_ms, arguments.minutes, arguments.trace, arguments.predict)
    asyncio.run(sweep.run(missing, rows))
    write("network", rows, f"bench-network: timed devices, a target step takes {arguments.step_ms:g} ms")
    for verdict in verdicts(rows, arguments.step_ms):
        print(verdict)
    left = len(missing) + len(done) - len(rows)
    if left:
        print(f"{left} rows are missing: go on with --resume")


if __name__ == "__main__":
    main()
