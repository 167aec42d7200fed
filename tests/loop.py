"""An event loop in the hands of a test: its time stands still until it is told to pass, and what is ready is done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager


@contextmanager
def still() -> Iterator[Callable[[float], None]]:
    """The running loop's clock stands. What is yielded lets seconds pass: timers that they make due come next. The
    clock never goes back: it goes on from where it was left."""
    loop = asyncio.get_running_loop()
    real, now_s = loop.time, loop.time()

    def passes(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    loop.time = lambda: now_s  # type: ignore[method-assign]
    try:
        yield passes
    finally:
        ahead_s = max(0.0, now_s - real())
        loop.time = lambda: real() + ahead_s  # type: ignore[method-assign]


async def hurried(work: Coroutine[object, object, None]) -> None:
    """Do ``work``, whose seconds pass as fast as what is ready is done."""
    task = asyncio.create_task(work)
    with still() as passes:
        while not task.done():
            passes(0.01)
            await asyncio.sleep(0)
    await task


async def settled() -> None:
    """All that is ready has been done, and what follows from it, over loopback too."""
    for _ in range(100):
        await asyncio.sleep(0)


async def eventually(holds: Callable[[], bool]) -> None:
    """Wait on the real clock, on a busy machine too."""
    async with asyncio.timeout(120):
        while not holds():
            await asyncio.sleep(0.005)
