"""A decoder of the Llama family on the CPU kernels: bfloat16, a forward as one list of operations.

Rules:
1. A row's bits do not depend on its company (see ``kernels.cpp``): answers of speculation are those of plain steps.
2. Buffers grow to the most rows seen, by doubling. What is returned is the caller's, but for the logits of ``scored``,
   which are there until its next call.

It knows nothing about sessions, slots' owners or files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from slipstream.engine.batch import ForwardBatch
from slipstream.engine.int8 import Matrix, as_whole, head_of
from slipstream.engine.kv import KVPool
from slipstream.engine.model import ModelConfig
from slipstream.engine.native.layer import Buffers, NativeLayer, check_sizes
from slipstream.engine.native.linear import FEW_ROWS, NativeLinear, fits
from slipstream.engine.native.program import BatchFrame, Frame, Kept, Packed, Program, Team
from slipstream.engine.native.rotary import Table
from slipstream.engine.ops.linear import Linear
from slipstream.engine.weights import Tensors, take


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

    def write(self, program: Program, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """The same as an operation on the rows that a frame picks: hidden bfloat16 [C, H], out float32 [C, V]."""
        program.product(hidden, self._packed, out, few=True)


@dataclass(frozen=True, slots=True)
class Scores:
    """What a list ends with, for at most R rows."""

    logits: torch.Tensor  # float32 [R, V]
    best: torch.Tensor  # int64 [R]


class NativeDecoder:
    """A whole model; see ``model.ScoringModel``."""

    __slots__ = ("_embedding", "_few", "_head", "_layers", "_lists", "_norm", "_rows", "_scoring", "_table", "_team",
                 "config", "device", "dtype", "threads")

    def __init__(self, config: ModelConfig, tensors: Tensors, team: Team, whole: bool = False) -> None:
        """tensors, whole: as in ``NativeLayer``. Raises ModelError naming a tensor or a measure."""
        check_sizes(config)
        self.config, self.dtype, self.device = config, torch.bfloat16, torch.device("cpu")
        self._team, self.threads = team, team.threads
        embedding = take(tensors, "model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self._embedding = embedding.to(torch.bfloat16).contiguous()
        self._layers = [NativeLayer(team, config, tensors, f"model.layers.{i}", whole=whole)
                        for i in range(config.num_layers)]
        self._norm = take(tensors, "model.norm.weight", config.hidden_size)
        head = head_of(config, tensors)
        self._head = NativeHead(team, as_whole(head) if whole else head)
        self._table = Table(config)
        self._rows = self._few = FEW_ROWS
        self._lists: dict[tuple[int, ...], tuple[Program, Buffers, torch.Tensor | None]] = {}  # by taps
        self._scoring: dict[tuple[int, ...], tuple[Program, Scores]] = {}  # by taps

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, pool: KVPool,
                taps: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[T, H] after the final norm, and the taps side by side [T, len(taps) * H] or None."""
        rows = batch.num_rows
        program, buffers, tapped = self.listed(rows, taps)
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

    def scored(self, batch: ForwardBatch, pool: KVPool, taps: tuple[int, ...],
               features: torch.Tensor | None) -> tuple[torch.Tensor, list[int]]:
        """See ``model.ScoringModel``; the logits are a buffer's."""
        assert len(taps) * self.config.hidden_size == (0 if features is None else features.shape[1])
        few = len(batch.host.logit_rows)
        self._reach(batch.num_rows, few)
        if taps not in self._scoring:
            self._scoring[taps] = self._scoring_list(taps)
        program, scores = self._scoring[taps]
        program.run(self.frame(batch, pool, features))
        return scores.logits[:few], scores.best[:few].tolist()

    def linear(self, weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """See ``model.ScoringModel``; on the model's threads where it fits them."""
        return NativeLinear(self._team, weight) if fits(weight) else Linear(weight)

    def frame(self, batch: ForwardBatch, pool: KVPool, features: torch.Tensor | None = None) -> BatchFrame:
        """What a batch adds to the list. AssertionError for a token that is none: the kernels would read beyond."""
        tokens, positions = batch.host.tokens.tolist(), batch.host.positions.tolist()
        assert min(tokens) >= 0 and max(tokens) < self.config.vocab_size and min(positions) >= 0
        self._table.reach(1 + max(positions))
        return BatchFrame.of(batch, pool, self._table.cos, self._table.sin, self.config.sliding_window,
                             batch.positions, features)

    def listed(self, rows: int, taps: tuple[int, ...]) -> tuple[Program, Buffers, torch.Tensor | None]:
        """The list for at most so many rows, its buffers, and the one of tapped states."""
        self._reach(rows, 0)
        if taps not in self._lists:
            self._lists[taps] = self._list(taps)
        return self._lists[taps]

    def _reach(self, rows: int, few: int) -> None:
        if rows <= self._rows and few <= self._few:
            return
        while self._rows < rows:
            self._rows *= 2
        while self._few < few:
            self._few *= 2
        self._lists.clear()
        self._scoring.clear()

    def _list(self, taps: tuple[int, ...]) -> tuple[Program, Buffers, torch.Tensor | None]:
        config, program = self.config, Program(self._team)
        buffers = Buffers.of(config, self._rows, config.hidden_size)
        tapped = torch.empty(self._rows, len(taps) * config.hidden_size, dtype=torch.bfloat16) if taps else None
        places = {} if tapped is None else dict(zip(taps, torch.split(tapped, config.hidden_size, 1), strict=True))
        self._write(program, buffers, places)
        program.norm(buffers.stream, self._norm, config.norm_eps, buffers.normed)
        return program, buffers, tapped

    def _scoring_list(self, taps: tuple[int, ...]) -> tuple[Program, Scores]:
        config, program = self.config, Program(self._team)
        hidden, buffers = config.hidden_size, Buffers.of(config, self._rows, config.hidden_size)
        scores = Scores(torch.empty(self._few, config.vocab_size), torch.empty(self._few, dtype=torch.int64))
        picked = torch.empty(self._few, hidden, dtype=torch.bfloat16)
        self._write(program, buffers, {tap: Kept(i * hidden, len(taps) * hidden) for i, tap in enumerate(taps)})
        program.norm(buffers.stream, self._norm, config.norm_eps, picked, few=True)
        self._head.write(program, picked, scores.logits)
        program.best(scores.logits, scores.best)
        return program, scores

    def _write(self, program: Program, buffers: Buffers, places: Mapping[int, torch.Tensor | Kept]) -> None:
        """From tokens to the stream after the last layer; what is tapped goes to its place."""
        config = self.config
        program.embed(self._embedding, buffers.stream)
        for i, layer in enumerate(self._layers):
            if i in places:
                program.rounded(buffers.stream, places[i])
            layer.read(program, buffers.stream, buffers.read)
            layer.write(program, buffers, i)
        if config.num_layers in places:
            program.norm(buffers.stream, self._norm, config.norm_eps, places[config.num_layers])
