"""A drafter that has read the answer beforehand: as good as a drafter can be, at no cost. For demonstrations and tests
of what surrounds a drafter, never for figures of what drafting gains.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from slipstream.protocol.messages import Commit, Features, Growth, Open
from slipstream.protocol.tree import MAX_NODES


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
        self._at: dict[int, tuple[int, int]] = {}  # session -> (base, answer tokens so far)
        self._ids = itertools.count(1)

    def open(self, opens: Sequence[Open]) -> list[int]:
        for opened in opens:
            self._at[opened.session] = len(opened.tokens), len(opened.tokens) - opened.prompt_len
        return []

    def absorb(self, features: Sequence[Features]) -> None:
        pass

    def commit(self, commits: Sequence[Commit]) -> None:
        for commit in commits:
            base, done = self._at[commit.session]
            self._at[commit.session] = base + len(commit.tokens), done + len(commit.tokens)

    def grow(self, ids: Sequence[int], budgets: Sequence[int], steps: int = 0) -> list[Growth]:
        return [self._chain(session, budget) for session, budget in zip(ids, budgets, strict=True)]

    def close(self, ids: Sequence[int]) -> None:
        for session in ids:
            self._at.pop(session, None)

    def _chain(self, session: int, budget: int) -> Growth:
        base, done = self._at[session]
        tokens = self._answer[done : done + min(budget, self._length)]
        nodes = [next(self._ids) for _ in tokens]
        return Growth(session, base, np.array(nodes, np.int32), np.array([-base, *nodes][: len(nodes)], np.int32),
                      np.array(tokens, np.int32), -0.1 * np.arange(1, len(nodes) + 1, dtype=np.float32))
