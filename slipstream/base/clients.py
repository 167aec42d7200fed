"""The clients of a server, busy and idle, and which one is closed when there are too many.

Rules:
1. A client is idle while the server waits for it, and busy while it waits for the server. A new client is idle.
2. Beyond ``max_clients``, or ``max_per_address`` of one address, the client that has been idle longest is closed: of
   all, or of that address. That is the newcomer itself if no other is idle. A busy client is never closed.
3. Of an IPv6 address only the first 64 bits count, because one client usually owns all addresses of such a network.

It knows nothing about sockets.
"""

from __future__ import annotations

import ipaddress
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

C = TypeVar("C")


class ClientTracker(Generic[C]):
    """``close`` is called with the client to close and the reason: ``full`` or ``address``."""

    def __init__(self, max_clients: int, max_per_address: int, close: Callable[[C, str], None]) -> None:
        self._max_clients = max_clients
        self._max_per_address = max_per_address
        self._close = close
        self._networks: dict[C, str] = {}  # of all clients
        self._num_in_network: Counter[str] = Counter()
        self._idle: OrderedDict[C, None] = OrderedDict()  # longest idle first
        self._idle_in_network: dict[str, OrderedDict[C, None]] = {}

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def num_busy(self) -> int:
        return len(self._networks) - len(self._idle)

    def add(self, client: C, host: str) -> None:
        network = network_of(host)
        self._networks[client] = network
        self._num_in_network[network] += 1
        self.mark_idle(client)
        if self._num_in_network[network] > self._max_per_address:
            self._evict(next(iter(self._idle_in_network[network])), "address")
        elif len(self._networks) > self._max_clients:
            self._evict(next(iter(self._idle)), "full")

    def mark_idle(self, client: C) -> None:
        """From now on the server waits for ``client``; the idle time of one that was idle before starts again."""
        if (network := self._networks.get(client)) is not None:
            for idle in (self._idle, self._idle_in_network.setdefault(network, OrderedDict())):
                idle[client] = None
                idle.move_to_end(client)

    def mark_busy(self, client: C) -> None:
        if (network := self._networks.get(client)) is not None:
            self._idle.pop(client, None)
            self._idle_in_network[network].pop(client, None)

    def remove(self, client: C) -> None:
        """The client has left; calling this twice is allowed."""
        self.mark_busy(client)
        network = self._networks.pop(client, None)
        if network is None:
            return
        self._num_in_network[network] -= 1
        if not self._num_in_network[network]:
            del self._num_in_network[network], self._idle_in_network[network]

    def _evict(self, client: C, reason: str) -> None:
        self.remove(client)
        self._close(client, reason)


def network_of(host: str) -> str:
    """What counts as one address; ``host`` itself if it is not an IP address."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((address, 64), strict=False))
