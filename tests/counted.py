"""An event loop whose time is counted: it stands still while anybody has something to do, and leaps when all wait."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Leaps(selectors.SelectSelector):
    now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "all wait, and nothing will ever happen"
        self.now_s += timeout
        return super().select(0)


class CountedLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._leaps = Leaps()
        super().__init__(self._leaps)

    def time(self) -> float:
        return self._leaps.now_s


def counted(work: Coroutine[Any, Any, T]) -> T:
    """What comes of ``work``, whose sleeps take no time."""
    with asyncio.Runner(loop_factory=CountedLoop) as runner:
        return runner.run(work)
