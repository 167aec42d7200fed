"""One rank's part of a model: what the rank is told at its start, and a decoder that is cut for several ranks, as
Megatron cuts it (Shoeybi et al., arXiv 1909.08053).

Rules:
1. A rank holds whole heads, KV heads with their query heads, and as many columns of the MLP: a smaller model, whose
   attention, KV pool and batches are as any other's. The residual stream is whole on every rank.
2. Two sums a layer: after ``o`` and after ``down``, which are cut along what they sum over. Their biases are rank 0's.
3. The embedding is whole on every rank: its rows are looked up, not multiplied, and cutting it would cost a third sum.
   The head is cut by vocabulary, since a step reads all of it; its logits are put side by side.
4. What does not divide is a ModelError that names the field.

It knows nothing about processes or who tells a rank what to compute. Format: JSON, for the other ranks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F

from slipstream.base.config import ModelSection
from slipstream.base.errors import ModelError
from slipstream.engine.attention import Attention
from slipstream.engine.decoder import Decoder, Placing
from slipstream.engine.flashinfer import attention_for
from slipstream.engine.fp8 import with_fp8
from slipstream.engine.int8 import Matrix, holds_int8
from slipstream.engine.loading import graphed
from slipstream.engine.model import CausalModel, ModelConfig, dtype_of
from slipstream.engine.ops.fused import operations_for
from slipstream.engine.ops.layer import LayerOps
from slipstream.engine.ops.linear import Linear
from slipstream.engine.ops.specification import TORCH
from slipstream.engine.orders import Group
from slipstream.engine.weights import Tensors, load_tensors, take

ALONG = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "gate_proj": 0, "up_proj": 0, "o_proj": 1, "down_proj": 1}
WHOLE_HEAD = "lm_head.weight"
SUMMED = ("o", "down")  # products that ranks have parts of


@dataclass(frozen=True, slots=True)
class Part:
    """Of the model in ``folder``, which ``section`` shares out: the ``rank``-th. ``port``: where ranks meet. Of device
    cuda, rank r has the r-th."""

    rank: int
    port: int
    folder: str
    section: ModelSection

    @property
    def ranks(self) -> int:
        return self.section.tensor_parallel

    @property
    def place(self) -> torch.device:
        device = self.section.device
        return torch.device(device, self.rank) if device == "cuda" else torch.device(device)

    def message(self) -> bytes:
        return json.dumps([self.rank, self.port, self.folder, self.section.model_dump()]).encode()

    @staticmethod
    def read(message: bytes) -> Part:
        rank, port, folder, section = json.loads(message)
        return Part(rank, port, folder, ModelSection.model_validate(section))


def part_of(folder: str | Path, section: ModelSection) -> Part:
    """The first part of a model. Raises ModelError where it cannot be cut as the section says, or devices are missing;
    before anything is loaded."""
    ranks, field = section.tensor_parallel, "model.tensor_parallel"
    if section.engine != "decoder" or section.kernels == "native":
        raise ModelError(f"{field}: it is for engine decoder, without kernels native")
    if section.device not in ("cpu", "cuda"):
        raise ModelError(f"{field}: device '{section.device}' cannot be shared out; use cuda (the first GPUs) or cpu")
    if section.device == "cuda" and torch.cuda.device_count() < ranks:
        raise ModelError(f"{field}: {ranks} GPUs are wanted and {torch.cuda.device_count()} can be seen; give the pod "
                         "more, or lower it")
    if section.quantize == "int8" or holds_int8(folder):
        raise ModelError(f"{field}: int8 weights (model.quantize) are not shared out; take the model's own folder, and "
                         "none or fp8")
    part_config(ModelConfig.from_folder(folder), ranks)
    return Part(0, 0, str(folder), section)


def load_part(part: Part, group: Group) -> CausalModel:
    """The model of this rank. Raises ModelError."""
    config = ModelConfig.from_folder(part.folder)
    dtype, device = dtype_of(part.section.dtype), part.place
    own = part_config(config, part.ranks)
    attention = attention_for(own, dtype, device)
    decoder = sharded_decoder(config, load_tensors(part.folder), group, dtype, device, attention,
                              operations_for(part.section.kernels, own, dtype, device))
    return graphed(with_fp8(decoder) if part.section.quantize == "fp8" else decoder)


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
