"""A world for the policy, in simulated time: a target, a drafter and their delays, all of them functions of time.

The policy sees what a target would show it: its own costs are a profile, what steps take is the world's. ``World`` says
what is true; ``Simulation`` plays rounds and keeps, for each, the time it took and what plain decoding would take.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from slipstream.base.config import PolicySection
from slipstream.decision.beliefs import Beliefs, StepCosts
from slipstream.decision.decide import Decision, Mode, Round, RoundInputs, Transition
from slipstream.decision.policy import SpeculationPolicy

PROFILE = {1: 0.010, 2: 0.0102, 4: 0.0106, 8: 0.0115, 16: 0.0135, 32: 0.018, 64: 0.030, 128: 0.055}

Of = Callable[[float], float]


def always(value: float) -> Of:
    return lambda _: value


def steps(*changes: tuple[float, float]) -> Of:
    """The value of the last change at or before a time; ``changes`` are (from second, value), the first from 0."""
    return lambda now_s: [value for from_s, value in changes if from_s <= now_s][-1]


@dataclass(frozen=True)
class World:
    """What is true at each second."""

    acceptance: Of = field(default=always(0.8))  # chance of a draft token, given the one before it
    exchange_s: Of = field(default=always(0.002))  # commit to growth
    present: Of = field(default=always(1.0))  # 0: nobody drafts, and nobody says so
    matches: Of = field(default=always(1.0))  # chance that the drafter has something to propose
    others: Of = field(default=always(0.0))  # rows of other sessions in the step
    slowness: Of = field(default=always(1.0))  # of the whole machine, against the profile
    verify_factor: Of = field(default=always(1.0))  # of steps with drafts alone: a profile that is wrong about trees
    depth: int = 4
    noise: float = 0.05  # of step and exchange times, relative
    restart_s: float = 0.05  # a drafter that was not followed catches up


@dataclass
class Simulation:
    """One session (or a stream of them) under one policy."""

    world: World
    config: PolicySection = field(default_factory=PolicySection)
    seed: int = 0
    now_s: float = 0.0
    transitions: list[Transition] = field(default_factory=list)
    noted_s: list[float] = field(default_factory=list)  # when each of them was noted
    rounds: list[tuple[float, float, float, int]] = field(default_factory=list)  # end, took, plain would, drafted
    beliefs: Beliefs = field(default_factory=lambda: Beliefs(StepCosts(PROFILE)))  # shared with the sessions before

    def __post_init__(self) -> None:
        self.policy = SpeculationPolicy(self.config, self.beliefs, self.now_s)
        self.rng = np.random.default_rng(self.seed)
        self._followed = True
        self._tree = 0  # nodes of the chain that wait at the target
        self._coming: tuple[float, int, int] | None = None  # growth: when it comes, for which commit, its depth
        self._asked_s = 0.0  # when the drafter heard of that commit
        self._took_s: float | None = None  # of growth that came too late for its commit, since the last round
        self._commits = 0

    def run(self, until_s: float) -> None:
        """Play rounds up to ``until_s``."""
        while self.now_s < until_s:
            self._round()

    def overhead(self, from_s: float, until_s: float) -> float:
        """Time taken / time that plain decoding would have taken for the same tokens, over rounds that ended in it."""
        inside = [(took, plain) for end, took, plain, _ in self.rounds if from_s < end <= until_s]
        return sum(took for took, _ in inside) / sum(plain for _, plain in inside)

    def first(self, mode: Mode, after_s: float) -> float:
        """Seconds after ``after_s`` until the policy is in ``mode``; infinite if never."""
        noted = zip(self.noted_s, self.transitions, strict=True)
        modes = [(0.0, Mode.SPECULATE), *((at_s, transition.after) for at_s, transition in noted)]
        if [m for at_s, m in modes if at_s <= after_s][-1] is mode:
            return 0.0
        return min((at_s - after_s for at_s, m in modes if at_s > after_s and m is mode), default=float("inf"))

    def note(self, transition: Transition | None) -> None:
        if transition is not None:
            self.transitions.append(transition)
            self.noted_s.append(self.now_s)

    def _round(self) -> None:
        world, policy, start_s = self.world, self.policy, self.now_s
        others = int(world.others(start_s))
        decision = policy.decide(RoundInputs(others, followed=True))
        self._ask(decision)
        wait_s, late = self._await(decision)
        drafted = min(decision.verify, self._tree)
        chance = world.acceptance(start_s)
        accepted = 0
        while accepted < drafted and self.rng.random() < chance:
            accepted += 1
        plain_s = self._step_s(others + 1)
        verify_s = self._step_s(others + 1 + drafted) * (world.verify_factor(start_s) if drafted else 1.0)
        verify_s *= 1 + world.noise * self.rng.standard_normal()
        self.now_s += verify_s
        self._reroot(drafted, accepted, chance)
        self.beliefs.costs.observe(others + 1 + drafted, verify_s)
        took_s, self._took_s = self._took_s, None
        self.rounds.append((self.now_s, wait_s + verify_s, (1 + accepted) * plain_s, drafted))
        self.note(policy.observe(self.now_s, Round(drafted, accepted, verify_s, wait_s, others + 1 + drafted,
                                                   late, exchange_s=took_s)))

    def _ask(self, decision: Decision) -> None:
        world = self.world
        if decision.num_wanted and not self._tree and self._coming is None and world.present(self.now_s):
            delay_s = world.exchange_s(self.now_s) * (1 + world.noise * abs(self.rng.standard_normal()))
            delay_s += 0.0 if self._followed else world.restart_s
            depth = world.depth if self.rng.random() < world.matches(self.now_s) else 0
            self._asked_s = self.now_s
            self._coming = (self.now_s + delay_s, self._commits, depth)
        self._followed = decision.follow

    def _await(self, decision: Decision) -> tuple[float, bool]:
        """Wait as the policy allows; returns the seconds, and whether growth stayed out."""
        if not decision.num_wanted or self._tree:
            return 0.0, False
        deadline_s = decision.wait_s
        comes_s = self._coming[0] - self.now_s if self._coming is not None else float("inf")
        wait_s = max(0.0, min(deadline_s, comes_s))
        self.now_s += wait_s
        if comes_s > deadline_s:
            return wait_s, True
        self._land(1.0)
        return wait_s, False

    def _land(self, chance: float) -> None:
        # Growth for an older commit keeps what lies below the tokens chosen since, if they were guessed right.
        assert self._coming is not None
        comes_s, commit, depth = self._coming
        missed = self._commits - commit
        self._took_s = comes_s - self._asked_s if missed else None
        self._tree = max(0, depth - missed) if self.rng.random() < chance**missed else 0
        self._coming = None

    def _reroot(self, drafted: int, accepted: int, chance: float) -> None:
        self._commits += 1
        if self._tree:  # the chain hangs on if the bonus token is its next one
            left = self._tree - drafted - 1
            self._tree = left if left > 0 and accepted == drafted and self.rng.random() < chance else 0
        if self._coming is not None and self._coming[0] <= self.now_s:
            self._land(chance)

    def _step_s(self, rows: int) -> float:
        points = sorted(PROFILE)
        return float(np.interp(rows, points, [PROFILE[p] for p in points])) * self.world.slowness(self.now_s)
