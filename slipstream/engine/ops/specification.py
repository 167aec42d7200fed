"""What stands between a layer's products, in torch: the specification, and what runs where nothing else does.

Rules:
1. Others compute the same and round where this does.
2. float64 stays float64 throughout: a model in float64 gives the same choice whatever batch a row stands in.

It knows nothing about batches, pools or attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from slipstream.engine.ops.layer import Heads, LayerWeights, Step
from slipstream.engine.ops.linear import Linear
from slipstream.engine.ops.rope import rotate


@dataclass(frozen=True, slots=True)
class Operations:
    """A ``layer.LayerOps`` by three operations."""

    add_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
    # x, added [T, H], weight [H], eps -> their sum and its norm
    place: Callable[[torch.Tensor, Heads, Step, torch.Tensor], torch.Tensor]
    # rows [T, Q + 2 G, D], which may be written, normed and rotated -> queries [T, Q, D]; KV written to kv [S, 2, G, D]
    silu_mul: Callable[[torch.Tensor], torch.Tensor]  # [T, 2 I] -> [T, I]: silu of the first half times the second

    def before(self, layer: LayerWeights[Linear], x: torch.Tensor, step: Step, kv: torch.Tensor) -> torch.Tensor:
        return self.place(heads_of(layer, x), layer.heads, step, kv)

    def after(self, layer: LayerWeights[Linear], x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        x, normed = self.add_norm(x, layer.o(attended), layer.post_norm, layer.heads.eps)
        return x + layer.down(self.silu_mul(layer.gate_up(normed)))


def heads_of(layer: LayerWeights[Linear], x: torch.Tensor) -> torch.Tensor:
    """x [T, in], normed unless the layer has no norm -> queries, keys and values [T, Q + 2 G, D]."""
    heads = layer.heads
    rows = layer.qkv(x if layer.norm is None else rms_norm(x, layer.norm, heads.eps))
    return rows.view(x.shape[0], heads.queries + 2 * heads.kv, heads.size)


def turned(rows: torch.Tensor, heads: Heads, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """rows [T, Q + 2 G, D], which are written -> queries [T, Q, D], and KV to be written [T, 2, G, D]."""
    queries, both = heads.queries, heads.queries + heads.kv
    if heads.q_norm is not None and heads.k_norm is not None:
        rows[:, :queries] = rms_norm(rows[:, :queries], heads.q_norm, heads.eps)
        rows[:, queries:both] = rms_norm(rows[:, queries:both], heads.k_norm, heads.eps)
    rotate(rows[:, :both], cos, sin)
    return rows[:, :queries], rows[:, queries:].view(rows.shape[0], 2, heads.kv, heads.size)


def place(rows: torch.Tensor, heads: Heads, step: Step, kv: torch.Tensor) -> torch.Tensor:
    q, written = turned(rows, heads, step.cos, step.sin)
    kv.index_copy_(0, step.slots, written)
    return q


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., H] over the root of its mean square, times weight [H]; computed in at least float32."""
    return F.rms_norm(x, weight.shape, weight, eps)


def add_norm(x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor,
             eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    x = x + added
    return x, rms_norm(x, weight, eps)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


TORCH = Operations(add_norm, place, silu_mul)
