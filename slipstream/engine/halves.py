"""The two halves of a decoder layer as functions of tensors and ``Linear``s, so that they can be compiled once and
serve every layer.

Rules:
1. What changes between layers is an argument; nothing is read from elsewhere and no argument is written.
2. No shape but the number of rows T depends on the batch.

It knows nothing about batches, pools or attention. Dimension key: see the package.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from slipstream.engine.layers import Linear, rms_norm, rotate, silu_mul


def before_attention(x: torch.Tensor, norm: torch.Tensor | None, qkv: Linear, q_norm: torch.Tensor | None,
                     k_norm: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, heads: int, kv_heads: int,
                     size: int, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, in], normed by ``norm`` [in] unless None -> rotated queries [T, Q, D], KV to be written [T, 2, G, D]."""
    both = heads + kv_heads
    rows = qkv(x if norm is None else rms_norm(x, norm, eps)).view(x.shape[0], both + kv_heads, size)
    if q_norm is not None and k_norm is not None:
        rows[:, :heads] = rms_norm(rows[:, :heads], q_norm, eps)
        rows[:, heads:both] = rms_norm(rows[:, heads:both], k_norm, eps)
    rotate(rows[:, :both], cos, sin)
    return rows[:, :heads], rows[:, heads:].view(x.shape[0], 2, kv_heads, size)


def after_attention(x: torch.Tensor, attended: torch.Tensor, o: Linear, norm: torch.Tensor, gate_up: Linear,
                    down: Linear, eps: float) -> torch.Tensor:
    """Residual stream x [T, H] and what attention gave [T, Q * D] -> [T, H]."""
    x = x + o(attended)
    return x + down(silu_mul(gate_up(rms_norm(x, norm, eps))))


class Before(Protocol):
    def __call__(self, x: torch.Tensor, norm: torch.Tensor | None, qkv: Linear, q_norm: torch.Tensor | None,
                 k_norm: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, heads: int, kv_heads: int,
                 size: int, eps: float) -> tuple[torch.Tensor, torch.Tensor]: ...


class After(Protocol):
    def __call__(self, x: torch.Tensor, attended: torch.Tensor, o: Linear, norm: torch.Tensor, gate_up: Linear,
                 down: Linear, eps: float) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Halves:
    """How the halves of a layer run."""

    before: Before
    after: After


EAGER = Halves(before_attention, after_attention)
