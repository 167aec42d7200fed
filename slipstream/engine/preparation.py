"""Copies of a model folder in another dtype or in int8: converted once, and loaded without another conversion.

Rules:
1. ``int8`` stores the matrices as ``int8.rounded`` makes them, so answers have the same bits as with
   ``model.quantize=int8``; the embedding is stored as bfloat16, and all else as it is. Other kinds are dtypes of the
   matrices; vectors keep theirs.
2. A folder is written beside its place and renamed when complete. Its ``slipstream.json`` says what it was made from:
   the source's receipt or the SHA-256 of its weights, and a hash of the files beside them. Preparing the same again
   does nothing; a folder with other content is never overwritten.
3. A copy of a known model keeps that model's name, so the head that is shipped for the model drafts for it, too.

It knows nothing about engines. Format: see ``int8``.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from slipstream.base.errors import ModelError
from slipstream.engine.decoder import LAYERS
from slipstream.engine.fp8_blocks import FIELD
from slipstream.engine.int8 import (
    EMBEDDING,
    HEAD,
    NOTE,
    SCALE,
    as_int8,
    check_floats,
    head_of,
    holds_int8,
    matrix,
    with_embedding,
)
from slipstream.engine.model import INDEX, ModelConfig, Tensors, load_tensors
from slipstream.engine.ops.layer import layer_shapes
from slipstream.models.folder import (
    RECEIPT,
    TEMPLATES,
    is_prepared,
    may_replace,
    new_model_folder,
    prepared_name,
    read_json,
    weights_hash,
    write_json,
)

KINDS = {"int8": torch.bfloat16, "bfloat16": torch.bfloat16, "float32": torch.float32}
COPIED = (".json", ".txt", ".model", ".jinja")  # files beside the weights: tokenizer, chat template, end tokens
WEIGHTS = "model.safetensors"
COPIED_HASH = "beside"  # in a receipt: the hash of the copied files


def prepare_as(kind: str, source: Path, folder: Path) -> Path:
    """Write the model in ``source`` to ``folder`` in a kind of ``KINDS``, unless that is done already. Returns
    ``folder``. Raises ModelError."""
    if kind not in KINDS:
        raise ModelError(f"--dtype: {kind!r} is not known; use one of {', '.join(KINDS)}")
    config = ModelConfig.from_folder(source)
    if holds_int8(source):
        raise ModelError(f"{source}: its weights are int8 already; prepare the folder that it was made from")
    receipt = {"name": prepared_name(source), "dtype": kind, "source": _origin(source)}
    copied_hash = weights_hash(source, [str(file.relative_to(source)) for file in _copied_files(source)])
    if is_prepared(folder) and (old_receipt := _receipt_of(folder)).items() >= receipt.items():
        if old_receipt.get(COPIED_HASH, copied_hash) != copied_hash:  # receipts of earlier versions have no such hash
            raise ModelError(f"{folder}: was made before what stands beside {source.name}'s weights was changed "
                             "(config.json, tokenizer, chat template); remove it, or choose another with --to")
        return folder
    if folder.exists() and (is_prepared(folder) or not may_replace(folder)):
        raise ModelError(f"{folder}: exists and holds something else; remove it, or choose another with --to")
    with new_model_folder(folder, receipt | {COPIED_HASH: copied_hash}) as new_folder:
        _write(kind, config, source, new_folder)
    return folder


def _write(kind: str, config: ModelConfig, source: Path, new_folder: Path) -> None:
    check_floats(source)
    tensors, dtype = with_embedding(config, load_tensors(source)), KINDS[kind]
    integers = [name for name, tensor in tensors.items() if not tensor.is_floating_point()]
    if integers:
        raise ModelError(f"{source}: tensor {integers[0]} holds {tensors[integers[0]].dtype}; weights must be "
                         "floating-point")
    for file in _copied_files(source):
        (place := new_folder / file.relative_to(source)).parent.mkdir(exist_ok=True)
        shutil.copyfile(file, place)
    content = read_json(source / "config.json") | {"dtype": str(dtype).removeprefix("torch.")}
    for name in ("torch_dtype", FIELD):
        content.pop(name, None)
    if kind == "int8":
        content[FIELD] = NOTE
        written = _in_int8(config, tensors)
    else:
        written = {name: (tensor.to(dtype) if tensor.dim() > 1 else tensor).contiguous()
                   for name, tensor in tensors.items()}
    write_json(new_folder / "config.json", content)
    save_file(written, new_folder / WEIGHTS, metadata={"format": "pt"})
    # safetensors makes files that only their owner can read.
    shutil.copymode(new_folder / "config.json", new_folder / WEIGHTS)


def _copied_files(source: Path) -> list[Path]:
    """The files that are copied unchanged (config.json is then written anew)."""
    return [file for file in (*source.iterdir(), *(source / TEMPLATES).glob("*"))
            if file.is_file() and file.suffix in COPIED and file.name not in (INDEX, RECEIPT)]


def _in_int8(config: ModelConfig, tensors: Tensors) -> dict[str, torch.Tensor]:
    matrices = {name: matrix(tensors, name, *shape) for layer in range(config.num_layers)
                for name, shape in layer_shapes(config, f"{LAYERS}{layer}").items() if len(shape) == 2}
    matrices[HEAD] = head_of(config, tensors)
    written = {name: tensor.contiguous() for name, tensor in tensors.items() if name not in matrices}
    written[EMBEDDING] = written[EMBEDDING].to(torch.bfloat16)
    for name, found in matrices.items():
        int8 = as_int8(found)
        written |= {name: int8.numbers, name + SCALE: int8.scales}
    return written


def _origin(source: Path) -> dict[str, Any]:
    receipt = _receipt_of(source) if is_prepared(source) else {}
    if "source" in receipt:
        return {"source": receipt["source"], "dtype": receipt.get("dtype", "float32")}
    digests = {}
    for path in sorted(source.glob("*.safetensors")):
        with path.open("rb") as file:
            digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return {"sha256": digests}


def _receipt_of(folder: Path) -> dict[str, Any]:
    return read_json(folder / RECEIPT)
