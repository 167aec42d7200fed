"""Whether a model's draft pool pays, over all answers of this router: the fallback to plain decoding, and the way back.

Rules:
1. It decides as a target does, at the scope of a pool: ``SpeculationPolicy`` with beliefs of its own, made of what
   pieces of answers say (steps with and without drafts, waits, drafted and accepted tokens). Each piece of an answer
   that may speculate is a round. The first piece of an answer is none: its step was the prompt's.
2. While the pool does not pay, new answers begin plain and running ones are switched in mid-answer.
3. While a probe runs, a share of the answers speculates and is judged alone; the others stay plain. The time of all of
   them pays for it.
4. Nobody who asked for plain decoding is ever switched.
5. Every transition is logged with its numbers and counted, with the scope ``pool``.
6. Pieces are judged together, as many as there are answers, which are those of one step: a judge that is called for
   each piece has left the caches in between. A single answer's are judged at once.

It knows nothing about targets, text or HTTP.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable

from slipstream.base.config import PolicySection
from slipstream.decision.beliefs import SHARE, Beliefs, StepCosts
from slipstream.decision.decide import Mode, Round, Seen, Transition
from slipstream.decision.policy import SpeculationPolicy
from slipstream.observe.log import logger
from slipstream.observe.metrics import RouterMetrics
from slipstream.protocol.requests import Answer, Piece

TICK_S = 0.25
START_S = 0.02  # of a step that nobody has seen


class PoolFallback:
    """Admits and switches answers; times are seconds of ``clock``."""

    def __init__(self, config: PolicySection, metrics: RouterMetrics,
                 clock: Callable[[], float] = time.monotonic) -> None:
        # Before the first piece nothing is known of its steps: that further rows are free is soon corrected.
        self._beliefs = Beliefs(StepCosts({1: START_S, 1 + config.max_nodes: START_S}))
        self._policy = SpeculationPolicy(config, self._beliefs, clock())
        self._metrics = metrics
        self._clock = clock
        self._reason = "operator"
        self._probing = False
        self._followed: set[FollowedAnswer] = set()
        self._heard: list[tuple[FollowedAnswer, Piece]] = []  # and not judged
        self._log = logger("fallback")
        metrics.mode.now(self._policy.mode.value)

    @property
    def mode(self) -> Mode:
        return self._policy.mode

    @property
    def probing(self) -> bool:
        return self._policy.probing

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
        if transition is not None:
            self._reason = transition.reason
            before, after = transition.before.value, transition.after.value
            self._metrics.mode.changed(before, after, transition.reason)
            self._metrics.mode.now(after)
            decision = self._policy.decide(self._clock(), Seen(followed=True))
            self._log.info("mode changed", scope="pool", before=before, after=after, reason=transition.reason,
                           why=decision.why, gain=round(transition.gain, 3),
                           plain_ms=round(1e3 * self._beliefs.costs.cost(1), 2), answers=len(self._followed))
        if transition is not None or self._probing != self.probing:
            self._probing = self.probing
            self._switch_all()

    def _switch_all(self) -> None:
        speculate = self.mode is Mode.SPECULATE
        for answer in self._followed:
            answer.switch(speculate)
        self._fill_probe()

    def _fill_probe(self) -> None:
        plain = [answer for answer in self._followed if answer.wanted and not answer.allowed]
        for answer in plain[: max(0, self._probe_room())]:
            answer.switch(True)

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

    def switch(self, allowed: bool) -> None:
        """What the fallback decides; an answer that is not to speculate stays as it is."""
        if self.wanted and allowed != self.allowed:
            self.set_speculation(allowed)

    def set_speculation(self, allowed: bool) -> None:
        self.allowed = allowed
        self._answer.set_speculation(allowed)

    async def aclose(self) -> None:
        self._fallback.left(self)
        await self._answer.aclose()
