"""Forks of this process that work beside it, each with one thread; a fork's pipe ends when this process does, however
it ends.

On a CPU this scales where threads inside an operation do not: on two cores a second thread brought nothing, a second
process did. It knows nothing about the work.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess

import torch


def fork(work: Callable[[Connection], None], pipes: list[Connection]) -> ForkProcess:
    """Start ``work`` in a fork, with one end of a new pipe. The other end joins ``pipes``, which has those of earlier
    forks."""
    context = multiprocessing.get_context("fork")
    own_end, worker_end = context.Pipe()
    pipes.append(own_end)
    process = context.Process(target=_run, args=(work, worker_end, pipes), daemon=True)
    process.start()
    worker_end.close()
    return process


def _run(work: Callable[[Connection], None], pipe: Connection, inherited: list[Connection]) -> None:
    for connection in inherited:  # open copies would hide the end of the first process
        connection.close()
    torch.set_num_threads(1)
    with suppress(KeyboardInterrupt):  # the first process is interrupted too, and says so
        work(pipe)
