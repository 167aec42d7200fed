"""Several completions as one stream of numbered deltas, in the order they come.

It knows nothing about requests or formats.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from router_service.completion import Completion, TextDelta

Numbered = tuple[int, TextDelta]
PENDING = 4  # deltas of one completion that may wait for a slow reader


async def merged(completions: Sequence[Completion]) -> AsyncGenerator[Numbered, None]:
    """(number, delta) of all ``completions``. The first error of any ends the stream with it."""
    queue: asyncio.Queue[Numbered | BaseException | None] = asyncio.Queue(PENDING * len(completions))
    tasks = [asyncio.create_task(_pump(i, c, queue)) for i, c in enumerate(completions)]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(number: int, completion: Completion, queue: asyncio.Queue[Numbered | BaseException | None]) -> None:
    try:
        async for delta in completion:
            await queue.put((number, delta))
    except Exception as error:
        await queue.put(error)
    else:
        await queue.put(None)
