"""Attention over pages answers as torch's over gathered slots does, whatever stands in a batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream.engine.attention import Attend, PagePlan, TorchAttention, page_tensors, plan_pages
from slipstream.engine.batch import BatchBuilder, ForwardBatch
from slipstream.engine.model import ModelConfig, parse_config
from tests.test_attention import HEADS, SIZE, poisoned, random_batch
from tests.tiny import tiny_config

CPU = torch.device("cpu")


def config(group: int, window: int = 0) -> ModelConfig:
    return parse_config(tiny_config("mistral", num_attention_heads=HEADS * group, num_key_value_heads=HEADS,
                                    head_dim=SIZE, sliding_window=window or None), "test")


def as_a_kernel(batch: ForwardBatch, shape: ModelConfig) -> Attend:
    return TorchAttention(shape, torch.float64).fixed(page_tensors(plan_pages(batch, shape.sliding_window), CPU))


def by_gathering(q: torch.Tensor, kv: torch.Tensor, plan: PagePlan, scale: float) -> torch.Tensor:
    """What the arrays of a plan say, entry by entry: the contract of a kernel, in float64 and without its shortcuts."""
    out = np.zeros(q.shape)
    for b in range(len(plan.q_indptr) - 1):
        slots = plan.indices[plan.kv_indptr[b] : plan.kv_indptr[b + 1]]
        for row in range(plan.q_indptr[b], plan.q_indptr[b + 1]):
            word = int(plan.words[row]) & ((1 << 64) - 1)
            seen = [slots[i] for i in range(len(slots)) if i >= plan.firsts[row]
                    and (i < plan.limits[row] or (i - plan.limits[row] < 64 and word >> (i - plan.limits[row]) & 1))]
            for head in range(q.shape[1]):
                keys, values = kv[seen, :, head // (q.shape[1] // HEADS)].double().numpy().transpose(1, 0, 2)
                scores = keys @ q[row, head].double().numpy() * scale
                weights = np.exp(scores - scores.max())
                out[row, head] = weights @ values / weights.sum()
    return torch.from_numpy(out).flatten(1)


@pytest.mark.parametrize(("segments", "group", "window"), [(1, 1, 0), (3, 2, 0), (12, 3, 0), (12, 1, 64)])
def test_pages_answer_as_gathered_slots_do(segments: int, group: int, window: int) -> None:
    for seed in range(4):
        rng = np.random.default_rng(seed)
        batch, shape = random_batch(rng, segments, True), config(group, window)
        pool = poisoned(rng, batch)
        q = torch.from_numpy(rng.normal(size=(batch.num_rows, HEADS * group, SIZE)))
        right = TorchAttention(shape, torch.float64).plan(batch)(q, pool.kv[0])
        found = as_a_kernel(batch, shape)(q, pool.kv[0])
        assert float((found - right).abs().max()) < 1e-12, f"seed {seed}"
        gathered = by_gathering(q, pool.kv[0], plan_pages(batch, window), SIZE**-0.5)
        assert float((gathered - right).abs().max()) < 1e-12, f"seed {seed}"


def test_a_plan_names_what_each_kind_of_row_sees() -> None:
    builder = BatchBuilder()
    builder.add([0] * 3, [2, 3, 4], [7, 8, 9], np.array([5, 6]))  # a chunk of a prompt
    builder.add([0], [3], [4], np.array([1, 2, 3]))  # a plain step
    builder.add([0] * 3, [2, 3, 3], [12, 13, 14], np.array([10, 11]), [1, 3, 5], 3)  # a root with two children
    plan = plan_pages(builder.build())
    assert plan.q_indptr.tolist() == [0, 3, 4, 7] and plan.kv_indptr.tolist() == [0, 5, 9, 14]
    assert plan.indices.tolist() == [5, 6, 7, 8, 9, 1, 2, 3, 4, 10, 11, 12, 13, 14]
    assert plan.limits.tolist() == [3, 4, 5, 4, 2, 2, 2]
    assert plan.words.tolist() == [0, 0, 0, 0, 1, 3, 5] and plan.firsts.tolist() == [0] * 7


def test_a_window_hides_the_oldest_along_each_rows_own_path() -> None:
    builder = BatchBuilder()
    words = [1, 3, 7, 9]  # a chain of three nodes, and a second child of the root
    builder.add([0] * 4, [100, 101, 102, 101], [100, 101, 102, 103], np.arange(100), words, 4)
    builder.add([0], [90], [200], np.arange(110, 200))
    assert plan_pages(builder.build(), 64).firsts.tolist() == [37, 38, 39, 38, 27]


def test_the_64th_node_is_the_sign_bit() -> None:
    builder = BatchBuilder()
    builder.add([0] * 64, range(5, 69), list(range(5, 69)), np.arange(5), [(2 << i) - 1 for i in range(64)], 64)
    batch: ForwardBatch = builder.build()
    pool = poisoned(np.random.default_rng(1), batch)
    q = torch.from_numpy(np.random.default_rng(2).normal(size=(64, HEADS, SIZE)))
    shape = config(1)
    right = TorchAttention(shape, torch.float64).plan(batch)(q, pool.kv[0])
    assert float((as_a_kernel(batch, shape)(q, pool.kv[0]) - right).abs().max()) < 1e-12
