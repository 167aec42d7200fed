"""Suffixes: what is found is what stands there, and what is forgotten is gone."""

from __future__ import annotations

import random

import pytest

from slipstream.protocol.session import SuffixIndex


@pytest.mark.parametrize("seed", range(4))
def test_matches_equal_a_naive_search(seed: int) -> None:
    rng = random.Random(seed)
    index, text = SuffixIndex([2, 4], max_match=6, max_tokens=1000), []
    for _ in range(300):
        token = rng.choice([0, 0, 1, 2, 3, 4, 5, 6, 7])
        text.append(token)
        index.extend([token])
        naive = []
        for end in range(2, len(text)):
            length = 0
            while length < min(6, end) and text[end - 1 - length] == text[-1 - length]:
                length += 1
            if length >= 2:
                naive.append((length, end))
        found = [tuple(match) for match in index.matches()]
        if len(naive) <= 16:  # below the bound of a chain the search is complete
            assert found == sorted(naive, reverse=True), (seed, len(text))
        assert set(found) <= set(naive), (seed, len(text))
        longest = index.longest(3)
        assert longest is None or (longest in naive and longest.length >= 3), (seed, len(text))
        newest = [length for length, end in naive if index.tokens[end - 4 : end] == index.tokens[-4:]]
        if len(newest) in (1, 2, 3, 4):
            assert longest is not None and longest.length == max(newest), (seed, len(text))


class Looked(int):
    """A token that counts how often it is looked at."""

    times = 0

    def __hash__(self) -> int:
        Looked.times += 1
        return int.__hash__(self)


def test_of_a_long_text_what_would_be_forgotten_is_not_looked_at() -> None:
    whole, parts = (SuffixIndex([2, 4], max_match=6, max_tokens=55) for _ in range(2))
    text = [n % 40 for n in range(5000)]
    whole.extend([Looked(token) for token in text])
    assert Looked.times <= 55 * (2 + 4)
    parts.extend(text[:-55])
    parts.extend(text[-55:])
    assert whole.tokens == text[-55:] and parts.tokens[-55:] == whole.tokens
    assert [match.length for match in whole.matches()] == [6]


def test_capacity_forgets_the_oldest() -> None:
    index = SuffixIndex([2, 4, 8, 16], max_match=18, max_tokens=55)
    index.extend([1, 2, 3])
    index.extend([10 + n % 40 for n in range(500)])
    assert len(index.tokens) <= 2 * 55 + 500 and index.tokens[0] != 1
    index.extend([1, 2])
    assert index.matches() == [] and index.longest(2) is None
