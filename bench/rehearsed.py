"""A drafter that has read the answer beforehand: as good as a drafter can be, at no cost. For demonstrations and tests
of what surrounds a drafter, never for figures of what drafting gains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from slipstream.drafting.tree import ROOT, GrowingTree
from slipstream.protocol.messages import Commit, Features, Growth, Open
from slipstream.protocol.tree import MAX_NODES


@dataclass(slots=True)
class Reading:
    done: int  # answer tokens so far
    tree: GrowingTree


class RehearsedDrafter:
    """Proposes the next tokens of ``answer`` as a chain, whatever was committed so far."""

    name = "rehearsed"
    features = None
    vocab_size = 0
    hidden_size = 0
    max_context = 1 << 20
    max_nodes = MAX_NODES - 1
    max_sessions = 64

    def __init__(self, answer: Sequence[int], length: int) -> None:
        self._answer = list(answer)
        self._length = length  # of a chain
        self._at: dict[int, Reading] = {}

    def open(self, opens: Sequence[Open]) -> list[int]:
        for opened in opens:
            known, base = self._at.get(opened.session), len(opened.tokens)
            tree = GrowingTree(base, next_id=1 if known is None else known.tree.next_id)
            self._at[opened.session] = Reading(base - opened.prompt_len, tree)
        return []

    def absorb(self, features: Sequence[Features]) -> None:
        pass

    def commit(self, commits: Sequence[Commit]) -> None:
        for commit in commits:
            reading = self._at[commit.session]
            reading.done += len(commit.tokens)
            reading.tree.commit(commit.tokens.tolist(), lasting=False)

    def grow(self, ids: Sequence[int], budgets: Sequence[int], steps: int = 0) -> list[Growth]:
        return [self._chain(session, budget) for session, budget in zip(ids, budgets, strict=True)]

    def tree(self, session: int) -> GrowingTree:
        return self._at[session].tree

    def close(self, ids: Sequence[int]) -> None:
        for session in ids:
            self._at.pop(session, None)

    def _chain(self, session: int, budget: int) -> Growth:
        began_s, reading, node = perf_counter(), self._at[session], ROOT
        for depth, token in enumerate(self._answer[reading.done :][: min(budget, self._length)], start=1):
            node = reading.tree.propose(node, token, -0.1 * depth)
        return reading.tree.growth(session, budget, began_s)
