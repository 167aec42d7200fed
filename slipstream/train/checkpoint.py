"""Checkpoints of a training: safetensors for tensors, JSON for the progress. No pickles.

Rules:
1. A checkpoint is a folder named by its step: ``head.safetensors``, ``optimizer.safetensors``, ``state.json``. It is
   written beside its place and renamed when complete; then older ones are removed. So a kill never loses the last one.
2. ``identity`` (the settings that decide shapes and data) must be the same when training is resumed.

It knows nothing about what the tensors mean.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from slipstream.base.errors import ConfigError
from slipstream.train.folders import work_files


@dataclass(frozen=True, slots=True)
class Checkpoint:
    tensors: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]
    state: dict[str, Any]


def save(folder: Path, step: int, checkpoint: Checkpoint, identity: Mapping[str, Any]) -> None:
    """Write the checkpoint of ``step`` and remove older ones. Raises ConfigError if it cannot be written; then the
    older one stays."""
    path = folder / f"step-{step:08d}"
    if path.exists():  # nothing was trained since; replacing it could lose it in a kill
        return
    with work_files(path) as partial:
        save_file(_on_cpu(checkpoint.tensors), partial / "head.safetensors")
        save_file(_on_cpu(checkpoint.optimizer), partial / "optimizer.safetensors")
        text = json.dumps({"identity": dict(identity), "state": checkpoint.state})
        (partial / "state.json").write_text(text, encoding="utf-8")
    for old in folder.glob("step-*"):
        if old != path:
            shutil.rmtree(old)


def load_newest(folder: Path, identity: Mapping[str, Any]) -> Checkpoint | None:
    """The newest complete checkpoint; None if there is none. Raises ConfigError if its identity is another, or if it
    cannot be read."""
    paths = sorted(path for path in folder.glob("step-*") if path.suffix != ".partial")
    if not paths:
        return None
    path = paths[-1]
    try:
        content = json.loads((path / "state.json").read_text(encoding="utf-8"))
        saved_identity, state = content["identity"], content["state"]
        tensors, optimizer = (load_file(path / f"{name}.safetensors") for name in ("head", "optimizer"))
    except (OSError, ValueError, LookupError, TypeError, SafetensorError) as error:
        raise ConfigError(f"{path} cannot be read: {error!r}; copy it again, or remove {folder} to train anew: the "
                          "conversations stay") from error
    differing = sorted(name for name in saved_identity.keys() | identity.keys()
                       if saved_identity.get(name) != identity.get(name))
    if differing:
        raise ConfigError(f"{path}: was trained with another {', '.join(differing)}; choose another --work "
                          f"(--data {folder.parent} keeps its conversations), or remove {folder} to train anew")
    return Checkpoint(tensors, optimizer, state)


def _on_cpu(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
