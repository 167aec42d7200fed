"""Answers: what happens to one answer at each turn of its life, from admission to its last token.

Rules:
1. Admission takes what the prefix cache holds; release gives back what was computed, so that the next prompt finds it.
2. A commit goes to its policy and its drafter (with its feature rows) first, as a drafter waits for it (``commit``);
   clients and counters hear of it when the frames have left (``tell``).
3. The policy decides how many nodes pay; a drafter that is wanted and not there is looked for at each commit.
   Where the answer's own text foretells more than a drafter would in the same time, nobody is asked.
4. Pieces leave in one go, when the next step computes or none comes (``deliver``).

Runs on the engine thread alone. It knows nothing about schedules, batches or sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from slipstream.base.config import PolicySection
from slipstream.decision.exchanges import ExchangeByLoad
from slipstream.decision.policy import ExchangeTimes, Experience, Round, SpeculationPolicy, StepCosts
from slipstream.decision.record import Mode, Reason, Transition
from slipstream.engine.prefix import RadixCache
from slipstream.engine.runner import ModelRunner
from slipstream.engine.sampling import TokenHistory
from slipstream.observe.log import logger
from slipstream.observe.metrics import TargetMetrics
from slipstream.observe.spans import Spans
from slipstream.protocol.messages import Drop, Growth
from slipstream.protocol.requests import Finish, Piece, Request
from slipstream.protocol.session import TargetSide
from slipstream.protocol.tree import MAX_NODES
from target_service.links import DraftPool
from target_service.running import Running, Sink
from target_service.step import Committed, Step, Verified

LOOK_S = 0.2  # between two looks whether a drafter would pay, on shared cores
IDLE_TOKENS = 128  # committed since a tree was asked for: to tell a drafter of more would cost time there
ASKED = 4  # commits whose answers may still come
Dispatch = Callable[[list[tuple[Sink, Piece | Exception]]], None]


class Answers:
    """The life of answers; the worker decides when, this decides what."""

    def __init__(self, runner: ModelRunner, cache: RadixCache | None, pool: DraftPool, config: PolicySection,
                 costs: StepCosts, metrics: TargetMetrics, dispatch: Dispatch, spans: Spans,
                 foresight: bool = False, shared_cores: bool = False) -> None:
        self._runner = runner
        self._cache = cache
        self._pool = pool
        self._config = config
        self._costs = costs
        self._metrics = metrics
        self._load = ExchangeByLoad() if shared_cores else None
        # One for all: a new answer need not learn how far the drafts are.
        self._exchange = self._load or ExchangeTimes()
        self._experience = {greedy: Experience() for greedy in (True, False)}  # sampled text is harder to foresee
        self._dispatch = dispatch
        self._spans = spans
        self._foresight = foresight
        self._log = logger("target")
        self._pieces: list[tuple[Sink, Piece | Exception]] = []

    def begin(self, number: int, request: Request, sink: Sink, now_s: float) -> Running:
        """An answer that waits for its turn."""
        prompt = len(request.tokens) - request.answered
        span = self._spans.begin("target.answer", request.trace, prompt=prompt, answered=request.answered)
        side = TargetSide(number, request.tokens, prompt, request.sampling, span.parent)
        policy = SpeculationPolicy(self._config, self._costs, self._exchange, now_s,
                                   self._experience[request.sampling.greedy])
        if not request.speculate:
            policy.forbid(now_s)
        history = TokenHistory.of(request.sampling, request.tokens[:prompt])
        if history is not None:
            history.append(request.tokens[prompt:])
        return Running(number, request, side, policy, sink, now_s, history, span=span)

    def loaded(self, sessions: int) -> None:
        """So many answers run, or are about to."""
        if self._load is not None:
            self._load.load = max(1, sessions)

    def admit(self, running: Running, now_s: float) -> None:
        """Give it its slots, as far as the prefix cache has them, and a drafter, unless it would not pay."""
        # A tree may reach beyond the last token that is wanted; its slots are taken before the answer is cut.
        running.slots = np.zeros(running.max_len + MAX_NODES, np.int64)
        if self._cache is not None:
            match = self._cache.match(running.side.tokens[:-1])
            self._cache.lock(match)
            running.match = match
            running.take_slots(match.slots)
            running.borrowed = running.computed
            if running.first_step_s is None:
                running.cached_tokens = running.computed
                self._metrics.prompt(running.side.base, running.computed)
        self._follow(running, now_s)

    def put_back(self, running: Running) -> None:
        """Take its slots away; it will be computed again from its tokens."""
        self._pool.detach(running)
        self._return_slots(running)
        self._log.debug("put back", session=running.number)

    def release(self, running: Running) -> None:
        """It is over: its drafter is told, its KV goes to the prefix cache."""
        self._pool.close(running)
        self._return_slots(running)
        running.span.end(tokens=running.side.num_output)

    def fail(self, running: Running, error: Exception, outcome: str = "failed") -> None:
        """It cannot go on here."""
        self._metrics.request(outcome)
        self.release(running)
        self._pieces.append((running.sink, error))

    def nodes(self, running: Running, others: int, now_s: float) -> int:
        """Rows to verify for it now, root included."""
        if len(running.side.tree) == 1 or running.request.max_tokens - running.side.num_output == 1:
            return 1
        return 1 + min(len(running.side.tree) - 1, running.foreseen or running.policy.budget(now_s, others))

    def coming(self, waiting: Sequence[Running]) -> tuple[float, int]:
        """When the growth that ``waiting`` wait for should be here, and how many rows they would verify then."""
        # Generous: going a moment too early costs a whole step, a moment of patience costs that moment.
        usual_s = max(self._exchange.usual_s(self._config.deadline_max_s), 1.5 * (self._exchange.mean_s or 0.0))
        due_s = max(min(running.committed_s + usual_s, running.wait_until_s) for running in waiting)
        return due_s, sum(1 + running.policy.nodes for running in waiting)

    def prefilled(self, running: Running, started_s: float) -> None:
        """A chunk of its prompt is computed."""
        running.first_step_s = running.first_step_s or started_s
        self._pool.send_features(running)

    def heard(self, running: Running, message: Growth | Drop, now_s: float) -> None:
        """Its drafter sent something. Raises RemoteProtocolError for what cannot be."""
        self._pool.received(running, message, now_s)
        if isinstance(message, Drop):
            self.drafter_lost(running, "draft_unavailable", now_s, moves=message.reason == "draining")
            if now_s >= running.retry_at_s:
                running.policy.drafter_ready(now_s)

    def drafter_lost(self, running: Running, reason: Reason, now_s: float, moves: bool = False) -> None:
        """Nobody follows it any more, through no wish of ours. ``moves``: another drafter takes over at its next
        commit, if one has room; else it decodes alone."""
        if running.link is not None:
            running.link = None
            running.side.lost()
        if moves and self._pool.has_room:
            self._metrics.moved()
            return
        self._note(running, running.policy.drafter_lost(now_s, reason))

    def switch(self, running: Running, allowed: bool, now_s: float) -> None:
        """Its client (or the router's policy) allows or forbids speculation from now on."""
        if allowed:
            self._note(running, running.policy.allow(now_s))
        else:
            self._note(running, running.policy.forbid(now_s))
            running.foresight = None  # it would miss tokens
            self._pool.detach(running)

    def commit(self, verified: Verified, step: Step) -> Committed:
        """Make the verdict part of the answer, and have its drafter told by the next flush."""
        started_s, step_s = step.started_s, step.seconds
        running, now_s = verified.running, started_s + step_s
        tokens, finish = self._cut(running, verified.verdict.tokens)
        running.first_step_s = running.first_step_s or started_s
        first = running.side.num_output == running.request.answered
        drafted, accepted = len(verified.tree) - 1, min(verified.verdict.num_accepted, len(tokens))
        waited_s = running.waited(started_s)
        # As it was when the round began.
        if not (running.first_round or running.foreseen) and running.policy.wants_drafts(now_s):
            self._pool.round_over(running, len(tokens), now_s - running.committed_s)
        self._observe(running, verified, accepted, waited_s, step, now_s)
        committed = Committed(verified, tokens, finish, accepted, waited_s, first, self._outcome(running, drafted),
                              None if running.foreseen else running.link)
        if finish:
            running.side.commit(tokens)
            return committed
        most = self._config.max_nodes if self._foresight else 0
        chain, scores = running.foresee(tokens, most, step.num_trees - 1)
        asks = running.link is not None and not chain and self._asks(running, now_s)
        running.told(len(tokens), asks)
        self._pool.commit(running, tokens, drafted, running.policy.budget(now_s, step.num_trees - 1) if asks else 0)
        self._ask(running, now_s)
        self._follow(running, now_s)
        running.side.foresee(chain, scores)
        return committed

    def tell(self, committed: Committed, step: Step) -> bool:
        """Let its client and the counters know. Returns whether the answer is over."""
        verified, tokens, accepted = committed.verified, committed.tokens, committed.accepted
        running, drafted = verified.running, len(verified.tree) - 1
        running.span.event("round", drafted=drafted, accepted=accepted, rows=step.rows, step_s=step.seconds,
                           wait_s=committed.waited_s, mode=running.policy.mode.value)
        if drafted:
            self._pool.judge(committed.link, drafted, verified.verdict.num_accepted)
        self._metrics.round(drafted, min(accepted, len(tokens) - 1), committed.outcome)
        plain_s = step.seconds * self._costs.cost(step.rows - step.nodes) / self._costs.cost(step.rows)
        piece = Piece(tokens, accepted, drafted, verified.logprobs[: len(tokens)], committed.finish, step.seconds,
                      committed.waited_s, running.policy.mode.value, lossy=verified.lossy, plain_s=plain_s)
        self._metrics.lenient(verified.lenient)
        if committed.first and running.first_step_s is not None:
            piece = piece._replace(cached_tokens=running.cached_tokens,
                                   queue_s=max(0.0, running.first_step_s - running.arrived_s))
        self._pieces.append((running.sink, piece))
        if running.history is not None:
            running.history.append(tokens)
        if committed.finish:
            self._metrics.request(committed.finish)
        return committed.finish != ""

    def deliver(self) -> None:
        """Hand the pieces of the step to their readers."""
        pieces, self._pieces = self._pieces, []
        if pieces:
            self._dispatch(pieces)

    def _follow(self, running: Running, now_s: float) -> None:
        # Shadow keeps its drafter informed; plain opens no traffic at all.
        wants = running.policy.wants_drafts(now_s)
        idle = self._load is not None and running.unasked > IDLE_TOKENS
        if running.link is not None and (idle or (running.policy.mode is Mode.PLAIN and not wants)):
            self._pool.detach(running)
        elif running.link is None and self._pool.has_room and now_s >= running.retry_at_s:
            if not self._asks(running, now_s):  # to ask again takes time from the step; elsewhere it is one look
                running.retry_at_s = now_s + LOOK_S if self._load is not None else 0.0
            elif self._pool.attach(running, now_s, running.policy.budget(now_s, 0)):
                running.first_round, running.unasked = True, 0
                self._ask(running, now_s)

    def _asks(self, running: Running, now_s: float) -> bool:
        if self._load is None:
            return running.policy.wants_drafts(now_s)
        # On the target's own cores, a tree that nobody waits for slows the step beside it.
        running.policy.budget(now_s, self._load.load - 1)
        return running.policy.asks(running.link is None)

    def _ask(self, running: Running, now_s: float) -> None:
        """Its drafter hears of its newest token now; from here on it may wait."""
        running.committed_s, running.heard_s, running.stood = now_s, None, False
        running.wait_until_s = now_s
        if running.link is None or running.foreseen:
            return
        running.wait_until_s += running.policy.deadline_s()
        running.enough = running.policy.enough()
        if len(running.side.tree) == 1 and not running.first_round:
            # What a drafter says to a target that holds nodes tells how it deepens, not how long an exchange takes.
            running.asked[running.side.base] = now_s
            if len(running.asked) > ASKED:
                del running.asked[min(running.asked)]

    def _cut(self, running: Running, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], Finish]:
        stops = running.request.sampling.stop_token_ids
        room = running.request.max_tokens - running.side.num_output
        for count, token in enumerate(tokens[:room], start=1):
            if token in stops:
                return tokens[:count], "stop"
        return (tokens[:room], "length") if len(tokens) >= room else (tokens, "")

    def _observe(self, running: Running, verified: Verified, accepted: int, waited_s: float, step: Step,
                 now_s: float) -> None:
        if running.foreseen:
            return
        exchange_s, running.exchange_s = running.exchange_s, None
        round_ = Round(drafted=len(verified.tree) - 1, accepted=accepted, depth=verified.depth,
                       verify_s=step.seconds, wait_s=waited_s, rows=step.rows,
                       late=running.stood and not running.side.heard, exchange_s=exchange_s, first=running.first_round)
        # The first token comes with the prompt: nobody waits for a drafter there.
        running.first_round = running.first_round and running.side.num_output == 0
        self._note(running, running.policy.observe(now_s, round_))

    def _outcome(self, running: Running, drafted: int) -> str:
        if drafted:
            return "foreseen" if running.foreseen else "used"
        if running.policy.mode is Mode.PLAIN:
            return "plain"
        return "draft_missing" if running.link is None or running.side.heard else "discarded_late"

    def _note(self, running: Running, transition: Transition | None) -> None:
        if transition is None:
            return
        self._metrics.mode.changed(transition.before.value, transition.after.value, transition.reason)
        self._log.info("mode", session=running.number, before=transition.before.value, after=transition.after.value,
                       reason=transition.reason, gain=round(transition.gain, 3))

    def _return_slots(self, running: Running) -> None:
        # The last commit may have been cut: what was computed beyond it is nobody's.
        known, computed = min(running.computed, running.side.base), running.computed
        self._runner.slots.free(running.slots[known:computed])
        if self._cache is None:
            self._runner.slots.free(running.slots[running.borrowed : known])
        else:
            # The cache takes the whole row: it knows its own part and frees what it has twice.
            self._cache.insert(running.side.tokens[:known], running.slots[:known])
            if running.match is not None:
                self._cache.unlock(running.match)
        running.match, running.computed, running.borrowed = None, 0, 0
