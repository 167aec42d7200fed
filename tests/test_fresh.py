"""Trees that begin together, as arrays, are those that grow one after the other, in lists."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream.drafting.fresh import FreshTrees
from slipstream.drafting.tree import GrowingTree


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
