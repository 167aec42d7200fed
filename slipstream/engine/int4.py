"""Weights in 4 bits for few rows on a CPU: a step of few rows waits for memory, and these are a quarter of bfloat16's.

Rules:
1. 16 levels from the least to the greatest weight of a group of 32 in a row. A model whose file was 4-bit in such
   groups (GGUF's Q4_1) gets its own levels back, to the rounding of bfloat16.
2. At most ``FEW_ROWS`` rows read them; more read the bfloat16 weights, which are kept: there arithmetic is what takes
   time, and unpacking comes on top.
3. The head stays as it is: its levels are the ones that answers show.

It knows nothing about files or batches.
"""

from __future__ import annotations

import torch

from slipstream.engine.decoder import Decoder
from slipstream.engine.layers import Few
from slipstream.errors import ModelError

GROUP = 32
LEVELS = 16
FEW_ROWS = 8
TILE = 16  # rows of a matrix that the kernel takes together


class Int4Weights:
    """y = x W^T for few rows."""

    __slots__ = ("_packed", "_scales")

    def __init__(self, weight: torch.Tensor) -> None:
        """weight: bfloat16 [O, I]. Raises ModelError for a shape that the kernel does not take."""
        rows, columns = weight.shape
        if rows % TILE or columns % GROUP:
            raise ModelError(f"model.quantize: int4 needs matrices of a multiple of {TILE} rows and {GROUP} columns; "
                             f"one of this model is {rows} x {columns}")
        groups = weight.float().view(rows, columns // GROUP, GROUP)
        least, most = groups.amin(-1, True), groups.amax(-1, True)
        step = ((most - least) / (LEVELS - 1)).clamp_min(torch.finfo(torch.float32).tiny)
        levels = ((groups - least) / step).round().clamp(0, LEVELS - 1).view(rows, columns).to(torch.int32)
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels, 1)
        # The kernel's zero point is the middle level.
        scales = torch.cat((step, least + LEVELS // 2 * step), -1)  # [O, I / GROUP, 2]
        self._scales = scales.transpose(0, 1).contiguous().to(torch.bfloat16)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """bfloat16 [T, I] -> [T, O]."""
        y: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self._packed, GROUP, self._scales)
        return y


def with_int4(decoder: Decoder) -> Decoder:
    """The decoder, its layers reading 4-bit weights for few rows. Raises ModelError."""
    if decoder.dtype != torch.bfloat16 or decoder.device.type != "cpu":
        raise ModelError("model.quantize: int4 is for dtype bfloat16 and device cpu")
    if not hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu"):
        raise ModelError(f"model.quantize: torch {torch.__version__} has no int4 kernel for CPUs; use 2.6 or newer")
    *layers, _head = decoder.linears()
    for linear in layers:
        linear.few = Few(Int4Weights(linear.weight()), FEW_ROWS)
    return decoder
