"""Conduct: how much a peer may send, how much of a thread's time it may take, and for how long a peer that breaks these
limits is not used.

Rules:
1. A draft may send only what was asked for. An opening or a commit allows a drop; if it wants draft tokens, also a
   growth, and further growths if the drafter may run ahead. A frame counts as one item more. A draft that sends more
   breaks the protocol.
2. Items that were allowed and not sent may be sent later, up to ``MAX_UNUSED``: a draft that was stopped may go on.
3. A wrong item costs its session. More than ``MAX_FAULTS`` of them within ``FAULT_PERIOD_S`` cost the stream.
4. A peer that broke the protocol is not used for ``FIRST_PAUSE_S``, twice as long after each further breach (at most
   ``MAX_PAUSE_S``). After ``FORGIVE_AFTER_S`` without a breach the pauses begin at ``FIRST_PAUSE_S`` again.
5. What a peer sends is processed at once, up to ``MAX_BURST_S`` of work; beyond that at a share of the thread's time.
   The rest stays at the sender (flow control). Work is the processor time that the thread used, not its waits. Reason:
   Python runs one thread at a time, so a peer that sends without end would take the engine thread's time.

It knows nothing about sockets or what items mean.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from slipstream.base.errors import RemoteProtocolError
from slipstream.protocol.messages import Commit, DraftBound, Growth, Open, TargetBound

Owner = TypeVar("Owner")
MAX_GROWTHS_AHEAD = 32  # for one opening or commit, by a drafter that runs ahead: levels below are not verified
FREE_ITEMS = 16  # items that are always allowed: drops of sessions that have ended
# All that the largest target asks for at once, each growth in a frame of its own.
MAX_UNUSED = 2 * MAX_GROWTHS_AHEAD * 1024
MAX_FAULTS, FAULT_PERIOD_S = 16, 10.0
FIRST_PAUSE_S, MAX_PAUSE_S, FORGIVE_AFTER_S = 1.0, 64.0, 300.0
MAX_BURST_S = 0.05


def donor(holders: Iterable[Owner], newcomer: Owner) -> Owner | None:
    """Who gives up a place for a ``newcomer`` when all are taken: the holder of most places, if it has at least two
    more than the newcomer, and of many an eighth more; None: nobody. holders: the owner of each place."""
    held = Counter(holders)
    most = max(held, key=lambda owner: held[owner])
    # As many come and go, their numbers are never equal for long: places would change hands all the time.
    return most if held[most] >= held[newcomer] + 2 + held[newcomer] // 8 else None


def donor_by_host(holders: Sequence[Owner], newcomer: Owner, host: Callable[[Owner], str]) -> Owner | None:
    """As ``donor``, among hosts first: one with a stream for each place has them all. Of a host who has most gives."""
    host_of_most = donor(map(host, holders), host(newcomer))
    if host_of_most is not None:
        return Counter(holder for holder in holders if host(holder) == host_of_most).most_common(1)[0][0]
    own_holders = [holder for holder in holders if host(holder) == host(newcomer)]
    return donor(own_holders, newcomer) if own_holders else None


class Allowance:
    """Items that a draft may send on one stream, and how many of them may be growths."""

    __slots__ = ("growths", "remaining")

    def __init__(self) -> None:
        self.remaining = self.growths = FREE_ITEMS

    def add_request(self, items: Iterable[DraftBound]) -> None:
        """Count ``items``, which are sent to the draft: each allows answers."""
        sessions = growths = 0
        for item in items:
            if isinstance(item, Commit | Open):
                sessions += 1
                if item.wanted:
                    growths += MAX_GROWTHS_AHEAD if item.ahead else 1
        # Twice, as each may come in a frame of its own.
        self.remaining = min(MAX_UNUSED, self.remaining + 2 * (sessions + growths))
        self.growths = min(MAX_UNUSED, self.growths + growths)

    def use(self, items: Sequence[TargetBound], faults: int = 0) -> None:
        """Count a received frame with its ``items`` and the number of its ``faults``. Raises RemoteProtocolError beyond
        the allowance."""
        self.remaining -= 1 + len(items) + faults
        self.growths -= sum(isinstance(item, Growth) for item in items)
        if self.remaining < 0 or self.growths < 0:
            raise RemoteProtocolError("items", "more was said than was asked for")


class Pace:
    """Pauses the reading of one stream."""

    def __init__(self, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        """share: of all time, at most 1."""
        self._share, self._clock = share, clock
        self._owed_s = 0.0
        self._at_s = clock()

    def pause_after_s(self, seconds: float) -> float:
        """Count ``seconds`` of work for the stream. Returns for how many seconds to read nothing more of it."""
        now_s = self._clock()
        self._owed_s = max(0.0, self._owed_s - self._share * (now_s - self._at_s)) + seconds
        self._at_s = now_s
        return max(0.0, self._owed_s - MAX_BURST_S) / self._share


class FaultRate:
    """Counts the faults of one stream."""

    __slots__ = ("_at_s", "_faults", "_known")

    def __init__(self) -> None:
        self._faults = self._at_s = 0.0
        self._known = set[str]()

    def is_new(self, field: str) -> bool:
        """Whether ``field`` is wrong for the first time: a faulty peer makes the same mistake in every session."""
        known = field in self._known
        self._known.add(field)
        return not known

    def exceeded(self, now_s: float) -> bool:
        """Count one more fault. Returns whether that is one too many."""
        self._faults = max(0.0, self._faults - (now_s - self._at_s) * MAX_FAULTS / FAULT_PERIOD_S) + 1.0
        self._at_s = now_s
        return self._faults > MAX_FAULTS


class Exclusion:
    """Pauses of one peer, over all its streams. ``until_s``: when the latest one ends."""

    __slots__ = ("_breaches", "until_s")

    def __init__(self) -> None:
        self._breaches, self.until_s = 0, 0.0

    def breach(self, now_s: float) -> float:
        """The peer broke the protocol. Returns for how many seconds it is not used."""
        if now_s - self.until_s > FORGIVE_AFTER_S:
            self._breaches = 0
        pause_s = min(FIRST_PAUSE_S * 2.0**self._breaches, MAX_PAUSE_S)
        self._breaches, self.until_s = min(self._breaches + 1, 16), now_s + pause_s
        return pause_s
