"""torch.compile: compiled layers compute what eager ones do, answers stay exact, and without a compiler it goes on."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.base.config import DraftSection, GrowthSection, ModelSection, PolicySection
from slipstream.drafting import Drafter, create
from slipstream.engine.batch import rows_batch
from slipstream.engine.kv import KVPool
from slipstream.engine.loading import load_model
from slipstream.engine.ops.compiled import compiled
from slipstream.engine.ops.layer import TORCH, LayerOps
from slipstream.protocol.messages import Open
from slipstream.protocol.requests import Request, Sampling
from tests.eagle_folder import write_eagle2_folder, write_eagle_folder
from tests.growth_rules import scored_paths
from tests.pair import drafting, local_link, target
from tests.tiny import write_tiny_model

COMPILER = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler here: torch.compile cannot be tried")
PATIENT = PolicySection(always=True, deadline_max_s=20.0)  # compiling is slow
PROMPT = b"the cat sat on the mat. the cat sat on the"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("compiled")
    return {"target": write_tiny_model(root / "target", num_hidden_layers=8),
            "standalone": write_tiny_model(root / "standalone", noise=0.1),
            "eagle2": write_eagle2_folder(root / "eagle2"), "eagle3": write_eagle_folder(root / "eagle3")}


def drafter(kind: str, folders: dict[str, Path], with_compile: bool) -> Drafter:
    section = DraftSection(drafter=kind, model=str(folders[kind]), dtype="float64", compile=with_compile,
                           growth=GrowthSection(num_steps=3, topk=2, num_draft_tokens=6))
    return create(section, ModelSection(path=str(folders["target"]), dtype="float64"), 512)


async def drafted(folders: dict[str, Path], kind: str, with_compile: bool) -> dict[str, list[int]]:
    """Answers with such a drafter, greedy and sampled. The log says whether it was compiled."""
    answers = {}
    async with (target(folders["target"], PATIENT) as rig, drafting(drafter(kind, folders, with_compile)) as peers,
                local_link(rig, peers)):
        for name, sampling in (("greedy", Sampling()), ("sampled", Sampling(temperature=1.0, seed=4))):
            pieces = await rig.answer(Request(name, tuple(PROMPT), sampling, 24))
            answers[name] = [token for piece in pieces for token in piece.tokens]
            assert any(piece.drafted for piece in pieces)
        await rig.check()
    return answers


@needs_compiler
@pytest.mark.parametrize("kind", ["eagle2", pytest.param("eagle3", marks=pytest.mark.long)])
def test_a_compiled_head_changes_no_answer(folders: dict[str, Path], kind: str,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    answers = asyncio.run(drafted(folders, kind, True))
    assert " compiled" in capsys.readouterr().out, "the head went on in eager mode"
    assert answers == asyncio.run(drafted(folders, kind, False))


@needs_compiler
@pytest.mark.long  # every dtype is compiled anew, and each takes tens of seconds on a busy machine
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 1e-4)])
def test_a_compiled_model_computes_what_the_eager_one_does(folders: dict[str, Path], dtype: str, tolerance: float,
                                                           capsys: pytest.CaptureFixture[str]) -> None:
    section = ModelSection(dtype=dtype)
    models = [load_model(folders["target"], section, compile_layers=wanted) for wanted in (True, False)]
    assert " compiled" in capsys.readouterr().out
    for rows in (1, 2, 7):
        outcomes = []
        for model in models:
            pool = KVPool(8, rows, model.config.num_kv_heads, model.config.head_dim, model.dtype)
            hidden, _ = model.forward(rows_batch(np.arange(rows), model.device), pool)
            outcomes.append((hidden, pool.kv))
        for ours, theirs in zip(*outcomes, strict=True):
            torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


def test_what_cannot_be_compiled_runs_eager_with_a_warning(folders: dict[str, Path],
                                                           capsys: pytest.CaptureFixture[str]) -> None:
    def run(halves: LayerOps, rows: int) -> None:
        raise RuntimeError(f"no compiler for {rows} rows")

    assert compiled(lambda halves: halves, run, "head") is TORCH
    printed = capsys.readouterr().out
    assert "not compiled: eager goes on" in printed and "no compiler for 1 rows" in printed


WITHOUT = """
import sys
from slipstream.base.config import DraftSection, ModelSection
from slipstream.drafting import create
drafter = create(DraftSection(drafter="standalone", model=sys.argv[1], dtype="float64", compile=True),
                 ModelSection(path=sys.argv[1]), 64)
print("drafter", drafter.name)
"""


@pytest.mark.long  # a process that imports the compiler's parts and looks for one
def test_without_a_compiler_eager_goes_on_with_a_warning(folders: dict[str, Path], tmp_path: Path) -> None:
    environment = {**os.environ, "CXX": str(tmp_path / "no-such-compiler"), "PATH": str(tmp_path),
                   "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", WITHOUT, str(folders["standalone"])], env=environment, timeout=300,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "not compiled: eager goes on" in done.stdout + done.stderr and "drafter standalone" in done.stdout


def test_eager_is_the_default(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert not DraftSection().compile
    made = drafter("standalone", folders, False)
    made.open([Open(1, np.array(list(PROMPT), np.int32), 1, Sampling())])
    assert len(scored_paths(made.grow([1], [6])[0])) == 6
    assert "compiled" not in capsys.readouterr().out
