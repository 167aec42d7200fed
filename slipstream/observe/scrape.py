"""``/metrics``, ``/live`` and ``/ready`` on a port of their own, so that a busy service still answers.

Rules:
1. It runs in threads: neither a full event loop nor a long step delays a probe.
2. Nothing but these three pages is answered, to GET alone; a client that dawdles is dropped after ten seconds.

It knows nothing about what is measured or what ready means.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from slipstream.base.address import host_port
from slipstream.base.errors import ConfigError
from slipstream.observe.metrics import Registry

CLOSE_POLL_S = 0.1


class MetricsServer:
    """Serves ``registry`` on ``listen`` (host:port; port 0 takes a free one).

    ``ready`` is asked on each call of ``/ready``, from another thread. Raises ConfigError when the port is taken."""

    def __init__(self, listen: str, registry: Registry, ready: Callable[[], bool]) -> None:
        host, port = host_port(listen)

        class Page(BaseHTTPRequestHandler):
            timeout = 10

            def do_GET(self) -> None:
                status, content_type, body = answer(self.path, self.headers.get("Accept", ""), registry, ready)
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Scrapes are not worth a line."""

        class Server(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        try:
            self._server = Server((host, port), Page)
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigError(f"metrics_listen {listen}: {error}; choose another port") from error
        self._thread = threading.Thread(target=self._server.serve_forever, args=(CLOSE_POLL_S,), name="metrics",
                                        daemon=True)

    @property
    def port(self) -> int:
        return self._server.server_port

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def answer(path: str, accept: str, registry: Registry, ready: Callable[[], bool]) -> tuple[int, str, bytes]:
    """(HTTP status, content type, body) of one page."""
    if path == "/metrics":
        return 200, *registry.page(accept)
    if path == "/live" or (path == "/ready" and ready()):
        return 200, "text/plain", b"ok\n"
    if path == "/ready":
        return 503, "text/plain", b"no\n"
    return 404, "text/plain", b"here are /metrics, /live and /ready\n"
