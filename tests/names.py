"""A DNS server for which every name has the same address, or none, which may become another."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import cast


class Names(asyncio.DatagramProtocol):
    """Made by ``serving``. ``host``: the address, "" for none; ``asked``: how often."""

    def __init__(self, host: str) -> None:
        self.host, self.asked = host, 0

    @staticmethod
    async def serving(host: str) -> Names:
        """Until its ``transport`` is closed."""
        _, names = await asyncio.get_running_loop().create_datagram_endpoint(lambda: Names(host), ("127.0.0.1", 0))
        return names

    def behind(self, port: int) -> str:
        """A name that is looked up here, with a port, as gRPC takes it."""
        return f"dns://127.0.0.1:{self.transport.get_extra_info('sockname')[1]}/service.test:{port}"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self.asked += 1
        question, found = data[12 : data.index(b"\0", 12) + 5], b""
        if self.host and question.endswith(b"\0\1\0\1"):  # an address of IPv4 is asked for
            found = struct.pack(">HHHIH", 0xC00C, 1, 1, 0, 4) + socket.inet_aton(self.host)
        head = struct.pack(">HHHHH", 0x8180 if self.host else 0x8183, 1, bool(found), 0, 0)
        self.transport.sendto(data[:2] + head + question + found, addr)
