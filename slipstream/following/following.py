"""Following: all sessions of one target that may be drafted for, the drafts, and what both have shown so far.

Rules:
1. Its verbs belong to the engine thread; what links tell (``LinkEvents``) waits in the inbox until that thread looks.
2. It blocks nowhere but in ``take``, and there never longer than it is told.
3. What can wait until the drafts have heard of a commit (counters, costs) waits until ``flush``.

It knows nothing about engines, clients or sockets.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable, Sequence

from slipstream.base.config import TargetSection
from slipstream.base.errors import RemoteProtocolError
from slipstream.decision.beliefs import Beliefs, StepCosts
from slipstream.decision.policy import SpeculationPolicy
from slipstream.following.followed import Followed, RoundRecord, Shared, Step, Verified
from slipstream.following.pool import DraftPool, GiveRows, no_rows
from slipstream.observe.log import logger
from slipstream.observe.metrics import TargetMetrics
from slipstream.observe.trace import Trace, commit_key, growth_key
from slipstream.protocol.messages import DraftHello, Growth, Link, Sampling, TargetBound
from slipstream.protocol.session import TargetSide
from slipstream.protocol.tree import DraftTree

Event = Callable[[], None]


class Inbox:
    __slots__ = ("_events", "_stopped")

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._stopped = False

    def post(self, event: Event) -> None:
        """From any thread."""
        self._events.put(event)

    def stop(self) -> None:
        """From any thread: ``drain`` returns False once it has come so far."""
        self._events.put(None)

    def drain(self, wait_s: float | None = 0.0) -> bool:
        """Do what is there; with nothing there, wait for something (None: for ever). Returns False when told to
        stop."""
        try:
            event = self._events.get(block=wait_s != 0.0, timeout=wait_s)
            while event is not None:
                event()
                event = self._events.get_nowait()
        except queue.Empty:
            return not self._stopped
        self._stopped = True
        return False


LANES = 16  # rows of a trace for sessions; later ones share them


class Following:
    """See the module, and the package for an example. Implements ``messages.LinkEvents``."""

    def __init__(self, config: TargetSection, costs: StepCosts, metrics: TargetMetrics, gives: GiveRows = no_rows,
                 clock: Callable[[], float] = time.monotonic, trace: Trace | None = None) -> None:
        """gives: see ``pool.DraftPool``."""
        self.inbox = Inbox()
        self.pool = DraftPool(metrics, gives)
        # One for all: a new session need not learn how far the drafts are.
        self._beliefs = Beliefs(costs, config.shared_cores)
        self._shared = Shared(self.pool, config.policy, self._beliefs, metrics, config.prompt_lookup)
        self._most = config.max_sessions
        self._costs = costs
        self._metrics = metrics
        self._clock = clock
        self._trace = trace or Trace("", "target")
        self._log = logger("target")
        self._sessions: dict[int, Followed] = {}
        self._told: list[RoundRecord] = []
        self._step: Step | None = None

    # From any thread.

    def link_up(self, link: Link, hello: DraftHello) -> None:
        def event() -> None:
            self.pool.link_up(link, hello)
            for followed in self._sessions.values():
                followed.policy.drafter_ready(self._clock())

        self.inbox.post(event)

    def link_down(self, link: Link, reason: str) -> None:
        def event() -> None:
            self.pool.link_down(link, reason)
            for followed in self._sessions.values():
                if followed.link is link:
                    followed.lost(self._clock(), "draft_unavailable", moves=True)

        self.inbox.post(event)

    def link_leaving(self, link: Link, leaving: bool) -> None:
        """Discovery no longer lists this draft (or does so again): no new session goes there, open ones go on."""
        self.inbox.post(lambda: self.pool.set_leaving(link, leaving))

    def received(self, link: Link, items: Sequence[TargetBound],
                 faults: Sequence[tuple[int, RemoteProtocolError]]) -> None:
        came_s = self._clock()  # now: a step may be on the device until this is looked at
        self.inbox.post(lambda: self._receive(link, items, faults, came_s))

    # From the engine thread.

    def open(self, session: int, tokens: Sequence[int], prompt_len: int, sampling: Sampling, limit: int,
             speculate: bool = True, trace: str = "") -> Followed:
        """A session that may be drafted for once it begins. ``tokens``: what is committed, the first ``prompt_len`` of
        them the prompt; ``limit``: at most so many in the end."""
        now_s = self._clock()
        policy = SpeculationPolicy(self._shared.policy, self._beliefs, now_s, sampled=not sampling.greedy)
        if not speculate:
            policy.forbid(now_s)
        followed = Followed(TargetSide(session, tokens, prompt_len, sampling, trace), policy, self._shared, limit)
        self._sessions[session] = followed
        self._loaded()
        return followed

    def begin(self, sessions: Iterable[Followed], now_s: float) -> None:
        """They are computed from now on (again): drafters may follow."""
        others = sum(followed.begun for followed in self._sessions.values())
        for followed in sessions:
            followed.begin(now_s, others)
            others += 1

    def committed(self, batch: Sequence[Verified], step: Step) -> list[RoundRecord]:
        """What a step gave. Drafters hear of it with the next ``flush``."""
        records = []
        for verified in batch:
            followed = self._sessions[verified.session]
            base, began_s = followed.side.base, followed.waiting.committed_s
            records.append(record := followed.commit(verified, step))
            if self._trace.keeps:
                self._picture(followed, base, began_s, record, step)
        self._told, self._step = [*self._told, *records], step
        return records

    def flush(self) -> bool:
        """Send what there is to say to drafts, one frame each, and count what was verified. Returns whether anything
        left."""
        left = self.pool.flush()
        told, self._told = self._told, []
        for record in told:
            self._metrics.round(record.drafted, min(record.accepted, record.tokens - 1), record.outcome)
            if record.drafted:
                self.pool.judge(record.link, record.drafted, record.accepted)
        step, self._step = self._step, None
        if step is not None and not step.prefill:  # a prompt's rows cost something else
            self._costs.observe(step.rows, step.seconds)
        return left

    def take(self, sessions: Sequence[Followed], within_s: float = 0.0) -> list[DraftTree]:
        """What each should verify now. Waits for growth that is worth it, at most so long; never for nothing."""
        until_s = self._clock() + within_s
        self.inbox.drain()
        while (now_s := self._clock()) < until_s and (due_s := self._due_s(sessions, now_s)) > now_s:
            self.inbox.drain(max(1e-4, min(due_s, until_s) - now_s))
        return [followed.take(followed.nodes) for followed in sessions]

    def coming(self, waiting: Sequence[Followed]) -> tuple[float, int]:
        """When the growth that ``waiting`` wait for should be here, and how many rows they would verify then."""
        # Generous: going a moment too early costs a whole step, a moment of patience costs that moment.
        latency = self._beliefs.latency
        usual_s = max(latency.usual_s(self._shared.policy.deadline_max_s), 1.5 * (latency.mean_s or 0.0))
        due_s = max(min(one.waiting.committed_s + usual_s, one.waiting.until_s) for one in waiting)
        return due_s, sum(1 + one.decision.verify for one in waiting)

    def close(self, followed: Followed) -> None:
        """The answer is over; its drafter hears of it."""
        followed.close()
        self._sessions.pop(followed.session, None)
        self._loaded()

    def _due_s(self, sessions: Sequence[Followed], now_s: float) -> float:
        return max((one.waiting.until_s for one in sessions if one.waits(now_s)), default=now_s)

    def _loaded(self) -> None:
        self._beliefs.latency.load = max(1, min(len(self._sessions), self._most))

    def _receive(self, link: Link, items: Sequence[TargetBound], faults: Sequence[tuple[int, RemoteProtocolError]],
                 came_s: float) -> None:
        for session, error in faults:
            self._refuse(self._of(session, link), error)
        for item in items:
            followed = self._of(item.session, link)
            if followed is None:
                self._metrics.stale_growth()
                continue
            if self._trace.keeps and isinstance(item, Growth):
                self._trace.came("device", "growth", growth_key(item), came_s)
            try:
                followed.receive(item, came_s)
            except RemoteProtocolError as error:
                self._refuse(followed, error)

    def _of(self, session: int, link: Link) -> Followed | None:
        followed = self._sessions.get(session)
        return followed if followed is not None and followed.link is link else None

    def _refuse(self, followed: Followed | None, error: RemoteProtocolError) -> None:
        self._metrics.invalid_growth()
        if followed is not None:
            self._log.warning("invalid growth", session=followed.session, field=error.field)
            followed.detach()
            followed.lost(self._clock(), "incompatible")

    def _picture(self, followed: Followed, base: int, began_s: float, record: RoundRecord, step: Step) -> None:
        lane = f"answer {followed.session % LANES}"
        if record.waited_s:
            self._trace.span(lane, "wait", began_s, began_s + record.waited_s)
        self._trace.span(lane, "round", step.began_s, step.ended_s, drafted=record.drafted, accepted=record.accepted,
                         why=record.why)
        if followed.link is not None:
            self._trace.left("device", "commit", commit_key(followed.session, base), step.ended_s)
