"""EndpointSlices of Kubernetes as values: which pods stand behind a service, and which of them take work.

Rules:
1. What the API server says is checked before it is used; a slice that makes no sense is refused by field.
2. A pod is ready when its slice says so (or says nothing) and it is not ending. Where the version tells that it ends
   (``terminating``), it is out at once; where it does not, it leaves when it is no longer ready.
3. A pod that several slices name counts once: IPv4 before IPv6, ready if one of them says so.
4. The port of an address is a number or a name, and must be among the slice's: a service that does not have it has no
   endpoints for us.

It knows nothing about API servers. Format: EndpointSlice of ``discovery.k8s.io``, v1 and v1beta1.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.base.address import SCHEME, SERVICE
from slipstream.base.errors import ConfigError, RemoteProtocolError

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
