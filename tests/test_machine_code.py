"""Modules as a wheel has them, compiled: they decide as their sources do, bit for bit, and pass the same tests."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from setuptools.errors import CompileError

ROOT = Path(__file__).parent.parent
WORLDS = """
import hashlib, sys
import slipstream.decision.decide, slipstream.following.chains, slipstream.protocol.tree
from slipstream.protocol.messages import Growth
from tests.simulated import Simulation, World, always, steps
worlds = [World(), World(acceptance=always(0.2)), World(acceptance=steps((0, 0.9), (4, 0.1), (8, 0.9))),
          World(exchange_s=always(0.03)), World(present=steps((0, 1.0), (3, 0.0), (6, 1.0))),
          World(others=always(12.0)), World(matches=always(0.4)),
          World(slowness=steps((0, 1.0), (5, 3.0)), verify_factor=always(1.4))]
for number, world in enumerate(worlds):
    simulation = Simulation(world, seed=number)
    simulation.run(12.0)
    print(hashlib.sha256(repr((simulation.rounds, simulation.transitions)).encode()).hexdigest())
print(*(sys.modules[name].__file__.rpartition(".")[2] for name in sorted(sys.modules)
        if name in ("slipstream.decision.decide", "slipstream.following.chains", "slipstream.protocol.tree")),
      type(Growth.__init__).__name__)
"""


def build_hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_hook", ROOT / "build_hook.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree with compiled modules beside their sources. The C compiler does not optimise them, which would take it
    another minute."""
    hook, tree = build_hook(), tmp_path_factory.mktemp("compiled")
    if hook.compiler() is None:
        pytest.skip("no C compiler is here: wheels that are built here have no compiled modules")
    for name in ("slipstream", "tests", "bench", "target_service", "draft_service", "router_service",
                 "integrations"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tree)
    done = subprocess.run([sys.executable, ROOT / "build_hook.py", tree / "made", "0"], capture_output=True, text=True,
                          timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    shutil.copytree(tree / "made" / "lib", tree, dirs_exist_ok=True)
    return tree


def run(folder: Path, *words: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-P", *words], cwd=folder, env=environment, capture_output=True, text=True,
                          timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_compiled_modules_decide_as_their_sources_do(compiled: Path) -> None:
    *ours, kinds = run(compiled, "-c", WORLDS).splitlines()
    *theirs, sources = run(ROOT, "-c", WORLDS).splitlines()
    assert (kinds, sources) == ("so so so wrapper_descriptor", "py py py function") and len(ours) == 8
    assert ours == theirs


@pytest.mark.long
def test_compiled_modules_pass_the_tests_of_their_sources(compiled: Path) -> None:
    files = ("test_policy", "test_following", "test_session", "test_tree", "test_lookup", "test_pairing", "test_vllm",
             "test_vllm_features", "test_codec", "test_draft_worker", "test_scheduler", "test_target_worker",
             "test_wire")
    told = run(compiled, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"tests/{name}.py" for name in files))
    assert "[100%]" in told


@pytest.mark.parametrize("fields", [
    "class One(Other):\n    a: int\n", "class One:\n    a: list[int] = field(default_factory=list)\n",
    "class One:\n    a: ClassVar[int] = 1\n", "class One:\n    a: int\n    def __post_init__(self): ...\n",
    "class One:\n    a: int\nb = 1\n"])
def test_a_value_that_is_more_than_fields_is_not_compiled_wrongly(fields: str) -> None:
    hook = build_hook()
    with pytest.raises(ValueError, match="One: a value has fields with plain defaults"):
        hook.with_constructors("@value\n" + fields)
    made = hook.with_constructors("@value\nclass One:\n    a: int = 1")
    assert made.endswith("    a: int = 1\n    def __init__(self, a: int = 1) -> None: self.a = a\n")


class Told:
    """What a build says to people."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def display_warning(self, line: str) -> None:
        self.warnings.append(line)


@pytest.mark.parametrize(("version", "pure", "compiles", "says"), [
    ("standard", "", True, ""), ("editable", "", True, ""), ("standard", "1", True, ""),
    ("standard", "", False, "no compiled modules: Python.h")])
def test_a_wheel_has_what_can_be_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, pure: str,
                                          compiles: bool, says: str) -> None:
    def compile_modules(out: Path, root: Path) -> dict[str, str]:
        if not compiles:
            raise CompileError("Python.h: No such file or directory")
        return {"/made/decide.so": "slipstream/decision/decide.so"}

    hook, told, data = build_hook(), Told(), dict[str, Any](force_include={})
    monkeypatch.setattr(hook, "compile_protos", lambda root: None)
    monkeypatch.setattr(hook, "compile_modules", compile_modules)
    monkeypatch.setattr(hook, "compiler", lambda: "/usr/bin/cc")
    monkeypatch.setenv("SLIPSTREAM_PURE", pure)
    made = hook.CustomBuildHook(str(ROOT), {}, None, None, str(tmp_path), "wheel", told)
    made.initialize(version, data)
    made.finalize(version, data, "")
    assert says in "".join(told.warnings) and bool(told.warnings) == bool(says)
    if version == "standard" and not pure and compiles:
        assert data == {"force_include": {"/made/decide.so": "slipstream/decision/decide.so"}, "pure_python": False,
                        "infer_tag": True}
    else:
        assert data == {"force_include": {}}, "the wheel is for any machine"
