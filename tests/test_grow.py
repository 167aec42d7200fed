"""Tree growth without a model, against a naive best-of-everything oracle on a known score table."""

from __future__ import annotations

import random
from unittest.mock import patch

import numpy as np
import pytest
import torch

from slipstream.drafting.tree import ROOT, DraftContext, GrowingTree
from slipstream.protocol.messages import Growth
from slipstream.protocol.requests import Sampling
from slipstream.wire.codec import FrameLimits, decode_draft_frame, encode_draft_frames
from tests.growth_rules import GrowthLedger, best_paths, scored_paths


def children_of(path: tuple[int, ...], topk: int, seed: int) -> tuple[list[int], list[float]]:
    """A draft model as a function: the same path always has the same children."""
    rng = random.Random(hash((seed, path)))
    scores = sorted((-rng.expovariate(1.0) for _ in range(topk)), reverse=True)
    return rng.sample(range(50), topk), scores


def grown(topk: int, levels: int, seed: int, next_id: int = 1) -> GrowingTree:
    growth = GrowingTree(10, topk, next_id)
    for _ in range(levels):
        growth.expand([children_of(tuple(growth.path(node)), topk, seed) for node in growth.frontier])
    return growth


def to_message(growth: GrowingTree, most: int) -> Growth:
    return growth.next_growth(1, most)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("topk", "levels", "most"), [(1, 4, 4), (2, 3, 5), (4, 4, 12), (8, 3, 40)])
def test_sends_the_best_candidates(topk: int, levels: int, most: int, seed: int) -> None:
    growth = grown(topk, levels, seed)
    oracle = best_paths(lambda path: children_of(path, topk, seed), topk, levels, most)
    assert len(growth.tokens) == topk + (levels - 1) * topk * topk
    assert set(scored_paths(to_message(growth, most))) == set(oracle), f"seed {seed}"


@pytest.mark.parametrize("most", range(1, 17))
@pytest.mark.parametrize("grid", [0.0, 0.5])  # many scores are equal
def test_what_is_sent_does_not_depend_on_rows_that_are_left_out(grid: float, most: int) -> None:
    rows = [0, 0]
    for seed in range(20):
        messages = []
        for which, wanted in enumerate((0, most)):
            growth = GrowingTree(10, 4)
            growth.wanted = wanted
            for _ in range(4):
                rows[which] += len(growth.frontier)
                children = [children_of(tuple(growth.path(node)), 4, seed) for node in growth.frontier]
                growth.expand([(tokens, [-grid * round(-score / grid) for score in scores] if grid else scores)
                               for tokens, scores in children])
                assert not wanted or len(growth.frontier) < wanted, "the best one is the others' parent or beside them"
            messages.append(to_message(growth, most))
        for field in ("ids", "parents", "tokens", "scores"):
            assert np.array_equal(getattr(messages[0], field), getattr(messages[1], field)), f"seed {seed}"
    assert rows[1] < rows[0]


@pytest.mark.parametrize("seed", range(5))
def test_growing_on_extends_the_same_tree(seed: int) -> None:
    rng = random.Random(seed)
    growth, ledger = GrowingTree(10, 3), GrowthLedger(list(range(10)))
    while growth.frontier:
        growth.expand([children_of(tuple(growth.path(node)), 3, seed) for node in growth.frontier])
        budget = rng.randrange(5)
        ledger.take(to_message(growth, budget), budget, vocab_size=50)
    assert len(growth.computed) <= 64, f"seed {seed}"


def test_a_chain_is_a_chain() -> None:
    message = to_message(grown(1, 6, seed=0, next_id=5), 6)
    assert message.ids.tolist() == [5, 6, 7, 8, 9, 10]
    assert message.parents.tolist() == [-10, 5, 6, 7, 8, 9]


def test_words_hold_exactly_the_ancestors() -> None:
    growth = grown(3, 4, seed=1)
    listed = [*growth.computed, *growth.frontier]
    for node, word in zip(growth.frontier, growth.ancestor_words(), strict=True):
        ancestors = set()
        while node != ROOT:
            ancestors.add(node)
            node = growth.parents[node]
        assert {listed[j] for j in range(64) if word >> j & 1} == ancestors


def test_forbidden_tokens_are_no_children() -> None:
    growth = GrowingTree(10, 3)
    growth.expand([([4, 5, 6], [-0.5, float("-inf"), float("nan")])])
    assert growth.tokens == [4] and growth.frontier == [0]
    growth.expand([([7, 8, 9], [float("-inf")] * 3)])
    assert growth.frontier == [] and to_message(growth, 9).tokens.tolist() == [4]


def test_a_commit_of_a_token_below_which_all_are_forbidden_leaves_nothing_to_expand() -> None:
    """What had been the next level was asked for by numbers that were gone, and the drafter's thread ended."""
    growth = GrowingTree(10, 2)
    growth.grow_ahead()
    growth.expand([([4, 5], [-0.5, -1.0])])
    growth.expand([([6, 7], [float("nan")] * 2), ([8, 9], [-0.5, -1.0])], np.array([20, 21]))
    kept, freed = growth.commit([4], keep_kv=True)
    assert (kept.tolist(), freed.tolist()) == ([20], [21])
    assert growth.frontier == [] and growth.depth() == 0
    growth.grow_ahead()
    assert growth.frontier == []


def test_a_score_above_zero_does_not_lift_a_child_over_its_parent() -> None:
    growth = GrowingTree(10, 1)
    growth.expand([([4], [-0.5])])
    growth.expand([([5], [0.25])])
    assert growth.scores == [-0.5, -0.5] and to_message(growth, 1).tokens.tolist() == [4]


def test_scores_stay_numbers_that_can_be_sent() -> None:
    """A temperature that is all but zero tells siblings apart by numbers of nearly any size."""
    growth = GrowingTree(10, 2)
    for nodes in (1, 2, 2):
        growth.expand([([7, 8], [0.0, -2e38])] * nodes)
    frames, _ = encode_draft_frames(1, [to_message(growth, 10)], 1 << 20)
    (sent,), faults = decode_draft_frame(frames[0], 1, FrameLimits(50, 64))
    assert not faults and len(sent.ids) == 10 and np.isfinite(sent.scores).all()


def test_the_kv_of_drafted_tokens_that_became_true_is_kept() -> None:
    """As far as they were computed, and never that of the newest token: its row gives the logits to grow from."""
    for length in range(4):
        growth = grown(2, 3, seed=2)
        growth.slots = np.arange(100, 100 + len(growth.computed))
        slots = dict(zip(growth.computed, growth.slots.tolist(), strict=True))
        deepest = growth.computed[-1]
        path = [node for node in slots if node in (growth.parents[deepest], deepest)]
        tokens = [*growth.path(deepest)[:length], 49]
        true, freed = growth.commit(tokens, keep_kv=True)
        assert true.tolist() == [slots[node] for node in path[:length]]
        assert sorted([*true.tolist(), *freed.tolist()]) == sorted(slots.values())
        assert not growth.begun and growth.base == 10 + len(tokens)


@pytest.mark.parametrize("seed", range(5))
def test_it_is_re_rooted_as_the_targets_is(seed: int) -> None:
    rng = random.Random(seed)
    tree, ledger = GrowingTree(10, 3), GrowthLedger(list(range(10)))
    for _ in range(60):
        text = tuple(ledger.tokens)
        for _ in range(rng.randint(1, 3)):
            tree.expand([children_of((*text, *tree.path(node)), 3, seed) for node in tree.frontier])
        budget = rng.randrange(12)
        ledger.take(to_message(tree, budget), budget, vocab_size=50)
        assert tree.num_sent == len(ledger.tree) - 1, f"seed {seed}"
        path = ledger.tree.path(rng.randrange(len(ledger.tree)))[1:]
        new = [ledger.tree.tokens[at] for at in path] or [rng.randrange(50)]
        ledger.commit(new)
        tree.commit(new, keep_kv=False)
        assert tree.num_sent == len(ledger.tree) - 1, f"seed {seed}"


def test_nothing_is_likelier_than_certain_below_a_node_that_was_found_less_likely() -> None:
    """It was thought of too well before the target's states came. Its children would have scores above 0, which targets
    refuse."""
    tree = grown(1, 0, seed=0)
    for token in (1, 2, 3):
        tree.expand([([token], [-0.1])])
    to_message(tree, 3)
    tree.commit([1], keep_kv=False)
    tree.expand([([2], [-4.0])])
    tree.commit([2], keep_kv=False)
    assert tree.tokens == [3] and tree.scores == [0.0]


def test_what_the_target_holds_is_not_sent_again_but_grown_on() -> None:
    tree = grown(1, 4, seed=0)
    chain = to_message(tree, 4).tokens.tolist()
    tree.commit(chain[:2], keep_kv=False)  # the third and fourth stay on both sides
    for token in [*chain[2:], 7, 8]:
        tree.expand([([token], [-0.1])])
    message = to_message(tree, 4)
    assert message.tokens.tolist() == [7, 8] and message.ids.tolist() == [5, 6] and message.parents.tolist() == [4, 5]


def test_states_that_wait_are_not_copied_for_each_part_of_them_that_is_read() -> None:
    """A draft that found 16,384 of them, as after a restart, copied what was left once for each forward: a quadratic
    second of nothing else."""
    context = DraftContext(1, Sampling(), 8, list(range(2001)), GrowingTree(2001), None, 1 << 20, 1)
    copied, read = list[int](), list[torch.Tensor]()
    clone = torch.Tensor.clone

    def watched(rows: torch.Tensor) -> torch.Tensor:
        copied.append(len(rows))
        return clone(rows)

    with patch.object(torch.Tensor, "clone", watched):
        for came in range(0, 2000, 20):
            context.add_states(came, torch.arange(came, came + 20.0)[:, None])
        while context.num_inputs:
            part = min(50, context.num_inputs)
            states = context.take_inputs(part)
            assert states is not None and len(states) == part
            read.append(states)
    assert torch.cat(read)[:, 0].tolist() == [float(row) for row in range(2000)]
    assert sum(copied) <= len(read) * 20 and context.take_inputs(1) is None
