"""Limits on waiting, one timer for all waits of an owner: a timer for every wait costs more than a token's other work.

Rules:
1. ``with limit: await …`` raises what the limit was made with when it takes too long, and nothing else differs from
   waiting without it: who is cancelled from outside stays cancelled.
2. One task waits within a limit at a time.

It knows nothing about what is awaited.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any


class TimeLimit:
    """``seconds`` for all waits together from now on, or with ``each`` for every wait. Make it on the event loop and
    ``close`` it. ``error`` makes what is raised."""

    __slots__ = ("_began_s", "_cancelling", "_each", "_error", "_expired", "_loop", "_seconds", "_task", "_timer")

    def __init__(self, seconds: float, error: Callable[[], Exception], *, each: bool = False) -> None:
        self._seconds = seconds
        self._error = error
        self._each = each
        self._loop = asyncio.get_running_loop()
        self._began_s = self._loop.time()
        self._expired = False
        self._task: asyncio.Task[Any] | None = None  # that waits now
        self._cancelling = 0
        self._timer = self._loop.call_later(seconds, self._look)

    def close(self) -> None:
        self._timer.cancel()

    def __enter__(self) -> None:
        if self._expired:
            raise self._error()
        if self._each:
            self._began_s = self._loop.time()
        self._task = task = asyncio.current_task()
        assert task is not None
        self._cancelling = task.cancelling()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        task, self._task = self._task, None
        if self._expired and task is not None:
            alone = task.uncancel() <= self._cancelling
            if alone and kind is asyncio.CancelledError:
                raise self._error() from error

    def _look(self) -> None:
        left_s = self._began_s + self._seconds - self._loop.time()
        if self._each and (self._task is None or left_s > 0):
            # Nobody waits, or for a shorter time: look again when the present wait, or one that begins now, is over.
            self._timer = self._loop.call_later(left_s if self._task is not None else self._seconds, self._look)
            return
        self._expired = True
        if self._task is not None:
            self._task.cancel()
