"""Addresses as people write them, host:port, and lists of them.

Rule: what is none is refused where the configuration is read, with an example, before anything listens or dials.

It knows nothing about sockets, gRPC or Kubernetes.
"""

from __future__ import annotations

import re

SCHEME = "kubernetes:"
LABEL = "[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
SERVICE = re.compile(rf"kubernetes:///({LABEL})\.({LABEL})(?:\.svc)?:({LABEL})")  # whose pods discovery knows


def host_port(address: str) -> tuple[str, int]:
    """The two parts of ``address``, an IPv6 host without its brackets. Raises ValueError with an example."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not (port.isascii() and port.isdecimal()) or int(port) >= 1 << 16:
        raise ValueError(f"{address!r} is not host:port, such as 127.0.0.1:8000")
    return host.strip("[]"), int(port)


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
    """``value`` as a list of addresses to dial: host:port, or a service for discovery. Raises ValueError."""
    if not isinstance(value, list | tuple):
        raise ValueError("write a list, as in [127.0.0.1:8051]; [] for none")
    for address in value:
        if not str(address).startswith(SCHEME):
            host_port(str(address))
        elif SERVICE.fullmatch(str(address)) is None:
            raise ValueError(f"{address!r} is not kubernetes:///SERVICE.NAMESPACE:PORT")
    return value
