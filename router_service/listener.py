"""The HTTP listener: a server on a socket of ours, whose connections are ``connection``'s.

Rules:
1. To listen beyond loopback, HTTP needs ``wire.insecure_allow_plaintext``, with API keys or without.
2. The server takes no signals of the process: the composition root starts and closes it.

It knows nothing about requests.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Container
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from router_service.connection import Connection, ConnectionLimits
from slipstream.base.address import host_port
from slipstream.base.config import RouterSection, WireSection
from slipstream.base.errors import ConfigError
from slipstream.observe.metrics import RouterMetrics
from slipstream.protocol.chat import STALL_S
from slipstream.wire.server import bind_guard

KEEP_ALIVE_S = 620  # longer than any balancer keeps its own (Google's 600 s): a request would meet our close
CLOSE_S = 2


class HttpListener:
    """Serves ``app`` on ``section.listen`` (port 0 takes a free one). Raises ConfigError if the port cannot be had."""

    def __init__(self, app: ASGIApp, section: RouterSection, wire: WireSection, metrics: RouterMetrics,
                 probes: Container[bytes] = (), retry_after_s: Callable[[], float] = lambda: 1.0,
                 stall_s: float = STALL_S) -> None:
        """``probes``, ``retry_after_s``: as of ``ConnectionLimits``."""
        bind_guard(section.listen, wire, setting="router.listen")
        self._socket = _listen(section.listen, stall_s)
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            app, http=partial(Connection, ConnectionLimits(section.max_in_flight, probes, metrics, retry_after_s)),  # type: ignore[arg-type]
            ws="none", lifespan="off", log_config=None, access_log=False, server_header=False,
            proxy_headers=False,  # an address that a client can write is none
            timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=CLOSE_S,
        )
        config.load()
        self._server = uvicorn.Server(config)
        self._server.lifespan = config.lifespan_class(config)
        self._main_loop: asyncio.Task[None] | None = None

    async def start(self) -> asyncio.Task[None]:
        """Returns the task that runs until the listener is closed."""
        # Not ``Server.serve``: that one takes the process's signals, which belong to the composition root.
        await self._server.startup(sockets=[self._socket])
        self._main_loop = asyncio.create_task(self._server.main_loop())
        return self._main_loop

    def stop_accepting(self) -> None:
        """Take no new connection; open ones go on."""
        for server in self._server.servers:
            server.close()

    async def close(self) -> None:
        """Stop listening and end what is left."""
        if self._main_loop is None:
            self._socket.close()
            return
        self._server.should_exit = True
        await self._main_loop
        await self._server.shutdown(sockets=[self._socket])


def _listen(address: str, stall_s: float) -> socket.socket:
    host, port = host_port(address)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=1024,
                                        dualstack_ipv6=host == "::" and socket.has_dualstack_ipv6())
    except OSError as error:
        raise ConfigError(f"router.listen: cannot listen on {address} ({error}); is the port taken?") from error
    # Connections inherit it. asyncio sets it only on sockets that name their protocol, which these do not, and without
    # it the second write of every answer waits 40 ms for the client's delayed acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux has it
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(stall_s * 1000))
    return listener
