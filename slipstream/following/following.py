"""Following: the sessions of one target that may be drafted for, and the events of links about them.

Rules:
1. Its methods belong to the engine thread; events of links (``LinkEvents``) wait in the inbox until that thread reads
   it. A caller may set a time limit: the rest waits for the next call, however fast more comes.
2. It blocks only in ``wait``, and never longer than ``within_s``.
3. Work that can be done after the drafts have the commit (counters, costs) is done in ``flush``.
4. All items of one step for a link leave as one frame (``Post``). Commits that ask for no nodes wait for one that does,
   or for each other, because a draft that wakes at each step takes time from the next step.
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
from slipstream.decision.decide import Rules, Seen
from slipstream.decision.policy import SpeculationPolicy
from slipstream.following.followed import MOST_ROWS, Changed, Followed, RoundRecord, Shared, Step, Verified, logged
from slipstream.following.pool import DraftPool, GiveRows, no_rows
from slipstream.observe.log import logger
from slipstream.observe.metrics import TargetMetrics
from slipstream.observe.trace import Trace, commit_key, growth_key
from slipstream.protocol.conduct import FaultRate
from slipstream.protocol.messages import Commit, DraftBound, DraftHello, Features, Growth, Link, TargetBound
from slipstream.protocol.requests import Sampling
from slipstream.protocol.session import Doubt, TargetSide
from slipstream.protocol.tree import DraftTree

Event = Callable[[], None]
Failed = Callable[[int, Exception], None]  # a session, and what went wrong in it

AT_ONCE = 64  # items of a frame that are looked at before the clock is
GLANCE_S = 0.005  # for what has come, where nobody waits
TRACED = 16  # rows of a trace for sessions; later ones share them
HELD = 8  # commits that ask for nothing
MOST = 256  # events of one peer that wait: a frame of a draft's is one, and a step has a few


class Events(Protocol):
    """What is used of a queue."""

    def put(self, item: Event | None, /) -> None: ...

    def get(self, block: bool = True, timeout: float | None = None) -> Event | None: ...


class Inbox:
    """Events from other threads, in order, handled on the engine thread that drains the inbox."""

    __slots__ = ("_clock", "_events", "_stopped")

    def __init__(self, clock: Callable[[], float] = time.monotonic, events: Events | None = None) -> None:
        self._clock = clock
        self._events: Events = events if events is not None else queue.SimpleQueue()
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


class Lane:
    """One stream of a peer's, whose events are posted on its thread and done on the inbox's. A bounded number of them
    waits, so that a flood costs its sender and nobody else."""

    __slots__ = ("done", "faults", "hello", "over", "posted")

    def __init__(self, hello: DraftHello) -> None:
        self.hello: DraftHello | None = hello  # until somebody has looked, or the stream is over
        self.over = ""  # why it is
        self.posted = self.done = 0  # each counted by one thread alone
        self.faults = FaultRate()

    @property
    def full(self) -> bool:
        """Whether more waits than comes of what was asked for."""
        return self.posted - self.done >= MOST


class Post:
    """The items of sessions for links that are up. A drafter that stands aside also gets its sessions' Close. Feature
    rows for one flush are limited by what a link holds, see ``room``."""

    __slots__ = ("_due", "_rows", "_said")

    def __init__(self) -> None:
        self._said: dict[Link, list[DraftBound]] = {}
        self._due: dict[Link, None] = {}  # whose items leave with the next flush, in order
        self._rows = Counter[Link]()  # bytes of feature rows among them, but for those of commits

    def link_up(self, link: Link) -> None:
        self._said[link] = []

    def link_down(self, link: Link) -> None:
        self._said.pop(link, None)
        self._due.pop(link, None)

    def say(self, link: Link | None, item: DraftBound | None) -> None:
        """With the next flush."""
        if link is None or item is None or (said := self._said.get(link)) is None:
            return
        if isinstance(item, Features):
            self._rows[link] += len(item.rows)
        said.append(item)
        if not isinstance(item, Commit) or item.wanted or len(said) >= HELD:
            self._due[link] = None

    def room(self, link: Link | None) -> int:
        """Bytes of feature rows that may still be said to it with the next flush."""
        return 0 if link is None else max(0, MOST_ROWS - self._rows[link])

    def flush(self) -> bool:
        """Returns whether anything left."""
        due, self._due = self._due, {}
        self._rows.clear()
        for link in due:
            items, self._said[link] = self._said[link], []
            link.send(items)
        return bool(due)


class Following:
    """See the module, and the package for an example. Implements ``messages.LinkEvents``."""

    def __init__(self, config: TargetSection, costs: StepCosts, metrics: TargetMetrics, gives: GiveRows = no_rows,
                 clock: Callable[[], float] = time.monotonic, trace: Trace | None = None, inbox: Inbox | None = None,
                 changed: Changed | None = None, together: bool = False) -> None:
        """gives: see ``pool.DraftPool``; changed: told of sessions that have another mode, in place of the log;
        together: the engine's steps are of all its sessions at once."""
        self._log = logger("target")
        self.inbox = inbox or Inbox(clock)
        self.pool = DraftPool(metrics, gives)
        # One for all: a new session need not learn how far the drafts are.
        self._beliefs = Beliefs(costs, config.shared_cores, together)
        self._rules = Rules.of(config.policy)
        self._post = Post()
        self._shared = Shared(self.pool, self._post.say, self._post.room, config.policy, self._beliefs, metrics,
                              config.prompt_lookup, changed or partial(logged, self._log.info))
        self._doubts = {sampled: Doubt() for sampled in (False, True)}
        self._most = config.max_sessions
        self._costs = costs
        self._metrics = metrics
        self._clock = clock
        self._trace = trace or Trace("", "target")
        self.sessions: dict[int, Followed] = {}
        self._lanes: dict[Link, Lane] = {}  # of links that are up
        self._leaving: dict[Link, bool] = {}  # what was said last, until somebody looks
        self._changed: set[Link] = set()  # links that are to be looked at
        self._seen: dict[Link, Lane] = {}  # of links that were up at the last look
        self._told: list[RoundRecord] = []
        self._step: Step | None = None

    # From any thread.

    def link_up(self, link: Link, hello: DraftHello) -> None:
        self._lanes[link] = Lane(hello)
        self._change(link)

    def link_down(self, link: Link, reason: str) -> None:
        if (lane := self._lanes.get(link)) is not None:
            lane.over, lane.hello = reason, None  # a hello may have many megabytes
            del self._lanes[link]
        self._change(link)

    def link_leaving(self, link: Link, leaving: bool) -> None:
        """Discovery no longer lists this draft (or does so again): no new session goes there, open ones go on."""
        self._leaving[link] = leaving
        self._change(link)

    def _change(self, link: Link) -> None:
        """One look is enough, however often it came and went: an engine with nothing to do may not look for days."""
        if link not in self._changed:
            self._changed.add(link)
            self.inbox.post(partial(self._look, link))

    def received(self, link: Link, items: Sequence[TargetBound],
                 faults: Sequence[tuple[int, RemoteProtocolError]]) -> None:
        lane = self._lanes.get(link)
        if lane is None or lane.hello is not None:  # nobody has looked at it, so it was asked nothing
            return
        came_s = self._clock()  # now: a step may be on the device until this is looked at
        for at in range(0, max(1, len(items), len(faults)), AT_ONCE):
            if lane.full:
                self._metrics.stale_growth()  # what is lost is late at worst
                return
            lane.posted += 1
            upto = at + AT_ONCE
            self.inbox.post(partial(self._receive, link, lane, items[at:upto], faults[at:upto], came_s))

    def full(self, link: Link) -> bool:
        lane = self._lanes.get(link)
        return lane is not None and lane.full

    # From the engine thread.

    def _look(self, link: Link) -> None:
        """What became of a link since the last look."""
        self._changed.discard(link)  # first: what changes from now on is another event
        before, now = self._seen.get(link), self._lanes.get(link)
        if before is not None and before is not now:
            del self._seen[link]
            self._lose(link, before.over)
        hello = now.hello if now is not None else None
        if now is not None and hello is not None:  # as it was read: the stream may end meanwhile
            now.hello = None
            self._seen[link] = now
            self._post.link_up(link)
            self.pool.link_up(link, hello)
            self._put_aside()
            for followed in self.sessions.values():
                followed.policy.drafter_ready(self._clock())
        if (leaving := self._leaving.pop(link, None)) is not None:
            self.pool.set_leaving(link, leaving)

    def _lose(self, link: Link, reason: str) -> None:
        self._post.link_down(link)
        self.pool.link_down(link, reason)
        for followed in self.sessions.values():
            if followed.link is link:
                followed.lost(self._clock(), "draft_unavailable", moves=True)
        self._put_aside()

    def open(self, session: int, tokens: Sequence[int], prompt_len: int, sampling: Sampling, limit: int,
             speculate: bool = True, trace: str = "") -> Followed:
        """A session that may be drafted for once it begins. ``tokens``: what is committed, the first ``prompt_len`` of
        them the prompt; ``limit``: at most so many in the end."""
        now_s, sampled = self._clock(), not sampling.greedy
        policy = SpeculationPolicy(self._shared.policy, self._beliefs, now_s, sampled, self._rules)
        if not speculate:
            policy.forbid(now_s)
        side = TargetSide(session, tokens, prompt_len, sampling, trace, self._doubts[sampled])
        followed = Followed(side, policy, self._shared, limit, plain=not speculate)
        self.sessions[session] = followed
        self._loaded()
        return followed

    def begin(self, sessions: Iterable[Followed], now_s: float) -> None:
        """The sessions are computed from now on (or again): drafters may follow."""
        others = sum(followed.begun for followed in self.sessions.values())
        for followed in sessions:
            followed.begin(now_s, others)
            others += 1

    def committed(self, batch: Sequence[Verified], step: Step, failed: Failed | None = None) -> list[RoundRecord]:
        """Take the results of a step; drafters get them with the next ``flush``. failed: called for a session with an
        error, which then has no record; without it the error is raised."""
        learned, now_s = list[tuple[Followed, Verified, RoundRecord, Seen | None]](), step.ended_s
        self._step = step
        if self._costs.guessed and not step.nodes:  # it may be the plain step that was due: the next one is not
            self._learn_costs()
        for verified in batch:
            try:
                followed = self.sessions[verified.session]
                record, seen = followed.learn(verified, step, now_s)
                learned.append((followed, verified, record, seen))
            except Exception as error:
                _fails(failed, verified.session, error)
        decisions = iter(SpeculationPolicy.decide_step([(followed.policy, seen) for followed, _, _, seen in learned
                                                        if seen is not None]))
        records = list[RoundRecord]()
        for followed, verified, record, seen in learned:
            decision = next(decisions) if seen is not None else None
            base, began_s = followed.side.base, followed.waiting.committed_s
            try:
                followed.commit(verified, decision, step, now_s)
            except Exception as error:
                _fails(failed, followed.session, error)
                continue
            records.append(record)
            if self._trace.keeps:
                self._picture(followed, base, began_s, record, step)
        self._told += records
        return records

    def flush(self) -> bool:
        """Send what there is to say to drafts, one frame each, and count what was verified. Returns whether anything
        left."""
        left = self._post.flush()
        told, self._told = self._told, []
        if told:
            self._metrics.rounds([(one.drafted, one.accepted if one.accepted < one.tokens else one.tokens - 1,
                                   one.outcome) for one in told])
            self.pool.judge([(one.link, one.drafted, one.accepted) for one in told
                             if one.drafted and one.link is not None])
        self._learn_costs()
        return left

    def take(self, sessions: Sequence[Followed], within_s: float = 0.0) -> list[DraftTree]:
        """Call ``wait``, then return the tree that each session should verify now."""
        self.wait(sessions, within_s)
        return [followed.take(followed.nodes) for followed in sessions]

    def wait(self, sessions: Sequence[Followed], within_s: float) -> None:
        """Wait at most ``within_s`` seconds for growth that is worth the wait."""
        began_s = self._clock()
        until_s = began_s + within_s
        self.inbox.drain(until_s=max(until_s, began_s + GLANCE_S))
        while (now_s := self._clock()) < until_s and (waiting := [one for one in sessions if one.waits(now_s)]):
            for one in waiting:
                one.stands(now_s)
            due_s = max(one.waiting.until_s for one in waiting)
            self.inbox.drain(max(1e-4, min(due_s, until_s) - now_s), until_s)

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
        self.sessions.pop(followed.session, None)
        self._loaded()

    def _loaded(self) -> None:
        self._beliefs.latency.load = max(1, min(len(self.sessions), self._most))

    def _learn_costs(self) -> None:
        step, self._step = self._step, None
        if step is not None and step.prefill:  # a prompt's rows cost something else
            self._costs.passes()
        elif step is not None:
            self._costs.observe(step.rows, step.seconds)

    def _receive(self, link: Link, lane: Lane, items: Sequence[TargetBound],
                 faults: Sequence[tuple[int, RemoteProtocolError]], came_s: float) -> None:
        lane.done += 1
        for session, error in faults:
            self._refuse(link, lane, session, error)
        for item in items:
            followed = self.sessions.get(item.session)
            if followed is None or followed.link is not link:
                self._metrics.stale_growth()
                continue
            if self._trace.keeps and isinstance(item, Growth):
                self._trace.came("device", "growth", growth_key(item), came_s)
            try:
                followed.receive(item, came_s)
            except RemoteProtocolError as error:
                self._refuse(link, lane, item.session, error)

    def _put_aside(self) -> None:
        """End the sessions of drafters that stand aside now."""
        for followed in self.sessions.values():
            if (link := followed.link) is not None and not self.pool.follows(link):
                followed.detach()
                followed.lost(self._clock(), "draft_unavailable", moves=True, had=link)

    def _refuse(self, link: Link, lane: Lane, session: int, error: RemoteProtocolError) -> None:
        self._metrics.invalid_growth()
        if lane.faults.fault(self._clock()):
            link.refuse(error.field)
        followed = self.sessions.get(session)
        if followed is None or followed.link is not link:
            return
        log = self._log.warning if lane.faults.news(error.field) else self._log.debug
        log("invalid growth", session=session, draft=link.address, field=error.field)
        followed.detach()
        followed.lost(self._clock(), "incompatible", had=link)

    def _picture(self, followed: Followed, base: int, began_s: float, record: RoundRecord, step: Step) -> None:
        lane = f"answer {followed.session % TRACED}"
        if record.waited_s:
            self._trace.span(lane, "wait", began_s, began_s + record.waited_s)
        self._trace.span(lane, "round", step.began_s, step.ended_s, drafted=record.drafted, accepted=record.accepted,
                         why=record.why)
        if followed.link is not None:
            self._trace.left("device", "commit", commit_key(followed.session, base), step.ended_s)


def _fails(failed: Failed | None, session: int, error: Exception) -> None:
    if failed is None:
        raise error
    failed(session, error)
