"""One decoder layer: its weights as one object, the protocol of the operations before and after its attention, and
these in torch, which is the specification and runs where there are no other kernels.

Rules:
1. ``TORCH`` defines the operations; others compute the same and round at the same places. float64 stays float64
   throughout, so a float64 model makes the same choice for a row in any batch.
2. Weights that are read together are one matrix: q, k, v; gate and up.
3. The caller norms a layer's input, which may be wider than its residual stream, as in draft heads. The layer gets the
   next layer's norm, so that its last addition and that norm are one operation.
4. All that differs between layers is an argument. Of all shapes only the number of rows T depends on the batch.
5. Rotary positions use the half-split layout of transformers, with angles in float32. Cosines and sines are computed
   once a forward, not once a layer.

It knows nothing about whole models, pools or how a batch attends. Dimension key: see ``slipstream.engine``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import library

from slipstream.engine.attention import Attend, Attention
from slipstream.engine.batch import ForwardBatch
from slipstream.engine.int8 import Matrix, concatenated, matrix
from slipstream.engine.model import Map, ModelConfig, RopeScaling, Tensors, require_tensor


class Linear:
    """x [T, I] -> x W^T + bias [T, O]. On CPUs in float32 and bfloat16 W is packed once into oneDNN's blocked layout,
    1.4 to 1.6 times as fast as ``F.linear`` on few rows; elsewhere it is ``F.linear``."""

    __slots__ = ("_bias", "_packed", "_reduce", "_replacement", "_weight", "in_features", "out_features")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, reduce: Map | None = None) -> None:
        """weight: [O, I]; bias: [O] or None; reduce: applied to the result, for example a sum over ranks."""
        self.out_features, self.in_features = weight.shape
        self._bias, self._reduce = bias, reduce
        self._replacement: Map | None = None
        self._packed = weight.device.type == "cpu" and _packs(weight.dtype)
        self._weight = (torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None) if self._packed
                        else weight.contiguous())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, I] -> [T, O]."""
        y = self._multiply(x)
        return y if self._reduce is None else self._reduce(y)

    def replace_product(self, product: Map) -> None:
        """Compute x W^T with ``product`` from now on; W itself is freed."""
        self._replacement, self._packed = product, False
        self._weight = torch.empty(0)

    def weight(self) -> torch.Tensor:
        """W [O, I], not packed; empty after ``replace_product``."""
        return self._weight.to_dense() if self._packed else self._weight

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        if self._replacement is not None:
            y = self._replacement(x)
            return y if self._bias is None else y.add_(self._bias)
        if not self._packed:
            return F.linear(x, self._weight, self._bias)
        if torch.compiler.is_compiling():
            opaque: torch.Tensor = torch.ops.slipstream.packed_linear(x, self._weight, self._bias)
            return opaque
        return _packed_linear(x, self._weight, self._bias)


def _packed_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y


def _packed_shape(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


# torch.compile takes packed weights only as constants, so compiled code calls this operation of our own instead. It is
# registered by hand: the wrapper of ``library.custom_op`` makes steps measurably slower.
_OPERATIONS: Any = library.Library("slipstream", "DEF")  # type: ignore[no-untyped-call]
_OPERATIONS.define("packed_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_OPERATIONS.impl("packed_linear", _packed_linear, "CompositeExplicitAutograd")
library.register_fake("slipstream::packed_linear", _packed_shape, lib=_OPERATIONS)


def _packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs weights of this dtype on this machine: float32 always, bfloat16 if the processor has AVX-512
    or bfloat16 instructions."""
    if not torch._C._has_mkldnn or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


class Rope:
    """The rotary frequencies of one model."""

    __slots__ = ("_amplitude", "_dtype", "_frequencies")

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        halves = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
        frequencies = scaled(1.0 / config.rope_theta**halves, config.rope_scaling, config.rope_theta)
        self._frequencies = torch.cat((frequencies, frequencies)).to(device)  # [D]
        self._dtype = dtype
        self._amplitude = 1.0 if config.rope_scaling is None else config.rope_scaling.attention_factor

    def rows(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions int64 [T] -> cos and sin [T, 1, D]; the sine's first half is negated, as ``rotate`` needs it."""
        angles = positions[:, None, None].float() * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        sin[..., : sin.shape[-1] // 2].neg_()
        if self._amplitude != 1.0:
            cos, sin = cos.mul_(self._amplitude), sin.mul_(self._amplitude)
        return cos.to(self._dtype), sin.to(self._dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate heads x [T, heads, D] in place. cos, sin: [T, 1, D], from ``Rope.rows``."""
    swapped = x.roll(x.shape[-1] // 2, -1)
    x.mul_(cos).addcmul_(swapped, sin)


def scaled(frequencies: torch.Tensor, scaling: RopeScaling | None, theta: float) -> torch.Tensor:
    """Rotary frequencies [D/2], divided as the checkpoint's rope scaling says. linear: all by the factor; llama3 and
    yarn: low frequencies by the whole factor, high ones not at all."""
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "yarn":
        stretched = _stretched(len(frequencies), scaling, theta)
        return stretched * frequencies / scaling.factor + (1 - stretched) * frequencies
    wavelength = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = ((scaling.original_context / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * frequencies / scaling.factor + smooth * frequencies


def _stretched(count: int, scaling: RopeScaling, theta: float) -> torch.Tensor:
    """YaRN (arXiv 2309.00071): how far each of ``count`` frequencies is stretched, from 0 (not at all) to 1 (by the
    whole factor). Between these it rises linearly with the index."""
    def index_of(turns: float) -> float:  # the index of the frequency with so many turns in the original context
        return count * (math.log(scaling.original_context) - math.log(2 * math.pi * turns)) / math.log(theta)

    first, last = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * count - 1)
    rise = last - first or 0.001
    return ((torch.arange(count) - first) / rise).clamp(0, 1)


P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class Heads:
    """A layer's heads: their numbers, size and norms, for the step between the qkv product and attention."""

    queries: int  # Q
    kv: int  # G
    size: int  # D
    q_norm: torch.Tensor | None  # [D], or neither
    k_norm: torch.Tensor | None
    eps: float


@dataclass(frozen=True, slots=True)
class LayerWeights(Generic[P]):
    """The weights of one layer. P: the type of a linear map, which depends on the kernels that run it."""

    heads: Heads
    norm: torch.Tensor | None  # [in] the input norm, which the caller applies; None: the input is not normed
    qkv: P  # [(Q + 2 G) D, in]
    o: P  # [H, Q * D]
    post_norm: torch.Tensor  # [H]
    gate_up: P  # [2 I, H]
    down: P  # [H, I]

    @staticmethod
    def from_tensors(config: ModelConfig, tensors: Tensors, prefix: str,
                     make: Callable[[str, Matrix, torch.Tensor | None], P], in_features: int | None = None,
                     input_norm: bool = True) -> LayerWeights[P]:
        """tensors: by name; prefix: for example ``model.layers.0``; make: makes a linear map of its name here, its
        matrix and its bias; in_features: width of attention's input, None: H. Raises ModelError naming a tensor."""
        shapes = layer_shapes(config, prefix, in_features, input_norm)

        def product(what: str, *parts: str) -> P:
            names = [f"{prefix}.{part}_proj" for part in parts]
            weights = [matrix(tensors, f"{part}.weight", *shapes[f"{part}.weight"]) for part in names]
            biases = [require_tensor(tensors, name, *shapes[name]) for part in names
                      if (name := f"{part}.bias") in shapes]
            return make(what, concatenated(weights), torch.cat(biases) if biases else None)

        def norm(name: str) -> torch.Tensor:
            return require_tensor(tensors, f"{prefix}.{name}.weight", *shapes[f"{prefix}.{name}.weight"])

        q_norm, k_norm = (norm("self_attn.q_norm"), norm("self_attn.k_norm")) if config.qk_norm else (None, None)
        return LayerWeights(
            Heads(config.num_heads, config.num_kv_heads, config.head_dim, q_norm, k_norm, config.norm_eps),
            norm("input_layernorm") if input_norm else None,
            product("qkv", "self_attn.q", "self_attn.k", "self_attn.v"), product("o", "self_attn.o"),
            norm("post_attention_layernorm"), product("gate_up", "mlp.gate", "mlp.up"), product("down", "mlp.down"))


def layer_shapes(config: ModelConfig, prefix: str, in_features: int | None = None,
                 input_norm: bool = True) -> dict[str, tuple[int, ...]]:
    """The names and shapes of the tensors that ``LayerWeights.from_tensors`` reads."""
    hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_dim
    width, kv_width, input_width = config.num_heads * size, config.num_kv_heads * size, in_features or hidden
    norms = ({"input_layernorm": hidden} if input_norm else {}) | {"post_attention_layernorm": hidden} | (
        {"self_attn.q_norm": size, "self_attn.k_norm": size} if config.qk_norm else {})
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}.{name}.weight": (numbers,) for name, numbers in norms.items()}
    for name, rows, columns, biased in (
            ("self_attn.q", width, input_width, config.qkv_bias),
            ("self_attn.k", kv_width, input_width, config.qkv_bias),
            ("self_attn.v", kv_width, input_width, config.qkv_bias), ("self_attn.o", hidden, width, config.o_bias),
            ("mlp.gate", inner, hidden, config.mlp_bias), ("mlp.up", inner, hidden, config.mlp_bias),
            ("mlp.down", hidden, inner, config.mlp_bias)):
        shapes[f"{prefix}.{name}_proj.weight"] = rows, columns
        if biased:
            shapes[f"{prefix}.{name}_proj.bias"] = (rows,)
    return shapes


def linear(_name: str, weight: Matrix, bias: torch.Tensor | None) -> Linear:
    """A linear map computed by torch; a ``make`` of ``LayerWeights.from_tensors``."""
    assert isinstance(weight, torch.Tensor)
    return Linear(weight, bias)


class Step:
    """What all layers of one forward share: slots to write KV to, cosines and sines, and the planned attention."""

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

    @property
    def name(self) -> str:
        """The name of the kernels; kernels of another name may round differently."""
        ...

    def before_attention(self, layer: LayerWeights[Linear], normed: torch.Tensor, step: Step,
                         kv: torch.Tensor) -> torch.Tensor:
        """The normed input [T, in] -> rotated queries [T, Q, D]; KV is written to the step's slots of one layer's
        kv [S, 2, G, D]."""
        ...

    def after_attention(self, layer: LayerWeights[Linear], x: torch.Tensor, attended: torch.Tensor,
                        norm: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Residual stream x [T, H] and attention's output [T, Q * D] -> the stream after the layer [T, H], and the same
        normed with weight ``norm`` [H] (None: not normed)."""
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

    def norm_input(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's input from a stream [T, in] that is not normed yet."""
        return x if self.weights.norm is None else rms_norm(x, self.weights.norm, self.weights.heads.eps)

    def __call__(self, x: torch.Tensor, normed: torch.Tensor, step: Step, kv: torch.Tensor,
                 norm: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Residual stream x [T, H] and attention's normed input [T, in] -> as ``LayerOps.after_attention``; KV is
        written to the step's slots of one layer's kv [S, 2, G, D]."""
        queries = self._ops.before_attention(self.weights, normed, step, kv)
        return self._ops.after_attention(self.weights, x, step.attend(queries, kv), norm)


def next_norms(layers: Sequence[DecoderLayer], last: torch.Tensor | None) -> list[torch.Tensor | None]:
    """For each layer the input norm of the next one; for the last layer ``last``."""
    return [*(layer.weights.norm for layer in layers[1:]), last]


@dataclass(frozen=True, slots=True)
class Operations:
    """A ``LayerOps`` made of three operations."""

    add_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
    # x, added [T, H], weight [H], eps -> their sum and its norm
    rotate_and_store: Callable[[torch.Tensor, Heads, Step, torch.Tensor], torch.Tensor]
    # norm and rotate rows [T, Q + 2 G, D] (maybe in place) -> queries [T, Q, D]; KV is written to kv [S, 2, G, D]
    silu_mul: Callable[[torch.Tensor], torch.Tensor]  # [T, 2 I] -> [T, I]: silu of the first half times the second
    name: str

    def before_attention(self, layer: LayerWeights[Linear], normed: torch.Tensor, step: Step,
                         kv: torch.Tensor) -> torch.Tensor:
        return self.rotate_and_store(heads_of(layer, normed), layer.heads, step, kv)

    def after_attention(self, layer: LayerWeights[Linear], x: torch.Tensor, attended: torch.Tensor,
                        norm: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        x, normed = self.add_norm(x, layer.o(attended), layer.post_norm, layer.heads.eps)
        added = layer.down(self.silu_mul(layer.gate_up(normed)))
        if norm is not None:
            return self.add_norm(x, added, norm, layer.heads.eps)
        x = x + added
        return x, x


def heads_of(layer: LayerWeights[Linear], normed: torch.Tensor) -> torch.Tensor:
    """The normed input [T, in] -> queries, keys and values [T, Q + 2 G, D]."""
    heads = layer.heads
    return layer.qkv(normed).view(normed.shape[0], heads.queries + 2 * heads.kv, heads.size)


def rotated(rows: torch.Tensor, heads: Heads, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor,
                                                                                             torch.Tensor]:
    """Norm and rotate rows [T, Q + 2 G, D] in place -> views: queries [T, Q, D], and the KV to write [T, 2, G, D]."""
    queries, both = heads.queries, heads.queries + heads.kv
    if heads.q_norm is not None and heads.k_norm is not None:
        rows[:, :queries] = rms_norm(rows[:, :queries], heads.q_norm, heads.eps)
        rows[:, queries:both] = rms_norm(rows[:, queries:both], heads.k_norm, heads.eps)
    rotate(rows[:, :both], cos, sin)
    return rows[:, :queries], rows[:, queries:].view(rows.shape[0], 2, heads.kv, heads.size)


def rotate_and_store(rows: torch.Tensor, heads: Heads, step: Step, kv: torch.Tensor) -> torch.Tensor:
    """See ``Operations.rotate_and_store``."""
    q, written = rotated(rows, heads, step.cos, step.sin)
    kv.index_copy_(0, step.slots, written)
    return q


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., H] over the root of its mean square, times weight [H]; computed in at least float32."""
    return F.rms_norm(x, weight.shape, weight, eps)


@dataclass(frozen=True, slots=True)
class PartsNorm:
    """A norm of rows [T, W] of which each ``width`` numbers are normed by themselves (``rms_norm``)."""

    weight: torch.Tensor  # [W]
    width: int
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        count = len(self.weight) // self.width
        parts = zip(x.chunk(count, 1), self.weight.chunk(count), strict=True)
        return torch.cat([rms_norm(part, own, self.eps) for part, own in parts], 1)


def add_norm(x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor,
             eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    x = x + added
    return x, rms_norm(x, weight, eps)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


TORCH = Operations(add_norm, rotate_and_store, silu_mul, "torch")
