"""Whether a model's draft pool pays, over all answers of this router: the fallback to plain decoding, and the way back.

Rules:
1. The judge is ``decision.policy.SpeculationPolicy``; every piece of an answer that may speculate is a round to it.
   The first piece of an answer is none: its step was the prompt's.
2. While the pool does not pay, new answers begin plain and running ones are switched in mid-answer.
3. While a probe runs, a share of the answers speculates and is judged alone; the others stay plain.
4. Nobody who asked for plain decoding is ever switched; his pieces still tell what a plain step takes.
5. Every transition is logged with its numbers and counted.
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
from slipstream.decision.policy import Mode, Round, SpeculationPolicy, StepCosts, Transition
from slipstream.observe.log import logger
from slipstream.observe.metrics import RouterMetrics
from slipstream.protocol.requests import Answer, Piece

TICK_S = 0.25
PROBE_SHARE = 0.05  # of the running answers, one at least
PLAIN_KEEP = 0.95  # of the mean plain step, for each further one


class PoolFallback:
    """Admits and switches answers; times are seconds of ``clock``."""

    def __init__(self, config: PolicySection, metrics: RouterMetrics,
                 clock: Callable[[], float] = time.monotonic) -> None:
        # Flat costs: the rounds bring their own times, and how many nodes to verify is the target's affair.
        self._policy = SpeculationPolicy(config, StepCosts({1: 1.0}), now_s=clock())
        self._metrics = metrics
        self._clock = clock
        self._plain_s: float | None = None
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
        if not piece.drafted and piece.verify_s > 0:
            keep = PLAIN_KEEP if self._plain_s is not None else 0.0
            self._plain_s = keep * (self._plain_s or 0.0) + (1 - keep) * piece.verify_s
        plain_s = piece.plain_s or self._plain_s  # the mean is of other loads, if the target does not know better
        if not answer.allowed or plain_s is None:
            return
        # A chain is the shallowest tree of so many nodes that can have had what was accepted.
        round_ = Round(piece.drafted, min(piece.accepted, piece.drafted), piece.drafted, piece.verify_s, piece.wait_s,
                       plain_s=plain_s)
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
            self._log.info("mode changed", before=before, after=after, reason=transition.reason,
                           gain=round(transition.gain, 3), plain_ms=round(1e3 * (self._plain_s or 0.0), 2),
                           answers=len(self._followed))
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
        return max(1, math.ceil(PROBE_SHARE * wanted)) - sum(answer.allowed for answer in self._followed)


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
