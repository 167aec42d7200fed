"""Guests: the connections of a server, and which one is closed when there are too many.

Rules:
1. A guest is idle while the server waits for it, and at work while it waits for the server. A new guest is idle.
2. Beyond ``most`` guests, or ``per_address`` of one address, the guest that has been idle longest is closed: of all, or
   of that address. That is the newcomer itself if no other is idle. A guest at work is never closed.
3. Of an IPv6 address only the first 64 bits count, because one client usually owns all addresses of such a network.

It knows nothing about sockets.
"""

from __future__ import annotations

import ipaddress
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

G = TypeVar("G")


class Guests(Generic[G]):
    """``end`` is called with the guest to close and the reason: ``full`` or ``address``."""

    def __init__(self, most: int, per_address: int, end: Callable[[G, str], None]) -> None:
        self._most = most
        self._per_address = per_address
        self._end = end
        self._networks: dict[G, str] = {}  # of all who are here
        self._num_at: Counter[str] = Counter()
        self._idle: OrderedDict[G, None] = OrderedDict()  # longest first
        self._idle_at: dict[str, OrderedDict[G, None]] = {}

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def num_at_work(self) -> int:
        return len(self._networks) - len(self._idle)

    def enter(self, guest: G, host: str) -> None:
        network = network_of(host)
        self._networks[guest] = network
        self._num_at[network] += 1
        self.idle(guest)
        if self._num_at[network] > self._per_address:
            self._send_away(next(iter(self._idle_at[network])), "address")
        elif len(self._networks) > self._most:
            self._send_away(next(iter(self._idle)), "full")

    def idle(self, guest: G) -> None:
        """From now on the server waits for ``guest``; a guest that was idle before counts from now, too."""
        if (network := self._networks.get(guest)) is not None:
            for idle in (self._idle, self._idle_at.setdefault(network, OrderedDict())):
                idle[guest] = None
                idle.move_to_end(guest)

    def at_work(self, guest: G) -> None:
        if (network := self._networks.get(guest)) is not None:
            self._idle.pop(guest, None)
            self._idle_at[network].pop(guest, None)

    def leave(self, guest: G) -> None:
        """The guest has left; calling this twice is allowed."""
        self.at_work(guest)
        network = self._networks.pop(guest, None)
        if network is None:
            return
        self._num_at[network] -= 1
        if not self._num_at[network]:
            del self._num_at[network], self._idle_at[network]

    def _send_away(self, guest: G, why: str) -> None:
        self.leave(guest)
        self._end(guest, why)


def network_of(host: str) -> str:
    """What counts as one address; ``host`` itself if it is none."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((address, 64), strict=False))
