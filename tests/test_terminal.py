"""What a person types in a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from contextlib import suppress

import pytest

ASK = "from slipstream.cli.terminal import read_line; print(repr(read_line('> ')))"


def test_a_question_is_edited_with_the_arrow_keys() -> None:
    """The arrows went into the question, as escape sequences, and on to the model."""
    pytest.importorskip("readline")
    keyboard, terminal = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", ASK], stdin=terminal, stdout=terminal, stderr=terminal,
                          env={**os.environ, "TERM": "xterm", "INPUTRC": os.devnull}):
        os.close(terminal)
        shown = b""
        while b"> " not in shown:
            shown += os.read(keyboard, 1024)
        os.write(keyboard, b"Hell!\x1b[Do\r")
        with suppress(OSError):  # as Linux tells the end
            while piece := os.read(keyboard, 1024):
                shown += piece
    os.close(keyboard)
    assert b"'Hello!'" in shown
