"""Checkpoints in fp8 with a scale for each block of a matrix (DeepSeek-V3, the FP8 folders of Qwen3). They are read as
bfloat16, as their publishers' own conversion does.

Rules:
1. ``FIELD`` of ``config.json`` says so and gives the size of a block. Other quantisations there are not handled here.
2. A matrix W is stored as e4m3 numbers, and W_scale_inv [rows / block, columns / block] (rounded up) beside it. A
   weight is its number times the scale of its block. Tensors of other dtypes are read as stored.
3. Missing scales, or scales of a wrong shape or value, are a ModelError that names the tensor.

It knows nothing about files or models. Format: that of transformers' ``quant_method`` fp8.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from slipstream.base.errors import ModelError

FIELD = "quantization_config"  # of config.json
SCALE_INV = "_scale_inv"  # behind the name of a matrix
MOST_BLOCK = 1 << 16
E4M3 = torch.float8_e4m3fn

Block = tuple[int, int]  # rows, columns


def block_of(raw: Mapping[str, Any], where: str) -> Block | None:
    """The size of a block, from the content ``raw`` of a ``config.json``; None: it has no fp8 blocks. where: its name
    in errors. Raises ModelError."""
    found = raw.get(FIELD)
    if not isinstance(found, dict) or found.get("quant_method") != "fp8" or found.get("weight_block_size") is None:
        return None
    block = found["weight_block_size"]
    if (not isinstance(block, list) or len(block) != 2 or found.get("fmt", "e4m3") != "e4m3"
            or not all(type(side) is int and 1 <= side <= MOST_BLOCK for side in block)):
        raise ModelError(f"{where}: {FIELD}: expected weight_block_size [rows, columns] with fmt e4m3, found {found!r}")
    return block[0], block[1]


def widened(tensors: Mapping[str, torch.Tensor], block: Block) -> dict[str, torch.Tensor]:
    """All tensors except the scales, those in fp8 as bfloat16. Raises ModelError."""
    return {name: _wide(name, tensor, tensors.get(name + SCALE_INV), block) if _is_narrow(tensor) else tensor
            for name, tensor in tensors.items() if not name.endswith(SCALE_INV)}


def _is_narrow(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.itemsize == 1


def _wide(name: str, numbers: torch.Tensor, scales: torch.Tensor | None, block: Block) -> torch.Tensor:
    if numbers.dtype != E4M3:
        raise ModelError(f"tensor {name} holds {numbers.dtype}, and blocks are of {E4M3}")
    if scales is None:
        raise ModelError(f"tensor {name}{SCALE_INV} is missing: {name} holds {E4M3}, which means nothing alone")
    blocks = tuple(-(-size // side) for size, side in zip(numbers.shape, block, strict=False))
    if numbers.dim() != 2 or tuple(scales.shape) != blocks or not scales.is_floating_point():
        raise ModelError(f"tensor {name}{SCALE_INV} holds {scales.dtype} of shape {tuple(scales.shape)}, and {name} "
                         f"has shape {tuple(numbers.shape)} in blocks of {block}")
    if not bool(scales.float().isfinite().all()):
        raise ModelError(f"tensor {name}{SCALE_INV}: scales must be finite")
    each = scales.float().repeat_interleave(block[0], 0)[: len(numbers)]
    return numbers.float().mul_(each.repeat_interleave(block[1], 1)[:, : numbers.shape[1]]).to(torch.bfloat16)
