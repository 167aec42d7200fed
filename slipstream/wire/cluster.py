"""The API server of Kubernetes: the slices of one service, listed and watched.

Rules:
1. Whatever goes wrong is Unavailable with a sentence; a version of the list that the server has forgotten (410) is
   Outdated, and calls for another list.
2. A watch ends by itself after ``WATCH_S``; one that is silent for longer than that is taken for dead.
3. Credentials are those of the pod (its service account, read again as Kubernetes renews them), or of a kubeconfig.

EndpointSlices of Kubernetes as values: which pods stand behind a service, and which of them take work.

Rules:
1. What the API server says is checked before it is used; a slice that makes no sense is refused by field.
2. A pod is ready when its slice says so (or says nothing) and it is not ending. Where the version tells that it ends
   (``terminating``), it is out at once; where it does not, it leaves when it is no longer ready.
3. A pod that several slices name counts once: IPv4 before IPv6, ready if one of them says so.
4. The port of an address is a number or a name, and must be among the slice's: a service that does not have it has no
   endpoints for us.
 Format: EndpointSlice of ``discovery.k8s.io``, v1 and v1beta1.

The only importer of the kubernetes client. It knows nothing about what endpoints mean.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from kubernetes.aio.client.api.custom_objects_api import CustomObjectsApi
from kubernetes.aio.client.api.discovery_api import DiscoveryApi
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.config import ConfigException, load_incluster_config, load_kube_config

from slipstream.base.address import SCHEME, SERVICE
from slipstream.base.errors import ConfigError, RemoteProtocolError, Unavailable

MAX_ENDPOINTS = 1000  # of one slice; Kubernetes allows no more


@dataclass(frozen=True, slots=True)
class ServiceAddress:
    """A service of the cluster. ``port``: a number, or the name of one of its ports."""

    service: str
    namespace: str
    port: str

    @property
    def host(self) -> str:
        """The name that certificates of its pods bear."""
        return f"{self.service}.{self.namespace}.svc"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One pod behind a service."""

    address: str  # host:port
    pod: str  # what it is, however many addresses it has; "" unknown
    ready: bool
    ending: bool


def service_address(address: str) -> ServiceAddress | None:
    """The service that ``kubernetes:///SERVICE.NAMESPACE:PORT`` names; None for a plain host:port. ConfigError."""
    if not address.startswith(SCHEME):
        return None
    found = SERVICE.fullmatch(address)
    if found is None:
        raise ConfigError(f"{address!r} is not kubernetes:///SERVICE.NAMESPACE:PORT")
    return ServiceAddress(*found.groups())


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


GROUP = "discovery.k8s.io"
VERSIONS = ("v1", "v1beta1")  # best first
REQUEST_S = 10.0
WATCH_S = 60
SPARE_S = 10.0  # for the server to end its watch
KINDS = ("ADDED", "MODIFIED", "DELETED", "BOOKMARK")

Slice = Mapping[str, Any]


class Outdated(Unavailable):
    """The server no longer knows the version that a watch should go on from."""


@dataclass(frozen=True, slots=True)
class Listing:
    """All slices of a service, and the version to watch from."""

    version: str
    slices: tuple[Slice, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """One event of a watch. ``kind``: one of KINDS."""

    kind: str
    slice: Slice


class ApiServer:
    """An API server. Make it on the event loop that uses it; ``aclose`` when done."""

    def __init__(self, configuration: Configuration) -> None:
        configuration.client_session_kwargs = {"trust_env": False}  # no proxy from the environment
        self._client = ApiClient(configuration)
        self._slices = CustomObjectsApi(self._client)
        self._groups = DiscoveryApi(self._client)

    async def served(self) -> str:
        """The version of EndpointSlices to ask for. Raises Unavailable."""
        async with _failures("which versions of discovery.k8s.io it serves"):
            group = await self._groups.get_api_group()
        known = {version.version for version in group.versions}
        for version in VERSIONS:
            if version in known:
                return version
        raise Unavailable(f"the API server serves discovery.k8s.io in none of {', '.join(VERSIONS)}")

    async def list(self, version: str, service: ServiceAddress) -> Listing:
        """Raises Unavailable or RemoteProtocolError."""
        async with _failures(f"list the slices of {service.service}"):
            found = await self._slices.list_namespaced_custom_object(
                GROUP, version, service.namespace, "endpointslices", label_selector=_selector(service))
        if not isinstance(found, Mapping) or not isinstance(found.get("items"), list):
            raise RemoteProtocolError("items", "the API server's list is none")
        items = [item for item in found["items"] if isinstance(item, Mapping)]
        return Listing(resource_version(found), tuple(items))

    async def watch(self, version: str, service: ServiceAddress, since: str) -> AsyncGenerator[Change, None]:
        """What changes after ``since``. Ends when the server ends it; raises Unavailable, Outdated or
        RemoteProtocolError."""
        async with _failures(f"watch the slices of {service.service}"):
            response = await self._slices.list_namespaced_custom_object_without_preload_content(
                GROUP, version, service.namespace, "endpointslices", label_selector=_selector(service), watch=True,
                allow_watch_bookmarks=True, resource_version=since, timeout_seconds=WATCH_S,
                _request_timeout=WATCH_S + SPARE_S)
        try:
            if response.status != 200:
                raise _refused(response.status, response.reason or "", "watch")
            while True:
                async with _failures("read its watch", WATCH_S + SPARE_S):
                    line = await response.content.readline()
                if not line:
                    return
                yield _change(line)
        finally:
            response.close()

    async def aclose(self) -> None:
        await self._client.close()


async def api_server(kubeconfig: str = "") -> ApiServer:
    """The API server of a kubeconfig, or ("") of the cluster that this pod runs in. Raises ConfigError."""
    configuration = Configuration()
    try:
        if kubeconfig:
            await load_kube_config(config_file=kubeconfig, client_configuration=configuration, persist_config=False)
        else:
            load_incluster_config(client_configuration=configuration)
        return ApiServer(configuration)
    except (ConfigException, OSError, ssl.SSLError) as error:
        raise ConfigError(f"kubernetes:/// addresses need a cluster: {error}; run in a pod whose service account token "
                          "is mounted, or set wire.kubeconfig") from error


def _selector(service: ServiceAddress) -> str:
    return f"kubernetes.io/service-name={service.service}"


def _change(line: bytes) -> Change:
    try:
        event = json.loads(line)
        kind, found = event["type"], event["object"]
    except (ValueError, KeyError, TypeError) as error:
        raise RemoteProtocolError("watch", "the API server sent what is no event") from error
    if not isinstance(found, Mapping):
        raise RemoteProtocolError("watch.object", "is none")
    if kind == "ERROR":
        raise _refused(found.get("code"), str(found.get("reason", "")), "watch")
    if kind not in KINDS:
        raise RemoteProtocolError("watch.type", "is unknown")
    return Change(kind, found)


def _refused(status: object, reason: str, what: str) -> Unavailable:
    if status == 410:
        return Outdated("the API server has forgotten the version that was watched")
    hint = "; may this service account get, list and watch endpointslices?" if status in (401, 403) else ""
    return Unavailable(f"the API server refused to {what}: {status} {reason}{hint}")


@asynccontextmanager
async def _failures(what: str, within_s: float = REQUEST_S) -> AsyncIterator[None]:
    """Turns all that can go wrong with a request into Unavailable."""
    try:
        async with asyncio.timeout(within_s):
            yield
    except ApiException as error:
        raise _refused(error.status, str(error.reason), what) from error
    except TimeoutError as error:
        raise Unavailable(f"the API server did not answer within {within_s:g} s: {what}") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise Unavailable(f"the API server cannot be asked to {what}: {type(error).__name__}") from error
