"""Work that would hold up an event loop: in a thread, or, where nobody knows what it costs, in a process of its own
that may be ended at any time.

Rules of a thread:
1. It works on one thing at a time, in the order in which things are given. What is done there leaves the interpreter to
   others by itself.
2. Who finds too many before him is refused, and told to come back when they will have been served at the pace of the
   latest one. How many are too many is the caller's to say.
3. Work that has begun may outlive the event loop that gave it; then nobody hears of its end.

Rules of a process:
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
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from slipstream.base.errors import CapacityError

# Libraries of numbers start a thread a core, and each maps 40 MB: where cores are many, more than ``bounded`` leaves.
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")

Made = TypeVar("Made")


class PacedThread:
    """One thread, and the pace at which it works."""

    def __init__(self, name: str, took_s: float) -> None:
        """took_s: what the first one is taken to need."""
        self._thread = ThreadPoolExecutor(1, name)
        self._took_s = took_s

    def submit(self, work: Callable[[], Made], soon: Callable[..., object],
               then: Callable[[Future[Made]], None]) -> Future[Made]:
        """``soon``: an event loop's ``call_soon_threadsafe``, by which ``then`` hears when ``work`` is done or left
        out."""
        def tell(made: Future[Made]) -> None:
            with suppress(RuntimeError):  # the loop is closed
                soon(then, made)

        future = self._thread.submit(self._timed, work)
        future.add_done_callback(tell)
        return future

    def refusal(self, message: str, waiting: int) -> CapacityError:
        """Of one more, while so many wait."""
        return CapacityError(message, waiting * self._took_s)

    def close(self) -> None:
        """Nobody waits any more; work that has begun ends by itself."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _timed(self, work: Callable[[], Made]) -> Made:
        began_s = time.monotonic()
        try:
            return work()
        finally:
            self._took_s = time.monotonic() - began_s


class Child:
    """The other end of a process that runs ``main`` of ``module``. One thread at a time may ask it, any may end
    it."""

    def __init__(self, module: str) -> None:
        begin = f"import sys; sys.path[:] = {sys.path!r}; from {module} import main; main()"
        self._popen = popen = subprocess.Popen([sys.executable, "-P", "-c", begin], stdin=subprocess.PIPE,
                                               stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
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
        """What it answers; None when it ends instead."""
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
    """Inside of the process: it maps at most so many bytes, dies without a core, and leaves a terminal's interrupt to
    whoever started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for limit, most in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_CORE, 0)):
        with suppress(ValueError, OSError):  # not every system has all of them
            resource.setrlimit(limit, (most, most))
