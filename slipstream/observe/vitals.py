"""Vitals: watches the threads and tasks that a service needs to work.

Rules:
1. If one dies, that is logged once with its reason. The service is then no longer ready, and ``until`` raises the
   reason: a service without one of its parts would look healthy and not answer.
2. Other parts may then wait for ever (a device for a rank). So ``GRACE_S`` after a death the process ends with code 1,
   unless the service has ended by then. This holds only where ``until`` is waiting.
3. Threads write a beat regularly, even when idle; so do an engine of another project, when it answers, and the event
   loop. If one is silent for ``SILENT_S``, the service is not ready until it beats again. It is not restarted, because
   it may be compiling and would only begin again. A step of 512 rows of 8 billion weights takes 80 s at 100 GFLOP/s.
4. In the process of another project (vLLM) ``until`` is not called: a death is logged and ends nothing.
5. ``watch_lag`` measures ten times a second how late the event loop is: everything on it waits as long.

It knows nothing about the work of these parts.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from slipstream.base.errors import PartLost, SlipstreamError
from slipstream.observe.log import logger

SILENT_S = 120.0
BEAT_S = 10.0  # the longest wait of an idle thread between two beats
GRACE_S = 20.0
LOOK_S = 0.5
LAG_EVERY_S = 0.1


@dataclass(slots=True)
class Pulse:
    """Made by ``Vitals.pulse``. A beat is the present time of the vitals' clock, written into ``beaten_s``."""

    name: str
    beaten_s: float | None = None  # None: it does not beat, or has ended


class Supervised(threading.Thread):
    """Made by ``Vitals.thread``. If ``work`` returns, the thread was asked to end; if it raises, the thread is lost."""

    def __init__(self, name: str, work: Callable[[], None], vitals: Vitals) -> None:
        super().__init__(name=name, daemon=True)
        self._work, self._vitals = work, vitals
        self.pulse = vitals.pulse(name)

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._vitals.lost(self.name, error)
        finally:
            self.pulse.beaten_s = None


class Vitals:
    """The vitals of one service, which is called ``part`` in logs."""

    def __init__(self, part: str, clock: Callable[[], float] = time.monotonic,
                 exits: Callable[[int], object] = os._exit) -> None:
        self.clock = clock
        self._log = logger(part)
        self._exits = exits
        self._lock = threading.Lock()
        self._pulses: list[Pulse] = []
        self._error: SlipstreamError | None = None
        self._awaited = False
        self._silent: str | None = None  # the silent thread that was logged last
        self._last: threading.Timer | None = None

    def thread(self, name: str, work: Callable[[], None]) -> Supervised:
        """A watched thread; the caller starts it."""
        return Supervised(name, work, self)

    def pulse(self, name: str) -> Pulse:
        """A pulse for something that must beat regularly after its first beat."""
        one = Pulse(name)
        self._pulses.append(one)
        return one

    def follow(self, task: asyncio.Task[None]) -> None:
        """Watch a task: it may end, but not with an error."""
        task.add_done_callback(self._ended)

    def lost(self, name: str, error: BaseException) -> None:
        """Report that ``name`` has died. From any thread; only the first report counts."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error if isinstance(error, SlipstreamError) else PartLost(
                f"{name} has ended: {type(error).__name__}: {error}")
            self._arm()
        self._log.error("lost", lost=name, problem=str(self._error), exc_info=error)

    @property
    def ready(self) -> bool:
        """Whether no part has died and none is silent. From any thread."""
        return self._error is None and self._silence() is None

    def look(self) -> bool:
        """Log when a part becomes silent or beats again. Returns ``ready``; raises the error of a part that died."""
        if not self._awaited:
            with self._lock:
                self._awaited = True
                self._arm()
        if self._error is not None:
            raise self._error
        silent, before = self._silence(), self._silent
        if silent is not None and before is None:
            self._log.warning("silent: not ready", thread=silent)
        elif silent is None and before is not None:
            self._log.info("goes on", thread=before)
        self._silent = silent
        return silent is None

    def end(self) -> None:
        """The service has ended: do not end the process any more."""
        with self._lock:
            self._awaited = False
            if self._last is not None:
                self._last.cancel()

    def _arm(self) -> None:
        if self._awaited and self._error is not None:
            self._last = threading.Timer(GRACE_S, partial(self._exits, 1))
            self._last.daemon = True
            self._last.start()

    def _silence(self) -> str | None:
        """The name of a silent part; None: there is none."""
        now_s = self.clock()
        return next((one.name for one in self._pulses
                     if (beaten_s := one.beaten_s) is not None and now_s - beaten_s > SILENT_S), None)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.lost(task.get_coro().__qualname__, error)  # type: ignore[union-attr]


async def until(stop: asyncio.Event, *vitals: Vitals,
                show: Callable[[bool], Awaitable[None]] | None = None) -> None:
    """Wait for ``stop``. Raises the error of a part that dies before. ``show`` is called with readiness whenever it
    changes. The waiting event loop beats, too."""
    ready, beats = True, [(one.pulse("event loop"), one.clock) for one in vitals]
    try:
        while not stop.is_set():
            for pulse, clock in beats:
                pulse.beaten_s = clock()
            now = min(one.look() for one in vitals)
            if now != ready and show is not None:
                await show(now)
            ready = now
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), LOOK_S)
    finally:
        for pulse, _ in beats:
            pulse.beaten_s = None


@asynccontextmanager
async def background_tasks(*work: Coroutine[Any, Any, None], vitals: Vitals | None = None) -> AsyncIterator[None]:
    """Run ``work`` beside the block, and cancel it at the block's end. ``vitals`` get errors before that."""
    tasks = [asyncio.create_task(one) for one in work]
    if vitals is not None:
        for task in tasks:
            vitals.follow(task)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def watch_lag(tell: Callable[[float], None], clock: Callable[[], float] = time.monotonic,
                    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
    """Call ``tell`` with the seconds by which this task was woken late, until cancelled (rule 5)."""
    while True:
        due_s = clock() + LAG_EVERY_S
        await sleep(LAG_EVERY_S)
        tell(max(clock() - due_s, 0.0))
