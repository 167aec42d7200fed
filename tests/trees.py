"""Random trees for tests."""

from __future__ import annotations

import numpy as np

from slipstream.protocol.tree import DraftTree


def random_tree(rng: np.random.Generator, nodes: int, base: int = 7, vocab: int = 5) -> DraftTree:
    """A valid tree of at most ``nodes`` nodes over a small vocabulary, so that tokens repeat across branches."""
    tree = DraftTree.root_only(base, int(rng.integers(vocab)))
    for node_id in range(1, 4 * nodes):
        if len(tree) >= nodes:
            break
        parent = int(rng.integers(len(tree)))
        score = tree.scores[parent] - float(rng.exponential())
        tree = tree.append([node_id], [tree.ids[parent]], [int(rng.integers(vocab))], [score])
    return tree
