"""The roster: who among discovered peers is to be dialled, given work, left alone, forgotten. Sans-IO.

Rules:
1. A peer that discovery lists as ready is wanted. One that it no longer lists has left: it gets no new work, what it
   does may end, and after ``leave_s`` it is over.
2. A peer that comes back before that is as it was.
3. A peer that is listed but silent for ``silent_s`` is over, while another is heard. When nobody is heard it is us, or
   everything: nobody is forgotten then.

It knows nothing about sockets, services or what peers do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RosterRules:
    leave_s: float = 30.0
    silent_s: float = 60.0


@dataclass(slots=True)
class Member:
    """A discovered peer. ``heard_s``: when it last showed that it lives, or was first seen."""

    heard_s: float
    left_s: float | None = None


class Roster:
    """Discovered peers by address. ``clock``: seconds."""

    def __init__(self, clock: Callable[[], float], rules: RosterRules | None = None) -> None:
        self._clock = clock
        self._rules = rules or RosterRules()
        self._members: dict[str, Member] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __contains__(self, address: str) -> bool:
        return address in self._members

    def seen(self, ready: Mapping[str, str]) -> list[str]:
        """Take what discovery lists. Returns those that are new."""
        now_s = self._clock()
        for address, member in self._members.items():
            if address in ready:
                member.left_s = None
            elif member.left_s is None:
                member.left_s = now_s
        new = [address for address in ready if address not in self._members]
        self._members |= {address: Member(now_s) for address in new}
        return new

    def heard(self, address: str) -> None:
        """It showed that it lives."""
        if address in self._members:
            self._members[address].heard_s = self._clock()

    def left(self, address: str) -> bool:
        """Whether it shall get no new work."""
        return address in self._members and self._members[address].left_s is not None

    def over(self) -> list[str]:
        """Those that are to be forgotten, as soon as what they do has ended."""
        now_s = self._clock()
        awake = any(now_s - member.heard_s <= self._rules.silent_s for member in self._members.values())
        return [address for address, member in self._members.items()
                if (member.left_s is not None and now_s - member.left_s > self._rules.leave_s)
                or (awake and now_s - member.heard_s > self._rules.silent_s)]

    def forget(self, address: str) -> None:
        self._members.pop(address, None)
