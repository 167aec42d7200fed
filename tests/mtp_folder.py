"""Models with multi-token prediction heads as they are published, tiny and with random weights: folders to the letter
of each layout.

A head that is ``faithful`` has the weights of its target's one layer and looks at the token alone, so it predicts what
the target will choose: it makes draft tokens that are accepted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.tiny import EOS, PAD, VOCAB, write_tiny_model

HIDDEN = 48
Tensors = dict[str, torch.Tensor]
Shapes = dict[str, tuple[int, ...]]
KINDS = ("mimo", "glm4_moe", "deepseek_v3")
NEXTN_NORMS = ("enorm", "hnorm", "shared_head.norm")
NORMS = {"mimo": ("token_layernorm", "hidden_layernorm", "final_layernorm"), "glm4_moe": NEXTN_NORMS,
         "deepseek_v3": NEXTN_NORMS}


def mtp_config(kind: str, **changes: Any) -> dict[str, Any]:
    """The content of the ``config.json`` of a target with a head inside; ``changes`` replace fields."""
    config: dict[str, Any] = {
        "attention_bias": True, "attention_dropout": 0.0, "bos_token_id": 256, "eos_token_id": EOS,
        "hidden_act": "silu", "hidden_size": HIDDEN, "initializer_range": 0.02, "intermediate_size": 96,
        "max_position_embeddings": 2048, "model_type": kind, "num_attention_heads": 4, "num_hidden_layers": 2,
        "num_key_value_heads": 2, "num_nextn_predict_layers": 1, "pad_token_id": PAD, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 640000, "tie_word_embeddings": False, "torch_dtype": "float32",
        "use_cache": True, "vocab_size": VOCAB,
    }
    experts = {"first_k_dense_replace": 1, "moe_intermediate_size": 16, "n_routed_experts": 4, "n_shared_experts": 1,
               "norm_topk_prob": True, "num_experts_per_tok": 2, "routed_scaling_factor": 2.5}
    own: dict[str, dict[str, Any]] = {
        "mimo": {"architectures": ["MiMoForCausalLM"], "head_dim": 12, "max_window_layers": 2, "sliding_window": 2048,
                 "use_sliding_window": False},
        "glm4_moe": {"architectures": ["Glm4MoeForCausalLM"], "head_dim": 16, "n_group": 1,
                     "partial_rotary_factor": 0.5, "topk_group": 1, "use_qk_norm": True, **experts},
        "deepseek_v3": {
            "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "ep_size": 1, "kv_lora_rank": 16,
            "moe_layer_freq": 1, "n_group": 2, "num_key_value_heads": 4, "q_lora_rank": 24, "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8, "scoring_func": "sigmoid", "topk_group": 1, "topk_method": "noaux_tc",
            "v_head_dim": 12, **experts, "rope_scaling": {
                "beta_fast": 32, "beta_slow": 1, "factor": 4, "mscale": 1.0, "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 512, "type": "yarn"}},
    }
    return config | own[kind] | changes


def layer_shapes(config: Mapping[str, Any], prefix: str, dense: bool = False) -> Shapes:
    """Names and shapes of one decoder layer of the family."""
    kind, hidden = config["model_type"], config["hidden_size"]
    shapes: Shapes = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    shapes |= latent_attention(config) if kind == "deepseek_v3" else attention(config)
    if dense or kind == "mimo":
        shapes |= mlp("mlp", config["intermediate_size"], hidden)
    else:
        inner, count = config["moe_intermediate_size"], config["n_routed_experts"]
        shapes |= {"mlp.gate.weight": (count, hidden), "mlp.gate.e_score_correction_bias": (count,)}
        shapes |= mlp("mlp.shared_experts", inner * config["n_shared_experts"], hidden)
        for number in range(count):
            shapes |= mlp(f"mlp.experts.{number}", inner, hidden)
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


def attention(config: Mapping[str, Any]) -> Shapes:
    size, hidden = config["head_dim"], config["hidden_size"]
    widths = {"q_proj": config["num_attention_heads"] * size, "k_proj": config["num_key_value_heads"] * size,
              "v_proj": config["num_key_value_heads"] * size}
    shapes: Shapes = {f"self_attn.{name}.weight": (width, hidden) for name, width in widths.items()}
    shapes |= {f"self_attn.{name}.bias": (width,) for name, width in widths.items()}
    if config.get("use_qk_norm"):
        shapes |= {f"self_attn.{name}.weight": (size,) for name in ("q_norm", "k_norm")}
    return shapes | {"self_attn.o_proj.weight": (hidden, widths["q_proj"])}


def latent_attention(config: Mapping[str, Any]) -> Shapes:
    heads, queries, latent = config["num_attention_heads"], config["q_lora_rank"], config["kv_lora_rank"]
    plain, turned, values = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    hidden = config["hidden_size"]
    return {"self_attn.q_a_proj.weight": (queries, hidden), "self_attn.q_a_layernorm.weight": (queries,),
            "self_attn.q_b_proj.weight": (heads * (plain + turned), queries),
            "self_attn.kv_a_proj_with_mqa.weight": (latent + turned, hidden),
            "self_attn.kv_a_layernorm.weight": (latent,),
            "self_attn.kv_b_proj.weight": (heads * (plain + values), latent),
            "self_attn.o_proj.weight": (hidden, heads * values)}


def mlp(name: str, inner: int, hidden: int = HIDDEN) -> Shapes:
    return {f"{name}.gate_proj.weight": (inner, hidden), f"{name}.up_proj.weight": (inner, hidden),
            f"{name}.down_proj.weight": (hidden, inner)}


def head_prefix(config: Mapping[str, Any], number: int = 0) -> str:
    """What the names of a head's layer begin with inside the target's checkpoint."""
    return (f"model.mtp_layers.{number}" if config["model_type"] == "mimo"
            else f"model.layers.{config['num_hidden_layers'] + number}")


def head_shapes(config: Mapping[str, Any]) -> Shapes:
    """Names and shapes of all layers of the head."""
    shapes: Shapes = {}
    hidden = config["hidden_size"]
    for number in range(config["num_nextn_predict_layers"]):
        prefix = head_prefix(config, number)
        shapes |= layer_shapes(config, prefix)
        shapes |= {f"{prefix}.{name}.weight": (hidden,) for name in NORMS[config["model_type"]]}
        shapes[f"{prefix}.{projection(config)}.weight"] = (hidden, 2 * hidden)
        if config["model_type"] != "mimo":
            shapes[f"{prefix}.embed_tokens.weight"] = shapes[f"{prefix}.shared_head.head.weight"] = (VOCAB, hidden)
    return shapes


def projection(config: Mapping[str, Any]) -> str:
    return "input_proj" if config["model_type"] == "mimo" else "eh_proj"


def mtp_tensors(config: Mapping[str, Any], seed: int = 0, faithful: bool = False) -> Tensors:
    """Random weights of target and head by their published names, float32. What a NextN layer repeats of the target
    (embedding and lm_head) is equal to it."""
    hidden = config["hidden_size"]
    body: Shapes = {"model.embed_tokens.weight": (VOCAB, hidden), "model.norm.weight": (hidden,),
                    "lm_head.weight": (VOCAB, hidden)}
    for number in range(config["num_hidden_layers"]):
        body |= layer_shapes(config, f"model.layers.{number}", number < config.get("first_k_dense_replace", 0))
    tensors = random_tensors(body | head_shapes(config), seed)
    for name in list(tensors):
        if name.endswith(".embed_tokens.weight"):
            tensors[name] = tensors["model.embed_tokens.weight"].clone()
        elif name.endswith("shared_head.head.weight"):
            tensors[name] = tensors["lm_head.weight"].clone()
    return tensors | faithful_head(config, tensors) if faithful else tensors


def random_tensors(shapes: Shapes, seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {name: random_tensor(name, shape, generator) for name, shape in shapes.items()}


def random_tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    if "norm" in name:
        return 1 + 0.2 * noise
    if len(shape) == 1:
        return 0.3 * noise
    gains = {"embed_tokens": 1.0, "lm_head": 3.0 / math.sqrt(shape[1])}
    return noise * gains.get(name.split(".")[-2], 1.5 / math.sqrt(shape[1]))


def faithful_head(config: Mapping[str, Any], tensors: Tensors) -> Tensors:
    """What makes the head of a target with one layer predict as the target does."""
    assert config["num_hidden_layers"] == 1 and config.get("first_k_dense_replace", 0) == 0
    prefix, (token_norm, _, final_norm) = head_prefix(config), NORMS[config["model_type"]]
    copied = {f"{prefix}.{name.removeprefix('model.layers.0.')}": tensor.clone() for name, tensor in tensors.items()
              if name.startswith("model.layers.0.")}
    hidden = config["hidden_size"]
    one, nothing = torch.eye(hidden), torch.zeros(hidden, hidden)
    halves = (nothing, one) if config["model_type"] == "mimo" else (one, nothing)
    return copied | {f"{prefix}.{token_norm}.weight": torch.ones(hidden),
                     f"{prefix}.{final_norm}.weight": tensors["model.norm.weight"].clone(),
                     f"{prefix}.{projection(config)}.weight": torch.cat(halves, 1)}


def write_mtp_target(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor] | None = None,
                     seed: int = 0, faithful: bool = False) -> Path:
    """Write the folder of a target with its head inside and return it."""
    write_tiny_model(folder)  # its tokenizer and generation config
    return write_folder(folder, config, mtp_tensors(config, seed, faithful) if tensors is None else tensors)


def write_folder(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Path:
    """Write ``config.json`` and ``model.safetensors`` and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_nextn_folder(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Path:
    """Write the head of a target as NextN export tools do: as the first layer of a model with one layer, without
    embedding and lm_head, its file named by an index. ``tensors`` are the target's."""
    prefix = f"{head_prefix(config)}."
    head = {f"model.layers.0.{name.removeprefix(prefix)}": tensor for name, tensor in tensors.items()
            if name.startswith(prefix) and "embed_tokens" not in name and "shared_head.head" not in name}
    changes = {"num_hidden_layers": 1, "architectures": [f"{config['architectures'][0]}NextN"]}
    write_folder(folder, {**config, **changes}, head)
    (folder / "model.safetensors").rename(folder / "nextn_layer_parameters.safetensors")
    index = {"weight_map": dict.fromkeys(head, "nextn_layer_parameters.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
