"""A DSpark head in training: its first weights, and its published configuration.

Rules:
1. Tensors have the names of the published layout (``layers.i.*``, ``fc``, ``hidden_norm``, ``norm``, ``lm_head``,
   ``markov_head``, ``confidence_head``), in float32; an export writes them as they are, in the layout of speculators'
   ``dspark`` (DeepSpec's own has no draft vocabulary), with ``sample_from_anchor`` true.
2. It reads all states that shards hold: those that enter layers 2, n // 2 and n - 3, and the final one, with id n. This
   is the state after the final norm here, but before it in vLLM: vLLM's own drafter cannot use a head made here.
3. Warm start: the layers are the target's last ones, ``lm_head`` and ``norm`` the target's; ``fc`` passes on the state
   that enters layer n - 3 and adds a little of the others. ``W2`` and the confidence head begin at zero.
4. The mask token is the last one of the target's tokens that its answers use least.

It knows nothing about data or optimisers. Format: see ``slipstream.drafting.heads.block_checkpoint``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from slipstream.engine.model import ModelConfig
from slipstream.train.head import INIT_STD, Counts, Head, copied_weights, layer_config, place_head, taps_of

LAYERS, BLOCK, RANK = 2, 6, 128


def mask_token(counts: Counts) -> int:
    """The last of the tokens that answers use least. counts: [V]."""
    return int(np.flatnonzero(counts == counts.min())[-1])


def warm_block_head(target: ModelConfig, tensors: Mapping[str, torch.Tensor], vocabulary: torch.Tensor, mask: int,
                    seed: int, device: torch.device) -> Head:
    """A new head with the weights of rule 3. tensors: the target's checkpoint; mask: the mask token."""
    layers = min(LAYERS, target.num_layers)
    config = replace(layer_config(target, layers), model_type="qwen3", qk_norm=True)
    taps, hidden = (*taps_of(target.num_layers), target.num_layers), config.hidden_size
    rng = torch.Generator().manual_seed(seed)
    weights = copied_weights(target, tensors, config, len(taps), vocabulary, rng)
    weights["hidden_norm.weight"] = weights[f"layers.{layers - 1}.input_layernorm.weight"].clone()
    weights |= {"markov_head.markov_w1.weight": INIT_STD * torch.randn(target.vocab_size, RANK, generator=rng),
                "markov_head.markov_w2.weight": torch.zeros(len(vocabulary), RANK),
                "confidence_head.proj.weight": torch.zeros(1, hidden + RANK),
                "confidence_head.proj.bias": torch.zeros(1)}
    ones = {f"layers.{layer}.self_attn.{name}_norm.weight": torch.ones(config.head_dim)
            for layer in range(layers) for name in "qk"}
    return place_head(target, tensors, config, taps, ones | weights, vocabulary, device, mask)


def block_config(head: Head, rope: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The content of ``config.json``. rope: its fields about rotary positions."""
    config = head.config
    return {
        "architectures": ["DSparkDraftModel"], "model_type": "speculator_model", "speculators_model_type": "dspark",
        "aux_hidden_state_layer_ids": list(head.taps), "block_size": BLOCK, "mask_token_id": head.mask_token,
        "sample_from_anchor": True, "draft_vocab_size": len(head.vocabulary), "markov_rank": RANK,
        "markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True,
        "target_hidden_size": config.hidden_size, "tie_word_embeddings": False, "dtype": str(dtype).split(".")[-1],
        "speculators_config": {
            "algorithm": "dspark", "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": BLOCK}]},
        "transformer_layer_config": {
            "model_type": "qwen3", "hidden_act": "silu", "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size, "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim, "max_position_embeddings": config.max_context,
            "rms_norm_eps": config.norm_eps, "attention_bias": False, "tie_word_embeddings": False,
            "layer_types": ["full_attention"] * config.num_layers, "use_sliding_window": False,
            "vocab_size": config.vocab_size, **rope}}
