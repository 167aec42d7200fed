"""EndpointSlices as values: which pods stand behind a service, and which of them take work. Format: EndpointSlice of
``discovery.k8s.io``, v1 and v1beta1.

Rules:
1. Answers of the API server are checked before they are used; the error for an invalid slice names the field.
2. A pod is ready when its slice says so (or says nothing) and it is not terminating. v1 slices tell that
   (``terminating``), so such a pod is out at once; with v1beta1 it is out when it is no longer ready.
3. A pod that several slices name counts once: IPv4 before IPv6, ready if one of them says so.
4. The port of an address is a number or a name, and must be among the slice's: a service without it has no endpoints
   for us.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.base.errors import RemoteProtocolError

MAX_ENDPOINTS = 1000  # of one slice; Kubernetes allows no more

Slice = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One pod behind a service."""

    address: str  # host:port
    pod_uid: str  # the same for all addresses of a pod; "": unknown
    ready: bool
    terminating: bool


def slice_name(slice_: Mapping[str, Any]) -> str:
    """Raises RemoteProtocolError."""
    return _text(_mapping(slice_.get("metadata"), "metadata").get("name"), "metadata.name")


def resource_version(resource: Mapping[str, Any]) -> str:
    """Raises RemoteProtocolError."""
    return _text(_mapping(resource.get("metadata"), "metadata").get("resourceVersion"), "metadata.resourceVersion")


def parse_endpoints(slice_: Mapping[str, Any], port: str) -> tuple[Endpoint, ...]:
    """The endpoints of one slice. Raises RemoteProtocolError."""
    if slice_.get("addressType") not in ("IPv4", "IPv6"):
        return ()  # FQDN: not made by Kubernetes for pods
    number = _find_port(_items(slice_.get("ports"), "ports"), port)
    if number is None:
        return ()
    endpoints = _items(slice_.get("endpoints"), "endpoints")
    if len(endpoints) > MAX_ENDPOINTS:
        raise RemoteProtocolError("endpoints", f"{len(endpoints)} are more than {MAX_ENDPOINTS}")
    return tuple(_parse_endpoint(_mapping(endpoint, "endpoints"), number) for endpoint in endpoints)


def merge_slices(slices: Iterable[tuple[Endpoint, ...]]) -> dict[str, Endpoint]:
    """The pods of all slices of a service, by address."""
    pods: dict[str, Endpoint] = {}
    for endpoint in (endpoint for endpoints in slices for endpoint in endpoints):
        key = endpoint.pod_uid or endpoint.address
        known = pods.get(key)
        if known is None or _rank(endpoint) > _rank(known):
            pods[key] = endpoint
    return {endpoint.address: endpoint for endpoint in sorted(pods.values(), key=lambda e: e.address)}


def _rank(endpoint: Endpoint) -> tuple[bool, bool]:
    return endpoint.ready, not endpoint.address.startswith("[")


def _parse_endpoint(endpoint: Mapping[str, Any], port: int) -> Endpoint:
    addresses = _items(endpoint.get("addresses"), "endpoints.addresses")
    try:
        # All addresses of one endpoint are the same pod; only the first counts.
        ip = ipaddress.ip_address(_text(addresses[0] if addresses else None, "endpoints.addresses"))
    except ValueError as error:
        raise RemoteProtocolError("endpoints.addresses", str(error)) from error
    conditions = _mapping(endpoint.get("conditions") or {}, "endpoints.conditions")
    terminating = conditions.get("terminating") is True
    uid = _mapping(endpoint.get("targetRef") or {}, "endpoints.targetRef").get("uid")
    host = f"[{ip}]" if ip.version == 6 else str(ip)
    return Endpoint(f"{host}:{port}", uid if isinstance(uid, str) else "",
                    conditions.get("ready") is not False and not terminating, terminating)


def _find_port(ports: list[Any], wanted: str) -> int | None:
    """The number of the ``wanted`` port, which is given by number or name; None: there is none."""
    for port in (_mapping(item, "ports") for item in ports):
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
