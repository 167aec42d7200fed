"""The targets that are known: a fixed list, and those that discovery finds, as they come and go.

Rules:
1. Fixed targets stay, whatever happens to them. Discovered ones follow the roster's rules.
2. A target that left gets new work only when no other answers; it is closed when its last answer is over.

It knows nothing about how targets are found, chosen or polled.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from router_service.admission import Limit
from slipstream.base.errors import SlipstreamError
from slipstream.observe.log import logger
from slipstream.protocol.requests import Backend, TargetInfo
from slipstream.wire.roster import Roster, RosterRules


class RemoteBackend(Backend, Protocol):
    """A backend that was opened for us."""

    async def aclose(self) -> None: ...


Connect = Callable[[str, str], RemoteBackend]  # (address, name that its certificate bears)


@dataclass(slots=True, eq=False)
class Target:
    """What is known of one target."""

    name: str
    backend: Backend
    close: Callable[[], Awaitable[None]] | None = None  # of those that were discovered
    left: bool = False
    info: TargetInfo | None = None
    in_flight: int = 0
    in_flight_at_poll: int = 0
    missed_polls: int = 0
    failures: int = 0
    ejections: int = 0
    ejected_until: float = 0.0
    problem: str = "not asked yet"
    ready: bool = False  # it answers polls, fits and is not draining
    draining: bool = False
    drafted: bool = False  # it has a draft connected
    gone: bool = False  # it answers no polls
    awaited: set[Limit] = field(default_factory=set)  # by answers without their first piece

    @property
    def load(self) -> int:
        reported = self.info.sessions_running + self.info.sessions_waiting if self.info else 0
        return max(reported + self.in_flight - self.in_flight_at_poll, self.in_flight)

    def answered(self, info: TargetInfo, problem: str) -> None:
        """A poll. ``problem``: why it gets no work all the same; "" for none."""
        self.info, self.problem = info, problem
        self.draining, self.ready = info.draining, not problem and not info.draining
        self.drafted = any(draft.connected for draft in info.drafts)
        self.missed_polls, self.in_flight_at_poll, self.gone = 0, self.in_flight, False

    def missed(self, problem: str) -> None:
        """A poll that it did not answer."""
        self.missed_polls += 1
        self.problem, self.ready = problem, False

    def lose(self) -> None:
        """It answers nobody: those who wait for their first piece need wait no longer."""
        self.gone = True
        for limit in list(self.awaited):
            limit.fire()

    def affinity(self, prefix: bytes) -> bytes:
        """The rendezvous score of this target for prompts that begin with ``prefix``."""
        return hashlib.blake2b(prefix, digest_size=8, key=self.name.encode()[:64]).digest()


class Targets:
    """All targets that are ``known``, by name. ``connect`` opens one that is discovered; without it none may be."""

    def __init__(self, fixed: Mapping[str, Backend], connect: Connect | None = None,
                 clock: Callable[[], float] = time.monotonic, rules: RosterRules | None = None) -> None:
        self.known = {name: Target(name, backend) for name, backend in fixed.items()}
        self._fixed = frozenset(fixed)
        self._connect = connect
        self._roster = Roster(clock, rules)
        self._log = logger("balance")

    def __iter__(self) -> Iterator[Target]:
        return iter(list(self.known.values()))

    def seen(self, ready: Mapping[str, str]) -> None:
        """What discovery knows: addresses that take work, each with the name that its certificate bears."""
        for address in self._roster.seen({a: name for a, name in ready.items() if a not in self._fixed}):
            self._add(address, ready[address])
        for target in self.known.values():
            left = self._roster.left(target.name)
            if left != target.left:
                target.left = left
                self._log.info("target left" if left else "target back", target=target.name, running=target.in_flight)

    def heard(self, target: Target) -> None:
        """It answered."""
        self._roster.heard(target.name)

    async def sweep(self) -> list[Target]:
        """Close and forget those that are over. Returns them."""
        over = [self.known[name] for name in self._roster.over() if self.known[name].in_flight == 0]
        for target in over:
            self._log.info("target forgotten", target=target.name, left=target.left)
            self._roster.forget(target.name)
            del self.known[target.name]
            await _close(target)
        return over

    async def aclose(self) -> None:
        """Close those that were discovered."""
        for target in self:
            await _close(target)

    def _add(self, address: str, name: str) -> None:
        assert self._connect is not None
        try:
            backend = self._connect(address, name)
        except SlipstreamError as error:
            self._log.warning("target not opened", target=address, problem=str(error))
            self._roster.forget(address)  # discovery will say it again
            return
        self.known[address] = Target(address, backend, backend.aclose)
        self._log.info("target found", target=address)


async def _close(target: Target) -> None:
    if target.close is not None:
        await target.close()
