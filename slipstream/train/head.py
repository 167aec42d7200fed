"""An EAGLE-3 head in training: its tensors by their published names, and the tensors that it uses of its target.

Rules:
1. ``tensors`` are the trained ones in float32, by the names of the published layout (``layers.i.*``, ``fc``, ``norm``,
   ``lm_head``); an export writes them as they are.
2. Warm start: the layers are the target's last ones. In the first one, the target's weights multiply the state's half
   of the input; those of the token's half begin small and random. ``lm_head`` and ``norm`` are the target's. ``fc``
   passes on the deepest of the three layer inputs and adds a little of the others: far better than random weights.
3. The draft vocabulary has the tokens that the target's answers use most; ties go to the lower id.
4. The head reads the states that enter layers 2, n // 2 and n - 3, the published default. For targets of less than 6
   layers they are others, and the export names them.

It knows nothing about data or optimisers. Format: arXiv 2503.01840, architecture ``LlamaForCausalLMEagle3``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.drafting.heads.checkpoint import LAYER, default_taps
from slipstream.engine.int8 import EMBEDDING, HEAD
from slipstream.engine.model import ModelConfig, require_tensor
from slipstream.engine.ops.layer import layer_shapes
from slipstream.train.shards import ANSWER, Conversation

INIT_STD = 0.02  # standard deviation of random first weights, as models of this size are initialised
FC_INIT_STD = 0.005  # the same in ``fc``

Tensors = dict[str, torch.Tensor]
Counts = NDArray[np.int64]


@dataclass(slots=True)
class Head:
    """A head in training, on its device."""

    config: ModelConfig  # of the layers; vocab_size is the target's
    taps: tuple[int, ...]
    tensors: Tensors  # float32, trained
    vocabulary: torch.Tensor  # int64 [V'] target ids, ascending
    embedding: torch.Tensor  # [V, H] the target's, not trained
    teacher: torch.Tensor  # [V', H] the target's lm_head over the draft vocabulary
    target_layers: int
    mask_token: int | None = None  # of a DSpark head (see ``block_head``); None: an EAGLE-3 head, as here

    @property
    def num_parameters(self) -> int:
        return sum(t.numel() for t in self.tensors.values())

    def layer(self, number: int) -> Tensors:
        """The tensors of one layer, by their names within the layer."""
        prefix = f"layers.{number}."
        return {name.removeprefix(prefix): t for name, t in self.tensors.items() if name.startswith(prefix)}

    def draft_ids(self) -> NDArray[np.int64]:
        """int64 [V + 1]: each token's draft id, -1 if it has none. The last entry, -1, is found by index -1, which
        stands for no token."""
        ids = np.full(self.config.vocab_size + 1, -1, np.int64)
        ids[self.vocabulary.cpu().numpy()] = np.arange(len(self.vocabulary))
        return ids


def taps_of(num_layers: int) -> tuple[int, int, int]:
    """The three layers of a target of ``num_layers`` layers whose inputs a head reads."""
    return default_taps(num_layers) if num_layers >= 6 else (0, num_layers // 2, num_layers - 1)


def layer_config(target: ModelConfig, layers: int) -> ModelConfig:
    """The configuration of the head's layers: plain Llama layers with the target's dimensions."""
    return replace(target, model_type="llama", num_layers=layers, tied_embeddings=False, qkv_bias=False, o_bias=False,
                   mlp_bias=False, qk_norm=False, sliding_window=0)


def answer_counts(conversations: Iterable[Conversation], vocab: int) -> Counts:
    """How often answers use each token, [V]."""
    counts = np.zeros(vocab, np.int64)
    for conversation in conversations:
        counts += np.bincount(conversation.tokens[conversation.roles == ANSWER], minlength=vocab)
    return counts


def draft_vocabulary(counts: Counts, size: int) -> torch.Tensor:
    """The ``size`` tokens that answers use most, int64 ascending."""
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:size]))


def coverage(counts: Counts, vocabulary: torch.Tensor) -> float:
    """The share of answer tokens that are in ``vocabulary``."""
    return float(counts[vocabulary.numpy()].sum() / max(1, counts.sum()))


def warm_head(target: ModelConfig, tensors: Mapping[str, torch.Tensor], vocabulary: torch.Tensor, layers: int,
              seed: int, device: torch.device) -> Head:
    """A new head of ``layers`` layers with the weights of rule 2. tensors: the target's checkpoint."""
    config, taps = layer_config(target, layers), taps_of(target.num_layers)
    rng = torch.Generator().manual_seed(seed)
    weights = copied_weights(target, tensors, config, len(taps), vocabulary, rng)
    for name in "qkv":  # the first one reads a token beside the state
        state_weight = weights[f"{LAYER}.self_attn.{name}_proj.weight"]
        token_weight = INIT_STD * torch.randn(state_weight.shape, generator=rng)
        weights[f"{LAYER}.self_attn.{name}_proj.weight"] = torch.cat((token_weight, state_weight), 1)
    weights[f"{LAYER}.hidden_norm.weight"] = weights[f"{LAYER}.input_layernorm.weight"]
    weights[f"{LAYER}.input_layernorm.weight"] = torch.ones(config.hidden_size)
    return place_head(target, tensors, config, taps, weights, vocabulary, device)


def copied_weights(target: ModelConfig, tensors: Mapping[str, torch.Tensor], config: ModelConfig, num_taps: int,
                   vocabulary: torch.Tensor, rng: torch.Generator) -> Tensors:
    """The first weights of heads of any kind: the target's last layers, as many as ``config`` has (with norms of
    queries and keys if both have them), its norm, its ``lm_head`` over ``vocabulary``, and ``fc`` (rule 2)."""
    hidden, shared = config.hidden_size, replace(config, qk_norm=config.qk_norm and target.qk_norm)

    def copy_of(name: str, *shape: int) -> torch.Tensor:
        return require_tensor(tensors, name, *shape).float().clone()

    fc = FC_INIT_STD * torch.randn(hidden, num_taps * hidden, generator=rng)
    fc[:, 2 * hidden : 3 * hidden] += torch.eye(hidden)
    lm_head = copy_of(EMBEDDING if target.tied_embeddings else HEAD, target.vocab_size, hidden)[vocabulary]
    weights = {"fc.weight": fc, "norm.weight": copy_of("model.norm.weight", hidden), "lm_head.weight": lm_head}
    for layer in range(config.num_layers):
        own, source = f"layers.{layer}", f"model.layers.{max(0, target.num_layers - config.num_layers + layer)}"
        weights |= {name: copy_of(name.replace(own, source, 1), *shape)
                    for name, shape in layer_shapes(shared, own).items()}
    return weights


def place_head(target: ModelConfig, tensors: Mapping[str, torch.Tensor], config: ModelConfig, taps: tuple[int, ...],
               weights: Tensors, vocabulary: torch.Tensor, device: torch.device, mask_token: int | None = None) -> Head:
    """A head with the first weights ``weights``, on ``device``."""
    teacher = weights["lm_head.weight"].to(device, copy=True)  # a copy that is not trained
    trained = {name: tensor.to(device).requires_grad_() for name, tensor in weights.items()}
    embedding = require_tensor(tensors, EMBEDDING, target.vocab_size, config.hidden_size).to(device, torch.float32)
    return Head(config, taps, trained, vocabulary.to(device), embedding, teacher, target.num_layers, mask_token)
