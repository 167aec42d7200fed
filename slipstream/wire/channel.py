"""Channels and their options, one table for both ends: message sizes, keepalive, back-off; and the names of services.

Rules:
1. Keepalive is set on both ends from the same rules: a peer that vanishes without a word is noticed after
   ``keepalive_s`` plus half of it (15 s), on either end.
2. A server has ``connections`` at most. A connection without a finished handshake after ``handshake_s``, or without a
   call for ``IDLE_S``, is closed; a channel opens a new one by itself.
3. A channel takes no proxy from the environment and shares no connection with another channel.
4. A Connection opens a new channel when its certificates are replaced: a call stays on the channel on which it began,
   and a replaced channel closes when its last call ends. The files are checked at most once a second; unreadable ones
   change nothing. The name may resolve to another server by now: a caller that reached it by ``open_lane`` may ``use``
   that lane.

It knows nothing about what is sent.
"""

from __future__ import annotations

import asyncio
import ipaddress
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import grpc
from grpc import aio

from slipstream.base.address import host_port
from slipstream.base.errors import ConfigError, Unavailable
from slipstream.observe.log import logger
from slipstream.wire.tls import TlsFiles, channel_credentials

DRAFT_SERVICE = "slipstream.v1.DraftService"
TARGET_SERVICE = "slipstream.v1.TargetService"
INFERENCE_SERVICE = "slipstream.v1.InferenceService"

CHECK_INTERVAL_S = 1.0
IDLE_S = 60
PINGS, PING_S = 50, 5.0  # messages that time a round trip, and how long each may take

Options = Sequence[tuple[str, int | str]]


@dataclass(frozen=True, slots=True)
class ConnectionRules:
    """The same at both ends of every connection."""

    message_bytes: int = 4 << 20  # of one message; frames are split below it
    keepalive_s: float = 10.0  # between pings; a peer silent for 1.5 times as long is lost
    backoff_max_s: float = 2.0  # longest wait before a lost peer is dialled again
    connections: int = 1024  # of one server
    handshake_s: float = 5.0  # of a connection, and for the hellos of a draft stream
    refused_retry_s: float = 10.0  # before a draft that does not fit is dialled again
    waiting_batches: int = 1024  # of items that wait to go out on one draft stream


RULES = ConnectionRules()


def client_options(rules: ConnectionRules) -> Options:
    return (
        *_common_options(rules),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 2000),
        ("grpc.max_reconnect_backoff_ms", round(rules.backoff_max_s * 1000)),
        ("grpc.dns_min_time_between_resolutions_ms", 1000),  # else half a minute with an outdated address
    )


def server_options(rules: ConnectionRules) -> Options:
    return (
        *_common_options(rules),
        # Clients of others ping each second; one that does it more often than allowed loses all its answers.
        ("grpc.http2.min_ping_interval_without_data_ms", round(rules.keepalive_s * 50)),
        ("grpc.max_concurrent_streams", 1024),
        ("grpc.max_allowed_incoming_connections", rules.connections),
        ("grpc.server_handshake_timeout_ms", round(rules.handshake_s * 1000)),
        ("grpc.max_connection_idle_ms", IDLE_S * 1000),
        ("grpc.so_reuseport", 0),  # a second server on the same port must fail, not share its connections
    )


def _common_options(rules: ConnectionRules) -> Options:
    return (
        ("grpc.max_receive_message_length", rules.message_bytes),
        ("grpc.max_send_message_length", rules.message_bytes),
        ("grpc.keepalive_time_ms", round(rules.keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(rules.keepalive_s * 500)),
        # The core ends a silent connection by this one (default 60 s); its keepalive timeout never fires (grpc #39239).
        ("grpc.http2.ping_timeout_ms", round(rules.keepalive_s * 500)),
        ("grpc.keepalive_permit_without_calls", 1),
    )


def open_channel(address: str, tls: TlsFiles | bool | None, rules: ConnectionRules = RULES) -> aio.Channel:
    """A channel to ``address`` (host:port); connects when it is first used. ``tls`` True: no client certificate, and
    gRPC's trusted roots. Raises ConfigError for unreadable files."""
    if not tls:
        return aio.insecure_channel(address, options=client_options(rules))
    return aio.secure_channel(address, channel_credentials(tls), options=(*client_options(rules), *_name_option(tls)))


def open_sync_channel(address: str, tls: TlsFiles | bool | None) -> grpc.Channel:
    """The same for programs without asyncio."""
    if not tls:
        return grpc.insecure_channel(address, options=client_options(RULES))
    return grpc.secure_channel(address, channel_credentials(tls), options=(*client_options(RULES), *_name_option(tls)))


def round_trip_s(address: str, tls: TlsFiles | None) -> float:
    """Seconds of a small message to a service at ``address`` and back: the median of PINGS or, over a slow network, of
    as many as PING_S has time for. Raises Unavailable, ConfigError."""
    from grpc_health.v1 import health_pb2, health_pb2_grpc  # not installed where another engine follows drafts

    times_s = list[float]()
    with open_sync_channel(address, tls) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            for _ in range(PINGS + 1):  # the first one connects
                began_s = time.perf_counter()
                stub.Check(health_pb2.HealthCheckRequest(), timeout=PING_S)
                times_s.append(time.perf_counter() - began_s)
                if sum(times_s) > PING_S:
                    break
        except grpc.RpcError as error:
            raise Unavailable(f"nobody answers over gRPC at {address}") from error
    return statistics.median(times_s[1:] or times_s)


def host_of(context: aio.ServicerContext[Any, Any]) -> str:
    """The address that a call comes from, without the port. gRPC writes ipv4:10.0.0.1:80, and ipv6:%5B::1%5D:80."""
    return unquote(context.peer().partition(":")[2].rpartition(":")[0]).strip("[]")


def _name_option(tls: TlsFiles | bool) -> Options:
    name = tls.server_name if isinstance(tls, TlsFiles) else ""
    return (("grpc.ssl_target_name_override", name),) if name else ()


@dataclass(slots=True, eq=False)
class Lane:
    """A channel and the number of its running calls."""

    channel: aio.Channel
    calls: int = 0


class Connection:
    """Make it on the event loop that uses it; ``aclose`` when done. Raises ConfigError for unreadable files."""

    def __init__(self, address: str, tls: TlsFiles | None) -> None:
        self._address = address
        self._tls = tls
        self._stamp = tls.stamp() if tls is not None else None
        self._lane = Lane(open_channel(address, tls))  # of new calls
        self._checked_s = time.monotonic()
        self._lanes = {self._lane}  # that are open
        self._closing: set[asyncio.Task[None]] = set()
        self._log = logger("wire", address=address)

    def begin(self) -> Lane:
        """The lane for a new call, which must call ``end`` when it is over."""
        self._check_certificates()
        self._lane.calls += 1
        return self._lane

    def is_current(self, lane: Lane) -> bool:
        """Whether a new call would use ``lane``, too."""
        self._check_certificates()
        return lane is self._lane

    def end(self, lane: Lane) -> None:
        lane.calls -= 1
        self._close_unused(lane)

    def open_lane(self) -> Lane | None:
        """A new lane to the server to which the name resolves now; the caller must ``use`` or close it. None: the
        address is no name, or certificates are being replaced."""
        try:
            ipaddress.ip_address(host_port(self._address)[0])
        except ValueError:
            with suppress(ConfigError):
                return Lane(open_channel(self._address, self._tls))
        return None

    def use(self, lane: Lane) -> None:
        """New calls go to ``lane``."""
        old, self._lane = self._lane, lane
        self._lanes.add(lane)
        self._close_unused(old)

    async def aclose(self) -> None:
        for lane in list(self._lanes):
            await lane.channel.close()
        await asyncio.gather(*self._closing)

    def _check_certificates(self) -> None:
        if self._tls is None or time.monotonic() - self._checked_s < CHECK_INTERVAL_S:
            return
        self._checked_s = time.monotonic()
        stamp = self._tls.stamp()
        if stamp is None or stamp == self._stamp:
            return
        try:
            lane = Lane(open_channel(self._address, self._tls))
        except ConfigError:
            return  # in the middle of being replaced
        self._stamp = stamp
        self._log.info("certificates replaced: new calls take a new connection", running=self._lane.calls)
        self.use(lane)

    def _close_unused(self, lane: Lane) -> None:
        if lane is self._lane or lane.calls:
            return
        self._lanes.discard(lane)
        task = asyncio.get_running_loop().create_task(lane.channel.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
