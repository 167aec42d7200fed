from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream.base.errors import CapacityError
from slipstream.engine.kv import LARGE_PAGE, RUN, SCAN, KVPool, Slots


def test_slots_are_handed_out_from_the_lowest_in_runs() -> None:
    slots = Slots(10)
    first = slots.alloc(4)
    assert first.dtype == np.int64 and first.tolist() == [0, 1, 2, 3]
    slots.free(first[1:3])
    assert slots.alloc(3).tolist() == [1, 2, 4]


def test_too_many_raises_and_changes_nothing() -> None:
    slots = Slots(4)
    held = slots.alloc(3)
    with pytest.raises(CapacityError, match="2 KV slots wanted, 1 of 4"):
        slots.alloc(2)
    assert slots.num_free == 1
    slots.check([held])


def test_alloc_of_none_is_empty() -> None:
    assert Slots(1).alloc(0).shape == (0,)


def test_answers_that_decode_together_fill_runs_of_their_own() -> None:
    slots = Slots(RUN * 6)
    held = [[int(slot)] for slot in slots.alloc(2)]
    for _ in range(RUN + 4):
        for one, slot in zip(held, slots.alloc_behind([(1, one[-1]) for one in held]), strict=True):
            one.append(slot)
    for one in held:
        own = [slot for slot in one if slot >= RUN]  # they began in one run
        assert len(own) > RUN - 4 and own == list(range(own[0], own[0] + len(own)))
    slots.check([np.array(one) for one in held])


def test_a_run_is_looked_for_near_the_lowest_free_slot_alone() -> None:
    slots = Slots(SCAN + 4 * RUN)
    held = slots.alloc(SCAN + 2 * RUN)
    slots.free(held[[5, 7]])
    assert slots.alloc_behind([(2, -1)]) == [5, 7]
    assert slots.alloc_behind([(1, -1)]) == [SCAN + 2 * RUN]


def test_without_a_run_the_lowest_free_slots_are_taken() -> None:
    slots = Slots(RUN + 8)
    held = slots.alloc(RUN + 8)
    slots.free(held[[1, 3, RUN + 2]])
    with pytest.raises(CapacityError, match="4 KV slots wanted, 3 of"):
        slots.alloc_behind([(3, RUN), (1, 5)])
    assert slots.num_free == 3
    assert slots.alloc_behind([(1, RUN), (1, -1), (1, RUN + 4)]) == [RUN + 2, 1, 3]
    slots.check([held])


@pytest.mark.parametrize("wrong", [[105], [0, 0], [*range(100), 105], [*range(100), 0]])
def test_freeing_twice_is_caught(wrong: list[int]) -> None:
    slots = Slots(200)
    slots.alloc(100)
    with pytest.raises(AssertionError, match="twice"):
        slots.free(np.array(wrong, np.int64))
    with pytest.raises(AssertionError, match="twice"):
        slots.free(wrong)


def test_check_finds_lost_and_shared_slots() -> None:
    slots = Slots(6)
    a, b = slots.alloc(2), slots.alloc(2)
    slots.check([a, b])
    with pytest.raises(AssertionError, match="2 slots lost, 0 owned twice"):
        slots.check([a])
    with pytest.raises(AssertionError, match="0 slots lost, 1 owned twice"):
        slots.check([a, b, b[:1]])
    with pytest.raises(AssertionError, match="owned twice"):
        slots.check([a, b, np.array([5])])


@pytest.mark.parametrize("seed", range(5))
def test_a_random_population_keeps_every_slot_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    slots = Slots(9000)  # wider than one scan of the free flags
    held: list[np.ndarray] = []
    for step in range(200):
        if rng.random() < 0.55:
            wanted = int(rng.integers(1, rng.choice([12, 400])))
            if wanted <= slots.num_free:
                held.append(slots.alloc(wanted))
        elif held:
            gone = held.pop(int(rng.integers(len(held))))
            keep = rng.random(len(gone)) < 0.3
            slots.free(gone[~keep] if step % 2 else gone[~keep].tolist())
            if keep.any():
                held.append(gone[keep])
        slots.check(held)
        assert slots.num_free == 9000 - sum(map(len, held)), f"seed {seed} step {step}"
    if slots.num_free:
        held.append(slots.alloc(slots.num_free))
    slots.check(held)


def test_layers_come_to_their_next_large_page_in_turn() -> None:
    for layers, slots, heads, size in ((30, 32768, 3, 64), (32, 4096, 8, 128), (30, 5001, 3, 64)):
        pool = KVPool(layers, slots, heads, size, torch.bfloat16)
        assert pool.num_slots == slots
        begins = sorted(layer.data_ptr() % LARGE_PAGE for layer in pool.kv)
        between = np.diff([*begins, begins[0] + LARGE_PAGE])
        slot = 2 * heads * size * 2  # bytes; layers begin at whole slots
        assert len(between) == layers and between.max() < 2 * LARGE_PAGE / layers + layers * slot


def test_a_write_lands_in_its_layer_and_slots() -> None:
    pool = KVPool(2, 8, 3, 4, torch.float64)
    pool.kv.zero_()
    k, v = torch.randn(2, 2, 3, 4, dtype=torch.float64)
    pool.write(1, torch.tensor([5, 2]), k, v)
    assert torch.equal(pool.kv[1, [5, 2], 0], k) and torch.equal(pool.kv[1, [5, 2], 1], v)
    assert pool.kv.shape == (2, 8, 2, 3, 4) and pool.num_slots == 8
    assert pool.kv.count_nonzero() == k.numel() + v.numel()
