"""DraftWorker: the engine thread of the draft service. It receives frames of targets and answers with frames.

Rules of the worker:
1. One thread owns the drafter and every session; other threads only put items into queues. Only ``peer_up`` runs on
   the caller's thread, and it reads nothing that changes.
2. A round: take a bounded part of each peer's waiting items; give them to the drafter in batches; grow; answer each
   peer with one frame.
3. A session belongs to the peer that opened it. It is freed when the peer is lost or silent about it for ``lease_s``.
4. With ``run_ahead``, a session whose target allows it grows ahead, a level at a time, whenever the inbox is empty and
   growing pays (``DraftSession``); others get one growth a commit. When there is nothing to grow, the drafter reads
   more of texts that are too long for one growth, and of prompts whose states arrive.
5. No input of a peer stops the thread: a fault closes one session and is counted; too many faults end the stream.
6. When all sessions are in use, a host gives one up for a host that has clearly fewer; so do peers of one host.

Intake: items of targets that the drafter has not processed yet, separate for each target.

Rules of the intake:
1. Any thread may add items; only the worker's thread takes them. Waiting items of one target are bounded in number and
   bytes; beyond that (``inbox_full``) nothing more is read from the target.
2. A round takes at most ``ROUND_TOKENS`` tokens (or one item) of each target, so no target waits for all input of
   another.
3. While several targets are served, one whose input took more than ``TIME_SHARE`` of the time is skipped for a while.

DraftSession: the state of one session, and whether growing ahead pays while its target verifies.

Rules of a session:
1. The tree shows which nodes the target has: it is re-rooted on every commit, as the target's tree is. Sent nodes that
   remain can be verified without a wait.
2. A target without nodes waits or goes on without drafts: its next growth is a whole tree, sent at once. One with nodes
   gets further levels as they are grown, if it allows that.
3. Growth stops at ``max_ahead`` nodes beyond those that the target would verify, when no likely node is left, when the
   drafter finds nothing more, or after ``MAX_GROWTHS_AHEAD`` growths (``conduct``). A commit starts it again.

It knows nothing about verification, policies or how frames travel.
"""

from __future__ import annotations

import itertools
import queue
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import log

import torch

from slipstream.base.errors import RemoteProtocolError, SlipstreamError
from slipstream.drafting import Drafter
from slipstream.drafting.tree import GrowingTree
from slipstream.engine.device import own_stream, threads
from slipstream.observe.log import logger
from slipstream.observe.metrics import DraftMetrics
from slipstream.observe.spans import Span, Spans
from slipstream.observe.trace import DEVICE, Trace, commit_key, growth_key
from slipstream.observe.vitals import Vitals
from slipstream.protocol.conduct import MAX_GROWTHS_AHEAD, FaultRate, Pace, donor_by_host
from slipstream.protocol.messages import (
    PROTOCOL_VERSION,
    Commit,
    DraftBound,
    DraftHello,
    Drop,
    Faults,
    Features,
    Growth,
    Open,
    Peer,
    TargetBound,
    TargetHello,
)
from slipstream.protocol.pairing import check_pair
from slipstream.protocol.session import DraftEvent, DraftSide
from slipstream.protocol.tree import MAX_HELD

CPU = torch.device("cpu")
ROUND_TOKENS = 16_384  # most tokens taken from one target in a round
TIME_SHARE = 0.5  # share of the time that one of several targets may take
MAX_WAITING_ITEMS, MAX_WAITING_BYTES = 4096, 64 << 20  # of one target that may wait
# A further level sends ``max_ahead // LEVELS_AHEAD`` nodes, at least MIN_LEVEL_NODES.
MIN_LEVEL_NODES, LEVELS_AHEAD = 16, 16
MIN_SCORE = log(1 / 256)  # the score below which a node is not worth a level of the drafter's time

Received = DraftBound | tuple[int, RemoteProtocolError]


def load_of(item: Received) -> tuple[int, int]:
    """About how many tokens of an item a drafter reads, and how many bytes the item takes."""
    if isinstance(item, Commit):
        count = len(item.tokens)
        return count, 4 * count + (0 if item.features is None else len(item.features.rows))
    if isinstance(item, Features):
        return item.num_rows, 4 * item.num_rows + len(item.rows)
    count = len(item.tokens) if isinstance(item, Open) else 1
    return count, 4 * count


class PeerQueue:
    """The waiting items of one target."""

    __slots__ = ("added_bytes", "items", "pace", "paused_until_s", "round_tokens", "taken_bytes")

    def __init__(self, pace: Pace) -> None:
        self.items: deque[tuple[Received, int, int]] = deque()  # item, tokens, bytes
        self.added_bytes = self.taken_bytes = 0  # each is written by one thread only
        self.pace = pace
        self.paused_until_s = 0.0
        self.round_tokens = 0  # taken in this round


class Intake:
    __slots__ = ("_clock", "_queues", "_shared")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._queues: dict[Peer, PeerQueue] = {}
        self._shared = False  # whether several targets are served

    # From any thread.

    def close(self, peer: Peer) -> None:
        self._queues.pop(peer, None)

    def inbox_full(self, peer: Peer) -> bool:
        if (waiting := self._queues.get(peer)) is None:
            return False
        num_bytes = waiting.added_bytes - waiting.taken_bytes
        return len(waiting.items) >= MAX_WAITING_ITEMS or num_bytes >= MAX_WAITING_BYTES

    def accept(self, peer: Peer, items: Sequence[DraftBound], faults: Faults) -> None:
        """Queue new items of a peer."""
        waiting = self._queues.get(peer)
        if waiting is None:
            waiting = self._queues[peer] = PeerQueue(Pace(TIME_SHARE, self._clock))
        new = [(item, *load_of(item)) for item in (*faults, *items)]
        waiting.added_bytes += sum(size for _, _, size in new)
        waiting.items.extend(new)  # all at once, so that a round takes them together

    # From the worker's thread.

    def take(self, served: int) -> list[tuple[Peer, list[Received]]]:
        """The items of one round. ``served``: number of targets that have sessions."""
        now_s, by_peer = self._clock(), list[tuple[Peer, list[Received]]]()
        for peer, waiting in list(self._queues.items()):
            waiting.round_tokens = 0
            if not waiting.items or now_s < waiting.paused_until_s:
                continue
            items = list[Received]()
            while waiting.items and (not items or waiting.round_tokens + waiting.items[0][1] <= ROUND_TOKENS):
                item, tokens, size = waiting.items.popleft()
                items.append(item)
                waiting.round_tokens += tokens
                waiting.taken_bytes += size
            by_peer.append((peer, items))
        self._shared = served > 1
        return by_peer

    def charge(self, seconds: float) -> None:
        """Charge the ``seconds`` that the drafter took for a round's items to their targets, by tokens."""
        if not self._shared:
            return
        queues = [waiting for waiting in list(self._queues.values()) if waiting.round_tokens]
        tokens = sum(waiting.round_tokens for waiting in queues)
        for waiting in queues:
            waiting.paused_until_s = self._clock() + waiting.pace.pause_after_s(seconds * waiting.round_tokens / tokens)

    def waits(self, peer: Peer) -> bool:
        """Whether items of a peer wait for a later round."""
        waiting = self._queues.get(peer)
        return waiting is not None and bool(waiting.items)

    def wait_s(self) -> float | None:
        """Seconds until a waiting item may be taken; None: none waits."""
        paused_until_s = [waiting.paused_until_s for waiting in list(self._queues.values()) if waiting.items]
        return max(0.0, min(paused_until_s) - self._clock()) if paused_until_s else None


@dataclass(slots=True, eq=False)
class DraftSession:
    """See the module. ``number`` is our own id of the session, because two peers may use the same one."""

    number: int
    peer: Peer
    side: DraftSide
    span: Span | None = None
    tree: GrowingTree = field(default_factory=lambda: GrowingTree(0))  # the drafter's, once it has opened the session
    wanted: int = 0  # nodes that the target would verify next; 0: grow none
    answer_due: bool = False  # whether the target waits for an answer to its newest commit
    max_ahead: int = 0  # most nodes beyond ``wanted``; 0: one growth a commit, until the target allows more
    unlikely_growths: int = 0  # in a row without a likely node
    growths_sent: int = 0  # since the last commit
    has_unread: bool = False  # whether committed tokens may be left that the drafter can read now

    def apply_request(self, message: Open | Commit, run_ahead: int) -> None:
        """Set what an opening or a commit asks for."""
        self.wanted, self.answer_due = message.wanted, message.wanted > 0
        self.unlikely_growths = self.growths_sent = 0
        self.max_ahead = run_ahead if message.ahead else 0
        self.has_unread = False

    def record_growth(self, growth: Growth) -> bool:
        """Count the drafter's ``growth``. Returns whether to send it: even an empty one if the target waits for an
        answer."""
        is_sent, self.answer_due = self.answer_due or len(growth.ids) > 0, False
        self.growths_sent += is_sent
        self.has_unread = len(growth.ids) == 0 and not self.tree.begun
        if not self.max_ahead:
            return is_sent
        likely = len(growth.scores) and float(growth.scores.max()) >= MIN_SCORE
        self.unlikely_growths = 0 if likely else self.unlikely_growths + 1
        return is_sent

    @property
    def free_nodes(self) -> int:
        """How many further nodes may be sent to the target."""
        return max(0, min(MAX_HELD - 1, self.wanted + self.max_ahead) - self.tree.num_sent)

    @property
    def needs_whole_tree(self) -> bool:
        """Whether the next growth should be a whole tree (rule 2)."""
        return not (self.max_ahead and self.tree.num_sent)

    @property
    def should_grow_ahead(self) -> bool:
        """Whether to grow beyond ``wanted``. A drafter that begins a new tree after a commit first proposes the nodes
        that the target has already. So as many growths may be empty as the sent tree has levels."""
        if not self.max_ahead or self.wanted < 1 or not self.free_nodes or self.growths_sent >= MAX_GROWTHS_AHEAD:
            return False
        return not self.unlikely_growths or self.unlikely_growths <= self.tree.sent_depth()

    @property
    def budget(self) -> int:
        """Most nodes of the next growth. Only the best of a level are sent, because deeper levels may have better ones
        and the number of sent nodes is limited."""
        if not self.max_ahead:
            return self.wanted
        level = max(MIN_LEVEL_NODES, self.max_ahead // LEVELS_AHEAD)
        return min(self.wanted if self.needs_whole_tree else level, self.free_nodes)


@dataclass(frozen=True, slots=True)
class GrowCall:
    """One call of the drafter's ``grow``."""

    name: str  # of the span in the trace: tree or level
    began_s: float
    ended_s: float
    sessions: int


@dataclass(slots=True)
class Round:
    """The items of one pass over the inbox, sorted for the drafter, and the answers to send."""

    opens: dict[int, tuple[DraftSession, Open]] = field(default_factory=dict)  # the newest of each session, by number
    commits: list[Commit] = field(default_factory=list)  # without their states
    features: list[Features] = field(default_factory=list)  # states of prompts and commits, in order of arrival
    closes: list[int] = field(default_factory=list)
    answers: dict[Peer, list[TargetBound]] = field(default_factory=partial(defaultdict, list))
    received: list[tuple[int, int, float]] = field(default_factory=list)  # commits: the target's session, base, time
    grow_call: GrowCall | None = None
    growths: list[tuple[DraftSession, Growth]] = field(default_factory=list)

    def send(self) -> None:
        for peer, items in self.answers.items():
            peer.send(items)

    def discard(self, number: int) -> None:
        """Remove the items of a session before the drafter gets them."""
        self.opens.pop(number, None)
        self.commits = [c for c in self.commits if c.session != number]
        self.features = [f for f in self.features if f.session != number]

    def add_features(self, number: int, states: Features) -> None:
        self.features.append(Features(number, states.start, states.rows, states.num_rows, states.dtype))


HAND_OVER_S = 50e-6


class DraftWorker:
    """Serves one drafter to any number of targets: a ``messages.PeerEvents``."""

    def __init__(self, drafter: Drafter, tokenizer_hash: str, lease_s: float, run_ahead: int = 0,
                 trace: Trace | None = None, clock: Callable[[], float] = time.monotonic, spans: Spans | None = None,
                 made_for: str = "", device: torch.device = CPU) -> None:
        """``tokenizer_hash``: what targets must have, "" for any. ``run_ahead``: nodes beyond those that a target would
        verify next; 0: one growth a commit. ``made_for``: see ``DraftHello``. ``device``: the drafter's device."""
        self._drafter, self._device = drafter, device
        self._tokenizer_hash = tokenizer_hash
        self._lease_s = lease_s
        self.metrics = DraftMetrics(drafter.name)
        self._clock = clock
        self._run_ahead = run_ahead
        self._made_for = made_for
        self._trace = trace or Trace("", "draft")
        self._spans = spans
        self._log = logger("draft")
        self._inbox: queue.SimpleQueue[Callable[[Round], None] | None] = queue.SimpleQueue()
        self._intake = Intake(clock)
        self._faults: dict[Peer, FaultRate] = {}
        self._sessions: dict[tuple[Peer, int], DraftSession] = {}
        self._numbers = itertools.count(1)
        self._draining = False
        self._next_sweep_s = clock() + lease_s / 4
        self.vitals = Vitals("draft")
        self._num_threads = torch.get_num_threads()  # threads of one torch operation
        # Not named _thread: in compiled code that is a keyword of C.
        self._engine = self.vitals.thread("draft-worker", self._run)

    def start(self) -> None:
        self._engine.start()

    def stop(self) -> None:
        """End the thread after the round it is in."""
        self._inbox.put(None)
        if self._engine.is_alive():
            self._engine.join()
        self.vitals.disarm_exit()
        self._trace.write()

    def drain(self) -> None:
        """Give every session up, so that targets go on without us; new ones are refused."""
        self._inbox.put(self._begin_drain)

    def peer_up(self, peer: Peer, hello: TargetHello) -> DraftHello:
        """The handshake. Raises PairingError naming the field that does not fit; a doubtful pair is only logged."""
        drafter = self._drafter
        answer = DraftHello(PROTOCOL_VERSION, hello.incarnation, drafter.name, drafter.vocab_size,
                            self._tokenizer_hash, drafter.features, drafter.hidden_size, drafter.max_context,
                            drafter.max_nodes, drafter.max_sessions, self._run_ahead, self._made_for)
        if problem := check_pair(hello, answer):
            self._log.warning("doubtful pair", target=peer.name, problem=problem)
        return answer

    def peer_down(self, peer: Peer) -> None:
        self._intake.close(peer)
        self._inbox.put(lambda round_: self._forget_peer(peer, round_))

    def received(self, peer: Peer, items: Sequence[DraftBound], faults: Faults) -> None:
        self._intake.accept(peer, items, faults)
        self._inbox.put(lambda _: None)  # wake the thread

    def inbox_full(self, peer: Peer) -> bool:
        return self._intake.inbox_full(peer)

    @property
    def wait_s(self) -> float | None:
        """Seconds until there is work even if no item comes; None: there is none."""
        has_work = any(session.should_grow_ahead or session.has_unread for session in self._sessions.values())
        return 0.0 if has_work else self._intake.wait_s()

    def _run(self) -> None:
        # Otherwise the thread would use the newest setting of this process, which may be that of a target.
        with threads(self._num_threads), own_stream(self._device):
            while self.turn():
                self._engine.pulse.last_beat_s = self.vitals.clock()

    def turn(self, block: bool = True) -> bool:
        """One round: wait for items (or for the next check of leases) and process them; if none come, grow ahead where
        that pays. Returns False after ``stop``."""
        events: list[Callable[[Round], None]] = []
        sweep_s = max(0.0, self._next_sweep_s - self._clock())
        wait_s = self.wait_s
        try:
            event = self._inbox.get(block and wait_s != 0.0, sweep_s if wait_s is None else min(sweep_s, wait_s))
            while event is not None:
                events.append(event)
                event = self._inbox.get_nowait()
        except queue.Empty:
            self._round(events)
            return True
        return False

    def _round(self, events: Sequence[Callable[[Round], None]]) -> None:
        round_ = Round()
        for event in events:
            event(round_)
        for peer, items in self._intake.take(len({peer for peer, _ in self._sessions})):
            for item in items:
                if isinstance(item, tuple):
                    self._refuse(peer, *item, round_)
                else:
                    self._handle(peer, item, round_)
        if self._clock() >= self._next_sweep_s:  # after the new items, which renew leases
            self._expire(round_)
        try:
            began_s = self._clock()
            self._feed_drafter(round_)
            self._intake.charge(self._clock() - began_s)
            self._grow(round_)
            if not events and round_.grow_call is None:
                self._read_on()
        except (SlipstreamError, torch.OutOfMemoryError) as error:  # memory may run out in any part of a drafter
            # The drafter is at fault, not a peer: targets go on alone and open their sessions again.
            self._log.error("drafter failed", error=str(error))
            self._give_up_all("failed", round_)
            self._drafter.close(round_.closes)
        round_.send()
        if round_.growths and self._inbox.empty() and self._engine.is_alive():
            time.sleep(HAND_OVER_S)  # Python runs one thread at a time: let the one that writes the frame run first
        self._record(round_)

    def _expire(self, round_: Round) -> None:
        now_s = self._clock()
        self._next_sweep_s = now_s + self._lease_s / 4
        silent = [s for s in self._sessions.values() if now_s - s.side.received_s > self._lease_s]
        for session in [s for s in silent if not self._intake.waits(s.peer)]:  # what waits may be of it
            self._drop(session, "expired", round_)
            self.metrics.expired()

    def _refuse(self, peer: Peer, session_id: int, error: RemoteProtocolError, round_: Round) -> None:
        self.metrics.invalid_item()
        faults = self._faults.setdefault(peer, FaultRate())
        log = self._log.warning if faults.is_new(error.field) else self._log.debug
        log("invalid message", peer=peer.name, session=session_id, field=error.field)
        if faults.exceeded(self._clock()):
            peer.refuse(error.field)
        session = self._sessions.get((peer, session_id))
        if session is not None:
            self._drop(session, "invalid", round_)

    def _handle(self, peer: Peer, item: DraftBound, round_: Round) -> None:
        session = self._sessions.get((peer, item.session))
        if session is None:
            if isinstance(item, Commit):
                round_.answers[peer].append(Drop(item.session, "unknown", item.base + len(item.tokens)))
            if not isinstance(item, Open):
                return
            session = self._begin(peer, item, round_)
            if session is None:
                return
        now_s = self._clock()
        event = session.side.receive(item, now_s)
        number = session.number
        match event, item:
            case DraftEvent.OPEN, Open():
                # The drafter gets only the newest opening of a round.
                round_.discard(number)
                round_.opens[number] = session, replace(item, session=number)
                session.apply_request(item, self._run_ahead)
            case DraftEvent.FEATURES, Features():
                round_.add_features(number, item)
                session.has_unread = session.wanted > 0  # read the prompt while the target computes the rest of it
            case DraftEvent.COMMIT, Commit():
                round_.commits.append(Commit(number, item.base, item.tokens))
                if item.features is not None:
                    round_.add_features(number, item.features)
                round_.received.append((item.session, item.base, now_s))
                session.apply_request(item, self._run_ahead)
            case DraftEvent.GAP, Commit():
                self._forget(session, round_)
                round_.answers[peer].append(Drop(item.session, "gap", item.base + len(item.tokens)))
            case DraftEvent.CLOSE, _:
                self._forget(session, round_)

    def _begin(self, peer: Peer, item: Open, round_: Round) -> DraftSession | None:
        if self._draining or (len(self._sessions) >= self._drafter.max_sessions and not self._make_room(peer, round_)):
            reason = "draining" if self._draining else "capacity"
            round_.answers[peer].append(Drop(item.session, reason, len(item.tokens)))
            return None
        span = None if self._spans is None else self._spans.begin("draft.session", item.trace, prompt=item.prompt_len)
        session = DraftSession(next(self._numbers), peer, DraftSide(item.session), span)
        self._sessions[(peer, item.session)] = session
        return session

    def _make_room(self, peer: Peer, round_: Round) -> bool:
        """Make room for a session of ``peer`` (rule 6). Returns whether another peer's oldest session was closed."""
        holders = [holder for holder, _ in self._sessions]
        if (donor := donor_by_host(holders, peer, lambda holder: holder.name.rpartition(":")[0])) is None:
            return False
        oldest = next(session for session in self._sessions.values() if session.peer == donor)
        self._drop(oldest, "capacity", round_)
        return True

    def _feed_drafter(self, round_: Round) -> None:
        if round_.closes:
            self._drafter.close(round_.closes)
        if round_.opens:
            for number in self._drafter.open([message for _, message in round_.opens.values()]):
                self._drop(round_.opens[number][0], "capacity", round_)
            for session, _ in round_.opens.values():
                session.tree = self._drafter.tree(session.number)
        if round_.commits:
            self._drafter.commit(round_.commits)
        if round_.features:  # last: states are kept only of tokens that are known
            self._drafter.absorb(round_.features)

    def _grow(self, round_: Round) -> None:
        """Grow the sessions whose target waits for an answer (it may be empty) or that may grow ahead. Those that need
        a whole tree come first."""
        growing = [session for session in self._sessions.values() if session.answer_due or session.should_grow_ahead]
        if not growing:
            return
        if len(growing) > 1:
            growing.sort(key=lambda session: not session.needs_whole_tree)
        whole = growing[0].needs_whole_tree  # then all get whole trees: it costs little more than for those alone
        began_s, max_nodes = self._clock(), self._drafter.max_nodes
        numbers, budgets = list[int](), list[int]()
        for session in growing:
            numbers.append(session.number)
            budgets.append(min(session.budget, max_nodes))
        growths = self._drafter.grow(numbers, budgets, 0 if whole else 1)
        ended_s = self._clock()
        round_.grow_call = GrowCall("tree" if whole else "level", began_s, ended_s, len(growing))
        for session, growth in zip(growing, growths, strict=True):
            if session.record_growth(growth):
                growth = Growth(session.side.session, growth.base, growth.ids, growth.parents, growth.tokens,
                                growth.scores)  # the target's number of the session
                round_.answers[session.peer].append(growth)
                round_.growths.append((session, growth))

    def _read_on(self) -> None:
        """Read more of texts that were too long for one growth, so that the next commit finds them read."""
        if unread := [session for session in self._sessions.values() if session.has_unread]:
            unfinished = set(self._drafter.read([session.number for session in unread]))
            for session in unread:
                session.has_unread = session.number in unfinished

    def _record(self, round_: Round) -> None:
        """Record metrics, traces and spans of a round, after its answers were sent."""
        if self._trace.enabled:
            self._trace_round(round_)
        self.metrics.sessions_open(len(self._sessions))
        if round_.commits:
            self.metrics.committed(len(round_.commits))
        if (call := round_.grow_call) is None:
            return
        self.metrics.grew(call.ended_s - call.began_s, sum(len(growth.ids) for _, growth in round_.growths))
        for session, growth in round_.growths:
            if session.span is not None:
                session.span.event("growth", base=growth.base, nodes=len(growth.ids),
                                   draft_s=call.ended_s - call.began_s)

    def _trace_round(self, round_: Round) -> None:
        for session, base, received_s in round_.received:
            self._trace.received("commit", commit_key(session, base), received_s)
        if (call := round_.grow_call) is None:
            return
        self._trace.span(DEVICE, call.name, call.began_s, call.ended_s, sessions=call.sessions)
        for _, growth in round_.growths:
            self._trace.sent("growth", growth_key(growth), call.ended_s)

    def _drop(self, session: DraftSession, reason: str, round_: Round) -> None:
        self._forget(session, round_)
        round_.answers[session.peer].append(Drop(session.side.session, reason, session.side.base))

    def _forget(self, session: DraftSession, round_: Round) -> None:
        self._sessions.pop((session.peer, session.side.session), None)
        round_.discard(session.number)
        if session.span is not None:
            session.span.end()
        round_.closes.append(session.number)

    def _forget_peer(self, peer: Peer, round_: Round) -> None:
        for session in [s for s in self._sessions.values() if s.peer is peer]:
            self._forget(session, round_)
        round_.answers.pop(peer, None)
        self._faults.pop(peer, None)

    def _begin_drain(self, round_: Round) -> None:
        self._draining = True
        self._give_up_all("draining", round_)

    def _give_up_all(self, reason: str, round_: Round) -> None:
        for session in list(self._sessions.values()):
            self._drop(session, reason, round_)
