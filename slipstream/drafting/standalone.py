"""The standalone drafter's network: any smaller model with the target's vocabulary.

Rules:
1. It reads tokens alone, so drafted KV is as good as committed KV and is kept when the draft was right.
2. The same ``ModelRunner`` as the target's runs it; it never learns that it drafts.

It knows nothing about sessions, trees or the target.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slipstream.choosing.sampling import Race
from slipstream.drafting.neural import Output
from slipstream.engine.batch import ForwardBatch
from slipstream.engine.kv import Slots
from slipstream.engine.runner import ModelRunner
from slipstream.protocol.messages import Features, FeatureSpec


class StandaloneNetwork:
    """A ``neural.Network`` over a whole causal model."""

    lag = 0
    hidden_size = 0
    features: FeatureSpec | None = None

    def __init__(self, runner: ModelRunner, vocabulary: torch.Tensor | None = None) -> None:
        """vocabulary: int64 [K] token ids of the logits' columns, where ``runner``'s model has a token map."""
        self._runner = runner
        self.vocabulary = vocabulary
        self.vocab_size = runner.config.vocab_size
        self.max_context = runner.config.max_context
        self.slots: Slots = runner.slots
        self.device: torch.device = runner.model.device
        self.race: Race | None = runner.race if vocabulary is None else None

    def read(self, features: Sequence[Features]) -> list[torch.Tensor]:
        """Nobody sends any: ``features`` is None."""
        return []

    def forward(self, batch: ForwardBatch) -> Output:
        """Logits of the wanted rows."""
        return Output(self._runner.forward(batch), None)
