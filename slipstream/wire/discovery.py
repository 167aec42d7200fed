"""Discovery: the pods behind Kubernetes services, as they come and go, for the services that dial them.

Rules:
1. Only a valid answer of the API server changes what is known. A broken watch, an unreachable server or an invalid
   answer changes nothing: the last list stays in use until there is a new one.
2. A list comes first, then a watch from its version. If a watch ends for any reason but its own time limit (410, an
   error, an end at once), another list follows after a random wait below an exponential bound.
3. Every ``resync_s`` there is a list in any case, so that a missed change is not missed for long.
4. Listeners get the whole set, not the changes: at every change, and every ``repeat_s`` while in sync.
5. Every wait ends: a watch that dies silently is noticed after 70 s (``cluster``).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from slipstream.base.address import ServiceAddress, service_address
from slipstream.base.errors import ConfigError, RemoteProtocolError, SlipstreamError, Unavailable
from slipstream.observe.log import logger
from slipstream.observe.vitals import Vitals, background_tasks
from slipstream.wire.slices import Endpoint, Slice, merge_slices, parse_endpoints, resource_version, slice_name

HEALTHY_S = 5.0  # a watch that lasts longer resets the back-off

OnReady = Callable[[Mapping[str, str]], None]  # addresses of ready pods -> the name in their certificate


@dataclass(frozen=True, slots=True)
class WatchRules:
    resync_s: float = 300.0
    repeat_s: float = 15.0
    backoff_min_s: float = 0.2
    backoff_max_s: float = 30.0
    min_watch_s: float = 1.0  # a watch that ends sooner without an event is a failure


class SliceServer(Protocol):
    """An API server; its answers are unchecked, its errors are SlipstreamErrors."""

    async def api_version(self) -> str: ...

    async def list(self, version: str, service: ServiceAddress) -> object: ...

    def watch(self, version: str, service: ServiceAddress, since: str) -> AsyncGenerator[tuple[str, Slice], None]:
        """Events: their type in Kubernetes' words, and the slice."""
        ...

    async def aclose(self) -> None: ...


class ServiceWatch:
    """Follows one service. ``on_change`` is called whenever ``endpoints`` may have changed."""

    def __init__(self, service: ServiceAddress, server: SliceServer, on_change: Callable[[], None],
                 rules: WatchRules) -> None:
        self.service = service
        self.endpoints: dict[str, Endpoint] = {}
        self.in_sync = False
        self.was_listed = False  # at least once
        self._server = server
        self._on_change = on_change
        self._rules = rules
        self._slices: dict[str, tuple[Endpoint, ...]] = {}
        self._synced_s = 0.0
        self._is_listed = False  # in this turn of list and watch
        self._problem = False, ""  # the latest that was told: whether there was a list, and what was wrong
        self._list_is_news = True  # the next one is logged
        self._log = logger("discovery", service=f"{service.service}.{service.namespace}")

    async def run(self) -> None:
        """Follow until cancelled."""
        loop, attempt = asyncio.get_running_loop(), 0
        while True:
            self._synced_s, self._is_listed = loop.time(), False
            try:
                await self._list_and_watch()
                attempt = 0
                continue
            except SlipstreamError as error:
                self._report(error)
            except Exception:  # a bug of ours, or of a listener; what is known stays known
                self._log.exception("following failed")
            self.in_sync = False
            attempt = 0 if loop.time() - self._synced_s > HEALTHY_S else min(attempt + 1, 16)
            bound = min(self._rules.backoff_min_s * 2.0**attempt, self._rules.backoff_max_s)
            await asyncio.sleep(random.uniform(0, bound))

    async def _list_and_watch(self) -> None:
        """List, then watch until it is time to list again. Raises the error that ended it before."""
        loop = asyncio.get_running_loop()
        version = await self._server.api_version()
        since = self._apply_list(await self._server.list(version, self.service))
        self._synced_s = loop.time()
        until_s = self._synced_s + self._rules.resync_s * random.uniform(0.9, 1.1)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until_s):
                while True:
                    since = await self._watch(version, since)

    async def _watch(self, version: str, since: str) -> str:
        """Watch until the server ends it. Returns the version to continue from."""
        loop = asyncio.get_running_loop()
        began_s, got_event = loop.time(), False
        async with contextlib.aclosing(self._server.watch(version, self.service, since)) as changes:
            async for kind, item in changes:
                since, got_event = self._apply_event(kind, item), True
        if not got_event and loop.time() - began_s < self._rules.min_watch_s:
            raise Unavailable("the API server ended the watch at once")
        return since

    def _apply_list(self, listing: object) -> str:
        """Returns the version to watch from."""
        if not isinstance(listing, Mapping) or not isinstance(listing.get("items"), list):
            raise RemoteProtocolError("items", "the API server's list is none")
        version, found = resource_version(listing), dict[str, tuple[Endpoint, ...]]()
        for item in listing["items"]:
            if not isinstance(item, Mapping):
                continue
            name = slice_name(item)
            try:
                found[name] = parse_endpoints(item, self.service.port)
            except RemoteProtocolError as error:
                self._log.warning("slice refused; what was known of it stays", slice=name, problem=str(error))
                found[name] = self._slices.get(name, ())
        self._slices = found
        if self._list_is_news:
            self._log.info("slices listed", slices=len(found))
            self._list_is_news = False
        if not self._problem[0]:
            self._problem = False, ""
        self.in_sync = self.was_listed = self._is_listed = True
        self._publish()
        return version

    def _apply_event(self, kind: str, item: Slice) -> str:
        """Returns the version of the event, from which a watch can continue."""
        version = resource_version(item)
        if kind == "BOOKMARK":
            return version
        if kind == "DELETED":
            self._slices.pop(slice_name(item), None)
        else:
            self._slices[slice_name(item)] = parse_endpoints(item, self.service.port)
        self._publish()
        return version

    def _publish(self) -> None:
        before, self.endpoints = self.endpoints, merge_slices(self._slices.values())
        if before != self.endpoints:
            self._log.info("endpoints", ready=sum(e.ready for e in self.endpoints.values()), listed=len(self.endpoints),
                           ending=sum(e.terminating for e in self.endpoints.values()))
        self._on_change()

    def _report(self, error: SlipstreamError) -> None:
        # Once for each new problem: an API server may be away for hours, or list and never let watch.
        watched_s = asyncio.get_running_loop().time() - self._synced_s
        problem = self._is_listed, str(error)
        if problem != self._problem or (self._is_listed and watched_s > HEALTHY_S):
            self._problem, self._list_is_news = problem, True
            self._log.warning("slices not followed; the last list stands", problem=problem[1])


class Directory:
    """The ready pods of all services that ``addresses`` name. Plain addresses among them (``fixed_addresses``) are
    ignored."""

    def __init__(self, addresses: Sequence[str], server: SliceServer | None, on_ready: OnReady,
                 rules: WatchRules | None = None) -> None:
        """``server`` may be None where no address names a service."""
        services = [service for service in map(service_address, addresses) if service is not None]
        self._on_ready = on_ready
        self._rules = rules or WatchRules()
        assert server is not None or not services
        self._watches = [ServiceWatch(service, server, self._publish, self._rules)
                         for service in dict.fromkeys(services)] if server is not None else []

    @property
    def num_listed(self) -> int:
        """Number of pods, ready or not, without terminating ones. A service that was never listed counts as one pod."""
        return sum(sum(not e.terminating for e in watch.endpoints.values()) if watch.was_listed else 1
                   for watch in self._watches)

    @property
    def in_sync(self) -> bool:
        """Whether the lists of all services are up to date."""
        return all(watch.in_sync for watch in self._watches)

    async def run(self) -> None:
        """Follow all services until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for watch in self._watches:
                tasks.create_task(watch.run())
            tasks.create_task(self._publish_regularly())

    async def _publish_regularly(self) -> None:
        while True:
            await asyncio.sleep(self._rules.repeat_s)
            if self._watches and self.in_sync:
                self._publish()

    def _publish(self) -> None:
        self._on_ready({endpoint.address: watch.service.host for watch in self._watches
                        for endpoint in watch.endpoints.values() if endpoint.ready})


def fixed_addresses(addresses: Sequence[str]) -> tuple[str, ...]:
    """The addresses of the form host:port."""
    return tuple(address for address in addresses if service_address(address) is None)


@asynccontextmanager
async def watch_services(addresses: Sequence[str], kubeconfig: str, on_ready: OnReady, rules: WatchRules | None = None,
                         vitals: Vitals | None = None) -> AsyncIterator[Directory]:
    """A directory that is kept up to date while the block runs. ``vitals`` get an error that ends it. Raises
    ConfigError where ``addresses`` name a service and no cluster can be found."""
    server = await _server(kubeconfig) if len(fixed_addresses(addresses)) < len(addresses) else None
    directory = Directory(addresses, server, on_ready, rules)
    try:
        async with background_tasks(directory.run(), vitals=vitals):
            yield directory
    finally:
        if server is not None:
            await server.aclose()


async def _server(kubeconfig: str) -> SliceServer:
    # Imported only if needed: it takes half a second and 40 MB.
    try:
        from slipstream.wire.cluster import api_server
    except ImportError as error:
        raise ConfigError("kubernetes:/// addresses need the Kubernetes client: "
                          "pip install 'slipstream[kubernetes]'") from error
    return await api_server(kubeconfig)
