"""Purse: what exploration may cost. Whoever tries what should not pay takes it from here, and nowhere else.

Paid from it: probes while speculation is off, waits that are tried, plain steps that are measured, sessions that begin
with a guess. It holds SHARE of the time of all rounds, of the last KEPT_S at most.

It knows nothing about what is tried or what comes of it.
"""

from __future__ import annotations

SHARE = 0.01  # of all time: the goal is 2 % in all, and what is paid for is what should be lost, not what is
KEPT_S = 60.0  # of each session: what was saved longer ago is not spent at once
TOGETHER = 3  # tried waits in a row, on shared cores: one alone is not believed


class Purse:
    """Of one target, or of one draft pool."""

    __slots__ = ("_together", "left_s", "row")

    def __init__(self, together: int = 1) -> None:
        """``together``: tried waits in a row."""
        self.left_s = 0.0
        self.row = self._together = together  # that are still to be made before the next row is saved for

    def earn(self, seconds: float, sessions: int = 1) -> None:
        """A round took so long, beside as many others as ``sessions`` says with it."""
        self.left_s = max(self.left_s, min(self.left_s + SHARE * seconds, SHARE * KEPT_S * max(1, sessions)))

    def pay(self, seconds: float) -> None:
        """What was lost, or (below 0) given back."""
        self.left_s -= seconds

    def affords_wait(self, seconds: float) -> bool:
        """Whether a tried wait that loses ``seconds`` can be paid, and those that are left of its row."""
        return self.left_s >= self.row * seconds

    def pay_wait(self, seconds: float) -> None:
        """A tried wait is made."""
        self.pay(seconds)
        self.row = self.row - 1 or self._together

    def unpay_wait(self, seconds: float) -> None:
        """It is not made after all."""
        self.pay(-seconds)
        self.row = self.row % self._together + 1
