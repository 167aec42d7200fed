"""DraftWorker: the engine thread of the draft service. It receives frames of targets and answers with frames.

Rules of the worker:
1. One thread owns the drafter and every session; other threads only put items into queues. Only ``peer_up`` runs on
   the caller's thread, and it reads nothing that changes.
2. A round: take waiting items, a bounded part of each peer's; give them to the drafter in batches; grow; answer each
   peer with one frame.
3. A session belongs to the peer that opened it. It is freed when the peer is lost or silent about it for ``lease_s``.
4. With ``run_ahead``, a session whose target allows it grows on, a level at a time, whenever the inbox is empty and
   growing pays (``Drafted``); others get one growth a commit. When there is nothing to grow, the drafter reads on in
   texts that are too long for one growth, and in prompts whose states arrive.
5. No input of a peer stops the thread: a fault closes one session and is counted; too many faults end the stream.
6. When all sessions are in use, a host gives one up for a host that has at least two fewer; so do peers of one host.

Intake: items of targets that the drafter has not processed yet, separate for each target.

Rules of the intake:
1. Any thread may add items; only the worker's thread takes them. Waiting items of one target are bounded in number and
   bytes; beyond that (``full``) nothing more is read from the target.
2. A round takes at most ``ROUND`` tokens (or one item) of each target: so no target waits for all input of another.
3. While several targets are served, one whose input took more than ``RESTS`` of the time is skipped for a while.

Drafted: the state of one session, and whether growing on pays while its target verifies.

Rules of a session:
1. The tree shows which nodes the target has: it is re-rooted on every commit, as the target's tree is. Sent nodes that
   remain can be verified without a wait.
2. If a target has no nodes, or few, it waits or goes on without drafts: its next growth is a whole tree, sent at once.
   A target with more nodes gets further levels as they are grown, if it allows that.
3. Growth stops at ``extra`` nodes beyond those that the target would verify, when no likely node is left, when the
   drafter finds nothing more, or after ``GROWTHS`` growths (``conduct``). A commit starts it again.

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
from slipstream.engine.runner import stream_of_its_own, threads
from slipstream.observe.log import logger
from slipstream.observe.metrics import DraftMetrics
from slipstream.observe.spans import Span, Spans
from slipstream.observe.trace import Trace, commit_key, growth_key
from slipstream.observe.vitals import Vitals
from slipstream.protocol.conduct import GROWTHS, FaultRate, Pace, giver_of_hosts
from slipstream.protocol.messages import (
    PROTOCOL_VERSION,
    Close,
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
ROUND = 16_384  # most tokens of one target in a round
RESTS = 0.5  # share of the time that one of several targets may take
MOST_ITEMS, MOST_BYTES = 4096, 64 << 20  # of one target that may wait
THIN = 0.5  # a tree with less than this share of a whole tree's expected tokens is replaced by a whole tree
PIECE, SHARE = 16, 16  # nodes sent for one further level: extra // SHARE, at least PIECE
LEAST = log(1 / 256)  # the score below which a node is not worth a level of the drafter's time

Said = DraftBound | tuple[int, RemoteProtocolError]


def weight_of(item: Said) -> tuple[int, int]:
    """About how many tokens of an item a drafter reads, and how many bytes the item takes."""
    if isinstance(item, Commit):
        count = len(item.tokens)
        return count, 4 * count + (0 if item.features is None else len(item.features.rows))
    if isinstance(item, Features):
        return item.num_rows, 4 * item.num_rows + len(item.rows)
    count = len(item.tokens) if isinstance(item, Open) else 1
    return count, 4 * count


class Tray:
    """The waiting items of one target."""

    __slots__ = ("came", "done", "items", "pace", "rests_until_s", "took")

    def __init__(self, pace: Pace) -> None:
        self.items: deque[tuple[Said, int, int]] = deque()  # item, tokens, bytes
        self.came, self.done = [0, 0], [0, 0]  # items and bytes, added and taken; each is written by one thread only
        self.pace = pace
        self.rests_until_s = 0.0
        self.took = 0  # tokens taken in this round


class Intake:
    __slots__ = ("_clock", "_shared", "_trays")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._trays: dict[Peer, Tray] = {}
        self._shared = False  # whether several targets are served

    # From any thread.

    def close(self, peer: Peer) -> None:
        self._trays.pop(peer, None)

    def full(self, peer: Peer) -> bool:
        if (tray := self._trays.get(peer)) is None:
            return False
        came, done = tray.came, tray.done
        return came[0] - done[0] >= MOST_ITEMS or came[1] - done[1] >= MOST_BYTES

    def came(self, peer: Peer, items: Sequence[DraftBound], faults: Faults) -> Callable[[object], None]:
        """Count new items of a peer. Returns the function that the worker's thread calls to queue them."""
        tray = self._trays.get(peer)
        if tray is None:
            tray = self._trays[peer] = Tray(Pace(RESTS, self._clock))
        waiting, said, came = tray.items, list[tuple[Said, int, int]](), tray.came
        for item in (*faults, *items):
            tokens, size = weight_of(item)
            said.append((item, tokens, size))
            came[0] += 1
            came[1] += size
        return lambda _: waiting.extend(said)

    # From the worker's thread.

    def take(self, served: int) -> list[tuple[Peer, list[Said]]]:
        """The items of one round. ``served``: number of targets that have sessions."""
        now_s, waiting, rounds = self._clock(), 0, list[tuple[Peer, list[Said]]]()
        for peer, tray in list(self._trays.items()):
            tray.took = 0
            waiting += bool(tray.items)
            if not tray.items or now_s < tray.rests_until_s:
                continue
            taken, done = list[Said](), tray.done
            while tray.items and (not taken or tray.took + tray.items[0][1] <= ROUND):  # at least one item
                item, tokens, size = tray.items.popleft()
                taken.append(item)
                tray.took += tokens
                done[0] += 1
                done[1] += size
            rounds.append((peer, taken))
        self._shared = max(served, waiting) > 1
        return rounds

    def told(self, seconds: float) -> None:
        """Charge the ``seconds`` that the drafter took for a round's items to their targets, by tokens."""
        if not self._shared:
            return
        trays = [tray for tray in list(self._trays.values()) if tray.took]
        tokens = sum(tray.took for tray in trays)
        for tray in trays:
            tray.rests_until_s = self._clock() + tray.pace.owes(seconds * tray.took / tokens)

    def rests_s(self) -> float | None:
        """Seconds until a waiting item may be taken; None: none waits."""
        waiting = [tray.rests_until_s for tray in list(self._trays.values()) if tray.items]
        return max(0.0, min(waiting) - self._clock()) if waiting else None

@dataclass(slots=True, eq=False)
class Drafted:
    """See the module. ``number`` is our own id of the session, because two peers may use the same one."""

    number: int
    peer: Peer
    side: DraftSide
    span: Span | None = None
    tree: GrowingTree = field(default_factory=lambda: GrowingTree(0))  # the drafter's, once it has opened the session
    wanted: int = 0  # nodes that the target would verify next; 0: grow none
    stale: bool = False  # whether the target waits for an answer to its newest commit
    extra: int = 0  # most nodes beyond ``wanted``; 0: one growth a commit, until the target allows more
    usual: float = 0.0  # average expected tokens of a whole tree
    barren: int = 0  # growths in a row without a likely node
    said: int = 0  # growths sent since the last commit
    behind: bool = False  # whether committed tokens may be left that the drafter can read now

    def told(self, message: Open | Commit, run_ahead: int) -> None:
        """Take what an opening or a commit asks for."""
        self.wanted, self.stale, self.barren, self.said = message.wanted, message.wanted > 0, 0, 0
        self.extra = run_ahead if message.ahead else 0
        self.behind = False

    def grew(self, growth: Growth) -> bool:
        """Take the drafter's ``growth``. Returns whether to send it: even an empty one if the target waits for an
        answer."""
        answer, self.stale = self.stale or len(growth.ids) > 0, False
        self.said += answer
        self.behind = len(growth.ids) == 0 and not self.tree.begun
        if not self.extra:
            return answer
        if 0 < len(growth.ids) == self.tree.num_sent:
            promise = self.tree.promise(self.tree.num_sent)
            self.usual += 0.2 * (promise - self.usual) if self.usual else promise
        likely = len(growth.scores) and float(growth.scores.max()) >= LEAST
        self.barren = 0 if likely else self.barren + 1
        return answer

    @property
    def room(self) -> int:
        """How many further nodes may be sent to the target."""
        return max(0, min(MAX_HELD - 1, self.wanted + self.extra) - self.tree.num_sent)

    @property
    def starving(self) -> bool:
        """Whether the next growth should be a whole tree (rule 2)."""
        return not self.extra or self.tree.promise(self.wanted) <= THIN * self.usual

    @property
    def hungry(self) -> bool:
        """Whether to grow on. A drafter that begins a new tree after a commit first proposes the nodes that the target
        has already. So as many growths may be empty as the sent tree has levels."""
        if not self.extra or self.wanted < 1 or not self.room or self.said >= GROWTHS:
            return False
        return not self.barren or self.barren <= self.tree.sent_depth()

    @property
    def budget(self) -> int:
        """Most nodes of the next growth. Only the best of a level are sent, because deeper levels may have better ones
        and the number of sent nodes is limited."""
        if not self.extra:
            return self.wanted
        return min(self.wanted if self.starving else max(PIECE, self.extra // SHARE), self.room)


@dataclass(frozen=True, slots=True)
class Grown:
    """One call of the drafter's ``grow``."""

    name: str  # of the span in the trace: tree or level
    began_s: float
    ended_s: float
    sessions: int


@dataclass(slots=True)
class Round:
    """The items of one pass over the inbox, sorted for the drafter, and the answers to send."""

    opens: list[Open] = field(default_factory=list)
    features: list[Features] = field(default_factory=list)
    commits: list[Commit] = field(default_factory=list)
    committed: set[int] = field(default_factory=set)  # sessions of ``commits``
    behind: list[Features] = field(default_factory=list)  # features that came after a commit of their session
    closes: list[int] = field(default_factory=list)
    answers: dict[Peer, list[TargetBound]] = field(default_factory=partial(defaultdict, list))
    came: list[tuple[int, int, float]] = field(default_factory=list)  # commits: the target's session, base, time
    grown: Grown | None = None
    sent: list[tuple[Drafted, Growth]] = field(default_factory=list)

    def send(self) -> None:
        for peer, items in self.answers.items():
            peer.send(items)

    def unsay(self, number: int) -> None:
        """Remove the items of a session before the drafter gets them."""
        self.opens = [o for o in self.opens if o.session != number]
        self.features = [f for f in self.features if f.session != number]
        self.commits = [c for c in self.commits if c.session != number]
        self.committed.discard(number)
        self.behind = [f for f in self.behind if f.session != number]


def commit_of(item: Commit, number: int) -> Commit:
    """``item`` with our session ``number``. Written out: ``dataclasses.replace`` takes several times as long."""
    states = item.features
    if states is not None:
        states = Features(number, states.start, states.rows, states.num_rows, states.dtype)
    return Commit(number, item.base, item.tokens, states, item.wanted, item.ahead)


def growth_of(growth: Growth, session: int) -> Growth:
    """A copy of ``growth`` with the target's ``session``."""
    return Growth(session, growth.base, growth.ids, growth.parents, growth.tokens, growth.scores)


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
        self._sessions: dict[tuple[Peer, int], Drafted] = {}
        self._by_number: dict[int, Drafted] = {}
        self._numbers = itertools.count(1)
        self._draining = False
        self._next_sweep_s = clock() + lease_s / 4
        self.vitals = Vitals("draft")
        self._inside = torch.get_num_threads()  # threads of one torch operation
        # Not named _thread: in compiled code that is a keyword of C.
        self._engine = self.vitals.thread("draft-worker", self._run)

    def start(self) -> None:
        self._engine.start()

    def stop(self) -> None:
        """End the thread after the round it is in."""
        self._inbox.put(None)
        if self._engine.is_alive():
            self._engine.join()
        self.vitals.end()
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
        self._inbox.put(self._intake.came(peer, items, faults))

    def full(self, peer: Peer) -> bool:
        return self._intake.full(peer)

    @property
    def rests_s(self) -> float | None:
        """Seconds until there is work even if no item comes; None: there is none."""
        goes_on = any(drafted.hungry or drafted.behind for drafted in self._sessions.values())
        return 0.0 if goes_on else self._intake.rests_s()

    def _run(self) -> None:
        # Otherwise the thread would use the newest setting of this process, which may be that of a target.
        with threads(self._inside), stream_of_its_own(self._device):
            while self.turn():
                self._engine.pulse.beaten_s = self.vitals.clock()

    def turn(self, block: bool = True) -> bool:
        """One round: wait for items (or for the next check of leases) and process them; if none come, grow on where
        that pays. Returns False after ``stop``."""
        events: list[Callable[[Round], None]] = []
        wait_s = max(0.0, self._next_sweep_s - self._clock())
        rests_s = self.rests_s if wait_s > 0 else None
        goes_on = rests_s == 0.0
        try:
            event = self._inbox.get(block and not goes_on, wait_s if rests_s is None else min(wait_s, rests_s))
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
        for peer, said in self._intake.take(len({peer for peer, _ in self._sessions})):
            self._hear(peer, said, round_)
        if self._clock() >= self._next_sweep_s:  # after the new items, which renew leases
            self._expire(round_)
        try:
            began_s = self._clock()
            self._tell(round_)
            self._intake.told(self._clock() - began_s)
            self._grow(round_)
            if not events and round_.grown is None:
                self._read()
        except (SlipstreamError, torch.OutOfMemoryError) as error:  # memory may run out in any part of a drafter
            # The drafter is at fault, not a peer: targets go on alone and open their sessions again.
            self._log.error("drafter failed", error=str(error))
            self._give_up_all("failed", round_)
            self._drafter.close(round_.closes)
        round_.send()
        if round_.sent and self._inbox.empty() and self._engine.is_alive():
            time.sleep(HAND_OVER_S)  # Python runs one thread at a time: let the one that writes the frame run first
        self._note(round_)

    def _expire(self, round_: Round) -> None:
        now_s = self._clock()
        self._next_sweep_s = now_s + self._lease_s / 4
        for drafted in [f for f in self._sessions.values() if now_s - f.side.heard_s > self._lease_s]:
            self._drop(drafted, DraftEvent.EXPIRE, "expired", round_)
            self.metrics.expired()

    def _hear(self, peer: Peer, said: Sequence[Said], round_: Round) -> None:
        for item in said:
            if isinstance(item, Open | Features | Commit | Close):
                self._route(peer, item, round_)
            else:
                self._refuse(peer, *item, round_)

    def _refuse(self, peer: Peer, session: int, error: RemoteProtocolError, round_: Round) -> None:
        self.metrics.invalid_item()
        faults = self._faults.setdefault(peer, FaultRate())
        log = self._log.warning if faults.news(error.field) else self._log.debug
        log("invalid message", peer=peer.name, session=session, field=error.field)
        if faults.fault(self._clock()):
            peer.refuse(error.field)
        drafted = self._sessions.get((peer, session))
        if drafted is not None:
            self._drop(drafted, DraftEvent.CLOSE, "invalid", round_)

    def _route(self, peer: Peer, item: DraftBound, round_: Round) -> None:
        drafted = self._sessions.get((peer, item.session))
        if drafted is None:
            if isinstance(item, Commit):
                round_.answers[peer].append(Drop(item.session, "unknown", item.base + len(item.tokens)))
            if not isinstance(item, Open):
                return
            drafted = self._begin(peer, item, round_)
            if drafted is None:
                return
        now_s = self._clock()
        event = drafted.side.receive(item, now_s)
        number = drafted.number
        match event, item:
            case DraftEvent.OPEN, Open():
                # The drafter gets only the newest opening of a round.
                round_.unsay(number)
                round_.opens.append(replace(item, session=number))
                drafted.told(item, self._run_ahead)
            case DraftEvent.FEATURES, Features():
                states = round_.behind if number in round_.committed else round_.features
                states.append(replace(item, session=number))
                drafted.behind = drafted.wanted > 0  # read the prompt while the target computes the rest of it
            case DraftEvent.COMMIT, Commit():
                told = commit_of(item, number)
                if round_.behind and told.features is not None:  # earlier ones may be of this session: keep the order
                    round_.behind.append(told.features)
                    told = Commit(number, told.base, told.tokens, None, told.wanted, told.ahead)
                round_.commits.append(told)
                round_.committed.add(number)
                round_.came.append((item.session, item.base, now_s))
                drafted.told(item, self._run_ahead)
            case DraftEvent.GAP, Commit():
                self._forget(drafted, round_)
                round_.answers[peer].append(Drop(item.session, "gap", item.base + len(item.tokens)))
            case DraftEvent.CLOSE, _:
                self._forget(drafted, round_)

    def _begin(self, peer: Peer, item: Open, round_: Round) -> Drafted | None:
        if self._draining or (len(self._sessions) >= self._drafter.max_sessions and not self._yields(peer, round_)):
            reason = "draining" if self._draining else "capacity"
            round_.answers[peer].append(Drop(item.session, reason, len(item.tokens)))
            return None
        span = None if self._spans is None else self._spans.begin("draft.session", item.trace, prompt=item.prompt_len)
        drafted = Drafted(next(self._numbers), peer, DraftSide(item.session), span)
        self._sessions[(peer, item.session)] = drafted
        self._by_number[drafted.number] = drafted
        return drafted

    def _yields(self, peer: Peer, round_: Round) -> bool:
        """Make room for a session of ``peer`` (rule 6). Returns whether another peer's oldest session was closed."""
        holders = [holder for holder, _ in self._sessions]
        if (crowd := giver_of_hosts(holders, peer, lambda one: one.name.rpartition(":")[0])) is None:
            return False
        oldest = next(one for one in self._sessions.values() if one.peer == crowd)
        self._drop(oldest, DraftEvent.CLOSE, "capacity", round_)
        return True

    def _tell(self, round_: Round) -> None:
        if round_.closes:
            self._drafter.close(round_.closes)
        if round_.opens:
            for number in self._drafter.open(round_.opens):
                round_.unsay(number)
                self._drop(self._by_number[number], DraftEvent.CLOSE, "capacity", round_)
            for opened in round_.opens:
                self._by_number[opened.session].tree = self._drafter.tree(opened.session)
        if round_.features:
            self._drafter.absorb(round_.features)
        if round_.commits:
            self._drafter.commit(round_.commits)
        if round_.behind:
            self._drafter.absorb(round_.behind)

    def _grow(self, round_: Round) -> None:
        """Grow stale and hungry sessions, starving ones first. Each stale one gets an answer, even an empty one."""
        wanting = [drafted for drafted in self._sessions.values() if drafted.stale or drafted.hungry]
        if not wanting:
            return
        if len(wanting) > 1:
            wanting.sort(key=lambda drafted: not drafted.starving)
        whole = wanting[0].starving  # then all get whole trees: it costs little more than for the starving ones
        started_s, most = self._clock(), self._drafter.max_nodes
        numbers, budgets = list[int](), list[int]()
        for drafted in wanting:
            numbers.append(drafted.number)
            budgets.append(min(drafted.budget, most))
        growths = {growth.session: growth for growth in self._drafter.grow(numbers, budgets, 0 if whole else 1)}
        ended_s = self._clock()
        round_.grown = Grown("tree" if whole else "level", started_s, ended_s, len(wanting))
        for drafted in wanting:
            growth = growths.get(drafted.number) or Growth.empty(drafted.number, drafted.side.base)
            if drafted.grew(growth):
                growth = growth_of(growth, drafted.side.session)
                round_.answers[drafted.peer].append(growth)
                round_.sent.append((drafted, growth))

    def _read(self) -> None:
        """Read on in texts that were too long for one growth, so that the next commit finds them read."""
        if behind := [drafted for drafted in self._sessions.values() if drafted.behind]:
            left = set(self._drafter.read([drafted.number for drafted in behind]))
            for drafted in behind:
                drafted.behind = drafted.number in left

    def _note(self, round_: Round) -> None:
        """Record metrics, traces and spans of a round, after its answers were sent."""
        if self._trace.keeps:
            self._picture(round_)
        self.metrics.sessions_open(len(self._sessions))
        if round_.commits:
            self.metrics.committed(len(round_.commits))
        if (grown := round_.grown) is None:
            return
        self.metrics.grew(grown.ended_s - grown.began_s, sum(len(growth.ids) for _, growth in round_.sent))
        for drafted, growth in round_.sent:
            if drafted.span is not None:
                drafted.span.event("growth", base=growth.base, nodes=len(growth.ids),
                                   draft_s=grown.ended_s - grown.began_s)

    def _picture(self, round_: Round) -> None:
        for session, base, came_s in round_.came:
            self._trace.came("device", "commit", commit_key(session, base), came_s)
        if (grown := round_.grown) is None:
            return
        self._trace.span("device", grown.name, grown.began_s, grown.ended_s, sessions=grown.sessions)
        for _, growth in round_.sent:
            self._trace.left("device", "growth", growth_key(growth), grown.ended_s)

    def _drop(self, drafted: Drafted, event: DraftEvent, reason: str, round_: Round) -> None:
        drafted.side.apply(event)
        self._forget(drafted, round_)
        round_.answers[drafted.peer].append(Drop(drafted.side.session, reason, drafted.side.base))

    def _forget(self, drafted: Drafted, round_: Round) -> None:
        self._sessions.pop((drafted.peer, drafted.side.session), None)
        self._by_number.pop(drafted.number, None)
        round_.unsay(drafted.number)
        if drafted.span is not None:
            drafted.span.end()
        round_.closes.append(drafted.number)

    def _forget_peer(self, peer: Peer, round_: Round) -> None:
        for drafted in [f for f in self._sessions.values() if f.peer is peer]:
            drafted.side.apply(DraftEvent.LOST)
            self._forget(drafted, round_)
        round_.answers.pop(peer, None)
        self._faults.pop(peer, None)

    def _begin_drain(self, round_: Round) -> None:
        self._draining = True
        self._give_up_all("draining", round_)

    def _give_up_all(self, reason: str, round_: Round) -> None:
        for drafted in list(self._sessions.values()):
            self._drop(drafted, DraftEvent.CLOSE, reason, round_)
