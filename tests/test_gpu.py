"""``make gpu`` on a device that every machine has: each job runs whole, sees what it should, and dies alone."""

from __future__ import annotations

import ctypes
import json
import os
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.asking import ask
from bench.gpu import machine, served
from bench.gpu.__main__ import main, run
from bench.gpu.job import Job
from bench.gpu.pace import head_of
from bench.gpu.profile import waits
from bench.gpu.shapes import LLAMA_8B, config_of, head_bytes, read_bytes
from bench.gpu.stage import Finding, StageOptions, busy_s, by_kernel
from bench.gpu.stages import JOBS
from slipstream.drafting.graph import GraphBackend

OPTIONS = StageOptions(torch.device("cpu"), full=False, repeats=1)
SHAPES_HERE = ("kernel 64x7", "profile 64")  # of stages with several shapes, one is enough here
LOCAL_JOBS = [job for job in JOBS if job.stage != "suite" and (not job.shape or job.name in SHAPES_HERE)]


@pytest.mark.parametrize("job", LOCAL_JOBS, ids=lambda job: job.name)
def test_every_stage_runs_anywhere(job: Job) -> None:
    found = list(job.function(replace(OPTIONS, shape=job.shape)))
    assert found
    for finding in found:
        if "same as plain" in finding.what and finding.expected:
            assert str(finding.value) == finding.expected, finding
        if "trial beside" in finding.what:
            assert finding.value == finding.expected, finding
        if "in both trees" in finding.what:
            assert finding.unit == f"of {finding.value}", finding
        if "off by" in finding.what:
            assert float(finding.value) < float(finding.expected.removeprefix("< ")), finding


def aborts(_: StageOptions) -> Iterator[Finding]:
    yield Finding("began", "yes")
    os.abort()


def hangs(_: StageOptions) -> Iterator[Finding]:
    yield Finding("began", "yes")
    time.sleep(600.0)


def crashes(_: StageOptions) -> Iterator[Finding]:
    yield Finding("began", "yes")
    ctypes.string_at(0)


def raises(_: StageOptions) -> Iterator[Finding]:
    yield Finding("began", "yes")
    raise ValueError("no such shape")


def test_an_abort_a_hang_a_crash_and_an_error_cost_their_own_rows_only(tmp_path: Path) -> None:
    by_name = {job.name: job for job in JOBS}
    broken = [Job(stage.__name__, f"{__name__}:{stage.__name__}", limit_s)
              for stage, limit_s in ((aborts, 30.0), (hangs, 1.0), (crashes, 30.0), (raises, 30.0))]
    rows = run([*broken, by_name["equal"]], OPTIONS, tmp_path, 300.0)
    died = [(row["stage"], row["value"]) for row in rows if row["what"] == "DIED"]
    assert died == [("aborts", "signal 6 (SIGABRT)"), ("aborts", "once more: signal 6 (SIGABRT)"),
                    ("hangs", "killed: it took longer than 1 s"),
                    ("hangs", "once more: killed: it took longer than 0.5 s"),
                    ("crashes", "signal 11 (SIGSEGV)"), ("crashes", "once more: signal 11 (SIGSEGV)")]
    assert {row["what"] for row in rows if row["stage"] == "aborts"} == {"began", "once more: began", "DIED"}
    assert [(row["what"], row["value"]) for row in rows if row["stage"] == "raises"] == [
        ("began", "yes"), ("FAILED", "ValueError: no such shape")], "another try would find no more"
    assert "graphs that serve" in [row["what"] for row in rows if row["stage"] == "equal"]
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert written["rows"] == rows and {"device", "torch", "commit", "date"} <= set(written)
    lines = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert [{name: line[name] for name in line if name != "at_s"} for line in lines] == rows


def test_what_does_not_come_to_its_turn_is_named(tmp_path: Path) -> None:
    assert [row["what"] for row in run(JOBS[:2], OPTIONS, tmp_path, -1.0)] == ["not run", "not run"]


def test_a_stage_that_is_not_known_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--device", "cpu", "--stages", "warp"])
    assert "no stage warp" in capsys.readouterr().err


def test_the_large_shapes_weigh_what_they_are_known_to() -> None:
    config = config_of(LLAMA_8B)
    assert read_bytes(config, 2, 0) == 15_009_849_344
    assert 0.74e9 < head_bytes(config, 32_000) < 0.76e9


def test_graphs_are_captured_before_answers_count_and_each_mode_is_reported_when_it_ends(
        monkeypatch: pytest.MonkeyPatch) -> None:
    backends, num_graphs, found = list[GraphBackend](), list[int](), list[Finding]()

    def counting_ask(*args: Any, **kwargs: Any) -> Any:
        num_graphs.append(len(backends[0].graphs()))
        return ask(*args, **kwargs)

    def recording_head_of(*args: Any) -> Any:
        network, backend = head_of(*args)
        backends.append(backend)
        return network, backend

    monkeypatch.setattr(served, "ask", counting_ask)
    monkeypatch.setattr(served, "head_of", recording_head_of)
    for finding in served.served_stage(replace(OPTIONS, shape="2")):
        if finding.what.endswith("host busy"):
            found.append(finding)
            assert len(num_graphs) == 2 * (len(served.MODES) + len(found))
    assert [finding.what.rpartition(":")[0] for finding in found] == list(served.MODES)
    assert set(num_graphs) == {2}  # trees of one answer and of two


SUITE = """
from pathlib import Path

def test_a_number():
    print("\\n= largest error | 0.5 | rms")

def test_that_waits(pytestconfig):
    while not Path(__file__).with_name("first_found").exists():
        pass

def test_a_lie():
    assert 1 == 2, "one is not two"
"""
OPTION = "def pytest_addoption(parser):\n    parser.addoption('--device')\n"


def test_results_of_the_suite_are_found_while_it_runs_and_failures_by_name(tmp_path: Path,
                                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "test_some.py"
    file.write_text(SUITE)
    (tmp_path / "conftest.py").write_text(OPTION)
    monkeypatch.setattr(machine, "DEVICE_TESTS", (str(file),))
    found = machine.suite_stage(OPTIONS)
    assert next(found) == Finding("largest error", 0.5, "rms")
    (tmp_path / "first_found").touch()
    failed, passed, not_passed, code, _ = found
    assert failed.what.endswith("test_some.py::test_a_lie") and "one is not two" in str(failed.value)
    assert (passed.value, not_passed.value, code.value) == (2, 1, 1)


def test_that_the_mode_which_counts_waits_is_new_is_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def set_mode(mode: str) -> None:
        if mode == "warn":
            warnings.warn("Synchronization debug mode is a prototype feature and does not yet detect all synchronizing "
                          "operations", stacklevel=1)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    parts = {"build": lambda: None,
             "wait": lambda: warnings.warn("called a synchronizing CUDA operation", stacklevel=1)}
    assert [finding.value for finding in waits(parts)] == [0, 1]


def test_a_table_of_kernels_has_the_longest_first() -> None:
    took = {"norm": (6, 6, 6), "product of a long name" * 9: (50,), "sum": (1, 1), "copy": (2,)}
    events = [SimpleNamespace(name=name, time_range=SimpleNamespace(elapsed_us=lambda us=us: us))
              for name, times in took.items() for us in times]
    assert busy_s(events) == 72e-6
    first, second, third = by_kernel("tree", events, 3)
    assert first.what.startswith("tree: 1 x product") and len(first.what) < 90 and first.value == 50
    assert (second.what, second.value, second.unit) == ("tree: 3 x norm", 18, "us")
    assert third.what == "tree: 2 x sum" and not list(by_kernel("tree", [], 3))
