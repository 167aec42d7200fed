"""Copies of numbers from the host to a device, without waiting for the device's other work.

It knows nothing about what the numbers mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def to_device(values: Sequence[int] | Sequence[float] | NDArray[Any], device: torch.device,
              dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor of ``values`` on ``device``, of an array's shape or one-dimensional. dtype: None: an array's own; int64
    for integers, float32 for floats.

    ``torch.tensor(..., device=a GPU)`` and ``.to(a GPU)`` wait until the GPU has done all its work; this does not. The
    copy reads pageable memory before it returns, so ``values`` may be freed at once. It must not run while a graph is
    captured: each replay would read host memory that is gone."""
    host = torch.from_numpy(values) if isinstance(values, np.ndarray) else torch.tensor(values, dtype=dtype)
    return host.to(device, dtype, non_blocking=True)
