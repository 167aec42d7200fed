"""Rounds: what the workers of another engine tell of their steps, kept until the pieces that belong to it leave.

Rules:
1. It comes over a datagram socket of this machine, on the event loop. What is late, or nobody's, is dropped.
2. Nobody waits for it: what has not come is not there.

It knows nothing about answers.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree

from slipstream.following.rounds import Told, ToldStep, decode

PER_READ = 64  # steps that are heard of in one go


class Rounds:
    """What vLLM's workers tell of their steps, until the pieces that belong to it leave."""

    def __init__(self, path: Path) -> None:
        """path: of the socket that is made."""
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(str(path))
        self._of: dict[str, dict[int, tuple[ToldStep, Told]]] = {}

    @contextmanager
    def heard(self) -> Iterator[None]:
        """While the block runs, on its event loop."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._socket, self._read)
        try:
            yield
        finally:
            loop.remove_reader(self._socket)

    def follow(self, request: str) -> None:
        self._of[request] = {}

    def forget(self, request: str) -> None:
        self._of.pop(request, None)

    def take(self, request: str, length: int) -> tuple[ToldStep, Told] | None:
        """Of the step behind which ``request`` had so many tokens; None: it has not come, or was lost."""
        known = self._of.get(request, {})
        taken = known.pop(length, None)
        for passed in [other for other in known if other < length]:
            del known[passed]
        return taken

    def close(self) -> None:
        self._socket.close()
        rmtree(self.path.parent, ignore_errors=True)

    def _read(self) -> None:
        for _ in range(PER_READ):
            try:
                step = decode(self._socket.recv(1 << 20))
            except OSError:  # there is no more
                return
            if step is None:
                continue
            for told in step.requests:
                if told.request in self._of:
                    self._of[told.request][told.length] = step, told
