"""Inbox: what other threads tell an engine thread, in order, until it looks.

Rules:
1. ``post`` may be called from any thread and never blocks; what is posted is done on the thread that drains.
2. Whoever has little time says until when: what is left waits for the next look, however fast more of it comes.

It knows nothing about what is told.
"""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Callable
from typing import Protocol

Event = Callable[[], None]
MOST = 1024  # events that wait, before it is full: a frame of a draft's is one, and a step has a few


class Events(Protocol):
    """What is used of a queue."""

    def put(self, item: Event | None, /) -> None: ...

    def get(self, block: bool = True, timeout: float | None = None) -> Event | None: ...

    def qsize(self) -> int: ...


class Inbox:
    __slots__ = ("_clock", "_events", "_stopped")

    def __init__(self, clock: Callable[[], float] = time.monotonic, events: Events | None = None) -> None:
        self._clock = clock
        self._events: Events = events if events is not None else queue.SimpleQueue()
        self._stopped = False

    @property
    def full(self) -> bool:
        """Whether more waits than comes of what was asked for. It still takes what is posted."""
        return self._events.qsize() >= MOST

    def post(self, event: Event) -> None:
        """From any thread."""
        self._events.put(event)

    def stop(self) -> None:
        """From any thread: ``drain`` returns False once it has come so far."""
        self._events.put(None)

    def drain(self, wait_s: float | None = 0.0, until_s: float = math.inf) -> bool:
        """Do what is there, or as much of it as can be begun before ``until_s``; with nothing there, wait for something
        (None: for ever). Returns False when told to stop."""
        try:
            event = self._events.get(wait_s != 0.0, wait_s)
            while event is not None:
                event()
                if until_s < math.inf and self._clock() >= until_s:
                    return not self._stopped
                event = self._events.get(False)
        except queue.Empty:
            return not self._stopped
        self._stopped = True
        return False
