"""A head's folder as somebody published it, in one form: flat fields, plain tensor names.

Rules:
1. Two layouts: the authors' (fields at the top of ``config.json``, as SGLang and SpecForge write it too) and vLLM's
   "speculators" (``speculators_model_type``, the layer's fields in ``transformer_layer_config``).
2. Plain names: no leading ``model.``, the layer as ``layers.0``. The authors call EAGLE-3's layer ``midlayer``;
   speculators call EAGLE-1's ``transformer`` and its ``fc`` ``fusion_fc``.
3. Rotary positions are the head's own, also where they differ from the target's: it was trained with them. A config
   without ``rope_theta`` means 10000, as it does where such heads are trained and served. A difference is warned of,
   because converted configs are known to carry a wrong value.
4. Only safetensors are read. A folder of pickles is refused with the command that converts it.
5. A tensor that nothing would read (a norm, a bias that the config does not speak of) is refused by name: without it
   the head would run, and draft badly.

It knows nothing about what a head computes, or which tensors it needs beyond its layer's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from slipstream.base.errors import ModelError
from slipstream.engine.model import ModelConfig, parse_config, read_json
from slipstream.engine.weights import load_tensors, take
from slipstream.observe.log import logger

LAYER = "layers.0"
PREFIXES = (("model.", ""), ("midlayer.", f"{LAYER}."), ("transformer.", f"{LAYER}."), ("fusion_fc.", "fc."))
UNREAD = ("rotary_emb.inv_freq", "embed_tokens.weight", "lm_head.weight", "verifier_norm.weight",
          "verifier_lm_head.weight", "t2d")  # what published files hold beside what a head computes with
LIMIT = 1 << 24  # of any size in a config
CONVERSION = "read it there and write its tensors with safetensors.torch.save_file(tensors, 'model.safetensors')"


@dataclass(frozen=True, slots=True)
class Published:
    """The content of a head's ``config.json``: the layer's fields and the head's own side by side."""

    where: str  # names the file in errors
    fields: Mapping[str, Any]
    speculators: str  # the ``speculators_model_type``; empty: the authors' layout

    def size(self, name: str, default: int) -> int:
        """A positive number; ``default`` where it is missing or null. Raises ModelError."""
        value = self.fields.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LIMIT:
            raise ModelError(f"{self.where}: {name}: expected a positive number, found {value!r}")
        return value

    def flag(self, name: str, default: bool | None) -> bool:
        """True or false; a default of None: it must be there. Raises ModelError."""
        value = self.fields.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise ModelError(f"{self.where}: {name}: expected true or false, found {value!r}")
        return value

    def must_fit(self, name: str, found: int, expected: int, what: str = "") -> None:
        """Raises ModelError unless both are equal."""
        if found != expected:
            raise ModelError(f"{self.where}: {name}: the head was made for {found}{what}, the target has {expected}")


def read_published(folder: str | Path) -> Published:
    """Read ``config.json`` in either layout. Raises ModelError."""
    path = Path(folder) / "config.json"
    raw = read_json(path)
    kind = raw.get("speculators_model_type")
    if kind is None:
        return Published(str(path), raw, "")
    layer = raw.get("transformer_layer_config")
    if not isinstance(kind, str) or not isinstance(layer, dict):
        raise ModelError(f"{path}: transformer_layer_config: expected an object beside speculators_model_type, found "
                         f"{type(layer).__name__}")
    # Whether embeddings are tied is the layer's to say: on the whole it is transformers' default.
    head = {name: value for name, value in raw.items() if name != "tie_word_embeddings"}
    return Published(str(path), head | layer, kind)


def layer_config(published: Published, target: ModelConfig) -> ModelConfig:
    """The measures of the head's one layer, checked against the target's vocabulary. Raises ModelError."""
    raw, where = dict(published.fields), published.where
    config = parse_config({"model_type": "llama"} | raw, where)
    if config.num_layers != 1:
        raise ModelError(f"{where}: num_hidden_layers: expected 1, found {config.num_layers}")
    published.must_fit("vocab_size", config.vocab_size, target.vocab_size, " tokens")
    if "qkv_bias" in raw:  # heads for Qwen2: a bias on q, k and v, none on o
        config = replace(config, qkv_bias=published.flag("qkv_bias", None))
    if (config.rope_theta, config.rope_scaling) != (target.rope_theta, target.rope_scaling):
        logger("draft").warning("the head's rotary positions differ from the target's; if it accepts little, correct "
                                "rope_theta in its config.json", file=where, head=config.rope_theta,
                                target=target.rope_theta)
    return config


def read_tensors(folder: str | Path) -> dict[str, torch.Tensor]:
    """Every tensor of a head by its plain name. Raises ModelError."""
    folder = Path(folder)
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickles and not list(folder.glob("*.safetensors")):
        raise ModelError(f"{folder}: {pickles[0]} is a pickle, which can run code when it is read, so it never is; "
                         f"convert it once where you trust it: {CONVERSION}")
    return {_plain(name): tensor for name, tensor in load_tensors(folder).items()}


def layer_shapes(config: ModelConfig, in_features: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what every head's layer has; in_features: the width that its attention reads."""
    hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_heads * size, config.num_kv_heads * size
    biases = {"self_attn.q_proj": (config.qkv_bias, queries), "self_attn.k_proj": (config.qkv_bias, keys),
              "self_attn.v_proj": (config.qkv_bias, keys), "self_attn.o_proj": (config.o_bias, hidden),
              "mlp.gate_proj": (config.mlp_bias, inner), "mlp.up_proj": (config.mlp_bias, inner),
              "mlp.down_proj": (config.mlp_bias, hidden)}
    norms = ("q_norm", "k_norm") if config.qk_norm else ()
    return {f"{LAYER}.{name}.bias": (width,) for name, (there, width) in biases.items() if there} | {
        f"{LAYER}.self_attn.{name}.weight": (size,) for name in norms} | {
        f"{LAYER}.post_attention_layernorm.weight": (hidden,),
        f"{LAYER}.self_attn.q_proj.weight": (queries, in_features),
        f"{LAYER}.self_attn.k_proj.weight": (keys, in_features),
        f"{LAYER}.self_attn.v_proj.weight": (keys, in_features),
        f"{LAYER}.self_attn.o_proj.weight": (hidden, queries),
        f"{LAYER}.mlp.gate_proj.weight": (inner, hidden),
        f"{LAYER}.mlp.up_proj.weight": (inner, hidden),
        f"{LAYER}.mlp.down_proj.weight": (hidden, inner),
    }


def check_tensors(folder: str | Path, tensors: Mapping[str, torch.Tensor],
                  shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ModelError for a tensor of ``shapes`` that is missing or of another shape, and for one left over."""
    for name, shape in shapes.items():
        take(tensors, name, *shape)
    left = [name for name in sorted(tensors.keys() - shapes.keys()) if not name.endswith(UNREAD)]
    if left:
        raise ModelError(f"{folder}: tensor {left[0]} is no part of the head that config.json describes; a head of "
                         "another kind, or a field that is missing (attention_bias, qkv_bias, norm_before_fc)")


def fc_bias(published: Published, tensors: Mapping[str, torch.Tensor], hidden_size: int) -> dict[str, tuple[int, ...]]:
    """The shape of ``fc.bias`` where there is one. Raises ModelError when config and tensors disagree."""
    name = "fusion_bias" if published.speculators else "bias"
    found = "fc.bias" in tensors
    if published.flag(name, found) != found:
        raise ModelError(f"{published.where}: {name}: {not found}, but tensor fc.bias is "
                         f"{'there' if found else 'missing'}")
    return {"fc.bias": (hidden_size,)} if found else {}


def _plain(name: str) -> str:
    for prefix, plain in PREFIXES:
        if name.startswith(prefix):
            name = plain + name.removeprefix(prefix)
    return name
