"""The EAGLE-3 head as a network: one decoder layer that reads a token and the target's state before it.

Rules:
1. The row of the token at position p reads (embedding of that token, state at p - 1) and predicts the token at p + 1.
   Its rotary position is p - 1, as where heads are trained: inputs shifted left by one.
2. Target states are projected once, by ``fc``: when they arrive (behind a norm, if the head has one there), or by the
   target before it sends them, to which the spec hands the weights over: a third of the bytes. Below the newest token
   the layer's own output, before the final norm, takes their place; ``fc`` is not applied to it.
3. States come in the dtype of the wire and are cast to the head's at this edge; target and head dtypes differ freely.

It knows nothing about sessions, trees or files. Source: arXiv 2503.01840.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from slipstream.drafters.checkpoint import EagleHead
from slipstream.drafters.layout import LAYER
from slipstream.drafters.network import Output, apart, wire_rows
from slipstream.engine.backend import Attend, Attention
from slipstream.engine.batch import ForwardBatch
from slipstream.engine.decoder import DecoderLayer, Step
from slipstream.engine.flashinfer import attention_for
from slipstream.engine.halves import EAGER, Halves
from slipstream.engine.int8 import rounded
from slipstream.engine.kv import KVPool, Slots
from slipstream.engine.layers import Linear, Rope, Tensors, rms_norm
from slipstream.engine.model import ModelConfig, dtype_of
from slipstream.engine.native import native_or
from slipstream.engine.native.decoder import NativeBlock, NativeHead
from slipstream.engine.native.program import Team
from slipstream.messages import Features, FeatureSpec, Projection


class EagleNetwork:
    """A ``network.Network`` over an EAGLE-3 head."""

    lag = 1
    keeps = True

    def __init__(self, head: EagleHead, dtype: str, device: torch.device, num_slots: int,
                 project: bool = False, halves: Halves = EAGER, attention: str = "auto",
                 kernels: str = "torch", spare_slots: int = 0, whole: bool = False) -> None:
        """dtype: of weights, KV and features on the wire; project: let the target apply ``fc``, where no norm comes
        before it and rows get shorter by it; halves: how the layer runs; attention: see ``flashinfer.attention_for``;
        kernels: see ``native.native_or``; spare_slots: further slots of the pool (see ``levels``); whole: with kernels
        "native", matrices of whole numbers (see ``int8``). Raises ModelError for an unknown dtype."""
        kind = dtype_of(dtype)
        tensors = {name: t.to(device, kind) for name, t in head.tensors.items() if t.is_floating_point()}
        config = head.config
        self.vocab_size = config.vocab_size
        self.hidden_size = head.target_hidden_size
        self.max_context = config.max_context
        self._input_norm = tensors.get("input_norm.weight")
        self._fc_bias = tensors.get("fc.bias")
        width = len(head.taps) * head.target_hidden_size
        handed_over = project and self._input_norm is None and config.hidden_size < width
        self._fc = None if handed_over else Linear(tensors["fc.weight"])
        spec = (FeatureSpec(head.taps, config.hidden_size, dtype, projection_of(tensors["fc.weight"], dtype))
                if handed_over else FeatureSpec(head.taps, width, dtype))
        self.features: FeatureSpec | None = spec
        all_tokens = torch.equal(head.vocabulary, torch.arange(config.vocab_size))
        self.vocabulary = None if all_tokens else head.vocabulary.to(device)
        self.device = device
        self.slots = Slots(num_slots)
        self._pool = KVPool(1, num_slots + spare_slots, config.num_kv_heads, config.head_dim, kind, device)
        self._config = config
        self._spec = spec
        self._dtype = kind
        self._embedding = tensors["embed_tokens.weight"]
        self._token_norm = tensors[f"{LAYER}.input_layernorm.weight"]
        self._hidden_norm = tensors[f"{LAYER}.hidden_norm.weight"]
        self._norm_before_residual = head.norm_before_residual

        def native(team: Team) -> Body:
            return NativeBody(team, config, tensors, whole)

        self._body = native_or(kernels, kind, device, "head", native,
                               lambda: TorchBody(config, tensors, attention, halves))

    def linears(self) -> tuple[Linear, ...]:
        """The products of a step."""
        return self._body.linears()

    @torch.inference_mode()
    def read(self, features: Sequence[Features]) -> list[torch.Tensor]:
        """Rows of the wire, already checked against ``features``, through ``fc``: [M, H] for each."""
        rows = wire_rows(features, self._spec, self.device, self._dtype)
        if self._input_norm is not None:
            rows = rms_norm(rows, self._input_norm, self._config.norm_eps)
        if self._fc is not None:
            rows = self._fc(rows)
        return apart(rows if self._fc_bias is None else rows + self._fc_bias, features)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Output:
        """``batch.features`` [T, H]: projected target states, or this head's own states."""
        assert batch.features is not None
        residual, read = self._inputs(batch.tokens, batch.features)
        out, logits = self._body(batch, self._pool, residual, read)
        return Output(logits, out)

    @property
    def attention(self) -> Attention | None:
        """Of a layer that runs on torch."""
        return self._body.attention if isinstance(self._body, TorchBody) else None

    @property
    def pool_slots(self) -> int:
        return self._pool.num_slots

    @property
    def state_type(self) -> tuple[int, torch.dtype]:
        return self._config.hidden_size, self._dtype

    def level(self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, states: torch.Tensor,
              attend: Attend) -> Output:
        """See ``levels.LevelNetwork``; of a layer that runs on torch."""
        assert isinstance(self._body, TorchBody)
        residual, read = self._inputs(tokens, states)
        out, logits = self._body.run(self._body.step(positions, slots, attend), self._pool, residual, read)
        return Output(logits, out)

    def _inputs(self, tokens: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """tokens [T], states [T, H] -> what the layer adds to [T, H], and what it reads [T, 2 H]."""
        eps = self._config.norm_eps
        token = rms_norm(F.embedding(tokens, self._embedding), self._token_norm, eps)
        state_normed = rms_norm(state, self._hidden_norm, eps)
        return state_normed if self._norm_before_residual else state, torch.cat((token, state_normed), -1)


class Body(Protocol):
    """The layer of a head, the final norm and the head's ``lm_head``."""

    def linears(self) -> tuple[Linear, ...]:
        """The products that may be replaced."""
        ...

    def __call__(self, batch: ForwardBatch, pool: KVPool, residual: torch.Tensor,
                 read: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """residual [T, H], read [T, 2 H] -> of the rows with logits: states [R, H], logits [R, V] in float32 (float64
        of a float64 head)."""
        ...


class TorchBody:
    def __init__(self, config: ModelConfig, tensors: Tensors, attention: str, halves: Halves) -> None:
        """attention, halves: as in ``EagleNetwork``."""
        self._norm = tensors["norm.weight"]
        self._dtype, self._eps = self._norm.dtype, config.norm_eps
        self._layer = DecoderLayer(config, tensors, LAYER, in_features=2 * config.hidden_size, halves=halves)
        self._lm_head = Linear(tensors["lm_head.weight"])
        self._rope = Rope(config, self._dtype, self._norm.device)
        self.attention = attention_for(attention, config, self._dtype, self._norm.device)

    def linears(self) -> tuple[Linear, ...]:
        return *self._layer.linears(), self._lm_head

    def __call__(self, batch: ForwardBatch, pool: KVPool, residual: torch.Tensor,
                 read: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.run(Step.of(batch, self._rope, self.attention), pool, residual, read, batch.logit_rows)

    def step(self, positions: torch.Tensor, slots: torch.Tensor, attend: Attend) -> Step:
        return Step(positions, slots, self._rope, attend)

    def run(self, step: Step, pool: KVPool, residual: torch.Tensor, read: torch.Tensor,
            wanted: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows that are planned; wanted: int64 [R], None for all."""
        out = self._layer(residual, step, pool.kv[0], read)
        out = out if wanted is None else out.index_select(0, wanted)
        logits: torch.Tensor = self._lm_head(rms_norm(out, self._norm, self._eps))
        return out, logits.to(torch.promote_types(self._dtype, torch.float32))


class NativeBody:
    def __init__(self, team: Team, config: ModelConfig, tensors: Tensors, whole: bool) -> None:
        """whole: as in ``EagleNetwork``."""
        self._block = NativeBlock(team, config, tensors, LAYER, "norm.weight", 2 * config.hidden_size, whole)
        lm_head = tensors["lm_head.weight"]
        self._lm_head = NativeHead(team, rounded(lm_head) if whole else lm_head)
        self._rope = Rope(config, torch.float32, torch.device("cpu"))

    def linears(self) -> tuple[Linear, ...]:
        return ()

    def __call__(self, batch: ForwardBatch, pool: KVPool, residual: torch.Tensor,
                 read: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, normed = self._block(residual, read, batch, pool, self._rope)
        return out.index_select(0, batch.logit_rows), self._lm_head(normed.index_select(0, batch.logit_rows))


def projection_of(weight: torch.Tensor, dtype: str) -> Projection:
    """weight [H, F] in ``dtype``, as it is handed to a target."""
    content = weight.cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return Projection(weight.shape[0], weight.shape[1], dtype, hashlib.sha256(content).digest(), content)
