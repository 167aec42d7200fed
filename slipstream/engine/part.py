"""One rank's part of a model: what the rank is told at its start, and the part that it makes of it.

It knows nothing about how ranks talk. Format: JSON, for the other ranks.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from slipstream.base.config import ModelSection
from slipstream.base.errors import ModelError
from slipstream.engine.flashinfer import attention_for
from slipstream.engine.fp8 import with_fp8
from slipstream.engine.group import Group
from slipstream.engine.int8 import holds_int8
from slipstream.engine.loading import graphed
from slipstream.engine.model import CausalModel, ModelConfig, dtype_of
from slipstream.engine.ops.fused import operations_for
from slipstream.engine.shards import part_config, sharded_decoder
from slipstream.engine.weights import load_tensors


@dataclass(frozen=True, slots=True)
class Part:
    """Of the model in ``folder``: the ``rank``-th of ``ranks``. ``port``: where they meet. ``device``: cpu or cuda, of
    which rank r has the r-th. The rest as in ``model`` of the configuration."""

    rank: int
    ranks: int
    port: int
    folder: str
    dtype: str
    device: str
    threads: int = 0  # of a CPU; 0: leave them as they are
    quantize: str = "none"  # or fp8
    kernels: str = "auto"  # or torch

    def of(self, rank: int, port: int) -> Part:
        return replace(self, rank=rank, port=port)

    @property
    def place(self) -> torch.device:
        return torch.device(self.device, self.rank) if self.device == "cuda" else torch.device(self.device)

    def message(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def read(message: bytes) -> Part:
        return Part(**json.loads(message))


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
    dtype_of(section.dtype)
    part_config(ModelConfig.from_folder(folder), ranks)
    return Part(0, ranks, 0, str(folder), section.dtype, section.device, section.threads,
                section.quantize, section.kernels)


def load_part(part: Part, group: Group) -> CausalModel:
    """The model of this rank. Raises ModelError."""
    config = ModelConfig.from_folder(part.folder)
    dtype, device = dtype_of(part.dtype), part.place
    own = part_config(config, part.ranks)
    attention = attention_for(own, dtype, device)
    decoder = sharded_decoder(config, load_tensors(part.folder), group, dtype, device, attention,
                              operations_for(part.kernels, own, dtype, device))
    if part.quantize == "fp8":
        decoder = with_fp8(decoder)
    return graphed(decoder)
