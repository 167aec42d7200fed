"""Together or apart: what a pair whose devices were measured would give under each schedule, in simulated time.

Rules:
1. The answers and what the drafter says at each place of them are records of the real pair (``replay``); times are
   what was measured, host work included. Prompts take no time.
2. A schedule is compared with both on one device. It pays where it gives more than ``LEAST`` times as much: what is
   simulated is no nearer to the truth than that, and a device more is to be run.
3. ``bound``: the speed if a draft apart took no time, and its network none.

It knows nothing about how devices are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

from slipstream.base.config import PolicySection
from slipstream.drafting.records import Record
from slipstream.drafting.rounds import Measured
from slipstream.simulate.replay import Answers, ReplayedCast
from slipstream.simulate.simulation import AHEAD, SCHEDULES, Deployment, Predicted, of_schedule, simulate
from slipstream.simulate.timed import Timing

LEAST = 1.03
STEPS, WARM_UP = 1000, 200  # plain ones: so long each schedule is played, and so long before
AT_ONCE_S = 1e-6
TOGETHER = "colocated"


def timing_of(plain_s: float, measured: Measured, wider: float, many: int) -> Timing:
    """Of simulated devices, from what was measured of one answer at a time: a plain step, a shape's rounds, and how
    much longer a level of ``many`` rows takes than one of the shape's."""
    growth = measured.growth
    return Timing(plain_s, knee(growth.num_draft_tokens + 1, measured.verify_s / plain_s), knee(many, wider),
                  measured.draft_s, growth.num_steps, growth.topk)


def knee(rows: int, ratio: float) -> int:
    """Rows at which arithmetic takes as long as reading the weights, where a forward of ``rows`` takes ``ratio`` times
    one of few (see ``Timing.step_of``)."""
    return 1 << 30 if ratio <= 1.001 else max(1, round(rows / (ratio**3 - 1) ** (1 / 3)))


@dataclass(frozen=True, slots=True)
class Compared:
    """The schedules, and what each gave."""

    found: dict[str, Predicted]
    bound: float  # by what one device gives

    def ratio(self, schedule: str) -> float:
        """Tokens a second by those of both on one device; inf where that has not made any."""
        return _by(self.found[schedule], self.found[TOGETHER])

    @property
    def apart(self) -> str:
        """The best one of two devices."""
        return max((name for name in self.found if name not in ("plain", TOGETHER)),
                   key=lambda name: self.found[name].tokens_per_s)

    @property
    def best(self) -> str:
        """The schedule to take."""
        chosen = self.apart if self.ratio(self.apart) >= LEAST else TOGETHER
        return "plain" if self.found["plain"].tokens_per_s > self.found[chosen].tokens_per_s else chosen

    @property
    def run_ahead(self) -> int:
        """The setting for it."""
        return AHEAD.get(self.best, 0)

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
    """Play every schedule, with trees of so many ``nodes``. ``exchange_s``: what a round spends between the services;
    ``apart_s``: what a tree takes on the draft's own device; ``shared_cores``: the setting of a target that has the
    draft on its device. ``report`` is called after each of SCHEDULES."""
    deployment = Deployment(timing, rtt_s=exchange_s, hop_s=0.0, host_s=0.0, cast=ReplayedCast(Answers(records)),
                            policy=PolicySection(max_nodes=nodes))

    def played(name: str, where: Deployment) -> Predicted:
        return simulate(of_schedule(name, where), STEPS * timing.step_s, WARM_UP * timing.step_s)

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
