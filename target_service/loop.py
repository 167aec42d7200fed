"""TargetWorker: the engine thread of the target service. It owns every sequence from its request to its last token.

Rules:
1. One thread makes and changes sequences, slots, trees and policies; other threads only post events to it.
2. A turn: receive → schedule → forward → commit → send. Commits go to drafters before pieces go to clients and
   counters, because the next step waits for drafters.
3. If a drafter is silent, sends invalid items or dies, the turn goes on with smaller trees.
4. An error in one answer ends that answer. An error of a step ends the answers in it and frees their slots. If the
   device computes nothing any more after it, the thread ends, and the service with it.
5. All pieces of a step leave in one call (``Outbox.deliver``): while the next step computes, or when there is none.

It knows nothing about text, HTTP or how frames travel.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from slipstream.base.config import TargetSection
from slipstream.base.errors import DeviceFull, Draining, InvalidRequest, RanksLost, Unavailable, first_line
from slipstream.decision.beliefs import StepCosts, whole_context
from slipstream.engine.device import device_works, threads
from slipstream.engine.runner import ModelRunner
from slipstream.following.followed import LOOKED_UP, RoundRecord, Step, Verified
from slipstream.following.following import Following
from slipstream.observe.log import logger
from slipstream.observe.metrics import TargetMetrics
from slipstream.observe.spans import Spans
from slipstream.observe.trace import DEVICE, Trace
from slipstream.observe.vitals import BEAT_S, Vitals
from slipstream.protocol.requests import Finish, Piece, PromptScores, Request, State
from slipstream.protocol.tree import Thresholds
from target_service.sequence import KV, Rule, Sequence, Sink
from target_service.step import Limits, Outcome, Queues, Schedule, Scored, Shedding, run_step, should_hold

Dispatch = Callable[[list[tuple[Sink, Piece | Exception]]], None]


class Outbox:
    """The pieces of a step, until they are delivered to their readers."""

    __slots__ = ("_dispatch", "_metrics", "_pieces")

    def __init__(self, metrics: TargetMetrics, dispatch: Dispatch) -> None:
        self._metrics, self._dispatch = metrics, dispatch
        self._pieces: list[tuple[Sink, Piece | Exception]] = []

    def add_round(self, outcome: Outcome, verified: Verified, record: RoundRecord, step: Step, plain_s: float) -> None:
        """Queue the piece of a committed round. plain_s: seconds that a plain step would have taken."""
        sequence, tokens, finish = outcome.sequence, verified.tokens, verified.finish
        mode = sequence.followed.policy.mode
        if record.outcome == LOOKED_UP:  # it says nothing about whether drafters pay
            plain_s = 0.0
        if sequence.span is not None:
            sequence.span.event("round", drafted=record.drafted, accepted=record.accepted, rows=step.rows,
                                step_s=step.seconds, wait_s=record.waited_s, mode=mode.value, why=record.why)
        piece = Piece(tokens, record.accepted, record.drafted, outcome.logprobs[: len(tokens)], finish, step.seconds,
                      record.waited_s, mode.value, lossy=outcome.lossy, plain_s=plain_s, late=record.late)
        piece = self._with_cached_tokens(sequence, piece)
        if outcome.lenient:
            self._metrics.lenient(outcome.lenient)
        self._pieces.append((sequence.sink, piece))
        if sequence.history is not None:
            sequence.history.append(tokens)
        if finish:
            self._metrics.request(finish)

    def add_prompt(self, sequence: Sequence, scores: PromptScores | None, finish: Finish = "") -> None:
        """Queue scores of the prompt, before the first token, or the end of an answer without tokens."""
        state: State = sequence.followed.policy.mode.value
        piece = Piece((), prompt=scores, finish=finish, state=state)
        self._pieces.append((sequence.sink, self._with_cached_tokens(sequence, piece)))
        if finish:
            self._metrics.request(finish)

    def _with_cached_tokens(self, sequence: Sequence, piece: Piece) -> Piece:
        cached_tokens, sequence.cached_tokens = sequence.cached_tokens, 0
        return piece._replace(cached_tokens=cached_tokens) if cached_tokens else piece

    def add_error(self, sequence: Sequence, error: Exception, outcome: str = "failed") -> None:
        """Queue ``error``, which ends the answer."""
        self._metrics.request(outcome)
        self._pieces.append((sequence.sink, error))

    def deliver(self) -> None:
        """Send all queued pieces to their readers."""
        pieces, self._pieces = self._pieces, []
        if pieces:
            self._dispatch(pieces)


YIELD_S = 5e-5  # so that the thread that writes frames runs
MAX_EVENTS_S = 0.005  # most time of a turn for new events, so that running answers get their next step
Committed = list[tuple[Outcome, Verified, RoundRecord]]


@dataclass(frozen=True, slots=True)
class StepResult:
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
        self.following = Following(config, costs, metrics, self._kv.set_feature_spec, clock, self._trace)
        self._outbox = Outbox(metrics, dispatch)
        self._dispatch = dispatch
        self._thresholds = Thresholds(config.accept_threshold_single, config.accept_threshold_acc)
        metrics.lossy(self._thresholds.lossy)
        self.shedding = Shedding(limits or Limits.on(runner.model.device.type, config.max_sessions), clock, metrics)
        self._queues = Queues()
        self._costs = costs
        # Answers. The event loop writes the first, the engine thread the second.
        self._num_submitted = self._num_ended = 0
        self.vitals = Vitals("target")
        self._num_torch_threads = torch.get_num_threads()  # threads of one torch operation
        # Not named _thread: in compiled code that is a keyword of C.
        self._engine_thread = self.vitals.thread("target-worker", self._work)
        self._fatal_error: Exception | None = None  # what ended the thread
        self._update_gauges()

    # From any thread.

    def start(self) -> None:
        self._engine_thread.start()

    def stop(self) -> None:
        """End the thread after the turn it is in; running answers get no further piece."""
        self.following.inbox.stop()
        if self._engine_thread.is_alive():
            self._engine_thread.join()
        self.vitals.disarm_exit()
        self._trace.write()

    @property
    def alive(self) -> bool:
        """Whether the engine thread runs."""
        return self._fatal_error is None and self._engine_thread.is_alive()

    @property
    def num_open(self) -> int:
        """Submitted answers that have not ended, queued ones included; 0 after the thread has failed."""
        return self._num_submitted - self._num_ended if self._fatal_error is None else 0

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

    def add_request(self, number: int, request: Request, sink: Sink, rule: Rule | None = None) -> None:
        """Begin an answer; ``sink`` takes its pieces, or the error that ends it. ``rule``: which tokens it allows; only
        the engine thread may use it from now on."""
        self._num_submitted += 1
        self.post(lambda: self._begin(number, request, sink, rule))
        if self._fatal_error is not None:  # it failed after the caller looked at ``alive``
            self._dispatch([(sink, self._fatal_error)])

    def cancel(self, number: int) -> None:
        """End an answer that has no reader any more."""
        self.post(lambda: self._cancel(number))

    def set_speculation(self, number: int, allowed: bool) -> None:
        """Allow or forbid drafts for an answer from now on. Prompt lookup goes on in both cases."""
        def event() -> None:
            if (sequence := self._queues.find(number)) is not None:
                sequence.followed.allow(allowed, self._clock())

        self.post(event)

    def check_slots(self) -> Future[None]:
        """Check, between two turns, that every slot is free or owned once. The future raises AssertionError if not."""
        result: Future[None] = Future()

        def check() -> None:
            try:
                self._kv.check(self._queues.running)
                result.set_result(None)
            except AssertionError as error:
                result.set_exception(error)

        self.post(check)
        return result

    # On the engine thread.

    def _work(self) -> None:
        with threads(self._num_torch_threads):  # else it would use the process's newest setting, which may be a draft's
            self._run()

    def _run(self) -> None:
        wait_s: float | None = None
        try:
            while self.following.inbox.drain(BEAT_S if wait_s is None else wait_s, for_s=MAX_EVENTS_S):
                self._engine_thread.pulse.last_beat_s = self.vitals.clock()
                wait_s = self.turn()
            self._outbox.deliver()
        except Exception as error:  # a bug of ours, or a lost device: ``vitals`` end the process
            self._fatal_error = error
            self._fail_all(error)
            raise

    def _fail_all(self, error: Exception) -> None:
        """Send ``error`` to all answers, those in the inbox too: their readers would wait for ever."""
        while not self._try_drain():
            pass
        for sequence in self._queues.all_sequences():
            self._outbox.add_error(sequence, error)
        self._outbox.deliver()

    def _try_drain(self) -> bool:
        """Whether the inbox is empty now; an event that fails is dropped."""
        try:
            self.following.inbox.drain()
        except Exception:
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
        hold_s = self._hold_s(plan, waiting)
        if hold_s != 0.0:
            if hold_s is None:  # the last answer may have left without a step
                self._update_gauges()
            self._outbox.deliver()
            return hold_s
        if plan.admit:
            self._put_back_and_admit(plan)
            plan, _ = self._queues.schedule(self._clock(), self._kv, self.shedding)  # with their prompts
        self._put_back_and_admit(plan)
        self._queues.count_missed(plan)
        result = self._forward(plan)
        if result is not None:
            self._send(result, self._commit(result))
        self._update_gauges()
        return 0.0

    def _update_gauges(self) -> None:
        self._metrics.sessions(len(self._queues.running), len(self._queues.waiting))
        self._metrics.slots(self._runner.slots.num_slots, self._runner.slots.num_free, self._kv.num_cached)

    def _hold_s(self, plan: Schedule, waiting: list[Sequence]) -> float | None:
        """Seconds to hold the step for answers whose growth should arrive soon; 0: start it. Without work: seconds
        until the first of ``waiting`` goes on without growth; None: until an event comes."""
        now_s = self._clock()
        if plan.empty:
            if not waiting:
                return None
            return max(1e-4, min(sequence.followed.wait.deadline_s for sequence in waiting) - now_s)
        if not waiting or plan.prefill or plan.admit:
            return 0.0
        due_s, coming_rows = self.following.expected_growth([sequence.followed for sequence in waiting])
        left_s, ready_rows = due_s - now_s, sum(rows for _, rows in plan.verify)
        return left_s if left_s > 0.0 and should_hold(ready_rows, coming_rows, left_s, self._costs.cost) else 0.0

    def _put_back_and_admit(self, plan: Schedule) -> None:
        """Put answers back and admit new ones, as ``plan`` says."""
        for number in plan.put_back:
            sequence = self._queues.put_back(number)
            sequence.followed.pause()
            self._kv.release(sequence)
            self._metrics.preempted()
            self._log.debug("put back", session=number)
        begun = list[Sequence]()
        for number in plan.admit:
            sequence = self._queues.admit(number)
            self._kv.admit(sequence)
            if not sequence.stepped:
                sequence.cached_tokens = sequence.num_computed
                self._metrics.prompt(sequence.base, sequence.num_computed)
            if sequence.request.max_tokens:
                begun.append(sequence)
            self._end_if_prompt_only(sequence)
        if begun:  # together, so that each gets an equal part of the rows that may be sent at once
            self.following.begin([sequence.followed for sequence in begun], self._clock())
            self._kv.send_prompt_rows(begun)

    def _forward(self, plan: Schedule) -> StepResult | None:
        """Compute the step. None: there was none, or the device failed. Raises RanksLost, or Unavailable where the
        device is lost."""
        if not (plan.prefill or plan.verify):
            return None
        by_number = {sequence.number: sequence for sequence in self._queues.running}
        prefill = [(by_number[number], rows) for number, rows in plan.prefill]
        trees = [(by_number[number], by_number[number].tree_to_verify(rows)) for number, rows in plan.verify]
        nodes = sum(len(tree.tokens) - 1 for _, tree in trees)
        num_read = sum((len(tree.tokens) - 1) * whole_context(sequence.base) for sequence, tree in trees)
        rows = sum(rows for _, rows in prefill) + len(trees) + nodes
        self._kv.make_room(rows)
        began_s = self._clock()
        try:
            outcomes, scored = run_step(self._runner, prefill, trees, self._thresholds, self._outbox.deliver)
        except Exception as error:  # the step failed: its answers are lost, the service goes on
            if isinstance(error, DeviceFull) and self.shedding.step_failed(rows):
                return None  # nothing of it was committed: the next turn makes a smaller step
            if isinstance(error, RanksLost):  # no further step is possible
                raise
            if not device_works(self._runner.model.device):  # nor here
                raise Unavailable(f"the device is lost, the service has to start again: {first_line(error)}") from error
            # An answer whose prompt ends in this step is in both.
            lost = dict.fromkeys(sequence for sequence, _ in [*prefill, *trees])
            self._log.exception("step failed", rows=rows, answer_ids=[sequence.request.request_id for sequence in lost])
            for sequence in lost:
                self._fail(sequence, error)
            return None
        step = Step(began_s, self._clock() - began_s, rows, len(trees), nodes, num_read, bool(prefill))
        if self._trace.enabled:
            self._trace.span(DEVICE, "verify", began_s, step.ended_s, rows=rows)
        for sequence, _ in [*prefill, *trees]:
            sequence.stepped = True
        return StepResult(step, [sequence for sequence, _ in prefill], self._without_failed(outcomes), scored)

    def _without_failed(self, outcomes: list[Outcome]) -> list[Outcome]:
        """The outcomes with tokens. One without means that its grammar took too long: that answer fails."""
        for outcome in outcomes:
            if not outcome.verdict.tokens:
                self._fail(outcome.sequence, InvalidRequest("grammar", "takes more work to follow than it may"))
        return [outcome for outcome in outcomes if outcome.verdict.tokens]

    def _commit(self, result: StepResult) -> Committed:
        """Append the verdicts to the answers, and send the commits to their drafters."""
        self._kv.share_prompts(result.prefilled)
        rows = self._kv.newest_feature_rows([(outcome.sequence, len(outcome.verdict.tokens))
                                             for outcome in result.outcomes])
        batch, sequences, now_s = list[Verified](), list[Sequence](), result.step.ended_s
        for outcome, feature_rows in zip(result.outcomes, rows, strict=True):
            sequence, new_tokens = outcome.sequence, outcome.verdict.tokens
            tokens, finish = sequence.cut(new_tokens)
            sequences.append(sequence)
            batch.append(Verified(sequence.number, tokens, len(outcome.tree) - 1,
                                  min(len(new_tokens) - 1, len(tokens)), finish, feature_rows,
                                  sequence.forced(finish), outcome.ranks))
        self._kv.send_prompt_rows(result.prefilled)  # before the rows of tokens that follow the prompt
        records = self.following.committed(batch, result.step)
        self._kv.send_prompt_rows(sequence for sequence, verified in zip(sequences, batch, strict=True)
                                  if not verified.finish)
        if self.following.flush() and self.alive and all(
                sequence.followed.should_wait(now_s) for sequence in self._queues.running):
            # Python runs one thread at a time, and all answers wait anyway: let the thread that writes frames run.
            time.sleep(YIELD_S)
        return list(zip(result.outcomes, batch, records, strict=True))

    def _send(self, result: StepResult, committed: Committed) -> None:
        """Queue the pieces, count, and end finished answers."""
        step = result.step
        for sequence, scores in result.scored:
            if sequence.row is not None:  # else the answer has failed already
                self._outbox.add_prompt(sequence, scores)
        for sequence in result.prefilled:
            self._end_if_prompt_only(sequence)
        looked_up = sum(record.drafted for _, _, record in committed if record.outcome == LOOKED_UP)
        plain_s = step.plain_s(self._costs, looked_up)
        for outcome, verified, record in committed:
            self._outbox.add_round(outcome, verified, record, step, plain_s)
            if verified.finish:
                self._end(outcome.sequence)
        waited_s = max((record.waited_s for _, _, record in committed), default=0.0)
        self._metrics.step(step.rows, waited_s, step.seconds, self._clock() - step.ended_s)

    def _end_if_prompt_only(self, sequence: Sequence) -> None:
        if sequence.is_prompt_only_done:
            self._outbox.add_prompt(sequence, None, "length")
            self._end(sequence)

    def _begin(self, number: int, request: Request, sink: Sink, rule: Rule | None) -> None:
        try:
            sequence = Sequence.begin(number, request, sink, self.following, self._spans, rule)
        except Exception as error:  # it ends only this answer
            self._log.exception("request not begun", session=number, answer_id=request.request_id)
            self._metrics.request("failed")
            self._dispatch([(sink, error)])
            self._num_ended += 1
        else:
            self._queues.waiting.append(sequence)

    def _cancel(self, number: int) -> None:
        if (sequence := self._queues.find(number)) is not None:
            self._metrics.request("cancelled")
            self._end(sequence)

    def _fail(self, sequence: Sequence, error: Exception, outcome: str = "failed") -> None:
        self._outbox.add_error(sequence, error, outcome)
        self._end(sequence, failed=outcome == "failed")

    def _end(self, sequence: Sequence, failed: bool = False) -> None:
        """End an answer: close it at its drafter, and give its KV to the prefix cache."""
        self.following.close(sequence.followed)
        self._queues.remove(sequence)
        self._kv.release(sequence)  # an answer that waits has no KV
        if sequence.span is not None:
            sequence.span.end(tokens=sequence.followed.side.num_output, failed=int(failed))
        self._num_ended += 1

    def hand_back(self) -> None:
        """End every answer with Draining, so that another target goes on where it stopped."""
        error = handed_back_error()
        for sequence in self._queues.all_sequences():
            self._fail(sequence, error, "handed_back")
        self.following.flush()
        self._outbox.deliver()


def handed_back_error() -> Draining:
    """The error that ends an answer which another target shall continue."""
    return Draining("the target is shutting down; another one will go on")
