"""Two targets and three drafts as real processes on timed devices, 32 streams; drafts die, join and drain meanwhile.

What happened is read from the pages that the processes serve to a scraper, and from the answers.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from bench.fleet import Process, free_port
from bench.timed import TIMING_JSON
from slipstream.protocol.requests import Request, Sampling
from slipstream.simulate.timed import STREAMS, SYMBOLS, Timing
from slipstream.wire.target import TargetClient
from tests.scraped import scraped
from tests.test_timed import text

TIMING = Timing(step_s=0.06, draft_s=0.006, seed=5)
TOKENS, TARGETS, DRAFTS, ALL_STREAMS = 240, 2, 4, 32  # the fourth draft is started later
WITHIN_S = 30.0


@dataclass
class Fleet:
    """All processes; ``drafts[3]`` is known to the targets and not there yet."""

    folder: Path
    targets: list[Process] = field(default_factory=list)
    drafts: list[Process] = field(default_factory=list)
    clients: list[TargetClient] = field(default_factory=list)

    def __post_init__(self) -> None:
        ports = [[free_port(), free_port()] for _ in range(DRAFTS + TARGETS)]
        known = ", ".join(f"'127.0.0.1:{listen}'" for listen, _ in ports[:DRAFTS])
        for number, (listen, metrics) in enumerate(ports):
            role = "draft" if number < DRAFTS else "target"
            settings = (f"{role}.listen=127.0.0.1:{listen}", f"{role}.metrics_listen=127.0.0.1:{metrics}",
                        f"target.drafts=[{known}]", "target.slots=32768", "draft.run_ahead=40")
            (self.drafts if role == "draft" else self.targets).append(
                Process("bench.timed", settings, metrics, self.folder / f"{number}.log",
                        (role, TIMING_JSON.dump_json(TIMING).decode())))
        self.clients = [TargetClient(f"127.0.0.1:{listen}") for listen, _ in ports[DRAFTS:]]

    async def total(self, name: str, **labels: str) -> float:
        """Of both targets."""
        return sum([await scraped(target.metrics_port, name, **labels) for target in self.targets])

    async def open_sessions(self) -> list[float]:
        """Of each draft; 0 of one that is not there, or is just going."""
        counts = []
        for draft in self.drafts:
            try:
                counts.append(await scraped(draft.metrics_port, "sessions_open") if runs(draft) else 0.0)
            except httpx.TransportError:
                counts.append(0.0)
        return counts

    async def share(self, seconds: float) -> float:
        """The share of tokens that came from drafts, in the time from now."""
        before = [await self.total(f"{kind}_tokens_total") for kind in ("accepted", "bonus")]
        await asyncio.sleep(seconds)
        drafted, own = [await self.total(f"{kind}_tokens_total") - was
                        for kind, was in zip(("accepted", "bonus"), before, strict=True)]
        return drafted / (drafted + own)


def runs(process: Process) -> bool:
    return process.process is not None and process.process.poll() is None


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Fleet]:
    fleet = Fleet(folder)
    processes = [*fleet.drafts[:3], *fleet.targets]
    try:
        for process in processes:
            process.start()
        await asyncio.gather(*(process.ready() for process in processes))
        yield fleet
    finally:
        for client in fleet.clients:
            await client.aclose()
        for process in (*fleet.targets, *fleet.drafts):
            process.stop()


async def until(what: str, condition: Callable[[], Awaitable[bool]]) -> None:
    deadline_s = time.monotonic() + WITHIN_S
    while not await condition():
        assert time.monotonic() < deadline_s, f"not within {WITHIN_S:g} s: {what}"
        await asyncio.sleep(0.1)


@dataclass
class Reader:
    """One stream: an answer after the other, each compared with the text that plain decoding gives."""

    client: TargetClient
    number: int
    answers: int = 0
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self) -> None:
        for turn in itertools.count():
            if self.over.is_set():
                return
            token = (self.number + 7 * turn) % STREAMS * SYMBOLS
            request, tokens, finish = Request(f"{self.number}-{turn}", (token, token), Sampling(), TOKENS), [], ""
            async for piece in self.client.submit(request):
                tokens += piece.tokens
                finish = piece.finish
            assert tokens == text(TIMING, token, 1, TOKENS), f"stream {self.number}, answer {turn}"
            assert finish == "length"
            self.answers += 1


@pytest.mark.long
async def test_drafts_die_join_and_drain_while_every_answer_stays_the_same(tmp_path: Path) -> None:
    async with running(tmp_path) as fleet, asyncio.TaskGroup() as group:
        readers = [Reader(fleet.clients[number % TARGETS], number) for number in range(ALL_STREAMS)]
        tasks = [group.create_task(reader.read()) for reader in readers]
        await story(fleet)
        for reader in readers:
            reader.over.set()
        await asyncio.gather(*tasks)
        assert all(reader.answers for reader in readers)
        answers = sum(reader.answers for reader in readers)
        assert await fleet.total("answers_total", outcome="length") == answers, "an answer was lost or made twice"
        assert await fleet.total("answers_total") == answers
        await until("nobody holds a session", lambda: idle(fleet))


async def idle(fleet: Fleet) -> bool:
    return not sum(await fleet.open_sessions()) and not await fleet.total("sessions", state="running")


async def story(fleet: Fleet) -> None:
    """One killed, one added, one drained; what the counters say of each."""
    async def spread(among: set[int]) -> bool:
        busy = await fleet.open_sessions()
        return {number for number, count in enumerate(busy) if count >= 4} == among and sum(busy) >= ALL_STREAMS - 2

    await until("all three drafts have sessions", lambda: spread({0, 1, 2}))
    usual = await fleet.share(2.0)
    assert usual > 0.5, "drafts are of no use"

    fleet.drafts[0].signal(signal.SIGKILL)
    await until("its sessions moved to the two others", lambda: spread({1, 2}))
    lost = await fleet.total("drafter_lost_total")
    moved = await fleet.total("drafter_moves_total")
    assert lost == TARGETS and moved >= 4, (lost, moved)
    assert await fleet.share(2.0) > 0.9 * usual

    async def all_connected() -> bool:
        return await fleet.total("drafts_connected") == 3 * TARGETS

    fleet.drafts[3].start()
    await until("new answers use the draft that joined", lambda: spread({1, 2, 3}))
    await until("all targets have it", all_connected)

    fleet.drafts[1].signal(signal.SIGTERM)
    await until("its sessions moved to the two that stay", lambda: spread({2, 3}))
    assert await fleet.total("drafter_moves_total") > moved
    await until("the drained one has ended", lambda: asyncio.sleep(0, not runs(fleet.drafts[1])))
    assert fleet.drafts[1].process is not None and fleet.drafts[1].process.returncode == 0
    assert await fleet.share(2.0) > 0.9 * usual, "speculation did not recover"
    assert await fleet.total("mode_transitions_total", reason="draft_unavailable") == 0
    assert await fleet.total("invalid_growths_total") == 0
