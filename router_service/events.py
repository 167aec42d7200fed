"""Server-sent events, and noticing that nobody listens any more.

Rules:
1. A client that goes away ends the work for it at once, also while it waits for its first byte.
2. A client that does not read what it asked for counts as gone after ``STALL_S``, and its connection ends.

Format: WHATWG server-sent events, data lines alone. It knows nothing about what is sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any

import orjson
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router_service.outlet import Outlet, abort, outlet_of
from router_service.patience import Limit

STALL_S = 60.0
DONE = b"data: [DONE]\n\n"
HEADERS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"),
           (b"x-accel-buffering", b"no"))


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
