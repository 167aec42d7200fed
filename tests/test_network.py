"""``make bench-network``: what a reader counts, and what the whole sweep measures."""

from __future__ import annotations

import pytest

from bench.report import Row
from bench.timed import Reader
from bench.traffic.network import ALL, cells_of, verdicts
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


def row(schedule: str, speed: float, rtt_ms: float = 0.0, round_ms: float = 20.5) -> Row:
    return {"schedule": schedule, "rtt_ms": rtt_ms, "draft_ms": 5.0, "batch": 1, "tokens_per_s": speed,
            "hit_rate": 0.8, "hit_round_ms": round_ms, "verify_ms": 20.0}


ROWS = [row("plain", 50), row("serial", 145), row("serial", 140, 1.0), row("run-ahead", 200),
        row("run-ahead", 195, 1.0)]


def test_good_rows_bear_out_every_promise_and_none_is_judged_without_rows() -> None:
    assert [line.split(":")[0] for line in verdicts(ROWS)] == ["holds"] * 3
    assert [line.split(":")[0] for line in verdicts(ROWS[:1])] == ["not judged"] * 3


@pytest.mark.parametrize(("promise", "worse"), [
    (0, row("run-ahead", 180, 1.0)), (1, row("run-ahead", 130, 1.0)), (2, row("run-ahead", 195, 1.0, round_ms=23.0))])
def test_a_row_that_is_worse_breaks_its_promise_and_is_named(promise: int, worse: Row) -> None:
    found = verdicts([*ROWS[:-1], worse])
    assert found[promise].startswith("FAILS") and "run-ahead, RTT 1.0 ms" in found[promise]


def test_a_serial_round_that_loses_to_plain_breaks_one_too() -> None:
    assert verdicts([row("plain", 50), row("serial", 40, 20.0)])[1].startswith("FAILS")
