"""Mirror: a copy of the slot table on the model's device, updated by changes only, and the slot lists that kernels read
from it.

Rules:
1. One copy brings everything that a step needs from the host: its rows, the table's changes, where segments begin.
2. Kernels that read slots one segment behind the other have them gathered on the device: however long contexts are,
   the host sends what is new.
3. Nothing here waits for the device.
4. If a copy failed half-way (a full device), the next one sends all entries again, because entries that count as known
   may be missing.

It knows nothing about graphs or sessions. The specification is ``PagePlan.indices``.
"""

from __future__ import annotations

import numpy as np
import torch

from slipstream.engine.attention import PagePlan
from slipstream.engine.kv import Indices, SlotTable

NOWHERE: Indices = np.zeros(0, np.int64)


class Mirror:
    __slots__ = ("_entries", "_source", "table")

    def __init__(self, table: SlotTable, device: torch.device) -> None:
        self.table = table
        self._source = NOWHERE
        self._entries = torch.zeros(0, dtype=torch.int32, device=device)

    def bring(self, rows: Indices, plan: PagePlan, indices: torch.Tensor) -> torch.Tensor:
        """``rows`` where the device is, int64 [K]. The plan's slots are written over all of ``indices``; what lies
        behind the last of them repeats it. Of a plan over this table."""
        assert plan.begins is not None
        if self.table.entries is not self._source:
            self._begin()
        self._source = NOWHERE  # until all is done
        packed, sizes = self.packed(rows, plan)
        parts = torch.from_numpy(packed).to(self._entries.device, non_blocking=True).split_with_sizes(sizes)
        there, ends, offsets, changed, slots = parts
        self._entries.index_copy_(0, changed, slots.to(torch.int32))
        total = int(plan.kv_indptr[-1])
        places = torch.arange(total, device=self._entries.device)
        places += offsets.index_select(0, torch.searchsorted(ends, places, right=True))
        indices[:total] = self._entries.index_select(0, places)
        indices[total:] = int(plan.slots(len(plan.begins) - 1)[-1])
        self._source = self.table.entries
        return there

    def packed(self, rows: Indices, plan: PagePlan) -> tuple[Indices, list[int]]:
        """What travels, and the lengths of its parts: ``rows``, where segments end in a list and how far they lie from
        there in the table, what changed in the table and to what. The table's copy counts as up to date from now on."""
        table, begins = self.table, plan.begins
        assert begins is not None
        lists = plan.kv_indptr.astype(np.int64)
        ends, lengths = lists[1:], lists[1:] - lists[:-1]
        own = np.count_nonzero(begins >= table.width)  # the rest are dummies, which never change
        numbers, starts = begins[:own] // table.width, begins[:own] + lengths[:own]
        counts = (lengths[:own] - table.known[numbers]).clip(0)
        table.known[numbers] = lengths[:own]
        sums = counts.cumsum()
        changed = (starts - sums).repeat(counts) + np.arange(sums[-1] if own else 0)
        parts = (rows, ends, begins - lists[:-1], changed, table.entries[changed])
        return np.concatenate(parts), [len(part) for part in parts]

    def _begin(self) -> None:
        """All of it, when the table is new or has grown."""
        entries = self.table.entries.astype(np.int32)
        self._entries = torch.from_numpy(entries).to(self._entries.device, non_blocking=True)
        self.table.known[:] = self.table.width
