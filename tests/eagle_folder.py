"""An EAGLE-3 head as it is published, with random weights: a folder to the letter of the format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.tiny import VOCAB

HIDDEN, DRAFT_VOCAB = 32, 96


def eagle_config(**changes: Any) -> dict[str, Any]:
    """The content of a head's ``config.json`` for the tiny target; ``changes`` replace fields."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": HIDDEN, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_hidden_layers": 1, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": False, "vocab_size": VOCAB, "draft_vocab_size": DRAFT_VOCAB,
        "target_hidden_size": 48, "bos_token_id": 256, "eos_token_id": 257, "dtype": "float32",
    }
    return config | changes


def eagle_tensors(config: dict[str, Any], num_taps: int = 3, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights by their published names."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    keys = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {
        "embed_tokens.weight": (config["vocab_size"], hidden),
        "fc.weight": (hidden, num_taps * config["target_hidden_size"]),
        "midlayer.self_attn.q_proj.weight": (hidden, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, hidden),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "lm_head.weight": (config["draft_vocab_size"], hidden),
    }
    tensors = {name: torch.randn(shape, generator=generator) * 2 / shape[-1]**0.5 for name, shape in shapes.items()}
    for name in ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm"):
        tensors[f"{name}.weight"] = 1 + 0.2 * torch.randn(hidden, generator=generator)
    ids = torch.randperm(config["vocab_size"], generator=generator)[:config["draft_vocab_size"]].sort().values
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool).index_fill_(0, ids, True)
    return tensors


def write_eagle_folder(folder: Path, config: dict[str, Any] | None = None,
                       tensors: Mapping[str, torch.Tensor] | None = None, seed: int = 0) -> Path:
    """Write a head's folder and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = eagle_config() if config is None else config
    tensors = eagle_tensors(config, seed=seed) if tensors is None else tensors
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "model.safetensors")
    return folder
