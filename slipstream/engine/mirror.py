"""Mirror: a copy of a ``SlotTable`` on a model's device. Each step sends it the changed entries only.

Rules:
1. A step sends one copy to the device: its rows, the changed entries of the table, and where segments begin.
2. Kernels read the slots of all segments as one list, which is gathered on the device: the host sends new entries only,
   however long contexts are.
3. Nothing here waits for the device.
4. If a copy fails half-way (the device was full), the next step sends the whole table: entries that count as known may
   be missing on the device.

It knows nothing about graphs or sessions. The specification is ``PagePlan.indices``.
"""

from __future__ import annotations

import numpy as np
import torch

from slipstream.engine.attention import PagePlan
from slipstream.engine.kv import Indices, SlotTable

NO_ENTRIES: Indices = np.zeros(0, np.int64)


class Mirror:
    """The copy of one table on one device."""

    __slots__ = ("_entries", "_source", "table")

    def __init__(self, table: SlotTable, device: torch.device) -> None:
        self.table = table
        self._source = NO_ENTRIES
        self._entries = torch.zeros(0, dtype=torch.int32, device=device)

    def send(self, rows: Indices, plan: PagePlan, indices: torch.Tensor) -> torch.Tensor:
        """Send ``rows`` int64 [K] and the table's changes; returns ``rows`` on the device. The plan's slots are written
        to ``indices``, and the last of them into the rest of it. plan: of a batch over this table."""
        if self.table.entries is not self._source:
            self._send_table()
        self._source = NO_ENTRIES  # until all is done
        packed, sizes = self.packed(rows, plan)
        parts = torch.from_numpy(packed).to(self._entries.device, non_blocking=True).split_with_sizes(sizes)
        device_rows, ends, offsets, changed, slots = parts
        self._entries.index_copy_(0, changed, slots.to(torch.int32))
        total = int(plan.kv_indptr[-1])
        places = torch.arange(total, device=self._entries.device)
        places += offsets.index_select(0, torch.searchsorted(ends, places, right=True))
        indices[:total] = self._entries.index_select(0, places)
        indices[total:] = int(plan.slots(len(plan.begins) - 1)[-1])
        self._source = self.table.entries
        return device_rows

    def packed(self, rows: Indices, plan: PagePlan) -> tuple[Indices, list[int]]:
        """The numbers to send, and the lengths of their parts: ``rows``; where segments end in the list; the distance
        from there to their place in the table; the changed places of the table; their slots. From now on ``synced``
        counts these as sent."""
        table, begins = self.table, plan.begins
        lists = plan.kv_indptr.astype(np.int64)
        ends, lengths = lists[1:], lists[1:] - lists[:-1]
        own = np.count_nonzero(begins >= table.width)  # the rest are dummies, which never change
        numbers, starts = begins[:own] // table.width, begins[:own] + lengths[:own]
        counts = (lengths[:own] - table.synced[numbers]).clip(0)
        table.synced[numbers] = lengths[:own]
        sums = counts.cumsum()
        changed = (starts - sums).repeat(counts) + np.arange(sums[-1] if own else 0)
        parts = (rows, ends, begins - lists[:-1], changed, table.entries[changed])
        return np.concatenate(parts), [len(part) for part in parts]

    def _send_table(self) -> None:
        """Send the whole table, when it is new, has grown, or a copy failed."""
        entries = self.table.entries.astype(np.int32)
        self._entries = torch.from_numpy(entries).to(self._entries.device, non_blocking=True)
        self.table.synced[:] = self.table.width
