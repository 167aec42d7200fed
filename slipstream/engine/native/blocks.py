"""The layers of a block head on the CPU kernels: it writes the KV of committed tokens, and computes blocks.

Rules:
1. The KV of a committed token, in all layers, is computed from its target state only: it passes through no layer.
2. Buffers and rotary rows grow by doubling. Results are never views of buffers.

It knows nothing about sessions, who owns slots, markov heads or files. Dimension key: see ``slipstream.engine``.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from slipstream.engine.batch import ForwardBatch
from slipstream.engine.kv import KVPool
from slipstream.engine.model import ModelConfig, Tensors, require_tensor
from slipstream.engine.native.program import (
    INITIAL_ROWS,
    BatchFrame,
    Buffers,
    NativeHead,
    NativeLayer,
    Program,
    RopeTable,
    Team,
    check_sizes,
)
from slipstream.engine.native.races import NativeRace


class NativeBlocks:
    """One head's weights, and its lists of operations (see ``program``)."""

    __slots__ = ("_buffers", "_config", "_context", "_embedding", "_head", "_layers", "_norm", "_pass", "_pool",
                 "_table", "_team", "race")

    def __init__(self, team: Team, config: ModelConfig, tensors: Tensors, pool: KVPool,
                 vocabulary: torch.Tensor | None) -> None:
        """tensors: by name, on the CPU; vocabulary: int64 [V], the tokens of the logits' columns; None: column numbers
        are tokens. Raises ModelError."""
        check_sizes(config)
        self._team, self._config, self._pool = team, config, pool
        self._embedding = require_tensor(tensors, "embed_tokens.weight", config.vocab_size,
                                         config.hidden_size).contiguous()
        self._layers = [NativeLayer(team, config, tensors, f"layers.{i}") for i in range(config.num_layers)]
        self._norm = require_tensor(tensors, "norm.weight", config.hidden_size)
        self._head = NativeHead(team, tensors["lm_head.weight"])
        self.race = NativeRace(team, vocabulary)  # of its logits
        self._table = RopeTable(config)
        self._allocate(INITIAL_ROWS)

    @torch.inference_mode()
    def keep(self, batch: ForwardBatch) -> None:
        """Compute keys and values of all layers from ``batch.features`` (bfloat16 [T, H]) and write them to the batch's
        slots."""
        assert batch.features is not None and batch.features.dtype == torch.bfloat16
        states, frame = batch.features.contiguous(), self._frame(batch)
        frame.frame.states = states.data_ptr()
        self._context.run(frame)

    @torch.inference_mode()
    def forward(self, batches: Mapping[bool, ForwardBatch]) -> torch.Tensor:
        """States bfloat16 [T, H] after the final norm. batches: exactly one, under either key (the key says whether
        layers have a sliding window)."""
        (batch,) = batches.values()
        frame = self._frame(batch)
        self._pass.run(frame)
        return self._buffers.normed[: batch.num_rows].clone()

    @torch.inference_mode()
    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """bfloat16 [R, H] -> float32 [R, V]."""
        return self._head(states)

    def _frame(self, batch: ForwardBatch) -> BatchFrame:
        """The frame of a batch, after making room for its rows and positions."""
        self._table.ensure(1 + int(batch.host.positions.max()))
        if batch.num_rows > len(self._buffers.stream):
            self._allocate(2 * batch.num_rows)
        return BatchFrame.of(batch, self._pool, self._table.cos, self._table.sin, self._config.sliding_window)

    def _allocate(self, rows: int) -> None:
        config = self._config
        # Made in inference mode whoever calls: tensors made in it can only be written in it, and all calls are.
        with torch.inference_mode():
            self._buffers = buffers = Buffers.of(config, rows, config.hidden_size)
        self._context, self._pass = Program(self._team, keep_cached=True), Program(self._team, keep_cached=True)
        self._context.widen(None, buffers.stream)
        self._context.to_bf16(buffers.stream, buffers.attention_input)
        self._pass.embed(self._embedding, buffers.stream)
        for number, layer in enumerate(self._layers):
            layer.append_qkv(self._context, buffers, number)
            layer.append_input_norm(self._pass, buffers.stream, buffers.attention_input)
            layer.append_layer(self._pass, buffers, number)
        self._pass.norm(buffers.stream, self._norm, config.norm_eps, buffers.normed)
