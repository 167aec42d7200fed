"""The EAGLE-1 and EAGLE-2 head as a network: one decoder layer that continues the target's last state.

Rules:
1. The row of the token at position p reads ``fc`` of (embedding of that token, state at p - 1) and predicts the token
   at p + 1. Its rotary position is p - 1, as where heads are trained: inputs shifted left by one.
2. The layer has no input norm and is followed by none: its output is a guess of the target's state after the final
   norm, so the target's lm_head makes logits of it, and below the newest token it takes the target state's place.
3. States come in the dtype of the wire and are cast to the head's at this edge; target and head dtypes differ freely.

It knows nothing about sessions, trees or files. Source: arXiv 2401.15077, arXiv 2406.16858.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from slipstream.drafting.heads.eagle2_checkpoint import Eagle2Head
from slipstream.drafting.heads.layout import LAYER
from slipstream.drafting.network import Output, apart, wire_rows
from slipstream.engine.batch import ForwardBatch
from slipstream.engine.flashinfer import attention_for
from slipstream.engine.kv import KVPool, Slots
from slipstream.engine.model import dtype_of
from slipstream.engine.ops.layer import DecoderLayer, LayerOps, LayerWeights, Step, linear
from slipstream.engine.ops.linear import Linear
from slipstream.engine.ops.rope import Rope
from slipstream.engine.ops.specification import TORCH
from slipstream.protocol.messages import Features, FeatureSpec


class Eagle2Network:
    """A ``network.Network`` over an EAGLE-1 or EAGLE-2 head."""

    lag = 1

    def __init__(self, head: Eagle2Head, dtype: str, device: torch.device, num_slots: int,
                 ops: LayerOps = TORCH) -> None:
        """dtype: of weights, KV and features on the wire; ops: how the layer runs. Raises ModelError for an unknown
        dtype."""
        kind = dtype_of(dtype)
        tensors = {name: t.to(device, kind) for name, t in head.tensors.items() if t.is_floating_point()}
        config = head.config
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.max_context = config.max_context
        self.vocabulary = None if head.vocabulary is None else head.vocabulary.to(device)
        self.device = device
        self.slots = Slots(num_slots)
        spec = FeatureSpec((head.num_target_layers,), config.hidden_size, dtype)
        self.features: FeatureSpec | None = spec
        self._spec = spec
        self._pool = KVPool(1, num_slots, config.num_kv_heads, config.head_dim, kind, device)
        self._config = config
        self._dtype = kind
        self._embedding = head.embedding.to(device, kind)
        self._fc = Linear(tensors["fc.weight"], tensors.get("fc.bias"))
        self._layer = DecoderLayer(LayerWeights.read(config, tensors, LAYER, linear, input_norm=False), ops)
        self._lm_head = Linear(head.lm_head.to(device, kind))
        self._rope = Rope(config, kind, device)
        self._attention = attention_for(config, kind, device)

    def linears(self) -> tuple[Linear, ...]:
        """The products of a step."""
        return self._fc, *self._layer.linears(), self._lm_head

    @torch.inference_mode()
    def read(self, features: Sequence[Features]) -> list[torch.Tensor]:
        """Rows of the wire, already checked against ``features``: [M, H] for each."""
        return apart(wire_rows(features, self._spec, self.device, self._dtype), features)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Output:
        """``batch.features`` [T, H]: target states, or this head's own."""
        assert batch.features is not None
        step = Step.of(batch, self._rope, self._attention)
        token = F.embedding(batch.tokens, self._embedding)
        out = self._layer(self._fc(torch.cat((token, batch.features), -1)), step, self._pool.kv[0])
        out = out.index_select(0, batch.logit_rows)
        return Output(self._lm_head(out).to(torch.promote_types(self._dtype, torch.float32)), out)
