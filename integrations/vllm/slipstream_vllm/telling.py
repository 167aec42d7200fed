"""Telling a target what became of a step, where one serves the engine's answers (``target.engine: vllm``).

Rule: it never blocks and never raises. What cannot be told at once is not told.
"""

from __future__ import annotations

import socket
from contextlib import suppress

from slipstream.following.rounds import ToldStep, encode


class Teller:
    """Tells the socket at ``path``."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    def tell(self, step: ToldStep) -> None:
        with suppress(OSError):
            self._socket.sendto(encode(step), self._path)
