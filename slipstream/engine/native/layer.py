"""One decoder layer as operations: weights packed for the kernels, and the buffers and rotary rows that layers share.

Rules:
1. Weights are those of any layer (``ops.layer``), which may read more than its residual stream.
2. The residual stream is float32 and is added to in place.

It knows nothing about batches or whole models. Dimension key: see ``slipstream.engine``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream.base.errors import ModelError
from slipstream.engine.int8 import Matrix, as_whole
from slipstream.engine.model import ModelConfig
from slipstream.engine.native.program import GROUP, LANES, Packed, Program, Team
from slipstream.engine.ops.layer import LayerWeights
from slipstream.engine.ops.rope import Rope
from slipstream.engine.weights import Tensors

FIRST_POSITIONS = 4096  # of a table of rotary rows


def check_sizes(config: ModelConfig) -> None:
    """Raises ModelError for measures that the kernels do not take."""
    for name, size, of in (("hidden_size", config.hidden_size, LANES), ("head_dim", config.head_dim, GROUP),
                           ("intermediate_size", config.intermediate_size, LANES)):
        if size % of:
            raise ModelError(f"the CPU kernels need a {name} that is a multiple of {of}, and it is {size}; "
                             "set model.kernels=torch")


@dataclass(frozen=True, slots=True)
class Buffers:
    """What the layers of one list write and read again, for at most C rows."""

    stream: torch.Tensor  # float32 [C, H]
    read: torch.Tensor  # bfloat16 [C, in] what attention reads
    normed: torch.Tensor  # bfloat16 [C, H]
    qkv: torch.Tensor  # float32 [C, (Q + 2 G) D]
    queries: torch.Tensor  # bfloat16 [C, Q * D]
    attended: torch.Tensor  # bfloat16 [C, Q * D]
    inner: torch.Tensor  # bfloat16 [C, I]

    @staticmethod
    def of(config: ModelConfig, rows: int, in_features: int) -> Buffers:
        heads, size = config.num_heads, config.head_dim

        def rounded(width: int) -> torch.Tensor:
            return torch.empty(rows, width, dtype=torch.bfloat16)

        return Buffers(torch.empty(rows, config.hidden_size), rounded(in_features), rounded(config.hidden_size),
                       torch.empty(rows, (heads + 2 * config.num_kv_heads) * size), rounded(heads * size),
                       rounded(heads * size), rounded(config.intermediate_size))


class NativeLayer:
    """The weights of a layer, and what they do to a list."""

    __slots__ = ("_weights",)

    def __init__(self, team: Team, config: ModelConfig, tensors: Tensors, prefix: str,
                 in_features: int | None = None, input_norm: bool = True, whole: bool = False) -> None:
        """tensors: by name, any float dtype or as ``int8`` stores them, on the CPU; whole: round matrices to whole
        numbers (see ``int8``); the rest as in ``LayerWeights.read``. Raises ModelError."""

        def packed(name: str, weight: Matrix, bias: torch.Tensor | None) -> Packed:
            return Packed(team, as_whole(weight) if whole else weight, bias, silu=name == "gate_up")

        self._weights = LayerWeights.read(config, tensors, prefix, packed, in_features, input_norm)

    def read(self, program: Program, x: torch.Tensor, out: torch.Tensor) -> None:
        """The layer's input norm of x float32 [C, H], to out bfloat16 [C, H]."""
        assert self._weights.norm is not None
        program.norm(x, self._weights.norm, self._weights.heads.eps, out)

    def write(self, program: Program, buffers: Buffers, layer: int) -> None:
        """From ``buffers.read`` on: the layer's share, added to ``buffers.stream``. layer: whose KV."""
        weights = self._weights
        program.product(buffers.read, weights.qkv, buffers.qkv)
        program.attention(buffers.qkv, weights.heads, layer, buffers.queries, buffers.attended)
        program.product(buffers.attended, weights.o, buffers.stream, add=True)
        program.norm(buffers.stream, weights.post_norm, weights.heads.eps, buffers.normed)
        program.product(buffers.normed, weights.gate_up, buffers.inner)
        program.product(buffers.inner, weights.down, buffers.stream, add=True)


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
