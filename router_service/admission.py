"""Waiting: how many answers run at once, how many wait for room, who is turned away; and limits on any wait.

Rules:
1. First come, first served: a request for several answers is not overtaken while it waits.
2. Beyond the queue a request is refused at once (429 with a time to come back), so that waiting stays bounded.
3. Closing turns away everyone who waits; who is inside may finish.
4. ``with limit: await …`` raises what the limit was made with when it fires, and nothing else differs from waiting
   without it: who is cancelled from outside stays cancelled. It takes no task or timer for each wait: those cost more
   than a token's other work. One task waits within a limit at a time; one that has fired lets nobody begin to wait.

It knows nothing about targets or text, nor what is awaited.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any

from slipstream.base.errors import CapacityError, Draining, InvalidRequest

MAX_RETRY_AFTER_S = 30.0
WAITING = 2  # answers for each that may run: who comes last waits for two others, well within a request's time limit


class Admission:
    """Room for ``max_in_flight`` answers and a queue. ``changed`` hears (in flight, queued)."""

    def __init__(self, max_in_flight: int, changed: Callable[[int, int], None]) -> None:
        self.in_flight = 0
        self.queued = 0
        self.closed = False
        self._entered = 0
        self._max_in_flight = max_in_flight
        self._max_queue = WAITING * max_in_flight
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._changed = changed
        self._empty = asyncio.Event()
        self._empty.set()

    async def empty(self) -> None:
        """Wait until nothing is inside."""
        await self._empty.wait()

    async def quiet(self, for_s: float) -> None:
        """Wait until nothing has been inside for so many seconds."""
        while True:
            await self.empty()
            entered = self._entered
            await asyncio.sleep(for_s)
            if self._entered == entered:
                return

    async def enter(self, answers: int) -> None:
        """Wait for room for so many answers; each ``enter`` needs one ``leave``. Raises CapacityError, Draining, or
        InvalidRequest for more answers than could ever run."""
        if self.closed:
            raise Draining("the router is shutting down; try again soon")
        if answers > self._max_in_flight:
            raise InvalidRequest("n", f"asks for {answers} answers at once; this server runs {self._max_in_flight}")
        if not self._waiting and self.in_flight + answers <= self._max_in_flight:
            self._take(answers)
            self._changed(self.in_flight, self.queued)
            return
        if self.queued + answers > self._max_queue:
            after_s = min(1.0 + self.queued / self._max_in_flight, MAX_RETRY_AFTER_S)
            raise CapacityError("the server is busy and its queue is full; try again later", after_s)
        await self._wait(answers)

    def leave(self, answers: int) -> None:
        self._give(answers)
        self._let_in()

    def close(self) -> None:
        self.closed = True
        for _, turn in self._waiting:
            if not turn.done():
                turn.set_exception(Draining("the router is shutting down; try again soon"))

    async def _wait(self, answers: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((answers, turn))
        self.queued += answers
        self._changed(self.in_flight, self.queued)
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._give(answers)  # let in and given up in the same moment
            else:
                self._forget(answers, turn)
            self._let_in()
            raise

    def _forget(self, answers: int, turn: asyncio.Future[None]) -> None:
        with contextlib.suppress(ValueError):
            self._waiting.remove((answers, turn))
            self.queued -= answers

    def _let_in(self) -> None:
        while self._waiting and self.in_flight + self._waiting[0][0] <= self._max_in_flight:
            answers, turn = self._waiting.popleft()
            self.queued -= answers
            if not turn.done():
                self._take(answers)
                turn.set_result(None)
        self._changed(self.in_flight, self.queued)

    def _take(self, answers: int) -> None:
        self.in_flight += answers
        self._entered += 1
        self._empty.clear()

    def _give(self, answers: int) -> None:
        self.in_flight -= answers
        if self.in_flight == 0:
            self._empty.set()


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

