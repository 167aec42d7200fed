"""int8 weights for our own CPU kernels: a step reads half as many bytes as with bfloat16.

Rules:
1. Each row of a matrix (the weights of one output) has a scale: its largest absolute value / 127. A stored number is
   weight / scale, rounded to nearest, ties to even; zero stays zero, and -128 never occurs.
2. Products use these integers, which bfloat16 holds exactly; the scale multiplies the finished sum. On processors that
   multiply four bytes at once, inputs are rounded to integers of 15 bits, too (``native/quantized_rows.h``).
3. Only matrices are rounded. Norms, biases and the embedding stay as they are.
4. A model folder may store them: tensor ``X.weight`` as int8 [O, I] and ``X.weight_scale`` as float32 [O]. Its
   config.json has ``NOTE`` then. A head that is tied to the embedding is stored as a tensor of its own.
5. The content of a folder is checked before use: shapes, dtypes, no -128, finite scales above 0.

It knows nothing about kernels. Dimension key: see ``slipstream.engine``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from slipstream.base.errors import ModelError
from slipstream.engine.fp8_blocks import FIELD
from slipstream.engine.model import ModelConfig, Tensors, fp8_block, require_tensor, tensor_types
from slipstream.models.folder import read_json

LARGEST = 127
SCALE = "_scale"  # behind the name of a matrix
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
EIGHT_BITS = {"I8": "int8", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
              "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
              "F4": "float4_e2m1fn_x2"}  # dtypes of at most 8 bits: safetensors' name -> torch's
NOTE = {"quant_method": "slipstream", "format": 1, "weights": "int8"}


@dataclass(frozen=True, slots=True)
class Int8Matrix:
    """A matrix W = numbers * scales."""

    numbers: torch.Tensor  # int8 [O, I]
    scales: torch.Tensor  # float32 [O]

    def dequantized(self) -> torch.Tensor:
        """float32 [O, I]"""
        return self.numbers.float() * self.scales[:, None]


Matrix = torch.Tensor | Int8Matrix


def rounded(weight: torch.Tensor) -> Int8Matrix:
    """Round weight [O, I], any float dtype, finite numbers (rule 1)."""
    wide = weight.float()
    scales = wide.abs().amax(-1).div_(LARGEST).clamp_min_(torch.finfo(torch.float32).tiny)
    return Int8Matrix((wide / scales[:, None]).round_().clamp_(-LARGEST, LARGEST).to(torch.int8), scales)


def as_int8(matrix: Matrix) -> Int8Matrix:
    """The matrix as int8; a float one is rounded."""
    return matrix if isinstance(matrix, Int8Matrix) else rounded(matrix)


def concatenated(parts: Sequence[Matrix]) -> Matrix:
    """One matrix of the rows of all ``parts``: int8 if at least one of them is."""
    floats = [part for part in parts if not isinstance(part, Int8Matrix)]
    if len(floats) == len(parts):
        return torch.cat(floats)
    int8 = [as_int8(part) for part in parts]
    return Int8Matrix(torch.cat([part.numbers for part in int8]), torch.cat([part.scales for part in int8]))


def matrix(tensors: Tensors, name: str, rows: int, columns: int) -> Matrix:
    """The matrix called ``name`` [rows, columns], float or int8 as stored. Raises ModelError naming the tensor."""
    numbers = require_tensor(tensors, name, rows, columns)
    if numbers.is_floating_point() and name + SCALE not in tensors:
        return numbers
    scales = require_tensor(tensors, name + SCALE, rows)
    if numbers.dtype != torch.int8 or scales.dtype != torch.float32:
        raise ModelError(f"tensor {name}: expected int8 with scales of float32, found {_dtype_name(numbers)} with "
                         f"{_dtype_name(scales)}")
    if numbers.numel() and int(numbers.min()) < -LARGEST:
        raise ModelError(f"tensor {name}: numbers must be from -{LARGEST} to {LARGEST}, found {int(numbers.min())}")
    if not bool((scales.isfinite() & (scales > 0)).all()):
        raise ModelError(f"tensor {name}{SCALE}: scales must be finite and above 0")
    return Int8Matrix(numbers, scales)


def with_embedding(config: ModelConfig, tensors: Tensors) -> Tensors:
    """``tensors`` of a whole model, with the embedding under its own name. A folder of a tied model may store it as
    lm_head only, which transformers reads, too."""
    if not config.tied_embeddings or EMBEDDING in tensors or HEAD not in tensors or HEAD + SCALE in tensors:
        return tensors
    return {EMBEDDING if name == HEAD else name: tensor for name, tensor in tensors.items()}


def head_of(config: ModelConfig, tensors: Tensors) -> Matrix:
    """The lm_head [V, H], see ``matrix``. Of a tied model it is the embedding, unless an int8 head is stored, too.
    Raises ModelError."""
    own = not config.tied_embeddings or HEAD + SCALE in tensors
    return matrix(tensors, HEAD if own else EMBEDDING, config.vocab_size, config.hidden_size)


def holds_int8(folder: str | Path) -> bool:
    """Whether the folder's config.json says that its matrices are int8 in our format. False for fp8 in blocks, which is
    read as bfloat16 (``fp8_blocks``). Raises ModelError for any other quantisation."""
    path = Path(folder) / "config.json"
    found = read_json(path).get(FIELD)
    if found is None or fp8_block(folder) is not None:
        return False
    if found != NOTE:
        # Whole it may list hundreds of modules.
        method = found.get("quant_method") if isinstance(found, dict) else found
        raise ModelError(f"{path}: {FIELD}: quant_method {method!r} is not supported, only fp8 in blocks "
                         "(weight_block_size) and what 'slipstream models prepare FOLDER --dtype int8' writes; take "
                         "the model's folder without quantisation")
    return True


def check_floats(folder: str | Path) -> None:
    """Raises ModelError for weights of at most 8 bits in a folder whose config.json names no quantisation: their scales
    are somewhere unknown, and without scales the model would be another one."""
    if fp8_block(folder) is not None:
        return
    for name, kind in tensor_types(folder).items():
        if kind in EIGHT_BITS:
            raise ModelError(f"{folder}: tensor {name} holds {EIGHT_BITS[kind]}, and config.json has no {FIELD} that "
                             "says how; take the model's folder without quantisation, or prepare it again: slipstream "
                             "models prepare FOLDER --dtype int8")


def check_int8(field: str, quantize: str, dtype: str, device: str, *, native: bool) -> None:
    """Raises ModelError naming ``field`` if int8 weights cannot be served with these settings. native: our CPU kernels
    are asked for or may be chosen, and no other setting needs torch's."""
    if quantize == "fp8":
        raise ModelError(f"{field}: the folder's weights are int8 already; set none, or take the folder that it was "
                         "prepared from")
    if not native or dtype != "bfloat16" or torch.device(device).type != "cpu":
        raise ModelError(f"{field}: int8 is for the CPU kernels of our own: kernels native or auto, engine decoder, "
                         f"dtype bfloat16 and device cpu, without compile; here are {dtype} and {device}")


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
