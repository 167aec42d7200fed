"""An EAGLE-3 head as it is published: ``config.json`` and safetensors, read and checked against its target.

Rules:
1. Tensors: ``fc.weight`` (``fc.bias``), ``midlayer.*`` (or ``layers.0.*``), ``norm.weight``, ``lm_head.weight``,
   ``d2t``, ``t2d``, ``embed_tokens.weight`` or else the target's; all of them with or without a leading ``model.``.
2. ``d2t`` holds differences: draft id i means target id ``i + d2t[i]``. ``t2d`` is a mask and only checked.
3. Target states: without ``eagle_aux_hidden_state_layer_ids`` those that *enter* layers 2, n // 2 and n - 3 of a target
   with n layers. Explicit ids name layers by their *output*, so id i is what enters layer i + 1.
4. What the head's config leaves out of its rotary positions is the target's; what differs from the target's is used and
   warned of, because converted configs are known to carry a wrong ``rope_theta``.
5. Whatever is missing, of a wrong shape or of a foreign vocabulary is a ModelError that names it, expected and found.

It knows nothing about sessions or forwards. Format: arXiv 2503.01840 and its reference repository's checkpoints
(architecture ``LlamaForCausalLMEagle3``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from slipstream.engine.layers import take
from slipstream.engine.model import ModelConfig, parse_config, read_json
from slipstream.engine.weights import load_tensors
from slipstream.errors import ModelError
from slipstream.log import logger

ARCHITECTURE = "LlamaForCausalLMEagle3"
LAYER = "midlayer"


@dataclass(frozen=True, slots=True)
class EagleHead:
    """A checked head, on the CPU and in its stored dtypes."""

    config: ModelConfig  # the layer's measures; vocab_size is the target's
    target_hidden_size: int
    draft_vocab_size: int
    taps: tuple[int, ...]  # as FeatureSpec.layers
    tensors: Mapping[str, torch.Tensor]  # names of rule 1, without ``model.``, the layer as ``midlayer``
    vocabulary: torch.Tensor  # int64 [draft_vocab_size] target ids


def read_head(folder: str | Path, target_folder: str | Path) -> EagleHead:
    """Read and check the head in ``folder`` for the target in ``target_folder``. Raises ModelError."""
    where = str(Path(folder) / "config.json")
    raw = read_json(Path(folder) / "config.json")
    target = ModelConfig.from_folder(target_folder)
    if raw.get("architectures") != [ARCHITECTURE]:
        raise ModelError(f"{where}: architectures: expected [{ARCHITECTURE!r}], found {raw.get('architectures')!r}")
    config = _config(raw, target, where)
    hidden = _size(raw, "target_hidden_size", target.hidden_size, where)
    if hidden != target.hidden_size:
        raise ModelError(f"{where}: target_hidden_size: the head was made for {hidden}, the target has "
                         f"{target.hidden_size}")
    draft_vocab = _size(raw, "draft_vocab_size", config.vocab_size, where)
    taps = _taps(raw, target.num_layers, where)
    tensors = _renamed(load_tensors(folder))
    if "embed_tokens.weight" not in tensors:
        tensors["embed_tokens.weight"] = _target_embedding(target_folder, config)
    _check_shapes(tensors, config, draft_vocab, len(taps) * hidden)
    return EagleHead(config, hidden, draft_vocab, taps, tensors, _vocabulary(tensors, draft_vocab, config.vocab_size))


def _config(raw: dict[str, Any], target: ModelConfig, where: str) -> ModelConfig:
    own_rope = any(raw.get(name) is not None for name in ("rope_theta", "rope_parameters", "rope_scaling"))
    config = parse_config({"model_type": "llama", **raw}, where)
    if config.num_layers != 1:
        raise ModelError(f"{where}: num_hidden_layers: expected 1, found {config.num_layers}")
    if config.vocab_size != target.vocab_size:
        raise ModelError(f"{where}: vocab_size: the head was made for {config.vocab_size} tokens, the target has "
                         f"{target.vocab_size}")
    rope = (target.rope_theta, target.rope_scaling)
    if not own_rope:
        return replace(config, rope_theta=target.rope_theta, rope_scaling=target.rope_scaling)
    if (config.rope_theta, config.rope_scaling) != rope:
        logger("draft").warning("the head's rotary positions differ from the target's; if it accepts little, correct "
                                "rope_theta in its config.json", file=where, head=config.rope_theta,
                                target=target.rope_theta)
    return config


def _size(raw: dict[str, Any], name: str, default: int, where: str) -> int:
    value = raw.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1 << 24:
        raise ModelError(f"{where}: {name}: expected a positive number, found {value!r}")
    return value


def _taps(raw: dict[str, Any], num_layers: int, where: str) -> tuple[int, ...]:
    section = raw.get("eagle_config") or {}
    if not isinstance(section, dict) or section.get("use_aux_hidden_state", True) is not True:
        raise ModelError(f"{where}: eagle_config: heads that read the last state alone are not EAGLE-3 heads")
    ids = section.get("eagle_aux_hidden_state_layer_ids", raw.get("eagle_aux_hidden_state_layer_ids"))
    if ids is None:
        taps = (2, num_layers // 2, num_layers - 3)
    elif isinstance(ids, list) and ids and all(isinstance(i, int) for i in ids):
        taps = tuple(i + 1 for i in ids)
    else:
        raise ModelError(f"{where}: eagle_aux_hidden_state_layer_ids: expected layer numbers, found {ids!r}")
    if any(not 0 <= tap <= num_layers for tap in taps):
        raise ModelError(f"{where}: eagle_aux_hidden_state_layer_ids: {ids or 'the default'} does not fit a target "
                         f"with {num_layers} layers")
    return taps


def _renamed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    renamed = {}
    for name, tensor in tensors.items():
        plain = name.removeprefix("model.")
        renamed[f"{LAYER}{plain.removeprefix('layers.0')}" if plain.startswith("layers.0.") else plain] = tensor
    return renamed


def _target_embedding(folder: str | Path, config: ModelConfig) -> torch.Tensor:
    try:
        return take(load_tensors(folder), "model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    except ModelError as error:
        raise ModelError(f"the head has no embed_tokens.weight, so it needs the target's embedding: {error}") from error


def _check_shapes(tensors: Mapping[str, torch.Tensor], config: ModelConfig, draft_vocab: int, width: int) -> None:
    hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_heads * size, config.num_kv_heads * size
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (config.vocab_size, hidden),
        "fc.weight": (hidden, width),
        "norm.weight": (hidden,),
        "lm_head.weight": (draft_vocab, hidden),
        f"{LAYER}.hidden_norm.weight": (hidden,),
        f"{LAYER}.input_layernorm.weight": (hidden,),
        f"{LAYER}.post_attention_layernorm.weight": (hidden,),
        f"{LAYER}.self_attn.q_proj.weight": (queries, 2 * hidden),
        f"{LAYER}.self_attn.k_proj.weight": (keys, 2 * hidden),
        f"{LAYER}.self_attn.v_proj.weight": (keys, 2 * hidden),
        f"{LAYER}.self_attn.o_proj.weight": (hidden, queries),
        f"{LAYER}.mlp.gate_proj.weight": (inner, hidden),
        f"{LAYER}.mlp.up_proj.weight": (inner, hidden),
        f"{LAYER}.mlp.down_proj.weight": (hidden, inner),
    }
    if "fc.bias" in tensors:
        shapes["fc.bias"] = (hidden,)
    if draft_vocab != config.vocab_size or "d2t" in tensors:
        shapes["d2t"] = (draft_vocab,)
    if "t2d" in tensors:
        shapes["t2d"] = (config.vocab_size,)
    for name, shape in shapes.items():
        take(tensors, name, *shape)


def _vocabulary(tensors: Mapping[str, torch.Tensor], draft_vocab: int, vocab: int) -> torch.Tensor:
    own = torch.arange(draft_vocab)
    if "d2t" not in tensors:
        return own
    difference = tensors["d2t"]
    if difference.is_floating_point() or difference.dtype is torch.bool:
        raise ModelError(f"tensor d2t: expected integers, found {difference.dtype}")
    ids = own + difference.long()
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab:
        raise ModelError(f"tensor d2t: it leads to token ids from {low} to {high}, expected 0 to {vocab - 1}: "
                         "the head is of another vocabulary")
    distinct = len(set(ids.tolist()))
    if distinct != draft_vocab:
        raise ModelError(f"tensor d2t: {draft_vocab} draft tokens lead to {distinct} distinct token ids; "
                         "it must hold differences (target id - draft id)")
    if "t2d" in tensors:
        mask = tensors["t2d"].bool()
        if int(mask.sum()) != draft_vocab or not bool(mask[ids].all()):
            raise ModelError("tensor t2d: it does not mark exactly the tokens that d2t leads to")
    return ids
