"""Hosting gRPC services: where a server may listen, its health, its drain.

Rules:
1. Beyond loopback a server listens with TLS only, unless the configuration explicitly allows plain text.
2. Health: "" and "liveness" serve while the process runs; "readiness" and the services' own names while it takes work.
   Any client may ask for the health, so these calls must be cheap: when there are too many, the one that has not sent
   its request for longest is ended, and so is the oldest watch.
3. A drain first changes the health, then lets the services end their work, then closes the rest. gRPC is
   never given a time to stop within: where two stops run, and the time of one ends as the other closes the server, gRPC
   touches what is freed, and the process dies.

It knows nothing about what the services do.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Sequence
from typing import Any, Protocol

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from slipstream.base.address import host_port
from slipstream.base.clients import ClientTracker
from slipstream.base.config import WireSection
from slipstream.base.errors import ConfigError
from slipstream.wire.channel import RULES, ConnectionRules, host_of, server_options
from slipstream.wire.fields import MAX_NAME
from slipstream.wire.tls import NameGuard, TlsFiles, server_credentials

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
MAX_ASKING, ASK_S = 64, 5.0  # calls whose health request has not arrived yet, and how long it may take
MAX_WATCHING, MAX_WATCHING_EACH = 1024, 128  # watches of the health, in all and from one address
NEVER_S = 1e9  # a time that does not end


class Servicer(Protocol):
    """One service that a server hosts."""

    service: str  # its full protobuf name

    def handler(self) -> grpc.GenericRpcHandler: ...

    def drain(self) -> None:
        """Take no new work; end by itself what would never end."""
        ...


def bind_guard(listen: str, wire: WireSection, tls: TlsFiles | None = None, setting: str = "listen") -> None:
    """Raises ConfigError for plain text beyond loopback at ``listen`` (host:port) that is not allowed, and for TLS
    files that cannot be used. setting: the name of that of ``listen``; the router's are for clients, where we have no
    TLS."""
    if tls is not None:
        tls.read()
    elif not wire.insecure_allow_plaintext and not _is_loopback(listen):
        advice = "put a proxy with TLS before it and" if setting.startswith("router.") else "set wire.tls.folder,"
        raise ConfigError(f"{setting}: {listen} reaches beyond this machine in plain text; {advice} listen "
                          "on 127.0.0.1, or set wire.insecure_allow_plaintext=true behind a network policy")


def _is_loopback(listen: str) -> bool:
    host, _ = host_port(listen)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Health:
    """grpc.health.v1 around ``health``. By itself gRPC would wait for a request for ever, and read one of any size."""

    def __init__(self, health: HealthServicer) -> None:
        self._health = health
        self._reading: ClientTracker[asyncio.Timeout] = ClientTracker(MAX_ASKING, MAX_ASKING, self._expire)
        self._watching: ClientTracker[asyncio.Timeout] = ClientTracker(MAX_WATCHING, MAX_WATCHING_EACH, self._expire)

    def handler(self) -> grpc.GenericRpcHandler:
        handlers: Any = {name: grpc.stream_stream_rpc_method_handler(
            method, health_pb2.HealthCheckRequest.FromString, health_pb2.HealthCheckResponse.SerializeToString)
            for name, method in (("Check", self._check), ("Watch", self._watch))}
        return grpc.method_handlers_generic_handler("grpc.health.v1.Health", handlers)

    async def _check(self, _requests: object, context: Any) -> None:
        await context.write(await self._health.Check(await self._read_request(context), context))

    async def _watch(self, _requests: object, context: Any) -> None:
        request = await self._read_request(context)
        try:
            async with asyncio.timeout(None) as timeout:
                self._watching.add(timeout, host_of(context))
                try:
                    await self._health.Watch(request, context)
                finally:
                    self._watching.remove(timeout)
        except TimeoutError:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many watch; ask again later")

    async def _read_request(self, context: Any) -> health_pb2.HealthCheckRequest:
        request = None
        try:
            async with asyncio.timeout(ASK_S) as timeout:
                self._reading.add(timeout, "")
                try:
                    request = await context.read()
                finally:
                    self._reading.remove(timeout)
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the question did not come in time")
        if not isinstance(request, health_pb2.HealthCheckRequest) or len(request.service) > MAX_NAME:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "ask about one service")
        return request

    def _expire(self, timeout: asyncio.Timeout, reason: str) -> None:
        if not timeout.expired():
            timeout.reschedule(asyncio.get_running_loop().time())


class GrpcServer:
    """A server for ``servicers`` and grpc.health.v1. Make and use it on one event loop."""

    def __init__(self, listen: str, wire: WireSection, servicers: Sequence[Servicer], *, tls: TlsFiles | None = None,
                 rules: ConnectionRules = RULES, setting: str = "listen") -> None:
        """``setting``: as of ``bind_guard``."""
        bind_guard(listen, wire, tls, setting)
        self.listen = listen
        self._setting = setting
        self.port = 0  # set by start
        self._servicers = servicers
        self._tls = tls
        self._health = HealthServicer()
        guards = [NameGuard(tls.allowed_names)] if tls is not None and tls.allowed_names else []
        self._server = aio.server(options=server_options(rules), interceptors=guards)
        self._stopping: asyncio.Task[None] | None = None  # ends with the last call
        self._server.add_generic_rpc_handlers([*(servicer.handler() for servicer in servicers),
                                               Health(self._health).handler()])
        if _is_loopback(listen):  # handy in development; elsewhere it would show all services to anybody
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
            raise ConfigError(f"{self._setting}: cannot listen on {self.listen}: the port is taken, or the address is "
                              "none of this machine's; stop what uses it, or listen elsewhere") from error
        for name in ("", "liveness"):
            await self._health.set(name, SERVING)
        await self.set_ready(False)
        await self._server.start()
        return self.port

    async def set_ready(self, ready: bool) -> None:
        for name in ("readiness", *(servicer.service for servicer in self._servicers)):
            await self._health.set(name, SERVING if ready else NOT_SERVING)

    async def drain(self, grace_s: float) -> None:
        """Refuse new calls, give running ones ``grace_s`` seconds, then close everything. Of several drains, the one
        whose time ends first closes it for all."""
        await self.set_ready(False)
        for servicer in self._servicers:
            servicer.drain()
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._server.stop(NEVER_S))
        await asyncio.wait([self._stopping], timeout=grace_s)
        if not self._stopping.done():
            await self._server.stop(None)
        await asyncio.shield(self._stopping)
