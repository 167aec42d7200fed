"""``/metrics``, ``/live`` and ``/ready`` on a port of their own, so that a busy service still answers.

Rules:
1. It runs in a thread of its own: neither a full event loop nor a long step delays a probe.
2. It serves only these three pages, only to GET, one request for each connection. A slow client is disconnected after
   ten seconds.
3. Beyond ``MAX_CONNECTIONS``, or ``MAX_PER_ADDRESS`` of one address, the oldest connection is closed, so a new client
   is always answered.

It knows nothing about what is measured or what ready means.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from http import HTTPStatus

from slipstream.base.address import host_port
from slipstream.base.clients import ClientTracker
from slipstream.base.errors import ConfigError
from slipstream.observe.metrics import Registry
from slipstream.observe.vitals import Vitals

MAX_CONNECTIONS, MAX_PER_ADDRESS = 64, 32
REQUEST_S = 10.0
MAX_HEAD_BYTES = 16 << 10


class MetricsServer:
    """Serves ``registry`` on ``listen`` (host:port; port 0 takes a free one).

    ``ready`` is called for each request of ``/ready``, in another thread. Raises ConfigError when the port is taken."""

    def __init__(self, listen: str, registry: Registry, ready: Callable[[], bool],
                 vitals: Vitals | None = None) -> None:
        """vitals: of the service; ``/ready`` also needs them to be ready."""
        vitals = vitals or Vitals("metrics")
        host, port = host_port(listen)
        self._registry = registry
        self._ready = lambda: ready() and vitals.ready
        self._clients: ClientTracker[asyncio.StreamWriter] = ClientTracker(
            MAX_CONNECTIONS, MAX_PER_ADDRESS, lambda writer, _: writer.transport.abort())
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family, backlog=2 * MAX_CONNECTIONS,
                                                dualstack_ipv6=host == "::" and socket.has_dualstack_ipv6())
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigError(f"metrics_listen {listen}: {error}; choose another port") from error
        self.port: int = self._socket.getsockname()[1]
        self._thread = vitals.thread("metrics", self._run)
        self._listening_or_failed = threading.Event()
        self._stop: Callable[[], object] = lambda: None

    def start(self) -> None:
        """Start the thread. Returns when it answers requests, or has failed, which ``vitals`` then report."""
        self._thread.start()
        self._listening_or_failed.wait()

    def close(self) -> None:
        """Stop the server; calling it twice is allowed."""
        if self._thread.is_alive():
            with suppress(RuntimeError):  # its loop is closed
                self._stop()
            self._thread.join()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        finally:
            self._listening_or_failed.set()

    async def _serve(self) -> None:
        stop = asyncio.Event()
        self._stop = partial(asyncio.get_running_loop().call_soon_threadsafe, stop.set)
        server = await asyncio.start_server(self._serve_connection, sock=self._socket, limit=MAX_HEAD_BYTES)
        self._listening_or_failed.set()
        await stop.wait()
        server.close()  # open connections end with the event loop

    async def _serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._clients.add(writer, writer.get_extra_info("peername")[0])
        try:
            async with asyncio.timeout(REQUEST_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(http_response(head.decode("latin-1"), self._registry, self._ready))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):  # TimeoutError is an OSError
            writer.transport.abort()
        finally:
            self._clients.remove(writer)


def http_response(head: str, registry: Registry, ready: Callable[[], bool]) -> bytes:
    """The response to a request with this ``head``."""
    line, *headers = head.split("\r\n")
    method, _, path = line.partition(" ")
    accept = next((value.strip() for name, _, value in (header.partition(":") for header in headers)
                   if name.lower() == "accept"), "")
    if method == "GET":
        status, content_type, body = page(path.split(" ")[0].split("?")[0], accept, registry, ready)
    else:
        status, content_type, body = 405, "text/plain", b"only GET is answered here\n"
    return (f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: {content_type}\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n").encode() + body


def page(path: str, accept: str, registry: Registry, ready: Callable[[], bool]) -> tuple[int, str, bytes]:
    """(HTTP status, content type, body) of one page."""
    if path == "/metrics":
        return 200, *registry.page(accept)
    if path == "/live" or (path == "/ready" and ready()):
        return 200, "text/plain", b"ok\n"
    if path == "/ready":
        return 503, "text/plain", b"no\n"
    return 404, "text/plain", b"here are /metrics, /live and /ready\n"
