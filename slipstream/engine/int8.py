"""Weights as 8-bit integers for our CPU kernels: a step reads half as many bytes.

Rules:
1. A row of a matrix (what sums to one output) has a scale: its largest size / 127. A number is its weight over the
   scale, rounded to the nearest, ties to even; zero stays zero, and -128 never occurs.
2. Products are of these numbers, which bfloat16 holds exactly; a scale is applied to the sum of its products. Where a
   processor multiplies four bytes at once, a row's inputs are whole numbers of 15 bits, too (``native/numbers.h``).
3. Only matrices are rounded. Norms, biases and the embedding stay as they are.
4. A folder may hold them so: tensor ``X.weight`` as int8 [O, I], and ``X.weight_scale`` as float32 [O]. Its config.json
   says so (``NOTE``). A head that is tied to the embedding stands there by itself.
5. What a folder holds is checked before it is used: shapes, types, -128, and that scales are numbers and positive.

It knows nothing about kernels. Dimension key: see ``slipstream.engine``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from slipstream.base.errors import ModelError
from slipstream.engine.fp8_blocks import FIELD
from slipstream.engine.model import ModelConfig, Tensors, fp8_block, take, tensor_types
from slipstream.models.folder import read_json

MOST = 127
SCALE = "_scale"  # behind the name of a matrix
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
EIGHT_BITS = {"I8": "int8", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
              "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
              "F4": "float4_e2m1fn_x2"}  # or less, as safetensors and torch call them
NOTE = {"quant_method": "slipstream", "format": 1, "weights": "int8"}


@dataclass(frozen=True, slots=True)
class Whole:
    """A matrix W = numbers * scales."""

    numbers: torch.Tensor  # int8 [O, I]
    scales: torch.Tensor  # float32 [O]

    def wide(self) -> torch.Tensor:
        """float32 [O, I]"""
        return self.numbers.float() * self.scales[:, None]


Matrix = torch.Tensor | Whole


def rounded(weight: torch.Tensor) -> Whole:
    """weight [O, I], any float dtype, finite."""
    wide = weight.float()
    scales = wide.abs().amax(-1).div_(MOST).clamp_min_(torch.finfo(torch.float32).tiny)
    return Whole((wide / scales[:, None]).round_().clamp_(-MOST, MOST).to(torch.int8), scales)


def as_whole(matrix: Matrix) -> Whole:
    return matrix if isinstance(matrix, Whole) else rounded(matrix)


def joined(parts: Sequence[Matrix]) -> Matrix:
    """Matrices below one another: whole numbers as soon as one of them is."""
    floats = [part for part in parts if not isinstance(part, Whole)]
    if len(floats) == len(parts):
        return torch.cat(floats)
    whole = [as_whole(part) for part in parts]
    return Whole(torch.cat([part.numbers for part in whole]), torch.cat([part.scales for part in whole]))


def matrix(tensors: Tensors, name: str, rows: int, columns: int) -> Matrix:
    """The matrix called ``name``, as the folder holds it. Raises ModelError naming the tensor."""
    numbers = take(tensors, name, rows, columns)
    if numbers.is_floating_point() and name + SCALE not in tensors:
        return numbers
    scales = take(tensors, name + SCALE, rows)
    if numbers.dtype != torch.int8 or scales.dtype != torch.float32:
        raise ModelError(f"tensor {name}: expected int8 with scales of float32, found {_said(numbers)} with "
                         f"{_said(scales)}")
    if numbers.numel() and int(numbers.min()) < -MOST:
        raise ModelError(f"tensor {name}: numbers must be from -{MOST} to {MOST}, found {int(numbers.min())}")
    if not bool((scales.isfinite() & (scales > 0)).all()):
        raise ModelError(f"tensor {name}{SCALE}: scales must be finite and above 0")
    return Whole(numbers, scales)


def with_embedding(config: ModelConfig, tensors: Tensors) -> Tensors:
    """``tensors`` of a whole model, the embedding among them under its own name: of a tied one a folder may have it as
    the head alone, and transformers reads that, too."""
    if not config.tied_embeddings or EMBEDDING in tensors or HEAD not in tensors or HEAD + SCALE in tensors:
        return tensors
    return {EMBEDDING if name == HEAD else name: tensor for name, tensor in tensors.items()}


def head_of(config: ModelConfig, tensors: Tensors) -> Matrix:
    """What makes logits of final states [V, H]: as ``matrix``; of a tied model the embedding, unless a head is stored
    beside it. Raises ModelError."""
    own = not config.tied_embeddings or HEAD + SCALE in tensors
    return matrix(tensors, HEAD if own else EMBEDDING, config.vocab_size, config.hidden_size)


def holds_int8(folder: str | Path) -> bool:
    """Whether the folder's config.json says that its matrices are whole numbers. Raises ModelError for weights that
    somebody else has quantised, or another version has, but for those that are read as bfloat16 (``fp8_blocks``)."""
    path = Path(folder) / "config.json"
    found = read_json(path).get(FIELD)
    if found is None or fp8_block(folder) is not None:
        return False
    if found != NOTE:
        raise ModelError(f"{path}: {FIELD}: {found!r} is not supported, only what 'slipstream models prepare FOLDER "
                         "--dtype int8' writes; take the model's folder without quantisation")
    return True


def check_floats(folder: str | Path) -> None:
    """Raises ModelError for weights of eight bits in a folder without a note: whoever wrote them keeps their scales
    elsewhere, and taken for plain numbers they are another model's."""
    if fp8_block(folder) is not None:
        return
    for name, kind in tensor_types(folder).items():
        if kind in EIGHT_BITS:
            raise ModelError(f"{folder}: tensor {name} holds {EIGHT_BITS[kind]}, and config.json has no {FIELD} that "
                             "says how; take the model's folder without quantisation, or prepare it again: slipstream "
                             "models prepare FOLDER --dtype int8")


def check_int8(field: str, quantize: str, dtype: str, device: str, *, native: bool) -> None:
    """Raises ModelError that names the field where weights cannot be whole numbers. native: kernels of our own are
    wanted, or left to be chosen, and nothing else asks for torch's."""
    if quantize == "fp8":
        raise ModelError(f"{field}: the folder's weights are int8 already; set none, or take the folder that it was "
                         "prepared from")
    if not native or dtype != "bfloat16" or torch.device(device).type != "cpu":
        raise ModelError(f"{field}: int8 is for the CPU kernels of our own: kernels native or auto, engine decoder, "
                         f"dtype bfloat16 and device cpu, without compile; here are {dtype} and {device}")


def _said(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
