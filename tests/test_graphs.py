"""Captured steps, with the same function called again in a graph's place: all of their logic but the capture itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.engine.attention import FixedAttention, PageTensors, TorchAttention
from slipstream.engine.batch import BatchBuilder
from slipstream.engine.decoder import Decoder
from slipstream.engine.graphs import (
    MANY_ROWS,
    RETRY_STEPS,
    SEGMENTS,
    GraphedDecoder,
    Replay,
    Size,
    capture_eager,
    needed,
    padded,
    sizes,
)
from slipstream.engine.model import ModelConfig, load_tensors
from slipstream.engine.runner import ModelRunner
from tests.trees import random_tree

CPU = torch.device("cpu")
SMALL = sizes((1, 2, 4, 8, 16), (1, 2, 5, 9), ())
SLOTS = 600


@pytest.fixture(scope="module")
def decoder(tiny_folder: Path) -> Decoder:
    return Decoder(ModelConfig.from_folder(tiny_folder), load_tensors(tiny_folder), torch.float64, CPU)


def graphed(decoder: Decoder, capture: Callable[[Callable[[], None]], Replay] = capture_eager) -> GraphedDecoder:
    return GraphedDecoder(decoder, TorchAttention(decoder.config, torch.float64), capture, SMALL)


def runners(decoder: Decoder, model: GraphedDecoder, taps: tuple[int, ...] = ()) -> list[ModelRunner]:
    """One with graphs and one without. Slots that nothing has written hold NaN."""
    both = [ModelRunner(model, SLOTS, model.spare_slots), ModelRunner(decoder, SLOTS)]
    for runner in both:
        runner.pool.kv.fill_(torch.nan)
        runner.set_taps(taps)
    return both


@torch.inference_mode()
def spoil(model: GraphedDecoder) -> None:
    """What a replay may not read: numbers that are none, places that are not there."""
    for buffer in model.buffers():
        buffer.fill_(torch.nan if buffer.is_floating_point() else 1 << 30)


def segments(rng: np.random.Generator, count: int, rows: int) -> BatchBuilder:
    """Trees, plain steps and short chunks behind contexts, of so many rows together, on the first slots."""
    builder, slot = BatchBuilder(), 400
    for left in range(count, 0, -1):
        size = rows - left + 1 if left == 1 else 1 + int(rng.integers(rows - left + 1))
        rows -= size
        context = rng.permutation(400)[: int(rng.integers(1, 60))].astype(np.int64)
        tree = random_tree(rng, size, vocab=250) if rng.integers(2) and size > 1 else None
        size = size if tree is None else len(tree)
        levels = range(size) if tree is None else tree.levels()
        builder.add(rng.integers(250, size=size).tolist(), [len(context) + level for level in levels],
                    list(range(slot, slot + size)), context, None if tree is None else tree.ancestors(),
                    0 if tree is None else len(tree))
        slot += size
    return builder


def fill(runner: ModelRunner) -> None:
    """Write the KV of 400 slots, in chunks that no graph takes."""
    for first in range(0, 400, 100):
        builder = BatchBuilder()
        builder.add(list(range(100)), range(100), list(range(first, first + 100)), np.zeros(0, np.int64))
        runner.forward(builder.build())


def test_every_row_count_is_as_without_graphs_though_all_buffers_are_spoilt(decoder: Decoder) -> None:
    model = graphed(decoder)
    with_graphs, without = runners(decoder, model, (0, 2))
    fill(with_graphs), fill(without)
    for seed, (rows, count) in enumerate((r, c) for r in range(1, 19) for c in (1, 2, 3, 4, 8, 9) if c <= r):
        batch = segments(np.random.default_rng(seed), count, rows).build()
        spoil(model)
        found, right = with_graphs.forward(batch), without.forward(batch)
        assert float((found - right).abs().max()) < 1e-9, f"{rows} rows in {count} segments"
        states = [runner.features(batch.host.slots) for runner in (with_graphs, without)]
        assert float((states[0] - states[1]).abs().max()) < 1e-9, f"{rows} rows in {count} segments"
    assert torch.equal(with_graphs.pool.kv[:, :SLOTS].isnan(), without.pool.kv.isnan()), "a foreign slot was written"


def test_results_outlive_the_next_step(decoder: Decoder) -> None:
    model = graphed(decoder)
    (runner, _) = runners(decoder, model)
    fill(runner)
    batch = segments(np.random.default_rng(0), 2, 6).build()
    hidden, _ = model.forward(batch, runner.pool)
    kept = hidden.clone()
    spoil(model)
    model.forward(segments(np.random.default_rng(1), 2, 7).build(), runner.pool)
    assert torch.equal(hidden, kept)


def test_padding_adds_whole_segments_with_slots_of_their_own() -> None:
    builder = BatchBuilder()
    builder.add([7, 8, 9], [4, 5, 5], [1, 2, 3], np.array([10, 11]), [1, 3, 5], 3)
    batch = padded(builder.build(), Size(8, 3), range(90, 98))
    assert batch.q_indptr == (0, 3, 4, 8) and batch.kv_indptr == (0, 5, 6, 10) and batch.mask_lens == (3, 0, 0)
    assert batch.host.slots.tolist() == [1, 2, 3, 90, 91, 92, 93, 94]
    assert batch.host.kv_slots.tolist() == [10, 11, 1, 2, 3, 90, 91, 92, 93, 94]
    assert batch.host.positions.tolist() == [4, 5, 5, 0, 0, 1, 2, 3] and batch.host.words[3:].tolist() == [0] * 5


def test_a_size_takes_what_leaves_a_row_for_each_dummy() -> None:
    every = sizes()
    assert (min(every), max(every)) == (Size(1, 1), Size(max(MANY_ROWS), max(SEGMENTS)))
    for rows in range(1, 129):  # of plain steps, as many segments as rows: small tiles
        taken = next(size for size in every if size.fits(rows, rows))
        assert taken.rows == taken.segments < 1.5 * rows + 1
    for rows in range(1, 65):
        for count in range(1, rows + 1):
            assert any(size.fits(rows, count) for size in every), (rows, count)
    assert Size(4, 1).fits(4, 1) and Size(8, 5).fits(4, 1) and not Size(8, 5).fits(5, 1)
    assert not Size(4, 2).fits(4, 1) and not Size(4, 1).fits(3, 1)


@pytest.mark.parametrize("most", [1, 2, 3, 5, 6, 12, 24, 48, 64, 100])
def test_what_steps_of_few_segments_may_need_is_known(most: int) -> None:
    every = sizes()
    known = needed(every, most)
    for count in range(1, most + 1):
        for rows in range(count, max(MANY_ROWS), 7):
            assert next((size for size in every if size.fits(rows, count)), None) in {None, *known}


def test_all_sizes_that_may_come_are_captured_at_once_and_later_ones_are_not_again(decoder: Decoder) -> None:
    captured: list[Callable[[], None]] = []

    def capture(run: Callable[[], None]) -> Replay:
        captured.append(run)
        return capture_eager(run)

    model = graphed(decoder, capture)
    runner = ModelRunner(model, SLOTS, model.spare_slots)
    assert model.warm(runner.pool, 4) == len(needed(SMALL, 4)) == len(captured)
    fill(runner)
    for seed in range(8):
        runner.forward(segments(np.random.default_rng(seed), 3, 3 + seed).build())
    assert len(captured) == len(needed(SMALL, 4))


def test_a_size_that_fails_is_given_up_alone_and_tried_again_later(decoder: Decoder) -> None:
    full, missed = True, 0

    def capture(run: Callable[[], None]) -> Replay:
        nonlocal missed
        replay = capture_eager(run)
        if rows[-1] == 8 and full:
            missed += 1
            raise RuntimeError("out of memory")
        return replay

    rows: list[int] = []  # of each size that was to be captured

    class Watched(TorchAttention):
        def fixed(self, pages: PageTensors, own_plan: bool = False) -> FixedAttention:
            rows.append(len(pages.firsts))
            return super().fixed(pages, own_plan)

    model = GraphedDecoder(decoder, Watched(decoder.config, torch.float64), capture, SMALL)
    with_graphs, without = runners(decoder, model)
    fill(with_graphs), fill(without)
    few, many = (segments(np.random.default_rng(3), 1, count).build() for count in (4, 8))
    for batch in (few, many, few, many):
        assert torch.equal(with_graphs.forward(batch), without.forward(batch))
    assert (missed, model.num_graphs) == (1, 1)
    full = False
    for _ in range(RETRY_STEPS):
        model.forward(many, with_graphs.pool)
    assert (missed, model.num_graphs) == (1, 2)
    assert torch.equal(with_graphs.forward(many), without.forward(many))


def test_graphs_of_taps_that_nobody_reads_any_more_are_given_up(decoder: Decoder) -> None:
    model = graphed(decoder)
    runner, _ = runners(decoder, model)
    fill(runner)
    batch = segments(np.random.default_rng(3), 1, 4).build()
    for taps in ((), (0,), (0, 1), (2,), (2,)):
        runner.set_taps(taps)
        runner.forward(batch)
        assert model.num_graphs == 1


def test_a_graph_that_comes_late_is_tried_on_slots_that_nobody_has(decoder: Decoder) -> None:
    def lies(run: Callable[[], None]) -> Replay:
        run()
        return lambda: None

    for capture, serving in ((capture_eager, 1), (lies, 0)):
        model = graphed(decoder, capture)
        with_graphs, without = runners(decoder, model, (0, 2))
        fill(with_graphs), fill(without)
        batch = segments(np.random.default_rng(5), 2, 6).build()
        before = with_graphs.pool.kv[:, :SLOTS].clone()
        assert torch.allclose(with_graphs.forward(batch), without.forward(batch), atol=1e-9)
        before.index_copy_(1, batch.slots, with_graphs.pool.kv.index_select(1, batch.slots))
        assert torch.equal(before.nan_to_num(7.0), with_graphs.pool.kv[:, :SLOTS].nan_to_num(7.0))
        assert model.num_graphs == serving


def test_what_cannot_be_captured_runs_without_graphs(decoder: Decoder) -> None:
    def capture(run: Callable[[], None]) -> Replay:
        raise RuntimeError("operation not permitted when stream is capturing")

    with_graphs, without = runners(decoder, graphed(decoder, capture))
    fill(with_graphs), fill(without)
    batch = segments(np.random.default_rng(3), 2, 6).build()
    assert torch.equal(with_graphs.forward(batch), without.forward(batch))


def test_another_pool_than_the_captured_one_runs_without_graphs(decoder: Decoder) -> None:
    model = graphed(decoder)
    first, without = runners(decoder, model)
    second = ModelRunner(model, SLOTS, model.spare_slots)
    for runner in (first, second, without):
        fill(runner)
    batch = segments(np.random.default_rng(4), 2, 6).build()
    first.forward(batch)
    assert torch.equal(second.forward(batch), without.forward(batch))
