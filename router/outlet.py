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
from collections.abc import Callable, Mapping
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

STATE = "outlet"  # its name in the state of a connection's scopes


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
    found = scope.get("state", {}).get(STATE)
    return found if isinstance(found, Outlet) and scope["http_version"] == "1.1" else None


class TappedProtocol(asyncio.Protocol):
    """uvicorn's HTTP, with an outlet to the same connection."""

    def __init__(self, config: Config, server_state: ServerState, app_state: Mapping[str, Any],
                 _loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._outlet = Outlet()
        self._http = H11Protocol(config, server_state, {**app_state, STATE: self._outlet}, _loop)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._outlet.opened(transport)
        self._http.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._outlet.lost()
        self._http.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._http.data_received(data)

    def eof_received(self) -> None:
        self._http.eof_received()

    def pause_writing(self) -> None:
        self._outlet.fill(True)
        self._http.pause_writing()

    def resume_writing(self) -> None:
        self._outlet.fill(False)
        self._http.resume_writing()
