"""``make bench-network``: what a reader counts, and what the whole sweep measures."""

from __future__ import annotations

import pytest

from bench.timed import Reader
from bench.traffic.network import ALL, cells_of
from slipstream.protocol.requests import Piece


def test_a_reader_counts_from_one_token_to_another() -> None:
    reader = Reader(0, begin=3, end=7)
    for second in range(10):
        reader.take(float(second), Piece((1, 1), 1, 1, wait_s=0.001 if second == 2 else 0.0))
    assert [at for at, _ in reader.pieces] == [1.0, 2.0, 3.0]  # tokens 3 to 4, 5 to 6 and 7 to 8
    assert reader.tokens_per_s == pytest.approx(2.0)
    assert len(reader.counted) == 2 and reader.ended
    assert reader.hit_rounds_ms == [1000.0], "the round that waited is no hit"


def test_the_whole_sweep_has_every_combination_once() -> None:
    assert len(set(ALL)) == len(ALL) == 4 + 12 + 60 + 60
    assert {cell.schedule for cell in ALL} == {"plain", "colocated", "serial", "run-ahead"}
    assert cells_of(("plain",), (0.0, 1.0), (2.0, 5.0), (1,)) == cells_of(("plain",), (0.0,), (2.0,), (1,))
