"""Triton kernels for the operations between a layer's products, and for the rounding to fp8.

Rules:
1. Each kernel rounds where torch's operations round: each value that torch would store is rounded to the same dtype.
   Only the order of the norm's sum differs.
2. Sizes are constants of a kernel and the number of rows is its grid, so one compilation serves a model, and a captured
   launch is like any other.
3. Sums and products are float32. Loads and stores beyond a row's end are masked.

It is imported only where Triton is installed (see ``fused``). It knows nothing about models. Parameters in capitals are
compile-time constants.
Format: Triton's language, 3.6 and later.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_norm(x: tl.tensor, added: tl.tensor, weight: tl.tensor, total: tl.tensor, normed: tl.tensor,
             WIDTH: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """One row: total = x + added, and normed = its RMS norm times weight. All of them [T, WIDTH] but weight [WIDTH]."""
    row = tl.program_id(0).to(tl.int64) * WIDTH
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    wide = (tl.load(x + row + at, inside, 0.0).to(tl.float32) + tl.load(added + row + at, inside, 0.0).to(tl.float32))
    stored = wide.to(total.dtype.element_ty)
    tl.store(total + row + at, stored, inside)
    wide = stored.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + EPS)
    wide = wide * tl.load(weight + at, inside, 0.0).to(tl.float32)
    tl.store(normed + row + at, wide.to(normed.dtype.element_ty), inside)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def rotate_and_store(rows: tl.tensor, cos: tl.tensor, sin: tl.tensor, slots: tl.tensor, q_norm: tl.tensor,
                     k_norm: tl.tensor, queries: tl.tensor, kv: tl.tensor, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
                     SIZE: tl.constexpr, NORMED: tl.constexpr, EPS: tl.constexpr, HEAD_BLOCK: tl.constexpr,
                     SIZE_BLOCK: tl.constexpr) -> None:
    """Some heads of one row of ``rows`` [T, Q + 2 G, D]: queries and keys are normed and rotated. Queries are written
    to ``queries`` [T, Q, D], keys and values to the row's slot of ``kv`` [S, 2, G, D]. cos, sin: [T, D], from
    ``layer.Rope``; q_norm, k_norm: [D], read if NORMED."""
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK))[:, None]
    at = tl.arange(0, SIZE_BLOCK)[None, :]
    across = tl.where(at < SIZE // 2, at + SIZE // 2, at - SIZE // 2)  # the other number of its rotary pair
    inside = (head < HEADS + 2 * KV_HEADS) & (at < SIZE)
    first = rows + (row * (HEADS + 2 * KV_HEADS) + head) * SIZE
    stored = tl.load(first + at, inside, 0.0)
    own, other = stored.to(tl.float32), tl.load(first + across, inside, 0.0).to(tl.float32)
    if NORMED:
        size = tl.rsqrt(tl.sum(own * own, 1) / SIZE + EPS)[:, None]
        is_query, wanted = head < HEADS, inside & (head < HEADS + KV_HEADS)
        scale = tl.where(is_query, tl.load(q_norm + at, at < SIZE, 0.0), tl.load(k_norm + at, at < SIZE, 0.0))
        own = tl.where(wanted, (own * size * scale.to(tl.float32)).to(stored.dtype).to(tl.float32), own)
        scale = tl.where(is_query, tl.load(q_norm + across, at < SIZE, 0.0), tl.load(k_norm + across, at < SIZE, 0.0))
        other = tl.where(wanted, (other * size * scale.to(tl.float32)).to(stored.dtype).to(tl.float32), other)
    turn = tl.load(cos + row * SIZE + at, at < SIZE, 0.0).to(tl.float32)
    lean = tl.load(sin + row * SIZE + at, at < SIZE, 0.0).to(tl.float32)
    rotated = (own * turn).to(stored.dtype).to(tl.float32) + other * lean
    done = tl.where(head < HEADS + KV_HEADS, rotated.to(stored.dtype), stored)
    tl.store(queries + (row * HEADS + head) * SIZE + at, done, inside & (head < HEADS))
    slot = tl.load(slots + row).to(tl.int64) * (2 * KV_HEADS)  # V lies behind K, as in the row
    tl.store(kv + (slot + head - HEADS) * SIZE + at, done, inside & (head >= HEADS))


@triton.jit
def silu_mul(gate_up: tl.tensor, out: tl.tensor, WIDTH: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """Part of one row: ``gate_up`` [T, 2 WIDTH] -> ``out`` [T, WIDTH], silu of the first half times the second."""
    row = tl.program_id(0).to(tl.int64) * WIDTH
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    gate = tl.load(gate_up + 2 * row + at, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up + 2 * row + WIDTH + at, inside, 0.0).to(tl.float32)
    stored = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty)
    tl.store(out + row + at, (stored.to(tl.float32) * up).to(out.dtype.element_ty), inside)


@triton.jit
def rounded(x: tl.tensor, out: tl.tensor, scales: tl.tensor, WIDTH: tl.constexpr, MOST: tl.constexpr,
            LEAST: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """One row of ``x`` [T, WIDTH] -> e4m3 ``out`` [T, WIDTH] and its float32 scale in ``scales`` [T]. MOST: the largest
    number of e4m3; LEAST: the smallest scale."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    wide = tl.load(x + row * WIDTH + at, inside, 0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(wide), 0) * (1.0 / MOST), LEAST)
    near = tl.clamp(tl.div_rn(wide, scale), -MOST, MOST, tl.PropagateNan.ALL)
    tl.store(out + row * WIDTH + at, near.to(out.dtype.element_ty), inside)
    tl.store(scales + row, scale)
