"""RadixCache: prompts that were computed once, kept by their tokens so that the next one with the same start is cheap.

Rules:
1. A tree of runs: an edge carries tokens and the slots of their KV, one each; children of a node differ in their first
   token.
2. The cache owns every slot in it. ``insert`` hands ownership over; what the cache holds already is freed.
3. A locked node and everything above it stays; the rest may be evicted, leaves first, the least recently used first.

It knows nothing about KV, sessions or models. Idea: radix attention (SGLang, arXiv 2312.07104), page size one.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from slipstream.engine.kv import Slots

Indices = NDArray[np.int64]


@dataclass(slots=True, eq=False)
class Node:
    """A run of tokens below its parent."""

    parent: Node | None
    tokens: Indices  # int64 [n]
    slots: Indices  # int64 [n]
    locks: int = 0  # of this node and everything below it
    used: int = 0
    children: dict[int, Node] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix of some tokens. ``slots`` int64 [length]; ``node`` is what to lock."""

    length: int
    slots: Indices
    node: Node


class RadixCache:
    """Belongs to the engine thread, as the slots do."""

    __slots__ = ("_clock", "_num_locked", "_num_slots", "_root", "_slots")

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._clear_tree()

    def __len__(self) -> int:
        """Slots that the cache owns."""
        return self._num_slots

    @property
    def num_evictable(self) -> int:
        """Slots that ``evict`` could free now."""
        return self._num_slots - self._num_locked

    def match(self, tokens: ArrayLike) -> Match:
        """The longest cached prefix of tokens [n]. Lock it before anything else may evict."""
        node, length = self._descend(np.asarray(tokens, np.int64))
        runs = [n.slots for n in _path(node)]
        return Match(length, np.concatenate(runs[::-1]) if runs else np.zeros(0, np.int64), node)

    def lock(self, match: Match) -> None:
        """Keep the matched prefix until ``unlock``; may be called more than once."""
        for node in _path(match.node):
            self._num_locked += len(node.slots) if node.locks == 0 else 0
            node.locks += 1

    def unlock(self, match: Match) -> None:
        for node in _path(match.node):
            assert node.locks > 0, "unlocked more often than locked"
            node.locks -= 1
            self._num_locked -= len(node.slots) if node.locks == 0 else 0

    def insert(self, tokens: ArrayLike, slots: Indices) -> None:
        """Give ``slots`` (one for each token, KV written) to the cache. Where it holds a token already, the given slot
        is freed, unless it is that very slot; the caller must not use any of them afterwards without a lock."""
        tokens = np.asarray(tokens, np.int64)
        assert len(tokens) == len(slots)
        node, length = self._descend(tokens)
        held = [n.slots for n in _path(node)]
        given, mine = slots[:length], np.concatenate(held[::-1]) if held else slots[:0]
        self._slots.free(given[given != mine])
        if length < len(tokens):
            node.children[int(tokens[length])] = Node(node, tokens[length:].copy(), slots[length:].copy(),
                                                      used=self._clock)
            self._num_slots += len(tokens) - length

    def evict(self, n: int) -> int:
        """Free ``n`` slots, or what is not locked: the ends of the least recently used runs. Returns how many."""
        leaves = [(node.used, id(node), node) for node in self._nodes() if not node.children and not node.locks]
        heapq.heapify(leaves)
        freed = 0
        while leaves and freed < n:
            node = heapq.heappop(leaves)[2]
            freed += self._trim(node, n - freed)
            parent = node.parent
            if parent is not None and parent is not self._root and not parent.children and not parent.locks:
                heapq.heappush(leaves, (parent.used, id(parent), parent))
        return freed

    def clear(self) -> None:
        """Free everything. Nothing may be locked."""
        assert not any(node.locks for node in self._nodes()), "a locked prefix would be lost"
        for slots in self.owned():
            self._slots.free(slots)
        self._clear_tree()

    def owned(self) -> list[Indices]:
        """The slots of every node, for ``Slots.check``."""
        return [node.slots for node in self._nodes()]

    def _clear_tree(self) -> None:
        self._root = Node(None, np.zeros(0, np.int64), np.zeros(0, np.int64))
        self._clock = 0
        self._num_slots = 0
        self._num_locked = 0

    def _descend(self, tokens: Indices) -> tuple[Node, int]:
        # The node at which the longest common prefix ends; splits a run where the prefix ends inside it.
        self._clock += 1
        node, at = self._root, 0
        while at < len(tokens) and (child := node.children.get(int(tokens[at]))) is not None:
            common = _common(child.tokens, tokens[at:])
            node = child if common == len(child.tokens) else _split(child, common)
            node.used = self._clock
            at += common
            if node is not child:
                break
        return node, at

    def _trim(self, node: Node, n: int) -> int:
        # Free the last n slots of a leaf; the leaf itself when nothing is left.
        assert node.parent is not None and n > 0
        keep = max(0, len(node.slots) - n)
        gone = node.slots[keep:]
        self._slots.free(gone)
        self._num_slots -= len(gone)
        if keep == 0:
            del node.parent.children[int(node.tokens[0])]
        node.tokens, node.slots = node.tokens[:keep], node.slots[:keep]
        return len(gone)

    def _nodes(self) -> Iterator[Node]:
        pending = list(self._root.children.values())
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.children.values())


def _path(node: Node) -> Iterator[Node]:
    # From the node up, without the root.
    while node.parent is not None:
        yield node
        node = node.parent


def _common(a: Indices, b: Indices) -> int:
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


def _split(node: Node, at: int) -> Node:
    # The upper part is the new node: matches that hold ``node`` keep naming the whole prefix.
    assert node.parent is not None
    upper = Node(node.parent, node.tokens[:at], node.slots[:at], node.locks, node.used, {int(node.tokens[at]): node})
    node.parent.children[int(node.tokens[0])] = upper
    node.parent, node.tokens, node.slots = upper, node.tokens[at:], node.slots[at:]
    return upper
