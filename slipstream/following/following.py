"""Following: sessions of one target that may be drafted for: their trees, who drafts, what was decided, and when.

Rules:
1. Its verbs belong to the engine thread; what links tell (``LinkEvents``) waits in the inbox until that thread looks.
2. It blocks nowhere but in ``wait``, and there never longer than it is told.
3. What can wait until the drafts have heard of a commit (counters, costs) waits until ``flush``.
4. What a round needs is decided once, when the round before is committed (or a drafter joins): ``Followed.decision``
   holds until the next commit.
5. A drafter that is wanted and not there is looked for at each commit. Where the text itself foretells more than a
   drafter would in the same time, its chain is verified at once and nobody is asked.
6. A lost or unwilling drafter costs nothing but speed: another takes over, or the session decodes alone.
7. Draft latency is learned only from answers to commits that left nothing but the root (``Waiting``): what a drafter
   says to a target that holds nodes tells how it deepens, not how long an answer takes.

It knows nothing about engines, clients or sockets.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import log
from typing import NamedTuple

from slipstream.base.config import PolicySection, TargetSection
from slipstream.base.errors import RemoteProtocolError
from slipstream.decision.beliefs import Beliefs, StepCosts
from slipstream.decision.decide import Decision, Mode, Reason, Round, Seen, Transition, Why
from slipstream.decision.policy import SpeculationPolicy
from slipstream.following.inbox import Inbox, Lane
from slipstream.following.pool import DraftPool, GiveRows, no_rows
from slipstream.observe.log import logger
from slipstream.observe.metrics import TargetMetrics
from slipstream.observe.trace import Trace, commit_key, growth_key
from slipstream.protocol.conduct import FaultRate
from slipstream.protocol.lookup import PromptLookup
from slipstream.protocol.messages import (
    Close,
    DraftHello,
    Drop,
    Features,
    FeatureSpec,
    Growth,
    Link,
    Sampling,
    TargetBound,
)
from slipstream.protocol.requests import Finish
from slipstream.protocol.session import TargetSide
from slipstream.protocol.tree import DraftTree


@dataclass(frozen=True, slots=True)
class Step:
    """A forward that is done. ``rows``: of all sessions; ``nodes``: draft tokens among them."""

    began_s: float
    seconds: float
    rows: int
    sessions: int  # that it verified a tree for
    nodes: int = 0
    prefill: bool = False  # it computed prompts too

    @property
    def ended_s(self) -> float:
        return self.began_s + self.seconds


@dataclass(frozen=True, slots=True)
class Verified:
    """What one session got out of a step: ``tokens`` to commit, the first ``accepted`` of them draft tokens."""

    session: int
    tokens: tuple[int, ...]
    drafted: int  # draft tokens that were verified
    accepted: int
    depth: int  # of the deepest of them
    finish: Finish = ""  # why the answer ends here; "": it goes on
    rows: bytes | None = None  # feature rows of the positions before each of ``tokens``, if its drafter reads them


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """What became of a round, and why it was as it was."""

    drafted: int
    accepted: int
    tokens: int
    waited_s: float  # it stood still for its drafter
    outcome: str  # one of the metric's
    why: Why
    link: Link | None  # who drafted, if anybody did


Changed = Callable[[int, Transition, Why, Link | None], None]


def logged(session: int, change: Transition, why: Why, _: Link | None) -> None:
    """A line for each."""
    logger("target").info("mode changed", scope="session", session=session, before=change.before.value,
                          after=change.after.value, reason=change.reason, gain=round(change.gain, 3), why=why)


@dataclass(frozen=True, slots=True)
class Shared:
    pool: DraftPool
    policy: PolicySection
    beliefs: Beliefs
    metrics: TargetMetrics
    lookup: bool  # in the text itself
    tell: Changed

    def changed(self, session: int, change: Transition, why: Why, link: Link | None) -> None:
        """Another mode from now on. ``why``: of the decision that stood then; ``link``: who drafted."""
        self.metrics.mode.changed(change.before.value, change.after.value, change.reason)
        self.tell(session, change, why, link)


PENDING = 16  # committed tokens that a drafter takes in together with a tree
ASKED = 4  # commits whose answers may still come


class Waiting:
    """Of one session, since its newest commit."""

    __slots__ = ("_asked", "_heard_s", "_latency_s", "committed_s", "first", "stood", "unasked", "until_s")

    def __init__(self) -> None:
        self.committed_s = 0.0  # when the newest token was committed
        self.until_s = 0.0  # the deadline of the drafter's answer
        self.stood = False  # a step went without it since then, because it waited
        self.first = True  # the drafter that follows has not been awaited yet, or not for long
        self.unasked = 0  # tokens that were committed since a tree was asked for
        self._heard_s: float | None = None  # when the drafter answered for it
        self._asked: dict[int, float] = {}  # base -> when
        self._latency_s: float | None = None  # of an answer that came since the last round

    def attached(self) -> None:
        """A drafter follows from here, and has the whole text to read."""
        self.first, self.unasked = True, 0

    def asks(self) -> None:
        """A tree is asked for. What the drafter has to catch up with takes time that no later answer takes."""
        self.first, self.unasked = self.first or self.unasked > PENDING, 0

    def begin(self, now_s: float, wait_s: float, base: int | None) -> None:
        """The drafter hears of the newest token now. ``base``: what its answer will name, if that tells its latency."""
        self.committed_s, self.until_s, self.stood, self._heard_s = now_s, now_s + wait_s, False, None
        if base is not None and not self.first:
            self._asked[base] = now_s
            if len(self._asked) > ASKED:
                del self._asked[min(self._asked)]

    def heard(self, now_s: float, base: int, newest: int, joined: bool, answered: bool) -> None:
        """Growth for ``base`` came, of which something ``joined`` the tree at ``newest``; ``answered``: it is what was
        waited for."""
        if answered and self._heard_s is None:
            self._heard_s = now_s
        if joined and base < newest:
            # It crossed the commit, so its drafter believes in a tree here: what comes next is one more level of it.
            self._asked.pop(newest, None)
        asked_s = self._asked.pop(base, None)
        if asked_s is not None:
            self._latency_s = max(0.0, now_s - asked_s)

    def stood_s(self, began_s: float) -> float:
        """Seconds that it stood still before the step that began at ``began_s``."""
        if not self.stood:
            return 0.0
        answered_s = self._heard_s if self._heard_s is not None else min(began_s, self.until_s)
        return max(0.0, answered_s - self.committed_s)

    def latency(self) -> float | None:
        """What the newest answer took; told once."""
        latency_s, self._latency_s = self._latency_s, None
        return latency_s


ROWS = 256  # feature rows of one item: well below the message limit for any known model
RETRY_S = 1.0  # after a drafter gave the session up for lack of room
LOOK_S = 0.2  # between two looks whether a drafter would pay, on shared cores


class Followed:
    """One session. Made by ``Following.open``."""

    __slots__ = ("_limit", "_lookup", "_opened_s", "_retry_at_s", "_rows_from", "_runs_ahead", "_shared", "begun",
                 "decision", "link", "policy", "reads", "session", "side", "waiting")

    def __init__(self, side: TargetSide, policy: SpeculationPolicy, shared: Shared, limit: int) -> None:
        """limit: tokens that the session has at most, its prompt included."""
        self.session = side.session
        self.side = side
        self.policy = policy
        self.link: Link | None = None
        self.reads: FeatureSpec | None = None  # what its drafter reads of the engine's states
        self._runs_ahead = False  # whether its drafter grows on while the engine verifies, where it may
        self.begun = False
        self.decision = self._alone()
        self.waiting = Waiting()
        self._shared = shared
        self._limit = limit
        self._lookup: PromptLookup | None = None
        self._retry_at_s = 0.0  # no drafter is looked for before
        self._opened_s = -RETRY_S  # when the newest drafter was told of it
        self._rows_from = 0  # feature rows before were handed over, or are outside the drafter's window

    @property
    def left(self) -> int:
        """Tokens that may still be committed."""
        return self._limit - self.side.base

    @property
    def nodes(self) -> int:
        """Rows to verify now, root included."""
        held, decision = len(self.side.tree) - 1, self.decision
        return 1 if not held or self.left == 1 else 1 + min(held, decision.lookup or decision.verify)

    def take(self, rows: int) -> DraftTree:
        """The best of its tree in at most so many rows, root included."""
        return self.side.tree.best(min(rows, self.nodes))

    def chain(self, most: int) -> list[int]:
        """The best path below the newest token, at most so many tokens: for an engine that verifies no trees."""
        rows = self.nodes
        if rows == 1:
            return []
        tree = self.side.tree
        if not tree.is_chain:  # of one, the best nodes are the first
            tree = tree.best(rows)
            tree = tree.select(tree.best_path())
        tokens: list[int] = tree.tokens.tolist()
        return tokens[1 : min(rows, 1 + most, self.left)]

    def waits(self, now_s: float) -> bool:
        """Whether the step should leave it out for a while, because growth may still come in time."""
        if self.link is None or self.side.heard or now_s >= self.waiting.until_s:
            return False
        tree = self.side.tree
        return len(tree) == 1 or tree.promise(self.decision.verify) < self.decision.enough

    def begin(self, now_s: float, others: int) -> None:
        """It is computed from now on, beside so many ``others``."""
        self.begun = True
        self.decision = self._decide(now_s, others, ())
        self._follow(now_s, others)
        self._await(now_s)

    def pause(self) -> None:
        """It is not computed for a while."""
        self.begun = False
        self.detach()

    def detach(self) -> None:
        """Nobody follows it any more; its drafter, if it had one, is told."""
        self._leave(self.side.detach())

    def close(self) -> None:
        """The answer is over."""
        self._leave(self.side.close())

    def allow(self, allowed: bool, now_s: float) -> None:
        """Its client (or the router's policy) allows or forbids speculation from now on."""
        if allowed:
            self._note(self.policy.allow(now_s), self.link)
            return
        self._note(self.policy.forbid(now_s), self.link)
        self._lookup = None  # it would miss tokens
        self.detach()
        self.decision = self._alone()

    def learn(self, verified: Verified, step: Step) -> Learned:
        """What a step gave, and what the next round is decided by."""
        record = self._learn(verified, step, step.ended_s)
        if verified.finish:
            return Learned(self, verified, record, (), (), None)
        chain, chances = self._look_up(verified.tokens)
        self.waiting.unasked += len(verified.tokens)
        return Learned(self, verified, record, chain, chances, self._sees(step.ended_s, step.sessions - 1, chances))

    def commit(self, learned: Learned, decision: Decision | None, step: Step) -> None:
        """Make ``tokens`` part of the session, and have the drafter told by the next flush. ``decision``: of the next
        round; None: nobody drafts there."""
        now_s, verified, side = step.ended_s, learned.verified, self.side
        if verified.finish:
            side.commit(verified.tokens)
            return
        decision = self.decision = decision or self._alone()
        if decision.want:
            self.waiting.asks()
        message = side.commit(verified.tokens, self._rows_of(verified), verified.drafted, decision.want, decision.ahead)
        self._shared.pool.say(self.link, message)
        self._follow(now_s, step.sessions - 1)
        self._await(now_s)
        if decision.lookup:
            chances = learned.chances[: decision.lookup]
            side.add_lookup(learned.chain[: decision.lookup], [log(chance) for chance in chances])

    def wants_rows(self) -> tuple[FeatureSpec, int] | None:
        """Which feature rows its drafter reads, and the first position whose row it has not had."""
        return (self.reads, self._rows_from) if self.reads is not None else None

    def give_rows(self, start: int, count: int, rows: bytes) -> None:
        """Rows of committed tokens from ``start`` on, in order; what is left out is a gap that the drafter bridges."""
        if self.reads is None:
            return
        size = len(rows) // max(1, count)
        for at in range(0, count, ROWS):
            self._shared.pool.say(self.link, Features(self.session, start + at, rows[at * size : (at + ROWS) * size],
                                                      min(ROWS, count - at), self.reads.dtype))
        self._rows_from = start + count

    def receive(self, message: Growth | Drop, now_s: float) -> None:
        """Take what its drafter sent, which came at ``now_s``. Raises RemoteProtocolError for what cannot be."""
        joined = self.side.receive(message)
        if isinstance(message, Drop):
            self._dropped(message.reason, now_s)
            return
        if joined < 0:
            self._shared.metrics.stale_growth()
            return
        self.waiting.heard(now_s, message.base, self.side.base, joined > 0, self.side.heard)

    def lost(self, now_s: float, reason: Reason, moves: bool = False, had: Link | None = None) -> None:
        """Nobody follows it any more, through no wish of ours. ``moves``: another drafter takes over at its next
        commit, if one has room; else it decodes alone. ``had``: who followed, if that is over already."""
        link = self._unlink()
        if link is not None:
            self.side.lost()
        if moves and self._shared.pool.has_room:
            self._shared.metrics.moved()
            return
        self._note(self.policy.drafter_lost(now_s, reason), link or had)

    def _dropped(self, reason: str, now_s: float) -> None:
        link = self._unlink()
        self._shared.pool.part(link)
        if reason == "draining" and link is not None:
            self._shared.pool.set_leaving(link, True)
        elif reason in ("capacity", "failed", "invalid"):
            self._retry_at_s = now_s + RETRY_S
        else:  # whoever drops what it was just given must not have the whole text again for each token
            self._retry_at_s = max(self._retry_at_s, self._opened_s + RETRY_S)
        self.lost(now_s, "draft_unavailable", moves=reason == "draining", had=link)
        if now_s >= self._retry_at_s:
            self.policy.drafter_ready(now_s)

    def _learn(self, verified: Verified, step: Step, now_s: float) -> RoundRecord:
        before, waiting, lookup = self.decision, self.waiting, self.decision.lookup > 0
        waited_s = waiting.stood_s(step.began_s) if self.link is not None and self.side.num_output else 0.0
        round_ = Round(drafted=verified.drafted, accepted=verified.accepted, depth=verified.depth,
                       verify_s=step.seconds, wait_s=waited_s, rows=step.rows,
                       late=waiting.stood and not self.side.heard, exchange_s=None if lookup else waiting.latency(),
                       first=waiting.first, lookup=lookup)
        # The first token comes with the prompt: nobody waits for a drafter there.
        waiting.first = waiting.first and (lookup or self.side.num_output == 0)
        if (change := self.policy.observe(now_s, round_)) is not None:
            self._note(change, self.link)
        return RoundRecord(verified.drafted, verified.accepted, len(verified.tokens), waited_s,
                           self._outcome(verified.drafted), before.why, None if before.lookup else self.link)

    def _outcome(self, drafted: int) -> str:
        if drafted:
            return "prompt_lookup" if self.decision.lookup else "used"
        if self.policy.mode is Mode.PLAIN:
            return "plain"
        return "draft_missing" if self.link is None or self.side.heard else "discarded_late"

    def _look_up(self, tokens: tuple[int, ...]) -> tuple[Sequence[int], Sequence[float]]:
        most = self._shared.policy.max_nodes if self._shared.lookup else 0
        if not most or not self.policy.allowed:
            return (), ()
        if self._lookup is None:
            self._lookup = PromptLookup([*self.side.tokens, *tokens])
        else:
            self._lookup.commit(tokens)
        return self._lookup.chain(min(most, self.left - len(tokens) - 1))

    def _decide(self, now_s: float, others: int, chances: Sequence[float]) -> Decision:
        seen = self._sees(now_s, others, chances)
        return self.policy.decide(now_s, seen) if seen is not None else self._alone()

    def _sees(self, now_s: float, others: int, chances: Sequence[float]) -> Seen | None:
        """None: there is nothing to decide."""
        followed = self.link is not None
        if not followed and not chances and not self._looks(now_s):
            return None
        return Seen(others, followed, chances, self.waiting.unasked, self._runs_ahead)

    def _alone(self) -> Decision:
        return Decision(self.policy.mode, 0, 0, 0, False, False, 0.0, 0.0,
                        "no drafter" if self.policy.allowed else "forbidden")

    def _looks(self, now_s: float) -> bool:
        """Whether a drafter could be found for it."""
        return now_s >= self._retry_at_s and self._shared.pool.has_room

    def _follow(self, now_s: float, others: int) -> None:
        if self.link is not None:
            if not self.decision.follow:
                self.detach()
        elif self._looks(now_s):
            if self.decision.follow:
                self._attach(now_s, others)
            elif self._shared.beliefs.latency.shared:  # to ask again takes time from the step
                self._retry_at_s = now_s + LOOK_S

    def _attach(self, now_s: float, others: int) -> None:
        self.link = self._shared.pool.join()
        hello = self._shared.pool.hello(self.link)
        if hello is None:
            return
        self.reads, self._runs_ahead = hello.features, hello.run_ahead > 0
        self._opened_s = now_s
        # Who is asked for nothing while the text's own chain is verified reads the prompt meanwhile.
        message = self.side.attach(self.decision.want, self.decision.ahead)
        self._shared.pool.say(self.link, message)
        self.waiting.attached()
        self._rows_from = max(0, self.side.base - hello.max_context)
        if not self.decision.lookup:
            self.decision = self._decide(now_s, others, ())

    def _unlink(self) -> Link | None:
        """Whom it had, and has no more."""
        link, self.link, self.reads, self._runs_ahead = self.link, None, None, False
        return link

    def _leave(self, message: Close | None) -> None:
        link = self._unlink()
        self._shared.pool.part(link)
        self._shared.pool.say(link, message)

    def _await(self, now_s: float) -> None:
        """Its drafter hears of its newest token now; from here on it may wait."""
        tells = self.link is not None and self.decision.want and len(self.side.tree) == 1
        self.waiting.begin(now_s, self.decision.wait_s if self.link is not None else 0.0,
                           self.side.base if tells else None)

    def _rows_of(self, verified: Verified) -> Features | None:
        if self.reads is None or not verified.rows:
            return None
        start, count = self.side.base - 1, len(verified.tokens)
        self._rows_from = start + count
        return Features(self.session, start, verified.rows, count, self.reads.dtype)

    def _note(self, change: Transition | None, link: Link | None) -> None:
        if change is not None:
            self._shared.changed(self.session, change, self.decision.why, link)


class Learned(NamedTuple):
    """A session between a step and the decision that follows."""

    followed: Followed
    verified: Verified
    record: RoundRecord
    chain: Sequence[int]  # that the text foretells
    chances: Sequence[float]  # of it
    seen: Seen | None  # None: there is nothing to decide


Failed = Callable[[int, Exception], None]  # a session, and what went wrong in it

AT_ONCE = 64  # items of a frame that are looked at before the clock is
GLANCE_S = 0.005  # for what has come, where nobody waits
LANES = 16  # rows of a trace for sessions; later ones share them


class Following:
    """See the module, and the package for an example. Implements ``messages.LinkEvents``."""

    def __init__(self, config: TargetSection, costs: StepCosts, metrics: TargetMetrics, gives: GiveRows = no_rows,
                 clock: Callable[[], float] = time.monotonic, trace: Trace | None = None, inbox: Inbox | None = None,
                 changed: Changed | None = None, together: bool = False) -> None:
        """gives: see ``pool.DraftPool``; changed: told of sessions that have another mode, in place of the log;
        together: the engine's steps are of all its sessions at once."""
        self.inbox = inbox or Inbox(clock)
        self.pool = DraftPool(metrics, gives)
        # One for all: a new session need not learn how far the drafts are.
        self._beliefs = Beliefs(costs, config.shared_cores, together)
        self._shared = Shared(self.pool, config.policy, self._beliefs, metrics, config.prompt_lookup, changed or logged)
        self._most = config.max_sessions
        self._costs = costs
        self._metrics = metrics
        self._clock = clock
        self._trace = trace or Trace("", "target")
        self._log = logger("target")
        self.sessions: dict[int, Followed] = {}
        self._nonsense: dict[str, set[str]] = {}  # by address: fields that were wrong
        self._lanes: dict[Link, Lane] = {}  # of links that are up
        self._faults: dict[Link, FaultRate] = {}
        self._told: list[RoundRecord] = []
        self._step: Step | None = None

    # From any thread.

    def link_up(self, link: Link, hello: DraftHello) -> None:
        self._lanes[link] = Lane(self.inbox)

        def event() -> None:
            self.pool.link_up(link, hello)
            self._faults[link] = FaultRate()
            self._nonsense.pop(link.address, None)
            self._put_aside()
            for followed in self.sessions.values():
                followed.policy.drafter_ready(self._clock())

        self.inbox.post(event)

    def link_down(self, link: Link, reason: str) -> None:
        self._lanes.pop(link, None)

        def event() -> None:
            self.pool.link_down(link, reason)
            self._faults.pop(link, None)
            for followed in self.sessions.values():
                if followed.link is link:
                    followed.lost(self._clock(), "draft_unavailable", moves=True)
            self._put_aside()

        self.inbox.post(event)

    def link_leaving(self, link: Link, leaving: bool) -> None:
        """Discovery no longer lists this draft (or does so again): no new session goes there, open ones go on."""
        self.inbox.post(lambda: self.pool.set_leaving(link, leaving))

    def received(self, link: Link, items: Sequence[TargetBound],
                 faults: Sequence[tuple[int, RemoteProtocolError]]) -> None:
        lane = self._lanes.get(link)
        if lane is None:
            return
        came_s = self._clock()  # now: a step may be on the device until this is looked at
        for at in range(0, max(1, len(items), len(faults)), AT_ONCE):
            upto = at + AT_ONCE
            if not lane.post(partial(self._receive, link, items[at:upto], faults[at:upto], came_s)):
                self._metrics.stale_growth()  # what is lost is late at worst
                return

    def full(self, link: Link) -> bool:
        lane = self._lanes.get(link)
        return lane is not None and lane.full

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
        self.sessions[session] = followed
        self._loaded()
        return followed

    def begin(self, sessions: Iterable[Followed], now_s: float) -> None:
        """They are computed from now on (again): drafters may follow."""
        others = sum(followed.begun for followed in self.sessions.values())
        for followed in sessions:
            followed.begin(now_s, others)
            others += 1

    def committed(self, batch: Sequence[Verified], step: Step, failed: Failed | None = None) -> list[RoundRecord]:
        """What a step gave. Drafters hear of it with the next ``flush``. failed: is told of a session in which
        something went wrong, which has no record then; without it that is raised."""
        learned = list[Learned]()
        for verified in batch:
            try:
                learned.append(self.sessions[verified.session].learn(verified, step))
            except Exception as error:
                _fails(failed, verified.session, error)
        decisions = iter(SpeculationPolicy.decide_step([(one.followed.policy, one.seen) for one in learned
                                                        if one.seen is not None]))
        records = list[RoundRecord]()
        for one in learned:
            decision = next(decisions) if one.seen is not None else None
            followed, base, began_s = one.followed, one.followed.side.base, one.followed.waiting.committed_s
            try:
                followed.commit(one, decision, step)
            except Exception as error:
                _fails(failed, followed.session, error)
                continue
            records.append(one.record)
            if self._trace.keeps:
                self._picture(followed, base, began_s, one.record, step)
        self._told += records
        self._step = step
        return records

    def flush(self) -> bool:
        """Send what there is to say to drafts, one frame each, and count what was verified. Returns whether anything
        left."""
        left = self.pool.flush()
        told, self._told = self._told, []
        if told:
            self._metrics.rounds([(one.drafted, min(one.accepted, one.tokens - 1), one.outcome) for one in told])
            self.pool.judge([(one.link, one.drafted, one.accepted) for one in told if one.drafted and one.link])
        step, self._step = self._step, None
        if step is not None and step.prefill:  # a prompt's rows cost something else
            self._costs.passes()
        elif step is not None:
            self._costs.observe(step.rows, step.seconds)
        return left

    def take(self, sessions: Sequence[Followed], within_s: float = 0.0) -> list[DraftTree]:
        """What each should verify now, after ``wait``."""
        self.wait(sessions, within_s)
        return [followed.take(followed.nodes) for followed in sessions]

    def wait(self, sessions: Sequence[Followed], within_s: float) -> None:
        """For growth that is worth it, at most so long; never for nothing, and no longer for much."""
        began_s = self._clock()
        until_s = began_s + within_s
        self.inbox.drain(until_s=max(until_s, began_s + GLANCE_S))
        while (now_s := self._clock()) < until_s and (waiting := [one for one in sessions if one.waits(now_s)]):
            for one in waiting:
                one.waiting.stood = True
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

    def _receive(self, link: Link, items: Sequence[TargetBound], faults: Sequence[tuple[int, RemoteProtocolError]],
                 came_s: float) -> None:
        for session, error in faults:
            self._refuse(link, self._of(session, link), error)
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
                self._refuse(link, followed, error)

    def _put_aside(self) -> None:
        """End the sessions of drafters that stand aside now."""
        for followed in self.sessions.values():
            if (link := followed.link) is not None and not self.pool.follows(link):
                followed.detach()
                followed.lost(self._clock(), "draft_unavailable", moves=True, had=link)

    def _of(self, session: int, link: Link) -> Followed | None:
        followed = self.sessions.get(session)
        return followed if followed is not None and followed.link is link else None

    def _refuse(self, link: Link, followed: Followed | None, error: RemoteProtocolError) -> None:
        self._metrics.invalid_growth()
        faults = self._faults.get(link)
        if faults is not None and faults.fault(self._clock()):
            link.refuse(error.field)
        if followed is not None:
            self._refused(followed.session, link.address, error.field)
            followed.detach()
            followed.lost(self._clock(), "incompatible", had=link)

    def _refused(self, session: int, address: str, field: str) -> None:
        # A line for each new problem of a connection: who sends nonsense sends it to every session.
        known = self._nonsense.setdefault(address, set())
        (self._log.debug if field in known else self._log.warning)("invalid growth", session=session, draft=address,
                                                                   field=field)
        known.add(field)

    def _picture(self, followed: Followed, base: int, began_s: float, record: RoundRecord, step: Step) -> None:
        lane = f"answer {followed.session % LANES}"
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
