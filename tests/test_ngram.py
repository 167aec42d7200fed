"""The n-gram drafter: what it proposes, in which order, and that its index forgets without losing its way."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from slipstream.drafting.ngram import MAX_CHILDREN, MAX_MATCH, ORDERS, RESERVED_BYTES, TOKEN_BYTES, NgramDrafter
from slipstream.protocol.messages import Commit, Growth, Open
from slipstream.protocol.requests import Sampling
from tests.growth_rules import GrowthLedger, scored_paths


def opened(tokens: list[int], orders: Sequence[int] = ORDERS) -> NgramDrafter:
    drafter = NgramDrafter(2, orders)
    assert drafter.open([Open(7, np.array(tokens, np.int32), 1, Sampling())]) == []
    return drafter


def paths(growth: Growth) -> set[tuple[int, ...]]:
    """Token paths from the root, one for each node."""
    return set(scored_paths(growth))


def test_continues_the_longest_match() -> None:
    drafter = opened([1, 2, 3, 4, 5, 6, 9, 2, 3, 8, 8, 1, 2, 3])
    (growth,) = drafter.grow([7], [4])
    assert (4,) in paths(growth) and (4, 5) in paths(growth)  # 1 2 3 beats the newer 2 3
    assert growth.tokens[0] == 4


def test_a_long_match_is_found_behind_many_short_ones() -> None:
    long = [5, 6, 7, 8, 1, 2]
    short = [token for n in range(60) for token in (1, 2, 100 + n)]
    (growth,) = opened([*long, 9, *short, *long]).grow([7], [1])
    assert growth.tokens.tolist() == [9]


def test_a_deeper_node_continues_a_longer_match() -> None:
    """So each is likelier below the one before: 3, 4 and 5 of 5, 6 and 7 at two tokens of doubt."""
    (growth,) = opened([1, 2, 3, 4, 5, 6, 9, 1, 2, 3]).grow([7], [3])
    assert growth.tokens.tolist() == [4, 5, 6]
    assert np.exp(growth.scores) == pytest.approx([3 / 5, 3 / 5 * 4 / 6, 3 / 5 * 4 / 6 * 5 / 7], abs=1e-6)


def test_shorter_matches_are_merged_in_as_siblings() -> None:
    drafter = opened([1, 2, 3, 4, 5, 6, 9, 2, 3, 8, 8, 1, 2, 3])
    (growth,) = drafter.grow([7], [12])
    assert {(4,), (8,)} <= paths(growth)


def test_nothing_matches_nothing_grows() -> None:
    drafter = opened([1, 2, 3, 4])
    (growth,) = drafter.grow([7], [8])
    assert len(growth.ids) == 0 and growth.base == 4


def test_a_match_below_the_shortest_proposes_nothing() -> None:
    assert len(opened([5, 1, 6, 7, 1]).grow([7], [8])[0].ids) == 0
    assert len(opened([5, 1, 6, 7, 1], (1, *ORDERS)).grow([7], [1])[0].ids) == 1


def test_the_newest_of_equal_matches_goes_first() -> None:
    text = [1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 4, 0, 1, 2]
    assert opened(text).grow([7], [1])[0].tokens.tolist() == [4]


def test_a_period_goes_on_beyond_the_end_of_the_text() -> None:
    (growth,) = opened([1, 2, 3, 1, 2, 3, 1]).grow([7], [63])
    assert (2, 3, 1, 2, 3, 1, 2) in paths(growth)


def test_breadth_and_depth_are_bounded() -> None:
    text = [t for n in range(10) for t in (1, 2, 10 + n)] + [1, 2]
    assert sum(len(path) == 1 for path in paths(opened(text).grow([7], [63])[0])) == MAX_CHILDREN
    assert max(len(path) for path in paths(opened([1, 2, 3] * 20).grow([7], [63])[0])) == MAX_MATCH


def test_a_second_grow_adds_only_further_nodes() -> None:
    text = [1, 2, 3, 0, 1, 2, 3, 5, 1, 2, 4, 0, 1, 2]
    whole = paths(opened(text).grow([7], [20])[0])
    drafter, ledger = opened(text), GrowthLedger(text)
    for budget in (3, 0, 1, 16):
        ledger.take(drafter.grow([7], [budget])[0], budget, vocab_size=6)
    assert len(ledger.tree) - 1 == len(whole) == 20


def test_a_commit_re_roots_and_ids_go_on() -> None:
    drafter, ledger = opened([1, 2, 3, 1, 2]), GrowthLedger([1, 2, 3, 1, 2])
    ledger.take(drafter.grow([7], [4])[0], 4, vocab_size=4)
    drafter.commit([Commit(7, 5, np.array([3, 1], np.int32))])
    ledger.commit([3, 1])
    (growth,) = drafter.grow([7], [4])
    ledger.take(growth, 4, vocab_size=4)
    # The chain 3 1 2 3 became 2 3 on both sides, under its old ids: growth goes on below it.
    assert growth.parents.tolist() == [4, 5, 6, 7] and growth.tokens.tolist() == [1, 2, 3, 1]


def test_room_and_strangers() -> None:
    drafter = opened([1, 2, 1, 2])
    opens = [Open(n, np.array([1, 2], np.int32), 1, Sampling()) for n in (7, 8, 9)]
    assert drafter.open(opens) == [9]
    assert drafter.grow([9, 1], [4, 4]) == []
    drafter.close([7, 55])
    assert drafter.open([opens[2]]) == []


def test_texts_take_no_more_memory_than_is_left() -> None:
    """Sixty-four answers to prompts of 100,000 tokens took 2.7 GB, and a draft of the chart has 2 GiB."""
    free = RESERVED_BYTES + 1500 * TOKEN_BYTES
    drafter = NgramDrafter(8, free_bytes=lambda: free)

    def opens(session: int, count: int) -> list[int]:
        return drafter.open([Open(session, np.zeros(count, np.int32), 1, Sampling())])

    assert opens(1, 1000) == []
    free = RESERVED_BYTES + 500 * TOKEN_BYTES
    assert opens(2, 1000) == [2] and opens(3, 500) == []
    free = RESERVED_BYTES
    assert opens(3, 501) == [3] and opens(3, 500) == [], "what it had is there again"
    drafter.close([1])
    assert opens(2, 1000) == []


def test_opening_again_forgets_the_text_but_not_the_ids() -> None:
    drafter = opened([1, 2, 1, 2])
    first = drafter.grow([7], [2])[0]
    drafter.open([Open(7, np.array([4, 5, 4, 5], np.int32), 1, Sampling())])
    second = drafter.grow([7], [2])[0]
    assert set(second.tokens.tolist()) == {4, 5}
    assert set(first.ids.tolist()).isdisjoint(second.ids.tolist())


@pytest.mark.parametrize("seed", range(3))
def test_random_sessions_obey_the_rules(seed: int) -> None:
    rng = random.Random(seed)
    tokens = [rng.randrange(4) for _ in range(20)]
    drafter, ledger = opened(tokens), GrowthLedger(tokens)
    for _ in range(80):
        for _ in range(rng.randrange(3)):
            budget = rng.randrange(70)
            ledger.take(drafter.grow([7], [budget])[0], budget, vocab_size=4)
        new = [rng.randrange(4) for _ in range(rng.randint(1, 5))]
        drafter.commit([Commit(7, len(ledger.tokens), np.array(new, np.int32))])
        ledger.commit(new)
