"""Growth while the target verifies: what a draft worker sends of its own accord, and when it stops."""

from __future__ import annotations

import numpy as np
import pytest

from draft_service.worker import DraftSession, DraftWorker
from slipstream.drafting.tree import ROOT, GrowingTree
from slipstream.protocol.conduct import MAX_GROWTHS_AHEAD
from slipstream.protocol.messages import (
    PROTOCOL_VERSION,
    Close,
    Commit,
    Growth,
    Open,
    TargetBound,
    TargetHello,
)
from slipstream.protocol.requests import Sampling
from slipstream.protocol.session import DraftSide, TargetSide
from slipstream.simulate.timed import SYMBOLS, VOCAB, Device, SyntheticText, TimedDrafter, Timing
from tests.test_draft_worker import Listener

TIMING = Timing(draft_s=0.0, levels=3, width=2, acceptance=(0.7, 0.2))
PROMPT = [SYMBOLS, SYMBOLS]
HELLO = TargetHello(PROTOCOL_VERSION, 1, "timed", VOCAB, "", 1, 1, 64)


class Bench:
    """A worker that grows ahead, stepped by hand, and the target's side of one session."""

    def __init__(self, run_ahead: int = 12, keep: bool = True) -> None:
        drafter = TimedDrafter(TIMING, Device(), keep)
        self.worker = DraftWorker(drafter, "", 30.0, run_ahead=run_ahead)
        self.peer = Listener()
        self.side = TargetSide(1, PROMPT, len(PROMPT), Sampling())

    def deliver(self, *items: Open | Commit | Close | None) -> list[TargetBound]:
        self.worker.received(self.peer, [item for item in items if item is not None], [])
        return self.turn()

    def turn(self) -> list[TargetBound]:
        self.worker.turn(block=False)
        heard = self.peer.take()
        for item in heard:
            if isinstance(item, Growth):
                assert self.side.receive(item) == len(item.ids), "the target left nodes out"
        return heard

    def idle(self, limit: int = 60) -> int:
        """Turns with an empty inbox until nothing more is sent; returns how many sent something."""
        for turns in range(limit):
            if not self.turn() and not self.turn() and not self.turn() and not self.turn():
                return turns
        raise AssertionError(f"still growing after {limit} turns")

    def true_path(self, count: int) -> list[int]:
        law, tokens, token = SyntheticText(TIMING), [], self.side.tokens[-1]
        for position in range(self.side.base - 1, self.side.base - 1 + count):
            token = int(law.following([token], [position])[0])
            tokens.append(token)
        return tokens


def test_it_grows_on_while_nothing_comes_and_stops_at_its_bound() -> None:
    bench = Bench(run_ahead=12)
    (whole,) = bench.deliver(bench.side.attach(wanted=4, ahead=True))
    assert isinstance(whole, Growth) and len(whole.ids) == 4, "first what the target would verify, at once"
    assert bench.idle() > 0
    assert len(bench.side.tree) - 1 <= 4 + 12
    assert len(bench.side.tree) - 1 > 8


@pytest.mark.parametrize("most", [2, 3])
def test_it_says_no_more_than_a_commit_allows(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draft_service.worker.MAX_GROWTHS_AHEAD", most)
    bench = Bench(run_ahead=200)
    said = len(bench.deliver(bench.side.attach(wanted=4, ahead=True))) + bench.idle()
    assert said == most
    assert len(bench.deliver(bench.side.commit(bench.true_path(1), wanted=4, ahead=True))) + bench.idle() == most


def test_what_may_grow_far_grows_wide() -> None:
    """The nodes of a level, by how many may be held beyond those that are verified next."""
    widths = {}
    for extra in (239, 1007):
        bench = Bench(run_ahead=extra)
        bench.deliver(bench.side.attach(wanted=4, ahead=True))
        sent = [len(item.ids) for _ in range(24) for item in bench.turn() if isinstance(item, Growth)]
        assert len(bench.side.tree) - 1 <= 4 + extra
        widths[extra] = max(sent)
    assert widths[239] <= 16 < widths[1007] <= 62, widths


def test_its_hello_says_how_far_it_grows_ahead() -> None:
    assert [Bench(nodes).worker.peer_up(Listener(), HELLO).run_ahead for nodes in (0, 12)] == [0, 12]


def test_without_run_ahead_it_says_one_thing_for_a_commit() -> None:
    bench = Bench(run_ahead=0)
    assert len(bench.deliver(bench.side.attach(wanted=4, ahead=True))) == 1
    assert bench.idle() == 0


@pytest.mark.parametrize("keep", [True, False])
def test_what_survives_a_commit_is_there_before_the_drafter_says_a_word(keep: bool) -> None:
    """The true path is followed for some commits. A drafter that keeps its tree and one that begins anew both get
    below what the target holds."""
    bench, hits = Bench(run_ahead=24, keep=keep), 0
    bench.deliver(bench.side.attach(wanted=3, ahead=True))
    for _ in range(12):
        bench.idle()
        tokens = bench.true_path(2)
        message = bench.side.commit(tokens, wanted=3, ahead=True)
        hits += len(bench.side.tree) > 1
        before = len(bench.side.tree)
        bench.deliver(message)
        bench.idle()
        assert len(bench.side.tree) > before or before > 24, "nothing was added below what survived"
    assert hits >= 5


def test_the_target_says_from_commit_to_commit_whether_it_may_grow_ahead() -> None:
    bench = Bench(run_ahead=24)
    assert len(bench.deliver(bench.side.attach(wanted=4))) == 1 and bench.idle() == 0
    bench.deliver(bench.side.commit(bench.true_path(1), wanted=4, ahead=True))
    assert bench.idle() > 0 and len(bench.side.tree) - 1 > 8
    bench.deliver(bench.side.commit(bench.true_path(1), wanted=4))
    assert bench.idle() == 0


def test_a_target_that_wants_nothing_gets_nothing() -> None:
    bench = Bench()
    bench.deliver(bench.side.attach(wanted=4, ahead=True))
    bench.idle()
    bench.deliver(bench.side.commit(bench.true_path(1), wanted=0, ahead=True))
    assert bench.idle() == 0


def test_a_closed_session_stops_growing() -> None:
    bench = Bench()
    bench.deliver(bench.side.attach(wanted=4, ahead=True))
    bench.deliver(bench.side.detach())
    assert bench.idle() == 0


def test_hopeless_nodes_stop_it() -> None:
    side = TargetSide(1, PROMPT, len(PROMPT), Sampling())
    session = DraftSession(1, Listener(), DraftSide(1), tree=GrowingTree(2))
    session.apply_request(side.attach(wanted=8, ahead=True), 40)
    node = session.tree.propose(ROOT, 1, -0.1)
    session.record_growth(session.tree.next_growth(1, 8))
    assert session.should_grow_ahead
    for token in range(2, 5):
        session.tree.propose(node, token, -9.0)
        session.record_growth(session.tree.next_growth(1, 8))
    assert not session.should_grow_ahead
    session.apply_request(side.commit([1], wanted=8, ahead=True), 40)
    assert session.should_grow_ahead, "a commit starts it again"


def test_growths_that_found_nothing_are_not_counted_among_those_that_were_sent() -> None:
    """As a drafter that begins anew first finds what the target has, as deep as that goes."""
    side, node = TargetSide(1, PROMPT, len(PROMPT), Sampling()), ROOT
    session = DraftSession(1, Listener(), DraftSide(1), tree=GrowingTree(2))
    session.apply_request(side.attach(wanted=60, ahead=True), 400)
    for token in range(MAX_GROWTHS_AHEAD + 8):
        node = session.tree.propose(node, token, -0.1)
    session.record_growth(session.tree.next_growth(1, 60))
    for _ in range(MAX_GROWTHS_AHEAD):
        assert session.should_grow_ahead
        session.record_growth(session.tree.next_growth(1, 16))
    assert session.should_grow_ahead and session.growths_sent == 1


@pytest.mark.parametrize("seed", range(20))
def test_a_tree_that_is_re_rooted_is_the_tree_below(seed: int) -> None:
    """Against the definition: the nodes below the committed path, by their paths, scores and slots."""
    rng = np.random.default_rng(seed)
    tree, slots = GrowingTree(10, 3), {}

    def computed() -> dict[tuple[int, ...], int]:
        return {tuple(tree.path(node)): slot for node, slot in zip(tree.computed, tree.slots.tolist(), strict=True)}

    tree.grow_ahead()
    for _ in range(6):
        new = np.arange(len(slots), len(slots) + (len(tree.frontier) if tree.begun else 0))
        slots |= dict.fromkeys(new.tolist())
        tree.expand([(rng.permutation(50)[:3].tolist(), sorted((-rng.random(3)).tolist(), reverse=True))
                     for _ in tree.frontier], new)
        tree.next_growth(1, int(rng.integers(0, 6)))
        if rng.random() < 0.5:
            tree.grow_ahead()
    before = {tuple(tree.path(node)): tree.scores[node] for node in range(len(tree.tokens))}
    was = computed()
    root = list(was)[int(rng.integers(len(was)))]
    true, freed = tree.commit(root, keep_kv=True)
    assert true.tolist() == [was[root[: i + 1]] for i in range(len(root))]
    after = {tuple(tree.path(node)): tree.scores[node] for node in range(len(tree.tokens))}
    below = {p[len(root):]: score - before[root] for p, score in before.items() if p[: len(root)] == root and p != root}
    assert after.keys() == below.keys() and all(abs(after[p] - below[p]) < 1e-9 for p in below)
    assert computed() == {p[len(root):]: slot for p, slot in was.items() if p[: len(root)] == root and p != root}
    assert sorted([*true.tolist(), *freed.tolist(), *tree.slots.tolist()]) == sorted(slots)
    leaf = next(p for p in after if p not in computed())
    tree.commit(leaf, keep_kv=True)
    assert not tree.begun, "a node that was never expanded has nothing below it"
