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
    """Ends whoever waits within it once it is told to ``fire``, or ``after_s`` seconds from now unless it is closed
    (make it on the event loop then). ``error`` makes what is raised."""

    __slots__ = ("_cancelling", "_error", "_task", "_timer", "fired")

    def __init__(self, error: Callable[[], Exception], after_s: float | None = None) -> None:
        self.fired = False
        self._error = error
        self._task: asyncio.Task[Any] | None = None  # that waits now
        self._cancelling = 0
        self._timer = None if after_s is None else asyncio.get_running_loop().call_later(after_s, self.fire)

    def close(self) -> None:
        """Time fires it no more."""
        if self._timer is not None:
            self._timer.cancel()

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

