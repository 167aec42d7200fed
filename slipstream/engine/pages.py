"""Attention over one-slot pages: what a paged kernel is told of a batch, and in plain torch what it must answer.

Rules:
1. A page is a slot. A segment's KV is a list of slots (``indices`` between two of ``kv_indptr``), its own rows last.
2. What a row sees is three numbers, whatever kind of row it is: of its segment's entries those from ``first`` up to
   ``limit``, and entry ``limit + j`` where bit j of ``word`` is set. A causal row has no word; a row of a tree has its
   ancestors there; a sliding window raises ``first``.
3. So a mask is 16 bytes a row, however long the context is, and nothing of it is made on the device.
4. All of it is planned on the host, once a forward, without a loop over rows.

``attend_pages`` is the specification for kernels; it reads the same tensors as they do. It knows nothing about layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from slipstream.engine.batch import ForwardBatch
from slipstream.protocol.tree import MAX_NODES


@dataclass(frozen=True, slots=True)
class PagePlan:
    """A batch as a paged kernel reads it, on the host."""

    q_indptr: NDArray[np.int32]  # [B + 1]
    kv_indptr: NDArray[np.int32]  # [B + 1]
    indices: NDArray[np.int32]  # [kv_indptr[-1]] slots
    firsts: NDArray[np.int32]  # [T]
    limits: NDArray[np.int32]  # [T]
    words: NDArray[np.int64]  # [T]

    @property
    def num_rows(self) -> int:
        return len(self.words)


@dataclass(frozen=True, slots=True)
class PageTensors:
    """The same where the kernel runs."""

    q_indptr: torch.Tensor  # int32 [B + 1]
    kv_indptr: torch.Tensor  # int32 [B + 1]
    indices: torch.Tensor  # int32 [at least kv_indptr[-1]]
    firsts: torch.Tensor  # int32 [T]
    limits: torch.Tensor  # int32 [T]
    words: torch.Tensor  # int64 [T]

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from (self.q_indptr, self.kv_indptr, self.indices, self.firsts, self.limits, self.words)

    @staticmethod
    def empty(rows: int, segments: int, entries: int, device: torch.device) -> PageTensors:
        """Room for so much."""
        def zeros(size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        return PageTensors(zeros(segments + 1), zeros(segments + 1), zeros(entries), zeros(rows), zeros(rows),
                           zeros(rows, torch.int64))

    def part(self, rows: int, segments: int) -> PageTensors:
        """The same memory for fewer rows and segments."""
        return PageTensors(self.q_indptr[: segments + 1], self.kv_indptr[: segments + 1], self.indices,
                           self.firsts[:rows], self.limits[:rows], self.words[:rows])


def plan_pages(batch: ForwardBatch, window: int = 0) -> PagePlan:
    """window: sliding window in tokens, 0 for none; it must hold a whole tree."""
    assert window == 0 or window >= MAX_NODES, "a window must hold a whole tree"
    q_indptr, kv_indptr = np.asarray(batch.q_indptr), np.asarray(batch.kv_indptr)
    q, n = np.diff(q_indptr), np.diff(kv_indptr)
    rows = np.repeat(np.arange(len(q)), q)
    n, mask_lens = n[rows], np.asarray(batch.mask_lens)[rows]
    causal = mask_lens == 0
    words = np.where(causal, 0, batch.host.words)
    # Of a causal row its own entry, of a row of a tree the entry where it would stand if its path were all there is.
    own = n - q[rows] + np.arange(len(rows)) - q_indptr[rows]
    end = np.where(causal, own, n - mask_lens + np.bitwise_count(words.view(np.uint64)) - 1)
    limits = np.where(causal, own + 1, n - mask_lens)
    firsts = np.clip(end - window + 1, 0, limits) if window else np.zeros(len(rows))
    return PagePlan(q_indptr.astype(np.int32), kv_indptr.astype(np.int32), batch.host.kv_slots.astype(np.int32),
                    firsts.astype(np.int32), limits.astype(np.int32), words)


def placed(plan: PagePlan, device: torch.device) -> PageTensors:
    """A plan's own tensors, for one forward."""
    def tensor(values: NDArray[np.int32] | NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(values).to(device, non_blocking=True)

    return PageTensors(tensor(plan.q_indptr), tensor(plan.kv_indptr), tensor(plan.indices), tensor(plan.firsts),
                       tensor(plan.limits), tensor(plan.words))


def attend_pages(q: torch.Tensor, kv: torch.Tensor, pages: PageTensors, scale: float) -> torch.Tensor:
    """q [T, Q, D], one layer's kv [S, 2, G, D] -> [T, Q * D]. The rows' own KV must be written already."""
    out = torch.empty(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)
    q_indptr, kv_indptr = pages.q_indptr.tolist(), pages.kv_indptr.tolist()
    for b in range(len(q_indptr) - 1):
        rows = slice(q_indptr[b], q_indptr[b + 1])
        k, v = kv[pages.indices[kv_indptr[b] : kv_indptr[b + 1]]].permute(1, 2, 0, 3)[:, None]  # [1, G, n, D] each
        attended = F.scaled_dot_product_attention(q[rows].transpose(0, 1)[None], k, v, visible(pages, rows, k.shape[2]),
                                                  scale=scale, enable_gqa=True)
        out[rows] = attended[0].transpose(0, 1).flatten(1)
    return out


def visible(pages: PageTensors, rows: slice, entries: int) -> torch.Tensor:
    """bool [q, entries]: which of a segment's entries its rows see (rule 2)."""
    entry = torch.arange(entries, device=pages.words.device)
    node = entry - pages.limits[rows, None]
    marked = (pages.words[rows, None] >> node.clamp(0, MAX_NODES - 1)) & 1 == 1
    return (entry >= pages.firsts[rows, None]) & ((node < 0) | (marked & (node < MAX_NODES)))
