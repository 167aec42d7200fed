"""A deployment in simulated time: real workers, scheduler, policy and sessions on timed devices, without a clock.

Rules:
1. Each worker has its own clock. Its work is done at once, and its clock then moves on by the time that the device
   would take; messages sent to it meanwhile stay in its inbox with their arrival times.
2. A message takes half a round trip plus ``hop_s``. Events are played in order of time, so a run depends on its seed
   alone: two schedules can be compared without the noise of a machine.
3. Host work takes ``host_s`` for each target step, and no other time.

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
    Law,
    Text,
    TimedDrafter,
    TimedModel,
    Timing,
)
from target_service.loop import TargetWorker
from target_service.service import hand_over
from target_service.step import Limits

AHEAD = {"run-ahead": 239, "outcomes": 1007}  # nodes beyond those that are verified next
SCHEDULES = ("plain", "colocated", "serial", *AHEAD)
PROFILED = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
PARTS = 100  # of what is played; behind each one is told how far it is
ANSWER = 2000  # tokens; who has read them asks for more


class Cast(Protocol):
    """The texts and drafters of a simulation."""

    @property
    def answer(self) -> int:
        """Tokens of one."""
        ...

    @property
    def keeps(self) -> bool:
        """Whether a drafter that grows ahead does not draft again what survives a commit."""
        ...

    def text(self, timing: Timing, stream: int) -> Text:
        """Of a target and of drafts. ``stream``: the first that the target is asked for."""
        ...

    def prompt(self, stream: int) -> tuple[int, ...]: ...


class TimedCast:
    """Nothing is computed."""

    answer = ANSWER
    keeps = True

    def text(self, timing: Timing, stream: int) -> Text:
        return Law(timing)

    def prompt(self, stream: int) -> tuple[int, ...]:
        return (stream % STREAMS * SYMBOLS,) * 2


@dataclass(frozen=True, slots=True)
class Deployment:
    """What is simulated. ``batch``: streams of each target."""

    timing: Timing = field(default_factory=Timing)
    targets: int = 1
    drafts: int = 1
    rtt_s: float = 0.001
    hop_s: float = 0.000125  # of host work and RPC, one way
    host_s: float = 0.0003  # of a target step, not hidden
    batch: int = 1
    run_ahead: int = 0
    colocated: bool = False
    shared_cores: bool = False  # as the setting of a target
    speculate: bool = True
    policy: PolicySection = field(default_factory=PolicySection)
    cast: Cast = field(default_factory=TimedCast)


class World:
    """What happens, in order of time."""

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
    """A device whose users' times move on instead of passing."""

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
    """A worker with a time of its own. ``act`` returns when it wants to act next (None: when it hears something)."""

    world: World
    device: Accelerator
    now_s: float = 0.0
    came_s: float | None = None  # while a message is handed over, when it came
    due_s: float = float("inf")
    act: Callable[[], float | None] = field(default=lambda: None)

    def clock(self) -> float:
        return self.now_s if self.came_s is None else self.came_s

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

    def hear(self, time_s: float, tell: Callable[[], None]) -> None:
        """``tell`` puts a message into its inbox at ``time_s``."""
        def come() -> None:
            self.came_s = time_s
            tell()
            self.came_s = None
            self.wake(time_s)

        self.world.at(time_s, come)


class Line:
    """One target joined with one draft: the link of the one, the peer of the other."""

    def __init__(self, name: str, target: Target, draft: Draft, delay_s: float) -> None:
        self.address = self.name = name
        self._target = target
        self._draft = draft
        self._delay_s = delay_s

    def join(self) -> None:
        hello = TargetHello(PROTOCOL_VERSION, 1, "simulated", self._target.vocab_size, "", 1, 1, MAX_CONTEXT)
        self._target.worker.following.link_up(self, self._draft.worker.peer_up(LinePeer(self), hello))

    def send(self, items: Sequence[DraftBound]) -> None:
        peer = LinePeer(self)
        self._draft.actor.hear(self._target.actor.now_s + self._delay_s,
                               lambda: self._draft.worker.received(peer, items, []))

    def refuse(self, field: str) -> None:
        raise AssertionError(f"nobody simulated sends what is wrong: {field}")

    def answer(self, items: Sequence[TargetBound]) -> None:
        self._target.actor.hear(self._draft.actor.now_s + self._delay_s,
                                lambda: self._target.worker.following.received(self, items, []))


@dataclass(frozen=True, slots=True)
class LinePeer:
    """The target as a draft sees it. Equal for the same line, as a draft knows its sessions by their peer."""

    line: Line

    @property
    def name(self) -> str:
        return self.line.name

    def send(self, items: Sequence[TargetBound]) -> None:
        self.line.answer(items)

    def refuse(self, field: str) -> None:
        self.line.refuse(field)


class Draft:
    def __init__(self, world: World, device: Accelerator, deployment: Deployment) -> None:
        self.actor = Actor(world, device)
        cast, timing = deployment.cast, deployment.timing
        drafter = TimedDrafter(timing, device, cast.keeps and deployment.run_ahead > 0, text=cast.text(timing, 0))
        self.worker = DraftWorker(drafter, "", 1e9, deployment.run_ahead, clock=self.actor.clock)
        self.actor.act = self._act

    def _act(self) -> float | None:
        self.worker.turn(block=False)
        rests_s = self.worker.rests_s
        return None if rests_s is None else self.actor.now_s + rests_s


class Target:
    """With ``batch`` readers, each of which asks again when its answer is over."""

    def __init__(self, world: World, device: Accelerator, deployment: Deployment, first: int) -> None:
        self.actor = Actor(world, device)
        self.pieces: list[tuple[float, Piece]] = []
        self._deployment = deployment
        timing = deployment.timing
        # Whole answers of all have their place: who is put back computes anew, and that takes time.
        slots = max(MAX_CONTEXT, deployment.batch * (deployment.cast.answer + 2 * MAX_NODES))
        runner = ModelRunner(TimedModel(timing, device, deployment.cast.text(timing, first)), slots)
        self.vocab_size = runner.config.vocab_size
        costs = StepCosts({rows: timing.step_of(rows) for rows in PROFILED})
        section = TargetSection(policy=deployment.policy, slots=slots, drafts=(), prompt_lookup=False,
                                max_sessions=max(64, deployment.batch), shared_cores=deployment.shared_cores)
        self.worker = TargetWorker(runner, section, costs, TargetMetrics("timed"), hand_over, self.actor.clock,
                                   limits=Limits(section.max_sessions, 4096, 256), prefix_cache=False)
        self.actor.act = self._act
        self._asked = False
        self._numbers = itertools.count(1)
        for stream in range(deployment.batch):
            self._ask(first + stream)

    def _ask(self, stream: int) -> None:
        cast = self._deployment.cast
        request = Request("r", cast.prompt(stream), Sampling(), cast.answer, None, self._deployment.speculate)

        def sink(piece: Piece | Exception) -> None:
            assert isinstance(piece, Piece), piece
            self.pieces.append((self.actor.now_s, piece))
            if piece.finish:
                self._ask(stream + 17)

        self._asked = True
        self.worker.ask(next(self._numbers), request, sink)

    def _act(self) -> float | None:
        wait_s = self.worker.poll()
        if wait_s == 0.0:
            self.actor.now_s += self._deployment.host_s
        asked, self._asked = self._asked, False
        if asked and wait_s != 0.0:  # who heard the end of an answer has asked again
            return self.actor.now_s
        return None if wait_s is None else self.actor.now_s + wait_s


def of_schedule(name: str, deployment: Deployment) -> Deployment:
    """The deployment under a schedule of SCHEDULES. Raises ConfigError for another name."""
    if name not in SCHEDULES:
        raise ConfigError(f"schedule: {name!r} is not one of {', '.join(SCHEDULES)}")
    return replace(deployment, speculate=name != "plain", colocated=name == "colocated",
                   run_ahead=AHEAD.get(name, 0))


def describe(schedule: str, targets: int, drafts: int, batch: int, rtt_ms: float, step_ms: float, draft_ms: float,
             acceptance: str, seconds: float, report: Callable[[float], None]) -> dict[str, str]:
    """One row of ``slipstream simulate``; ``report`` is told which share of it is done. Raises ConfigError for what
    cannot be."""
    try:
        chances = tuple(float(part) for part in acceptance.split(","))
    except ValueError as error:
        raise ConfigError(f"acceptance: {acceptance!r} is not a list of numbers") from error
    timing = Timing(step_s=step_ms / 1e3, draft_s=draft_ms / 1e3, acceptance=chances, width=len(chances))
    deployment = Deployment(timing, targets, drafts, rtt_ms / 1e3, batch=batch)
    found = simulate(of_schedule(schedule, deployment), seconds, report=report)
    return {"schedule": schedule, "tokens/s": f"{found.tokens_per_s:.1f}", "tokens a round":
            f"{found.acceptance_length:.2f}", "tree was there": f"{found.hit_rate:.0%}",
            "target idle": f"{found.waiting_share:.0%}", "draft busy": f"{found.draft_busy:.0%}"}


@dataclass(frozen=True, slots=True)
class Predicted:
    """Results of all targets together, over the measured time."""

    tokens_per_s: float
    hit_rate: float  # rounds whose tree was there
    hit_length: float  # tokens that they gave; 0 of none
    waiting_share: float  # of a target's time
    acceptance_length: float
    draft_busy: float  # share of a draft's time


def simulate(deployment: Deployment, seconds: float, warmup_s: float = 2.0,
             report: Callable[[float], None] | None = None) -> Predicted:
    """Play ``warmup_s`` and then ``seconds`` of simulated time; ``report`` is told which share of both is played."""
    world = World()
    devices = [Accelerator() for _ in range(deployment.targets)]
    targets = [Target(world, device, deployment, 7 * number) for number, device in enumerate(devices)]
    beside = devices if deployment.colocated else [Accelerator() for _ in range(deployment.drafts)]
    drafts = [Draft(world, device, deployment) for device in beside]
    delay_s = 2e-5 if deployment.colocated else deployment.rtt_s / 2 + deployment.hop_s
    for number, target in enumerate(targets):
        for other, draft in enumerate(drafts):
            if not deployment.colocated or number == other:
                Line(f"{number}-{other}", target, draft, delay_s).join()
        target.actor.wake(0.0)

    def play(begin_s: float, end_s: float) -> None:
        for part in range(1, PARTS + 1):
            at_s = begin_s + (end_s - begin_s) * part / PARTS
            world.run(at_s)
            if report is not None:
                report(at_s / (warmup_s + seconds))

    play(0.0, warmup_s)
    busy = [device.busy_s for device in (*devices, *beside)]
    play(warmup_s, warmup_s + seconds)
    pieces = [piece for target in targets for at_s, piece in target.pieces if warmup_s <= at_s < warmup_s + seconds]
    rounds = max(1, len(pieces))
    shares = [(device.busy_s - before) / seconds for device, before in zip((*devices, *beside), busy, strict=True)]
    hits = [piece for piece in pieces if piece.drafted > 0 and piece.wait_s == 0.0]
    return Predicted(sum(len(piece.tokens) for piece in pieces) / seconds, len(hits) / rounds,
                     sum(len(piece.tokens) for piece in hits) / max(1, len(hits)),
                     max(0.0, 1.0 - sum(shares[:len(devices)]) / len(devices)),
                     sum(len(piece.tokens) for piece in pieces) / rounds, sum(shares[len(devices):]) / len(beside))
