"""A decoder of the Llama family on the CPU kernels: bfloat16, a forward as one list of operations.

Rules:
1. A row's bits do not depend on its company (see ``kernels.cpp``): answers of speculation are those of plain steps.
2. Buffers grow to the most rows seen, by doubling; what is returned is the caller's, never a buffer.

It knows nothing about sessions, slots' owners or files.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from slipstream.engine.batch import ForwardBatch
from slipstream.engine.int8 import Matrix, head_of
from slipstream.engine.kv import KVPool
from slipstream.engine.layers import Rope, Tensors, take
from slipstream.engine.model import ModelConfig
from slipstream.engine.native.layer import Buffers, NativeLayer, check_sizes
from slipstream.engine.native.program import BatchFrame, Frame, Packed, Program, Team

FEW_ROWS = 64  # buffers begin with so many


class NativeHead:
    """Final states to logits."""

    __slots__ = ("_packed", "_team")

    def __init__(self, team: Team, weight: Matrix) -> None:
        """weight [V, H], any float dtype or whole numbers."""
        self._team = team
        self._packed = Packed(team, weight)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """bfloat16 [R, H] -> float32 [R, V]."""
        out = torch.empty(hidden.shape[0], self._packed.outer)
        program = Program(self._team)
        program.product(hidden.contiguous(), self._packed, out)
        program.run(BatchFrame(Frame(hidden.shape[0])))
        return out


class NativeDecoder:
    """A whole model; see ``model.CausalModel``."""

    __slots__ = ("_embedding", "_head", "_layers", "_lists", "_norm", "_rows", "_team", "config", "device", "dtype",
                 "rope", "threads")

    def __init__(self, config: ModelConfig, tensors: Tensors, team: Team, whole: bool = False) -> None:
        """tensors, whole: as in ``NativeLayer``. Raises ModelError naming a tensor or a measure."""
        check_sizes(config)
        self.config, self.dtype, self.device = config, torch.bfloat16, torch.device("cpu")
        self._team, self.threads = team, team.threads
        embedding = take(tensors, "model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self._embedding = embedding.to(torch.bfloat16)
        self._layers = [NativeLayer(team, config, tensors, f"model.layers.{i}", whole=whole)
                        for i in range(config.num_layers)]
        self._norm = take(tensors, "model.norm.weight", config.hidden_size).float()
        self._head = NativeHead(self._team, head_of(config, tensors, whole))
        self.rope = Rope(config, torch.float32, self.device)
        self._rows = FEW_ROWS
        self._lists: dict[tuple[int, ...], tuple[Program, Buffers, torch.Tensor | None]] = {}  # by taps

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, pool: KVPool,
                taps: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[T, H] after the final norm, and the taps side by side [T, len(taps) * H] or None."""
        rows = batch.num_rows
        program, buffers, tapped = self.listed(rows, taps)
        buffers.stream[:rows] = self.embed(batch.tokens)
        program.run(self.frame(batch, pool))
        return buffers.normed[:rows].clone(), None if tapped is None else tapped[:rows].clone()

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """bfloat16 [R, H] after the final norm -> float32 [R, V]."""
        return self._head(hidden)

    @torch.inference_mode()
    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> [T, H]."""
        return F.embedding(tokens, self._embedding)

    def frame(self, batch: ForwardBatch, pool: KVPool) -> BatchFrame:
        """What a batch adds to the list."""
        return BatchFrame.of(batch, pool, *self.rope.rows(batch.positions), self.config.sliding_window)

    def listed(self, rows: int, taps: tuple[int, ...]) -> tuple[Program, Buffers, torch.Tensor | None]:
        """The list for at most so many rows, its buffers, and the one of tapped states."""
        while self._rows < rows:
            self._rows *= 2
            self._lists.clear()
        if taps not in self._lists:
            self._lists[taps] = self._list(taps)
        return self._lists[taps]

    def _list(self, taps: tuple[int, ...]) -> tuple[Program, Buffers, torch.Tensor | None]:
        config, program = self.config, Program(self._team)
        buffers = Buffers.of(config, self._rows, config.hidden_size)
        tapped = torch.empty(self._rows, len(taps) * config.hidden_size, dtype=torch.bfloat16) if taps else None
        places = {} if tapped is None else dict(zip(taps, torch.split(tapped, config.hidden_size, 1), strict=True))
        for i, layer in enumerate(self._layers):
            if i in places:
                program.rounded(buffers.stream, places[i])
            layer.read(program, buffers.stream, buffers.read)
            layer.write(program, buffers, i)
        program.norm(buffers.stream, self._norm, config.norm_eps, buffers.normed)
        if config.num_layers in places:
            program.norm(buffers.stream, self._norm, config.norm_eps, places[config.num_layers])
        return program, buffers, tapped
