"""What a token costs a process that does nothing but send it: the floor under ``make bench-router``.

A process of its own writes one chunk to each of some sockets every step, by asyncio, and tells the processor time that
it took by writes; the caller reads them. It knows nothing about routers.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time

CHUNK = b"a0\r\n" + b"x" * 160 + b"\r\n"  # an event of one token, as HTTP/1.1 chunks it


async def send(streams: int, steps: int, step_s: float) -> None:
    """Write ``steps`` chunks to each of ``streams`` connections to the port that is printed first, then the cost."""
    writers: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: writers.append(writer), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    while len(writers) < streams:
        await asyncio.sleep(0.01)
    began_s = time.process_time()
    for _ in range(steps):
        await asyncio.sleep(step_s)
        for writer in writers:
            writer.write(CHUNK)
    print(1e6 * (time.process_time() - began_s) / (steps * streams), flush=True)
    for writer in writers:
        writer.close()


async def floor(streams: int, step_s: float, steps: int = 80) -> float:
    """Microseconds of processor time of such a process for a chunk."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.floor", str(streams), str(steps), str(step_s), stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    port = int(await process.stdout.readline())

    async def read() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while await reader.read(1 << 16):
            pass
        writer.close()

    await asyncio.gather(*(read() for _ in range(streams)))
    cost_us = float(await process.stdout.readline())
    await process.wait()
    return cost_us


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("streams", type=int)
    parser.add_argument("steps", type=int)
    parser.add_argument("step_s", type=float)
    arguments = parser.parse_args()
    asyncio.run(send(arguments.streams, arguments.steps, arguments.step_s))


if __name__ == "__main__":
    main()
