"""EAGLE heads as they are published, with random weights: folders to the letter of each format."""

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
    for layer in range(1, config["num_hidden_layers"]):
        tensors |= further_layer(config, f"layers.{layer}", generator)
    ids = torch.randperm(config["vocab_size"], generator=generator)[:config["draft_vocab_size"]].sort().values
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool).index_fill_(0, ids, True)
    return tensors


def further_layer(config: dict[str, Any], name: str, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """A layer behind the first: a plain one."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    keys = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {"self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (keys, hidden),
              "self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, hidden),
              "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    tensors = {f"{name}.{part}.weight": torch.randn(shape, generator=generator) * 2 / shape[-1]**0.5
               for part, shape in shapes.items()}
    return tensors | {f"{name}.{norm}.weight": 1 + 0.2 * torch.randn(hidden, generator=generator)
                      for norm in ("input_layernorm", "post_attention_layernorm")}


def write_eagle_folder(folder: Path, config: dict[str, Any] | None = None,
                       tensors: Mapping[str, torch.Tensor] | None = None, seed: int = 0) -> Path:
    """Write a head's folder and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = eagle_config() if config is None else config
    tensors = eagle_tensors(config, seed=seed) if tensors is None else tensors
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "model.safetensors")
    return folder


def speculators_config(**changes: Any) -> dict[str, Any]:
    """``config.json`` of an EAGLE-3 head as vLLM's speculators library writes it, for a tiny target of 8 layers."""
    config: dict[str, Any] = {
        "architectures": ["Eagle3Speculator"], "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "draft_vocab_size": DRAFT_VOCAB, "dtype": "float32", "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "embed_requires_grad": False, "has_no_defaults_at_init": False, "model_type": "speculator_model",
        "norm_before_fc": False, "norm_before_residual": True, "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy",
            "proposal_methods": [{"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 5,
                                  "verifier_accept_k": 1}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "somebody/tiny"}},
        "speculators_model_type": "eagle3", "speculators_version": "0.3.0", "target_hidden_size": None,
        "tie_word_embeddings": False, "transformer_layer_config": {
            "attention_bias": False, "attention_dropout": 0.0, "head_dim": 12, "hidden_act": "silu", "hidden_size": 48,
            "initializer_range": 0.02, "intermediate_size": 64, "max_position_embeddings": 2048, "mlp_bias": False,
            "model_type": "llama", "num_attention_heads": 4, "num_hidden_layers": 1, "num_key_value_heads": 2,
            "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0, "use_cache": True,
            "vocab_size": VOCAB},
    }
    return config | changes


def speculators_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights of it by their published names."""
    layer = config["transformer_layer_config"]
    flat = eagle_config(**layer, draft_vocab_size=config["draft_vocab_size"], target_hidden_size=48)
    tensors = {name.replace("midlayer", "layers.0"): tensor for name, tensor in eagle_tensors(flat, seed=seed).items()}
    if config["norm_before_fc"]:
        generator = torch.Generator().manual_seed(seed + 1)
        tensors["input_norm.weight"] = 1 + 0.2 * torch.randn(3 * 48, generator=generator)
    if config.get("fc_norm"):
        generator = torch.Generator().manual_seed(seed + 2)
        tensors |= {f"fc_norm.{i}.weight": 1 + 0.2 * torch.randn(48, generator=generator) for i in range(3)}
    return tensors


def eagle2_config(**changes: Any) -> dict[str, Any]:
    """``config.json`` of an EAGLE-1 or EAGLE-2 head of the authors, for the tiny target."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"], "bias": False, "bos_token_id": 256, "eos_token_id": 257,
        "hidden_act": "silu", "hidden_size": 48, "initializer_range": 0.02, "intermediate_size": 64,
        "max_position_embeddings": 2048, "model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_hidden_layers": 1, "pad_token_id": 0, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
        "tie_word_embeddings": False, "torch_dtype": "float16", "use_cache": True, "vocab_size": VOCAB,
    }
    return config | changes


def eagle2_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights of it by their published names, the copy of the target's embedding included (here it is another
    one, so that nobody can read it unseen)."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    keys = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {
        "embed_tokens.weight": (config["vocab_size"], hidden), "fc.weight": (hidden, 2 * hidden),
        "layers.0.self_attn.q_proj.weight": (hidden, hidden), "layers.0.self_attn.k_proj.weight": (keys, hidden),
        "layers.0.self_attn.v_proj.weight": (keys, hidden), "layers.0.self_attn.o_proj.weight": (hidden, hidden),
        "layers.0.mlp.gate_proj.weight": (inner, hidden), "layers.0.mlp.up_proj.weight": (inner, hidden),
        "layers.0.mlp.down_proj.weight": (hidden, inner),
    }
    tensors = {name: torch.randn(shape, generator=generator) * 2 / shape[-1]**0.5 for name, shape in shapes.items()}
    tensors["layers.0.post_attention_layernorm.weight"] = 1 + 0.2 * torch.randn(hidden, generator=generator)
    if config.get("bias"):
        tensors["fc.bias"] = 0.5 * torch.randn(hidden, generator=generator)
    if config.get("qkv_bias"):
        for name, width in (("q", hidden), ("k", keys), ("v", keys)):
            tensors[f"layers.0.self_attn.{name}_proj.bias"] = 0.5 * torch.randn(width, generator=generator)
    return tensors


def write_eagle2_folder(folder: Path, config: dict[str, Any] | None = None,
                        tensors: Mapping[str, torch.Tensor] | None = None, seed: int = 0) -> Path:
    """Write a head's folder and return it."""
    config = eagle2_config() if config is None else config
    return write_eagle_folder(folder, config, eagle2_tensors(config, seed) if tensors is None else tensors)


def as_speculators(config: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, Any],
                                                                                          dict[str, torch.Tensor]]:
    """The same EAGLE-1 head as speculators' converter writes it: other names, no embedding."""
    layer = {name: value for name, value in config.items() if name not in ("architectures", "bias")}
    converted = {
        "architectures": ["EagleSpeculator", "LlamaDecoderLayer"], "fusion_bias": config["bias"], "layernorms": False,
        "model_type": "speculator_model", "speculators_config": {"algorithm": "eagle"},
        "speculators_model_type": "eagle", "transformer_layer_architecture": "LlamaDecoderLayer",
        "transformer_layer_config": layer,
    }
    renamed = {name.replace("layers.0.", "transformer.").replace("fc.", "fusion_fc."): tensor
               for name, tensor in tensors.items() if name != "embed_tokens.weight"}
    return converted, renamed
