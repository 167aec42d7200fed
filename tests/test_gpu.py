"""``make gpu`` on a device that every machine has: each stage runs whole, and sees what it is there to see."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import bench.gpu.__main__ as gpu
from bench.gpu.__main__ import STAGES, main, run
from bench.gpu.shapes import LLAMA_8B, config_of, head_bytes, read_bytes
from bench.gpu.stage import Finding, Given

GIVEN = Given(torch.device("cpu"), full=False, repeats=1)


@pytest.mark.parametrize("name", [name for name in STAGES if name != "suite"])
def test_every_stage_runs_anywhere(name: str) -> None:
    found = list(STAGES[name](GIVEN))
    assert found
    for finding in found:
        if "same as plain" in finding.what and finding.expected:
            assert str(finding.value) == finding.expected, finding
        if finding.expected.startswith("<=") and finding.unit == "rms":
            assert float(finding.value) <= float(finding.expected[3:]), finding


def test_a_stage_that_fails_loses_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(given: Given) -> Iterator[Finding]:
        yield Finding("before", 1.0)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(gpu, "STAGES", {"bad": breaks, "good": lambda given: iter([Finding("after", 2.0)])})
    rows = run(["bad", "good"], GIVEN, tmp_path, 60.0)
    assert [row["what"] for row in rows] == ["before", "FAILED", "after"]
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert written["rows"] == rows and {"device", "torch", "commit", "date"} <= set(written)


def test_stages_that_come_too_late_are_named(tmp_path: Path) -> None:
    assert [row["what"] for row in run(["info", "tree"], GIVEN, tmp_path, -1.0)] == ["not run", "not run"]


def test_an_unknown_stage_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--device", "cpu", "--stages", "warp"])
    assert "no stage warp" in capsys.readouterr().err


def test_the_large_shapes_weigh_what_they_are_known_to() -> None:
    config = config_of(LLAMA_8B)
    assert read_bytes(config, 2, 0) == 15_009_849_344
    assert 0.74e9 < head_bytes(config, 32_000, 2) < 0.76e9
