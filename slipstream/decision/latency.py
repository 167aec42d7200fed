"""Draft latency: what an exchange takes, from a commit to the growth that answers it, as a target believes it.

Where drafts have devices of their own, an exchange costs the session that waits for it; on shared cores, all.
Seconds in, seconds out; no clock. It knows nothing about acceptance or steps.
"""

from __future__ import annotations

from collections import deque
from statistics import median

KEPT = 7  # exchanges of one load: one odd exchange does not move their median, and a few new ones do
MOMENT = 0.1  # of an exchange: it is waited for at least so much longer than usual


class DraftLatency:
    """Seconds from a commit to the growth that answers it, of the newest KEPT of each load: their median, and of fewer
    the least, as the first ones are cold and a hope that is wrong is soon seen to be.

    On ``shared`` cores trees take longer the more sessions there are: loads are told apart in powers of two, and what a
    smaller one took is believed of a load that nobody has seen. Elsewhere all loads are one."""

    __slots__ = ("_known", "_load", "_seen", "shared")

    def __init__(self, shared: bool = False) -> None:
        self.shared = shared
        self._load = 1
        self._seen: dict[int, Latencies] = {}
        self._known: Latencies | None = None  # of the present load, or of the next smaller one that was seen

    @property
    def load(self) -> int:
        """Sessions that run."""
        return self._load

    @load.setter
    def load(self, sessions: int) -> None:
        self._load = sessions
        self._look_up()

    @property
    def mean_s(self) -> float | None:
        """None: nothing is known."""
        return self._known.mean_s if self._known is not None else None

    def least_s(self, unknown_s: float) -> float:
        """The best that is known: what made the others dear may be over."""
        return self._known.least_s if self._known is not None else unknown_s

    def usual_s(self, unknown_s: float) -> float:
        """What all but a few exchanges stay below."""
        return self._known.usual_s if self._known is not None else unknown_s

    def toll_s(self, unknown_s: float) -> float:
        """What an exchange takes from the others, each of whom could step meanwhile: nothing, where drafts have a
        device of their own."""
        if not self.shared:
            return 0.0
        return (self._load - 1) * (self._seen[min(self._seen)].mean_s if self._seen else unknown_s)

    def observe(self, seconds: float) -> None:
        self._seen.setdefault(self._level(), Latencies()).observe(seconds)
        self._look_up()

    def forget(self) -> None:
        self._seen.clear()
        self._known = None

    def _level(self) -> int:
        return self._load.bit_length() if self.shared else 0

    def _look_up(self) -> None:
        seen = [level for level in self._seen if level <= self._level()]
        self._known = self._seen[max(seen)] if seen else None


class Latencies:
    """Of one load."""

    __slots__ = ("_kept", "least_s", "mean_s", "usual_s")

    def __init__(self) -> None:
        self.mean_s = self.least_s = self.usual_s = 0.0
        self._kept: deque[float] = deque(maxlen=KEPT)

    def observe(self, seconds: float) -> None:
        self._kept.append(seconds)
        self.least_s = min(self._kept)
        self.mean_s = median(self._kept) if len(self._kept) == KEPT else self.least_s
        apart_s = [abs(kept - self.mean_s) for kept in self._kept]
        deviation_s = sum(apart_s) / len(apart_s) if len(apart_s) > 1 else seconds / 2
        # As TCP keeps its round trips (RFC 6298); where all take the same, a moment more is no surprise.
        self.usual_s = self.mean_s + max(4.0 * deviation_s, MOMENT * self.mean_s)
