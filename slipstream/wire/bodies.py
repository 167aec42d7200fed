"""Bodies: how many bytes of requests a gRPC server holds together.

Rules:
1. gRPC does not tell a message's length before all of it has arrived. So a request that is arriving counts as the
   longest allowed message; one that has arrived counts its own bytes, until it is answered.
2. Where there is no room, a request waits, and gRPC reads almost nothing of it meanwhile. The newest goes on first,
   because the client of an old one may have left. At most ``most_waiting`` wait; more are refused.
3. While some wait, the request that has been arriving for longest is refused, once that is ``slow_s``. One that has
   arrived whole is never refused.

It knows nothing about what is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from slipstream.base.errors import CapacityError, InvalidRequest
from slipstream.protocol.chat import MOST_BODIES
from slipstream.wire.channel import RULES

T = TypeVar("T")
MOST_WAITING = 1024
SLOW_S = 0.5
FULL = "this server holds as many requests as it can; try again later"


class Bodies:
    """Make and use it on one event loop."""

    def __init__(self, most: int = MOST_BODIES, longest: int = RULES.message_bytes, most_waiting: int = MOST_WAITING,
                 slow_s: float = SLOW_S) -> None:
        """longest: bytes of a message."""
        self._free, self._longest, self._most_waiting, self._slow_s = most, longest, most_waiting, slow_s
        self._waiting: list[asyncio.Future[None]] = []
        self._coming: dict[asyncio.Timeout, float] = {}  # and since when, the oldest first

    @asynccontextmanager
    async def held(self, read: Callable[[], Awaitable[object]], within_s: float,
                   decode: Callable[[bytes], T]) -> AsyncIterator[T]:
        """The bytes that ``read`` returns, decoded by ``decode``; they count until the context is left. Raises
        InvalidRequest for a request that does not arrive in time, CapacityError for one that finds no room or is ended
        to make room."""
        data = await self._read(read, within_s)
        size = len(data)
        try:
            asked = decode(data)
            del data  # an answer may take long, and needs it no more
            yield asked
        finally:
            self._give(size)

    async def _read(self, read: Callable[[], Awaitable[object]], within_s: float) -> bytes:
        taken = 0
        try:
            async with asyncio.timeout(within_s) as limit:
                await self._room()
                taken = self._longest
                self._coming[limit] = asyncio.get_running_loop().time()
                data = await read()
            if not isinstance(data, bytes):
                raise InvalidRequest("request", "is missing")
            taken -= len(data)
            return data
        except TimeoutError:
            if limit in self._coming:
                raise InvalidRequest("request", f"did not arrive within {within_s:g} s") from None
            raise CapacityError(FULL) from None
        finally:
            self._coming.pop(limit, None)
            self._give(taken)

    async def _room(self) -> None:
        if self._free >= self._longest:
            self._free -= self._longest
            return
        if len(self._waiting) >= self._most_waiting:
            raise CapacityError(FULL)
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            while not turn.done():
                self._hurry()
                await asyncio.wait([turn], timeout=self._slow_s)
        except asyncio.CancelledError:
            if turn.done():
                self._give(self._longest)
            else:
                self._waiting.remove(turn)
            raise

    def _give(self, num_bytes: int) -> None:
        self._free += num_bytes
        while self._waiting and self._free >= self._longest:
            self._free -= self._longest
            self._waiting.pop().set_result(None)

    def _hurry(self) -> None:
        now = asyncio.get_running_loop().time()
        for limit, since in list(self._coming.items())[:1]:
            if now - since >= self._slow_s:
                del self._coming[limit]
                limit.reschedule(now)
