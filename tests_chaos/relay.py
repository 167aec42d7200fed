"""A connection between two pieces of the fleet that can be told to fail: TCP that is cut, held, slowed or corrupted.

Rules:
1. One ``Relay`` stands for one pair: what happens to it happens to nobody else.
2. Each way fails apart: ``there`` is from who dialled to who listens, ``back`` is the other.
3. What is held is kept and passes later, as TCP keeps what a stopped process or a hole in the network leaves unread.
"""

from __future__ import annotations

import asyncio
import contextlib
from random import Random

MOST_BYTES = 1 << 16  # at once


class Way:
    """One way of a relay."""

    def __init__(self) -> None:
        self.passes = asyncio.Event()
        self.passes.set()
        self.delay_s = 0.0
        self.corrupts: Random | None = None  # turns a bit of each piece

    async def pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """To its end."""
        with contextlib.suppress(OSError):
            while data := await reader.read(MOST_BYTES):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                await self.passes.wait()
                writer.write(self._corrupted(data))
                await writer.drain()
        writer.close()

    def _corrupted(self, data: bytes) -> bytes:
        if self.corrupts is None:
            return data
        place = self.corrupts.randrange(len(data))
        return data[:place] + bytes([data[place] ^ 1 << self.corrupts.randrange(8)]) + data[place + 1:]


class Relay:
    """Listens on ``port`` from ``start`` on; ``to`` is the port it leads to, None for nowhere."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.to: int | None = None
        self.there, self.back = Way(), Way()
        self._server: asyncio.Server | None = None
        self._joined: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._join, "127.0.0.1", self.port)

    def cut(self, to: int | None) -> None:
        """End all that is open, in the midst of whatever passes; what opens from now on leads to ``to``."""
        self.to = to
        for writer in self._writers:
            writer.transport.abort()

    def hold(self, there: bool, back: bool) -> None:
        """Nothing passes these ways until ``heal``."""
        for way, held in ((self.there, there), (self.back, back)):
            if held:
                way.passes.clear()

    def heal(self) -> None:
        """What is open passes again. What was corrupted stays so."""
        for way in (self.there, self.back):
            way.delay_s, way.corrupts = 0.0, None
            way.passes.set()

    async def close(self) -> None:
        self.heal()
        self.cut(None)
        if self._server is not None:
            self._server.close()
        await asyncio.gather(*self._joined, return_exceptions=True)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._joined.add(task)
        writers = {writer}
        self._writers.add(writer)
        try:
            if self.to is None:
                return
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.to)
            writers.add(far_writer)
            self._writers.add(far_writer)
            await asyncio.gather(self.there.pump(reader, far_writer), self.back.pump(far_reader, writer))
        except OSError:
            pass
        finally:
            self._writers -= writers
            for one in writers:
                one.transport.abort()
            self._joined.discard(task)
