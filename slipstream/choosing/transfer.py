"""Copies of numbers from the host to a busy device, without waiting for it.

It knows nothing about what they mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def sent(values: Sequence[int] | Sequence[float] | NDArray[Any], device: torch.device,
         dtype: torch.dtype | None = None) -> torch.Tensor:
    """One-dimensional, or of an array's shape. dtype: None is the array's own, int64 of integers.

    ``torch.tensor(..., device=a GPU)`` and ``.to(a GPU)`` wait until the GPU has done all that it was given; a copy
    that does not block reads pageable memory before it returns, so what was sent may be thrown away at once. Nothing of
    it may happen inside of a capture: a graph would read host memory that is gone."""
    near = torch.from_numpy(values) if isinstance(values, np.ndarray) else torch.tensor(values, dtype=dtype)
    return near.to(device, dtype, non_blocking=True)
