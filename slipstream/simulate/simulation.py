"""A deployment in simulated time: real workers, scheduler, policy and sessions on timed devices, without a real clock.

Rules:
1. Each worker has its own time. Its work is done at once, and its time advances by what its device would take. A
   message that arrives before that time waits in its inbox, with its time of arrival.
2. A message takes half a round trip plus ``hop_s`` (20 us if colocated). Events are played in order of time, so a run
   depends on its seed only: two schedules can be compared without the noise of a machine.
3. Host work takes no time, except ``host_s`` for each target step.

It is what ``slipstream simulate`` runs. It knows nothing about processes or sockets.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from draft_service.worker import DraftWorker
from slipstream.base.config import PolicySection, TargetSection
from slipstream.base.errors import ConfigError
from slipstream.decision.beliefs import StepCosts
from slipstream.engine.runner import ModelRunner
from slipstream.observe.metrics import TargetMetrics
from slipstream.protocol.messages import PROTOCOL_VERSION, DraftBound, TargetBound, TargetHello
from slipstream.protocol.requests import Piece, Request, Sampling
from slipstream.protocol.tree import MAX_NODES
from slipstream.simulate.timed import (
    MAX_CONTEXT,
    STREAMS,
    SYMBOLS,
    Device,
    SyntheticText,
    Text,
    TimedDrafter,
    TimedModel,
    Timing,
)
from target_service.loop import TargetWorker
from target_service.service import deliver
from target_service.step import Limits

RUN_AHEAD = {"run-ahead": 239, "outcomes": 1007}  # the setting draft.run_ahead of a schedule
SCHEDULES = ("plain", "colocated", "serial", *RUN_AHEAD)
PROFILED = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # rows
PARTS = 100  # of the simulated time; progress is reported after each
ANSWER = 2000  # tokens of an answer; the reader then asks again


class Workload(Protocol):
    """The prompts and texts of a simulation."""

    @property
    def answer(self) -> int:
        """Tokens of one answer."""
        ...

    @property
    def keeps_subtree(self) -> bool:
        """Whether a drafter that runs ahead keeps the part of a tree that survives a commit."""
        ...

    def text(self, timing: Timing, stream: int) -> Text:
        """The text of a target or of drafts. stream: the first stream that the target is asked for."""
        ...

    def prompt(self, stream: int) -> tuple[int, ...]:
        """The prompt tokens of a stream."""
        ...


class TimedWorkload:
    """The texts of ``timed.SyntheticText``."""

    answer = ANSWER
    keeps_subtree = True

    def text(self, timing: Timing, stream: int) -> Text:
        return SyntheticText(timing)

    def prompt(self, stream: int) -> tuple[int, ...]:
        return (stream % STREAMS * SYMBOLS,) * 2


@dataclass(frozen=True, slots=True)
class Deployment:
    """What is simulated."""

    timing: Timing = field(default_factory=Timing)
    targets: int = 1
    drafts: int = 1
    rtt_s: float = 0.001
    hop_s: float = 0.000125  # of host work and RPC, one way
    host_s: float = 0.0003  # host work of a target step that does not overlap with the device
    batch: int = 1  # answers that each target runs at a time
    run_ahead: int = 0  # the setting draft.run_ahead
    colocated: bool = False  # a draft on the device of each target
    shared_cores: bool = False  # that setting of a target
    speculate: bool = True
    policy: PolicySection = field(default_factory=PolicySection)
    workload: Workload = field(default_factory=TimedWorkload)


class World:
    """Events, played in order of time."""

    def __init__(self) -> None:
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, time_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), event))

    def run(self, until_s: float) -> None:
        while self._events and self._events[0][0] < until_s:
            _, _, event = heapq.heappop(self._events)
            event()


class Accelerator(Device):
    """A simulated device: work advances the time of its user instead of sleeping."""

    def __init__(self) -> None:
        super().__init__()
        self.user: Actor | None = None
        self.free_s = self.busy_s = 0.0

    def busy(self, began_s: float, seconds: float) -> None:
        assert self.user is not None
        self.user.now_s = self.free_s = max(self.user.now_s, self.free_s) + seconds
        self.busy_s += seconds


@dataclass(slots=True)
class Actor:
    """A worker with its own simulated time. ``act`` does its work and returns the time at which it acts next; None: at
    the next message."""

    world: World
    device: Accelerator
    now_s: float = 0.0
    arrival_s: float | None = None  # while a message is put into the inbox: its time of arrival
    due_s: float = float("inf")  # when it acts next
    act: Callable[[], float | None] = field(default=lambda: None)

    def clock(self) -> float:
        return self.now_s if self.arrival_s is None else self.arrival_s

    def wake(self, time_s: float) -> None:
        time_s = max(time_s, self.now_s)
        if time_s < self.due_s:
            self.due_s = time_s
            self.world.at(time_s, lambda: self._wake(time_s))

    def _wake(self, time_s: float) -> None:
        if time_s != self.due_s:
            return  # it was woken earlier
        self.due_s, self.now_s, self.device.user = float("inf"), max(time_s, self.now_s), self
        again_s = self.act()
        if again_s is not None:
            self.wake(again_s)

    def deliver(self, time_s: float, put: Callable[[], None]) -> None:
        """At ``time_s`` call ``put``, which puts a message into the worker's inbox, and wake the worker."""
        def arrive() -> None:
            self.arrival_s = time_s
            put()
            self.arrival_s = None
            self.wake(time_s)

        self.world.at(time_s, arrive)


class SimulatedLink:
    """The connection of one target with one draft, as the target's link; ``SimulatedPeer`` is the draft's side."""

    def __init__(self, name: str, target: Target, draft: Draft, delay_s: float) -> None:
        self.address = self.name = name
        self._target = target
        self._draft = draft
        self._delay_s = delay_s

    def connect(self) -> None:
        hello = TargetHello(PROTOCOL_VERSION, 1, "simulated", self._target.vocab_size, "", 1, 1, MAX_CONTEXT)
        self._target.worker.following.link_up(self, self._draft.worker.peer_up(SimulatedPeer(self), hello))

    def send(self, items: Sequence[DraftBound]) -> None:
        peer = SimulatedPeer(self)
        self._draft.actor.deliver(self._target.actor.now_s + self._delay_s,
                                  lambda: self._draft.worker.received(peer, items, []))

    def refuse(self, field: str) -> None:
        raise AssertionError(f"nobody simulated sends what is wrong: {field}")

    def answer(self, items: Sequence[TargetBound]) -> None:
        self._target.actor.deliver(self._draft.actor.now_s + self._delay_s,
                                   lambda: self._target.worker.following.received(self, items, []))


@dataclass(frozen=True, slots=True)
class SimulatedPeer:
    """The target as a draft sees it. Equal for the same link, as a draft knows its sessions by their peer."""

    link: SimulatedLink

    @property
    def name(self) -> str:
        return self.link.name

    def send(self, items: Sequence[TargetBound]) -> None:
        self.link.answer(items)

    def refuse(self, field: str) -> None:
        self.link.refuse(field)


class Draft:
    """A real draft worker on a simulated device."""

    def __init__(self, world: World, device: Accelerator, deployment: Deployment) -> None:
        self.actor = Actor(world, device)
        workload, timing = deployment.workload, deployment.timing
        keep_subtree = workload.keeps_subtree and deployment.run_ahead > 0
        drafter = TimedDrafter(timing, device, keep_subtree, text=workload.text(timing, 0))
        self.worker = DraftWorker(drafter, "", 1e9, deployment.run_ahead, clock=self.actor.clock)
        self.actor.act = self._act

    def _act(self) -> float | None:
        self.worker.turn(block=False)
        wait_s = self.worker.wait_s
        return None if wait_s is None else self.actor.now_s + wait_s


class Target:
    """A real target worker on a simulated device, with ``batch`` clients that ask again when their answer ends."""

    def __init__(self, world: World, device: Accelerator, deployment: Deployment, first: int) -> None:
        self.actor = Actor(world, device)
        self.pieces: list[tuple[float, Piece]] = []
        self._deployment = deployment
        timing = deployment.timing
        # Slots for whole answers of all clients: a preempted answer would be computed anew, which takes time.
        slots = max(MAX_CONTEXT, deployment.batch * (deployment.workload.answer + 2 * MAX_NODES))
        runner = ModelRunner(TimedModel(timing, device, deployment.workload.text(timing, first)), slots)
        self.vocab_size = runner.config.vocab_size
        costs = StepCosts({rows: timing.step_of(rows) for rows in PROFILED})
        section = TargetSection(policy=deployment.policy, slots=slots, drafts=(), prompt_lookup=False,
                                max_sessions=max(64, deployment.batch), shared_cores=deployment.shared_cores)
        self.worker = TargetWorker(runner, section, costs, TargetMetrics("timed"), deliver, self.actor.clock,
                                   limits=Limits(section.max_sessions, 4096, 256), prefix_cache=False)
        self.actor.act = self._act
        self._has_new_request = False
        self._numbers = itertools.count(1)
        for stream in range(deployment.batch):
            self._ask(first + stream)

    def _ask(self, stream: int) -> None:
        workload = self._deployment.workload
        request = Request("r", workload.prompt(stream), Sampling(), workload.answer, None, self._deployment.speculate)

        def sink(piece: Piece | Exception) -> None:
            assert isinstance(piece, Piece), piece
            self.pieces.append((self.actor.now_s, piece))
            if piece.finish:
                self._ask(stream + 17)

        self._has_new_request = True
        self.worker.add_request(next(self._numbers), request, sink)

    def _act(self) -> float | None:
        wait_s = self.worker.poll()
        if wait_s == 0.0:
            self.actor.now_s += self._deployment.host_s
        has_new_request, self._has_new_request = self._has_new_request, False
        if has_new_request and wait_s != 0.0:  # an answer ended, and its client has asked again
            return self.actor.now_s
        return None if wait_s is None else self.actor.now_s + wait_s


def with_schedule(name: str, deployment: Deployment) -> Deployment:
    """``deployment`` with one of SCHEDULES. Raises ConfigError for another name."""
    if name not in SCHEDULES:
        raise ConfigError(f"schedule: {name!r} is not one of {', '.join(SCHEDULES)}")
    return replace(deployment, speculate=name != "plain", colocated=name == "colocated",
                   run_ahead=RUN_AHEAD.get(name, 0))


def describe(schedule: str, targets: int, drafts: int, batch: int, rtt_ms: float, step_ms: float, draft_ms: float,
             acceptance: str, seconds: float, report: Callable[[float], None]) -> dict[str, str]:
    """One row of the table of ``slipstream simulate``, column by column. report: called with the share that is done.
    Raises ConfigError for invalid arguments."""
    try:
        chances = tuple(float(part) for part in acceptance.split(","))
    except ValueError as error:
        raise ConfigError(f"acceptance: {acceptance!r} is not a list of numbers") from error
    timing = Timing(step_s=step_ms / 1e3, draft_s=draft_ms / 1e3, acceptance=chances, width=len(chances))
    deployment = Deployment(timing, targets, drafts, rtt_ms / 1e3, batch=batch)
    found = simulate(with_schedule(schedule, deployment), seconds, report=report)
    return {"schedule": schedule, "tokens/s": f"{found.tokens_per_s:.1f}", "tokens a round":
            f"{found.acceptance_length:.2f}", "tree was there": f"{found.hit_rate:.0%}",
            "target idle": f"{found.waiting_share:.0%}", "draft busy": f"{found.draft_busy:.0%}"}


@dataclass(frozen=True, slots=True)
class Predicted:
    """Results of all targets together, over the counted time."""

    tokens_per_s: float
    hit_rate: float  # share of the rounds whose tree was there without waiting
    hit_length: float  # tokens of such a round; 0 if there was none
    waiting_share: float  # share of a target's time in which its device was idle
    acceptance_length: float  # tokens of a round
    draft_busy: float  # share of a draft's time


def simulate(deployment: Deployment, seconds: float, warmup_s: float = 2.0,
             report: Callable[[float], None] | None = None) -> Predicted:
    """Play ``warmup_s`` and then ``seconds`` of simulated time; only the latter counts. report: called with the share
    of both that is done."""
    world = World()
    devices = [Accelerator() for _ in range(deployment.targets)]
    targets = [Target(world, device, deployment, 7 * number) for number, device in enumerate(devices)]
    draft_devices = devices if deployment.colocated else [Accelerator() for _ in range(deployment.drafts)]
    drafts = [Draft(world, device, deployment) for device in draft_devices]
    delay_s = 2e-5 if deployment.colocated else deployment.rtt_s / 2 + deployment.hop_s
    for number, target in enumerate(targets):
        for other, draft in enumerate(drafts):
            if not deployment.colocated or number == other:
                SimulatedLink(f"{number}-{other}", target, draft, delay_s).connect()
        target.actor.wake(0.0)

    def play(begin_s: float, end_s: float) -> None:
        for part in range(1, PARTS + 1):
            at_s = begin_s + (end_s - begin_s) * part / PARTS
            world.run(at_s)
            if report is not None:
                report(at_s / (warmup_s + seconds))

    play(0.0, warmup_s)
    busy = [device.busy_s for device in (*devices, *draft_devices)]
    play(warmup_s, warmup_s + seconds)
    pieces = [piece for target in targets for at_s, piece in target.pieces if warmup_s <= at_s < warmup_s + seconds]
    rounds = max(1, len(pieces))
    shares = [(device.busy_s - before) / seconds
              for device, before in zip((*devices, *draft_devices), busy, strict=True)]
    hits = [piece for piece in pieces if piece.drafted > 0 and piece.wait_s == 0.0]
    tokens = sum(len(piece.tokens) for piece in pieces)
    return Predicted(tokens / seconds, len(hits) / rounds,
                     sum(len(piece.tokens) for piece in hits) / max(1, len(hits)),
                     max(0.0, 1.0 - sum(shares[:len(devices)]) / len(devices)),
                     tokens / rounds, sum(shares[len(devices):]) / len(draft_devices))
