"""Random trees for tests."""

from __future__ import annotations

import numpy as np

from slipstream.protocol.tree import DraftTree


def child(tree: DraftTree, node: int, token: int) -> int | None:
    """The child of ``node`` that carries ``token``."""
    return next((below for below in range(len(tree)) if (tree.parents[below], tree.tokens[below]) == (node, token)),
                None)


def rerooted(tree: DraftTree, tokens: list[int]) -> DraftTree:
    """The tree after ``tokens`` were committed."""
    return tree.reroot(tree.find_path(tokens), tokens)


def random_shape(rng: np.random.Generator, nodes: int) -> DraftTree:
    """A tree of so many nodes whose tokens all differ."""
    tree = DraftTree.root_only(7, 0)
    for node in range(1, nodes):
        tree = tree.append([node], [tree.ids[int(rng.integers(max(0, node - 3), node))]], [node], [0.0])
    return tree


def lucky_tree(shape: DraftTree, choices: list[int]) -> DraftTree:
    """The same tree, in which each node's first child carries what is chosen there: ``choices``, one a node."""
    tokens, served = shape.tokens.copy(), set[int]()
    for node, parent in enumerate(shape.parents):
        tokens[node] = 10**6 + node if parent < 0 or parent in served else choices[parent]
        served.add(parent)
    return DraftTree(shape.base, tokens, shape.parents, shape.ids, shape.scores)


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
