"""``make bench-host``: the exchange between two processes, and the sums of a round's parts."""

from __future__ import annotations

import pytest

from bench.exchange import exchanges
from bench.host import ECHO, HELLO, LEVELS, commit_of, grown, levels_of_a_tree, sums
from bench.transit import ARROWS, SPANS, measurable, parts_of


def test_sums_take_each_part_of_a_greedy_round_once() -> None:
    parts = ["target: walk", "target: choose, 9 rows, greedy", "target: choose, 9 rows, T = 1", "wire: encode a commit",
             "wire: decode a growth", "wire: decode a commit", "draft: rank, 4 rows, greedy"]
    rows = [{"part": part, "p50_us": 10.0 ** i, "p99_us": 1.0} for i, part in enumerate(parts)]
    target, draft = sums(rows)
    assert (target["p50_us"], target["p99_us"]) == (1 + 10 + 1000 + 10_000, 4.0)
    assert draft["p50_us"] == 100_000 + LEVELS * 1_000_000


def test_the_ways_of_a_round_are_read_from_both_traces() -> None:
    target = [{"ph": "X", "name": "verify", "dur": 9000.0}, {"ph": "X", "name": "round", "dur": 1.0},
              {"ph": "s", "name": "commit", "id": "c1.7", "ts": 100.0},
              {"ph": "s", "name": "commit", "id": "c1.9", "ts": 500.0},
              {"ph": "f", "name": "growth", "id": "g1.7.1", "ts": 800.0}]
    draft = [{"ph": "f", "name": "commit", "id": "c1.7", "ts": 1600.0}, {"ph": "X", "name": "tree", "dur": 4000.0},
             {"ph": "s", "name": "growth", "id": "g1.7.1", "ts": 300.0}, {"ph": "M", "name": "process_name"}]
    parts = parts_of([*target, *draft])
    assert parts[ARROWS["commit"]] == [1500.0]  # the second one never came
    assert parts[ARROWS["growth"]] == [500.0]
    assert parts[SPANS["verify"]] == [9000.0]
    assert parts[SPANS["tree"]] == [4000.0]
    assert measurable({**parts, "often": [1.0, 2.0]}) == {"often": [1.0, 2.0]}


@pytest.mark.long
async def test_a_commit_goes_to_another_process_and_a_growth_comes_back() -> None:
    times = await exchanges(commit_of(grown(levels_of_a_tree())), HELLO, 5, ECHO)
    assert len(times) == 5
    assert all(0 < us < 1e6 for us in times)
