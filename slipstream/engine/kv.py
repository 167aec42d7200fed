"""Slots and the KV pool: one slot per token, and who owns it.

Rules:
1. Every slot is free or owned by exactly one holder (a session, the prefix cache); ``check`` proves it.
2. A slot is written before it is read. The pool is not cleared when a slot changes hands.
3. Accepting a token moves no data: its slot joins a list, nothing else.

It knows nothing about sessions, trees or models.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.base.errors import CapacityError

Indices = NDArray[np.int64]

SCAN = 4096  # free flags looked at in one go
FEW = 32  # slots for which Python is faster than numpy, most of all with cold caches: a tree's


class Slots:
    """The free list of a pool. The lowest free slots are handed out first, so runs stay contiguous where they can."""

    __slots__ = ("_flags", "_free", "_lowest", "_num_free", "num_slots")

    def __init__(self, num_slots: int) -> None:
        assert num_slots > 0
        self.num_slots = num_slots
        self._flags = bytearray(b"\x01") * num_slots
        self._free = np.frombuffer(self._flags, bool)  # the same memory
        self._num_free = num_slots
        self._lowest = 0  # no free slot stands below it

    @property
    def num_free(self) -> int:
        return self._num_free

    def alloc(self, n: int) -> Indices:
        """int64 [n], ascending. Raises CapacityError, and changes nothing, when fewer are free."""
        if n > self._num_free:
            raise CapacityError(f"{n} KV slots wanted, {self._num_free} of {self.num_slots} are free; "
                                "wait for answers to end, or raise 'slots' in the configuration")
        if n <= 0:
            return np.zeros(0, np.int64)
        slots = self._take_few(n) if n <= FEW else self._take(n)
        self._num_free -= n
        self._lowest = int(slots[-1]) + 1
        return slots

    def _take_few(self, n: int) -> Indices:
        place, few = self._lowest - 1, list[int]()
        for _ in range(n):
            place = self._flags.find(1, place + 1)
            self._flags[place] = 0
            few.append(place)
        return np.array(few, np.int64)

    def _take(self, n: int) -> Indices:
        found: list[Indices] = []
        start, missing = self._lowest, n
        while missing > 0:
            window = np.flatnonzero(self._free[start : start + SCAN])[:missing] + start
            found.append(window)
            missing -= len(window)
            start += SCAN
        slots = found[0] if len(found) == 1 else np.concatenate(found)
        self._free[slots] = False
        return slots

    def free(self, slots: Indices | list[int]) -> None:
        """Give slots back; each must be owned and named once. A list is for a few."""
        if len(slots) == 0:
            return
        if isinstance(slots, list) or len(slots) <= FEW:
            self._free_few(slots if isinstance(slots, list) else slots.tolist())
            return
        owned = ~self._free[slots]
        assert owned.all(), f"slots freed twice: {slots[~owned][:8].tolist()}"
        assert len(set(slots.tolist())) == len(slots), "a slot is named twice"
        self._free[slots] = True
        self._num_free += len(slots)
        self._lowest = min(self._lowest, int(slots.min()))

    def _free_few(self, slots: list[int]) -> None:
        for slot in slots:
            assert not self._flags[slot], f"slot {slot} is free or named twice"
            self._flags[slot] = 1
        self._num_free += len(slots)
        self._lowest = min(self._lowest, *slots)

    def check(self, owned: Iterable[Indices]) -> None:
        """Prove that every slot is free, or in exactly one of the ``owned`` arrays. AssertionError otherwise."""
        holders = self._free.astype(np.int64)
        for slots in owned:
            np.add.at(holders, slots, 1)
        wrong = np.flatnonzero(holders != 1)
        assert len(wrong) == 0, (f"{int((holders == 0).sum())} slots lost, {int((holders > 1).sum())} owned twice; "
                                 f"first: {wrong[:8].tolist()}")
        assert self._num_free == int(self._free.sum()), "the count of free slots is wrong"


class KVPool:
    """Keys and values of all layers. K and V of a slot lie side by side: one write and one gather move both.
    Memory is touched when slots are written, not before."""

    __slots__ = ("kv",)

    def __init__(self, num_layers: int, num_slots: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype,
                 device: torch.device | str = "cpu") -> None:
        self.kv = torch.empty(num_layers, num_slots, 2, num_kv_heads, head_dim, dtype=dtype, device=device)

    @property
    def num_slots(self) -> int:
        return self.kv.shape[1]

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """slots int64 [T]; k, v [T, G, D]."""
        self.kv[layer].index_copy_(0, slots, torch.stack((k, v), 1))
