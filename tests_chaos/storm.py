"""A history as it befalls a fleet: its requests beside its faults, and what was wrong with the answers.

Rules:
1. A fault lasts as long as it says; then the network heals, the clock is right, and who was killed is started again.
2. A history is over when every fault is over and every answer has ended, or none has said a word for ``WITHIN_S``.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from random import Random
from typing import IO, cast
from unittest import mock

from slipstream.base.config import WireSection
from slipstream.observe.log import configure
from slipstream.wire.server import GrpcServer
from slipstream.wire.servicer import DraftServicer
from tests.hostile import HostileDraft
from tests_chaos.fleet import COMMON, NEW, OLD, Fleet, Piece, RouterPiece, TargetPiece, settings
from tests_chaos.history import WITHIN_S, Answer, Fault, History
from tests_chaos.relay import Relay


@dataclass(frozen=True, slots=True)
class Outcome:
    """``wrong``: answers that break the rules, and why."""

    answers: list[Answer]
    wrong: list[tuple[Answer, str]]


async def befall(fleet: Fleet, history: History) -> Outcome:
    weights = {target.timing.seed for target in fleet.targets}
    weights |= {seed for fault in history.faults if fault.kind == "rollout" for seed in (OLD.seed, NEW.seed)}
    answers = [Answer(ask) for ask in history.asks]
    reading = [asyncio.create_task(answer.read(fleet)) for answer in answers]
    await asyncio.gather(*(_strike(fleet, fault) for fault in history.faults))
    fleet.heal()
    for piece in fleet.pieces:
        if not piece.runs:
            await piece.start()
    late, said = set(reading), -1
    while late and said != (said := sum(answer.size for answer in answers)):  # a busy machine is slow, and no fault
        _, late = await asyncio.wait(late, timeout=WITHIN_S)
    for task in late:
        task.cancel()
    ended = await asyncio.gather(*reading, return_exceptions=True)
    faults = [f"{type(end).__name__}: {end}" if isinstance(end, Exception) else
              await answer.fault_beside([fleet.calm[seed].addresses[answer.ask.way] for seed in sorted(weights)])
              for answer, end in zip(answers, ended, strict=True)]
    await fleet.check()
    return Outcome(answers, [(answer, fault) for answer, fault in zip(answers, faults, strict=True) if fault])


async def _strike(fleet: Fleet, fault: Fault) -> None:
    await asyncio.sleep(fault.at_s)
    pieces = {piece.name: piece for piece in fleet.pieces}
    match fault.kind:
        case "kill" | "drain" | "rollout":
            await _replace(pieces[fault.victim[0]], fault)
        case "flood":
            await _flood(pieces[fault.victim[0]], fault)
        case "child":
            await _orphan(pieces[fault.victim[0]], fault)
        case "clock":
            with mock.patch.object(time, "time", _jumping(fault)):
                await asyncio.sleep(fault.seconds)
        case "disk":
            with _disk_full():
                await asyncio.sleep(fault.seconds)
        case "freeze":
            name = fault.victim[0]
            await _fail([relay for pair, relay in fleet.between.items() if name in pair], fault)
        case _:
            await _fail([fleet.between[fault.victim]], fault)


async def _replace(piece: Piece, fault: Fault) -> None:
    if not piece.runs:  # another fault has it already
        return
    await (piece.kill() if fault.kind == "kill" else piece.end())
    if fault.kind == "rollout":
        assert isinstance(piece, TargetPiece)
        piece.timing = NEW if piece.timing == OLD else OLD
    await asyncio.sleep(fault.seconds)
    if not piece.runs:
        await piece.start()


async def _flood(piece: Piece, fault: Fault) -> None:
    """Another takes the draft's place and breaks every rule."""
    if not piece.runs:
        return
    await piece.kill()
    server = GrpcServer("127.0.0.1:0", WireSection(), [DraftServicer(HostileDraft(fault.seed))])
    port = await server.start()
    for relay in piece.relays:
        relay.to = port
    await asyncio.sleep(fault.seconds)
    for relay in piece.relays:
        relay.cut(None)
    await server.drain(0.0)
    if not piece.runs:
        await piece.start()


async def _orphan(piece: Piece, fault: Fault) -> None:
    """A process that it has for itself dies, or stands still."""
    assert isinstance(piece, RouterPiece | TargetPiece)
    random, own = Random(fault.seed), piece.children
    if not piece.runs or not own:
        return
    child, stopped = random.choice(own), random.random() < 0.5
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGSTOP if stopped else signal.SIGKILL)
    await asyncio.sleep(fault.seconds)
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGCONT)


async def _fail(relays: list[Relay], fault: Fault) -> None:
    random = Random(fault.seed)
    for relay in relays:
        match fault.kind:
            case "freeze":
                relay.hold(there=True, back=True)
            case "hole":
                there = random.random() < 0.5
                relay.hold(there, not there)
            case "slow":
                relay.there.delay_s = relay.back.delay_s = random.uniform(0.002, 0.05)
            case "corrupt":
                relay.there.corrupts = relay.back.corrupts = random
            case _:
                for _ in range(random.randint(1, 4)):
                    relay.cut(relay.to)
                    await asyncio.sleep(fault.seconds / 4)
    await asyncio.sleep(fault.seconds)
    for relay in relays:
        relay.heal()


def _jumping(fault: Fault) -> Callable[[], float]:
    """A wall clock that jumps with every look, by up to an hour."""
    random, right = Random(fault.seed), time.time
    return lambda: right() + random.uniform(-3600.0, 3600.0)


class FullDisk:
    """What a log is written to when its disk is full."""

    def __init__(self) -> None:
        self.refused = itertools.count()

    def write(self, _text: str) -> int:
        next(self.refused)
        raise OSError(errno.ENOSPC, "No space left on device")

    def flush(self) -> None:
        self.write("")

    def isatty(self) -> bool:
        return False


@contextmanager
def _disk_full() -> Iterator[None]:
    """Every line of every log is written, and cannot be."""
    configure(settings("log.level=debug").log, cast(IO[str], FullDisk()))  # type: ignore[arg-type]
    try:
        yield
    finally:
        configure(settings(*COMMON).log, sys.stderr)
