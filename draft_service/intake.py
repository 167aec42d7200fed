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
from collections.abc import Callable, Sequence

from slipstream.base.errors import RemoteProtocolError
from slipstream.protocol.conduct import Pace
from slipstream.protocol.messages import Commit, DraftBound, Faults, Features, Open, Peer

ROUND = 16_384
SHARE = 0.5
MOST_ITEMS, MOST_BYTES = 4096, 64 << 20

Said = DraftBound | tuple[int, RemoteProtocolError]


def weight_of(item: Said) -> tuple[int, int]:
    """Tokens that a drafter has to read of it, and bytes that it keeps; about."""
    if isinstance(item, Commit):
        count = len(item.tokens)
        return count, 4 * count + (0 if item.features is None else len(item.features.rows))
    if isinstance(item, Features):
        return item.num_rows, 4 * item.num_rows + len(item.rows)
    count = len(item.tokens) if isinstance(item, Open) else 1
    return count, 4 * count


class Tray:
    """Of one target."""

    __slots__ = ("came", "done", "items", "pace", "rests_until_s", "took")

    def __init__(self, pace: Pace) -> None:
        self.items: deque[tuple[Said, int, int]] = deque()  # with tokens and bytes
        self.came, self.done = [0, 0], [0, 0]  # items and bytes; each counted by one thread alone
        self.pace = pace
        self.rests_until_s = 0.0
        self.took = 0  # tokens, in this round


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
        if (tray := self._trays.get(peer)) is None:
            return False
        came, done = tray.came, tray.done
        return came[0] - done[0] >= MOST_ITEMS or came[1] - done[1] >= MOST_BYTES

    def came(self, peer: Peer, items: Sequence[DraftBound], faults: Faults) -> Callable[[object], None]:
        """What the worker's thread has to do about it."""
        tray = self._trays.get(peer)
        if tray is None:
            tray = self._trays[peer] = Tray(Pace(SHARE, self._clock))
        waiting, said, came = tray.items, list[tuple[Said, int, int]](), tray.came
        for item in (*faults, *items):
            tokens, size = weight_of(item)
            said.append((item, tokens, size))
            came[0] += 1
            came[1] += size
        return lambda _: waiting.extend(said)

    # From the worker's.

    def take(self, served: int) -> list[tuple[Peer, list[Said]]]:
        """A round's. ``served``: targets that have sessions."""
        now_s, waiting, rounds = self._clock(), 0, list[tuple[Peer, list[Said]]]()
        for peer, tray in list(self._trays.items()):
            tray.took = 0
            waiting += bool(tray.items)
            if not tray.items or now_s < tray.rests_until_s:
                continue
            taken, done = list[Said](), tray.done
            while tray.items and (not taken or tray.took + tray.items[0][1] <= ROUND):  # one at least
                item, tokens, size = tray.items.popleft()
                taken.append(item)
                tray.took += tokens
                done[0] += 1
                done[1] += size
            rounds.append((peer, taken))
        self._shared = max(served, waiting) > 1
        return rounds

    def told(self, seconds: float) -> None:
        """The drafter took so long to hear what the round took."""
        if not self._shared:
            return
        trays = [tray for tray in list(self._trays.values()) if tray.took]
        tokens = sum(tray.took for tray in trays)
        for tray in trays:
            tray.rests_until_s = self._clock() + tray.pace.owes(seconds * tray.took / tokens)

    def rests_s(self) -> float | None:
        """Seconds until something that waits may be taken; None: nothing waits."""
        waiting = [tray.rests_until_s for tray in list(self._trays.values()) if tray.items]
        return max(0.0, min(waiting) - self._clock()) if waiting else None
