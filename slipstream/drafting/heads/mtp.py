"""Multi-token prediction (MTP) as a network: layers that were trained with the target to predict further ahead.

Rules:
1. The row of the token at position p reads (embedding of that token, state at p - 1), each normed, side by side in the
   family's order, and predicts the token at p + 1. Its rotary position is p - 1, as in the serving engines.
2. The target's state is the one AFTER its final norm, from which its logits come: a tap at its number of layers (see
   ``messages.FeatureSpec``). A wrong choice would only lower the acceptance, because the head norms its input. The
   technical reports do not say which state it is. After the norm: SGLang (``mimo_mtp``, ``deepseek_nextn``,
   ``glm4_moe_nextn``) and transformers (``MtpModel``, from ``hidden_states[-1]``) for all three families, vLLM 0.32 for
   two. Before it: vLLM 0.32 for MiMo. The code published with MiMo has the layer, but not its caller.
3. For draft tokens the head's own output replaces the target's state, likewise AFTER the head's final norm
   (``final_layernorm``, ``shared_head.norm``), as in SGLang, transformers, and vLLM for MiMo. vLLM long took DeepSeek's
   output before the norm: an early report on DeepSeek-R1, which took the target's state before its norm too, found
   slightly more tokens accepted; later ones on DeepSeek-R1 and GLM-5.2 found fewer. Not measured here.
4. With several layers, layer k reads the output of layer k - 1 for the row before, as in the DeepSeek-V3 report and in
   ``MtpModel``. So rows of committed tokens go through all layers, and the children of a node at depth d are predicted
   by layer d, or by the last layer. The first k rows of layer k have no row before them (``MtpModel`` leaves them out)
   and read zeros. Outputs are kept beside the KV, one row a slot.
5. States come in the dtype of the wire and are cast to the head's at this edge; target and head dtypes differ freely.

It knows nothing about sessions or files. Sources: arXiv 2412.19437 (DeepSeek-V3), 2505.07608 (MiMo).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from slipstream.choosing.sampling import Race
from slipstream.choosing.transfer import to_device
from slipstream.drafting.heads.mtp_checkpoint import MtpHead, MtpLayer
from slipstream.drafting.network import Output
from slipstream.engine.batch import ForwardBatch
from slipstream.engine.flashinfer import attention_for
from slipstream.engine.kv import Indices, KVPool, Slots
from slipstream.engine.model import ModelConfig
from slipstream.engine.ops.layer import (
    TORCH,
    DecoderLayer,
    LayerOps,
    LayerWeights,
    Linear,
    Rope,
    Step,
    linear,
    rms_norm,
)
from slipstream.engine.runner import FeatureReader
from slipstream.protocol.messages import FeatureSpec

RunLayer = Callable[[int, torch.Tensor], torch.Tensor]  # a layer's number and its input [T, H] -> its output [T, H]


class Layers(Protocol):
    """The decoder layers of a head: ``DecoderLayers``, or ``engine.hf.HFLayers`` for layers of the target's kind."""

    config: ModelConfig  # num_layers of them
    dtype: torch.dtype
    device: torch.device

    def begin(self, batch: ForwardBatch, pool: KVPool) -> RunLayer:
        """One forward. Layer i writes its KV to the pool's layer i."""
        ...


class DecoderLayers:
    """Layers of ``decoder.py``."""

    def __init__(self, config: ModelConfig, head: MtpHead, dtype: torch.dtype, device: torch.device,
                 ops: LayerOps = TORCH) -> None:
        """config: of the model that the layers are like; ops: how a layer runs. Raises ModelError."""
        prefixes = tuple(f"{layer.prefix}." for layer in head.layers)
        tensors = {name: t.to(device, dtype, copy=True) for name, t in head.tensors.items()
                   if name.startswith(prefixes)}
        self.config, self.dtype, self.device = replace(config, num_layers=len(head.layers)), dtype, device
        self._layers = [DecoderLayer(LayerWeights.from_tensors(config, tensors, layer.prefix, linear), ops)
                        for layer in head.layers]
        self._rope = Rope(config, dtype, device)
        self._attention = attention_for(config, dtype, device)

    def begin(self, batch: ForwardBatch, pool: KVPool) -> RunLayer:
        """See ``Layers``."""
        step = Step.of(batch, self._rope, self._attention)

        def run(number: int, x: torch.Tensor) -> torch.Tensor:
            layer = self._layers[number]
            return layer(x, layer.norm_input(x), step, pool.kv[number])[0]

        return run


class MtpNetwork:
    """A ``network.Network`` over the layers of a head."""

    zero_fill = True
    race: Race | None = None

    def __init__(self, head: MtpHead, layers: Layers, dtype: str, num_slots: int,
                 vocabulary: torch.Tensor | None = None) -> None:
        """dtype: of features on the wire; weights and KV are in that of ``layers``. vocabulary: int64 [K] token ids
        whose rows of the lm_head are kept (FR-Spec), None for all."""
        kind, device, config = layers.dtype, layers.device, layers.config
        self.vocab_size, self.hidden_size = head.vocab_size, head.hidden_size
        self.max_context = config.max_context
        spec = FeatureSpec((head.target_layers,), head.hidden_size, dtype)
        self.features: FeatureSpec | None = spec
        self.read = FeatureReader(spec, device, kind)
        self.vocabulary = None if vocabulary is None else vocabulary.to(device)
        self.device = device
        self.slots = Slots(num_slots)
        self._pool = KVPool(len(head.layers), num_slots, config.num_kv_heads, config.head_dim, kind, device)
        # [L - 1, S, H] a layer's output for the token in a slot; the last layer's output is kept by the drafter.
        self._block_outputs = torch.empty(len(head.layers) - 1, num_slots, head.hidden_size, dtype=kind, device=device)
        self._layers = layers
        self._blocks = [_MtpBlock(layer, head, kind, device) for layer in head.layers]
        self._embedding = head.embedding.to(device, kind, copy=True)
        kept = head.lm_head if vocabulary is None else head.lm_head.index_select(0, vocabulary)
        self._lm_head = Linear(kept.to(device, kind, copy=True))
        self._dtype = kind
        self._first_token_zero = head.layout.first_token_zero

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Output:
        """``batch.features`` [T, H]: target states, or this head's own."""
        assert batch.features is not None
        token = F.embedding(batch.tokens, self._embedding)
        if self._first_token_zero:
            token = token.masked_fill((batch.positions == 0)[:, None], 0.0)
        run = self._layers.begin(batch, self._pool)
        states = (self._blocks[0](run, 0, token, batch.features) if len(self._blocks) == 1
                  else self._run_blocks(run, batch, token, batch.features)).index_select(0, batch.logit_rows)
        return Output(self._lm_head(states).to(torch.promote_types(self._dtype, torch.float32)), states)

    def _run_blocks(self, run: RunLayer, batch: ForwardBatch, token: torch.Tensor,
                    inputs: torch.Tensor) -> torch.Tensor:
        """Rule 4. inputs [T, H]: the input of a row's own layer, which is layer d for a node at depth d. Later layers
        write KV that deeper nodes see; KV that earlier layers write is seen by no row whose output is used."""
        host_depths, host_parents = depths_and_parents(batch)
        depths = to_device(host_depths, self.device)
        parents = to_device(host_parents, self.device)
        last = len(self._blocks) - 1
        outputs = inputs
        for number, block in enumerate(self._blocks):
            state = inputs
            if number:
                previous = self._block_outputs[number - 1].index_select(0, parents.clamp(min=0))
                previous = previous.masked_fill((parents < 0)[:, None], 0.0)
                state = torch.where((depths < number)[:, None], previous, inputs)
            out = block(run, number, token, state)
            if number < last:
                self._block_outputs[number].index_copy_(0, batch.slots, out)
            outputs = torch.where((depths.clamp(max=last) == number)[:, None], out, outputs)
        return outputs


class _MtpBlock:
    """What is around one decoder layer: two norms, the projection and the final norm."""

    __slots__ = ("_eps", "_hidden_first", "_hidden_norm", "_norm", "_projection", "_token_norm")

    def __init__(self, layer: MtpLayer, head: MtpHead, dtype: torch.dtype, device: torch.device) -> None:
        self._token_norm, self._hidden_norm = (
            t.to(device, dtype, copy=True) for t in (layer.token_norm, layer.hidden_norm))
        self._projection = Linear(layer.projection.to(device, dtype, copy=True))
        self._norm = layer.norm.to(device, dtype, copy=True)
        self._eps, self._hidden_first = head.norm_eps, head.layout.hidden_first

    def __call__(self, run: RunLayer, number: int, token: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Embeddings [T, H] and states [T, H] -> the layer's output after its final norm [T, H]."""
        sides = (rms_norm(token, self._token_norm, self._eps), rms_norm(state, self._hidden_norm, self._eps))
        x = self._projection(torch.cat(sides[::-1] if self._hidden_first else sides, -1))
        return rms_norm(run(number, x), self._norm, self._eps)


def depths_and_parents(batch: ForwardBatch) -> tuple[Indices, Indices]:
    """Of each row, int64 [T]: its depth in its tree (0: a committed token) and the slot of the row before it on its
    path (-1: there is none)."""
    entries, words = batch.flat_kv_slots.tolist(), batch.host.words.tolist()
    depths, parents = [], []
    for segment, mask_len in enumerate(batch.mask_lens):
        begin, end = batch.kv_indptr[segment], batch.kv_indptr[segment + 1]
        first, last = batch.q_indptr[segment], batch.q_indptr[segment + 1]
        for row in range(first, last):
            own = end - (last - row)  # the row's own entry
            if mask_len == 0:
                depth, before = 0, own - 1
            else:
                tree = end - mask_len
                seen = words[row] & ((1 << (own - tree)) - 1)  # ancestors without the row itself
                depth, before = seen.bit_count() + 1, tree + seen.bit_length() - 1
            depths.append(depth)
            parents.append(entries[before] if before >= begin else -1)
    return np.array(depths, np.int64), np.array(parents, np.int64)
