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
from slipstream.following.followed import LOOKED_UP, Followed, Step, Verified, log_mode_change
from slipstream.following.following import Following, Inbox
from slipstream.following.pool import no_feature_rows
from slipstream.following.rounds import RequestReport, StepReport
from slipstream.observe.log import logger
from slipstream.observe.metrics import TargetMetrics
from slipstream.observe.spans import well_formed
from slipstream.protocol.messages import FeatureSpec, Link
from slipstream.protocol.requests import Sampling
from slipstream.protocol.tree import DraftTree

# Seconds of a step by its rows, until steps were seen: their growth is a guess, their height does not matter. Plain
# steps and those with a chain stand at row counts of their own, so that their difference can be learned.
GUESSED_COSTS = {1: 0.0200, 2: 0.0201, 4: 0.0202, 8: 0.0205, 16: 0.0210, 24: 0.0215, 32: 0.0220, 40: 0.0225, 48: 0.0230,
                 56: 0.0235, 64: 0.024, 80: 0.025, 96: 0.026, 112: 0.027, 128: 0.028, 160: 0.031, 192: 0.034,
                 224: 0.037, 256: 0.040}
MAX_DRAIN_S = 0.002  # for what drafts sent while the engine computed, before the commits of this step are sent
GREEDY = Sampling()
SWITCH = "slipstream"  # the extra argument of a request that allows or forbids drafts
PLAIN = "plain"  # its value for plain decoding, which tells what steps cost and earns time for probes
MAX_LOGGED = 64  # problems, so that one with a number in it does not fill the log
# Ended requests that are remembered, as ``allow`` may come behind the end; and requests that ``allow`` was called for.
MAX_REMEMBERED = 4096


@value
class Row:
    """One request of the engine's batch, after a step. ``length``: its tokens, the newest included."""

    request: str
    length: int
    new_tokens: tuple[int, ...]  # committed by this step; none while its prompt is computed
    drafted: int  # draft tokens that this step verified
    prompt_len: int  # tokens of the prompt
    limit: int  # tokens that it has at most, the prompt included
    tokens: Callable[[], list[int]]  # all ``length`` of them; asked for when it is opened
    can_verify: bool = True  # whether the engine can verify drafts for it
    sampling: Sampling = GREEDY  # how drafts rank for it
    user_setting: Any = None  # its user's value of ``SWITCH``, see ``allows_drafts``; mypyc cannot take ``object`` here
    ranks: Sequence[int] | None = None  # of the accepted among them, see ``Verified``; None: they were a chain
    trace: Any = None  # the traceparent that its drafts continue, if its user gave one
    max_drafted: int | None = None  # draft tokens that its next step can verify rightly; None: any
    finished: bool = False  # what was committed ends it, so it has no next step and needs no drafts


class FeatureSource(Protocol):
    """Where the engine's states are, for drafters that read them."""

    def set_feature_spec(self, spec: FeatureSpec) -> bool:
        """Rows are as ``spec`` says from now on. False: they cannot be."""
        ...

    def newest_rows(self, request: str) -> bytes | None:
        """The rows before each token that the last step committed to it."""
        ...

    def rows_since(self, request: str, start: int) -> tuple[int, int, bytes]:
        """What is known from ``start`` on: the first position, how many, and the rows."""
        ...


class UsageLog:
    """Log lines about the drafts of one engine: one when a draft begins to be used and one when it is used no more, not
    one for each request. The reason is that of the last request that left the draft; a request that merely ended gives
    none. Links log their own connects and losses."""

    def __init__(self, log: Any) -> None:
        self._log = log
        self._in_use: set[str] = set()  # addresses of drafts
        self._leave_reasons: dict[str, str] = {}  # why requests left them, since the last look

    def mode_changed(self, session: int, change: Transition, why: Why, link: Link | None) -> None:
        """See ``Following``."""
        log_mode_change(self._log.debug, session, change, why, link)
        if change.before is SPECULATE and link is not None:
            self._leave_reasons[link.address] = change.reason

    def update(self, sessions: Iterable[Followed]) -> None:
        """After a step: who drafts now."""
        links = {followed.link for followed in sessions
                 if followed.decision.verify and followed.policy.mode is SPECULATE}
        used = {link.address for link in links if link is not None}
        for address in sorted(used - self._in_use):
            self._log.info("speculation begins", draft=address)
        for address in sorted(set(self._leave_reasons) & self._in_use - used):
            self._log.info("speculation ends", draft=address, reason=self._leave_reasons[address])
        self._in_use = used | self._in_use - set(self._leave_reasons)
        self._leave_reasons.clear()


class Chains:
    """The sessions of one engine: rows in, chains of draft tokens out."""

    def __init__(self, config: TargetSection, metrics: TargetMetrics, clock: Callable[[], float] = time.monotonic,
                 states: FeatureSource | None = None, inbox: Inbox | None = None,
                 on_step: Callable[[StepReport], None] | None = None) -> None:
        """``config``: its policy says how long a chain is and how long a step may wait. ``on_step`` is called with
        each step's report."""
        self._log = logger("following")
        self._usage_log = UsageLog(self._log)
        costs = StepCosts(GUESSED_COSTS, guessed=True)
        set_feature_spec = states.set_feature_spec if states is not None else no_feature_rows
        self.following = Following(config, costs, metrics, set_feature_spec, clock, inbox=inbox,
                                   on_mode_change=self._usage_log.mode_changed, lockstep=True)
        self._states = states
        self._costs = costs
        self._on_step = on_step
        self._reports = list[RequestReport]()  # of this step
        self._max_nodes, self._deadline_s = config.policy.max_nodes, config.policy.deadline_max_s
        self._clock, self._metrics = clock, metrics
        self._sessions: dict[str, Followed] = {}
        self._allowed = dict[str, bool]()  # the newest ``allow`` of requests that have not ended
        self._ended: dict[str, None] = {}  # the newest that ended, in order
        self._num_opened = 0
        self._previous: set[str] = set()  # requests of the step before
        self._ended_s = 0.0  # that step, with what was done after it
        self._logged: set[str] = set()  # problems

    def close_finished(self, requests: Iterable[str]) -> None:
        """Close finished requests at once, so that their drafts need not wait for the next step. Never raises."""
        try:
            self._end(requests)
            self.following.flush()
            self._metrics.sessions(len(self._sessions), 0)
        except Exception as error:
            self._log_once("requests are not closed", error)

    def poll(self) -> None:
        """Handle events between two steps, for an engine without work, which makes no steps. Never raises."""
        try:
            self.following.inbox.drain(until_s=self._clock() + MAX_DRAIN_S)
        except Exception as error:
            self._log_once("what drafts said is lost", error)

    def allow(self, request: str, allowed: bool) -> None:
        """Set whether ``request`` may be drafted for, from the next step on. May be called before the request is known;
        has no effect after its end."""
        if request not in self._ended:
            self._allowed[request] = allowed
            if len(self._allowed) > MAX_REMEMBERED:  # one that another engine of the same target runs never ends here
                del self._allowed[next(iter(self._allowed))]
        if (followed := self._sessions.get(request)) is not None:
            followed.allow(allowed, self._clock())

    def reads_features(self, request: str) -> bool:
        """Whether its drafter reads states."""
        followed = self._sessions.get(request)
        return followed is not None and followed.feature_spec is not None

    def step_lazily(self, rows: Callable[[], Sequence[Row]], count: SupportsInt, finished: Iterable[str],
                    scheduled: SupportsInt) -> list[list[int]]:
        """``step`` for an adapter that may not know what it meets in ``rows`` of ``count`` requests."""
        try:
            known = rows()
        except Exception as error:  # rule 1
            self._log_once("no drafts for this step", error)
            return [[] for _ in range(int(count))]
        return self.step(known, finished, scheduled)

    def tree(self, request: str, num_nodes: SupportsInt, branches: object = True) -> DraftTree | None:
        """For an engine that verifies trees: after a step, the best of what ``request`` has, in at most so many nodes,
        root included. branches: False for one path. Never raises."""
        if (followed := self._sessions.get(request)) is None:
            return None
        try:
            tree = followed.take(int(num_nodes))
            return tree if branches else tree.select(tree.best_path())
        except Exception as error:  # rule 2
            self._log_once("no drafts for a request", error)
            self._drop(request)
            return None

    def step(self, rows: Sequence[Row], finished: Iterable[str], scheduled: SupportsInt) -> list[list[int]]:
        """A chain for each row; empty: none. ``scheduled``: rows of the step's forward."""
        now_s = self._clock()
        try:
            return self._step(rows, finished, int(scheduled), now_s)  # an engine may count with numpy
        except Exception as error:  # rule 1
            self._log_once("no drafts for this step", error)
            for request in list(self._sessions):
                self._drop(request)
            return [[] for _ in rows]
        finally:
            self._previous = {row.request for row in rows}
            self._ended_s = self._clock()

    def _step(self, rows: Sequence[Row], finished: Iterable[str], scheduled: int, now_s: float) -> list[list[int]]:
        self._end(finished)
        self._reports.clear()
        self.following.inbox.drain(until_s=now_s + MAX_DRAIN_S)
        step = self._measured(rows, scheduled, now_s)
        sessions = self._commit([row if row.new_tokens and row.can_verify
                                 and (row.user_setting is None or self._wants_drafts(row)) else None
                                 for row in rows], step)
        self.following.flush()
        self._send_report(step)
        waits_s = self._clock()
        awaited = [followed for row, followed in zip(rows, sessions, strict=True)
                   if followed is not None and row.max_drafted != 0]
        self.following.wait(awaited, max(0.0, now_s + self._deadline_s - waits_s))
        taken_s = self._clock()
        chains = [self._chain(row, followed) if followed is not None else []
                  for row, followed in zip(rows, sessions, strict=True)]
        self._usage_log.update(self._sessions.values())
        self._metrics.sessions(len(self._sessions), 0)
        if step.began_s < now_s:
            self._metrics.step(scheduled, taken_s - waits_s, step.seconds, self._clock() - now_s - (taken_s - waits_s))
        return chains

    def _measured(self, rows: Sequence[Row], scheduled: int, now_s: float) -> Step:
        """The step that ended now, as rule 4 has it."""
        drafted = sum([row.drafted for row in rows])
        began_s = now_s if self._previous.isdisjoint([row.request for row in rows]) else self._ended_s
        prompts = began_s == now_s or scheduled > len(rows) + drafted or not all(row.new_tokens for row in rows)
        return Step(began_s, max(1e-6, now_s - began_s), scheduled, len(rows), drafted, prefill=prompts)

    def _commit(self, rows: Sequence[Row | None], step: Step) -> list[Followed | None]:
        """Commit what the step gave. Returns each row's session; None: it has none any more, or none is wanted."""
        continued = dict[int, tuple[Row, Followed]]()
        opened = set[str]()
        for row in rows:
            if row is None:
                continue
            followed = self._sessions.get(row.request)
            if followed is not None and followed.side.base + len(row.new_tokens) == row.length:
                continued[followed.session] = row, followed
            elif not row.finished:
                opened.add(row.request)

        def failed(session: int, error: Exception) -> None:  # rule 2
            self._log_once("no drafts for a request", error)
            self._drop(continued.pop(session)[0].request)

        verified = [self._verified(row, followed) for row, followed in continued.values()]
        records = self.following.committed(verified, step, failed)
        pairs = zip(continued.values(), records, strict=True) if self._on_step is not None else ()
        for (row, followed), record in pairs:
            self._reports.append(RequestReport(row.request, row.length, row.drafted, record.waited_s,
                                               followed.policy.mode.value, record.outcome == LOOKED_UP, record.late))
        if opened or self._states is not None:
            return [self._with_rows(row, row.request in opened, step) if row is not None and not row.finished else None
                    for row in rows]
        return [self._sessions.get(row.request) if row is not None and not row.finished else None for row in rows]

    def _verified(self, row: Row, followed: Followed) -> Verified:
        rows = self._states.newest_rows(row.request) if self._states is not None and followed.feature_spec else None
        drafted, accepted = row.drafted, len(row.new_tokens) - 1
        return Verified(followed.session, row.new_tokens, drafted, accepted if accepted < drafted else drafted,
                        "stop" if row.finished else "", rows, ranks=row.ranks)

    def _with_rows(self, row: Row, opens: bool, step: Step) -> Followed | None:
        """Its session, after its drafter got the states that it lacks."""
        try:
            if opens:
                self.following.begin([self._open(row)], step.ended_s)
            followed = self._sessions.get(row.request)
            if followed is not None and followed.feature_spec is not None:
                self._send_rows(row, followed)
            return followed
        except Exception as error:  # rule 2
            self._log_once("no drafts for a request", error)
            self._drop(row.request)
            return None

    def _send_report(self, step: Step) -> None:
        """Report the step to the target that serves the answers, if one does."""
        reports, self._reports = self._reports, []
        if self._on_step is not None and reports:
            plain_s = step.plain_s(self._costs, sum(report.drafted for report in reports if report.looked_up))
            self._on_step(StepReport(step.seconds, plain_s, tuple(reports)))

    def _send_rows(self, row: Row, followed: Followed) -> None:
        """Send its drafter the states that it reads and has not got."""
        wanted = followed.missing_rows_from(followed.side.base - 1)
        if wanted is None or self._states is None:
            return
        start, count, rows = self._states.rows_since(row.request, wanted)
        if count:
            followed.send_rows(start, count, rows)

    def _chain(self, row: Row, followed: Followed) -> list[int]:
        try:
            return followed.chain(self._max_nodes if row.max_drafted is None else min(self._max_nodes, row.max_drafted))
        except Exception as error:  # rule 2
            self._log_once("no drafts for a request", error)
            self._drop(row.request)
            return []

    def _wants_drafts(self, row: Row) -> bool:
        """Whether its user wants drafts."""
        if row.user_setting is None or row.user_setting == PLAIN:
            return True
        wanted = allows_drafts(row.user_setting)
        if wanted is None and (kind := type(row.user_setting).__name__) not in self._logged:  # users may say much
            self._logged.add(kind)
            self._log.warning("not known and ignored: write true or false", name=SWITCH,
                              found=reprlib.repr(row.user_setting)[:80])
        return wanted is not False

    def _open(self, row: Row) -> Followed:
        self._close(row.request)
        self._num_opened += 1
        allowed = self._allowed.get(row.request)
        followed = self._sessions[row.request] = self.following.open(
            self._num_opened, row.tokens(), row.prompt_len, row.sampling, row.limit,
            allowed is True or row.user_setting != PLAIN,
            trace=well_formed(row.trace) if isinstance(row.trace, str) else "")
        if allowed is False:
            followed.allow(False, self._clock())
        return followed

    def _end(self, requests: Iterable[str]) -> None:
        for request in requests:
            self._close(request)
            self._allowed.pop(request, None)
            self._ended[request] = None
        while len(self._ended) > MAX_REMEMBERED:
            del self._ended[next(iter(self._ended))]

    def _close(self, request: str) -> None:
        followed = self._sessions.pop(request, None)
        if followed is not None:
            self.following.close(followed)

    def _drop(self, request: str) -> None:
        with suppress(Exception):  # what went wrong may go wrong again
            self._close(request)

    def _log_once(self, what: str, error: Exception) -> None:
        if (problem := repr(error)) not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(problem)
            self._log.error(what, exc_info=error)


def allows_drafts(user_setting: object) -> bool | None:
    """Whether a request's value of ``SWITCH`` allows drafts: false (or 0) forbids them, true or no value allows them.
    None: any other value."""
    if user_setting is None:
        return True
    return bool(user_setting) if isinstance(user_setting, int) and user_setting in (0, 1) else None
