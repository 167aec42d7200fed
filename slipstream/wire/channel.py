"""Channels and their options, one table for both ends: message sizes, keepalive, back-off; and the names of methods.

Rules:
1. Keepalive is set on both ends from the same rules: a peer that vanishes without a word is noticed after
   ``keepalive_s`` plus half of it (15 s), on either end.
2. A channel takes no proxy from the environment and shares no connection with another channel.

It knows nothing about what is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import grpc
from grpc import aio

from slipstream.wire.tls import TlsFiles, channel_credentials

DRAFT_SERVICE = "slipstream.v1.DraftService"
TARGET_SERVICE = "slipstream.v1.TargetService"
INFERENCE_SERVICE = "slipstream.v1.InferenceService"

Options = Sequence[tuple[str, int | str]]


@dataclass(frozen=True, slots=True)
class ConnectionRules:
    """The same at both ends of every connection."""

    message_bytes: int = 4 << 20  # of one message; frames are split below it
    keepalive_s: float = 10.0  # between pings; a peer silent for 1.5 times as long is lost
    backoff_max_s: float = 2.0  # longest wait before a lost peer is dialled again


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
    )


def server_options(rules: ConnectionRules) -> Options:
    return (
        *_common_options(rules),
        ("grpc.http2.min_ping_interval_without_data_ms", round(rules.keepalive_s * 500)),
        ("grpc.max_concurrent_streams", 1024),
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


def open_channel(address: str, tls: TlsFiles | None, rules: ConnectionRules = RULES) -> aio.Channel:
    """A channel to ``address`` (host:port); connects when it is first used. Raises ConfigError for unreadable files."""
    if tls is None:
        return aio.insecure_channel(address, options=client_options(rules))
    return aio.secure_channel(address, channel_credentials(tls), options=(*client_options(rules), *_name(tls)))


def open_sync_channel(address: str, tls: TlsFiles | None, rules: ConnectionRules = RULES) -> grpc.Channel:
    """The same for programs without asyncio."""
    if tls is None:
        return grpc.insecure_channel(address, options=client_options(rules))
    return grpc.secure_channel(address, channel_credentials(tls), options=(*client_options(rules), *_name(tls)))


def _name(tls: TlsFiles) -> Options:
    return (("grpc.ssl_target_name_override", tls.server_name),) if tls.server_name else ()
