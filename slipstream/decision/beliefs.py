"""Beliefs: the measurements that decisions use: step costs by rows, acceptance by rank or depth, draft latency, the
value of a second, and the budget of exploration.

Rules:
1. Seconds in, seconds out; no clock. Every belief forgets old measurements, so that changes are seen.
2. A round gives no evidence about depths that it did not reach: acceptance is censored at the offered depth and at the
   first rejection. Of each node of a tree it tells whether it was accepted.
3. One ``Beliefs`` is shared by the sessions of a target, or by the answers of a draft pool.
4. Where drafts have their own devices, an exchange costs only the session that waits for it; on shared cores it costs
   all sessions. Where an engine steps all sessions together, the waiting sessions share the cost of the others' wait.
5. All exploration that should not pay is paid from the ``ExplorationBudget``: probes while speculation is off,
   tried waits, measured plain steps, and sessions that begin with a guess (except the first ones).

It knows nothing about modes.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul

from slipstream.protocol.tree import MAX_NODES

KEPT_EXCHANGES = 7  # exchanges of one load: one odd exchange does not move their median, and a few new ones do
MIN_MARGIN = 0.1  # of an exchange: it is waited for at least so much longer than usual


class DraftLatency:
    """Seconds from a commit to the growth that answers it, of the newest KEPT_EXCHANGES of each load: their median, and
    of fewer the least, as the first ones are cold and a hope that is wrong is soon seen to be.

    On ``shared`` cores trees take longer the more sessions there are: loads are told apart in powers of two, and what a
    smaller one took is believed of a load that nobody has seen. Elsewhere all loads are one."""

    __slots__ = ("_by_level", "_current", "_level", "_load", "_unsorted", "held_per_waiter", "shared")

    def __init__(self, shared: bool = False) -> None:
        self.shared = shared
        self.held_per_waiter = 0.0  # sessions held up for nothing by each that waits: in engines that step in lockstep
        self._load = self._level = 1
        self._by_level: dict[int, LatencyWindow] = {}
        self._current: LatencyWindow | None = None  # of the present load, or of the next smaller one that was seen
        self._unsorted = False  # something was observed since they were put in order: once a step, not once a session

    @property
    def load(self) -> int:
        """Sessions that run."""
        return self._load

    @load.setter
    def load(self, sessions: int) -> None:
        self._load = sessions
        if self._unsorted:
            self._refresh()
        if self.shared:
            self._level = sessions.bit_length()
        self._refresh()

    @property
    def mean_s(self) -> float | None:
        """The mean at the present load; None: unknown."""
        if self._unsorted:
            self._refresh()
        return self._current.mean_s if self._current is not None else None

    def least_s(self, unknown_s: float) -> float:
        """The lowest that is known: the cause of higher ones may be over."""
        if self._unsorted:
            self._refresh()
        return self._current.least_s if self._current is not None else unknown_s

    def usual_s(self, unknown_s: float) -> float:
        """A bound that all but a few exchanges stay below."""
        if self._unsorted:
            self._refresh()
        return self._current.usual_s if self._current is not None else unknown_s

    def cost_to_others_s(self, unknown_s: float, wait_s: float, held_per_waiter: float | None = None) -> float:
        """Seconds that an exchange with a wait of ``wait_s`` takes from other sessions, which could step meanwhile: 0
        where drafts have their own device and no session is held up (None: as many as in the newest step)."""
        if not self.shared:
            return (self.held_per_waiter if held_per_waiter is None else held_per_waiter) * wait_s
        if self._unsorted:
            self._refresh()
        return (self._load - 1) * (self._by_level[min(self._by_level)].mean_s if self._by_level else unknown_s)

    def observe(self, seconds: float) -> None:
        if self._level not in self._by_level:
            self._by_level[self._level] = LatencyWindow()
        self._by_level[self._level].exchanges_s.append(seconds)
        self._unsorted = True

    def forget(self) -> None:
        self._by_level.clear()
        self._unsorted = False
        self._refresh()

    def _refresh(self) -> None:
        if self._unsorted:
            self._by_level[self._level].update()
            self._unsorted = False
        level: int | None = self._level
        if level not in self._by_level:
            level = max(filter(self._level.__gt__, self._by_level), default=None)
        self._current = self._by_level[level] if level is not None else None


class LatencyWindow:
    """Of one load. Numbers are as of the last ``update``."""

    __slots__ = ("exchanges_s", "least_s", "mean_s", "usual_s")

    def __init__(self) -> None:
        self.mean_s = self.least_s = self.usual_s = 0.0
        self.exchanges_s: deque[float] = deque(maxlen=KEPT_EXCHANGES)

    def update(self) -> None:
        ordered = sorted(self.exchanges_s)
        count, least_s = len(ordered), ordered[0]
        mean_s = ordered[KEPT_EXCHANGES // 2] if count == KEPT_EXCHANGES else least_s
        deviation_s = sum([abs(seconds - mean_s) for seconds in ordered]) / count if count > 1 else least_s / 2
        # As TCP keeps its round trips (RFC 6298); where all take the same, a moment more is no surprise.
        self.usual_s = mean_s + max(4.0 * deviation_s, MIN_MARGIN * mean_s)
        self.least_s, self.mean_s = least_s, mean_s


SHARE = 0.01  # of all time: the goal is 2 % in all, and what is paid for is what should be lost, not what is
SAVED_S = 60.0  # of each session: what was saved longer ago is not spent at once
TRIALS_IN_A_ROW = 3  # tried waits in a row, on shared cores: one alone is not believed


class ExplorationBudget:
    """The exploration budget of one target or draft pool: it earns SHARE of the time of all rounds, and holds at most
    SHARE * SAVED_S for each session and each wait of a row of tried waits. A full budget affords any price, so that
    expensive trials are rare, but possible."""

    __slots__ = ("_max_s", "_trials_in_a_row", "left_s", "trials_left")

    def __init__(self, trials_in_a_row: int = 1) -> None:
        self.left_s, self._max_s = 0.0, math.inf
        self.trials_left = self._trials_in_a_row = trials_in_a_row  # before the next row is saved for

    def earn(self, seconds: float, sessions: int = 1) -> None:
        """Earn from a round of ``seconds`` in which ``sessions`` sessions ran."""
        # For a whole row of the longest waits, too, or after a slow hour none would ever be tried again.
        left_s, max_s = self.left_s, SHARE * SAVED_S * self._trials_in_a_row * (sessions or 1)
        self._max_s = max_s
        if left_s < max_s:
            left_s += SHARE * seconds
            self.left_s = left_s if left_s < max_s else max_s

    def pay(self, seconds: float) -> None:
        """Take out ``seconds`` that were lost, or (below 0) put them back."""
        self.left_s -= seconds

    def affords(self, seconds: float) -> bool:
        """Whether a loss of ``seconds`` can be paid."""
        return self.left_s >= min(seconds, self._max_s)

    def affords_wait(self, seconds: float) -> bool:
        """Whether all remaining tried waits of the row can be paid, if each loses ``seconds``."""
        return self.affords(self.trials_left * seconds)

    def pay_wait(self, seconds: float) -> None:
        """Pay for a tried wait. After a whole row the budget must fill again, else the savings of a quiet hour would
        all be spent in the first moments of a busy one."""
        self.pay(seconds)
        self.trials_left -= 1
        if not self.trials_left:
            self.trials_left, self.left_s = self._trials_in_a_row, min(self.left_s, 0.0)

    def refund_wait(self, seconds: float) -> None:
        """Give the money for a tried wait back, because it was not made."""
        self.pay(-seconds)
        self.trials_left = self.trials_left % self._trials_in_a_row + 1


NEAR_RATE = 0.15  # of a surprise that changes the cost of row counts near the measured one
FAR_RATE = 0.03  # and of all row counts: a machine under load is slower everywhere
FORGET_AFTER = 512  # steps without one near a row count: then what a guess has learnt of its cost is forgotten
FADE_RATE = 0.0005  # of what is believed beyond the profile's shape, or of reading, for each step that does not show it
BUSY_AT_START = math.log(1.25)  # one of the first steps that takes so much less says that the profile is too high
MAX_SURPRISE = math.log(4.0)  # one odd step counts as no more than this
NODES = MAX_NODES - 1  # draft tokens that are told apart, by depth or rank
PRIOR = 0.7  # conditional acceptance of a drafter that nobody has seen yet
CHAIN = [PRIOR ** rank for rank in range(1, NODES + 1)]  # the chance of each rank, where all of them are a chain
PRIOR_TRIALS = 4.0  # fewer end a good drafter after ten unlucky rounds, with more a poor one comes and goes
SHARED_TRIALS = 6.0  # what is known from other sessions counts for more than a guess
FIRST_TEXTS = 4  # of a kind, for which drafts were verified: until then each begins with a guess
KEEP, KEEP_SHARED = 0.95, 0.995  # of the trials at a depth, for each new one: of a session, of all sessions
KEEP_ALONE = 0.995  # of what rounds without a drafter gave, for each new one
MIN_STEPS = 2  # steps near a row count, before a guess no longer stands for it
PLAIN_EVERY = 64  # rounds: then one is plain, so that the cost of a plain step is measured, not remembered
MAX_PLAIN_TRIES = 4  # steps in a row that may be asked to be plain: prompts in each of them must not forbid drafts


CONTEXT_STEP = 256  # tokens: sessions of about one length share a price, and that of a short text is the profile's
READ_DOUBT = 4.0  # what reading takes was measured in a moment, at start, when much else may have run


def whole_context(num_tokens: int) -> int:
    """``num_tokens`` in whole CONTEXT_STEPs."""
    return num_tokens - num_tokens % CONTEXT_STEP


class StepCosts:
    """Seconds of one target step by its number of rows: a start-up profile, corrected by what steps really take. Behind
    long texts draft tokens cost more: each reads them, for ``read_s`` seconds a token at start.

    Shared by all sessions of a target. Between profiled row counts it interpolates, beyond the last it goes on with the
    last slope, and it never falls as rows grow. A profile of one row count makes further rows free.

    A price that keeps drafts away is one that no step shows again, so it must not stay for ever: step by step
    (FADE_RATE), row counts that no step has return to the profile's shape, and where long texts verify nothing, what
    reading takes falls, to the READ_DOUBT-th part of what was measured at start.

    A profile may be a guess: then the first step of all says what height it has, and row counts beside two that were
    seen stand on the line through them. In many engines the first steps with drafts compile, and are slow: that a row
    count costs more is believed after MIN_STEPS steps near it, and as little more as the least of them took. After
    FORGET_AFTER steps elsewhere it is a guess again. What is never tried stays a guess, so it says of which row counts
    a step is ``due``.
    """

    __slots__ = ("_costs", "_factors", "_first_shown", "_last_observed", "_least_read_s", "_num_corrections",
                 "_num_seen", "_observed", "_profile", "_read_s", "_reading_priced", "_rows", "_steps", "_visited")

    def __init__(self, profile: Mapping[int, float], read_s: float = 0.0, guessed: bool = False) -> None:
        """``profile``: {rows: seconds}, at least one entry, all positive."""
        assert profile and all(rows > 0 and 0 < seconds < math.inf for rows, seconds in profile.items())
        self._read_s, self._least_read_s = read_s, read_s / READ_DOUBT
        self._reading_priced = False  # since the newest step
        self._rows = sorted(profile)
        self._profile = [profile[rows] for rows in self._rows]
        self._factors = [0.0] * len(self._rows)  # logarithms
        self._num_corrections = 0  # of a measured profile
        self._num_seen = [0] * len(self._rows) if guessed else None  # steps to which each was nearest
        self._visited: list[int] = []  # that any step was nearest to, in order
        self._first_shown: dict[int, float] = {}  # factors of points that are not believed yet
        self._last_observed = [0] * len(self._rows)  # the number of the newest step that was nearest to each
        self._observed = 0
        self._costs: list[float] = []
        self._steps: dict[tuple[int, int, int, int], Sequence[float]] = {}  # sessions of one step ask for the same
        self._update()

    @property
    def guessed(self) -> bool:
        return self._num_seen is not None

    def due(self, rows: int) -> bool:
        """Whether a step of ``rows`` rows should be taken to see what it costs: none, or none of the last
        PLAIN_EVERY, was near. Only where the profile is a guess."""
        if self._num_seen is None:
            return False
        point = self._nearest(rows)
        age = self._observed - self._last_observed[point]
        return (age >= PLAIN_EVERY or self._num_seen[point] < MIN_STEPS) and age % PLAIN_EVERY < MAX_PLAIN_TRIES

    def steps(self, rows: int, max_more: int, context: int = 0) -> Sequence[float]:
        """Seconds that steps of ``rows``, ``rows`` + 1, … ``rows`` + ``max_more`` rows are expected to take; those
        further rows are draft tokens behind ``context`` tokens."""
        cached = self._steps.get((rows, max_more, 1, context))
        if cached is None:
            cached = (self._with_reading(self.steps(rows, max_more), context) if context
                      else self._interpolated(rows, max_more, 1))
            self._steps[rows, max_more, 1, context] = cached
        return cached

    def step_shares(self, sessions: int, max_more: int, context: int = 0) -> Sequence[float]:
        """Seconds of a step of ``sessions`` with one row each, and what 1, 2, … ``max_more`` draft tokens behind
        ``context`` tokens add to it for one of them where all have as many."""
        cached = self._steps.get((sessions, max_more, 0, context))
        if cached is None:
            if context:
                cached = self._with_reading(self.step_shares(sessions, max_more), context)
            else:
                plain_s, *others = self._interpolated(sessions, max_more, sessions)
                cached = [plain_s, *[plain_s + (step_s - plain_s) / sessions for step_s in others]]
            self._steps[sessions, max_more, 0, context] = cached
        return cached

    def cost(self, rows: int, num_read: int = 0) -> float:
        """Seconds that a step of ``rows`` rows is expected to take. ``num_read``: the sum of ``whole_context`` over
        its draft tokens."""
        return self.steps(rows, 0)[0] + self._read_s * num_read

    def _with_reading(self, steps: Sequence[float], context: int) -> list[float]:
        self._reading_priced = True
        read_s = self._read_s * context
        return [step_s + more * read_s for more, step_s in enumerate(steps)]

    def _interpolated(self, rows: int, max_more: int, stride: int) -> list[float]:
        # Written out: it is made anew after each step.
        points, costs = self._rows, self._costs
        if len(points) == 1:
            return costs * (max_more + 1)
        last, interpolated = len(points) - 2, []
        low = min(max(0, bisect_right(points, rows) - 1), last)
        for count in range(rows, rows + max_more * stride + 1, stride):
            while low < last and count >= points[low + 1]:
                low += 1
            above, cost = count - points[low], costs[low]
            if above > 0:
                cost += above / (points[low + 1] - points[low]) * (costs[low + 1] - cost)
            interpolated.append(cost)
        return interpolated

    def observe(self, rows: int, seconds: float, num_read: int = 0) -> None:
        """A step took ``seconds``; the rest as in ``cost``. What cannot be (not positive, not finite) is ignored."""
        if rows < 1 or not 0.0 < seconds < math.inf:
            return
        cost_s, reading_s = self.cost(rows, num_read), self._read_s * num_read
        surprise = math.log(seconds / cost_s)
        if self._num_seen is None or self._visited:  # else nothing is known that it could be odd against
            surprise = max(-MAX_SURPRISE, min(MAX_SURPRISE, surprise))
        if self._num_seen is not None:
            self._correct_guess(rows, surprise, self._num_seen)
        else:
            self._correct_profile(rows, surprise)
            if reading_s:
                self._read_s *= math.exp(NEAR_RATE * surprise * reading_s / cost_s)
            elif self._reading_priced and self._read_s > self._least_read_s:
                self._read_s *= 1 - FADE_RATE
        self._update()

    def _correct_profile(self, rows: int, surprise: float) -> None:
        # What was measured: near the rows of the step more than elsewhere.
        low, share = self._place(rows)
        share, far, first = min(1.0, share), FAR_RATE, 1.0 / (1 + self._num_corrections)
        self._num_corrections += 1
        if first > FAR_RATE and surprise < -BUSY_AT_START:  # what was measured with it falls with it
            far, lowered = first, math.exp(first * surprise)
            self._read_s, self._least_read_s = self._read_s * lowered, self._least_read_s * lowered
        here = self._factors[low]
        if share:
            here += share * (self._factors[low + 1] - here)
        for point in range(len(self._rows)):
            weight = 1.0 - share if point == low else share if point == low + 1 else 0.0
            fade = FADE_RATE * (here - self._factors[point])
            self._factors[point] += fade + surprise * min(1.0, far + NEAR_RATE * weight)

    def _correct_guess(self, rows: int, surprise: float, num_seen: list[int]) -> None:
        nearest = self._nearest(rows)
        self.skip_step()
        self._last_observed[nearest] = self._observed
        num_seen[nearest] += 1
        if not self._visited:
            self._factors = [factor + surprise for factor in self._factors]
            self._visited.append(nearest)
        elif nearest in self._visited:
            near = surprise * (FAR_RATE + NEAR_RATE) if num_seen[nearest] > MIN_STEPS else min(0.0, surprise)
            self._factors = [factor + (near if point == nearest else surprise * FAR_RATE)
                             for point, factor in enumerate(self._factors)]
        else:  # what surprised was the cost on the line through others, not the guess
            shown = math.log(self._costs[nearest] / self._profile[nearest]) + surprise
            self._first_shown[nearest] = least = min(shown, self._first_shown.get(nearest, shown))
            if surprise <= 0.0 or num_seen[nearest] >= MIN_STEPS:
                self._factors[nearest] = least
                insort(self._visited, nearest)
                del self._first_shown[nearest]
        self._forget()

    def _forget(self) -> None:
        # What no step was near for long has the shape of the guess again, at the lowest height that is known.
        old = [point for point, observed in enumerate(self._last_observed) if self._observed - observed > FORGET_AFTER]
        visited = [point for point in self._visited if point not in old]
        if not old or not visited:  # a guess without any height were worse
            return
        self._visited, lowest = visited, min([self._factors[point] for point in visited])
        for point in old:
            self._factors[point] = lowest

    def skip_step(self) -> None:
        """A step that says nothing about row counts: it computed prompts."""
        self._observed += 1

    def _place(self, rows: int) -> tuple[int, float]:
        # The profiled point below and how far towards the next; beyond the last the share exceeds 1.
        points = self._rows
        if len(points) == 1:
            return 0, 0.0
        low = max(0, min(bisect_right(points, rows) - 1, len(points) - 2))
        return low, max(0.0, (rows - points[low]) / (points[low + 1] - points[low]))

    def _nearest(self, rows: int) -> int:
        low, share = self._place(rows)
        return low + (share >= 0.5 and low + 1 < len(self._rows))

    def _update(self) -> None:
        self._steps.clear()
        self._reading_priced = False
        rows, visited, costs = self._rows, self._visited, list(map(mul, self._profile, map(math.exp, self._factors)))
        # What was never measured stands on the line through what was: a guess there would be far too low or high.
        for low, high in pairwise(visited):
            begin, begin_s = rows[low], costs[low]
            slope = (costs[high] - begin_s) / (rows[high] - begin)
            for point in range(low + 1, high if high < visited[-1] else len(rows)):
                costs[point] = begin_s + slope * (rows[point] - begin)
        self._costs = list(accumulate(costs, max))


class Acceptance:
    """How many of n draft nodes become tokens. Of a chain, which a guess is too: the chance of each depth, given that
    the one above was accepted. Of a tree: the chance of each rank, as its best n nodes are a smaller tree."""

    __slots__ = ("_expected", "_hits", "_is_tree", "_keep", "_prior", "_rank_hits", "_rank_prior", "_rank_trials",
                 "_trials", "num_texts")

    def __init__(self, prior: Sequence[float] = (), keep: float = KEEP, rank_prior: Sequence[float] = ()) -> None:
        """``prior``: the chance of each depth as others have seen it; without it a guess. ``rank_prior``: the same of
        the best node of a tree, the second best and so on."""
        self._hits = [0.0] * NODES
        self._trials = [0.0] * NODES
        self._rank_hits, self._rank_trials = [0.0] * NODES, [0.0] * NODES
        self._is_tree = len(rank_prior) > 0  # as a round has shown
        self._prior = prior
        self._rank_prior = rank_prior
        self._keep = keep
        self._expected: list[float] = []  # made when it is asked for
        self.num_texts = 0  # of which it was observed

    @property
    def observed(self) -> bool:
        """Whether anything was ever observed."""
        return self._trials[0] > 0.0 or self._rank_trials[0] > 0.0

    def inherit(self) -> Acceptance:
        """A belief that begins where this one stands."""
        expected = self.expected(NODES) if self._is_tree else ()
        return Acceptance(self._levels(NODES)[0], rank_prior=[more - less for less, more in pairwise(expected)])

    def observe(self, drafted: int, accepted: int, ranks: Sequence[int] | None = None) -> None:
        """Count a round: ``accepted`` of ``drafted`` nodes. ``ranks``: of the accepted ones among all, where nodes are
        known from the best (1) on; None: all were a chain. The best of a tree are a smaller tree, so one round shows
        what each would have given. A round without drafted nodes is ignored."""
        if drafted < 1:
            return
        drafted, keep = drafted if drafted < NODES else NODES, self._keep
        if ranks is not None:
            self._is_tree = True
        else:
            accepted = accepted if accepted < drafted else drafted
            ranks, hits, trials = range(1, accepted + 1), self._hits, self._trials
            for level in range(accepted):
                trials[level] = trials[level] * keep + 1.0
                hits[level] = hits[level] * keep + 1.0
            if accepted < drafted:
                trials[accepted] = trials[accepted] * keep + 1.0
                hits[accepted] *= keep
        if self._is_tree:
            hits, trials = self._rank_hits, self._rank_trials
            for rank in range(drafted):
                trials[rank] = trials[rank] * keep + 1.0
                hits[rank] *= keep
            for rank in ranks:
                hits[rank - 1] += 1.0
        self._expected = []

    def expected(self, max_nodes: int) -> Sequence[float]:
        """Draft tokens expected to be accepted of the best 0, 1, … ``max_nodes`` nodes."""
        if len(self._expected) != max_nodes + 1:
            self._expected = self._by_rank(max_nodes) if self._is_tree else self._levels(max_nodes)[1]
        return self._expected

    def _by_rank(self, max_nodes: int) -> list[float]:
        """The same from the chances of ranks. What was seldom seen falls from rank to rank as others have seen it, or
        as in a chain."""
        prior, weight = self._rank_prior or CHAIN, SHARED_TRIALS if self._rank_prior else PRIOR_TRIALS
        chance, above, tokens, expected = 1.0, 1.0, 0.0, [0.0]
        for hits, trials, usual in zip(self._rank_hits[:max_nodes], self._rank_trials, prior, strict=False):
            guess = chance * usual / above if above > 0.0 else 0.0
            chance = min(chance, (hits + weight * guess) / (trials + weight))
            above, tokens = usual, tokens + chance
            expected.append(tokens)
        return expected

    def tokens(self, nodes: int) -> float:
        """Of the best ``nodes`` nodes."""
        return self.expected(nodes)[nodes]

    def _levels(self, depths: int) -> tuple[list[float], list[float]]:
        """The chance of each depth, and [depths + 1] tokens expected of a chain of so many nodes."""
        hits, trials, prior = self._hits, self._trials, self._prior
        weight, chance = SHARED_TRIALS if prior else PRIOR_TRIALS, PRIOR
        reach, tokens, chances, expected = 1.0, 0.0, list[float](), [0.0]
        for level in range(depths):
            if prior:  # a depth that was seldom reached is believed to be as others say, or like the one above it
                chance = prior[level]
            chance = (hits[level] + weight * chance) / (trials[level] + weight)
            chances.append(chance)
            reach *= chance
            tokens += reach
            expected.append(tokens)
        return chances, expected


@dataclass(slots=True)
class Ledger:
    """Seconds that rounds took against the seconds of plain decoding that they replaced. ``keep`` < 1 forgets."""

    keep: float = 1.0
    earned_s: float = 0.0
    spent_s: float = 0.0
    waited_s: float = 0.0
    num_rounds: int = 0
    num_drafted: int = 0  # rounds in which something was drafted

    def add(self, earned_s: float, spent_s: float, waited_s: float, drafted: bool) -> None:
        keep = self.keep
        self.earned_s = self.earned_s * keep + earned_s
        self.spent_s = self.spent_s * keep + spent_s
        self.waited_s = self.waited_s * keep + waited_s
        self.num_rounds += 1
        self.num_drafted += drafted

    @property
    def gain(self) -> float:
        """Goodput with speculation / plain goodput; 1 before the first round."""
        return self.earned_s / self.spent_s if self.spent_s > 0 else 1.0

    @property
    def loss_s(self) -> float:
        return self.spent_s - self.earned_s


LATE_RATE = 0.02  # of a round that changes what is believed of trees that nobody waits for
LATE_FADE = 1e-5  # of a round without one: about one in a hundred is asked for where none ever helped
MAX_RUN_AHEAD = 4  # sessions drafted for, above which none is grown ahead: others' steps hide an exchange


class Beliefs:
    """Measurements that the sessions of one target (or the answers of one draft pool) share. ``shared_cores``: drafts
    compute on the cores of their target. ``lockstep``: each step is one of all sessions, so that a wait delays all."""

    __slots__ = ("_hit_rate", "_num_asking", "acceptance", "budget", "costs", "late_rate", "latency", "lockstep",
                 "reading", "time_value", "without_drafter")

    def __init__(self, costs: StepCosts, shared_cores: bool = False, lockstep: bool = False) -> None:
        self.costs = costs
        self.lockstep = lockstep
        self.latency = DraftLatency(shared_cores)
        self.reading = DraftLatency()  # of whole texts, up to the first nodes
        self.budget = ExplorationBudget(TRIALS_IN_A_ROW if shared_cores else 1)
        self.time_value = 1.0  # of a second that drafting takes, in seconds of plain decoding: what prompt lookup makes
        self.without_drafter = Ledger(keep=KEEP_ALONE)  # all rounds, as with prompt lookup and no drafter
        # Over all sessions; sampled text is harder to foresee, so what is known of it is kept apart.
        self.acceptance = {sampled: Acceptance(keep=KEEP_SHARED) for sampled in (False, True)}
        self._hit_rate = 1.0
        self.late_rate = 1.0  # of trees that were asked for and not awaited: of how many there was something to verify
        self._num_asking = 0  # sessions that ask for drafts

    def observe_round(self, earned_s: float, spent_s: float, lookup: bool) -> None:
        """Count a round of any session. Without prompt lookup it counts as a plain one."""
        self.without_drafter.add(earned_s, spent_s if lookup else earned_s, 0.0, lookup)
        self.time_value = max(1.0, self.without_drafter.gain)

    def begin_session(self, sampled: bool, price_s: float) -> tuple[Acceptance, float, float]:
        """What a new session believes of draft tokens, and in which share of exchanges there are any: as others have
        seen it, once there are some: one text may be the hardest of all. If the budget has ``price_s`` it begins with a
        guess, so that a changed world is seen; what a row of tried waits would lose stays there, as behind waits that
        are too long a guess shows nothing. Also what was paid for that."""
        shared = self.acceptance[sampled]
        if shared.num_texts < FIRST_TEXTS:
            return Acceptance(), 1.0, 0.0
        if self.budget.left_s < price_s + self.budget.trials_left * self.latency.least_s(0.0):
            return shared.inherit(), self._hit_rate, 0.0
        self.budget.pay(price_s)
        return Acceptance(), 1.0, price_s

    def observe_exchange(self, drafted: bool) -> None:
        """An exchange of any session, and whether it gave something to verify."""
        self._hit_rate += (1.0 - KEEP_SHARED) * (drafted - self._hit_rate)

    def observe_late(self, asked: bool, drafted: bool) -> None:
        """A round of any session without a wait for its tree. What is not asked for slowly counts as unknown again."""
        if asked:
            self.late_rate += LATE_RATE * (drafted - self.late_rate)
        else:
            self.late_rate += LATE_FADE * (1.0 - self.late_rate)

    def count_asking(self, asking: bool) -> None:
        """A session asks for drafts from now on, or does not any more. A session that ends stops asking first."""
        self._num_asking += 1 if asking else -1

    def may_run_ahead(self, asking: bool) -> bool:
        """Whether a session's drafter may grow ahead, as one of MAX_RUN_AHEAD. ``asking``: it is counted already."""
        return self._num_asking + (not asking) <= MAX_RUN_AHEAD
