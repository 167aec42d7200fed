"""Lanes: threads in which texts become tokens and answers are written, so that the event loop goes on.

Rules:
1. Long texts have a lane of their own: a short one never waits for a long one.
2. Each lane works on one text at a time, whatever its clients do: who goes away frees his place in the lane when the
   work that was begun is done.
3. What takes less than a thread's turn needs none: it is done at once, on the event loop.
4. Who comes to the long lane while texts of ``MAX_WAITING`` characters are there is refused. What is paid for is not:
   an answer that is only to be written waits.

It knows nothing about what a text is turned into.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from slipstream.base.paced import PacedThread

BRIEF_TEXT = 512  # characters or token ids: half a millisecond of a slow tokenizer
LONG_TEXT = 16_384  # characters, or token ids
LARGE_BODY = 1 << 16  # bytes: two milliseconds of the event loop at worst
PAUSE_S = 0.005  # a token takes several turns of the loop from its target to its client
MAX_WAITING = 8 << 21  # characters or token ids: a body of 2 MiB takes one to three seconds
Made = TypeVar("Made")


class Lanes:
    """Two threads. Make it anywhere, use it on one event loop."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(1, "short-texts")
        self._long = PacedThread("long-texts", 1.0)
        self._num_long = self._waiting = 0  # texts in the long lane and their sizes, of the one that is worked on too
        self._large = asyncio.Lock()

    async def run(self, size: int, work: Callable[[], Made], at_once: bool = False, patient: bool = False) -> Made:
        """What ``work`` on a text of that size returns or raises. ``at_once``: it waits for nobody, so a brief
        text needs no thread. Raises CapacityError, but not for who is ``patient``."""
        if at_once and size <= BRIEF_TEXT:
            return work()
        loop = asyncio.get_running_loop()
        if size <= LONG_TEXT:
            return await loop.run_in_executor(self._short, work)
        if self._waiting and self._waiting + size > MAX_WAITING and not patient:
            raise self._long.refusal("too many long prompts wait to be read; try again later", self._num_long)
        self._num_long += 1
        self._waiting += size
        return await asyncio.wrap_future(self._long.submit(work, loop.call_soon_threadsafe, partial(self._left, size)))

    async def beside(self, size: int, work: Callable[[], Made]) -> Made:
        """What ``work`` on so many numbers of an answer gives, beside the event loop if they are many."""
        return await self.run(size, work, at_once=True, patient=True)

    async def pause(self, size: int) -> None:
        """Until a body of so many bytes may be read, which holds the event loop. Whatever follows without a wait
        belongs to its turn."""
        if size > LARGE_BODY:
            async with self._large:
                await asyncio.sleep(PAUSE_S)

    def close(self) -> None:
        """Nobody waits any more; work that has begun ends by itself."""
        self._short.shutdown(wait=False, cancel_futures=True)
        self._long.close()

    def _left(self, size: int, _: Future[Any]) -> None:
        self._num_long -= 1
        self._waiting -= size
