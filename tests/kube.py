"""Programs for the tests of the chart: found on PATH or in the cache folder that `make k8s-tools` fills."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.tools import folder

ROOT = Path(__file__).parent.parent
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C where libyaml is: ten times as fast
CHART = ROOT / "deploy/helm/slipstream"
PROFILES = {name: tuple(ROOT / f"deploy/helm/values-{file}.yaml" for file in files)
            for name, files in {
                "cpu": ("cpu",), "h100": ("h100",), "70b-tp": ("h100", "70b-tp"), "vllm": ("h100", "vllm")}.items()}
# Others on top of that one: they differ from it in figures and names alone.
VLLM = {name: (*PROFILES["vllm"], ROOT / f"deploy/helm/values-vllm-{name}.yaml")
        for name in ("70b", "qwen3-30b-a3b", "deepseek-v3")}


def program(name: str) -> str:
    """The path of a program; without it the test is skipped, and says so."""
    found = shutil.which(name, path=f"{folder() / 'bin'}") or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not here: run `make k8s-tools`")
    return found


def run(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program(name), *map(str, arguments)], capture_output=True, text=True, timeout=300)


def helm(command: str, profile: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    files = [word for file in {**PROFILES, **VLLM}[profile] for word in ("-f", str(file))]
    release = {"template": ["r"], "install": ["r", "--dry-run=client", "-n", "ns"]}.get(command, [])
    return run("helm", command, *release, CHART, *files, *arguments)


def rendered(profile: str, *arguments: str) -> list[dict[str, Any]]:
    """The objects of a profile, in namespace ``ns``."""
    return [found for found in yaml.load_all(template(profile, *arguments), LOADER) if found]


@cache
def template(profile: str, *arguments: str) -> str:
    """What helm writes for a profile: many tests read the same."""
    done = helm("template", profile, "--namespace", "ns", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def only(objects: Sequence[dict[str, Any]], kind: str, name: str = "") -> dict[str, Any]:
    """The one object of that kind (and name)."""
    found = [o for o in objects if o["kind"] == kind and name in ("", o["metadata"]["name"])]
    assert len(found) == 1, f"{len(found)} of {kind} {name}"
    return found[0]
