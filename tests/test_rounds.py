"""``make bench-host``: the pieces of a round, read off what both sides write down."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from bench.fleet import Process
from bench.host.rounds import round_parts, threads_s
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
        target.sent("commit", f"c{turn}", at_s + 0.021)
        draft.received("commit", f"c{turn}", at_s + 0.023)
        draft.span("device", "tree", at_s + 0.026, at_s + 0.035, sessions=1)
        draft.sent("growth", f"g{turn}", at_s + 0.035)
        target.received("growth", f"g{turn}", at_s + 0.040)
        at_s += 0.046
    for trace in (target, draft):
        trace.write()
    found = dict(round_parts(tmp_path / "target", tmp_path / "draft", timing))
    assert list(found.values()) == pytest.approx([1000, 2000, 3000, 4000, 5000, 6000], abs=2)


def test_the_event_loop_is_the_main_thread_wherever_it_is_listed(tmp_path: Path,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are sorted as texts: that of the main thread, 999, stands behind those of the others."""
    listed = [SimpleNamespace(id=number, user_time=s, system_time=0.5) for number, s in ((1000, 4.0), (1001, 1.0),
                                                                                          (999, 2.0))]
    monkeypatch.setattr(psutil, "Process", lambda pid: SimpleNamespace(threads=lambda: listed))
    process = Process("", (), 0, tmp_path / "log")
    monkeypatch.setattr(Process, "pid", 999)
    assert threads_s(process) == {"event loop": 2.5, "engine": 4.5, "other threads": 1.5}
