"""Attention over slots: which KV entries a row sees, torch's computation of it, and the protocol of other kernels.

Rules:
1. A page is a slot. A segment's KV is a list of slots (``indices`` between two of ``kv_indptr``), its own rows last.
2. Three numbers say what a row of any kind sees: the entries of its segment from ``first`` up to (not including)
   ``limit``, and entry ``limit + j`` where bit j of ``word`` is set. A causal row has the word 0; a tree row's word
   marks its ancestors; a sliding window raises ``first``. So a mask is 16 bytes a row, however long the context.
3. These numbers are computed on the host, once a forward and not once a layer, without a loop over rows.
4. Torch's attention is the specification, and what runs on a CPU. The query heads of one KV head are folded into rows,
   so K and V are never repeated. Segments of similar size (same power of two of rows and of KV entries) share one
   padded call, which gathers no slots if they are consecutive. Padding reads the segment's
   own last slot, never that of another segment.
5. A *fixed* attention is planned many times for one number of rows and segments. It always reads the same memory, so a
   captured graph can contain it. Its owner writes all of that memory before each ``replan``.
6. Before other kernels serve, ``disagreement`` compares both of their forms (planned and fixed) with torch's, with NaN
   in all slots that no row may read.

It knows nothing about layers, weights or why a row is there. Which attention serves: ``flashinfer.attention_for``.
Dimension key: see the package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from slipstream.choosing.transfer import to_device
from slipstream.engine.batch import BatchBuilder, ForwardBatch, joined_runs
from slipstream.engine.model import ModelConfig
from slipstream.protocol.tree import MAX_NODES


@dataclass(frozen=True, slots=True)
class PagePlan:
    """What a paged attention kernel needs of a batch, on the host (rule 2)."""

    q_indptr: NDArray[np.int32]  # [B + 1]
    kv_indptr: NDArray[np.int32]  # [B + 1]
    begins: NDArray[np.int32] | NDArray[np.int64]  # [B] where each segment's slots begin in ``entries``
    entries: NDArray[np.int32] | NDArray[np.int64]  # KV slots: those of all segments, or a whole ``SlotTable``
    firsts: NDArray[np.int32]  # [T]
    limits: NDArray[np.int32]  # [T]
    words: NDArray[np.int64]  # [T]

    @property
    def num_rows(self) -> int:
        return len(self.words)

    @property
    def indices(self) -> NDArray[np.int32]:
        """int32 [kv_indptr[-1]], the slots of all segments, one segment after the other."""
        return joined_runs(self.entries, self.begins, self.kv_indptr).astype(np.int32, copy=False)

    def slots(self, segment: int) -> NDArray[np.int32] | NDArray[np.int64]:
        begin, size = int(self.begins[segment]), int(self.kv_indptr[segment + 1] - self.kv_indptr[segment])
        return self.entries[begin : begin + size]


@dataclass(frozen=True, slots=True)
class PageTensors:
    """A ``PagePlan`` on the device of the kernel."""

    q_indptr: torch.Tensor  # int32 [B + 1]
    kv_indptr: torch.Tensor  # int32 [B + 1]
    indices: torch.Tensor  # int32 [at least kv_indptr[-1]]
    firsts: torch.Tensor  # int32 [T]
    limits: torch.Tensor  # int32 [T]
    words: torch.Tensor  # int64 [T]

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from (self.q_indptr, self.kv_indptr, self.indices, self.firsts, self.limits, self.words)

    @staticmethod
    def within(numbers: torch.Tensor, indices: torch.Tensor, rows: int) -> PageTensors:
        """Views into ``numbers``, memory for what ``packed`` makes of plans of ``rows`` rows; ``indices`` is kept as it
        is."""
        halves = numbers[rows:].view(torch.int32)
        ends = len(halves) // 2 - rows
        firsts, limits, q_indptr, kv_indptr = halves.split_with_sizes((rows, rows, ends, ends))
        return PageTensors(q_indptr, kv_indptr, indices, firsts, limits, numbers[:rows])


def plan_pages(batch: ForwardBatch, window: int = 0) -> PagePlan:
    """The plan of a batch. window: sliding window in tokens, 0 for none; it must hold a whole tree."""
    assert window == 0 or window >= MAX_NODES, "a window must hold a whole tree"
    segments, count = len(batch.mask_lens), batch.num_rows
    host = np.array((batch.q_indptr, batch.kv_indptr, (*batch.mask_lens, 0)))
    q_indptr, kv_indptr, mask_lens = host[0], host[1], host[2, :segments]
    q, n = host[:2, 1:] - host[:2, :-1]
    own = n - q_indptr[1:]  # a causal row's own entry minus its index in the batch, the same for all rows of a segment
    whole = n - mask_lens
    if count > segments:  # else each segment has one row
        own, whole, mask_lens = np.repeat(np.array((own, whole, mask_lens)), q, axis=1)
    limits = own + np.arange(1, count + 1)
    words = batch.host.words
    if any(batch.mask_lens):
        causal = mask_lens == 0
        words = np.where(causal, 0, words)
        limits = np.where(causal, limits, whole)
    firsts = np.zeros(count, np.int32)
    if window:  # a tree row's window counts its own path only, not the other nodes
        end = limits + np.bitwise_count(words.view(np.uint64)).astype(np.int64)
        firsts = np.clip(end - window, 0, limits).astype(np.int32)
    return PagePlan(q_indptr.astype(np.int32), kv_indptr.astype(np.int32), np.array(batch.begins), batch.host.kv_slots,
                    firsts, limits.astype(np.int32), words)


def page_tensors(plan: PagePlan, device: torch.device) -> PageTensors:
    """The tensors of a plan on ``device``, newly made, for one forward."""
    numbers, indices = (torch.from_numpy(part).to(device, non_blocking=True) for part in (packed(plan), plan.indices))
    return PageTensors.within(numbers, indices, plan.num_rows)


def visible(plan: PagePlan, rows: slice, entries: int) -> NDArray[np.bool_]:
    """bool [q, entries]: which of its segment's first ``entries`` entries each of ``rows`` sees (rule 2)."""
    entry = np.arange(entries)
    node = entry - plan.limits[rows, None]
    marked = (plan.words[rows, None].view(np.uint64) >> node.clip(0, MAX_NODES - 1).astype(np.uint64)) & np.uint64(1)
    seen: NDArray[np.bool_] = (entry >= plan.firsts[rows, None]) & ((node < 0) | ((marked != 0) & (node < MAX_NODES)))
    return seen


def packed_size(rows: int, segments: int) -> int:
    """How many int64 ``packed`` returns."""
    return 2 * rows + segments + 1


def packed(plan: PagePlan) -> NDArray[np.int64]:
    """int64 [2 * T + B + 1]: all of a plan except its slots, in one array for one copy to the device."""
    halves = np.concatenate((plan.firsts, plan.limits, plan.q_indptr, plan.kv_indptr))
    return np.concatenate((plan.words, halves.view(np.int64)))


def write_indices(pages: PageTensors, plan: PagePlan) -> None:
    """Write a plan's slots into ``pages.indices``, and the last slot into the rest of it."""
    indices = plan.indices
    pages.indices[: len(indices)].copy_(torch.from_numpy(indices), non_blocking=True)
    pages.indices[len(indices) :] = int(indices[-1])


# KV entries of one padded call, about: it bounds the memory of a gather. More on a GPU, where launches are expensive.
PADDED_ENTRIES, PADDED_ENTRIES_CUDA = 8192, 131_072


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Segments that share one call: b of them, padded to q rows and n KV entries."""

    size: tuple[int, int, int]  # b, q, n
    rows: slice | torch.Tensor  # b * q rows of the batch
    targets: slice | torch.Tensor  # result rows; padding rows write to an extra row after the last one
    slots: slice | torch.Tensor  # b * n KV slots
    mask: torch.Tensor | None  # [b, 1, q * Q/G, n] added to the scores; None: every row sees everything


class Segment(NamedTuple):
    number: int
    first: int  # row of the batch
    rows: int
    entries: int  # of KV


def plan_attention(pages: PagePlan, group: int, dtype: torch.dtype, device: torch.device) -> tuple[AttentionCall, ...]:
    """The calls that compute the attention of each layer of one forward. group: query heads of one KV head; dtype: that
    of the queries."""
    rows = np.diff(pages.q_indptr).tolist()
    entries = np.diff(pages.kv_indptr).tolist()
    segments = [Segment(i, *each) for i, each in enumerate(zip(pages.q_indptr.tolist(), rows, entries, strict=False))]
    most = PADDED_ENTRIES_CUDA if device.type == "cuda" else PADDED_ENTRIES
    return tuple(_call_of(pages, alike, group, dtype, device) for alike in _groups(segments, most))


def attend(q: torch.Tensor, kv: torch.Tensor, plan: tuple[AttentionCall, ...], scale: float) -> torch.Tensor:
    """q [T, Q, D], one layer's kv [S, 2, G, D] -> [T, Q * D]. The rows' own KV must be written already."""
    whole = plan[0].targets if plan else None
    if isinstance(whole, slice) and whole == slice(0, len(q)):  # asked first: to compare a tensor takes 20 us
        return _run_call(_rows(q, plan[0].rows), kv, plan[0], scale)
    out = q.new_empty(q.shape[0] + 1, q.shape[1] * q.shape[2])
    for part in plan:
        out[part.targets] = _run_call(_rows(q, part.rows), kv, part, scale)
    return out[:-1]


def attend_pages(q: torch.Tensor, kv: torch.Tensor, pages: PageTensors, scale: float) -> torch.Tensor:
    """``attend`` from the inputs of a paged kernel: the specification of such kernels. Slow: it plans at each call."""
    q_indptr, kv_indptr, *rest = (part.cpu().numpy() for part in pages)
    plan = PagePlan(q_indptr, kv_indptr, kv_indptr[:-1], *rest)
    return attend(q, kv, plan_attention(plan, q.shape[1] // kv.shape[2], q.dtype, q.device), scale)


def _run_call(q: torch.Tensor, kv: torch.Tensor, part: AttentionCall, scale: float) -> torch.Tensor:
    # q [b * q, Q, D] -> [b * q, Q * D]
    b, rows, n = part.size
    heads, size, group = kv.shape[2], kv.shape[3], q.shape[1] // kv.shape[2]
    entries = _rows(kv, part.slots).view(b, n, 2, heads, size)
    folded = q.reshape(b, rows, heads, group, size).transpose(1, 2).reshape(b, heads, rows * group, size)
    out = F.scaled_dot_product_attention(folded, entries[:, :, 0].transpose(1, 2), entries[:, :, 1].transpose(1, 2),
                                         attn_mask=part.mask, scale=scale)
    if rows == 1:
        return out.reshape(b, heads * group * size)  # CUDA kernels leave heads and rows the other way round
    return out.view(b, heads, rows, group, size).transpose(1, 2).reshape(b * rows, heads * group * size)


def _rows(x: torch.Tensor, index: slice | torch.Tensor) -> torch.Tensor:
    # index_select is several times as fast as indexing by a tensor.
    return x[index] if isinstance(index, slice) else x.index_select(0, index)


def _groups(segments: Sequence[Segment], most: int) -> Iterator[list[Segment]]:
    """Groups of segments that share one call (rule 4), each of about ``most`` KV entries at most."""
    open_groups: dict[tuple[int, int], list[Segment]] = {}
    for segment in segments:
        kind = segment.rows.bit_length(), segment.entries.bit_length()
        group = open_groups.setdefault(kind, [])
        group.append(segment)
        if len(group) << segment.entries.bit_length() >= most:
            yield open_groups.pop(kind)
    yield from open_groups.values()


def _call_of(pages: PagePlan, segments: Sequence[Segment], group: int, dtype: torch.dtype,
             device: torch.device) -> AttentionCall:
    """The call of some segments, each padded to the most rows and the most KV entries among them."""
    b, q, n = len(segments), max([each.rows for each in segments]), max([each.entries for each in segments])
    slots, seen = np.zeros((b, n), np.int64), np.zeros((b, q, n), bool)
    for i, (number, first, count, size) in enumerate(segments):
        slots[i, :size] = pages.slots(number)
        slots[i, size:] = slots[i, size - 1]
        seen[i, :count, :size] = visible(pages, slice(first, first + count), size)
        seen[i, count:] = seen[i, count - 1]  # a padding row repeats the last row: a row of -inf alone would give NaN
    mask = None
    if not seen.all():  # [b, q, n] -> [b, 1, q * group, n]: one row per folded query head
        scores = torch.zeros(seen.shape, dtype=dtype).masked_fill_(torch.from_numpy(~seen), float("-inf"))
        mask = scores.repeat_interleave(group, 1)[:, None].to(device, non_blocking=True)
    own = slots.ravel()
    first, last = int(own[0]), int(own[-1])
    consecutive = last - first == len(own) - 1 and bool((own[1:] - own[:-1] == 1).all())
    return AttentionCall((b, q, n), *_padded_rows(segments, q, pages.num_rows, device),
                         slice(first, last + 1) if consecutive else to_device(own, device), mask)


def _padded_rows(segments: Sequence[Segment], q: int, num_rows: int,
                 device: torch.device) -> tuple[slice | torch.Tensor, slice | torch.Tensor]:
    """The rows of a call with ``q`` of each segment, and their result rows."""
    size, whole = len(segments) * q, slice(segments[0].first, segments[-1].first + segments[-1].rows)
    if size == whole.stop - whole.start == sum([each.rows for each in segments]):
        return whole, whole
    rows, targets = np.zeros((len(segments), q), np.int64), np.full((len(segments), q), num_rows, np.int64)
    for i, (_, first, count, _) in enumerate(segments):
        targets[i, :count] = rows[i, :count] = np.arange(first, first + count)
        rows[i, count:] = first + count - 1
    return to_device(rows.ravel(), device), to_device(targets.ravel(), device)


Attend = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # q [T, Q, D], one layer's kv [S, 2, G, D] -> [T, Q * D]


class Attention(Protocol):
    def plan(self, batch: ForwardBatch) -> Attend:
        """The function that computes the attention of each layer in one forward of ``batch``."""
        ...


class FixedAttention(Protocol):
    """An attention for one number of rows and segments."""

    def replan(self, plan: PagePlan) -> bool:
        """Plan another batch of this size; its pages are written already. False: it cannot run as it was captured."""
        ...

    def __call__(self, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """As ``Attend``."""
        ...


class PagedAttention(Attention, Protocol):
    def fixed(self, pages: PageTensors, own_plan: bool = False) -> FixedAttention:
        """A fixed attention for batches with as many rows and segments as ``pages``, and at most as many KV entries.
        own_plan: it keeps a plan of its own, as other batches may be planned before it runs."""
        ...


class TorchAttention:
    """Torch's attention over gathered slots (rule 4). Its ``fixed`` form is slow: it is there for comparison."""

    __slots__ = ("_config", "_dtype")

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self._config, self._dtype = config, dtype

    def plan(self, batch: ForwardBatch) -> Attend:
        config = self._config
        plan = plan_attention(plan_pages(batch, config.sliding_window), config.group, self._dtype, batch.device)
        return partial(attend, plan=plan, scale=config.head_dim**-0.5)

    def fixed(self, pages: PageTensors, own_plan: bool = False) -> FixedAttention:
        return FixedTorch(pages, self._config.head_dim**-0.5)


class FixedTorch:
    __slots__ = ("_pages", "_scale")

    def __init__(self, pages: PageTensors, scale: float) -> None:
        self._pages, self._scale = pages, scale

    def replan(self, plan: PagePlan) -> bool:
        return True

    def __call__(self, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return attend_pages(q, kv, self._pages, self._scale)


# The batch of a trial: segments of every kind, with contexts of several lengths, on slots in random order.
TRIAL = (("chunk", 40, 9), ("step", 200, 1), ("tree", 130, 33), ("step", 1, 1), ("tree", 3, 2))  # kind, context, rows
TRIAL_SLOTS = 500
ROUNDING = 2e-2  # allowed error, relative to a row's norm: several times the rounding of 16-bit floats


@torch.inference_mode()
def disagreement(attention: PagedAttention, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> str:
    """How ``attention`` differs from torch's in a trial, in words; empty: it does not. Raises what ``attention``
    raises."""
    batch = trial_batch().build(device)
    rng = torch.Generator().manual_seed(0)
    q, known = (torch.randn(count, heads, config.head_dim, generator=rng).to(device, dtype)
                for count, heads in ((batch.num_rows, config.num_heads), (2 * TRIAL_SLOTS, config.num_kv_heads)))
    kv = torch.full_like(known, torch.nan).view(TRIAL_SLOTS, 2, config.num_kv_heads, config.head_dim)
    kv.index_copy_(0, batch.kv_slots, known.view_as(kv).index_select(0, batch.kv_slots))
    expected = TorchAttention(config, torch.float32).plan(batch)(q.float(), kv.float())
    for way, actual in (("planned", attention.plan(batch)(q, kv)), ("fixed", _fixed(attention, config, batch, q, kv))):
        worst = largest_row_error(actual, expected)
        if worst > ROUNDING:
            return f"in a trial ({way}) a row is off by {worst:.2g} of its length, and rounding explains {ROUNDING:g}"
    return ""


def largest_row_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The greatest distance between a row of ``actual`` [T, W] and the same row of ``expected``, relative to the norm
    of the latter; infinite if a number is NaN."""
    off = (actual.float() - expected.float()).norm(dim=1) / expected.float().norm(dim=1)
    return float(off.nan_to_num_(nan=torch.inf).max())


def trial_batch() -> BatchBuilder:
    """The segments of TRIAL, with random trees, always the same."""
    rng, builder, taken = np.random.default_rng(0), BatchBuilder(), 0
    order = rng.permutation(TRIAL_SLOTS).astype(np.int64)
    for kind, context, rows in TRIAL:
        own = order[taken + context : taken + context + rows].tolist()
        words = [1]
        for node in range(1, rows):
            words.append(words[int(rng.integers(node))] | 1 << node)
        is_tree = kind == "tree"
        builder.add([0] * rows, [0] * rows, own, order[taken : taken + context], words if is_tree else None,
                    rows if is_tree else 0)
        taken += context + rows
    return builder


def _fixed(attention: PagedAttention, config: ModelConfig, batch: ForwardBatch, q: torch.Tensor,
           kv: torch.Tensor) -> torch.Tensor:
    plan = plan_pages(batch, config.sliding_window)
    indices = torch.zeros(2 * TRIAL_SLOTS, dtype=torch.int32, device=kv.device)
    pages = PageTensors.within(torch.from_numpy(packed(plan)).to(kv.device), indices, batch.num_rows)
    write_indices(pages, plan)
    fixed = attention.fixed(pages)
    for _ in "ab":  # the second ``replan`` goes a shorter way, which must be correct too
        fixed.replan(plan)
    return fixed(q, kv)
