"""Waiting: when a session's drafter was asked, when it answered, and until when it is waited for.

Draft latency is learned only from answers to commits that left nothing but the root: what a drafter says to a target
that holds nodes tells how it deepens, not how long an answer takes. It knows no clock and no drafter.
"""

from __future__ import annotations

PENDING = 16  # committed tokens that a drafter takes in together with a tree
ASKED = 4  # commits whose answers may still come


class Waiting:
    """Of one session, since its newest commit."""

    __slots__ = ("_asked", "_heard_s", "_latency_s", "committed_s", "first", "stood", "unasked", "until_s")

    def __init__(self) -> None:
        self.committed_s = 0.0  # when the newest token was committed
        self.until_s = 0.0  # the deadline of the drafter's answer
        self.stood = False  # a step went without it since then, because it waited
        self.first = True  # the drafter that follows has not been awaited yet, or not for long
        self.unasked = 0  # tokens that were committed since a tree was asked for
        self._heard_s: float | None = None  # when the drafter answered for it
        self._asked: dict[int, float] = {}  # base -> when
        self._latency_s: float | None = None  # of an answer that came since the last round

    def attached(self) -> None:
        """A drafter follows from here, and has the whole text to read."""
        self.first, self.unasked = True, 0

    def asks(self) -> None:
        """A tree is asked for. What the drafter has to catch up with takes time that no later answer takes."""
        self.first, self.unasked = self.first or self.unasked > PENDING, 0

    def begin(self, now_s: float, wait_s: float, base: int | None) -> None:
        """The drafter hears of the newest token now. ``base``: what its answer will name, if that tells its latency."""
        self.committed_s, self.until_s, self.stood, self._heard_s = now_s, now_s + wait_s, False, None
        if base is not None and not self.first:
            self._asked[base] = now_s
            if len(self._asked) > ASKED:
                del self._asked[min(self._asked)]

    def heard(self, now_s: float, base: int, newest: int, joined: bool, answered: bool) -> None:
        """Growth for ``base`` came, of which something ``joined`` the tree at ``newest``; ``answered``: it is what was
        waited for."""
        if answered and self._heard_s is None:
            self._heard_s = now_s
        if joined and base < newest:
            # It crossed the commit, so its drafter believes in a tree here: what comes next is one more level of it.
            self._asked.pop(newest, None)
        asked_s = self._asked.pop(base, None)
        if asked_s is not None:
            self._latency_s = max(0.0, now_s - asked_s)

    def stood_s(self, began_s: float) -> float:
        """Seconds that it stood still before the step that began at ``began_s``."""
        if not self.stood:
            return 0.0
        answered_s = self._heard_s if self._heard_s is not None else min(began_s, self.until_s)
        return max(0.0, answered_s - self.committed_s)

    def latency(self) -> float | None:
        """What the newest answer took; told once."""
        latency_s, self._latency_s = self._latency_s, None
        return latency_s
