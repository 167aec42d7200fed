"""A connection to one address that follows its certificates: a channel, and another when the files are replaced.

Rules:
1. A call keeps the channel that it began on; a channel that was replaced closes when its last call ends.
2. The files are looked at no more than once a second. Files that cannot be read change nothing.

It knows nothing about what is called.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog
from grpc import aio

from slipstream.base.errors import ConfigError
from slipstream.wire.channel import RULES, ConnectionRules, open_channel
from slipstream.wire.tls import TlsFiles

LOOK_S = 1.0


@dataclass(slots=True, eq=False)
class Line:
    """A channel in use. ``calls``: those that run on it."""

    channel: aio.Channel
    calls: int = 0


class Connection:
    """Make it on the event loop that uses it; ``aclose`` when done. Raises ConfigError for unreadable files."""

    def __init__(self, address: str, tls: TlsFiles | None, rules: ConnectionRules = RULES,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._address = address
        self._rules = rules
        self._tls = tls
        self._clock = clock
        self._stamp = tls.stamp() if tls is not None else None
        self._line = Line(open_channel(address, tls, rules))
        self._looked_s = clock()
        self._replaced: set[Line] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._log = structlog.get_logger(part="wire", address=address)

    def begin(self) -> Line:
        """The line for a call that begins now; it must be given back with ``end``."""
        self._follow_files()
        self._line.calls += 1
        return self._line

    def is_current(self, line: Line) -> bool:
        """Whether a call that begins now takes ``line``, too."""
        self._follow_files()
        return line is self._line

    def end(self, line: Line) -> None:
        line.calls -= 1
        if line in self._replaced and line.calls == 0:
            self._replaced.discard(line)
            self._close(line)

    async def aclose(self) -> None:
        for line in (self._line, *self._replaced):
            await line.channel.close()
        await asyncio.gather(*self._closing)

    def _follow_files(self) -> None:
        now_s = self._clock()
        if self._tls is None or now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        found = self._tls.stamp()
        if found is None or found == self._stamp:
            return
        try:
            fresh = Line(open_channel(self._address, self._tls, self._rules))
        except ConfigError:
            return  # in the middle of being replaced
        self._stamp, old, self._line = found, self._line, fresh
        self._log.info("certificates replaced: new calls take a new connection", running=old.calls)
        if old.calls == 0:
            self._close(old)
        else:
            self._replaced.add(old)

    def _close(self, line: Line) -> None:
        task = asyncio.get_running_loop().create_task(line.channel.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
