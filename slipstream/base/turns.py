"""Work that would block an event loop, in one thread, in which clients take turns.

Rules:
1. However many items one client has, another client waits for one of them only. Work in the thread must release the
   interpreter lock by itself.
2. Waiting work has a size. One client may have ``each`` waiting (its share of ``each`` while others wait too), all
   together ``most``. One item of each client may always wait. Work beyond that is refused with a time to retry: how
   long the waiting work would take at the pace of the latest item.
3. A client that leaves before its turn is skipped, and its work is forgotten.
4. Work that has begun may outlive its event loop; its result is then dropped.

It knows nothing about the work.
"""

from __future__ import annotations

import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from slipstream.base.errors import CapacityError


class Promise(Protocol):
    """A future of an event loop."""

    def done(self) -> bool: ...

    def cancel(self) -> object: ...

    def set_result(self, result: Any, /) -> None: ...

    def set_exception(self, exception: BaseException, /) -> None: ...

    def add_done_callback(self, heard: Callable[[Any], object], /) -> None: ...


@dataclass(slots=True, eq=False)
class Job:
    whose: str
    work: Callable[[], Any]
    future: Promise
    soon: Callable[..., object]
    size: int
    waits: bool = True


class Turns:
    """Make it anywhere, use it in the thread of one event loop."""

    def __init__(self, name: str, took_s: float, refusal: str, each: int, most: float = math.inf) -> None:
        """took_s: what the first one is taken to need; refusal: what is said to who finds no room."""
        self._thread = ThreadPoolExecutor(1, name)
        self._took_s = took_s
        self._refusal = refusal
        self._each, self._most = each, most
        self._waiting: OrderedDict[str, deque[Job]] = OrderedDict()  # by whose they are, whose turn is next first
        self._sizes: Counter[str] = Counter()
        self._busy = False

    def run(self, whose: str, work: Callable[[], Any], future: Promise, soon: Callable[..., object], size: int = 1,
            patient: bool = False) -> None:
        """``future`` gets what ``work`` returns or raises, in its turn. ``soon``: the loop's ``call_soon_threadsafe``;
        ``patient``: it is not refused. Raises CapacityError."""
        own, share = self._sizes[whose], self._each // len({whose, *self._waiting})
        if not patient and ((own and own + size > share) or self._sizes.total() + size > self._most):
            before = sum(map(len, self._waiting.values())) + self._busy
            raise CapacityError(self._refusal, before * self._took_s)
        job = Job(whose, work, future, soon, size)
        self._waiting.setdefault(whose, deque()).append(job)
        self._sizes[whose] += size
        future.add_done_callback(lambda _: self._leave(job))
        self._begin()

    def close(self) -> None:
        """Nobody waits any more; a turn that has begun ends by itself."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        for jobs in self._waiting.values():
            for job in jobs:
                job.future.cancel()

    def _begin(self) -> None:
        while self._waiting and not self._busy:
            whose, jobs = next(iter(self._waiting.items()))
            job = jobs[0]
            self._leave(job)
            if jobs:
                self._waiting.move_to_end(whose)
            if not job.future.done():
                self._busy = True
                self._thread.submit(self._timed, job.work).add_done_callback(partial(self._tell, job))

    def _timed(self, work: Callable[[], Any]) -> Any:
        began_s = time.monotonic()
        try:
            return work()
        finally:
            self._took_s = time.monotonic() - began_s

    def _tell(self, job: Job, made: Future[Any]) -> None:
        """Called in the thread."""
        with suppress(RuntimeError):  # the loop is closed
            job.soon(self._end, job.future, made)

    def _leave(self, job: Job) -> None:
        """It waits no more."""
        if not job.waits:
            return
        job.waits = False
        jobs = self._waiting[job.whose]
        jobs.remove(job)
        self._sizes[job.whose] -= job.size
        if not jobs:
            del self._waiting[job.whose], self._sizes[job.whose]

    def _end(self, future: Promise, made: Future[Any]) -> None:
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
