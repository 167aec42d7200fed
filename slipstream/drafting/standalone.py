"""The standalone drafter's network: any smaller model with the target's vocabulary.

Rules:
1. It reads only tokens, so the KV of an accepted draft token equals that of a committed one and is kept.
2. A ``ModelRunner`` runs it, as in the target; the runner needs no code for drafting.
3. A model trained to fill in masks (PARD: ``pard_token`` in its ``config.json``) reads some masks after the newest
   token and predicts one further token at each, in the same pass. A mask sees all rows before it, other masks included;
   the masks' keys and values are dropped after the pass.
4. Vocabulary rows without a token are padding. They are never proposed: the target may have fewer of them.

It knows nothing about sessions, trees or the target. Source of PARD: arXiv 2504.18583.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from slipstream.choosing.sampling import Race
from slipstream.drafting.block import BlockStates
from slipstream.drafting.network import Output
from slipstream.engine.batch import BatchBuilder, ForwardBatch
from slipstream.engine.kv import Slots
from slipstream.engine.ops.layer import Linear
from slipstream.engine.runner import ModelRunner
from slipstream.protocol.messages import Features, FeatureSpec

AT_ONCE = 8  # blocks of one forward


class StandaloneNetwork:
    """A ``network.Network`` over a whole causal model."""

    zero_fill = True
    hidden_size = 0
    features: FeatureSpec | None = None

    def __init__(self, runner: ModelRunner, masks: Masks | None = None, vocabulary: torch.Tensor | None = None,
                 lm_head: torch.Tensor | None = None, known: int = 0) -> None:
        """masks: for a model that fills them in. vocabulary, lm_head: int64 [K] token ids to score, and their rows
        [K, H] of the model's lm_head, any dtype and device; None: all tokens. known: number of real tokens where all
        are scored: columns from there on are padding; 0: there is no padding."""
        model = runner.model
        self._runner, self._masks, self._known = runner, masks, known or runner.config.vocab_size
        self._head = None if lm_head is None else Linear(lm_head.to(model.device, model.dtype))
        self.vocabulary = None if vocabulary is None else vocabulary.to(model.device)
        self.vocab_size = runner.config.vocab_size
        self.max_context = runner.config.max_context
        self.slots: Slots = runner.slots
        self.device: torch.device = model.device
        self.race: Race | None = runner.race if lm_head is None else None

    def read(self, features: Sequence[Features]) -> list[torch.Tensor]:
        """Never called with states: ``features`` is None."""
        return []

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Output:
        """Logits of the wanted rows. With masks only the last row of each segment may be wanted; it begins a block."""
        if self._masks is None:
            return Output(self._logits(batch), None)
        segments = range(len(batch.mask_lens))
        parts = [self._logits(self._masks.behind(batch, segments[first : first + AT_ONCE]))
                 for first in range(0, len(segments), AT_ONCE)]
        logits = parts[0] if len(parts) == 1 else torch.cat(parts)
        return Output(logits, None, BlockStates(1 + self._masks.count))

    @torch.inference_mode()
    def _logits(self, batch: ForwardBatch) -> torch.Tensor:
        if self._head is None:
            logits = self._runner.forward(batch)
            if self._known < self.vocab_size:
                logits[:, self._known :] = -torch.inf
            return logits
        logits = self._head(self._runner.states(batch).index_select(0, batch.logit_rows))
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


class Masks:
    """The mask rows of a block, which follow the newest token, and their KV slots."""

    __slots__ = ("_scratch", "_token", "count")

    def __init__(self, token: int, count: int, num_slots: int) -> None:
        """count: masks of a block; num_slots: of the pool, which has ``AT_ONCE * count`` further slots for masks."""
        self._token, self.count = token, count
        self._scratch = np.arange(num_slots, num_slots + AT_ONCE * count).reshape(AT_ONCE, count)

    def behind(self, batch: ForwardBatch, segments: range) -> ForwardBatch:
        """A batch of some ``segments`` of ``batch`` with masks after each; logits of its last row and of its masks."""
        builder, host, entries = BatchBuilder(), batch.host, batch.flat_kv_slots
        for place, segment in enumerate(segments):
            rows = slice(batch.q_indptr[segment], batch.q_indptr[segment + 1])
            before = batch.kv_indptr[segment + 1] - (rows.stop - rows.start)
            last = int(host.positions[rows.stop - 1])
            added = builder.add([*host.tokens[rows].tolist(), *[self._token] * self.count],
                                [*host.positions[rows].tolist(), *range(last + 1, last + 1 + self.count)],
                                [*host.slots[rows].tolist(), *self._scratch[place].tolist()],
                                entries[batch.kv_indptr[segment] : before], logits="none")
            builder.logit_rows += added[-1 - self.count :]
        return builder.build(batch.device)
