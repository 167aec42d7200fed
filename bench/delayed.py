"""A network between two processes: ``python -m bench.delayed FROM TO --delay-ms 0.5`` relays TCP with a delay.

Rules:
1. Bytes leave ``delay`` plus a random part of ``jitter`` after they came, one way each, and never overtake each other:
   a round trip is twice the delay.
2. SIGUSR1 makes it a black hole (connections stay, nothing passes), the next one lets everything pass again, late.
3. Timers are exact to about 0.1 ms: the loop waits by ``select``, because ``epoll`` rounds up to whole milliseconds.

It knows nothing about what passes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import selectors
import signal
import socket
from collections import deque
from dataclasses import dataclass, field

EARLY_S = 1e-5  # a timer may fire so much before its time
BLIND_S = 0.01  # how often a black hole looks whether it still is one


@dataclass(slots=True)
class Delay:
    """The line: seconds one way, and whether anything passes at all."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    passes: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.passes.set()

    def toggle(self) -> None:
        """Into a black hole, or out of it."""
        if self.passes.is_set():
            self.passes.clear()
        else:
            self.passes.set()

    def draw(self) -> float:
        """Seconds for the next bytes."""
        return self.delay_s + self.jitter_s * self.rng.random()


class Way(asyncio.Protocol):
    """One end of a connection: what it hears goes to the other end, later."""

    def __init__(self, delay: Delay) -> None:
        self._delay = delay
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[float, bytes | None]] = deque()  # when it is due; None: the end
        self._due_s = 0.0
        self.transport: asyncio.Transport | None = None
        self.other: Way | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        raw = transport.get_extra_info("socket")
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        self._later(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._later(None)

    def _later(self, data: bytes | None) -> None:
        self._due_s = max(self._due_s, self._loop.time() + self._delay.draw())
        self._waiting.append((self._due_s, data))
        self._loop.call_at(self._due_s, self.flush)

    def flush(self) -> None:
        """Pass on what is due, once the other end is there and the line is up."""
        end = self.other.transport if self.other is not None else None
        if end is None:
            return
        if not self._delay.passes.is_set():
            self._loop.call_later(BLIND_S, self.flush)
            return
        now_s = self._loop.time()
        while self._waiting and self._waiting[0][0] <= now_s + EARLY_S:
            _, data = self._waiting.popleft()
            if data is None:
                end.close()
            elif not end.is_closing():
                end.write(data)


async def relay(listen: tuple[str, int], to: tuple[str, int], delay: Delay) -> asyncio.Server:
    """A server that joins each connection with one of its own to ``to``."""
    loop = asyncio.get_running_loop()
    joining: set[asyncio.Task[None]] = set()

    def accept() -> Way:
        near = Way(delay)
        task = loop.create_task(join(near))
        joining.add(task)
        task.add_done_callback(joining.discard)
        return near

    async def join(near: Way) -> None:
        try:
            _, far = await loop.create_connection(lambda: Way(delay), *to)
        except OSError:
            if near.transport is not None:
                near.transport.close()
            return
        near.other, far.other = far, near
        near.flush()

    return await loop.create_server(accept, *listen)


async def serve(listen: tuple[str, int], to: tuple[str, int], delay: Delay) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGINT, stop.set)
    loop.add_signal_handler(signal.SIGUSR1, delay.toggle)
    server = await relay(listen, to, delay)
    await stop.wait()
    server.close()


def address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("listen", type=address, metavar="FROM", help="host:port to take connections at")
    parser.add_argument("to", type=address, metavar="TO", help="host:port to which they lead")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="one way")
    parser.add_argument("--jitter-ms", type=float, default=0.0, help="at most so much more, one way")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    loop = exact_loop()
    with contextlib.suppress(KeyboardInterrupt), contextlib.closing(loop):
        delay = Delay(arguments.delay_ms / 1e3, arguments.jitter_ms / 1e3, random.Random(arguments.seed))
        loop.run_until_complete(serve(arguments.listen, arguments.to, delay))


def exact_loop() -> asyncio.AbstractEventLoop:
    """An event loop whose timers are not rounded to milliseconds."""
    return asyncio.SelectorEventLoop(selectors.SelectSelector())


if __name__ == "__main__":
    main()
