"""Kernels are tried by another process: what becomes of it is a verdict, and is kept."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from bench.gpu.shapes import TINY, config_of
from slipstream.base.errors import first_line
from slipstream.base.offload import main_command
from slipstream.engine import witness
from slipstream.engine.proof import VERDICT_PREFIX, cached_verdict, question_for, run_trial


def told(script: str) -> list[str]:
    return ["sh", "-c", script]


@pytest.mark.parametrize(("script", "words", "lasting"), [
    (f"echo '{VERDICT_PREFIX}\"\"'", "", True),
    (f"echo noise; echo '{VERDICT_PREFIX}\"a row is off\"'", "a row is off", True),
    ("kill -ABRT $$", "signal 6 (SIGABRT)", True),
    ("kill -SEGV $$", "signal 11 (SIGSEGV)", True),
    ("kill -KILL $$", "signal 9 (SIGKILL)", False),  # of a machine without memory
    ("echo first >&2; echo no compiler >&2; exit 1", "exit code 1: no compiler", False),  # who installs one asks again
    (f"echo '{VERDICT_PREFIX}\"CUDA error: an illegal memory access\"'", "illegal memory access", True),
    (f"echo '{VERDICT_PREFIX}\"OutOfMemoryError: CUDA out of memory\"'", "out of memory", False),
    ("exec sleep 60", "longer than 0.2 s", False),
])
def test_whatever_becomes_of_it_is_a_verdict(script: str, words: str, lasting: bool) -> None:
    found, kept = run_trial(told(script), 0.2 if "sleep" in script else 60.0)
    assert (words in found if words else found == "") and kept == lasting


def test_one_that_cannot_start_says_nothing_about_the_next_time(tmp_path: Path) -> None:
    found, kept = run_trial([str(tmp_path / "nothing")])
    assert "could not start" in found and not kept


def test_a_verdict_is_kept_by_what_it_is_about(tmp_path: Path) -> None:
    counted = told(f"echo x >> {tmp_path}/asked; echo '{VERDICT_PREFIX}\"\"'")
    times = [cached_verdict(tmp_path / "kept", {"gpu": gpu}, counted) for gpu in ("one", "one", "other", "one")]
    assert times == [""] * 4 and (tmp_path / "asked").read_text() == "x\n" * 2
    (verdict, _) = (tmp_path / "kept").iterdir()
    verdict.write_text("{")
    cached_verdict(tmp_path / "kept", {"gpu": "one"}, counted), cached_verdict(tmp_path / "kept", {"gpu": "other"},
                                                                               counted)
    assert (tmp_path / "asked").read_text() == "x\n" * 3, "one that cannot be read is asked for again"
    assert cached_verdict(tmp_path / "kept", {"gpu": "dead"}, told("kill -ABRT $$")).endswith("(SIGABRT)")
    assert cached_verdict(tmp_path / "kept", {"gpu": "dead"},
                          counted).endswith("(SIGABRT)"), "it is not asked to die twice"


def test_where_nothing_can_be_kept_it_is_asked_each_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert cached_verdict(tmp_path / "file", {}, told(f"echo '{VERDICT_PREFIX}\"no\"'")) == "no"


def test_a_witness_says_why_there_is_nothing_to_see(tmp_path: Path) -> None:
    """It is ours, whatever has a name of ours in the folder that one stands in."""
    (tmp_path / "numpy.py").write_text("raise SystemExit('not the one you think')")
    question = json.dumps(question_for("attention", config_of(TINY), torch.bfloat16))
    done = subprocess.run([*main_command("slipstream.engine.witness"), question, "cpu"], capture_output=True, text=True,
                          check=False, cwd=tmp_path)
    assert done.returncode == 1 and "flashinfer" in done.stderr.splitlines()[-1] and VERDICT_PREFIX not in done.stdout


@pytest.mark.parametrize(("error", "kept"), [
    (RuntimeError("CUDA error: an illegal memory access was encountered"), True),
    (RuntimeError("Triton Error [CUDA]: misaligned address"), True),
    (RuntimeError("Failed to find C compiler. Please specify via CC environment variable"), False),
    (ImportError("No module named 'flashinfer'"), False)])
def test_a_witness_keeps_to_itself_what_is_not_the_devices(monkeypatch: pytest.MonkeyPatch, error: Exception,
                                                           kept: bool) -> None:
    def fails() -> None:
        raise error

    monkeypatch.setattr(witness, "triton_operations", fails)
    question = question_for("operations", config_of(TINY), torch.bfloat16)
    if kept:
        assert witness.examine(question, torch.device("cpu")) == first_line(error)
    else:
        with pytest.raises(type(error)):
            witness.examine(question, torch.device("cpu"))
