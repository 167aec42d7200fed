"""Rotary rows by position, made once.

It knows nothing about batches.
"""

from __future__ import annotations

import torch

from slipstream.engine.model import ModelConfig
from slipstream.engine.ops.rope import Rope

FIRST_POSITIONS = 4096


class Table:
    """Rotary rows by position; it grows by doubling."""

    __slots__ = ("_rope", "cos", "sin")

    def __init__(self, config: ModelConfig) -> None:
        self._rope = Rope(config, torch.float32, torch.device("cpu"))
        self.cos, self.sin = self._rope.rows(torch.arange(min(FIRST_POSITIONS, config.max_context)))  # [P, 1, D]

    def reach(self, positions: int) -> None:
        """Have at least so many."""
        if positions > len(self.cos):
            self.cos, self.sin = self._rope.rows(torch.arange(2 * positions))
