"""PacedThread: one thread for work that would hold up an event loop, and the pace at which it is done.

Rules:
1. It works on one thing at a time, in the order in which things are given.
2. Who finds too many before him is refused, and told to come back when they will have been served at the pace of the
   latest one. How many are too many is the caller's to say.
3. Work that has begun may outlive the event loop that gave it; then nobody hears of its end.

It knows nothing about what is done, which has to leave the interpreter to others by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from slipstream.base.errors import CapacityError

Made = TypeVar("Made")


class PacedThread:
    def __init__(self, name: str, took_s: float) -> None:
        """took_s: what the first one is taken to need."""
        self._thread = ThreadPoolExecutor(1, name)
        self._took_s = took_s

    def submit(self, work: Callable[[], Made], soon: Callable[..., object],
               then: Callable[[Future[Made]], None]) -> Future[Made]:
        """``soon``: an event loop's ``call_soon_threadsafe``, by which ``then`` hears when ``work`` is done or left
        out."""
        def tell(made: Future[Made]) -> None:
            with suppress(RuntimeError):  # the loop is closed
                soon(then, made)

        future = self._thread.submit(self._timed, work)
        future.add_done_callback(tell)
        return future

    def refusal(self, message: str, waiting: int) -> CapacityError:
        """Of one more, while so many wait."""
        return CapacityError(message, waiting * self._took_s)

    def close(self) -> None:
        """Nobody waits any more; work that has begun ends by itself."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _timed(self, work: Callable[[], Made]) -> Made:
        began_s = time.monotonic()
        try:
            return work()
        finally:
            self._took_s = time.monotonic() - began_s
