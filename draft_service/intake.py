"""Intake: items of targets that the drafter has not processed yet, separate for each target.

Rules of the intake:
1. Any thread may add items; only the worker's thread takes them. Waiting items of one target are bounded in number and
   bytes; beyond that (``inbox_full``) nothing more is read from the target.
2. A round takes at most ``ROUND_TOKENS`` tokens (or one item) of each target, so no target waits for all input of
   another.
3. While several targets are served, one whose input took more than ``TIME_SHARE`` of the time is skipped for a while.

It knows nothing about sessions, drafters or links.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from slipstream.base.errors import RemoteProtocolError
from slipstream.protocol.conduct import Pace
from slipstream.protocol.messages import Commit, DraftBound, Faults, Features, Open, Peer

ROUND_TOKENS = 16_384  # most tokens taken from one target in a round
TIME_SHARE = 0.5  # share of the time that one of several targets may take
MAX_WAITING_ITEMS, MAX_WAITING_BYTES = 4096, 64 << 20  # of one target that may wait

Received = DraftBound | tuple[int, RemoteProtocolError]


def load_of(item: Received) -> tuple[int, int]:
    """About how many tokens of an item a drafter reads, and how many bytes the item takes."""
    if isinstance(item, Commit):
        count = len(item.tokens)
        return count, 4 * count + (0 if item.features is None else len(item.features.rows))
    if isinstance(item, Features):
        return item.num_rows, 4 * item.num_rows + len(item.rows)
    count = len(item.tokens) if isinstance(item, Open) else 1
    return count, 4 * count


class PeerQueue:
    """The waiting items of one target."""

    __slots__ = ("added_bytes", "items", "pace", "paused_until_s", "round_tokens", "taken_bytes")

    def __init__(self, pace: Pace) -> None:
        self.items: deque[tuple[Received, int, int]] = deque()  # item, tokens, bytes
        self.added_bytes = self.taken_bytes = 0  # each is written by one thread only
        self.pace = pace
        self.paused_until_s = 0.0
        self.round_tokens = 0  # taken in this round


class Intake:
    __slots__ = ("_clock", "_queues", "_shared")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._queues: dict[Peer, PeerQueue] = {}
        self._shared = False  # whether several targets are served

    # From any thread.

    def close(self, peer: Peer) -> None:
        self._queues.pop(peer, None)

    def inbox_full(self, peer: Peer) -> bool:
        if (waiting := self._queues.get(peer)) is None:
            return False
        num_bytes = waiting.added_bytes - waiting.taken_bytes
        return len(waiting.items) >= MAX_WAITING_ITEMS or num_bytes >= MAX_WAITING_BYTES

    def accept(self, peer: Peer, items: Sequence[DraftBound], faults: Faults) -> None:
        """Queue new items of a peer."""
        waiting = self._queues.get(peer)
        if waiting is None:
            waiting = self._queues[peer] = PeerQueue(Pace(TIME_SHARE, self._clock))
        new = [(item, *load_of(item)) for item in (*faults, *items)]
        waiting.added_bytes += sum(size for _, _, size in new)
        waiting.items.extend(new)  # all at once, so that a round takes them together

    # From the worker's thread.

    def take(self, served: int) -> list[tuple[Peer, list[Received]]]:
        """The items of one round. ``served``: number of targets that have sessions."""
        now_s, by_peer = self._clock(), list[tuple[Peer, list[Received]]]()
        for peer, waiting in list(self._queues.items()):
            waiting.round_tokens = 0
            if not waiting.items or now_s < waiting.paused_until_s:
                continue
            items = list[Received]()
            while waiting.items and (not items or waiting.round_tokens + waiting.items[0][1] <= ROUND_TOKENS):
                item, tokens, size = waiting.items.popleft()
                items.append(item)
                waiting.round_tokens += tokens
                waiting.taken_bytes += size
            by_peer.append((peer, items))
        self._shared = served > 1
        return by_peer

    def charge(self, seconds: float) -> None:
        """Charge the ``seconds`` that the drafter took for a round's items to their targets, by tokens."""
        if not self._shared:
            return
        queues = [waiting for waiting in list(self._queues.values()) if waiting.round_tokens]
        tokens = sum(waiting.round_tokens for waiting in queues)
        for waiting in queues:
            waiting.paused_until_s = self._clock() + waiting.pace.pause_after_s(seconds * waiting.round_tokens / tokens)

    def waits(self, peer: Peer) -> bool:
        """Whether items of a peer wait for a later round."""
        waiting = self._queues.get(peer)
        return waiting is not None and bool(waiting.items)

    def wait_s(self) -> float | None:
        """Seconds until a waiting item may be taken; None: none waits."""
        paused_until_s = [waiting.paused_until_s for waiting in list(self._queues.values()) if waiting.items]
        return max(0.0, min(paused_until_s) - self._clock()) if paused_until_s else None
