"""Timed devices as processes, a network between them, and readers of their answers.

``python -m bench.timed ROLE TIMING --set …`` is one of them, a composition root. ROLE is target, draft, or colocated: a
target whose drafter is in the same process and on the same device; TIMING is a Timing as JSON.
``timed_services`` starts as many as a benchmark needs. It knows nothing about what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from bench.fleet import LOGS, Process, Services, free_port, running_services, service
from draft_service.__main__ import host as host_draft
from draft_service.worker import DraftWorker
from slipstream.base.config import Config, load
from slipstream.cli.process import run
from slipstream.observe.trace import Trace
from slipstream.observe.vitals import background_tasks
from slipstream.protocol.requests import Piece, Request, Sampling
from slipstream.protocol.session import LEASE_S
from slipstream.simulate.timed import STREAMS, SYMBOLS, Device, TimedDrafter, TimedModel, Timing
from slipstream.wire.local import LocalLink
from slipstream.wire.target import TargetClient
from target_service.__main__ import host as host_target
from target_service.assembly import assemble as assemble_target

SETTLE_S = 2.0  # and a hundredth for each stream
TIMING_JSON = TypeAdapter(Timing)  # to and from an argument of a process


@dataclass(slots=True)
class Reader:
    """One stream. Only tokens from ``begin`` to ``end`` count; it reads on after them, so that the load stays the same.
    The window is in tokens and not in seconds, so that all streams are measured on the same text."""

    number: int
    begin: int = 0
    end: int = sys.maxsize
    tokens: int = 0
    pieces: list[tuple[float, Piece]] = field(default_factory=list)  # when each came, from the one before ``begin`` on

    @property
    def ended(self) -> bool:
        return self.tokens >= self.end

    def take(self, now_s: float, piece: Piece) -> None:
        self.tokens += len(piece.tokens)
        if self.tokens >= self.begin and self.tokens - len(piece.tokens) < self.end:
            self.pieces.append((now_s, piece))

    @property
    def counted(self) -> list[Piece]:
        return [piece for _, piece in self.pieces[1:]]

    @property
    def tokens_per_s(self) -> float:
        if len(self.pieces) < 2:
            return 0.0
        return sum(len(piece.tokens) for piece in self.counted) / (self.pieces[-1][0] - self.pieces[0][0])

    @property
    def hit_rounds_ms(self) -> list[float]:
        """The durations of rounds whose tree was there, so that the target did not wait."""
        return [1e3 * (now_s - before_s) for (before_s, _), (now_s, piece) in itertools.pairwise(self.pieces)
                if piece.drafted and not piece.wait_s]

    async def read(self, client: TargetClient, speculate: bool) -> None:
        """Read answers, each of another text, one after the other, until cancelled."""
        for turn in itertools.count():
            prompt = stream_prompt(self.number + 37 * turn)
            request = Request(f"{self.number}-{turn}", prompt, Sampling(), 4000, None, speculate)
            async for piece in client.submit(request):
                self.take(time.perf_counter(), piece)


def stream_prompt(stream: int) -> tuple[int, int]:
    """The prompt of a stream; the answer depends only on it."""
    token = stream % STREAMS * SYMBOLS
    return token, token


def timed_services(timing: Timing, targets: int = 1, drafts: int = 1, rtt_ms: float | None = None,
                   settings: Sequence[str] = (), role: str = "target",
                   traces: Mapping[str, Path] | None = None) -> AbstractAsyncContextManager[Services]:
    """Every target knows every draft, through a relay where there is an ``rtt_ms``. traces: files for those of a role,
    written when they stop."""
    LOGS.mkdir(parents=True, exist_ok=True)
    relays: list[Process] = []

    def process(role: str, number: int, *own: str) -> Process:
        trace = (f"log.trace={traces[role]}",) if traces else ()
        return service("draft" if role == "draft" else "target", f"timed-{role}-{number}", LOGS,
                       (*settings, *own, *trace), "bench.timed", (role, TIMING_JSON.dump_json(timing).decode()))

    def reached(draft: Process) -> str:
        if rtt_ms is None:
            return draft.address
        relay_address = f"127.0.0.1:{free_port()}"
        relays.append(Process("bench.delayed", (), 0, LOGS / "relay.log",
                              (relay_address, draft.address, "--delay-ms", str(rtt_ms / 2))))
        return relay_address

    draft_processes = [process("draft", number) for number in range(drafts)]
    drafts_setting = f"target.drafts={[reached(draft) for draft in draft_processes]}"
    target_processes = [process(role, number, drafts_setting, "target.slots=262144") for number in range(targets)]
    return running_services(target_processes, draft_processes, relays)


@asynccontextmanager
async def streaming(rig: Services, streams: int) -> AsyncIterator[list[Reader]]:
    """Endless readers, evenly over the targets, once they have settled."""
    readers = [Reader(number) for number in range(streams)]
    async with background_tasks(*(reader.read(rig.clients[reader.number % len(rig.clients)], True)
                                  for reader in readers)):
        await asyncio.sleep(SETTLE_S + streams / 100)
        yield readers


def draft(config: Config, timing: Timing, device: Device) -> DraftWorker:
    """A draft on ``device``."""
    section = config.draft
    drafter = TimedDrafter(timing, device, section.run_ahead > 0, section.max_sessions)
    return DraftWorker(drafter, "", LEASE_S, section.run_ahead, Trace(config.log.trace, "draft"))


async def serve_target(config: Config, timing: Timing, stop: asyncio.Event, ready: Callable[[], None],
                       colocated: bool = False) -> None:
    """``colocated``: its drafter is here, and no other is known."""
    device, loop = Device(), asyncio.get_running_loop()
    target = await asyncio.to_thread(assemble_target, config, TimedModel(timing, device), "timed", "", loop)
    if not colocated:
        await host_target(config, target, stop, ready)
        return
    drafter_worker = draft(config, timing, device)
    drafter_worker.start()
    link = LocalLink(target.hello, target.worker.following, drafter_worker)

    def on_ready() -> None:
        target.service.drafts = lambda: [link.status()]
        link.restore()
        ready()

    await host_target(config, target, stop, on_ready)
    await asyncio.to_thread(drafter_worker.stop)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=("target", "draft", "colocated"))
    parser.add_argument("timing", type=TIMING_JSON.validate_json)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    arguments = parser.parse_args()
    # A timed device's tokens are no real text, so repetitions in it must not be looked up.
    config = load(None, ("target.prompt_lookup=false", *arguments.overrides))
    timing = arguments.timing

    async def serve(config: Config, stop: asyncio.Event, ready: Callable[[], None]) -> None:
        if arguments.role == "draft":
            await host_draft(config, draft(config, timing, Device()), stop, ready)
        else:
            await serve_target(config, timing, stop, ready, arguments.role == "colocated")

    run(config, serve)


if __name__ == "__main__":
    main()
