"""Together or apart: the tokens a second that a measured pair of target and draft would give under each schedule, in
simulated time.

Rules:
1. Answers, and the drafter's trees at each place of them, are records of the real pair (``replay``); times are measured
   ones, host work included. Prompts take no time.
2. Each schedule is compared with target and draft on one device. A draft apart pays if it gives at least ``LEAST``
   times as much: a simulation is not more exact than that, and a second device has to be run.
3. ``bound``: what a draft apart would give if drafting and the network took no time.

It knows nothing about how devices are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

from slipstream.base.config import PolicySection
from slipstream.drafting.records import Record
from slipstream.drafting.rounds import Measured
from slipstream.simulate.replay import RecordedText, ReplayedWorkload
from slipstream.simulate.simulation import RUN_AHEAD, SCHEDULES, Deployment, Predicted, simulate, with_schedule
from slipstream.simulate.timed import Timing

LEAST = 1.03
STEPS, WARM_UP = 1000, 200  # times of so many plain steps: how long a schedule is played, and how long before counting
AT_ONCE_S = 1e-6  # a drafting time of nearly 0
TOGETHER = "colocated"


def timing_of(plain_s: float, measured: Measured, wider: float, many: int) -> Timing:
    """The Timing of simulated devices, from measurements of one answer at a time. plain_s: a plain step; measured:
    rounds of one tree shape; wider: how many times as long a tree level of ``many`` rows takes as one of that shape."""
    growth = measured.growth
    return Timing(plain_s, knee(growth.num_draft_tokens + 1, measured.verify_s / plain_s), knee(many, wider),
                  measured.draft_s, growth.num_steps, growth.topk)


def knee(rows: int, ratio: float) -> int:
    """The number of rows at which arithmetic takes as long as reading the weights, if a forward of ``rows`` rows takes
    ``ratio`` times as long as one of few rows (see ``Timing.step_of``)."""
    return 1 << 30 if ratio <= 1.001 else max(1, round(rows / (ratio**3 - 1) ** (1 / 3)))


@dataclass(frozen=True, slots=True)
class Compared:
    """The result of each schedule, by name."""

    found: dict[str, Predicted]
    bound: float  # rule 3, divided by the tokens a second of one device

    def ratio(self, schedule: str) -> float:
        """Tokens a second of ``schedule``, divided by those of both on one device; inf if these are 0."""
        return _by(self.found[schedule], self.found[TOGETHER])

    @property
    def apart(self) -> str:
        """The best schedule with two devices."""
        return max((name for name in self.found if name not in ("plain", TOGETHER)),
                   key=lambda name: self.found[name].tokens_per_s)

    @property
    def best(self) -> str:
        """The schedule to take."""
        chosen = self.apart if self.ratio(self.apart) >= LEAST else TOGETHER
        return "plain" if self.found["plain"].tokens_per_s > self.found[chosen].tokens_per_s else chosen

    @property
    def run_ahead(self) -> int:
        """The setting draft.run_ahead for the best schedule."""
        return RUN_AHEAD.get(self.best, 0)

    def why(self) -> list[str]:
        """The verdict, one sentence a line."""
        ahead, apart = self.found["outcomes"], self.ratio(self.apart)
        told = {"plain": f"decode plain: that gives {self.ratio('plain'):.2f} times what drafts on one device do",
                TOGETHER: f"keep both on one device: apart they would give {apart:.2f} of that"}
        lines = [told.get(self.best, f"take them apart, with draft.run_ahead={self.run_ahead}: "
                                     f"{self.ratio(self.best):.2f} times what one device gives")]
        if ahead.hit_length:
            lines.append(f"grown far ahead, a tree was there in {ahead.hit_rate:.0%} of rounds and gave "
                         f"{ahead.hit_length:.1f} tokens; one that is waited for gives "
                         f"{self.found['serial'].acceptance_length:.1f}")
        lines.append(f"with drafts that take no time, and no way to them, it would be {self.bound:.2f} times; a second "
                     "pair on the second device gives 2.00 times, to two answers at once")
        return lines


def compared(timing: Timing, nodes: int, exchange_s: float, records: Sequence[Record], apart_s: float,
             shared_cores: bool = False, report: Callable[[], None] = lambda: None) -> Compared:
    """Play every schedule, with trees of ``nodes`` nodes. exchange_s: round trip of a round between the services, in
    seconds; apart_s: seconds of a tree on the draft's own device; shared_cores: that setting of a colocated target;
    report: called after each of SCHEDULES."""
    workload = ReplayedWorkload(RecordedText(records))
    deployment = Deployment(timing, rtt_s=exchange_s, hop_s=0.0, host_s=0.0, workload=workload,
                            policy=PolicySection(max_nodes=nodes))

    def played(name: str, where: Deployment) -> Predicted:
        return simulate(with_schedule(name, where), STEPS * timing.step_s, WARM_UP * timing.step_s)

    found = dict[str, Predicted]()
    for name in SCHEDULES:
        together = name == TOGETHER
        there = timing if together else replace(timing, draft_s=apart_s)
        found[name] = played(name, replace(deployment, timing=there, shared_cores=together and shared_cores))
        report()
    at_hand = replace(deployment, rtt_s=0.0, timing=replace(timing, draft_s=AT_ONCE_S))
    return Compared(found, _by(played("serial", at_hand), found[TOGETHER]))


def _by(one: Predicted, other: Predicted) -> float:
    return one.tokens_per_s / other.tokens_per_s if other.tokens_per_s else inf
