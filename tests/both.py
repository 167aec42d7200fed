"""Two drafters that are told and asked the same: whatever comes between, their trees are the same."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from slipstream.drafting.neural import NeuralDrafter
from slipstream.protocol.messages import Commit, Features, Growth, Open
from slipstream.protocol.requests import Sampling
from tests.tiny import VOCAB

MIXED = (Sampling(), Sampling(), Sampling(temperature=0.8, seed=3), Sampling(frequency_penalty=0.5))


class Both:
    """States are of ``dtype``; scores may differ by ``within``."""

    def __init__(self, drafters: Sequence[NeuralDrafter], width: int, dtype: torch.dtype, within: float) -> None:
        self.drafters = drafters
        self.width, self.dtype, self.within = width, dtype, within
        self.dice = np.random.default_rng(0)
        self.bases: dict[int, int] = {}

    def states(self, session: int, start: int, count: int) -> Features:
        rows = torch.from_numpy(self.dice.standard_normal((count, self.width))).to(self.dtype)
        name = str(self.dtype).removeprefix("torch.")
        return Features(session, start, rows.view(torch.uint8).numpy().tobytes(), count, name)

    def open(self, session: int, length: int, sampling: Sampling = MIXED[0]) -> None:
        tokens = self.dice.integers(VOCAB, size=length).astype(np.int32)
        features = self.states(session, 0, length - 1)
        self.bases[session] = length
        for drafter in self.drafters:
            drafter.open([Open(session, tokens, 1, sampling)])
            drafter.absorb([features])

    def commit(self, session: int, tokens: list[int], with_states: bool = True) -> None:
        features = self.states(session, self.bases[session] - 1, len(tokens))
        for drafter in self.drafters:
            drafter.commit([Commit(session, self.bases[session], np.array(tokens, np.int32))])
            drafter.absorb([features] if with_states else [])
        self.bases[session] += len(tokens)

    def grow(self, sessions: list[int], budgets: Sequence[int] = (), steps: int = 0) -> list[Growth]:
        budgets = budgets or [12] * len(sessions)
        found, right = (drafter.grow(sessions, budgets, steps) for drafter in self.drafters)
        assert len(found) == len(right)
        for one, other in zip(found, right, strict=True):
            assert one.tokens.tolist() == other.tokens.tolist() and one.parents.tolist() == other.parents.tolist()
            assert np.allclose(one.scores, other.scores, rtol=0, atol=self.within)
        return found

    def close(self) -> None:
        for drafter in self.drafters:
            drafter.close(list(self.bases))
            assert drafter.slots.num_free == drafter.slots.num_slots, "slots were lost"
