"""Hosting gRPC services: where a server may listen, its health, its drain; and the draft's side of draft streams.

Rules:
1. Beyond loopback a server listens with TLS only, unless the configuration says otherwise in so many words.
2. Health: "" and "liveness" serve while the process runs; "readiness" and the services' own names while it takes work.
3. A drain first says so in its health, then lets the services end what they have, then closes what is left.
4. ``peer_up`` and ``peer_down`` come in pairs; a silent peer is ended by keepalive (15 s).

It knows nothing about what the services do.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import Protocol

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from slipstream.base.config import WireSection
from slipstream.base.errors import ConfigError
from slipstream.wire.channel import RULES, ConnectionRules, server_options
from slipstream.wire.tls import Doorman, TlsFiles, server_credentials

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Servicer(Protocol):
    """One service that a server hosts."""

    service: str  # its full protobuf name

    def handler(self) -> grpc.GenericRpcHandler: ...

    def drain(self) -> None:
        """Take no new work; end by itself what would never end."""
        ...


def bind_guard(listen: str, wire: WireSection, tls: TlsFiles | None = None) -> None:
    """Raises ConfigError if ``listen`` (host:port) reaches beyond loopback in plain text without leave."""
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdigit():
        raise ConfigError(f"listen: {listen!r} is not host:port")
    if tls is None and not wire.insecure_allow_plaintext and not _is_loopback(host):
        raise ConfigError(f"listen: {listen} reaches beyond this machine in plain text; give TLS files, listen on "
                          "127.0.0.1, or set wire.insecure_allow_plaintext=true behind a network policy")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class GrpcServer:
    """A server for ``servicers`` and grpc.health.v1. Make and use it on one event loop."""

    def __init__(self, listen: str, wire: WireSection, servicers: Sequence[Servicer], *, tls: TlsFiles | None = None,
                 rules: ConnectionRules = RULES) -> None:
        bind_guard(listen, wire, tls)
        self.listen = listen
        self.port = 0  # set by start
        self._servicers = servicers
        self._tls = tls
        self._health = HealthServicer()
        guards = [Doorman(tls.allowed_names)] if tls is not None and tls.allowed_names else []
        self._server = aio.server(options=server_options(rules), interceptors=guards)
        self._server.add_generic_rpc_handlers([servicer.handler() for servicer in servicers])
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if _is_loopback(listen.rpartition(":")[0]):  # handy in development; elsewhere it would be an inventory
            names = [servicer.service for servicer in servicers]
            reflection.enable_server_reflection([*names, reflection.SERVICE_NAME], self._server)

    async def start(self) -> int:
        """Listen; returns the port. Not ready until ``set_ready``. Raises ConfigError if the address cannot be had."""
        try:
            if self._tls is None:
                self.port = self._server.add_insecure_port(self.listen)
            else:
                self.port = self._server.add_secure_port(self.listen, server_credentials(self._tls))
        except RuntimeError as error:
            raise ConfigError(f"listen: cannot listen on {self.listen}; is the port taken?") from error
        for name in ("", "liveness"):
            await self._health.set(name, SERVING)
        await self.set_ready(False)
        await self._server.start()
        return self.port

    async def set_ready(self, ready: bool) -> None:
        for name in ("readiness", *(servicer.service for servicer in self._servicers)):
            await self._health.set(name, SERVING if ready else NOT_SERVING)

    async def drain(self, grace_s: float) -> None:
        """Refuse new calls, give running ones ``grace_s`` seconds, then close everything."""
        await self.set_ready(False)
        for servicer in self._servicers:
            servicer.drain()
        await self._server.stop(grace_s)
