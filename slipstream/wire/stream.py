"""A draft stream while it runs, the same at both of its ends: items that wait to go out, and frames both ways.

Rules:
1. ``put`` may be called from any thread and never blocks; what was put together stays together and in order.
2. Whatever waits when the writer comes is taken at once, so several puts become one frame.
3. What waits is bounded. Beyond the bound all of it is dropped and the stream ends with CapacityError: a gap cannot be
   repaired item by item.
4. A frame of another stream is dropped and counted, a bad item is a fault of its session, and anything else that is no
   frame ends the stream with RemoteProtocolError.

It knows nothing about handshakes or what items mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from slipstream.base.errors import CapacityError, RemoteProtocolError
from slipstream.protocol.messages import Commit, Features
from slipstream.wire.codec import Faults, FrameLimits

Item = TypeVar("Item")
Heard = TypeVar("Heard")

MAX_BATCHES = 1024
MAX_BYTES = 256 << 20
EXPORT_S = 0.5


@dataclass(slots=True)
class WireCounts:
    """What passed and what was left out, counted since the start. Metrics take the bytes from here; what else
    they show is counted where it happens."""

    frames_in: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    stale_frames: int = 0
    invalid_items: int = 0
    reconnects: int = 0
    overflows: int = 0
    oversized_items: int = 0


async def export_bytes(counts: Sequence[WireCounts], export: Callable[[str, int], None]) -> None:
    """Hand what passed since the last time to ``export`` (direction, bytes), twice a second, until cancelled."""
    told = {"in": 0, "out": 0}
    while True:
        now = {"in": sum(c.bytes_in for c in counts), "out": sum(c.bytes_out for c in counts)}
        for direction, total in now.items():
            export(direction, total - told[direction])
        told = now
        await asyncio.sleep(EXPORT_S)


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
        self.filled = asyncio.Event()
        self._full = asyncio.Event()

    def put(self, items: Sequence[Item]) -> None:
        """Add ``items``; nothing happens once the outbox is closed or has overflowed."""
        weight = 0
        for item in items:
            features = item.features if isinstance(item, Commit) else item
            if isinstance(features, Features):
                weight += len(features.rows)
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
            self._signal(self.filled)

    def take(self, max_bytes: int) -> list[Item]:
        """What waits (``filled`` says when): one put, and more up to about ``max_bytes`` of rows."""
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
                self.filled.clear()
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


class Line(Protocol):
    """What is used of a call, or of a call's context."""

    def read(self) -> Awaitable[object]: ...

    def write(self, message: bytes, /) -> Awaitable[None]: ...


@dataclass(frozen=True, slots=True)
class Pumps(Generic[Item, Heard]):
    """Both ways of one stream as one of its ends sees it. ``received`` hears of items and faults, ``oversized`` of own
    items that fit no frame."""

    encode: Callable[[int, Sequence[Item], int], tuple[list[bytes], list[Item]]]
    decode: Callable[[bytes, int, FrameLimits], tuple[list[Heard], Faults]]
    incarnation: int
    limits: FrameLimits
    max_bytes: int  # of a frame
    counts: WireCounts
    outbox: Outbox[Item]
    received: Callable[[list[Heard], Faults], None]
    oversized: Callable[[list[Item]], None] = lambda items: None

    async def run(self, line: Line, *until: Coroutine[Any, Any, None], opening: Iterable[bytes] = ()) -> None:
        """Until the peer ends the stream or one of ``until`` ends; ``opening`` goes out before all items. Raises
        CapacityError, RemoteProtocolError and what ``line`` raises."""
        await first_end(self._read(line), self._write(line, opening), self.outbox.overflowed(), *until)

    async def _read(self, line: Line) -> None:
        counts = self.counts
        while isinstance(data := await line.read(), bytes):
            counts.frames_in += 1
            counts.bytes_in += len(data)
            try:
                items, faults = self.decode(data, self.incarnation, self.limits)
            except RemoteProtocolError as error:
                if error.field != "incarnation":
                    raise
                counts.stale_frames += 1
                continue
            counts.invalid_items += len(faults)
            self.received(items, faults)

    async def _write(self, line: Line, opening: Iterable[bytes]) -> None:
        for message in opening:
            await line.write(message)
        while True:
            await self.outbox.filled.wait()
            frames, left = self.encode(self.incarnation, self.outbox.take(self.max_bytes), self.max_bytes)
            for frame in frames:
                await line.write(frame)
                self.counts.bytes_out += len(frame)
            if left:
                self.counts.oversized_items += len(left)
                self.oversized(left)


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
