"""Feature rows as bytes: the cast at the edge, from the engine's dtype to the one that the drafter asked for."""

from __future__ import annotations

import torch

from slipstream.engine.model import dtype_of


def feature_rows(rows: torch.Tensor, dtype: str) -> bytes:
    """rows: [M, F], any float dtype and device. Returns M * F numbers of ``dtype``, row-major and little-endian."""
    cast = rows.to(device="cpu", dtype=dtype_of(dtype)).contiguous()
    # numpy has no bfloat16: the bytes are taken without asking what they mean.
    return cast.view(torch.uint8).numpy().tobytes()
