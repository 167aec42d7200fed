"""The roster: which discovered peers to dial, to give work, to let finish and to forget. Sans-IO.

Rules:
1. A peer that discovery lists as ready gets work. One that it no longer lists is delisted: it gets no new work, its
   running work may finish, and after ``forget_after_s`` it is forgotten.
2. A peer that comes back before that is as it was.
3. A peer that is silent, and in no new list, for ``silent_s`` is forgotten, if another one answers: the last list is
   old then. When none answers, the fault may be here or everywhere: then no peer is forgotten. Nor is one that new
   lists have: it would be found again, and told of anew, each minute.

It knows nothing about targets, drafts or what is done with a pod.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RosterRules:
    forget_after_s: float = 30.0
    silent_s: float = 60.0


@dataclass(slots=True)
class Member:
    """A discovered peer. ``alive_s``: when it last answered, or was first listed; ``listed_s``: the time of the newest
    list that has it; ``delisted_s``: since when it is not listed."""

    alive_s: float
    listed_s: float
    delisted_s: float | None = None


class Roster:
    """Discovered peers by address. ``clock``: seconds. ``fixed``: peers that stay, whatever discovery says of them."""

    def __init__(self, clock: Callable[[], float], rules: RosterRules | None = None,
                 fixed: Iterable[str] = ()) -> None:
        self.fixed = set(fixed)
        self._clock = clock
        self._rules = rules or RosterRules()
        self._members: dict[str, Member] = {}

    def update(self, ready: Mapping[str, str]) -> tuple[list[str], dict[str, bool]]:
        """Take the list of discovery. Returns the addresses that are new, and of the others those that are delisted
        since the last list (True) or listed again (False)."""
        now_s = self._clock()
        changed = {address: address not in ready for address, member in self._members.items()
                   if (member.delisted_s is None) is not (address in ready)}
        for address, delisted in changed.items():
            self._members[address].delisted_s = now_s if delisted else None
        new = [address for address in ready if address not in self._members and address not in self.fixed]
        self._members |= {address: Member(now_s, now_s) for address in new}
        for address in self._members.keys() & ready.keys():
            self._members[address].listed_s = now_s
        return new, changed

    def mark_alive(self, address: str) -> None:
        """The peer has answered."""
        if address in self._members:
            self._members[address].alive_s = self._clock()

    def is_delisted(self, address: str) -> bool:
        """Whether discovery no longer lists it, so that it gets no new work."""
        return address in self._members and self._members[address].delisted_s is not None

    def expired(self) -> list[str]:
        """The peers to forget as soon as their running work has ended."""
        now_s = self._clock()
        any_alive = any(now_s - member.alive_s <= self._rules.silent_s for member in self._members.values())
        return [address for address, member in self._members.items()
                if (member.delisted_s is not None and now_s - member.delisted_s > self._rules.forget_after_s)
                or (any_alive and now_s - max(member.alive_s, member.listed_s) > self._rules.silent_s)]

    def forget(self, address: str) -> None:
        self._members.pop(address, None)
