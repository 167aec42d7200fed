"""The two halves of a decoder layer, before and after attention, as functions of tensors and ``Linear``s that serve
every layer, and the operations that stand between their products.

Rules:
1. What changes between layers is an argument; nothing is read from elsewhere.
2. No shape but the number of rows T depends on the batch.
3. ``before_attention`` and ``after_attention`` write no argument, so that they can be compiled. Whatever runs a layer
   writes its KV.
4. ``TORCH`` is the specification of operations; others round where it does.

It knows nothing about batches, pools or attention. Dimension key: see the package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from slipstream.engine.layers import Linear, rms_norm, rotate, silu_mul


def before_attention(x: torch.Tensor, norm: torch.Tensor | None, qkv: Linear, q_norm: torch.Tensor | None,
                     k_norm: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, heads: int, kv_heads: int,
                     size: int, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, in], normed by ``norm`` [in] unless None -> rotated queries [T, Q, D], KV to be written [T, 2, G, D]."""
    rows = qkv(x if norm is None else rms_norm(x, norm, eps)).view(x.shape[0], heads + 2 * kv_heads, size)
    return _turned(rows, q_norm, k_norm, cos, sin, heads, kv_heads, eps)


def _turned(rows: torch.Tensor, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None, cos: torch.Tensor,
            sin: torch.Tensor, heads: int, kv_heads: int, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    both = heads + kv_heads
    if q_norm is not None and k_norm is not None:
        rows[:, :heads] = rms_norm(rows[:, :heads], q_norm, eps)
        rows[:, heads:both] = rms_norm(rows[:, heads:both], k_norm, eps)
    rotate(rows[:, :both], cos, sin)
    return rows[:, :heads], rows[:, heads:].view(rows.shape[0], 2, kv_heads, rows.shape[2])


def after_attention(x: torch.Tensor, attended: torch.Tensor, o: Linear, norm: torch.Tensor, gate_up: Linear,
                    down: Linear, eps: float) -> torch.Tensor:
    """Residual stream x [T, H] and what attention gave [T, Q * D] -> [T, H]."""
    x = x + o(attended)
    return x + down(silu_mul(gate_up(rms_norm(x, norm, eps))))


class Before(Protocol):
    def __call__(self, x: torch.Tensor, norm: torch.Tensor | None, qkv: Linear, q_norm: torch.Tensor | None,
                 k_norm: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, heads: int, kv_heads: int,
                 size: int, eps: float, slots: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """As ``before_attention``, and the KV written at slots int64 [T] of kv [S, 2, G, D] -> queries."""
        ...


class Pure(Protocol):
    def __call__(self, x: torch.Tensor, norm: torch.Tensor | None, qkv: Linear, q_norm: torch.Tensor | None,
                 k_norm: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, heads: int, kv_heads: int,
                 size: int, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``before_attention``."""
        ...


class After(Protocol):
    def __call__(self, x: torch.Tensor, attended: torch.Tensor, o: Linear, norm: torch.Tensor, gate_up: Linear,
                 down: Linear, eps: float) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Halves:
    """How the halves of a layer run."""

    before: Before
    after: After


def writing(pure: Pure) -> Before:
    """A half that writes what ``pure`` gives it to be written."""

    def before(x: torch.Tensor, norm: torch.Tensor | None, qkv: Linear, q_norm: torch.Tensor | None,
               k_norm: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, heads: int, kv_heads: int,
               size: int, eps: float, slots: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        q, written = pure(x, norm, qkv, q_norm, k_norm, cos, sin, heads, kv_heads, size, eps)
        kv.index_copy_(0, slots, written)
        return q

    return before


EAGER = Halves(writing(before_attention), after_attention)


class Place(Protocol):
    def __call__(self, rows: torch.Tensor, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None, cos: torch.Tensor,
                 sin: torch.Tensor, heads: int, kv_heads: int, eps: float, slots: torch.Tensor,
                 kv: torch.Tensor) -> torch.Tensor:
        """rows [T, Q + 2 G, D], which may be written, normed and rotated -> queries [T, Q, D]; KV as in ``Before``."""
        ...


@dataclass(frozen=True, slots=True)
class Operations:
    """What stands between a layer's products. add_norm: x, added [T, H], weight [H], eps -> their sum and its norm."""

    add_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
    place: Place
    silu_mul: Callable[[torch.Tensor], torch.Tensor]


def _add_norm(x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor,
              eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    x = x + added
    return x, rms_norm(x, weight, eps)


def _place(rows: torch.Tensor, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None, cos: torch.Tensor,
           sin: torch.Tensor, heads: int, kv_heads: int, eps: float, slots: torch.Tensor,
           kv: torch.Tensor) -> torch.Tensor:
    q, written = _turned(rows, q_norm, k_norm, cos, sin, heads, kv_heads, eps)
    kv.index_copy_(0, slots, written)
    return q


TORCH = Operations(_add_norm, _place, silu_mul)


def same(x: torch.Tensor) -> torch.Tensor:
    return x


def halves_of(operations: Operations, total: Callable[[torch.Tensor], torch.Tensor] = same) -> Halves:
    """A layer of such operations. total: of what ``o`` and ``down`` give, where several ranks sum it."""

    def before(x: torch.Tensor, norm: torch.Tensor | None, qkv: Linear, q_norm: torch.Tensor | None,
               k_norm: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, heads: int, kv_heads: int,
               size: int, eps: float, slots: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        rows = qkv(x if norm is None else rms_norm(x, norm, eps)).view(x.shape[0], heads + 2 * kv_heads, size)
        return operations.place(rows, q_norm, k_norm, cos, sin, heads, kv_heads, eps, slots, kv)

    def after(x: torch.Tensor, attended: torch.Tensor, o: Linear, norm: torch.Tensor, gate_up: Linear, down: Linear,
              eps: float) -> torch.Tensor:
        x, normed = operations.add_norm(x, total(o(attended)), norm, eps)
        return x + total(down(operations.silu_mul(gate_up(normed))))

    return Halves(before, after)
