"""A trained head as a folder in the published layout, which servers of EAGLE-3 heads read; a head of several layers in
the layout that vLLM reads.

Rules:
1. ``midlayer.*`` (with several layers ``layers.i.*``), ``fc``, ``norm``, ``lm_head`` in the export's dtype; ``d2t`` as
   differences (target id - draft id), ``t2d`` as a mask. The embedding is the target's and is not written. DSpark
   heads: see ``block_head``.
2. If the tapped layers are not the published default, the ids in config.json name layers by their output, so they are
   one less than the taps (see ``slipstream.drafting.heads.checkpoint``, rule 10).
3. The files are written beside their place and renamed one by one, ``config.json`` last, so a new folder loads only
   when it is complete.

It knows nothing about training. Format: arXiv 2503.01840, architecture ``LlamaForCausalLMEagle3``.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from slipstream.drafting.heads.checkpoint import ARCHITECTURE, LAYER, default_taps
from slipstream.engine.model import ModelConfig, RopeScaling
from slipstream.models.folder import MADE_FOR
from slipstream.train.block_head import block_config
from slipstream.train.folders import new_folder
from slipstream.train.head import Head

WEIGHTS = "model.safetensors"
CONFIG = "config.json"


def export(head: Head, folder: Path, dtype: torch.dtype, weights: str) -> None:
    """Write the head into ``folder``; files of the same names are replaced. weights: the ``weights_hash`` of its
    target."""
    with new_folder(folder.with_name(f".{folder.name}.partial")) as partial:
        save_file(published_tensors(head, dtype), partial / WEIGHTS, metadata={"format": "pt"})
        config = published_config(head, dtype) | {MADE_FOR: weights}
        (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        shutil.copymode(partial / CONFIG, partial / WEIGHTS)  # safetensors makes files that only their owner can read
        folder.mkdir(parents=True, exist_ok=True)
        for name in (WEIGHTS, CONFIG):
            (partial / name).replace(folder / name)
        partial.rmdir()


def published_tensors(head: Head, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The head's tensors by their published names, on the CPU in ``dtype``; ``d2t`` int64 [V'], ``t2d`` bool [V]."""
    vocabulary = head.vocabulary.cpu()
    published = "midlayer" if head.mask_token is None and head.config.num_layers == 1 else LAYER
    tensors = {name.replace(f"{LAYER}.", f"{published}."): tensor.detach().to("cpu", dtype).contiguous()
               for name, tensor in head.tensors.items()}
    tensors["d2t"] = vocabulary - torch.arange(len(vocabulary))
    tensors["t2d"] = torch.zeros(head.config.vocab_size, dtype=torch.bool).index_fill_(0, vocabulary, True)
    return tensors


def published_config(head: Head, dtype: torch.dtype) -> dict[str, Any]:
    """The content of ``config.json``."""
    config = head.config
    if head.mask_token is not None:
        return block_config(head, _rope(config), dtype)
    return {
        "architectures": [ARCHITECTURE], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim,
        "max_position_embeddings": config.max_context, "rms_norm_eps": config.norm_eps,
        **_rope(config), "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
        "vocab_size": config.vocab_size, "draft_vocab_size": len(head.vocabulary),
        "target_hidden_size": config.hidden_size, "num_aux_hidden_states": len(head.taps),
        "eos_token_id": list(config.eos_token_ids), "torch_dtype": str(dtype).removeprefix("torch."),
        "eagle_config": {"use_aux_hidden_state": True,
                         "eagle_aux_hidden_state_layer_ids": layer_ids(head.taps, head.target_layers)},
    }


def layer_ids(taps: tuple[int, ...], num_layers: int) -> list[int]:
    """The published ids of layers whose inputs are ``taps``."""
    return list(taps) if taps == default_taps(num_layers) else [tap - 1 for tap in taps]


def _rope(config: ModelConfig) -> dict[str, Any]:
    scaling: RopeScaling | None = config.rope_scaling
    if scaling is None:
        return {"rope_theta": config.rope_theta, "rope_scaling": None}
    fields: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        fields |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor,
                    "original_max_position_embeddings": scaling.original_context}
    if scaling.kind == "yarn":
        fields |= {"original_max_position_embeddings": scaling.original_context, "beta_fast": scaling.beta_fast,
                    "beta_slow": scaling.beta_slow, "truncate": scaling.truncate,
                    "attention_factor": scaling.attention_factor}
    return {"rope_theta": config.rope_theta, "rope_scaling": fields}
