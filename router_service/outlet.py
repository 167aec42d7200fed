"""The way out of a connection: pieces of a running body, straight to its socket.

Between a handler and the socket lie the application's layers and the server's: calls, messages and a state machine for
each piece, and an answer has hundreds. A body's head and end go that way; what comes between is framed here.

Rules:
1. Only for a body that goes out in chunks (HTTP/1.1, no length), after its head and before its end.
2. ``write`` does not wait. Whoever writes looks whether the outlet is ``full`` and waits for ``drained``.
3. What is written to a connection that has ended is dropped; who watches the client hears of it there.

Format: chunked transfer coding, RFC 9112 section 7.1. It knows nothing about requests or what is sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import Any

STATE = "outlet"  # its name in the state of a connection's scopes
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"  # how uvicorn ends the head of a body in chunks


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
