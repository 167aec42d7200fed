"""Proof: whether kernels may serve on this GPU, found out by a trial in another process.

Rules:
1. After a kernel has read an invalid address, its process can never use the GPU again. So kernels that this GPU has not
   run before are first run by another process (``witness``), before a model is loaded. If that process fails, this one
   can fall back to torch.
2. The verdict of the trial, or the signal that ended it, is kept in a file for this GPU, driver, versions and model
   dimensions: the next start needs no trial. Running out of time or memory, or a missing compiler, may be over at the
   next start, so these are not kept.

It knows nothing about kernels. Format of a verdict: JSON, one file each in the user's cache.
"""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Literal

import torch

from slipstream import __version__
from slipstream.base.offload import main_command
from slipstream.engine.model import ModelConfig
from slipstream.models.folder import default_root

What = Literal["attention", "operations", "rounding", "choosing"]
Proof = Callable[[What, ModelConfig, torch.dtype, torch.device], str]

LIMIT_S = 900.0  # compilers take minutes
DRIVER = Path("/proc/driver/nvidia/version")
PACKAGES = ("torch", "triton", "flashinfer-python")
VERDICT_PREFIX = "verdict "  # the beginning of a witness's line with the verdict
TRANSIENT_ERRORS = ("out of memory", "Out of memory", "OutOfMemoryError")  # errors that may be over at the next start


def rejection_reason(what: What, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> str:
    """Why these kernels may not serve a model of these dimensions, in words; empty: they may."""
    about = question_for(what, config, dtype)
    environment = {"gpu": torch.cuda.get_device_name(device), "driver": driver(), "slipstream": __version__,
                   "cuda": str(torch.version.cuda), **{name: version(name) for name in PACKAGES}}
    trial_command = [*main_command("slipstream.engine.witness"), json.dumps(about), str(device)]
    return cached_verdict(default_root().with_name("kernels"), about | environment, trial_command)


def question_for(what: What, config: ModelConfig, dtype: torch.dtype) -> dict[str, object]:
    """The question as the witness gets it, in JSON."""
    return {"what": what, "dtype": str(dtype).removeprefix("torch."), "config": asdict(config)}


def cached_verdict(folder: Path, about: dict[str, object], trial_command: Sequence[str]) -> str:
    """The verdict on ``about``: from its file in ``folder``, else from running the command ``trial_command``."""
    digest = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()
    path = folder / f"verdict-{digest[:24]}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads(path.read_text(encoding="utf-8"))["objection"])
    found, is_lasting = run_trial(trial_command)
    if is_lasting:
        with suppress(OSError):  # a container's disk may be read-only: the next start asks again
            folder.mkdir(parents=True, exist_ok=True)
            fresh = path.with_suffix(".part")
            fresh.write_text(json.dumps({"objection": found, "about": about}, default=str), encoding="utf-8")
            fresh.replace(path)
    return found


def run_trial(trial_command: Sequence[str], limit_s: float = LIMIT_S) -> tuple[str, bool]:
    """Run a trial's command: why it rejects the kernels, or how it ended; and whether this holds for the next start."""
    try:
        done = subprocess.run(trial_command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return f"its trial took longer than {limit_s:g} s", False
    except OSError as error:
        return f"its trial could not start: {error}", False
    last = [line for line in done.stdout.splitlines() if line.startswith(VERDICT_PREFIX)]
    if done.returncode == 0 and last:
        found = str(json.loads(last[-1].removeprefix(VERDICT_PREFIX)))
    elif done.returncode < 0:
        found = f"its trial ended by signal {-done.returncode} ({signal.Signals(-done.returncode).name})"
    else:
        error_lines = done.stderr.strip().splitlines() or ["nothing said"]
        return f"its trial ended with exit code {done.returncode}: {error_lines[-1][:300]}", False
    return found, not any(word in found for word in TRANSIENT_ERRORS) and done.returncode != -signal.SIGKILL


def driver() -> str:
    try:
        return DRIVER.read_text(encoding="utf-8").partition("\n")[0]
    except OSError:
        return "unknown"


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"
