"""walk against enumeration, and the law of what it emits."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream.protocol.tree import DraftTree, walk
from tests.trees import random_tree

VOCAB = 4


def plain_choice(prefix: tuple[int, ...], seed: int) -> int:
    """Some fixed function of prefix and seed: plain decoding of a model that nobody can guess."""
    return int(np.random.default_rng([seed, *prefix]).integers(VOCAB))


@pytest.mark.parametrize("seed", range(200))
def test_walk_emits_a_prefix_of_plain_decoding_and_as_long_a_one_as_the_tree_allows(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, int(rng.integers(1, 40)), vocab=VOCAB)
    paths = [tuple(tree.tokens[n] for n in tree.path(node)[1:]) for node in range(len(tree))]
    verdict = walk(tree, [plain_choice(path, seed) for path in paths])

    plain: tuple[int, ...] = ()
    while plain in paths:
        plain += (plain_choice(plain, seed),)
    assert verdict.tokens == plain, seed
    assert verdict.num_accepted == len(plain) - 1
    assert [paths[node] for node in verdict.path] == [plain[:k] for k in range(len(plain))]


def test_a_tree_with_one_node_is_plain_decoding() -> None:
    verdict = walk(DraftTree.root_only(9, 3), [2])
    assert verdict.tokens == (2,) and verdict.path == (0,) and verdict.num_accepted == 0
