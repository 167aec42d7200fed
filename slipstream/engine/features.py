"""Features: states of a target's layers on their way to a drafter.

Rules:
1. They travel as a drafter asked for them: joined where its spec says so, in its dtype, as bytes (``FeatureRows``). The
   drafter makes states of them again (``FeatureReader``), and there a target's dtype becomes a drafter's.
2. What joins the states of several layers (``Fusion``) is applied on one of the two sides: by the target where a row
   gets shorter by it (``joined_states``).

It knows nothing about sessions, slots or the network. Format: see ``messages.FeatureSpec``.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from slipstream.engine.model import DTYPES, dtype_of
from slipstream.engine.ops.layer import Linear, norm_parts
from slipstream.protocol.messages import Features, FeatureSpec, Projection

Map = Callable[[torch.Tensor], torch.Tensor]


class Fusion:
    """x [M, F] -> x W^T [M, H], behind norms where there are any."""

    __slots__ = ("_dtype", "_norm", "_norm_eps", "_norm_width", "_product")

    def __init__(self, weight: torch.Tensor, norm: torch.Tensor | None = None, norm_width: int = 0,
                 norm_eps: float = 0.0, linear: Callable[[torch.Tensor], Map] = Linear) -> None:
        """weight: W [H, F]; norm [F]: so many numbers are normed together; linear: makes x -> x W^T of W, where the
        states are."""
        self._product, self._dtype = linear(weight), weight.dtype
        self._norm, self._norm_width, self._norm_eps = norm, norm_width, norm_eps

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        rows = rows.to(self._dtype)
        if self._norm is not None:
            self._norm = self._norm.to(rows.device)
            rows = norm_parts(rows, self._norm, self._norm_width, self._norm_eps)
        return self._product(rows)


class FeatureRows:
    """What one spec makes of target states."""

    __slots__ = ("_dtype", "_fusion")

    def __init__(self, spec: FeatureSpec, linear: Callable[[torch.Tensor], Map] = Linear) -> None:
        """linear: see ``Fusion``."""
        self._dtype, asked = dtype_of(spec.dtype), spec.projection
        self._fusion = None if asked is None else Fusion(*_weights_of(asked), asked.norm_width, asked.norm_eps, linear)

    @torch.inference_mode()
    def __call__(self, rows: torch.Tensor) -> bytes:
        """rows: [M, taps * H], any float dtype. Returns M * width numbers, row-major and little-endian."""
        if self._fusion is not None:
            rows = self._fusion(rows)
        cast = rows.to(device="cpu", dtype=self._dtype).contiguous()
        # numpy has no bfloat16: the bytes are taken without asking what they mean.
        return ctypes.string_at(cast.data_ptr(), cast.nbytes)


@dataclass(frozen=True, slots=True)
class FeatureReader:
    """Makes target states of the wire a network's input. ``project``: what a network does to them first, rows below
    each other."""

    spec: FeatureSpec
    device: torch.device
    dtype: torch.dtype
    project: Map | None = None

    @torch.inference_mode()
    def __call__(self, features: Sequence[Features]) -> list[torch.Tensor]:
        """Rows of ``features``, already checked against ``spec``: [M, W] for each."""
        content = bytearray(features[0].rows) if len(features) == 1 else bytearray().join([f.rows for f in features])
        rows = torch.frombuffer(content, dtype=DTYPES[self.spec.dtype]).view(-1, self.spec.width)
        rows = rows.to(self.device, self.dtype, non_blocking=True)
        if self.project is not None:
            rows = self.project(rows)
        if len(features) == 1:
            return [rows]
        return list(torch.split_with_sizes(rows, [f.num_rows for f in features]))


def joined_states(layers: tuple[int, ...], dtype: str, project: bool, weight: torch.Tensor,
                  norm: torch.Tensor | None = None, norm_width: int = 0, norm_eps: float = 0.0,
                  behind: Map | None = None) -> FeatureReader:
    """Reads the states of ``layers`` joined by a ``Fusion``. dtype: on the wire; project: let the target apply it,
    where rows get shorter by it; behind: what is done to the joined ones here in any case."""
    if project and weight.shape[0] < weight.shape[1]:
        asked = _projection_of(weight, dtype, norm, norm_width, norm_eps)
        return FeatureReader(FeatureSpec(layers, asked.rows, dtype, asked), weight.device, weight.dtype, behind)
    fusion = Fusion(weight, norm, norm_width, norm_eps)
    return FeatureReader(FeatureSpec(layers, weight.shape[1], dtype), weight.device, weight.dtype,
                         fusion if behind is None else lambda rows: behind(fusion(rows)))


def _projection_of(weight: torch.Tensor, dtype: str, norm: torch.Tensor | None, norm_width: int,
                   norm_eps: float) -> Projection:
    """As it is handed to a target."""
    whole = weight if norm is None else torch.cat((weight, norm[None]))
    content = whole.cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return Projection(weight.shape[0], weight.shape[1], dtype, hashlib.sha256(content).digest(), content, norm_width,
                      norm_eps if norm_width else 0.0)


def _weights_of(projection: Projection) -> tuple[torch.Tensor, torch.Tensor | None]:
    """[rows, columns] in the dtype of the weights, and of norms [columns] if there are any."""
    flat = torch.frombuffer(bytearray(projection.weights), dtype=dtype_of(projection.dtype))
    whole = flat.view(-1, projection.columns)
    return whole[: projection.rows], whole[projection.rows].clone() if projection.norm_width else None
