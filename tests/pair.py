"""A target and a draft joined in one process, over a wire that delays, loses, cuts and comes back.

The pieces are the real ones (workers, sessions, codec); only the delivery is ours.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from draft_service.worker import DraftWorker
from slipstream.base.config import ModelSection, PolicySection, TargetSection, WireSection
from slipstream.base.errors import RemoteProtocolError
from slipstream.decision.beliefs import StepCosts
from slipstream.drafting import Drafter
from slipstream.engine.loading import identity_of, load_model
from slipstream.engine.model import CausalModel
from slipstream.engine.runner import ModelRunner
from slipstream.grammar.trial import Grammars
from slipstream.models.folder import tokenizer_hash, weights_hash
from slipstream.observe.metrics import TargetMetrics
from slipstream.protocol.messages import (
    PROTOCOL_VERSION,
    DraftHello,
    Growth,
    Link,
    LinkEvents,
    PeerEvents,
    TargetBound,
    TargetHello,
)
from slipstream.protocol.requests import Piece, Request, ServedModel
from slipstream.wire.link import DraftLink
from slipstream.wire.local import LocalLink
from slipstream.wire.server import GrpcServer
from slipstream.wire.servicer import DraftServicer
from target_service.assembly import grammars
from target_service.loop import TargetWorker
from target_service.service import TargetService, deliver_on_loop
from target_service.step import Limits
from tests.loop import eventually

WIRE = WireSection()
# The policy shall never give up here: what is tested is that speculation changes nothing, not whether it pays.
STUBBORN = PolicySection(always=True, deadline_max_s=2.0)
HASTY = PolicySection(always=True, deadline_max_s=0.002)


@dataclass
class Deliveries:
    """What a faulty wire did."""

    delivered: int = 0
    delayed: int = 0
    lost: int = 0
    further: int = 0  # growths for a base that had one already


@dataclass
class FaultyEvents:
    """Stands before the target's events: delays each frame by ``delay_s``, loses a share of them."""

    events: LinkEvents
    delay_s: float = 0.0
    loss: float = 0.0
    shuffle: bool = False  # the items of a frame
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    counts: Deliveries = field(default_factory=Deliveries)
    answered: set[tuple[int, int]] = field(default_factory=set)  # session and base of growths

    def link_up(self, link: Link, hello: DraftHello) -> None:
        self.events.link_up(link, hello)

    def link_down(self, link: Link, reason: str) -> None:
        self.events.link_down(link, reason)

    def inbox_full(self, link: Link) -> bool:
        return self.events.inbox_full(link)

    def received(self, link: Link, items: list[TargetBound],
                 faults: Sequence[tuple[int, RemoteProtocolError]]) -> None:
        bases = {(item.session, item.base) for item in items if isinstance(item, Growth)}
        self.counts.further += len(bases & self.answered)
        self.answered |= bases
        if self.shuffle:
            items = [items[place] for place in self.rng.permutation(len(items))]
        if self.rng.random() < self.loss:
            self.counts.lost += 1
        elif self.delay_s:
            self.counts.delayed += 1
            threading.Timer(self.delay_s * self.rng.uniform(0.2, 2.0), self.events.received,
                            (link, items, faults)).start()
        else:
            self.counts.delivered += 1
            self.events.received(link, items, faults)


@dataclass
class Rig:
    """A target service on the running loop, with or without drafts."""

    worker: TargetWorker
    service: TargetService
    hello: TargetHello
    runner: ModelRunner
    metrics: TargetMetrics
    grammars: Grammars | None

    def count(self, name: str) -> float:
        """The sum of all series of the counter ``slipstream_<name>``, as a scrape would read it."""
        lines = self.metrics.registry.page("")[1].decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"slipstream_{name}{{"))

    async def answer(self, request: Request, on_piece: Callable[[int], None] = lambda _: None) -> list[Piece]:
        pieces: list[Piece] = []
        async for piece in self.service.submit(request):
            pieces.append(piece)
            on_piece(len(pieces))
        return pieces

    async def check(self) -> None:
        await asyncio.wrap_future(self.worker.check_slots())
        if not self.worker.num_running:
            assert self.worker.num_free_slots == self.runner.slots.num_slots, "slots are kept for answers that ended"


@asynccontextmanager
async def target(folder: Path, policy: PolicySection = STUBBORN, dtype: str = "float64", slots: int = 2048,
                 engine: str = "decoder", around: Callable[[CausalModel], CausalModel] = lambda model: model,
                 exact: bool = False, quantize: str = "none", limits: Limits | None = None,
                 prefix_cache: bool = True, bound: Grammars | None = None, **settings: object) -> AsyncIterator[Rig]:
    """A running target worker for the model in ``folder``, or what ``around`` makes of it, without drafts. bound: the
    grammars of another one on this loop; None: it has its own."""
    config = TargetSection(**{"policy": policy, "slots": slots, "drafts": (), "prompt_lookup": False} | settings)
    section = ModelSection(dtype=dtype, engine=engine, kernels="native" if exact else "auto", quantize=quantize)
    model = around(load_model(folder, section))
    runner = ModelRunner(model, slots)
    costs = StepCosts({1: 1e-3, 64: 2e-3})
    metrics = TargetMetrics("tiny")
    dispatch = partial(deliver_on_loop, asyncio.get_running_loop())
    worker = TargetWorker(runner, config, costs, metrics, dispatch, limits=limits, prefix_cache=prefix_cache)
    digest, shape = tokenizer_hash(folder), model.config
    served = ServedModel("tiny", shape.vocab_size, shape.max_context, digest, slots,
                    identity_of(model, section, weights_hash(folder)))
    hello = TargetHello(PROTOCOL_VERSION, 0, "tiny", shape.vocab_size, digest, shape.hidden_size, shape.num_layers,
                        shape.max_context, served.identity)
    worker.start()
    try:
        bound = bound or grammars(folder, shape.vocab_size)
        service = TargetService(worker, served, bound)
        yield Rig(worker, service, hello, runner, metrics, bound)
    finally:
        await asyncio.to_thread(worker.stop)


@asynccontextmanager
async def drafting(drafter: Drafter, run_ahead: int = 0, made_for: str = "") -> AsyncIterator[PeerEvents]:
    """A running draft worker around ``drafter``."""
    worker = DraftWorker(drafter, "", 30.0, run_ahead, made_for=made_for)
    worker.start()
    try:
        yield worker
    finally:
        await asyncio.to_thread(worker.stop)


@asynccontextmanager
async def local_link(rig: Rig, peers: PeerEvents, events: LinkEvents | None = None) -> AsyncIterator[LocalLink]:
    """Join them in-process; ``events`` may stand in between."""
    with local_link_to(rig.hello, events or rig.worker.following, peers) as link:
        yield link


@contextmanager
def local_link_to(hello: TargetHello, events: LinkEvents, peers: PeerEvents) -> Iterator[LocalLink]:
    """The same for a target that is not a rig."""
    link = LocalLink(hello, events, peers)
    link.restore()
    try:
        yield link
    finally:
        link.cut()


@asynccontextmanager
async def grpc_link(rig: Rig, peers: PeerEvents) -> AsyncIterator[DraftLink]:
    """Join them over loopback gRPC."""
    server = GrpcServer("127.0.0.1:0", WIRE, [DraftServicer(peers)])
    port = await server.start()
    link = DraftLink(f"127.0.0.1:{port}", rig.hello, rig.worker.following)
    running = asyncio.create_task(link.run())
    await eventually(lambda: link.status().connected)
    try:
        yield link
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await server.drain(0.1)
