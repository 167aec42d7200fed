"""A drafter for tests: a copy of the target with noise on its weights, and a switch that makes its proposals bad."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

from slipstream.drafters.base import Drafter
from slipstream.messages import Commit, Features, FeatureSpec, Growth, Open


class SwitchableDrafter:
    """Any drafter with a switch: while ``bad`` is set, every token that it proposes is another one."""

    def __init__(self, inner: Drafter, vocab_size: int) -> None:
        self._inner = inner
        self._vocab = vocab_size
        self.bad = threading.Event()
        self.name = f"switchable-{inner.name}"
        self.features: FeatureSpec | None = inner.features
        self.vocab_size = inner.vocab_size
        self.hidden_size = inner.hidden_size
        self.max_context = inner.max_context
        self.max_nodes = inner.max_nodes
        self.max_sessions = inner.max_sessions

    def open(self, opens: Sequence[Open]) -> list[int]:
        return self._inner.open(opens)

    def absorb(self, features: Sequence[Features]) -> None:
        self._inner.absorb(features)

    def commit(self, commits: Sequence[Commit]) -> None:
        self._inner.commit(commits)

    def grow(self, ids: Sequence[int], budgets: Sequence[int]) -> list[Growth]:
        growths = self._inner.grow(ids, budgets)
        if not self.bad.is_set():
            return growths
        # All siblings move by the same amount, so they stay distinct.
        return [replace(growth, tokens=(growth.tokens + 1) % self._vocab) for growth in growths]

    def close(self, ids: Sequence[int]) -> None:
        self._inner.close(ids)
