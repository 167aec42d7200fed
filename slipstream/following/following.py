"""Following: the sessions of one target that may be drafted for, and the events of links about them.

Rules:
1. Its methods belong to the engine thread; events of links (``LinkEvents``) wait in the inbox until that thread reads
   it. A caller may set a time limit: the rest waits for the next call, however fast more comes.
2. It blocks only in ``wait``, and never longer than ``within_s``.
3. Work that can be done after the drafts have the commit (counters, costs) is done in ``flush``.
4. All items of one step for a link leave as one frame (``FrameBuffer``). Commits that ask for no nodes wait for one
   that does, or for each other, because a draft that wakes at each step takes time from the next step.
5. What holds for each session alone is ``followed``'s.

It knows nothing about engines, clients or sockets.
"""

from __future__ import annotations

import math
import queue
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

from slipstream.base.config import TargetSection
from slipstream.base.errors import RemoteProtocolError
from slipstream.decision.beliefs import Beliefs, StepCosts
from slipstream.decision.decide import RoundInputs, Rules
from slipstream.decision.policy import SpeculationPolicy
from slipstream.following.followed import (
    Followed,
    OnModeChange,
    RoundRecord,
    Step,
    TargetContext,
    Verified,
    log_mode_change,
)
from slipstream.following.pool import DraftPool, SetFeatureSpec, no_feature_rows
from slipstream.observe.log import logger
from slipstream.observe.metrics import TargetMetrics
from slipstream.observe.trace import Trace, commit_key, growth_key
from slipstream.protocol.conduct import FaultRate
from slipstream.protocol.messages import Commit, DraftBound, DraftHello, Features, Growth, Link, Open, TargetBound
from slipstream.protocol.requests import Sampling
from slipstream.protocol.session import Doubt, TargetSide
from slipstream.protocol.tree import DraftTree

Event = Callable[[], None]
OnError = Callable[[int, Exception], None]  # a session, and what went wrong in it

ITEMS_PER_EVENT = 64  # items of a frame that are looked at before the clock is
MAX_DRAIN_S = 0.005  # for what has arrived, where nobody waits
TRACE_ROWS = 16  # rows of a trace for sessions; later ones share them
MAX_HELD_COMMITS = 8  # that ask for no nodes
MAX_ROW_BYTES = 128 << 20  # of feature rows sent to a link at once: half of what may wait for it
MAX_PENDING_EVENTS = 256  # events of one peer that wait: a frame of a draft's is one, and a step has a few


class EventQueue(Protocol):
    """What is used of a queue."""

    def put(self, item: Event | None, /) -> None: ...

    def get(self, block: bool = True, timeout: float | None = None) -> Event | None: ...


class Inbox:
    """Events from other threads, in order, handled on the engine thread that drains the inbox."""

    __slots__ = ("_clock", "_events", "_stopped")

    def __init__(self, clock: Callable[[], float] = time.monotonic, events: EventQueue | None = None) -> None:
        self._clock = clock
        self._events: EventQueue = events if events is not None else queue.SimpleQueue()
        self._stopped = False

    def post(self, event: Event) -> None:
        """From any thread."""
        self._events.put(event)

    def stop(self) -> None:
        """From any thread: ``drain`` returns False once it has come so far."""
        self._events.put(None)

    def drain(self, wait_s: float | None = 0.0, until_s: float = math.inf, for_s: float = math.inf) -> bool:
        """Do what is there, or as much of it as can be begun before ``until_s`` and within ``for_s``; with nothing
        there, wait for something (None: for ever). Returns False when told to stop."""
        try:
            event = self._events.get(wait_s != 0.0, wait_s)
            if for_s < math.inf:
                until_s = min(until_s, self._clock() + for_s)
            while event is not None:
                event()
                if until_s < math.inf and self._clock() >= until_s:
                    return not self._stopped
                event = self._events.get(False)
        except queue.Empty:
            return not self._stopped
        self._stopped = True
        return False


class LinkState:
    """One stream of a peer's, whose events are posted on its thread and done on the inbox's. A bounded number of them
    waits, so that a flood costs its sender and nobody else."""

    __slots__ = ("end_reason", "faults", "hello", "num_done", "num_posted")

    def __init__(self, hello: DraftHello) -> None:
        self.hello: DraftHello | None = hello  # until somebody has looked, or the stream is over
        self.end_reason = ""
        self.num_posted = self.num_done = 0  # each counted by one thread alone
        self.faults = FaultRate()

    @property
    def is_full(self) -> bool:
        """Whether more waits than a draft that keeps to the protocol causes."""
        return self.num_posted - self.num_done >= MAX_PENDING_EVENTS


class FrameBuffer:
    """The items of sessions for links that are up. A drafter that stands aside also gets its sessions' Close. Feature
    rows for one flush are limited by ``free_row_bytes``: sessions that are opened together have equal parts."""

    __slots__ = ("_due", "_items", "_num_opened", "_row_bytes")

    def __init__(self) -> None:
        self._items: dict[Link, list[DraftBound]] = {}
        self._due: dict[Link, None] = {}  # whose items leave with the next flush, in order
        self._row_bytes = Counter[Link]()  # bytes of feature rows among them, but for those of commits
        self._num_opened = Counter[Link]()  # openings among them

    def link_up(self, link: Link) -> None:
        self._items[link] = []

    def link_down(self, link: Link) -> None:
        self._items.pop(link, None)
        self._due.pop(link, None)

    def add(self, link: Link | None, item: DraftBound | None) -> None:
        """With the next flush."""
        if link is None or item is None or (items := self._items.get(link)) is None:
            return
        if isinstance(item, Features):
            self._row_bytes[link] += len(item.rows)
        elif isinstance(item, Open):
            self._num_opened[link] += 1
        items.append(item)
        if not isinstance(item, Commit) or item.wanted or len(items) >= MAX_HELD_COMMITS:
            self._due[link] = None

    def free_row_bytes(self, link: Link | None) -> int:
        """Bytes of a session's feature rows that may still be sent to it with the next flush."""
        if link is None:
            return 0
        return max(0, min(MAX_ROW_BYTES - self._row_bytes[link], MAX_ROW_BYTES // (self._num_opened[link] or 1)))

    def flush(self) -> bool:
        """Returns whether anything left."""
        due, self._due = self._due, {}
        self._row_bytes.clear()
        self._num_opened.clear()
        for link in due:
            items, self._items[link] = self._items[link], []
            link.send(items)
        return bool(due)


class Following:
    """See the module, and the package for an example. Implements ``messages.LinkEvents``."""

    def __init__(self, config: TargetSection, costs: StepCosts, metrics: TargetMetrics,
                 set_feature_spec: SetFeatureSpec = no_feature_rows, clock: Callable[[], float] = time.monotonic,
                 trace: Trace | None = None, inbox: Inbox | None = None, on_mode_change: OnModeChange | None = None,
                 lockstep: bool = False) -> None:
        """set_feature_spec: see ``pool.DraftPool``; on_mode_change: replaces the log lines of sessions' mode changes;
        lockstep: each step of the engine is of all its sessions."""
        self._log = logger("target")
        self.inbox = inbox or Inbox(clock)
        self.pool = DraftPool(metrics, set_feature_spec)
        # One for all: a new session need not learn how far the drafts are.
        self._beliefs = Beliefs(costs, config.shared_cores, lockstep)
        self._rules = Rules.of(config.policy)
        self._frames = FrameBuffer()
        self._context = TargetContext(self.pool, self._frames.add, self._frames.free_row_bytes, config.policy,
                                      self._beliefs, metrics, config.prompt_lookup,
                                      on_mode_change or partial(log_mode_change, self._log.info))
        self._doubts = {sampled: Doubt() for sampled in (False, True)}
        self._max_sessions = config.max_sessions
        self._costs = costs
        self._metrics = metrics
        self._clock = clock
        self._trace = trace or Trace("", "target")
        self.sessions: dict[int, Followed] = {}
        self._link_states: dict[Link, LinkState] = {}  # of links that are up
        self._leaving: dict[Link, bool] = {}  # the newest ``link_leaving``, until it is applied
        self._changed_links: set[Link] = set()  # whose changes are not applied yet
        self._known_links: dict[Link, LinkState] = {}  # of links that were up when changes were last applied
        self._records: list[RoundRecord] = []
        self._step: Step | None = None

    # From any thread.

    def link_up(self, link: Link, hello: DraftHello) -> None:
        self._metrics.drafts_connected(len({*self._link_states, link}))  # an idle engine may not look for days
        self._link_states[link] = LinkState(hello)
        self._post_change(link)

    def link_down(self, link: Link, reason: str) -> None:
        if (link_state := self._link_states.get(link)) is not None:
            link_state.end_reason, link_state.hello = reason, None  # a hello may have many megabytes
            self._metrics.drafts_connected(len(self._link_states) - 1)
            del self._link_states[link]
        self._post_change(link)

    def link_leaving(self, link: Link, leaving: bool) -> None:
        """Discovery no longer lists this draft (or does so again): no new session goes there, open ones go on."""
        self._leaving[link] = leaving
        self._post_change(link)

    def _post_change(self, link: Link) -> None:
        """One event is enough, however often it went up and down: an idle engine may not drain its inbox for days."""
        if link not in self._changed_links:
            self._changed_links.add(link)
            self.inbox.post(partial(self._apply_change, link))

    def received(self, link: Link, items: Sequence[TargetBound],
                 faults: Sequence[tuple[int, RemoteProtocolError]]) -> None:
        link_state = self._link_states.get(link)
        if link_state is None or link_state.hello is not None:  # not applied yet, so it was asked nothing
            return
        received_s = self._clock()  # now: a step may be on the device until this is looked at
        for first in range(0, max(1, len(items), len(faults)), ITEMS_PER_EVENT):
            if link_state.is_full:
                self._metrics.stale_growth()  # what is lost is late at worst
                return
            link_state.num_posted += 1
            stop = first + ITEMS_PER_EVENT
            self.inbox.post(partial(self._receive, link, link_state, items[first:stop], faults[first:stop], received_s))

    def inbox_full(self, link: Link) -> bool:
        link_state = self._link_states.get(link)
        return link_state is not None and link_state.is_full

    # From the engine thread.

    def _apply_change(self, link: Link) -> None:
        """Apply what became of a link since the last call."""
        self._changed_links.discard(link)  # first: what changes from now on is another event
        former, current = self._known_links.get(link), self._link_states.get(link)
        if former is not None and former is not current:
            del self._known_links[link]
            self._link_lost(link, former.end_reason)
        hello = current.hello if current is not None else None
        if current is not None and hello is not None:  # as it was read: the stream may end meanwhile
            current.hello = None
            self._known_links[link] = current
            self._frames.link_up(link)
            self.pool.link_up(link, hello)
            self._detach_sidelined()
            for followed in self.sessions.values():
                followed.policy.drafter_ready(self._clock())
        if (leaving := self._leaving.pop(link, None)) is not None:
            self.pool.set_leaving(link, leaving)

    def _link_lost(self, link: Link, reason: str) -> None:
        self._frames.link_down(link)
        self.pool.link_down(link, reason)
        for followed in self.sessions.values():
            if followed.link is link:
                followed.lost(self._clock(), "draft_unavailable", can_move=True)
        self._detach_sidelined()

    def open(self, session: int, tokens: Sequence[int], prompt_len: int, sampling: Sampling, limit: int,
             speculate: bool = True, trace: str = "") -> Followed:
        """A session that may be drafted for once it begins. ``tokens``: what is committed, the first ``prompt_len`` of
        them the prompt; ``limit``: at most so many in the end."""
        now_s, sampled = self._clock(), not sampling.greedy
        policy = SpeculationPolicy(self._context.policy, self._beliefs, now_s, sampled, self._rules)
        if not speculate:
            policy.forbid(now_s)
        side = TargetSide(session, tokens, prompt_len, sampling, trace, self._doubts[sampled])
        followed = Followed(side, policy, self._context, limit, plain=not speculate)
        self.sessions[session] = followed
        self._update_load()
        return followed

    def begin(self, sessions: Iterable[Followed], now_s: float) -> None:
        """The sessions are computed from now on (or again): drafters may follow."""
        others = sum(followed.begun for followed in self.sessions.values())
        for followed in sessions:
            followed.begin(now_s, others)
            others += 1

    def committed(self, batch: Sequence[Verified], step: Step, failed: OnError | None = None) -> list[RoundRecord]:
        """Take the results of a step; drafters get them with the next ``flush``. failed: called for a session with an
        error, which then has no record; without it the error is raised."""
        learned, now_s = list[tuple[Followed, Verified, RoundRecord, RoundInputs | None]](), step.ended_s
        self._step = step
        if self._costs.guessed and not step.nodes:  # it may be the plain step that was due: the next one is not
            self._learn_costs()
        for verified in batch:
            try:
                followed = self.sessions[verified.session]
                record, seen = followed.learn(verified, step, now_s)
                learned.append((followed, verified, record, seen))
            except Exception as error:
                _report_error(failed, verified.session, error)
        decisions = iter(SpeculationPolicy.decide_step([(followed.policy, seen) for followed, _, _, seen in learned
                                                        if seen is not None]))
        records = list[RoundRecord]()
        for followed, verified, record, seen in learned:
            decision = next(decisions) if seen is not None else None
            base, began_s = followed.side.base, followed.wait.committed_s
            try:
                followed.commit(verified, decision, step, now_s)
            except Exception as error:
                _report_error(failed, followed.session, error)
                continue
            records.append(record)
            if self._trace.enabled:
                self._trace_round(followed, base, began_s, record, step)
        self._records += records
        return records

    def flush(self) -> bool:
        """Send what there is to say to drafts, one frame each, and count what was verified. Returns whether anything
        left."""
        any_sent = self._frames.flush()
        records, self._records = self._records, []
        if records:
            self._metrics.rounds([(record.drafted,
                                   record.accepted if record.accepted < record.tokens else record.tokens - 1,
                                   record.outcome) for record in records])
            self.pool.judge([(record.link, record.drafted, record.accepted) for record in records
                             if record.drafted and record.link is not None])
        self._learn_costs()
        return any_sent

    def take(self, sessions: Sequence[Followed], within_s: float = 0.0) -> list[DraftTree]:
        """Call ``wait``, then return the tree that each session should verify now."""
        self.wait(sessions, within_s)
        return [followed.take(followed.num_rows) for followed in sessions]

    def wait(self, sessions: Sequence[Followed], within_s: float) -> None:
        """Wait at most ``within_s`` seconds for growth that is worth the wait."""
        began_s = self._clock()
        until_s = began_s + within_s
        self.inbox.drain(until_s=max(until_s, began_s + MAX_DRAIN_S))
        while (now_s := self._clock()) < until_s:
            waiting = [followed for followed in sessions if followed.should_wait(now_s)]
            if not waiting:
                break
            for followed in waiting:
                followed.skip_step(now_s)
            deadline_s = max(followed.wait.deadline_s for followed in waiting)
            self.inbox.drain(max(1e-4, min(deadline_s, until_s) - now_s), until_s)

    def expected_growth(self, waiting: Sequence[Followed]) -> tuple[float, int]:
        """When the growth that ``waiting`` wait for should be here, and how many rows they would verify then."""
        # Generous: going a moment too early costs a whole step, a moment of patience costs that moment.
        latency = self._beliefs.latency
        usual_s = max(latency.usual_s(self._context.policy.deadline_max_s), 1.5 * (latency.mean_s or 0.0))
        due_s = max(min(followed.wait.committed_s + usual_s, followed.wait.deadline_s) for followed in waiting)
        return due_s, sum(1 + followed.decision.verify for followed in waiting)

    def close(self, followed: Followed) -> None:
        """The answer is over; its drafter hears of it."""
        followed.close()
        self.sessions.pop(followed.session, None)
        self._update_load()

    def _update_load(self) -> None:
        self._beliefs.latency.load = max(1, min(len(self.sessions), self._max_sessions))

    def _learn_costs(self) -> None:
        step, self._step = self._step, None
        if step is not None and step.prefill:  # a prompt's rows cost something else
            self._costs.skip_step()
        elif step is not None:
            self._costs.observe(step.rows, step.seconds, step.num_read)

    def _receive(self, link: Link, link_state: LinkState, items: Sequence[TargetBound],
                 faults: Sequence[tuple[int, RemoteProtocolError]], received_s: float) -> None:
        link_state.num_done += 1
        for session, error in faults:
            self._reject(link, link_state, session, error)
        for item in items:
            followed = self.sessions.get(item.session)
            if followed is None or followed.link is not link:
                self._metrics.stale_growth()
                continue
            if self._trace.enabled and isinstance(item, Growth):
                self._trace.received("growth", growth_key(item), received_s)
            try:
                followed.receive(item, received_s)
            except RemoteProtocolError as error:
                self._reject(link, link_state, item.session, error)

    def _detach_sidelined(self) -> None:
        """Take sessions away from drafters that stand aside now."""
        for followed in self.sessions.values():
            if (link := followed.link) is not None and not self.pool.is_usable(link):
                followed.detach()
                followed.lost(self._clock(), "draft_unavailable", can_move=True, former_link=link)

    def _reject(self, link: Link, link_state: LinkState, session: int, error: RemoteProtocolError) -> None:
        self._metrics.invalid_growth()
        if link_state.faults.exceeded(self._clock()):
            link.refuse(error.field)
        followed = self.sessions.get(session)
        if followed is None or followed.link is not link:
            return
        log = self._log.warning if link_state.faults.is_new(error.field) else self._log.debug
        log("invalid growth", session=session, draft=link.address, field=error.field)
        followed.detach()
        followed.lost(self._clock(), "incompatible", former_link=link)

    def _trace_round(self, followed: Followed, base: int, began_s: float, record: RoundRecord, step: Step) -> None:
        lane = f"answer {followed.session % TRACE_ROWS}"
        if record.waited_s:
            self._trace.span(lane, "wait", began_s, began_s + record.waited_s)
        self._trace.span(lane, "round", step.began_s, step.ended_s, drafted=record.drafted, accepted=record.accepted,
                         why=record.why)
        if followed.link is not None:
            self._trace.sent("commit", commit_key(followed.session, base), step.ended_s)


def _report_error(failed: OnError | None, session: int, error: Exception) -> None:
    if failed is None:
        raise error
    failed(session, error)
