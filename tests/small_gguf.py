"""A GGUF file of a Llama that is small enough for every test: all supported tensor types, a byte-level vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import pre_tokenizers

SEED = 7
HIDDEN, FFN, HEADS, KV_HEADS, LAYERS = 64, 96, 4, 2, 2
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["h e", "l l", "Ġ 1"]
TOKENS = [*SPECIALS, *LETTERS, "he", "ll", "Ġ1"]
Q4_1, Q8_0, F16, F32 = (gguf.GGMLQuantizationType[name] for name in ("Q4_1", "Q8_0", "F16", "F32"))


def small_metadata() -> dict[str, Any]:
    return {
        "llama.block_count": LAYERS, "llama.context_length": 128, "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": FFN, "llama.attention.head_count": HEADS, "llama.vocab_size": len(TOKENS),
        "llama.attention.head_count_kv": KV_HEADS, "llama.rope.dimension_count": HIDDEN // HEADS,
        "llama.rope.freq_base": 1e5, "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(TOKENS) - 3), "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    }


def small_tensors() -> dict[str, tuple[np.ndarray[Any, Any], Any]]:
    """Every tensor of the small Llama as float32 and the type it is stored in."""
    rng = np.random.default_rng(SEED)
    key = HIDDEN * KV_HEADS // HEADS
    shapes: dict[str, tuple[tuple[int, ...], Any]] = {"token_embd.weight": ((len(TOKENS), HIDDEN), Q8_0)}
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.attn_norm.weight": ((HIDDEN,), F32), f"blk.{i}.ffn_norm.weight": ((HIDDEN,), F32),
            f"blk.{i}.attn_q.weight": ((HIDDEN, HIDDEN), Q4_1), f"blk.{i}.attn_k.weight": ((key, HIDDEN), Q4_1),
            f"blk.{i}.attn_v.weight": ((key, HIDDEN), F16), f"blk.{i}.attn_output.weight": ((HIDDEN, HIDDEN), Q4_1),
            f"blk.{i}.ffn_gate.weight": ((FFN, HIDDEN), Q4_1), f"blk.{i}.ffn_up.weight": ((FFN, HIDDEN), Q4_1),
            f"blk.{i}.ffn_down.weight": ((HIDDEN, FFN), Q4_1),
        }
    shapes["output_norm.weight"] = ((HIDDEN,), F32)
    return {name: (rng.normal(size=shape).astype(np.float32), kind) for name, (shape, kind) in shapes.items()}


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[Any, Any]]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    for name, (values, kind) in tensors.items():
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
