"""Logs: what a user wrote and what opens doors never gets into them."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import logging

import pytest

from slipstream.base.config import LogSection
from slipstream.observe.log import REFUSED, REFUSED_KEYS, configure, logger


@pytest.fixture
def lines() -> io.StringIO:
    """What is logged at INFO, to what is no terminal."""
    out = io.StringIO()
    configure(LogSection(level="info"), out)
    return out


def test_one_json_object_a_line(lines: io.StringIO) -> None:
    logger("router").info("draining", running=3)
    logger("router").debug("too much")
    logging.getLogger("library").warning("hm %s", "ok")
    logging.getLogger("library").info("chatter")
    first, second = [json.loads(line) for line in lines.getvalue().splitlines()]
    assert (first["event"], first["part"], first["running"], first["level"]) == ("draining", "router", 3, "info")
    assert (second["event"], second["logger"]) == ("hm ok", "library")


def test_an_error_of_a_library_comes_with_its_place(lines: io.StringIO) -> None:
    """As asyncio tells of a task that has failed, or OpenTelemetry of spans that it could not send."""
    try:
        raise LookupError("gone")
    except LookupError as error:
        logging.getLogger("library").error("it failed", exc_info=error)
    found = json.loads(lines.getvalue())
    assert "test_log.py" in found["exception"] and found["exception"].endswith("LookupError: gone")


async def test_a_full_table_of_open_files_is_one_line(lines: io.StringIO) -> None:
    """asyncio wrote 2,000 a second, with a traceback each."""
    loop, full = asyncio.get_running_loop(), OSError(errno.EMFILE, "Too many open files")
    for _ in range(100):
        loop.call_exception_handler({"message": "socket.accept() out of system resource", "exception": full})
    loop.call_exception_handler({"message": "another fault"})
    first, second = [json.loads(line)["event"] for line in lines.getvalue().splitlines()]
    assert first.startswith("socket.accept()") and second.startswith("another fault")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_person_reads_lines() -> None:
    screen = Terminal()
    configure(LogSection(level="info"), screen)
    logger("router").info("draining", running=3)
    logging.getLogger("library").warning("hm %s", "ok")
    first, second = screen.getvalue().splitlines()
    assert "draining" in first and "{" not in first and "hm ok" in second


@pytest.mark.parametrize("key", sorted(REFUSED_KEYS))
def test_private_keys_are_refused(lines: io.StringIO, key: str) -> None:
    logger("router").info("event", **{key.upper(): "hunter2"}, nested={key: "hunter2", "length": 7})
    found = json.loads(lines.getvalue())
    assert "hunter2" not in lines.getvalue()
    assert found[key.upper()] == REFUSED and found["nested"] == {key: REFUSED, "length": 7}


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), BrokenPipeError(),
                                   ValueError("I/O operation on closed file")])
def test_a_log_that_cannot_be_written_harms_nobody(error: Exception) -> None:
    """The engine's thread logs, too: an error there would end every answer."""
    class Full(io.StringIO):
        def write(self, _text: str) -> int:
            raise error

        def flush(self) -> None:
            raise error

    configure(LogSection(level="info"), Full())
    logger("target").info("mode changed")
    logging.getLogger("library").warning("hm")
