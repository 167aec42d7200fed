"""The token map of FR-Spec: a drafter scores only frequent tokens, not the whole vocabulary.

Rules:
1. A map is a list of token ids: JSON, or safetensors with one tensor of integers called ``token_map`` or
   ``hot_token_id``. A pickle (``.pt``) is refused with the command that converts it.
2. Ids are distinct and inside the vocabulary, and there are at least as many as children of a node.
3. Logits come from the kept rows of the lm_head; ids map back through ``Network.vocabulary``. The target still chooses
   from its whole vocabulary: a map may lower acceptance, and never changes an answer.

It knows nothing about drafters. Source: FR-Spec, arXiv 2502.14856.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from slipstream.base.errors import ModelError

TENSORS = ("token_map", "hot_token_id")
MAX_BYTES = 64 << 20  # of the file: some millions of ids
CONVERSION = "read it there and write the ids as a JSON list, json.dump([int(i) for i in ids], open('map.json', 'w'))"


def load_token_map(path: str | Path, vocab_size: int, at_least: int = 1) -> torch.Tensor:
    """The ids of a map, int64 [K], ascending. at_least: the fewest ids allowed. Raises ModelError naming the fault."""
    path = Path(path)
    where = f"draft.token_map: {path}"
    if path.suffix in (".pt", ".pth", ".bin", ".pkl"):
        raise ModelError(f"{where} is a pickle, which can run code when it is read, so it never is; convert it once "
                         f"where you trust it: {CONVERSION}")
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ModelError(f"{where} is larger than {MAX_BYTES >> 20} MiB: that is no list of token ids")
        ids = _of_safetensors(path, where) if path.suffix == ".safetensors" else _of_json(path, where)
    except OSError as error:
        raise ModelError(f"{where}: cannot be read: {error.strerror}") from error
    if len(ids) < at_least:
        raise ModelError(f"{where}: {len(ids)} token ids, expected at least {at_least} (draft.growth.topk)")
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        raise ModelError(f"{where}: token ids from {low} to {high}, expected 0 to {vocab_size - 1}: the map is of "
                         "another vocabulary")
    if len(set(ids)) != len(ids):
        raise ModelError(f"{where}: {len(ids)} token ids, {len(set(ids))} of them distinct; each may stand once")
    return torch.tensor(sorted(ids), dtype=torch.int64)


def _of_json(path: Path, where: str) -> list[int]:
    try:
        ids = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{where}: neither JSON nor *.safetensors: {error}") from error
    if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ModelError(f"{where}: expected a list of token ids")
    return ids


def _of_safetensors(path: Path, where: str) -> list[int]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            names = [name for name in TENSORS if name in set(file.keys())]
            if len(names) != 1:
                raise ModelError(f"{where}: expected one tensor called {' or '.join(TENSORS)}, found "
                                 f"{', '.join(sorted(file.keys())) or 'none'}")
            tensor = file.get_tensor(names[0])
    except SafetensorError as error:
        raise ModelError(f"{where}: not readable as safetensors: {error}") from error
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool or tensor.ndim != 1:
        raise ModelError(f"{where}: tensor {names[0]}: expected a list of integers, found {tensor.dtype} "
                         f"{tuple(tensor.shape)}")
    ids: list[int] = tensor.tolist()
    return ids
