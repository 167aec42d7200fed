"""Signals: a terminal and systemd send them to all processes of a service at once. vLLM's end with the first, beneath
the answers that a target has to finish; so they leave that one to the target which serves them, while it is there.

It knows nothing about drafts.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

from slipstream.following.rounds import SOCKET

Handler = Callable[[int, FrameType | None], object]


def patch() -> None:
    """Once a process, where a target serves the engine's answers."""
    if SOCKET not in os.environ:
        return
    from vllm.v1.engine.core import DPEngineCoreProc, EngineCoreProc
    from vllm.v1.executor.multiproc_executor import WorkerProc

    for kind, name in ((EngineCoreProc, "run_busy_loop"), (DPEngineCoreProc, "run_busy_loop"),
                       (WorkerProc, "worker_busy_loop")):
        setattr(kind, name, _leaving(getattr(kind, name)))


def _leaving(loop: Callable[..., Any]) -> Callable[..., Any]:
    """``loop``, which runs on a process' main thread when vLLM's own handlers stand."""
    def run(*given: Any) -> Any:
        left = list[int]()
        for number in (signal.SIGTERM, signal.SIGINT):
            if callable(theirs := signal.getsignal(number)):
                signal.signal(number, _left(theirs, left))
        return loop(*given)

    return run


def _left(theirs: Handler, left: list[int]) -> Handler:
    """``left``: what was left to the target, which ends at once by a second one."""
    def handle(number: int, frame: FrameType | None) -> None:
        if not left and _served():
            left.append(number)
        else:
            theirs(number, frame)

    return handle


def _served() -> bool:
    """Whether the target is there, and has not begun to end its engine."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(os.environ[SOCKET])
        except OSError:
            return False
    return True
