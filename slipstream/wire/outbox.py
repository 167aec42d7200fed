"""The way from an engine's thread to a stream: items wait here until the writer, on the event loop, takes them.

Rules:
1. ``put`` may be called from any thread and never blocks; what was put together stays together and in order.
2. Whatever waits when the writer comes is taken at once, so several puts become one frame.
3. The outbox is bounded. Beyond the bound it drops everything and says so through ``overflowed``: the stream must be
   reset, because a gap cannot be repaired item by item.

It knows nothing about frames or grpc.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Coroutine, Sequence
from typing import Any, Generic, TypeVar

from slipstream.base.errors import CapacityError
from slipstream.protocol.messages import Commit, Features

Item = TypeVar("Item")

MAX_BATCHES = 1024
MAX_BYTES = 256 << 20


class Outbox(Generic[Item]):
    """Made on the loop that takes from it. ``max_batches``: puts that may wait; ``max_bytes``: of feature rows."""

    def __init__(self, max_batches: int = MAX_BATCHES, max_bytes: int = MAX_BYTES) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._batches: deque[tuple[Sequence[Item], int]] = deque()
        self._weight = 0
        self._closed = False
        self._woken = False
        self._filled = asyncio.Event()
        self._full = asyncio.Event()

    def put(self, items: Sequence[Item]) -> None:
        """Add ``items``; nothing happens once the outbox is closed or has overflowed."""
        weight = sum(_weight(item) for item in items)
        with self._lock:
            if self._closed or not items:
                return
            self._batches.append((items, weight))
            self._weight += weight
            overflow = len(self._batches) > self._max_batches or self._weight > self._max_bytes
            if overflow:
                self._clear()
            wake = not self._woken
            self._woken = True
        if overflow:
            self._signal(self._full)
        elif wake:
            self._signal(self._filled)

    async def take(self, max_bytes: int) -> list[Item]:
        """Everything that waits, at least one put and then no more than about ``max_bytes`` of rows."""
        await self._filled.wait()
        taken: list[Item] = []
        weight = 0
        with self._lock:
            while self._batches and (not taken or weight + self._batches[0][1] <= max_bytes):
                items, heavy = self._batches.popleft()
                taken.extend(items)
                weight += heavy
            self._weight -= weight
            if not self._batches:
                self._woken = False
                self._filled.clear()
        return taken

    async def overflowed(self) -> None:
        """Waits until there was too much; raises CapacityError then."""
        await self._full.wait()
        raise CapacityError("overflow")

    def close(self) -> None:
        """Drop what waits and take nothing more."""
        with self._lock:
            self._clear()

    def _clear(self) -> None:
        self._closed = True
        self._batches.clear()
        self._weight = 0

    def _signal(self, event: asyncio.Event) -> None:
        if threading.get_ident() == self._thread:
            event.set()  # the loop is awake already: no need to write to its wake-up pipe
            return
        # The loop may have been closed between the check and here; then nobody is waiting.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(event.set)


def _weight(item: object) -> int:
    if isinstance(item, Commit):
        item = item.features
    return len(item.rows) if isinstance(item, Features) else 0


async def first_end(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run all until the first one ends; stop the others; raise what it raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        ended = [task for task in tasks if task.done()]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in ended:
        task.result()
