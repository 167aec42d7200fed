"""Attention over slots in plain torch: the specification, and the CPU's backend.

Rules:
1. What depends only on the batch (who sees what, which slots are gathered) is planned once per forward, not per layer.
2. The query heads of one KV head are folded into rows, so K and V are never repeated.
3. Segments alike in size (same power of two of rows and of KV entries) share one padded call; a segment alone is taken
   as it is, without a gather if its slots are one run. Padding reads the segment's own last slot, never foreign memory.
4. Who sees what is what ``pages`` says, as it is for kernels.

It knows nothing about layers, weights or why a row is there. Dimension key: see the package.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from slipstream.engine.batch import sent
from slipstream.engine.pages import PagePlan, PageTensors, visible

# KV entries of one padded call, about: bounds what is gathered at a time. A GPU likes few launches.
PADDED_ENTRIES, PADDED_ENTRIES_CUDA = 8192, 131_072


@dataclass(frozen=True, slots=True)
class Part:
    """Segments that share one call: b of them, padded to q rows and n KV entries."""

    size: tuple[int, int, int]  # b, q, n
    rows: slice | torch.Tensor  # b * q rows of the batch
    targets: slice | torch.Tensor  # where their results go; the row after the last one takes those of padding
    slots: slice | torch.Tensor  # b * n KV slots, or n that all segments read
    mask: torch.Tensor | None  # [b, 1, q * Q/G, n] added to the scores; None: every row sees everything


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    parts: tuple[Part, ...]
    group: int  # Q/G


def plan_attention(pages: PagePlan, group: int, dtype: torch.dtype, device: torch.device) -> AttentionPlan:
    """Plan the attention of every layer of one forward. group: query heads of one KV head; dtype: the queries'."""
    host = _Host(pages, group, dtype, device)
    return AttentionPlan(tuple(host.single(s[0]) if len(s) == 1 else host.padded(s) for s in host.likes()), group)


def attend(q: torch.Tensor, kv: torch.Tensor, plan: AttentionPlan, scale: float) -> torch.Tensor:
    """q [T, Q, D], one layer's kv [S, 2, G, D] -> [T, Q * D]. The rows' own KV must be written already."""
    if len(plan.parts) == 1 and isinstance(plan.parts[0].targets, slice):
        return _part(_rows(q, plan.parts[0].rows), kv, plan.parts[0], plan.group, scale)
    out = q.new_empty(q.shape[0] + 1, q.shape[1] * q.shape[2])
    for part in plan.parts:
        out[part.targets] = _part(_rows(q, part.rows), kv, part, plan.group, scale)
    return out[:-1]


def attend_pages(q: torch.Tensor, kv: torch.Tensor, pages: PageTensors, scale: float) -> torch.Tensor:
    """The same of what a paged kernel reads: the specification of such kernels."""
    plan = plan_attention(PagePlan(*(part.cpu().numpy() for part in pages)), q.shape[1] // kv.shape[2], q.dtype,
                          q.device)
    return attend(q, kv, plan, scale)


def _part(q: torch.Tensor, kv: torch.Tensor, part: Part, group: int, scale: float) -> torch.Tensor:
    # q [b * q, Q, D] -> [b * q, Q * D]
    b, rows, n = part.size
    heads, size = kv.shape[2], kv.shape[3]
    entries = _rows(kv, part.slots).view(-1, n, 2, heads, size).expand(b, -1, -1, -1, -1)
    folded = q.reshape(b, rows, heads, group, size).transpose(1, 2).reshape(b, heads, rows * group, size)
    out = F.scaled_dot_product_attention(folded, entries[:, :, 0].transpose(1, 2), entries[:, :, 1].transpose(1, 2),
                                         attn_mask=part.mask, scale=scale)
    if rows == 1:
        return out.reshape(b, heads * group * size)  # CUDA kernels leave heads and rows the other way round
    return out.view(b, heads, rows, group, size).transpose(1, 2).reshape(b * rows, heads * group * size)


def _rows(x: torch.Tensor, index: slice | torch.Tensor) -> torch.Tensor:
    # index_select is several times as fast as indexing by a tensor.
    return x[index] if isinstance(index, slice) else x.index_select(0, index)


class _Host:
    """The bookkeeping on the host while a plan is made."""

    __slots__ = ("device", "dtype", "group", "pages")

    def __init__(self, pages: PagePlan, group: int, dtype: torch.dtype, device: torch.device) -> None:
        self.pages, self.group, self.dtype, self.device = pages, group, dtype, device

    def q_len(self, segment: int) -> int:
        return int(self.pages.q_indptr[segment + 1] - self.pages.q_indptr[segment])

    def kv_len(self, segment: int) -> int:
        return int(self.pages.kv_indptr[segment + 1] - self.pages.kv_indptr[segment])

    def rows(self, segment: int) -> slice:
        return slice(int(self.pages.q_indptr[segment]), int(self.pages.q_indptr[segment + 1]))

    def slots(self, segment: int) -> NDArray[np.int32]:
        return self.pages.indices[self.pages.kv_indptr[segment] : self.pages.kv_indptr[segment + 1]]

    def likes(self) -> Iterator[list[int]]:
        """Segments that go together."""
        open_groups: dict[tuple[int, int], list[int]] = {}
        most = PADDED_ENTRIES_CUDA if self.device.type == "cuda" else PADDED_ENTRIES
        for segment in range(len(self.pages.q_indptr) - 1):
            n = self.kv_len(segment).bit_length()
            group = open_groups.setdefault((self.q_len(segment).bit_length(), n), [])
            group.append(segment)
            if len(group) << n >= most:
                yield open_groups.pop((self.q_len(segment).bit_length(), n))
        yield from open_groups.values()

    def single(self, segment: int) -> Part:
        """One segment, as it is."""
        slots, rows = self.slots(segment), self.rows(segment)
        q, n = rows.stop - rows.start, len(slots)
        run = int(slots[-1] - slots[0]) == n - 1 and bool((np.diff(slots) == 1).all())
        seen = visible(self.pages, rows, n)
        mask = None if seen.all() else self.additive(seen[None])
        return Part((1, q, n), rows, rows, slice(int(slots[0]), int(slots[0]) + n) if run else self.tensor(slots), mask)

    def padded(self, segments: Sequence[int]) -> Part:
        """Several segments, each padded to the most rows and the most KV entries among them."""
        q, n = max(map(self.q_len, segments)), max(map(self.kv_len, segments))
        count = self.pages.num_rows
        rows = np.zeros((len(segments), q), np.int64)
        targets = np.full((len(segments), q), count, np.int64)
        slots = np.zeros((len(segments), n), np.int64)
        seen = np.zeros((len(segments), q, n), bool)
        for i, segment in enumerate(segments):
            of, entries = self.rows(segment), self.kv_len(segment)
            own = of.stop - of.start
            targets[i, :own] = rows[i, :own] = np.arange(of.start, of.stop)
            rows[i, own:] = of.stop - 1
            slots[i, :entries] = self.slots(segment)
            slots[i, entries:] = slots[i, entries - 1]
            seen[i, :own, :entries] = visible(self.pages, of, entries)
            seen[i, own:] = seen[i, own - 1]  # a padding row repeats the last one: no row of nothing but -inf
        mask = None if seen.all() else self.additive(seen)
        if np.array_equal(targets.ravel(), np.arange(count)):
            whole = slice(0, count)
            return Part((len(segments), q, n), whole, whole, self.tensor(slots.ravel()), mask)
        return Part((len(segments), q, n), self.tensor(rows.ravel()), self.tensor(targets.ravel()),
                    self.tensor(slots.ravel()), mask)

    def additive(self, seen: NDArray[np.bool_]) -> torch.Tensor:
        # [b, q, n] -> [b, 1, q * group, n]: one row per folded query head
        mask = torch.zeros(seen.shape, dtype=self.dtype).masked_fill_(torch.from_numpy(~seen), float("-inf"))
        return mask.repeat_interleave(self.group, 1)[:, None].to(self.device, non_blocking=True)

    def tensor(self, values: NDArray[np.int64] | NDArray[np.int32]) -> torch.Tensor:
        return sent(values.astype(np.int64, copy=False), self.device)
