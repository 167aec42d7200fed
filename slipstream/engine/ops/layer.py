"""One decoder layer: its weights as one object, and the protocol of what runs before and after its attention.

Rules:
1. ``specification.TORCH`` says what operations compute; others round where it does.
2. Weights that are read together are one matrix: q, k, v; gate and up.
3. A layer may read more than its residual stream, and may leave its input's norm to whoever feeds it: draft heads are
   such layers.
4. What changes between layers is an argument. No shape but the number of rows T depends on the batch.

It knows nothing about whole models, pools or how a batch attends. Dimension key: see ``slipstream.engine``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from slipstream.engine.attention import Attend, Attention
from slipstream.engine.batch import ForwardBatch
from slipstream.engine.int8 import Matrix, joined, matrix
from slipstream.engine.model import ModelConfig
from slipstream.engine.ops.linear import Linear
from slipstream.engine.ops.rope import Rope
from slipstream.engine.weights import Tensors, take

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class Heads:
    """What is known of a layer's heads between its first product and attention."""

    queries: int  # Q
    kv: int  # G
    size: int  # D
    q_norm: torch.Tensor | None  # [D], or neither
    k_norm: torch.Tensor | None
    eps: float


@dataclass(frozen=True, slots=True)
class LayerWeights(Generic[P]):
    """P: what a product is for those that run it."""

    heads: Heads
    norm: torch.Tensor | None  # [in]; None: what comes in is read as it is
    qkv: P  # [(Q + 2 G) D, in]
    o: P  # [H, Q * D]
    post_norm: torch.Tensor  # [H]
    gate_up: P  # [2 I, H]
    down: P  # [H, I]

    @staticmethod
    def read(config: ModelConfig, tensors: Tensors, prefix: str, make: Callable[[str, Matrix, torch.Tensor | None], P],
             in_features: int | None = None, input_norm: bool = True) -> LayerWeights[P]:
        """tensors: by name; prefix: such as ``model.layers.0``; make: a product by its name here, its matrix and its
        bias; in_features: what attention reads, H unless given. Raises ModelError naming a tensor."""
        hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_dim
        width, kv_width = config.num_heads * size, config.num_kv_heads * size

        def product(name: str, columns: int, biased: bool, **parts: int) -> P:
            names = [(f"{prefix}.{'mlp' if name in ('gate_up', 'down') else 'self_attn'}.{part}", rows)
                     for part, rows in parts.items()]
            weight = joined([matrix(tensors, f"{part}.weight", rows, columns) for part, rows in names])
            return make(name, weight, torch.cat([take(tensors, f"{part}.bias", rows) for part, rows in names])
                        if biased else None)

        def norm(name: str, columns: int) -> torch.Tensor:
            return take(tensors, f"{prefix}.{name}.weight", columns)

        q_norm, k_norm = ((norm("self_attn.q_norm", size), norm("self_attn.k_norm", size)) if config.qk_norm
                          else (None, None))
        return LayerWeights(
            Heads(config.num_heads, config.num_kv_heads, size, q_norm, k_norm, config.norm_eps),
            norm("input_layernorm", hidden) if input_norm else None,
            product("qkv", in_features or hidden, config.qkv_bias, q_proj=width, k_proj=kv_width, v_proj=kv_width),
            product("o", width, config.o_bias, o_proj=hidden),
            norm("post_attention_layernorm", hidden),
            product("gate_up", hidden, config.mlp_bias, gate_proj=inner, up_proj=inner),
            product("down", inner, config.mlp_bias, down_proj=hidden))


def linear(_name: str, weight: Matrix, bias: torch.Tensor | None) -> Linear:
    """A product of torch's."""
    assert isinstance(weight, torch.Tensor)
    return Linear(weight, bias)


class Step:
    """What all layers of one forward share: where to write, how to rotate, who sees whom."""

    __slots__ = ("attend", "cos", "sin", "slots")

    def __init__(self, positions: torch.Tensor, slots: torch.Tensor, rope: Rope, attend: Attend) -> None:
        """positions, slots: int64 [T]."""
        self.slots = slots
        self.cos, self.sin = rope.rows(positions)
        self.attend = attend

    @staticmethod
    def of(batch: ForwardBatch, rope: Rope, attention: Attention) -> Step:
        return Step(batch.positions, batch.slots, rope, attention.plan(batch))


class LayerOps(Protocol):
    """How the halves of a layer run."""

    def before(self, layer: LayerWeights[Linear], x: torch.Tensor, step: Step, kv: torch.Tensor) -> torch.Tensor:
        """x [T, in] -> rotated queries [T, Q, D]; KV is written at the step's slots of kv [S, 2, G, D]."""
        ...

    def after(self, layer: LayerWeights[Linear], x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Residual stream x [T, H] and what attention gave [T, Q * D] -> [T, H]."""
        ...


class DecoderLayer:
    """A layer's weights and how it runs."""

    __slots__ = ("_ops", "weights")

    def __init__(self, weights: LayerWeights[Linear], ops: LayerOps) -> None:
        self.weights, self._ops = weights, ops

    def linears(self) -> tuple[Linear, ...]:
        """The products that may be replaced."""
        weights = self.weights
        return weights.qkv, weights.o, weights.gate_up, weights.down

    def __call__(self, x: torch.Tensor, step: Step, kv: torch.Tensor, read: torch.Tensor | None = None) -> torch.Tensor:
        """Residual stream x [T, H] -> [T, H]; one layer's kv [S, 2, G, D] is written at the step's slots. read [T, in]:
        what attention reads in the place of x."""
        q = self._ops.before(self.weights, x if read is None else read, step, kv)
        return self._ops.after(self.weights, x, step.attend(q, kv))
