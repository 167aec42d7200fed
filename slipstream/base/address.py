"""Addresses as people write them, host:port or a service of a cluster, and lists of them.

Rule: a malformed address is refused when the configuration is read, with an example, before anything listens or dials.

It knows nothing about sockets, gRPC or the clients of clusters.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

LABEL = "[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
SERVICE = re.compile(rf"kubernetes:///({LABEL})\.({LABEL})(?:\.svc)?:({LABEL})")


@dataclass(frozen=True, slots=True)
class ServiceAddress:
    """A service of a cluster, whose pods discovery knows. ``port``: a number, or the name of one of its ports."""

    service: str
    namespace: str
    port: str

    @property
    def host(self) -> str:
        """The name that certificates of its pods bear."""
        return f"{self.service}.{self.namespace}.svc"


def service_address(address: str) -> ServiceAddress | None:
    """The service that ``kubernetes:///SERVICE.NAMESPACE:PORT`` names; None for a plain host:port. Raises
    ValueError."""
    if not address.startswith("kubernetes:"):
        return None
    found = SERVICE.fullmatch(address)
    if found is None:
        raise ValueError(f"{address!r} is not kubernetes:///SERVICE.NAMESPACE:PORT")
    return ServiceAddress(*found.groups())


def host_port(address: str) -> tuple[str, int]:
    """The two parts of ``address``, an IPv6 host without its brackets. Raises ValueError with an example."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if (not host or "/" in host or not (port.isascii() and port.isdecimal()) or int(port) >= 1 << 16
            or (":" in host and not _is_ipv6(host))):
        raise ValueError(f"{address!r} is not host:port, such as 127.0.0.1:8000")
    return host, int(port)


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False


def reachable(listen: str) -> str:
    """Where to dial on this machine what listens on ``listen``: all interfaces have no address of their own."""
    host, port = host_port(listen)
    return {"0.0.0.0": f"127.0.0.1:{port}", "::": f"[::1]:{port}"}.get(host, listen)


def listening(value: object) -> str:
    """``value`` as an address to listen on, an IPv6 host in brackets. Raises ValueError."""
    address = str(value)
    if address[:1] == ":" and address[1:].isdecimal():
        raise ValueError(f"{address!r} names no host: for all interfaces write 0.0.0.0{address}")
    host, port = host_port(address)
    return f"[{host}]:{port}" if ":" in host else address


def dialled(value: object) -> object:
    """``value`` as a list of addresses to dial, each once: host:port, or a service for discovery. Raises ValueError."""
    if not isinstance(value, list | tuple):
        example = value if value and isinstance(value, str) else "127.0.0.1:8051"
        raise ValueError(f"write a list, as in [{example}]; [] for none")
    for address in value:
        if service_address(str(address)) is None:
            host_port(str(address))
    return tuple(dict.fromkeys(value))  # a second link would offer the places of the same draft again
