"""Shedding: what the target asks of a device whose memory ran out, until it has been calm for a while.

Rules:
1. A step that did not fit loses nothing: nothing of it was committed, and the next turn asks for less.
2. Each time a step may have half the rows of the one that did not fit. Drafts go first, as they are a bet; new answers
   are refused last, and running ones go on.
3. With no draft, nothing admitted and ``FEWEST_ROWS``, a step that still does not fit ends its answers.
4. Each level is left when no step has failed for ``CALM_S``.

It knows nothing about devices: it is told that one was full.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from slipstream.observe.log import logger
from slipstream.observe.metrics import TargetMetrics
from target_service.scheduler import Limits

CALM_S = 30.0
LEVELS = ("normal", "smaller trees", "plain", "no new answers")
FEWEST_ROWS = 16


class Shedding:
    __slots__ = ("_changed_s", "_clock", "_level", "_limits", "_log", "_metrics", "_most_rows")

    def __init__(self, limits: Limits, clock: Callable[[], float], metrics: TargetMetrics) -> None:
        self._limits, self._clock = limits, clock
        self._level, self._changed_s, self._most_rows = 0, 0.0, limits.max_step_rows
        self._metrics, self._log = metrics, logger("target")

    @property
    def level(self) -> int:
        """0: nothing is shed; else the index in ``LEVELS``."""
        return self._level

    @property
    def refuses(self) -> bool:
        """Whether new answers are refused."""
        return self._level == len(LEVELS) - 1

    def failed(self, rows: int) -> bool:
        """The device had no room for a step of so many rows. Returns whether less can be asked for."""
        self._changed_s = self._clock()
        hopeless = self.refuses and rows <= FEWEST_ROWS
        self._level = min(self._level + 1, len(LEVELS) - 1)
        self._metrics.shedding(self._level, full=True)
        if hopeless:
            return False
        self._most_rows = max(FEWEST_ROWS, rows // 2)
        self._log.warning("the device's memory ran out: less is asked of it; lower target.slots if "
                          "this comes again", rows=rows, now=LEVELS[self._level])
        return True

    def limits(self) -> Limits:
        """Those of the next step."""
        if self._level and self._clock() - self._changed_s >= CALM_S:
            self._level, self._changed_s = self._level - 1, self._clock()
            self._metrics.shedding(self._level)
            self._most_rows = min(2 * self._most_rows, self._limits.max_step_rows)
            self._log.info("the device's memory lasts again", now=LEVELS[self._level])
        given = self._limits
        if self._level == 0:
            return given
        return replace(given, max_running=1 if self.refuses else given.max_running,
                       max_step_rows=self._most_rows, prefill_chunk=min(given.prefill_chunk, self._most_rows))

    def nodes(self, wanted: int) -> int:
        """Rows of a tree of so many nodes, root included, that are verified."""
        return wanted if self._level == 0 else 1 + (wanted - 1) // 2 if self._level == 1 else 1
