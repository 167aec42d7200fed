"""The few operations that a decoder is made of, each with a torch implementation.

Rules:
1. What depends only on positions (rotary rows) is computed once per forward, not per layer.
2. Weights that are read together are one matrix: q, k, v; gate and up.
3. float64 stays float64 throughout: a model in float64 gives the same choice whatever batch a row stands in.

It knows nothing about batches, attention or files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import library

from slipstream.base.errors import ModelError
from slipstream.engine.model import ModelConfig, RopeScaling

Tensors = Mapping[str, torch.Tensor]


def take(tensors: Tensors, name: str, *shape: int) -> torch.Tensor:
    """The tensor called ``name``. Raises ModelError when it is missing or has another shape."""
    if name not in tensors:
        raise ModelError(f"tensor {name} is missing from the model's safetensors")
    if tuple(tensors[name].shape) != shape:
        raise ModelError(f"tensor {name} has shape {tuple(tensors[name].shape)}, expected {shape}")
    return tensors[name]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., H] over the root of its mean square, times weight [H]; computed in at least float32."""
    return F.rms_norm(x, weight.shape, weight, eps)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[T, 2I] -> [T, I]: silu of the first half times the second."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


class Linear:
    """y = x W^T + b, with W packed once where that is faster: oneDNN's blocked layout on CPU in float32 and bfloat16,
    1.4 to 1.6 times as fast as ``F.linear`` on few rows. Elsewhere it is ``F.linear``."""

    __slots__ = ("_bias", "_other", "_packed", "_weight", "in_features", "out_features")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """weight [O, I], bias [O] or None."""
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        self._other: Callable[[torch.Tensor], torch.Tensor] | None = None
        self._packed = (weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16)
                        and _onednn_works())
        self._weight = (torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None) if self._packed
                        else weight.contiguous())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, I] -> [T, O]."""
        if self._other is not None:
            y = self._other(x)
            return y if self._bias is None else y.add_(self._bias)
        return self._product(x)

    def only(self, product: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Compute x W^T by ``product`` from now on; W itself is given up."""
        self._other, self._packed = product, False
        self._weight = torch.empty(0)

    def weight(self) -> torch.Tensor:
        """W [O, I], as it was given."""
        return self._weight.to_dense() if self._packed else self._weight

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed:
            if torch.compiler.is_compiling():
                opaque: torch.Tensor = torch.ops.slipstream.packed_linear(x, self._weight, self._bias)
                return opaque
            return _packed_linear(x, self._weight, self._bias)
        return F.linear(x, self._weight, self._bias)


def _packed_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y


def _packed_shape(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


# A compiled graph takes packed weights as constants or not at all, so there the operation is one of our own. Registered
# by hand, because what ``library.custom_op`` does around each call shows in a step's time.
_OPERATIONS: Any = library.Library("slipstream", "DEF")  # type: ignore[no-untyped-call]
_OPERATIONS.define("packed_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_OPERATIONS.impl("packed_linear", _packed_linear, "CompositeExplicitAutograd")
library.register_fake("slipstream::packed_linear", _packed_shape, lib=_OPERATIONS)


def _onednn_works() -> bool:
    return bool(torch._C._has_mkldnn) and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


class Rope:
    """Rotary positions in the half-split layout of transformers. Angles are float32, as there."""

    __slots__ = ("_dtype", "_frequencies")

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        halves = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
        frequencies = scaled(1.0 / config.rope_theta**halves, config.rope_scaling)
        self._frequencies = torch.cat((frequencies, frequencies)).to(device)  # [D]
        self._dtype = dtype

    def rows(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions int64 [T] -> cos and sin [T, 1, D]; the sine's first half is negated, as ``rotate`` wants it."""
        angles = positions[:, None, None].float() * self._frequencies
        sin = angles.sin()
        sin[..., : sin.shape[-1] // 2].neg_()
        return angles.cos().to(self._dtype), sin.to(self._dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate heads x [T, heads, D] in place by ``Rope.rows``."""
    swapped = x.roll(x.shape[-1] // 2, -1)
    x.mul_(cos).addcmul_(swapped, sin)


def scaled(frequencies: torch.Tensor, scaling: RopeScaling | None) -> torch.Tensor:
    """Rotary frequencies [D/2] stretched as a checkpoint asks (llama3: long waves fully, short ones not at all)."""
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    wavelength = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = ((scaling.original_context / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
