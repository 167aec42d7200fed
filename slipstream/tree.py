"""DraftTree: the one type that flows from draft to target, and its algebra.

Rules:
1. Node 0 is the root: the newest committed token, at position ``base - 1``; the target has not computed its KV yet.
2. ``parents[0] == -1`` and ``parents[i] < i``: a parent stands before its children. A chain is a tree; plain is N = 1.
3. Siblings carry distinct tokens, so a path of tokens names at most one node.
4. Ids are the drafter's and positive, stable while a session is open. The root's id is ``-base``, whatever it was
   before: both sides know it without being told.
5. ``scores`` are cumulative log scores: a child's is at most its parent's, so the best n nodes are connected.
6. At most ``MAX_HELD`` nodes; what is verified is a selection of at most ``MAX_NODES`` of them (``best``), so that the
   ancestors of a node fit one 64-bit word.

It knows nothing about models, sessions or the network. Sources: tree drafting as in EAGLE-2 (arXiv 2406.16858);
re-rooting as in SwiftSpec (arXiv 2506.11309).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAX_NODES = 64  # of a selection that is verified, root included
MAX_HELD = 256  # of a tree that grows ahead of what is verified, root included

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Words = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class DraftTree:
    """A rooted tree of draft tokens. Built through ``root_only`` and ``append``, which keep the rules."""

    base: int
    tokens: Ints  # int32 [N]
    parents: Ints  # int32 [N]
    ids: Ints  # int32 [N]
    scores: Floats  # float32 [N]

    def __len__(self) -> int:
        return len(self.tokens)

    @staticmethod
    def root_only(base: int, token: int) -> DraftTree:
        """The tree of plain decoding: the newest committed token alone."""
        return DraftTree(
            base,
            np.array([token], np.int32),
            np.array([-1], np.int32),
            np.array([-base], np.int32),
            np.zeros(1, np.float32),
        )

    def depths(self) -> Ints:
        """int32 [N]: edges between each node and the root. A node's position is ``base - 1 + depth``."""
        depths = np.zeros(len(self), np.int32)
        for node in range(1, len(self)):
            depths[node] = depths[self.parents[node]] + 1
        return depths

    def ancestor_words(self) -> Words:
        """uint64 [N]: bit j of word i is set when node j is node i or one of its ancestors. N is at most MAX_NODES."""
        words = np.zeros(len(self), np.uint64)
        for node in range(len(self)):
            parent = self.parents[node]
            words[node] = np.uint64(1 << node) | (words[parent] if parent >= 0 else np.uint64(0))
        return words

    def path(self, node: int) -> list[int]:
        """Nodes from the root to ``node``, both included."""
        nodes = [node]
        while self.parents[nodes[-1]] >= 0:
            nodes.append(int(self.parents[nodes[-1]]))
        return nodes[::-1]

    def child(self, node: int, token: int) -> int | None:
        """The child of ``node`` that carries ``token``, or None."""
        found = np.flatnonzero((self.parents == node) & (self.tokens == token))
        return int(found[0]) if len(found) else None

    def append(self, ids: Sequence[int], parents: Sequence[int], tokens: Sequence[int],
               scores: Sequence[float]) -> DraftTree:
        """This tree with further nodes, whose ``parents`` are ids. What does not fit is left out, never an error:
        a node whose parent is not here, an id or a sibling's token that is here already, nodes beyond MAX_HELD.
        A score above its parent's is lowered to it (rule 5); one that is not a number counts as the worst."""
        where = dict(zip(self.ids.tolist(), range(len(self)), strict=True))
        # An edge as one number: this runs for every message of a drafter that grows ahead.
        taken = set((self.parents.astype(np.int64) << 32 | self.tokens).tolist())
        rows: list[tuple[int, int, int, float]] = []
        known = self.scores.tolist()
        for node_id, parent_id, token, score in zip(ids, parents, tokens, scores, strict=True):
            parent = where.get(parent_id)
            if parent is None or node_id in where or len(known) >= MAX_HELD or parent << 32 | token in taken:
                continue
            bounded = min(float(score), known[parent]) if score == score else -np.inf
            where[node_id] = len(known)
            taken.add(parent << 32 | token)
            known.append(bounded)
            rows.append((token, parent, node_id, bounded))
        if not rows:
            return self
        new = list(zip(*rows, strict=True))
        return DraftTree(
            self.base,
            np.concatenate([self.tokens, np.array(new[0], np.int32)]),
            np.concatenate([self.parents, np.array(new[1], np.int32)]),
            np.concatenate([self.ids, np.array(new[2], np.int32)]),
            np.concatenate([self.scores, np.array(new[3], np.float32)]),
        )

    def graft(self, tokens: Sequence[int], scores: Sequence[float], first_id: int) -> DraftTree:
        """This tree with a chain below its root, whose new nodes have ids from ``first_id`` on. What of it is here
        already stays as it is."""
        node, known = 0, 0
        while known < len(tokens) and (child := self.child(node, tokens[known])) is not None:
            node, known = child, known + 1
        ids = range(first_id, first_id + len(tokens) - known)
        return self.append(ids, [int(self.ids[node]), *ids][: len(ids)], tokens[known:], scores[known:])

    def select(self, nodes: Sequence[int] | Ints) -> DraftTree:
        """The connected sub-tree of ``nodes`` (ascending, the root first). Scores stay relative to the old root."""
        keep = np.asarray(nodes, np.int32)
        renumbered = np.full(len(self) + 1, -1, np.int32)
        renumbered[keep] = np.arange(len(keep), dtype=np.int32)
        assert keep[0] == 0 and (renumbered[self.parents[keep[1:]]] >= 0).all(), "not connected"
        return DraftTree(self.base, self.tokens[keep], renumbered[self.parents[keep]], self.ids[keep],
                         self.scores[keep])

    def promise(self, num_nodes: int) -> float:
        """Tokens that the ``num_nodes`` best nodes, root not counted, would give if scores were true logarithms of the
        chance of being accepted."""
        best = -np.sort(-self.scores[1:])[:num_nodes]
        return float(np.exp(best).sum())

    def best(self, num_nodes: int) -> DraftTree:
        """The ``num_nodes`` best-scored nodes, root included; connected because of rule 5 and a stable sort."""
        if num_nodes >= len(self):
            return self
        order = np.argsort(-self.scores, kind="stable")[: max(1, num_nodes)]
        return self.select(np.sort(order).astype(np.int32))

    def reroot(self, tokens: Sequence[int] | Ints) -> DraftTree:
        """The tree after ``tokens`` were committed: the subtree below the last of them if this tree holds that path,
        else the new root alone. Scores become relative to the new root."""
        base = self.base + len(tokens)
        node = 0
        for token in tokens:
            child = self.child(node, int(token))
            if child is None:
                return DraftTree.root_only(base, int(tokens[-1]))
            node = child
        inside = np.zeros(len(self), bool)
        inside[node] = True
        for n in range(node + 1, len(self)):
            inside[n] = self.parents[n] >= 0 and inside[self.parents[n]]
        keep = np.flatnonzero(inside)
        renumbered = np.full(len(self) + 1, -1, np.int32)
        renumbered[keep] = np.arange(len(keep), dtype=np.int32)
        parents, ids, scores = renumbered[self.parents[keep]], self.ids[keep].copy(), self.scores[keep]
        parents[0], ids[0] = -1, -base
        relative = np.where(np.isfinite(scores), scores - scores[0], -np.inf) if np.isfinite(scores[0]) else scores * 0
        return DraftTree(base, self.tokens[keep], parents, ids, relative.astype(np.float32))
