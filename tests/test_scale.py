"""The model that `make bench-scale` fits: what it finds again."""

from __future__ import annotations

from typing import Any

import pytest

from bench.traffic.scale import Cost, fit, measure, timed_services
from slipstream.simulate.timed import Timing

PLANTED = {"target": Cost(800.0, 150.0), "draft": Cost(500.0, 90.0), "client": Cost(0.0, 70.0)}
TIMING = Timing()


def rows() -> list[dict[str, Any]]:
    """What a machine would show on which the planted costs hold exactly."""
    out = []
    for targets, streams in ((1, 8), (1, 64), (2, 32), (4, 512)):
        batch = streams / targets
        out.append({"targets": targets, "drafts": targets, "streams": streams,
                    **{f"{part}_us_a_round": cost.round_us / batch + cost.stream_us for part, cost in PLANTED.items()}})
    return out


def test_the_fit_finds_what_was_planted() -> None:
    found = fit(rows())
    for part, cost in PLANTED.items():
        assert found[part].round_us == pytest.approx(cost.round_us, abs=1.0)
        assert found[part].stream_us == pytest.approx(cost.stream_us, rel=1e-3)


@pytest.mark.long
async def test_two_targets_with_two_drafts_answer_four_streams(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.timed.LOGS", tmp_path)
    async with timed_services(TIMING, 2, 2) as rig:
        row = await measure(rig, 4, 1.0, TIMING)
    assert row["tokens_per_s"] > 0
    assert row["target_us_a_round"] > 0
