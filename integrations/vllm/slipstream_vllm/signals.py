"""Signals: what ends vLLM's processes where a target serves its engine's answers.

Rules:
1. A terminal and systemd signal all processes of a service at once. vLLM's end with the first signal, beneath the
   answers that the target has to finish; so they leave that one to the target, while it is there.
2. They end with the process that began them, however that ended: they would hold a device's memory for ever.

It knows nothing about drafts.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from slipstream.following.rounds import SOCKET

Handler = Callable[[int, FrameType | None], object]


def patch() -> None:
    """Once a process, where a target serves the engine's answers."""
    if SOCKET not in os.environ:
        return
    _end_with_parent()
    from vllm.v1.engine.core import DPEngineCoreProc, EngineCoreProc
    from vllm.v1.executor.multiproc_executor import WorkerProc

    for kind, name in ((EngineCoreProc, "run_busy_loop"), (DPEngineCoreProc, "run_busy_loop"),
                       (WorkerProc, "worker_busy_loop")):
        setattr(kind, name, _leaving(getattr(kind, name)))
    EngineCoreProc.__init__ = _ending(EngineCoreProc.__init__)


def _ending(begin: Callable[..., None]) -> Callable[..., None]:
    """``begin``, which runs in a process that may be forked from one where everything is patched."""
    def run(*args: Any, **kwargs: Any) -> None:
        _end_with_parent()
        begin(*args, **kwargs)

    return run


def _end_with_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        threading.Thread(target=_end_with, args=(parent,), name="slipstream-parent", daemon=True).start()


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)


def _leaving(loop: Callable[..., Any]) -> Callable[..., Any]:
    """``loop``, which runs on a process' main thread when vLLM's own handlers stand."""
    def run(*args: Any) -> Any:
        deferred = list[int]()
        for number in (signal.SIGTERM, signal.SIGINT):
            if callable(handler := signal.getsignal(number)):
                signal.signal(number, _deferring(handler, deferred))
        return loop(*args)

    return run


def _deferring(handler: Handler, deferred: list[int]) -> Handler:
    """``deferred``: what was left to the target, which ends at once by a second one."""
    def handle(number: int, frame: FrameType | None) -> None:
        if not deferred and _served():
            deferred.append(number)
        else:
            handler(number, frame)

    return handle


def _served() -> bool:
    """Whether the target is there, and has not begun to end its engine."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(os.environ[SOCKET])
        except OSError:
            return False
    return True
