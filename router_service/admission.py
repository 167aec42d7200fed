"""Admission: which answers run, which wait for room and which are refused; whether they speculate; limits on waits.

Rules:
1. First come, first served within a tenant: while a request for several answers waits, no later request of its tenant
   overtakes it. While other tenants wait too, it gets at most its tenant's share of the places, and keeps no place
   empty to wait for more. Between tenants, the next place goes to the one with the fewest answers for its weight. So a
   tenant has its share however much others ask for, and others may use what it leaves.
2. Waiting is bounded. A request is refused at once if it would wait longer than ``max_wait_s`` at the latest pace of
   freed places, or if its tenant's share of the queue is full. A request that has waited ``max_wait_s`` is refused
   then. Every refusal says when to retry (when all that wait now should have started) and which limit applied.
3. A tenant runs at most ``requests`` answers at once: further ones wait. A tenant that has used up its tokens of a
   minute is refused until it has some again.
4. Closing refuses all waiting requests; running ones may finish.
5. ``with limit: await …`` raises the limit's error when it fires; a cancellation from outside stays one. It makes no
   task or timer for each wait, which would cost more than the other work of a token. One task at a time waits within a
   limit; after a limit has fired, a new wait raises at once.
6. Whether a model's draft pool pays is decided as a target does for a session: by the same ``decide``, on measurements
   of the pool, taken from the pieces of all answers (steps with and without drafts, waits, drafted and accepted
   tokens). Each piece of an answer that may speculate is a round, except its first, whose step computed the prompt.
   Only the decision's mode, and whether it is a probe, are used; they hold until one of them changes. How many nodes to
   verify and how long to wait is each target's own decision.
7. While the pool does not pay, new answers begin without drafts and running ones are switched over; prompt lookup needs
   no pool, and goes on. During a probe a share of the answers speculates, and only these are judged; they make way for
   others if they tell nothing for long. The probe's budget is a share of the time of all answers. An answer whose
   client asked for plain decoding is never switched.
8. Every transition is logged with its numbers and counted, with the scope ``pool``.
9. Pieces are judged together, as many as there are answers (about one step's), because a call for each piece would run
   with cold caches. Pieces of a single answer are judged at once.

It knows nothing about targets, text or HTTP, nor about what is waited for.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from router_service.tenants import Tenant
from slipstream.base.config import PolicySection
from slipstream.base.errors import CapacityError, Draining, QuotaExceeded
from slipstream.decision.beliefs import SHARE, Beliefs, StepCosts
from slipstream.decision.decide import Mode, Round, RoundInputs, Transition
from slipstream.decision.policy import PROBE_AFTER_S, PROBE_LIMIT_S, SpeculationPolicy
from slipstream.observe.log import logger
from slipstream.observe.metrics import RouterMetrics
from slipstream.protocol.requests import Answer, Piece

MAX_RETRY_AFTER_S = 60.0  # the openai client comes back by its own time where it is told a longer one
MAX_WAITING_PER_PLACE = 2  # answers: the queue's memory has a bound whatever the pace
HOLD_DECAY = 0.98  # weight of older answers in the mean time that a place is held, for each answer that leaves
MIN_WAIT_S = 1e-3
TICK_S = 0.25
POOL = RoundInputs(followed=True)


class Limit:
    """Ends the wait inside it when ``fire`` is called, or ``after_s`` seconds from now unless it is closed (create it
    on the event loop then). ``error`` makes the exception."""

    __slots__ = ("_error", "_num_cancels", "_task", "_timer", "fired")

    def __init__(self, error: Callable[[], Exception], after_s: float | None = None) -> None:
        self.fired = False
        self._error = error
        self._task: asyncio.Task[Any] | None = None  # that waits now
        self._num_cancels = 0  # of the task, from outside, when the wait began
        self._timer = None if after_s is None else asyncio.get_running_loop().call_later(after_s, self.fire)

    def close(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def fire(self) -> None:
        if not self.fired:
            self.fired = True
            if self._task is not None:
                self._task.cancel()

    def __enter__(self) -> None:
        if self.fired:
            raise self._error()
        self._task = task = asyncio.current_task()
        assert task is not None
        self._num_cancels = task.cancelling()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        task, self._task = self._task, None
        if self.fired and task is not None:
            only_ours = task.uncancel() <= self._num_cancels
            if only_ours and kind is asyncio.CancelledError:
                raise self._error() from error


class Waiter:
    """A request that waits to be admitted. ``num_answers``: that it asks for; once it is admitted: that may run at
    once."""

    __slots__ = ("future", "num_answers")

    def __init__(self, num_answers: int) -> None:
        self.num_answers = num_answers
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Account:
    """One tenant's running and waiting answers, and what is left of its tokens."""

    def __init__(self, tenant: Tenant, now_s: float) -> None:
        self.tenant = tenant
        self.in_flight = 0
        self.queued = 0
        self.waiters: deque[Waiter] = deque()
        self._tokens_left = float(tenant.tokens_per_minute)
        self._refilled_s = now_s

    @property
    def free_places(self) -> float:
        """Answers that it may have besides those that run."""
        return self.tenant.requests - self.in_flight if self.tenant.requests else math.inf

    def set_limits(self, tenant: Tenant, now_s: float) -> None:
        """Take over the tenant's present limits. A new token limit begins with all of its tokens."""
        if not self.tenant.tokens_per_minute:
            self._tokens_left, self._refilled_s = float(tenant.tokens_per_minute), now_s
        self.tenant = tenant

    def wait_for_tokens_s(self, now_s: float) -> float:
        """Seconds until it has tokens left; 0: it has some."""
        per_s = self.tenant.tokens_per_minute / 60.0
        if not per_s:
            return 0.0
        self._tokens_left = min(60.0 * per_s, self._tokens_left + per_s * (now_s - self._refilled_s))
        self._refilled_s = now_s
        return (1.0 - self._tokens_left) / per_s if self._tokens_left <= 0 else 0.0

    def spend(self, num_tokens: int) -> None:
        """Take tokens off. What is left may be negative, because an answer's tokens are known only at its end. Without
        a limit this does nothing."""
        if self.tenant.tokens_per_minute:
            self._tokens_left -= num_tokens


@dataclass(frozen=True, slots=True)
class Place:
    """What an admitted request holds until it leaves."""

    account: Account
    num_answers: int  # that may run at once
    since_s: float

    @property
    def tenant(self) -> Tenant:
        return self.account.tenant


class Admission:
    """Room for ``max_in_flight`` answers, and queues in which nobody waits longer than ``max_wait_s``."""

    def __init__(self, max_in_flight: int, max_wait_s: float, metrics: RouterMetrics,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self.in_flight = 0
        self.queued = 0
        self.closed = False
        self._max_in_flight = max_in_flight
        self._max_wait_s = max_wait_s
        self._accounts: dict[str, Account] = {}  # forgotten with the last answer, unless tokens are counted
        self._waiting: dict[str, Account] = {}  # accounts with waiters; whose turn it is next, first
        self._held_s = self._num_held = 0.0  # by answers that left, and how many they were; older ones decay
        self._stalled_since_s = 0.0  # since when nobody has left; renewed when the first one begins to wait
        self._metrics = metrics
        self._clock = clock

    async def wait_until_idle(self, for_s: float) -> None:
        """Wait until nothing has run for so many seconds of this wait."""
        began_s = self._clock()
        while self.in_flight or self._clock() - max(began_s, self._stalled_since_s) < for_s:
            await asyncio.sleep(for_s / 10)

    async def enter(self, tenant: Tenant, num_answers: int) -> Place:
        """Wait for places for so many answers. If more are asked for than may run, wait for half of the places; if
        others wait too, for the tenant's share: its answers then take turns in fewer places. Raises CapacityError or
        Draining."""
        if self.closed:
            raise _draining()
        limit = min(self._max_in_flight, tenant.requests or self._max_in_flight)
        if num_answers > limit:
            num_answers = max(1, limit // 2)
        account = self._accounts.setdefault(tenant.id, Account(tenant, self._clock()))
        account.set_limits(tenant, self._clock())
        if (wait_s := account.wait_for_tokens_s(self._clock())) > 0:
            raise self._refusal(account, "tokens", wait_s)
        wait_s = self.wait_s(account, num_answers)
        if wait_s > self._max_wait_s or (wait_s > 0 and not self._may_wait(account, num_answers)):
            raise self._refusal(account, "queue", wait_s)
        waiter = Waiter(num_answers)
        await self._wait(account, waiter)
        return Place(account, waiter.num_answers, self._clock())

    def leave(self, place: Place) -> None:
        """Give ``place`` back. Call it once."""
        held_s = self._clock() - place.since_s
        self._held_s = HOLD_DECAY * self._held_s + place.num_answers * held_s
        self._num_held = HOLD_DECAY * self._num_held + place.num_answers
        self._free(place.account, place.num_answers)
        self._admit_waiters()

    def overloaded(self, place: Place, error: CapacityError) -> CapacityError:
        """The error for an admitted request whose target had no room after all."""
        after_s = max(error.retry_after_s, self.wait_s(place.account, place.num_answers))
        return self._refusal(place.account, "target", after_s, str(error))

    def close(self) -> None:
        """Take no new request; running ones go on."""
        self.closed = True
        for account in self._waiting.values():
            for waiter in account.waiters:
                if not waiter.future.done():
                    waiter.future.set_exception(_draining())

    def wait_s(self, account: Account, num_answers: int) -> float:
        """How long so many more answers of a tenant would wait, at the pace at which places were given back lately; 0:
        they need not wait."""
        # Before them come those of its own, and as many of each other tenant's as bring that one to the same load.
        load = (account.in_flight + account.queued) / account.tenant.weight
        others = 0.0 if not load else sum(
            min(other.queued, other.free_places, max(0.0, load * other.tenant.weight - other.in_flight))
            for other in self._waiting.values() if other is not account)  # there may be thousands
        own = account.queued + num_answers
        missing = max(0.0, own + others - (self._max_in_flight - self.in_flight)) / self._max_in_flight
        if account.tenant.requests:
            missing = max(missing, (own - account.free_places) / account.tenant.requests)
        if missing <= 0:
            return 0.0
        return max(missing * self._mean_hold_s(), MIN_WAIT_S)

    def queue_wait_s(self) -> float:
        """Seconds until all that wait now should have started."""
        return min(self.queued / self._max_in_flight * self._mean_hold_s(), MAX_RETRY_AFTER_S)

    def _mean_hold_s(self) -> float:
        """How long an answer holds its place. While nobody leaves, at least as long as that has lasted."""
        return max(self._held_s / self._num_held if self._num_held else 0.0,
                   self._clock() - self._stalled_since_s if self.queued else 0.0)

    def _may_wait(self, account: Account, num_answers: int) -> bool:
        """Whether a tenant has so much left of its share of the queue. One request of each may always wait."""
        if not account.queued:
            return True
        others = sum(other.tenant.weight for other in self._waiting.values() if other is not account)
        share = account.tenant.weight / (account.tenant.weight + others)
        return account.queued + num_answers <= share * MAX_WAITING_PER_PLACE * self._max_in_flight

    def _refusal(self, account: Account, reason: str, after_s: float, message: str = "") -> CapacityError:
        self._metrics.refused(account.tenant.name, reason)
        after_s = min(after_s, MAX_RETRY_AFTER_S)
        again = f"try again in {max(1, math.ceil(after_s))} s"
        if reason == "tokens":
            return QuotaExceeded(f"this key's {account.tenant.tokens_per_minute} tokens a minute are used up; {again}",
                                 after_s)
        return CapacityError(f"{message or self._usage(account)}; {again}", after_s)

    def _usage(self, account: Account) -> str:
        """What runs and waits, and the limits, for the caller and for whoever may change the settings."""
        own, most = account.tenant.requests, MAX_WAITING_PER_PLACE * self._max_in_flight
        if own and self.in_flight < self._max_in_flight:  # there are places, but not for this key
            usage = f"answers of this key: {account.in_flight} run and {account.queued} wait, of {own} and {most}"
        else:
            usage = (f"answers here: {self.in_flight} run and {self.queued} wait, of {self._max_in_flight} and {most} "
                     "(router.max_in_flight)")
        return f"{usage}, for at most {self._max_wait_s:g} s (router.max_wait_s)"

    async def _wait(self, account: Account, waiter: Waiter) -> None:
        if not self.queued:
            self._stalled_since_s = self._clock()
        account.waiters.append(waiter)
        self._count_queued(account, waiter.num_answers)
        self._admit_waiters()
        if waiter.future.done():
            return
        limit = Limit(lambda: self._refusal(account, "late", self.wait_s(account, waiter.num_answers)),
                      self._max_wait_s)
        try:
            with limit:
                await waiter.future
        except BaseException:
            if waiter.future.done() and not waiter.future.cancelled() and waiter.future.exception() is None:
                self._free(account, waiter.num_answers)  # admitted and given up in the same moment
            elif waiter in account.waiters:
                account.waiters.remove(waiter)
                self._count_queued(account, -waiter.num_answers)
            self._admit_waiters()
            raise
        finally:
            limit.close()

    def _admit_waiters(self) -> None:
        while self.in_flight < self._max_in_flight and (account := self._next_account()) is not None:
            num_places = int(min(account.waiters[0].num_answers, self._share(account), account.free_places))
            if self.in_flight + num_places > self._max_in_flight:
                break
            waiter = account.waiters.popleft()
            del self._waiting[account.tenant.id]  # if more of it waits, it joins the others at their end
            self._count_queued(account, -waiter.num_answers)
            waiter.num_answers = num_places
            if not waiter.future.done():
                self.in_flight += num_places
                account.in_flight += num_places
                waiter.future.set_result(None)
        self._metrics.load(self.in_flight, self.queued)

    def _share(self, account: Account) -> int:
        """Places that one of its requests may have: its part of all of them while others wait, too, one at least."""
        if len(self._waiting) == 1 or account.waiters[0].num_answers == 1:
            return self._max_in_flight
        weights = sum(other.tenant.weight for other in self._waiting.values())
        return max(1, int(self._max_in_flight * account.tenant.weight / weights))

    def _next_account(self) -> Account | None:
        """Of those who may have more, the one with the least load for its weight; then the one whose turn it is."""
        # Who runs nothing has all that it may have: its limit may be lower by now than what it waits for.
        able = (account for account in self._waiting.values()
                if account.waiters[0].num_answers <= account.free_places or not account.in_flight)
        return min(able, key=lambda account: account.in_flight / account.tenant.weight, default=None)

    def _count_queued(self, account: Account, num_answers: int) -> None:
        account.queued += num_answers
        self.queued += num_answers
        if account.queued:
            self._waiting[account.tenant.id] = account
        else:
            self._waiting.pop(account.tenant.id, None)

    def _free(self, account: Account, num_answers: int) -> None:
        self._stalled_since_s = self._clock()
        account.in_flight -= num_answers
        self.in_flight -= num_answers
        if not (account.in_flight or account.queued or account.tenant.tokens_per_minute):
            self._accounts.pop(account.tenant.id, None)


def _draining() -> Draining:
    return Draining("the router is shutting down; try again soon")


class PoolFallback:
    """Admits and switches answers; times are seconds of ``clock``."""

    def __init__(self, config: PolicySection, metrics: RouterMetrics,
                 clock: Callable[[], float] = time.monotonic) -> None:
        # Until a piece says what its step took, a plain step is the unit of time.
        self._beliefs = Beliefs(StepCosts({1: 1.0}))
        self._costs_known = False
        self._max_rows = 1 + config.max_nodes
        # To leave it costs as much, until a probe begins.
        self._policy = SpeculationPolicy(config, self._beliefs, clock(), max_silent_s=PROBE_AFTER_S)
        self._decision = self._policy.decide(POOL)
        self._metrics = metrics
        self._clock = clock
        self._reason = "operator"
        self._followed: dict[FollowedAnswer, None] = {}  # those that probed longest ago first
        self._judged_s = clock()  # when a round was judged last, or others were taken for the probe
        self._unjudged: list[tuple[FollowedAnswer, Piece]] = []
        self._log = logger("fallback")
        metrics.mode.set_mode(self.mode.value)

    @property
    def mode(self) -> Mode:
        return self._decision.mode

    @property
    def probing(self) -> bool:
        return self._decision.why == "a probe"

    def follow(self, answer: Answer, may_speculate: bool) -> Answer:
        """``answer``, observed and switched from its beginning on."""
        followed = FollowedAnswer(self, answer, may_speculate)
        if may_speculate and self.mode is not Mode.SPECULATE and self._missing_probes() <= 0:
            self._metrics.fell_back(self._reason)
            followed.set_speculation(False)
        self._followed[followed] = None
        return followed

    def observe(self, answer: FollowedAnswer, piece: Piece) -> None:
        """``piece`` is not the first of ``answer``."""
        self._unjudged.append((answer, piece))
        if len(self._unjudged) >= len(self._followed):
            self._judge_all()

    def _judge_all(self) -> None:
        unjudged, self._unjudged, now_s = self._unjudged, [], self._clock()
        self._policy.num_answers = max(1, sum(answer.speculates and answer.drafted for answer in self._followed))
        for answer, piece in unjudged:
            self._judge(answer, piece, now_s)

    def _judge(self, answer: FollowedAnswer, piece: Piece, now_s: float) -> None:
        beliefs = self._beliefs
        if piece.plain_s:
            self._learn_costs(piece)
        # A target that does not say, or a text that was looked up, tells nothing of drafts; nor does an answer that its
        # own target drafts no more for: taken for silence, many of them made one late draft the end of the pool.
        undrafted = piece.state != "speculate" and not piece.drafted and not piece.wait_s and not self._policy.probing
        answer.drafted = bool(piece.plain_s) and not undrafted
        if not answer.speculates or not answer.drafted:
            beliefs.budget.earn(piece.verify_s, len(self._followed))
            return
        # Which nodes were accepted is not told: they count as a chain.
        round_ = Round(piece.drafted, min(piece.accepted, piece.drafted), piece.verify_s, piece.wait_s, late=piece.late,
                       plain_s=piece.plain_s)
        self._judged_s = now_s
        self._apply(self._policy.observe(now_s, round_))

    def _learn_costs(self, piece: Piece) -> None:
        beliefs = self._beliefs
        if not self._costs_known:  # further rows are free until a piece with drafts says what they cost
            self._costs_known, beliefs.costs = True, StepCosts({1: piece.plain_s, self._max_rows: piece.plain_s})
        beliefs.costs.observe(1, piece.plain_s)
        if piece.drafted:
            beliefs.costs.observe(1 + piece.drafted, piece.verify_s)

    def unfollow(self, answer: FollowedAnswer) -> None:
        self._followed.pop(answer, None)

    def tick(self) -> None:
        """Judge the pieces since the last call; a probe may begin."""
        now_s = self._clock()
        self._judge_all()
        self._policy.tick(now_s)
        self._apply(None)
        if self.probing and now_s - self._judged_s > PROBE_LIMIT_S:  # they wait, or look up: others may tell more
            self._judged_s = now_s
            self._switch_all()
        self._fill_probe()

    async def run(self) -> None:
        """Tick until cancelled."""
        while True:
            self.tick()
            await asyncio.sleep(TICK_S)

    def _apply(self, transition: Transition | None) -> None:
        if transition is None and self.probing == self._policy.probing:
            return
        self._decision = decision = self._policy.decide(POOL)
        if transition is not None:
            self._reason = transition.reason
            before, after = transition.before.value, transition.after.value
            self._metrics.mode.changed(before, after, transition.reason)
            self._metrics.mode.set_mode(after)
            self._log.info("mode changed", scope="pool", before=before, after=after, reason=transition.reason,
                           why=decision.why, gain=round(transition.gain, 3),
                           plain_ms=round(1e3 * self._beliefs.costs.cost(1), 2), answers=len(self._followed))
        self._judged_s = self._clock()
        self._switch_all()
        self._fill_probe()

    def _switch_all(self) -> None:
        for answer in self._followed:
            answer.set_speculation(self.mode is Mode.SPECULATE)

    def _fill_probe(self) -> None:
        if (missing := self._missing_probes()) > 0:
            plain = [answer for answer in self._followed if answer.may_speculate and not answer.speculates]
            for answer in plain[:missing]:
                answer.set_speculation(True)
                self._followed[answer] = self._followed.pop(answer)

    def _missing_probes(self) -> int:
        """How many further answers may speculate for the probe that runs."""
        if not self.probing:
            return 0
        able = sum(answer.may_speculate for answer in self._followed)
        return max(1, math.ceil(SHARE * able)) - sum(answer.speculates for answer in self._followed)


class FollowedAnswer:
    """An answer whose pieces the fallback sees first."""

    __slots__ = ("_answer", "_began", "_fallback", "_pieces", "drafted", "may_speculate", "speculates")

    def __init__(self, fallback: PoolFallback, answer: Answer, may_speculate: bool) -> None:
        self.may_speculate = self.speculates = may_speculate
        self._fallback = fallback
        self._answer = answer
        self._pieces = aiter(answer)
        self._began = False  # its first piece has come
        self.drafted = True  # its target drafts for it, as its newest piece says

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self

    async def __anext__(self) -> Piece:
        piece = await anext(self._pieces)
        if self._began:
            self._fallback.observe(self, piece)
        self._began = True
        return piece

    def set_speculation(self, allowed: bool) -> None:
        """Follow the fallback's decision; an answer that must not speculate stays plain."""
        if self.may_speculate and allowed != self.speculates:
            self.speculates = allowed
            self._answer.set_speculation(allowed)

    async def aclose(self) -> None:
        self._fallback.unfollow(self)
        await self._answer.aclose()
