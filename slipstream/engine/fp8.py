"""Weights and activations of 8 bits in floating point, for GPUs: half of what a step reads, and products at twice the
rate.

Rules:
1. Numbers are e4m3, which ends at 448. A matrix has a scale for each of its rows (what a row sums to), an activation
   one for each row of the batch, taken from its own largest number: a row does not depend on its company.
2. Products and sums are the GPU's; their result is bfloat16. ``specified`` is the specification in plain torch. It also
   runs on a CPU: slowly, but enough to see how answers change.
3. Matrices whose sides are no multiples of 16 stay as they are: the kernel does not take them.
4. All implementations round to the same bits: ``rounded`` is the specification, and a kernel with one launch is used
   where there is one (see ``ops.fused``). It rounds the weights too, so it is compiled before anything is served.
5. The new weights replace the old ones. A target's lm_head is not rounded, because its rounding changes answers most. A
   draft's lm_head is.

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

MOST = torch.finfo(E4M3).max
STEP = 16  # rows and columns come in multiples of it
CAPABILITY = (9, 0)  # of the first GPUs that multiply with a scale a row
LEAST = torch.finfo(torch.float32).tiny  # a scale

Rounding = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [R, C] -> e4m3 [R, C] and float32 scales [R, 1] whose product is x, to rounding. A row of zeros stays one."""
    wide = x.float()
    # Not divided: by a number, torch divides on a CPU and multiplies on a GPU.
    scale = wide.abs().amax(-1, keepdim=True).mul_(1 / MOST).clamp_min_(LEAST)
    return (wide / scale).clamp_(-MOST, MOST).to(E4M3), scale


def specified(x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """e4m3 [T, I] and [O, I] with their scales [T, 1] and [O, 1] -> x W^T in bfloat16 [T, O]."""
    return (x.float() @ weight.float().t()).mul_(x_scale).mul_(scale.t()).to(torch.bfloat16)


def multiplied(x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The same by the device's own kernel."""
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
        self._product = multiplied if weight.device.type == "cuda" else specified

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """bfloat16 [T, I] -> [T, O]."""
        return self._product(*self._rounding(x), self._weight, self._scale)


def with_fp8(decoder: Decoder, rounding: Rounding = rounded) -> Decoder:
    """The decoder, with its layers in fp8. Raises ModelError."""
    check_fp8(decoder.dtype, decoder.device)
    *layers, _head = decoder.linears()
    into_fp8(layers, rounding)
    return decoder


def into_fp8(linears: Iterable[Linear], rounding: Rounding = rounded) -> None:
    """Each product in the place of its own, where it can be."""
    done = kept = 0
    for linear in linears:
        if linear.in_features % STEP or linear.out_features % STEP:
            kept += 1
        else:
            linear.only(Fp8Weights(linear.weight(), rounding))
            done += 1
    logger("engine").info("fp8", matrices=done, kept_in_bfloat16=kept)


def check_fp8(dtype: torch.dtype, device: torch.device) -> None:
    """Raises ModelError where fp8 cannot be."""
    if dtype != torch.bfloat16:
        raise ModelError(f"quantize: fp8 is for dtype bfloat16, and this is {str(dtype).removeprefix('torch.')}")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        found = ".".join(map(str, torch.cuda.get_device_capability(device)))
        raise ModelError(f"quantize: fp8 with a scale a row takes a GPU of compute capability 9.0 (Hopper) or newer, "
                         f"and this one has {found}; use none")
