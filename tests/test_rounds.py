"""``make bench-host``: the pieces of a round, read off what both sides write down."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.host.rounds import way
from slipstream.observe import trace as trace_of
from slipstream.observe.trace import Trace
from slipstream.simulate.timed import Timing


def test_the_way_of_a_round_is_read_off_two_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rounds of a step of 20 ms and a tree of 5, each 1, 2, … 6 ms late on its way."""
    monkeypatch.setattr(trace_of, "time", SimpleNamespace(time=lambda: 5.0, monotonic=lambda: 3.0))
    target, draft = (Trace(str(tmp_path / name), name) for name in ("target", "draft"))
    timing, at_s = Timing(step_s=0.02, draft_s=0.005), 100.0
    for turn in range(3):
        target.span("device", "verify", at_s, at_s + 0.021, rows=1)
        target.left("device", "commit", f"c{turn}", at_s + 0.021)
        draft.came("device", "commit", f"c{turn}", at_s + 0.023)
        draft.span("device", "tree", at_s + 0.026, at_s + 0.035, sessions=1)
        draft.left("device", "growth", f"g{turn}", at_s + 0.035)
        target.came("device", "growth", f"g{turn}", at_s + 0.040)
        at_s += 0.046
    for trace in (target, draft):
        trace.write()
    found = dict(way(tmp_path / "target", tmp_path / "draft", timing))
    assert list(found.values()) == pytest.approx([1000, 2000, 3000, 4000, 5000, 6000], abs=2)
