"""Bodies: how many bytes of requests a gRPC server holds together.

Rules:
1. gRPC does not tell a message's length before all of it has arrived. So a request that is arriving counts as the
   longest allowed message; one that has arrived counts its own bytes, until it is answered.
2. Where there is no room, a request waits, and gRPC reads almost nothing of it meanwhile. The newest is read first,
   because the client of an old one may have left. At most ``max_waiting`` wait; more are refused.
3. While some wait, the request that has been arriving for longest is refused, once that is ``slow_s``. One that has
   arrived completely is never refused.
4. An eighth of the room is kept for requests that arrive, so that small requests are read beside large ones that are
   held. There a request that turns out larger than 1 / ``SMALLEST`` of all bytes is refused.

It knows nothing about the content of requests.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from slipstream.base.errors import CapacityError, InvalidRequest
from slipstream.protocol.chat import MAX_BODIES_BYTES
from slipstream.wire.channel import RULES

T = TypeVar("T")
MAX_WAITING = 1024
SLOW_S = 0.5
SMALLEST = 1024
ENDED = math.inf
FULL = "this server holds as many requests as it can; try again later"


class Bodies:
    """Make and use it on one event loop."""

    def __init__(self, max_bytes: int = MAX_BODIES_BYTES, max_message_bytes: int = RULES.message_bytes,
                 max_waiting: int = MAX_WAITING, slow_s: float = SLOW_S) -> None:
        self._free, self._max_message_bytes = max_bytes, max_message_bytes
        self._max_waiting, self._slow_s = max_waiting, slow_s
        self._small_bytes, self._min_arriving = max_bytes // SMALLEST, max_bytes // 8 // max_message_bytes
        self._waiting: dict[asyncio.Timeout, asyncio.Future[None]] = {}  # for room, the newest last
        # Since when each arrives, the oldest first; ENDED: it makes room.
        self._arriving: dict[asyncio.Timeout, float] = {}

    @asynccontextmanager
    async def held(self, read: Callable[[], Awaitable[object]], within_s: float,
                   decode: Callable[[bytes], T]) -> AsyncIterator[T]:
        """The bytes that ``read`` returns, decoded by ``decode``; they count until the context is left. Raises
        InvalidRequest for a request that does not arrive in time, CapacityError for one that finds no room or is ended
        to make room."""
        data = await self._read(read, within_s)
        size = len(data)
        try:
            decoded = [decode(data)]
            del data  # an answer may take long and does not need it, nor (after ``pop``) the decoded request
            yield decoded.pop()
        finally:
            self._release(size)

    async def _read(self, read: Callable[[], Awaitable[object]], within_s: float) -> bytes:
        size = 0
        try:
            async with asyncio.timeout(within_s) as deadline:
                await self._wait_for_room(deadline)
                data = await read()
            if not isinstance(data, bytes):
                raise InvalidRequest("request", "is missing")
            if len(data) > self._small_bytes and self._free + self._max_message_bytes < len(data):
                raise CapacityError(FULL)
            size = len(data)
            return data
        except TimeoutError:
            if self._arriving.get(deadline, ENDED) != ENDED:
                raise InvalidRequest("request", f"did not arrive within {within_s:g} s") from None
            raise CapacityError(FULL) from None
        finally:
            self._waiting.pop(deadline, None)
            if self._arriving.pop(deadline, None) is not None:
                self._release(self._max_message_bytes - size)

    async def _wait_for_room(self, deadline: asyncio.Timeout) -> None:
        if self._has_room():
            self._begin(deadline)
            return
        if len(self._waiting) >= self._max_waiting:
            raise CapacityError(FULL)
        turn = self._waiting[deadline] = asyncio.get_running_loop().create_future()
        while not turn.done():
            self._end_slow()
            await asyncio.wait([turn], timeout=self._slow_s)

    def _release(self, num_bytes: int) -> None:
        self._free += num_bytes
        while self._waiting and self._has_room():
            deadline, turn = self._waiting.popitem()
            self._begin(deadline)
            turn.set_result(None)

    def _has_room(self) -> bool:
        """Whether one more request may arrive."""
        return self._free >= self._max_message_bytes or len(self._arriving) < self._min_arriving

    def _begin(self, deadline: asyncio.Timeout) -> None:
        self._free -= self._max_message_bytes
        self._arriving[deadline] = asyncio.get_running_loop().time()

    def _end_slow(self) -> None:
        now_s = asyncio.get_running_loop().time()
        oldest = next((deadline for deadline, since_s in self._arriving.items() if since_s != ENDED), None)
        if oldest is not None and now_s - self._arriving[oldest] >= self._slow_s and not oldest.expired():
            self._arriving[oldest] = ENDED
            oldest.reschedule(now_s)
