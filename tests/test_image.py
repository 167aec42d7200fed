"""How images are built: who builds them is known before gigabytes are gathered."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deploy.image import BASES, ROOT, builder


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for programs, which are all that there are."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def install(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_a_client_without_its_daemon_builds_nothing(programs: Path) -> None:
    install(programs, "docker", "echo Client: fine; echo no daemon at /run/docker.sock >&2; exit 1")
    with pytest.raises(SystemExit, match=r"docker: no daemon at /run/docker\.sock; podman is not installed; buildah"):
        builder()
    install(programs, "buildah", 'test "$1" = info')
    assert builder() == "buildah"
    install(programs, "docker", "exit 0")
    assert builder() == "docker" and builder(("buildah",)) == "buildah"


def test_bases_name_their_registry() -> None:
    """podman and buildah look nowhere for others, but for a few names that a distribution knows."""
    files = list((ROOT / "deploy/docker").iterdir())
    bases = [base for file in files for base in re.findall(r"^ARG \w+=(\S+)$", file.read_text(), re.MULTILINE)]
    assert len(bases) == len(files) == 2
    for base in (*bases, *BASES.values()):
        assert "." in base.partition("/")[0], base
