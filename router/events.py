"""Server-sent events, and noticing that nobody listens any more.

Rules:
1. A client that goes away ends the work for it at once, also while it waits for its first byte.
2. A client that does not read what it asked for counts as gone after ``STALL_S``.

Format: WHATWG server-sent events, data lines alone. It knows nothing about what is sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import orjson
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.patience import TimeLimit

STALL_S = 60.0
DONE = b"data: [DONE]\n\n"

T = TypeVar("T")


def event(content: Mapping[str, Any]) -> bytes:
    return framed(orjson.dumps(content))


def framed(data: bytes) -> bytes:
    """An event of JSON that is written already."""
    return b"data: " + data + b"\n\n"


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` gives; it is cancelled, and ClientDisconnect raised, when the client goes away first."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return await task
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class EventStream(Response):
    """Sends ``events`` until they end or the client goes away; ``close`` is awaited in any case."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], close: Callable[[], Awaitable[None]],
                 headers: Mapping[str, str]) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._pump(send))
        except (ClientDisconnect, TimeoutError):
            return
        finally:
            await self._events.aclose()
            await self._close()

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        limit = TimeLimit(STALL_S, TimeoutError, each=True)
        try:
            async for chunk in self._events:
                with limit:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            limit.close()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
