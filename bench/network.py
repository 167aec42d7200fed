"""``make bench-network``: what a schedule makes of a network, on timed devices between real processes.

Each row is one target (20 ms a step) with a drafter, over a relay with a set round trip: serial (one growth a
commit), run-ahead (growth is streamed while the target verifies), colocated (drafter and target on one device, no
network) and plain. The policy is the default one and chooses within each. Nothing is computed, so the figures are
those of the schedule, the wire and the host's work, not of a model.

``ARGS=--full`` is the whole sweep; it ends after ``--minutes`` and goes on where it stopped with ``--resume``. The
claims that the rows bear out, or do not, are printed below them (``bench.claims``). One row scatters by a few per cent,
so those that are close to a bound, on either side, are measured again beside what they are compared with.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench.claims import KEYS, close, verdicts
from bench.repeats import Repeats
from bench.report import FOLDER as REPORTS
from bench.report import Row, save, write
from bench.rig import FOLDER, GOOD, USUAL, Cell, deployed, measure, timing_of
from slipstream.simulate.simulation import SCHEDULES


@dataclass(frozen=True, slots=True)
class Sweep:
    """How cells are measured."""

    seconds: float
    step_ms: float
    until_s: float  # no deployment is begun later

    async def run(self, cells: Sequence[Cell], rows: list[Row]) -> None:
        """Add a row for each cell; those that differ in the batch alone share a deployment."""
        for (schedule, rtt_ms, draft_ms, acceptance), group in itertools.groupby(
                cells, lambda c: (c.schedule, c.rtt_ms, c.draft_ms, c.acceptance)):
            if time.monotonic() > self.until_s:
                return
            timing = timing_of(self.step_ms, draft_ms, acceptance)
            async with deployed(schedule, rtt_ms, timing) as rig:
                for cell in group:
                    rows.append(await measure(rig, cell, self.seconds))
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
    parser.add_argument("--repeats", type=int, default=9, help="of each row that is close to a bound")
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--acceptance", type=numbers, default=USUAL,
                        help="chance that a node's first, second, ... child is right")
    parser.add_argument("--full", action="store_true", help="RTT 0 to 20 ms, trees of 2 to 10 ms, batch 1 to 32")
    parser.add_argument("--resume", action="store_true", help="keep the rows that are there, measure those that miss")
    return parser.parse_args()


def known(name: str) -> list[Row]:
    """Rows of an earlier run; none if there was none."""
    try:
        return list(json.loads((REPORTS / f"{name}.json").read_text())["rows"])
    except (OSError, ValueError, KeyError):
        return []


def main() -> None:
    arguments = arguments_of(argparse.ArgumentParser(description=__doc__))
    FOLDER.mkdir(parents=True, exist_ok=True)
    cells = full() if arguments.full else cells_of(
        arguments.schedules.split(","), arguments.rtts_ms, arguments.drafts_ms,
        [int(batch) for batch in arguments.batches], arguments.acceptance)
    rows, again = (known("network"), known("network-repeats")) if arguments.resume else ([], [])
    done = [{key: row[key] for key in KEYS} for row in rows]
    missing = [cell for cell in cells if cell.key not in done]
    until_s = time.monotonic() + 60 * arguments.minutes
    sweep = Sweep(arguments.seconds, arguments.step_ms, until_s)
    asyncio.run(sweep.run(missing, rows))
    left = len(missing) + len(done) - len(rows)
    repeats = Repeats(again, arguments.step_ms, arguments.seconds, until_s)
    if not left:
        asyncio.run(repeats.run(close(rows), arguments.repeats))
    write("network", rows, f"bench-network: timed devices, a target step takes {arguments.step_ms:g} ms")
    for verdict in verdicts(rows, arguments.step_ms, repeats.rows):
        print(verdict)
    if left or repeats.left:
        print(f"{left} rows and {repeats.left} repeats are missing: go on with --resume")


if __name__ == "__main__":
    main()
