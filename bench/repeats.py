"""Repeats: rows that stand close to the bound of a claim are measured again, in turns with what they are compared with.

Rules:
1. Which rows are close is the claim's affair, and the same on both sides of its bound (``bench.claims``).
2. Both deployments stand while the turns are taken, so machine and neighbours are the same for both; the first to be
   measured changes from turn to turn. The first turn of each is not counted: policies begin with nothing learned.
3. The median of the ratios replaces the ratio of the single rows; all are kept.

It knows nothing about what a ratio should be.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from bench.claims import Case
from bench.report import Row, save
from bench.rig import Cell, deployed, measure, timing_of


@dataclass(slots=True)
class Repeats:
    """``rows``: one for each case, with the speeds of all turns."""

    rows: list[Row]
    step_ms: float
    seconds: float  # of a turn at most
    until_s: float  # no case is begun later
    left: int = 0  # cases that are still to be repeated

    async def run(self, cases: Sequence[Case], turns: int) -> None:
        """Repeat those that were not repeated yet."""
        missing = [case for case in cases if not any(case.is_of(row) for row in self.rows)] if turns else []
        self.left = len(missing)
        for case in missing:
            if time.monotonic() > self.until_s:
                return
            speeds, rival_speeds = await self._take_turns(case, turns)
            self.rows.append({**case.key, "speeds": speeds, "rival_speeds": rival_speeds})
            self.left -= 1
            save("network-repeats", self.rows)
            print(self.rows[-1], file=sys.stderr)

    async def _take_turns(self, case: Case, turns: int) -> tuple[list[float], list[float]]:
        assert case.rival is not None
        cells = (Cell.of(case.row), Cell.of(case.rival))
        speeds: tuple[list[float], list[float]] = ([], [])
        async with AsyncExitStack() as stack:
            rigs = [await stack.enter_async_context(deployed(
                cell.schedule, cell.rtt_ms, timing_of(self.step_ms, cell.draft_ms, cell.acceptance)))
                for cell in cells]
            for turn in range(turns + 1):
                for place in (0, 1) if turn % 2 else (1, 0):
                    row = await measure(rigs[place], cells[place], self.seconds)
                    speed = row["tokens_per_s"]
                    assert isinstance(speed, float)
                    speeds[place].append(speed)
        return speeds[0][1:], speeds[1][1:]
