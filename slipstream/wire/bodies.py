"""Bodies: how many bytes of requests a gRPC server holds together.

Rules:
1. gRPC does not tell a message's length before all of it has arrived. So a request that is arriving counts as the
   longest allowed message; one that has arrived counts its own bytes, until it is answered.
2. Where there is no room, a request waits, and gRPC reads almost nothing of it meanwhile. The newest goes on first,
   because the client of an old one may have left. At most ``most_waiting`` wait; more are refused.
3. While some wait, the request that has been arriving for longest is refused, once that is ``slow_s``. One that has
   arrived whole is never refused.
4. An eighth of the room is kept for requests that arrive, so that small requests are read beside large ones that are
   held. A request that turns out larger than a ``SMALLEST`` part of all then is refused.

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
SMALLEST = 1024
FULL = "this server holds as many requests as it can; try again later"


class Bodies:
    """Make and use it on one event loop."""

    def __init__(self, most: int = MOST_BODIES, longest: int = RULES.message_bytes, most_waiting: int = MOST_WAITING,
                 slow_s: float = SLOW_S) -> None:
        """longest: bytes of a message."""
        self._free, self._longest, self._most_waiting, self._slow_s = most, longest, most_waiting, slow_s
        self._small, self._always = most // SMALLEST, most // 8 // longest
        self._num_coming = 0
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
            asked = [decode(data)]
            del data  # an answer may take long, and needs it no more; nor what is made of it, once that is handed on
            yield asked.pop()
        finally:
            self._give(size)

    async def _read(self, read: Callable[[], Awaitable[object]], within_s: float) -> bytes:
        begun, left = False, 0
        try:
            async with asyncio.timeout(within_s) as limit:
                await self._room()
                begun, left = True, self._longest
                self._coming[limit] = asyncio.get_running_loop().time()
                data = await read()
            if not isinstance(data, bytes):
                raise InvalidRequest("request", "is missing")
            if len(data) > self._small and self._free + self._longest < len(data):
                raise CapacityError(FULL)
            left -= len(data)
            return data
        except TimeoutError:
            if limit in self._coming:
                raise InvalidRequest("request", f"did not arrive within {within_s:g} s") from None
            raise CapacityError(FULL) from None
        finally:
            self._coming.pop(limit, None)
            self._num_coming -= begun
            self._give(left)

    async def _room(self) -> None:
        if self._has_room():
            self._begin()
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
                self._num_coming -= 1
                self._give(self._longest)
            else:
                self._waiting.remove(turn)
            raise

    def _give(self, num_bytes: int) -> None:
        self._free += num_bytes
        while self._waiting and self._has_room():
            self._begin()
            self._waiting.pop().set_result(None)

    def _has_room(self) -> bool:
        """For one more to come."""
        return self._free >= self._longest or self._num_coming < self._always

    def _begin(self) -> None:
        self._free -= self._longest
        self._num_coming += 1

    def _hurry(self) -> None:
        now = asyncio.get_running_loop().time()
        for limit, since in list(self._coming.items())[:1]:
            if now - since >= self._slow_s and not limit.expired():
                del self._coming[limit]
                limit.reschedule(now)
