"""Captured steps: a decoder whose small forwards are replayed as one CUDA graph, not launched kernel by kernel.

Rules:
1. Batches are padded, never tensors: a batch that is smaller than its graph gets dummy segments with rows, positions
   and slots of their own, before anything is computed from it. Only the last slice uses the real number of rows.
2. One function writes every static buffer, each over its whole length, before each replay.
3. Results are copied out before another replay may write over them.
4. Dummy rows write to spare slots that the pool never hands out, so they change nobody's KV.
5. A batch that fits no graph, or whose graph cannot be captured, runs as without graphs. None is refused.
6. Each new graph is tried at once: it replays a step on spare slots, which is compared with the same step without the
   graph, also while answers run. If that fails, only this graph is given up, and captured again after many steps that
   would have used it.

How a graph is captured is an argument: on a GPU as a CUDA graph; on a CPU the function is called again on the same
buffers, so that tests cover all but the speed. It knows nothing about sessions or sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from slipstream.base.errors import first_line
from slipstream.engine.attention import (
    PagedAttention,
    PageTensors,
    largest_row_error,
    packed,
    packed_size,
    plan_pages,
    write_indices,
)
from slipstream.engine.batch import BatchBuilder, ForwardBatch, HostRows
from slipstream.engine.decoder import Decoder
from slipstream.engine.kv import KVPool, SlotTable
from slipstream.engine.mirror import Mirror
from slipstream.engine.ops.layer import Step
from slipstream.observe.log import logger
from slipstream.protocol.tree import MAX_NODES

ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
SEGMENTS = (1, 2, 5, 9, 17, 33, 65)  # one more than a power of two, for a dummy segment
MANY_ROWS, MANY_SEGMENTS = (192, 256, 320, 384, 512, 640), 17  # rows of many trees at once: at least so many segments
TRIAL_CONTEXT, TRIAL_LIMIT = 20, 0.1  # tokens; error relative to a row's norm, far above that of another sum order
RETRY_STEPS = 1000  # steps without the graph of a size after it failed; doubled at each further failure
CPU = torch.device("cpu")
EMPTY_BATCH = BatchBuilder(kv_slots=[np.zeros(0, np.int64)]).build()  # pads to dummies alone

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]


@dataclass(frozen=True, slots=True, order=True)
class Size:
    """The size of a graph. It takes a batch of exactly this size, or one that leaves room for dummies: at least one
    segment, and at least as many rows as segments."""

    rows: int
    segments: int

    def fits(self, rows: int, segments: int) -> bool:
        spare_rows, spare_segments = self.rows - rows, self.segments - segments
        return spare_rows == spare_segments == 0 or spare_rows >= spare_segments >= 1


def sizes(rows: Sequence[int] = ROWS, segments: Sequence[int] = SEGMENTS,
          many_rows: Sequence[int] = MANY_ROWS) -> list[Size]:
    """All sizes that are captured, the cheapest first. For plain steps there are sizes with as many segments as rows:
    attention then uses its smallest tiles."""
    found = {Size(r, s) for r in rows for s in segments if s <= r} | {Size(r, r) for r in rows}
    return sorted(found | {Size(r, s) for r in many_rows for s in segments if s >= MANY_SEGMENTS})


def needed(every: Sequence[Size], most_segments: int) -> set[Size]:
    """The sizes that batches of at most ``most_segments`` segments use. every: all sizes, the cheapest first."""
    found, most = set[Size](), min(most_segments, max(size.segments for size in every))
    for count in range(1, most + 1):
        fitting = [size for size in every if size.segments >= count]
        for rows in range(count, max(size.rows for size in every) + 1):
            found.update([size for size in fitting if size.fits(rows, count)][:1])
    return found


def padded(batch: ForwardBatch, size: Size, spare: Sequence[int]) -> ForwardBatch:
    """``batch`` on the host, filled up to ``size`` with dummy segments: each has one row, the last one all that are
    left. spare: slots of the dummy rows, which are also the first row of a table."""
    rows, segments = size.rows - batch.num_rows, size.segments - len(batch.mask_lens)
    if not rows:
        return batch
    own, host = np.asarray(spare[:rows], np.int64), batch.host
    nothing, depths = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
    depths[segments - 1 :] = np.arange(rows - segments + 1)
    ends = (*range(1, segments), rows)
    entries, first = (np.concatenate((host.kv_slots, own)), len(host.kv_slots)) if batch.table is None else (
        host.kv_slots, 0)
    host_rows = HostRows(np.concatenate((host.tokens, nothing)), np.concatenate((host.positions, depths)),
                         np.concatenate((host.slots, own)), np.concatenate((host.words, nothing)), host.logit_rows,
                         entries)
    return ForwardBatch(host_rows, (*batch.q_indptr, *(batch.num_rows + end for end in ends)),
                        (*batch.kv_indptr, *(batch.kv_indptr[-1] + end for end in ends)),
                        (*batch.begins, *range(first, first + segments)), (*batch.mask_lens, *[0] * segments), CPU,
                        table=batch.table)


def capture_eager(run: Callable[[], None]) -> Replay:
    """The capture for devices without graphs: a replay calls ``run`` again."""
    run()
    return run


class CudaCapture:
    """Captures the kernels that a function launches as one CUDA graph. Graphs of one engine share their scratch memory,
    as they run one after the other and copy results to buffers outside of it. They share a stream, too: cuBLAS keeps a
    workspace for each stream that it was called on."""

    __slots__ = ("_device", "_pool", "_side")

    def __init__(self, device: torch.device) -> None:
        cuda: Any = torch.cuda
        self._device, self._pool, self._side = device, torch.cuda.graph_pool_handle(), cuda.Stream(device)

    def __call__(self, run: Callable[[], None]) -> Replay:
        ambient, graph = torch.cuda.current_stream(self._device), torch.cuda.CUDAGraph()
        self._side.wait_stream(ambient)
        try:
            with torch.cuda.stream(self._side):  # it also restores the stream after a failed capture
                run()  # before the capture: first calls allocate and compile
                with torch.cuda.graph(graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"):
                    run()
        finally:  # also after a failed capture: the first run still reads buffers that are written next
            ambient.wait_stream(self._side)
        return graph.replay


class CapturedStep:
    """One size of forward, on buffers that stay where they are."""

    __slots__ = ("_attend", "_hidden", "_pages", "_replay", "_rows", "_size", "_spare", "_tapped", "_window")

    def __init__(self, model: Decoder, attention: PagedAttention, indices: torch.Tensor, size: Size, pool: KVPool,
                 spare: Sequence[int], taps: tuple[int, ...], capture: Capture) -> None:
        """indices: memory for KV slots, int32, shared by all sizes; spare: slots of dummy rows."""
        self._size, self._spare = size, spare
        self._window = model.config.sliding_window
        rows = size.rows
        # Tokens, positions and slots of the rows, then the plan.
        self._rows = torch.zeros(3 * rows + packed_size(rows, size.segments), dtype=torch.int64, device=model.device)
        self._pages = PageTensors.within(self._rows[3 * rows :], indices, rows)
        self._attend = attend = attention.fixed(self._pages)
        width = model.config.hidden_size
        self._hidden = torch.empty(size.rows, width, dtype=model.dtype, device=model.device)
        self._tapped = torch.empty(size.rows, width * len(taps), dtype=model.dtype, device=model.device)

        def run() -> None:
            tokens, positions, slots = self._rows[: 3 * size.rows].view(3, -1)
            hidden, tapped = model.run(tokens, Step(positions, slots, model.rope, attend), pool, taps)
            self._hidden.copy_(hidden)
            if tapped is not None:
                self._tapped.copy_(tapped)

        self._write(EMPTY_BATCH, None)
        self._replay = capture(run)

    def __call__(self, batch: ForwardBatch,
                 mirror: Mirror | None = None) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """As ``Decoder.forward``; None if this batch needs another launch than the captured one. mirror: the copy of
        the batch's table, if it has a table."""
        if not self._write(batch, mirror):
            return None
        self._replay()
        rows = slice(0, batch.num_rows)
        return self._hidden[rows].clone(), self._tapped[rows].clone() if self._tapped.shape[1] else None

    def _write(self, batch: ForwardBatch, mirror: Mirror | None) -> bool:
        full = padded(batch, self._size, self._spare)
        plan, host = plan_pages(full, self._window), full.host
        rows = np.concatenate((host.tokens, host.positions, host.slots, packed(plan)))
        if mirror is None:
            self._rows.copy_(torch.from_numpy(rows), non_blocking=True)
            write_indices(self._pages, plan)
        else:
            device_rows, first = mirror.send(rows, plan, self._pages.indices), 2 * self._size.rows
            self._rows.copy_(device_rows)
            # Features are written by slot after the step.
            batch.set_tensor("slots", device_rows[first : first + batch.num_rows])
        return self._attend.replan(plan)

    def buffers(self) -> Iterator[torch.Tensor]:
        """All that stays where it is, for tests that spoil it between steps."""
        yield from (self._rows, self._pages.indices, self._hidden, self._tapped)


@dataclass(slots=True)
class FailedGraph:
    """A size whose graph failed. Steps are counted, not seconds, so that all ranks of a model try again together."""

    steps_left: int  # steps until it is tried again
    next_steps: int  # the same after the next failure


class GraphedDecoder:
    """A decoder that replays graphs where a batch fits one; see ``model.CausalModel``. It serves one pool, whose last
    ``spare_slots`` slots must never be handed out: those of dummy rows, then those of trials."""

    __slots__ = ("_all_agree", "_attention", "_capture", "_failed", "_indices", "_mirror", "_model", "_most_rows",
                 "_pool", "_sizes", "_steps", "config", "device", "dtype", "logits", "spare_slots")

    def __init__(self, model: Decoder, attention: PagedAttention, capture: Capture,
                 wanted: Sequence[Size] | None = None, all_agree: Callable[[bool], bool] = bool) -> None:
        """all_agree: called with whether a step of a capture succeeded here; returns whether it did on all ranks."""
        self._model, self._attention, self._capture, self._all_agree = model, attention, capture, all_agree
        self.config, self.dtype, self.device = model.config, model.dtype, model.device
        self.logits = model.logits
        self._sizes = sorted(sizes() if wanted is None else wanted)
        self._steps: dict[tuple[Size, tuple[int, ...]], CapturedStep] = {}
        self._failed: dict[tuple[Size, tuple[int, ...]], FailedGraph] = {}
        self._pool: KVPool | None = None
        self._mirror: Mirror | None = None
        self._indices = torch.zeros(0, dtype=torch.int32, device=model.device)
        self._most_rows = max(size.rows for size in self._sizes)
        self.spare_slots = 2 * self._most_rows + TRIAL_CONTEXT

    @property
    def kernels(self) -> str:
        """See ``model.CausalModel``. It names graphs, as products of padded batches may run on other kernels."""
        return f"{self._model.kernels}, graphs"

    @property
    def num_graphs(self) -> int:
        """Graphs that were captured and passed their trial."""
        return len(self._steps)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, pool: KVPool,
                taps: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor | None]:
        step = self._step(batch, pool, taps)
        result = None if step is None else step(batch, self._mirror_of(batch.table))
        return self._model.forward(batch, pool, taps) if result is None else result

    @torch.inference_mode()
    def warm(self, pool: KVPool, most_segments: int, taps: tuple[int, ...] = ()) -> int:
        """Capture every size that steps of at most so many segments need. Returns how many graphs serve."""
        if pool is not self._pool:
            self._bind(pool)
        wanted = needed(self._sizes, most_segments)
        for size in reversed(self._sizes):  # the largest first: the others then reuse its scratch memory
            if size in wanted:
                self._captured(size, taps)
        return self.num_graphs

    def buffers(self) -> Iterator[torch.Tensor]:
        """All static buffers, for tests that spoil them between steps."""
        for step in self._steps.values():
            yield from step.buffers()

    def _disagrees(self, size: Size, step: CapturedStep, pool: KVPool, taps: tuple[int, ...]) -> str:
        """How the replay of a new graph differs from the step without it, in words; empty: it does not."""
        rows = size.rows - size.segments + 1  # one segment, and room for dummies
        first = pool.num_slots - self._most_rows - TRIAL_CONTEXT
        context, own = np.arange(first, first + TRIAL_CONTEXT), range(first + TRIAL_CONTEXT, pool.num_slots)[:rows]
        before, tried, words = BatchBuilder(), BatchBuilder(), [1]
        before.add([1] * TRIAL_CONTEXT, range(TRIAL_CONTEXT), context.tolist(), context[:0])
        for node in range(1, rows):
            words.append(words[(node - 1) // 2] | 1 << node)
        is_tree = 1 < rows <= MAX_NODES
        tokens = [row % self.config.vocab_size for row in range(rows)]
        tried.add(tokens, range(TRIAL_CONTEXT, TRIAL_CONTEXT + rows), list(own), context,
                  words if is_tree else None, rows if is_tree else 0)
        self._model.forward(before.build(self.device), pool)
        batch = tried.build(self.device)
        expected = self._model.forward(batch, pool, taps)
        result = step(batch)
        if result is None:
            return "it was captured with another launch"
        worst = max(largest_row_error(actual, wanted) for actual, wanted in zip(result, expected, strict=True)
                    if actual is not None and wanted is not None)
        return f"its replay is off by {worst:.2g} of a row's length" if worst > TRIAL_LIMIT else ""

    def _mirror_of(self, table: SlotTable | None) -> Mirror | None:
        if table is not None and (self._mirror is None or self._mirror.table is not table):
            self._mirror = Mirror(table, self.device)
        return None if table is None else self._mirror

    def _bind(self, pool: KVPool) -> None:
        self._pool = pool
        self._steps.clear()
        self._failed.clear()
        # Twice the slots: a context that several answers share is listed once for each of them.
        self._indices = torch.zeros(2 * pool.num_slots, dtype=torch.int32, device=self.device)

    def _step(self, batch: ForwardBatch, pool: KVPool, taps: tuple[int, ...]) -> CapturedStep | None:
        if self._pool is None:
            self._bind(pool)
        if pool is not self._pool or batch.kv_indptr[-1] + self._most_rows > len(self._indices):
            return None
        rows, segments = batch.num_rows, len(batch.mask_lens)
        size = next((size for size in self._sizes if size.fits(rows, segments)), None)
        return None if size is None else self._captured(size, taps)

    def _captured(self, size: Size, taps: tuple[int, ...]) -> CapturedStep | None:
        key = (size, taps)
        if key in self._steps:
            return self._steps[key]
        failed = self._failed.get(key)
        if failed is not None and failed.steps_left:
            failed.steps_left -= 1
            return None
        assert self._pool is not None
        self._drop_other_taps(taps)
        first, reason, step = self._pool.num_slots - self.spare_slots, "", None
        try:
            step = CapturedStep(self._model, self._attention, self._indices, size, self._pool,
                                range(first, first + self._most_rows), taps, self._capture)
        except RuntimeError as error:
            reason = first_line(error)
        if self._all_agree(step is not None) and step is not None:  # a trial needs all ranks
            try:
                reason = self._disagrees(size, step, self._pool, taps)
            except RuntimeError as error:
                reason = first_line(error)
            if self._all_agree(not reason):
                self._steps[key] = step
                return step
        retry_steps = RETRY_STEPS if failed is None else failed.next_steps
        self._failed[key] = FailedGraph(retry_steps, 2 * retry_steps)
        logger("engine").warning("no graph of this size: each kernel is launched by itself", rows=size.rows,
                                 segments=size.segments, taps=len(taps), again_in_steps=retry_steps,
                                 reason=reason or "another rank's failed")
        return None

    def _drop_other_taps(self, taps: tuple[int, ...]) -> None:
        """Drop the graphs of other taps, so that a draft that asks for new taps at each handshake fills no memory."""
        self._steps = {key: step for key, step in self._steps.items() if key[1] == taps}
        self._failed = {key: failed for key, failed in self._failed.items() if key[1] == taps}
