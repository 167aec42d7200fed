"""The decoder of the Llama family: Llama, Mistral, SmolLM2, Qwen2, Qwen3 as flags of one class.

Rules:
1. Batch, pool and taps are arguments; a model holds weights and nothing that changes.
2. A tap at layer i is the residual stream that enters layer i; at the number of layers it is the state after the final
   norm.
3. ``DecoderLayer`` may be built with a wider attention input than its residual stream: draft heads are such layers.
4. A device holds a model once, and one layer twice, while it is built: what is merged is placed layer by layer.

It knows nothing about sessions, slots' owners or files. Format: tensor names as in transformers' checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from slipstream.engine.backend import Attend, Attention, TorchAttention
from slipstream.engine.batch import ForwardBatch
from slipstream.engine.halves import EAGER, Halves
from slipstream.engine.kv import KVPool
from slipstream.engine.layers import Linear, Rope, Tensors, rms_norm, take
from slipstream.engine.model import ModelConfig

LAYERS = "model.layers."
Place = Callable[[str, torch.Tensor], torch.Tensor]


def as_it_is(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor


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


class DecoderLayer:
    """One layer: fused q, k, v, rotary positions, KV written to the pool, attention, the MLP. ``in_features`` is the
    width that attention reads, H unless a draft head reads more. ``input_norm`` False: what comes in is read as it is.
    ``halves``: how what stands before and after attention runs (see there)."""

    __slots__ = ("_config", "_down", "_gate_up", "_halves", "_input_norm", "_k_norm", "_o", "_post_norm", "_q_norm",
                 "_qkv")

    def __init__(self, config: ModelConfig, tensors: Tensors, prefix: str, in_features: int | None = None,
                 input_norm: bool = True, halves: Halves = EAGER) -> None:
        """tensors: by name, already in the dtype and on the device to run in; prefix: such as ``model.layers.0``."""
        self._config = config
        self._halves = halves
        self._take_attention(tensors, f"{prefix}.self_attn", in_features or config.hidden_size)
        hidden, inner = config.hidden_size, config.intermediate_size
        self._input_norm = take(tensors, f"{prefix}.input_layernorm.weight", hidden) if input_norm else None
        self._post_norm = take(tensors, f"{prefix}.post_attention_layernorm.weight", hidden)
        names = [f"{prefix}.mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
        gate, up = (take(tensors, f"{name}.weight", inner, hidden) for name in names[:2])
        down = take(tensors, f"{names[2]}.weight", hidden, inner)
        self._gate_up = Linear(torch.cat((gate, up)), torch.cat([take(tensors, f"{name}.bias", inner)
                               for name in names[:2]]) if config.mlp_bias else None)
        self._down = Linear(down, take(tensors, f"{names[2]}.bias", hidden) if config.mlp_bias else None)

    def _take_attention(self, tensors: Tensors, prefix: str, in_features: int) -> None:
        config = self._config
        heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_dim
        widths = (("q_proj", heads * size), ("k_proj", kv_heads * size), ("v_proj", kv_heads * size))
        weight = torch.cat([take(tensors, f"{prefix}.{name}.weight", width, in_features) for name, width in widths])
        bias = None
        if config.qkv_bias:
            bias = torch.cat([take(tensors, f"{prefix}.{name}.bias", width) for name, width in widths])
        self._qkv = Linear(weight, bias)
        self._o = Linear(take(tensors, f"{prefix}.o_proj.weight", config.hidden_size, heads * size),
                         take(tensors, f"{prefix}.o_proj.bias", config.hidden_size) if config.o_bias else None)
        self._q_norm = take(tensors, f"{prefix}.q_norm.weight", size) if config.qk_norm else None
        self._k_norm = take(tensors, f"{prefix}.k_norm.weight", size) if config.qk_norm else None

    def linears(self) -> tuple[Linear, ...]:
        return self._qkv, self._o, self._gate_up, self._down

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's input norm; draft heads apply it themselves, to the token's half of a wider input."""
        return x if self._input_norm is None else rms_norm(x, self._input_norm, self._config.norm_eps)

    def __call__(self, x: torch.Tensor, step: Step, kv: torch.Tensor,
                 attention_input: torch.Tensor | None = None) -> torch.Tensor:
        """Residual stream x [T, H] -> [T, H]; one layer's kv [S, 2, G, D] is written at the step's slots.
        attention_input [T, in_features] replaces ``norm(x)``."""
        config = self._config
        read, norm = (x, self._input_norm) if attention_input is None else (attention_input, None)
        q = self._halves.before(read, norm, self._qkv, self._q_norm, self._k_norm, step.cos, step.sin,
                                config.num_heads, config.num_kv_heads, config.head_dim, config.norm_eps, step.slots,
                                kv)
        attended = step.attend(q, kv)
        return self._halves.after(x, attended, self._o, self._post_norm, self._gate_up, self._down, config.norm_eps)


class Decoder:
    """A whole model of the family; see ``model.CausalModel``."""

    __slots__ = ("_attention", "_embedding", "_head", "_layers", "_norm", "config", "device", "dtype", "rope")

    def __init__(self, config: ModelConfig, tensors: Tensors, halves: Halves = EAGER,
                 attention: Attention | None = None, head: torch.Tensor | None = None, place: Place = as_it_is) -> None:
        """tensors: by name; place: brings one to the dtype and the device to run in. attention: None is torch's. head:
        of a part of the vocabulary (see ``shards``). Raises ModelError naming a tensor."""
        self.config = config
        around = {name: place(name, tensor) for name, tensor in tensors.items() if not name.startswith(LAYERS)}
        self._embedding = take(around, "model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self.dtype, self.device = self._embedding.dtype, self._embedding.device
        self._layers = [DecoderLayer(config, _placed(tensors, f"{LAYERS}{i}.", place), f"{LAYERS}{i}", halves=halves)
                        for i in range(config.num_layers)]
        self._norm = take(around, "model.norm.weight", config.hidden_size)
        self._head = Linear(head if head is not None else self._embedding if config.tied_embeddings
                            else take(around, "lm_head.weight", config.vocab_size, config.hidden_size))
        self.rope = Rope(config, self.dtype, self.device)
        self._attention = attention or TorchAttention(config, self.dtype)

    @staticmethod
    def from_tensors(config: ModelConfig, tensors: Tensors, dtype: torch.dtype, device: torch.device,
                     halves: Halves = EAGER, attention: Attention | None = None) -> Decoder:
        """As ``Decoder(...)``, of tensors in any dtype and place."""
        floats = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
        return Decoder(config, floats, halves, attention, place=lambda _, tensor: tensor.to(device, dtype))

    def linears(self) -> Iterator[Linear]:
        """All of its products, the head's last."""
        for layer in self._layers:
            yield from layer.linears()
        yield self._head

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, pool: KVPool,
                taps: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[T, H] after the final norm, and the taps side by side [T, len(taps) * H] or None."""
        return self.run(batch.tokens, Step.of(batch, self.rope, self._attention), pool, taps)

    def run(self, tokens: torch.Tensor, step: Step, pool: KVPool,
            taps: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``forward`` of rows that are planned: tensors alone, which a graph may capture. tokens: int64 [T]."""
        x = self.embed(tokens)
        streams = [x]
        for layer, kv in zip(self._layers, pool.kv, strict=True):
            x = layer(x, step, kv)
            streams.append(x)
        streams[-1] = rms_norm(x, self._norm, self.config.norm_eps)
        return streams[-1], torch.cat([streams[i] for i in taps], -1) if taps else None

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, H] after the final norm -> [R, V] in float32, float64 for a float64 model."""
        return self._head(hidden).to(torch.promote_types(self.dtype, torch.float32))

    @torch.inference_mode()
    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> [T, H]."""
        return F.embedding(tokens, self._embedding)


def _placed(tensors: Tensors, prefix: str, place: Place) -> dict[str, torch.Tensor]:
    return {name: place(name, tensor) for name, tensor in tensors.items() if name.startswith(prefix)}
