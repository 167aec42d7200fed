from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream.engine.attention import attend, plan_attention, plan_pages
from slipstream.engine.batch import BatchBuilder, ForwardBatch
from slipstream.engine.kv import KVPool
from tests.trees import random_tree

HEADS, SIZE, SLOTS = 2, 8, 2000


def dense(q: torch.Tensor, pool: KVPool, batch: ForwardBatch, scale: float, window: int) -> torch.Tensor:
    """Masked softmax, one row and one head at a time, in the words of the rules of ``batch``."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for b, mask_len in enumerate(batch.mask_lens):
        entries = batch.kv_slots[batch.kv_indptr[b] : batch.kv_indptr[b + 1]].tolist()
        rows = range(batch.q_indptr[b], batch.q_indptr[b + 1])
        for row in rows:
            before = len(entries) - mask_len
            word = int(batch.words[row]) & ((1 << 64) - 1)
            path = [before + j for j in range(mask_len) if word >> j & 1]
            seen = [*range(before), *path] if mask_len else [*range(len(entries) - len(rows) + row - rows[0] + 1)]
            seen = seen[-window:] if window else seen
            at = [entries[i] for i in seen]
            for head in range(q.shape[1]):
                group = head // (q.shape[1] // pool.kv.shape[3])
                scores = pool.kv[0, at, 0, group] @ q[row, head] * scale
                out[row, head] = scores.softmax(-1) @ pool.kv[0, at, 1, group]
    return out.flatten(1)


def random_batch(rng: np.random.Generator, segments: int, scattered: bool, longest: int = 90) -> ForwardBatch:
    """Segments of every kind: prefill chunks, plain steps, whole trees, trees whose first nodes are computed."""
    free = rng.permutation(SLOTS) if scattered else np.arange(SLOTS)
    builder = BatchBuilder()
    for _ in range(segments):
        tree = random_tree(rng, int(rng.integers(1, 12)), vocab=9)
        kind = rng.integers(4)
        size = len(tree) if kind >= 2 else 1 if kind else int(rng.integers(1, 20))
        context = int(rng.integers(0 if kind < 2 else 1, longest))
        taken, free = free[: context + size].astype(np.int64), free[context + size :]
        old = int(rng.integers(size)) if kind == 3 else 0
        words = tree.ancestors()[old:] if kind >= 2 else None
        new = taken[context + old :]
        builder.add([0] * len(new), [0] * len(new), new.tolist(), taken[: context + old], words,
                    size if kind >= 2 else 0)
    return builder.build()


def poisoned(rng: np.random.Generator, batch: ForwardBatch) -> KVPool:
    """A pool whose slots hold numbers where the batch may read and NaN everywhere else."""
    pool = KVPool(1, SLOTS, HEADS, SIZE, torch.float64)
    pool.kv.fill_(torch.nan)
    pool.kv[0, batch.kv_slots] = torch.from_numpy(rng.normal(size=(len(batch.kv_slots), 2, HEADS, SIZE)))
    return pool


def attended(q: torch.Tensor, pool: KVPool, batch: ForwardBatch, group: int, window: int,
             device: torch.device) -> torch.Tensor:
    """What ``attend`` gives on ``device``, on the CPU."""
    plan = plan_attention(plan_pages(batch, window), group, q.dtype, device)
    return attend(q.to(device), pool.kv[0].to(device), plan, 0.4).cpu()


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize(("segments", "group", "window"), [(1, 1, 0), (1, 3, 0), (3, 2, 0), (12, 3, 0), (12, 1, 64)])
def test_ragged_segments_equal_dense_softmax(segments: int, group: int, window: int, scattered: bool,
                                             device: torch.device) -> None:
    for seed in range(4):
        rng = np.random.default_rng(seed)
        batch = random_batch(rng, segments, scattered)
        pool = poisoned(rng, batch)
        q = torch.from_numpy(rng.normal(size=(batch.num_rows, HEADS * group, SIZE)))
        got = attended(q, pool, batch, group, window, device)
        error = float((got - dense(q, pool, batch, 0.4, window)).abs().max())
        assert error < 1e-12, f"seed {seed}: {error}"


def test_many_plain_steps_share_a_call_and_keep_apart() -> None:
    rng = np.random.default_rng(7)
    builder = BatchBuilder()
    for i in range(16):
        taken = np.arange(i * 60, i * 60 + 33 + i % 5, dtype=np.int64)
        builder.add([0], [0], taken[-1:].tolist(), taken[:-1])
    batch = builder.build()
    pool = poisoned(rng, batch)
    q = torch.from_numpy(rng.normal(size=(16, HEADS * 2, SIZE)))
    plan = plan_attention(plan_pages(batch), 2, q.dtype, batch.tokens.device)
    assert len(plan) == 1
    before = attend(q, pool.kv[0], plan, 0.4)
    assert float((before - dense(q, pool, batch, 0.4, 0)).abs().max()) < 1e-12
    pool.kv[0, batch.kv_slots[batch.kv_indptr[3] : batch.kv_indptr[4]]] = torch.nan
    after = attend(q, pool.kv[0], plan, 0.4)
    others = [i for i in range(16) if i != 3]
    assert torch.equal(before[others], after[others]) and bool(after[3].isnan().all())


def test_the_64th_node_uses_the_sign_bit(device: torch.device) -> None:
    rng = np.random.default_rng(1)
    builder = BatchBuilder()
    words = [(2 << i) - 1 for i in range(64)]  # a chain of 64 nodes
    builder.add([0] * 64, [0] * 64, list(range(5, 69)), np.arange(5, dtype=np.int64), words, 64)
    batch = builder.build()
    pool = poisoned(rng, batch)
    q = torch.from_numpy(rng.normal(size=(64, HEADS, SIZE)))
    got = attended(q, pool, batch, 1, 0, device)
    assert float((got - dense(q, pool, batch, 0.4, 0)).abs().max()) < 1e-12


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_lower_precision_stays_close(dtype: torch.dtype, tolerance: float) -> None:
    rng = np.random.default_rng(3)
    batch = random_batch(rng, 6, True)
    pool = poisoned(rng, batch)
    q = torch.from_numpy(rng.normal(size=(batch.num_rows, HEADS * 3, SIZE)))
    plan = plan_attention(plan_pages(batch), 3, dtype, batch.tokens.device)
    got = attend(q.to(dtype), pool.kv[0].to(dtype), plan, 0.4)
    assert got.dtype == dtype
    assert float((got.double() - dense(q, pool, batch, 0.4, 0)).abs().max()) < tolerance
