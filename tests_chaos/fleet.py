"""The fleet that suffers: two routers, three targets and three drafts on timed devices, a relay between each pair.

Rules:
1. Everything but devices and relays is real: services, workers, sessions, wire, policy.
2. A piece that is killed is cut off at once and for good, in the midst of whatever it says, as a dead process is; what
   starts in its place begins anew.
3. Each piece of the fleet is reached through relays of its own, one for each that dials it.
4. Beside it stand calm routers, which nothing befalls: they say what is right (``reference``).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from bench.fleet import free_port
from draft_service.__main__ import host as host_draft
from draft_service.worker import DraftWorker
from router_service.service import RouterService
from slipstream.base.config import Config, load
from slipstream.grammar.trial import Grammars, Trial
from slipstream.protocol.requests import Backend
from slipstream.protocol.session import LEASE_S
from slipstream.simulate.timed import Device, Timing
from slipstream.wire.target import TargetClient
from target_service.__main__ import host as host_target
from target_service.assembly import Target, assemble
from tests_chaos.model import WordyModel, drafter, folder, vocabulary
from tests_chaos.reference import CONTEXT, Reference
from tests_chaos.relay import Relay

ROUTERS, TARGETS, DRAFTS = 2, 3, 3
# Two sets of weights: the text of each is a law of its own.
OLD, NEW = Timing(step_s=0.002, draft_s=0.0004, seed=3), Timing(step_s=0.002, draft_s=0.0004, seed=4)
COMMON = (f"model.path={folder()}", "target.slots=16384", f"target.max_context={CONTEXT}", "target.drain_s=0.5",
          "target.prompt_lookup=false", "draft.run_ahead=16", "log.level=error")
LOOSE = ("listen=127.0.0.1:0", "metrics_listen=127.0.0.1:0")


class Piece:
    """One of the fleet: ``relays`` lead to it, and ``work`` is it while it runs."""

    def __init__(self, name: str, relays: Sequence[Relay]) -> None:
        self.name = name
        self.relays = relays
        self.port = 0
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def runs(self) -> bool:
        return self._task is not None and not self._task.done()

    async def start(self) -> None:
        """Returns when it takes work. Raises what it ended with."""
        self.port, self._stop, up = free_port(), asyncio.Event(), asyncio.Event()
        self._task = asyncio.create_task(self.work(self._stop, up.set), name=self.name)
        waiting = asyncio.create_task(up.wait())
        await asyncio.wait({self._task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._task.done():
            self._task.result()
        for relay in self.relays:
            relay.to = self.port

    async def work(self, stop: asyncio.Event, ready: Callable[[], None]) -> None:
        raise NotImplementedError

    async def kill(self) -> None:
        """Nobody hears of it any more; then it ends."""
        for relay in self.relays:
            relay.heal()
            relay.cut(None)
        await self.end()

    async def end(self) -> None:
        """As SIGTERM ends it. Raises what it ended with."""
        self._stop.set()
        if self._task is not None:
            await self._task
        for relay in self.relays:
            relay.cut(None)


class DraftPiece(Piece):
    timing = OLD

    async def work(self, stop: asyncio.Event, ready: Callable[[], None]) -> None:
        config = settings(f"draft.listen=127.0.0.1:{self.port}", "draft.metrics_listen=127.0.0.1:0")
        self.made = DraftWorker(drafter(self.timing, config.draft.max_sessions), "", LEASE_S, config.draft.run_ahead)
        await host_draft(config, self.made, stop, ready)


class TargetPiece(Piece):
    """``drafts``: the relays that lead from it to drafts."""

    def __init__(self, name: str, relays: Sequence[Relay], drafts: Sequence[Relay]) -> None:
        super().__init__(name, relays)
        self.timing = OLD
        self._drafts = drafts
        self.made: Target | None = None
        self._trial = Trial(folder())

    async def work(self, stop: asyncio.Event, ready: Callable[[], None]) -> None:
        config = settings(f"target.listen=127.0.0.1:{self.port}", "target.metrics_listen=127.0.0.1:0",
                          f"target.drafts={[relay.address for relay in self._drafts]}")
        self.made = await asyncio.to_thread(
            assemble, config, WordyModel(self.timing, Device()), "timed", "", asyncio.get_running_loop(),
            str(self.timing.seed), Grammars(vocabulary(), self._trial))
        await host_target(config, self.made, stop, ready)

    @property
    def children(self) -> list[int]:
        """Processes of its own."""
        return [] if self._trial.child is None else [self._trial.child.pid]


class RouterPiece(Piece):
    """``relays``: over HTTP, and over gRPC. ``targets``: those that lead from it to targets."""

    def __init__(self, name: str, relays: Sequence[Relay], targets: Sequence[Relay]) -> None:
        super().__init__(name, relays)
        self._targets = targets

    async def work(self, stop: asyncio.Event, ready: Callable[[], None]) -> None:
        config = settings(*(f"router.{setting}" for setting in (*LOOSE, "grpc_listen=127.0.0.1:0", "drain_s=0.5")))
        clients = {relay.address: TargetClient(relay.address) for relay in self._targets}
        self._service = service = RouterService(config, clients)
        try:
            await service.start()
            self.ports = service.http_port, service.grpc_port
            ready()
            await stop.wait()
            await service.drain(config.router.drain_s)
        finally:
            for client in clients.values():
                await client.aclose()

    async def start(self) -> None:
        await super().start()
        for relay, port in zip(self.relays, self.ports, strict=True):
            relay.to = port

    @property
    def children(self) -> list[int]:
        """Processes of its own: one tries grammars, the other renders conversations."""
        gateway = self._service.gateway
        trial, template = gateway._trials._trial.child, gateway.codec._template
        return [*([] if trial is None else [trial.pid]), *([] if template is None else [template.process.pid])]


class Calm:
    """A router whose only target is the reference. ``addresses`` by the way to it."""

    def __init__(self, target: Backend) -> None:
        own = settings(*(f"router.{setting}" for setting in (*LOOSE, "grpc_listen=127.0.0.1:0")))
        self._service = RouterService(own, {"t0": target})
        self.addresses: dict[str, str] = {}

    async def start(self) -> None:
        await self._service.start()
        self.addresses = {"http": f"127.0.0.1:{self._service.http_port}",
                          "grpc": f"127.0.0.1:{self._service.grpc_port}"}

    async def end(self) -> None:
        await self._service.drain(0.0)


class Fleet:
    """All of it. ``between[name of who dials, name of who listens]`` is their relay."""

    def __init__(self) -> None:
        self.between: dict[tuple[str, str], Relay] = {}
        self.calm = {timing.seed: Calm(Reference(timing)) for timing in (OLD, NEW)}
        self.drafts = [DraftPiece(f"draft-{n}", [self._relay(f"target-{t}", f"draft-{n}") for t in range(TARGETS)])
                       for n in range(DRAFTS)]
        self.targets = [TargetPiece(f"target-{n}", [self._relay(f"router-{r}", f"target-{n}") for r in range(ROUTERS)],
                                    [self.between[f"target-{n}", f"draft-{d}"] for d in range(DRAFTS)])
                        for n in range(TARGETS)]
        self.routers = [RouterPiece(f"router-{n}", [self._relay(way, f"router-{n}") for way in ("http", "grpc")],
                                    [self.between[f"router-{n}", f"target-{t}"] for t in range(TARGETS)])
                        for n in range(ROUTERS)]

    def _relay(self, dials: str, listens: str) -> Relay:
        relay = self.between[dials, listens] = Relay(free_port())
        return relay

    @property
    def pieces(self) -> list[Piece]:
        return [*self.drafts, *self.targets, *self.routers]

    def heal(self) -> None:
        """The network is whole again."""
        for relay in self.between.values():
            relay.heal()

    async def check(self) -> None:
        """What each engine holds adds up. Raises AssertionError."""
        for target in self.targets:
            if target.runs and target.made is not None:
                await asyncio.wrap_future(target.made.worker.check_slots())


@asynccontextmanager
async def running() -> AsyncIterator[Fleet]:
    fleet = Fleet()
    for relay in fleet.between.values():
        await relay.start()
    try:
        for piece in (*fleet.calm.values(), *fleet.pieces):
            await piece.start()
        yield fleet
    finally:
        fleet.heal()
        for piece in reversed(fleet.pieces):
            with contextlib.suppress(Exception):
                await piece.end()
        for calm in fleet.calm.values():
            await calm.end()
        for relay in fleet.between.values():
            await relay.close()


def settings(*own: str) -> Config:
    return load(None, (*COMMON, *own))
