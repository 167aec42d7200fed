"""A decoder cut for several ranks, as Megatron cuts it (Shoeybi et al., arXiv 1909.08053).

Rules:
1. A rank holds whole heads, KV heads with their query heads, and as many columns of the MLP: a smaller model, whose
   attention, KV pool and batches are as any other's. The residual stream is whole on every rank.
2. Two sums a layer: after ``o`` and after ``down``, which are cut along what they sum over. Their biases are rank 0's.
3. The embedding is whole on every rank: its rows are looked up, not multiplied, and cutting it would cost a third sum.
   The head is cut by vocabulary, since a step reads all of it; its logits are put side by side.
4. What does not divide is a ModelError that names the field.

It knows nothing about processes or who tells a rank what to compute.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from slipstream.base.errors import ModelError
from slipstream.engine.backend import Attention
from slipstream.engine.decoder import Decoder, Placing
from slipstream.engine.group import Group
from slipstream.engine.int8 import Matrix
from slipstream.engine.model import ModelConfig
from slipstream.engine.ops.layer import LayerOps
from slipstream.engine.ops.linear import Linear
from slipstream.engine.ops.specification import TORCH
from slipstream.engine.weights import Tensors, take

ALONG = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "gate_proj": 0, "up_proj": 0, "o_proj": 1, "down_proj": 1}
WHOLE_HEAD = "lm_head.weight"
SUMMED = ("o", "down")  # products that ranks have parts of


def part_config(config: ModelConfig, ranks: int) -> ModelConfig:
    """The measures of one rank's part. Raises ModelError naming what does not divide."""
    for field, whole in (("num_attention_heads", config.num_heads), ("num_key_value_heads", config.num_kv_heads),
                         ("intermediate_size", config.intermediate_size)):
        if whole % ranks:
            raise ModelError(f"model.tensor_parallel: {field} {whole} of this model does not divide by {ranks}")
    return replace(config, num_heads=config.num_heads // ranks, num_kv_heads=config.num_kv_heads // ranks,
                   intermediate_size=config.intermediate_size // ranks)


def part_of_tensor(name: str, tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """A rank's part of one of a checkpoint's tensors."""
    *_, module, kind = name.split(".")
    if module not in ALONG or tensor.shape[ALONG[module] if kind == "weight" else 0] % ranks:
        return tensor  # whole, or of a wrong shape, which the decoder names
    if kind == "bias" and ALONG[module] == 1:
        return tensor if rank == 0 else torch.zeros_like(tensor)
    return tensor.chunk(ranks, ALONG[module] if kind == "weight" else 0)[rank]


def part_head(config: ModelConfig, tensors: Tensors, rank: int, ranks: int) -> torch.Tensor:
    """A rank's rows of the head [ceil(V / ranks), H]; those beyond the vocabulary are zeros."""
    name = "model.embed_tokens.weight" if config.tied_embeddings else WHOLE_HEAD
    head = take(tensors, name, config.vocab_size, config.hidden_size)
    width = -(-config.vocab_size // ranks)
    rows = head[rank * width : (rank + 1) * width]
    return F.pad(rows, (0, 0, 0, width - len(rows)))


def sharded_decoder(config: ModelConfig, tensors: Tensors, group: Group, dtype: torch.dtype, device: torch.device,
                    attention: Attention | None = None, ops: LayerOps = TORCH) -> Decoder:
    """This rank's part of a decoder, whose logits are of its part of the vocabulary. config, tensors: of the whole
    model; attention, ops: of the part. Raises ModelError."""
    part = part_config(config, group.ranks)
    own = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point() and name != WHOLE_HEAD}
    head = part_head(config, tensors, group.rank, group.ranks).to(device, dtype)

    def place(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return part_of_tensor(name, tensor, group.rank, group.ranks).to(device, dtype)

    def product(name: str, weight: Matrix, bias: torch.Tensor | None) -> Linear:
        assert isinstance(weight, torch.Tensor)
        return Linear(weight, bias, group.sum if name in SUMMED else None)

    return Decoder(part, own, ops, attention, Placing(place, product, head))
