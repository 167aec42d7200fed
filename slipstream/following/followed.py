"""One session that may be drafted for: its tree, who drafts, what was decided, and when.

Rules:
1. What a round needs is decided once, when the round before is committed (or a drafter joins): ``Followed.decision``
   holds until the next commit.
2. A session without its wanted drafter looks for one at each commit. If prompt lookup promises more tokens than a
   drafter in the same time, its chain is verified at once and no drafter is asked.
3. A lost or unwilling drafter costs nothing but speed: another takes over, or the session decodes alone.
4. Draft latency is learned only from answers to commits that left nothing but the root (``Waiting``): growth for a
   target that holds nodes does not show how long a whole tree takes.
5. Waiting time counts from the newest commit on; before the first token, from the step that left the session out.
6. A session does not wait for a drafter that still has to read the whole text: plain steps make tokens meanwhile.

It belongs to the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slipstream.base.config import PolicySection
from slipstream.base.value import value
from slipstream.decision.beliefs import Beliefs, StepCosts
from slipstream.decision.decide import PLAIN, Decision, Reason, Round, Seen, Transition, Why
from slipstream.decision.policy import SpeculationPolicy
from slipstream.following.pool import FORGET_S, DraftPool
from slipstream.observe.metrics import TargetMetrics
from slipstream.protocol.messages import (
    FEATURE_DTYPES,
    Close,
    DraftBound,
    Drop,
    Features,
    FeatureSpec,
    Growth,
    Link,
)
from slipstream.protocol.requests import Finish
from slipstream.protocol.session import TargetSide
from slipstream.protocol.tree import DraftTree


@value
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

    def plain_s(self, costs: StepCosts, looked_up: int) -> float:
        """Seconds that the step would have taken without drafters. ``looked_up``: nodes from prompt lookup."""
        return self.seconds * costs.cost(self.rows - self.nodes + looked_up) / costs.cost(self.rows)


@value
class Verified:
    """What one session got out of a step: ``tokens`` to commit, the first ``accepted`` of them draft tokens."""

    session: int
    tokens: tuple[int, ...]
    drafted: int  # draft tokens that were verified
    accepted: int
    depth: int  # of the deepest of them
    finish: Finish = ""  # why the answer ends here; "": it goes on
    rows: bytes | None = None  # feature rows of the positions before each of ``tokens``, if its drafter reads them
    forced: Sequence[int] = ()  # by its grammar, behind ``tokens``: what has to come, though others may spell it


LOOKED_UP = "prompt_lookup"  # an outcome: the text's own chain was verified


@value
class RoundRecord:
    """A finished round: its numbers, and the reason of its decision."""

    drafted: int
    accepted: int
    tokens: int
    waited_s: float  # it stood still for its drafter
    outcome: str  # one of the metric's
    why: Why
    link: Link | None  # who drafted, if anybody did

    @property
    def late(self) -> bool:
        """Whether the session waited and no growth came in time."""
        return self.outcome == "discarded_late" and self.waited_s > 0.0


Changed = Callable[[int, Transition, Why, Link | None], None]
Say = Callable[[Link | None, DraftBound | None], None]  # with the next flush
Room = Callable[[Link | None], int]  # bytes of feature rows that a link may still be told with it


def logged(log: Callable[..., object], session: int, change: Transition, why: Why, _: Link | None) -> None:
    """A line for each. ``log``: a logger's method."""
    log("mode changed", scope="session", session=session, before=change.before.value, after=change.after.value,
        reason=change.reason, gain=round(change.gain, 3), why=why)


@dataclass(frozen=True, slots=True)
class Shared:
    """What all sessions of one target share."""

    pool: DraftPool
    say: Say
    room: Room
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
        self.committed_s = 0.0  # when the newest token was committed; of a prompt, when it could have been verified
        self.until_s = 0.0  # the deadline of the drafter's answer
        self.stood = False  # a step went without it since then, because it waited
        self.first = True  # the drafter that follows has not been awaited yet, or not for long
        self.unasked = 0  # tokens that were committed since a tree was asked for
        self._heard_s: float | None = None  # when the drafter answered for it
        self._asked: dict[int, float] = {}  # base -> when
        self._latency_s: float | None = None  # of an answer that came since the last round

    def attached(self) -> None:
        """A drafter follows from here, and has the whole text to read. What was asked of who followed before is over:
        behind an answer that was put back the same base is asked for again."""
        self.first, self.unasked = True, 0
        self._asked.clear()

    def asks(self) -> None:
        """A tree is asked for. What the drafter has to catch up with takes time that no later answer takes."""
        self.first, self.unasked = self.first or self.unasked > PENDING, 0

    def stands(self, now_s: float, prompt: bool) -> None:
        """A step goes without it, because it waits. ``prompt``: nothing is committed behind its prompt yet."""
        if prompt and not self.stood:
            self.committed_s = now_s
        self.stood = True

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
            self._latency_s = now_s - asked_s if now_s > asked_s else 0.0

    def stood_s(self, began_s: float) -> float:
        """Seconds that it, which stood still, did so before the step that began at ``began_s``."""
        answered_s = self._heard_s if self._heard_s is not None else min(began_s, self.until_s)
        return max(0.0, answered_s - self.committed_s)

    def latency(self) -> float | None:
        """The latency of the newest answer in seconds; each is returned once."""
        latency_s, self._latency_s = self._latency_s, None
        return latency_s


ROWS = 256  # feature rows of one item: well below the message limit for any known model
MOST_ROWS = 128 << 20  # bytes of them that a link is told at once: half of what may wait for it
RETRY_S = 1.0  # after a drafter gave the session up for lack of room
LOOK_S = 0.2  # between two looks whether a drafter would pay, on shared cores


class Followed:
    """One session. Made by ``Following.open``."""

    __slots__ = ("_limit", "_opened_s", "_retry_at_s", "_rows_from", "_runs_ahead", "_shared", "begun", "decision",
                 "link", "plain", "policy", "reads", "session", "side", "waiting")

    def __init__(self, side: TargetSide, policy: SpeculationPolicy, shared: Shared, limit: int,
                 plain: bool = False) -> None:
        """limit: tokens that the session has at most, its prompt included. plain: nothing is ever drafted for it, its
        text not looked up either."""
        self.session = side.session
        self.side = side
        self.policy = policy
        self.link: Link | None = None
        self.reads: FeatureSpec | None = None  # what its drafter reads of the engine's states
        self._runs_ahead = False  # whether its drafter grows on while the engine verifies, where it may
        self.begun = False
        self.decision = self._alone()
        self.waiting = Waiting()
        self.plain = plain
        self._shared = shared
        self._limit = limit
        self._retry_at_s = 0.0  # no drafter is looked for before
        self._opened_s = -RETRY_S  # when the newest drafter was told of it
        self._rows_from = 0  # feature rows before were handed over, or are outside the drafter's window

    @property
    def left(self) -> int:
        """Tokens that may still be committed."""
        return self._limit - self.side.base

    @property
    def looks_up(self) -> bool:
        """Whether what its text and its grammar foretell may be verified."""
        return self._shared.lookup and self._shared.policy.max_nodes > 0 and not self.plain

    @property
    def nodes(self) -> int:
        """Rows to verify now, root included."""
        held, most = len(self.side.tree.tokens) - 1, self.decision.lookup or self.decision.verify
        return 1 if not held or self.left == 1 else 1 + (held if held < most else most)

    @property
    def tree(self) -> DraftTree:
        """The session's tree, without nodes after the last token that may be committed: a model may have no position
        for them."""
        tree, left = self.side.tree, self.left
        if left >= len(tree.tokens):
            return tree
        return tree.select([node for node, level in enumerate(tree.levels()) if not level or level < left])

    def take(self, rows: int) -> DraftTree:
        """The best of its tree in at most so many rows, root included."""
        return self.tree.best(min(rows, self.nodes))

    def chain(self, most: int) -> list[int]:
        """The best path below the newest token, at most so many tokens: for an engine that verifies no trees."""
        tree = self.side.tree
        if len(tree.tokens) == 1 or (rows := self.nodes) == 1:
            return []
        if not tree.is_chain:  # of one, the best nodes are the first
            tree = tree.best(rows)
            tree = tree.select(tree.best_path())
        return tree.tokens[1 : min(rows, 1 + most, self.left)]

    def waits(self, now_s: float) -> bool:
        """Whether the step should leave it out for a while, because growth may still come in time."""
        if self.link is None or self.side.heard or now_s >= self.waiting.until_s:
            return False
        tree = self.side.tree
        return len(tree.tokens) == 1 or tree.expected_accepted(self.decision.verify) < self.decision.enough

    def stands(self, now_s: float) -> None:
        """The step leaves it out, as it ``waits``."""
        self.waiting.stands(now_s, self.side.base == self.side.prompt_len)

    def begin(self, now_s: float, others: int) -> None:
        """The session is computed from now on, beside ``others`` other sessions."""
        self.begun = True
        self.decision = self._decide(now_s, others)
        self._follow(now_s, others)
        self._await(now_s)

    def pause(self) -> None:
        """The session is not computed for a while."""
        self.begun = False
        self.detach()

    def detach(self) -> None:
        """Nobody follows it any more; its drafter, if it had one, is told."""
        self._leave(self.side.detach())

    def close(self) -> None:
        """The answer is over."""
        self.policy.close()
        self._leave(self.side.close())

    def allow(self, allowed: bool, now_s: float) -> None:
        """The router's policy allows or forbids drafts from now on. What its text foretells needs no drafter, and is
        verified all the same."""
        if allowed:
            self.plain = False
            self.policy.allow(now_s)
            return
        change = self.policy.forbid(now_s)
        if self.begun or self.side.num_output:  # else it begins so
            self._note(change, self.link)
        if self.link is not None:
            self.detach()
        if not self.decision.lookup:  # that chain may be on its way through the engine
            self.decision = self._alone()

    def learn(self, verified: Verified, step: Step, now_s: float) -> tuple[RoundRecord, Seen | None]:
        """Take the result of a step that ended at ``now_s``. Returns the round's record and the inputs of the next
        decision; None: there is nothing to decide."""
        tokens, drafted, accepted = verified.tokens, verified.drafted, verified.accepted
        before, waiting, side, link = self.decision, self.waiting, self.side, self.link
        lookup, first_token = before.lookup > 0, side.base == side.prompt_len
        waited_s = waiting.stood_s(step.began_s) if waiting.stood and link is not None else 0.0
        round_ = Round(drafted, accepted, verified.depth, step.seconds, waited_s, step.rows,
                       waiting.stood and not side.heard, None, None if lookup else waiting.latency(), waiting.first,
                       lookup)
        # At the first token the drafter has the prompt to read, and so it may have behind it.
        reading = not waiting.stood and (first_token or (waiting.first and link is not None))
        waiting.first = waiting.first and (lookup or first_token)
        took_s = round_.took_s(self._shared.policy.deadline_max_s)
        if link is not None and took_s is not None:
            self._shared.pool.took(link, took_s, now_s)
        if (change := self.policy.observe(now_s, round_)) is not None:
            self._note(change, link)
        gave_up = change is not None and change.reason == "draft_timeout"
        if link is not None and (gave_up or waited_s):
            self._leave_slow(link, gave_up, now_s)
        outcome = "used" if drafted and not lookup else self._outcome(drafted, reading)
        record = RoundRecord(drafted, accepted, len(tokens), waited_s, outcome, before.why, None if lookup else link)
        if verified.finish:
            return record, None
        left = self.left - len(tokens)
        chances: Sequence[float] = side.foretell(
            tokens, min(self._shared.policy.max_nodes, left - 1), verified.forced) if self.looks_up else ()
        waiting.unasked += len(tokens)
        return record, self._sees(now_s, step.sessions - 1, chances, left)

    def commit(self, verified: Verified, decision: Decision | None, step: Step, now_s: float) -> None:
        """Make ``tokens`` part of the session, and have the drafter told by the next flush. ``decision``: of the next
        round; None: nobody drafts there."""
        side = self.side
        if verified.finish:
            side.commit(verified.tokens)
            return
        decision = self.decision = decision or self._alone()
        if decision.want:
            self.waiting.asks()
        rows = self._rows_of(verified, self.reads) if self.reads is not None and verified.rows else None
        message = side.commit(verified.tokens, rows, decision.want, decision.ahead)
        if message is not None:
            self._shared.say(self.link, message)
        if self.link is None or not decision.follow:
            self._follow(now_s, step.sessions - 1)
        self._await(now_s)
        if decision.lookup:
            side.add_foretold(decision.lookup)

    def wants_rows(self, end: int) -> int | None:
        """From which position on its drafter is to have the feature rows before ``end``: it has had what stands before,
        or its link has room for the newest alone. None: it lacks none, or has room for none."""
        if (reads := self.reads) is None or self._rows_from >= end:
            return None
        start = end - self._shared.room(self.link) // (reads.width * FEATURE_DTYPES[reads.dtype])
        return max(self._rows_from, start) if start < end else None

    def give_rows(self, start: int, count: int, rows: bytes) -> None:
        """Rows of committed tokens from ``start`` on, in order; what is left out is a gap for the drafter."""
        if self.reads is None:
            return
        size = len(rows) // max(1, count)
        for at in range(0, count, ROWS):
            self._shared.say(self.link, Features(self.session, start + at, rows[at * size : (at + ROWS) * size],
                                                 min(ROWS, count - at), self.reads.dtype))
        self._rows_from = start + count

    def receive(self, message: Growth | Drop, now_s: float) -> None:
        """Take what its drafter sent, which came at ``now_s``. Raises RemoteProtocolError for what cannot be."""
        joined = self.side.receive(message)
        if joined < 0:
            self._shared.metrics.stale_growth()
            return
        if isinstance(message, Drop):
            self._dropped(message.reason, now_s)
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

    def _leave_slow(self, link: Link, gave_up: bool, now_s: float) -> None:
        """Another drafter takes over at its next commit where that pays for reading the text again. ``gave_up``: for
        ``link`` drafts were given up."""
        if (gave_up or now_s - self._opened_s > FORGET_S) and self._shared.pool.is_slow(link, gave_up, now_s):
            self._shared.metrics.moved()
            self.detach()
            self.policy.drafter_ready(now_s)

    def _dropped(self, reason: str, now_s: float) -> None:
        link = self._unlink()
        self._shared.pool.part(link)
        if reason == "draining" and link is not None:
            self._shared.pool.set_leaving(link, True)
        elif reason in ("capacity", "failed", "invalid"):
            self._retry_at_s = now_s + RETRY_S
        else:  # whoever drops what it was just given must not have the whole text again for each token
            self._retry_at_s = max(self._retry_at_s, self._opened_s + RETRY_S)
        # A drafter hears nothing while a long prompt is computed, and its lease ends: it is opened again behind it.
        moves = reason == "draining" or (reason == "expired" and not self.side.num_output)
        self.lost(now_s, "draft_unavailable", moves, had=link)
        if now_s >= self._retry_at_s:
            self.policy.drafter_ready(now_s)

    def _outcome(self, drafted: int, reading: bool) -> str:
        if drafted:
            return LOOKED_UP if self.decision.lookup else "used"
        unasked = not self.decision.want and (self.link is not None or self._shared.pool.has_room)
        if self.policy.mode is PLAIN or reading or unasked:
            return "plain"
        return "draft_missing" if self.link is None or self.side.heard else "discarded_late"

    def _decide(self, now_s: float, others: int) -> Decision:
        seen = self._sees(now_s, others, (), self.left)
        return self.policy.decide(seen) if seen is not None else self._alone()

    def _sees(self, now_s: float, others: int, chances: Sequence[float], left: int) -> Seen | None:
        """``left``: tokens that may come. None: there is nothing to decide; before the last one no draft is of use."""
        followed = self.link is not None
        if left < 2 or (not followed and not chances and not self._looks(now_s)):
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
        self.link = self._shared.pool.join(now_s)
        hello = self._shared.pool.hello(self.link)
        if hello is None:
            return
        self.reads, self._runs_ahead = hello.features, hello.run_ahead > 0
        self._opened_s = now_s
        # Who is asked for nothing while the text's own chain is verified is told of the prompt meanwhile.
        message = self.side.attach(self.decision.want, self.decision.ahead)
        self._shared.say(self.link, message)
        self.waiting.attached()
        self._rows_from = max(0, self.side.base - hello.max_context)
        if not self.decision.lookup:
            self.decision = self._decide(now_s, others)

    def _unlink(self) -> Link | None:
        """Whom it had, and has no more."""
        link, self.link, self.reads, self._runs_ahead = self.link, None, None, False
        self.policy.alone()
        return link

    def _leave(self, message: Close | None) -> None:
        link = self._unlink()
        self._shared.pool.part(link)
        self._shared.say(link, message)

    def _await(self, now_s: float) -> None:
        """Its drafter hears of its newest token now; from here on it may wait."""
        tells = self.link is not None and self.decision.want and len(self.side.tree.tokens) == 1
        waits = self.link is not None and (not self.waiting.first or self._shared.policy.always)
        self.waiting.begin(now_s, self.decision.wait_s if waits else 0.0, self.side.base if tells else None)

    def _rows_of(self, verified: Verified, reads: FeatureSpec) -> Features:
        start, count = self.side.base - 1, len(verified.tokens)
        self._rows_from = start + count
        return Features(self.session, start, verified.rows or b"", count, reads.dtype)

    def _note(self, change: Transition | None, link: Link | None) -> None:
        if change is not None:
            self._shared.changed(self.session, change, self.decision.why, link)
