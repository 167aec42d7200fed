"""A cluster's DNS: names of services to addresses, over UDP. It knows no other names and forwards nothing."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

DOMAIN = ".svc.cluster.local"
HEADER = struct.Struct("!6H")  # ID, flags, and how many questions, answers and two others there are
ADDRESS = 1  # the type of a question: A
ANSWER, NO_SUCH_NAME = 0x8400, 0x8403  # flags
TTL_S = 5
Find = Callable[[str, str], Awaitable[list[str] | None]]  # service, namespace -> addresses; None: no such service


class Names(asyncio.DatagramProtocol):
    """Answers questions; ``find`` knows the services."""

    def __init__(self, find: Find) -> None:
        self._find = find
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.DatagramTransport) -> None:  # type: ignore[override]
        self._transport = transport

    def datagram_received(self, data: bytes, address: tuple[str, int]) -> None:
        task = asyncio.create_task(self._reply(data, address))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reply(self, data: bytes, address: tuple[str, int]) -> None:
        name, end = question(data)
        kind = struct.unpack_from("!H", data, end)[0]
        found = None
        if name.endswith(DOMAIN) and name.count(".") == DOMAIN.count(".") + 1:
            service, namespace = name.removesuffix(DOMAIN).split(".")
            found = await self._find(service, namespace)
        self._transport.sendto(reply(data[: end + 4], found, kind), address)


def question(data: bytes) -> tuple[str, int]:
    """The name that is asked for, and where it ends."""
    labels, at = [], HEADER.size
    while length := data[at]:
        labels.append(data[at + 1: at + 1 + length].decode())
        at += 1 + length
    return ".".join(labels).lower(), at + 1


def reply(asked: bytes, found: list[str] | None, kind: int) -> bytes:
    """``asked``: the header and the question. A service has addresses of IPv4 alone."""
    addresses = (found or []) if kind == ADDRESS else []
    flags = NO_SUCH_NAME if found is None else ANSWER
    header = HEADER.pack(HEADER.unpack_from(asked)[0], flags, 1, len(addresses), 0, 0)
    answers = [struct.pack("!HHHIH4B", 0xC000 | HEADER.size, ADDRESS, 1, TTL_S, 4, *map(int, address.split(".")))
               for address in addresses]
    return header + asked[HEADER.size:] + b"".join(answers)


@asynccontextmanager
async def names(address: str, find: Find) -> AsyncIterator[None]:
    """Answer on port 53 of ``address`` while the block lasts."""
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(lambda: Names(find), (address, 53))
    try:
        yield
    finally:
        transport.close()
