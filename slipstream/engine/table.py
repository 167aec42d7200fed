"""SlotTable: which KV slot each token of each sequence has, a row for each sequence.

Rules:
1. Entry i of a row is the slot of token i. Behind the tokens that are computed stand the slots of what a step adds:
   prompt rows, nodes of a tree. So a batch names rows and lengths, and lists no context.
2. Row 0 belongs to the dummies of captured steps, and holds their slots.
3. The table grows when a row is wanted that it has no room for; rows keep their numbers.
4. ``known`` says how many of a row's first entries a device's copy has right. So entries are written by ``Row.put``
   and by who builds a batch (``place``) alone, which lower it; the copy is sent what lies behind.

It knows nothing about who owns a slot (``kv.Slots``), nor about what a sequence is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.engine.kv import Indices

FIRST_ROWS, FIRST_WIDTH = 8, 1024


class SlotTable:
    """Belongs to the engine thread. ``entries`` int64 [R * W]: a batch keeps those that it was built over."""

    __slots__ = ("_free", "entries", "known", "width")

    def __init__(self, dummies: Sequence[int] = ()) -> None:
        """dummies: slots that nobody is handed."""
        self.width = max(FIRST_WIDTH, len(dummies))
        self.entries: Indices = np.zeros(FIRST_ROWS * self.width, np.int64)
        self.entries[: len(dummies)] = dummies
        self.known: Indices = np.zeros(FIRST_ROWS, np.int64)  # [R]
        self._free = list(range(FIRST_ROWS - 1, 0, -1))

    def take(self, width: int) -> Row:
        """A row with room for so many entries. It may hold anything."""
        if width > self.width or not self._free:
            self._grow(max(width, 2 * self.width) if width > self.width else self.width)
        return Row(self, self._free.pop())

    def place(self, begins: Indices, lengths: Indices, counts: Indices, slots: Indices) -> None:
        """So many of ``slots`` behind the first entries of rows that begin there. begins, lengths, counts: [B]."""
        places = begins + lengths
        if len(slots) > len(begins):  # else one each
            places = (places + counts - counts.cumsum()).repeat(counts) + np.arange(len(slots))
        self.entries[places] = slots
        rows = begins // self.width
        self.known[rows] = np.minimum(self.known[rows], lengths)

    def give(self, row: Row) -> None:
        assert row.number not in self._free, "a row is given back twice"
        self._free.append(row.number)

    @property
    def num_taken(self) -> int:
        return len(self.entries) // self.width - 1 - len(self._free)

    def _grow(self, width: int) -> None:
        rows = len(self.entries) // self.width
        wanted = rows if self._free else 2 * rows
        grown = np.zeros((wanted, width), np.int64)
        grown[:rows, : self.width] = self.entries.reshape(rows, self.width)
        self._free += range(wanted - 1, rows - 1, -1)
        self.entries, self.width, self.known = grown.reshape(-1), width, np.zeros(wanted, np.int64)


@dataclass(frozen=True, slots=True)
class Row:
    table: SlotTable
    number: int

    @property
    def begin(self) -> int:
        """Where it begins among the table's entries."""
        return self.number * self.table.width

    @property
    def slots(self) -> Indices:
        """int64 [W], the row itself, to be read."""
        return self.table.entries[self.number * self.table.width : (self.number + 1) * self.table.width]

    def put(self, start: int, slots: Indices | list[int]) -> None:
        """Entries from ``start`` on."""
        begin, known = self.begin + start, self.table.known
        self.table.entries[begin : begin + len(slots)] = slots
        if known[self.number] > start:
            known[self.number] = start
