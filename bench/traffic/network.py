"""``make bench-network``: what a schedule makes of a network, on timed devices between real processes.

Each row is one target (20 ms a step) with a drafter, over a relay with a set round trip: serial (one growth a
commit), run-ahead (growth is streamed while the target verifies), colocated (drafter and target on one device, no
network) and plain. The policy is the default one and chooses within each. Nothing is computed, so the figures are
those of the schedule, the wire and the host's work, not of a model. ``ARGS=--full`` is the whole sweep, half an hour;
``ARGS=--real`` is ``bench.traffic.real``.

What the rows say of the claims that are made of schedules is printed below them. A claim about rows that are not there
is not judged, and says so. The worst row decides, and is named. Two rows scatter against each other by some 3 %: a
claim that fails by less is looked at again, with the rows that it names.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace

from bench.report import Row, finished, number, save, write
from bench.timed import Reader, Timed, deployed
from bench.traffic import real
from slipstream.cli.process import kept_up
from slipstream.simulate.simulation import AHEAD, SCHEDULES
from slipstream.simulate.timed import Timing

STEP_MS = 20.0
MEASURED = SCHEDULES[:4]  # growth far ahead is said in simulated time
USUAL, GOOD = (0.75, 0.12, 0.05), (0.95, 0.03, 0.015)  # chances of a node's children
KEPT, WON, NEVER_WORSE, OVERLAP = 0.95, 1.10, 0.95, 1.10
DEAR, HITS, NEAR_MS = 0.15, 0.70, 1.0  # drafting's share of a round; rounds whose tree was there; a short round trip
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
        return 20 if self.schedule == "plain" else 150, max(400, 800 // self.batch)

    def deployed(self) -> AbstractAsyncContextManager[Timed]:
        """Its processes, which do not depend on the batch."""
        timing = Timing(STEP_MS / 1e3, draft_s=self.draft_ms / 1e3, acceptance=self.acceptance,
                        width=len(self.acceptance))
        drafts, role = {"plain": (0, "target"), "colocated": (0, "colocated")}.get(self.schedule, (1, "target"))
        return deployed(timing, drafts=drafts, rtt_ms=self.rtt_ms, role=role, settings=(
            f"draft.run_ahead={AHEAD.get(self.schedule, 0)}",))


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
            *cells_of(MEASURED, (0.0, 0.1, 1.0, 5.0, 20.0), (2.0, 5.0, 10.0), (1, 2, 8, 32))]


async def measure(rig: Timed, cell: Cell, seconds: float) -> Row:
    """Answer ``batch`` streams side by side, for ``seconds`` at most."""
    begin, count = cell.tokens
    target, client = rig.targets[0], rig.clients[0]
    readers = [Reader(number, begin, begin + count) for number in range(cell.batch)]
    async with kept_up(*(reader.read(client, cell.schedule != "plain") for reader in readers)):
        began_s = time.perf_counter()
        while not all(reader.began for reader in readers) and time.perf_counter() < began_s + seconds:
            await asyncio.sleep(0.01)
        opened_s, busy_s = time.perf_counter(), await target.metric("step_seconds_sum", phase="verify")
        while not all(reader.ended for reader in readers) and time.perf_counter() < began_s + seconds:
            await asyncio.sleep(0.01)
        busy_s = await target.metric("step_seconds_sum", phase="verify") - busy_s
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


async def swept(cells: Sequence[Cell], seconds: float) -> list[Row]:
    """A row for each cell; those that differ in the batch alone share a deployment."""
    rows: list[Row] = []
    for _, group in itertools.groupby(cells, lambda cell: replace(cell, batch=0)):
        alike = list(group)
        async with alike[0].deployed() as rig:
            for cell in alike:
                rows.append(await measure(rig, cell, seconds))
                save("network", rows)
                print({key: round(value, 3) if isinstance(value, float) else value
                       for key, value in rows[-1].items()}, file=sys.stderr)
    return rows


@dataclass(frozen=True, slots=True)
class Case:
    """One row, and its figure against what it is compared with."""

    figure: float
    row: Row

    def __str__(self) -> str:
        row = self.row
        return (f"{self.figure:.3f} ({row['schedule']}, round trip {row['rtt_ms']:g} ms, tree {row['draft_ms']:g} ms, "
                f"batch {row['batch']}, acceptance {row['acceptance']})")


def verdicts(rows: Sequence[Row]) -> list[str]:
    """One line a claim."""
    return [
        _line("run-ahead at 1 ms keeps >= 95 % of its own speed at 0, batch 1", _kept(rows), lambda f: f >= KEPT, min),
        _line("run-ahead is >= 10 % faster than colocated where drafting is >= 15 % of a round, hits >= 70 %, batch 1",
              _won(rows), lambda f: f >= WON, min),
        _line("what the policy chose is never > 5 % below the best of plain and serial", _never_worse(rows),
              lambda f: f >= NEVER_WORSE, min),
        _line("rounds whose tree was there take <= 1.1 of max(verify, draft) as measured, batch 1", _overlap(rows),
              lambda f: f <= OVERLAP, max),
    ]


def _line(claim: str, cases: Iterable[Case], holds: Callable[[float], bool],
          worst: Callable[..., Case]) -> str:
    found = list(cases)
    if not found:
        return f"not judged: {claim}: no such rows"
    failed = [case for case in found if not holds(case.figure)]
    first = (f"{'FAILS' if failed else 'holds'}: {claim}: worst of {len(found)} rows "
             f"{worst(found, key=lambda case: case.figure)}")
    return "\n".join([first, *(f"  also {case}" for case in failed[:12])] if len(failed) > 1 else [first])


def _speed(row: Row) -> float:
    return number(row, "tokens_per_s")


def _like(rows: Sequence[Row], row: Row, **other: str | float) -> Row | None:
    """The row that differs from ``row`` in nothing but ``other``."""
    wanted = {key: row[key] for key in KEYS} | other
    if wanted["schedule"] in ("plain", "colocated"):
        del wanted["rtt_ms"]
    if wanted["schedule"] == "plain":
        del wanted["draft_ms"]
    return next((r for r in rows if all(r[key] == value for key, value in wanted.items())), None)


def _of(rows: Sequence[Row], schedule: str, batch: int | None = None) -> list[Row]:
    return [row for row in rows if row["schedule"] == schedule and batch in (None, row["batch"])]


def _kept(rows: Sequence[Row]) -> Iterable[Case]:
    for row in _of(rows, "run-ahead", 1):
        near = _like(rows, row, rtt_ms=0.0)
        if row["rtt_ms"] == NEAR_MS and near is not None:
            yield Case(_speed(row) / _speed(near), row)


def _won(rows: Sequence[Row]) -> Iterable[Case]:
    for row in _of(rows, "run-ahead", 1):
        beside, draft_ms = _like(rows, row, schedule="colocated"), number(row, "draft_ms")
        dear = draft_ms / (STEP_MS + draft_ms) >= DEAR
        if beside is not None and dear and number(row, "hit_rate") >= HITS and number(row, "rtt_ms") <= NEAR_MS:
            yield Case(_speed(row) / _speed(beside), row)


def _never_worse(rows: Sequence[Row]) -> Iterable[Case]:
    for row in (*_of(rows, "serial"), *_of(rows, "run-ahead")):
        plain, serial = _like(rows, row, schedule="plain"), _like(rows, row, schedule="serial")
        if plain is not None and serial is not None:
            yield Case(_speed(row) / max(_speed(plain), _speed(serial)), row)


def _overlap(rows: Sequence[Row]) -> Iterable[Case]:
    for row in _of(rows, "run-ahead", 1):
        if number(row, "hit_rate") > 0:
            yield Case(number(row, "hit_round_ms") / max(number(row, "verify_ms"), number(row, "draft_ms")), row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="RTT 0 to 20 ms, trees of 2 to 10 ms, batch 1 to 32")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a row at most")
    parser.add_argument("--real", action="store_true", help="the default pair in simulated time, and what a second "
                        "device is worth")
    parser.add_argument("--prompts", help="for --real: folder of JSONL question sets")
    parser.add_argument("--count", type=int, default=5, help="for --real: questions of each set")
    parser.add_argument("--tokens", type=int, default=64, help="for --real: of an answer at most")
    given = parser.parse_args()
    if given.real:
        if not given.prompts:
            parser.error("--real: give PROMPTS=folder of question sets")
        real.run(given.prompts, given.count, given.tokens)
        return
    cells = full() if given.full else cells_of(MEASURED, (0.0, 1.0, 5.0), (5.0,), (1, 8))
    rows = finished(swept(cells, given.seconds))
    write("network", rows, f"bench-network: timed devices, a target step takes {STEP_MS:g} ms")
    print("\n".join(verdicts(rows)))


if __name__ == "__main__":
    main()
