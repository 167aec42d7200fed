"""Work that would block an event loop, in one thread, in which owners take turns.

Rules:
1. However many jobs one owner has, another owner waits for one of them only. Work in the thread must release the
   interpreter lock by itself.
2. Waiting jobs have a size. Those of one owner may have ``max_per_owner`` together (its share of it while others wait
   too), those of all ``max_total``. One job of each owner may always wait. A job beyond that is refused with a time to
   retry: how long the waiting jobs would take if each took as long as the latest one.
3. A job whose future is cancelled before its turn is dropped.
4. A job that has begun may outlive its event loop; its result is then dropped.

It knows nothing about the work.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from slipstream.base.errors import CapacityError

Result = TypeVar("Result")


@dataclass(slots=True, eq=False)
class Job:
    owner: str
    work: Callable[[], Any]
    future: asyncio.Future[Any]
    size: int


class FairExecutor:
    """Make it anywhere, use it on one event loop."""

    def __init__(self, name: str, first_job_s: float, refusal: str, max_per_owner: int,
                 max_total: float = math.inf) -> None:
        """first_job_s: what a job is taken to need before one has ended; refusal: the message for refused jobs."""
        self._thread = ThreadPoolExecutor(1, name)
        self._last_job_s = first_job_s
        self._refusal = refusal
        self._max_per_owner, self._max_total = max_per_owner, max_total
        self._waiting: OrderedDict[str, deque[Job]] = OrderedDict()  # by owner, the next one first
        self._sizes: Counter[str] = Counter()
        self._busy = False

    def submit(self, owner: str, work: Callable[[], Result], size: int = 1,
               never_refuse: bool = False) -> asyncio.Future[Result]:
        """The future of what ``work`` returns or raises, in its turn. ``never_refuse``: it waits, however much waits
        already. Raises CapacityError."""
        own, share = self._sizes[owner], self._max_per_owner // len({owner, *self._waiting})
        if not never_refuse and ((own and own + size > share) or self._sizes.total() + size > self._max_total):
            num_before = sum(map(len, self._waiting.values())) + self._busy
            raise CapacityError(self._refusal, num_before * self._last_job_s)
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        job = Job(owner, work, future, size)
        self._waiting.setdefault(owner, deque()).append(job)
        self._sizes[owner] += size
        future.add_done_callback(lambda _: self._remove(job))
        self._start_next()
        return future

    def close(self) -> None:
        """Cancel all waiting jobs; one that has begun ends by itself."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        for jobs in self._waiting.values():
            for job in jobs:
                job.future.cancel()

    def _start_next(self) -> None:
        while self._waiting and not self._busy:
            owner, jobs = next(iter(self._waiting.items()))
            job = jobs[0]
            self._remove(job)
            if jobs:
                self._waiting.move_to_end(owner)
            if not job.future.done():
                self._busy = True
                self._thread.submit(self._timed, job.work).add_done_callback(partial(self._finish_soon, job))

    def _timed(self, work: Callable[[], Any]) -> Any:
        began_s = time.monotonic()
        try:
            return work()
        finally:
            self._last_job_s = time.monotonic() - began_s

    def _finish_soon(self, job: Job, done: Future[Any]) -> None:
        """Called in the thread."""
        with suppress(RuntimeError):  # the loop is closed
            job.future.get_loop().call_soon_threadsafe(self._finish, job.future, done)

    def _remove(self, job: Job) -> None:
        """Remove ``job`` from the waiting ones, if it is there."""
        jobs = self._waiting.get(job.owner, deque())
        if job not in jobs:
            return
        jobs.remove(job)
        self._sizes[job.owner] -= job.size
        if not jobs:
            del self._waiting[job.owner], self._sizes[job.owner]

    def _finish(self, future: asyncio.Future[Any], done: Future[Any]) -> None:
        self._busy = False
        if done.cancelled():
            future.cancel()
        elif not future.done():
            error = done.exception()
            if error is None:
                future.set_result(done.result())
            else:
                future.set_exception(error)
        self._start_next()
