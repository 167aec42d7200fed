"""``make gpu-bundle``: what a machine with torch but without a network lacks to run ``make gpu``, in one folder.

Rules:
1. Packages are those of ``PACKAGES``, in the versions of ``requirements.lock``, for Python 3.12 on x86-64 Linux; they
   are unpacked below ``site``, which ``make gpu`` puts on PYTHONPATH where there is no ``.venv``.
2. Everything else is expected there: torch, numpy 2, safetensors, tokenizers, psutil, PyYAML, rich, jinja2, pytest,
   scipy.
3. The default model is 98 MB. ``--model`` cuts it into parts that can travel one by one; ``--join`` puts them together
   there and prepares the model.
4. ``--flashinfer`` adds FlashInfer with prebuilt kernels (see ``gpu_kernels``), an archive that ``make gpu`` unpacks.

It knows nothing about how the folder travels.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

PACKAGES = ("annotated-types", "gguf", "pydantic", "pydantic_core", "structlog", "typing_extensions",
            "typing_inspection")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
FOLDER = Path("build/gpu-bundle")
MODEL = "smollm2-135m"
PART_BYTES = 24 << 20


def pinned(lock: str, packages: Sequence[str]) -> list[str]:
    """``NAME==VERSION`` of each package. Raises KeyError for one that the lock file does not have."""
    versions = {_plain(name): version for name, version in re.findall(r"^([\w.-]+)==(\S+)", lock, re.MULTILINE)}
    return [f"{name}=={versions[_plain(name)]}" for name in packages]


def fetch(requirements: Sequence[str], wheels: Path) -> None:
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
                    "--python-version", "3.12", "--implementation", "cp", *platforms, "-d", str(wheels),
                    *requirements], check=True)


def unpack(wheels: Path, site: Path) -> None:
    shutil.rmtree(site, ignore_errors=True)
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)


def split(file: Path, folder: Path, part_bytes: int = PART_BYTES) -> list[Path]:
    """The parts of a file, in order: ``NAME.00``, ``NAME.01``, …"""
    folder.mkdir(parents=True, exist_ok=True)
    parts: list[Path] = []
    with file.open("rb") as source:
        while content := source.read(part_bytes):
            parts.append(folder / f"{file.name}.{len(parts):02}")
            parts[-1].write_bytes(content)
    return parts


def join(folder: Path, name: str, target: Path) -> Path:
    """The file ``name`` from its parts. Raises FileNotFoundError when there are none."""
    parts = sorted(folder.glob(f"{name}.[0-9][0-9]"))
    if not parts:
        raise FileNotFoundError(f"no parts of {name} in {folder}; 'make gpu-bundle ARGS=--model' makes them")
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as whole:
        for part in parts:
            whole.write(part.read_bytes())
    return target


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_bundle", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="store_true", help="the default model too, in parts")
    parser.add_argument("--flashinfer", action="store_true", help="FlashInfer too, its kernels compiled here with nvcc")
    parser.add_argument("--join", action="store_true", help="only put the model's parts together and prepare it")
    options = parser.parse_args(arguments)
    if options.join:
        _prepare()
        return
    wheels = FOLDER / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    fetch(pinned(Path("requirements.lock").read_text(encoding="utf-8"), PACKAGES), wheels)
    if options.flashinfer:
        from bench.gpu_kernels import NVML, TVM, build

        fetch([TVM, NVML], wheels)
        build(FOLDER)
    unpack(wheels, FOLDER / "site")
    if options.model:
        from slipstream.models.folder import KNOWN, packaged_file

        split(packaged_file(KNOWN[MODEL]), FOLDER / "model")
    files = [file for place in ("site", "model") for file in (FOLDER / place).rglob("*") if file.is_file()]
    files += FOLDER.glob("*.tar.gz")
    print(f"{FOLDER}: {len(files)} files, {sum(file.stat().st_size for file in files) / 2**20:.1f} MiB "
          "in site, model and archives")


def _prepare() -> None:
    from slipstream.models.folder import KNOWN, prepare

    known = KNOWN[MODEL]
    # Where the package that carries the model would have it: from there on it is as anywhere else.
    join(FOLDER / "model", known.file, FOLDER / "site" / known.package / known.file)
    print(prepare(MODEL, FOLDER / MODEL))


if __name__ == "__main__":
    main()
