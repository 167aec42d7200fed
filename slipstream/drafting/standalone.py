"""The standalone drafter's network: any smaller model with the target's vocabulary.

Rules:
1. It reads tokens alone, so drafted KV is as good as committed KV and is kept when the draft was right.
2. The same ``ModelRunner`` as the target's runs it; it never learns that it drafts.
3. A model that was trained to fill in masks (PARD: ``pard_token`` in its ``config.json``) reads some of them behind the
   newest token, and says as many tokens more in the same pass. Masks see what is before them and one another, causally;
   their keys and values are gone after the pass.
4. Rows of its vocabulary that no token has are padding, of which a target may have fewer: they are never proposed.

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

    lag = 0
    bridged = True
    hidden_size = 0
    features: FeatureSpec | None = None

    def __init__(self, runner: ModelRunner, masks: Masks | None = None, vocabulary: torch.Tensor | None = None,
                 lm_head: torch.Tensor | None = None, known: int = 0) -> None:
        """masks: of a model that fills them in; vocabulary, lm_head: int64 [K] token ids that are scored and their rows
        [K, H] of the model's, in any dtype and place; None: all are. known: tokens, where all are scored: columns
        behind them are padding; 0: there is none."""
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
        """Nobody sends any: ``features`` is None."""
        return []

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Output:
        """Logits of the wanted rows. With masks every segment wants its last row, and gets that row's block."""
        if self._masks is None:
            return Output(self._logits(batch), None)
        segments = range(len(batch.mask_lens))
        parts = [self._logits(self._masks.behind(batch, segments[first : first + AT_ONCE]))
                 for first in range(0, len(segments), AT_ONCE)]
        # The next forward of a model of ours may write where this one's logits are.
        logits = parts[0] if len(parts) == 1 else torch.cat([part.clone() for part in parts])
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
    """What stands behind the newest token."""

    __slots__ = ("_scratch", "_token", "count")

    def __init__(self, token: int, count: int, num_slots: int) -> None:
        """count: of a block; num_slots: of the pool, behind which there are ``AT_ONCE * count`` for masks."""
        self._token, self.count = token, count
        self._scratch = np.arange(num_slots, num_slots + AT_ONCE * count).reshape(AT_ONCE, count)

    def behind(self, batch: ForwardBatch, segments: range) -> ForwardBatch:
        """Some segments of ``batch`` with masks behind each; logits of its last row and of the masks."""
        builder, host, entries = BatchBuilder(), batch.host, batch.listed
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
