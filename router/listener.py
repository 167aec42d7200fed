"""HTTP listening: uvicorn on a socket of ours, started and stopped by us.

Rules:
1. Beyond loopback HTTP needs API keys, or leave in so many words.
2. Headers and connections are bounded; the application bounds bodies and answers.

It knows nothing about routes.
"""

from __future__ import annotations

import asyncio
import socket

import uvicorn
from starlette.types import ASGIApp

from router.gate import MAX_HEADER_BYTES
from router.outlet import TappedProtocol
from slipstream.config import RouterSection, WireSection
from slipstream.errors import ConfigError
from slipstream.wire.server import bind_guard

KEEP_ALIVE_S = 75
SPARE_CONNECTIONS = 256  # beside the requests that run and wait: health checks, keep-alive, refusals
CLOSE_S = 2


class HttpListener:
    """Serves ``app`` on ``section.listen`` (port 0 takes a free one). Raises ConfigError if the port cannot be had."""

    def __init__(self, app: ASGIApp, section: RouterSection, wire: WireSection) -> None:
        if not section.api_keys_file:
            bind_guard(section.listen, wire)
        self._socket = _listening(section.listen)
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            app, http=TappedProtocol, ws="none", lifespan="off", log_config=None, access_log=False, server_header=False,
            proxy_headers=False,  # nobody asks for a client's address
            h11_max_incomplete_event_size=MAX_HEADER_BYTES, timeout_keep_alive=KEEP_ALIVE_S,
            limit_concurrency=section.max_in_flight + section.max_queue + SPARE_CONNECTIONS,
            timeout_graceful_shutdown=CLOSE_S,
        )
        config.load()
        self._server = uvicorn.Server(config)
        self._server.lifespan = config.lifespan_class(config)
        self._loop: asyncio.Task[None] | None = None

    async def start(self) -> None:
        # Not ``Server.serve``: that one takes the process's signals, which belong to the composition root.
        await self._server.startup(sockets=[self._socket])
        self._loop = asyncio.create_task(self._server.main_loop())

    def refuse(self) -> None:
        """Take no new connection; open ones go on."""
        for listening in self._server.servers:
            listening.close()

    async def close(self) -> None:
        """Stop listening and end what is left."""
        if self._loop is None:
            self._socket.close()
            return
        self._server.should_exit = True
        await self._loop
        await self._server.shutdown(sockets=[self._socket])


def _listening(listen: str) -> socket.socket:
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdigit():
        raise ConfigError(f"router.listen: {listen!r} is not host:port")
    host = host.strip("[]")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, int(port)), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"router.listen: cannot listen on {listen} ({error}); is the port taken?") from error
    # Connections inherit it. asyncio sets it only on sockets that name their protocol, which these do not, and without
    # it the second write of every answer waits 40 ms for the client's delayed acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
