from __future__ import annotations

import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

from deploy.bundle import PACKAGES, flashinfer_files, pack, pinned, with_dependencies
from deploy.gpu_kernels import FLASHINFER

LOCK = Path(__file__).parent.parent / "requirements.lock"


def test_every_package_is_pinned_by_the_lock_file() -> None:
    found = pinned(LOCK.read_text(encoding="utf-8"), PACKAGES)
    assert [line.partition("==")[0] for line in found] == list(PACKAGES) and all(line[-1].isdigit() for line in found)
    with pytest.raises(KeyError):
        pinned("torch==1\n", ["pydantic"])


WITHOUT = """
import sys
from importlib import import_module, metadata
from packaging.utils import canonicalize_name
from deploy.bundle import EXPECTED, PACKAGES, with_dependencies
there = {*map(canonicalize_name, PACKAGES)} | with_dependencies(EXPECTED) | {"slipstream"}
missing = {top for top, owners in metadata.packages_distributions().items()
           if not there & {*map(canonicalize_name, owners)}}
for name in [name for name in sys.modules if name.partition(".")[0] in missing]:
    del sys.modules[name]
sys.modules.update(dict.fromkeys(missing))  # to import one fails
from bench.gpu.stages import JOBS
for job in JOBS:
    job.function
print(*sorted(missing))
"""


def test_all_stages_do_with_what_travels_and_what_is_expected() -> None:
    found = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    assert "starlette" in found.stdout.split()


def test_names_are_compared_as_pip_does() -> None:
    assert pinned("Typing_Extensions==4.1\n", ["typing-extensions"]) == ["typing-extensions==4.1"]


def test_of_flashinfer_go_python_and_the_templates_of_one_kernel(tmp_path: Path) -> None:
    kept = {"__init__.py", "jit/core.py", "data/csrc/batch_prefill.cu", "tuning_configs/a.json"}
    left = {"data/cutlass/include/a.h", "data/csrc/mla.cu", "data/cccl/tool.py", "__pycache__/core.py", "kernels/a.ptx"}
    for name in kept | left:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert {str(path) for path in flashinfer_files(tmp_path)} == kept


def test_the_bundle_has_the_version_that_the_project_asks_for() -> None:
    project = tomllib.loads((LOCK.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["optional-dependencies"]["gpu"] == [FLASHINFER]


def test_one_archive_holds_all_and_no_more_than_can_travel(tmp_path: Path) -> None:
    for name in ("bundle/site/package/a.py", "made/common_pb2.py", "made/common_pb2.pyi"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1")
    with tarfile.open(pack(tmp_path / "bundle", tmp_path / "made", tmp_path / "all.tar.xz")) as packed:
        files = {member.name for member in packed if member.isfile()}
    assert files == {"build/gpu-bundle/site/package/a.py", "slipstream/v1/common_pb2.py"}
    with pytest.raises(SystemExit, match="can travel"):
        pack(tmp_path / "bundle", tmp_path / "made", tmp_path / "all.tar.xz", 10)


def test_what_is_expected_there_brings_what_it_needs() -> None:
    found = with_dependencies(["rich", "not-there"])
    assert {"rich", "pygments"} <= found and "not-there" not in found
    assert "pydantic" not in with_dependencies(["torch", "pytest"])
