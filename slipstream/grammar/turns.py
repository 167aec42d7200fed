"""Turns: grammars are tried and compiled in one thread, and those who ask take turns.

Rules:
1. ``MAX_EACH`` of a namespace may wait, its share of that while others wait too, and ``MAX_WAITING`` of all. Who finds
   no room is refused.
2. Namespaces take turns, so many grammars of one hold up another's by one at a time.
3. Who goes away before his turn is passed over.

It knows nothing about what is done in a turn.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from slipstream.base.paced import PacedThread

MAX_EACH, MAX_WAITING = 64, 256
Made = TypeVar("Made")
Job = tuple[Callable[[], Any], "asyncio.Future[Any]"]


class Turns:
    """Make it anywhere, use it on one event loop."""

    def __init__(self) -> None:
        self._thread = PacedThread("grammars", 0.1)
        self._waiting: OrderedDict[str, deque[Job]] = OrderedDict()  # by namespace, whose turn is next first
        self._num_waiting = 0
        self._busy = False

    def run(self, namespace: str, work: Callable[[], Made]) -> asyncio.Future[Made]:
        """What ``work`` returns or raises, in its turn. Raises CapacityError."""
        own = len(self._waiting.get(namespace, ()))
        share = max(1, MAX_EACH // len({namespace, *self._waiting}))
        if own >= share or self._num_waiting >= MAX_WAITING:
            raise self._thread.refusal("too many grammars wait to be compiled; try again later", self._num_waiting)
        future: asyncio.Future[Made] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(namespace, deque()).append((work, future))
        self._num_waiting += 1
        self._begin()
        return future

    def close(self) -> None:
        """Nobody waits any more; a turn that has begun ends by itself."""
        self._thread.close()
        for jobs in self._waiting.values():
            for _, future in jobs:
                future.cancel()
        self._waiting.clear()
        self._num_waiting = 0

    def _begin(self) -> None:
        while self._waiting and not self._busy:
            namespace, jobs = self._waiting.popitem(last=False)
            work, future = jobs.popleft()
            self._num_waiting -= 1
            if jobs:
                self._waiting[namespace] = jobs
            if not future.done():
                self._busy = True
                soon = asyncio.get_running_loop().call_soon_threadsafe
                self._thread.submit(work, soon, partial(self._end, future))

    def _end(self, future: asyncio.Future[Any], made: Future[Any]) -> None:
        self._busy = False
        if made.cancelled():
            future.cancel()
        elif not future.done():
            error = made.exception()
            if error is None:
                future.set_result(made.result())
            else:
                future.set_exception(error)
        self._begin()
