"""Inbox: what other threads want done on the engine's thread, in order."""

from __future__ import annotations

import queue
from collections.abc import Callable

Event = Callable[[], None]


class Inbox:
    __slots__ = ("_events", "_stopped")

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._stopped = False

    def post(self, event: Event) -> None:
        """From any thread."""
        self._events.put(event)

    def stop(self) -> None:
        """From any thread: ``drain`` returns False once it has come so far."""
        self._events.put(None)

    def drain(self, wait_s: float | None = 0.0) -> bool:
        """Do what is there; with nothing there, wait for something (None: for ever). Returns False when told to
        stop."""
        try:
            event = self._events.get(block=wait_s != 0.0, timeout=wait_s)
            while event is not None:
                event()
                event = self._events.get_nowait()
        except queue.Empty:
            return not self._stopped
        self._stopped = True
        return False
