"""Records: a drafter's trees at every position of real answers, computed once, so that schedules can be compared by
simulation (``slipstream.simulate.replay``).

1. The target answers each question plainly and greedily. Trees never change an answer, so that is every schedule's.
2. At each position of an answer, behind the target's own states, the drafter that serves grows a tree best first, far
   wider than any schedule would: what a schedule would grow is in it, with what the head says of each node.

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
from slipstream.drafting.tree import SENT, GrowingTree
from slipstream.engine.runner import ModelRunner
from slipstream.protocol.messages import Growth

ROWS, FORWARDS = 32, 8  # nodes that are expanded at once, and how often, at each position
CHILDREN, LEAST = 64, -9.0  # of a node at most; a score below which nothing is kept
TOGETHER = 13  # questions


@dataclass(frozen=True, slots=True)
class Place:
    """A tree at one position: node 0 stands for the newest committed token. Scores are logarithms of chances, relative
    to the parent; -1 in ``first`` is a node whose children are not known."""

    tokens: NDArray[np.int32]
    scores: NDArray[np.float32]
    first: NDArray[np.int32]  # [N] where its children begin; best first
    count: NDArray[np.int32]  # [N] of its children

    def children(self, node: int) -> range:
        """Their numbers; none where they are not known."""
        first = int(self.first[node])
        return range(first, first + int(self.count[node])) if first >= 0 else range(0)


@dataclass(frozen=True, slots=True)
class Record:
    """An answer. ``places[i]``: where its first i + 1 tokens are committed."""

    answer: list[int]
    places: list[Place]


class Recording(NeuralDrafter):
    """Grows trees as one that runs ahead, without end, and proposes nothing. ``places``: of each session, so far."""

    def __init__(self, network: Network) -> None:
        # Wider than it may be where trees are sent.
        shape = GrowthSection.model_construct(num_steps=1 + FORWARDS, topk=CHILDREN, num_draft_tokens=CHILDREN)
        super().__init__("recording", network, shape, TOGETHER)
        self.places: dict[int, list[Place]] = defaultdict(list)

    def grow(self, ids: Sequence[int], budgets: Sequence[int], steps: int = 0) -> list[Growth]:
        """A place more for each."""
        for _ in range(1 + FORWARDS):
            super().grow(ids, [SENT * ROWS] * len(ids), 1)
        for session in ids:
            tree = self.tree(session)
            self.places[session].append(place_of(self._contexts[session].tokens[-1], tree))
            tree.ids, tree.num_sent = [0] * len(tree.ids), 0  # nobody has them: it begins anew behind the next commit
        return []

    def close(self, ids: Sequence[int]) -> None:
        """With a place behind the newest tokens."""
        self.grow(ids, [0] * len(ids))
        super().close(ids)


def place_of(root: int, tree: GrowingTree) -> Place:
    """The nodes of ``tree`` below the token ``root``, except very unlikely ones."""
    scores = np.array(tree.scores)
    kept = np.flatnonzero(scores >= LEAST)  # parents of what is kept are kept, too
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
    """Answer at most TOGETHER prompts with a target. network: of its drafter, with ``slots_for`` slots of each prompt;
    tokens: of an answer at most."""
    drafter = Recording(network)
    answers = Rounds(runner, drafter, tokens).answer(prompts, 1, Tally())
    return [Record(answer, drafter.places[session]) for session, answer in enumerate(answers, 1)]


def slots_for(prompt: int, tokens: int) -> int:
    """Of a network, for a prompt of so many tokens and its answer."""
    return prompt + tokens + ROWS * FORWARDS
