"""TargetWorker: the engine thread of the target service. It owns every answer from its request to its last token.

Rules:
1. One thread mutates answers, slots, trees and policies; the outside only enqueues.
2. A turn: take all that waits in the inbox, decide (``scheduler``), make room, run one step, commit its verdicts.
3. Whatever a drafter does (nothing, nonsense, death), the turn goes on with smaller trees.
4. An error in one answer ends that answer. An error of a step ends the answers that were in it, with their slots freed.

It knows nothing about text, HTTP or how frames travel.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from slipstream.base.config import TargetSection
from slipstream.base.errors import DeviceFull, Draining, RanksLost, RemoteProtocolError
from slipstream.decision.policy import StepCosts
from slipstream.engine.prefix import RadixCache
from slipstream.engine.runner import ModelRunner
from slipstream.observe.log import logger
from slipstream.observe.metrics import TargetMetrics
from slipstream.observe.spans import NoSpans, Spans
from slipstream.observe.trace import Trace, growth_key
from slipstream.protocol.lenient import Thresholds
from slipstream.protocol.messages import DraftHello, Growth, TargetBound
from slipstream.wire.link import Link
from target_service.answers import Answers, Dispatch
from target_service.links import DraftPool
from target_service.plan import Plan
from target_service.running import Running
from target_service.scheduler import Decision, Limits
from target_service.shedding import Shedding
from target_service.step import Step, run_step
from target_service.tracing import trace_step

Event = Callable[[], None]


class TargetWorker:
    """Turns requests into answers. Implements ``wire.link.LinkEvents``; requests come through ``Answers``."""

    def __init__(self, runner: ModelRunner, config: TargetSection, costs: StepCosts, metrics: TargetMetrics,
                 dispatch: Dispatch, clock: Callable[[], float] = time.monotonic,
                 trace: Trace | None = None, spans: Spans | None = None, limits: Limits | None = None) -> None:
        """limits: None for those of the device."""
        self._runner = runner
        self._config = config
        self._metrics = metrics
        self._clock = clock
        self._trace = trace or Trace("", "target")
        self._log = logger("target")
        self._inbox: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._cache = RadixCache(runner.slots) if config.prefix_cache else None
        self.pool = DraftPool(runner, metrics, config)
        self.answers = Answers(runner, self._cache, self.pool, config.policy, costs, metrics, dispatch,
                               spans or NoSpans(), config.prompt_lookup, config.shared_cores)
        self._thresholds = Thresholds(config.accept_threshold_single, config.accept_threshold_acc)
        metrics.lossy(self._thresholds.lossy)
        self.shedding = Shedding(limits or Limits.on(runner.model.device.type, config.max_sessions), clock, metrics)
        self._plan = Plan(self.answers, costs, self.shedding)
        self._waiting: deque[Running] = deque()
        self._running: list[Running] = []  # in order of arrival
        self._costs = costs
        self._dispatch = dispatch
        self._thread = threading.Thread(target=self._run, name="target-worker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the turn it is in; what still runs is left where it is."""
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join()
        self._trace.write()

    @property
    def alive(self) -> bool:
        """Whether the engine thread runs."""
        return self._thread.is_alive()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_free_slots(self) -> int:
        """Slots that a new answer could have: free ones and those that the prefix cache would give up."""
        return self._runner.slots.num_free + (self._cache.num_evictable if self._cache else 0)

    def post(self, event: Event) -> None:
        """Let the engine thread do ``event`` before its next step. From any thread."""
        self._inbox.put(event)

    def enqueue(self, running: Running) -> None:
        """On the engine thread: a request has come."""
        self._waiting.append(running)

    def cancel(self, running: Running) -> None:
        """On the engine thread: nobody wants this answer any more."""
        if running in self._waiting:
            self._waiting.remove(running)
        elif running in self._running:
            self._running.remove(running)
            self.answers.release(running)

    def switch(self, running: Running, allowed: bool) -> None:
        """On the engine thread: whoever asked for the answer allows or forbids speculation from now on."""
        self.answers.switch(running, allowed, self._clock())

    def hand_back(self) -> None:
        """On the engine thread: end every answer with Draining, so that another target goes on where it stopped."""
        error = Draining("the target is shutting down; another one will go on")
        self.answers.deliver()
        for running in self._running:
            self.answers.fail(running, error, "handed_back")
        self._dispatch([(running.sink, error) for running in self._waiting])
        self._running.clear()
        self._waiting.clear()
        self.pool.flush()
        self.answers.deliver()

    def check(self) -> Future[None]:
        """Prove, between two turns, that every slot is free or owned once. The future raises AssertionError if not."""
        result: Future[None] = Future()

        def prove() -> None:
            try:
                owned = [running.slots[running.borrowed : running.computed] for running in self._running]
                self._runner.slots.check([*owned, *(self._cache.owned() if self._cache else ())])
                result.set_result(None)
            except AssertionError as error:
                result.set_exception(error)

        self.post(prove)
        return result

    def link_up(self, link: Link, hello: DraftHello) -> None:
        def event() -> None:
            self.pool.link_up(link, hello)
            for running in self._everyone():
                running.policy.drafter_ready(self._clock())

        self.post(event)

    def link_down(self, link: Link, reason: str) -> None:
        def event() -> None:
            self.pool.link_down(link, reason)
            for running in self._everyone():
                if running.link is link:
                    self.answers.drafter_lost(running, "draft_unavailable", self._clock(), moves=True)

        self.post(event)

    def link_leaving(self, link: Link, leaving: bool) -> None:
        """Discovery no longer lists this draft (or does so again): no new session goes there, open ones go on."""
        self.post(lambda: self.pool.set_leaving(link, leaving))

    def received(self, link: Link, items: Sequence[TargetBound],
                 faults: Sequence[tuple[int, RemoteProtocolError]]) -> None:
        came_s = self._clock()  # now: a step may be on the device until this is looked at
        self.post(lambda: self._take(link, items, faults, came_s))

    def _take(self, link: Link, items: Sequence[TargetBound], faults: Sequence[tuple[int, RemoteProtocolError]],
              came_s: float) -> None:
        followed = {running.number: running for running in self._running if running.link is link}
        for session, error in faults:
            self._refuse(followed.get(session), error)
        for item in items:
            running = followed.get(item.session)
            if running is None or running.link is not link:  # an item before it in the frame may have parted them
                self._metrics.stale_growth()
                continue
            if isinstance(item, Growth):
                self._trace.came("device", "growth", growth_key(item), came_s)
            try:
                self.answers.heard(running, item, came_s)
            except RemoteProtocolError as error:
                self._refuse(running, error)

    def _refuse(self, running: Running | None, error: RemoteProtocolError) -> None:
        self._metrics.invalid_growth()
        if running is not None:
            self._log.warning("invalid growth", session=running.number, field=error.field)
            self.pool.detach(running)
            self.answers.drafter_lost(running, "incompatible", self._clock())

    def _everyone(self) -> list[Running]:
        return [*self._running, *self._waiting]

    def _run(self) -> None:
        wait_s: float | None = None
        try:
            while self._drain(wait_s):
                wait_s = self.turn()
            self.answers.deliver()
        except Exception as error:
            # A bug of ours. Nobody may wait for ever on a thread that is gone: whoever runs is told, and the process
            # is restarted by whoever watches ``alive``.
            self._log.exception("the engine thread failed")
            self.answers.deliver()
            self._dispatch([(running.sink, error) for running in self._everyone()])
            raise

    def _drain(self, wait_s: float | None) -> bool:
        """Do what waits in the inbox; with nothing there, wait (None: for ever). Returns False when told to stop."""
        try:
            event = self._inbox.get(block=wait_s != 0.0, timeout=wait_s)
            while event is not None:
                event()
                event = self._inbox.get_nowait()
        except queue.Empty:
            return True
        return False

    def poll(self) -> float | None:
        """Do what waits in the inbox, then a turn, for a caller that has the thread's place."""
        self._drain(0.0)
        return self.turn()

    def turn(self) -> float | None:
        """Decide and act once. Returns for how long there is nothing to do: 0.0 go on, None until something comes."""
        now_s = self._clock()
        decision = self._plan.decide(self._running, self._waiting, self.num_free_slots, now_s)
        self.pool.flush()
        held_s = self._plan.hold_s(decision, self._running, now_s)
        if held_s != 0.0:
            self.answers.deliver()
            return held_s
        self._act(decision)
        self.pool.flush()
        self._metrics.sessions(len(self._running), len(self._waiting))
        self._metrics.slots(self._runner.slots.num_slots, self._runner.slots.num_free)
        return 0.0

    def _act(self, decision: Decision) -> None:
        self.answers.loaded(min(len(self._running) + len(self._waiting), self._config.max_sessions))
        for number in decision.put_back:
            running = next(r for r in self._running if r.number == number)
            self._running.remove(running)
            self.answers.put_back(running)
            self._waiting.appendleft(running)
            self._metrics.preempted()
        for number in decision.admit:
            running = next(r for r in self._waiting if r.number == number)
            self._waiting.remove(running)
            self.answers.admit(running, self._clock())
            self._running.append(running)
        self._running.sort(key=lambda r: r.number)
        if decision.prefill or decision.verify:
            self._step(decision)

    def _step(self, decision: Decision) -> None:
        by_number = {running.number: running for running in self._running}
        prefill = [(by_number[number], rows) for number, rows in decision.prefill]
        trees = [(by_number[number], by_number[number].side.tree.best(rows)) for number, rows in decision.verify]
        rows = sum(rows for _, rows in prefill) + sum(len(tree) for _, tree in trees)
        self._make_room(rows)
        started_s = self._clock()
        try:
            results = run_step(self._runner, prefill, trees, self._thresholds, self.answers.deliver)
        except Exception as error:  # the device failed: whoever was in the step is lost, the service is not
            if isinstance(error, DeviceFull) and self.shedding.failed(rows):
                return  # nobody was in it yet: the next turn asks for less
            if isinstance(error, RanksLost):  # there will be no other step
                raise
            self._log.exception("step failed", rows=rows)
            for running in [r for r, _ in prefill] + [r for r, _ in trees]:
                self._running.remove(running)
                self.answers.fail(running, error)
            return
        step_s = self._clock() - started_s
        self.pool.prepare((verified.running, len(verified.verdict.tokens)) for verified in results)
        step = Step(started_s, step_s, rows, len(trees), sum(len(tree) - 1 for _, tree in trees))
        trace_step(self._trace, step, results)
        for running, _ in prefill:
            self.answers.prefilled(running, started_s)
        committed = [self.answers.commit(verified, step) for verified in results]
        self.pool.flush(all(running.waits(started_s + step_s) for running in self._running))
        self._costs.observe(0 if prefill else rows, step_s)  # a prompt's rows cost something else
        for one in committed:
            if self.answers.tell(one, step):
                self._running.remove(one.verified.running)
                self.answers.release(one.verified.running)
        waited_s = max((one.waited_s for one in committed), default=0.0)
        self._metrics.step(rows, waited_s, step_s, self._clock() - started_s - step_s)

    def _make_room(self, rows: int) -> None:
        if (short := rows - self._runner.slots.num_free) > 0 and self._cache is not None:
            self._cache.evict(short)
