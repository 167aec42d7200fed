"""One decoder layer as operations: weights packed for the kernels, and the buffers that layers share.

Rules:
1. Tensors are named and checked as in ``decoder.DecoderLayer``; a layer may read more than its residual stream.
2. The residual stream is float32 and is added to in place.

It knows nothing about batches or whole models. Dimension key: see ``slipstream.engine``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream.base.errors import ModelError
from slipstream.engine.int8 import joined, matrix
from slipstream.engine.layers import Tensors, take
from slipstream.engine.model import ModelConfig
from slipstream.engine.native.program import GROUP, LANES, Packed, Program, Team


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

    __slots__ = ("_config", "_down", "_gate_up", "_input_norm", "_norms", "_o", "_post_norm", "_qkv")

    def __init__(self, team: Team, config: ModelConfig, tensors: Tensors, prefix: str,
                 in_features: int | None = None, whole: bool = False) -> None:
        """tensors: by name, any float dtype or as ``int8`` stores them, on the CPU; prefix: such as ``model.layers.0``;
        whole: round matrices to whole numbers (see ``int8``). Raises ModelError."""
        self._config = config
        hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_dim
        width, kv_width = config.num_heads * size, config.num_kv_heads * size
        reads = in_features or hidden

        def packed(names: tuple[tuple[str, int], ...], columns: int, biased: bool, silu: bool = False) -> Packed:
            parts = [matrix(tensors, f"{prefix}.{name}.weight", rows, columns, whole) for name, rows in names]
            biases = [take(tensors, f"{prefix}.{name}.bias", rows) for name, rows in names] if biased else None
            return Packed(team, joined(parts), None if biases is None else torch.cat(biases), silu)

        def norm(name: str, columns: int) -> torch.Tensor:
            return take(tensors, f"{prefix}.{name}.weight", columns).float()

        self._qkv = packed((("self_attn.q_proj", width), ("self_attn.k_proj", kv_width),
                            ("self_attn.v_proj", kv_width)), reads, config.qkv_bias)
        self._o = packed((("self_attn.o_proj", hidden),), width, config.o_bias)
        self._gate_up = packed((("mlp.gate_proj", inner), ("mlp.up_proj", inner)), hidden, config.mlp_bias, silu=True)
        self._down = packed((("mlp.down_proj", hidden),), inner, config.mlp_bias)
        self._input_norm = norm("input_layernorm", hidden)
        self._post_norm = norm("post_attention_layernorm", hidden)
        self._norms = (norm("self_attn.q_norm", size), norm("self_attn.k_norm", size)) if config.qk_norm else None

    def read(self, program: Program, x: torch.Tensor, out: torch.Tensor) -> None:
        """The layer's input norm of x float32 [C, H], to out bfloat16 [C, H]."""
        program.norm(x, self._input_norm, self._config.norm_eps, out)

    def write(self, program: Program, buffers: Buffers, layer: int) -> None:
        """From ``buffers.read`` on: the layer's share, added to ``buffers.stream``. layer: whose KV."""
        config = self._config
        program.product(buffers.read, self._qkv, buffers.qkv)
        shape = (config.num_heads, config.num_kv_heads, config.head_dim)
        program.attention(buffers.qkv, self._norms, config.norm_eps, layer, shape, buffers.queries, buffers.attended)
        program.product(buffers.attended, self._o, buffers.stream, add=True)
        program.norm(buffers.stream, self._post_norm, config.norm_eps, buffers.normed)
        program.product(buffers.normed, self._gate_up, buffers.inner)
        program.product(buffers.inner, self._down, buffers.stream, add=True)
