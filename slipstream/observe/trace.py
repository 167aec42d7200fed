"""A trace of rounds in Chrome's format (chrome://tracing, ui.perfetto.dev): what each pod did, and when, side by side.

Rules:
1. Times come from a monotonic clock and are written as wall-clock time, so that events of several processes can be
   compared; between machines only as well as their clocks agree.
2. Without a path it records nothing. With one it keeps the newest ``MAX_EVENTS`` events and writes them at the end;
   events that other services have written into the file since this one began are kept.
3. It holds numbers and names from our code: no token, no text, no request id.

An arrow leads from ``sent`` to ``received`` with the same key: a message on the wire.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from pathlib import Path
from typing import Any
from zlib import crc32

from slipstream.base.errors import ConfigError
from slipstream.observe.spans import Value
from slipstream.protocol.messages import Growth

MAX_EVENTS = 200_000
DEVICE = "device"  # the row of what a device computes, at which arrows begin and end


class Trace:
    """The trace of one process, called ``name`` in it."""

    def __init__(self, path: str, name: str) -> None:
        """Raises ConfigError where the file could not be written at the end."""
        self._path = path
        if path:
            self._write_text("")
        self.enabled = bool(path)
        self._name = name
        self._pid = crc32(f"{os.getpid()} {name}".encode())  # two traces of one process are shown as two processes
        self._offset_s = time.time() - time.monotonic()
        self._rows: dict[str, int] = {}
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)

    def span(self, row: str, name: str, began_s: float, ended_s: float, **values: Value) -> None:
        """Record that ``name`` lasted from ``began_s`` to ``ended_s``."""
        self._add(row, began_s, ph="X", name=name, dur=round(1e6 * max(0.0, ended_s - began_s), 1), args=values)

    def sent(self, name: str, key: str, at_s: float) -> None:
        """Record that a message left for another process."""
        self._add(DEVICE, at_s, ph="s", cat="wire", name=name, id=key)

    def received(self, name: str, key: str, at_s: float) -> None:
        """Record that a message arrived."""
        self._add(DEVICE, at_s, ph="f", bp="e", cat="wire", name=name, id=key)

    def write(self) -> None:
        """Write the kept events. Raises ConfigError when the file cannot be written."""
        if not self._path:
            return
        pid = self._pid
        names: list[dict[str, Any]] = [{"ph": "M", "pid": pid, "name": "process_name", "args": {"name": self._name}}]
        names += [{"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": row}}
                  for row, tid in self._rows.items()]
        self._write_text(json.dumps({"traceEvents": [*self._events_of_others(), *names, *self._events]}))

    def _write_text(self, text: str) -> None:
        try:
            Path(self._path).write_text(text)
        except OSError as error:
            raise ConfigError(f"log.trace: cannot write {self._path}: {error.strerror}") from error

    def _events_of_others(self) -> list[Any]:
        try:
            events: list[Any] = json.loads(Path(self._path).read_text())["traceEvents"]
        except (OSError, ValueError):
            return []
        return events

    def _add(self, row: str, at_s: float, **event: Any) -> None:
        if self._path:
            event.update(ts=round(1e6 * (at_s + self._offset_s), 1), pid=self._pid,
                         tid=self._rows.setdefault(row, len(self._rows)))
            self._events.append(event)


def commit_key(session: int, base: int) -> str:
    """The key of a Commit's arrow."""
    return f"c{session}.{base}"


def growth_key(growth: Growth) -> str:
    """The key of a Growth's arrow."""
    return f"g{growth.session}.{growth.base}.{int(growth.ids[0]) if len(growth.ids) else 0}"
