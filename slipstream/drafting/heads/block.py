"""A block drafter (DFlash, DSpark) as a network: a few layers that predict a whole block of tokens in one pass.

Rules:
1. Context comes only from the target's states: ``c_i = hidden_norm(fc · the taps of position i)``. Keys and values of
   every layer are computed from ``c_i``, at rotary position i, once for each committed token. So no context is ever
   computed again, and a token whose state has not arrived is left out.
2. A block is (newest committed token, mask, mask, …) from the newest token's position on. Each of its rows sees the
   context before the newest token and the whole block, not causally; the block's keys and values are dropped after the
   pass. In sliding layers rows see less of the context, and only earlier rows of the block, unless the head says
   otherwise (``BlockHead.ahead``).
3. ``from_anchor``: slot k predicts the token after its place; else the token at its place, and slot 0 nothing.
4. Markov and confidence heads: see ``drafting.block``.
5. ``fc`` runs on the target if that makes rows shorter, as for EAGLE-3. Rows arrive in the wire's dtype and are cast.

It knows nothing about sessions, trees or files. Source: arXiv 2602.06036 (DFlash) and the code of DeepSpec (DSpark).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from slipstream.choosing.sampling import Race
from slipstream.drafting.block import BlockStates, MarkovHead
from slipstream.drafting.heads.block_checkpoint import BlockHead
from slipstream.drafting.network import Output, some_tokens
from slipstream.engine.batch import BatchBuilder, ForwardBatch
from slipstream.engine.flashinfer import attention_for
from slipstream.engine.kv import KVPool, Slots
from slipstream.engine.model import ModelConfig, Tensors, dtype_of
from slipstream.engine.native import native_or
from slipstream.engine.native.blocks import NativeBlocks
from slipstream.engine.native.program import Team
from slipstream.engine.ops.layer import (
    TORCH,
    DecoderLayer,
    LayerOps,
    LayerWeights,
    Linear,
    Rope,
    Step,
    linear,
    next_norms,
    rms_norm,
    rotate,
)
from slipstream.engine.runner import fused_reader
from slipstream.protocol.messages import FeatureSpec

AT_ONCE = 8  # blocks of one forward


class BlockNetwork:
    """A ``network.Network`` over a block head."""

    zero_fill = False

    def __init__(self, head: BlockHead, dtype: str, device: torch.device, num_slots: int, project: bool = False,
                 ops: LayerOps = TORCH, kernels: str = "torch") -> None:
        """dtype: of weights, KV and features on the wire; project: let the target apply ``fc`` if that makes rows
        shorter; ops: the torch operations of a layer; kernels: see ``native.native_or``. Raises ModelError for an
        unknown dtype."""
        kind, config = dtype_of(dtype), head.config
        tensors = {name: t.to(device, kind, copy=True) for name, t in head.tensors.items() if t.is_floating_point()}
        self.vocab_size, self.hidden_size = config.vocab_size, head.target_hidden_size
        self.max_context = config.max_context
        hidden_norm = tensors["hidden_norm.weight"]
        self.read = fused_reader(head.taps, dtype, project, tensors["fc.weight"],  # as ``c``
                                 then=lambda rows: rms_norm(rows, hidden_norm, config.norm_eps))
        self.features: FeatureSpec | None = self.read.spec
        self.vocabulary = some_tokens(head.vocabulary, config.vocab_size, device)
        self.device, self._head = device, replace(head, tensors={})
        self.slots = Slots(num_slots)
        spare = AT_ONCE * head.block_size
        self._scratch = np.arange(num_slots, num_slots + spare, dtype=np.int64).reshape(AT_ONCE, head.block_size)
        self._pool = KVPool(config.num_layers, num_slots + spare, config.num_kv_heads, config.head_dim, kind, device)
        self._markov = MarkovHead(head, tensors, self.vocabulary) if head.markov or head.confidence else None
        self.race: Race | None = None
        self._torch: TorchBlocks | None = None  # torch computes

        def native(team: Team) -> Layers:
            made = NativeBlocks(team, config, tensors, self._pool, self.vocabulary)
            self.race = made.race
            return made

        def on_torch() -> Layers:
            self._torch = TorchBlocks(config, tensors, self._pool, ops, head.sliding)
            return self._torch

        alike = len(set(head.sliding)) == 1  # the kernels take one window for all layers
        self._layers = native_or(kernels if alike else "torch", kind, device, "head", native, on_torch)

    def linears(self) -> tuple[Linear, ...]:
        """The products of a pass on torch."""
        return () if self._torch is None else self._torch.linears()

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Output:
        """``batch.features`` [T, H]: ``c`` of each row's position. Each row whose logits are wanted begins a block:
        logits [R * reach, V]."""
        self._layers.keep(batch)
        wanted = batch.host.logit_rows.tolist()
        states = torch.cat([self._blocks(batch, wanted[first : first + AT_ONCE])
                            for first in range(0, len(wanted), AT_ONCE)])
        reach = self._head.reach
        predicting = states[:, states.shape[1] - reach :].flatten(0, 1)
        return Output(self._layers.logits(predicting), None, BlockStates(reach, states, self._markov))

    def _blocks(self, batch: ForwardBatch, rows: Sequence[int]) -> torch.Tensor:
        """[r, S, H]: states of the blocks' slots after the final norm."""
        head, size = self._head, self._head.block_size
        whole, then = [(1 << size) - 1] * size, [(1 << slot) - 1 for slot in range(1, size + 1)]
        words = {slides: then if slides and not head.ahead else whole for slides in set(head.sliding)}
        begun = {slides: self._begun(batch, rows, seen) for slides, seen in words.items()}
        return self._layers.forward(begun).view(len(rows), size, -1)

    def _begun(self, batch: ForwardBatch, rows: Sequence[int], words: Sequence[int]) -> ForwardBatch:
        """The blocks that begin at rows of a batch; words: which slots of its block each slot sees."""
        size, builder, entries = self._head.block_size, BatchBuilder(), batch.flat_kv_slots
        ends = np.searchsorted(np.array(batch.q_indptr), rows, side="right")  # of the segments, counted from 1
        for place, (row, end) in enumerate(zip(rows, ends.tolist(), strict=True)):
            seen = batch.kv_indptr[end] - (batch.q_indptr[end] - 1 - row)
            position = int(batch.host.positions[row]) + 1
            masks = [self._head.mask_token] * (size - 1)
            builder.add([int(batch.host.tokens[row]), *masks], range(position, position + size),
                        self._scratch[place].tolist(), entries[batch.kv_indptr[end - 1] : seen], words, size)
        return builder.build(self.device)


class Layers(Protocol):
    """The layers of a head, over a pool of KV."""

    def keep(self, batch: ForwardBatch) -> None:
        """Write keys and values of ``batch.features`` [T, H], which is ``c`` of its rows, at the batch's slots."""
        ...

    def forward(self, batches: Mapping[bool, ForwardBatch]) -> torch.Tensor:
        """States of the blocks' rows, [T, H] after the final norm. batches: the same rows with the masks of sliding
        layers (True) and of the others (False)."""
        ...

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """[R, H] -> [R, V]: float32, of a float64 head float64."""
        ...


class TorchBlocks:
    """The same on torch's operations: the specification."""

    __slots__ = ("_attention", "_config", "_context", "_embedding", "_k_norms", "_layers", "_lm_head", "_norms",
                 "_pool", "_rope", "_sliding")

    def __init__(self, config: ModelConfig, tensors: Tensors, pool: KVPool, ops: LayerOps,
                 sliding: Sequence[bool]) -> None:
        self._embedding, self._pool = tensors["embed_tokens.weight"], pool
        kind, device, self._lm_head = self._embedding.dtype, self._embedding.device, Linear(tensors["lm_head.weight"])
        self._rope, self._sliding = Rope(config, kind, device), sliding
        self._attention = {slides: attention_for(config if slides else replace(config, sliding_window=0), kind, device)
                           for slides in set(sliding)}
        self._layers = [DecoderLayer(LayerWeights.from_tensors(config, tensors, f"layers.{i}", linear), ops)
                        for i in range(config.num_layers)]
        self._norms = next_norms(self._layers, tensors["norm.weight"])
        names = [f"layers.{i}.self_attn.{part}_proj" for i in range(config.num_layers) for part in "kv"]
        bias = torch.cat([tensors[f"{name}.bias"] for name in names]) if config.qkv_bias else None
        # Keys and values of all layers from one product.
        self._context = Linear(torch.cat([tensors[f"{name}.weight"] for name in names]), bias)
        self._k_norms = [tensors[f"layers.{i}.self_attn.k_norm.weight"] for i in range(config.num_layers)
                         ] if config.qk_norm else None
        self._config = config

    def linears(self) -> tuple[Linear, ...]:
        """The products that may be replaced."""
        return *(product for layer in self._layers for product in layer.linears()), self._lm_head

    def keep(self, batch: ForwardBatch) -> None:
        assert batch.features is not None
        config, turn = self._config, self._rope.rows(batch.positions)
        rows = self._context(batch.features).view(-1, config.num_layers, 2, config.num_kv_heads, config.head_dim)
        for number, (keys, values) in enumerate(layer.unbind(1) for layer in rows.unbind(1)):
            if self._k_norms is not None:
                keys = rms_norm(keys, self._k_norms[number], config.norm_eps)
            rotate(keys, *turn)
            self._pool.kv[number].index_copy_(0, batch.slots, torch.stack((keys, values), 1))

    def forward(self, batches: Mapping[bool, ForwardBatch]) -> torch.Tensor:
        steps = {slides: Step.of(batch, self._rope, self._attention[slides]) for slides, batch in batches.items()}
        x = F.embedding(next(iter(batches.values())).tokens, self._embedding)
        read = self._layers[0].norm_input(x)
        for layer, norm, kv, slides in zip(self._layers, self._norms, self._pool.kv, self._sliding, strict=True):
            x, read = layer(x, read, steps[slides], kv, norm)
        return read

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return self._lm_head(states).to(torch.promote_types(states.dtype, torch.float32))
