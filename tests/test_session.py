"""The two sides of a session: tables, and any schedule of deliveries, losses and cuts."""

from __future__ import annotations

import gc
import itertools
from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from slipstream.base.errors import LocalProtocolError, PairingError, RemoteProtocolError
from slipstream.drafting.tree import GrowingTree
from slipstream.protocol.messages import (
    PROTOCOL_VERSION,
    Commit,
    DraftHello,
    Drop,
    FeatureSpec,
    Growth,
    TargetHello,
)
from slipstream.protocol.pairing import check_pair
from slipstream.protocol.requests import Sampling
from slipstream.protocol.session import (
    TARGET_TABLE,
    DraftEvent,
    DraftSide,
    TargetEvent,
    TargetSide,
    TargetState,
)
from slipstream.protocol.tree import MAX_HELD, MAX_NODES, PREDICTED, DraftTree

NOT_AFTER_CLOSE = {TargetEvent.ATTACH, TargetEvent.COMMIT}  # ours to send: a bug if it happens


def growth(base: int, nodes: list[tuple[int, int, int]], session: int = 1) -> Growth:
    ids, parents, tokens = (np.array(column, np.int32) for column in zip(*nodes, strict=True))
    return Growth(session, base, ids, parents, tokens, -np.arange(1, len(nodes) + 1, dtype=np.float32))


def side(tokens: list[int] | None = None) -> TargetSide:
    return TargetSide(1, tokens or [5, 6, 7], 3, Sampling())


def test_every_state_and_event_has_a_row() -> None:
    missing = set(itertools.product(TargetState, TargetEvent)) - set(TARGET_TABLE)
    assert missing == {(TargetState.CLOSED, event) for event in NOT_AFTER_CLOSE}


def test_committing_after_the_end_is_our_own_bug() -> None:
    target = side()
    target.close()
    with pytest.raises(LocalProtocolError):
        target.commit([1])


def test_growth_that_crosses_a_commit_still_finds_its_parents() -> None:
    target = side()
    target.attach()
    target.receive(growth(3, [(1, -3, 10), (2, 1, 11)]))
    target.commit([10])  # node 1 is the root now
    assert target.receive(growth(3, [(3, 2, 12), (4, 1, 13), (5, -3, 14)])) == 2
    assert sorted(target.tree.tokens) == [10, 11, 12, 13], "14 continued a branch that lost"
    assert not target.answered, "what was drafted for an older base is no answer to this one"


def test_growth_drafted_before_several_commits_is_followed_along_the_committed_text() -> None:
    target = side()
    target.attach()
    target.commit([10])
    target.commit([11])
    assert target.receive(growth(3, [(1, -3, 10), (2, 1, 11), (3, 2, 12), (4, 1, 99)])) == 1
    assert target.tree.tokens == [11, 12]


def scored(base: int, nodes: list[tuple[int, int, int, float]]) -> Growth:
    return replace(growth(base, [node[:3] for node in nodes]), scores=np.array([node[3] for node in nodes], np.float32))


@pytest.mark.parametrize("known", [True, False])
def test_scores_of_what_crossed_a_commit_are_relative_to_the_newest_root(known: bool) -> None:
    """Else the worst of an older growth stand before the best of a newer one."""
    target, crossed = side(), scored(4, [(3, 2, 12, -3.0), (4, 1, 13, -1.5)])
    target.attach()
    target.receive(scored(3, [(9, -3, 9, -0.7)]))
    target.commit([9])
    first = scored(4, [(1, -4, 10, -1.0), (2, 1, 11, -2.0)])
    if known:
        target.receive(first)
        target.commit([10])
    else:
        target.commit([10])
        target.receive(first)
    target.receive(crossed)
    assert dict(zip(target.tree.tokens, target.tree.scores, strict=True)) == {10: 0.0, 11: -1.0, 12: -2.0, 13: -0.5}


@pytest.mark.parametrize("known", [True, False])
def test_below_what_a_drafter_called_impossible_scores_still_rank(known: bool) -> None:
    target = side()
    target.attach()
    if known:
        target.receive(scored(3, [(1, -3, 10, -np.inf)]))
    target.commit([10])
    if not known:
        target.receive(scored(3, [(1, -3, 10, -np.inf)]))
    target.receive(scored(3, [(2, 1, 11, -6.0), (3, 1, 12, -5.0)]))
    assert target.tree.best(2).tokens == [10, 12]


def test_a_drafter_that_names_the_committed_text_again_and_again_is_forgotten() -> None:
    """What a growth costs must not grow with how much such a drafter has said."""
    target = side([5] * 3)
    target.attach()
    ids, kept = itertools.count(1), list[int]()
    for _ in range(12):
        target.commit([5] * 40)
        for _ in range(10):
            target.receive(growth(3, [(next(ids), -position, 5) for position in range(target.base - 60, target.base)
                                      if position >= 3]))
        kept.append(remembered(target))
    assert 0 < max(kept) <= MAX_HELD + MAX_NODES, kept


def test_what_the_text_foretold_is_not_remembered_for_a_drafter_that_cannot_name_it() -> None:
    """A text that repeats itself asks its drafter for nothing, so nothing comes that would end what is remembered."""
    target = side()
    target.attach()
    for _ in range(1000):
        foretold(target, [1, 2, 3])
        target.commit([1, 2, 3, 4])
    assert remembered(target) <= MAX_NODES


def remembered(target: TargetSide) -> int:
    """The entries of its largest table."""
    return max(len(held) for held in gc.get_referents(target) if isinstance(held, dict))


def foretold(target: TargetSide, chain: list[int]) -> None:
    """As ``add_predicted`` does with the prediction from a text."""
    scores = [-0.1 * at for at in range(len(chain))]
    target.tree = target.tree.graft(chain, scores, PREDICTED + MAX_NODES * target.base)


def test_what_the_text_foretells_too_is_the_drafters_node() -> None:
    target = side()
    target.attach()
    foretold(target, [10, 11])
    assert target.receive(growth(3, [(1, -3, 10), (2, 1, 11), (3, 2, 12), (4, 1, 13)])) == 2
    assert sorted(target.tree.tokens) == [7, 10, 11, 12, 13]
    target.commit([10])
    assert target.receive(growth(3, [(5, 3, 14), (6, 2, 15)])) == 2, "by the ids that its drafter knows"
    assert target.commit([11, 12]) is not None
    assert target.tree.tokens == [12, 14]


def test_growth_of_an_earlier_opening_is_stale() -> None:
    target = side()
    target.attach()
    target.detach()
    target.commit([10])
    assert target.receive(growth(3, [(1, -3, 10)])) == -1
    target.attach()
    assert target.receive(growth(3, [(1, -3, 10)])) == -1


def test_a_drafter_that_claims_to_be_ahead_is_refused() -> None:
    target = side()
    target.attach()
    with pytest.raises(RemoteProtocolError, match=r"growth\.base"):
        target.receive(growth(4, [(1, -4, 10)]))


def test_losing_the_drafter_keeps_its_nodes() -> None:
    target = side()
    target.attach()
    target.receive(growth(3, [(1, -3, 10)]))
    target.lost()
    assert target.state is TargetState.ALONE and len(target.tree) == 2
    assert target.commit([10]) is None, "nobody follows, so nothing is sent"


def test_a_drop_of_an_earlier_opening_does_not_end_this_one() -> None:
    """One that crossed a Close and an Open on the wire ended a session that the draft had just opened again, and kept
    open. One without a base is of a draft that does not say: it counts."""
    target = side()
    target.attach()
    target.commit([5])
    target.detach()
    target.commit([6])
    target.attach()
    assert target.receive(Drop(1, "failed", 4)) == -1 and target.state is TargetState.FOLLOWED
    assert target.receive(Drop(1, "failed", 5)) == 0 and target.state is TargetState.ALONE
    target.attach()
    assert target.receive(Drop(1, "failed")) == 0 and target.state is TargetState.ALONE


def test_the_draft_side_tells_repeats_and_gaps_from_commits() -> None:
    draft = DraftSide(1)
    commit = Commit(1, 3, np.array([10], np.int32))
    assert draft.receive(commit, 0.0) is DraftEvent.GAP and draft.base == 0
    assert draft.receive(side().attach(), 0.0) is DraftEvent.OPEN and draft.base == 3
    assert draft.receive(commit, 1.0) is DraftEvent.COMMIT and draft.base == 4
    assert draft.receive(commit, 2.0) is DraftEvent.REPEAT and draft.base == 4
    assert draft.receive(Commit(1, 9, np.array([1], np.int32)), 3.0) is DraftEvent.GAP
    assert draft.base == 4 and draft.received_s == 3.0


@pytest.mark.parametrize("seed", range(40))
def test_whatever_the_wire_does_the_tree_continues_the_committed_tokens(seed: int) -> None:
    """Random growth (true guesses, lies, late, twice, reordered) against random commits: every path of the tree is one
    that the drafter proposed below tokens that were committed, and the root is the newest committed token."""
    rng = np.random.default_rng(seed)
    target, proposed, ids, wire = side(), set(), itertools.count(1), []
    target.attach()
    names: dict[int, tuple[int, ...]] = {}  # node id -> all tokens up to and with it
    for _ in range(60):
        parent, prefix = -target.base, tuple(target.tokens)
        nodes = []
        for _ in range(int(rng.integers(1, 5))):
            node, token = next(ids), int(rng.integers(3))
            nodes.append((node, parent, token))
            names[node] = (*prefix, token)
            proposed.add(names[node])
            parent, prefix = (node, names[node]) if rng.random() < 0.7 else (-target.base, tuple(target.tokens))
        wire.append(growth(target.base, nodes))
        while wire and rng.random() < 0.6:
            target.receive(wire.pop(int(rng.integers(len(wire)))))
        if rng.random() < 0.7:
            target.commit([int(t) for t in rng.integers(3, size=int(rng.integers(1, 4)))])
        if rng.random() < 0.05:
            target.receive(Drop(1, "expired"))
            target.attach()
            wire.clear()
        check_tree(target.tree, target.tokens, proposed, seed)


def check_tree(tree: DraftTree, tokens: list[int], proposed: set[tuple[int, ...]], seed: int) -> None:
    assert tree.base == len(tokens) and tree.tokens[0] == tokens[-1], seed
    assert tree.ids[0] == -tree.base
    for node in range(1, len(tree)):
        assert (*tokens, *(tree.tokens[n] for n in tree.path(node)[1:])) in proposed, seed


@pytest.mark.parametrize("seed", range(40))
def test_when_all_has_come_a_target_holds_what_its_draft_believes(seed: int) -> None:
    """Commits and growth in order, late; some commits bring a chain that the text foretells."""
    rng = np.random.default_rng(seed)
    target, tree, keep_kv = side(), GrowingTree(3, width=2), bool(seed % 2)
    there, back = deque[list[int]](), deque[Growth]()
    target.attach()

    def draws() -> list[int]:
        return [int(token) for token in rng.integers(3, size=int(rng.integers(1, 5)))]

    def grow() -> None:
        tree.expand([([int(token) for token in rng.permutation(3)[:2]], [-0.3, -1.5]) for _ in tree.frontier])
        back.append(tree.next_growth(1, int(rng.integers(1, 8))))

    def come() -> None:
        while there:
            tree.commit(there.popleft(), keep_kv)
        while back:
            target.receive(back.popleft())

    for _ in range(200):
        match rng.integers(6):
            case 0 | 1:
                path = target.tree.path(int(rng.integers(len(target.tree))))[1:]
                there.append([*(target.tree.tokens[node] for node in path), int(rng.integers(3))])
                target.commit(there[-1])
                if rng.random() < 0.4:
                    foretold(target, draws())
            case 2 if there:
                tree.commit(there.popleft(), keep_kv)
            case 3 if back:
                target.receive(back.popleft())
            case 4:
                if keep_kv:
                    tree.grow_ahead()
                grow()
        if rng.random() < 0.1:
            come()
            sent = [node for node, number in enumerate(tree.ids) if number]
            found = [target.tree.find_path(tree.path(node)) for node in sent]
            assert [target.tree.ids[nodes[-1]] for nodes in found] == [tree.ids[node] for node in sent], seed
            assert list(map(len, found)) == [len(tree.path(node)) for node in sent], seed


TARGET = TargetHello(PROTOCOL_VERSION, 7, "m", 100, "hash", 32, 4, 64)
DRAFT = DraftHello(PROTOCOL_VERSION, 7, "ngram", 0, "", None, 0, 64, 16, 8)


def test_a_fitting_pair_is_accepted() -> None:
    check_pair(TARGET, DRAFT)


@pytest.mark.parametrize("rows", [99, 101])
def test_a_model_with_the_same_tokens_and_other_padding_fits(rows: int) -> None:
    check_pair(TARGET, replace(DRAFT, vocab_size=rows, tokenizer_hash="hash"))


@pytest.mark.parametrize(("field", "change"), [
    ("vocab_size", {"vocab_size": 101}),
    ("vocab_size", {"vocab_size": 101, "tokenizer_hash": "other"}),
    ("vocab_size", {"vocab_size": 101, "tokenizer_hash": "hash", "features": FeatureSpec((1, 2), 64)}),
    ("tokenizer_hash", {"tokenizer_hash": "other"}),
    ("hidden_size", {"hidden_size": 64}),
    ("features.layers", {"features": FeatureSpec((1, 5), 64)}),
    ("features.width", {"features": FeatureSpec((1, 2), 32)}),
])
def test_a_pair_that_does_not_fit_is_refused_by_name(field: str, change: dict[str, Any]) -> None:
    with pytest.raises(PairingError) as caught:
        check_pair(TARGET, replace(DRAFT, **change))
    assert caught.value.field == field
