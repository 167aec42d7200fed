"""A network between two processes: ``python -m bench.delayed FROM TO --delay-ms 0.5`` relays TCP with a delay.

Rules:
1. Bytes leave ``delay`` after they arrived, in both directions, and never overtake each other: a round trip is twice
   the delay.
2. Timers are exact to about 0.1 ms: the loop waits by ``select``, because ``epoll`` rounds up to whole milliseconds.

It knows nothing about the content.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import selectors

from slipstream.base.address import host_port

CHUNK_BYTES = 1 << 16


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    """Copy bytes in one direction, each ``delay_s`` seconds late, until the end of input."""
    loop, due_s = asyncio.get_running_loop(), 0.0
    while data := await reader.read(CHUNK_BYTES):
        due_s = max(due_s + 1e-6, loop.time() + delay_s)
        loop.call_at(due_s, writer.write, data)
    loop.call_later(delay_s, writer.close)


async def relay(listen: tuple[str, int], to: tuple[str, int], delay_s: float) -> asyncio.Server:
    """A server that relays each connection to a new connection to ``to``."""

    loop = asyncio.get_running_loop()

    async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError):
                far_reader, far_writer = await asyncio.open_connection(*to)
                await asyncio.gather(pump(reader, far_writer, delay_s), pump(far_reader, writer, delay_s))
        finally:
            if not loop.is_closed():
                loop.call_later(delay_s, writer.close)

    return await asyncio.start_server(join, *listen)


async def serve(listen: tuple[str, int], to: tuple[str, int], delay_s: float) -> None:
    """Relay until a signal ends the process."""
    async with await relay(listen, to, delay_s) as server:
        await server.serve_forever()


def exact_loop() -> asyncio.AbstractEventLoop:
    """An event loop whose timers are not rounded to milliseconds."""
    return asyncio.SelectorEventLoop(selectors.SelectSelector())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("listen", type=host_port, metavar="FROM", help="host:port to take connections at")
    parser.add_argument("to", type=host_port, metavar="TO", help="host:port to which they lead")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="one way")
    arguments = parser.parse_args()
    with contextlib.closing(exact_loop()) as loop:
        loop.run_until_complete(serve(arguments.listen, arguments.to, arguments.delay_ms / 1e3))


if __name__ == "__main__":
    main()
