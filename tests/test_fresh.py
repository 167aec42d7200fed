"""Trees that begin together, as arrays, are those that grow one after the other, in lists."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream.drafting.fresh import FreshTrees
from slipstream.drafting.neural import adopt_levels
from slipstream.drafting.tree import GrowingTree
from slipstream.engine.native.draft import Grown


def one_by_one(tokens: list[np.ndarray], scores: list[np.ndarray], place: int, width: int, levels: int) -> GrowingTree:
    tree = GrowingTree(10 + place, width, 1 + 7 * place)
    for level in range(levels):
        count = len(tree.frontier)
        tree.expand([*zip(tokens[level][place, :count].tolist(), scores[level][place, :count].tolist(), strict=True)])
    return tree


def parts(tree: GrowingTree) -> list[object]:
    return [tree.base, tree.begun, tree.tokens, tree.parents, tree.scores, tree.depths, tree.ids, tree.computed,
            tree.frontier, tree.picks, tree.next_id, tree.num_sent]


@pytest.mark.parametrize(("width", "levels"), [(1, 5), (2, 3), (4, 3), (3, 1), (8, 9), (13, 7)])
@pytest.mark.parametrize("equals", [False, True])
def test_arrays_grow_what_lists_grow(width: int, levels: int, equals: bool) -> None:
    """Some trees end before the others; a frontier ends where no word holds more nodes."""
    dice, count = np.random.default_rng(width * levels), 9
    fresh, tokens, scores, nodes = FreshTrees(count, width), list[np.ndarray](), list[np.ndarray](), 1
    for _ in range(levels):
        tokens.append(dice.integers(0, 999, (count, nodes, width)))
        drawn = -np.sort(dice.exponential(size=(count, nodes, width)), axis=2) + 0.01
        scores.append(drawn.round() if equals else drawn)
        assert fresh.expand(tokens[-1], scores[-1]).all()
        nodes = fresh.picks.shape[1]
    wanted = [1 + int(dice.integers(levels)) for _ in range(count)]
    trees = [GrowingTree(10 + place, width, 1 + 7 * place) for place in range(count)]
    assert all(tree.is_fresh for tree in trees)
    fresh.write_to(trees, wanted)
    right = [one_by_one(tokens, scores, place, width, own) for place, own in enumerate(wanted)]
    assert [*map(parts, trees)] == [*map(parts, right)]


def test_a_score_that_is_no_number_is_told() -> None:
    fresh, scores = FreshTrees(3, 2), np.array([[[-1.0, -2.0]], [[-1.0, -np.inf]], [[np.nan, -2.0]]])
    assert fresh.expand(np.zeros((3, 1, 2), np.int64), scores).tolist() == [True, False, False]


@pytest.mark.parametrize("bad", [1, 2, 3])
def test_what_is_adopted_at_once_is_what_is_adopted_one_by_one(bad: int) -> None:
    """Also where a child of level ``bad`` has no score: arrays would keep it."""
    dice, (count, topk, levels) = np.random.default_rng(bad), (5, 3, 3)
    rows = 1 + levels * topk
    scores = -np.sort(dice.exponential(size=(count, rows, topk)), axis=2)
    scores[dice.integers(count), bad * topk, topk - 1] = np.nan
    tokens, picks = dice.integers(0, 999, (count, rows, topk)), np.full((count, levels, topk), -1)
    for place in range(count):
        tree = GrowingTree(10, topk)
        tree.expand([(tokens[place, 0].tolist(), scores[place, 0].tolist())])
        for level in range(levels):
            picks[place, level, : len(tree.picks)] = tree.picks
            children = slice(1 + level * topk, 1 + level * topk + len(tree.picks))
            tree.expand([*zip(tokens[place, children].tolist(), scores[place, children].tolist(), strict=True)])
    grown = Grown(tokens, scores, picks, torch.empty(count, rows, 1), np.full(count, 1 + levels))
    trees, right = ([GrowingTree(10, topk) for _ in range(count)] for _ in range(2))
    adopted = adopt_levels(trees, grown, [levels] * count, topk)
    assert adopted == [adopt_levels([tree], grown.select([place]), [levels], topk)[0]
                       for place, tree in enumerate(right)]
    assert [*map(parts, trees)] == [*map(parts, right)]
