"""A network between vLLM and a draft that can be told to fail: TCP connections that lead somewhere, nowhere, or end."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

from bench.fleet import free_port


class Relay:
    """Listens on ``port`` from now on; ``to`` is where connections lead, None for nowhere: they are ended."""

    def __init__(self) -> None:
        self.port = free_port()
        self.to: int | None = None
        self._swallows = False
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, daemon=True).start()

    def leads(self, to: int | None) -> None:
        """New connections lead to ``to``, and those that are open end."""
        self.to, self._swallows = to, False
        ended, self._open = self._open, []
        for one in ended:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def swallow(self) -> None:
        """What is open stays so, and nothing passes any more. What opens later passes nothing either."""
        self._swallows = True

    def heal(self) -> None:
        """What opens from now on passes again. What lost bytes never does."""
        self._swallows, self._open = False, []

    def close(self) -> None:
        self._listener.close()
        self.leads(None)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self._join(near)

    def _join(self, near: socket.socket) -> None:
        try:
            if self.to is None:
                raise ConnectionRefusedError
            far = socket.create_connection(("127.0.0.1", self.to))
        except OSError:
            near.close()
            return
        self._open += [near, far]
        lost = threading.Event()
        for source, sink in ((near, far), (far, near)):
            threading.Thread(target=self._pump, args=(source, sink, lost), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, lost: threading.Event) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if self._swallows:
                    lost.set()
                if not lost.is_set():
                    sink.sendall(data)
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
