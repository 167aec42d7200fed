"""TargetWorker: the engine thread of the target service. It owns every sequence from its request to its last token.

Rules:
1. One thread makes and changes sequences, slots, trees and policies; other threads only post events to it.
2. A turn: receive → schedule → forward → commit → send. Commits go to drafters before pieces go to clients and
   counters, because the next step waits for drafters.
3. If a drafter is silent, sends invalid items or dies, the turn goes on with smaller trees.
4. An error in one answer ends that answer. An error of a step ends the answers in it and frees their slots. If the
   device computes nothing any more after it, the thread ends, and the service with it.
5. All pieces of a step leave in one call (``Telling.deliver``): while the next step computes, or when there is none.

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
from slipstream.engine.runner import ModelRunner, device_works, threads
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
        """Queue the piece of a committed round. plain_s: seconds that a plain step would have taken."""
        one, tokens, finish = outcome.sequence, verified.tokens, verified.finish
        mode = one.followed.policy.mode
        if record.outcome == LOOKED_UP:  # it tells nothing about whether drafters pay
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
        """Queue scores of the prompt, before the first token, or the end of an answer without tokens."""
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
        """Queue ``error``, which ends the answer."""
        self._metrics.request(outcome)
        self._pieces.append((one.sink, error))

    def deliver(self) -> None:
        """Send all queued pieces to their readers."""
        pieces, self._pieces = self._pieces, []
        if pieces:
            self._dispatch(pieces)


HAND_OVER_S = 5e-5
SLICE_S = 0.005  # most time of a turn for new events, so that running answers get their next step
Committed = list[tuple[Outcome, Verified, RoundRecord]]


@dataclass(frozen=True, slots=True)
class Done:
    """The results of a step."""

    step: Step
    prefilled: list[Sequence]
    outcomes: list[Outcome]
    scored: Scored


class TargetWorker:
    """Turns requests into answers. ``following`` receives the events of links to drafts."""

    def __init__(self, runner: ModelRunner, config: TargetSection, costs: StepCosts, metrics: TargetMetrics,
                 dispatch: Dispatch, clock: Callable[[], float] = time.monotonic,
                 trace: Trace | None = None, spans: Spans | None = None, limits: Limits | None = None,
                 prefix_cache: bool = True) -> None:
        """dispatch: sends pieces to their readers. limits: None for the device's own."""
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
        self._num_asked = self._num_over = 0  # answers; the event loop writes the first, the engine thread the other
        self.vitals = Vitals("target")
        self._inside = torch.get_num_threads()  # threads of one torch operation
        # Not named _thread: in compiled code that is a keyword of C.
        self._engine = self.vitals.thread("target-worker", self._work)
        self._failed: Exception | None = None  # what ended the thread
        self._show()

    # From any thread.

    def start(self) -> None:
        self._engine.start()

    def stop(self) -> None:
        """End the thread after the turn it is in; running answers get no further piece."""
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
        """Answers that were asked for and are not over, queued ones included; 0 after the thread has failed."""
        return self._num_asked - self._num_over if self._failed is None else 0

    @property
    def num_running(self) -> int:
        return len(self._queues.running)

    @property
    def num_waiting(self) -> int:
        return max(0, self.num_open - self.num_running)

    @property
    def num_free_slots(self) -> int:
        """KV slots that a new answer could get."""
        return self._kv.num_free

    def post(self, event: Callable[[], None]) -> None:
        """Let the engine thread do ``event`` before its next step."""
        self.following.inbox.post(event)

    def ask(self, number: int, request: Request, sink: Sink, rule: Rule | None = None) -> None:
        """Begin an answer; ``sink`` takes its pieces, or the error that ends it. ``rule``: which tokens it allows; only
        the engine thread may use it from now on."""
        self._num_asked += 1
        self.post(lambda: self._arrive(number, request, sink, rule))
        if self._failed is not None:  # it failed after the caller looked at ``alive``
            self._dispatch([(sink, self._failed)])

    def cancel(self, number: int) -> None:
        """End an answer that has no reader any more."""
        self.post(lambda: self._drop(number))

    def switch(self, number: int, allowed: bool) -> None:
        """Allow or forbid drafts for an answer from now on. Prompt lookup goes on in both cases."""
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
        with threads(self._inside):  # else it would use the process's newest setting, which may be a draft's
            self._run()

    def _run(self) -> None:
        wait_s: float | None = None
        try:
            while self.following.inbox.drain(BEAT_S if wait_s is None else wait_s, for_s=SLICE_S):
                self._engine.pulse.beaten_s = self.vitals.clock()
                wait_s = self.turn()
            self._telling.deliver()
        except Exception as error:  # a bug of ours, or a lost device: ``vitals`` end the process
            self._failed = error
            self._tell_all(error)
            raise

    def _tell_all(self, error: Exception) -> None:
        """Send ``error`` to all answers, those in the inbox too: otherwise their readers would wait for ever."""
        while not self._emptied():
            pass
        for one in self._queues.everyone():
            self._telling.failed(one, error)
        self._telling.deliver()

    def _emptied(self) -> bool:
        try:
            self.following.inbox.drain()
        except Exception:  # drop the event that failed, go on with the next
            return False
        return True

    def poll(self) -> float | None:
        """Process the inbox, then do a turn, for a caller that runs the worker without its thread."""
        self.following.inbox.drain()
        return self.turn()

    def turn(self) -> float | None:
        """One turn, after events were received. Returns for how many seconds there is nothing to do: 0.0: go on; None:
        until an event comes."""
        self.following.flush()
        plan, waiting = self._queues.schedule(self._clock(), self._kv, self.shedding)
        held_s = self._held_s(plan, waiting)
        if held_s != 0.0:
            if held_s is None:  # the last answer may have left without a step
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
        """Seconds to hold the step for answers whose growth should arrive soon; 0: go. Without work: seconds until the
        first of ``waiting`` goes on without growth; None: until an event comes."""
        now_s = self._clock()
        if plan.empty:
            return max(1e-4, min(one.followed.waiting.until_s for one in waiting) - now_s) if waiting else None
        if not waiting or plan.prefill or plan.admit or plan.put_back:
            return 0.0
        due_s, coming = self.following.coming([one.followed for one in waiting])
        missing_s, ready = due_s - now_s, sum(rows for _, rows in plan.verify)
        return missing_s if missing_s > 0.0 and holds(ready, coming, missing_s, self._costs.cost) else 0.0

    def _admit(self, plan: Schedule) -> None:
        """Put answers back and admit new ones, as ``plan`` says."""
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
        """Compute the step. None: there was none, or the device failed. Raises RanksLost, or Unavailable where the
        device is lost."""
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
        except Exception as error:  # the step failed: its answers are lost, the service goes on
            if isinstance(error, DeviceFull) and self.shedding.failed(rows):
                return None  # nothing of it was committed: the next turn makes a smaller step
            if isinstance(error, RanksLost):  # no further step is possible
                raise
            if not device_works(self._runner.model.device):  # nor here
                raise Unavailable(f"the device is lost, the service has to start again: {in_a_line(error)}") from error
            lost = dict.fromkeys(one for one, _ in [*prefill, *trees])  # an answer whose prompt ends is in both
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
        """The outcomes with tokens. An empty one means that its grammar took too long: that answer fails."""
        for outcome in outcomes:
            if not outcome.verdict.tokens:
                self._fail(outcome.sequence, InvalidRequest("grammar", "takes more work to follow than it may"))
        return [outcome for outcome in outcomes if outcome.verdict.tokens]

    def _commit(self, done: Done) -> Committed:
        """Append the verdicts to the answers, and send the commits to their drafters."""
        self._kv.share(done.prefilled)
        rows = self._kv.newest_rows([(outcome.sequence, len(outcome.verdict.tokens)) for outcome in done.outcomes])
        batch, sequences, now_s = list[Verified](), list[Sequence](), done.step.ended_s
        for outcome, newest in zip(done.outcomes, rows, strict=True):
            one, new = outcome.sequence, outcome.verdict.tokens
            tokens, finish = one.cut(new)
            sequences.append(one)
            batch.append(Verified(one.number, tokens, len(outcome.tree) - 1, min(len(new) - 1, len(tokens)),
                                  outcome.depth, finish, newest, one.forced(finish)))
        self._kv.give_prompt_rows(done.prefilled)  # before the rows of tokens that follow the prompt
        records = self.following.committed(batch, done.step)
        self._kv.give_prompt_rows(sequences)
        if self.following.flush() and self.alive and all(
                one.followed.waits(now_s) for one in self._queues.running):
            # Python runs one thread at a time: all answers wait anyway, so let the thread that writes frames run.
            time.sleep(HAND_OVER_S)
        return list(zip(done.outcomes, batch, records, strict=True))

    def _send(self, done: Done, committed: Committed) -> None:
        """Queue the pieces, count, and end finished answers."""
        step = done.step
        for one, scores in done.scored:
            if one.row is not None:  # else the answer has failed already
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
        except Exception as error:  # it ends only this answer
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
        """End an answer: close it at its drafter, and give its KV to the prefix cache."""
        self.following.close(one.followed)
        self._queues.remove(one)
        self._kv.release(one)  # an answer that waits has no KV
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
    """The error that ends an answer which another target shall continue."""
    return Draining("the target is shutting down; another one will go on")
