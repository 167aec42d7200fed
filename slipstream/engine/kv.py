"""Slots and the KV pool: one slot for each token's keys and values, and who owns it.

Rules of slots:
1. Every slot is free or owned by exactly one owner (a session or the prefix cache); ``check`` proves it.
2. A slot is written before it is read. The pool is not cleared when a slot changes hands.
3. Accepting a token moves no data: its slot joins a list, nothing else.
4. The slots of an answer are neighbours if the pool has room for that: neighbours in memory are read faster.

RadixCache: the prefix cache. It keeps the KV of computed prompts, so a prompt with the same beginning is cheap.

Rules of the cache:
1. It is a radix tree: a node has a run of tokens and their slots; children of a node differ in their first token.
2. The cache owns all its slots, also those of running answers' prompts: these answers lock them. ``insert`` gives slots
   to the cache; it frees those whose tokens it holds already.
3. A locked node and all nodes above it stay; others may be evicted, leaves first, the least recently used first.
4. Each namespace has its own tree, and a prompt is looked up in its namespace only: response times must not show what
   other tenants asked. Eviction is over all trees.
Idea: radix attention (SGLang, arXiv 2312.07104), page size one.

SlotTable: the slots of each sequence's tokens, one row for each sequence.

Rules of the table:
1. Entry i of a row is the slot of token i. After the computed tokens come the slots of the rows that a step adds:
   prompt rows or tree nodes. So a batch needs only row numbers and lengths, and copies no context.
2. Row 0 holds the slots of the dummy rows of captured steps (see ``graphs``).
3. The table grows when it has no room for a new row; rows keep their numbers.
4. ``synced`` counts the first entries of a row that a device's copy (``mirror``) has right; later ones are sent to it.
   So only ``Row.write`` and ``SlotTable.write`` write entries: they lower ``synced``.

It knows nothing about sessions, trees or models.
"""

from __future__ import annotations

import ctypes
import heapq
import mmap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from slipstream.base.errors import CapacityError

Indices = NDArray[np.int64]

SCAN = 4096  # free flags that are searched at a time
FIRST_ROWS, FIRST_WIDTH = 8, 1024  # size of a new table
FEW_SLOTS = 64  # a tree's, not a prompt's: with so few Python is faster than numpy, most of all with cold caches
RUN = 16  # consecutive slots that one answer fills; longer runs measured the same
FREE_RUN = b"\x01" * RUN


class Slots:
    """The free list of a pool."""

    __slots__ = ("_flags", "_lowest", "_num_free", "num_slots")

    def __init__(self, num_slots: int) -> None:
        assert num_slots > 0
        self.num_slots = num_slots
        self._flags = bytearray(b"\x01") * num_slots  # 1: free
        self._num_free = num_slots
        self._lowest = 0  # no slot below it is free

    @property
    def num_free(self) -> int:
        return self._num_free

    def alloc(self, n: int) -> Indices:
        """The n lowest free slots, int64 [n], ascending. Raises CapacityError, and changes nothing, when fewer are
        free."""
        if n > self._num_free:
            raise _out_of_slots(n, self)
        assert n >= 0
        if n > FEW_SLOTS:
            return self._alloc_many(n)
        place, slots = self._lowest - 1, list[int]()
        for _ in range(n):
            place = self._flags.find(1, place + 1)
            self._flags[place] = 0
            slots.append(place)
        self._num_free -= n
        self._lowest = place + 1
        return np.array(slots, np.int64)

    def _alloc_many(self, n: int) -> Indices:
        free, found, start, missing = np.frombuffer(self._flags, bool), list[Indices](), self._lowest, n
        while missing:
            found.append(np.flatnonzero(free[start : start + SCAN])[:missing] + start)
            missing -= len(found[-1])
            start += SCAN
        slots = np.concatenate(found)
        free[slots] = False
        self._num_free -= n
        self._lowest = int(slots[-1]) + 1
        return slots

    def alloc_behind(self, wanted: Sequence[tuple[int, int]]) -> list[int]:
        """For each (count, slot) of ``wanted``, ``count`` free slots near ``slot``: the later ones of its run of RUN,
        then whole free runs, else the lowest free slots. Returns all, in order. Raises CapacityError, and changes
        nothing, when fewer are free in all."""
        n = sum([count for count, _ in wanted])
        if n > self._num_free:
            raise _out_of_slots(n, self)
        flags, taken = self._flags, list[int]()
        for count, place in wanted:
            for _ in range(count):
                place = flags.find(1, place + 1, place + RUN - place % RUN)
                if place < 0:
                    place = self._next_place()
                flags[place] = 0
                taken.append(place)
        self._num_free -= n
        return taken

    def _next_place(self) -> int:
        """The first slot of the lowest free run; the lowest free slot if there is no free run within SCAN slots of it,
        so that a full pool is not searched as a whole. One slot must be free."""
        place, end = self._lowest, self._lowest + SCAN
        while (place := self._flags.find(FREE_RUN, place, end)) >= 0:
            begin = -(-place // RUN) * RUN  # runs begin at multiples of RUN, so that two answers never share one
            if self._flags.startswith(FREE_RUN, begin):
                return begin
            place = begin
        self._lowest = self._flags.find(1, self._lowest)
        return self._lowest

    def free(self, slots: Indices | list[int]) -> None:
        """Give slots back; each must be owned and occur once."""
        if len(slots) > FEW_SLOTS:
            self._free_many(np.asarray(slots, np.int64))
            return
        places: list[int] = slots if isinstance(slots, list) else slots.tolist()
        for slot in places:
            assert not self._flags[slot], f"slot {slot} is free or named twice"
            self._flags[slot] = 1
        self._num_free += len(places)
        self._lowest = min([self._lowest, *places])

    def _free_many(self, slots: Indices) -> None:
        free = np.frombuffer(self._flags, bool)
        assert not free[slots].any(), "a slot is free or named twice"
        free[slots] = True
        self._num_free += len(slots)
        assert np.count_nonzero(free) == self._num_free, "a slot is free or named twice"
        self._lowest = min(self._lowest, int(slots.min()))

    def check(self, owned: Iterable[Indices]) -> None:
        """Prove that every slot is free or in exactly one of the ``owned`` arrays, once. Raises AssertionError."""
        holders = np.frombuffer(self._flags, np.uint8).astype(np.int64)
        for slots in owned:
            np.add.at(holders, slots, 1)
        wrong = np.flatnonzero(holders != 1)
        assert len(wrong) == 0, (f"{int((holders == 0).sum())} slots lost, {int((holders > 1).sum())} owned twice; "
                                 f"first: {wrong[:8].tolist()}")
        assert self._num_free == self._flags.count(1), "the count of free slots is wrong"


def _out_of_slots(wanted: int, slots: Slots) -> CapacityError:
    return CapacityError(f"{wanted} KV slots wanted, {slots.num_free} of {slots.num_slots} are free; "
                         "wait for answers to end, or raise 'slots' in the configuration")


LARGE_PAGE = 2 << 20  # bytes, on x86-64 and on most of Arm


def in_large_pages(memory: torch.Tensor) -> torch.Tensor:
    """The same tensor; Linux is advised to use large pages for its memory, which makes reading all of it faster. It
    takes no memory before it is written to."""
    if memory.device.type == "cpu" and hasattr(mmap, "MADV_HUGEPAGE"):
        first = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        size = (memory.data_ptr() + memory.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
        if size > 0:  # the system may ignore the advice
            ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)
    return memory


def _staggered_slots(num_layers: int, num_slots: int, slot_bytes: int) -> int:
    """How many slots to allocate a layer, at least ``num_slots``. The first write to a large page takes up to 5 ms;
    layers of this size reach their next page in different steps, not all in the same one."""
    pages = -(-num_slots * slot_bytes // LARGE_PAGE)
    return -(-(pages * LARGE_PAGE + LARGE_PAGE // num_layers) // slot_bytes)


class KVPool:
    """Keys and values of all layers: ``kv`` [L, S, 2, G, D]. K and V of a slot lie side by side, so one write and one
    gather move both. Memory is used when slots are first written, not before."""

    __slots__ = ("kv",)

    def __init__(self, num_layers: int, num_slots: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype,
                 device: torch.device | str = "cpu") -> None:
        layer_bytes, allocated = num_slots * 2 * num_kv_heads * head_dim * dtype.itemsize, num_slots
        if layer_bytes >= LARGE_PAGE and torch.device(device).type == "cpu":
            allocated = _staggered_slots(num_layers, num_slots, layer_bytes // num_slots)
        self.kv = in_large_pages(torch.empty(num_layers, allocated, 2, num_kv_heads, head_dim, dtype=dtype,
                                             device=device))[:, :num_slots]
        assert self.kv[0].is_contiguous(), "kernels know a layer by where it begins"

    @property
    def num_slots(self) -> int:
        return self.kv.shape[1]

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write keys and values of one layer. slots: int64 [T]; k, v: [T, G, D]."""
        self.kv[layer].index_copy_(0, slots, torch.stack((k, v), 1))


@dataclass(slots=True, eq=False)
class Node:
    """A run of tokens below its parent."""

    parent: Node | None
    tokens: Indices  # int64 [n]
    slots: Indices  # int64 [n]
    locks: int = 0  # matches that end at this node or below it and are locked
    used: int = 0  # clock of the last ``match`` or ``insert`` that passed it
    children: dict[int, Node] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix of some tokens: ``length`` tokens, that end at ``node``. slots: int64 [length]; after
    an ``insert`` behind another match, those of the inserted tokens only."""

    length: int
    slots: Indices
    node: Node


class RadixCache:
    """The prefix cache; see the rules above. It belongs to the engine thread, as the slots do."""

    __slots__ = ("_clock", "_num_locked", "_num_slots", "_roots", "_slots")

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._roots: dict[str, Node] = {}  # by namespace
        self._clock = self._num_slots = self._num_locked = 0

    def __len__(self) -> int:
        """Slots that the cache owns."""
        return self._num_slots

    @property
    def num_evictable(self) -> int:
        """Slots that ``evict`` could free now."""
        return self._num_slots - self._num_locked

    def match(self, tokens: ArrayLike, namespace: str = "") -> Match:
        """The longest prefix of tokens [n] that is cached in ``namespace``. Lock it before the next ``evict``."""
        node, length = self._descend(self._roots.get(namespace) or _root(), np.asarray(tokens, np.int64))
        return Match(length, _slots(node), node)

    def peek(self, tokens: ArrayLike, namespace: str = "", usable: NDArray[np.bool_] | None = None) -> tuple[int, int]:
        """How many of tokens [n] are cached in ``namespace``, and how many of those are locked. It changes nothing, not
        even when they were last used. usable: [S] slots that count; None: all."""
        tokens, at, locked = np.asarray(tokens, np.int64), 0, 0
        node = self._roots.get(namespace)
        while node is not None and at < len(tokens) and (child := node.children.get(int(tokens[at]))) is not None:
            common = _common(child.tokens, tokens[at:])
            if usable is not None and not (counted := usable[child.slots[:common]]).all():
                common = int(counted.argmin())
            node, at = child if common == len(child.tokens) else None, at + common
            locked = at if child.locks else locked
        return at, locked

    def num_kept_only_by(self, match: Match) -> int:
        """How many slots no other lock than this match's own keeps."""
        return sum([len(node.slots) for node in _path(match.node) if node.locks == 1])

    def lock(self, match: Match, prefix: Match | None = None) -> None:
        """Keep the matched prefix until ``unlock``; may be called more than once. prefix: a locked match of a shorter
        prefix; its lock becomes part of this one."""
        for node in _path(match.node, None if prefix is None else prefix.node):
            self._num_locked += len(node.slots) if node.locks == 0 else 0
            node.locks += 1

    def unlock(self, match: Match) -> None:
        for node in _path(match.node):
            assert node.locks > 0, "unlocked more often than locked"
            node.locks -= 1
            self._num_locked -= len(node.slots) if node.locks == 0 else 0

    def insert(self, tokens: ArrayLike, slots: Indices, namespace: str = "", prefix: Match | None = None) -> Match:
        """Give ``slots`` (one for each token, KV written) to the cache. If it holds a token already, the given slot is
        freed, unless the cache has that very slot. The caller must lock the result before it uses any of its slots.
        Returns the match of all ``tokens``. prefix: a locked match of the tokens before ``tokens``, so that they are
        not searched again; the result's ``slots`` are then those of ``tokens`` only."""
        tokens = np.asarray(tokens, np.int64)
        assert len(tokens) == len(slots)
        prefix_length, start = 0, self._roots.setdefault(namespace, _root())
        if prefix is not None and prefix.length:  # a root may have been given up meanwhile
            prefix_length, start = prefix.length, prefix.node
        node, length = self._descend(start, tokens)
        given, held = slots[:length], _slots(node, start)
        self._slots.free(given[given != held])
        if length < len(tokens):
            parent, node = node, Node(node, tokens[length:].copy(), slots[length:].copy(), used=self._clock)
            parent.children[int(tokens[length])] = node
            self._num_slots += len(tokens) - length
        return Match(prefix_length + len(tokens), np.concatenate((held, slots[length:])), node)

    def evict(self, n: int) -> int:
        """Free ``n`` slots, or all that are not locked if these are fewer: the ends of the least recently used runs.
        Returns how many were freed."""
        leaves = [(node.used, id(node), node) for node in self._nodes() if not node.children and not node.locks]
        heapq.heapify(leaves)
        freed = 0
        while leaves and freed < n:
            node = heapq.heappop(leaves)[2]
            freed += self._trim(node, n - freed)
            above = node.parent
            if above is not None and above.parent is not None and not above.children and not above.locks:
                heapq.heappush(leaves, (above.used, id(above), above))
        self._roots = {name: root for name, root in self._roots.items() if root.children}
        return freed

    def owned(self) -> list[Indices]:
        """The slots of every node, for ``Slots.check``."""
        return [node.slots for node in self._nodes()]

    def _descend(self, root: Node, tokens: Indices) -> tuple[Node, int]:
        # The node at which the longest common prefix ends; splits a run where the prefix ends inside it.
        self._clock += 1
        node, at = root, 0
        while at < len(tokens) and (child := node.children.get(int(tokens[at]))) is not None:
            common = _common(child.tokens, tokens[at:])
            node = child if common == len(child.tokens) else _split(child, common)
            node.used = self._clock
            at += common
            if node is not child:
                break
        return node, at

    def _trim(self, node: Node, n: int) -> int:
        # Free the last n slots of a leaf; the leaf itself when nothing is left.
        assert node.parent is not None and n > 0
        keep = max(0, len(node.slots) - n)
        trimmed = node.slots[keep:]
        self._slots.free(trimmed)
        self._num_slots -= len(trimmed)
        if keep == 0:
            del node.parent.children[int(node.tokens[0])]
        node.tokens, node.slots = node.tokens[:keep], node.slots[:keep]
        return len(trimmed)

    def _nodes(self) -> Iterator[Node]:
        pending = [child for root in self._roots.values() for child in root.children.values()]
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.children.values())


def _root() -> Node:
    return Node(None, np.zeros(0, np.int64), np.zeros(0, np.int64))


def _path(node: Node, above: Node | None = None) -> Iterator[Node]:
    # The node and those above it, without the root; or without ``above`` and those over it.
    while node is not above and node.parent is not None:
        yield node
        node = node.parent


def _slots(node: Node, above: Node | None = None) -> Indices:
    # The slots of all tokens from the root down to the node, or of those below ``above``.
    return np.concatenate([np.zeros(0, np.int64), *[n.slots for n in _path(node, above)][::-1]])


def _common(a: Indices, b: Indices) -> int:
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


def _split(node: Node, at: int) -> Node:
    # The upper part is the new node: matches that hold ``node`` keep naming the whole prefix.
    assert node.parent is not None
    upper = Node(node.parent, node.tokens[:at], node.slots[:at], node.locks, node.used, {int(node.tokens[at]): node})
    node.parent.children[int(node.tokens[0])] = upper
    node.parent, node.tokens, node.slots = upper, node.tokens[at:], node.slots[at:]
    return upper


class SlotTable:
    """Belongs to the engine thread. ``entries`` int64 [R * W]: a batch keeps those that it was built over."""

    __slots__ = ("_free", "entries", "synced", "width")

    def __init__(self, dummies: Sequence[int] = ()) -> None:
        """dummies: spare slots for row 0 (rule 2)."""
        self.width = max(FIRST_WIDTH, len(dummies))
        self.entries: Indices = np.zeros(FIRST_ROWS * self.width, np.int64)
        self.entries[: len(dummies)] = dummies
        self.synced: Indices = np.zeros(FIRST_ROWS, np.int64)  # [R]
        self._free = list(range(FIRST_ROWS - 1, 0, -1))

    def add_row(self, width: int) -> Row:
        """A row with room for ``width`` entries. Its content is undefined."""
        if width > self.width or not self._free:
            self._grow(max(width, 2 * self.width) if width > self.width else self.width)
        return Row(self, self._free.pop())

    def write(self, begins: Indices, lengths: Indices, counts: Indices, slots: Indices) -> None:
        """Write slots into rows: of row b, which begins at ``begins[b]``, the ``counts[b]`` entries after its first
        ``lengths[b]``. begins, lengths, counts: [B]; slots: those of all rows, one row after the other."""
        places = begins + lengths
        if len(slots) > len(begins):  # else each row gets one
            places = (places + counts - counts.cumsum()).repeat(counts) + np.arange(len(slots))
        self.entries[places] = slots
        rows = begins // self.width
        self.synced[rows] = np.minimum(self.synced[rows], lengths)

    def free_row(self, row: Row) -> None:
        """Give a row back."""
        assert row.number not in self._free, "a row is given back twice"
        self._free.append(row.number)

    @property
    def num_used_rows(self) -> int:
        return len(self.entries) // self.width - 1 - len(self._free)

    def _grow(self, width: int) -> None:
        rows = len(self.entries) // self.width
        wanted = rows if self._free else 2 * rows
        grown = np.zeros((wanted, width), np.int64)
        grown[:rows, : self.width] = self.entries.reshape(rows, self.width)
        self._free += range(wanted - 1, rows - 1, -1)
        self.entries, self.width, self.synced = grown.reshape(-1), width, np.zeros(wanted, np.int64)


@dataclass(frozen=True, slots=True)
class Row:
    table: SlotTable
    number: int

    @property
    def begin(self) -> int:
        """The index of its first entry in ``table.entries``."""
        return self.number * self.table.width

    @property
    def slots(self) -> Indices:
        """int64 [W], a view of the row; only to be read (rule 4 of the table)."""
        return self.table.entries[self.number * self.table.width : (self.number + 1) * self.table.width]

    def write(self, start: int, slots: Indices | list[int]) -> None:
        """Write ``slots`` as the row's entries from ``start`` on."""
        begin, synced = self.begin + start, self.table.synced
        self.table.entries[begin : begin + len(slots)] = slots
        if synced[self.number] > start:
            synced[self.number] = start
