"""Records: a drafter's tree at every position of real answers, computed once. Simulations then compare schedules
without a model (``slipstream.simulate.replay``).

1. The target answers each question greedily and without drafts. Trees never change an answer, so every schedule gives
   this one.
2. At each position of an answer the drafter grows a tree from the target's states, best first and far wider than any
   schedule would. So each schedule's tree is a part of it, and each node has the head's score.

It knows nothing about schedules, devices or times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.base.config import GrowthSection
from slipstream.drafting.network import Network
from slipstream.drafting.neural import NeuralDrafter
from slipstream.drafting.rounds import Rounds, Tally
from slipstream.drafting.tree import SENT_PER_ROW, GrowingTree
from slipstream.engine.runner import ModelRunner
from slipstream.protocol.messages import Growth

ROWS, FORWARDS = 32, 8  # nodes expanded in one forward, and forwards at each position
MAX_CHILDREN, MIN_SCORE = 64, -9.0  # children of a node; score of a node that is kept
MAX_PROMPTS = 13  # answered at once


@dataclass(frozen=True, slots=True)
class Place:
    """A tree of N nodes at one position; node 0 is the newest committed token. Scores are log chances relative to the
    parent; -1 in ``first`` means that the node was not expanded."""

    tokens: NDArray[np.int32]
    scores: NDArray[np.float32]
    first: NDArray[np.int32]  # [N] where its children begin; best first
    count: NDArray[np.int32]  # [N] of its children

    def children(self, node: int) -> range:
        """The numbers of the node's children; empty where it was not expanded."""
        first = int(self.first[node])
        return range(first, first + int(self.count[node])) if first >= 0 else range(0)


@dataclass(frozen=True, slots=True)
class Record:
    """An answer. ``places[i]``: the tree after its first i + 1 tokens."""

    answer: list[int]
    places: list[Place]


class Recording(NeuralDrafter):
    """Grows wide trees, keeps each as a Place in ``places`` (by session), and proposes nothing to the target."""

    def __init__(self, network: Network) -> None:
        # Not validated: wider than the limit for trees that are sent.
        shape = GrowthSection.model_construct(num_steps=1 + FORWARDS, topk=MAX_CHILDREN, num_draft_tokens=MAX_CHILDREN)
        super().__init__("recording", network, shape, MAX_PROMPTS)
        self.places: dict[int, list[Place]] = defaultdict(list)

    def grow(self, ids: Sequence[int], budgets: Sequence[int], steps: int = 0) -> list[Growth]:
        """Append the tree at the newest token to ``places`` of each session. Returns no growth."""
        for _ in range(1 + FORWARDS):
            super().grow(ids, [SENT_PER_ROW * ROWS] * len(ids), 1)
        for session in ids:
            tree = self.tree(session)
            self.places[session].append(place_of(self._contexts[session].tokens[-1], tree))
            tree.ids, tree.num_sent = [0] * len(tree.ids), 0  # nothing was sent: a new tree begins at the next commit
        return []

    def close(self, ids: Sequence[int]) -> None:
        """Append the last trees, then forget the sessions."""
        self.grow(ids, [0] * len(ids))
        super().close(ids)


def place_of(root: int, tree: GrowingTree) -> Place:
    """``tree`` below the token ``root``, without nodes whose score is below ``MIN_SCORE``."""
    scores = np.array(tree.scores)
    kept = np.flatnonzero(scores >= MIN_SCORE)  # parents of what is kept are kept, too
    numbers = np.zeros(1 + len(scores), np.int64)
    numbers[1 + kept] = 1 + np.arange(len(kept))
    above, totals = numbers[1 + np.array(tree.parents, np.int64)[kept]], np.concatenate(([0.0], scores[kept]))
    first = np.full(len(totals), -1, np.int32)
    parents, begins = np.unique(above, return_index=True)
    first[parents] = 1 + begins
    return Place(np.array([root, *np.array(tree.tokens)[kept]], np.int32),
                 np.concatenate(([0.0], totals[1:] - totals[above])).astype(np.float32), first,
                 np.bincount(above, minlength=len(totals)).astype(np.int32))


def record(runner: ModelRunner, network: Network, tokens: int, prompts: Sequence[Sequence[int]]) -> list[Record]:
    """Answer at most MAX_PROMPTS prompts with the target ``runner``, and record the trees of its drafter. network: the
    drafter's, with ``slots_for`` slots for each prompt; tokens: the longest answer. Raises CapacityError without
    enough slots."""
    drafter = Recording(network)
    answers = Rounds(runner, drafter, tokens).answer(prompts, 1, Tally())
    return [Record(answer, drafter.places[session]) for session, answer in enumerate(answers, 1)]


def slots_for(prompt: int, tokens: int) -> int:
    """Slots that a network needs for a prompt of ``prompt`` tokens and an answer of ``tokens``."""
    return prompt + tokens + ROWS * FORWARDS
