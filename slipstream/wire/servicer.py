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
from dataclasses import dataclass, field, replace
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


@dataclass(slots=True)
class Host:
    """What is remembered of a host: its breaches, and the problem that ended its last stream."""

    exclusion: Exclusion = field(default_factory=Exclusion)
    last_problem: str = ""


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
        self._known_hosts: dict[str, Host] = {}
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
            self._remember(context, error)
            await abort(context, error)

    async def _serve(self, context: Context, deadline: asyncio.Timeout) -> None:
        if self._draining.is_set():
            raise Draining("this draft service is shutting down")
        host = self._known_hosts.get(host_of(context)) or Host()
        if (remaining_s := host.exclusion.until_s - asyncio.get_running_loop().time()) > 0.0:
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
            host.last_problem = ""
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

    def _remember(self, context: Context, error: SlipstreamError) -> None:
        """The stream ended with ``error``, which is a warning once: a target that does not fit tries every ten
        seconds."""
        name = host_of(context)
        host = self._known_hosts.pop(name, None) or Host()
        if len(self._known_hosts) >= MAX_HOSTS:
            del self._known_hosts[next(iter(self._known_hosts))]
        self._known_hosts[name] = host
        log = self._log.debug if str(error) == host.last_problem else self._log.warning
        log("target stream ended", target=context.peer(), problem=str(error))
        host.last_problem = str(error)
        if isinstance(error, RemoteProtocolError) and not isinstance(error, PairingError):
            pause_s = host.exclusion.breach(asyncio.get_running_loop().time())
            self._log.warning("target left alone", target=name, seconds=pause_s)

    def _count_connected(self, change: int) -> None:
        self._num_connected += change
        self._on_connected(self._num_connected)

    async def _wait_drained(self) -> None:
        await self._draining.wait()
        await asyncio.sleep(DRAIN_S)
