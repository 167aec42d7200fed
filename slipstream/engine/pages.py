"""Attention over one-slot pages: what of a batch is planned on the host, for torch and for paged kernels.

Rules:
1. A page is a slot. A segment's KV is a list of slots (``indices`` between two of ``kv_indptr``), its own rows last.
2. What a row sees is three numbers, whatever kind of row it is: of its segment's entries those from ``first`` up to
   ``limit``, and entry ``limit + j`` where bit j of ``word`` is set. A causal row has no word; a row of a tree has its
   ancestors there; a sliding window raises ``first``.
3. So a kernel's mask is 16 bytes a row, however long the context is, and nothing of it is made on the device.
4. All of it is planned on the host, once a forward, without a loop over rows.

It knows nothing about layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
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


def visible(plan: PagePlan, rows: slice, entries: int) -> NDArray[np.bool_]:
    """[q, entries]: which of a segment's entries its rows see (rule 2)."""
    entry = np.arange(entries)
    node = entry - plan.limits[rows, None]
    marked = (plan.words[rows, None].view(np.uint64) >> node.clip(0, MAX_NODES - 1).astype(np.uint64)) & np.uint64(1)
    seen: NDArray[np.bool_] = (entry >= plan.firsts[rows, None]) & ((node < 0) | ((marked != 0) & (node < MAX_NODES)))
    return seen


def write_pages(pages: PageTensors, plan: PagePlan) -> None:
    """A plan into tensors of its size, over all of them: what lies beyond the last entry repeats it."""
    length = len(plan.indices)
    pages.indices[:length].copy_(torch.from_numpy(plan.indices), non_blocking=True)
    pages.indices[length:] = int(plan.indices[-1])
    for tensor, values in ((pages.q_indptr, plan.q_indptr), (pages.kv_indptr, plan.kv_indptr),
                           (pages.firsts, plan.firsts), (pages.limits, plan.limits), (pages.words, plan.words)):
        tensor.copy_(torch.from_numpy(values), non_blocking=True)
