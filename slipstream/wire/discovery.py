"""Discovery: the pods behind Kubernetes services, as they come and go, for the services that dial them.

Rules of discovery:
1. Only an answer of the API server changes what is known. A watch that breaks, a server that is away or speaks
   nonsense changes nothing: the last list stands until there is a new one.
2. A list comes first, then a watch from its version. Whatever ends a watch but its own time (410, an error, an end at
   once) leads to another list, after a random wait below an exponential bound.
3. Every ``resync_s`` there is a list in any case, so that nothing missed is missed for long.
4. Listeners hear the whole set, not what changed: with every change, and every ``repeat_s`` while all is well.
5. Every wait ends: a watch that dies silently is noticed after 70 s (``cluster``).

EndpointSlices as values: which pods stand behind a service, and which of them take work. Format: EndpointSlice of
``discovery.k8s.io``, v1 and v1beta1.

Rules of slices:
1. Answers of the API server are checked before they are used; the error for an invalid slice names the field.
2. A pod is ready when its slice says so (or says nothing) and it is not ending. Where the version tells that it ends
   (``terminating``), it is out at once; where it does not, it leaves when it is no longer ready.
3. A pod that several slices name counts once: IPv4 before IPv6, ready if one of them says so.
4. The port of an address is a number or a name, and must be among the slice's: a service that does not have it has no
   endpoints for us.

The roster: which discovered peers to dial, to give work, to let finish and to forget. Sans-IO.

Rules of the roster:
1. A peer that discovery lists as ready gets work. One that it no longer lists has left: it gets no new work, its
   running work may finish, and after ``leave_s`` it is forgotten.
2. A peer that comes back before that is as it was.
3. A peer that is listed but silent for ``silent_s`` is forgotten, if another one answers. When none answers, the fault
   may be here or everywhere: then no peer is forgotten.

It knows nothing about targets, drafts or what is done with a pod.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from slipstream.base.address import ServiceAddress, service_address
from slipstream.base.errors import ConfigError, RemoteProtocolError, SlipstreamError, Unavailable
from slipstream.observe.log import logger
from slipstream.observe.vitals import Vitals, kept_up

MAX_ENDPOINTS = 1000  # of one slice; Kubernetes allows no more
HEALTHY_S = 5.0  # a watch that lasted so long starts the back-off anew


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One pod behind a service."""

    address: str  # host:port
    pod: str  # what it is, however many addresses it has; "" unknown
    ready: bool
    ending: bool


def slice_name(found: Mapping[str, Any]) -> str:
    """Raises RemoteProtocolError."""
    return _text(_mapping(found.get("metadata"), "metadata").get("name"), "metadata.name")


def resource_version(found: Mapping[str, Any]) -> str:
    """Raises RemoteProtocolError."""
    return _text(_mapping(found.get("metadata"), "metadata").get("resourceVersion"), "metadata.resourceVersion")


def endpoints_of(found: Mapping[str, Any], port: str) -> tuple[Endpoint, ...]:
    """The endpoints of one slice. Raises RemoteProtocolError."""
    if found.get("addressType") not in ("IPv4", "IPv6"):
        return ()  # FQDN: not made by Kubernetes for pods
    number = _port(_items(found.get("ports"), "ports"), port)
    if number is None:
        return ()
    listed = _items(found.get("endpoints"), "endpoints")
    if len(listed) > MAX_ENDPOINTS:
        raise RemoteProtocolError("endpoints", f"{len(listed)} are more than {MAX_ENDPOINTS}")
    return tuple(_endpoint(_mapping(one, "endpoints"), number) for one in listed)


def merged(slices: Iterable[tuple[Endpoint, ...]]) -> dict[str, Endpoint]:
    """The pods of all slices of a service, by address."""
    pods: dict[str, Endpoint] = {}
    for endpoint in (one for endpoints in slices for one in endpoints):
        key = endpoint.pod or endpoint.address
        known = pods.get(key)
        if known is None or _rank(endpoint) > _rank(known):
            pods[key] = endpoint
    return {endpoint.address: endpoint for endpoint in sorted(pods.values(), key=lambda e: e.address)}


def _rank(endpoint: Endpoint) -> tuple[bool, bool]:
    return endpoint.ready, not endpoint.address.startswith("[")


def _endpoint(found: Mapping[str, Any], port: int) -> Endpoint:
    addresses = _items(found.get("addresses"), "endpoints.addresses")
    try:
        # All addresses of one endpoint are the same pod; only the first counts.
        ip = ipaddress.ip_address(_text(addresses[0] if addresses else None, "endpoints.addresses"))
    except ValueError as error:
        raise RemoteProtocolError("endpoints.addresses", str(error)) from error
    conditions = _mapping(found.get("conditions") or {}, "endpoints.conditions")
    ending = conditions.get("terminating") is True
    pod = _mapping(found.get("targetRef") or {}, "endpoints.targetRef").get("uid")
    host = f"[{ip}]" if ip.version == 6 else str(ip)
    return Endpoint(f"{host}:{port}", pod if isinstance(pod, str) else "",
                    conditions.get("ready") is not False and not ending, ending)


def _port(ports: list[Any], wanted: str) -> int | None:
    """The number of the port that is wanted: by number, or by name."""
    for port in (_mapping(one, "ports") for one in ports):
        number = port.get("port")
        if not isinstance(number, int) or not 0 < number < 65536:
            continue
        if wanted in (str(number), port.get("name")) and port.get("protocol", "TCP") == "TCP":
            return number
    return None


def _mapping(value: object, field: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise RemoteProtocolError(field, f"expected an object, found {type(value).__name__}")
    return value


def _items(value: object, field: str) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise RemoteProtocolError(field, f"expected a list, found {type(value).__name__}")
    return value


def _text(value: object, field: str) -> str:
    if not isinstance(value, str) or not value or len(value) > 253:
        raise RemoteProtocolError(field, "expected a name")
    return value


Slice = Mapping[str, Any]


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
    """Discovered peers by address. ``clock``: seconds. ``fixed``: peers that stay, whatever discovery says of them."""

    def __init__(self, clock: Callable[[], float], rules: RosterRules | None = None,
                 fixed: Iterable[str] = ()) -> None:
        self.fixed = set(fixed)
        self._clock = clock
        self._rules = rules or RosterRules()
        self._members: dict[str, Member] = {}

    def seen(self, ready: Mapping[str, str]) -> list[str]:
        """Take what discovery lists. Returns those that are new."""
        now_s = self._clock()
        for address, member in self._members.items():
            if address in ready:
                member.left_s = None
            elif member.left_s is None:
                member.left_s = now_s
        new = [address for address in ready if address not in self._members and address not in self.fixed]
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


Seen = Callable[[Mapping[str, str]], None]  # addresses that take work -> the name that their certificate bears


@dataclass(frozen=True, slots=True)
class WatchRules:
    resync_s: float = 300.0
    repeat_s: float = 15.0
    backoff_min_s: float = 0.2
    backoff_max_s: float = 30.0
    hasty_s: float = 1.0  # one that ends sooner, without a word, is a failure


class SliceServer(Protocol):
    """What is asked of an API server, as it says it; errors are SlipstreamErrors."""

    async def served(self) -> str: ...

    async def list(self, version: str, service: ServiceAddress) -> object: ...

    def watch(self, version: str, service: ServiceAddress, since: str) -> AsyncGenerator[tuple[str, Slice], None]:
        """What happened, in its words, and the slice that it happened to."""
        ...

    async def aclose(self) -> None: ...


class ServiceWatch:
    """Follows one service. ``changed`` is called whenever ``endpoints`` may have."""

    def __init__(self, service: ServiceAddress, server: SliceServer, changed: Callable[[], None],
                 rules: WatchRules) -> None:
        self.service = service
        self.endpoints: dict[str, Endpoint] = {}
        self.fresh = False
        self.known = False  # whether it was ever listed
        self._server = server
        self._changed = changed
        self._rules = rules
        self._slices: dict[str, tuple[Endpoint, ...]] = {}
        self._synced_s = 0.0
        self._problem = ""
        self._log = logger("discovery", service=f"{service.service}.{service.namespace}")

    async def run(self) -> None:
        """Follow until cancelled."""
        loop, attempt = asyncio.get_running_loop(), 0
        while True:
            self._synced_s = loop.time()
            try:
                await self._follow()
                attempt = 0
                continue
            except SlipstreamError as error:
                self._report(error)
            except Exception:  # a bug of ours, or of a listener; what is known stays known
                self._log.exception("following failed")
            self.fresh = False
            attempt = 0 if loop.time() - self._synced_s > HEALTHY_S else min(attempt + 1, 16)
            bound = min(self._rules.backoff_min_s * 2.0**attempt, self._rules.backoff_max_s)
            await asyncio.sleep(random.uniform(0, bound))

    async def _follow(self) -> None:
        """List, then watch until it is time to list again. Raises what ended it before."""
        loop = asyncio.get_running_loop()
        version = await self._server.served()
        since = self._take(await self._server.list(version, self.service))
        self._synced_s = loop.time()
        until_s = self._synced_s + self._rules.resync_s * random.uniform(0.9, 1.1)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until_s):
                while True:
                    since = await self._watch(version, since)

    async def _watch(self, version: str, since: str) -> str:
        """Watch until the server ends it. Returns the version to go on from."""
        loop = asyncio.get_running_loop()
        began_s, heard = loop.time(), False
        async with contextlib.aclosing(self._server.watch(version, self.service, since)) as changes:
            async for kind, one in changes:
                since, heard = self._apply(kind, one), True
        if not heard and loop.time() - began_s < self._rules.hasty_s:
            raise Unavailable("the API server ended the watch at once")
        return since

    def _take(self, listing: object) -> str:
        """Returns the version to watch from."""
        if not isinstance(listing, Mapping) or not isinstance(listing.get("items"), list):
            raise RemoteProtocolError("items", "the API server's list is none")
        version, found = resource_version(listing), dict[str, tuple[Endpoint, ...]]()
        for one in listing["items"]:
            if not isinstance(one, Mapping):
                continue
            name = slice_name(one)
            try:
                found[name] = endpoints_of(one, self.service.port)
            except RemoteProtocolError as error:
                self._log.warning("slice refused; what was known of it stays", slice=name, problem=str(error))
                found[name] = self._slices.get(name, ())
        self._slices = found
        if not self.fresh:
            self._log.info("slices listed", slices=len(found))
        self.fresh, self.known, self._problem = True, True, ""
        self._publish()
        return version

    def _apply(self, kind: str, one: Slice) -> str:
        """Returns the version that the watch has got to."""
        version = resource_version(one)
        if kind == "BOOKMARK":
            return version
        if kind == "DELETED":
            self._slices.pop(slice_name(one), None)
        else:
            self._slices[slice_name(one)] = endpoints_of(one, self.service.port)
        self._publish()
        return version

    def _publish(self) -> None:
        before, self.endpoints = self.endpoints, merged(self._slices.values())
        if before != self.endpoints:
            self._log.info("endpoints", ready=sum(e.ready for e in self.endpoints.values()), listed=len(self.endpoints),
                           ending=sum(e.ending for e in self.endpoints.values()))
        self._changed()

    def _report(self, error: SlipstreamError) -> None:
        # Once for each new problem: an API server may be away for hours.
        if str(error) != self._problem:
            self._problem = str(error)
            self._log.warning("slices not followed; the last list stands", problem=self._problem)


class Directory:
    """What is known of all services that ``addresses`` name; plain addresses among them are ``fixed``."""

    def __init__(self, addresses: Sequence[str], server: SliceServer | None, seen: Seen,
                 rules: WatchRules | None = None) -> None:
        """``server`` may be None where no address names a service."""
        services = [found for found in map(service_address, addresses) if found is not None]
        self._seen = seen
        self._rules = rules or WatchRules()
        assert server is not None or not services
        self._watches = [ServiceWatch(service, server, self._tell, self._rules)
                         for service in dict.fromkeys(services)] if server is not None else []

    @property
    def listed(self) -> int:
        """Pods that services have, ready or not, but for those that end. Of a service that was never listed nobody
        knows how many; one is missed."""
        return sum(sum(not e.ending for e in watch.endpoints.values()) if watch.known else 1 for watch in self._watches)

    @property
    def fresh(self) -> bool:
        """Whether the API server answers for every service."""
        return all(watch.fresh for watch in self._watches)

    async def run(self) -> None:
        """Follow all services until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for watch in self._watches:
                tasks.create_task(watch.run())
            tasks.create_task(self._repeat())

    async def _repeat(self) -> None:
        while True:
            await asyncio.sleep(self._rules.repeat_s)
            if self._watches and self.fresh:
                self._tell()

    def _tell(self) -> None:
        self._seen({endpoint.address: watch.service.host for watch in self._watches
                    for endpoint in watch.endpoints.values() if endpoint.ready})


def fixed(addresses: Sequence[str]) -> tuple[str, ...]:
    """The addresses that are what they say: host:port."""
    return tuple(address for address in addresses if service_address(address) is None)


@asynccontextmanager
async def watching(addresses: Sequence[str], kubeconfig: str, seen: Seen, rules: WatchRules | None = None,
                   vitals: Vitals | None = None) -> AsyncIterator[Directory]:
    """A directory that is kept up while the block runs. ``vitals`` hear if it is not. Raises ConfigError where
    ``addresses`` name a service and no cluster can be found."""
    server = await _server(kubeconfig) if len(fixed(addresses)) < len(addresses) else None
    found = Directory(addresses, server, seen, rules)
    try:
        async with kept_up(found.run(), vitals=vitals):
            yield found
    finally:
        if server is not None:
            await server.aclose()


async def _server(kubeconfig: str) -> SliceServer:
    # Half a second and 40 MB that only those pay who ask Kubernetes.
    try:
        from slipstream.wire.cluster import api_server
    except ImportError as error:
        raise ConfigError("kubernetes:/// addresses need the Kubernetes client: "
                          "pip install 'slipstream[kubernetes]'") from error
    return await api_server(kubeconfig)
