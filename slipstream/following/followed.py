"""One session that may be drafted for: its tree, who drafts, what was decided, and when.

Rules:
1. What a round needs is decided once, when the round before is committed (or a drafter joins): ``Followed.decision``
   holds until the next commit.
2. A session without its wanted drafter looks for one at each commit. If prompt lookup promises more tokens than a
   drafter in the same time, its chain is verified at once and no drafter is asked.
3. A lost or unwilling drafter costs nothing but speed: another takes over, or the session decodes alone.
4. Draft latency is learned only from answers to commits that left nothing but the root (``DraftWait``): growth for a
   target that holds nodes does not show how long a whole tree takes.
5. Waiting time counts from the newest commit on; before the first token, from the step that left the session out.
6. A session does not wait for a drafter that still has to read the whole text: plain steps make tokens meanwhile. Until
   it has proposed something its reading is timed, not its latency; a session waits once that is about to end.

It belongs to the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from slipstream.base.config import PolicySection
from slipstream.base.value import value
from slipstream.decision.beliefs import Beliefs, StepCosts, whole_context
from slipstream.decision.decide import PLAIN, SPECULATE, Decision, Reason, Round, RoundInputs, Transition, Why
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
    num_read: int = 0  # by draft tokens: the sum of their ``whole_context``
    prefill: bool = False  # it computed prompts too

    @property
    def ended_s(self) -> float:
        return self.began_s + self.seconds

    def plain_s(self, costs: StepCosts, looked_up: int) -> float:
        """Seconds that the step would have taken without drafters. ``looked_up``: nodes from prompt lookup."""
        if not self.nodes:
            return self.seconds
        left = costs.cost(self.rows - self.nodes + looked_up, self.num_read * looked_up // self.nodes)
        return self.seconds * left / costs.cost(self.rows, self.num_read)


@value
class Verified:
    """What one session got out of a step: ``tokens`` to commit, the first ``accepted`` of them draft tokens."""

    session: int
    tokens: tuple[int, ...]
    drafted: int  # draft tokens that were verified
    accepted: int
    finish: Finish = ""  # why the answer ends here; "": it goes on
    rows: bytes | None = None  # feature rows of the positions before each of ``tokens``, if its drafter reads them
    forced: Sequence[int] = ()  # by its grammar, behind ``tokens``: what has to come, though others may spell it
    ranks: Sequence[int] | None = None  # the accepted nodes' places in the tree, best nodes first; None: it is a chain


LOOKED_UP = "prompt_lookup"  # an outcome: the text's own chain was verified


@value
class RoundRecord:
    """A finished round: its numbers, and the reason of its decision."""

    drafted: int
    accepted: int
    tokens: int
    waited_s: float  # for its drafter
    outcome: str  # one of the metric's
    why: Why
    link: Link | None  # who drafted, if anybody did

    @property
    def late(self) -> bool:
        """Whether the session waited and no growth came in time."""
        return self.outcome == "discarded_late" and self.waited_s > 0.0


OnModeChange = Callable[[int, Transition, Why, Link | None], None]
Send = Callable[[Link | None, DraftBound | None], None]  # with the next flush
FreeBytes = Callable[[Link | None], int]  # of feature rows that a link may still be sent with it


def log_mode_change(log: Callable[..., object], session: int, change: Transition, why: Why, _: Link | None) -> None:
    """A line for each. ``log``: a logger's method."""
    log("mode changed", scope="session", session=session, before=change.before.value, after=change.after.value,
        reason=change.reason, gain=round(change.gain, 3), why=why)


@dataclass(frozen=True, slots=True)
class TargetContext:
    """What all sessions of one target share."""

    pool: DraftPool
    send: Send
    free_row_bytes: FreeBytes
    policy: PolicySection
    beliefs: Beliefs
    metrics: TargetMetrics
    prompt_lookup: bool  # in the text itself
    on_mode_change: OnModeChange

    def mode_changed(self, session: int, change: Transition, why: Why, link: Link | None) -> None:
        """``why``: of the decision in force then; ``link``: who drafted."""
        self.metrics.mode.changed(change.before.value, change.after.value, change.reason)
        self.on_mode_change(session, change, why, link)


MAX_CATCH_UP = 16  # committed tokens that a drafter takes in together with a tree
READING_S = 1.0  # without a proposal, before a drafter that was given a text counts as silent
MAX_TIMED = 4  # commits whose answers are still timed


class DraftWait:
    """One session's wait for its drafter, since the newest commit."""

    __slots__ = ("_answered_s", "_latency_s", "_requested_s", "committed_s", "deadline_s", "first_exchange",
                 "num_since_request", "owed_from_s", "reading_from_s", "skipped")

    def __init__(self) -> None:
        self.committed_s = 0.0  # when the newest token was committed; of a prompt, when it could have been verified
        self.deadline_s = 0.0  # of the drafter's answer
        self.skipped = False  # a step left it out since then, because it waited
        self.first_exchange = True  # the drafter that follows has the text to read, or much of it
        self.reading_from_s: float | None = None  # since when it reads the whole text; None: it has proposed something
        self.owed_from_s: float | None = None  # since when, meanwhile, it is asked for a tree; None: it is not
        self.num_since_request = 0  # tokens that were committed since a tree was asked for
        self._answered_s: float | None = None  # when the drafter answered for it
        self._requested_s: dict[int, float] = {}  # base -> when
        self._latency_s: float | None = None  # of an answer that came since the last round

    def attached(self, now_s: float, reads: bool, asked: bool) -> None:
        """A drafter follows from here, and has the whole text to read; not ``reads``: in no time. Requests to its
        predecessor are forgotten: after an answer was put back the same base is requested again."""
        self.first_exchange, self.reading_from_s, self.num_since_request = True, now_s if reads else None, 0
        self.owed_from_s = self.reading_from_s if asked else None
        self._requested_s.clear()

    def requested(self, now_s: float, wanted: int) -> None:
        """A tree of so many nodes is requested. What the drafter has to catch up with takes time that no later answer
        takes. Who is asked for nothing owes nothing, however long it has had the text."""
        if not wanted:
            self.owed_from_s = None
            return
        if self.owed_from_s is None and self.reading_from_s is not None:
            self.owed_from_s = now_s
        self.first_exchange, self.num_since_request = self.first_exchange or self.num_since_request > MAX_CATCH_UP, 0

    def unread_s(self, now_s: float, reading_s: float | None) -> float:
        """Seconds until the drafter should have read what it has, if others took ``reading_s`` for their texts; inf:
        not known, or too early to wait for it."""
        if self.reading_from_s is None or reading_s is None or now_s == self.reading_from_s:
            return inf
        return max(0.0, self.reading_from_s + reading_s - now_s)

    def skip(self, now_s: float, at_prompt: bool) -> None:
        """A step leaves it out, because it waits. ``at_prompt``: nothing is committed behind its prompt yet."""
        if at_prompt and not self.skipped:
            self.committed_s = now_s
        self.skipped = True

    def committed(self, now_s: float, wait_s: float, base: int | None) -> None:
        """The drafter gets the newest commit now. ``base``: of the answer that tells its latency, if one does."""
        self.committed_s, self.deadline_s, self.skipped, self._answered_s = now_s, now_s + wait_s, False, None
        if base is not None and not self.first_exchange:
            self._requested_s[base] = now_s
            if len(self._requested_s) > MAX_TIMED:
                del self._requested_s[min(self._requested_s)]

    def received(self, now_s: float, base: int, committed_base: int, joined: bool, answered: bool) -> None:
        """Growth for ``base`` arrived. ``joined``: some of it joined the tree at ``committed_base``; ``answered``: it
        is what was waited for."""
        if answered and self._answered_s is None:
            self._answered_s = now_s
        if joined and base < committed_base:
            # It crossed the commit, so its drafter believes in a tree here: what comes next is one more level of it.
            self._requested_s.pop(committed_base, None)
        asked_s = self._requested_s.pop(base, None)
        if asked_s is not None:
            self._latency_s = now_s - asked_s if now_s > asked_s else 0.0

    def waited_s(self, began_s: float) -> float:
        """Seconds that it waited before the step that began at ``began_s``, if it was skipped."""
        answered_s = self._answered_s if self._answered_s is not None else min(began_s, self.deadline_s)
        return max(0.0, answered_s - self.committed_s)

    def take_latency_s(self) -> float | None:
        """The latency of the newest answer in seconds; each is returned once."""
        latency_s, self._latency_s = self._latency_s, None
        return latency_s


ROWS_PER_ITEM = 256  # feature rows of one item: well below the message limit for any known model
RETRY_S = 1.0  # after a drafter gave the session up
LOOK_AGAIN_S = 0.2  # on shared cores, until it is checked again whether a drafter would pay


class Followed:
    """One session. Made by ``Following.open``."""

    __slots__ = (
        "_begun_base",
        "_can_run_ahead",
        "_context",
        "_left",
        "_limit",
        "_opened_s",
        "_retry_at_s",
        "_rows_from",
        "begun",
        "decision",
        "feature_spec",
        "link",
        "plain",
        "policy",
        "session",
        "side",
        "wait",
    )

    def __init__(self, side: TargetSide, policy: SpeculationPolicy, context: TargetContext, limit: int,
                 plain: bool = False) -> None:
        """limit: tokens that the session has at most, its prompt included. plain: nothing is ever drafted for it, its
        text not looked up either."""
        self.session = side.session
        self.side = side
        self.policy = policy
        self.link: Link | None = None
        self.feature_spec: FeatureSpec | None = None  # what its drafter reads of the engine's states
        self._can_run_ahead = False  # whether its drafter grows on while the engine verifies, where it may
        self.begun = False
        self.decision = self._plain_decision()
        self.wait = DraftWait()
        self.plain = plain
        self._begun_base = side.base  # when it was begun, or begun again: all before is computed first
        self._context = context
        self._limit = limit
        self._retry_at_s = 0.0  # no drafter is looked for before
        self._opened_s = -RETRY_S  # when the newest drafter was told of it
        self._left: Link | None = None  # the drafter that was too slow for it, until it has another
        self._rows_from = 0  # feature rows before were handed over, or are outside the drafter's window

    @property
    def num_left(self) -> int:
        """Tokens that may still be committed."""
        return self._limit - self.side.base

    @property
    def uses_prompt_lookup(self) -> bool:
        """Whether what its text and its grammar foretell may be verified."""
        return self._context.prompt_lookup and self._context.policy.max_nodes > 0 and not self.plain

    @property
    def num_rows(self) -> int:
        """Rows to verify now, root included."""
        num_held, max_nodes = len(self.side.tree.tokens) - 1, self.decision.lookup or self.decision.verify
        return 1 if not num_held or self.num_left == 1 else 1 + (num_held if num_held < max_nodes else max_nodes)

    @property
    def tree(self) -> DraftTree:
        """The session's tree, without nodes after the last token that may be committed: a model may have no position
        for them."""
        tree, num_left = self.side.tree, self.num_left
        if num_left >= len(tree.tokens):
            return tree
        return tree.select([node for node, level in enumerate(tree.levels()) if not level or level < num_left])

    def take(self, rows: int) -> DraftTree:
        """The best of its tree in at most so many rows, root included."""
        return self.tree.best(min(rows, self.num_rows))

    def chain(self, max_tokens: int) -> list[int]:
        """The best path below the newest token, at most so many tokens: for an engine that verifies no trees."""
        tree = self.side.tree
        if len(tree.tokens) == 1 or (rows := self.num_rows) == 1:
            return []
        if not tree.is_chain:  # of one, the best nodes are the first
            tree = tree.best(rows)
            tree = tree.select(tree.best_path())
        return tree.tokens[1 : min(rows, 1 + max_tokens, self.num_left)]

    def should_wait(self, now_s: float) -> bool:
        """Whether the step should leave it out for a while, because growth may still come in time."""
        if self.link is None or self.side.answered or now_s >= self.wait.deadline_s:
            return False
        return len(self.side.tree.tokens) == 1

    def skip_step(self, now_s: float) -> None:
        """The step leaves it out, because it ``should_wait``."""
        self.wait.skip(now_s, self.side.base == self.side.prompt_len)

    def begin(self, now_s: float, others: int) -> None:
        """The session is computed from now on, beside ``others`` other sessions."""
        self.begun, self._begun_base = True, self.side.base
        self.decision = self._decide(now_s, others)
        self._update_drafter(now_s, others)
        self._start_wait(now_s)

    def pause(self) -> None:
        """The session is not computed for a while."""
        self.begun = False
        self.detach()

    def detach(self) -> None:
        """Nobody follows it any more; its drafter, if it had one, is told."""
        self._release_drafter(self.side.detach())

    def close(self) -> None:
        """The answer is over."""
        self.policy.close()
        self._release_drafter(self.side.close())

    def allow(self, allowed: bool, now_s: float) -> None:
        """The router's policy allows or forbids drafts from now on. What its text foretells needs no drafter, and is
        verified all the same."""
        if allowed:
            self.plain = False
            self.policy.allow(now_s)
            return
        change = self.policy.forbid(now_s)
        if self.begun or self.side.num_output:  # else it begins so
            self._report_mode_change(change, self.link)
        if self.link is not None:
            self.detach()
        if not self.decision.lookup:  # that chain may be on its way through the engine
            self.decision = self._plain_decision()

    def learn(self, verified: Verified, step: Step, now_s: float) -> tuple[RoundRecord, RoundInputs | None]:
        """Take the result of a step that ended at ``now_s``. Returns the round's record and the inputs of the next
        decision; None: there is nothing to decide."""
        tokens, drafted, accepted = verified.tokens, verified.drafted, verified.accepted
        decision, wait, side, link = self.decision, self.wait, self.side, self.link
        looked_up, first_token = decision.lookup > 0, side.base == self._begun_base
        waited_s = wait.waited_s(step.began_s) if wait.skipped and link is not None else 0.0
        exchange_s = None if looked_up else wait.take_latency_s()
        if first_token and wait.reading_from_s is not None:  # the drafter had nothing to read before
            wait.reading_from_s, wait.owed_from_s = now_s, now_s if wait.owed_from_s is not None else None
        round_ = Round(drafted, accepted, step.seconds, waited_s, step.rows,
                       wait.skipped and not side.answered, None, exchange_s, wait.first_exchange, looked_up,
                       wait.reading_from_s is not None and now_s - wait.reading_from_s > READING_S, verified.ranks)
        # At its first token (since it was put back) the drafter has its text to read, and so it may have behind it.
        reading = not wait.skipped and (first_token or (wait.first_exchange and link is not None))
        wait.first_exchange = wait.first_exchange and wait.reading_from_s is not None
        latency_s = round_.latency_s(self._context.policy.deadline_max_s)
        if link is not None and latency_s is not None:
            self._context.pool.observe_latency(link, latency_s, now_s)
        if (change := self.policy.observe(now_s, round_)) is not None:
            self._report_mode_change(change, link)
        gave_up = change is not None and change.reason == "draft_timeout"
        if link is not None and gave_up and self.policy.silent_s:  # it takes no less, and no answer tells so
            self._context.pool.observe_latency(link, self.policy.silent_s, now_s)
        if link is not None and (gave_up or waited_s or decision.mode is not SPECULATE):
            self._leave_slow_drafter(link, gave_up, now_s)
        outcome = "used" if drafted and not looked_up else self._outcome(drafted, reading, now_s)
        record = RoundRecord(drafted, accepted, len(tokens), waited_s, outcome, decision.why,
                             None if looked_up else link)
        if verified.finish:
            return record, None
        num_left = self.num_left - len(tokens)
        chances: Sequence[float] = ()
        if self.uses_prompt_lookup:
            chances = side.predict(tokens, min(self._context.policy.max_nodes, num_left - 1), verified.forced)
        wait.num_since_request += len(tokens)
        return record, self._round_inputs(now_s, step.sessions - 1, chances, num_left)

    def commit(self, verified: Verified, decision: Decision | None, step: Step, now_s: float) -> None:
        """Make ``tokens`` part of the session, and have the drafter told by the next flush. ``decision``: of the next
        round; None: nobody drafts there."""
        side = self.side
        if verified.finish:
            side.commit(verified.tokens)
            return
        decision = self.decision = decision or self._plain_decision()
        self.wait.requested(now_s, decision.num_wanted)
        features = None
        if self.feature_spec is not None and verified.rows:
            features = self._features_of(verified, self.feature_spec)
        message = side.commit(verified.tokens, features, decision.num_wanted, decision.ahead)
        if message is not None:
            self._context.send(self.link, message)
        if self.link is None or not decision.follow:
            self._update_drafter(now_s, step.sessions - 1)
        self._start_wait(now_s)
        if decision.lookup:
            side.add_predicted(decision.lookup)

    def missing_rows_from(self, end: int) -> int | None:
        """The first of the feature rows before ``end`` to send to its drafter: it has the rows before, or its link has
        room for the newest alone. None: it lacks none, or has room for none."""
        if (spec := self.feature_spec) is None or self._rows_from >= end:
            return None
        start = end - self._context.free_row_bytes(self.link) // (spec.width * FEATURE_DTYPES[spec.dtype])
        return max(self._rows_from, start) if start < end else None

    def send_rows(self, start: int, count: int, rows: bytes) -> None:
        """Rows of committed tokens from ``start`` on, in order; what is left out is a gap for the drafter."""
        if self.feature_spec is None:
            return
        size = len(rows) // max(1, count)
        for at in range(0, count, ROWS_PER_ITEM):
            part = rows[at * size : (at + ROWS_PER_ITEM) * size]
            self._context.send(self.link, Features(self.session, start + at, part, min(ROWS_PER_ITEM, count - at),
                                                   self.feature_spec.dtype))
        self._rows_from = start + count

    def receive(self, message: Growth | Drop, now_s: float) -> None:
        """Take what its drafter sent, which came at ``now_s``. Raises RemoteProtocolError for what cannot be."""
        joined = self.side.receive(message)
        if joined < 0:
            self._context.metrics.stale_growth()
            return
        if isinstance(message, Drop):
            self._handle_drop(message.reason, now_s)
            return
        if (from_s := self.wait.reading_from_s) is not None and len(message.ids):
            if now_s > from_s:  # else it had read the text before the engine had
                self._context.beliefs.reading.observe(now_s - from_s)
            self.wait.reading_from_s = self.wait.owed_from_s = None
        self.wait.received(now_s, message.base, self.side.base, joined > 0, self.side.answered)

    def lost(self, now_s: float, reason: Reason, can_move: bool = False, former_link: Link | None = None) -> None:
        """Nobody follows it any more, through no wish of ours. ``can_move``: another drafter takes over at its
        next commit, if one has room; else it decodes alone. ``former_link``: its drafter, if unlinked already."""
        link = self._unlink()
        if link is not None:
            self.side.lost()
        if can_move and self._context.pool.has_room(now_s):
            self._context.metrics.moved()
            return
        self._report_mode_change(self.policy.drafter_lost(now_s, reason), link or former_link)

    def _leave_slow_drafter(self, link: Link, gave_up: bool, now_s: float) -> None:
        """Another drafter takes over at its next commit where that pays for reading the text again. ``gave_up``: the
        session has just stopped drafting because of ``link``; how slow that is may be known only later."""
        stopped = gave_up or self.decision.mode is not SPECULATE
        if (stopped or now_s - self._opened_s > FORGET_S) and self._context.pool.is_slow(link, gave_up, now_s):
            self._context.metrics.moved()
            self.detach()
            self._left = link
            self.policy.drafter_ready(now_s)

    def _handle_drop(self, reason: str, now_s: float) -> None:
        link = self._unlink()
        self._context.pool.release(link)
        if reason == "draining" and link is not None:
            self._context.pool.set_leaving(link, True)
        elif reason == "capacity":
            self._context.pool.refused(link, now_s)
        elif reason in ("failed", "invalid"):
            self._retry_at_s = now_s + RETRY_S
        else:  # whoever drops what it was just given must not have the whole text again for each token
            self._retry_at_s = max(self._retry_at_s, self._opened_s + RETRY_S)
        # A drafter hears nothing while a long prompt is computed, and its lease ends: it is opened again behind it.
        can_move = reason in ("draining", "capacity") or (reason == "expired" and not self.side.num_output)
        self.lost(now_s, "draft_unavailable", can_move, former_link=link)
        if self._drafter_available(now_s):
            self.policy.drafter_ready(now_s)

    def _outcome(self, drafted: int, reading: bool, now_s: float) -> str:
        if drafted:
            return LOOKED_UP if self.decision.lookup else "used"
        not_requested = not self.decision.num_wanted and (self.link is not None or self._context.pool.has_room(now_s))
        if self.policy.mode is PLAIN or reading or not_requested:
            return "plain"
        return "draft_missing" if self.link is None or self.side.answered else "discarded_late"

    def _decide(self, now_s: float, others: int) -> Decision:
        seen = self._round_inputs(now_s, others, (), self.num_left)
        return self.policy.decide(seen) if seen is not None else self._plain_decision()

    def _round_inputs(self, now_s: float, others: int, chances: Sequence[float], num_left: int) -> RoundInputs | None:
        """``num_left``: tokens that may come. None: nothing to decide, as no draft is of use before the last one."""
        followed = self.link is not None
        if num_left < 2 or (not followed and not chances and not self._drafter_available(now_s)):
            return None
        # A guess of what steps cost says nothing of reading: sessions of all lengths share its prices.
        context = 0 if self._context.beliefs.costs.guessed else whole_context(self.side.base)
        wait, unread_s = self.wait, 0.0
        if (wait.first_exchange or wait.num_since_request > MAX_CATCH_UP) and not self._context.policy.always:
            unread_s = wait.unread_s(now_s, self._context.beliefs.reading.mean_s)
        return RoundInputs(others, followed, chances, wait.num_since_request, self._can_run_ahead, context, unread_s)

    def _plain_decision(self) -> Decision:
        return Decision(self.policy.mode, 0, 0, 0, False, False, 0.0,
                        "no drafter" if self.policy.allowed else "forbidden")

    def _drafter_available(self, now_s: float) -> bool:
        """Whether a drafter could be found for it."""
        return now_s >= self._retry_at_s and self._context.pool.has_room(now_s)

    def _update_drafter(self, now_s: float, others: int) -> None:
        if self.link is not None:
            if not self.decision.follow:
                self.detach()
        elif self._drafter_available(now_s):
            if self.decision.follow:
                self._attach(now_s, others)
            elif self._context.beliefs.latency.shared:  # to ask again takes time from the step
                self._retry_at_s = now_s + LOOK_AGAIN_S

    def _attach(self, now_s: float, others: int) -> None:
        self.link, self._left = self._context.pool.assign(now_s, self._left), None
        hello = self._context.pool.hello(self.link)
        if hello is None:
            return
        self.feature_spec, self._can_run_ahead = hello.features, hello.run_ahead > 0
        self._opened_s = now_s
        # Who is asked for nothing while the text's own chain is verified is told of the prompt meanwhile.
        message = self.side.attach(self.decision.num_wanted, self.decision.ahead)
        self._context.send(self.link, message)
        self.wait.attached(now_s, hello.vocab_size > 0, self.decision.num_wanted > 0)
        self._rows_from = max(0, self.side.base - hello.max_context)
        if not self.decision.lookup:
            self.decision = self._decide(now_s, others)

    def _unlink(self) -> Link | None:
        """Forget its drafter and return it."""
        link, self.link, self.feature_spec, self._can_run_ahead = self.link, None, None, False
        self.wait.reading_from_s = self.wait.owed_from_s = None
        self.policy.detached()
        return link

    def _release_drafter(self, message: Close | None) -> None:
        from_s, until_s, link = self.wait.owed_from_s, self.wait.committed_s, self._unlink()
        # That it said no word is seen here alone. In less time than others take to read nobody could have.
        if (link is not None and from_s is not None
                and until_s - from_s > (self._context.beliefs.reading.mean_s or 0.0)):
            self._context.pool.observe_latency(link, until_s - from_s, until_s)
        self._context.pool.release(link)
        self._context.send(link, message)

    def _start_wait(self, now_s: float) -> None:
        """Its drafter gets its newest commit now; from here on it may wait."""
        measures_latency = self.link is not None and self.decision.num_wanted and len(self.side.tree.tokens) == 1
        self.wait.committed(now_s, self.decision.wait_s if self.link is not None else 0.0,
                            self.side.base if measures_latency else None)

    def _features_of(self, verified: Verified, spec: FeatureSpec) -> Features:
        start, count = self.side.base - 1, len(verified.tokens)
        self._rows_from = start + count
        return Features(self.session, start, verified.rows or b"", count, spec.dtype)

    def _report_mode_change(self, change: Transition | None, link: Link | None) -> None:
        if change is not None:
            self._context.mode_changed(self.session, change, self.decision.why, link)
