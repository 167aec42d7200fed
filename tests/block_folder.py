"""DFlash and DSpark heads as they are published, with random weights: folders to the letter of each layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.eagle_folder import write_eagle_folder
from tests.tiny import VOCAB

DRAFT_VOCAB, RANK, BLOCK, MASK = 96, 8, 4, 259
LAYER = {"attention_bias": False, "attention_dropout": 0.0, "head_dim": 12, "hidden_act": "silu", "hidden_size": 48,
         "initializer_range": 0.02, "intermediate_size": 64, "layer_types": ["full_attention", "full_attention"],
         "max_position_embeddings": 2048, "max_window_layers": 2, "model_type": "qwen3", "num_attention_heads": 4,
         "num_hidden_layers": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "sliding_window": None,
         "tie_word_embeddings": False, "use_cache": True, "use_sliding_window": False, "vocab_size": VOCAB}
ROPE = {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}
IDS = [0, 1, 3, 4, 6]  # outputs of layers of a tiny target with eight


def zlab_config(**changes: Any) -> dict[str, Any]:
    """``config.json`` of a DFlash head as z-lab writes it: ids and mask nested, the target's embedding and head."""
    return {"architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
            "block_size": BLOCK, "dflash_config": {"mask_token_id": MASK, "target_layer_ids": IDS}, "dtype": "bfloat16",
            "num_target_layers": 8, "rope_scaling": None, "rope_theta": 10000.0, **LAYER, **changes}


def deepspec_config(**changes: Any) -> dict[str, Any]:
    """``config.json`` of a DSpark head as DeepSpec writes it: all at the top."""
    return {"architectures": ["Qwen3DSparkModel"], "block_size": BLOCK, "confidence_head_with_markov": True,
            "dtype": "bfloat16", "enable_confidence_head": True, "markov_head_type": "vanilla", "markov_rank": RANK,
            "mask_token_id": MASK, "num_anchors": 512, "num_target_layers": 8, "target_layer_ids": IDS, **LAYER, **ROPE,
            **changes}


def speculators_block_config(kind: str = "dspark", **changes: Any) -> dict[str, Any]:
    """``config.json`` of either as vLLM's speculators library writes it."""
    config = {
        "architectures": [{"dspark": "DSparkDraftModel", "dflash": "DFlashDraftModel"}[kind]],
        "aux_hidden_state_layer_ids": [i + 1 for i in IDS], "block_size": BLOCK, "draft_vocab_size": DRAFT_VOCAB,
        "dtype": "bfloat16", "mask_token_id": MASK, "model_type": "speculator_model",
        "sample_from_anchor": kind == "dspark", "sliding_window_non_causal": False,
        "speculators_config": {
            "algorithm": kind, "default_proposal_method": "greedy",
            "proposal_methods": [{"accept_tolerance": 0.0, "proposal_type": "greedy", "verifier_accept_k": 1,
                                  "speculative_tokens": BLOCK - (kind == "dflash")}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "somebody/tiny"}},
        "speculators_model_type": kind, "speculators_version": "0.5.0", "target_hidden_size": None,
        "tie_word_embeddings": False, "transformer_layer_config": LAYER | ROPE,
    }
    if kind == "dspark":
        config |= {"confidence_head_with_markov": True, "enable_confidence_head": True, "markov_head_type": "vanilla",
                   "markov_rank": RANK}
    return config | changes


def block_tensors(config: Mapping[str, Any], seed: int = 0, loud: float = 2.0) -> dict[str, torch.Tensor]:
    """Random weights by their published names. loud: of the markov head, so that a parent counts."""
    generator = torch.Generator().manual_seed(seed)
    layer = config.get("transformer_layer_config", config)
    ids = config.get("aux_hidden_state_layer_ids") or config.get("target_layer_ids") or \
        config["dflash_config"]["target_layer_ids"]
    hidden, inner, size, vocab = (layer[name] for name in ("hidden_size", "intermediate_size", "head_dim",
                                                           "vocab_size"))
    queries, keys = layer["num_attention_heads"] * size, layer["num_key_value_heads"] * size
    draft_vocab, rank = config.get("draft_vocab_size", vocab), config.get("markov_rank", 0)
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, len(ids) * (config.get("target_hidden_size") or 48))}
    for i in range(layer["num_hidden_layers"]):
        attention, mlp = f"layers.{i}.self_attn", f"layers.{i}.mlp"
        shapes |= {f"{attention}.q_proj.weight": (queries, hidden), f"{attention}.k_proj.weight": (keys, hidden),
                   f"{attention}.v_proj.weight": (keys, hidden), f"{attention}.o_proj.weight": (hidden, queries),
                   f"{mlp}.gate_proj.weight": (inner, hidden), f"{mlp}.up_proj.weight": (inner, hidden),
                   f"{mlp}.down_proj.weight": (hidden, inner)}
    if rank:
        shapes |= {"markov_head.markov_w1.weight": (vocab, rank), "markov_head.markov_w2.weight": (draft_vocab, rank)}
    if rank and config["markov_head_type"] == "gated":
        shapes |= {"markov_head.gate_proj.weight": (rank, hidden + rank), "markov_head.gate_proj.bias": (rank,)}
    if rank and config["markov_head_type"] == "rnn":
        shapes |= {"markov_head.joint_proj.weight": (3 * rank, 2 * rank + hidden),
                   "markov_head.joint_proj.bias": (3 * rank,)}
    if config.get("enable_confidence_head"):
        shapes |= {"confidence_head.proj.weight": (1, hidden + rank * config["confidence_head_with_markov"]),
                   "confidence_head.proj.bias": (1,)}
    if draft_vocab != vocab or "Qwen3DSparkModel" in config["architectures"]:
        shapes["lm_head.weight"] = (draft_vocab, hidden)
    if "Qwen3DSparkModel" in config["architectures"]:
        shapes["embed_tokens.weight"] = (vocab, hidden)
    tensors = {name: torch.randn(shape, generator=generator) * (2 / shape[-1]**0.5 if len(shape) > 1 else 0.3)
               for name, shape in shapes.items()}
    if rank:
        tensors["markov_head.markov_w2.weight"] *= loud * rank**0.5
    norms = {"hidden_norm": hidden, "norm": hidden}
    for i in range(layer["num_hidden_layers"]):
        norms |= {f"layers.{i}.input_layernorm": hidden, f"layers.{i}.post_attention_layernorm": hidden,
                  f"layers.{i}.self_attn.q_norm": size, f"layers.{i}.self_attn.k_norm": size}
    for name, width in norms.items():
        tensors[f"{name}.weight"] = 1 + 0.2 * torch.randn(width, generator=generator)
    if draft_vocab != vocab:
        ids = torch.randperm(vocab, generator=generator)[:draft_vocab].sort().values
        tensors["d2t"] = ids - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
    return tensors


def write_block_folder(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor] | None = None,
                       seed: int = 0) -> Path:
    """Write a head's folder and return it."""
    return write_eagle_folder(folder, dict(config), block_tensors(config, seed) if tensors is None else tensors)
