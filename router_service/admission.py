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
   no pool, and goes on. During a probe a share of the answers speculates, and only these are judged; the probe's budget
   is a share of the time of all answers. An answer whose client asked for plain decoding is never switched.
8. Every transition is logged with its numbers and counted, with the scope ``pool``.
9. Pieces are judged together, as many as there are answers (about one step's), because a call for each piece would run
   with cold caches. Pieces of a single answer are judged at once.

It knows nothing about targets, text or HTTP, nor about what is waited for.
"""

from __future__ import annotations

import asyncio
import itertools
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
from slipstream.decision.decide import Mode, Round, Seen, Transition
from slipstream.decision.policy import SpeculationPolicy
from slipstream.observe.log import logger
from slipstream.observe.metrics import RouterMetrics
from slipstream.protocol.requests import Answer, Piece

MAX_RETRY_AFTER_S = 60.0  # the openai client comes back by its own time where it is told a longer one
WAITING = 2  # answers for each that may run: the queue's memory has a bound whatever the pace
FADE = 0.98  # of how long answers held their places, for each that leaves
SHORTEST_S = 1e-3  # of a wait
TICK_S = 0.25
POOL = Seen(followed=True)


class Limit:
    """Ends the wait inside it when ``fire`` is called, or ``after_s`` seconds from now unless it is closed (create it
    on the event loop then). ``error`` makes the exception."""

    __slots__ = ("_cancelling", "_error", "_task", "_timer", "fired")

    def __init__(self, error: Callable[[], Exception], after_s: float | None = None) -> None:
        self.fired = False
        self._error = error
        self._task: asyncio.Task[Any] | None = None  # that waits now
        self._cancelling = 0
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
        self._cancelling = task.cancelling()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        task, self._task = self._task, None
        if self.fired and task is not None:
            alone = task.uncancel() <= self._cancelling
            if alone and kind is asyncio.CancelledError:
                raise self._error() from error


class Turn:
    """A request that waits to be let in."""

    __slots__ = ("answers", "future", "number")

    def __init__(self, number: int, answers: int) -> None:
        self.number, self.answers = number, answers  # once it is let in: that may run at once
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Account:
    """One tenant's running and waiting answers, and what is left of its tokens."""

    def __init__(self, tenant: Tenant, now_s: float) -> None:
        self.tenant = tenant
        self.in_flight = 0
        self.queued = 0
        self.waiting: deque[Turn] = deque()
        self._tokens = float(tenant.tokens_per_minute)
        self._at_s = now_s

    @property
    def level(self) -> float:
        """Running answers divided by the weight."""
        return self.in_flight / self.tenant.weight

    @property
    def room(self) -> float:
        """Answers that it may have besides those that run."""
        return self.tenant.requests - self.in_flight if self.tenant.requests else math.inf

    @property
    def idle(self) -> bool:
        return not (self.in_flight or self.queued or self.tenant.tokens_per_minute)

    def renew(self, tenant: Tenant, now_s: float) -> None:
        """Take over the tenant's present limits. A new token limit begins with all of its tokens."""
        if not self.tenant.tokens_per_minute:
            self._tokens, self._at_s = float(tenant.tokens_per_minute), now_s
        self.tenant = tenant

    def due_s(self, now_s: float) -> float:
        """Seconds until it has tokens left; 0: it has."""
        rate = self.tenant.tokens_per_minute / 60.0
        if not rate:
            return 0.0
        self._tokens = min(60.0 * rate, self._tokens + rate * (now_s - self._at_s))
        self._at_s = now_s
        return (1.0 - self._tokens) / rate if self._tokens <= 0 else 0.0

    def spend(self, tokens: int) -> None:
        """Take tokens off. The rest may become negative, because an answer's tokens are known only at its end. Without
        a limit this does nothing."""
        if self.tenant.tokens_per_minute:
            self._tokens -= tokens


@dataclass(frozen=True, slots=True)
class Place:
    """What an admitted request holds until it leaves."""

    account: Account
    answers: int  # that may run at once
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
        self._entered = 0
        self._max_in_flight = max_in_flight
        self._max_wait_s = max_wait_s
        self._accounts: dict[str, Account] = {}
        self._queues: dict[str, Account] = {}  # those of whom somebody waits
        self._numbers = itertools.count()
        self._held_s = self._held = 0.0  # by answers that left, and how many they were; older ones fade
        self._moved_s = 0.0  # since when somebody waits and nobody has left
        self._metrics = metrics
        self._clock = clock
        self._empty = asyncio.Event()
        self._empty.set()

    async def quiet(self, for_s: float) -> None:
        """Wait until nothing has been inside for so many seconds."""
        while True:
            await self._empty.wait()
            entered = self._entered
            await asyncio.sleep(for_s)
            if self._entered == entered:
                return

    async def enter(self, tenant: Tenant, answers: int) -> Place:
        """Wait for places for ``answers`` answers. If more are asked for than may run, wait for half of the places; if
        others wait too, for the tenant's share: its answers then take turns in fewer places. Raises CapacityError or
        Draining."""
        if self.closed:
            raise _leaving()
        most = min(self._max_in_flight, tenant.requests or self._max_in_flight)
        if answers > most:
            answers = max(1, most // 2)
        account = self._accounts.setdefault(tenant.id, Account(tenant, self._clock()))
        account.renew(tenant, self._clock())
        try:
            if (due_s := account.due_s(self._clock())) > 0:
                raise self._refusal(account, "tokens", due_s)
            wait_s = self.wait_s(account, answers)
            if wait_s > self._max_wait_s or (wait_s > 0 and not self._may_wait(account, answers)):
                raise self._refusal(account, "queue", wait_s)
            turn = Turn(next(self._numbers), answers)
            await self._turn(account, turn)
        finally:
            self._forget_idle(account)
        return Place(account, turn.answers, self._clock())

    def leave(self, place: Place) -> None:
        """Give ``place`` back. Call it once."""
        held_s = self._clock() - place.since_s
        self._held_s = FADE * self._held_s + place.answers * held_s
        self._held = FADE * self._held + place.answers
        self._give(place.account, place.answers)
        self._let_in()
        self._forget_idle(place.account)

    def overloaded(self, place: Place, error: CapacityError) -> CapacityError:
        """The error for an admitted request whose target had no room after all."""
        after_s = max(error.retry_after_s, self.wait_s(place.account, place.answers))
        return self._refusal(place.account, "target", after_s, str(error))

    def close(self) -> None:
        self.closed = True
        for account in self._queues.values():
            for turn in account.waiting:
                if not turn.future.done():
                    turn.future.set_exception(_leaving())

    def wait_s(self, account: Account, answers: int) -> float:
        """How long ``answers`` more of a tenant would wait, at the pace at which places were given back lately; 0: they
        need not wait."""
        # Before them come those of its own, and as many of each other's as bring him to what it would have itself.
        level = (account.in_flight + account.queued) / account.tenant.weight
        others = 0.0 if not level else sum(
            min(other.queued, other.room, max(0.0, level * other.tenant.weight - other.in_flight))
            for other in self._queues.values() if other is not account)  # there may be thousands
        mine = account.queued + answers
        missing = max(0.0, mine + others - (self._max_in_flight - self.in_flight)) / self._max_in_flight
        if account.tenant.requests:
            missing = max(missing, (mine - account.room) / account.tenant.requests)
        if missing <= 0:
            return 0.0
        return max(missing * self._hold_s(), SHORTEST_S)

    def all_in_s(self) -> float:
        """Seconds until all that wait now should have started."""
        return min(self.queued / self._max_in_flight * self._hold_s(), MAX_RETRY_AFTER_S)

    def _hold_s(self) -> float:
        """How long an answer holds its place. While nobody leaves, at least as long as that has lasted."""
        return max(self._held_s / self._held if self._held else 0.0,
                   self._clock() - self._moved_s if self.queued else 0.0)

    def _may_wait(self, account: Account, answers: int) -> bool:
        """Whether a tenant has so much left of its share of the queue. One request of each may always wait."""
        if not account.queued:
            return True
        others = sum(other.tenant.weight for other in self._queues.values() if other is not account)
        share = account.tenant.weight / (account.tenant.weight + others)
        return account.queued + answers <= share * WAITING * self._max_in_flight

    def _refusal(self, account: Account, reason: str, after_s: float, told: str = "") -> CapacityError:
        self._metrics.refused(account.tenant.name, reason)
        after_s = min(after_s, MAX_RETRY_AFTER_S)
        again = f"try again in {max(1, math.ceil(after_s))} s"
        if reason == "tokens":
            return QuotaExceeded(f"this key's {account.tenant.tokens_per_minute} tokens a minute are used up; {again}",
                                 after_s)
        return CapacityError(f"{told or self._full(account)}; {again}", after_s)

    def _full(self, account: Account) -> str:
        """What is there and what bounds it, for its caller and for whoever may change the settings."""
        own, most = account.tenant.requests, WAITING * self._max_in_flight
        if own and self.in_flight < self._max_in_flight:  # there are places, but not for this key
            there = f"answers of this key: {account.in_flight} run and {account.queued} wait, of {own} and {most}"
        else:
            there = (f"answers here: {self.in_flight} run and {self.queued} wait, of {self._max_in_flight} and {most} "
                     "(router.max_in_flight)")
        return f"{there}, for at most {self._max_wait_s:g} s (router.max_wait_s)"

    async def _turn(self, account: Account, turn: Turn) -> None:
        if not self.queued:
            self._moved_s = self._clock()
        account.waiting.append(turn)
        self._count(account, turn.answers)
        self._let_in()
        if turn.future.done():
            return
        limit = Limit(lambda: self._refusal(account, "late", self.wait_s(account, turn.answers)), self._max_wait_s)
        try:
            with limit:
                await turn.future
        except BaseException:
            if turn.future.done() and not turn.future.cancelled() and turn.future.exception() is None:
                self._give(account, turn.answers)  # let in and given up in the same moment
            elif turn in account.waiting:
                account.waiting.remove(turn)
                self._count(account, -turn.answers)
            self._let_in()
            raise
        finally:
            limit.close()

    def _let_in(self) -> None:
        while self.in_flight < self._max_in_flight and (account := self._next()) is not None:
            places = min(account.waiting[0].answers, self._share(account))
            if self.in_flight + places > self._max_in_flight:
                break
            turn = account.waiting.popleft()
            self._count(account, -turn.answers)
            turn.answers = places
            if not turn.future.done():
                self._take(account, turn)
                turn.future.set_result(None)
        self._metrics.load(self.in_flight, self.queued)

    def _share(self, account: Account) -> int:
        """Places that one of its requests may have: its part of all of them while others wait, too, one at least."""
        if len(self._queues) == 1 or account.waiting[0].answers == 1:
            return self._max_in_flight
        weights = sum(other.tenant.weight for other in self._queues.values())
        return max(1, int(self._max_in_flight * account.tenant.weight / weights))

    def _next(self) -> Account | None:
        """Whose turn it is: of those who may have more, who has least for its weight; then who has waited longest."""
        able = (account for account in self._queues.values() if account.waiting[0].answers <= account.room)
        return min(able, key=lambda account: (account.level, account.waiting[0].number), default=None)

    def _count(self, account: Account, answers: int) -> None:
        account.queued += answers
        self.queued += answers
        if account.queued:
            self._queues[account.tenant.id] = account
        else:
            self._queues.pop(account.tenant.id, None)

    def _take(self, account: Account, turn: Turn) -> None:
        self.in_flight += turn.answers
        account.in_flight += turn.answers
        self._entered += 1
        self._empty.clear()

    def _give(self, account: Account, answers: int) -> None:
        self._moved_s = self._clock()
        account.in_flight -= answers
        self.in_flight -= answers
        if self.in_flight == 0:
            self._empty.set()

    def _forget_idle(self, account: Account) -> None:
        if account.idle:
            self._accounts.pop(account.tenant.id, None)


def _leaving() -> Draining:
    return Draining("the router is shutting down; try again soon")


class PoolFallback:
    """Admits and switches answers; times are seconds of ``clock``."""

    def __init__(self, config: PolicySection, metrics: RouterMetrics,
                 clock: Callable[[], float] = time.monotonic) -> None:
        # Until a piece says what its step took, a plain one is the unit of time.
        self._beliefs = Beliefs(StepCosts({1: 1.0}))
        self._told = False
        self._rows = 1 + config.max_nodes
        self._policy = SpeculationPolicy(config, self._beliefs, clock())
        self._decision = self._policy.decide(POOL)
        self._metrics = metrics
        self._clock = clock
        self._reason = "operator"
        self._followed: set[FollowedAnswer] = set()
        self._heard: list[tuple[FollowedAnswer, Piece]] = []  # and not judged
        self._log = logger("fallback")
        metrics.mode.now(self.mode.value)

    @property
    def mode(self) -> Mode:
        return self._decision.mode

    @property
    def probing(self) -> bool:
        return self._decision.why == "a probe"

    def admits(self) -> bool:
        """Whether an answer that may speculate begins with drafts."""
        if self.mode is Mode.SPECULATE or self._probe_room() > 0:
            return True
        self._metrics.fell_back(self._reason)
        return False

    def follow(self, answer: Answer, wanted: bool) -> Answer:
        """``answer``, observed and switched from its beginning on. ``wanted``: it may speculate."""
        followed = FollowedAnswer(self, answer, wanted)
        if wanted and not self.admits():
            followed.set_speculation(False)
        self._followed.add(followed)
        return followed

    def observe(self, answer: FollowedAnswer, piece: Piece) -> None:
        """A later piece of ``answer`` came."""
        self._heard.append((answer, piece))
        if len(self._heard) >= len(self._followed):
            self._judge_all()

    def _judge_all(self) -> None:
        heard, self._heard, now_s = self._heard, [], self._clock()
        for answer, piece in heard:
            self._judge(answer, piece, now_s)

    def _judge(self, answer: FollowedAnswer, piece: Piece, now_s: float) -> None:
        beliefs = self._beliefs
        if piece.plain_s:
            self._learn(piece)
        # A target that does not say, or a text that was looked up, tells nothing of drafts; nor does an answer that its
        # own target drafts no more for: taken for silence, many of them made one late draft the end of the pool.
        left = piece.state != "speculate" and not piece.drafted and not piece.wait_s and not self._policy.probing
        if not answer.allowed or not piece.plain_s or left:
            beliefs.purse.earn(piece.verify_s, len(self._followed))
            return
        # A chain is the shallowest tree of so many nodes that can have had what was accepted.
        round_ = Round(piece.drafted, min(piece.accepted, piece.drafted), piece.drafted, piece.verify_s, piece.wait_s,
                       late=piece.late, plain_s=piece.plain_s)
        self._heed(self._policy.observe(now_s, round_))

    def _learn(self, piece: Piece) -> None:
        beliefs = self._beliefs
        if not self._told:  # further rows are free until a piece with drafts says what they cost
            self._told, beliefs.costs = True, StepCosts({1: piece.plain_s, self._rows: piece.plain_s})
        beliefs.costs.observe(1, piece.plain_s)
        if piece.drafted:
            beliefs.costs.observe(1 + piece.drafted, piece.verify_s)

    def left(self, answer: FollowedAnswer) -> None:
        self._followed.discard(answer)

    def tick(self) -> None:
        """Judge the pieces since the last call; a probe may begin."""
        self._judge_all()
        self._policy.tick(self._clock())
        self._heed(None)
        self._fill_probe()

    async def run(self) -> None:
        """Tick until cancelled."""
        while True:
            self.tick()
            await asyncio.sleep(TICK_S)

    def _heed(self, transition: Transition | None) -> None:
        if transition is None and self.probing == self._policy.probing:
            return
        self._decision = decision = self._policy.decide(POOL)
        if transition is not None:
            self._reason = transition.reason
            before, after = transition.before.value, transition.after.value
            self._metrics.mode.changed(before, after, transition.reason)
            self._metrics.mode.now(after)
            self._log.info("mode changed", scope="pool", before=before, after=after, reason=transition.reason,
                           why=decision.why, gain=round(transition.gain, 3),
                           plain_ms=round(1e3 * self._beliefs.costs.cost(1), 2), answers=len(self._followed))
        for answer in self._followed:
            answer.set_speculation(self.mode is Mode.SPECULATE)
        self._fill_probe()

    def _fill_probe(self) -> None:
        if (room := self._probe_room()) > 0:
            plain = [answer for answer in self._followed if answer.wanted and not answer.allowed]
            for answer in plain[:room]:
                answer.set_speculation(True)

    def _probe_room(self) -> int:
        """How many further answers may speculate for the probe that runs."""
        if not self.probing:
            return 0
        wanted = sum(answer.wanted for answer in self._followed)
        return max(1, math.ceil(SHARE * wanted)) - sum(answer.allowed for answer in self._followed)


class FollowedAnswer:
    """An answer whose pieces the fallback sees first."""

    __slots__ = ("_answer", "_begun", "_fallback", "_pieces", "allowed", "wanted")

    def __init__(self, fallback: PoolFallback, answer: Answer, wanted: bool) -> None:
        self.wanted = self.allowed = wanted
        self._fallback = fallback
        self._answer = answer
        self._pieces = aiter(answer)
        self._begun = False

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self

    async def __anext__(self) -> Piece:
        piece = await anext(self._pieces)
        if self._begun:
            self._fallback.observe(self, piece)
        self._begun = True
        return piece

    def set_speculation(self, allowed: bool) -> None:
        """Follow the fallback's decision; an answer that must not speculate stays plain."""
        if self.wanted and allowed != self.allowed:
            self.allowed = allowed
            self._answer.set_speculation(allowed)

    async def aclose(self) -> None:
        self._fallback.left(self)
        await self._answer.aclose()
