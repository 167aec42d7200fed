"""DraftTree: the one type that flows from draft to target, and its algebra.

Rules of a tree:
1. Node 0 is the root: the newest committed token, at position ``base - 1``; the target has not computed its KV yet.
2. ``parents[0] == -1`` and ``parents[i] < i``: a parent stands before its children. A chain is a tree; plain is N = 1.
3. Siblings carry distinct tokens, so a path of tokens names at most one node.
4. Ids are the drafter's and positive, stable while a session is open. The root's id is ``-base``, whatever it was
   before: both sides know it without being told. Nodes from no drafter have ids from ``PREDICTED`` on; one that a
   drafter proposes, too, has its id from then on, as further growth names it by that.
5. ``scores`` are cumulative log scores: a child's is at most its parent's, so the best n nodes are connected.
6. At most ``MAX_HELD`` nodes; what is verified is a selection of at most ``MAX_NODES`` of them (``best``), so that the
   ancestors of a node fit one 64-bit word.

Choose, then walk: how the target decides what of a draft tree becomes the answer.

At every node the target has chosen its own next token (argmax, or argmax of logits/T plus keyed noise). ``walk`` starts
at the root; while a child carries the chosen token it steps to that child; the first choice without a child is the
bonus token.

Why this is exact for any tree and any drafter: let ``c(prefix)`` be the token that plain decoding picks after
``prefix``, a function of the prefix, the seed and the target alone. The choice at a node is ``c`` of the path from the
root to it, because the node's logits depend on that path only (ancestor mask) and so does the noise (seed, position).
By induction every token the walk emits is ``c`` of everything emitted before it: the root's prefix is the committed
text; a step to a child appends the very token that was chosen; the bonus token is a choice too. So the walk emits a
prefix of the plain answer, whatever the tree holds; the tree decides only how long that prefix is (at least one).
No draft probability is used, so a drafter cannot bias the result (compare Daliri, Musco, Suresh, arXiv 2408.07978).

Accept thresholds: taking draft tokens that the target did not choose. LOSSY, off by default, never silent.

Rules of thresholds:
1. With both thresholds at 1 nothing here runs, and answers are those of plain decoding.
2. A child that carries the target's own choice is always taken. Otherwise the children of a node are looked at from the
   best-scored to the worst, and the first one is taken whose probability under the target is at least ``single``, or
   for which the coin is at most (probability of the children so far) / ``acc``.
3. The coin is as likely to fall anywhere between the children's share and one, for the choice was none of them; so with
   ``acc`` alone a child is taken with probability min(1, share / acc), as in SGLang, and with ``acc`` 1 never here.
4. Greedy answers know no thresholds. Probabilities are those after penalties, temperature and filters: a forbidden
   token has none and is never taken.

With thresholds an answer depends on what was drafted, so it is neither repeatable nor distributed as the model's.
Source: the semantics of SGLang's ``speculative_accept_threshold_single`` and ``_acc``.

It knows nothing about models, sessions or the network. Sources: tree drafting as in EAGLE-2 (arXiv 2406.16858);
re-rooting as in SwiftSpec (arXiv 2506.11309).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

MAX_NODES = 64  # of a selection that is verified, root included
MAX_HELD = 1024  # of a tree that grows ahead of what is verified, root included
PREDICTED = 1 << 30  # a drafter whose ids go so far loses nodes, and nothing else

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]


class DraftTree:
    """A rooted tree of draft tokens. Built through ``root_only`` and ``append``, which keep the rules; never changed.
    Nodes are Python lists: for a few nodes numpy costs more time than it saves."""

    __slots__ = ("base", "ids", "parents", "scores", "tokens")

    def __init__(self, base: int, tokens: list[int], parents: list[int], ids: list[int], scores: list[float]) -> None:
        """Lists of N items, which are kept, not copied."""
        self.base = base
        self.tokens = tokens
        self.parents = parents
        self.ids = ids
        self.scores = scores

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        return f"DraftTree({self.base}, {self.tokens}, {self.parents}, {self.ids}, {self.scores})"

    @staticmethod
    def root_only(base: int, token: int) -> DraftTree:
        """The tree of plain decoding: the newest committed token alone."""
        return DraftTree(base, [token], [-1], [-base], [0.0])

    @property
    def is_chain(self) -> bool:
        return self.parents == list(range(-1, len(self.tokens) - 1))

    def levels(self) -> list[int]:
        """[N]: edges between each node and the root. A node's position is ``base - 1 + level``."""
        levels = [0]
        for parent in self.parents[1:]:
            levels.append(levels[parent] + 1)
        return levels

    def ancestors(self) -> list[int]:
        """[N]: bit j of word i is set when node j is node i or one of its ancestors. N is at most MAX_NODES."""
        words = [1]
        for node, parent in enumerate(self.parents[1:], start=1):
            words.append(1 << node | words[parent])
        return words

    def find_path(self, tokens: Sequence[int]) -> list[int]:
        """The nodes that carry ``tokens``, each below the one before and the first below the root, as far as there are
        any."""
        nodes: list[int] = []
        node_tokens, parents = self.tokens, self.parents
        if len(node_tokens) == 1:  # nothing is drafted
            return nodes
        parent, node, count = 0, 1, len(node_tokens)
        # One pass: a parent stands before its children, and siblings carry distinct tokens.
        for token in tokens:
            if token not in node_tokens:  # as the last one mostly is
                break
            while node < count and (node_tokens[node] != token or parents[node] != parent):
                node += 1
            if node == count:
                break
            nodes.append(node)
            parent, node = node, node + 1
        return nodes

    def path(self, node: int) -> list[int]:
        """Nodes from the root to ``node``, both included."""
        nodes, parents = [node], self.parents
        while (node := parents[node]) >= 0:
            nodes.append(node)
        return nodes[::-1]

    def best_path(self) -> list[int]:
        """Nodes from the root down, at each the child of the highest score."""
        nodes, scores, parents = [0], self.scores, self.parents
        while children := [node for node in range(nodes[-1] + 1, len(parents)) if parents[node] == nodes[-1]]:
            nodes.append(max(children, key=scores.__getitem__))
        return nodes

    def append(self, ids: Sequence[int], parents: Sequence[int], tokens: Sequence[int],
               scores: Sequence[float]) -> DraftTree:
        """This tree with further nodes, whose ``parents`` are ids. What does not fit is left out, never an error:
        a node whose parent is not here, an id or a sibling's token that is here already, nodes beyond MAX_HELD.
        A score above its parent's is lowered to it (rule 5 of trees); one that is not a number counts as the worst."""
        root, count = self.ids[0], len(ids)
        if (len(self.ids) == 1 and parents == [root, *ids[:-1]]
                and len({root, *ids}) - 1 == count == len(tokens) == len(scores) < MAX_HELD):  # a chain below the root
            new_scores = [bound := self.scores[0]]
            for score in scores:
                bound = -inf if score != score else score if score < bound else bound
                new_scores.append(bound)
            return DraftTree(self.base, [self.tokens[0], *tokens], [*range(-1, count)], [root, *ids], new_scores)
        held_tokens, held_parents, held_ids = [*self.tokens], [*self.parents], [*self.ids]
        new_scores = [*self.scores]
        count = num_held = len(new_scores)
        node_of_id = {known_id: node for node, known_id in enumerate(held_ids)}
        # Edges, and the nodes below them.
        node_of_edge = {parent << 32 | token: node for node, (parent, token) in enumerate(zip(held_parents, held_tokens,
                                                                                              strict=True))}
        renamed = False
        for node_id, parent_id, token, score in zip(ids, parents, tokens, scores, strict=True):
            above = node_of_id.get(parent_id)
            if above is None or node_id in node_of_id:
                continue
            edge = above << 32 | token
            if (node := node_of_edge.get(edge)) is not None:
                if held_ids[node] >= PREDICTED:
                    node_of_id[node_id], held_ids[node], renamed = node, node_id, True
                continue
            if count >= MAX_HELD:
                continue
            node_of_id[node_id] = node_of_edge[edge] = count
            count += 1
            bound = new_scores[above]
            new_scores.append(-inf if score != score else score if score < bound else bound)
            held_tokens.append(token)
            held_parents.append(above)
            held_ids.append(node_id)
        if count == num_held and not renamed:
            return self
        return DraftTree(self.base, held_tokens, held_parents, held_ids, new_scores)

    def graft(self, tokens: Sequence[int], scores: Sequence[float], first_id: int) -> DraftTree:
        """This tree with a chain below its root. New nodes get ids from ``first_id`` on; nodes of the chain that are
        here already stay as they are."""
        nodes = self.find_path(tokens)
        known = len(nodes)
        ids = range(first_id, first_id + len(tokens) - known)
        return self.append(ids, [self.ids[nodes[-1] if nodes else 0], *ids][: len(ids)], tokens[known:], scores[known:])

    def select(self, keep: Sequence[int]) -> DraftTree:
        """The connected sub-tree of the nodes ``keep`` (ascending, the root first). Scores stay relative to the old
        root."""
        places = {node: place for place, node in enumerate(keep)}
        places[-1] = -1
        new_parents = [places.get(self.parents[node]) for node in keep]
        parents = [parent for parent in new_parents if parent is not None]
        assert keep[0] == 0 and len(parents) == len(keep), "not connected"
        tokens, ids, scores = self.tokens, self.ids, self.scores
        return DraftTree(self.base, [tokens[node] for node in keep], parents, [ids[node] for node in keep],
                         [scores[node] for node in keep])

    def best(self, num_nodes: int) -> DraftTree:
        """The ``num_nodes`` best-scored nodes, root included; connected by rule 5 of trees and a stable sort."""
        scores = self.scores
        if num_nodes >= len(scores):
            return self
        order = sorted(range(len(scores)), key=lambda node: -scores[node])
        return self.select(sorted(order[: max(1, num_nodes)]))

    def reroot(self, nodes: Sequence[int], tokens: Sequence[int]) -> DraftTree:
        """The tree after ``tokens`` were committed: the subtree below the last of them if this tree has that path, else
        only the new root. Scores become relative to the new root. nodes: ``find_path`` of ``tokens``."""
        base = self.base + len(tokens)
        if len(nodes) < len(tokens):
            return DraftTree.root_only(base, tokens[-1])
        all_parents, keep, parents = self.parents, [nodes[-1]], [-1]
        places = {nodes[-1]: 0}
        for node in range(nodes[-1] + 1, len(all_parents)):
            if (parent := places.get(all_parents[node])) is not None:
                places[node] = len(keep)
                keep.append(node)
                parents.append(parent)
        if len(keep) == 1:
            return DraftTree.root_only(base, tokens[-1])
        ids, all_tokens, scores = self.ids, self.tokens, self.scores
        root = scores[keep[0]]
        # Below what is impossible nothing is more so.
        relative = [scores[node] - root for node in keep] if root > -inf else [0.0] * len(keep)
        return DraftTree(base, [all_tokens[node] for node in keep], parents, [-base, *[ids[node] for node in keep[1:]]],
                         relative)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one verification gives: ``path`` are the accepted nodes with the root first; ``tokens`` what to commit."""

    path: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def num_accepted(self) -> int:
        """Draft tokens that became part of the answer; the acceptance length is this plus one (the bonus token)."""
        return len(self.tokens) - 1


def walk(tree: DraftTree, choices: Sequence[int]) -> Verdict:
    """Walk ``tree`` along ``choices`` (int [N], the target's token at each node). Always yields at least one token."""
    assert len(choices) == len(tree)
    # One pass over the nodes beats a search per level: a node is on the path exactly when its parent is the newest
    # node of the path and it carries the token chosen there.
    path = [0]
    tokens = tree.tokens
    parents = tree.parents
    for node in range(1, len(tokens)):
        if parents[node] == path[-1] and tokens[node] == choices[path[-1]]:
            path.append(node)
    return Verdict(tuple(path), tuple([choices[node] for node in path]))


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Accept thresholds ``single`` and ``acc``, both in (0, 1]; with 1 only tokens that the target chose are
    accepted."""

    single: float = 1.0
    acc: float = 1.0

    @property
    def lossy(self) -> bool:
        return self.single < 1.0 or self.acc < 1.0


def relaxed_choices(tree: DraftTree, choices: Sequence[int], chances: Sequence[float], coins: Sequence[float],
                    thresholds: Thresholds) -> list[int]:
    """The choices to ``walk`` by: those of the target, replaced by a child's token where a threshold takes the child.

    choices: int [N], the target's own. chances: [N], the target's probability of each node's token at its parent (the
    root's is not looked at). coins: [N], uniform in (0, 1), one for each node's choice.
    """
    tokens, parents, scores = tree.tokens, tree.parents, tree.scores
    children: dict[int, list[int]] = {}
    for node in range(1, len(tokens)):
        children.setdefault(parents[node], []).append(node)
    result = list(choices)
    for node, siblings in children.items():
        if any(tokens[child] == choices[node] for child in siblings):
            continue
        siblings.sort(key=lambda child: (-scores[child], child))
        accepted = _accepted([chances[child] for child in siblings], coins[node], thresholds)
        if accepted is not None:
            result[node] = tokens[siblings[accepted]]
    return result


def _accepted(chances: Sequence[float], coin: float, thresholds: Thresholds) -> int | None:
    """Which child the thresholds accept, if any. chances: of the children, the best-scored first."""
    share = min(1.0, sum(chances))
    point = share + (1.0 - share) * coin
    cumulative = 0.0
    for place, chance in enumerate(chances):
        cumulative += chance
        if chance > 0.0 and ((thresholds.single < 1.0 and chance >= thresholds.single)
                             or (thresholds.acc < 1.0 and point * thresholds.acc <= cumulative)):
            return place
    return None
