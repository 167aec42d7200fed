"""torch.compile for the two halves of a decoder layer: the operations before attention, and those after it.

Rules:
1. Only the halves are compiled. The number of rows is the only size in them that changes, so two graphs (one row, more
   rows) serve every layer of a model. Planning, KV writes and attention change shape with every batch and stay eager.
2. All graphs are made before anything is served, by running the model once for each of ROWS.
3. If that fails (no C++ compiler, an operation that cannot be compiled), a warning is logged and layers stay eager.
4. Fused sums round differently: results are close to eager ones, not equal bit for bit. All target steps of a process
   use the same graphs, so drafted answers are as exact as before.

It knows nothing about files, sessions or the kind of model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import TypeVar

import torch

from slipstream.base.errors import first_line
from slipstream.engine.ops.layer import TORCH, LayerOps, LayerWeights, Linear, Step, heads_of, rotated
from slipstream.observe.log import logger

ROWS = (1, 3)  # one row is a graph of its own

M = TypeVar("M")


def before_attention(layer: LayerWeights[Linear], normed: torch.Tensor, cos: torch.Tensor,
                     sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``TORCH.before_attention`` without the KV write: queries [T, Q, D], and the KV to be written [T, 2, G, D]."""
    return rotated(heads_of(layer, normed), layer.heads, cos, sin)


@dataclass(frozen=True, slots=True)
class CompiledOps:
    """A ``layer.LayerOps`` of compiled functions."""

    queries: Callable[[LayerWeights[Linear], torch.Tensor, torch.Tensor, torch.Tensor],
                      tuple[torch.Tensor, torch.Tensor]]
    rest: Callable[[LayerWeights[Linear], torch.Tensor, torch.Tensor, torch.Tensor | None],
                   tuple[torch.Tensor, torch.Tensor]]
    name: str = "compiled"

    def before_attention(self, layer: LayerWeights[Linear], normed: torch.Tensor, step: Step,
                         kv: torch.Tensor) -> torch.Tensor:
        q, written = self.queries(layer, normed, step.cos, step.sin)
        kv.index_copy_(0, step.slots, written)
        return q

    def after_attention(self, layer: LayerWeights[Linear], x: torch.Tensor, attended: torch.Tensor,
                        norm: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rest(layer, x, attended, norm)


def compiled(build: Callable[[LayerOps], M], run: Callable[[M, int], object], what: str) -> M:
    """The model that ``build`` makes with compiled halves, after ``run(model, rows)`` for each of ROWS compiled them;
    if that fails, the one with eager halves. what: its name in the log."""
    log, began_s = logger("engine"), perf_counter()
    try:
        model = build(CompiledOps(torch.compile(before_attention), torch.compile(TORCH.after_attention)))
        for rows in ROWS:
            run(model, rows)
    except Exception as error:  # compilers fail in their own ways, and none of them is a reason not to serve
        log.warning("not compiled: eager goes on; 'slipstream doctor' looks for a C++ compiler", what=what,
                    reason=first_line(error))
        return build(TORCH)
    log.info("compiled", what=what, seconds=round(perf_counter() - began_s, 1))
    return model
