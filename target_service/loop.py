"""TargetWorker: the engine thread of the target service. It owns every sequence from its request to its last token.

Rules:
1. One thread creates and changes sequences, slots, trees and policies; other threads only post to its inbox.
2. A turn: receive → schedule → forward → commit → send. Drafters hear of a commit before clients and counters do, as
   they are waited for.
3. Whatever a drafter does (nothing, nonsense, death), the turn goes on with smaller trees.
4. An error in one answer ends that answer. An error of a step ends the answers that were in it, and frees their slots.
   An error after which the device no longer works ends the thread, and with it the service.
5. Pieces are delivered together (``Telling.deliver``): while the next step computes, or when there is none.

It knows nothing about text, HTTP or how frames travel.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from slipstream.base.config import TargetSection
from slipstream.base.errors import DeviceFull, Draining, InvalidRequest, RanksLost, Unavailable, in_a_line
from slipstream.decision.beliefs import StepCosts
from slipstream.engine.runner import ModelRunner, computes, threads
from slipstream.following.followed import LOOKED_UP, RoundRecord, Step, Verified
from slipstream.following.following import Following
from slipstream.observe.log import logger
from slipstream.observe.metrics import TargetMetrics
from slipstream.observe.spans import Spans
from slipstream.observe.trace import Trace
from slipstream.observe.vitals import BEAT_S, Vitals
from slipstream.protocol.requests import Finish, Piece, PromptScores, Request, State
from slipstream.protocol.tree import Thresholds
from target_service.sequence import KV, Rule, Sequence, Sink
from target_service.step import Limits, Outcome, Queues, Schedule, Scored, Shedding, holds, run_step

Dispatch = Callable[[list[tuple[Sink, Piece | Exception]]], None]


class Telling:
    __slots__ = ("_dispatch", "_metrics", "_pieces")

    def __init__(self, metrics: TargetMetrics, dispatch: Dispatch) -> None:
        self._metrics, self._dispatch = metrics, dispatch
        self._pieces: list[tuple[Sink, Piece | Exception]] = []

    def round(self, outcome: Outcome, verified: Verified, record: RoundRecord, step: Step, plain_s: float) -> None:
        """A round of one sequence is committed."""
        one, tokens, finish = outcome.sequence, verified.tokens, verified.finish
        mode = one.followed.policy.mode
        if record.outcome == LOOKED_UP:  # which says nothing of drafters
            plain_s = 0.0
        if one.span is not None:
            one.span.event("round", drafted=record.drafted, accepted=record.accepted, rows=step.rows,
                           step_s=step.seconds, wait_s=record.waited_s, mode=mode.value, why=record.why)
        piece = Piece(tokens, record.accepted, record.drafted, outcome.logprobs[: len(tokens)], finish, step.seconds,
                      record.waited_s, mode.value, lossy=outcome.lossy, plain_s=plain_s, late=record.late)
        piece = self._first(one, piece)
        if outcome.lenient:
            self._metrics.lenient(outcome.lenient)
        self._pieces.append((one.sink, piece))
        if one.history is not None:
            one.history.append(tokens)
        if finish:
            self._metrics.request(finish)

    def prompt(self, one: Sequence, scores: PromptScores | None, finish: Finish = "") -> None:
        """Scores of its prompt, before its first token; or the end of an answer that wanted only these."""
        state: State = one.followed.policy.mode.value
        self._pieces.append((one.sink, self._first(one, Piece((), prompt=scores, finish=finish, state=state))))
        if finish:
            self._metrics.request(finish)

    def _first(self, one: Sequence, piece: Piece) -> Piece:
        if one.told:
            return piece
        one.told = True
        return piece._replace(cached_tokens=one.cached_tokens)

    def failed(self, one: Sequence, error: Exception, outcome: str = "failed") -> None:
        """It ends with ``error``."""
        self._metrics.request(outcome)
        self._pieces.append((one.sink, error))

    def deliver(self) -> None:
        """Hand all that was told to its readers."""
        pieces, self._pieces = self._pieces, []
        if pieces:
            self._dispatch(pieces)


HAND_OVER_S = 5e-5
SLICE_S = 0.005  # of a turn for what came, where so much comes: the others' next step is due
Committed = list[tuple[Outcome, Verified, RoundRecord]]


@dataclass(frozen=True, slots=True)
class Done:
    """A step that is computed."""

    step: Step
    prefilled: list[Sequence]
    outcomes: list[Outcome]
    scored: Scored


class TargetWorker:
    """Turns requests into answers. ``following`` is what hears of drafts."""

    def __init__(self, runner: ModelRunner, config: TargetSection, costs: StepCosts, metrics: TargetMetrics,
                 dispatch: Dispatch, clock: Callable[[], float] = time.monotonic,
                 trace: Trace | None = None, spans: Spans | None = None, limits: Limits | None = None,
                 prefix_cache: bool = True) -> None:
        """limits: None for those of the device."""
        self._runner = runner
        self._kv = KV(runner, prefix_cache)
        self._metrics = metrics
        self._clock = clock
        self._trace = trace or Trace("", "target")
        self._spans = spans
        self._log = logger("target")
        self.following = Following(config, costs, metrics, self._kv.keep_rows, clock, self._trace)
        self._telling = Telling(metrics, dispatch)
        self._dispatch = dispatch
        self._thresholds = Thresholds(config.accept_threshold_single, config.accept_threshold_acc)
        metrics.lossy(self._thresholds.lossy)
        self.shedding = Shedding(limits or Limits.on(runner.model.device.type, config.max_sessions), clock, metrics)
        self._queues = Queues()
        self._costs = costs
        self._num_asked = self._num_over = 0  # answers; the first is the event loop's, the other the engine's
        self.vitals = Vitals("target")
        self._inside = torch.get_num_threads()  # of an operation
        # Not _thread: compiled, that is a word of C.
        self._engine = self.vitals.thread("target-worker", self._work)
        self._failed: Exception | None = None  # what ended the thread
        self._show()

    # From any thread.

    def start(self) -> None:
        self._engine.start()

    def stop(self) -> None:
        """End the thread after the turn it is in; what still runs is left where it is."""
        self.following.inbox.stop()
        if self._engine.is_alive():
            self._engine.join()
        self.vitals.end()
        self._trace.write()

    @property
    def alive(self) -> bool:
        """Whether the engine thread runs."""
        return self._failed is None and self._engine.is_alive()

    @property
    def num_open(self) -> int:
        """Answers that were asked for and are not over, waiting or running; 0 after the thread has ended."""
        return self._num_asked - self._num_over if self._failed is None else 0

    @property
    def num_running(self) -> int:
        return len(self._queues.running)

    @property
    def num_waiting(self) -> int:
        return max(0, self.num_open - self.num_running)

    @property
    def num_free_slots(self) -> int:
        """Slots that a new answer could have."""
        return self._kv.num_free

    def post(self, event: Callable[[], None]) -> None:
        """Let the engine thread do ``event`` before its next step."""
        self.following.inbox.post(event)

    def ask(self, number: int, request: Request, sink: Sink, rule: Rule | None = None) -> None:
        """An answer is wanted; ``sink`` takes its pieces, or the error that ends it. ``rule``: what it is bound to; it
        is the engine thread's from now on."""
        self._num_asked += 1
        self.post(lambda: self._arrive(number, request, sink, rule))
        if self._failed is not None:  # it failed since somebody looked
            self._dispatch([(sink, self._failed)])

    def cancel(self, number: int) -> None:
        """Nobody wants this answer any more."""
        self.post(lambda: self._drop(number))

    def switch(self, number: int, allowed: bool) -> None:
        """Whoever asked for the answer allows or forbids drafts from now on. Its text is looked up all the same."""
        def event() -> None:
            if (one := self._queues.find(number)) is not None:
                one.followed.allow(allowed, self._clock())

        self.post(event)

    def check(self) -> Future[None]:
        """Prove, between two turns, that every slot is free or owned once. The future raises AssertionError if not."""
        result: Future[None] = Future()

        def prove() -> None:
            try:
                self._kv.prove(self._queues.running)
                result.set_result(None)
            except AssertionError as error:
                result.set_exception(error)

        self.post(prove)
        return result

    # On the engine thread.

    def _work(self) -> None:
        with threads(self._inside):  # else a thread has those that anybody set last, be it a draft beside it
            self._run()

    def _run(self) -> None:
        wait_s: float | None = None
        try:
            while self.following.inbox.drain(BEAT_S if wait_s is None else wait_s, for_s=SLICE_S):
                self._engine.pulse.beaten_s = self.vitals.clock()
                wait_s = self.turn()
            self._telling.deliver()
        except Exception as error:  # a bug of ours: the process ends by its vitals
            self._failed = error
            self._tell_all(error)
            raise

    def _tell_all(self, error: Exception) -> None:
        """Nobody may wait for ever on a thread that is gone: who asked and is still in the inbox is told, too."""
        while not self._emptied():
            pass
        for one in self._queues.everyone():
            self._telling.failed(one, error)
        self._telling.deliver()

    def _emptied(self) -> bool:
        try:
            self.following.inbox.drain()
        except Exception:  # what failed is done with
            return False
        return True

    def poll(self) -> float | None:
        """Do what waits in the inbox, then a turn, for a caller that has the thread's place."""
        self.following.inbox.drain()
        return self.turn()

    def turn(self) -> float | None:
        """One turn after the inbox was handled. Returns how many seconds there is nothing to do: 0.0: go on; None:
        until an event comes."""
        self.following.flush()
        plan, waiting = self._queues.schedule(self._clock(), self._kv, self.shedding)
        held_s = self._held_s(plan, waiting)
        if held_s != 0.0:
            if held_s is None:  # who left last did so without a step
                self._show()
            self._telling.deliver()
            return held_s
        if plan.admit:
            self._admit(plan)
            plan, _ = self._queues.schedule(self._clock(), self._kv, self.shedding)  # with their prompts
        self._admit(plan)
        done = self._forward(plan)
        if done is not None:
            self._send(done, self._commit(done))
        self._show()
        return 0.0

    def _show(self) -> None:
        self._metrics.sessions(len(self._queues.running), len(self._queues.waiting))
        self._metrics.slots(self._runner.slots.num_slots, self._runner.slots.num_free, self._kv.num_cached)

    def _held_s(self, plan: Schedule, waiting: list[Sequence]) -> float | None:
        """Seconds to hold the step for those whose growth should be here soon; 0: go. With nothing to do: until the
        first of them gives up waiting; None: until something comes."""
        now_s = self._clock()
        if plan.empty:
            return max(1e-4, min(one.followed.waiting.until_s for one in waiting) - now_s) if waiting else None
        if not waiting or plan.prefill or plan.admit or plan.put_back:
            return 0.0
        due_s, coming = self.following.coming([one.followed for one in waiting])
        missing_s, ready = due_s - now_s, sum(rows for _, rows in plan.verify)
        return missing_s if missing_s > 0.0 and holds(ready, coming, missing_s, self._costs.cost) else 0.0

    def _admit(self, plan: Schedule) -> None:
        """Who is put back, and who is computed from now on."""
        for number in plan.put_back:
            one = self._queues.put_back(number)
            one.followed.pause()
            self._kv.release(one)
            self._metrics.preempted()
            self._log.debug("put back", session=number)
        for number in plan.admit:
            one = self._queues.admit(number)
            self._kv.admit(one)
            if not one.stepped:
                one.cached_tokens = one.computed
                self._metrics.prompt(one.base, one.computed)
            if one.request.max_tokens:
                self.following.begin([one.followed], self._clock())
                self._kv.give_prompt_rows([one])
            self._end_if_over(one)

    def _forward(self, plan: Schedule) -> Done | None:
        """Compute the step. None: there was none, or the device failed."""
        if not (plan.prefill or plan.verify):
            return None
        by_number = {one.number: one for one in self._queues.running}
        prefill = [(by_number[number], rows) for number, rows in plan.prefill]
        trees = [(by_number[number], by_number[number].take(rows)) for number, rows in plan.verify]
        nodes = sum(len(tree.tokens) - 1 for _, tree in trees)
        rows = sum(rows for _, rows in prefill) + len(trees) + nodes
        self._kv.make_room(rows)
        began_s = self._clock()
        try:
            outcomes, scored = run_step(self._runner, prefill, trees, self._thresholds, self._telling.deliver)
        except Exception as error:  # the device failed: whoever was in the step is lost, the service is not
            if isinstance(error, DeviceFull) and self.shedding.failed(rows):
                return None  # nobody was in it yet: the next turn asks for less
            if isinstance(error, RanksLost):  # there will be no other step
                raise
            if not computes(self._runner.model.device):  # nor here
                raise Unavailable(f"the device is lost, the service has to start again: {in_a_line(error)}") from error
            lost = dict.fromkeys(one for one, _ in [*prefill, *trees])  # a prompt that ends is in both
            self._log.exception("step failed", rows=rows, answer_ids=[one.request.request_id for one in lost])
            for one in lost:
                self._fail(one, error)
            return None
        step = Step(began_s, self._clock() - began_s, rows, len(trees), nodes, bool(prefill))
        if self._trace.keeps:
            self._trace.span("device", "verify", began_s, step.ended_s, rows=rows)
        for one, _ in [*prefill, *trees]:
            one.stepped = True
        return Done(step, [one for one, _ in prefill], self._without_broken(outcomes), scored)

    def _without_broken(self, outcomes: list[Outcome]) -> list[Outcome]:
        """Those whose grammar says what may follow; the others' answers end."""
        for outcome in outcomes:
            if not outcome.verdict.tokens:
                self._fail(outcome.sequence, InvalidRequest("grammar", "takes more work to follow than it may"))
        return [outcome for outcome in outcomes if outcome.verdict.tokens]

    def _commit(self, done: Done) -> Committed:
        """Make the verdicts part of the answers, and have their drafters told."""
        self._kv.share(done.prefilled)
        rows = self._kv.newest_rows([(outcome.sequence, len(outcome.verdict.tokens)) for outcome in done.outcomes])
        batch, sequences, now_s = list[Verified](), list[Sequence](), done.step.ended_s
        for outcome, newest in zip(done.outcomes, rows, strict=True):
            one, new = outcome.sequence, outcome.verdict.tokens
            tokens, finish = one.cut(new)
            sequences.append(one)
            batch.append(Verified(one.number, tokens, len(outcome.tree) - 1, min(len(new) - 1, len(tokens)),
                                  outcome.depth, finish, newest, one.forced(finish)))
        self._kv.give_prompt_rows(done.prefilled)  # before what is committed behind them
        records = self.following.committed(batch, done.step)
        self._kv.give_prompt_rows(sequences)
        if self.following.flush() and self.alive and all(
                one.followed.waits(now_s) for one in self._queues.running):
            # Frames are written by another thread, and Python runs one at a time: who has to wait lets it go on.
            time.sleep(HAND_OVER_S)
        return list(zip(done.outcomes, batch, records, strict=True))

    def _send(self, done: Done, committed: Committed) -> None:
        """Clients and counters hear of it, and who is done goes."""
        step = done.step
        for one, scores in done.scored:
            if one.row is not None:  # else it has been told that it failed
                self._telling.prompt(one, scores)
        for one in done.prefilled:
            self._end_if_over(one)
        looked_up = sum(record.drafted for _, _, record in committed if record.outcome == LOOKED_UP)
        plain_s = step.plain_s(self._costs, looked_up)
        for outcome, verified, record in committed:
            self._telling.round(outcome, verified, record, step, plain_s)
            if verified.finish:
                self._end(outcome.sequence)
        waited_s = max((record.waited_s for _, _, record in committed), default=0.0)
        self._metrics.step(step.rows, waited_s, step.seconds, self._clock() - step.ended_s)

    def _end_if_over(self, one: Sequence) -> None:
        if one.over:
            self._telling.prompt(one, None, "length")
            self._end(one)

    def _arrive(self, number: int, request: Request, sink: Sink, rule: Rule | None) -> None:
        try:
            one = Sequence.begin(number, request, sink, self.following, self._spans, rule)
        except Exception as error:  # its reader hears of it, and nobody else
            self._log.exception("request not begun", session=number, answer_id=request.request_id)
            self._metrics.request("failed")
            self._dispatch([(sink, error)])
            self._num_over += 1
        else:
            self._queues.waiting.append(one)

    def _drop(self, number: int) -> None:
        if (one := self._queues.find(number)) is not None:
            self._metrics.request("cancelled")
            self._end(one)

    def _fail(self, one: Sequence, error: Exception, outcome: str = "failed") -> None:
        self._telling.failed(one, error, outcome)
        self._end(one, failed=outcome == "failed")

    def _end(self, one: Sequence, failed: bool = False) -> None:
        """It is over: its drafter is told, and what the prefix cache has not of its KV goes there."""
        self.following.close(one.followed)
        self._queues.remove(one)
        self._kv.release(one)  # nothing, of one that waits
        if one.span is not None:
            one.span.end(tokens=one.followed.side.num_output, failed=int(failed))
        self._num_over += 1

    def hand_back(self) -> None:
        """End every answer with Draining, so that another target goes on where it stopped."""
        error = handed_back()
        for one in self._queues.everyone():
            self._fail(one, error, "handed_back")
        self.following.flush()
        self._telling.deliver()


def handed_back() -> Draining:
    """The error that ends an answer here, so that another target goes on with it."""
    return Draining("the target is shutting down; another one will go on")
