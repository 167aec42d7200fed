"""``make gpu-bundle``: one archive with all that ``make gpu`` needs on a machine with torch and without a network.

Rules:
1. Packages are those of ``PACKAGES``, in the versions of ``requirements.lock``, for Python 3.12 on x86-64 Linux; they
   lie below ``site``, which ``make gpu`` puts on PYTHONPATH where there is no ``.venv``. The code that is made from
   ``proto`` goes along. The archive is unpacked in the root of a checkout, and has at most ``MAX_BYTES``.
2. Everything else is expected there: ``EXPECTED``, and what those need.
3. ``--rehearse`` makes it for this Python, unpacks it in an empty folder beside what git tracks, and runs the stages
   there on a CPU, with nothing else of this environment than what is expected.
4. ``--model`` puts the default model's file (98 MB) where its package has it, and ``make gpu ARGS="--model NAME"``
   prepares it there.
5. ``--flashinfer`` adds FlashInfer as small as it runs, an archive that ``make gpu`` unpacks: Python, and the templates
   from which it would make the kernels' sources; no headers. Its kernels are compiled here for an H100
   (``gpu_kernels``), and with FLASHINFER_DISABLE_JIT=1 nothing is compiled where it runs. What was packed is unpacked
   elsewhere and loaded.

It knows nothing about how the archive travels.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from bench.gpu.stages import STAGES
from deploy.gpu_kernels import NVML, TVM, check, compile_libraries
from deploy.pip import pip
from slipstream.base.config import ModelSection
from slipstream.models.folder import KNOWN, packaged_file

PACKAGES = ("annotated-types", "gguf", "grpcio", "grpcio-health-checking", "grpcio-reflection", "llguidance",
            "prometheus-client", "protobuf", "pydantic", "pydantic_core", "structlog", "typing_extensions",
            "typing_inspection")
EXPECTED = ("torch", "numpy", "safetensors", "tokenizers", "psutil", "PyYAML", "rich", "jinja2", "pytest", "scipy")
GENERATED = Path("slipstream/v1")  # code, from proto
MAX_BYTES = 36 << 20
PLATFORMS = ("manylinux_2_31_x86_64", "manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
FOLDER = Path("build/gpu-bundle")
GPUS = "9.0a"  # compute capabilities


def pinned(lock: str, packages: Sequence[str]) -> list[str]:
    """``NAME==VERSION`` of each package. Raises KeyError for one that is not in the lock file."""
    pins = re.findall(r"^([\w.-]+)==(\S+)", lock, re.MULTILINE)
    versions = {canonicalize_name(name): version for name, version in pins}
    return [f"{name}=={versions[canonicalize_name(name)]}" for name in packages]


def fetch(requirements: Sequence[str], site: Path, python: str = "3.12") -> None:
    """Wheels for the other machine and its Python, unpacked into ``site``."""
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    with tempfile.TemporaryDirectory() as wheels:
        pip("download", "--no-deps", "--only-binary=:all:", "--python-version", python, "--implementation", "cp",
            *platforms, "-d", wheels, *requirements)
        for wheel in sorted(Path(wheels).glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)


def build_flashinfer(folder: Path) -> Path:
    """Make the archive ``flashinfer.tar`` in ``folder``: a slim package with prebuilt kernels."""
    builder = folder.with_name("gpu-kernels").resolve()  # outside of the folder, which is packed
    archive = _pack(builder, compile_libraries(builder, GPUS), folder / "flashinfer.tar")
    with tempfile.TemporaryDirectory() as place, tarfile.open(archive) as packed:
        packed.extractall(place, filter="data")
        check(builder, Path(place), GPUS)
    return archive


def flashinfer_files(package: Path) -> Iterator[Path]:
    """The files of an installed ``flashinfer`` that go along, relative to it (rule 5)."""
    for file in sorted(package.rglob("*")):
        path = file.relative_to(package)
        if not file.is_file() or "__pycache__" in path.parts:
            continue
        is_data = path.parts[0] == "data"
        if path.suffix in (".py", ".json") if not is_data else path.match("data/csrc/batch_prefill*"):
            yield path


def _pack(builder: Path, libraries: Sequence[Path], archive: Path) -> Path:
    package = builder / "flashinfer"
    with tarfile.open(archive, "w") as out:
        for path in flashinfer_files(package):
            out.add(package / path, Path("flashinfer") / path)
        for library in libraries:
            out.add(library, Path("flashinfer/data/aot") / library.stem / library.name)
    return archive


def pack(folder: Path, generated: Path, archive: Path, max_bytes: int = MAX_BYTES) -> Path:
    """One archive of ``folder`` and the generated code, by their paths in a checkout. Raises SystemExit where it is
    larger than ``max_bytes``."""
    with tarfile.open(archive, "w:xz") as out:
        out.add(folder, FOLDER)
        for file in sorted(generated.glob("*.py")):
            out.add(file, GENERATED / file.name)
    size = archive.stat().st_size
    if size > max_bytes:
        raise SystemExit(f"{archive}: {size / 2**20:.1f} MiB, and at most {max_bytes / 2**20:.0f} can travel")
    print(f"{archive}: {size / 2**20:.1f} MiB, to be unpacked in the root of a checkout")
    return archive


def with_dependencies(names: Sequence[str]) -> set[str]:
    """The normalized names of these packages and of all their dependencies, as far as they are installed."""
    found: set[str] = set()
    pending = list(names)
    while pending:
        name = canonicalize_name(pending.pop())
        if name not in found:
            with suppress(metadata.PackageNotFoundError):
                requirements = metadata.requires(name) or []
                found.add(name)
                pending += [Requirement(requirement).name for requirement in requirements
                            if "extra ==" not in requirement]
    return found


def rehearse(archive: Path, options: Sequence[str]) -> int:
    """Unpack it in an empty folder beside what git tracks, and run ``make gpu`` there. Returns the exit code."""
    with tempfile.TemporaryDirectory() as place:
        checkout, site = Path(place) / "checkout", Path(place) / "beside"
        site.mkdir()
        for name in with_dependencies(EXPECTED):
            for file in metadata.files(name) or []:
                top = site / file.parts[0]
                if file.parts[0] not in ("..", "__pycache__") and not top.exists():
                    top.symlink_to(Path(str(file.locate())).parents[len(file.parts) - 1] / file.parts[0])
        tracked = subprocess.run(["git", "ls-files", "-z"], capture_output=True, check=True).stdout.decode().split("\0")
        for name in filter(None, tracked):
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(name, checkout / name)
        with tarfile.open(archive) as packed:
            packed.extractall(checkout, filter="data")
        environment = [f"HOME={place}", f"PATH={os.defpath}",  # a compiler calls others by it
                       f"PYTHONPATH={checkout / FOLDER / 'site'}:{site}"]
        command = ["env", "-i", *environment, sys.executable, "-S", "-m", "bench.gpu", "--device", "cpu", "--rehearse",
                   "--repeats", "1", *options]
        return subprocess.run(command, cwd=checkout, check=False).returncode


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m deploy.bundle", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="store_true", help="the default model too")
    parser.add_argument("--flashinfer", action="store_true", help="FlashInfer too, its kernels compiled here with nvcc")
    parser.add_argument("--rehearse", nargs="?", const="", metavar="STAGES",
                        help="for this Python, unpacked and run in an empty folder; all stages but suite, or these")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "bundle" if options.rehearse is not None else FOLDER
        site = folder / "site"
        shutil.rmtree(site, ignore_errors=True)
        python = ".".join(map(str, sys.version_info[:2])) if options.rehearse is not None else "3.12"
        fetch(pinned(Path("requirements.lock").read_text(encoding="utf-8"), PACKAGES), site, python)
        if options.flashinfer:
            fetch([TVM, NVML], site)
            build_flashinfer(folder)
        if options.model:
            known = KNOWN[ModelSection().path]
            (site / known.package).mkdir(exist_ok=True)
            shutil.copy(packaged_file(known), site / known.package / known.file)
        archive = folder.with_name("gpu-bundle.tar.xz")
        pack(folder, GENERATED, archive, sys.maxsize if options.model else MAX_BYTES)  # a model travels another way
        if options.rehearse is not None:
            names = options.rehearse or " ".join(name for name in STAGES if name != "suite")
            sys.exit(rehearse(archive, ["--stages", names]))


if __name__ == "__main__":
    main()
