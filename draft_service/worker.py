"""DraftWorker: the engine thread of the draft service. Frames in, frames out.

Rules of the worker:
1. One thread owns the drafter and every session; the outside only enqueues (``peer_up`` alone runs on the caller's
   thread and touches nothing that changes).
2. A round: take a bounded part of each peer's waiting items, pass them to the drafter in one batch, grow, and send each
   peer one frame.
3. A session belongs to the peer that opened it; it is freed when the peer vanishes or is silent about it for a lease.
4. With ``run_ahead``, sessions whose targets allow it keep growing, a level at a time, whenever the inbox is empty and
   growing pays (``Drafted``); others get one growth a commit. In such idle moments the drafter also reads on in texts
   too long for one round, and in prompts as their states come.
5. Nothing that a peer sends stops the thread: a fault closes one session and is counted, too many end the stream.
6. When all places are taken, a host with at least two more than another gives one up for it; so do peers of one host.

Intake: the items of each target that the drafter has not processed yet.

Rules of the intake:
1. Any thread fills it, and the worker's thread takes from it. Each target's waiting items are limited in number and
   bytes; beyond that (``full``) no more is read from the target.
2. A round takes items of each target in turn, at most ``ROUND`` tokens of each, so that no target waits for another's
   long texts.
3. While others are served too, a target whose texts took more than the share ``RESTS`` of the time is skipped for a
   while.

Drafted: all that the draft service holds of one session, and whether growing on pays while its target verifies.

Rules of a session:
1. The session's tree shows which nodes the target holds, because both sides re-root on every commit. The target can
   verify the remaining nodes without waiting.
2. If the target holds no or few nodes, it waits or goes on without drafts: the next growth is a whole tree, sent at
   once. If it holds more, it gets further levels as they are made, if it allows that.
3. Growth stops at ``extra`` nodes beyond what the target would verify, when no likely node is left, when the drafter
   proposes no more, or at the allowed number of growths (``conduct``). A commit starts it again.

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
ROUND = 16_384  # tokens of one target
RESTS = 0.5  # share of the time
MOST_ITEMS, MOST_BYTES = 4096, 64 << 20  # that wait
THIN = 0.5  # share of a whole tree's promise
PIECE, SHARE = 16, 16  # nodes sent for one further level: a sixteenth of what may be held beyond, at least so many
LEAST = log(1 / 256)  # the score below which a node is not worth a level of the drafter's time

Said = DraftBound | tuple[int, RemoteProtocolError]


def weight_of(item: Said) -> tuple[int, int]:
    """An item's weight, roughly: tokens that the drafter has to read, and bytes that it occupies."""
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
        self.items: deque[tuple[Said, int, int]] = deque()  # with tokens and bytes
        self.came, self.done = [0, 0], [0, 0]  # items and bytes; each counted by one thread alone
        self.pace = pace
        self.rests_until_s = 0.0
        self.took = 0  # tokens, in this round


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
        """Store arrived items. Returns the function that the worker's thread has to call for them."""
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

    # From the worker's.

    def take(self, served: int) -> list[tuple[Peer, list[Said]]]:
        """A round's. ``served``: targets that have sessions."""
        now_s, waiting, rounds = self._clock(), 0, list[tuple[Peer, list[Said]]]()
        for peer, tray in list(self._trays.items()):
            tray.took = 0
            waiting += bool(tray.items)
            if not tray.items or now_s < tray.rests_until_s:
                continue
            taken, done = list[Said](), tray.done
            while tray.items and (not taken or tray.took + tray.items[0][1] <= ROUND):  # one at least
                item, tokens, size = tray.items.popleft()
                taken.append(item)
                tray.took += tokens
                done[0] += 1
                done[1] += size
            rounds.append((peer, taken))
        self._shared = max(served, waiting) > 1
        return rounds

    def told(self, seconds: float) -> None:
        """Count the time that the drafter needed for the items of the round."""
        if not self._shared:
            return
        trays = [tray for tray in list(self._trays.values()) if tray.took]
        tokens = sum(tray.took for tray in trays)
        for tray in trays:
            tray.rests_until_s = self._clock() + tray.pace.owes(seconds * tray.took / tokens)

    def rests_s(self) -> float | None:
        """Seconds until something that waits may be taken; None: nothing waits."""
        waiting = [tray.rests_until_s for tray in list(self._trays.values()) if tray.items]
        return max(0.0, min(waiting) - self._clock()) if waiting else None

@dataclass(slots=True, eq=False)
class Drafted:
    """``number`` is ours: peers count their sessions on their own and may collide."""

    number: int
    peer: Peer
    side: DraftSide
    span: Span | None = None
    tree: GrowingTree = field(default_factory=lambda: GrowingTree(0))  # the drafter's, once it has opened the session
    wanted: int = 0  # nodes that the target would verify next; 0: none are to be grown
    stale: bool = False  # committed since the last growth
    extra: int = 0  # nodes grown beyond those; 0: one growth a commit, until the target allows more
    usual: float = 0.0  # what a whole tree promises
    barren: int = 0  # growths in a row without a likely node
    said: int = 0  # growths since it was asked
    behind: bool = False  # there is text that was not read, and more of that may be read

    def told(self, message: Open | Commit, run_ahead: int) -> None:
        """Take the target's commit and the number of nodes that it wants."""
        self.wanted, self.stale, self.barren, self.said = message.wanted, message.wanted > 0, 0, 0
        self.extra = run_ahead if message.ahead else 0
        self.behind = False

    def grew(self, growth: Growth) -> bool:
        """Take the drafter's ``growth``. Returns whether to send it: an empty one is sent if the target may wait for an
        answer to its newest commit."""
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
        """Further nodes that the target is to hold."""
        return max(0, min(MAX_HELD - 1, self.wanted + self.extra) - self.tree.num_sent)

    @property
    def starving(self) -> bool:
        """Whether the target waits for a whole tree, or should."""
        return not self.extra or self.tree.promise(self.wanted) <= THIN * self.usual

    @property
    def hungry(self) -> bool:
        """Whether to grow further. A drafter that began anew after a commit proposes nothing new until it is below the
        nodes that the target holds, so its growths may be empty for as many levels as the tree has."""
        if not self.extra or self.wanted < 1 or not self.room or self.said >= GROWTHS:
            return False
        return not self.barren or self.barren <= self.tree.sent_depth()

    @property
    def budget(self) -> int:
        """The most nodes of the next growth. Only a level's best nodes are sent, because better ones may come from the
        levels below, and the tree's size is limited."""
        if not self.extra:
            return self.wanted
        return min(self.wanted if self.starving else max(PIECE, self.extra // SHARE), self.room)


@dataclass(frozen=True, slots=True)
class Grown:
    """One growth of all sessions that wanted one."""

    name: str  # of the span
    began_s: float
    ended_s: float
    sessions: int


@dataclass(slots=True)
class Round:
    """What one pass over the inbox collected for the drafter."""

    opens: list[Open] = field(default_factory=list)
    features: list[Features] = field(default_factory=list)
    commits: list[Commit] = field(default_factory=list)
    committed: set[int] = field(default_factory=set)  # whose they are
    behind: list[Features] = field(default_factory=list)  # them, in the same session
    closes: list[int] = field(default_factory=list)
    answers: dict[Peer, list[TargetBound]] = field(default_factory=partial(defaultdict, list))
    came: list[tuple[int, int, float]] = field(default_factory=list)  # commits: a target's session, base, and when
    grown: Grown | None = None
    sent: list[tuple[Drafted, Growth]] = field(default_factory=list)

    def send(self) -> None:
        for peer, items in self.answers.items():
            peer.send(items)

    def unsay(self, number: int) -> None:
        """Drop everything that is collected for a session."""
        self.opens = [o for o in self.opens if o.session != number]
        self.features = [f for f in self.features if f.session != number]
        self.commits = [c for c in self.commits if c.session != number]
        self.committed.discard(number)
        self.behind = [f for f in self.behind if f.session != number]


def commit_of(item: Commit, number: int) -> Commit:
    """``item`` of our session ``number``. Written out: ``dataclasses.replace`` takes several times as long."""
    states = item.features
    if states is not None:
        states = Features(number, states.start, states.rows, states.num_rows, states.dtype)
    return Commit(number, item.base, item.tokens, states, item.wanted, item.ahead)


def growth_of(growth: Growth, session: int) -> Growth:
    """``growth`` of the target's ``session``."""
    return Growth(session, growth.base, growth.ids, growth.parents, growth.tokens, growth.scores)


HAND_OVER_S = 50e-6


class DraftWorker:
    """Serves one drafter to any number of targets: a ``messages.PeerEvents``."""

    def __init__(self, drafter: Drafter, tokenizer_hash: str, lease_s: float, run_ahead: int = 0,
                 trace: Trace | None = None, clock: Callable[[], float] = time.monotonic, spans: Spans | None = None,
                 made_for: str = "", device: torch.device = CPU) -> None:
        """``tokenizer_hash``: what targets must have, "" for any. ``run_ahead``: nodes beyond those that a target would
        verify next; 0: one growth a commit. ``made_for``: see ``DraftHello``. ``device``: the drafter's."""
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
        self._inside = torch.get_num_threads()  # of an operation
        # Not _thread: compiled, that is a word of C.
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
        """The handshake. Raises PairingError naming the field that does not fit."""
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
        """Seconds until it would go on if nothing came; None: it would not."""
        goes_on = any(drafted.hungry or drafted.behind for drafted in self._sessions.values())
        return 0.0 if goes_on else self._intake.rests_s()

    def _run(self) -> None:
        # Else a thread has those that anybody set last, be it a target beside it.
        with threads(self._inside), stream_of_its_own(self._device):
            while self.turn():
                self._engine.pulse.beaten_s = self.vitals.clock()

    def turn(self, block: bool = True) -> bool:
        """Wait for items (or for a lease to end) and process them; if there are none, grow further where that pays.
        Returns False after ``stop``."""
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
        if self._clock() >= self._next_sweep_s:  # behind what came, which is a sign of life
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
            time.sleep(HAND_OVER_S)  # Python runs one thread at a time: the one that writes the frame goes first
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
                # An earlier opening in the same round is void: the drafter hears of the newest alone.
                round_.unsay(number)
                round_.opens.append(replace(item, session=number))
                drafted.told(item, self._run_ahead)
            case DraftEvent.FEATURES, Features():
                states = round_.behind if number in round_.committed else round_.features
                states.append(replace(item, session=number))
                drafted.behind = drafted.wanted > 0  # while the target goes on with its prompt
            case DraftEvent.COMMIT, Commit():
                told = commit_of(item, number)
                if round_.behind and told.features is not None:  # those before them may be its own: in order
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
        """Whether a peer with more sessions gave the oldest of them up for one of ``peer``'s."""
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
        """Whatever is stale or hungry, those that starve first; each has a growth then, be it empty."""
        wanting = [drafted for drafted in self._sessions.values() if drafted.stale or drafted.hungry]
        if not wanting:
            return
        if len(wanting) > 1:
            wanting.sort(key=lambda drafted: not drafted.starving)
        whole = wanting[0].starving  # one whole tree for all costs little more than for those that wait for it
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
        """Go on with texts that were too long for a growth, so that the next commit finds them read."""
        if behind := [drafted for drafted in self._sessions.values() if drafted.behind]:
            left = set(self._drafter.read([drafted.number for drafted in behind]))
            for drafted in behind:
                drafted.behind = drafted.number in left

    def _note(self, round_: Round) -> None:
        """What nobody waits for: metrics, traces and spans of a round."""
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
