"""The target's side of a draft stream: connect, shake hands, pump both ways, come back after every loss.

Rules:
1. ``send`` may be called from any thread, never blocks, and does nothing while the link is down.
2. Every stream has a new random incarnation; a frame that carries another one is dropped and counted.
3. ``link_up`` and ``link_down`` come in pairs. After ``link_up`` the draft knows nothing: sessions are opened anew.
4. Reconnects wait a random time below an exponential bound; a draft that does not fit is asked again every 10 s.
5. Nothing waits without an end: the handshake has a deadline, keepalive ends a silent stream.

It knows nothing about sessions, trees or what items mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import structlog
from grpc import aio

from slipstream.base.errors import CapacityError, PairingError, RemoteProtocolError, SlipstreamError, Unavailable
from slipstream.protocol.messages import DraftBound, DraftHello, Drop, TargetBound, TargetHello
from slipstream.protocol.requests import DraftStatus
from slipstream.wire.channel import DRAFT_SERVICE, RULES, ConnectionRules, open_channel
from slipstream.wire.codec import Faults, FrameLimits, decode_draft_frame, encode_target_frames
from slipstream.wire.handshake import ProjectionReader, decode_draft_hello, encode_target_hello
from slipstream.wire.status import error_of
from slipstream.wire.stream import MAX_BATCHES, Outbox, Pumps, WireCounts
from slipstream.wire.tls import TlsFiles

FIRST_BACKOFF_S = 0.1
REFUSED_RETRY_S = 10.0
HANDSHAKE_S = 5.0
PROJECTION_S = 60.0  # for all weights of a projection: 512 MiB at less than 10 MiB/s

Call = aio.StreamStreamCall[bytes, bytes]
Check = Callable[[TargetHello, DraftHello], None]


class Link(Protocol):
    """One draft as the target sees it."""

    address: str

    def send(self, items: Sequence[DraftBound]) -> None: ...


class LinkEvents(Protocol):
    """Who hears of a link. Called on the event loop; must not block, so it only puts things into a queue."""

    def link_up(self, link: Link, hello: DraftHello) -> None: ...

    def link_down(self, link: Link, reason: str) -> None: ...

    def received(self, link: Link, items: list[TargetBound], faults: Faults) -> None: ...


class DraftLink:
    """A link over gRPC. ``hello``: the target's half, its incarnation is replaced for every stream. ``check`` raises
    PairingError when the draft does not fit."""

    def __init__(self, address: str, hello: TargetHello, events: LinkEvents, check: Check, *,
                 tls: TlsFiles | None = None, rules: ConnectionRules = RULES, max_batches: int = MAX_BATCHES,
                 handshake_s: float = HANDSHAKE_S, refused_retry_s: float = REFUSED_RETRY_S,
                 counts: WireCounts | None = None) -> None:
        self.address = address
        self.counts = counts or WireCounts()
        self._hello = hello
        self._events = events
        self._rules = rules
        self._check = check
        self._tls = tls
        self._max_batches = max_batches
        self._handshake_s = handshake_s
        self._refused_retry_s = refused_retry_s
        self._outbox: Outbox[DraftBound] | None = None
        self._drafter = ""
        self._known = False  # whether it has been up before
        self._problem = "not connected yet"
        self._log = structlog.get_logger(part="wire", draft=address)

    def send(self, items: Sequence[DraftBound]) -> None:
        outbox = self._outbox
        if outbox is not None:
            outbox.put(items)

    def status(self) -> DraftStatus:
        return DraftStatus(self.address, self._outbox is not None, self._drafter, self._problem)

    async def run(self) -> None:
        """Keep the link up until cancelled. Never ends by itself and raises nothing but bugs."""
        loop = asyncio.get_running_loop()
        attempt = 0
        while True:
            began = loop.time()
            try:
                await self._stream()
            except PairingError as error:
                self._report("draft refused: it does not fit this target", error)
                await asyncio.sleep(self._refused_retry_s)
                continue
            except SlipstreamError as error:
                self._report("draft not reachable", error)
            lasted = loop.time() - began > self._rules.backoff_max_s
            attempt = 0 if lasted else min(attempt + 1, 16)
            bound = min(FIRST_BACKOFF_S * 2.0**attempt, self._rules.backoff_max_s)
            await asyncio.sleep(random.uniform(0, bound))

    def _report(self, event: str, error: SlipstreamError) -> None:
        # Once for each new problem: a draft may be away for hours.
        if str(error) != self._problem:
            self._problem = str(error)
            self._log.warning(event, problem=self._problem)

    async def _stream(self) -> None:
        """One stream from connecting to its end; raises what ended it."""
        target = replace(self._hello, incarnation=secrets.randbits(64))
        channel = open_channel(self.address, self._tls, self._rules)
        try:
            method: Any = channel.stream_stream(f"/{DRAFT_SERVICE}/Exchange")  # bytes in, bytes out
            call: Call = method()
            draft = await self._shake_hands(call, target)
            await self._pump(call, target, draft)
        except aio.AioRpcError as error:
            raise error_of(error, self.address) from error
        except TimeoutError as error:
            raise Unavailable(f"{self.address}: no handshake within {self._handshake_s:g} s") from error
        finally:
            await channel.close()

    async def _shake_hands(self, call: Call, target: TargetHello) -> DraftHello:
        async with asyncio.timeout(self._handshake_s):
            # A refusal may overtake the hello; the read below then tells why.
            with contextlib.suppress(asyncio.InvalidStateError):
                await call.write(encode_target_hello(target))
            answer = await call.read()
        if not isinstance(answer, bytes):
            raise Unavailable(f"{self.address}: ended the stream before its hello")
        draft = decode_draft_hello(answer)
        if draft.incarnation != target.incarnation:
            raise RemoteProtocolError("incarnation", "the draft answered another stream")
        self._check(target, draft)
        return await self._complete(call, draft)

    async def _complete(self, call: Call, draft: DraftHello) -> DraftHello:
        """The hello with the weights of its projection, if it declares one."""
        spec = draft.features
        if spec is None or spec.projection is None:
            return draft
        reader = ProjectionReader(spec.projection)
        try:
            async with asyncio.timeout(PROJECTION_S):
                while not reader.complete:
                    chunk = await call.read()
                    if not isinstance(chunk, bytes):
                        raise Unavailable(f"{self.address}: ended the stream before its projection")
                    reader.add(chunk)
        except TimeoutError as error:
            raise Unavailable(f"{self.address}: no whole projection within {PROJECTION_S:g} s") from error
        return replace(draft, features=replace(spec, projection=reader.finish()))

    async def _pump(self, call: Call, target: TargetHello, draft: DraftHello) -> None:
        outbox: Outbox[DraftBound] = Outbox(self._max_batches)
        pumps = Pumps(encode_target_frames, decode_draft_frame, target.incarnation, FrameLimits.of(target, draft),
                      self._rules.message_bytes, self.counts, outbox, partial(self._events.received, self),
                      self._give_up)
        self._outbox, self._drafter, self._problem = outbox, draft.drafter, ""
        self._log.info("draft link up", drafter=draft.drafter)
        reason = "stopped"
        self.counts.reconnects += self._known
        self._known = True
        self._events.link_up(self, draft)
        try:
            await pumps.run(call)
            reason = "closed"
        except asyncio.InvalidStateError as error:
            reason = "unavailable"
            raise Unavailable(f"{self.address}: the stream has ended") from error
        except (SlipstreamError, aio.AioRpcError) as error:
            reason = self._reason(error)
            raise
        finally:
            self._outbox, self._problem = None, reason
            outbox.close()
            self._log.info("draft link down", reason=reason)
            self._events.link_down(self, reason)

    def _reason(self, error: Exception) -> str:
        if isinstance(error, CapacityError):
            self.counts.overflows += 1
            return "overflow"
        return f"protocol: {error.field}" if isinstance(error, RemoteProtocolError) else "unavailable"

    def _give_up(self, items: list[DraftBound]) -> None:
        # To its session an item that cannot travel is a draft without room for it.
        self._events.received(self, [Drop(item.session, "capacity") for item in items], [])
