"""Drafts: the links to all drafts that are known, a fixed list and those that discovery finds, as they come and go.

Rules:
1. Fixed drafts are dialled for ever. Discovered ones follow the roster's rules.
2. A draft that left gets no new session; its link stays until the draft ends it or the roster says that it is over, and
   is not dialled again.
3. All links count into one place.

Runs on the event loop. It knows nothing about sessions or drafting.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from slipstream.base.errors import SlipstreamError
from slipstream.observe.log import logger
from slipstream.observe.vitals import Vitals, kept_up
from slipstream.protocol.messages import Link
from slipstream.protocol.requests import DraftStatus
from slipstream.wire.discovery import Roster, RosterRules, fixed, watching

LOOK_S = 0.5


class Dialling(Link, Protocol):
    """A link that keeps itself up while it runs."""

    def status(self) -> DraftStatus: ...

    async def run(self) -> None: ...


class Leaving(Protocol):
    """The receiver of a draft's leaving: whether the draft may get new sessions."""

    def link_leaving(self, link: Link, leaving: bool) -> None: ...


Connect = Callable[[str, str], Dialling]  # (address, name that its certificate bears; "": the address's own)


@dataclass(slots=True, eq=False)
class Dialled:
    link: Dialling
    task: asyncio.Task[None]
    left: bool = False


class Drafts:
    """``connect`` makes a link, which is then kept up here. Make it on the event loop."""

    def __init__(self, connect: Connect, worker: Leaving, clock: Callable[[], float] = time.monotonic,
                 rules: RosterRules | None = None) -> None:
        self._connect = connect
        self._worker = worker
        self._roster = Roster(clock, rules)
        self._dialled: dict[str, Dialled] = {}
        self._log = logger("wire")

    def fix(self, addresses: Sequence[str]) -> None:
        """Dial these for ever. Raises ConfigError for certificates that cannot be read."""
        self._roster.fixed.update(addresses)
        for address in addresses:
            self._dial(address, "")

    def seen(self, ready: Mapping[str, str]) -> None:
        """What discovery knows: addresses that take work, each with the name that its certificate bears."""
        for address in self._roster.seen(ready):
            try:
                self._dial(address, ready[address])
                self._log.info("draft found", draft=address)
            except SlipstreamError as error:
                self._log.warning("draft not dialled", draft=address, problem=str(error))
                self._roster.forget(address)  # discovery will say it again
        self._tell_who_leaves()

    def statuses(self) -> list[DraftStatus]:
        """From any thread."""
        return [dialled.link.status() for dialled in list(self._dialled.values())]

    @asynccontextmanager
    async def dialled(self, addresses: Sequence[str], kubeconfig: str, expected: Callable[[int], None],
                      vitals: Vitals) -> AsyncIterator[None]:
        """Keep links to all of ``addresses`` up while the block runs. ``expected`` is told how many drafts there should
        be. Raises ConfigError for certificates that cannot be read, and where ``addresses`` name a service and no
        cluster can be found."""
        try:
            self.fix(fixed(addresses))
            async with (watching(addresses, kubeconfig, self.seen, vitals=vitals) as directory,
                        kept_up(self.run(lambda: expected(len(self._roster.fixed) + directory.listed)), vitals=vitals)):
                yield
        finally:
            await self.aclose()

    async def run(self, told: Callable[[], None] = lambda: None, look_s: float = LOOK_S) -> None:
        """Forget those that are over, until cancelled. ``told`` is called at every look."""
        while True:
            self.sweep()
            told()
            await asyncio.sleep(look_s)

    def sweep(self) -> None:
        """Forget those that are over."""
        for address, dialled in self._dialled.items():
            status = dialled.link.status()
            if status.connected or status.given_up:  # one that is refused lives
                self._roster.heard(address)
            if status.connected and dialled.left:  # the link may have come back since, and is as new then
                self._worker.link_leaving(dialled.link, True)
        ended = [address for address, dialled in self._dialled.items()
                 if dialled.left and not dialled.link.status().connected]
        for address in {*self._roster.over(), *ended}:
            self._log.info("draft forgotten", draft=address, left=self._dialled[address].left)
            self._roster.forget(address)
            self._dialled.pop(address).task.cancel()

    async def aclose(self) -> None:
        """End all links."""
        tasks = [dialled.task for dialled in self._dialled.values()]
        self._dialled.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _dial(self, address: str, name: str) -> None:
        link = self._connect(address, name)
        self._dialled[address] = Dialled(link, asyncio.get_running_loop().create_task(link.run()))

    def _tell_who_leaves(self) -> None:
        for address, dialled in self._dialled.items():
            left = self._roster.left(address)
            if left != dialled.left:
                dialled.left = left
                self._worker.link_leaving(dialled.link, left)
                self._log.info("draft left" if left else "draft back", draft=address)
