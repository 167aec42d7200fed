"""What exchanges with drafters take, from a commit to the growth that answers it, as a target believes it.

Rules:
1. Seconds in, seconds out; no clock.
2. Where drafts have devices of their own, an exchange costs the session that waits for it; on shared cores, all.
3. What does not pay is tried again now and then, so that a changed world is seen.

It knows nothing about acceptance or steps.
"""

from __future__ import annotations

from collections import deque
from statistics import median

KEPT = 7  # exchanges of one load
TRY_SHARE = 0.01
TOGETHER = 3


class Tries:
    """Waits that should not pay and are made to hear news: ``together`` in a row, as one alone says little. Saved for
    with TRY_SHARE of all time; what a row leaves is not kept."""

    __slots__ = ("_left", "_saved_s", "_together")

    def __init__(self, together: int) -> None:
        self._left = self._together = together
        self._saved_s = 0.0

    def add(self, seconds: float) -> None:
        """A round took so long."""
        self._saved_s += TRY_SHARE * seconds

    def take(self, seconds: float) -> bool:
        """Whether a try that costs ``seconds`` and those left of its row are affordable. It is paid for then."""
        if self._saved_s < self._left * seconds:
            return False
        self._left -= 1
        self._saved_s -= seconds
        if not self._left:
            self._left, self._saved_s = self._together, 0.0
        return True


class ExchangeTimes:
    """Seconds from a commit to the growth that answers it: mean and mean deviation, as TCP keeps its round trips
    (RFC 6298). Sessions of one drafter may share it."""

    __slots__ = ("_deviation_s", "mean_s")

    def __init__(self) -> None:
        self.mean_s: float | None = None  # None: nothing is known
        self._deviation_s = 0.0

    def forget(self) -> None:
        self.mean_s = None

    def observe(self, seconds: float) -> None:
        if self.mean_s is None:
            self.mean_s, self._deviation_s = seconds, seconds / 2
            return
        self._deviation_s += 0.25 * (abs(seconds - self.mean_s) - self._deviation_s)
        self.mean_s += 0.125 * (seconds - self.mean_s)

    def tries(self) -> Tries:
        """For a session that begins: its own."""
        return Tries(1)

    def try_s(self, usual_s: float) -> float:
        """What one try is taken to cost, with a wait that is ``usual_s`` long."""
        return usual_s

    def toll_s(self, unknown_s: float) -> float:
        """What an exchange takes from other sessions: nothing, drafts have a device of their own."""
        return 0.0

    def usual_s(self, unknown_s: float) -> float:
        """What all but a few exchanges stay below; ``unknown_s`` before the first one."""
        return unknown_s if self.mean_s is None else self.mean_s + 4.0 * self._deviation_s


class RecentTimes:
    """Like ``ExchangeTimes``, of the newest KEPT alone: their median, which one odd exchange does not move and a few
    new ones do. Of fewer the least: the first ones are cold, and a hope that is wrong is soon seen to be."""

    __slots__ = ("_deviation_s", "_kept", "least_s", "mean_s")

    def __init__(self) -> None:
        self.mean_s = self.least_s = self._deviation_s = 0.0
        self._kept: deque[float] = deque(maxlen=KEPT)

    def observe(self, seconds: float) -> None:
        self._kept.append(seconds)
        self.least_s = min(self._kept)
        self.mean_s = median(self._kept) if len(self._kept) == KEPT else self.least_s
        apart_s = [abs(kept - self.mean_s) for kept in self._kept]
        self._deviation_s = sum(apart_s) / len(apart_s) if len(apart_s) > 1 else seconds / 2

    @property
    def usual_s(self) -> float:
        return self.mean_s + 4.0 * self._deviation_s


class ExchangeByLoad:
    """``ExchangeTimes`` where drafts compute on the cores of their target, so that all sessions pay for the tree of
    each. Trees take longer the more sessions there are: times are kept apart for each load, in powers of two, and what
    a smaller one took is believed of a load that nobody has seen. ``load``: the present one."""

    __slots__ = ("_times", "_tries", "load")

    def __init__(self) -> None:
        self.load = 1
        self._times: dict[int, RecentTimes] = {}
        self._tries = Tries(TOGETHER)

    @property
    def _known(self) -> RecentTimes | None:
        level = self.load.bit_length()
        return next((self._times[lower] for lower in range(level, -1, -1) if lower in self._times), None)

    @property
    def mean_s(self) -> float | None:
        return self._known.mean_s if self._known is not None else None

    def tries(self) -> Tries:
        """Those of all sessions: an answer may be over before it could afford one."""
        return self._tries

    def try_s(self, usual_s: float) -> float:
        """As little as the best that is known took: what made it dear may be over."""
        return usual_s if self._known is None else self._known.least_s

    def toll_s(self, unknown_s: float) -> float:
        """What an exchange takes from the others, each of whom could step meanwhile."""
        return (self.load - 1) * (self._times[min(self._times)].mean_s if self._times else unknown_s)

    def forget(self) -> None:
        self._times.clear()

    def observe(self, seconds: float) -> None:
        self._times.setdefault(self.load.bit_length(), RecentTimes()).observe(seconds)

    def usual_s(self, unknown_s: float) -> float:
        return self._known.usual_s if self._known is not None else unknown_s
