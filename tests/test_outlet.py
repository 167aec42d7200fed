"""Pieces of a body that skip the server's layers: framed as HTTP says, as fast as the client reads, and no faster."""

from __future__ import annotations

import asyncio
import gc
import socket
import struct
import weakref
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import h11
import pytest
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from router_service.connection import COMMENT, Connection, EventStream, connection_of
from router_service.listener import HttpListener
from slipstream.base.config import RouterSection, WireSection
from slipstream.observe.metrics import RouterMetrics
from slipstream.protocol.chat import STALL_S
from tests.echo import EchoTarget
from tests.loop import eventually
from tests.routing import COMPLETIONS, events, routing

BLOCK = bytes(range(256)) * 256


def watched(scope: Scope, lost: asyncio.Event) -> None:
    """Set ``lost`` when the connection of ``scope`` is over."""
    connection_of(scope).watch(lost.set)


class Source:
    """An application that answers anything with ``blocks`` blocks. ``ended``: its stream is over and closed; ``lost``:
    so is the connection."""

    def __init__(self, blocks: int, stall_s: float = STALL_S) -> None:
        self.blocks, self._stall_s = blocks, stall_s
        self.made = 0
        self.ended, self.lost = asyncio.Event(), asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await EventStream(self._events(), self._close, {}, self._stall_s)(scope, receive, send)
        watched(scope, self.lost)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        while self.made < self.blocks:
            self.made += 1
            yield BLOCK

    async def _close(self) -> None:
        self.ended.set()


@asynccontextmanager
async def asked(port: int, request: bytes) -> AsyncIterator[asyncio.StreamReader]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 12)
    writer.write(request)
    try:
        yield reader
    finally:
        writer.close()


@asynccontextmanager
async def served(source: ASGIApp, stall_s: float = STALL_S) -> AsyncIterator[int]:
    listener = HttpListener(source, RouterSection(listen="127.0.0.1:0"), WireSection(), RouterMetrics("tiny"),
                            stall_s=stall_s)
    await listener.start()
    yield listener.port
    await listener.close()


async def body(reader: asyncio.StreamReader, begun: bytes = b"") -> bytes:
    """What an HTTP client of its own makes of a whole answer, of which ``begun`` was read."""
    client, found = h11.Connection(h11.CLIENT), bytearray()
    client.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
    client.send(h11.EndOfMessage())
    if begun:
        client.receive_data(begun)
    while not isinstance(event := client.next_event(), h11.EndOfMessage):
        if event is h11.NEED_DATA:
            client.receive_data(await reader.read(1 << 16))
        elif isinstance(event, h11.Data):
            found += event.data
    return bytes(found)


async def test_a_client_that_reads_slowly_gets_all_of_it() -> None:
    source = Source(200)
    async with served(source) as port, asked(port, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n") as reader:
        await asyncio.sleep(0.05)
        assert source.made < 200, "nothing is made for a socket that is full"
        assert await body(reader) == BLOCK * 200
        await source.ended.wait()


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_a_client_that_stops_reading_counts_as_gone(version: bytes) -> None:
    source = Source(1 << 20, stall_s=0.3)
    async with served(source) as port, asked(port, b"GET / HTTP/%b\r\nHost: x\r\n\r\n" % version):
        await source.ended.wait()
        assert source.made < 1 << 12
        async with asyncio.timeout(60):
            await source.lost.wait()


class Whole(Source):
    """Answers at once, with all of it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watched(scope, self.lost)
        await Response(BLOCK * self.blocks)(scope, receive, send)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system has no such timeout")
@pytest.mark.parametrize("wish", [b"keep-alive", b"close"])
async def test_a_client_that_never_reads_a_whole_answer_is_let_go(wish: bytes) -> None:
    source, request = Whole(500), b"GET / HTTP/1.1\r\nHost: x\r\nConnection: %b\r\n\r\n" % wish
    async with served(source, stall_s=0.3) as port, asked(port, request), asyncio.timeout(60):
        await source.lost.wait()


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_a_stream_that_has_nothing_to_say_says_so(version: bytes) -> None:
    heard = asyncio.Event()

    async def events() -> AsyncGenerator[bytes, None]:
        yield b"data: a\n\n"
        await heard.wait()
        yield b"data: b\n\n"

    async def close() -> None: ...

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await EventStream(events(), close, {}, quiet_s=0.01)(scope, receive, send)

    async with (served(answer) as port, asked(port, b"GET / HTTP/%b\r\nHost: x\r\n\r\n" % version) as reader,
                asyncio.timeout(60)):
        head = b"".join([await reader.readuntil(COMMENT) for _ in range(3)])
        heard.set()
        said = await body(reader, head)
    assert said.replace(COMMENT, b"") == b"data: a\n\ndata: b\n\n"


async def test_a_client_that_leaves_ends_the_stream() -> None:
    source = Source(1 << 20)
    async with served(source) as port:
        async with asked(port, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n") as reader:
            await reader.readexactly(1 << 12)
        await source.ended.wait()


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_an_old_client_gets_no_chunks(tiny_folder: Path, version: bytes) -> None:
    asked_for = b'{"model": "tiny", "prompt": "0123456789", "seed": 3, "stream": true}'
    async with routing(tiny_folder, EchoTarget()) as r:
        request = (b"POST %b HTTP/%b\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
                   % (COMPLETIONS.encode(), version, len(asked_for)) + asked_for)
        async with asked(r.service.http_port, request) as reader:
            head, _, sent = (await reader.read(-1)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert (b"transfer-encoding: chunked" in head.lower()) == (version == b"1.1")
    if version == b"1.0":
        assert "".join(e["choices"][0]["text"] for e in events(sent.decode())) == "10 s3 w0 w1 w2 w"


@pytest.mark.parametrize("wish", [b"close", b"keep-alive"])
async def test_a_connection_that_is_over_leaves_nothing(wish: bytes) -> None:
    """Ended by the server, or reset by a client that could have asked again."""
    kept: list[weakref.ref[Connection]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        kept.append(weakref.ref(connection_of(scope)))
        await Response(b"x")(scope, receive, send)

    gc.disable()
    try:
        async with served(app) as port:
            for _ in range(3):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: %b\r\n\r\n" % wish)
                await reader.readuntil(b"\r\n\r\nx")
                writer.close()
            await eventually(lambda: not any(connection() for connection in kept))
        assert len(kept) == 3
    finally:
        gc.enable()
