"""A model folder's tensors: safetensors in, tensors by name out.

Rules:
1. Only safetensors are read, never pickles; shards follow ``model.safetensors.index.json``.
2. A missing file, tensor or a wrong shape is a ModelError that names it.

It knows nothing about where folders come from (see ``slipstream.models``) or what tensors are for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from slipstream.base.errors import ModelError
from slipstream.engine.model import read_json

Tensors = Mapping[str, torch.Tensor]


def take(tensors: Tensors, name: str, *shape: int) -> torch.Tensor:
    """The tensor called ``name``. Raises ModelError when it is missing or has another shape."""
    if name not in tensors:
        raise ModelError(f"tensor {name} is missing from the model's safetensors")
    if tuple(tensors[name].shape) != shape:
        raise ModelError(f"tensor {name} has shape {tuple(tensors[name].shape)}, expected {shape}")
    return tensors[name]


def load_tensors(folder: str | Path, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
    """The tensors of the folder's safetensors by name, in their stored dtypes, on the CPU: those of ``names`` that are
    there, or (None) all. Raises ModelError."""
    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return _sharded(folder, index, names)
    return _tensors_of(folder / "model.safetensors", names)


def tensor_names(folder: str | Path) -> set[str]:
    """The names of the tensors that ``load_tensors`` would read; only headers are. Raises ModelError."""
    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return set(_weight_map(index))
    with _opened(folder / "model.safetensors") as file:
        return set(file.keys())


def _tensors_of(path: Path, wanted: Collection[str] | None = None) -> dict[str, torch.Tensor]:
    with _opened(path) as file:
        names: list[str] = list(file.keys())
        return {name: file.get_tensor(name) for name in names if wanted is None or name in wanted}


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    if not path.exists():
        raise ModelError(f"{path}: no such file; a model folder holds config.json and *.safetensors")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: not readable as safetensors: {error}") from error


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise ModelError(f"{index}: weight_map: expected an object of tensor name to file name")
    return weight_map


def _sharded(folder: Path, index: Path, names: Collection[str] | None) -> dict[str, torch.Tensor]:
    weight_map = _weight_map(index)
    if names is not None:
        weight_map = {name: file for name, file in weight_map.items() if name in names}
    tensors: dict[str, torch.Tensor] = {}
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name:
            raise ModelError(f"{index}: weight_map: {name!r} is not the name of a file of this folder")
        tensors.update(_tensors_of(folder / name, names))
    missing = sorted(set(weight_map) - set(tensors))
    if missing:
        raise ModelError(f"{index}: tensor {missing[0]} is in the index but in none of its files")
    return tensors
