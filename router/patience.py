"""Limits on waiting, without a task or a timer for each wait: those cost more than a token's other work.

Rules:
1. ``with limit: await …`` raises what the limit was made with when it fires, and nothing else differs from waiting
   without it: who is cancelled from outside stays cancelled.
2. One task waits within a limit at a time. A limit that has fired lets nobody begin to wait.

It knows nothing about what is awaited.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any


class Limit:
    """Ends whoever waits within it once it is told to ``fire``. ``error`` makes what is raised."""

    __slots__ = ("_cancelling", "_error", "_task", "fired")

    def __init__(self, error: Callable[[], Exception]) -> None:
        self.fired = False
        self._error = error
        self._task: asyncio.Task[Any] | None = None  # that waits now
        self._cancelling = 0

    @property
    def waiting(self) -> bool:
        return self._task is not None

    def fire(self) -> None:
        if not self.fired:
            self.fired = True
            if self._task is not None:
                self._task.cancel()

    def __enter__(self) -> None:
        if self.fired:
            raise self._error()
        self._task = task = asyncio.current_task()
        assert task is not None
        self._cancelling = task.cancelling()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        task, self._task = self._task, None
        if self.fired and task is not None:
            alone = task.uncancel() <= self._cancelling
            if alone and kind is asyncio.CancelledError:
                raise self._error() from error


class TimeLimit:
    """``seconds`` for all waits together from now on, or with ``each`` for every wait. Make it on the event loop and
    ``close`` it."""

    __slots__ = ("_began_s", "_each", "_limit", "_loop", "_seconds", "_timer")

    def __init__(self, seconds: float, error: Callable[[], Exception], *, each: bool = False) -> None:
        self._seconds = seconds
        self._each = each
        self._limit = Limit(error)
        self._loop = asyncio.get_running_loop()
        self._began_s = self._loop.time()
        self._timer = self._loop.call_later(seconds, self._look)

    def close(self) -> None:
        self._timer.cancel()

    def __enter__(self) -> None:
        if self._each:
            self._began_s = self._loop.time()
        self._limit.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._limit.__exit__(kind, error, trace)

    def _look(self) -> None:
        left_s = self._began_s + self._seconds - self._loop.time()
        if self._each and (not self._limit.waiting or left_s > 0):
            # Nobody waits, or for a shorter time: look again when the present wait, or one that begins now, is over.
            self._timer = self._loop.call_later(left_s if self._limit.waiting else self._seconds, self._look)
        else:
            self._limit.fire()
