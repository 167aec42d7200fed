"""One piece of ``make gpu``: a stage, or one shape of it, in a process of its own.

Rules:
1. A finding is handed on as soon as it is known. What a piece found before it died counts.
2. A piece has so many seconds. One that takes longer is killed with all that it started.
3. A piece that dies costs its own rows only, and its death is told: a signal by its name, or what it was waiting for.
4. Pieces are forked from a process that has imported what they need and touched no device: a start costs milliseconds,
   and no two share a device's context. What cannot be imported costs the pieces that need it.

It knows nothing about what a piece measures, nor about tables.
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

from bench.gpu.stage import Find, Finding, Given

FORKS = multiprocessing.get_context("forkserver")
START_S = 300.0  # of the process that is forked from, once
ENDED_S = 5.0  # that a piece has to end when it has said all
READY = b""


class Died(Exception):
    """Of a piece, in words. ``on_device``: the next try may say more."""

    def __init__(self, reason: str, on_device: bool = True) -> None:
        super().__init__(reason)
        self.on_device = on_device


@dataclass(frozen=True, slots=True)
class Piece:
    stage: str
    place: str  # module:function, a ``Find``
    limit_s: float
    shape: str = ""  # of a stage that has several

    @property
    def module(self) -> str:
        return self.place.partition(":")[0]

    @property
    def find(self) -> Find:
        found: Find = getattr(importlib.import_module(self.module), self.place.partition(":")[2])
        return found

    @property
    def name(self) -> str:
        return f"{self.stage} {self.shape}".rstrip()


def prepare(pieces: Sequence[Piece]) -> None:
    """Let the fork server import the modules of ``pieces`` before the first one starts."""
    FORKS.set_forkserver_preload(sorted({piece.module for piece in pieces}))


def found_by(piece: Piece, given: Given, limit_s: float) -> Iterator[Finding]:
    """Run a piece in its own process and yield its findings as they arrive. Raises Died."""
    ours, theirs = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=_work, args=(theirs, piece, given), name=piece.name)
    process.start()
    theirs.close()
    try:
        yield from _told(ours, limit_s)
        process.join(ENDED_S)
    finally:
        with suppress(ProcessLookupError):
            if process.pid is not None:
                os.killpg(process.pid, signal.SIGKILL)  # with all processes that it started: they are in its group
        process.kill()
        process.join()
        ours.close()
    if process.exitcode:
        raise Died(_ending(process.exitcode))


def _told(ours: Connection, limit_s: float) -> Iterator[Finding]:
    """Yield findings until the piece closes its end. Raises Died."""
    until_s = time.monotonic() + START_S
    while True:
        if not ours.poll(max(0.0, until_s - time.monotonic())):
            raise Died(f"killed: it took longer than {limit_s:g} s")
        try:
            message = ours.recv_bytes()
        except EOFError:
            return
        if message == READY:
            until_s = time.monotonic() + limit_s
            continue
        found = json.loads(message)
        if isinstance(found, str):
            raise Died(found, "CUDA" in found)
        yield Finding(*found)


def _ending(code: int) -> str:
    return f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"


def _work(theirs: Connection, piece: Piece, given: Given) -> None:
    """In the piece's own process."""
    os.setsid()
    if given.device.type == "cpu":
        torch.set_num_threads(1)  # shapes are tiny, and threads of several pieces would wait for one another
    theirs.send_bytes(READY)
    try:
        for finding in piece.find(given):
            theirs.send_bytes(json.dumps([finding.what, finding.value, finding.unit, finding.expected]).encode())
    except Exception as error:  # whatever it meets, the others are still worth their time
        traceback.print_exc()
        theirs.send_bytes(json.dumps(f"{type(error).__name__}: {str(error)[:200]}").encode())
