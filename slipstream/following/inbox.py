"""Inbox: what other threads tell an engine thread, in order, until it looks.

Rules:
1. ``post`` may be called from any thread and never blocks; what is posted is done on the thread that drains.
2. Whoever has little time says until when, or how much: what is left waits for the next look, however fast more of it
   comes.
3. Of each peer a bounded number of events waits (``Lane``), so that a flood costs its sender and nobody else.

It knows nothing about what is told.
"""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

Event = Callable[[], None]
MOST = 256  # events of one peer that wait: a frame of a draft's is one, and a step has a few


class Events(Protocol):
    """What is used of a queue."""

    def put(self, item: Event | None, /) -> None: ...

    def get(self, block: bool = True, timeout: float | None = None) -> Event | None: ...



class Inbox:
    __slots__ = ("_clock", "_events", "_stopped")

    def __init__(self, clock: Callable[[], float] = time.monotonic, events: Events | None = None) -> None:
        self._clock = clock
        self._events: Events = events if events is not None else queue.SimpleQueue()
        self._stopped = False

    def post(self, event: Event) -> None:
        """From any thread."""
        self._events.put(event)

    def stop(self) -> None:
        """From any thread: ``drain`` returns False once it has come so far."""
        self._events.put(None)

    def drain(self, wait_s: float | None = 0.0, until_s: float = math.inf, for_s: float = math.inf) -> bool:
        """Do what is there, or as much of it as can be begun before ``until_s`` and within ``for_s``; with nothing
        there, wait for something (None: for ever). Returns False when told to stop."""
        try:
            event = self._events.get(wait_s != 0.0, wait_s)
            if for_s < math.inf:
                until_s = min(until_s, self._clock() + for_s)
            while event is not None:
                event()
                if until_s < math.inf and self._clock() >= until_s:
                    return not self._stopped
                event = self._events.get(False)
        except queue.Empty:
            return not self._stopped
        self._stopped = True
        return False


class Lane:
    """What one peer has to tell, in order: posted on its thread, done on the inbox's."""

    __slots__ = ("_done", "_inbox", "_posted")

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._posted = self._done = 0  # each counted by one thread alone

    @property
    def full(self) -> bool:
        """Whether more waits than comes of what was asked for."""
        return self._posted - self._done >= MOST

    def post(self, event: Event) -> bool:
        """False: it is full, and the event is lost."""
        if self._posted - self._done >= MOST:
            return False
        self._posted += 1
        self._inbox.post(partial(self._do, event))
        return True

    def _do(self, event: Event) -> None:
        self._done += 1
        event()
