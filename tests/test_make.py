"""The first minutes with `make`, where something is missing."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

MAKEFILE = Path(__file__).parent.parent / "Makefile"
WITHOUT_PIP = """#!/bin/sh
test "$1" = -c && exit 0
mkdir -p .venv/bin && cp "$0" .venv/bin/python && echo "ensurepip is not available: install python3-venv" && exit {code}
"""


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not here")
def test_an_environment_that_is_not_whole_is_made_again(tmp_path: Path) -> None:
    """As on Debian without python3-venv: once that is installed, the same command has to do."""
    python = tmp_path / "python3"
    python.touch(0o755)
    for code in (1, 0):
        python.write_text(WITHOUT_PIP.format(code=code))
        done = subprocess.run(["make", "-f", MAKEFILE, f"PYTHON={python}", ".venv/bin/python"], cwd=tmp_path,
                              capture_output=True, text=True)
        assert "install python3-venv" in done.stdout, "make says what its first line says"
        assert bool(done.returncode) == bool(code) and (tmp_path / ".venv").exists() == (not code)


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not here")
def test_a_benchmark_without_questions_says_so_before_anything_is_made(tmp_path: Path) -> None:
    """Environment, model and machine code take minutes."""
    done = subprocess.run(["make", "-n", "--no-print-directory", "-f", MAKEFILE, "bench"], cwd=tmp_path,
                          capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "") and "give PROMPTS=folder" in done.stderr


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not here")
def test_a_cache_folder_may_have_a_space_in_its_name(tmp_path: Path) -> None:
    cache = tmp_path / "my cache"
    for written in (False, True):
        done = subprocess.run(["make", "-n", "-o", ".venv/.project", "setup",
                               f"CACHE={cache}"], cwd=MAKEFILE.parent, capture_output=True, text=True, timeout=60)
        assert not done.returncode and done.stdout.count("models prepare") == (not written), done
        file = cache / "slipstream" / "models" / "smollm2-135m" / "slipstream.json"
        assert written or f'touch "{file}"' in done.stdout
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
