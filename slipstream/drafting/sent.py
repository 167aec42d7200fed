"""SentTree: the nodes of one session that the target holds, by the drafter's own ids; and what is sent next.

Rules:
1. Both sides re-root on every commit. What survives there survives here under the same ids, so a node that is drafted
   again at the new base is not sent again: its further children hang below the id that the target knows. (Sent anew, it
   would be left out as a second child with the same token, and everything below it with it.)
2. Ids are positive and are not used twice, also when a session is opened again.
3. At most MAX_HELD - 1 nodes, as the target's tree has.
4. Several sources may propose for one session: they share its tree (``SentTrees``), so that ids stay unique and the
   same child is not sent twice. Each tells the tree of every opening and commit; only the first of them counts.

It knows nothing about how nodes are found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import merge
from time import perf_counter

import numpy as np

from slipstream.protocol.messages import Growth
from slipstream.protocol.tree import MAX_HELD

Proposal = tuple[float, int, int]  # cumulative log score, id of the parent (``-base`` for the root), token


class SentTree:
    __slots__ = ("_children", "_num_nodes", "base", "next_id")

    def __init__(self, base: int, next_id: int = 1) -> None:
        self.base = base
        self.next_id = next_id
        self._children: dict[int, dict[int, int]] = {}  # id of a parent -> token -> id
        self._num_nodes = 0

    def __len__(self) -> int:
        return self._num_nodes

    @property
    def full(self) -> bool:
        """Whether no further node fits the target's tree."""
        return self._num_nodes >= MAX_HELD - 1

    def find(self, parent: int, token: int) -> int | None:
        """The id of a child that the target holds. ``parent`` is an id, ``-base`` for the root."""
        return self._children.get(parent, {}).get(token)

    def add(self, parent: int, token: int) -> int:
        """The id of a new child."""
        node = self.next_id
        self._children.setdefault(parent, {})[token] = node
        self.next_id += 1
        self._num_nodes += 1
        return node

    def commit(self, base: int, tokens: Sequence[int]) -> None:
        """Re-root below tokens committed at ``base``: keep what stands below the last of them, or nothing. A commit
        that is known already changes nothing."""
        if base != self.base:
            return
        node: int | None = -self.base
        for token in tokens:
            node = self.find(node, token) if node is not None else None
        self.base += len(tokens)
        old, self._children, self._num_nodes = self._children, {}, 0
        if node is None or node not in old:
            return
        self._children[-self.base] = old[node]
        waiting = list(old[node].values())
        while waiting:
            kept = waiting.pop()
            self._num_nodes += 1
            if kept in old:
                self._children[kept] = old[kept]
                waiting.extend(old[kept].values())


class SentTrees:
    """The SentTree of each open session, for all that propose for it."""

    __slots__ = ("_trees",)

    def __init__(self) -> None:
        self._trees: dict[int, SentTree] = {}

    def open(self, session: int, base: int) -> SentTree:
        """The empty tree of a session that begins, or begins again, at ``base``: the same for all who ask."""
        tree = self._trees.get(session)
        if tree is None or tree.base != base or len(tree):
            tree = self._trees[session] = SentTree(base, 1 if tree is None else tree.next_id)
        return tree

    def of(self, session: int) -> SentTree:
        """The tree of an open session."""
        return self._trees[session]

    def close(self, session: int) -> None:
        """Forget a session; an unknown one is fine."""
        self._trees.pop(session, None)


@dataclass(slots=True)
class Nodes:
    """Nodes as ``messages.Growth`` wants them."""

    ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)

    def growth(self, session: int, base: int, began_s: float) -> Growth:
        """The message. began_s: when drafting began, by ``time.perf_counter``."""
        return Growth(session, base, np.array(self.ids, np.int32), np.array(self.parents, np.int32),
                      np.array(self.tokens, np.int32), np.array(self.scores, np.float32), perf_counter() - began_s)


def send(sources: Sequence[Iterator[Proposal]], most: int, sent: SentTree) -> Nodes:
    """The ``most`` best proposals of all sources that the target does not have, best first. They join ``sent``; what it
    holds already costs nothing.

    A source yields proposals from the best to the worst, parents before children. When it is asked for the next one,
    ``sent`` holds the one before; a source that is not asked again keeps its last proposal for another time.
    """
    nodes = Nodes()
    for score, parent, token in merge(*sources, key=_cost):
        if sent.find(parent, token) is not None:
            continue
        if len(nodes.ids) >= most or sent.full:
            break
        nodes.ids.append(sent.add(parent, token))
        nodes.parents.append(parent)
        nodes.tokens.append(token)
        nodes.scores.append(score)
    return nodes


def _cost(proposal: Proposal) -> float:
    return -proposal[0]
