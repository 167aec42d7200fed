"""Feature rows as a drafter asked for them: projected where its spec says so, in its dtype, as bytes.

It is the edge at which the target's dtype becomes the drafter's. It knows nothing about sessions or the wire.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from slipstream.engine.model import dtype_of
from slipstream.engine.ops.linear import Linear
from slipstream.protocol.messages import FeatureSpec, Projection

Product = Callable[[torch.Tensor], torch.Tensor]


class FeatureRows:
    """What one spec makes of target states."""

    __slots__ = ("_dtype", "_inner", "_project")

    def __init__(self, spec: FeatureSpec, linear: Callable[[torch.Tensor], Product] = Linear) -> None:
        """linear: makes x -> x W^T of W, where the states are."""
        self._dtype = dtype_of(spec.dtype)
        self._inner = self._dtype if spec.projection is None else dtype_of(spec.projection.dtype)
        self._project = None if spec.projection is None else linear(weights_of(spec.projection))

    @torch.inference_mode()
    def __call__(self, rows: torch.Tensor) -> bytes:
        """rows: [M, taps * H], any float dtype. Returns M * width numbers, row-major and little-endian."""
        if self._project is not None:
            rows = self._project(rows.to(self._inner))
        cast = rows.to(device="cpu", dtype=self._dtype).contiguous()
        # numpy has no bfloat16: the bytes are taken without asking what they mean.
        return ctypes.string_at(cast.data_ptr(), cast.nbytes)


def weights_of(projection: Projection) -> torch.Tensor:
    """[rows, columns] in the dtype of the weights."""
    flat = torch.frombuffer(bytearray(projection.weights), dtype=dtype_of(projection.dtype))
    return flat.view(projection.rows, projection.columns)
