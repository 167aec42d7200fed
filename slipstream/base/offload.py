"""Work whose cost is unknown, in a child process that may be killed at any time.

Rules:
1. Both ends write lines of JSON. The process answers line by line, logs nothing, and ends with its standard input.
2. ``bounded`` limits what it may map; ``signal.ITIMER_PROF`` ends it when its processor time is over.
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

# Libraries of numbers start a thread a core, and each maps 40 MB: where cores are many, more than ``bounded`` leaves.
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def command(module: str) -> list[str]:
    """What runs ``main`` of ``module``: by ``-m``, what has a module's name in the folder that one stands in would be
    taken for it."""
    return [sys.executable, "-P", "-c", f"import sys; sys.path[:] = {sys.path!r}; from {module} import main; main()"]


class Child:
    """The other end of a process that runs ``main`` of ``module``. One thread at a time may ask it, any may end
    it."""

    def __init__(self, module: str) -> None:
        self._popen = popen = subprocess.Popen(command(module), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                               stderr=subprocess.DEVNULL,
                                               env=os.environ | dict.fromkeys(THREADS, "1"))
        self.pid = popen.pid
        self._pipes = threading.Lock()
        self.end = weakref.finalize(self, _end, popen, self._pipes)

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
        self.end()
        return None


def _end(popen: subprocess.Popen[bytes], pipes: threading.Lock) -> None:
    popen.kill()  # first: whoever asks it holds the pipes until it is dead
    with pipes, suppress(BrokenPipeError):
        popen.communicate()


def bounded(memory: int) -> None:
    """Inside of the process: it maps at most so many bytes, dies without a core, and leaves signals that a terminal or
    systemd sends to all to whoever started it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    for limit, most in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_CORE, 0)):
        with suppress(ValueError, OSError):  # not every system has all of them
            resource.setrlimit(limit, (most, most))
