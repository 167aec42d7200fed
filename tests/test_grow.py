"""Tree growth without a model, against a naive best-of-everything oracle on a known score table."""

from __future__ import annotations

import random

import numpy as np
import pytest

from slipstream.drafting.grow import ROOT, TreeGrowth
from slipstream.drafting.sent import SentTree
from slipstream.protocol.messages import Growth
from tests.growth_rules import GrowthLedger, best_paths, scored_paths


def children_of(path: tuple[int, ...], topk: int, seed: int) -> tuple[list[int], list[float]]:
    """A draft model as a function: the same path always has the same children."""
    rng = random.Random(hash((seed, path)))
    scores = sorted((-rng.expovariate(1.0) for _ in range(topk)), reverse=True)
    return rng.sample(range(50), topk), scores


def grown(topk: int, levels: int, seed: int) -> TreeGrowth:
    growth = TreeGrowth(topk=topk)
    for _ in range(levels):
        growth.expand([children_of(tuple(growth.path(node)), topk, seed) for node in growth.frontier])
    return growth


def to_message(growth: TreeGrowth, most: int, sent: SentTree) -> Growth:
    nodes = growth.send(most, sent)
    return Growth(1, sent.base, np.array(nodes.ids, np.int32), np.array(nodes.parents, np.int32),
                  np.array(nodes.tokens, np.int32), np.array(nodes.scores, np.float32))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("topk", "levels", "most"), [(1, 4, 4), (2, 3, 5), (4, 4, 12), (8, 3, 40)])
def test_sends_the_best_candidates(topk: int, levels: int, most: int, seed: int) -> None:
    growth = grown(topk, levels, seed)
    oracle = best_paths(lambda path: children_of(path, topk, seed), topk, levels, most)
    assert len(growth.tokens) == topk + (levels - 1) * topk * topk
    assert set(scored_paths(to_message(growth, most, SentTree(10)))) == set(oracle), f"seed {seed}"


@pytest.mark.parametrize("seed", range(5))
def test_growing_on_extends_the_same_tree(seed: int) -> None:
    rng = random.Random(seed)
    growth, ledger, sent = TreeGrowth(topk=3), GrowthLedger(list(range(10))), SentTree(10)
    while growth.frontier:
        growth.expand([children_of(tuple(growth.path(node)), 3, seed) for node in growth.frontier])
        budget = rng.randrange(5)
        ledger.take(to_message(growth, budget, sent), budget, vocab_size=50)
    assert len(growth.computed) <= 64, f"seed {seed}"


def test_a_chain_is_a_chain() -> None:
    message = to_message(grown(1, 6, seed=0), 6, SentTree(10, next_id=5))
    assert message.ids.tolist() == [5, 6, 7, 8, 9, 10]
    assert message.parents.tolist() == [-10, 5, 6, 7, 8, 9]


def test_words_hold_exactly_the_ancestors() -> None:
    growth = grown(3, 4, seed=1)
    listed = [*growth.computed, *growth.frontier]
    for node, word in zip(growth.frontier, growth.words(), strict=True):
        ancestors = set()
        while node != ROOT:
            ancestors.add(node)
            node = growth.parents[node]
        assert {listed[j] for j in range(64) if word >> j & 1} == ancestors


def test_forbidden_tokens_are_no_children() -> None:
    growth = TreeGrowth(topk=3)
    growth.expand([([4, 5, 6], [-0.5, float("-inf"), float("nan")])])
    assert growth.tokens == [4] and growth.frontier == [0]
    growth.expand([([7, 8, 9], [float("-inf")] * 3)])
    assert growth.frontier == [] and growth.send(9, SentTree(10)).tokens == [4]


def test_a_score_above_zero_does_not_lift_a_child_over_its_parent() -> None:
    growth = TreeGrowth(topk=1)
    growth.expand([([4], [-0.5])])
    growth.expand([([5], [0.25])])
    assert growth.scores == [-0.5, -0.5] and growth.send(1, SentTree(10)).tokens == [4]


def test_follow_goes_as_far_as_nodes_were_computed() -> None:
    growth = grown(2, 3, seed=2)
    deepest = growth.computed[-1]
    path = growth.path(deepest)
    places = growth.follow([*path, 49, 49])
    assert [growth.computed[place] for place in places][-1] == deepest and len(places) == len(path)
    assert growth.follow([99]) == []
    leaf = next(node for node in range(len(growth.tokens)) if growth.depths[node] == 3)
    assert len(growth.follow(growth.path(leaf))) <= 2


@pytest.mark.parametrize("seed", range(5))
def test_the_sent_tree_re_roots_as_the_targets_does(seed: int) -> None:
    rng = random.Random(seed)
    sent, ledger = SentTree(10), GrowthLedger(list(range(10)))
    for _ in range(60):
        growth = TreeGrowth(topk=3)
        text = tuple(ledger.tokens)
        for _ in range(rng.randint(1, 3)):
            growth.expand([children_of((*text, *growth.path(node)), 3, seed) for node in growth.frontier])
        budget = rng.randrange(12)
        ledger.take(to_message(growth, budget, sent), budget, vocab_size=50)
        assert len(sent) == len(ledger.tree) - 1, f"seed {seed}"
        new = ledger.tree.tokens[ledger.tree.path(rng.randrange(len(ledger.tree)))[1:]].tolist() or [rng.randrange(50)]
        ledger.commit(new)
        sent.commit(sent.base, new)
        assert len(sent) == len(ledger.tree) - 1, f"seed {seed}"


def test_what_the_target_holds_is_not_sent_again_but_grown_on() -> None:
    sent = SentTree(10)
    first = grown(1, 4, seed=0)
    chain = to_message(first, 4, sent).tokens.tolist()
    sent.commit(10, chain[:2])  # the third and fourth stay on both sides
    again = TreeGrowth(topk=1)
    for token in [*chain[2:], 7, 8]:
        again.expand([([token], [-0.1])])
    message = to_message(again, 4, sent)
    assert message.tokens.tolist() == [7, 8] and message.ids.tolist() == [5, 6] and message.parents.tolist() == [4, 5]
