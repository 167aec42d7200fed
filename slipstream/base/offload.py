"""Work whose cost is unknown, in a child process that may be killed at any time.

Rules:
1. Both ends write lines of JSON. The process answers line by line, logs nothing, and ends with its standard input.
2. ``limit_resources`` limits the memory that it may map; ``signal.ITIMER_PROF`` ends it when its processor time is
   over.
3. It finds its modules where its parent found them.

It knows nothing about the work.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from typing import Any

# Numeric libraries start a thread for each core, which maps 40 MB: on many cores, more than ``limit_resources`` allows.
THREAD_COUNT_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def main_command(module: str) -> list[str]:
    """The command that runs ``main`` of ``module``. With ``-m``, a file of the current folder could be imported in
    place of a module of the same name."""
    return [sys.executable, "-P", "-c", f"import sys; sys.path[:] = {sys.path!r}; from {module} import main; main()"]


class ChildProcess:
    """A process that runs ``main`` of ``module``. One thread at a time may ask it, any may kill it."""

    def __init__(self, module: str) -> None:
        self._popen = popen = subprocess.Popen(main_command(module), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                               stderr=subprocess.DEVNULL,
                                               env=os.environ | dict.fromkeys(THREAD_COUNT_VARIABLES, "1"))
        self.pid = popen.pid
        self._pipes = threading.Lock()
        self.kill = weakref.finalize(self, _kill, popen, self._pipes)

    @property
    def ended(self) -> bool:
        return self._popen.poll() is not None

    @property
    def out_of_time(self) -> bool:
        return self._popen.poll() == -signal.SIGPROF

    def ask(self, line: bytes) -> Any:
        """The child's answer; None when the child ends instead."""
        stdin, stdout = self._popen.stdin, self._popen.stdout
        assert stdin is not None and stdout is not None
        with self._pipes:
            if stdin.closed:
                return None
            with suppress(BrokenPipeError):
                stdin.write(line + b"\n")
                stdin.flush()
            reply = stdout.readline()
        if reply.endswith(b"\n"):
            return json.loads(reply)
        self.kill()
        return None


def _kill(popen: subprocess.Popen[bytes], pipes: threading.Lock) -> None:
    popen.kill()  # first: a thread that asks it holds the pipes until it is dead
    with pipes, suppress(BrokenPipeError):
        popen.communicate()


def limit_resources(memory_bytes: int) -> None:
    """For the child itself: it maps at most ``memory_bytes``, leaves no core file, and ignores signals that a
    terminal or systemd sends to all processes: its parent handles them."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    for limit, maximum in ((resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_CORE, 0)):
        with suppress(ValueError, OSError):  # not every system has all of them
            resource.setrlimit(limit, (maximum, maximum))
