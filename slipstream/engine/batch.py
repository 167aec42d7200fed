"""ForwardBatch: one ragged forward for everything, and the builder that makes it.

Rules:
1. A prefill chunk, a plain step, a tree verification, a draft prefill and a tree growth are all *segments*: some query
   rows of one sequence, plus the slots of the KV that they may see. The rows' own slots are the last ones of the list.
2. Visibility is causal, or ruled by ancestor words: the last ``mask_len`` KV entries of a segment form a tree, and
   bit j of a row's word says whether the row sees entry ``kv_len - mask_len + j``. Everything before them is visible to
   all rows. With words, ``mask_len`` is at most 64; with ``mask_len == 0`` the segment is causal.
3. A row's KV is written to its slot before attention, so a row sees itself.
4. Built once, read-only afterwards. Lists until ``build``, tensors after: lists are cheap to append to.
5. Numbers go from the host to a device without waiting for what the device was given before (``choosing.transfer``).

It knows nothing about sessions, sampling or why a row is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.protocol.tree import MAX_NODES


@dataclass(frozen=True, slots=True)
class HostRows:
    """What a batch's tensors say, int64, on the host. On a CPU they share memory with the tensors."""

    tokens: NDArray[np.int64]  # [T]
    positions: NDArray[np.int64]  # [T]
    slots: NDArray[np.int64]  # [T]
    words: NDArray[np.int64]  # [T]
    logit_rows: NDArray[np.int64]  # [R]
    kv_slots: NDArray[np.int64]  # [kv_indptr[-1]]

    def placed(self, device: torch.device) -> Sequence[torch.Tensor]:
        """The same, in this order, on a device."""
        arrays = (self.tokens, self.positions, self.slots, self.words, self.logit_rows, self.kv_slots)
        if device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        whole = torch.from_numpy(np.concatenate(arrays)).to(device, non_blocking=True)
        return whole.split_with_sizes([len(array) for array in arrays])


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The arrays of one forward pass. Host-side bookkeeping is plain Python: backends plan on the host."""

    tokens: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    slots: torch.Tensor  # int64 [T] where each row's K and V are written
    q_indptr: tuple[int, ...]  # [B + 1] rows of segment b: q_indptr[b] : q_indptr[b + 1]
    kv_indptr: tuple[int, ...]  # [B + 1]
    kv_slots: torch.Tensor  # int64 [kv_indptr[-1]]
    mask_lens: tuple[int, ...]  # [B] 0: causal
    words: torch.Tensor  # int64 [T], the bits of the uint64 ancestor word; unused where mask_len is 0
    logit_rows: torch.Tensor  # int64 [R] rows whose logits are wanted, ascending
    host: HostRows  # the same numbers where the host reads them: nothing is copied back from a device to plan with
    features: torch.Tensor | None = None  # [T, F] further input of draft heads

    @property
    def num_rows(self) -> int:
        return self.q_indptr[-1]

    @staticmethod
    def of(host: HostRows, q_indptr: Sequence[int], kv_indptr: Sequence[int], mask_lens: Sequence[int],
           placed: Sequence[torch.Tensor], features: torch.Tensor | None = None) -> ForwardBatch:
        """placed: ``host.placed``."""
        tokens, positions, slots, words, logit_rows, kv_slots = placed
        return ForwardBatch(tokens, positions, slots, tuple(q_indptr), tuple(kv_indptr), kv_slots, tuple(mask_lens),
                            words, logit_rows, host, features)


@dataclass(slots=True)
class BatchBuilder:
    """Collects segments; ``build`` makes the batch."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    q_indptr: list[int] = field(default_factory=lambda: [0])
    kv_indptr: list[int] = field(default_factory=lambda: [0])
    kv_slots: list[NDArray[np.int64]] = field(default_factory=list)
    mask_lens: list[int] = field(default_factory=list)
    words: list[int] = field(default_factory=list)
    logit_rows: list[int] = field(default_factory=list)

    def add(self, tokens: Sequence[int], positions: Sequence[int], slots: Sequence[int],
            context: NDArray[np.int64], words: Sequence[int] | None = None, mask_len: int = 0,
            logits: str = "all") -> range:
        """Append a segment and return the indices of its rows.

        tokens, positions, slots: one entry a row. context: int64 [C], slots of the KV before the rows, oldest first.
        words: ancestor words (uint64 values), one a row, over the last ``mask_len`` entries of context and rows; None:
        causal.
        logits: "all", "last" or "none" of the rows get logits.
        """
        assert len(tokens) == len(positions) == len(slots) > 0
        assert (words is None) == (mask_len == 0) and mask_len <= MAX_NODES
        first = len(self.tokens)
        self.tokens.extend(tokens)
        self.positions.extend(positions)
        self.slots.extend(slots)
        self.words.extend([0] * len(tokens) if words is None else _signed(words))
        self.mask_lens.append(mask_len)
        self.q_indptr.append(len(self.tokens))
        self.kv_slots.append(context)
        self.kv_slots.append(np.asarray(slots, np.int64))
        self.kv_indptr.append(self.kv_indptr[-1] + len(context) + len(slots))
        rows = range(first, len(self.tokens))
        if logits == "all":
            self.logit_rows.extend(rows)
        elif logits == "last":
            self.logit_rows.append(rows[-1])
        return rows

    def build(self, device: torch.device | str = "cpu", features: torch.Tensor | None = None) -> ForwardBatch:
        """The finished batch. features: [T, F] or None."""
        lists = [*self.tokens, *self.positions, *self.slots, *self.words, *self.logit_rows]
        whole = np.concatenate([np.array(lists, np.int64), *self.kv_slots])
        rows, wanted = len(self.tokens), len(self.logit_rows)
        sizes = [rows] * 4 + [wanted, len(whole) - len(lists)]
        ends = list(accumulate(sizes))
        host = HostRows(*(whole[end - size : end] for size, end in zip(sizes, ends, strict=True)))
        # A copy to a device costs more to begin than its bytes: one for all.
        placed = torch.from_numpy(whole).to(device, non_blocking=True).split_with_sizes(sizes)
        return ForwardBatch.of(host, self.q_indptr, self.kv_indptr, self.mask_lens, placed, features)


def rows_batch(slots: NDArray[np.int64], device: torch.device, features: torch.Tensor | None = None) -> ForwardBatch:
    """A causal segment of token 0, with so many rows as slots."""
    builder = BatchBuilder()
    builder.add([0] * len(slots), range(len(slots)), slots.tolist(), np.zeros(0, np.int64), logits="all")
    return builder.build(device, features)


def _signed(words: Sequence[int]) -> list[int]:
    # torch has no useful uint64: the same 64 bits travel as int64.
    return [int(w) - (1 << 64) if int(w) >= 1 << 63 else int(w) for w in words]
