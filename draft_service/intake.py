"""Intake: what targets have said and the drafter has not heard yet, each target's apart.

Rules:
1. It is filled from any thread and taken from the worker's. What waits of one target is bounded in items and bytes;
   beyond that (``full``) the target is not read any more.
2. A round takes of each target in turn, and of each no more than ``ROUND`` tokens: nobody waits for all that another
   has to say.
3. While others are served too, a target whose texts took more than ``SHARE`` of the time is left out for a while.

It knows nothing about sessions or drafters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from slipstream.base.errors import RemoteProtocolError
from slipstream.protocol.conduct import Pace
from slipstream.protocol.messages import Commit, DraftBound, Faults, Features, Open, Peer

ROUND = 16_384
SHARE = 0.5
MOST_ITEMS, MOST_BYTES = 4096, 64 << 20

Said = DraftBound | tuple[int, RemoteProtocolError]


def tokens_of(item: Said) -> int:
    """What a drafter has to read of it, about."""
    if isinstance(item, Open | Commit):
        return len(item.tokens)
    return item.num_rows if isinstance(item, Features) else 1


def bytes_of(item: Said) -> int:
    """What it keeps of memory, about."""
    states = item.features if isinstance(item, Commit) else item
    return 4 * tokens_of(item) + (len(states.rows) if isinstance(states, Features) else 0)


class Tray:
    """Of one target."""

    __slots__ = ("_came", "_done", "items", "pace", "rests_until_s", "took")

    def __init__(self, pace: Pace) -> None:
        self.items: deque[Said] = deque()
        self._came, self._done = [0, 0], [0, 0]  # items and bytes; each counted by one thread alone
        self.pace = pace
        self.rests_until_s = 0.0
        self.took = 0  # tokens, in this round

    @property
    def full(self) -> bool:
        items, size = (came - done for came, done in zip(self._came, self._done, strict=True))
        return items >= MOST_ITEMS or size >= MOST_BYTES

    def came(self, items: Sequence[Said]) -> None:
        self._came[0] += len(items)
        self._came[1] += sum(map(bytes_of, items))

    def take(self, most: int) -> list[Said]:
        """As many as have ``most`` tokens together; one at least."""
        taken: list[Said] = []
        self.took = 0
        while self.items and (not taken or self.took + tokens_of(self.items[0]) <= most):
            item = self.items.popleft()
            taken.append(item)
            self.took += tokens_of(item)
            self._done[0] += 1
            self._done[1] += bytes_of(item)
        return taken


class Intake:
    __slots__ = ("_clock", "_shared", "_trays")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._trays: dict[Peer, Tray] = {}
        self._shared = False  # whether several targets are served

    # From any thread.

    def close(self, peer: Peer) -> None:
        self._trays.pop(peer, None)

    def full(self, peer: Peer) -> bool:
        tray = self._trays.get(peer)
        return tray is not None and tray.full

    def came(self, peer: Peer, items: Sequence[DraftBound], faults: Faults) -> Callable[[], None]:
        """What the worker's thread has to do about it."""
        tray = self._trays.get(peer)
        if tray is None:
            tray = self._trays[peer] = Tray(Pace(SHARE, self._clock, self._clock))
        said: list[Said] = [*faults, *items]
        tray.came(said)
        return lambda: tray.items.extend(said)

    # From the worker's.

    def take(self, served: int) -> Iterator[tuple[Peer, list[Said]]]:
        """A round's. ``served``: targets that have sessions."""
        now_s = self._clock()
        trays = list(self._trays.items())
        self._shared = max(served, sum(bool(tray.items) for _, tray in trays)) > 1
        for peer, tray in trays:
            tray.took = 0
            if tray.items and now_s >= tray.rests_until_s:
                yield peer, tray.take(ROUND)

    def told(self, seconds: float) -> None:
        """The drafter took so long to hear what the round took."""
        trays = [tray for tray in list(self._trays.values()) if tray.took and self._shared]
        tokens = sum(tray.took for tray in trays)
        for tray in trays:
            tray.rests_until_s = self._clock() + tray.pace.owes(seconds * tray.took / tokens)

    def rests_s(self) -> float | None:
        """Seconds until something that waits may be taken; None: nothing waits."""
        waiting = [tray.rests_until_s for tray in list(self._trays.values()) if tray.items]
        return max(0.0, min(waiting) - self._clock()) if waiting else None
