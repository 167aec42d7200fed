"""A decoder of the Llama family on the CPU kernels: bfloat16; a forward is one list of operations (see ``program``).

Rules:
1. A row's bits do not depend on other rows (see ``kernels.cpp``), so drafted answers are those of plain steps.
2. Buffers grow by doubling. Results belong to the caller, except the logits of ``logits_and_best`` and the results of
   ``linear``'s functions: these are valid until the next call.

It knows nothing about sessions, who owns slots, or files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.choosing.sampling import GREEDY, Draws
from slipstream.engine.batch import ForwardBatch
from slipstream.engine.int8 import EMBEDDING, as_int8, head_of
from slipstream.engine.kv import KVPool
from slipstream.engine.model import Map, ModelConfig, Tensors, require_tensor
from slipstream.engine.native.program import (
    INITIAL_ROWS,
    BatchFrame,
    Buffers,
    FeatureColumns,
    NativeHead,
    NativeLayer,
    NativeLinear,
    Program,
    RopeTable,
    Team,
    check_sizes,
    fits,
)
from slipstream.engine.native.races import NativeRace
from slipstream.engine.ops.layer import Linear


@dataclass(frozen=True, slots=True)
class PreparedForward:
    """A forward as a list of operations, and its results, for at most C rows. A list with scores also computes logits
    or choices of at most R of them."""

    program: Program
    states: torch.Tensor  # bfloat16 [C, H] after the final norm; in a list with scores only of the rows with scores
    tapped: torch.Tensor | None  # bfloat16 [C, len(taps) * H], the tapped states; a list with scores writes them, or
    # what ``join`` makes of them, to the frame's features
    logits: torch.Tensor  # float32 [R, V]; undefined in a list for choices only
    best: NDArray[np.int64]  # [R] the choices; in a list with logits the argmax


class Taps(NamedTuple):
    """The features of a row: the states of ``layers``, or what ``join`` makes of them."""

    layers: tuple[int, ...]
    join: NativeLinear | None = None

    def goes_with(self, other: Taps) -> bool:
        """Whether lists of both are kept: while a model joins, some forwards are still made without ``join``."""
        return self.layers == other.layers and (self.join is other.join or None in (self.join, other.join))


class NativeDecoder:
    """A whole model; see ``model.CausalModel``. ``logits_and_best`` goes from tokens to choices in one call."""

    __slots__ = ("_embedding", "_head", "_layers", "_max_logit_rows", "_norm", "_prepared", "_rows", "_table", "_team",
                 "config", "device", "dtype", "race", "threads")

    def __init__(self, config: ModelConfig, tensors: Tensors, team: Team, to_int8: bool = False) -> None:
        """tensors, to_int8: as in ``NativeLayer``. Raises ModelError naming a tensor or a dimension."""
        check_sizes(config)
        self.config, self.dtype, self.device = config, torch.bfloat16, torch.device("cpu")
        self._team, self.threads, self.race = team, team.threads, NativeRace(team)
        embedding = require_tensor(tensors, EMBEDDING, config.vocab_size, config.hidden_size)
        # A copy: a view would keep the whole file in memory.
        self._embedding = embedding.to(torch.bfloat16, copy=True).contiguous()
        self._layers = [NativeLayer(team, config, tensors, f"model.layers.{i}", to_int8=to_int8)
                        for i in range(config.num_layers)]
        self._norm = require_tensor(tensors, "model.norm.weight", config.hidden_size)
        head = head_of(config, tensors)
        self._head = NativeHead(team, as_int8(head) if to_int8 else head)
        self._table = RopeTable(config)
        self._rows = self._max_logit_rows = INITIAL_ROWS
        # By taps, whether with scores, whether for choices only.
        self._prepared: dict[tuple[Taps, bool, bool], PreparedForward] = {}

    @property
    def kernels(self) -> str:
        """See ``model.CausalModel``."""
        return " ".join(("native", *self._team.kernels.flags))

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, pool: KVPool,
                taps: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[T, H] after the final norm, and the taps side by side [T, len(taps) * H] or None."""
        rows, prepared = batch.num_rows, self.prepared(batch.num_rows, Taps(taps))
        prepared.program.run(self.frame(batch, pool))
        return prepared.states[:rows].clone(), None if prepared.tapped is None else prepared.tapped[:rows].clone()

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """bfloat16 [R, H] after the final norm -> float32 [R, V]."""
        return self._head(hidden)

    def logits_and_best(self, batch: ForwardBatch, pool: KVPool, taps: tuple[int, ...], features: torch.Tensor | None,
                        draws: Draws | None = None, join: Map | None = None) -> tuple[torch.Tensor, list[int] | None]:
        """Logits float32 [R, V] of the batch's ``logit_rows``, valid until the next call, and the argmax of each.

        draws: only these choices are wanted. They are returned in place of the argmax, and the logits may be empty;
        None in their place: they are not certain, and the logits are there. features: [S, len(taps) * H], where the
        tapped states are written by slot; None: no taps. join: a ``linear`` of a matrix that ``fits``, applied to the
        tapped states; ``features`` is [S, O] then."""
        assert join is None or isinstance(join, NativeLinear)
        width = len(taps) * self.config.hidden_size if join is None else join.packed.outer
        assert (width if taps else 0) == (0 if features is None else features.shape[1])
        num_logit_rows, drawn = len(batch.host.logit_rows), draws is not None and bool(draws.samplings)
        choices_only = draws is not None and self._head.uses_screen(num_logit_rows, drawn)
        prepared = self.prepared(batch.num_rows, Taps(taps, join), num_logit_rows, choices_only)
        prepared.program.run(self.frame(batch, pool, features, draws if choices_only and draws is not None else GREEDY))
        best: list[int] = prepared.best[:num_logit_rows].tolist()
        missed = choices_only and drawn and min(best) < 0
        if drawn:
            self._head.tell_sampled(missed if choices_only else None)
        if not choices_only:
            return prepared.logits[:num_logit_rows], None if drawn else best
        if missed:
            return self._head(prepared.states[:num_logit_rows]), None
        return prepared.logits[:0], best

    def linear(self, weight: torch.Tensor) -> Map:
        """The function x -> x W^T for W [O, I] of any float dtype; on the model's threads if W is bfloat16 and
        ``fits``. Its result is valid until its next call."""
        ours = weight.dtype is self.dtype and fits(*weight.shape)
        return NativeLinear(self._team, weight) if ours else Linear(weight)

    def frame(self, batch: ForwardBatch, pool: KVPool, features: torch.Tensor | None = None,
              draws: Draws = GREEDY) -> BatchFrame:
        """The frame of a batch (see ``program``). AssertionError for a token outside the vocabulary, for which the
        kernels would read invalid memory."""
        tokens, positions = batch.host.tokens.tolist(), batch.host.positions.tolist()
        assert min(tokens) >= 0 and max(tokens) < self.config.vocab_size and min(positions) >= 0
        self._table.ensure(1 + max(positions))
        return BatchFrame.of(batch, pool, self._table.cos, self._table.sin, self.config.sliding_window,
                             features, draws)

    def prepared(self, rows: int, taps: Taps, num_logit_rows: int | None = None,
                 choices_only: bool = False) -> PreparedForward:
        """The list for at least ``rows`` rows. num_logit_rows: how many of them have scores; None: a list without
        scores. choices_only: only choices are wanted, no logits."""
        if rows > self._rows or (num_logit_rows or 0) > self._max_logit_rows:
            self._rows = _doubled(self._rows, rows)
            self._max_logit_rows = _doubled(self._max_logit_rows, num_logit_rows or 0)
            self._prepared.clear()
        key = (taps, num_logit_rows is not None, choices_only)
        if key not in self._prepared:
            # Buffers of other taps are given up: a draft may name new ones with each handshake.
            self._prepared = {other: prepared for other, prepared in self._prepared.items() if other[0].goes_with(taps)}
            self._prepared[key] = self._prepare(*key)
        return self._prepared[key]

    def _prepare(self, taps: Taps, scores: bool, choices_only: bool) -> PreparedForward:
        config, program, hidden = self.config, Program(self._team), self.config.hidden_size
        buffers, layers, tapped = Buffers.of(config, self._rows, hidden), taps.layers, None
        places: list[torch.Tensor | FeatureColumns] = [
            FeatureColumns(i * hidden, len(layers) * hidden) for i in range(len(layers))]
        if layers and (taps.join is not None or not scores):
            tapped = torch.empty(self._rows, len(layers) * hidden, dtype=torch.bfloat16)
            places = list(torch.split(tapped, hidden, 1))
        program.embed(self._embedding, buffers.stream)
        for i, layer in enumerate(self._layers):
            for place in _of(i, layers, places):
                program.to_bf16(buffers.stream, place)
            layer.append_input_norm(program, buffers.stream, buffers.attention_input)
            layer.append_layer(program, buffers, i)
        for place in _of(config.num_layers, layers, places):
            program.norm(buffers.stream, self._norm, config.norm_eps, place)
        if taps.join is not None and tapped is not None:
            taps.join.append_to(program, tapped, FeatureColumns(0, taps.join.packed.outer))
        program.norm(buffers.stream, self._norm, config.norm_eps, buffers.normed, picked_only=scores)
        num_logit_rows, screen = self._max_logit_rows if scores else 0, self._head.screen if choices_only else None
        logits, best = torch.empty(num_logit_rows, config.vocab_size), torch.empty(num_logit_rows, dtype=torch.int64)
        if screen is not None:
            program.choose(buffers.normed, self._head.packed, screen, best)
        elif scores:
            program.product(buffers.normed, self._head.packed, logits, picked_only=True)
            program.best(logits, best)
        return PreparedForward(program, buffers.normed, tapped, logits, best.numpy())


def _doubled(size: int, wanted: int) -> int:
    while size < wanted:
        size *= 2
    return size


def _of(layer: int, taps: tuple[int, ...],
        places: list[torch.Tensor | FeatureColumns]) -> list[torch.Tensor | FeatureColumns]:
    """The places that a layer's states are written to: several, if it is tapped more than once."""
    return [place for tap, place in zip(taps, places, strict=True) if tap == layer]
