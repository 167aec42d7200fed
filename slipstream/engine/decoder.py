"""The decoder of the Llama family: Llama, Mistral, SmolLM2, Qwen2, Qwen3 as flags of one class.

Rules:
1. Batch, pool and taps are arguments; a model holds weights and nothing that changes.
2. A tap at layer i is the residual stream that enters layer i; a tap at ``num_layers`` is the state after the final
   norm.
3. While a model is built its device holds the weights once, and one layer twice: merged matrices are moved layer by
   layer.
4. Weights are copies: tensors that ``load_tensors`` gives are maps of files, into which a trainer may write others.

It knows nothing about sessions, who owns slots, or files. Format: tensor names as in transformers' checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from slipstream.engine.attention import Attention, TorchAttention
from slipstream.engine.batch import ForwardBatch
from slipstream.engine.int8 import EMBEDDING, HEAD, SCALE, Matrix
from slipstream.engine.kv import KVPool
from slipstream.engine.model import ModelConfig, Tensors, require_tensor
from slipstream.engine.ops.layer import (
    TORCH,
    DecoderLayer,
    LayerOps,
    LayerWeights,
    Linear,
    Rope,
    Step,
    layer_shapes,
    linear,
    next_norms,
)

LAYERS, NORM = "model.layers.", "model.norm.weight"
MTP_LAYERS = "model.mtp_layers."  # MiMo's multi-token prediction layers, which a drafter reads


@dataclass(frozen=True, slots=True)
class Split:
    """What makes a decoder a rank's part of one; without arguments it is whole. part: a rank's part of a checkpoint's
    tensor, by its name; product: makes the linear map of a matrix, by its name in ``LayerWeights``; head: lm_head rows
    to use instead of the checkpoint's (a rank's part of the vocabulary)."""

    part: Callable[[str, torch.Tensor], torch.Tensor] = lambda _name, tensor: tensor
    product: Callable[[str, Matrix, torch.Tensor | None], Linear] = linear
    head: torch.Tensor | None = None


WHOLE = Split()


class Decoder:
    """A whole model of the family, or a rank's part; see ``model.CausalModel``."""

    __slots__ = ("_embedding", "_head", "_layers", "_norms", "_ops", "attention", "config", "device", "dtype", "rope")

    def __init__(self, config: ModelConfig, tensors: Tensors, dtype: torch.dtype, device: torch.device,
                 ops: LayerOps = TORCH, attention: Attention | None = None, split: Split = WHOLE) -> None:
        """tensors: by name, of any float dtype on any device, copied to ``dtype`` and ``device``; those of integers are
        ignored; ops: the operations of a layer; attention: None is torch's. Raises ModelError naming a tensor."""

        def placed(names: Iterable[str]) -> dict[str, torch.Tensor]:
            return {name: split.part(name, tensors[name]).to(device, dtype, copy=True) for name in names
                    if name in tensors and tensors[name].is_floating_point()}

        def layer(prefix: str) -> DecoderLayer:
            own = placed(layer_shapes(config, prefix))
            return DecoderLayer(LayerWeights.from_tensors(config, own, prefix, split.product), ops)

        self.config, self.dtype, self._ops = config, dtype, ops
        own_head = split.head is None and not config.tied_embeddings
        outer = placed((EMBEDDING, NORM, HEAD) if own_head else (EMBEDDING, NORM))
        self._embedding = require_tensor(outer, EMBEDDING, config.vocab_size, config.hidden_size)
        self.device = self._embedding.device  # with its number, which "cuda" has not
        self._layers = [layer(f"{LAYERS}{i}") for i in range(config.num_layers)]
        self._norms = next_norms(self._layers, require_tensor(outer, NORM, config.hidden_size))
        head = self._embedding if split.head is None else split.head
        self._head = Linear(require_tensor(outer, HEAD, config.vocab_size, config.hidden_size) if own_head else head)
        self.rope = Rope(config, dtype, self.device)
        self.attention = attention or TorchAttention(config, dtype)

    @property
    def kernels(self) -> str:
        """See ``model.CausalModel``."""
        return f"{type(self.attention).__name__}, {self._ops.name} operations"

    def linears(self) -> Iterator[Linear]:
        """All linear maps, layer by layer; the head is the last."""
        for layer in self._layers:
            yield from layer.linears()
        yield self._head

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, pool: KVPool,
                taps: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[T, H] after the final norm, and the taps side by side [T, len(taps) * H] or None."""
        return self.run(batch.tokens, Step.of(batch, self.rope, self.attention), pool, taps)

    def run(self, tokens: torch.Tensor, step: Step, pool: KVPool,
            taps: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``forward`` after planning: it runs on tensors only, so a CUDA graph can capture it. tokens: int64 [T]."""
        x, tapped = F.embedding(tokens, self._embedding), dict[int, torch.Tensor]()
        normed = self._layers[0].norm_input(x)
        for number, (layer, norm, kv) in enumerate(zip(self._layers, self._norms, pool.kv, strict=True)):
            if number in taps:  # other layers' states are freed, which bounds the memory of a step
                tapped[number] = x
            x, normed = layer(x, normed, step, kv, norm)
        tapped[len(self._layers)] = normed
        return normed, torch.cat([tapped[i] for i in taps], -1) if taps else None

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, H] after the final norm -> [R, V] in float32, float64 for a float64 model."""
        return self._head(hidden).to(torch.promote_types(self.dtype, torch.float32))


def decoder_names(config: ModelConfig) -> set[str]:
    """The names of the tensors that a decoder reads, lm_head included also where the embedding is tied."""
    layers = (layer_shapes(config, f"{LAYERS}{i}") for i in range(config.num_layers))
    return {EMBEDDING, NORM, HEAD}.union(*layers)


def unread_names(config: ModelConfig, tensors: Tensors) -> list[str]:
    """The names of tensors that no decoder reads. Scales of int8 weights and layers for a drafter are left out, and so
    is an lm_head beside a tied embedding if both are equal."""
    known = decoder_names(config)
    if config.tied_embeddings and HEAD + SCALE not in tensors and not _head_repeats_embedding(tensors):
        known.remove(HEAD)
    return [name for name in tensors if name not in known and name.removesuffix(SCALE) not in known
            and not name.startswith(MTP_LAYERS)]


def _head_repeats_embedding(tensors: Tensors) -> bool:
    head, embedding = tensors.get(HEAD), tensors.get(EMBEDDING)
    return head is None or embedding is None or torch.equal(head.to(embedding.dtype), embedding)
