"""The draft worker round by round: leases, capacity, gaps, peers that vanish, a drafter that fails."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest
import torch

from draft_service import assembly
from draft_service.assembly import build
from draft_service.worker import ROUND_TOKENS, DraftWorker
from slipstream.base.config import Config, DraftSection, ModelSection
from slipstream.base.errors import CapacityError, PairingError, RemoteProtocolError
from slipstream.drafting.ngram import NgramDrafter
from slipstream.engine.device import threads
from slipstream.protocol.messages import (
    PROTOCOL_VERSION,
    Close,
    Commit,
    DraftBound,
    Drop,
    Features,
    Growth,
    Open,
    TargetBound,
    TargetHello,
)
from slipstream.protocol.requests import Sampling

TEXT = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
HELLO = TargetHello(PROTOCOL_VERSION, 1, "m", 100, "hash", 32, 4, 64)


@dataclass(eq=False)
class Listener:
    """A peer that remembers what it was sent."""

    name: str = "peer"
    heard: list[TargetBound] = field(default_factory=list)

    def send(self, items: Sequence[TargetBound]) -> None:
        self.heard.extend(items)

    def take(self) -> list[TargetBound]:
        heard, self.heard = self.heard, []
        return heard


class Reading(NgramDrafter):
    """Remembers what it is asked to read."""

    def read(self, ids: Sequence[int]) -> list[int]:
        self.seen = [*getattr(self, "seen", ()), *ids]
        return []


@pytest.mark.parametrize(("wanted", "read"), [(8, [1, 1]), (0, [])])
def test_states_of_a_prompt_are_read_as_they_come_where_drafts_will_be_wanted(wanted: int, read: list[int]) -> None:
    """A head had all of a long prompt to read behind its first token, when its target waited for a tree."""
    drafter = Reading(8)
    worker, peer = DraftWorker(drafter, "hash", 30.0, clock=lambda: 100.0), Listener()
    for told in (opened(1, wanted), Features(1, 0, bytes(8), 4, "float64"), Features(1, 4, bytes(8), 4, "float64")):
        before = getattr(drafter, "seen", [])
        worker.received(peer, [told], ())
        worker.turn(block=False)
        assert getattr(drafter, "seen", []) == before, "what comes is answered first"
        for _ in range(2):
            worker.turn(block=False)
    assert getattr(drafter, "seen", []) == read


def test_no_text_is_read_on_for_a_target_that_wants_nothing_any_more() -> None:
    drafter = Reading(8)
    worker, peer = DraftWorker(drafter, "hash", 30.0, clock=lambda: 100.0), Listener()
    worker.received(peer, [Open(1, np.array([5, 6, 7], np.int32), 3, Sampling())], ())
    worker.turn(block=False)
    worker.received(peer, [commit(3, 8, wanted=0)], ())
    for _ in range(3):
        worker.turn(block=False)
    assert not hasattr(drafter, "seen")


def test_a_text_is_read_on_part_by_part_until_it_is_read() -> None:
    parts = [[1], [1], []]

    class Long(NgramDrafter):
        def read(self, ids: Sequence[int]) -> list[int]:
            return parts.pop(0)

    worker = DraftWorker(Long(8), "hash", 30.0, clock=lambda: 100.0)
    worker.received(Listener(), [Open(1, np.array([5, 6, 7], np.int32), 3, Sampling())], ())
    for _ in range(6):
        worker.turn(block=False)
    assert parts == [] and worker.wait_s is None


class FailingDrafter(NgramDrafter):
    """Fails once, when it is told to."""

    error: Exception | None = None
    place = "grow"

    def _fail(self, place: str) -> None:
        if (error := self.error) is not None and place == self.place:
            self.error = None
            raise error

    def open(self, opens: Sequence[Open]) -> list[int]:
        self._fail("open")
        return super().open(opens)

    def absorb(self, features: Sequence[Features]) -> None:
        self._fail("absorb")

    def commit(self, commits: Sequence[Commit]) -> None:
        self._fail("commit")
        super().commit(commits)

    def grow(self, ids: Sequence[int], budgets: Sequence[int], steps: int = 0) -> list[Growth]:
        self._fail("grow")
        return super().grow(ids, budgets, steps)


class Counting(NgramDrafter):
    """Knows in how many threads an operation runs when it is told of a session."""

    def __init__(self) -> None:
        super().__init__(8)
        self.inside = SimpleQueue[int]()

    def open(self, opens: Sequence[Open]) -> list[int]:
        self.inside.put(torch.get_num_threads())
        return super().open(opens)


def test_its_thread_has_the_threads_that_its_drafter_was_made_with() -> None:
    drafter = Counting()
    with threads(3):
        worker = DraftWorker(drafter, "hash", 30.0)
    with threads(1):
        worker.received(Listener(), [opened(1, 8)], ())
        worker.start()
        assert drafter.inside.get(timeout=30) == 3
        worker.stop()


class Bench:
    """A worker that is stepped by hand, on a clock that is set by hand."""

    def __init__(self, max_sessions: int = 8) -> None:
        self.now_s = 100.0
        self.drafter = FailingDrafter(max_sessions)
        self.worker = DraftWorker(self.drafter, "hash", 30.0, clock=lambda: self.now_s)
        self.peer = Listener()

    @property
    def open_sessions(self) -> float:
        return next(float(line.split()[-1]) for line in self.metrics_lines
                    if line.startswith("slipstream_sessions_open{"))

    @property
    def metrics_lines(self) -> list[str]:
        return self.worker.metrics.registry.page("")[1].decode().splitlines()

    def deliver(self, *items: DraftBound, peer: Listener | None = None,
                faults: Sequence[tuple[int, RemoteProtocolError]] = ()) -> list[TargetBound]:
        peer = peer or self.peer
        self.worker.received(peer, items, faults)
        self.worker.turn(block=False)
        return peer.take()


def opened(session: int = 1, wanted: int = 8) -> Open:
    return Open(session, np.array(TEXT, np.int32), len(TEXT), Sampling(), wanted)


def commit(base: int, *tokens: int, session: int = 1, wanted: int = 8) -> Commit:
    return Commit(session, base, np.array(tokens, np.int32), wanted=wanted)


def test_it_grows_for_each_commit_and_only_then() -> None:
    bench = Bench()
    (growth,) = bench.deliver(opened())
    assert isinstance(growth, Growth) and growth.base == len(TEXT) and growth.tokens.tolist()[:2] == [3, 4]
    (growth,) = bench.deliver(commit(10, 3), commit(11, 4))
    assert isinstance(growth, Growth) and growth.base == 12, "two commits in one round need one growth"
    assert bench.deliver(commit(12, 1, wanted=0)) == [], "the target follows in the shadow and wants nothing"


def test_no_growth_has_more_nodes_than_a_hello_says() -> None:
    bench, text = Bench(), np.random.default_rng(0).integers(2, size=400, dtype=np.int32)
    (growth,) = bench.deliver(Open(1, text, len(text), Sampling(), 200))
    assert isinstance(growth, Growth) and len(growth.ids) == bench.drafter.max_nodes


class Reader(NgramDrafter):
    """Remembers what it is told of target states: the session and the first byte."""

    def absorb(self, features: Sequence[Features]) -> None:
        self.seen = [(one.session, one.rows[0]) for one in features]


def test_states_of_a_commit_belong_to_its_session() -> None:
    """Two targets both count their sessions from 7; the drafter knows each by a number of the worker's."""
    drafter = Reader(8)
    worker = DraftWorker(drafter, "hash", 30.0, clock=lambda: 100.0)
    for content, peer in enumerate((Listener("a"), Listener("b")), 1):
        worker.received(peer, [opened(7)], ())
        states = Features(7, len(TEXT) - 1, bytes([content] * 8), 1, "float64")
        worker.received(peer, [Commit(7, len(TEXT), np.array([3], np.int32), states)], ())
    worker.turn(block=False)
    assert drafter.seen == [(1, 1), (2, 2)]


def test_states_come_behind_the_commits_of_their_round_and_in_order() -> None:
    """A drafter has no place for states of tokens that it does not know, and passes over those that come late: those of
    a second commit must not overtake the ones before them."""
    told = list[str]()

    class Listening(NgramDrafter):
        def absorb(self, features: Sequence[Features]) -> None:
            told.extend(f"states {one.start}" for one in features)

        def commit(self, commits: Sequence[Commit]) -> None:
            told.extend(f"commit {one.base}" for one in commits)
            super().commit(commits)

    def states(start: int) -> Features:
        return Features(1, start, bytes(8), 1, "float64")

    worker = DraftWorker(Listening(8), "hash", 30.0, clock=lambda: 100.0)
    second = Commit(1, 11, np.array([4], np.int32), states(10))
    worker.received(Listener(), [opened(), states(0), commit(10, 3), states(9), second], ())
    worker.turn(block=False)
    assert told == ["commit 10", "commit 11", "states 0", "states 9", "states 10"]


def test_what_is_grown_ahead_does_not_wait_for_a_text_that_is_read() -> None:
    """A part of a long text is many more rows than a level, and was read before the level was sent."""
    done = list[str]()

    class Busy(NgramDrafter):
        def grow(self, ids: Sequence[int], budgets: Sequence[int], steps: int = 0) -> list[Growth]:
            done.append("grow")
            return super().grow(ids, budgets, steps)

        def read(self, ids: Sequence[int]) -> list[int]:
            done.append("read")
            return []

    worker = DraftWorker(Busy(8), "hash", 30.0, clock=lambda: 100.0, run_ahead=16)
    worker.received(Listener(), [replace(opened(1, 2), ahead=True),
                                 Open(2, np.array([5, 6, 7], np.int32), 3, Sampling(), 8)], ())
    for _ in range(40):
        done.append("")
        worker.turn(block=False)
    assert " ".join(done).split() == ["grow", "grow", "read"] and "grow read" not in " ".join(done)


def test_a_new_session_has_a_whole_tree_though_an_older_one_grows_ahead() -> None:
    """Else its first tree is one level deep."""
    asked = list[tuple[int, int]]()

    class Asked(NgramDrafter):
        def grow(self, ids: Sequence[int], budgets: Sequence[int], steps: int = 0) -> list[Growth]:
            asked.append((len(ids), steps))
            return super().grow(ids, budgets, steps)

    worker, peer = DraftWorker(Asked(8), "hash", 30.0, clock=lambda: 100.0, run_ahead=16), Listener()
    for told in ([replace(opened(1, 2), ahead=True)], [opened(2, 8)]):
        worker.received(peer, told, ())
        worker.turn(block=False)
    assert asked == [(1, 0), (2, 0)]


def test_what_stays_below_a_commit_takes_nothing_of_what_is_wanted() -> None:
    """The target chooses among all of them, and the new ones are drafted from more of the text."""
    bench, text = Bench(), np.random.default_rng(0).integers(2, size=400, dtype=np.int32)
    (growth,) = bench.deliver(Open(1, text, len(text), Sampling(), 8))
    assert isinstance(growth, Growth) and len(growth.ids) == 8
    (growth,) = bench.deliver(commit(400, int(growth.tokens[0])))
    assert isinstance(growth, Growth) and len(growth.ids) == 8


def test_nothing_found_ahead_is_not_said() -> None:
    worker, peer = DraftWorker(NgramDrafter(8), "hash", 30.0, clock=lambda: 100.0, run_ahead=900), Listener()
    worker.received(peer, [replace(opened(), ahead=True)], ())
    turns = 0
    while not turns or worker.wait_s is not None:
        worker.turn(block=False)
        turns += 1
    assert 1 < len(peer.heard) < turns and all(isinstance(one, Growth) and len(one.ids) for one in peer.heard)


def test_what_was_done_is_counted() -> None:
    bench = Bench()
    bench.deliver(opened())
    bench.deliver(commit(10, 3), commit(11, 4), faults=[(9, RemoteProtocolError("base", "no"))])
    bench.now_s += 31
    bench.deliver()
    lines = [line.split("{")[0] + " " + line.split()[-1] for line in bench.metrics_lines]
    for line in ("session_expirations_total 1", "commits_total 2", "invalid_items_total 1", "draft_seconds_count 2",
                 "grown_nodes_total 16"):
        assert f"slipstream_{line}.0" in lines, line


def test_nothing_to_propose_is_said() -> None:
    bench = Bench()
    (growth,) = bench.deliver(Open(1, np.array([5, 6, 7], np.int32), 3, Sampling()))
    assert isinstance(growth, Growth) and len(growth.ids) == 0 and growth.base == 3


def test_a_gap_and_a_stranger_are_dropped() -> None:
    bench = Bench()
    bench.deliver(opened())
    assert bench.deliver(commit(12, 9)) == [Drop(1, "gap", 13)]
    assert bench.deliver(commit(13, 9)) == [Drop(1, "unknown", 14)]
    assert bench.deliver(Close(7)) == []


def test_a_repeated_commit_changes_nothing() -> None:
    bench = Bench()
    bench.deliver(opened())
    bench.deliver(commit(10, 3))
    assert bench.deliver(commit(10, 3)) == []
    (growth,) = bench.deliver(commit(11, 4))
    assert isinstance(growth, Growth) and growth.base == 12


def test_a_session_that_is_opened_and_closed_at_once_is_none() -> None:
    """Who leaves as soon as it has asked: the drafter heard of an opening whose session was gone, and all ended."""
    bench = Bench()
    assert bench.deliver(opened(), Close(1)) == []
    assert bench.open_sessions == 0
    (growth,) = bench.deliver(opened())
    assert isinstance(growth, Growth) and growth.base == len(TEXT)


def test_behind_a_second_opening_nothing_counts_that_was_said_before_it() -> None:
    """Else its drafter knows more than is committed, which no target takes."""
    drafter = Reader(8)
    worker, peer = DraftWorker(drafter, "hash", 30.0, clock=lambda: 100.0), Listener()
    states = Features(1, 9, bytes(8), 1, "float64")
    again = replace(opened(), tokens=np.array([*TEXT, 3, 4], np.int32))
    worker.received(peer, [opened(), Commit(1, 10, np.array([3], np.int32), states), again], ())
    worker.turn(block=False)
    (growth,) = peer.take()
    assert isinstance(growth, Growth) and growth.base == 12 and growth.tokens.tolist()[:2] == [1, 2]
    assert not hasattr(drafter, "seen"), "and no states of it"


def test_of_a_target_that_is_gone_nothing_is_kept() -> None:
    """Targets come and go as long as a draft runs."""
    bench, peer = Bench(), Listener("gone")
    bench.deliver(opened(1), opened(2), Close(1), peer=peer, faults=[(3, RemoteProtocolError("base", "no"))])
    bench.worker.peer_down(peer)
    bench.worker.turn(block=False)
    left = weakref.ref(peer)
    del peer
    gc.collect()
    assert left() is None


def test_room_is_bounded_and_comes_back() -> None:
    bench = Bench(max_sessions=2)
    bench.deliver(opened(1), opened(2))
    assert bench.deliver(opened(3)) == [Drop(3, "capacity", 10)]
    assert bench.deliver(Close(1)) == []
    (growth,) = bench.deliver(opened(3))
    assert isinstance(growth, Growth) and growth.session == 3


def test_a_text_that_its_drafter_has_no_memory_for_is_not_followed() -> None:
    worker, peer = DraftWorker(NgramDrafter(8, free_bytes=lambda: 0), "hash", 30.0, clock=lambda: 100.0), Listener()
    worker.received(peer, [opened()], ())
    worker.turn(block=False)
    worker.received(peer, [commit(10, 3)], ())
    worker.turn(block=False)
    assert peer.take() == [Drop(1, "capacity", 10), Drop(1, "unknown", 11)]


def test_a_host_of_many_streams_has_its_share_of_the_places() -> None:
    """One that had a stream for each session left another a single one."""
    bench = Bench(max_sessions=8)
    crowd = [Listener(f"ipv4:10.0.0.1:{port}") for port in range(12)]
    other = Listener("ipv4:10.0.0.2:7")
    for session in range(1, 5):
        bench.deliver(opened(session), peer=other)
    for peer in crowd:
        bench.deliver(opened(1), peer=peer)
    told = bench.deliver(*(commit(10, 3, session=session) for session in range(1, 5)), peer=other)
    assert [type(item) for item in told] == [Growth] * 4
    for session in range(5, 9):
        bench.deliver(opened(session), peer=other)
    assert bench.open_sessions == 8
    answered = [bench.deliver(commit(10, 3), peer=peer) for peer in crowd]
    assert sum(isinstance(item, Growth) for told in answered for item in told) == 4, "and has it"


def test_places_do_not_change_hands_while_answers_come_and_go() -> None:
    """Of two targets that have more answers than there are places, each took the other's oldest again and again."""
    bench, rng = Bench(max_sessions=64), np.random.default_rng(0)
    targets = [Listener("ipv4:10.0.0.1:7"), Listener("ipv4:10.0.0.2:7")]
    held, numbers, taken = [list[int](), list[int]()], count(1), 0
    for turn in range(400):
        leaver, comer = (turn % 2, turn % 2) if turn < 64 else rng.integers(2, size=2)
        if turn >= 64:
            bench.deliver(Close(held[leaver].pop(int(rng.integers(len(held[leaver]))))), peer=targets[leaver])
        for place in {comer: 0, leaver: 0}:
            session = next(numbers)
            told = bench.deliver(opened(session), peer=targets[place])
            held[place] += [session for item in told if isinstance(item, Growth)]
            lost = [item.session for item in targets[1 - place].take() if isinstance(item, Drop)]
            held[1 - place] = [session for session in held[1 - place] if session not in lost]
            taken += len(lost)
    assert bench.open_sessions == 64 and taken < 40 and min(map(len, held)) > 24


def test_a_lease_ends_for_sessions_that_nobody_speaks_of() -> None:
    bench = Bench()
    bench.deliver(opened(1), opened(2))
    bench.now_s += 20
    bench.deliver(commit(10, 3, session=2))
    bench.now_s += 15
    bench.worker.turn(block=False)
    assert bench.peer.take() == [Drop(1, "expired", 10)] and bench.open_sessions == 1
    left, growth = bench.deliver(commit(10, 3), commit(11, 4, session=2))
    assert left == Drop(1, "unknown", 11) and isinstance(growth, Growth)


def test_a_lease_ends_while_there_is_always_something_to_do() -> None:
    """Sessions that nobody spoke of kept their places on a busy draft. What waits is heard first: it may be of them."""
    bench = Bench(max_sessions=3)
    bench.deliver(opened(1), opened(2), opened(3))
    bench.now_s += 31
    dropped, growth = bench.deliver(commit(10, 3, session=2), Close(3))
    assert dropped == Drop(1, "expired", 10) and isinstance(growth, Growth) and growth.session == 2
    assert all(isinstance(one, Growth) for one in bench.deliver(opened(4), opened(5)))


def test_no_lease_ends_while_its_renewal_waits_for_a_later_round() -> None:
    """A draft was held up for longer than a lease, and a long text came before the commits that had waited."""
    bench = Bench()
    bench.deliver(opened(1), opened(2))
    bench.now_s += 31
    long = replace(opened(3), tokens=np.zeros(ROUND_TOKENS, np.int32))
    (growth,) = bench.deliver(long, commit(10, 3))
    assert isinstance(growth, Growth) and growth.session == 3
    (growth,) = bench.deliver()
    assert isinstance(growth, Growth) and growth.session == 1
    bench.now_s += 8
    assert bench.deliver() == [Drop(2, "expired", 10)]


def test_peers_count_their_sessions_on_their_own() -> None:
    bench, other = Bench(), Listener("other")
    bench.deliver(opened(1))
    bench.deliver(opened(1), peer=other)
    for peer in (bench.peer, other):
        (growth,) = bench.deliver(commit(10, 3), peer=peer)
        assert isinstance(growth, Growth)
    bench.worker.peer_down(other)
    bench.worker.turn(block=False)
    assert bench.deliver(commit(11, 4), peer=other) == [Drop(1, "unknown", 12)]
    (growth,) = bench.deliver(commit(11, 4))
    assert isinstance(growth, Growth)


def test_a_fault_costs_one_session() -> None:
    bench = Bench()
    bench.deliver(opened(1), opened(2))
    assert bench.deliver(faults=[(1, RemoteProtocolError("commit.tokens", "odd length"))]) == [Drop(1, "invalid", 10)]
    (growth,) = bench.deliver(commit(10, 3, session=2))
    assert isinstance(growth, Growth)


@pytest.mark.parametrize("error", [CapacityError("no room"), torch.OutOfMemoryError("no memory")],
                         ids=["slots", "memory"])
@pytest.mark.parametrize("place", ["open", "absorb", "commit", "grow"])
def test_a_drafter_that_fails_gives_its_sessions_up_and_goes_on(place: str, error: Exception) -> None:
    bench = Bench(max_sessions=1)  # the drafter has room again only if it forgets the first one
    bench.deliver(opened(1))
    bench.drafter.place, bench.drafter.error = place, error
    told = {"open": opened(1), "absorb": Features(1, 0, bytes(8), 1, "float64")}.get(place, commit(10, 3))
    assert bench.deliver(told) == [Drop(1, "failed", 11 if place in ("commit", "grow") else 10)]
    assert bench.deliver(commit(11, 4)) == [Drop(1, "unknown", 12)]
    (growth,) = bench.deliver(opened(1))
    assert isinstance(growth, Growth)


def test_draining_gives_everything_up() -> None:
    bench = Bench()
    bench.deliver(opened(1))
    bench.worker.drain()
    bench.worker.turn(block=False)
    assert bench.peer.take() == [Drop(1, "draining", 10)]
    assert bench.deliver(opened(2)) == [Drop(2, "draining", 10)]


def test_a_target_that_does_not_fit_is_refused() -> None:
    bench = Bench()
    assert bench.worker.peer_up(bench.peer, HELLO).drafter == "ngram"
    with pytest.raises(PairingError, match="tokenizer_hash"):
        bench.worker.peer_up(bench.peer, TargetHello(PROTOCOL_VERSION, 1, "m", 100, "other", 32, 4, 64))


def test_who_goes_back_to_ngram_need_not_take_the_heads_name_away() -> None:
    """It is not for ngram: a draft whose head could not be found did not start without it either."""
    worker = build(Config.model_validate({"draft": {"drafter": "ngram", "model": "nowhere"}}))
    hello = worker.peer_up(Listener(), HELLO)
    assert hello.drafter == "ngram" and hello.made_for == ""


def test_a_draft_on_another_gpu_is_made_where_that_one_is_current(tiny_folder: Path,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels in Triton are launched there, or not tried."""
    current, found = [0], list[int]()

    @contextmanager
    def device(place: torch.device) -> Iterator[None]:
        current.append(place.index)
        yield
        current.pop()

    def made(section: DraftSection, model: ModelSection) -> NgramDrafter:
        found.append(current[-1])
        return NgramDrafter(4)

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(assembly, "device_of", torch.device)
    monkeypatch.setattr(assembly, "create", made)
    for place in ("cuda:1", "cpu"):
        draft = {"drafter": "standalone", "model": str(tiny_folder), "device": place}
        build(Config.model_validate({"model": {"path": str(tiny_folder)}, "draft": draft}))
    assert found == [1, 0] and current == [0]
