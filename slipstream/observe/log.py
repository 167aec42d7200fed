"""Structured logs on standard error: one JSON object a line; on a terminal, lines for a person.

Rules:
1. INFO is for life-cycle and changes of mode; nothing is logged for every request or round above DEBUG.
2. Values under the keys of user text, answers and secrets are replaced, so that such a mistake in our code is visible
   and the value is not. Log ids and lengths instead.
3. If a log cannot be written (a full disk, a pipe without a reader), its lines are lost; answers go on.

It knows nothing about services. The configuration of structlog is one for the process, so only a composition root
calls ``configure``.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import traceback
from collections.abc import Mapping, MutableMapping
from os.path import basename
from typing import Any, TextIO, cast

import structlog

from slipstream.base.config import LogSection

REFUSED_KEYS = frozenset({
    "prompt", "prompts", "text", "content", "message", "messages", "completion", "answer", "tokens", "stop",
    "api_key", "api_keys", "key", "password", "secret", "authorization", "headers", "body",
})
REFUSED = "[refused]"
NO_FILES = "socket.accept() out of system resource"  # how asyncio begins
NO_FILES_S = 10.0


class Lenient:
    """Wraps ``stream``; lines that cannot be written are dropped."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except (OSError, ValueError):  # ValueError: it was closed
            return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()


class OpenFilesFilter(logging.Filter):
    """Of asyncio's lines that no connection can be accepted, as no more files may be open, one in ``NO_FILES_S``: it
    tries again each second, and writes one for each place in the queue of connections."""

    def __init__(self) -> None:
        super().__init__()
        self._next_s = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        if not str(record.msg).startswith(NO_FILES):
            return True
        if record.created < self._next_s:
            return False
        self._next_s = record.created + NO_FILES_S
        return True


def configure(section: LogSection, stream: TextIO | None = None) -> None:
    """Send all logs of this process, those of libraries included, to ``stream`` (None: standard error)."""
    out = sys.stderr if stream is None else stream
    lenient = cast(TextIO, Lenient(out))
    level = logging.getLevelNamesMapping()[section.level.upper()]
    shared: list[Any] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        refuse_private,
    ]
    renderer: Any = (structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback) if out.isatty()
                     else structlog.processors.JSONRenderer())
    structlog.configure(
        processors=[*shared, structlog.processors.format_exc_info, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file=lenient),
    )
    _adopt_libraries(lenient, level, shared, renderer)


def logger(name: str, **fields: str) -> Any:
    """A logger of one part: ``logger("router").info("draining", running=3)``. ``fields`` are in each of its
    lines."""
    return structlog.get_logger(part=name, **fields)


def bug(error: Exception) -> dict[str, Any]:
    """Fields of a line: the class of ``error`` and its place. Not its message, which may quote what a user wrote."""
    return {"error": type(error).__name__, "at": [f"{basename(frame.filename)}:{frame.lineno} {frame.name}"
                                                  for frame in traceback.extract_tb(error.__traceback__)[-6:]]}


def refuse_private(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """The processor of rule 2; it checks keys of nested mappings too."""
    for key, value in event.items():
        if key.lower() in REFUSED_KEYS:
            event[key] = REFUSED
        elif isinstance(value, Mapping):
            event[key] = refuse_private(_logger, _method, dict(value))
    return event


def _adopt_libraries(out: TextIO, level: int, shared: list[Any], renderer: Any) -> None:
    """Give log lines of libraries, which use the standard library, the same form; only those from WARNING up."""
    handler = logging.StreamHandler(out)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared, structlog.processors.format_exc_info],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
    ))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(max(level, logging.WARNING))
    logging.getLogger("asyncio").filters = [OpenFilesFilter()]
