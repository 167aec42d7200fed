"""Admission: which answers run, which wait for room and which are turned away; whether they speculate; limits on waits.

Rules:
1. First come, first served: a request for several answers is not overtaken while it waits.
2. Beyond the queue a request is refused at once (429 with a time to come back), so that waiting stays bounded.
3. Closing turns away everyone who waits; who is inside may finish.
4. ``with limit: await …`` raises what the limit was made with when it fires, and nothing else differs from waiting
   without it: who is cancelled from outside stays cancelled. It takes no task or timer for each wait: those cost more
   than a token's other work. One task waits within a limit at a time; one that has fired lets nobody begin to wait.
5. Whether a model's draft pool pays is decided as a target does for a session, by the same ``decide`` on beliefs of the
   pool's own, made of what pieces of all answers say (steps with and without drafts, waits, drafted and accepted
   tokens). Each piece of an answer that may speculate is a round. The first piece of an answer is none: its step was
   the prompt's. The decision is followed in its mode, and in whether it is a probe; it holds until one of them changes.
   How many nodes are verified and how long they are waited for is each target's own decision.
6. While the pool does not pay, new answers begin plain and running ones are switched in mid-answer. While a probe runs,
   a share of the answers speculates and is judged alone; the time of all of them pays for it. Nobody who asked for
   plain decoding is ever switched.
7. Every transition is logged with its numbers and counted, with the scope ``pool``.
8. Pieces are judged together, as many as there are answers, which are those of one step: a judge that is called for
   each piece has left the caches in between. A single answer's are judged at once.

It knows nothing about targets, text or HTTP, nor what is awaited.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any

from slipstream.base.config import PolicySection
from slipstream.base.errors import CapacityError, Draining, InvalidRequest
from slipstream.decision.beliefs import SHARE, Beliefs, StepCosts
from slipstream.decision.decide import Mode, Round, Seen, Transition
from slipstream.decision.policy import SpeculationPolicy
from slipstream.observe.log import logger
from slipstream.observe.metrics import RouterMetrics
from slipstream.protocol.requests import Answer, Piece

MAX_RETRY_AFTER_S = 30.0
WAITING = 2  # answers for each that may run: who comes last waits for two others, well within a request's time limit
TICK_S = 0.25
POOL = Seen(followed=True)


class Admission:
    """Room for ``max_in_flight`` answers and a queue. ``changed`` hears (in flight, queued)."""

    def __init__(self, max_in_flight: int, changed: Callable[[int, int], None]) -> None:
        self.in_flight = 0
        self.queued = 0
        self.closed = False
        self._entered = 0
        self._max_in_flight = max_in_flight
        self._max_queue = WAITING * max_in_flight
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._changed = changed
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

    async def enter(self, answers: int) -> None:
        """Wait for room for so many answers; each ``enter`` needs one ``leave``. Raises CapacityError, Draining, or
        InvalidRequest for more answers than could ever run."""
        if self.closed:
            raise _leaving()
        if answers > self._max_in_flight:
            raise InvalidRequest("n", f"asks for {answers} answers at once; this server runs {self._max_in_flight}")
        if not self._waiting and self.in_flight + answers <= self._max_in_flight:
            self._take(answers)
            self._changed(self.in_flight, self.queued)
            return
        if self.queued + answers > self._max_queue:
            after_s = min(1.0 + self.queued / self._max_in_flight, MAX_RETRY_AFTER_S)
            raise CapacityError("the server is busy and its queue is full; try again later", after_s)
        await self._wait(answers)

    def leave(self, answers: int) -> None:
        self._give(answers)
        self._let_in()

    def close(self) -> None:
        self.closed = True
        for _, turn in self._waiting:
            if not turn.done():
                turn.set_exception(_leaving())

    async def _wait(self, answers: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((answers, turn))
        self.queued += answers
        self._changed(self.in_flight, self.queued)
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._give(answers)  # let in and given up in the same moment
            else:
                self._forget(answers, turn)
            self._let_in()
            raise

    def _forget(self, answers: int, turn: asyncio.Future[None]) -> None:
        with contextlib.suppress(ValueError):
            self._waiting.remove((answers, turn))
            self.queued -= answers

    def _let_in(self) -> None:
        while self._waiting and self.in_flight + self._waiting[0][0] <= self._max_in_flight:
            answers, turn = self._waiting.popleft()
            self.queued -= answers
            if not turn.done():
                self._take(answers)
                turn.set_result(None)
        self._changed(self.in_flight, self.queued)

    def _take(self, answers: int) -> None:
        self.in_flight += answers
        self._entered += 1
        self._empty.clear()

    def _give(self, answers: int) -> None:
        self.in_flight -= answers
        if self.in_flight == 0:
            self._empty.set()


def _leaving() -> Draining:
    return Draining("the router is shutting down; try again soon")


class Limit:
    """Ends whoever waits within it once it is told to ``fire``, or ``after_s`` seconds from now unless it is closed
    (make it on the event loop then). ``error`` makes what is raised."""

    __slots__ = ("_cancelling", "_error", "_task", "_timer", "fired")

    def __init__(self, error: Callable[[], Exception], after_s: float | None = None) -> None:
        self.fired = False
        self._error = error
        self._task: asyncio.Task[Any] | None = None  # that waits now
        self._cancelling = 0
        self._timer = None if after_s is None else asyncio.get_running_loop().call_later(after_s, self.fire)

    def close(self) -> None:
        """Time fires it no more."""
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


class PoolFallback:
    """Admits and switches answers; times are seconds of ``clock``."""

    def __init__(self, config: PolicySection, metrics: RouterMetrics,
                 clock: Callable[[], float] = time.monotonic) -> None:
        # Until a piece says what its step took, a plain one is the unit of time.
        self._beliefs = Beliefs(StepCosts({1: 1.0}))
        self._told = False
        self._rows = 1 + config.max_nodes
        self._policy = SpeculationPolicy(config, self._beliefs, clock())
        self._decision = self._policy.decide(clock(), POOL)
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
        """Whether an answer that may speculate begins so."""
        if self.mode is Mode.SPECULATE or self._probe_room() > 0:
            return True
        self._metrics.fell_back(self._reason)
        return False

    def follow(self, answer: Answer, wanted: bool, allowed: bool) -> Answer:
        """``answer``, observed and switched from now on. ``wanted``: it may speculate; ``allowed``: it begins so."""
        followed = FollowedAnswer(self, answer, wanted, allowed)
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
        if not piece.plain_s:  # a target that does not say tells nothing of what drafts cost
            return
        if not self._told:  # further rows are free until a piece with drafts says what they cost
            self._told, beliefs.costs = True, StepCosts({1: piece.plain_s, self._rows: piece.plain_s})
        beliefs.costs.observe(1, piece.plain_s)
        if piece.drafted:
            beliefs.costs.observe(1 + piece.drafted, piece.verify_s)
        if not answer.allowed:
            beliefs.purse.earn(piece.verify_s, len(self._followed))
            return
        # A chain is the shallowest tree of so many nodes that can have had what was accepted.
        round_ = Round(piece.drafted, min(piece.accepted, piece.drafted), piece.drafted, piece.verify_s, piece.wait_s,
                       plain_s=piece.plain_s)
        self._heed(self._policy.observe(now_s, round_))

    def left(self, answer: FollowedAnswer) -> None:
        self._followed.discard(answer)

    def tick(self) -> None:
        """Time passes: a probe may begin or run out."""
        self._judge_all()
        self._heed(self._policy.tick(self._clock()))
        self._fill_probe()

    async def run(self) -> None:
        """Tick until cancelled."""
        while True:
            self.tick()
            await asyncio.sleep(TICK_S)

    def _heed(self, transition: Transition | None) -> None:
        if transition is None and self.probing == self._policy.probing:
            return
        self._decision = decision = self._policy.decide(self._clock(), POOL)
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

    def __init__(self, fallback: PoolFallback, answer: Answer, wanted: bool, allowed: bool) -> None:
        self.wanted = wanted
        self.allowed = allowed
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
        """What the fallback decides; an answer that is not to speculate stays as it is."""
        if self.wanted and allowed != self.allowed:
            self.allowed = allowed
            self._answer.set_speculation(allowed)

    async def aclose(self) -> None:
        self._fallback.left(self)
        await self._answer.aclose()
