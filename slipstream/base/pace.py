"""Pace: how much of a thread's time one peer may have, where others need it too.

Rules:
1. What a peer sends is taken at once, up to ``BURST_S`` of work; beyond that at a share of the thread's time. What is
   not taken is held back where it comes from.
2. Work is what the thread computed, not what others kept it from.

Python runs one thread at a time: without a pace, a peer that sends without end takes the engine's turns.
It knows nothing about what the work is.
"""

from __future__ import annotations

import time
from collections.abc import Callable

BURST_S = 0.05


class Pace:
    """Of one stream."""

    def __init__(self, share: float, worked: Callable[[], float] = time.thread_time,
                 clock: Callable[[], float] = time.monotonic) -> None:
        """share: of all time, at most 1. worked: seconds that this thread has computed."""
        self._share, self._worked, self._clock = share, worked, clock
        self._owed_s = self._began_s = 0.0
        self._at_s = clock()

    def begin(self) -> None:
        """Something is read."""
        self._began_s = self._worked()

    def end(self) -> float:
        """It is done. Returns for how long nothing more should be read."""
        return self.owes(self._worked() - self._began_s)

    def owes(self, seconds: float) -> float:
        """So much work was done for it. Returns for how long nothing more should be."""
        now_s = self._clock()
        self._owed_s = max(0.0, self._owed_s - self._share * (now_s - self._at_s)) + seconds
        self._at_s = now_s
        return max(0.0, self._owed_s - BURST_S) / self._share
