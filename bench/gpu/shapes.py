"""Models of a given shape with random weights, made where they run: nothing is downloaded.

Rules:
1. Weights are random and not zeros: a device computes zeros faster, and equal logits hide mistakes.
2. The published shapes are those of Llama 3.1 8B and of an EAGLE-3 head for it with 32,000 draft tokens.

It knows nothing about measuring.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from slipstream.drafting.heads.checkpoint import LAYER, EagleHead
from slipstream.engine.model import ModelConfig, parse_config
from slipstream.engine.ops.layer import layer_shapes

Shapes = dict[str, tuple[int, ...]]
Fields = dict[str, object]

# What config.json of a model says that is large enough for every kernel's usual path and small enough for float64.
SMALL: Fields = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512,
                 "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
                 "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 2048, "max_position_embeddings": 2048,
                 "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
                 "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
# Takes the place of any shape in a rehearsal.
TINY = SMALL | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
                "head_dim": 16, "vocab_size": 256}
LLAMA_8B = SMALL | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
                    "max_position_embeddings": 131072,
                    "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0,
                                        "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                        "original_max_position_embeddings": 8192}}


def config_of(fields: Fields) -> ModelConfig:
    return parse_config(fields, "shape")


def decoder_shapes(config: ModelConfig) -> Shapes:
    """Names and shapes of a whole model's tensors."""
    hidden = config.hidden_size
    shapes: Shapes = {"model.embed_tokens.weight": (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    for i in range(config.num_layers):
        shapes |= layer_shapes(config, f"model.layers.{i}")
    return shapes | ({} if config.tied_embeddings else {"lm_head.weight": (config.vocab_size, hidden)})


def head_shapes(config: ModelConfig, draft_vocab: int) -> Shapes:
    """Names and shapes of an EAGLE-3 head's tensors that reads three states of its own width."""
    hidden = config.hidden_size
    return {"fc.weight": (hidden, 3 * hidden), "norm.weight": (hidden,),
            "embed_tokens.weight": (config.vocab_size, hidden), "lm_head.weight": (draft_vocab, hidden),
            f"{LAYER}.hidden_norm.weight": (hidden,), **layer_shapes(config, LAYER, 2 * hidden)}


def random_tensors(shapes: Shapes, dtype: torch.dtype, device: torch.device, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights that keep a state's size from layer to layer, on ``device``."""
    rng, tensors = torch.Generator(device).manual_seed(seed), {}
    for name, shape in shapes.items():
        tensors[name] = torch.randn(shape, dtype=dtype, device=device, generator=rng)
        if name.endswith("norm.weight"):
            tensors[name].mul_(0.1).add_(1)
        elif not name.endswith("embed_tokens.weight"):
            tensors[name].mul_(shape[-1] ** -0.5)
    return tensors


def random_head(config: ModelConfig, draft_vocab: int, dtype: torch.dtype, device: torch.device) -> EagleHead:
    """An EAGLE-3 head for a target of ``config``, whose layer has the target's measures."""
    taps = (2, config.num_layers // 2, max(0, config.num_layers - 3))
    tensors = random_tensors(head_shapes(config, draft_vocab), dtype, device)
    vocabulary = torch.arange(draft_vocab) * (config.vocab_size // draft_vocab)
    return EagleHead(replace(config, num_layers=1), config.hidden_size, taps, tensors, vocabulary)


def write_folder(folder: Path, fields: Fields) -> Path:
    """A model folder of a shape, without a tokenizer and without an end token."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = random_tensors(decoder_shapes(config_of(fields)), torch.float32, torch.device("cpu"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    return folder


def read_bytes(config: ModelConfig, itemsize: int, context: int, layer_itemsize: int = 0) -> int:
    """Bytes that one plain step reads at least: all weights but the embedding's rows, and the KV of a context.
    layer_itemsize: of weights in layers; 0: as of all else."""
    size = itemsize * 2 * context * config.num_layers * config.num_kv_heads * config.head_dim
    for name, shape in decoder_shapes(config).items():
        if config.tied_embeddings or not name.endswith("embed_tokens.weight"):
            in_layer = name.startswith("model.layers.") and layer_itemsize
            size += torch.Size(shape).numel() * (layer_itemsize if in_layer else itemsize)
    return size


def head_bytes(config: ModelConfig, draft_vocab: int) -> int:
    """Bytes that one step of an EAGLE-3 head in bfloat16 reads at least; ``fc`` is not part of a step."""
    shapes = head_shapes(config, draft_vocab)
    return 2 * sum(torch.Size(shape).numel() for name, shape in shapes.items()
                   if name not in ("embed_tokens.weight", "fc.weight"))

