"""A head of multi-token prediction as it is published, inside the target's checkpoint or beside it.

Rules (those of every head stand in ``checkpoint``):
1. MiMo: ``model.mtp_layers.{i}.`` with ``token_layernorm``, ``hidden_layernorm``, ``input_proj``, a Qwen2 decoder
   layer and ``final_layernorm``. The input is (hidden, token), in this order; the token's half is zero in the first
   row.
2. DeepSeek-V3 and GLM-4.5 (NextN): ``enorm``, ``hnorm``, ``eh_proj``, a decoder layer of the target's own kind,
   ``shared_head.norm``. The input is (token, hidden). In the target's checkpoint these are the layers after the last,
   ``model.layers.{num_hidden_layers + i}.``; in a folder of their own they may be ``model.layers.{i}.``.
3. A folder of its own need not hold everything: embedding and lm_head are its own (NextN: ``embed_tokens`` and
   ``shared_head.head`` of the first layer) or else the target's, and so are MiMo layers that it lacks (MiMo publishes
   the first layer with the model and further ones apart). ``num_nextn_predict_layers`` says how many layers there are.
   Tensors of a decoder layer itself are checked by the code that builds the layer.

It knows nothing about sessions or forwards. Formats: tensor names of targets as in transformers' checkpoints.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from slipstream.base.errors import ModelError
from slipstream.drafting.heads.checkpoint import MAX_LAYERS, PublishedConfig, check_float, read_published_config
from slipstream.engine.fp8_blocks import FIELD
from slipstream.engine.int8 import EMBEDDING, HEAD
from slipstream.engine.model import (
    Tensors,
    TrackedTensors,
    fp8_block,
    load_tensors,
    of_folder,
    require_tensor,
    tensor_names,
)

OWN_EMBEDDING, OWN_LM_HEAD = "embed_tokens.weight", "shared_head.head.weight"  # of a NextN layer


@dataclass(frozen=True, slots=True)
class Layout:
    """What differs between families."""

    token_norm: str
    hidden_norm: str
    projection: str
    norm: str
    hidden_first: bool  # the projection reads (hidden, token); False: (token, hidden)
    first_token_zero: bool  # the row at position 0 reads a token of zeros
    on_transformers: bool  # the layer is of the type of the target's and built by transformers; False: by decoder.py
    norm_eps: float = 1e-6  # where a config says nothing


MIMO = Layout("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", True, True, False)
NEXTN = Layout("enorm", "hnorm", "eh_proj", "shared_head.norm", False, False, True)
LAYOUTS = {"mimo": MIMO, "deepseek_v3": NEXTN, "glm4_moe": replace(NEXTN, norm_eps=1e-5)}


@dataclass(frozen=True, slots=True)
class MtpLayer:
    """What one layer has beside its decoder layer."""

    prefix: str  # of the decoder layer's tensors, such as ``model.layers.61``
    token_norm: torch.Tensor  # [H]
    hidden_norm: torch.Tensor  # [H]
    projection: torch.Tensor  # [H, 2H]
    norm: torch.Tensor  # [H]


@dataclass(frozen=True, slots=True)
class MtpHead:
    """A checked head for its target, on the CPU and in its stored dtypes."""

    folder: Path  # of the config.json that describes its decoder layers
    layout: Layout
    vocab_size: int
    hidden_size: int
    target_layers: int
    norm_eps: float
    layers: tuple[MtpLayer, ...]
    tensors: TrackedTensors  # by their full names: the decoder layers'
    embedding: torch.Tensor  # [V, H]
    lm_head: torch.Tensor  # [V, H]


def read_mtp(folder: str | Path, target_folder: str | Path) -> MtpHead:
    """Read and check the head in ``folder`` (the target's own folder, or another) for the target in
    ``target_folder``. Raises ModelError."""
    folder, target_folder = Path(folder), Path(target_folder)
    own, target = read_published_config(folder), read_published_config(target_folder)
    layout = LAYOUTS.get(str(own.raw.get("model_type")))
    if layout is None:
        raise ModelError(f"{own.where}: model_type: {own.raw.get('model_type')!r} has no multi-token prediction "
                         f"head that is known here ({', '.join(LAYOUTS)} have)")
    if own.raw.get(FIELD) is not None and fp8_block(folder) is None:
        raise ModelError(f"{own.where}: {FIELD}: quantized heads are not read, but for fp8 in blocks "
                         "(weight_block_size); convert the checkpoint to bfloat16")
    for name in ("model_type", "hidden_size", "vocab_size"):
        if own.raw.get(name) != target.raw.get(name):
            raise ModelError(f"{own.where}: {name}: the head was made for {own.raw.get(name)!r}, the target has "
                             f"{target.raw.get(name)!r}")
    vocab, hidden = target.integer("vocab_size"), target.integer("hidden_size")
    names = tensor_names(folder)
    prefixes = _prefixes(own, names, folder.resolve() == target_folder.resolve())
    tied = target.raw.get("tie_word_embeddings") is True
    # What the first layer repeats of the target is not read twice; of a tied pair either may be all that there is.
    shared = [name for own, name in ((OWN_EMBEDDING, EMBEDDING), (OWN_LM_HEAD, HEAD))
              if tied or f"{prefixes[0]}{own}" not in names]
    tensors = TrackedTensors(_tensors(folder, names, target_folder, prefixes, shared))
    both = (EMBEDDING, HEAD)
    with of_folder(folder):
        embedding = _shared(tensors, (f"{prefixes[0]}{OWN_EMBEDDING}", *(both if tied else both[:1])), vocab, hidden)
        lm_head = _shared(tensors, (f"{prefixes[0]}{OWN_LM_HEAD}", *(both if tied else both[1:])), vocab, hidden)
        layers = tuple(_layer(tensors, layout, prefix, hidden) for prefix in prefixes)
    norm_eps = own.real("rms_norm_eps", layout.norm_eps)
    return MtpHead(folder, layout, vocab, hidden, target.integer("num_hidden_layers"), norm_eps, layers, tensors,
                   embedding, lm_head)


def _prefixes(own: PublishedConfig, names: set[str], in_target: bool) -> list[str]:
    """What the tensors of each layer begin with."""
    count = own.integer("num_nextn_predict_layers", high=MAX_LAYERS)
    if own.raw["model_type"] == "mimo":
        return [f"model.mtp_layers.{i}." for i in range(count)]
    first = own.integer("num_hidden_layers")
    if not in_target and not any(name.startswith(f"model.layers.{first}.") for name in names):
        first = 0
    return [f"model.layers.{first + i}." for i in range(count)]


def _tensors(folder: Path, names: Iterable[str], target_folder: Path, prefixes: list[str],
             shared: Collection[str]) -> dict[str, torch.Tensor]:
    """What the head's folder holds of it and of ``shared``, and what it lacks from the target's. Nothing else is read:
    a target may be larger than this machine."""
    own = {name for name in names if name.startswith(tuple(prefixes)) or name in shared}
    held = load_tensors(folder, own)
    # Only MiMo's names say that a layer is a head's: a layer of the target's body never stands in for one.
    lendable = tuple(prefix for prefix in prefixes if prefix.startswith("model.mtp_layers."))
    lent = {name for name in tensor_names(target_folder) - own
            if name in shared or name.startswith(lendable)}
    found = load_tensors(target_folder, lent) | held if lent else held
    for name, tensor in found.items():
        check_float(folder if name in held else target_folder, name, tensor)
    return found


def _shared(tensors: Tensors, names: Sequence[str], vocab: int, hidden: int) -> torch.Tensor:
    """The first of ``names`` that is there: the head's own, then the target's."""
    return require_tensor(tensors, next((name for name in names if name in tensors), names[1]), vocab, hidden)


def _layer(tensors: Tensors, layout: Layout, prefix: str, hidden: int) -> MtpLayer:
    def norm(name: str) -> torch.Tensor:
        return require_tensor(tensors, f"{prefix}{name}.weight", hidden)

    return MtpLayer(prefix.removesuffix("."), norm(layout.token_norm), norm(layout.hidden_norm),
                    require_tensor(tensors, f"{prefix}{layout.projection}.weight", hidden, 2 * hidden),
                    norm(layout.norm))
