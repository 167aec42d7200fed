"""A multi-token prediction head as it is published, inside its target's checkpoint or beside it, read and checked.

Rules:
1. MiMo: ``model.mtp_layers.{i}.`` with ``token_layernorm``, ``hidden_layernorm``, ``input_proj``, a Qwen2 decoder layer
   and ``final_layernorm``. The input is (hidden, token), in this order; the token's half is zero in the first row.
2. DeepSeek-V3 and GLM-4.5 (NextN): ``enorm``, ``hnorm``, ``eh_proj``, a decoder layer of the target's own kind,
   ``shared_head.norm``. The input is (token, hidden). In the target's checkpoint these are the layers after the last,
   ``model.layers.{num_hidden_layers + i}.``; in a folder of their own they may be ``model.layers.{i}.``.
3. A folder of its own need not hold everything: embedding and lm_head are its own (NextN: ``embed_tokens`` and
   ``shared_head.head`` of the first layer) or else the target's, and so are MiMo layers that it lacks (MiMo publishes
   the first layer with the model and further ones apart).
4. ``num_nextn_predict_layers`` of ``config.json`` says how many layers there are.
5. Whatever is missing, of a wrong shape, quantized or made for another target is a ModelError that names it.

It knows nothing about sessions or forwards. Tensors of a decoder layer itself are checked by whoever builds the layer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slipstream.base.errors import ModelError
from slipstream.engine.model import DTYPES, read_json
from slipstream.engine.weights import Tensors, load_tensors, take, tensor_names

MAX_LAYERS = 16
EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
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
    own_kind: bool  # the layer is of the target's own kind, built by transformers; False: of decoder.py


MIMO = Layout("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", True, True, False)
NEXTN = Layout("enorm", "hnorm", "eh_proj", "shared_head.norm", False, False, True)
LAYOUTS = {"mimo": MIMO, "deepseek_v3": NEXTN, "glm4_moe": NEXTN}


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
    tensors: Tensors  # by their full names: the decoder layers'
    embedding: torch.Tensor  # [V, H]
    lm_head: torch.Tensor  # [V, H]


def read_mtp(folder: str | Path, target_folder: str | Path) -> MtpHead:
    """Read and check the head in ``folder`` (the target's own folder, or another) for the target in
    ``target_folder``. Raises ModelError."""
    folder, target_folder = Path(folder), Path(target_folder)
    raw, target = _Fields.of(folder), _Fields.of(target_folder)
    layout = LAYOUTS.get(str(raw.content.get("model_type")))
    if layout is None:
        raise ModelError(f"{raw.where}: model_type: {raw.content.get('model_type')!r} has no multi-token prediction "
                         f"head that is known here ({', '.join(LAYOUTS)} have)")
    if raw.content.get("quantization_config") is not None:
        raise ModelError(f"{raw.where}: quantization_config: quantized heads are not read; convert the checkpoint to "
                         "bfloat16")
    for name in ("model_type", "hidden_size", "vocab_size"):
        if raw.content.get(name) != target.content.get(name):
            raise ModelError(f"{raw.where}: {name}: the head was made for {raw.content.get(name)!r}, the target has "
                             f"{target.content.get(name)!r}")
    vocab, hidden = target.size("vocab_size"), target.size("hidden_size")
    names = tensor_names(folder)
    prefixes = _prefixes(raw, names, folder.resolve() == target_folder.resolve())
    tied = target.content.get("tie_word_embeddings") is True
    # What the first layer repeats of the target is not read twice; a tied embedding serves as lm_head too.
    shared = [name for own, name in ((OWN_EMBEDDING, EMBEDDING), (OWN_LM_HEAD, LM_HEAD))
              if tied or f"{prefixes[0]}{own}" not in names]
    tensors = _tensors(folder, names, target_folder, prefixes, shared)
    embedding = _shared(tensors, (f"{prefixes[0]}{OWN_EMBEDDING}", EMBEDDING), vocab, hidden)
    lm_head = _shared(tensors, (f"{prefixes[0]}{OWN_LM_HEAD}", EMBEDDING if tied else LM_HEAD), vocab, hidden)
    return MtpHead(folder, layout, vocab, hidden, target.size("num_hidden_layers"), raw.epsilon(),
                   tuple(_layer(tensors, layout, prefix, hidden) for prefix in prefixes), tensors, embedding, lm_head)


@dataclass(frozen=True, slots=True)
class _Fields:
    where: str
    content: Mapping[str, Any]

    @staticmethod
    def of(folder: Path) -> _Fields:
        return _Fields(str(folder / "config.json"), read_json(folder / "config.json"))

    def size(self, name: str, high: int = 1 << 24) -> int:
        value = self.content.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= high:
            raise ModelError(f"{self.where}: {name}: expected a number from 1 to {high}, found {value!r}")
        return value

    def epsilon(self) -> float:
        value = self.content.get("rms_norm_eps", 1e-6)
        if not isinstance(value, float) or not 0 < value < 1:
            raise ModelError(f"{self.where}: rms_norm_eps: expected a small positive number, found {value!r}")
        return value


def _prefixes(raw: _Fields, names: set[str], in_target: bool) -> list[str]:
    """What the tensors of each layer begin with."""
    count = raw.size("num_nextn_predict_layers", MAX_LAYERS)
    if raw.content["model_type"] == "mimo":
        return [f"model.mtp_layers.{i}." for i in range(count)]
    first = raw.size("num_hidden_layers")
    if not in_target and not any(name.startswith(f"model.layers.{first}.") for name in names):
        first = 0
    return [f"model.layers.{first + i}." for i in range(count)]


def _tensors(folder: Path, names: Iterable[str], target_folder: Path, prefixes: list[str],
             shared: Collection[str]) -> dict[str, torch.Tensor]:
    """What the head's folder holds of it and of ``shared``, and what it lacks from the target's. Nothing else is read:
    a target may be larger than this machine."""
    own = {name for name in names if name.startswith(tuple(prefixes)) or name in shared}
    held = load_tensors(folder, own)
    for name, tensor in held.items():
        if tensor.dtype not in DTYPES.values():
            raise ModelError(f"{folder}: tensor {name} holds {tensor.dtype}: quantized heads are not read; convert the "
                             "checkpoint to bfloat16")
    # Only MiMo's names say that a layer is a head's: a layer of the target's body never stands in for one.
    lendable = tuple(prefix for prefix in prefixes if prefix.startswith("model.mtp_layers."))
    lent = {name for name in tensor_names(target_folder) - own
            if name in shared or name.startswith(lendable)}
    return load_tensors(target_folder, lent) | held if lent else held


def _shared(tensors: Tensors, names: tuple[str, str], vocab: int, hidden: int) -> torch.Tensor:
    own, targets = names
    return take(tensors, own if own in tensors else targets, vocab, hidden)


def _layer(tensors: Tensors, layout: Layout, prefix: str, hidden: int) -> MtpLayer:
    def norm(name: str) -> torch.Tensor:
        return take(tensors, f"{prefix}{name}.weight", hidden)

    return MtpLayer(prefix.removesuffix("."), norm(layout.token_norm), norm(layout.hidden_norm),
                    take(tensors, f"{prefix}{layout.projection}.weight", hidden, 2 * hidden), norm(layout.norm))
