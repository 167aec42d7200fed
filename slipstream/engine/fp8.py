"""fp8 weights and activations for GPUs: a step reads half as many bytes as with bfloat16, and multiplies twice as fast.

Rules:
1. Numbers are e4m3, whose largest is 448. A matrix has a scale for each output row; an activation has one for each row
   of the batch, from that row's own largest number, so no row depends on the other rows of the batch.
2. The GPU computes products and sums; the result is bfloat16. ``reference_product`` defines them in plain torch, and
   runs on a CPU: slow, but it shows the answers that fp8 gives.
3. Matrices whose sides are not multiples of 16 stay bfloat16: the kernel does not take them.
4. ``rounded`` defines the rounding, and every implementation gives the same bits. A kernel that does it in one launch
   is used where there is one (see ``ops.fused``); it rounds the weights, too, so it is compiled before answers run.
5. fp8 weights replace the originals. A target's lm_head stays bfloat16, as its rounding would change answers most; a
   draft's lm_head may be fp8.

It knows nothing about files or batches. Format: OCP 8-bit floating point, e4m3 ("fn").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from slipstream.base.errors import ModelError
from slipstream.engine.decoder import Decoder
from slipstream.engine.fp8_blocks import E4M3
from slipstream.engine.ops.layer import Linear
from slipstream.observe.log import logger

LARGEST = torch.finfo(E4M3).max
STEP = 16  # rows and columns of a matrix must be multiples of it
CAPABILITY = (9, 0)  # the lowest compute capability of GPUs whose products take a scale for each row
SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # the smallest scale

Rounding = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [R, C] -> e4m3 [R, C] and float32 scales [R, 1]; numbers times scales are x, to rounding. Zeros stay zeros."""
    wide = x.float()
    # A product, not a division by LARGEST: torch computes that division differently on a CPU and on a GPU.
    scale = wide.abs().amax(-1, keepdim=True).mul_(1 / LARGEST).clamp_min_(SMALLEST_SCALE)
    return (wide / scale).clamp_(-LARGEST, LARGEST).to(E4M3), scale


def reference_product(x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor,
                      scale: torch.Tensor) -> torch.Tensor:
    """x e4m3 [T, I] and weight e4m3 [O, I] with their scales [T, 1] and [O, 1] -> x W^T in bfloat16 [T, O]."""
    return (x.float() @ weight.float().t()).mul_(x_scale).mul_(scale.t()).to(torch.bfloat16)


def gpu_product(x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """As ``reference_product``, with the GPU's own kernel."""
    y: torch.Tensor = torch._scaled_mm(x, weight.t(), scale_a=x_scale, scale_b=scale.t(), out_dtype=torch.bfloat16,
                                       use_fast_accum=True)
    return y


class Fp8Weights:
    """y = x W^T."""

    __slots__ = ("_product", "_rounding", "_scale", "_weight")

    def __init__(self, weight: torch.Tensor, rounding: Rounding = rounded) -> None:
        """weight: bfloat16 [O, I], both multiples of ``STEP``."""
        self._rounding = rounding
        self._weight, self._scale = rounding(weight)
        self._product = gpu_product if weight.device.type == "cuda" else reference_product

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """bfloat16 [T, I] -> [T, O]."""
        return self._product(*self._rounding(x), self._weight, self._scale)


def with_fp8(decoder: Decoder, rounding: Rounding = rounded) -> Decoder:
    """The same decoder, after the matrices of its layers became fp8; lm_head did not. Raises ModelError."""
    check_fp8(decoder.dtype, decoder.device)
    *layers, _head = decoder.linears()
    into_fp8(layers, rounding)
    return decoder


def into_fp8(linears: Iterable[Linear], rounding: Rounding = rounded) -> None:
    """Replace the weights of each of ``linears`` by fp8, if its sides allow it (rule 3)."""
    done = kept = 0
    for linear in linears:
        if linear.in_features % STEP or linear.out_features % STEP:
            kept += 1
        else:
            linear.replace_product(Fp8Weights(linear.weight(), rounding))
            done += 1
    logger("engine").info("fp8", matrices=done, kept_in_bfloat16=kept)


def check_fp8(dtype: torch.dtype, device: torch.device) -> None:
    """Raises ModelError if this dtype or device cannot be served in fp8."""
    if dtype != torch.bfloat16:
        raise ModelError(f"quantize: fp8 is for dtype bfloat16, and this is {str(dtype).removeprefix('torch.')}")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        found = ".".join(map(str, torch.cuda.get_device_capability(device)))
        raise ModelError(f"quantize: fp8 with a scale a row takes a GPU of compute capability 9.0 (Hopper) or newer, "
                         f"and this one has {found}; use none")
