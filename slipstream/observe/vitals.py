"""Vitals: whether the threads and tasks that a service needs are alive.

Rules:
1. A death is reported once, with its reason. The service is then not ready, and ``until`` raises the reason, because
   half a service looks healthy and answers nobody.
2. Others may wait for ever for the dead part (a device for a rank). So ``GRACE_S`` after a death that ``until``
   reported, the process exits with code 1, unless it has ended by then.
3. Each thread beats, also when idle; so do the event loop, and another engine when it answers. One that is silent for
   ``SILENT_S`` makes the service not ready until it beats again. It is not ended: it may be compiling, and after a
   restart it would compile again. A step of 512 rows of 8 billion weights takes 80 s where 100 GFLOP/s are computed.
4. Inside another engine's process a death is only reported; it ends nothing.
5. ``watch_lag`` measures ten times a second how late an event loop runs: all its tasks are delayed by that time.

It knows nothing about what they do.
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
BEAT_S = 10.0  # a thread waits no longer for something to do
GRACE_S = 20.0
LOOK_S = 0.5
LAG_EVERY_S = 0.1


@dataclass(slots=True)
class Pulse:
    """Made by ``Vitals.pulse``. Who goes on writes the time, by the vitals' clock: that is a beat."""

    name: str
    beaten_s: float | None = None  # None: it does not beat, or has ended


class Supervised(threading.Thread):
    """Made by ``Vitals.thread``. That ``work`` returns is an end that was asked for; that it raises is none."""

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
    """Of one service, which is called ``part`` in logs."""

    def __init__(self, part: str, clock: Callable[[], float] = time.monotonic,
                 exits: Callable[[int], object] = os._exit) -> None:
        self.clock = clock
        self._log = logger(part)
        self._exits = exits
        self._lock = threading.Lock()
        self._pulses: list[Pulse] = []
        self._error: SlipstreamError | None = None
        self._awaited = False
        self._silent: str | None = None  # as it was told
        self._last: threading.Timer | None = None

    def thread(self, name: str, work: Callable[[], None]) -> Supervised:
        """One that is to be started."""
        return Supervised(name, work, self)

    def pulse(self, name: str) -> Pulse:
        """A pulse for a part that must keep beating after its first beat."""
        one = Pulse(name)
        self._pulses.append(one)
        return one

    def follow(self, task: asyncio.Task[None]) -> None:
        """Also this task may not die; it may end."""
        task.add_done_callback(self._ended)

    def lost(self, name: str, error: BaseException) -> None:
        """``name`` is gone. From any thread; only the first counts."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error if isinstance(error, SlipstreamError) else PartLost(
                f"{name} has ended: {type(error).__name__}: {error}")
            self._arm()
        self._log.error("lost", lost=name, problem=str(self._error), exc_info=error)

    @property
    def ready(self) -> bool:
        """Whether all live and none is silent. From any thread."""
        return self._error is None and self._silence() is None

    def look(self) -> bool:
        """Tell of silence and of its end. Returns ``ready``; raises what was lost."""
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
        """The service has come to its end."""
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
        """The name of what is silent."""
        now_s = self.clock()
        return next((one.name for one in self._pulses
                     if (beaten_s := one.beaten_s) is not None and now_s - beaten_s > SILENT_S), None)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.lost(task.get_coro().__qualname__, error)  # type: ignore[union-attr]


async def until(stop: asyncio.Event, *vitals: Vitals,
                show: Callable[[bool], Awaitable[None]] | None = None) -> None:
    """Wait for ``stop``. Raises what is lost before. ``show`` is told whenever readiness changes. The event loop that
    waits beats, too."""
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
async def kept_up(*work: Coroutine[Any, Any, None], vitals: Vitals | None = None) -> AsyncIterator[None]:
    """Run ``work`` beside the block, and end it with the block. ``vitals`` hear of what fails before."""
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
    """Tell by how many seconds this task was woken late, until cancelled (rule 5)."""
    while True:
        due_s = clock() + LAG_EVERY_S
        await sleep(LAG_EVERY_S)
        tell(max(clock() - due_s, 0.0))
