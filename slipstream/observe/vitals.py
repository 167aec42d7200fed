"""Vitals: watches the threads and tasks that a service needs to work.

Rules:
1. If one dies, that is logged once with its reason. The service is then no longer ready, and ``wait_until_stopped``
   raises the reason: a service without one of its parts would look healthy and not answer.
2. Other parts may then wait for ever (a device for a rank). So ``GRACE_S`` after a death the process ends with code 1,
   unless the service has ended by then. This holds only where ``wait_until_stopped`` is waiting.
3. Threads write a beat regularly, even when idle; so does the event loop, and an engine of another project when it
   answers. If one is silent for ``SILENT_S``, the service is not ready until it beats again. It is not restarted,
   because it may be compiling and would only begin again. A step of 512 rows of 8 billion weights takes 80 s at 100
   GFLOP/s.
4. In the process of another project (vLLM) ``wait_until_stopped`` is not called: a death is logged and ends nothing.
5. ``watch_lag`` measures ten times a second how late the event loop is: everything on it is delayed as much.

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
CHECK_S = 0.5
LAG_EVERY_S = 0.1


@dataclass(slots=True)
class Pulse:
    """Made by ``Vitals.pulse``. A beat is the present time of the vitals' clock, written into ``last_beat_s``."""

    name: str
    last_beat_s: float | None = None  # None: it does not beat, or has ended


class SupervisedThread(threading.Thread):
    """Made by ``Vitals.thread``. If ``work`` returns, the thread was asked to end; if it raises, the thread is lost."""

    def __init__(self, name: str, work: Callable[[], None], vitals: Vitals) -> None:
        super().__init__(name=name, daemon=True)
        self._work, self._vitals = work, vitals
        self.pulse = vitals.pulse(name)

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._vitals.report_lost(self.name, error)
        finally:
            self.pulse.last_beat_s = None


class Vitals:
    """The vitals of one service, which is called ``part`` in logs."""

    def __init__(self, part: str, clock: Callable[[], float] = time.monotonic,
                 exit_process: Callable[[int], object] = os._exit) -> None:
        self.clock = clock
        self._log = logger(part)
        self._exit_process = exit_process
        self._lock = threading.Lock()
        self._pulses: list[Pulse] = []
        self._error: SlipstreamError | None = None
        self._exit_armed = False
        self._silent: str | None = None  # the silent thread that was logged last
        self._exit_timer: threading.Timer | None = None

    def thread(self, name: str, work: Callable[[], None]) -> SupervisedThread:
        """A watched thread; the caller starts it."""
        return SupervisedThread(name, work, self)

    def pulse(self, name: str) -> Pulse:
        """A pulse for something that must beat regularly after its first beat."""
        pulse = Pulse(name)
        self._pulses.append(pulse)
        return pulse

    def follow(self, task: asyncio.Task[None]) -> None:
        """Watch a task: it may end, but not with an error."""
        task.add_done_callback(self._on_task_end)

    def report_lost(self, name: str, error: BaseException) -> None:
        """Report that ``name`` has died. From any thread; only the first report counts."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error if isinstance(error, SlipstreamError) else PartLost(
                f"{name} has ended: {type(error).__name__}: {error}")
            self._start_exit_timer()
        self._log.error("lost", lost=name, problem=str(self._error), exc_info=error)

    @property
    def ready(self) -> bool:
        """Whether no part has died and none is silent. From any thread."""
        return self._error is None and self._silent_part() is None

    def check(self) -> bool:
        """Log when a part becomes silent or beats again. Returns ``ready``; raises the error of a part that died."""
        if not self._exit_armed:
            with self._lock:
                self._exit_armed = True
                self._start_exit_timer()
        if self._error is not None:
            raise self._error
        silent, before = self._silent_part(), self._silent
        if silent is not None and before is None:
            self._log.warning("silent: not ready", thread=silent)
        elif silent is None and before is not None:
            self._log.info("goes on", thread=before)
        self._silent = silent
        return silent is None

    def disarm_exit(self) -> None:
        """Call it when the service has ended: the process is not ended any more."""
        with self._lock:
            self._exit_armed = False
            if self._exit_timer is not None:
                self._exit_timer.cancel()

    def _start_exit_timer(self) -> None:
        if self._exit_armed and self._error is not None:
            self._exit_timer = threading.Timer(GRACE_S, partial(self._exit_process, 1))
            self._exit_timer.daemon = True
            self._exit_timer.start()

    def _silent_part(self) -> str | None:
        """The name of a silent part; None: there is none."""
        now_s = self.clock()
        return next((pulse.name for pulse in self._pulses
                     if (last_beat_s := pulse.last_beat_s) is not None and now_s - last_beat_s > SILENT_S), None)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.report_lost(task.get_coro().__qualname__, error)  # type: ignore[union-attr]


async def wait_until_stopped(stop: asyncio.Event, *vitals: Vitals,
                             show: Callable[[bool], Awaitable[None]] | None = None) -> None:
    """Wait for ``stop``. Raises the error of a part that dies before. ``show`` is called with readiness whenever it
    changes. The waiting event loop beats, too."""
    ready, pulses = True, [(each.pulse("event loop"), each.clock) for each in vitals]
    try:
        while not stop.is_set():
            for pulse, clock in pulses:
                pulse.last_beat_s = clock()
            ready_now = min(each.check() for each in vitals)
            if ready_now != ready and show is not None:
                await show(ready_now)
            ready = ready_now
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), CHECK_S)
    finally:
        for pulse, _ in pulses:
            pulse.last_beat_s = None


@asynccontextmanager
async def background_tasks(*work: Coroutine[Any, Any, None], vitals: Vitals | None = None) -> AsyncIterator[None]:
    """Run ``work`` while the block runs, and cancel it at the block's end. ``vitals`` get errors before that."""
    tasks = [asyncio.create_task(coroutine) for coroutine in work]
    if vitals is not None:
        for task in tasks:
            vitals.follow(task)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def watch_lag(observe: Callable[[float], None], clock: Callable[[], float] = time.monotonic,
                    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
    """Call ``observe`` with the seconds by which this task was woken late, until cancelled (rule 5)."""
    while True:
        due_s = clock() + LAG_EVERY_S
        await sleep(LAG_EVERY_S)
        observe(max(clock() - due_s, 0.0))
