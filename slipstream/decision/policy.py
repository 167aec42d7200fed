"""SpeculationPolicy: the state machine of one session around ``decide``: when to stop speculating, when to return.

SPECULATE: trees are awaited and verified. SHADOW: commits and features still flow, so that coming back is cheap, but
nothing is awaited. PLAIN: no draft traffic.

    SPECULATE -> SHADOW     it cost more than it gave, or the drafter stays silent
    SPECULATE -> PLAIN      even a good drafter would not pay at this load (overload)
    SHADOW -> PLAIN         three probes in a row failed
    SHADOW, PLAIN -> SPECULATE   a probe reached ``enter_gain``
    any -> PLAIN            the drafter is lost, or drafts are forbidden; at once

Rules:
1. Leaving follows a running sum, so it is quick and its loss in seconds is bounded: each round adds its loss against
   ``leave_gain`` or subtracts its gain, down to zero. Above ``PATIENCE`` plain steps, speculation stops.
2. Coming back is slower: ``PROBE_ROUNDS`` drafted rounds must reach ``enter_gain``. A probe ends early when it has lost
   what the budget had for it.
3. Waits between probes double, up to ``PROBE_MAX_S``. They begin short again only after speculation that won more than
   leaving can lose; so a session near the threshold probes ever more rarely.
4. A probe passes if the drafter answered but proposed nothing: an empty proposal costs only its wait.
5. After one wait without an answer, no step waits for the drafter until it answers again. So silence costs little, and
   a drafter that stands still for a moment is not left.

A target has one for each session. A router has one for each model and draft pool, and feeds it the pieces of all its
answers, each as one round with its own ``plain_s``. A late step is late for all of them, so what they lose is shared by
``num_answers``. It knows no clock, no session, no drafter, and keeps no logs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from slipstream.base.config import PolicySection
from slipstream.decision.beliefs import Acceptance, Beliefs, Ledger
from slipstream.decision.decide import (
    PLAIN,
    SPECULATE,
    Case,
    Decision,
    Mode,
    Prices,
    Reason,
    Round,
    RoundInputs,
    Rules,
    SessionState,
    Transition,
    decide_all,
    exchange_s,
    held_per_waiter,
    overloaded,
    too_slow,
    tree_nodes,
    usual_wait_s,
)

PATIENCE = 12  # plain steps' worth of time that may be lost before speculation is given up
SILENT_ROUNDS = 8  # in a row without growth, the first of them waited, before a drafter counts as silent
SILENT_S = 0.25  # that these rounds take: where a packet was lost, the next one comes after 0.2 s
FAILED_PROBES = 3  # before the drafter is not even kept informed
MIN_DWELL_S = 0.5  # a mode lasts so long
PROBE_ROUNDS = 8  # drafted rounds of one probe: fewer say nothing about acceptance
PROBE_AFTER_S = 1.0  # before the first probe; doubles after each that fails
PROBE_MAX_S = 30.0  # so that a drafter that is good again is seen within half a minute
PROBE_LIMIT_S = 5.0  # of rounds without its answer: the drafter has failed the probe
OVERLOAD_S = 0.1  # between two looks whether an overload is over


@dataclass(slots=True)
class Probe:
    """One try at speculation while it is off."""

    granted_s: float  # what it may lose
    last_round_s: float  # when the latest round was over
    ledger: Ledger = field(default_factory=Ledger)  # since the drafter first spoke
    answered: bool = False
    silent_s: float = 0.0  # of rounds, until it spoke
    restart_s: float = 0.0  # what was lost until then: the price of the restart, not of the rounds

    @property
    def left_s(self) -> float:
        return self.granted_s - self.restart_s - self.ledger.loss_s

    def add(self, now_s: float, earned_s: float, spent_s: float, round_: Round, answered: bool) -> None:
        """Count a round that asked for drafts."""
        # Neither looked-up text nor a time without answers is the drafter's silence.
        if not self.answered:
            self.silent_s += min(now_s - self.last_round_s, round_.verify_s + round_.wait_s)
            self.last_round_s = now_s
        if answered and not self.answered:
            self.answered = True
            self.restart_s = self.ledger.loss_s + round_.wait_s
            self.ledger = Ledger()
            self.ledger.add(earned_s, spent_s - round_.wait_s, 0.0, round_.drafted > 0)
        else:
            self.ledger.add(earned_s, spent_s, round_.wait_s, round_.drafted > 0)


class SpeculationPolicy:
    """See the module. Times are seconds of any monotone clock, never decreasing from call to call."""

    def __init__(self, config: PolicySection, beliefs: Beliefs, now_s: float = 0.0, sampled: bool = False,
                 rules: Rules | None = None, max_silent_s: float = SILENT_S) -> None:
        """``beliefs`` are shared by the sessions of a target; ``sampled``: the text is drawn, not the likeliest;
        ``max_silent_s``: of rounds without an answer, before the drafter is left."""
        self._can_draft = config.max_nodes > 0
        self._beliefs = beliefs
        self._rules = rules = rules or Rules.of(config)
        self._plain_s = beliefs.costs.cost(1)  # of the latest round
        acceptance, share, self._guess_s = beliefs.begin_session(sampled, PATIENCE * self._plain_s)
        self._state = SessionState(SPECULATE if self._can_draft else PLAIN, acceptance, config.max_nodes,
                                   self._can_draft, hit_rate=share)
        self._shared_acceptance = beliefs.acceptance[sampled]
        self._inputs: RoundInputs | None = None  # of the newest decision
        self._decision: Decision | None = None  # since the last round
        self._since_s = self._next_probe_s = now_s
        self._backoff_s = PROBE_AFTER_S
        self._num_failed_probes = 0
        self._return_reason: Reason = "probe_ok"  # what a probe that succeeds is credited to
        self._won_s = 0.0  # since speculation began
        self._risk_s = 0.0  # the running sum of rule 1
        self._probe: Probe | None = None
        self._asking = False  # for drafts
        self.num_answers = 1  # whose rounds it is told of
        self.silent_s = 0.0  # of the newest rounds, in which the drafter did not answer
        self._max_silent_s, self._last_round_s = max_silent_s, now_s

    @property
    def mode(self) -> Mode:
        return self._state.mode

    @property
    def allowed(self) -> bool:
        return self._state.allowed

    @property
    def probing(self) -> bool:
        return self._probe is not None

    @property
    def gain(self) -> float:
        """The gain over the latest rounds in which drafts were asked for."""
        return self._state.recent.gain

    def decide(self, inputs: RoundInputs) -> Decision:
        """The coming round, from what is there after a commit. It is paid for; asked again before the round is over,
        the last answer counts."""
        decision = decide_all(self._beliefs, [self._case(inputs)], self._rules)[0]
        self._accept(decision, inputs)
        return decision

    @staticmethod
    def decide_step(asking: Sequence[tuple[SpeculationPolicy, RoundInputs]]) -> list[Decision]:
        """The same for sessions of one target that were in one step."""
        if not asking:
            return []
        beliefs, rules = asking[0][0]._beliefs, asking[0][0]._rules
        decisions = decide_all(beliefs, [policy._case(inputs) for policy, inputs in asking], rules)
        for (policy, inputs), decision in zip(asking, decisions, strict=True):
            policy._accept(decision, inputs)
        if beliefs.lockstep:
            beliefs.latency.held_per_waiter = held_per_waiter(decisions, asking[0][1].others + 1)
        return decisions

    def _case(self, inputs: RoundInputs) -> Case:
        if self._decision is not None:
            self._refund(self._decision)
        if self._probe is not None:
            self._state.probe_left_s = self._probe.left_s
        return self._state, inputs, (inputs.grows_ahead and self._beliefs.may_run_ahead(self._asking))

    def _accept(self, decision: Decision, inputs: RoundInputs) -> None:
        beliefs, asking = self._beliefs, decision.num_wanted > 0 and inputs.followed
        self._decision, self._inputs = decision, inputs
        if asking is not self._asking:
            self._set_asking(asking)
        self._state.trying = self._state.trying or decision.is_trial
        if decision.budget_s:
            pay = beliefs.budget.pay_wait if decision.is_trial else beliefs.budget.pay
            pay(decision.budget_s)

    def _set_asking(self, asking: bool) -> None:
        if asking is not self._asking:
            self._asking = asking
            self._beliefs.count_asking(asking)

    def detached(self) -> None:
        """No drafter follows the session any more: until one does, it asks for no drafts."""
        self._set_asking(False)

    def close(self) -> None:
        """The session is over: it asks for no drafts, and its unspent budget is free for others."""
        if self._decision is not None:
            self._refund(self._decision)
        self._refund_guess()
        self._end_probe()
        self._set_asking(False)

    def _refund(self, decision: Decision) -> None:
        self._decision = None
        if not decision.budget_s:
            return
        if decision.is_trial:
            self._beliefs.budget.refund_wait(decision.budget_s)
            self._state.trying = False
        else:
            self._beliefs.budget.pay(-decision.budget_s)

    def _refund_guess(self) -> None:
        """A session that neither drafted nor waited has lost nothing by the guess that it began with."""
        self._beliefs.budget.pay(-self._guess_s)
        self._guess_s = 0.0

    def observe(self, now_s: float, round_: Round) -> Transition | None:
        """A round is over. Every commit is reported, plain ones too."""
        state, decision, self._decision = self._state, self._decision, None
        earned_s, spent_s = self._account(round_)
        answered = not round_.lookup and self._count_answers(round_, decision)
        if self._beliefs.lockstep and decision is not None and self._may_be_late(decision, round_):
            self._beliefs.observe_late(decision.num_wanted > 0, round_.drafted > 0)
        silent_s = min(now_s - self._last_round_s, round_.verify_s + round_.wait_s)  # many answers share a step
        self.silent_s, self._last_round_s = self.silent_s + silent_s if state.num_silent else 0.0, now_s
        if round_.lookup or not state.wants_drafts:
            if state.mode is not SPECULATE:
                self.tick(now_s)
            return None
        state.recent.add(earned_s, spent_s, round_.wait_s, round_.drafted > 0)
        if self._probe is not None:
            self._probe.add(now_s, earned_s, spent_s, round_, answered)
            return self._judge_probe(now_s, self._probe)
        self._won_s += earned_s - spent_s
        risk_s = self._risk_s + self._rules.leave_gain * spent_s - earned_s
        self._risk_s = risk_s if risk_s > 0.0 else 0.0
        return self._consider_leaving(now_s) if now_s - self._since_s >= MIN_DWELL_S else None

    def _may_be_late(self, decision: Decision, round_: Round) -> bool:
        """Whether the round shows if trees that nobody waits for are of use."""
        inputs = self._inputs
        return (self._state.wants_drafts and not decision.wait_s and not round_.lookup and inputs is not None
                and inputs.followed and not inputs.unread_s)

    def _account(self, round_: Round) -> tuple[float, float]:
        """Learn from a round. Returns the seconds of plain decoding that it replaced and those that it cost."""
        beliefs, state, inputs = self._beliefs, self._state, self._inputs
        drafted, wait_s = round_.drafted, round_.wait_s
        # Prompt rows make the step long, but those who wait for it are the sessions that the caller told of.
        others = max(round_.rows - 1 - drafted, 0) if inputs is None else inputs.others
        context = 0 if inputs is None else inputs.context
        if round_.plain_s is not None:
            plain_s, step_s, waiting = round_.plain_s, round_.verify_s, 1
        else:
            # As many as a decision asks for, so that they are made once.
            max_nodes, waiting = max(drafted, state.max_nodes), others + 1
            if round_.lookup and not beliefs.lockstep:
                steps = beliefs.costs.steps(max(waiting, round_.rows - drafted), max_nodes, context)  # as decided
            else:
                steps = beliefs.costs.step_shares(waiting, max_nodes, context)
            plain_s, step_s = steps[0], steps[drafted]
        self._plain_s = plain_s
        beside_s = wait_s
        if (drafted or wait_s) and not round_.lookup:
            beside_s += beliefs.latency.cost_to_others_s(0.0, wait_s)
        if drafted:  # a plain step is a plain step, whatever it took
            beside_s += waiting * (step_s - plain_s)
        earned_s, spent_s = (1 + round_.accepted) * plain_s, plain_s + beliefs.time_value * beside_s
        beliefs.observe_round(earned_s, spent_s, round_.lookup)
        beliefs.budget.earn(round_.verify_s + wait_s, others + 1)
        if round_.lookup:
            return earned_s, spent_s
        if drafted:
            self._shared_acceptance.num_texts += not state.acceptance.observed
            state.acceptance.observe(drafted, round_.accepted, round_.ranks)
            self._shared_acceptance.observe(drafted, round_.accepted, round_.ranks)
        if drafted or wait_s > 0:
            self._guess_s = 0.0
            state.hit_rate += 0.1 * ((drafted > 0) - state.hit_rate)
            beliefs.observe_exchange(drafted > 0)
        if not round_.first_exchange:  # which teaches nothing
            state.trying = False
            if (latency_s := round_.latency_s(self._rules.deadline_max_s)) is not None:
                beliefs.latency.observe(latency_s)
        return earned_s, spent_s

    def _prices(self) -> Prices:
        inputs = self._inputs or RoundInputs()
        return Prices.of(self._beliefs, inputs.others, inputs.context, self._state.max_nodes)

    def _count_answers(self, round_: Round, decision: Decision | None) -> bool:
        """``decision``: of this round. Returns whether the drafter answered in this round."""
        state = self._state
        pays = (decision.tree_pays if decision is not None
                else tree_nodes(self._prices(), self._beliefs, state, self._rules) > 0)
        state.num_since_plain = state.num_since_plain + 1 if round_.drafted else 0
        state.num_idle = 0 if pays else state.num_idle + 1
        waited = round_.wait_s > 0
        answered = round_.drafted > 0 or round_.exchange_s is not None or (waited and not round_.late)
        if answered:
            state.num_silent = 0
        elif waited or round_.overdue or state.num_silent:
            state.num_silent += 1
        return answered

    def tick(self, now_s: float) -> None:
        """Time passes: a probe may begin, as in ``observe``."""
        if self._probe is None and self._state.mode is not SPECULATE and self._probe_due(now_s):
            self._start_probe(now_s)

    def drafter_lost(self, now_s: float, reason: Reason = "draft_unavailable") -> Transition | None:
        """Nobody drafts any more. Probes go on, ever more rarely, in case nobody says that a drafter is back."""
        if reason == "incompatible":
            self._backoff_s = PROBE_MAX_S
        elif self._state.mode is PLAIN and self._probe is None:
            return None
        return self._leave(now_s, PLAIN, reason)

    def drafter_ready(self, now_s: float) -> None:
        """A drafter is connected (again): probe soon, but later after each time that it was lost at once."""
        if self._state.mode is not SPECULATE and (self._probe is None or not self._probe.answered):
            self._end_probe()
            if not self._beliefs.latency.shared:  # how long the last one took says nothing about this one
                self._beliefs.latency.forget()
            # _postpone has doubled the wait already; an eighth of it is a quarter of the one that was due.
            self._next_probe_s = min(self._next_probe_s, now_s + self._backoff_s / 8)
            self._return_reason = "drafter_ready"

    def forbid(self, now_s: float) -> Transition | None:
        """The operator, the client or the router wants no drafter from now on."""
        self._refund_guess()
        self._state.allowed = False
        return self._switch_mode(now_s, PLAIN, "operator")

    def allow(self, now_s: float) -> None:
        """Take ``forbid`` back: a probe begins as soon as it is affordable."""
        if not self._state.allowed:
            self._state.allowed = self._can_draft
            self._next_probe_s, self._return_reason = now_s, "operator"
        self.tick(now_s)

    def _consider_leaving(self, now_s: float) -> Transition | None:
        state, answers = self._state, self.num_answers
        if state.num_idle >= PATIENCE * answers:
            full = overloaded(self._prices(), self._beliefs, state, self._rules)
            return (self._leave(now_s, PLAIN, "overload") if full
                    else self._leave(now_s, Mode.SHADOW, "acceptance_low"))
        if state.num_silent >= SILENT_ROUNDS and self.silent_s >= self._max_silent_s:
            return self._leave(now_s, Mode.SHADOW, "draft_timeout")
        if self._risk_s > PATIENCE * answers * self._plain_s:
            late = state.num_silent > 1 or too_slow(self._plain_s, self._beliefs, state, self._rules)
            return self._leave(now_s, Mode.SHADOW, "draft_timeout" if late else "acceptance_low")
        return None

    def _leave(self, now_s: float, after: Mode, reason: Reason) -> Transition | None:
        won = self._won_s > PATIENCE * self.num_answers * self._plain_s
        if self._state.mode is SPECULATE and won and reason != "incompatible":
            self._backoff_s = PROBE_AFTER_S
        self._postpone(now_s)
        return self._switch_mode(now_s, after, reason)

    def _postpone(self, now_s: float) -> None:
        self._next_probe_s = now_s + max(self._backoff_s, MIN_DWELL_S)
        self._backoff_s = min(2 * self._backoff_s, PROBE_MAX_S)

    def _switch_mode(self, now_s: float, after: Mode, reason: Reason) -> Transition | None:
        if self._decision is not None:
            self._refund(self._decision)
        self._end_probe()
        state, before = self._state, self._state.mode
        state.mode, self._since_s = after, now_s
        state.num_silent = state.num_idle = state.num_since_plain = 0
        if after is not SPECULATE:
            self._set_asking(False)
        return Transition(before, after, reason, self.gain) if before is not after else None

    def _probe_due(self, now_s: float) -> bool:
        # None begins before one exchange is affordable, and under overload it would only confirm what is known.
        if (not self._state.allowed or now_s < self._next_probe_s
                or not self._beliefs.budget.affords(exchange_s(self._beliefs, self._rules))):
            return False
        if overloaded(self._prices(), self._beliefs, self._state, self._rules):
            self._next_probe_s = now_s + OVERLOAD_S
            return False
        return True

    def _start_probe(self, now_s: float) -> None:
        state, beliefs, rules = self._state, self._beliefs, self._rules
        most_s = PROBE_ROUNDS * (usual_wait_s(beliefs, rules) + self._plain_s)
        self._probe = Probe(min(beliefs.budget.left_s, most_s), now_s)
        beliefs.budget.pay(self._probe.granted_s)
        # It is judged afresh: what was believed is what may have changed.
        state.acceptance, state.recent, state.hit_rate = Acceptance(), Ledger(keep=state.recent.keep), 1.0
        state.num_silent = state.num_idle = state.num_since_plain = 0
        state.probe_left_s = self._probe.left_s

    def _end_probe(self) -> None:
        if self._probe is not None:
            self._beliefs.budget.pay(-min(self._probe.granted_s, self._probe.left_s))
            self._probe, self._state.probe_left_s = None, None

    def _judge_probe(self, now_s: float, probe: Probe) -> Transition | None:
        ledger = probe.ledger
        if probe.answered and (ledger.num_drafted >= PROBE_ROUNDS or ledger.num_rounds >= 4 * PROBE_ROUNDS):
            passed = not ledger.num_drafted or ledger.gain >= self._rules.enter_gain
            return self._enter(now_s) if passed else self._fail(now_s)
        if ledger.num_drafted and (probe.left_s < 0 or self._state.num_idle):
            return self._fail(now_s)
        spent = probe.left_s < 0 and self._state.num_silent > 1
        silent = not probe.answered and (spent or probe.silent_s > PROBE_LIMIT_S)
        return self._fail(now_s, "draft_timeout") if silent else None

    def _enter(self, now_s: float) -> Transition | None:
        reason, self._return_reason = self._return_reason, "probe_ok"
        self._won_s, self._num_failed_probes, self._risk_s = 0.0, 0, 0.0
        return self._switch_mode(now_s, SPECULATE, reason)

    def _fail(self, now_s: float, reason: Reason = "probe_failed") -> Transition | None:
        self._end_probe()
        self._return_reason = "probe_ok"
        self._num_failed_probes += 1
        self._postpone(now_s)
        return self._switch_mode(now_s, PLAIN, reason) if self._num_failed_probes >= FAILED_PROBES else None
