"""SpeculationPolicy: whether speculation pays, how many draft nodes, and how long to wait for them.

One pure state machine: rounds and times go in, a node budget comes out. SPECULATE: trees are awaited and verified. SHADOW:
commits and features still flow, so that coming back is cheap, but nothing is awaited. PLAIN: no draft traffic at all.

    SPECULATE -> SHADOW     it cost more than it gave, or the drafter stays silent
    SPECULATE -> PLAIN      even a good drafter would not pay at this load (overload)
    SHADOW -> PLAIN         three probes in a row failed
    SHADOW, PLAIN -> SPECULATE   a probe reached ``enter_gain``
    any -> PLAIN            the drafter is lost, or speculation is forbidden; at once

Rules:
1. Gain = goodput with speculation / plain goodput. In one step with others, who wait for our rows too:
   gain = (1 + accepted) * plain / (plain + (1 + others) * (verify - plain) + wait).
   It is above 1 exactly when the whole step makes more tokens a second with our nodes than without (wait aside).
2. Leaving is a running sum, so it is quick and bounded in seconds: each round adds what it lost against ``leave_gain``,
   what it won is taken off, down to zero. Above ``warmup_rounds`` plain steps, speculation stops.
3. Coming back is slower: a probe of ``probe_rounds`` drafted rounds must reach ``enter_gain``, with the seconds that the
   drafter took to catch up repaid within REPAY_S. It ends early when it has lost PROBE_SHARE of the time since the last.
4. Waits between probes double, up to ``probe_max_s``. They start anew only after a spell of speculation that won more
   than leaving can lose; what hovers at the threshold therefore probes ever more rarely.
5. A drafter that proposes nothing costs its wait, no more. A wait is granted while a waited round reaches
   ``leave_gain``; one that does not is still tried once it is below TRY_SHARE of the time since the last.
6. Every PLAIN_EVERY rounds one is plain, so that the cost of a plain step is measured and not remembered.

It knows no clock, no session, no drafter, and keeps no logs. A target has one for each session; ``rows`` are the step's.
A router has one for each model and draft pool, and feeds it the pieces of all its answers, each as one round with
``plain_s`` set to what a plain step takes now (the mean of pieces with nothing drafted): then neither row counts nor
``StepCosts`` matter. It switches answers by ``mode``; while ``probing`` it lets a small share speculate and feeds theirs
alone. Deadline and budget are the target's.

Sources: goodput as the objective, arXiv 2406.14066; restart cost, arXiv 2512.22420.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from slipstream.config import PolicySection
from slipstream.estimates import Acceptance, ExchangeTimes, Ledger, StepCosts

__all__ = ["ExchangeTimes", "Mode", "Reason", "Round", "SpeculationPolicy", "StepCosts", "Transition"]

PROBE_SHARE = 0.02
TRY_SHARE = 0.01
REPAY_S = 10.0
PLAIN_EVERY = 64
PROBE_LIMIT_S = 5.0  # a drafter that has not caught up by then has failed the probe
FAILED_PROBES = 3  # before shadow becomes plain
SILENT_WAITS = 8  # waits in a row without growth before a drafter counts as silent

Reason = Literal["acceptance_low", "draft_unavailable", "draft_timeout", "overload", "incompatible", "probe_ok",
                 "probe_failed", "operator", "drafter_ready"]


class Mode(StrEnum):
    SPECULATE = "speculate"
    SHADOW = "shadow"
    PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Round:
    """One commit as the policy sees it. Plain rounds count too: they have nothing drafted."""

    drafted: int  # draft nodes that were verified
    accepted: int
    depth: int  # of the deepest node that was verified
    verify_s: float
    wait_s: float  # the session stood still for its drafter
    rows: int = 0  # of the whole step; 0: unknown
    late: bool = False  # growth was awaited and did not come before the step began
    plain_s: float | None = None  # what the step would have taken without drafts; None: ask StepCosts
    exchange_s: float | None = None  # commit to growth, when one came; None: the wait tells


@dataclass(frozen=True, slots=True)
class Transition:
    """A change of mode, with the gain that was believed then."""

    at_s: float
    before: Mode
    after: Mode
    reason: Reason
    gain: float


class SpeculationPolicy:
    """See the module. Times are seconds of any monotone clock, never decreasing from call to call."""

    def __init__(self, config: PolicySection, costs: StepCosts, exchange: ExchangeTimes | None = None,
                 now_s: float = 0.0) -> None:
        self._config = config
        self._costs = costs
        self._exchange = exchange or ExchangeTimes()
        self._acceptance = Acceptance()
        self.mode = Mode.SPECULATE if config.enabled and config.max_nodes else Mode.PLAIN
        self.num_probes = 0
        self._allowed = True
        self._since_s = self._probed_s = now_s
        self._next_probe_s = now_s
        self._backoff_s = config.probe_after_s
        self._failed = 0
        self._returns: Reason = "probe_ok"  # what a probe that succeeds is credited to
        self._recent = Ledger(keep=0.9)
        self._spell = Ledger()  # since speculation began
        self._risk_s = 0.0  # the running sum of rule 2
        self._probe: Ledger | None = None
        self._allowance_s = 0.0  # what it may lose
        self._caught_up = True  # the drafter answered since the probe began
        self._restart_s = 0.0
        self._plain_s = costs.cost(1)
        self._others = 0
        self._told_others: int | None = None  # by budget(), since the last round
        self._share = 1.0  # of waits and trees that had something to verify
        self._unpaid_s = 0.0  # time since the last wait
        self._silent = self._idle = self._since_plain = 0
        self._best_for, self._best_nodes = -1, 0  # for so many rows of others, so many nodes are best

    @property
    def probing(self) -> bool:
        return self._probe is not None

    @property
    def gain(self) -> float:
        """Of the latest ten rounds or so with drafts awaited."""
        return self._recent.gain

    def wants_drafts(self, now_s: float) -> bool:
        """Whether growth should be asked for now. Commits flow then, and in SHADOW as well."""
        return self.mode is Mode.SPECULATE or self._probe is not None

    def budget(self, now_s: float, batch_rows_of_others: int) -> int:
        """Draft nodes to verify in this step, root not counted; 0 is plain. ``batch_rows_of_others``: rows that the
        others bring to the step, each worth a token. May be asked as often as one likes."""
        self._told_others = self._others = max(0, batch_rows_of_others)
        if not self.wants_drafts(now_s) or self._measures_plain():
            return 0
        return self._best()

    def deadline_s(self) -> float:
        """Seconds after a commit that its growth may be awaited; 0: step at once."""
        if not self.wants_drafts(self._since_s) or self._measures_plain() or self._idle:
            return 0.0
        config = self._config
        usual_s = min(max(self._exchange.usual_s(config.deadline_max_s), config.deadline_min_s), config.deadline_max_s)
        if self._probe is not None:
            left_s = self._allowance_s - self._probe.loss_s
            return min(usual_s, max(left_s, config.deadline_min_s)) if left_s > 0 else 0.0
        return usual_s if self._wait_pays() or TRY_SHARE * self._unpaid_s >= usual_s else 0.0

    def observe(self, now_s: float, round_: Round) -> Transition | None:
        """A round is over. Every commit is reported, plain ones too."""
        self._others = max(self._told_others or 0, round_.rows - 1 - round_.drafted, 0)
        self._told_others = None
        earned_s, spent_s = self._account(round_)
        self._learn(now_s, round_, spent_s)
        if self.mode is Mode.SPECULATE:
            self._recent.add(earned_s, spent_s, round_.wait_s, round_.drafted > 0)
            self._spell.add(earned_s, spent_s, round_.wait_s, round_.drafted > 0)
            self._risk_s = max(0.0, self._risk_s + self._config.leave_gain * spent_s - earned_s)
            return self._consider_leaving(now_s)
        if self._probe is not None:
            self._recent.add(earned_s, spent_s, round_.wait_s, round_.drafted > 0)
            self._probe.add(earned_s, spent_s, round_.wait_s, round_.drafted > 0)
            return self._judge(now_s)
        return self.tick(now_s)

    def tick(self, now_s: float) -> Transition | None:
        """Time passes: a probe begins or runs out. ``observe`` does the same; an idle caller may call it."""
        if self.mode is Mode.SPECULATE:
            return None
        if self._probe is not None:
            return self._judge(now_s)
        if self._due(now_s):
            self._start_probe(now_s)
        return None

    def drafter_lost(self, now_s: float, reason: Reason = "draft_unavailable") -> Transition | None:
        """Nobody drafts any more. Probes go on, ever more rarely, in case nobody says that a drafter is back."""
        if reason == "incompatible":
            self._backoff_s = self._config.probe_max_s
        elif self.mode is Mode.PLAIN and self._probe is None:
            return None
        self._probe = None
        return self._leave(now_s, Mode.PLAIN, reason)

    def drafter_ready(self, now_s: float) -> Transition | None:
        """A drafter is there (again): probe soon, though later each time that it is lost at once."""
        if self.mode is not Mode.SPECULATE and self._probe is None:
            # _postpone has doubled the wait already; an eighth of it is a quarter of the one that was due.
            self._next_probe_s = min(self._next_probe_s, now_s + self._backoff_s / 8)
            self._returns = "drafter_ready"
        return None

    def forbid(self, now_s: float) -> Transition | None:
        """The operator, the client or the router wants plain decoding from now on."""
        self._allowed = False
        self._probe = None
        self._probed_s = now_s
        return self._go(now_s, Mode.PLAIN, "operator")

    def allow(self, now_s: float) -> Transition | None:
        """Take ``forbid`` back: a probe begins as soon as it is affordable."""
        if not self._allowed:
            self._allowed = True
            self._next_probe_s = now_s
            self._returns = "operator"
        return self.tick(now_s)

    def _account(self, round_: Round) -> tuple[float, float]:
        """Seconds of plain decoding that the round replaced, and seconds that it cost, others included."""
        rows = self._others + 1
        if round_.plain_s is not None:
            plain_s, cost_s = round_.plain_s, max(round_.verify_s, 0.0)
        else:
            plain_s, cost_s = self._costs.cost(rows), self._costs.cost(rows + round_.drafted)
            cost_s += self._others * (cost_s - plain_s)
        self._plain_s = plain_s
        if not round_.drafted:  # a plain step is a plain step, whatever it took
            cost_s = plain_s
        return (1 + round_.accepted) * plain_s, cost_s + round_.wait_s

    def _learn(self, now_s: float, round_: Round, spent_s: float) -> None:
        self._acceptance.observe(round_.drafted, round_.accepted, round_.depth)
        self._best_for = -1
        waited = round_.wait_s > 0
        self._unpaid_s = 0.0 if waited else self._unpaid_s + spent_s
        self._since_plain = self._since_plain + 1 if round_.drafted else 0
        self._idle = 0 if self._best() else self._idle + 1
        if round_.late:
            if waited:  # the answer takes longer than this, nobody knows how much
                self._exchange.observe(min(2 * round_.wait_s, self._config.deadline_max_s))
                self._silent += 1
                self._share *= 0.9
            return
        if round_.drafted or waited or round_.exchange_s is not None:
            self._exchange.observe(round_.wait_s if round_.exchange_s is None else round_.exchange_s)
            self._silent = 0
            self._share += 0.1 * ((round_.drafted > 0) - self._share)
            if not self._caught_up:
                self._caught_up, self._restart_s = True, now_s - self._probed_s

    def _best(self) -> int:
        """The node count of the highest expected gain; 0 when even that falls below ``leave_gain`` times a plain step."""
        if self._best_for != self._others:  # asked several times a round
            self._best_for, self._best_nodes = self._others, self._search(self._acceptance)
        return self._best_nodes

    def _search(self, acceptance: Acceptance) -> int:
        rows, plain_s = self._others + 1, self._costs.cost(self._others + 1)
        wait_s = self._recent.waited_s / max(1.0, min(10.0, self._recent.rounds))
        best, best_rate = 0, self._config.leave_gain / (plain_s + wait_s)
        for nodes in range(1, self._config.max_nodes + 1):
            extra_s = rows * (self._costs.cost(rows + nodes) - plain_s)
            rate = (1 + acceptance.tokens(nodes)) / (plain_s + extra_s + wait_s)
            if rate > best_rate:
                best, best_rate = nodes, rate
        return best

    def _measures_plain(self) -> bool:
        return self.mode is Mode.SPECULATE and self._since_plain >= PLAIN_EVERY

    def _wait_pays(self) -> bool:
        if self._exchange.mean_s is None:
            return True
        nodes = self._best()
        rows = self._others + 1
        step_s = self._costs.cost(rows + nodes) - self._costs.cost(rows) + self._plain_s
        won = 1 + self._share * self._acceptance.tokens(nodes)
        return won * self._plain_s >= self._config.leave_gain * (step_s + self._exchange.mean_s)

    def _overloaded(self) -> bool:
        return not self._search(self._acceptance.fresh())

    def _consider_leaving(self, now_s: float) -> Transition | None:
        if now_s - self._since_s < self._config.min_dwell_s:
            return None
        if self._idle >= self._config.warmup_rounds and self._overloaded():
            return self._leave(now_s, Mode.PLAIN, "overload")
        if self._silent >= SILENT_WAITS:
            return self._leave(now_s, Mode.SHADOW, "draft_timeout")
        if self._idle >= self._config.warmup_rounds:
            return self._leave(now_s, Mode.SHADOW, "acceptance_low")
        if self._risk_s > self._config.warmup_rounds * self._plain_s:
            waits_alone = self._recent.gain_without_waits >= self._config.leave_gain
            return self._leave(now_s, Mode.SHADOW, "draft_timeout" if waits_alone else "acceptance_low")
        return None

    def _leave(self, now_s: float, after: Mode, reason: Reason) -> Transition | None:
        if self.mode is Mode.SPECULATE and self._spell_won() and reason != "incompatible":
            self._backoff_s = self._config.probe_after_s
            self._failed = 0
        self._postpone(now_s)
        return self._go(now_s, after, reason)

    def _spell_won(self) -> bool:
        return -self._spell.loss_s > self._config.warmup_rounds * self._plain_s

    def _postpone(self, now_s: float) -> None:
        self._probed_s = now_s
        self._next_probe_s = now_s + max(self._backoff_s, self._config.min_dwell_s)
        self._backoff_s = min(2 * self._backoff_s, self._config.probe_max_s)

    def _go(self, now_s: float, after: Mode, reason: Reason) -> Transition | None:
        before, self.mode = self.mode, after
        self._since_s = now_s
        self._silent = self._idle = self._since_plain = 0
        return Transition(now_s, before, after, reason, self.gain) if before is not after else None

    def _due(self, now_s: float) -> bool:
        config = self._config
        if not (self._allowed and config.enabled and config.max_nodes) or now_s < self._next_probe_s:
            return False
        # Under overload a probe would only confirm it; and no probe before one exchange is affordable.
        price_s = min(self._exchange.mean_s or 0.0, config.deadline_max_s)
        return not self._overloaded() and PROBE_SHARE * (now_s - self._probed_s) >= price_s

    def _start_probe(self, now_s: float) -> None:
        self.num_probes += 1
        self._probe = Ledger()
        self._allowance_s = PROBE_SHARE * min(now_s - self._probed_s, self._config.probe_max_s)
        self._probed_s = now_s
        self._caught_up = self.mode is Mode.SHADOW
        self._restart_s = 0.0
        self._recent = Ledger(keep=0.9)
        # What was believed is what may have changed: a probe looks without it.
        self._acceptance = self._acceptance.fresh()
        self._share, self._best_for = 1.0, -1
        self._silent = self._idle = 0

    def _judge(self, now_s: float) -> Transition | None:
        probe, config = self._probe, self._config
        assert probe is not None
        if self._caught_up and (probe.drafted >= config.probe_rounds or probe.rounds >= 4 * config.probe_rounds):
            # Nothing drafted is nothing lost: rule 5 keeps such a drafter harmless.
            gain = probe.gain / (1 + self._restart_s / REPAY_S)
            return self._enter(now_s) if not probe.drafted or gain >= config.enter_gain else self._fail(now_s)
        if probe.drafted and (probe.loss_s > self._allowance_s or self._idle):
            return self._fail(now_s)
        silent = now_s - self._probed_s > PROBE_LIMIT_S and not self._caught_up
        return self._fail(now_s, "draft_timeout") if silent else None

    def _enter(self, now_s: float) -> Transition | None:
        self._probe = None
        self._failed, self._risk_s, self._spell = 0, 0.0, Ledger()
        reason, self._returns = self._returns, "probe_ok"
        return self._go(now_s, Mode.SPECULATE, reason)

    def _fail(self, now_s: float, reason: Reason = "probe_failed") -> Transition | None:
        self._probe = None
        self._failed += 1
        self._returns = "probe_ok"
        self._postpone(now_s)
        return self._go(now_s, Mode.PLAIN, reason) if self._failed >= FAILED_PROBES else None
