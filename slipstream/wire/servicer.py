"""The draft's side of draft streams: one peer for each target that is connected.

Rules of a peer:
1. The first message must be the hello, within a deadline; a target that does not fit is refused with the field named.
2. ``peer_up`` and ``peer_down`` come in pairs, also when the target vanishes.
3. ``Peer.send`` may be called from any thread and never blocks; the stream of a peer that does not read ends.
4. A host that broke the protocol may open no new stream for a while, longer each time (``conduct``).
5. Where all places are taken, a host with at least two more streams than the newcomer's loses its oldest one to it.

It knows nothing about sessions, trees or what items mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import grpc

from slipstream.base.errors import CapacityError, Draining, PairingError, RemoteProtocolError, SlipstreamError
from slipstream.observe.log import logger
from slipstream.protocol.conduct import Exclusion, donor
from slipstream.protocol.messages import PeerEvents, TargetBound
from slipstream.wire.channel import DRAFT_SERVICE, RULES, ConnectionRules, host_of
from slipstream.wire.codec import (
    FrameLimits,
    decode_target_frame,
    decode_target_hello,
    encode_draft_frames,
    encode_draft_hello,
    encode_projection,
)
from slipstream.wire.link import Outbox, Pumps, WireCounts
from slipstream.wire.status import Context, abort

MAX_PEERS = 64
MAX_HOSTS = 256  # hosts whose breaches and last problems are remembered
DRAIN_S = 0.25  # from the beginning of a drain to the end of streams: the engine thread gives its sessions up


class DraftServicer:
    """DraftService: hands what targets send to ``events``."""

    service = DRAFT_SERVICE

    def __init__(self, events: PeerEvents, *, rules: ConnectionRules = RULES, max_peers: int = MAX_PEERS,
                 on_connected: Callable[[int], None] = lambda num_targets: None) -> None:
        """``on_connected`` gets the number of connected targets whenever it changes."""
        self.counts = WireCounts()
        self._events = events
        self._rules = rules
        self._max_peers = max_peers
        self._hosts: dict[asyncio.Timeout, str] = {}  # host of each stream (by its deadline), the oldest stream first
        self._num_connected = 0
        self._on_connected = on_connected
        self._pauses: dict[str, tuple[Exclusion, float]] = {}  # by host: its breaches, paused until
        self._last_problems: dict[str, str] = {}  # by host: the problem that ended its last stream
        self._draining = asyncio.Event()
        self._log = logger("wire")

    def handler(self) -> grpc.GenericRpcHandler:
        exchange: Any = grpc.stream_stream_rpc_method_handler(self._exchange)
        return grpc.method_handlers_generic_handler(DRAFT_SERVICE, {"Exchange": exchange})

    def drain(self) -> None:
        """Refuse new targets; end the streams of connected ones after their last messages have been sent."""
        self._draining.set()

    async def _exchange(self, _requests: object, context: Context) -> None:
        try:
            async with asyncio.timeout(None) as deadline:
                try:
                    await self._serve(context, deadline)
                finally:
                    self._hosts.pop(deadline, None)
        except TimeoutError:
            no_hello = RemoteProtocolError("hello", f"none within {self._rules.handshake_s:g} s")
            await abort(context, CapacityError("another host has this place now") if deadline.expired() else no_hello)
        except SlipstreamError as error:
            log = self._log.warning if self._is_new_problem(host_of(context), str(error)) else self._log.debug
            log("target stream ended", target=context.peer(), problem=str(error))
            if isinstance(error, RemoteProtocolError) and not isinstance(error, PairingError):
                self._leave_alone(host_of(context))
            await abort(context, error)

    async def _serve(self, context: Context, deadline: asyncio.Timeout) -> None:
        if self._draining.is_set():
            raise Draining("this draft service is shutting down")
        _, until_s = self._pauses.get(host_of(context), (None, 0.0))
        if (remaining_s := until_s - asyncio.get_running_loop().time()) > 0.0:
            raise CapacityError("a stream from there broke the protocol", retry_after_s=remaining_s)
        self._admit(deadline, host_of(context))
        async with asyncio.timeout(self._rules.handshake_s):
            first = await context.read()
        if not isinstance(first, bytes):
            return
        target = decode_target_hello(first)
        peer: Outbox[TargetBound] = Outbox(context.peer(), self._rules.waiting_batches)
        hello = replace(self._events.peer_up(peer, target), incarnation=target.incarnation)
        self._count_connected(1)
        try:
            await context.write(encode_draft_hello(hello))
            self._log.info("target connected", target=peer.name, model=target.model_id)
            self._last_problems.pop(host_of(context), None)
            pumps = Pumps(encode_draft_frames, decode_target_frame, hello.incarnation, FrameLimits.of(target, hello),
                          self._rules.message_bytes, self.counts, peer, partial(self._events.received, peer),
                          is_full=partial(self._events.inbox_full, peer))
            projection = hello.features.projection if hello.features is not None else None
            weights = encode_projection(projection, self._rules.message_bytes) if projection is not None else ()
            await pumps.run(context, self._wait_drained(), preamble=weights)
        finally:
            peer.close()
            self._log.info("target gone", target=peer.name)
            self._count_connected(-1)
            self._events.peer_down(peer)

    def _admit(self, deadline: asyncio.Timeout, host: str) -> None:
        """Take a stream from ``host``, which ``deadline`` can end. Raises CapacityError."""
        if len(self._hosts) >= self._max_peers:
            if (crowd := donor(self._hosts.values(), host)) is None:
                raise CapacityError(f"already {self._max_peers} targets are connected", retry_after_s=10.0)
            oldest = next(stream for stream, owner in self._hosts.items() if owner == crowd)
            del self._hosts[oldest]
            oldest.reschedule(asyncio.get_running_loop().time())
        self._hosts[deadline] = host

    def _is_new_problem(self, host: str, problem: str) -> bool:
        """Whether its last stream ended with another problem: a target that does not fit tries every ten seconds."""
        last_problem = self._last_problems.pop(host, "")
        if len(self._last_problems) >= MAX_HOSTS:
            del self._last_problems[next(iter(self._last_problems))]
        self._last_problems[host] = problem
        return problem != last_problem

    def _leave_alone(self, host: str) -> None:
        now_s = asyncio.get_running_loop().time()
        absence, _ = self._pauses.pop(host, (Exclusion(), 0.0))
        if len(self._pauses) >= MAX_HOSTS:
            del self._pauses[next(iter(self._pauses))]
        pause_s = absence.breach(now_s)
        self._pauses[host] = absence, now_s + pause_s
        self._log.warning("target left alone", target=host, seconds=pause_s)

    def _count_connected(self, change: int) -> None:
        self._num_connected += change
        self._on_connected(self._num_connected)

    async def _wait_drained(self) -> None:
        await self._draining.wait()
        await asyncio.sleep(DRAIN_S)
