"""TreeGrowth: how a draft model's tree grows, level by level, without the model.

Rules:
1. The frontier are the nodes whose children come next: the root at first, then the ``topk`` best nodes of the newest
   level. Each gets up to ``topk`` children; all of them stay candidates (EAGLE-2, arXiv 2406.16858). topk = 1: a chain.
2. Scores are cumulative logs and never rise along a path, so the best n candidates are connected (``send``).
3. A node costs a forward only when it is expanded: S levels cost S - 1 forwards beyond the root's.
4. ``aim`` widens the frontier to ``AHEAD`` nodes of any level: a forward of few rows costs what one row costs, and what
   the target will ask for next is not known.
5. Growth goes on where it stopped: more levels and more ``send`` at the same base extend the same tree.
6. A tree that was kept below a commit may learn better of its root (``correct``); deeper nodes stay as they are.
7. Computed nodes stand in the KV list in the order in which they were expanded; bit j of an ancestor word is the j-th.

It knows nothing about logits, slots or sessions; it is plain Python on lists of at most a few hundred candidates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from math import isfinite

from slipstream.drafting.sent import Nodes, Proposal, SentTree, send
from slipstream.protocol.tree import MAX_NODES

AHEAD = 8
ROOT = -1  # the root among candidates, which are counted from 0
Children = tuple[Sequence[int], Sequence[float]]  # tokens of one node's children, best first, and their log scores


@dataclass(slots=True)
class TreeGrowth:
    """The candidates of one session's tree at one base."""

    topk: int
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)  # candidates, or ROOT
    scores: list[float] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)  # 1 below the root
    ids: list[int] = field(default_factory=list)  # 0: the target does not have it
    frontier: list[int] = field(default_factory=lambda: [ROOT])
    computed: list[int] = field(default_factory=list)  # expanded candidates, the root not counted
    most: int = MAX_NODES  # of them

    def expand(self, children: Sequence[Children]) -> None:
        """Give each frontier node its children (log scores relative to the node) and move the frontier down a level.
        What is not a finite score is no child: a token that the filters forbid."""
        assert len(children) == len(self.frontier)
        first = len(self.tokens)
        for node, (tokens, scores) in zip(self.frontier, children, strict=True):
            above = 0.0 if node == ROOT else self.scores[node]
            kept = [(token, above + min(0.0, score))
                    for token, score in zip(tokens[:self.topk], scores[:self.topk], strict=True) if isfinite(score)]
            self.tokens += [token for token, _ in kept]
            self.scores += [score for _, score in kept]
            self.parents += [node] * len(kept)
            self.depths += [1 if node == ROOT else self.depths[node] + 1] * len(kept)
        self.ids += [0] * (len(self.tokens) - first)
        self.computed += [node for node in self.frontier if node != ROOT]
        level = sorted(range(first, len(self.tokens)), key=self.scores.__getitem__, reverse=True)
        room = max(0, self.most - len(self.computed))
        self.frontier = sorted(level[:min(self.topk, room)])

    def correct(self, tokens: Sequence[int], scores: Sequence[float]) -> None:
        """Give the root the children that it should have had, now that more is known of it: those that are here move
        to their new score with all that stands below them, others join, and none goes."""
        here = {self.tokens[node]: node for node, parent in enumerate(self.parents) if parent == ROOT}
        gains = [0.0] * len(self.tokens)
        for token, score in zip(tokens[:self.topk], scores[:self.topk], strict=True):
            if isfinite(score) and int(token) in here:
                gains[here[int(token)]] = min(0.0, score) - self.scores[here[int(token)]]
            elif isfinite(score):
                self.tokens.append(int(token))
                self.parents.append(ROOT)
                self.scores.append(min(0.0, score))
                self.depths.append(1)
                self.ids.append(0)
        for node, gain in enumerate(gains):  # a parent stands before its children
            gains[node] = gain if self.parents[node] == ROOT else gains[self.parents[node]]
            self.scores[node] += gains[node]
        self.aim()

    def depth(self) -> int:
        """Of the deepest node of the frontier; 0 at the root. 0 too when nothing is left to expand."""
        return max((self.depths[node] for node in self.frontier if node != ROOT), default=0)

    def path(self, node: int) -> list[int]:
        """Draft tokens from below the root to ``node``, itself included."""
        tokens = []
        while node != ROOT:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def words(self) -> list[int]:
        """Ancestor words of the frontier over the computed nodes followed by the frontier itself."""
        places = {node: place for place, node in enumerate([*self.computed, *self.frontier])}
        words = []
        for node in self.frontier:
            word = 0
            while node != ROOT:
                word |= 1 << places[node]
                node = self.parents[node]
            words.append(word)
        return words

    def above(self, node: int) -> list[int]:
        """Places in ``computed`` of the nodes between the root and ``node``, both left out."""
        places = {found: place for place, found in enumerate(self.computed)}
        found: list[int] = []
        while (node := self.parents[node]) != ROOT:
            found.append(places[node])
        return found[::-1]

    def proposals(self, sent: SentTree) -> Iterator[Proposal]:
        """The candidates that the target does not have, best first, which is parents first (see ``sent.send``)."""
        unsent = [node for node, node_id in enumerate(self.ids) if node_id == 0]
        for node in sorted(unsent, key=self.scores.__getitem__, reverse=True):  # the earlier first among equals
            parent = -sent.base if self.parents[node] == ROOT else self.ids[self.parents[node]]
            yield self.scores[node], parent, self.tokens[node]
            found = sent.find(parent, self.tokens[node])
            assert found is not None
            self.ids[node] = found

    def send(self, most: int, sent: SentTree) -> Nodes:
        """The ``most`` best candidates that the target does not have."""
        return send([self.proposals(sent)], most, sent)

    def follow(self, tokens: Sequence[int]) -> list[int]:
        """Places in ``computed`` of the nodes along ``tokens`` from the root, as far as they were computed."""
        below = {(self.parents[node], self.tokens[node]): (place, node) for place, node in enumerate(self.computed)}
        places: list[int] = []
        node = ROOT
        for token in tokens:
            found = below.get((node, int(token)))
            if found is None:
                break
            places.append(found[0])
            node = found[1]
        return places

    def aim(self) -> None:
        """Point the frontier at the ``AHEAD`` best candidates of any level that have no children yet. Growth ahead of
        the target goes where it is likely to be needed, not only down the newest level."""
        if not self.tokens:
            return
        expanded = set(self.computed)
        waiting = [node for node in range(len(self.tokens)) if node not in expanded]
        room = max(0, self.most - len(self.computed))
        self.frontier = sorted(nlargest(min(AHEAD, room), waiting, key=self.scores.__getitem__))

    def reroot(self, tokens: Sequence[int]) -> tuple[list[int], list[int]] | None:
        """Keep what stands below committed ``tokens``. None, and nothing is changed, if the last of them was not
        expanded here; else places in ``computed`` as it was: of the committed nodes, and of the kept ones."""
        path = self.follow(tokens)
        if len(path) < len(tokens):
            return None
        root = self.computed[path[-1]]
        inside = {root}
        for node in range(root + 1, len(self.tokens)):  # a parent stands before its children
            if self.parents[node] in inside:
                inside.add(node)
        kept = sorted(inside - {root})
        places = [place for place, node in enumerate(self.computed) if node != root and node in inside]
        renumbered = {root: ROOT, **{node: number for number, node in enumerate(kept)}}
        score, depth = self.scores[root], self.depths[root]
        self.computed = [renumbered[self.computed[place]] for place in places]
        self.parents = [renumbered[self.parents[node]] for node in kept]
        self.tokens = [self.tokens[node] for node in kept]
        self.scores = [self.scores[node] - score for node in kept]
        self.depths = [self.depths[node] - depth for node in kept]
        self.ids = [self.ids[node] for node in kept]
        self.frontier = []
        self.aim()
        return path, places
