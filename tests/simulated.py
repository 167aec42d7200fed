"""A world for the policy, in simulated time: a target, a drafter and their delays, all of them functions of time.

The policy sees what a target would show it: its own costs are a profile, what steps take is the world's. ``World`` says
what is true; ``Simulation`` plays rounds and keeps, for each, the time it took and what plain decoding would take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from slipstream.config import PolicySection
from slipstream.policy import ExchangeTimes, Experience, Mode, Round, SpeculationPolicy, StepCosts, Transition

PROFILE = {1: 0.010, 2: 0.0102, 4: 0.0106, 8: 0.0115, 16: 0.0135, 32: 0.018, 64: 0.030, 128: 0.055}
CROWDED = {1: 0.016, 4: 0.020, 8: 0.028, 16: 0.038, 32: 0.055, 64: 0.090, 128: 0.160}  # a CPU's: rows are dear
EACH_S = 0.001

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
    rounds: list[tuple[float, float, float, int]] = field(default_factory=list)  # end, took, plain would, drafted
    experience: Experience | None = None  # of the sessions before
    exchange: ExchangeTimes | None = None

    def __post_init__(self) -> None:
        self.costs = StepCosts(PROFILE)
        self.policy = SpeculationPolicy(self.config, self.costs, self.exchange, self.now_s, self.experience)
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
        modes = [(0.0, Mode.SPECULATE), *((t.at_s, t.after) for t in self.transitions)]
        if [m for at_s, m in modes if at_s <= after_s][-1] is mode:
            return 0.0
        return min((at_s - after_s for at_s, m in modes if at_s > after_s and m is mode), default=float("inf"))

    def note(self, transition: Transition | None) -> None:
        if transition is not None:
            self.transitions.append(transition)

    def _round(self) -> None:
        world, policy, start_s = self.world, self.policy, self.now_s
        others = int(world.others(start_s))
        asked = policy.wants_drafts(start_s)
        self._ask(asked)
        wait_s, late = self._await(asked)
        drafted = min(policy.budget(self.now_s, others), self._tree)
        chance = world.acceptance(start_s)
        accepted = 0
        while accepted < drafted and self.rng.random() < chance:
            accepted += 1
        plain_s = self._step_s(others + 1)
        verify_s = self._step_s(others + 1 + drafted) * (world.verify_factor(start_s) if drafted else 1.0)
        verify_s *= 1 + world.noise * self.rng.standard_normal()
        self.now_s += verify_s
        self._reroot(drafted, accepted, chance)
        self.costs.observe(others + 1 + drafted, verify_s)
        took_s, self._took_s = self._took_s, None
        self.rounds.append((self.now_s, wait_s + verify_s, (1 + accepted) * plain_s, drafted))
        self.note(policy.observe(self.now_s, Round(drafted, accepted, drafted, verify_s, wait_s, others + 1 + drafted,
                                                   late, exchange_s=took_s)))

    def _ask(self, asked: bool) -> None:
        world = self.world
        if asked and not self._tree and self._coming is None and world.present(self.now_s):
            delay_s = world.exchange_s(self.now_s) * (1 + world.noise * abs(self.rng.standard_normal()))
            delay_s += 0.0 if self._followed else world.restart_s
            depth = world.depth if self.rng.random() < world.matches(self.now_s) else 0
            self._asked_s = self.now_s
            self._coming = (self.now_s + delay_s, self._commits, depth)
        self._followed = asked or self.policy.mode is Mode.SHADOW

    def _await(self, asked: bool) -> tuple[float, bool]:
        """Wait as the policy allows; returns the seconds, and whether growth stayed out."""
        if not asked or self._tree:
            return 0.0, False
        deadline_s = self.policy.deadline_s()
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


@dataclass
class Crowd:
    """Answers in one step after another, drafted for on the target's own cores: a drafter at work slows their step."""

    acceptance: Sequence[float]  # of each answer
    seed: int = 0
    exchange_s: float = 0.003  # and EACH_S for each further answer that is drafted for at once
    slowed: float = 1.2  # a step beside which drafts are made
    config: PolicySection = field(default_factory=PolicySection)
    spent_s: float = 0.0
    plain_s: float = 0.0  # what plain decoding would have taken until the longest answer was over

    def __post_init__(self) -> None:
        self.costs, self.exchange, self.experience = StepCosts(CROWDED), ExchangeTimes(), Experience()
        self.rng = np.random.default_rng(self.seed)
        self.now_s = 0.0

    def answer(self, tokens: int) -> None:
        """All answers, so many tokens each, from their first to the longest one's last."""
        count = len(self.acceptance)
        policies = [SpeculationPolicy(self.config, self.costs, self.exchange, self.now_s, self.experience)
                    for _ in self.acceptance]
        for policy in policies:
            policy.begin(self.now_s, count - 1)
        left, began_s = [tokens] * count, self.now_s
        while any(rest > 0 for rest in left):
            self._step([(n, policies[n]) for n in range(count) if left[n] > 0], left)
        self.spent_s += self.now_s - began_s
        self.plain_s += tokens * self.costs_of(count)

    @staticmethod
    def costs_of(rows: int) -> float:
        return float(np.interp(rows, sorted(CROWDED), [CROWDED[points] for points in sorted(CROWDED)]))

    def _step(self, running: Sequence[tuple[int, SpeculationPolicy]], left: list[int]) -> None:
        asking = [policy for _, policy in running if policy.wants_drafts(self.now_s)]
        comes_s = self.exchange_s + EACH_S * len(asking)
        heard = {id(policy) for policy in asking if policy.deadline_s() >= comes_s}
        held_s = comes_s if heard else 0.0
        nodes = {n: min(4, policy.budget(self.now_s, len(running) - 1)) if id(policy) in heard else 0
                 for n, policy in running}
        rows, beside = len(running) + sum(nodes.values()), len(asking) - len(heard)
        step_s = self.costs_of(rows) * (self.slowed if beside else 1.0) * (1 + 0.03 * self.rng.standard_normal())
        slowed_s = self.costs.slowed_s(rows) * len(running) / beside if beside else 0.0
        self.costs.observe(rows, step_s, beside > 0)
        self.now_s += held_s + step_s
        for n, policy in running:
            accepted = int(np.argmin(np.append(self.rng.random(nodes[n]) < self.acceptance[n], False)))
            left[n] -= 1 + accepted
            waited = id(policy) in heard
            burden_s = held_s * (len(running) - len(heard)) / len(heard) if waited else slowed_s * (policy in asking)
            policy.observe(self.now_s, Round(
                nodes[n], accepted, nodes[n], step_s, held_s if waited else 0.0, rows, nodes=sum(nodes.values()),
                exchange_s=comes_s if policy in asking else None, burden_s=burden_s))
