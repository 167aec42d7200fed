"""What bench-network makes of its rows: each claim holds, fails or is not judged, by rows written by hand."""

from __future__ import annotations

import pytest

from bench.report import Row
from bench.timed import Reader
from bench.traffic.network import cells_of, full, verdicts
from slipstream.protocol.requests import Piece


def row(schedule: str, speed: float, rtt_ms: float = 0.0, hits: float = 0.0, draft_ms: float = 5.0,
        round_ms: float = 20.5) -> Row:
    return {"schedule": schedule, "rtt_ms": rtt_ms, "draft_ms": draft_ms, "batch": 1, "acceptance": "0.9",
            "tokens_per_s": speed, "hit_rate": hits, "hit_round_ms": round_ms, "verify_ms": 20.0}


GOOD = [row("plain", 50), row("colocated", 150), row("serial", 145), row("serial", 140, 1.0),
        row("run-ahead", 200, 0.0, 0.8), row("run-ahead", 195, 1.0, 0.8)]


def states(rows: list[Row]) -> list[str]:
    return [verdict.split(":")[0] for verdict in verdicts(rows)]


def test_good_rows_bear_out_all_claims() -> None:
    assert states(GOOD) == ["holds"] * 4


@pytest.mark.parametrize(("claim", "worse"), [
    (0, row("run-ahead", 180, 1.0, 0.8)), (1, row("run-ahead", 160, 1.0, 0.8)), (2, row("run-ahead", 130, 1.0, 0.8)),
    (3, row("run-ahead", 195, 1.0, 0.8, round_ms=23.0))])
def test_a_row_that_is_worse_fails_its_claim_and_is_named(claim: int, worse: Row) -> None:
    found = verdicts([*GOOD[:-1], worse])
    assert found[claim].startswith("FAILS") and "round trip 1 ms" in found[claim]


def test_without_hits_nothing_is_said_about_the_tenth() -> None:
    rows = [*GOOD[:4], row("run-ahead", 200, 0.0, 0.5), row("run-ahead", 151, 1.0, 0.5)]
    assert states(rows)[1] == "not judged"


def test_a_serial_round_that_loses_to_plain_fails_too() -> None:
    assert states([row("plain", 50), row("serial", 40, 20.0)])[2] == "FAILS"


def test_a_reader_counts_from_one_token_to_another() -> None:
    reader = Reader(0, begin=3, end=7)
    for second in range(10):
        reader.take(float(second), Piece((1, 1), 1, 1, wait_s=0.001 if second == 2 else 0.0))
    assert [at for at, _ in reader.pieces] == [1.0, 2.0, 3.0]  # tokens 3 to 4, 5 to 6 and 7 to 8
    assert reader.tokens_per_s == pytest.approx(2.0)
    assert reader.hits_ms == [1000.0], "the round that waited is no hit"


def test_the_whole_sweep_has_every_combination_once() -> None:
    cells = full()
    assert len(set(cells)) == len(cells) == 4 + 12 + 60 + 60 + 6
    assert {cell.schedule for cell in cells} == {"plain", "colocated", "serial", "run-ahead"}
    assert cells_of(("plain",), (0.0, 1.0), (2.0, 5.0), (1,)) == cells_of(("plain",), (0.0,), (2.0,), (1,))
