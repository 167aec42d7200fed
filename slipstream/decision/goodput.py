"""Goodput: what speculation would give and cost now, by all that was measured; the arithmetic under the policy.

Rules:
1. Gain = goodput with speculation / plain goodput. In one step with others, who wait for our rows too:
   gain = (1 + accepted) * plain / (plain + (1 + others) * (verify - plain) + wait).
   It is above 1 exactly when the whole step makes more tokens a second with our nodes than without (wait aside).
2. The rows of others are worth a token each, drafts or not: the estimate errs to the plain side.
3. A drafter that proposes nothing costs its wait, no more. A wait is granted while a waited round reaches
   ``leave_gain``; one that does not is still tried now and then (``exchanges.Tries``). On shared cores the time that
   it takes from others counts, too (``toll_s``).
4. Nobody knows how long an exchange takes that was given up: it counts as twice the wait.

It knows no modes and no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from slipstream.base.config import PolicySection
from slipstream.decision.estimates import Acceptance, Experience, Ledger, StepCosts
from slipstream.decision.exchanges import ExchangeByLoad, ExchangeTimes

WORTH = 1.02  # gain from which a chain that costs no wait is verified
RECENT = 10  # rounds that the recent gain looks back on, or so


class Round(NamedTuple):
    """One commit as the policy sees it. Plain rounds count too: they have nothing drafted. A named tuple, as a router
    makes one for every piece of every answer."""

    drafted: int  # draft nodes that were verified
    accepted: int
    depth: int  # of the deepest node that was verified
    verify_s: float  # the step; read only together with ``plain_s``
    wait_s: float  # the session stood still for its drafter
    rows: int = 0  # of the whole step, the session's included; 0: unknown
    late: bool = False  # growth was asked for and had not come when the step began
    plain_s: float | None = None  # what the step would have taken without drafts; None: ask StepCosts
    exchange_s: float | None = None  # commit to growth, when one came; None: the wait tells
    first: bool = False  # of this drafter in this answer: it had the prompt to read, which no later exchange has


class Goodput:
    """The estimates of one policy."""

    def __init__(self, config: PolicySection, costs: StepCosts, exchange: ExchangeTimes | ExchangeByLoad,
                 experience: Experience) -> None:
        self.recent = Ledger(keep=1 - 1 / RECENT)
        self.plain_s = costs.cost(1)  # of the latest round
        self._config = config
        self._costs = costs
        self._exchange = exchange
        self._experience = experience
        self._acceptance = experience.begin()
        self._others = 0
        self._told_others: int | None = None  # by the caller, since the last round
        self._share = 1.0  # of waits and trees that had something to verify
        self._tries = exchange.tries()
        self._trying = False  # the coming exchange is a try
        self._nodes: int | None = None  # asked for several times a round, searched for once

    def tell_others(self, rows: int) -> None:
        """``rows`` of others are in the step that comes."""
        rows = max(0, rows)
        if rows != self._others:
            self._nodes = None
        self._told_others = self._others = rows

    def account(self, round_: Round) -> tuple[float, float]:
        """Learn from a round. Returns the seconds of plain decoding that it replaced and those that it cost."""
        beside = max(self._told_others or 0, round_.rows - 1 - round_.drafted, 0)
        # Prompt rows make the step long, but those who wait for it are the sessions that the caller told of.
        self._others = beside if self._told_others is None else self._told_others
        self._told_others = None
        if round_.plain_s is not None:
            self.plain_s, cost_s = round_.plain_s, round_.verify_s
        else:
            self.plain_s, cost_s = self._costs.cost(beside + 1), self._costs.cost(beside + 1 + round_.drafted)
            cost_s += self._others * (cost_s - self.plain_s)
        if not round_.drafted:  # a plain step is a plain step, whatever it took
            cost_s = self.plain_s
        earned_s, spent_s = (1 + round_.accepted) * self.plain_s, cost_s + round_.wait_s
        self._acceptance.observe(round_.drafted, round_.accepted, round_.depth)
        self._experience.observe(round_.drafted, round_.accepted, round_.depth)
        self._nodes = None
        self._tries.add(spent_s)
        self._trying = self._trying and round_.first  # which teaches nothing
        self._learn_exchange(round_)
        return earned_s, spent_s

    def _learn_exchange(self, round_: Round) -> None:
        waited = round_.wait_s > 0
        if round_.drafted or waited:
            self._share += 0.1 * ((round_.drafted > 0) - self._share)
        if round_.first:
            return
        if round_.exchange_s is not None:
            self._exchange.observe(round_.exchange_s)
        elif waited and not round_.late:
            self._exchange.observe(round_.wait_s)
        elif waited and not round_.drafted:
            self._exchange.observe(min(2 * round_.wait_s, self._config.deadline_max_s))

    def forget(self) -> None:
        """Judge the drafter afresh: what was believed is what may have changed."""
        self.recent = Ledger(keep=self.recent.keep)
        self._acceptance = self._acceptance.fresh()
        self._share, self._nodes = 1.0, None

    def new_drafter(self) -> None:
        """How long the last one took says nothing about this one."""
        self._exchange.forget()

    @property
    def nodes(self) -> int:
        """The node count of the highest expected gain; 0 when even that is below ``leave_gain``."""
        if self._nodes is None:
            self._nodes = self._search(self._acceptance)
        return self._nodes

    @property
    def worthwhile(self) -> bool:
        """Whether ``nodes`` is not 0, which is known as soon as one count pays."""
        return bool(self._search(self._acceptance, any_will_do=True) if self._nodes is None else self._nodes)

    @property
    def overloaded(self) -> bool:
        """Whether not even a drafter with the prior acceptance would pay at this load."""
        return not self._search(self._acceptance.fresh(), any_will_do=True)

    def _search(self, acceptance: Acceptance, any_will_do: bool = False) -> int:
        rows, plain_s = self._others + 1, self._costs.cost(self._others + 1)
        wait_s, toll_s = self._recent_wait_s(), self._exchange.toll_s(plain_s)
        best, best_rate = 0, self._config.leave_gain / (plain_s + wait_s)
        least_s = plain_s + rows * (self._costs.cost(rows + self._config.min_nodes) - plain_s) + wait_s + toll_s
        if (1 + acceptance.tokens(self._config.max_nodes)) / least_s <= best_rate:
            return 0  # quickly, as a full house asks often
        for nodes in range(self._config.min_nodes, self._config.max_nodes + 1):
            extra_s = rows * (self._costs.cost(rows + nodes) - plain_s)
            rate = (1 + acceptance.tokens(nodes)) / (plain_s + extra_s + wait_s + toll_s)
            if rate > best_rate:
                best, best_rate = nodes, rate
                if any_will_do:
                    break
        return best

    def foreseen(self, chances: Sequence[float], drafted_for: bool) -> int:
        """How many tokens of a chain that is at hand to verify at once; ``chances``: that all up to each come. 0 where
        a plain step makes more tokens a second, or a drafter's tree, if there is one, with the wait for it."""
        rows, plain_s = self._others + 1, self._costs.cost(self._others + 1)
        best, best_rate, tokens = 0, WORTH / plain_s, 1.0
        if drafted_for and (nodes := self.nodes):
            wait_s = self._recent_wait_s() if self.recent.rounds else self.exchange_s
            step_s = plain_s + rows * (self._costs.cost(rows + nodes) - plain_s)
            took_s = step_s + wait_s + self._exchange.toll_s(plain_s)
            best_rate = max(best_rate, (1 + self._share * self._acceptance.tokens(nodes)) / took_s)
        if (1 + sum(chances)) / (plain_s + rows * (self._costs.cost(rows + 1) - plain_s)) <= best_rate:
            return 0  # quickly, as a full house asks often
        for count, chance in enumerate(chances, start=1):
            tokens += chance
            rate = tokens / (plain_s + rows * (self._costs.cost(rows + count) - plain_s))
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    def _recent_wait_s(self) -> float:
        return self.recent.waited_s / max(1, min(RECENT, self.recent.rounds))

    @property
    def too_slow(self) -> bool:
        """Whether an exchange would be a loss with the prior acceptance too: the drafter is late, not wrong."""
        tokens = 1 + self._acceptance.fresh().tokens(self._config.max_nodes)
        return tokens * self.plain_s < self._config.leave_gain * (self.plain_s + self.exchange_s)

    @property
    def usual_wait_s(self) -> float:
        """What all but a few exchanges stay below, within the configured limits."""
        config = self._config
        return min(max(self._exchange.usual_s(config.deadline_max_s), config.deadline_min_s), config.deadline_max_s)

    @property
    def exchange_s(self) -> float:
        """An exchange's mean, within the limit; 0 while unknown."""
        return min(self._exchange.mean_s or 0.0, self._config.deadline_max_s)

    @property
    def enough(self) -> float:
        """Draft tokens from which a tree that is there is better than a whole one after an exchange; below, waiting
        gains more tokens than the time would make. With others in the step a wait lasts until they are through, which
        is too long for that: 0."""
        if self._others or self._exchange.mean_s is None:
            return 0.0
        nodes = self.nodes
        whole = self._acceptance.tokens(nodes)
        return max(0.0, whole - (1 + whole) * self._exchange.mean_s / self._costs.cost(1 + nodes))

    @property
    def wait_pays(self) -> bool:
        """Rule 3."""
        return self.pays(self._config.leave_gain)

    def pays(self, gain: float) -> bool:
        """Whether a round with its wait reaches ``gain``, or is tried: then it is until it is over."""
        exchange, toll_s = self._exchange, self._exchange.toll_s(self.plain_s)
        if self._trying or (exchange.mean_s is None and not toll_s):
            return True
        rows, nodes = self._others + 1, self.nodes
        step_s = self.plain_s + self._costs.cost(rows + nodes) - self._costs.cost(rows)
        won = 1 + self._share * self._acceptance.tokens(nodes)
        if won * self.plain_s >= gain * (step_s + (exchange.mean_s or 0.0) + toll_s):
            return True
        self._trying = self._tries.take(exchange.try_s(self.usual_wait_s) + toll_s)
        return self._trying
