"""The target's side of a draft stream: connect, shake hands, pump both ways, come back after every loss.

Rules of a link:
1. ``send`` may be called from any thread, never blocks, and does nothing while the link is down.
2. Every stream has a new random incarnation; a frame that carries another one is dropped.
3. ``link_up`` and ``link_down`` come in pairs. After ``link_up`` the draft knows nothing: sessions are opened anew.
4. Reconnects wait a random time below an exponential bound; a draft that does not fit is tried again every 10 s, one
   that broke the protocol after a longer pause each time (``conduct``).
5. Nothing waits without an end: the handshake has a deadline, keepalive ends a silent stream.

A draft stream while it runs, the same at both of its ends: items that wait to go out, and frames both ways.

Rules of a stream:
1. What is sent may come from any thread and never blocks; what was sent together stays together and in order.
2. The writer takes all waiting items at once, so several of them become one frame.
3. The waiting items have a limit. Beyond it all of them are dropped and the stream ends with CapacityError, because a
   gap cannot be repaired item by item. Feature rows of prompts alone are left out before that, while more of them wait
   than the stream carries: a drafter goes on behind a gap, and a new stream would have to carry all of them again.
4. A frame of another stream is dropped, and a bad item is a fault of its session. Bytes that are no frame, or more
   items than allowed, end the stream with RemoteProtocolError.
5. A peer is read at a limited pace, and not at all while too much of its input waits (``is_full``): flow control then
   holds the rest at the peer.

It knows nothing about sessions, trees or what items mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar, cast

from grpc import aio

from slipstream.base.errors import (
    CapacityError,
    PairingError,
    RemoteProtocolError,
    SlipstreamError,
    Unavailable,
)
from slipstream.observe.log import logger
from slipstream.protocol.conduct import Allowance, Exclusion, Pace
from slipstream.protocol.messages import (
    Commit,
    DraftBound,
    DraftHello,
    Drop,
    Faults,
    Features,
    LinkEvents,
    TargetBound,
    TargetHello,
)
from slipstream.protocol.pairing import check_pair
from slipstream.protocol.requests import LEFT_ALONE, REFUSED, DraftStatus
from slipstream.wire.channel import DRAFT_SERVICE, RULES, ConnectionRules, open_channel
from slipstream.wire.codec import (
    MAX_FRAME_ITEMS,
    FrameLimits,
    ProjectionReader,
    decode_draft_frame,
    decode_draft_hello,
    encode_target_frames,
    encode_target_hello,
)
from slipstream.wire.status import ReportedProblems, from_grpc_error
from slipstream.wire.tls import TlsFiles

Item = TypeVar("Item")
Received = TypeVar("Received")

READ_SHARE = 0.25  # of a thread's time, to read one peer: answers for 256 requests every 20 ms take that
POLL_S = 0.005  # between two checks whether a peer may be read again
MAX_BYTES = 256 << 20
SLOW_PART = 3  # of MAX_BYTES: where so much waits, prompts come faster than the stream carries their rows
EXPORT_S = 0.5


@dataclass(slots=True)
class WireCounts:
    """Bytes in and out since the start. Other metrics are counted where the events happen."""

    bytes_in: int = 0
    bytes_out: int = 0


async def export_bytes(counts: WireCounts, export: Callable[[str, int], None]) -> None:
    """Call ``export`` (direction, bytes) with the bytes since the last call, twice a second, until cancelled."""
    exported = WireCounts()
    while True:
        current = replace(counts)
        export("in", current.bytes_in - exported.bytes_in)
        export("out", current.bytes_out - exported.bytes_out)
        exported = current
        await asyncio.sleep(EXPORT_S)


class Outbox(Generic[Item]):
    """The outgoing items of one stream; on a draft's side a ``messages.Peer``. Create it on the event loop that takes
    from it."""

    def __init__(self, name: str = "", max_batches: int = RULES.waiting_batches, max_bytes: int = MAX_BYTES) -> None:
        """name: of the other end. At most ``max_batches`` (items sent together) and ``max_bytes`` of feature rows may
        wait."""
        self.name = name
        self._loop = asyncio.get_running_loop()
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._batches: deque[tuple[Sequence[Item], int]] = deque()
        self._queued_bytes = 0
        self._closed = False
        self.filled = asyncio.Event()
        self._error: SlipstreamError | None = None
        self._failed = asyncio.Event()

    def send(self, items: Sequence[Item]) -> None:
        """Nothing happens once the outbox is closed or has failed."""
        with self._lock:
            if self._queued_bytes > self._max_bytes // SLOW_PART:
                items = [item for item in items if not isinstance(item, Features)]
            if self._closed or not items:
                return
            num_bytes = _row_bytes(items)
            needs_wake = not self._batches  # else the loop has been woken, and has not taken all
            self._batches.append((items, num_bytes))
            self._queued_bytes += num_bytes
            overflow = len(self._batches) > self._max_batches or self._queued_bytes > self._max_bytes
        if overflow:
            self._fail(CapacityError("overflow"))
        elif needs_wake:
            # The loop may have been closed between the check and here; then nobody is waiting.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self.filled.set)

    def refuse(self, field: str) -> None:
        """End the stream, because the other side sends too many faults. From any thread."""
        self._fail(RemoteProtocolError(field, "wrong too often"))

    def take(self, max_bytes: int) -> list[Item]:
        """The waiting items (``filled`` is set when there are some): one batch, and more batches up to about
        ``max_bytes`` of rows."""
        taken: list[Item] = []
        num_bytes = 0
        with self._lock:
            while self._batches and (not taken or num_bytes + self._batches[0][1] <= max_bytes):
                items, batch_bytes = self._batches.popleft()
                taken.extend(items)
                num_bytes += batch_bytes
            self._queued_bytes -= num_bytes
            if not self._batches:
                self.filled.clear()
        return taken

    async def wait_failed(self) -> None:
        """Wait for an overflow or ``refuse``; raises CapacityError or RemoteProtocolError."""
        await self._failed.wait()
        assert self._error is not None
        raise self._error

    def close(self) -> None:
        """Drop what waits and take nothing more."""
        with self._lock:
            self._closed = True
            self._batches.clear()
            self._queued_bytes = 0

    def _fail(self, error: SlipstreamError) -> None:
        self.close()
        self._error = self._error or error
        with contextlib.suppress(RuntimeError):  # the loop is closed: so is the stream
            self._loop.call_soon_threadsafe(self._failed.set)


def _row_bytes(items: Sequence[Any]) -> int:
    """Bytes of the feature rows in ``items``."""
    size = 0
    for item in items:
        features = item.features if isinstance(item, Commit) else item
        if isinstance(features, Features):
            size += len(features.rows)
    return size


class ByteStream(Protocol):
    """The methods used of a gRPC call, or of a call's context on the server."""

    def read(self) -> Awaitable[object]: ...

    def write(self, message: bytes, /) -> Awaitable[None]: ...


@dataclass(frozen=True, slots=True)
class Pumps(Generic[Item, Received]):
    """Both directions of one stream, at one of its ends. ``on_received`` gets items and faults, ``on_oversized``
    own items that fit no frame. While ``is_full``, nothing is read."""

    encode: Callable[[int, Sequence[Item], int], tuple[list[bytes], list[Item]]]
    decode: Callable[[bytes, int, FrameLimits, int], tuple[list[Received], Faults]]
    incarnation: int
    limits: FrameLimits
    max_bytes: int  # of a frame
    counts: WireCounts
    outbox: Outbox[Item]
    on_received: Callable[[list[Received], Faults], None]
    on_oversized: Callable[[list[Item]], None] = lambda items: None
    is_full: Callable[[], bool] = lambda: False
    allowance: Allowance | None = None  # None: the peer may send without limit
    pace: Pace = field(default_factory=partial(Pace, READ_SHARE))
    cpu_clock: Callable[[], float] = time.thread_time  # seconds of processor time that this thread has used

    async def run(self, stream: ByteStream, *until: Coroutine[Any, Any, None], preamble: Iterable[bytes] = ()) -> None:
        """Read and write until the peer ends the stream or one of ``until`` ends; ``preamble`` is sent before all
        items. Raises CapacityError, RemoteProtocolError and what ``stream`` raises."""
        await first_completed(self._read(stream), self._write(stream, preamble), self.outbox.wait_failed(), *until)

    async def _read(self, stream: ByteStream) -> None:
        while isinstance(data := await stream.read(), bytes):
            began_s = self.cpu_clock()
            self._receive(data)
            if (pause_s := self.pace.pause_after_s(self.cpu_clock() - began_s)) > 0.0:
                await asyncio.sleep(pause_s)
            while self.is_full():
                await asyncio.sleep(POLL_S)

    def _receive(self, data: bytes) -> None:
        allowance, max_items = self.allowance, MAX_FRAME_ITEMS
        self.counts.bytes_in += len(data)
        if allowance is not None:
            max_items = max(0, allowance.remaining - 1)  # a frame counts as one
        try:
            items, faults = self.decode(data, self.incarnation, self.limits, max_items)
        except RemoteProtocolError as error:
            if error.field != "incarnation":
                raise
            items, faults = [], ()
        if allowance is not None:
            allowance.use(cast(Sequence[TargetBound], items), len(faults))
        if items or faults:
            self.on_received(items, faults)

    async def _write(self, stream: ByteStream, preamble: Iterable[bytes]) -> None:
        for message in preamble:
            await stream.write(message)
        while True:
            await self.outbox.filled.wait()
            items = self.outbox.take(self.max_bytes)
            if self.allowance is not None:
                self.allowance.add_request(cast(Sequence[DraftBound], items))
            frames, oversized = self.encode(self.incarnation, items, self.max_bytes)
            for frame in frames:
                await stream.write(frame)
                self.counts.bytes_out += len(frame)
            if oversized:
                self.on_oversized(oversized)


async def first_completed(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run all until the first one ends; stop the others; raise what it raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        completed = [task for task in tasks if task.done()]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in completed:
        task.result()


FIRST_BACKOFF_S = 0.1
PROJECTION_S = 60.0  # for all weights of a projection: 512 MiB at less than 10 MiB/s

Call = aio.StreamStreamCall[bytes, bytes]
PairingCheck = Callable[[TargetHello, DraftHello], str]


class DraftLink:
    """A link over gRPC. ``hello``: the target's; every stream gets a new incarnation. ``check`` returns a warning ("":
    none), and raises PairingError when the draft does not fit."""

    def __init__(self, address: str, hello: TargetHello, events: LinkEvents, check: PairingCheck = check_pair, *,
                 tls: TlsFiles | None = None, rules: ConnectionRules = RULES,
                 counts: WireCounts | None = None) -> None:
        self.address = address
        self.counts = counts or WireCounts()
        self._hello = hello
        self._events = events
        self._rules = rules
        self._check = check
        self._tls = tls
        self._outbox: Outbox[DraftBound] | None = None
        self._exclusion = Exclusion()
        self._drafter = ""
        self._problem = "not connected yet"
        self._reported = ReportedProblems()
        self._log = logger("wire", draft=address)

    def send(self, items: Sequence[DraftBound]) -> None:
        outbox = self._outbox
        if outbox is not None:
            outbox.send(items)

    def refuse(self, field: str) -> None:
        outbox = self._outbox
        if outbox is not None:
            outbox.refuse(field)

    def status(self) -> DraftStatus:
        return DraftStatus(self.address, self._outbox is not None, self._drafter, self._problem)

    async def run(self) -> None:
        """Keep the link up until cancelled. Never ends by itself."""
        loop = asyncio.get_running_loop()
        attempt = 0
        while True:
            began = loop.time()
            try:
                await self._stream()
            except PairingError as error:
                self._report("draft refused: it does not fit this target", error, REFUSED)
                await asyncio.sleep(self._rules.refused_retry_s)
                continue
            except RemoteProtocolError as error:
                await self._leave_alone(error)
                continue
            except SlipstreamError as error:
                self._report("draft not reachable", error)
            except Exception as error:  # a bug of ours: it costs this draft, and nobody else
                self._log.exception("draft link failed")
                await self._leave_alone(error)
                continue
            was_stable = loop.time() - began > self._rules.backoff_max_s
            attempt = 0 if was_stable else min(attempt + 1, 16)
            bound = min(FIRST_BACKOFF_S * 2.0**attempt, self._rules.backoff_max_s)
            await asyncio.sleep(random.uniform(0, bound))

    async def _leave_alone(self, error: Exception) -> None:
        pause_s = self._exclusion.breach(asyncio.get_running_loop().time())
        self._problem = f"{LEFT_ALONE}{error}"
        self._log.warning("draft left alone", problem=str(error), seconds=pause_s)
        await asyncio.sleep(pause_s)

    def _report(self, event: str, error: SlipstreamError, kind: str = "") -> None:
        # Once for each new problem: a draft may be away for hours.
        self._problem = f"{kind}{error}"
        if self._reported.is_new(self._problem):
            self._log.warning(event, problem=str(error))

    async def _stream(self) -> None:
        """One stream from connecting to its end; raises what ended it."""
        target = replace(self._hello, incarnation=secrets.randbits(64))
        channel = open_channel(self.address, self._tls, self._rules)
        try:
            method: Any = channel.stream_stream(f"/{DRAFT_SERVICE}/Exchange")  # bytes in, bytes out
            call: Call = method()
            await self._pump(call, target, await self._shake_hands(call, target))
        except aio.AioRpcError as error:
            raise from_grpc_error(error, self.address) from error
        except TimeoutError as error:
            raise Unavailable(f"{self.address}: no handshake within {self._rules.handshake_s:g} s") from error
        finally:
            await channel.close()

    async def _shake_hands(self, call: Call, target: TargetHello) -> DraftHello:
        async with asyncio.timeout(self._rules.handshake_s):
            # A refusal may overtake the hello; the read below then tells why.
            with contextlib.suppress(asyncio.InvalidStateError):
                await call.write(encode_target_hello(target))
            answer = await call.read()
        if not isinstance(answer, bytes):
            raise Unavailable(f"{self.address}: ended the stream before its hello")
        draft = decode_draft_hello(answer)
        if draft.incarnation != target.incarnation:
            raise RemoteProtocolError("incarnation", "the draft answered another stream")
        self._problem = self._check(target, draft)
        return await self._read_projection(call, draft)

    async def _read_projection(self, call: Call, draft: DraftHello) -> DraftHello:
        """``draft`` with the weights of its projection, if it declares one."""
        spec = draft.features
        if spec is None or spec.projection is None:
            return draft
        reader = ProjectionReader(spec.projection)
        try:
            async with asyncio.timeout(PROJECTION_S):
                while not reader.complete:
                    data = await call.read()
                    if not isinstance(data, bytes):
                        raise Unavailable(f"{self.address}: ended the stream before its projection")
                    reader.add(data)
        except TimeoutError as error:
            raise Unavailable(f"{self.address}: no whole projection within {PROJECTION_S:g} s") from error
        return replace(draft, features=replace(spec, projection=reader.finish()))

    async def _pump(self, call: Call, target: TargetHello, draft: DraftHello) -> None:
        outbox: Outbox[DraftBound] = Outbox(self.address, self._rules.waiting_batches)
        pumps = Pumps(encode_target_frames, decode_draft_frame, target.incarnation, FrameLimits.of(target, draft),
                      self._rules.message_bytes, self.counts, outbox, partial(self._events.received, self),
                      self._give_up, partial(self._events.inbox_full, self), Allowance())
        self._outbox, self._drafter = outbox, draft.drafter
        self._reported.is_new("")
        (self._log.warning if self._problem else self._log.info)("draft link up", drafter=draft.drafter,
                                                                 problem=self._problem)
        reason = "stopped"
        self._events.link_up(self, draft)
        del draft  # all weights of a projection, as long as the stream lasts
        try:
            await pumps.run(call)
            reason = "closed"
        except asyncio.InvalidStateError as error:
            reason = "unavailable"
            raise Unavailable(f"{self.address}: the stream has ended") from error
        except (SlipstreamError, aio.AioRpcError) as error:
            reason = _reason(error)
            raise
        finally:
            self._outbox, self._problem = None, reason
            outbox.close()
            self._log.info("draft link down", reason=reason)
            self._events.link_down(self, reason)

    def _give_up(self, items: list[DraftBound]) -> None:
        # For its session, an item that cannot be sent is the same as a draft without room.
        self._events.received(self, [Drop(item.session, "capacity") for item in items], [])


def _reason(error: Exception) -> str:
    if isinstance(error, CapacityError):
        return "overflow"
    return f"protocol: {error.field}" if isinstance(error, RemoteProtocolError) else "unavailable"
