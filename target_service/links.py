"""DraftPool: which drafter follows which answer, and what is to be said to each.

Rules:
1. All of it runs on the engine thread; links tell it of their fate through the worker's inbox.
2. What the commits of one step have to say to a link leaves as one frame (``flush``). Commits that ask for nothing
   wait for one that does, or for each other: a draft that is woken at each step takes time from the next.
3. A lost or unwilling drafter costs its answers nothing but speed: another takes over, or they decode alone and ask
   again later. What was accepted is counted by the drafter's name, so that pools of different heads can be compared.
4. A drafter that is right no more often than by chance is reported: a loud line once a connection, a gauge, and the
   problem in its status. One that names no vocabulary (n-gram) has learned none and is not judged.
5. A drafter that leaves, by its own word or by discovery's, gets no new session.
6. How many sessions may be grown ahead is measured over all links (``leads``), and said with each commit.
7. All links share one FeatureSpec, that of the first drafter that reads features; another spec is refused by name.

It knows nothing about what is drafted or how it is verified.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from random import Random

import numpy as np

from slipstream.base.config import TargetSection
from slipstream.decision.leads import Leads
from slipstream.engine.features import FeatureRows
from slipstream.engine.runner import ModelRunner
from slipstream.observe.log import logger
from slipstream.observe.metrics import TargetMetrics
from slipstream.protocol.messages import Commit, DraftBound, DraftHello, Drop, Features, FeatureSpec, Growth
from slipstream.protocol.pairing import Agreement
from slipstream.protocol.requests import DraftStatus
from slipstream.wire.link import Link
from target_service.running import Running

RETRY_S = 1.0  # after a drafter gave a session up for lack of room
HELD = 8  # commits that ask for nothing
HAND_OVER_S = 5e-5
FEATURE_CHUNK = 256  # rows of one Features item: well below the message limit for any known model


class DraftPool:
    """The ready drafts of one target."""

    def __init__(self, runner: ModelRunner, metrics: TargetMetrics, config: TargetSection,
                 chance: Random | None = None) -> None:
        self._runner = runner
        self._config = config
        self._chance = chance or Random()
        self._metrics = metrics
        self._log = logger("target")
        self._ready: dict[Link, DraftHello] = {}
        self._leaving: set[Link] = set()
        self._sessions: dict[Link, int] = {}
        self._outbox: dict[Link, list[DraftBound]] = defaultdict(list)
        self._leads = Leads()
        self._spec: FeatureSpec | None = None
        self._rows: FeatureRows | None = None  # of the spec
        self._prepared: dict[tuple[int, int], bytes] = {}  # by number of the answer, and how many rows
        self._agreement: dict[Link, Agreement] = {}
        self._warned: set[Link] = set()
        self._problems: dict[str, str] = {}  # by address; read by other threads

    def link_up(self, link: Link, hello: DraftHello) -> None:
        """A drafter is there. Features that it reads are kept from now on; older tokens have none for it."""
        spec = hello.features
        if spec is not None and self._spec is not None and spec != self._spec and self._reads_features():
            self._log.warning("draft refused", address=link.address, field="features",
                              found=str(spec.layers), expected=str(self._spec.layers))
            return
        if spec is not None and spec != self._spec:
            self._runner.set_taps(spec.layers)
            self._spec, self._rows = spec.light(), FeatureRows(spec, self._runner.linear)
        self._ready[link] = hello if spec is None else replace(hello, features=spec.light())
        self._sessions[link] = 0
        if hello.vocab_size:
            self._agreement[link] = Agreement()
            self._metrics.pairing_suspect(link.address, False)
        self._metrics.drafts_connected(len(self._ready))

    def link_down(self, link: Link, reason: str) -> bool:
        """A drafter is gone. Returns whether it had been in use."""
        self._outbox.pop(link, None)
        self._sessions.pop(link, None)
        self._agreement.pop(link, None)
        self._leaving.discard(link)
        if self._ready.pop(link, None) is None:
            return False
        self._warned.discard(link)
        self._problems.pop(link.address, None)  # what was found out is about this connection
        self._metrics.draft_gone(link.address)
        self._metrics.drafter_lost(reason)
        self._metrics.drafts_connected(len(self._ready))
        return True

    def set_leaving(self, link: Link, leaving: bool) -> None:
        """Give a drafter no new session any more, or again."""
        if leaving and link in self._ready:
            self._leaving.add(link)
        elif not leaving:
            self._leaving.discard(link)

    @property
    def has_room(self) -> bool:
        """Whether some drafter would take one more session."""
        return bool(self._open_links())

    def _open_links(self) -> list[Link]:
        return [link for link, hello in self._ready.items()
                if self._sessions[link] < hello.max_sessions and link not in self._leaving]

    def attach(self, running: Running, now_s: float, wanted: int) -> bool:
        """Let a drafter follow ``running``, if there is one that has room: of two drawn at random the one that is less
        busy for its size. Targets that do not know of each other spread their sessions so. A drafter on trial gets its
        share and no more."""
        open_links = self._open_links()
        if not open_links or now_s < running.retry_at_s:
            return False
        link = self._choose(open_links)
        hello = self._ready[link]
        running.link = link
        self._sessions[link] += 1
        self._outbox[link].append(running.side.attach(wanted, self._may_lead(running, wanted)))
        if hello.features is not None:
            known = self._runner.features_from(running.slots[: running.computed])
            running.features_sent = max(known, running.side.base - hello.max_context)
            self.send_features(running)
        return True

    def _choose(self, open_links: list[Link]) -> Link:
        trial = [link for link in open_links if self._ready[link].drafter == self._config.canary_drafter]
        if trial and len(trial) < len(open_links):
            tried = self._chance.random() < self._config.canary_share
            open_links = trial if tried else [link for link in open_links if link not in trial]
        return min(self._chance.sample(open_links, min(2, len(open_links))),
                   key=lambda candidate: self._sessions[candidate] / self._ready[candidate].max_sessions)

    def detach(self, running: Running) -> None:
        """Nobody follows ``running`` any more; its drafter, if it had one, is told."""
        link, running.link = running.link, None
        message = running.side.detach()
        self._leads.end(running.number)
        if link in self._ready:
            self._sessions[link] -= 1
            if message is not None:
                self._outbox[link].append(message)

    def close(self, running: Running) -> None:
        """The answer is over."""
        link, running.link = running.link, None
        message = running.side.close()
        self._leads.end(running.number)
        if link in self._ready:
            self._sessions[link] -= 1
            if message is not None:
                self._outbox[link].append(message)

    def send_features(self, running: Running) -> None:
        """Hand over the rows of the prompt that have been computed since the last time."""
        spec = self._spec_of(running)
        if spec is None or running.link is None:
            return
        while running.features_sent < running.computed:
            stop = min(running.computed, running.features_sent + FEATURE_CHUNK)
            self._outbox[running.link].append(self._features(running, spec, running.features_sent, stop))
            running.features_sent = stop

    def prepare(self, verified: Iterable[tuple[Running, int]]) -> None:
        """Before the commits of a step: the feature rows of so many newest tokens of each answer, in one product."""
        due = [(running, count) for running, count in verified if self._spec_of(running) is not None]
        self._prepared.clear()
        if not due or self._rows is None:
            return
        slots = [running.slots[running.computed - count : running.computed] for running, count in due]
        data, begin = self._rows(self._runner.features(np.concatenate(slots))), 0
        size = len(data) // sum(count for _, count in due)
        for running, count in due:
            self._prepared[running.number, count] = data[begin : begin + size * count]
            begin += size * count

    def commit(self, running: Running, tokens: tuple[int, ...], drafted: int, wanted: int) -> None:
        """Commit ``tokens``, whose predecessors' KV (and rows) are computed, and tell the drafter."""
        spec, features = self._spec_of(running), None
        if spec is not None:
            features = self._features(running, spec, running.computed - len(tokens), running.computed)
            running.features_sent = running.computed
        ahead = self._may_lead(running, wanted)
        message: Commit | None = running.side.commit(tokens, features, drafted, wanted, ahead)
        if message is not None and running.link in self._ready:
            self._outbox[running.link].append(message)

    def round_over(self, running: Running, tokens: int, seconds: float) -> None:
        """A round in which ``running`` was drafted for made ``tokens``, ``seconds`` after the commit before."""
        if not self._grows_ahead(running):
            return
        change = self._leads.observe(tokens, seconds)
        if change is not None:
            self._log.info("ahead", before=min(change.before, change.sessions),
                           after=min(change.after, change.sessions), sessions=change.sessions,
                           gain=round(change.gain, 3))

    def _grows_ahead(self, running: Running) -> bool:
        hello = self._ready.get(running.link) if running.link is not None else None
        return hello is not None and hello.run_ahead > 0

    def _may_lead(self, running: Running, wanted: int) -> bool:
        """Whether its drafter may grow ahead until the next commit."""
        if wanted and self._grows_ahead(running):
            return self._leads.grant(running.number)
        self._leads.end(running.number)
        return False

    def judge(self, link: Link | None, drafted: int, accepted: int) -> None:
        """A tree that ``link``'s drafter proposed was verified."""
        if link in self._ready:
            self._metrics.judged(self._ready[link].drafter, drafted, accepted)
        agreement = self._agreement.get(link) if link is not None else None
        if link is None or agreement is None:
            return
        suspected = agreement.suspect
        agreement.add(accepted > 0)
        if agreement.suspect == suspected:
            return
        self._metrics.pairing_suspect(link.address, agreement.suspect)
        if suspected:
            self._problems.pop(link.address, None)
            return
        if link not in self._warned:
            self._warned.add(link)
            self._log.warning("DRAFTER SUSPECT: " + agreement.problem(), address=link.address,
                              drafter=self._ready[link].drafter, agreed=agreement.agreed, rounds=agreement.rounds)
        self._problems[link.address] = agreement.problem()

    def with_problem(self, status: DraftStatus) -> DraftStatus:
        """A link's status with what was found out about its drafter. From any thread."""
        problem = status.problem or self._problems.get(status.address, "")
        return replace(status, problem=problem)

    def received(self, running: Running, message: Growth | Drop, now_s: float) -> None:
        """Take what a drafter sent for ``running``, which came at ``now_s``. Raises RemoteProtocolError for what cannot
        be."""
        joined = running.side.receive(message)
        if isinstance(message, Drop):
            self._log.debug("drafter gave up", session=running.number, reason=message.reason)
            if running.link in self._sessions:
                self._sessions[running.link] -= 1
            if message.reason == "draining" and running.link is not None:
                self.set_leaving(running.link, True)
            elif message.reason in ("capacity", "failed", "invalid"):
                running.retry_at_s = now_s + RETRY_S
            running.link = None
            return
        if joined < 0:
            self._metrics.stale_growth()
            return
        if running.heard_s is None and running.side.heard:
            running.heard_s = now_s
        if joined and message.base < running.side.base:
            # It crossed the commit, so its drafter believes in a tree here: what comes next is one more level of it.
            running.asked.pop(running.side.base, None)
        asked_s = running.asked.pop(message.base, None)
        if asked_s is not None:
            running.exchange_s = max(0.0, now_s - asked_s)

    def flush(self, idle: bool = False) -> None:
        """Send what the step had to say. It is written by another thread, and Python runs one at a time: an engine
        thread that has to wait anyway (``idle``) lets it go on at once."""
        sent = False
        for link, items in list(self._outbox.items()):
            if len(items) >= HELD or any(not isinstance(item, Commit) or item.wanted for item in items):
                link.send(items)
                del self._outbox[link]
                sent = True
        if sent and idle:
            time.sleep(HAND_OVER_S)

    def links(self) -> Iterable[Link]:
        return self._ready

    def _reads_features(self) -> bool:
        return any(hello.features is not None for hello in self._ready.values())

    def _spec_of(self, running: Running) -> FeatureSpec | None:
        hello = self._ready.get(running.link) if running.link is not None else None
        return hello.features if hello is not None else None

    def _features(self, running: Running, spec: FeatureSpec, start: int, stop: int) -> Features:
        assert self._rows is not None
        rows = self._prepared.pop((running.number, stop - start), b"") if stop == running.computed else b""
        rows = rows or self._rows(self._runner.features(running.slots[start:stop]))
        return Features(running.number, start, rows, stop - start, spec.dtype)
