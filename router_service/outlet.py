"""The way out of a connection: server-sent events, straight to its socket, and noticing that nobody listens any more.

Between a handler and the socket lie the application's layers and the server's: calls, messages and a state machine for
each piece, and an answer has hundreds. A body's head and end go that way; what comes between is framed here.

Rules:
1. Only a body that goes out in chunks (HTTP/1.1, no length) takes the outlet, after its head and before its end.
2. ``Outlet.write`` does not wait. Whoever writes looks whether the outlet is ``full`` and waits for ``drained``.
3. What is written to a connection that has ended is dropped; who watches the client hears of it there.
4. A client that goes away ends the work for it at once, also while it waits for its first byte. One that does not read
   what it asked for counts as gone after ``STALL_S``, and its connection ends.

Formats: chunked transfer coding, RFC 9112 section 7.1; WHATWG server-sent events, data lines alone. It knows nothing
about requests or what is sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

import orjson
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router_service.admission import Limit

STATE = "outlet"  # its name in the state of a connection's scopes
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"  # how uvicorn ends the head of a body in chunks
STALL_S = 60.0
DONE = b"data: [DONE]\n\n"
HEADERS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"),
           (b"x-accel-buffering", b"no"))


class Outlet:
    """Of one connection."""

    __slots__ = ("_over", "_room", "_transport", "_watcher", "full")

    def __init__(self) -> None:
        self.full = False
        self._room = asyncio.Event()
        self._transport: asyncio.Transport | None = None
        self._over = False
        self._watcher: Callable[[], None] | None = None

    def watch(self, watcher: Callable[[], None] | None) -> None:
        """Call ``watcher`` when the connection is over, which it may be already; None: nobody any more."""
        self._watcher = watcher
        if self._over and watcher is not None:
            watcher()

    def write(self, data: bytes) -> None:
        """Send ``data``, which is not empty, as one chunk."""
        transport = self._transport
        if transport is not None and not transport.is_closing():
            transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def abort(self) -> None:
        """End the connection at once, whatever is still to be sent: closed, it would wait for the client to read."""
        if self._transport is not None:
            self._transport.abort()

    async def drained(self) -> None:
        """Wait until the outlet is not full, or the connection is over."""
        while self.full:
            await self._room.wait()

    def lost(self) -> None:
        """The connection is over."""
        self._over = True
        self.fill(False)
        if self._watcher is not None:
            self._watcher()

    def opened(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def fill(self, full: bool) -> None:
        self.full = full
        if full:
            self._room.clear()
        else:
            self._room.set()


def outlet_of(scope: Mapping[str, Any]) -> Outlet | None:
    """Where the pieces of an answer to ``scope`` may go; None: only through its ``send``."""
    return _connection(scope) if scope["http_version"] == "1.1" else None


def abort(scope: Mapping[str, Any]) -> None:
    """End the connection of ``scope`` at once."""
    found = _connection(scope)
    if found is not None:
        found.abort()


def _connection(scope: Mapping[str, Any]) -> Outlet | None:
    found = scope.get("state", {}).get(STATE)
    return found if isinstance(found, Outlet) else None


class Unchunked:
    """``transport`` for an answer to a client of HTTP/1.0, which knows no chunks: the body ends with the connection."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._begun = False
        self._chunked = False

    def write(self, data: bytes) -> None:
        """A whole head, later any number of whole chunks."""
        if not self._begun:
            self._begun, self._chunked = True, data.endswith(CHUNKED)
            data = data.removesuffix(CHUNKED) + b"\r\n" if self._chunked else data
        elif self._chunked:
            data = b"".join(_bodies(data))
        self._transport.write(data)

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self._transport.close()


def _bodies(chunks: bytes) -> Iterator[bytes]:
    start = 0
    while start < len(chunks):
        body = chunks.index(b"\r\n", start) + 2
        end = body + int(chunks[start:body], 16)
        yield chunks[body:end]
        start = end + 2


def event(content: Mapping[str, Any]) -> bytes:
    return framed(orjson.dumps(content))


def framed(data: bytes) -> bytes:
    """An event of JSON that is written already."""
    return b"data: " + data + b"\n\n"


class Presence:
    """The client of one request: ``with presence: await …`` raises ClientDisconnect when it goes away. Make it when the
    body has been read, and ``close`` it. Where the connection has an ``outlet`` that one tells, which spares a task."""

    def __init__(self, receive: Receive, outlet: Outlet | None = None) -> None:
        self._limit = Limit(ClientDisconnect)
        self._outlet = outlet
        self._watch: asyncio.Task[None] | None = None
        if outlet is not None:
            outlet.watch(self._limit.fire)
        else:
            self._watch = asyncio.create_task(_gone(receive))
            self._watch.add_done_callback(self._over)

    def close(self) -> None:
        if self._outlet is not None:
            self._outlet.watch(None)
        if self._watch is not None:
            self._watch.cancel()

    def __enter__(self) -> None:
        self._limit.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._limit.__exit__(kind, error, trace)

    def _over(self, watch: asyncio.Task[None]) -> None:
        if not watch.cancelled():
            watch.exception()  # an error of the connection is its end as well
            self._limit.fire()


class EventStream(Response):
    """Sends ``events`` until they end or ``client`` goes away, which it closes; ``close`` is awaited in any case."""

    def __init__(self, events: AsyncGenerator[bytes, None], client: Presence, close: Callable[[], Awaitable[None]],
                 headers: Mapping[str, str], stall_s: float = STALL_S) -> None:
        self.status_code = 200
        self.background = None
        self.raw_headers = [*HEADERS, *((name.encode(), value.encode()) for name, value in headers.items())]
        self._events = events
        self._client = client
        self._close = close
        self._stall_s = stall_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._client:
                await self._pump(outlet_of(scope), send)
        except ClientDisconnect:
            return
        except TimeoutError:
            abort(scope)
        finally:
            self._client.close()
            await self._events.aclose()
            await self._close()

    async def _pump(self, outlet: Outlet | None, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for chunk in self._events:
            if outlet is None:
                async with asyncio.timeout(self._stall_s):
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                continue
            outlet.write(chunk)
            if outlet.full:
                async with asyncio.timeout(self._stall_s):
                    await outlet.drained()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
