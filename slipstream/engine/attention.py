"""Attention over slots in plain torch: the specification, and the CPU's backend.

Rules:
1. What depends only on the batch (who sees what, which slots are gathered) is planned once per forward, not per layer.
2. The query heads of one KV head are folded into rows, so K and V are never repeated.
3. Segments alike in size (same power of two of rows and of KV entries) share one padded call; a segment alone is taken
   as it is, without a gather if its slots are one run. Padding reads the segment's own last slot, never foreign memory.
4. With ancestor words a row sees everything before the tree plus the nodes of its word. A sliding window of W shows a
   row at distance d only entries with d < W along its own path; trees are shallower than any window.

It knows nothing about layers, weights or why a row is there. Dimension key: see the package.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from slipstream.engine.batch import ForwardBatch, sent
from slipstream.protocol.tree import MAX_NODES

Indices = NDArray[np.int64]

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


def plan_attention(batch: ForwardBatch, group: int, dtype: torch.dtype, window: int = 0) -> AttentionPlan:
    """Plan the attention of every layer of one forward. group: query heads of one KV head; dtype: the queries';
    window: sliding window in tokens, 0 for none."""
    assert window == 0 or window >= MAX_NODES, "a window must hold a whole tree"
    host = _Host(batch, group, dtype, window)
    return AttentionPlan(tuple(host.single(s[0]) if len(s) == 1 else host.padded(s) for s in host.likes()), group)


def attend(q: torch.Tensor, kv: torch.Tensor, plan: AttentionPlan, scale: float) -> torch.Tensor:
    """q [T, Q, D], one layer's kv [S, 2, G, D] -> [T, Q * D]. The rows' own KV must be written already."""
    if len(plan.parts) == 1 and isinstance(plan.parts[0].targets, slice):
        return _part(_rows(q, plan.parts[0].rows), kv, plan.parts[0], plan.group, scale)
    out = q.new_empty(q.shape[0] + 1, q.shape[1] * q.shape[2])
    for part in plan.parts:
        out[part.targets] = _part(_rows(q, part.rows), kv, part, plan.group, scale)
    return out[:-1]


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
    """The batch's bookkeeping on the host while a plan is made."""

    __slots__ = ("batch", "device", "dtype", "group", "kv_slots", "window", "words")

    def __init__(self, batch: ForwardBatch, group: int, dtype: torch.dtype, window: int) -> None:
        self.batch, self.group, self.dtype, self.window = batch, group, dtype, window
        self.device = batch.kv_slots.device
        self.kv_slots, self.words = batch.host.kv_slots, batch.host.words

    def q_len(self, segment: int) -> int:
        return self.batch.q_indptr[segment + 1] - self.batch.q_indptr[segment]

    def kv_len(self, segment: int) -> int:
        return self.batch.kv_indptr[segment + 1] - self.batch.kv_indptr[segment]

    def slots(self, segment: int) -> Indices:
        return self.kv_slots[self.batch.kv_indptr[segment] : self.batch.kv_indptr[segment + 1]]

    def likes(self) -> Iterator[list[int]]:
        """Segments that go together."""
        open_groups: dict[tuple[int, int], list[int]] = {}
        most = PADDED_ENTRIES_CUDA if self.device.type == "cuda" else PADDED_ENTRIES
        for segment in range(len(self.batch.mask_lens)):
            n = self.kv_len(segment).bit_length()
            group = open_groups.setdefault((self.q_len(segment).bit_length(), n), [])
            group.append(segment)
            if len(group) << n >= most:
                yield open_groups.pop((self.q_len(segment).bit_length(), n))
        yield from open_groups.values()

    def single(self, segment: int) -> Part:
        """One segment, as it is."""
        slots = self.slots(segment)
        q, n = self.q_len(segment), len(slots)
        run = int(slots[-1] - slots[0]) == n - 1 and bool((np.diff(slots) == 1).all())
        visible = self.visible(segment)
        mask = None if visible.all() else self.additive(visible[None])
        first = self.batch.q_indptr[segment]
        rows = slice(first, first + q)
        return Part((1, q, n), rows, rows, slice(int(slots[0]), int(slots[0]) + n) if run else self.tensor(slots), mask)

    def padded(self, segments: Sequence[int]) -> Part:
        """Several segments, each padded to the most rows and the most KV entries among them."""
        q, n = max(map(self.q_len, segments)), max(map(self.kv_len, segments))
        rows = np.zeros((len(segments), q), np.int64)
        targets = np.full((len(segments), q), self.batch.num_rows, np.int64)
        slots = np.zeros((len(segments), n), np.int64)
        visible = np.zeros((len(segments), q, n), bool)
        for i, segment in enumerate(segments):
            own, entries = self.q_len(segment), self.kv_len(segment)
            first = self.batch.q_indptr[segment]
            targets[i, :own] = rows[i, :own] = np.arange(first, first + own)
            rows[i, own:] = first + own - 1
            slots[i, :entries] = self.slots(segment)
            slots[i, entries:] = slots[i, entries - 1]
            visible[i, :own, :entries] = self.visible(segment)
            visible[i, own:] = visible[i, own - 1]  # a padding row repeats the last one: no row of nothing but -inf
        mask = None if visible.all() else self.additive(visible)
        if np.array_equal(targets.ravel(), np.arange(self.batch.num_rows)):
            whole = slice(0, self.batch.num_rows)
            return Part((len(segments), q, n), whole, whole, self.tensor(slots.ravel()), mask)
        return Part((len(segments), q, n), self.tensor(rows.ravel()), self.tensor(targets.ravel()),
                    self.tensor(slots.ravel()), mask)

    def visible(self, segment: int) -> NDArray[np.bool_]:
        """bool [q, n]: which KV entries each row of a segment sees."""
        q, n, mask_len = self.q_len(segment), self.kv_len(segment), self.batch.mask_lens[segment]
        first = self.batch.q_indptr[segment]
        words = self.words[first : first + q].view(np.uint64)
        entry = np.arange(n)
        if mask_len == 0:
            end = np.arange(n - q, n)  # the index of each row's own entry
            seen = entry <= end[:, None]
        else:
            seen = np.ones((q, n), bool)
            seen[:, n - mask_len :] = (words[:, None] >> np.arange(mask_len, dtype=np.uint64)) & np.uint64(1)
            depth = np.array([int(word).bit_count() for word in words]) - 1
            end = n - mask_len + depth  # where the row would stand if its path were all there is
        if self.window:
            reach = np.minimum(end - self.window, n - mask_len - 1)
            seen &= entry > reach[:, None]
        return seen

    def additive(self, visible: NDArray[np.bool_]) -> torch.Tensor:
        # [b, q, n] -> [b, 1, q * group, n]: one row per folded query head
        mask = torch.zeros(visible.shape, dtype=self.dtype).masked_fill_(torch.from_numpy(~visible), float("-inf"))
        return mask.repeat_interleave(self.group, 1)[:, None].to(self.device, non_blocking=True)

    def tensor(self, values: Indices) -> torch.Tensor:
        return sent(values, self.device)
