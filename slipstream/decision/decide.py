"""Decide: what one round does, as a pure function of the shared beliefs, the session's own state and its present
inputs.

Rules:
1. An action's value is its expected tokens divided by its seconds: its own, and those of other sessions that wait for
   it. In one step with others:  gain = tokens * plain / (plain + time_value * ((1 + others) * (verify - plain) + wait +
   cost_to_others)). It is above 1 exactly when more tokens are made than without a drafter: ``time_value`` is what else
   a second would give (``beliefs.without_drafter``), so a draft has to beat prompt lookup, not just plain steps.
2. Each tree is priced as if all of the step had one of its size: what is cheap for one is not for all at once. A chain
   of prompt lookup, which few sessions have, is priced after the trees of others; not in an engine that steps
   ``lockstep``.
3. A wait is granted if its round reaches ``leave_gain``, or ``enter_gain`` where a drafter has to read the prompt
   first. Another wait is tried when the budget can pay its expected loss. Where all sessions stop while one waits,
   it is granted to as many at once as are together worth the time of all; a trial then covers all.
4. Nothing is changed here. A decision contains what it spends; the caller pays that when it takes the decision. It is a
   value, valid until the next commit. ``why`` is for people: it goes to traces, spans and logs.

It knows no clock, no drafter and no transition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import inf
from typing import Literal, NamedTuple

from slipstream.base.config import PolicySection
from slipstream.base.value import value
from slipstream.decision.beliefs import PLAIN_EVERY, Acceptance, Beliefs, DraftLatency, Ledger

LOOKUP_GAIN = 1.02  # of a chain that costs no wait
HOST_SHARE = 0.002  # of a plain step, in which the host reads a tree: all who are in the step wait
IDLE_TOKENS = 128  # committed since a tree was asked for: on shared cores, to tell of more takes time there


@dataclass(frozen=True, slots=True)
class Rules:
    """The settings of ``PolicySection``. Other constants are defined where they are used, with their reasons."""

    leave_gain: float = 0.98  # a little below 1: beliefs scatter, and to come back costs a probe
    enter_gain: float = 1.05  # above it by more than beliefs scatter, or the mode flaps
    deadline_min_s: float = 0.005  # a wait is at least so long: beliefs of less are noise of the host
    deadline_max_s: float = 0.25
    whole_trees: bool = False  # are verified, whatever part of them pays

    @staticmethod
    def of(config: PolicySection) -> Rules:
        """As configured. ``always``: whole trees, whatever they cost, and each has the whole time that it may take."""
        rules = Rules(deadline_max_s=config.deadline_max_s)
        if config.always:
            return replace(rules, leave_gain=0.0, enter_gain=0.0, deadline_min_s=config.deadline_max_s,
                           whole_trees=True)
        return replace(rules, deadline_min_s=min(rules.deadline_min_s, config.deadline_max_s))


Why = Literal["drafts pay", "prompt lookup", "a probe", "tries a wait", "measures plain", "too slow",
              "drafts do not pay", "no drafter", "forbidden"]


Reason = Literal["acceptance_low", "draft_unavailable", "draft_timeout", "overload", "incompatible", "probe_ok",
                 "probe_failed", "operator", "drafter_ready"]


class Mode(StrEnum):
    SPECULATE = "speculate"
    SHADOW = "shadow"
    PLAIN = "plain"


SPECULATE, PLAIN = Mode.SPECULATE, Mode.PLAIN  # an enum looks its members up slowly, and each round asks often


@value
class RoundInputs:
    """The inputs of a session's decision."""

    others: int = 0  # rows that others bring to the coming step
    followed: bool = False  # a drafter follows
    lookup_chances: Sequence[float] = ()  # of prompt lookup's chain: that all tokens up to each are right
    num_since_request: int = 0  # tokens committed since a tree was asked for
    grows_ahead: bool = False  # the drafter would grow on while the target verifies
    context: int = 0  # tokens that its draft tokens stand behind: ``whole_context``
    unread_s: float = 0.0  # its drafter still reads for so long; inf: nobody knows


@value
class Decision:
    """All that a round needs to know."""

    mode: Mode
    verify: int  # draft nodes to verify at most, root not counted; 0: plain
    lookup: int  # tokens of the text's own chain that are verified at once instead of waiting; 0: none
    num_wanted: int  # nodes that the drafter is asked for; 0: it gets the commit, and is asked for nothing
    follow: bool  # a drafter should follow: attach one, or keep it
    ahead: bool  # the drafter may grow on until the next commit
    wait_s: float  # seconds after the commit that its growth may be awaited
    why: Why
    budget_s: float = 0.0  # of exploration: what this round is expected to lose
    is_trial: bool = False  # the budget pays for its wait
    tree_pays: bool = False  # a tree would pay, if it were there


@value
class Round:
    """One commit as a decision saw it. Plain rounds count too: they have nothing drafted."""

    drafted: int  # draft nodes that were verified
    accepted: int
    verify_s: float  # the step
    wait_s: float  # the session stood still for its drafter
    rows: int = 0  # of the whole step, the session's included; 0: unknown
    late: bool = False  # growth was asked for and had not come when the step began
    plain_s: float | None = None  # what the step would have taken without drafts; None: ask StepCosts
    exchange_s: float | None = None  # commit to growth, when one came; None: the wait tells
    first_exchange: bool = False  # of this drafter in this answer: it had the prompt to read
    lookup: bool = False  # the text's own chain was verified: it says nothing about a drafter
    overdue: bool = False  # the drafter has had the text for long, and has not said a word
    ranks: Sequence[int] | None = None  # of the accepted nodes among all, 1 the best; None: all were a chain

    def latency_s(self, max_s: float) -> float | None:
        """Seconds of the exchange, at most ``max_s`` where the session stopped waiting; None: not measured."""
        if self.first_exchange:
            return None
        if self.exchange_s is not None:
            return self.exchange_s
        if self.wait_s > 0 and not self.late:
            return self.wait_s
        if self.wait_s > 0 and not self.drafted:  # nobody knows how long one takes that was given up: twice the wait
            return min(2 * self.wait_s, max_s)
        return None


@dataclass(frozen=True, slots=True)
class Transition:
    """A change of mode, with the gain that was believed then."""

    before: Mode
    after: Mode
    reason: Reason
    gain: float


RECENT = 10  # rounds that the recent gain looks back on, or so


@dataclass(slots=True)
class SessionState:
    """One session's own measurements and mode."""

    mode: Mode
    acceptance: Acceptance
    max_nodes: int  # nodes of a tree that is verified
    allowed: bool = True
    probe_left_s: float | None = None  # what the probe that runs may still lose; None: none runs
    trying: bool = False  # the wait that was paid for goes on
    num_silent: int = 0  # rounds in a row in which the drafter did not answer, the first of them waited
    num_idle: int = 0  # rounds in a row in which no tree would have paid
    num_since_plain: int = 0  # rounds
    hit_rate: float = 1.0  # of waits and trees that had something to verify
    recent: Ledger = field(default_factory=lambda: Ledger(keep=1 - 1 / RECENT))  # rounds with drafts asked for

    @property
    def wants_drafts(self) -> bool:
        """Whether growth is asked for."""
        return self.mode is SPECULATE or self.probe_left_s is not None

    @property
    def recent_wait_s(self) -> float:
        recent = self.recent
        if not recent.waited_s:
            return 0.0
        return recent.waited_s / (recent.num_rounds if recent.num_rounds < RECENT else RECENT)


@value
class Prices:
    """Prices of the coming step. ``steps``: its seconds, as they count for one session, with 0, 1, 2, … draft nodes;
    ``rows``: sessions in the step, which wait for them; ``context``: tokens before the nodes; ``tokens``: what the
    sessions get without the nodes."""

    steps: Sequence[float]
    rows: int
    context: int
    time_value: float
    tokens: float

    @staticmethod
    def of(beliefs: Beliefs, others: int, context: int, max_nodes: int) -> Prices:
        """As if all did as it does."""
        steps = beliefs.costs.step_shares(others + 1, max_nodes, context)
        return Prices(steps, others + 1, context, beliefs.time_value, others + 1)

    def after_others(self, beliefs: Beliefs, max_nodes: int, taken_rows: int, given_tokens: float) -> Prices:
        """After others have added ``taken_rows``, expected to give ``given_tokens``: the more rows there are, the
        dearer is the next one, and the more waits for it."""
        if beliefs.lockstep:
            return self
        steps = beliefs.costs.steps(self.rows + taken_rows, max_nodes, self.context)
        return Prices(steps, self.rows, self.context, self.time_value, self.tokens + given_tokens)

    @property
    def plain_s(self) -> float:
        return self.steps[0]

    def seconds(self, nodes: int, beside_s: float) -> float:
        """Rule 1; ``beside_s``: waits and what they take from others."""
        return self.steps[0] + self.time_value * (self.tokens * (self.steps[nodes] - self.steps[0]) + beside_s)

    def best(self, expected: Sequence[float], floor: float, beside_s: float = 0.0) -> int:
        """How many draft nodes gain most, where the best n give ``expected[n]`` tokens; 0: none gains more than
        ``floor``."""
        steps, plain_s = self.steps, self.steps[0]
        base_s, step = plain_s + self.time_value * beside_s, self.time_value * self.tokens
        best, max_nodes = 0, len(expected) - 1
        if not max_nodes or (1 + expected[max_nodes]) * plain_s <= floor * (base_s + step * (steps[1] - plain_s)):
            return 0  # quickly, as a full house asks often
        for nodes in range(1, max_nodes + 1):
            gain = (1 + expected[nodes]) * plain_s / (base_s + step * (steps[nodes] - plain_s))
            if gain > floor:
                best, floor = nodes, gain
        return best


def tree_nodes(prices: Prices, beliefs: Beliefs, state: SessionState, rules: Rules,
               acceptance: Acceptance | None = None) -> int:
    """How many nodes of a present tree to verify (the wait for it is already spent). 0: a plain step is better."""
    if rules.whole_trees:
        return state.max_nodes
    plain_s, wait_s, latency = prices.steps[0], state.recent_wait_s, beliefs.latency
    expected = (acceptance or state.acceptance).expected(state.max_nodes)
    # Of what nobody has seen yet a wait is judged (``_wait_verdict``), not a tree: else none would ever be.
    if wait_s == 0.0:
        return prices.best(expected, rules.leave_gain, latency.cost_to_others_s(0.0, 0.0) if latency.shared else 0.0)
    return prices.best(expected, rules.leave_gain * plain_s / (plain_s + prices.time_value * wait_s),
                       wait_s + latency.cost_to_others_s(0.0, wait_s))


def overloaded(prices: Prices, beliefs: Beliefs, state: SessionState, rules: Rules) -> bool:
    """Whether at this load not even a drafter as good as assumed for an unknown one would pay."""
    return not tree_nodes(prices, beliefs, state, rules, Acceptance())


def too_slow(plain_s: float, beliefs: Beliefs, state: SessionState, rules: Rules) -> bool:
    """Whether an exchange would be a loss with such a drafter: it is late, not wrong."""
    tokens = 1 + Acceptance().tokens(state.max_nodes)
    return tokens * plain_s < rules.leave_gain * (plain_s + exchange_s(beliefs, rules))


def exchange_s(beliefs: Beliefs, rules: Rules) -> float:
    """An exchange's mean, within the limit; 0 while unknown."""
    return min(beliefs.latency.mean_s or 0.0, rules.deadline_max_s)


def usual_wait_s(beliefs: Beliefs, rules: Rules) -> float:
    """A wait within which all but a few exchanges end, within the limits."""
    usual_s = beliefs.latency.usual_s(rules.deadline_max_s)
    return min(max(usual_s, rules.deadline_min_s), rules.deadline_max_s)


def _lookup_nodes(prices: Prices, nodes: int, beliefs: Beliefs, state: SessionState, inputs: RoundInputs, rules: Rules,
                  after_others: Prices) -> int:
    """Tokens of the text's own chain to verify at once, where that gains more than a tree with the wait for it.
    ``after_others``: what rows cost after those that others look up."""
    if state.probe_left_s is not None and inputs.followed:
        return 0  # a probe is the drafter's, once there is one
    floor, expected = LOOKUP_GAIN, [0.0]
    if nodes and inputs.followed and state.wants_drafts:
        wait_s = state.recent_wait_s if state.recent.num_rounds else exchange_s(beliefs, rules)
        beside_s = wait_s + beliefs.latency.cost_to_others_s(prices.plain_s, wait_s)
        tokens = 1 + state.hit_rate * state.acceptance.expected(state.max_nodes)[nodes]
        floor = max(floor, tokens * prices.plain_s / prices.seconds(nodes, beside_s))
    for chance in inputs.lookup_chances[: state.max_nodes]:
        expected.append(expected[-1] + chance)
    return after_others.best(expected, floor)


class WaitVerdict(NamedTuple):
    """Whether a tree that is asked for now is worth the wait for it."""

    granted: bool
    is_trial: bool = False  # it should not pay, and is made to learn
    budget_s: float = 0.0


GRANTED, TRIED, REFUSED = WaitVerdict(True), WaitVerdict(True, is_trial=True), WaitVerdict(False)


def _affordable_s(case: PricedCase, rules: Rules) -> float:
    """Seconds beside the step, its own and those of others, that its tree is worth (rule 1)."""
    state, steps = case.state, case.prices.steps
    plain_s, gain = steps[0], rules.leave_gain if case.inputs.followed else rules.enter_gain
    if not gain:
        return inf
    won_s = (1 + state.hit_rate * state.acceptance.expected(state.max_nodes)[case.nodes]) * plain_s
    return (won_s / gain - plain_s) / case.prices.time_value - case.prices.rows * (steps[case.nodes] - plain_s)


def _wait_verdict(case: PricedCase, beliefs: Beliefs, rules: Rules, held_per_waiter: float | None) -> WaitVerdict:
    """``held_per_waiter``: see ``DraftLatency.cost_to_others_s``."""
    state, latency, plain_s = case.state, beliefs.latency, case.prices.steps[0]
    mean_s = latency.mean_s
    others_s = latency.cost_to_others_s(plain_s, mean_s or 0.0, held_per_waiter)
    if state.trying or (mean_s is None and not others_s):
        return TRIED if state.trying else GRANTED
    if _affordable_s(case, rules) >= (mean_s or 0.0) + others_s:
        return GRANTED
    loss_s = min(latency.least_s(inf), usual_wait_s(beliefs, rules)) + others_s  # if nothing comes of it
    affordable = beliefs.budget.affords_wait(loss_s)
    return WaitVerdict(affordable, affordable, loss_s if affordable else 0.0)


def _plain_step_loss_s(prices: Prices, state: SessionState) -> float:
    """What a plain step in place of a drafted one takes longer for its token."""
    return prices.plain_s * max(0.0, 1 - 1 / state.recent.gain)


def _deadline_s(usual_s: float, state: SessionState, rules: Rules) -> float:
    left_s = state.probe_left_s
    if left_s is None:
        return usual_s
    return min(usual_s, max(left_s, rules.deadline_min_s)) if left_s > 0 else 0.0


Case = tuple[SessionState, RoundInputs, bool]  # one session that decides; whether one more may be grown ahead


@value
class PricedCase:
    """A case with its prices and what follows from it alone."""

    state: SessionState
    inputs: RoundInputs
    may_run_ahead: bool
    prices: Prices
    nodes: int  # of a tree that is there
    lookup: int
    wants_drafts: bool  # growth is asked for
    would_wait: bool  # for it, if that is granted
    measures_plain: bool = False  # a step to measure what one costs
    loss_s: float = 0.0  # by that


def decide_all(beliefs: Beliefs, cases: Sequence[Case], rules: Rules) -> list[Decision]:
    """The coming rounds of sessions that were in one step."""
    prices: Prices | None = None
    priced, measurement_due = list[PricedCase](), False
    usual_s = usual_wait_s(beliefs, rules)
    taken_rows, given_tokens = 0, 0.0  # rows of the step that prompt lookups take, and the tokens expected of them
    for state, inputs, may_run_ahead in cases:
        if prices is None or prices.rows != inputs.others + 1 or prices.context != inputs.context:
            prices = Prices.of(beliefs, inputs.others, inputs.context, state.max_nodes)
            measurement_due = beliefs.costs.due(prices.rows)
        nodes, wants_drafts = tree_nodes(prices, beliefs, state, rules), state.wants_drafts
        lookup = 0
        if inputs.lookup_chances:
            lookup = _lookup_nodes(prices, nodes, beliefs, state, inputs, rules,
                                   prices.after_others(beliefs, state.max_nodes, taken_rows, given_tokens))
            taken_rows, given_tokens = taken_rows + lookup, given_tokens + sum(inputs.lookup_chances[:lookup])
        would_wait = (wants_drafts and nodes > 0 and inputs.followed and not state.num_silent
                      and inputs.unread_s <= usual_s)
        case = PricedCase(state, inputs, may_run_ahead, prices, nodes, lookup, wants_drafts, would_wait)
        if measurement_due or state.num_since_plain >= PLAIN_EVERY:
            case = _as_plain_step(case, beliefs, rules, measurement_due)
        priced.append(case)
    verdicts = (_lockstep_verdicts(priced, beliefs, rules) if beliefs.lockstep
                else [_request_verdict(case, beliefs, rules) for case in priced])
    return [_decision(beliefs, case, verdict, rules, usual_s) for case, verdict in zip(priced, verdicts, strict=True)]


def _as_plain_step(case: PricedCase, beliefs: Beliefs, rules: Rules, measurement_due: bool) -> PricedCase:
    """``case``, without its tree if it is to measure what a plain step costs. measurement_due: ``StepCosts.due``."""
    state, costs = case.state, beliefs.costs
    if costs.guessed:  # one plain step of all, or nobody learns what it costs
        if not measurement_due or rules.whole_trees:
            return case
        # Made in any case, it takes what there is: behind a debt nobody could afford to come back.
        left_s = max(0.0, beliefs.budget.left_s) / case.prices.rows
        loss_s = min(_plain_step_loss_s(case.prices, state), left_s)
        return replace(case, lookup=0, would_wait=False, measures_plain=True, loss_s=loss_s)
    if state.mode is not SPECULATE or state.num_since_plain < PLAIN_EVERY or case.lookup:
        return case
    loss_s = _plain_step_loss_s(case.prices, state)
    if beliefs.budget.left_s < loss_s:
        return case
    return replace(case, would_wait=False, measures_plain=True, loss_s=loss_s)


def _decision(beliefs: Beliefs, case: PricedCase, verdict: WaitVerdict, rules: Rules, usual_s: float) -> Decision:
    """``usual_s``: see ``usual_wait_s``."""
    state, inputs, nodes, lookup, wants_drafts = case.state, case.inputs, case.nodes, case.lookup, case.wants_drafts
    if lookup and verdict.is_trial:
        verdict = REFUSED
    granted, shared = verdict.granted, beliefs.latency.shared
    # On the target's own cores, a tree that nobody waits for slows the step beside it.
    requests = granted
    if not shared:
        requests = wants_drafts and (granted or (nodes > 0 and _late_tree_pays(case, beliefs, rules)))
    verify = nodes if wants_drafts and not case.measures_plain else 0
    num_wanted = verify if requests and not lookup else 0
    return Decision(state.mode, verify, lookup, num_wanted, _should_follow(requests, beliefs, state, inputs),
                    num_wanted > 0 and inputs.grows_ahead and case.may_run_ahead and not shared,
                    _deadline_s(min(inputs.unread_s + usual_s, rules.deadline_max_s), state, rules)
                    if granted and case.would_wait else 0.0,
                    _why(case, verdict), case.loss_s if case.measures_plain else verdict.budget_s,
                    verdict.is_trial, nodes > 0)


def _late_tree_pays(case: PricedCase, beliefs: Beliefs, rules: Rules) -> bool:
    """Whether a tree that comes behind the step is worth being read. In a step of all its first token is decided by
    then; one that comes behind several steps may never be of use."""
    state, inputs = case.state, case.inputs
    if not beliefs.lockstep or not inputs.followed or inputs.grows_ahead:
        return True
    if case.nodes < 2:
        return False
    expected = state.acceptance.expected(state.max_nodes)
    share = state.hit_rate if state.hit_rate < beliefs.late_rate else beliefs.late_rate
    return share * (expected[case.nodes] - expected[1]) > max(1 - rules.leave_gain, HOST_SHARE * case.prices.rows)


def _request_verdict(case: PricedCase, beliefs: Beliefs, rules: Rules,
                     held_per_waiter: float | None = None) -> WaitVerdict:
    state, inputs = case.state, case.inputs
    if not case.wants_drafts or case.measures_plain:
        return REFUSED
    if state.probe_left_s is not None or state.num_silent:
        return GRANTED
    if not case.nodes:  # who is followed for nothing takes the host's time from all
        return REFUSED
    if not (beliefs.latency.shared or case.would_wait):  # nobody waits for who is not there, or still reads
        return GRANTED
    if beliefs.latency.shared and beliefs.latency.load != case.prices.rows:  # all who run, not who is in this step
        prices = Prices.of(beliefs, beliefs.latency.load - 1, inputs.context, state.max_nodes)
        case = replace(case, prices=prices, nodes=tree_nodes(prices, beliefs, state, rules))
    return _wait_verdict(case, beliefs, rules, held_per_waiter)


def _lockstep_verdicts(priced: Sequence[PricedCase], beliefs: Beliefs, rules: Rules) -> list[WaitVerdict]:
    """Of one step. Whoever is least worth the time of all leaves the others to pay for it, until all who are left
    are worth it."""
    worth_s, verdicts = dict[int, float](), list[WaitVerdict]()  # who could wait -> the seconds that it is worth
    for index, case in enumerate(priced):
        if not case.would_wait:
            verdicts.append(_request_verdict(case, beliefs, rules))
            continue
        state = case.state
        worth_s[index] = inf if state.trying or state.probe_left_s is not None else _affordable_s(case, rules)
        verdicts.append(REFUSED)
    waiting = _who_waits(worth_s, priced, beliefs.latency)
    for index in waiting:
        verdicts[index] = TRIED if priced[index].state.trying else GRANTED
    if waiting or not worth_s:
        return verdicts
    # Nobody waits: who tries it tries it with all, as all stand. One alone whom only that would pay stops the others.
    held_per_waiter = (priced[0].prices.rows - len(worth_s)) / len(worth_s)
    trials = [_request_verdict(priced[index], beliefs, rules, held_per_waiter) for index in worth_s]
    price_s = sum([verdict.budget_s for verdict in trials])
    if all(verdict.granted for verdict in trials) and beliefs.budget.affords_wait(price_s):
        # It is one trial: one who makes it pays for all. Who has looked up its text makes none (``_decision``).
        payer = next((index for index, verdict in zip(worth_s, trials, strict=True)
                      if verdict.is_trial and not priced[index].lookup), None)
        for index, verdict in zip(worth_s, trials, strict=True):
            verdicts[index] = verdict._replace(budget_s=price_s if index == payer else 0.0)
    return verdicts


def _who_waits(worth_s: Mapping[int, float], priced: Sequence[PricedCase], latency: DraftLatency) -> list[int]:
    """The indices of the cases in ``worth_s`` that wait."""
    waiting, mean_s = list(worth_s), latency.mean_s
    while waiting:
        held_per_waiter = max(0, priced[0].prices.rows - len(waiting)) / len(waiting)
        others_s = latency.cost_to_others_s(priced[0].prices.steps[0], mean_s or 0.0, held_per_waiter)
        if mean_s is None and not others_s:
            break
        still_waiting = [index for index in waiting if worth_s[index] >= (mean_s or 0.0) + others_s]
        if len(still_waiting) == len(waiting):
            break
        waiting = still_waiting
    return waiting


def held_per_waiter(decisions: Sequence[Decision], rows: int) -> float:
    """Of a step of ``rows`` sessions: how many are held up for nothing by each that waits."""
    waiting = sum(decision.wait_s > 0 for decision in decisions)
    return max(0, rows - waiting) / waiting if waiting else 0.0


def _should_follow(requests: bool, beliefs: Beliefs, state: SessionState, inputs: RoundInputs) -> bool:
    if not inputs.followed:
        return requests
    idle = beliefs.latency.shared and inputs.num_since_request > IDLE_TOKENS
    return not idle and (state.mode is not PLAIN or state.wants_drafts)


def _why(case: PricedCase, verdict: WaitVerdict) -> Why:
    state = case.state
    if case.lookup:
        return "prompt lookup"
    if not state.allowed:
        return "forbidden"
    if case.measures_plain and case.wants_drafts:
        return "measures plain"
    if state.probe_left_s is not None:
        return "a probe"
    if not case.wants_drafts or not case.nodes:
        return "drafts do not pay"
    if verdict.is_trial:
        return "tries a wait"
    if not case.inputs.followed:
        return "no drafter"
    return "drafts pay" if verdict.granted else "too slow"
