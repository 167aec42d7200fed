"""``make bench-host``: the exchange with a draft service, and the sums of a round's parts."""

from __future__ import annotations

import pytest

from bench.host import LEVELS, exchanges, sums


def test_sums_take_each_part_of_a_greedy_round_once() -> None:
    parts = ["target: walk", "target: choose, 9 rows, greedy", "target: choose, 9 rows, T = 1", "wire: encode a commit",
             "wire: decode a growth", "wire: decode a commit", "draft: rank, 4 rows, greedy"]
    rows = [{"part": part, "p50_us": 10.0 ** i, "p99_us": 1.0} for i, part in enumerate(parts)]
    target, draft = sums(rows)
    assert (target["p50_us"], target["p99_us"]) == (1 + 10 + 1000 + 10_000, 4.0)
    assert draft["p50_us"] == 100_000 + LEVELS * 1_000_000


@pytest.mark.long
async def test_a_commit_goes_to_another_process_and_a_growth_comes_back() -> None:
    times = await exchanges(5)
    assert len(times) == 5
    assert all(0 < us < 1e6 for us in times)
