from __future__ import annotations

import numpy as np
import pytest

from slipstream.engine.kv import Match, RadixCache, Slots

Prefix = tuple[int, ...]


class Oracle:
    """The cache as a plain set: each cached prefix and the slot of its last token."""

    def __init__(self) -> None:
        self.held: dict[Prefix, int] = {}

    def match(self, tokens: Prefix) -> list[int]:
        found: list[int] = []
        while tokens[: len(found) + 1] in self.held and len(found) < len(tokens):
            found.append(self.held[tokens[: len(found) + 1]])
        return found

    def insert(self, tokens: Prefix, slots: np.ndarray) -> None:
        for i, slot in enumerate(slots.tolist()):
            self.held.setdefault(tokens[: i + 1], slot)

    def keep(self, cached: set[int]) -> None:
        self.held = {prefix: slot for prefix, slot in self.held.items() if slot in cached}
        assert all(len(p) == 1 or p[:-1] in self.held for p in self.held), "a prefix lost its start"


def test_what_was_inserted_is_matched_and_the_given_copy_is_freed() -> None:
    slots = Slots(32)
    cache = RadixCache(slots)
    first = slots.alloc(5)
    cache.insert([1, 2, 3, 4, 5], first)
    match = cache.match([1, 2, 3, 9])
    assert (match.length, match.slots.tolist()) == (3, first[:3].tolist())
    again = slots.alloc(6)
    cache.insert([1, 2, 3, 4, 7, 8], again)
    assert cache.match([1, 2, 3, 4, 7, 8]).slots.tolist() == [*first[:4].tolist(), *again[4:].tolist()]
    assert len(cache) == 7
    slots.check(cache.owned())


def test_the_same_slots_again_are_kept() -> None:
    slots = Slots(8)
    cache = RadixCache(slots)
    held = slots.alloc(3)
    cache.insert([1, 2, 3], held)
    longer = np.concatenate([held, slots.alloc(2)])
    cache.insert([1, 2, 3, 4, 5], longer)
    assert cache.match([1, 2, 3, 4, 5]).slots.tolist() == longer.tolist()
    slots.check(cache.owned())


def test_eviction_takes_the_end_of_the_least_recently_used() -> None:
    slots = Slots(16)
    cache = RadixCache(slots)
    cache.insert([1, 2, 3, 4], slots.alloc(4))
    cache.insert([5, 6, 7, 8], slots.alloc(4))
    cache.match([1, 2, 3, 4])
    assert cache.evict(3) == 3
    assert cache.match([5, 6, 7, 8]).length == 1 and cache.match([1, 2, 3, 4]).length == 4
    assert cache.evict(2) == 2
    assert (cache.match([5]).length, cache.match([1, 2, 3, 4]).length) == (0, 3)
    slots.check(cache.owned())


def test_locked_prefixes_stay_and_can_be_split_meanwhile() -> None:
    slots = Slots(16)
    cache = RadixCache(slots)
    cache.insert([1, 2, 3, 4], slots.alloc(4))
    match = cache.match([1, 2, 3, 4])
    cache.lock(match)
    cache.insert([1, 2, 9], slots.alloc(3))
    assert cache.evict(100) == 1
    cache.unlock(match)
    assert cache.evict(100) == 4 and len(cache) == 0
    with pytest.raises(AssertionError, match="more often"):
        cache.unlock(match)
    slots.check([])


def test_all_is_evicted_where_more_is_wanted() -> None:
    slots = Slots(16)
    cache = RadixCache(slots)
    cache.insert([1, 2, 3], slots.alloc(3))
    cache.insert([1, 5], slots.alloc(2))
    assert cache.evict(100) == 4
    assert slots.num_free == 16 and cache.match([1]).length == 0


@pytest.mark.parametrize("seed", range(6))
def test_a_random_population_agrees_with_a_plain_set(seed: int) -> None:
    rng = np.random.default_rng(seed)
    slots, oracle = Slots(120), Oracle()
    cache = RadixCache(slots)
    running: list[tuple[Prefix, np.ndarray, Match]] = []  # sessions: tokens, all slots, the locked prefix
    for step in range(400):
        where = f"seed {seed} step {step}"
        action = rng.random()
        if action < 0.45:
            _begin(rng, slots, cache, oracle, running, where)
        elif action < 0.8 and running:
            tokens, held, match = running.pop(int(rng.integers(len(running))))
            cache.insert(tokens, held)
            oracle.insert(tokens, held)
            cache.unlock(match)
        elif action < 0.9 and running:
            _share(rng, cache, oracle, running)
        else:
            _evict(rng, cache, oracle, running, where)
        assert len(cache) == len(oracle.held), where
        slots.check([*cache.owned(), *(held[match.length:] for _, held, match in running)])


def _begin(rng: np.random.Generator, slots: Slots, cache: RadixCache, oracle: Oracle,
           running: list[tuple[Prefix, np.ndarray, Match]], where: str) -> None:
    tokens = tuple(rng.integers(3, size=int(rng.integers(1, 14))).tolist())
    match = cache.match(tokens)
    assert match.slots.tolist() == oracle.match(tokens), where
    assert match.length == len(match.slots), where
    if len(tokens) - match.length <= slots.num_free:
        cache.lock(match)
        running.append((tokens, np.concatenate([match.slots, slots.alloc(len(tokens) - match.length)]), match))


def _share(rng: np.random.Generator, cache: RadixCache, oracle: Oracle,
           running: list[tuple[Prefix, np.ndarray, Match]]) -> None:
    """Some more of what one has computed."""
    place = int(rng.integers(len(running)))
    tokens, held, match = running[place]
    end = int(rng.integers(match.length, len(tokens) + 1))
    longer = cache.insert(tokens[match.length : end], held[match.length : end], prefix=match)
    cache.lock(longer, match)
    oracle.insert(tokens[:end], held[:end])
    assert longer.length == end and [*held[: match.length], *longer.slots] == oracle.match(tokens[:end])
    running[place] = tokens, np.concatenate([held[: match.length], longer.slots, held[end:]]), longer


def _evict(rng: np.random.Generator, cache: RadixCache, oracle: Oracle,
           running: list[tuple[Prefix, np.ndarray, Match]], where: str) -> None:
    locked = {tokens[: i + 1] for tokens, _, match in running for i in range(match.length)}
    wanted = int(rng.integers(1, 20))
    assert cache.evict(wanted) == min(wanted, len(oracle.held) - len(locked)), where
    oracle.keep({slot for run in cache.owned() for slot in run.tolist()})
    assert locked <= set(oracle.held), where


def test_namespaces_find_nothing_of_each_other_and_are_evicted_together() -> None:
    slots = Slots(16)
    cache = RadixCache(slots)
    cache.insert([1, 2, 3], slots.alloc(3), "a")
    assert cache.match([1, 2, 3]).length == cache.match([1, 2, 3], "b").length == 0
    mine = slots.alloc(4)
    cache.insert([1, 2, 3, 4], mine, "b")
    assert cache.match([1, 2, 3, 4], "b").slots.tolist() == mine.tolist()
    assert cache.match([1, 2, 3, 4], "a").length == 3 and len(cache) == 7
    slots.check(cache.owned())
    cache.lock(kept := cache.match([1, 2], "b"))
    assert cache.evict(16) == 5 and cache.match([1, 2, 3], "a").length == 0
    assert cache.match([1, 2, 3], "b").length == 2
    cache.unlock(kept)
    assert cache.evict(16) == 2
    assert len(cache) == 0 and slots.num_free == 16
