"""Rotary positions, in the half-split layout of transformers.

Rules:
1. What depends only on positions is computed once per forward, not per layer.
2. Angles are float32, as in transformers.

It knows nothing about layers.
"""

from __future__ import annotations

import math

import torch

from slipstream.engine.model import ModelConfig, RopeScaling


class Rope:
    """The frequencies of one model."""

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
