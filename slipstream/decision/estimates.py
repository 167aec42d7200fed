"""What the policy believes, from what was measured: step costs, acceptance by depth, gains.

Rules:
1. Seconds in, seconds out; no clock. Every estimate forgets, so that a changed world is seen.
2. A round never speaks about a depth that it did not reach: acceptance is censored at the offered depth and at the
   first rejection.

The objective is goodput, accepted tokens by time (SmartSpec, arXiv 2406.14066). It knows nothing about modes.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

NEAR = 0.15  # of a surprise that changes the cost of row counts near the measured one
FAR = 0.03  # and of all row counts: a machine under load is slower everywhere
SURPRISE = math.log(4.0)  # one odd step counts as no more than this
DEPTHS = 32
PRIOR = 0.7  # conditional acceptance of a drafter that nobody has seen yet
PRIOR_TRIALS = 2.0
TOLD_TRIALS = 6.0  # what is known from other sessions counts for more than a guess
KEEP, KEEP_LONG = 0.95, 0.995  # of the trials at a depth, for each new one: of a session, of all sessions
UNTOLD_EVERY = 16  # sessions: one begins with a guess, so that a changed world is seen


class StepCosts:
    """Seconds of one target step by its number of rows: a start-up profile, corrected by what steps really take.

    Shared by all sessions of a target. Between profiled row counts it interpolates, beyond the last it goes on with the
    last slope, and it never falls as rows grow. A profile of one row count makes further rows free.
    """

    __slots__ = ("_costs", "_factors", "_profile", "_rows")

    def __init__(self, profile: Mapping[int, float]) -> None:
        """``profile``: {rows: seconds}, at least one entry, all positive."""
        assert profile and all(rows > 0 and 0 < seconds < math.inf for rows, seconds in profile.items())
        self._rows = sorted(profile)
        self._profile = [profile[rows] for rows in self._rows]
        self._factors = [0.0] * len(self._rows)  # logarithms
        self._costs: list[float] = []
        self._update()

    def cost(self, rows: int) -> float:
        """Seconds that a step of ``rows`` rows is expected to take."""
        if len(self._costs) == 1:
            return self._costs[0]
        low, share = self._place(rows)
        return self._costs[low] + share * (self._costs[low + 1] - self._costs[low])

    def observe(self, rows: int, seconds: float) -> None:
        """A step of ``rows`` rows took ``seconds``. What cannot be (not positive, not finite) is ignored."""
        if rows < 1 or not 0.0 < seconds < math.inf:
            return
        surprise = max(-SURPRISE, min(SURPRISE, math.log(seconds / self.cost(rows))))
        low, share = self._place(rows)
        share = min(1.0, share)
        for point in range(len(self._rows)):
            weight = 1.0 - share if point == low else share if point == low + 1 else 0.0
            self._factors[point] += surprise * (FAR + NEAR * weight)
        self._update()

    def _place(self, rows: int) -> tuple[int, float]:
        # The profiled point below and how far towards the next; beyond the last the share exceeds 1.
        low = max(0, min(bisect_right(self._rows, rows) - 1, len(self._rows) - 2))
        if len(self._rows) == 1:
            return 0, 0.0
        return low, max(0.0, (rows - self._rows[low]) / (self._rows[low + 1] - self._rows[low]))

    def _update(self) -> None:
        highest = 0.0
        self._costs = [highest := max(highest, seconds * math.exp(factor))
                       for seconds, factor in zip(self._profile, self._factors, strict=True)]


class Acceptance:
    """How many of n draft nodes become tokens: the chance of each depth, given that the one above was accepted."""

    __slots__ = ("_hits", "_keep", "_per_level", "_reach", "_told", "_trials")

    def __init__(self, nodes_per_level: float = 1.0, told: Sequence[float] = (), keep: float = KEEP) -> None:
        """``told``: the chance of each depth as others have seen it; without it a guess."""
        self._hits = [0.0] * DEPTHS
        self._trials = [0.0] * DEPTHS
        self._per_level = nodes_per_level
        self._told = told
        self._keep = keep
        self._reach: list[float] = []  # made when it is asked for: an experience never is

    def fresh(self) -> Acceptance:
        """A belief without experience, in trees of the same shape."""
        return Acceptance(self._per_level)

    def heir(self) -> Acceptance:
        """A belief that begins where this one stands."""
        return Acceptance(self._per_level, self._chances())

    def observe(self, drafted: int, accepted: int, depth: int) -> None:
        """Of ``drafted`` nodes, ``depth`` deep at most, ``accepted`` were; nothing drafted says nothing."""
        if drafted < 1:
            return
        depth = min(max(depth, accepted, 1), DEPTHS)
        self._per_level += 0.1 * (drafted / depth - self._per_level)
        for level in range(min(accepted + 1, depth)):
            self._trials[level] = self._trials[level] * self._keep + 1.0
            self._hits[level] = self._hits[level] * self._keep + float(level < accepted)
        self._reach = []

    def tokens(self, nodes: int) -> float:
        """Draft tokens expected to be accepted when the best ``nodes`` nodes are verified."""
        if not self._reach:
            self._update()
        levels = min(nodes / self._per_level, float(DEPTHS))
        whole = int(levels)
        if whole == DEPTHS:
            return self._reach[DEPTHS]
        return self._reach[whole] + (levels - whole) * (self._reach[whole + 1] - self._reach[whole])

    def _chances(self) -> list[float]:
        chance, chances = PRIOR, []
        for level, (hits, trials) in enumerate(zip(self._hits, self._trials, strict=True)):
            # A depth that was seldom reached is believed to be as others say, or like the one above it.
            before, weight = (self._told[level], TOLD_TRIALS) if self._told else (chance, PRIOR_TRIALS)
            chance = (hits + weight * before) / (trials + weight)
            chances.append(chance)
        return chances

    def _update(self) -> None:
        alive, total = 1.0, 0.0
        self._reach = [0.0]
        for chance in self._chances():
            alive *= chance
            total += alive
            self._reach.append(total)


class Experience:
    """Acceptance as all sessions of one kind have seen it: a new one need not find out that its drafter is poor."""

    __slots__ = ("_begun", "_seen")

    def __init__(self) -> None:
        self._seen = Acceptance(keep=KEEP_LONG)
        self._begun = 0

    def observe(self, drafted: int, accepted: int, depth: int) -> None:
        """A round of any session (see ``Acceptance.observe``)."""
        self._seen.observe(drafted, accepted, depth)

    def begin(self) -> Acceptance:
        """What a new session believes. Every UNTOLD_EVERY-th is told nothing, the first of all among them."""
        self._begun += 1
        return self._seen.fresh() if self._begun % UNTOLD_EVERY == 1 else self._seen.heir()


@dataclass(slots=True)
class Ledger:
    """Seconds that rounds took against the seconds of plain decoding that they replaced. ``keep`` < 1 forgets."""

    keep: float = 1.0
    earned_s: float = 0.0
    spent_s: float = 0.0
    waited_s: float = 0.0
    rounds: int = 0
    drafted: int = 0  # rounds in which something was drafted

    def add(self, earned_s: float, spent_s: float, waited_s: float, drafted: bool) -> None:
        self.earned_s = self.earned_s * self.keep + earned_s
        self.spent_s = self.spent_s * self.keep + spent_s
        self.waited_s = self.waited_s * self.keep + waited_s
        self.rounds += 1
        self.drafted += drafted

    @property
    def gain(self) -> float:
        """Goodput with speculation / plain goodput; 1 before the first round."""
        return self.earned_s / self.spent_s if self.spent_s > 0 else 1.0

    @property
    def loss_s(self) -> float:
        return self.spent_s - self.earned_s
