"""A network between two processes: ``python -m bench.delayed FROM TO --delay-ms 0.5`` relays TCP with a delay.

Rules:
1. Bytes leave ``delay`` after they came, one way each, and never overtake each other: a round trip is twice the delay.
2. Timers are exact to about 0.1 ms: the loop waits by ``select``, because ``epoll`` rounds up to whole milliseconds.

It knows nothing about what passes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import selectors
import signal
import socket
from collections import deque

UNJOINED_S = 1e-3  # how often bytes look whether there is another end by now


class Way(asyncio.Protocol):
    """One end of a connection: what it hears goes to the other end, later."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[bytes | None] = deque()  # None: the end
        self.transport: asyncio.Transport | None = None
        self.other: Way | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        self._later(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._later(None)

    def _later(self, data: bytes | None) -> None:
        self._waiting.append(data)
        self._loop.call_later(self._delay_s, self._pass_on)

    def _pass_on(self) -> None:
        """The oldest bytes; one call for each that came."""
        end = self.other.transport if self.other is not None else None
        if end is None:
            self._loop.call_later(UNJOINED_S, self._pass_on)
            return
        data = self._waiting.popleft()
        if data is None:
            end.close()
        elif not end.is_closing():
            end.write(data)


async def relay(listen: tuple[str, int], to: tuple[str, int], delay_s: float) -> asyncio.Server:
    """A server that joins each connection with one of its own to ``to``."""
    loop = asyncio.get_running_loop()
    joining: set[asyncio.Task[None]] = set()

    def accept() -> Way:
        near = Way(delay_s)
        task = loop.create_task(join(near))
        joining.add(task)
        task.add_done_callback(joining.discard)
        return near

    async def join(near: Way) -> None:
        far = near  # nobody is there: the end comes back
        with contextlib.suppress(OSError):
            _, far = await loop.create_connection(lambda: Way(delay_s), *to)
        near.other, far.other = far, near
        if far is near and near.transport is not None:
            near.transport.close()

    return await loop.create_server(accept, *listen)


async def serve(listen: tuple[str, int], to: tuple[str, int], delay_s: float) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server = await relay(listen, to, delay_s)
    await stop.wait()
    server.close()


def address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


def exact_loop() -> asyncio.AbstractEventLoop:
    """An event loop whose timers are not rounded to milliseconds."""
    return asyncio.SelectorEventLoop(selectors.SelectSelector())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("listen", type=address, metavar="FROM", help="host:port to take connections at")
    parser.add_argument("to", type=address, metavar="TO", help="host:port to which they lead")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="one way")
    arguments = parser.parse_args()
    with contextlib.closing(exact_loop()) as loop:
        loop.run_until_complete(serve(arguments.listen, arguments.to, arguments.delay_ms / 1e3))


if __name__ == "__main__":
    main()
