"""A job of ``make gpu``: a stage, or one shape of it, in a process of its own.

Rules:
1. A finding is passed on as soon as it is known. What a job found before it died counts.
2. A job has a time limit. One that takes longer is killed with all processes that it started.
3. A job that dies costs its own rows only, and a row says why: the name of the signal, the error, or the time limit.
4. Pieces are forked from a process that has imported what they need and touched no device: a start costs milliseconds,
   and no two share a device's context. A failed import costs the jobs that need it.

It knows nothing about what a job measures, nor about tables.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from bench.gpu.stage import Finding, Stage, StageOptions

FORK_SERVER = multiprocessing.get_context("forkserver")
START_S = 300.0  # of the fork server, once
END_S = 5.0  # for a job's process to end after its last finding
READY = b""


class JobDied(Exception):
    """A job ended without its result. ``on_device``: another try may find more."""

    def __init__(self, reason: str, on_device: bool = True) -> None:
        super().__init__(reason)
        self.on_device = on_device


@dataclass(frozen=True, slots=True)
class Job:
    stage: str
    entry_point: str  # module:function, a ``Stage``
    limit_s: float
    shape: str = ""  # of a stage that has several

    @property
    def module(self) -> str:
        return self.entry_point.partition(":")[0]

    @property
    def function(self) -> Stage:
        stage: Stage = getattr(importlib.import_module(self.module), self.entry_point.partition(":")[2])
        return stage

    @property
    def name(self) -> str:
        return f"{self.stage} {self.shape}".rstrip()


def prepare(jobs: Sequence[Job]) -> None:
    """Let the fork server import the modules of ``jobs`` before the first one starts."""
    FORK_SERVER.set_forkserver_preload(sorted({job.module for job in jobs}))


def run_job(job: Job, options: StageOptions, limit_s: float) -> Iterator[Finding]:
    """Run a job in its own process and yield its findings as they arrive. Raises JobDied."""
    receiver, sender = FORK_SERVER.Pipe(duplex=False)
    process = FORK_SERVER.Process(target=_run_in_process, args=(sender, job, options), name=job.name)
    process.start()
    sender.close()
    try:
        yield from _received(receiver, limit_s)
        process.join(END_S)
    finally:
        with suppress(ProcessLookupError):
            if process.pid is not None:
                os.killpg(process.pid, signal.SIGKILL)  # with all processes that it started: they are in its group
        process.kill()
        process.join()
        receiver.close()
    if process.exitcode:
        raise JobDied(_exit_reason(process.exitcode))


def _received(receiver: Connection, limit_s: float) -> Iterator[Finding]:
    """Yield findings until the job closes its end. Raises JobDied."""
    deadline_s = time.monotonic() + START_S
    while True:
        if not receiver.poll(max(0.0, deadline_s - time.monotonic())):
            raise JobDied(f"killed: it took longer than {limit_s:g} s")
        try:
            message = receiver.recv_bytes()
        except EOFError:
            return
        if message == READY:
            deadline_s = time.monotonic() + limit_s
            continue
        content = json.loads(message)
        if isinstance(content, str):
            raise JobDied(content, "CUDA" in content)
        yield Finding(*content)


def _exit_reason(code: int) -> str:
    return f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"


def _run_in_process(sender: Connection, job: Job, options: StageOptions) -> None:
    """Run a job and send its findings; in the job's own process."""
    os.setsid()
    if options.device.type == "cpu":
        torch.set_num_threads(1)  # shapes are tiny, and threads of several jobs would wait for one another
    sender.send_bytes(READY)
    try:
        for finding in job.function(options):
            sender.send_bytes(json.dumps([finding.what, finding.value, finding.unit, finding.expected]).encode())
    except Exception as error:  # whatever the error is, the other jobs still run
        traceback.print_exc()
        sender.send_bytes(json.dumps(f"{type(error).__name__}: {str(error)[:200]}").encode())
