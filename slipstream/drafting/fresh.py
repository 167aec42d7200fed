"""FreshTrees: new trees of several sessions, grown together as arrays; then they become ``tree.GrowingTree`` objects.

Rules:
1. They equal the trees of ``tree.GrowingTree.expand``, called for one tree after the other: it is the specification. A
   tree of which the target has nodes already, or that grows ahead of it, is left to ``GrowingTree``.
2. Nodes of a level are in the order of its candidates: those of the frontier's first node first.
3. With a score that is not finite a frontier is shorter, which these arrays cannot hold: ``expand`` returns which trees
   are finite, and the caller checks it.

Fewer than ``MIN_ARRAY_TREES`` trees are faster in lists: arrays take as long for one tree as for a hundred.

It knows nothing about sessions, networks or slots. B trees, w nodes in a frontier, K children of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.drafting.tree import ROOT, GrowingTree
from slipstream.engine.kv import Indices
from slipstream.protocol.tree import MAX_NODES

MIN_ARRAY_TREES = 4  # trees: from so many on arrays are faster


class FreshTrees:
    __slots__ = ("_depths", "_frontier_scores", "_frontiers", "_parents", "_picks", "_scores", "_sizes", "_tokens",
                 "_width")

    def __init__(self, count: int, width: int) -> None:
        self._width = width
        self._tokens, self._parents, self._picks = list[Indices](), list[Indices](), list[Indices]()
        self._scores = list[NDArray[np.float64]]()
        self._depths, self._sizes = list[int](), [0]  # node depths of one tree; its nodes after each level
        self._frontiers: list[Indices] = [np.full((count, 1), ROOT)]
        self._frontier_scores = np.zeros((count, 1))  # scores of the newest frontier

    @property
    def picks(self) -> Indices:
        """[B, w]: which candidates of the newest level are the frontier."""
        return self._picks[-1]

    def expand(self, tokens: Indices, scores: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Add a level: children of each frontier node, int64 [B, w, K] best first, and their log scores relative to the
        node. Returns bool [B]: whether all scores of a tree are finite."""
        count, nodes, topk = tokens.shape
        totals: NDArray[np.float64] = (self._frontier_scores[:, :, None] + np.minimum(scores, 0.0)).reshape(count, -1)
        self._tokens.append(tokens.reshape(count, -1))
        self._parents.append(self._frontiers[-1].repeat(topk, 1))
        self._scores.append(totals)
        self._depths += [len(self._tokens)] * (nodes * topk)
        most = min(self._width, MAX_NODES - sum(frontier.shape[1] for frontier in self._frontiers[1:]))
        picks = np.argsort(-totals, axis=1, kind="stable")[:, : max(0, most)]  # the earlier first among equals
        picks.sort(axis=1)
        self._picks.append(picks)
        self._frontiers.append(picks + self._sizes[-1])
        self._frontier_scores = np.take_along_axis(totals, picks, 1)
        self._sizes.append(self._sizes[-1] + nodes * topk)
        finite: NDArray[np.bool_] = np.logical_and.reduce(np.isfinite(totals), axis=1)
        return finite

    def write_to(self, trees: Sequence[GrowingTree], levels: Sequence[int]) -> None:
        """Write the first ``levels[i]`` levels (at least one) into ``trees[i]``."""
        tokens, parents, scores = (_rows(parts) for parts in (self._tokens, self._parents, self._scores))
        computed = _rows(self._frontiers[1:])
        before = [0, *accumulate(frontier.shape[1] for frontier in self._frontiers[1:])]
        picks, frontiers = ([part.tolist() for part in parts] for parts in (self._picks, self._frontiers))
        for place, (tree, count) in enumerate(zip(trees, levels, strict=True)):
            size = self._sizes[count]
            tree.begun, tree.width = True, self._width
            tree.tokens, tree.parents = tokens[place][:size], parents[place][:size]
            tree.scores, tree.depths, tree.ids = scores[place][:size], self._depths[:size], [0] * size
            tree.computed = computed[place][: before[count - 1]]
            tree.frontier, tree.picks = frontiers[count][place], picks[count - 1][place]


def _rows(parts: Sequence[NDArray[Any]]) -> list[list[Any]]:
    found: list[list[Any]] = np.concatenate(parts, axis=1).tolist()
    return found
