"""Decide: what one round does, as a pure function of the shared beliefs, the session's own state and its present
inputs.

Rules:
1. An action's value is its expected tokens divided by its seconds: its own, and those of other sessions that wait for
   it. In one step with others:  gain = tokens * plain / (plain + worth * ((1 + others) * (verify - plain) + wait +
   toll)). It is above 1 exactly when more tokens are made than without a drafter: ``worth`` is what else a second would
   give (``beliefs.alone``), so a draft has to beat prompt lookup, not just plain steps.
2. Each tree is priced as if all of the step had one of its size: what is cheap for one is not for all at once. A chain
   of prompt lookup, which few sessions have, is priced after the trees of others; not in an engine that steps
   ``together``.
3. A wait is granted if its round reaches ``leave_gain``, or ``enter_gain`` where a drafter has to read the prompt
   first. Another wait is tried when the purse can pay its expected loss. Where all sessions stop while one waits, it is
   granted to as many at once as are together worth the time of all; a trial then covers all.
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
class Seen:
    """The inputs of a session's decision."""

    others: int = 0  # rows that others bring to the coming step
    followed: bool = False  # a drafter follows
    chances: Sequence[float] = ()  # of the chain that the text foretells: that all tokens up to each come
    unasked: int = 0  # tokens committed since a tree was asked for
    grows_ahead: bool = False  # the drafter would grow on while the target verifies


@value
class Decision:
    """All that a round needs to know."""

    mode: Mode
    verify: int  # draft nodes to verify at most, root not counted; 0: plain
    lookup: int  # tokens of the text's own chain that are verified at once instead of waiting; 0: none
    want: int  # nodes that the drafter is asked for; 0: it is told, and asked for nothing
    follow: bool  # a drafter should follow: attach one, or keep it
    ahead: bool  # the drafter may grow on until the next commit
    wait_s: float  # seconds after the commit that its growth may be awaited
    enough: float  # draft tokens that a tree must promise for the step to begin at once
    why: Why
    spends_s: float = 0.0  # of the purse: what this round is expected to lose for what it tells
    tries: bool = False  # it is a wait that is spent for
    pays: bool = False  # a tree would, if it were there


@value
class Round:
    """One commit as a decision saw it. Plain rounds count too: they have nothing drafted."""

    drafted: int  # draft nodes that were verified
    accepted: int
    depth: int  # of the deepest node that was verified
    verify_s: float  # the step
    wait_s: float  # the session stood still for its drafter
    rows: int = 0  # of the whole step, the session's included; 0: unknown
    late: bool = False  # growth was asked for and had not come when the step began
    plain_s: float | None = None  # what the step would have taken without drafts; None: ask StepCosts
    exchange_s: float | None = None  # commit to growth, when one came; None: the wait tells
    first: bool = False  # of this drafter in this answer: it had the prompt to read, which no later exchange has
    lookup: bool = False  # the text's own chain was verified: it says nothing about a drafter

    def took_s(self, most_s: float) -> float | None:
        """Seconds of the exchange, at most ``most_s`` where the session stopped waiting; None: not measured."""
        if self.first:
            return None
        if self.exchange_s is not None:
            return self.exchange_s
        if self.wait_s > 0 and not self.late:
            return self.wait_s
        if self.wait_s > 0 and not self.drafted:  # nobody knows how long one takes that was given up: twice the wait
            return min(2 * self.wait_s, most_s)
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
class Standing:
    """One session's own measurements and mode."""

    mode: Mode
    acceptance: Acceptance
    most: int  # nodes of a tree that is verified
    allowed: bool = True
    probe_left_s: float | None = None  # what the probe that runs may still lose; None: none runs
    trying: bool = False  # the wait that was paid for goes on
    silent: int = 0  # rounds in a row in which the drafter did not answer, the first of them waited
    idle: int = 0  # rounds in a row in which no tree would have paid
    since_plain: int = 0  # rounds
    share: float = 1.0  # of waits and trees that had something to verify
    recent: Ledger = field(default_factory=lambda: Ledger(keep=1 - 1 / RECENT))  # rounds with drafts asked for

    @property
    def wants(self) -> bool:
        """Whether growth is asked for."""
        return self.mode is SPECULATE or self.probe_left_s is not None

    @property
    def recent_wait_s(self) -> float:
        recent = self.recent
        if not recent.waited_s:
            return 0.0
        return recent.waited_s / (recent.rounds if recent.rounds < RECENT else RECENT)


@value
class Prices:
    """Prices of the coming step. ``steps``: its seconds, as they count for one session, with 0, 1, 2, … draft nodes;
    ``rows``: sessions in the step, which wait for them; ``tokens``: what these get without the nodes."""

    steps: Sequence[float]
    rows: int
    worth: float
    tokens: float

    @staticmethod
    def of(beliefs: Beliefs, others: int, most: int) -> Prices:
        """As if all did as it does."""
        return Prices(beliefs.costs.shares(others + 1, most), others + 1, beliefs.worth, others + 1)

    def behind(self, beliefs: Beliefs, most: int, taken: int, given: float) -> Prices:
        """For who comes behind others that have ``taken`` rows more, which should give so many tokens: the more rows
        there are, the dearer is the next one, and the more waits for it."""
        if beliefs.together:
            return self
        return Prices(beliefs.costs.steps(self.rows + taken, most), self.rows, self.worth, self.tokens + given)

    @property
    def plain_s(self) -> float:
        return self.steps[0]

    def seconds(self, nodes: int, beside_s: float) -> float:
        """Rule 1; ``beside_s``: waits and what they take from others."""
        return self.steps[0] + self.worth * (self.tokens * (self.steps[nodes] - self.steps[0]) + beside_s)

    def best(self, expected: Sequence[float], floor: float, beside_s: float = 0.0) -> int:
        """How many draft nodes gain most, where the best n give ``expected[n]`` tokens; 0: none gains more than
        ``floor``."""
        steps, plain_s = self.steps, self.steps[0]
        base_s, step, best, most = plain_s + self.worth * beside_s, self.worth * self.tokens, 0, len(expected) - 1
        if not most or (1 + expected[most]) * plain_s <= floor * (base_s + step * (steps[1] - plain_s)):
            return 0  # quickly, as a full house asks often
        for nodes in range(1, most + 1):
            gain = (1 + expected[nodes]) * plain_s / (base_s + step * (steps[nodes] - plain_s))
            if gain > floor:
                best, floor = nodes, gain
        return best


def tree_nodes(prices: Prices, beliefs: Beliefs, standing: Standing, rules: Rules,
               acceptance: Acceptance | None = None) -> int:
    """How many nodes of a present tree to verify (the wait for it is already spent). 0: a plain step is better."""
    if rules.whole_trees:
        return standing.most
    plain_s, wait_s, latency = prices.steps[0], standing.recent_wait_s, beliefs.latency
    expected = (acceptance or standing.acceptance).expected(standing.most)
    # Of what nobody has seen yet a wait is judged (``_wait``), not a tree: else none would ever be.
    if wait_s == 0.0:
        return prices.best(expected, rules.leave_gain, latency.toll_s(0.0, 0.0) if latency.shared else 0.0)
    return prices.best(expected, rules.leave_gain * plain_s / (plain_s + prices.worth * wait_s),
                       wait_s + latency.toll_s(0.0, wait_s))


def overloaded(prices: Prices, beliefs: Beliefs, standing: Standing, rules: Rules) -> bool:
    """Whether at this load not even a drafter as good as assumed for an unknown one would pay."""
    return not tree_nodes(prices, beliefs, standing, rules, standing.acceptance.fresh())


def too_slow(plain_s: float, beliefs: Beliefs, standing: Standing, rules: Rules) -> bool:
    """Whether an exchange would be a loss with such a drafter: it is late, not wrong."""
    tokens = 1 + standing.acceptance.fresh().tokens(standing.most)
    return tokens * plain_s < rules.leave_gain * (plain_s + exchange_s(beliefs, rules))


def exchange_s(beliefs: Beliefs, rules: Rules) -> float:
    """An exchange's mean, within the limit; 0 while unknown."""
    return min(beliefs.latency.mean_s or 0.0, rules.deadline_max_s)


def usual_wait_s(beliefs: Beliefs, rules: Rules) -> float:
    """A wait within which all but a few exchanges end, within the limits."""
    usual_s = beliefs.latency.usual_s(rules.deadline_max_s)
    return min(max(usual_s, rules.deadline_min_s), rules.deadline_max_s)


def _lookup(prices: Prices, nodes: int, beliefs: Beliefs, standing: Standing, seen: Seen, rules: Rules,
            behind: Prices) -> int:
    """Tokens of the text's own chain to verify at once, where that gains more than a tree with the wait for it.
    ``behind``: what rows cost it behind those that others look up."""
    if standing.probe_left_s is not None and seen.followed:
        return 0  # a probe is the drafter's, once there is one
    floor, reach = LOOKUP_GAIN, [0.0]
    if nodes and seen.followed and standing.wants:
        wait_s = standing.recent_wait_s if standing.recent.rounds else exchange_s(beliefs, rules)
        beside_s = wait_s + beliefs.latency.toll_s(prices.plain_s, wait_s)
        tokens = 1 + standing.share * standing.acceptance.expected(standing.most)[nodes]
        floor = max(floor, tokens * prices.plain_s / prices.seconds(nodes, beside_s))
    for chance in seen.chances[: standing.most]:
        reach.append(reach[-1] + chance)
    return behind.best(reach, floor)


class Wait(NamedTuple):
    """Whether a tree that is asked for now is worth the wait for it."""

    granted: bool
    tries: bool = False  # it should not pay, and tells news
    spends_s: float = 0.0


GRANTED, TRIED, REFUSED = Wait(True), Wait(True, tries=True), Wait(False)


def _worth_s(turn: Turn, rules: Rules) -> float:
    """Seconds beside the step, its own and those of others, that its tree is worth (rule 1)."""
    standing, steps = turn.standing, turn.prices.steps
    plain_s, gain = steps[0], rules.leave_gain if turn.seen.followed else rules.enter_gain
    if not gain:
        return inf
    won_s = (1 + standing.share * standing.acceptance.expected(standing.most)[turn.nodes]) * plain_s
    return (won_s / gain - plain_s) / turn.prices.worth - turn.prices.rows * (steps[turn.nodes] - plain_s)


def _wait(turn: Turn, beliefs: Beliefs, rules: Rules, held: float | None) -> Wait:
    """``held``: see ``DraftLatency.toll_s``."""
    standing, latency, plain_s = turn.standing, beliefs.latency, turn.prices.steps[0]
    mean_s = latency.mean_s
    toll_s = latency.toll_s(plain_s, mean_s or 0.0, held)
    if standing.trying or (mean_s is None and not toll_s):
        return TRIED if standing.trying else GRANTED
    if _worth_s(turn, rules) >= (mean_s or 0.0) + toll_s:
        return GRANTED
    loses_s = min(latency.least_s(inf), usual_wait_s(beliefs, rules)) + toll_s  # if nothing comes of it
    affords = beliefs.purse.affords_wait(loses_s)
    return Wait(affords, affords, loses_s if affords else 0.0)


def _plain_loses_s(prices: Prices, standing: Standing) -> float:
    """What a plain step in place of a drafted one takes longer for its token."""
    return prices.plain_s * max(0.0, 1 - 1 / standing.recent.gain)


def _enough(prices: Prices, nodes: int, beliefs: Beliefs, standing: Standing) -> float:
    """Draft tokens from which a tree that is there is better than a whole one after an exchange; below, waiting gains
    more tokens than the time would make. With others in the step a wait lasts until they are through, which is too
    long for that, and nobody asks."""
    mean_s = beliefs.latency.mean_s
    if mean_s is None:
        return 0.0
    whole = standing.acceptance.expected(standing.most)[nodes]
    return max(0.0, whole - (1 + whole) * mean_s / prices.steps[nodes])


def _deadline_s(usual_s: float, standing: Standing, rules: Rules) -> float:
    left_s = standing.probe_left_s
    if left_s is None:
        return usual_s
    return min(usual_s, max(left_s, rules.deadline_min_s)) if left_s > 0 else 0.0


Case = tuple[Standing, Seen, bool]  # one session that decides; whether one more may be grown ahead


@value
class Turn:
    """A case with what follows from it alone."""

    standing: Standing
    seen: Seen
    leads: bool
    prices: Prices
    nodes: int  # of a tree that is there
    lookup: int
    wants: bool  # growth is asked for
    stands: bool  # it would stand still for it, if that is granted
    plain: bool = False  # a step to measure what one costs
    loses_s: float = 0.0  # by that


def decide_all(beliefs: Beliefs, cases: Sequence[Case], rules: Rules) -> list[Decision]:
    """The coming rounds of sessions that were in one step."""
    prices: Prices | None = None
    turns, due = list[Turn](), False
    taken, given = 0, 0.0  # rows of the coming step that texts' own chains have, and the tokens that they should give
    for standing, seen, leads in cases:
        if prices is None or prices.rows != seen.others + 1:  # all of a step have the same
            prices = Prices.of(beliefs, seen.others, standing.most)
            due = beliefs.costs.due(prices.rows)
        nodes, wants = tree_nodes(prices, beliefs, standing, rules), standing.wants
        lookup = 0
        if seen.chances:
            lookup = _lookup(prices, nodes, beliefs, standing, seen, rules,
                             prices.behind(beliefs, standing.most, taken, given))
            taken, given = taken + lookup, given + sum(seen.chances[:lookup])
        stands = wants and nodes > 0 and seen.followed and not standing.silent
        turn = Turn(standing, seen, leads, prices, nodes, lookup, wants, stands)
        if due or standing.since_plain >= PLAIN_EVERY:
            turn = _measures(turn, beliefs, rules, due)
        turns.append(turn)
    waits = _together(turns, beliefs, rules) if beliefs.together else [_asks(turn, beliefs, rules) for turn in turns]
    usual_s = usual_wait_s(beliefs, rules)
    return [_decision(beliefs, turn, wait, rules, usual_s) for turn, wait in zip(turns, waits, strict=True)]


def _measures(turn: Turn, beliefs: Beliefs, rules: Rules, due: bool) -> Turn:
    """``turn``, if it is one to measure what a plain step costs, without its tree. ``due``: see ``StepCosts.due``."""
    standing, costs = turn.standing, beliefs.costs
    if costs.guessed:  # one plain step of all, or nobody learns what it costs
        if not due or rules.whole_trees:
            return turn
        # Made in any case, it takes what there is: behind a debt nobody could afford to come back.
        left_s = max(0.0, beliefs.purse.left_s) / turn.prices.rows
        loses_s = min(_plain_loses_s(turn.prices, standing) * costs.known(turn.prices.rows), left_s)
        return replace(turn, lookup=0, stands=False, plain=True, loses_s=loses_s)
    if standing.mode is not SPECULATE or standing.since_plain < PLAIN_EVERY or turn.lookup:
        return turn
    loses_s = _plain_loses_s(turn.prices, standing)
    return turn if beliefs.purse.left_s < loses_s else replace(turn, stands=False, plain=True, loses_s=loses_s)


def _decision(beliefs: Beliefs, turn: Turn, wait: Wait, rules: Rules, usual_s: float) -> Decision:
    """``usual_s``: see ``usual_wait_s``."""
    standing, seen, nodes, lookup, wants = turn.standing, turn.seen, turn.nodes, turn.lookup, turn.wants
    if lookup and wait.tries:
        wait = REFUSED
    granted, shared = wait.granted, beliefs.latency.shared
    # On the target's own cores, a tree that nobody waits for slows the step beside it.
    asks = granted if shared else wants and (granted or (nodes > 0 and _lasts(turn, beliefs, rules)))
    verify = nodes if wants and not turn.plain else 0
    want = verify if asks and not lookup else 0
    enough = _enough(turn.prices, nodes, beliefs, standing) if turn.prices.rows == 1 and wants and not lookup else 0.0
    return Decision(standing.mode, verify, lookup, want, _follows(asks, beliefs, standing, seen),
                    want > 0 and seen.grows_ahead and turn.leads and not shared,
                    _deadline_s(usual_s, standing, rules) if granted and turn.stands else 0.0,
                    enough, _why(turn, wait), turn.loses_s if turn.plain else wait.spends_s, wait.tries, nodes > 0)


def _lasts(turn: Turn, beliefs: Beliefs, rules: Rules) -> bool:
    """Whether a tree that comes behind the step is worth being read. In a step of all its first token is decided by
    then."""
    standing, seen = turn.standing, turn.seen
    if not beliefs.together or not seen.followed or seen.grows_ahead:
        return True
    if turn.nodes < 2:
        return False
    expected = standing.acceptance.expected(standing.most)
    return standing.share * (expected[turn.nodes] - expected[1]) > 1 - rules.leave_gain


def _asks(turn: Turn, beliefs: Beliefs, rules: Rules, held: float | None = None) -> Wait:
    standing, seen = turn.standing, turn.seen
    if not turn.wants or turn.plain:
        return REFUSED
    if standing.probe_left_s is not None or standing.silent:
        return GRANTED
    if not turn.nodes:  # who is followed for nothing takes the host's time from all
        return REFUSED
    if not (seen.followed or beliefs.latency.shared):
        return GRANTED
    if beliefs.latency.shared and beliefs.latency.load != turn.prices.rows:  # all who run, not who is in this step
        prices = Prices.of(beliefs, beliefs.latency.load - 1, standing.most)
        turn = replace(turn, prices=prices, nodes=tree_nodes(prices, beliefs, standing, rules))
    return _wait(turn, beliefs, rules, held)


def _together(turns: Sequence[Turn], beliefs: Beliefs, rules: Rules) -> list[Wait]:
    """Of one step. Whoever is least worth the time of all leaves the others to pay for it, until all who are left
    are worth it."""
    able, waits = dict[int, float](), list[Wait]()  # who could wait -> the seconds that it is worth
    for at, turn in enumerate(turns):
        if not turn.stands:
            waits.append(_asks(turn, beliefs, rules))
            continue
        standing = turn.standing
        able[at] = inf if standing.trying or standing.probe_left_s is not None else _worth_s(turn, rules)
        waits.append(REFUSED)
    waiting = _worth(able, turns, beliefs.latency)
    for at in waiting:
        waits[at] = TRIED if turns[at].standing.trying else GRANTED
    if waiting or not able:
        return waits
    # Nobody waits: who tries it tries it with all, as all stand.
    held = (turns[0].prices.rows - len(able)) / len(able)
    tried = [_asks(turns[at], beliefs, rules, held) for at in able]
    if beliefs.purse.affords_wait(sum(wait.spends_s for wait in tried)):
        for at, wait in zip(able, tried, strict=True):
            waits[at] = wait
    return waits


def _worth(able: Mapping[int, float], turns: Sequence[Turn], latency: DraftLatency) -> list[int]:
    """Who of ``able`` waits."""
    waiting, mean_s = list(able), latency.mean_s
    while waiting:
        held = max(0, turns[0].prices.rows - len(waiting)) / len(waiting)
        toll_s = latency.toll_s(turns[0].prices.steps[0], mean_s or 0.0, held)
        if mean_s is None and not toll_s:
            break
        left = [at for at in waiting if able[at] >= (mean_s or 0.0) + toll_s]
        if len(left) == len(waiting):
            break
        waiting = left
    return waiting


def held(decisions: Sequence[Decision], rows: int) -> float:
    """Of a step of ``rows`` sessions: who stands still for nothing with each who waits."""
    waiting = sum(decision.wait_s > 0 for decision in decisions)
    return max(0, rows - waiting) / waiting if waiting else 0.0


def _follows(asks: bool, beliefs: Beliefs, standing: Standing, seen: Seen) -> bool:
    if not seen.followed:
        return asks
    idle = beliefs.latency.shared and seen.unasked > IDLE_TOKENS
    return not idle and (standing.mode is not PLAIN or standing.wants)


def _why(turn: Turn, wait: Wait) -> Why:
    standing = turn.standing
    if turn.lookup:
        return "prompt lookup"
    if not standing.allowed:
        return "forbidden"
    if turn.plain and turn.wants:
        return "measures plain"
    if standing.probe_left_s is not None:
        return "a probe"
    if not turn.wants or not turn.nodes:
        return "drafts do not pay"
    if wait.tries:
        return "tries a wait"
    if not turn.seen.followed:
        return "no drafter"
    return "drafts pay" if wait.granted else "too slow"
