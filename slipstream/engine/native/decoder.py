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
    FEW_ROWS,
    BatchFrame,
    Buffers,
    Kept,
    NativeHead,
    NativeLayer,
    NativeLinear,
    Program,
    Table,
    Team,
    check_sizes,
    fits,
)
from slipstream.engine.native.races import NativeRace
from slipstream.engine.ops.layer import Linear


@dataclass(frozen=True, slots=True)
class Listed:
    """A forward as a list of operations, and its results, for at most C rows. A list with scores also computes logits
    or choices of at most R of them."""

    program: Program
    states: torch.Tensor  # bfloat16 [C, H] after the final norm; in a list with scores only of the rows with scores
    tapped: torch.Tensor | None  # bfloat16 [C, len(taps) * H], the tapped states; a list with scores writes them, or
    # what ``join`` makes of them, to the frame's features
    logits: torch.Tensor  # float32 [R, V]; undefined in a list for choices alone
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

    __slots__ = ("_embedding", "_few", "_head", "_layers", "_lists", "_norm", "_rows", "_table", "_team", "config",
                 "device", "dtype", "race", "threads")

    def __init__(self, config: ModelConfig, tensors: Tensors, team: Team, whole: bool = False) -> None:
        """tensors, whole: as in ``NativeLayer``. Raises ModelError naming a tensor or a dimension."""
        check_sizes(config)
        self.config, self.dtype, self.device = config, torch.bfloat16, torch.device("cpu")
        self._team, self.threads, self.race = team, team.threads, NativeRace(team)
        embedding = require_tensor(tensors, EMBEDDING, config.vocab_size, config.hidden_size)
        # A copy: a view would keep the whole file in memory.
        self._embedding = embedding.to(torch.bfloat16, copy=True).contiguous()
        self._layers = [NativeLayer(team, config, tensors, f"model.layers.{i}", whole=whole)
                        for i in range(config.num_layers)]
        self._norm = require_tensor(tensors, "model.norm.weight", config.hidden_size)
        head = head_of(config, tensors)
        self._head = NativeHead(team, as_int8(head) if whole else head)
        self._table = Table(config)
        self._rows = self._few = FEW_ROWS
        self._lists: dict[tuple[Taps, bool, bool], Listed] = {}  # by taps, with scores or not, for choices alone or not

    @property
    def kernels(self) -> str:
        """See ``model.CausalModel``."""
        return " ".join(("native", *self._team.kernels.flags))

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, pool: KVPool,
                taps: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[T, H] after the final norm, and the taps side by side [T, len(taps) * H] or None."""
        rows, listed = batch.num_rows, self.listed(batch.num_rows, Taps(taps))
        listed.program.run(self.frame(batch, pool))
        return listed.states[:rows].clone(), None if listed.tapped is None else listed.tapped[:rows].clone()

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
        few, drawn = len(batch.host.logit_rows), draws is not None and bool(draws.temperatures)
        alone = draws is not None and self._head.screens(few)
        listed = self.listed(batch.num_rows, Taps(taps, join), few, alone)
        listed.program.run(self.frame(batch, pool, features, draws if alone and draws is not None else GREEDY))
        best: list[int] = listed.best[:few].tolist()
        if not alone:
            return listed.logits[:few], None if drawn else best
        if drawn and min(best) < 0:
            return self._head(listed.states[:few]), None
        return listed.logits[:0], best

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
        self._table.reach(1 + max(positions))
        return BatchFrame.of(batch, pool, self._table.cos, self._table.sin, self.config.sliding_window,
                             features, draws)

    def listed(self, rows: int, taps: Taps, few: int | None = None, alone: bool = False) -> Listed:
        """The list for at least ``rows`` rows. few: how many of them have scores; None: a list without scores. alone:
        only choices are wanted, no logits."""
        if rows > self._rows or (few or 0) > self._few:
            self._rows, self._few = _doubled(self._rows, rows), _doubled(self._few, few or 0)
            self._lists.clear()
        key = (taps, few is not None, alone)
        if key not in self._lists:
            # Buffers of other taps are given up: a draft may name new ones with each handshake.
            self._lists = {other: listed for other, listed in self._lists.items() if other[0].goes_with(taps)}
            self._lists[key] = self._list(*key)
        return self._lists[key]

    def _list(self, taps: Taps, scores: bool, alone: bool) -> Listed:
        config, program, hidden = self.config, Program(self._team), self.config.hidden_size
        buffers, layers, tapped = Buffers.of(config, self._rows, hidden), taps.layers, None
        places: list[torch.Tensor | Kept] = [Kept(i * hidden, len(layers) * hidden) for i in range(len(layers))]
        if layers and (taps.join is not None or not scores):
            tapped = torch.empty(self._rows, len(layers) * hidden, dtype=torch.bfloat16)
            places = list(torch.split(tapped, hidden, 1))
        program.embed(self._embedding, buffers.stream)
        for i, layer in enumerate(self._layers):
            for place in _of(i, layers, places):
                program.rounded(buffers.stream, place)
            layer.read(program, buffers.stream, buffers.read)
            layer.write(program, buffers, i)
        for place in _of(config.num_layers, layers, places):
            program.norm(buffers.stream, self._norm, config.norm_eps, place)
        if taps.join is not None and tapped is not None:
            taps.join.write(program, tapped, Kept(0, taps.join.packed.outer))
        program.norm(buffers.stream, self._norm, config.norm_eps, buffers.normed, few=scores)
        few, screen = self._few if scores else 0, self._head.screen if alone else None
        logits, best = torch.empty(few, config.vocab_size), torch.empty(few, dtype=torch.int64)
        if screen is not None:
            program.choose(buffers.normed, self._head.packed, screen, best)
        elif scores:
            program.product(buffers.normed, self._head.packed, logits, few=True)
            program.best(logits, best)
        return Listed(program, buffers.normed, tapped, logits, best.numpy())


def _doubled(size: int, wanted: int) -> int:
    while size < wanted:
        size *= 2
    return size


def _of(layer: int, taps: tuple[int, ...], places: list[torch.Tensor | Kept]) -> list[torch.Tensor | Kept]:
    """The places that a layer's states are written to: several, if it is tapped more than once."""
    return [place for tap, place in zip(taps, places, strict=True) if tap == layer]
