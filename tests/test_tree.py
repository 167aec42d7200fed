"""DraftTree against brute force."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream.protocol.tree import MAX_HELD, MAX_NODES, DraftTree
from tests.trees import child, random_tree, rerooted


def paths_of(tree: DraftTree) -> dict[tuple[int, ...], float]:
    """Every node as its token path below the root, with its score: what a tree means, whatever its numbering."""
    return {tuple(tree.tokens[n] for n in tree.path(node)[1:]): tree.scores[node]
            for node in range(len(tree))}


@pytest.mark.parametrize("seed", range(20))
def test_ancestors_and_levels_equal_the_brute_force_relation(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, int(rng.integers(1, MAX_NODES + 1)))
    words = tree.ancestors()
    for node in range(len(tree)):
        path = tree.path(node)
        assert {j for j in range(len(tree)) if int(words[node]) >> j & 1} == set(path), seed
        assert tree.levels()[node] == len(path) - 1, seed


@pytest.mark.parametrize("seed", range(20))
def test_rerooting_twice_equals_rerooting_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, 40, vocab=3)
    tokens = [int(t) for t in rng.integers(3, size=4)]
    once = rerooted(tree, tokens)
    twice = rerooted(rerooted(tree, tokens[:2]), tokens[2:])
    assert paths_of(once).keys() == paths_of(twice).keys()
    assert once.base == twice.base == tree.base + 4
    assert once.ids[0] == -once.base
    np.testing.assert_allclose(sorted(once.scores), sorted(twice.scores), atol=1e-5)


@pytest.mark.parametrize("seed", range(20))
def test_reroot_keeps_exactly_what_continues_the_committed_tokens(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, 30, vocab=3)
    node = int(rng.integers(len(tree)))
    tokens = [tree.tokens[n] for n in tree.path(node)[1:]] or [99]
    kept = paths_of(rerooted(tree, tokens))
    expected = {path[len(tokens):] for path in paths_of(tree) if path[: len(tokens)] == tuple(tokens)} or {()}
    assert kept.keys() == expected, seed


@pytest.mark.parametrize("seed", range(20))
def test_follow_goes_as_far_as_children_carry_the_tokens(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, 30, vocab=3)
    tokens = [int(t) for t in rng.integers(3, size=6)]
    nodes, node = [], child(tree, 0, tokens[0])
    for token in tokens[1:]:
        if node is None:
            break
        nodes.append(node)
        node = child(tree, node, token)
    else:
        nodes += [] if node is None else [node]
    assert tree.find_path(tokens) == nodes, seed
    assert tree.find_path([]) == []


def test_reroot_outside_the_tree_is_plain_decoding() -> None:
    tree = DraftTree.root_only(3, 1).append([1, 2], [-3, 1], [5, 6], [-0.1, -0.2])
    plain = rerooted(tree, [7])
    assert len(plain) == 1 and plain.base == 4 and plain.tokens == [7] and plain.ids == [-4]


@pytest.mark.parametrize("seed", range(20))
def test_best_is_connected_and_takes_the_highest_scores(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, 50)
    for size in (1, 2, 7, len(tree)):
        best = tree.best(size)
        assert len(best) == min(size, len(tree))
        assert paths_of(best).items() <= paths_of(tree).items()
        assert all(0 <= parent < node for node, parent in enumerate(best.parents) if node)
        assert sorted(best.scores) == sorted(tree.scores)[-len(best) :]


def test_append_leaves_out_what_does_not_fit() -> None:
    tree = DraftTree.root_only(3, 1)
    tree = tree.append([1, 2, 3, 1, 4, 5], [-3, 1, 77, -3, -3, 1], [10, 11, 12, 13, 10, 14],
                       [-1.0, -0.5, -1.0, -1.0, -1.0, float("nan")])
    assert tree.ids == [-3, 1, 2, 5], "an unknown parent, a used id and a used sibling's token are left out"
    assert tree.scores == [0.0, -1.0, -1.0, -np.inf], "scores never rise, and nonsense counts as the worst"


def test_append_stops_at_what_may_be_held_and_a_selection_fits_the_words() -> None:
    tree = DraftTree.root_only(1, 0)
    tree = tree.append(range(1, 1400), [-1] * 1399, range(1399), [-1.0] * 1399)
    assert len(tree) == MAX_HELD
    chosen = tree.best(MAX_NODES)
    assert len(chosen) == MAX_NODES
    assert int(chosen.ancestors()[-1]) == 1 | 1 << 63


def test_a_chain_is_grafted_below_what_is_here() -> None:
    tree = DraftTree.root_only(5, 9).append([1, 2], [-5, 1], [10, 11], [-0.1, -0.2])
    grafted = tree.graft([10, 11, 12, 13], [-0.5, -0.6, -0.7, -0.8], 100)
    assert paths_of(grafted).keys() == {(), (10,), (10, 11), (10, 11, 12), (10, 11, 12, 13)}
    assert grafted.ids == [-5, 1, 2, 100, 101]
    assert paths_of(tree.graft([20], [-0.5], 100)).keys() == {(), (10,), (10, 11), (20,)}
    assert tree.graft([10, 11], [-0.5, -0.6], 100) is tree and tree.graft([], [], 100) is tree


@pytest.mark.parametrize("seed", range(200))
def test_a_chain_joins_a_root_as_its_nodes_do_one_by_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    root, count = DraftTree(5, [3], [-1], [-5], [-0.5]), int(rng.integers(1, 6))
    ids = rng.permutation(9)[:count].tolist() if rng.random() < 0.8 else rng.integers(1, 5, count).tolist()
    parents, tokens = [-5, *ids[:-1]], rng.integers(0, 3, count).tolist()
    scores = rng.choice([0.5, -0.25, -1.0, -2.0, np.nan, -np.inf], count).tolist()
    single = root
    for node in zip(ids, parents, tokens, scores, strict=True):
        single = single.append(*([part] for part in node))
    assert repr(root.append(ids, parents, tokens, scores)) == repr(single)
