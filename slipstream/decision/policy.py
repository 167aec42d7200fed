"""SpeculationPolicy: whether speculation pays, how many draft nodes, and how long to wait for them.

One pure state machine: rounds and times go in, a node budget comes out. SPECULATE: trees are awaited and verified.
SHADOW: commits and features still flow, so that coming back is cheap, but nothing is awaited. PLAIN: no draft traffic.

    SPECULATE -> SHADOW     it cost more than it gave, or the drafter stays silent
    SPECULATE -> PLAIN      even a good drafter would not pay at this load (overload)
    SHADOW -> PLAIN         three probes in a row failed
    SHADOW, PLAIN -> SPECULATE   a probe reached ``enter_gain``
    any -> PLAIN            the drafter is lost, or speculation is forbidden; at once

Rules:
1. What counts is the gain of ``goodput.py``: seconds of plain decoding that rounds replaced / seconds that they cost.
2. Leaving is a running sum, quick and bounded in seconds: each round adds what it lost against ``leave_gain`` and takes
   off what it won, down to zero. Above ``warmup_rounds`` plain steps, speculation stops.
3. Coming back is slower: ``probe_rounds`` drafted rounds must reach ``enter_gain``, with the seconds that the drafter
   took to catch up repaid within REPAY_S. A probe ends early when it has lost PROBE_SHARE of the time since the last.
4. Waits between probes double, up to ``probe_max_s``. They start anew only after a spell of speculation that won more
   than leaving can lose; what hovers at the threshold therefore probes ever more rarely.
5. A probe in which an answering drafter proposed nothing passes: an empty proposal never costs more than its wait.
6. A session begins with the acceptance that others of its kind have seen (``estimates.Experience``), so that short
   answers need not pay for finding out.
7. One wait in vain is enough: until the drafter is heard again, no step waits for it.
8. Every PLAIN_EVERY rounds one is plain, so that the cost of a plain step is measured and not remembered.

It knows no clock, no session, no drafter, and keeps no logs. A target has one for each session. A router has one for
each model and draft pool, and feeds it the pieces of all its answers, each as one round with its own ``plain_s``. It
switches answers by ``mode``; while ``probing`` it lets a small share speculate and feeds theirs alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.base.config import PolicySection
from slipstream.decision.estimates import Experience, Ledger, StepCosts
from slipstream.decision.exchanges import ExchangeByLoad, ExchangeTimes
from slipstream.decision.goodput import Goodput, Round
from slipstream.decision.probe import Probe
from slipstream.decision.record import Decision, Mode, Reason, Seen, Transition, Why

__all__ = ["ExchangeTimes", "Experience", "Mode", "Reason", "Round", "SpeculationPolicy", "StepCosts", "Transition"]

PROBE_SHARE = 0.02
REPAY_S = 10.0
PLAIN_EVERY = 64
PROBE_LIMIT_S = 5.0  # a drafter that has not answered by then has failed the probe
OVERLOAD_S = 0.1  # between two looks whether it is over
IDLE_TOKENS = 128  # committed since a tree was asked for: to tell a drafter of more would cost time there
FAILED_PROBES = 3  # before shadow becomes plain
SILENT_ROUNDS = 8  # in a row without growth, the first of them waited, before a drafter counts as silent


class SpeculationPolicy:
    """See the module. Times are seconds of any monotone clock, never decreasing from call to call."""

    def __init__(self, config: PolicySection, costs: StepCosts, exchange: ExchangeTimes | ExchangeByLoad | None = None,
                 now_s: float = 0.0, experience: Experience | None = None) -> None:
        """``costs`` are the target's, shared by its sessions; ``exchange`` may be shared by those of one drafter,
        ``experience`` by those that are drafted for alike."""
        self.mode = Mode.SPECULATE if config.enabled and config.max_nodes else Mode.PLAIN
        self.num_probes = 0
        self.allowed = config.enabled and config.max_nodes > 0
        self._config = config
        self._exchange = exchange or ExchangeTimes()
        self._shared = isinstance(self._exchange, ExchangeByLoad)
        self._goodput = Goodput(config, costs, self._exchange, experience or Experience())
        self._since_s = self._quiet_since_s = self._next_probe_s = now_s
        self._backoff_s = config.probe_after_s
        self._failed = 0
        self._returns: Reason = "probe_ok"  # what a probe that succeeds is credited to
        self._spell = Ledger()  # since speculation began
        self._risk_s = 0.0  # the running sum of rule 2
        self._probe: Probe | None = None
        self._silent = self._idle = self._since_plain = 0  # rounds in a row

    @property
    def probing(self) -> bool:
        return self._probe is not None

    @property
    def gain(self) -> float:
        """Of the latest rounds in which drafts were asked for."""
        return self._goodput.recent.gain

    def wants_drafts(self, now_s: float) -> bool:
        """Whether growth should be asked for now. Commits flow then, and in SHADOW as well."""
        return self._wants

    @property
    def _wants(self) -> bool:
        return self.mode is Mode.SPECULATE or self._probe is not None

    @property
    def _measures_plain(self) -> bool:
        return self.mode is Mode.SPECULATE and self._since_plain >= PLAIN_EVERY

    def budget(self, now_s: float, batch_rows_of_others: int) -> int:
        """Draft nodes to verify in this step, root not counted; 0 is plain. ``batch_rows_of_others``: rows that the
        others bring to the step. May be asked as often as one likes."""
        self._goodput.tell_others(batch_rows_of_others)
        return self._goodput.nodes if self._wants and not self._measures_plain else 0

    def foresees(self, chances: Sequence[float], followed: bool, batch_rows_of_others: int) -> int:
        """See ``Goodput.foreseen``; ``followed``: there is a drafter. Such rounds are not observed."""
        self._goodput.tell_others(batch_rows_of_others)
        return self._goodput.foreseen(chances, followed and self._wants) if self.allowed and not self._probe else 0

    @property
    def nodes(self) -> int:
        """Draft nodes of the highest expected gain, whatever the mode."""
        return self._goodput.nodes

    def deadline_s(self) -> float:
        """Seconds after a commit that its growth may be awaited; 0: step at once."""
        if not self._wants or self._measures_plain or self._idle or self._silent:
            return 0.0
        usual_s = self._goodput.usual_wait_s
        if self._probe is None:
            return usual_s if self._goodput.wait_pays else 0.0
        left_s = self._probe.allowance_s - self._probe.ledger.loss_s
        return min(usual_s, max(left_s, self._config.deadline_min_s)) if left_s > 0 else 0.0

    def asks(self, entering: bool = False) -> bool:
        """Whether a tree that is asked for now would be waited for, or one that was is still missing. ``entering``: no
        drafter follows yet, and one that is to follow reads the prompt first: that must pay, too."""
        gain = self._config.enter_gain if entering else self._config.leave_gain
        if not self._wants or self._measures_plain:
            return False
        return bool(self._probe or self._silent or (not self._idle and self._goodput.pays(gain)))

    def decide(self, now_s: float, seen: Seen) -> Decision:
        """The coming round, from what is there after a commit."""
        lookup = self.foresees(seen.chances, seen.followed, seen.others) if seen.chances else 0
        verify = self.budget(now_s, seen.others)
        asks = self._worth_asking(now_s, seen)
        self._goodput.tell_others(seen.others)
        stays = self.mode is not Mode.PLAIN or self._wants
        follow = (stays and not (self._shared and seen.unasked > IDLE_TOKENS)) if seen.followed else asks
        want = verify if asks and not lookup else 0
        wait_s, enough = (self.deadline_s(), self.enough()) if seen.followed and not lookup else (0.0, 0.0)
        return Decision(self.mode, verify, lookup, want, follow, bool(want and seen.grows_ahead), wait_s, enough,
                        self._why(lookup, asks, seen))

    def _worth_asking(self, now_s: float, seen: Seen) -> bool:
        if not isinstance(self._exchange, ExchangeByLoad):
            return self._wants
        # On the target's own cores, a tree that nobody waits for slows the step beside it.
        self.budget(now_s, self._exchange.load - 1)
        return self.asks(not seen.followed)

    def _why(self, lookup: int, asks: bool, seen: Seen) -> Why:
        rows: tuple[tuple[bool, Why], ...] = (
            (not self.allowed, "forbidden"), (lookup > 0, "prompt lookup"), (self.probing, "a probe"),
            (self._measures_plain, "measures plain"), (not self._wants, "drafts do not pay"),
            (not seen.followed, "no drafter"), (not asks, "too slow"))
        return next((why for holds, why in rows if holds), "drafts pay")

    def enough(self) -> float:
        """Draft tokens that a tree must promise for the step to begin at once, within ``deadline_s``."""
        return self._goodput.enough if self._wants else 0.0

    def observe(self, now_s: float, round_: Round) -> Transition | None:
        """A round is over. Every commit is reported, plain ones too."""
        earned_s, spent_s = self._goodput.account(round_)
        answered = self._count(round_)
        if not self._wants:
            return self.tick(now_s)
        self._goodput.recent.add(earned_s, spent_s, round_.wait_s, round_.drafted > 0)
        if self._probe is not None:
            self._probe.add(now_s, earned_s, spent_s, round_, answered)
            return self._judge(now_s, self._probe)
        self._spell.add(earned_s, spent_s, round_.wait_s, round_.drafted > 0)
        self._risk_s = max(0.0, self._risk_s + self._config.leave_gain * spent_s - earned_s)
        return self._consider_leaving(now_s)

    def _count(self, round_: Round) -> bool:
        """Returns whether the drafter answered in this round."""
        self._since_plain = self._since_plain + 1 if round_.drafted else 0
        self._idle = 0 if self._goodput.worthwhile else self._idle + 1
        waited = round_.wait_s > 0
        answered = round_.drafted > 0 or round_.exchange_s is not None or (waited and not round_.late)
        if answered:
            self._silent = 0
        elif waited or self._silent:
            self._silent += 1
        return answered

    def tick(self, now_s: float) -> Transition | None:
        """Time passes: a probe begins or runs out, as in ``observe``."""
        if self._probe is not None:
            return self._judge(now_s, self._probe)
        if self.mode is not Mode.SPECULATE and self._due(now_s):
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
        if self.mode is not Mode.SPECULATE and (self._probe is None or self._probe.answered_s is None):
            self._probe = None
            self._goodput.new_drafter()
            # _postpone has doubled the wait already; an eighth of it is a quarter of the one that was due.
            self._next_probe_s = min(self._next_probe_s, now_s + self._backoff_s / 8)
            self._returns = "drafter_ready"
        return None

    def forbid(self, now_s: float) -> Transition | None:
        """The operator, the client or the router wants plain decoding from now on."""
        self.allowed = False
        self._probe = None
        self._quiet_since_s = now_s
        return self._go(now_s, Mode.PLAIN, "operator")

    def allow(self, now_s: float) -> Transition | None:
        """Take ``forbid`` back: a probe begins as soon as it is affordable."""
        if not self.allowed:
            self.allowed = self._config.enabled and self._config.max_nodes > 0
            self._next_probe_s, self._returns = now_s, "operator"
        return self.tick(now_s)

    def _consider_leaving(self, now_s: float) -> Transition | None:
        patience = self._config.warmup_rounds
        if now_s - self._since_s < self._config.min_dwell_s:
            return None
        if self._idle >= patience:
            return (self._leave(now_s, Mode.PLAIN, "overload") if self._goodput.overloaded
                    else self._leave(now_s, Mode.SHADOW, "acceptance_low"))
        if self._silent >= SILENT_ROUNDS:
            return self._leave(now_s, Mode.SHADOW, "draft_timeout")
        if self._risk_s > patience * self._goodput.plain_s:
            late = self._silent > 1 or self._goodput.too_slow
            return self._leave(now_s, Mode.SHADOW, "draft_timeout" if late else "acceptance_low")
        return None

    def _leave(self, now_s: float, after: Mode, reason: Reason) -> Transition | None:
        won = -self._spell.loss_s > self._config.warmup_rounds * self._goodput.plain_s
        if self.mode is Mode.SPECULATE and won and reason != "incompatible":
            self._backoff_s = self._config.probe_after_s
        self._postpone(now_s)
        return self._go(now_s, after, reason)

    def _postpone(self, now_s: float) -> None:
        self._quiet_since_s = now_s
        self._next_probe_s = now_s + max(self._backoff_s, self._config.min_dwell_s)
        self._backoff_s = min(2 * self._backoff_s, self._config.probe_max_s)

    def _go(self, now_s: float, after: Mode, reason: Reason) -> Transition | None:
        before, self.mode = self.mode, after
        self._since_s = now_s
        self._silent = self._idle = self._since_plain = 0
        return Transition(now_s, before, after, reason, self.gain) if before is not after else None

    def _due(self, now_s: float) -> bool:
        # None begins before one exchange is affordable, and under overload it would only confirm what is known.
        if (not self.allowed or now_s < self._next_probe_s
                or PROBE_SHARE * (now_s - self._quiet_since_s) < self._goodput.exchange_s):
            return False
        if self._goodput.overloaded:
            self._next_probe_s = now_s + OVERLOAD_S
            return False
        return True

    def _start_probe(self, now_s: float) -> None:
        self.num_probes += 1
        quiet_s = min(now_s - self._quiet_since_s, self._config.probe_max_s)
        self._probe = Probe(now_s, PROBE_SHARE * quiet_s)
        self._goodput.forget()
        self._silent = self._idle = self._since_plain = 0

    def _judge(self, now_s: float, probe: Probe) -> Transition | None:
        ledger, rounds = probe.ledger, self._config.probe_rounds
        if probe.answered_s is not None and (ledger.drafted >= rounds or ledger.rounds >= 4 * rounds):
            gain = ledger.gain / (1 + (probe.answered_s - probe.began_s) / REPAY_S)
            return self._enter(now_s) if not ledger.drafted or gain >= self._config.enter_gain else self._fail(now_s)
        if ledger.drafted and (ledger.loss_s > probe.allowance_s or self._idle):
            return self._fail(now_s)
        silent = probe.answered_s is None and now_s - probe.began_s > PROBE_LIMIT_S
        return self._fail(now_s, "draft_timeout") if silent else None

    def _enter(self, now_s: float) -> Transition | None:
        reason, self._returns = self._returns, "probe_ok"
        self._probe, self._spell = None, Ledger()
        self._failed, self._risk_s = 0, 0.0
        return self._go(now_s, Mode.SPECULATE, reason)

    def _fail(self, now_s: float, reason: Reason = "probe_failed") -> Transition | None:
        self._probe, self._returns = None, "probe_ok"
        self._failed += 1
        self._postpone(now_s)
        return self._go(now_s, Mode.PLAIN, reason) if self._failed >= FAILED_PROBES else None
