"""ForwardBatch: one ragged forward for everything, and the builder that makes it.

Rules:
1. A prefill chunk, a plain step, a tree verification, a draft prefill and a tree growth are all *segments*: some query
   rows of one sequence, and the slots of the KV that they may see. The rows' own slots are the last of these. The slots
   are copied into the batch, or they are a row of a ``SlotTable``: then the cost of a batch depends on its new rows
   only, however long the contexts are.
2. A segment with ``mask_len == 0`` is causal. Else its last ``mask_len`` KV entries (at most 64) form a tree, and bit j
   of a row's ancestor word says whether the row sees entry ``kv_len - mask_len + j``. All rows see every entry before
   those.
3. A row's KV is written to its slot before attention, so a row sees itself.
4. A batch is built once and read-only afterwards. The builder collects lists, which are cheap to append to.
5. Copies to a device do not wait for the work that the device was given before (``choosing.transfer``).

It knows nothing about sessions, sampling or why a row is there.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.engine.kv import Row, SlotTable
from slipstream.protocol.tree import MAX_NODES, DraftTree


@dataclass(frozen=True, slots=True)
class HostRows:
    """The numbers of a batch's rows on the host. On a CPU the batch's tensors share their memory."""

    tokens: NDArray[np.int64]  # [T]
    positions: NDArray[np.int64]  # [T]
    slots: NDArray[np.int64]  # [T]
    words: NDArray[np.int64]  # [T]
    logit_rows: NDArray[np.int64]  # [R]
    kv_slots: NDArray[np.int64]  # of all segments, one after the other, or a whole table; see ``ForwardBatch.begins``

    def tensors(self, device: torch.device) -> dict[str, torch.Tensor]:
        """All fields but ``kv_slots``, which stay on the host, where attention is planned, as tensors on ``device``."""
        arrays = {"tokens": self.tokens, "positions": self.positions, "slots": self.slots, "words": self.words,
                  "logit_rows": self.logit_rows}
        if device.type == "cpu":
            return {name: torch.from_numpy(array) for name, array in arrays.items()}
        # Starting a copy to a device costs more than its bytes, so there is one copy for all.
        whole = torch.from_numpy(np.concatenate([*arrays.values()])).to(device, non_blocking=True)
        return dict(zip(arrays, whole.split_with_sizes([*map(len, arrays.values())]), strict=True))


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One forward pass. Planning reads plain Python and numpy values on the host. The tensors of the rows are copied to
    the device when the first of them is read, all in one copy."""

    host: HostRows
    q_indptr: tuple[int, ...]  # [B + 1] rows of segment b: q_indptr[b] : q_indptr[b + 1]
    kv_indptr: tuple[int, ...]  # [B + 1] segment b has kv_indptr[b + 1] - kv_indptr[b] KV entries
    begins: tuple[int, ...]  # [B] where they begin in ``host.kv_slots``
    mask_lens: tuple[int, ...]  # [B] 0: causal
    device: torch.device
    features: torch.Tensor | None = None  # [T, F] further input of draft heads
    table: SlotTable | None = None  # whose entries ``kv_slots`` are; None: these are the segments' own
    _tensors: dict[str, torch.Tensor] = field(default_factory=dict, compare=False)

    @property
    def tokens(self) -> torch.Tensor:
        """int64 [T]."""
        return self._tensor("tokens")

    @property
    def positions(self) -> torch.Tensor:
        """int64 [T]."""
        return self._tensor("positions")

    @property
    def slots(self) -> torch.Tensor:
        """int64 [T], where each row's K and V are written."""
        return self._tensor("slots")

    @property
    def words(self) -> torch.Tensor:
        """int64 [T], the bits of the uint64 ancestor word; unused where mask_len is 0."""
        return self._tensor("words")

    @property
    def logit_rows(self) -> torch.Tensor:
        """int64 [R], the rows whose logits are wanted, ascending."""
        return self._tensor("logit_rows")

    def _tensor(self, name: str) -> torch.Tensor:
        if name not in self._tensors:
            self._tensors.update(self.host.tensors(self.device))
        return self._tensors[name]

    def set_tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Use ``tensor`` for the field ``name``: another copy brought it to the device."""
        self._tensors[name] = tensor

    @property
    def num_rows(self) -> int:
        return self.q_indptr[-1]

    @property
    def flat_kv_slots(self) -> NDArray[np.int64]:
        """int64 [kv_indptr[-1]], the slots of all segments, one segment after the other, on the host."""
        return joined_runs(self.host.kv_slots, np.array(self.begins), np.array(self.kv_indptr))

    @property
    def kv_slots(self) -> torch.Tensor:
        """``flat_kv_slots`` on the batch's device."""
        return torch.from_numpy(self.flat_kv_slots).to(self.device)


def joined_runs(entries: NDArray[Any], begins: NDArray[Any], indptr: NDArray[Any]) -> NDArray[Any]:
    """Runs of ``entries``, joined: run b begins at ``begins[b]`` and has ``indptr[b + 1] - indptr[b]`` entries. A view
    where they are joined already, as those of lists are."""
    if np.array_equal(begins, indptr[:-1]):
        return entries[: indptr[-1]]
    sizes = np.diff(indptr).tolist()
    runs = [entries[begin : begin + size] for begin, size in zip(begins.tolist(), sizes, strict=True)]
    return np.concatenate(runs)


@dataclass(slots=True)
class BatchBuilder:
    """Collects segments; ``build`` makes the batch. Either all contexts are given as lists (``add``), or all as rows of
    one table (``add_row``, ``add_trees``)."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    q_indptr: list[int] = field(default_factory=lambda: [0])
    kv_indptr: list[int] = field(default_factory=lambda: [0])
    kv_slots: list[NDArray[np.int64]] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    mask_lens: list[int] = field(default_factory=list)
    words: list[int] = field(default_factory=list)
    logit_rows: list[int] = field(default_factory=list)
    table: SlotTable | None = None

    def add(self, tokens: Sequence[int], positions: Sequence[int], slots: Sequence[int],
            context: NDArray[np.int64], words: Sequence[int] | None = None, mask_len: int = 0,
            logits: str = "all") -> range:
        """Append a segment and return the indices of its rows.

        tokens, positions, slots: one entry a row. context: int64 [C], slots of the KV before the rows, oldest first.
        words: ancestor words (uint64 values), one a row, over the last ``mask_len`` entries of context and rows; None:
        causal.
        logits: "all", "last" or "none" of the rows get logits.
        """
        assert self.table is None
        self.begins.append(self.kv_indptr[-1])
        self.kv_slots.append(context)
        self.kv_slots.append(np.asarray(slots, np.int64))
        return self._add(tokens, positions, slots, len(context), words, mask_len, logits)

    def add_row(self, tokens: Sequence[int], positions: Sequence[int], slots: Sequence[int], row: Row, length: int,
                words: Sequence[int] | None = None, mask_len: int = 0, logits: str = "all") -> range:
        """As ``add``; the context is the first ``length`` entries of a table's row, and ``build`` writes ``slots``
        behind them."""
        assert self.table is row.table or not self.kv_indptr[-1]
        self.table = row.table
        self.begins.append(row.begin)
        return self._add(tokens, positions, slots, length, words, mask_len, logits)

    def add_trees(self, trees: Sequence[tuple[DraftTree, Row, int]], slots: Sequence[int]) -> list[list[int]]:
        """As ``add_row`` for each (tree, row, length); a tree of one node is a causal segment. slots: those of all
        nodes, tree by tree. Returns the depths of each tree's nodes.

        The loop is written out here: a step has a tree for each answer, and a function call a tree costs more."""
        tokens, positions, words, rows, entries = self.tokens, self.positions, self.words, self.q_indptr, self.kv_indptr
        first, begin, num_entries, depths = rows[-1], rows[-1], entries[-1], list[list[int]]()
        for tree, row, length in trees:
            root, levels, tree_words = tree.base - 1, [0], [1]
            tokens += tree.tokens
            count = len(tree.tokens)
            if count > 1:
                for node, parent in enumerate(tree.parents):
                    if node:
                        levels.append(levels[parent] + 1)
                        tree_words.append(1 << node | tree_words[parent])
                positions += [root + level for level in levels]
                words += tree_words if count < MAX_NODES else _signed(tree_words)
                self.mask_lens.append(count)
            else:
                positions.append(root)
                words.append(0)
                self.mask_lens.append(0)
            assert count <= MAX_NODES and (self.table is row.table or not num_entries)
            self.table = row.table
            self.begins.append(row.begin)
            first, num_entries = first + count, num_entries + length + count
            rows.append(first)
            entries.append(num_entries)
            depths.append(levels)
        assert len(slots) == first - begin
        self.slots += slots
        self.logit_rows += range(begin, first)
        return depths

    def _add(self, tokens: Sequence[int], positions: Sequence[int], slots: Sequence[int], length: int,
             words: Sequence[int] | None, mask_len: int, logits: str) -> range:
        count, first = len(tokens), self.q_indptr[-1]
        assert count == len(positions) == len(slots) > 0
        assert (words is None) == (mask_len == 0) and mask_len <= MAX_NODES
        rows = range(first, first + count)
        self.tokens += tokens
        self.positions += positions
        self.slots += slots
        self.words += [0] * count if words is None else _signed(words)
        self.mask_lens.append(mask_len)
        self.q_indptr.append(first + count)
        self.kv_indptr.append(self.kv_indptr[-1] + length + count)
        if logits == "all":
            self.logit_rows += rows
        elif logits == "last":
            self.logit_rows.append(first + count - 1)
        return rows

    def build(self, device: torch.device | str = "cpu", features: torch.Tensor | None = None) -> ForwardBatch:
        """The finished batch. features: [T, F] or None."""
        # By way of an array: numpy converts a list three times as slowly.
        whole = np.asarray(array("q", [*self.tokens, *self.positions, *self.slots, *self.words, *self.logit_rows]))
        rows = len(self.tokens)
        tokens, positions, slots, words = whole[: 4 * rows].reshape(4, rows)
        entries = self._write_to_table(slots) if self.table is not None else np.concatenate(self.kv_slots)
        host = HostRows(tokens, positions, slots, words, whole[4 * rows :], entries)
        return ForwardBatch(host, tuple(self.q_indptr), tuple(self.kv_indptr), tuple(self.begins),
                            tuple(self.mask_lens), torch.device(device), features, self.table)

    def _write_to_table(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """The table's entries, after the rows' slots were written behind their contexts."""
        assert self.table is not None
        ends, rows = np.array(self.kv_indptr), np.array(self.q_indptr)
        counts = rows[1:] - rows[:-1]
        self.table.write(np.array(self.begins), ends[1:] - ends[:-1] - counts, counts, slots)
        return self.table.entries


def rows_batch(slots: NDArray[np.int64], device: torch.device, features: torch.Tensor | None = None) -> ForwardBatch:
    """A batch of one causal segment without context: token 0 in as many rows as there are ``slots``."""
    builder = BatchBuilder()
    builder.add([0] * len(slots), range(len(slots)), slots.tolist(), np.zeros(0, np.int64), logits="all")
    return builder.build(device, features)


def _signed(words: Sequence[int]) -> list[int]:
    # torch has no useful uint64: the same 64 bits travel as int64.
    return [int(w) - (1 << 64) if int(w) >= 1 << 63 else int(w) for w in words]
