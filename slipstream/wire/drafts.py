"""Drafts: the links to all drafts that are known, a fixed list and those that discovery finds, as they come and go.

Rules:
1. Fixed drafts are dialled for ever. Discovered ones follow the roster's rules.
2. A delisted draft gets no new session; its link stays until the draft ends it or the roster lets it expire, and is not
   dialled again.

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
from slipstream.observe.vitals import Vitals, background_tasks
from slipstream.protocol.messages import Link
from slipstream.protocol.requests import DraftStatus
from slipstream.wire.discovery import fixed_addresses, watch_services
from slipstream.wire.roster import Roster, RosterRules

SWEEP_S = 0.5


class RunnableLink(Link, Protocol):
    """A link that keeps itself up while it runs."""

    def status(self) -> DraftStatus: ...

    async def run(self) -> None: ...


class LeavingListener(Protocol):
    """Is notified when a draft is delisted (``leaving``: it gets no new sessions) or listed again."""

    def link_leaving(self, link: Link, leaving: bool) -> None: ...


Connect = Callable[[str, str], RunnableLink]  # (address, name in its certificate; "": the address's own)


@dataclass(slots=True, eq=False)
class Dialled:
    link: RunnableLink
    task: asyncio.Task[None]


class Drafts:
    """``connect`` makes a link, which is then kept up here. Make it on the event loop."""

    def __init__(self, connect: Connect, worker: LeavingListener, clock: Callable[[], float] = time.monotonic,
                 rules: RosterRules | None = None) -> None:
        self._connect = connect
        self._worker = worker
        self._roster = Roster(clock, rules)
        self._dialled: dict[str, Dialled] = {}
        self._log = logger("wire")

    def dial_fixed(self, addresses: Sequence[str]) -> None:
        """Dial these for ever. Raises ConfigError for certificates that cannot be read."""
        self._roster.fixed.update(addresses)
        for address in addresses:
            self._dial(address, "")

    def update(self, ready: Mapping[str, str]) -> None:
        """Discovery's present list: addresses of ready drafts, each with the name in its certificate."""
        new, changed = self._roster.update(ready)
        for address in new:
            try:
                self._dial(address, ready[address])
                self._log.info("draft found", draft=address)
            except SlipstreamError as error:
                self._log.warning("draft not dialled", draft=address, problem=str(error))
                self._roster.forget(address)  # discovery will list it again
        for address, delisted in changed.items():
            self._worker.link_leaving(self._dialled[address].link, delisted)
            self._log.info("draft left" if delisted else "draft back", draft=address)

    def statuses(self) -> list[DraftStatus]:
        """From any thread."""
        return [dialled.link.status() for dialled in list(self._dialled.values())]

    @asynccontextmanager
    async def kept_connected(self, addresses: Sequence[str], kubeconfig: str, on_expected: Callable[[int], None],
                             vitals: Vitals) -> AsyncIterator[None]:
        """Keep links to all of ``addresses`` up while the block runs. ``on_expected`` gets the number of drafts that
        there should be. Raises ConfigError for certificates that cannot be read, and where ``addresses`` name a service
        and no cluster can be found."""
        try:
            self.dial_fixed(fixed_addresses(addresses))
            async with watch_services(addresses, kubeconfig, self.update, vitals=vitals) as directory:
                sweeping = self.run(lambda: on_expected(len(self._roster.fixed) + directory.num_listed))
                async with background_tasks(sweeping, vitals=vitals):
                    yield
        finally:
            await self.aclose()

    async def run(self, on_sweep: Callable[[], None] = lambda: None, sweep_s: float = SWEEP_S) -> None:
        """Sweep every ``sweep_s``, until cancelled. ``on_sweep`` is called after each sweep."""
        while True:
            self.sweep()
            on_sweep()
            await asyncio.sleep(sweep_s)

    def sweep(self) -> None:
        """Forget drafts that have expired or, once delisted, are no longer connected."""
        for address, dialled in self._dialled.items():
            status = dialled.link.status()
            if status.connected or status.given_up:  # a draft that refuses is alive
                self._roster.mark_alive(address)
            if status.connected and self._roster.is_delisted(address):  # again: a new stream of the link is not leaving
                self._worker.link_leaving(dialled.link, True)
        ended = [address for address, dialled in self._dialled.items()
                 if self._roster.is_delisted(address) and not dialled.link.status().connected]
        for address in {*self._roster.expired(), *ended}:
            self._log.info("draft forgotten", draft=address, left=self._roster.is_delisted(address))
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
