"""``make bench-network``: what a schedule makes of a network, on timed devices between real processes.

Each row is one target (20 ms a step) with a drafter, over a relay with a set round trip: serial (one growth a
commit), run-ahead (growth is streamed while the target verifies), colocated (drafter and target on one device, no
network) and plain. The policy is the default one and chooses within each. Nothing is computed, so the figures are
those of the schedule, the wire and the host's work, not of a model. ``ARGS=--full`` is the whole sweep, half an hour;
``ARGS=--real`` is ``bench.traffic.real``.

Below them stands what is promised of schedules, each with its worst row. Two rows scatter against each other by some
3 %; in simulated time, where nothing scatters, ``tests/test_simulation.py`` holds the same.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, replace

from bench.fleet import Services
from bench.report import Row, exit_on_error, number, save, write
from bench.timed import Reader, timed_services
from bench.traffic import real
from slipstream.observe.vitals import background_tasks
from slipstream.simulate.simulation import RUN_AHEAD, SCHEDULES
from slipstream.simulate.timed import Timing

MEASURED = SCHEDULES[:4]  # growth far ahead is said in simulated time
Case = tuple[float, str]  # a figure, and the row that it is of


@dataclass(frozen=True, slots=True)
class Cell:
    """One row to measure."""

    schedule: str
    rtt_ms: float
    draft_ms: float
    batch: int

    @property
    def tokens(self) -> tuple[int, int]:
        """Of each stream: those that are not counted, while the policy learns what an exchange takes; and the rest.
        Every schedule answers the same text, so it meets the same luck."""
        return 20 if self.schedule == "plain" else 150, max(400, 800 // self.batch)

    def services(self) -> AbstractAsyncContextManager[Services]:
        """Its processes, which do not depend on the batch."""
        drafts, role = {"plain": (0, "target"), "colocated": (0, "colocated")}.get(self.schedule, (1, "target"))
        settings = (f"draft.run_ahead={RUN_AHEAD.get(self.schedule, 0)}",)
        return timed_services(Timing(draft_s=self.draft_ms / 1e3), drafts=drafts, rtt_ms=self.rtt_ms, role=role,
                              settings=settings)


def cells_of(schedules: Sequence[str], rtts_ms: Sequence[float], drafts_ms: Sequence[float],
             batches: Sequence[int]) -> list[Cell]:
    """The sweep; where the network (or the drafter) does not matter, it is measured once."""
    cells = []
    for schedule in schedules:
        for draft_ms in drafts_ms[:1] if schedule == "plain" else drafts_ms:
            for rtt_ms in rtts_ms[:1] if schedule in ("plain", "colocated") else rtts_ms:
                cells += [Cell(schedule, rtt_ms, draft_ms, batch) for batch in batches]
    return cells


SOME = cells_of(MEASURED, (0.0, 1.0, 5.0), (5.0,), (1, 8))
ALL = cells_of(MEASURED, (0.0, 0.1, 1.0, 5.0, 20.0), (2.0, 5.0, 10.0), (1, 2, 8, 32))


async def measure(rig: Services, cell: Cell, seconds: float) -> Row:
    """Answer ``batch`` streams side by side, for ``seconds`` at most."""
    begin, count = cell.tokens
    readers = [Reader(number, begin, begin + count) for number in range(cell.batch)]
    async with background_tasks(*(reader.read(rig.clients[0], cell.schedule != "plain") for reader in readers)):
        began_s = time.perf_counter()
        while not all(reader.ended for reader in readers) and time.perf_counter() < began_s + seconds:
            await asyncio.sleep(0.01)
    pieces = [piece for reader in readers for piece in reader.counted]
    rounds, hits = max(1, len(pieces)), [ms for reader in readers for ms in reader.hit_rounds_ms]
    return {**asdict(cell), "tokens_per_s": sum(reader.tokens_per_s for reader in readers),
            "hit_rate": len(hits) / rounds, "hit_round_ms": sum(hits) / max(1, len(hits)),
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
        async with alike[0].services() as rig:
            for cell in alike:
                rows.append(await measure(rig, cell, seconds))
                save("network", rows)
                print({key: round(value, 3) if isinstance(value, float) else value
                       for key, value in rows[-1].items()}, file=sys.stderr)
    return rows


def verdicts(rows: Sequence[Row]) -> list[str]:
    """One line a promise: whether all rows that it is about keep it, and the worst; or that there are none."""
    of = {(row["schedule"], row["rtt_ms"], row["draft_ms"], row["batch"]): row for row in rows}
    plain = {row["batch"]: number(row, "tokens_per_s") for row in rows if row["schedule"] == "plain"}
    kept, best, overlap = list[Case](), list[Case](), list[Case]()
    for (schedule, rtt_ms, draft_ms, batch), row in of.items():
        name, speed = f"{schedule}, RTT {rtt_ms} ms, tree {draft_ms} ms, batch {batch}", number(row, "tokens_per_s")
        serial, near = of.get(("serial", rtt_ms, draft_ms, batch)), of.get((schedule, 0.0, draft_ms, batch))
        if schedule in ("serial", "run-ahead") and serial is not None and batch in plain:
            best.append((speed / max(plain[batch], number(serial, "tokens_per_s")), name))
        if (schedule, rtt_ms, batch) == ("run-ahead", 1.0, 1) and near is not None:
            kept.append((speed / number(near, "tokens_per_s"), name))
        if (schedule, batch) == ("run-ahead", 1) and row["hit_rate"]:
            longest_ms = max(number(row, "verify_ms"), number(row, "draft_ms"))
            overlap.append((longest_ms / number(row, "hit_round_ms"), name))
    return [f"not judged: {promise}: no such rows" if not cases else
            f"{'holds' if min(cases)[0] >= least else 'FAILS'}: {promise}: at least {least:.2f}, worst of {len(cases)} "
            f"rows {min(cases)[0]:.3f} ({min(cases)[1]})" for promise, least, cases in (
                ("run-ahead's speed at 1 ms by its own at 0, batch 1", 0.95, kept),
                ("what the policy chose by the best of plain and serial", 0.95, best),
                ("max(verify, draft) by a round whose tree was there, batch 1", 0.91, overlap))]


@exit_on_error()
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
    rows = asyncio.run(swept(ALL if given.full else SOME, given.seconds))
    write("network", rows, f"bench-network: timed devices, a target step takes {1e3 * Timing().step_s:g} ms")
    print("\n".join(verdicts(rows)))


if __name__ == "__main__":
    main()
