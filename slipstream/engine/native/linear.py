"""One product on the CPU kernels, for whoever has rows at hand and no list of operations.

It knows nothing about what the rows are.
"""

from __future__ import annotations

import torch

from slipstream.engine.int8 import Matrix
from slipstream.engine.native.program import LANES, BatchFrame, Frame, Packed, Program, Team

FEW_ROWS = 64  # buffers begin with so many


def fits(weight: torch.Tensor) -> bool:
    """Whether W [O, I] is one for ``NativeLinear``."""
    return weight.dtype == torch.bfloat16 and weight.shape[0] % LANES == 0 and weight.shape[1] % 2 == 0


class NativeHead:
    """x W^T in float32: of final states, logits."""

    __slots__ = ("_team", "packed")

    def __init__(self, team: Team, weight: Matrix) -> None:
        """weight [V, H], any float dtype or whole numbers."""
        self._team = team
        self.packed = Packed(team, weight)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """bfloat16 [R, H] -> float32 [R, V]."""
        out = torch.empty(hidden.shape[0], self.packed.outer)
        program = Program(self._team)
        program.product(hidden.contiguous(), self.packed, out)
        program.run(BatchFrame(Frame(hidden.shape[0])))
        return out


class NativeLinear:
    """x W^T: sums in float32, rounded to bfloat16."""

    __slots__ = ("_out", "_packed", "_program", "_team")

    def __init__(self, team: Team, weight: torch.Tensor) -> None:
        """weight bfloat16 [O, I]; see ``fits``."""
        self._team = team
        self._packed = Packed(team, weight)
        self._hold(FEW_ROWS)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """bfloat16 [M, I] -> bfloat16 [M, O], there until the next call."""
        assert x.dtype == torch.bfloat16 and x.stride(1) == 1
        if len(x) > len(self._out):
            self._hold(2 * len(x))
        self._program.read(x)
        self._program.run(BatchFrame(Frame(len(x)), x))
        return self._out[: len(x)]

    def _hold(self, rows: int) -> None:
        sums = torch.empty(rows, self._packed.outer)
        self._out = torch.empty(rows, self._packed.outer, dtype=torch.bfloat16)
        self._program = Program(self._team)
        self._program.product(torch.empty(rows, self._packed.inner, dtype=torch.bfloat16), self._packed, sums)
        self._program.rounded(sums, self._out)
