"""Chains: the sessions of an engine that is not ours. What each step gave in, draft tokens out.

Rules:
1. ``step`` is called once after each step of the engine, on the engine's thread. Whatever drafts send, it never raises
   and never waits past the policy's deadline: an error means no draft tokens, and one log line for each new problem.
2. What goes wrong in one request ends that request's session alone.
3. A request that the engine computes again from its start (preempted, resumed) is opened again; one that is missing
   from a step is closed only when the engine reports it finished.
4. A step's time runs from the end of the proposal before it to its own end, because the engine's host work between them
   is part of a token's cost. The first step of a batch is not measured, because that work is not known.
5. The engine decides what it verifies: a draft can cost time but cannot change a greedy token.

It knows no engine: an adapter turns the engine's batch into ``Row`` values.
"""

from __future__ import annotations

import reprlib
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol, SupportsInt

from slipstream.base.config import TargetSection
from slipstream.base.value import value
from slipstream.decision.beliefs import StepCosts
from slipstream.decision.decide import SPECULATE, Transition, Why
from slipstream.following.followed import LOOKED_UP, Followed, Step, Verified, logged
from slipstream.following.following import Following, Inbox
from slipstream.following.pool import no_rows
from slipstream.following.rounds import Told, ToldStep
from slipstream.observe.log import logger
from slipstream.observe.metrics import TargetMetrics
from slipstream.observe.spans import well_formed
from slipstream.protocol.messages import FeatureSpec, Link
from slipstream.protocol.requests import Sampling
from slipstream.protocol.tree import DraftTree

# Seconds of a step by its rows, until steps were seen: their growth is a guess, their height does not matter. Plain
# steps and those with a chain stand at row counts of their own, so that their difference can be learned.
GUESSED_COSTS = {1: 0.0200, 2: 0.0201, 4: 0.0202, 8: 0.0205, 16: 0.021, 32: 0.022, 64: 0.024, 128: 0.028, 256: 0.040}
GLANCE_S = 0.002  # for what drafts sent while the engine computed, before they hear of what it gave
GREEDY = Sampling()
SWITCH = "slipstream"  # what a request says of drafts stands under it
PLAIN = "plain"  # there: plain decoding, which tells what steps cost and earns time for probes
TOLD = 64  # problems that are told, so that one with a number in it does not fill the log
OVER = 4096  # requests whose end is remembered, as what is said of one may come behind it; and what was said of others


@value
class Row:
    """One request of the engine's batch, after a step. ``length``: its tokens, the newest included."""

    request: str
    length: int
    new: tuple[int, ...]  # committed by this step; none while its prompt is computed
    drafted: int  # draft tokens that this step verified
    prompt: int  # tokens of the prompt
    limit: int  # tokens that it has at most, the prompt included
    tokens: Callable[[], list[int]]  # all ``length`` of them; asked for when it is opened
    drafts: bool = True  # whether the engine can verify drafts for it
    sampling: Sampling = GREEDY  # how drafts rank for it
    asked: Any = None  # what its user says of drafts: see ``allowed``; mypyc cannot take ``object`` here
    depth: int | None = None  # of the deepest that this step verified; None: they were a chain
    trace: Any = None  # the traceparent that its drafts continue, if its user gave one
    most: int | None = None  # draft tokens that its next step can verify rightly; None: any
    over: bool = False  # what was committed ends it: it has no next step, and nobody is asked for one


class States(Protocol):
    """Where the engine's states are, for drafters that read them."""

    def gives(self, spec: FeatureSpec) -> bool:
        """Rows are as ``spec`` says from now on. False: they cannot be."""
        ...

    def newest(self, request: str) -> bytes | None:
        """The rows before each token that the last step committed to it."""
        ...

    def since(self, request: str, start: int) -> tuple[int, int, bytes]:
        """What is known from ``start`` on: the first position, how many, and the rows."""
        ...


class Changes:
    """Log lines about the drafts of one engine: one when a draft begins to be used and one when it is used no more, not
    one for each request. The reason is that of the last request that left the draft; a request that merely ended gives
    none. Links log their own connects and losses."""

    def __init__(self, log: Any) -> None:
        self._log = log
        self._used: set[str] = set()  # addresses of drafts
        self._left: dict[str, str] = {}  # why requests left them, since the last look

    def changed(self, session: int, change: Transition, why: Why, link: Link | None) -> None:
        """See ``Following``."""
        logged(self._log.debug, session, change, why, link)
        if change.before is SPECULATE and link is not None:
            self._left[link.address] = change.reason

    def look(self, sessions: Iterable[Followed]) -> None:
        """After a step: who drafts now."""
        links = {one.link for one in sessions if one.decision.verify and one.policy.mode is SPECULATE}
        used = {link.address for link in links if link is not None}
        for address in sorted(used - self._used):
            self._log.info("speculation begins", draft=address)
        for address in sorted(set(self._left) & self._used - used):
            self._log.info("speculation ends", draft=address, reason=self._left[address])
        self._used = used | self._used - set(self._left)
        self._left.clear()


class Chains:
    """The sessions of one engine: rows in, chains of draft tokens out."""

    def __init__(self, config: TargetSection, metrics: TargetMetrics, clock: Callable[[], float] = time.monotonic,
                 states: States | None = None, inbox: Inbox | None = None,
                 tell: Callable[[ToldStep], None] | None = None) -> None:
        """``config``: its policy says how long a chain is and how long a step may wait. ``tell`` hears of each step."""
        self._log = logger("following")
        self._changes = Changes(self._log)
        costs = StepCosts(GUESSED_COSTS, guessed=True)
        self.following = Following(config, costs, metrics, states.gives if states is not None else no_rows, clock,
                                   inbox=inbox, changed=self._changes.changed, together=True)
        self._states = states
        self._costs = costs
        self._tell_step = tell
        self._told = list[Told]()  # of this step
        self._most, self._deadline_s = config.policy.max_nodes, config.policy.deadline_max_s
        self._clock, self._metrics = clock, metrics
        self._sessions: dict[str, Followed] = {}
        self._allowed = dict[str, bool]()  # what was said last of requests that are not over
        self._over: dict[str, None] = {}  # the newest that ended, in order
        self._opened = 0
        self._before: set[str] = set()  # requests of the step before
        self._ended_s = 0.0  # that step, with what was done after it
        self._problems: set[str] = set()  # that were told

    def ended(self, requests: Iterable[str]) -> None:
        """Close finished requests at once, so that their drafts need not wait for the next step. Never raises."""
        try:
            self._end(requests)
            self.following.flush()
            self._metrics.sessions(len(self._sessions), 0)
        except Exception as error:
            self._tell("requests are not closed", error)

    def look(self) -> None:
        """Handle what has come between two steps; for an engine without work, which makes no steps. Never raises."""
        try:
            self.following.inbox.drain(until_s=self._clock() + GLANCE_S)
        except Exception as error:
            self._tell("what drafts said is lost", error)

    def allow(self, request: str, allowed: bool) -> None:
        """Set whether ``request`` may be drafted for, from the next step on. May be called before the request is known;
        has no effect after its end."""
        if request not in self._over:
            self._allowed[request] = allowed
            if len(self._allowed) > OVER:  # one that another engine of the same target runs never ends here
                del self._allowed[next(iter(self._allowed))]
        if (one := self._sessions.get(request)) is not None:
            one.allow(allowed, self._clock())

    def reads(self, request: str) -> bool:
        """Whether its drafter reads states."""
        one = self._sessions.get(request)
        return one is not None and one.reads is not None

    def after(self, rows: Callable[[], Sequence[Row]], count: SupportsInt, finished: Iterable[str],
              scheduled: SupportsInt) -> list[list[int]]:
        """``step`` for an adapter that may not know what it meets in ``rows`` of ``count`` requests."""
        try:
            known = rows()
        except Exception as error:  # rule 1
            self._tell("no drafts for this step", error)
            return [[] for _ in range(int(count))]
        return self.step(known, finished, scheduled)

    def tree(self, request: str, nodes: SupportsInt, branches: object = True) -> DraftTree | None:
        """For an engine that verifies trees: after a step, the best of what ``request`` has, in at most so many nodes,
        root included. branches: False for one path. Never raises."""
        if (one := self._sessions.get(request)) is None:
            return None
        try:
            tree = one.take(int(nodes))
            return tree if branches else tree.select(tree.best_path())
        except Exception as error:  # rule 2
            self._tell("no drafts for a request", error)
            self._lose(request)
            return None

    def step(self, rows: Sequence[Row], finished: Iterable[str], scheduled: SupportsInt) -> list[list[int]]:
        """A chain for each row; empty: none. ``scheduled``: rows of the step's forward."""
        now_s = self._clock()
        try:
            return self._step(rows, finished, int(scheduled), now_s)  # an engine may count with numpy
        except Exception as error:  # rule 1
            self._tell("no drafts for this step", error)
            for request in list(self._sessions):
                self._lose(request)
            return [[] for _ in rows]
        finally:
            self._before = {row.request for row in rows}
            self._ended_s = self._clock()

    def _step(self, rows: Sequence[Row], finished: Iterable[str], scheduled: int, now_s: float) -> list[list[int]]:
        self._end(finished)
        self._told.clear()
        self.following.inbox.drain(until_s=now_s + GLANCE_S)
        step = self._measured(rows, scheduled, now_s)
        asked = self._heard([row if row.new and row.drafts and (row.asked is None or self._wanted(row)) else None
                             for row in rows], step)
        self.following.flush()
        self._say(step)
        waits_s = self._clock()
        drafted = [one for row, one in zip(rows, asked, strict=True) if one is not None and row.most != 0]
        self.following.wait(drafted, max(0.0, now_s + self._deadline_s - waits_s))
        taken_s = self._clock()
        chains = [self._chain(row, one) if one is not None else [] for row, one in zip(rows, asked, strict=True)]
        self._changes.look(self._sessions.values())
        self._metrics.sessions(len(self._sessions), 0)
        if step.began_s < now_s:
            self._metrics.step(scheduled, taken_s - waits_s, step.seconds, self._clock() - now_s - (taken_s - waits_s))
        return chains

    def _measured(self, rows: Sequence[Row], scheduled: int, now_s: float) -> Step:
        """The step that ended now, as rule 4 has it."""
        drafted = sum([row.drafted for row in rows])
        began_s = now_s if self._before.isdisjoint([row.request for row in rows]) else self._ended_s
        prompts = began_s == now_s or scheduled > len(rows) + drafted or not all(row.new for row in rows)
        return Step(began_s, max(1e-6, now_s - began_s), scheduled, len(rows), drafted, prompts)

    def _heard(self, rows: Sequence[Row | None], step: Step) -> list[Followed | None]:
        """The session of each, which knows of what the step gave. None: it has none any more, or none is wanted."""
        goes_on = dict[int, tuple[Row, Followed]]()
        opens = set[str]()
        for row in rows:
            if row is None:
                continue
            one = self._sessions.get(row.request)
            if one is not None and one.side.base + len(row.new) == row.length:
                goes_on[one.session] = row, one
            elif not row.over:
                opens.add(row.request)

        def failed(session: int, error: Exception) -> None:  # rule 2
            self._tell("no drafts for a request", error)
            self._lose(goes_on.pop(session)[0].request)

        records = self.following.committed([self._verified(row, one) for row, one in goes_on.values()], step, failed)
        for (row, one), record in zip(goes_on.values(), records, strict=True) if self._tell_step is not None else ():
            self._told.append(Told(row.request, row.length, row.drafted, record.waited_s, one.policy.mode.value,
                                   record.outcome == LOOKED_UP, record.late))
        if opens or self._states is not None:
            return [self._ready(row, row.request in opens, step) if row is not None and not row.over else None
                    for row in rows]
        return [self._sessions.get(row.request) if row is not None and not row.over else None for row in rows]

    def _verified(self, row: Row, one: Followed) -> Verified:
        newest = self._states.newest(row.request) if self._states is not None and one.reads else None
        drafted, accepted = row.drafted, len(row.new) - 1
        return Verified(one.session, row.new, drafted, accepted if accepted < drafted else drafted,
                        drafted if row.depth is None else row.depth, "stop" if row.over else "", newest)

    def _ready(self, row: Row, opens: bool, step: Step) -> Followed | None:
        """Its session, with the states that it lacks."""
        try:
            if opens:
                self.following.begin([self._open(row)], step.ended_s)
            one = self._sessions.get(row.request)
            if one is not None and one.reads is not None:
                self._give_rows(row, one)
            return one
        except Exception as error:  # rule 2
            self._tell("no drafts for a request", error)
            self._lose(row.request)
            return None

    def _say(self, step: Step) -> None:
        """What became of it, to the target that serves the answers, if one does."""
        told, self._told = self._told, []
        if self._tell_step is not None and told:
            plain_s = step.plain_s(self._costs, sum(one.drafted for one in told if one.looked_up))
            self._tell_step(ToldStep(step.seconds, plain_s, tuple(told)))

    def _give_rows(self, row: Row, one: Followed) -> None:
        """Hand its drafter what it reads and has not had."""
        wanted = one.wants_rows(one.side.base - 1)
        if wanted is None or self._states is None:
            return
        start, count, rows = self._states.since(row.request, wanted)
        if count:
            one.give_rows(start, count, rows)

    def _chain(self, row: Row, one: Followed) -> list[int]:
        try:
            return one.chain(self._most if row.most is None else min(self._most, row.most))
        except Exception as error:  # rule 2
            self._tell("no drafts for a request", error)
            self._lose(row.request)
            return []

    def _wanted(self, row: Row) -> bool:
        """Whether its user wants drafts."""
        if row.asked is None or row.asked == PLAIN:
            return True
        wanted = allowed(row.asked)
        if wanted is None and (kind := type(row.asked).__name__) not in self._problems:  # users may say much
            self._problems.add(kind)
            self._log.warning("not known and ignored: write true or false", name=SWITCH,
                              found=reprlib.repr(row.asked)[:80])
        return wanted is not False

    def _open(self, row: Row) -> Followed:
        self._close(row.request)
        self._opened += 1
        said = self._allowed.get(row.request)
        one = self._sessions[row.request] = self.following.open(
            self._opened, row.tokens(), row.prompt, row.sampling, row.limit, said is True or row.asked != PLAIN,
            trace=well_formed(row.trace) if isinstance(row.trace, str) else "")
        if said is False:
            one.allow(False, self._clock())
        return one

    def _end(self, requests: Iterable[str]) -> None:
        for request in requests:
            self._close(request)
            self._allowed.pop(request, None)
            self._over[request] = None
        while len(self._over) > OVER:
            del self._over[next(iter(self._over))]

    def _close(self, request: str) -> None:
        one = self._sessions.pop(request, None)
        if one is not None:
            self.following.close(one)

    def _lose(self, request: str) -> None:
        with suppress(Exception):  # what went wrong may go wrong again
            self._close(request)

    def _tell(self, what: str, error: Exception) -> None:
        if (problem := repr(error)) not in self._problems and len(self._problems) < TOLD:
            self._problems.add(problem)
            self._log.error(what, exc_info=error)


def allowed(asked: object) -> bool | None:
    """Whether a request's value of ``SWITCH`` allows drafts: false (or 0) forbids them, true or no value allows them.
    None: any other value."""
    if asked is None:
        return True
    return bool(asked) if isinstance(asked, int) and asked in (0, 1) else None
