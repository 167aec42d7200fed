"""The GGUF file of a known Llama as a model folder that transformers and this project's engine read.

Rules:
1. The file is the pinned one (``folder.KNOWN``): whoever calls has compared its SHA-256, so nothing in it is checked
   again.
2. Weights are stored as float32: bfloat16 or float16 would round dequantised Q4_1 values again.
3. The rows of the query and key projections are reordered from llama.cpp's interleaved rotary order to transformers'.
4. The tokenizer splits digits one by one, as SmolLM's own does; the GGUF only names that rule (``pre = smollm``).
5. Characters that the vocabulary cannot express (SmolLM lacks six control characters) are dropped, never replaced by a
   special token.
6. Tensors are written one after the other, so memory holds one of them, not the whole model.

Formats: GGUF (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), safetensors
(https://github.com/huggingface/safetensors), the config.json of transformers' LlamaForCausalLM.
It knows nothing about where the file comes from and where the folder goes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

Floats = NDArray[np.float32]
Metadata = Mapping[str, Any]

CONTROL, USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
HEADER_ALIGN = 64
# Of a layer, in the order of the folder's file: names in GGUF -> transformers' names.
LAYER_TENSORS = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the folder and its name in the GGUF. interleaved_heads: the number of heads whose rows are to be
    reordered (rule 3); 0: none."""

    source: str
    name: str
    interleaved_heads: int = 0


def convert(source: Path, folder: Path, progress: Callable[[int, int], None]) -> dict[str, dict[str, Any]]:
    """Write tokenizer.json and model.safetensors into the existing ``folder``. Returns the contents of its other files
    by name: config.json, generation_config.json and tokenizer_config.json.

    progress: called with the bytes of weights written so far, and their total.
    """
    reader = gguf.GGUFReader(source)
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    tokenizer = build_tokenizer(metadata)
    ids: dict[str, int] = {f"{name}_token_id": metadata[f"tokenizer.ggml.{of}_token_id"]
                           for name, of in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))}
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    write_weights({tensor.name: tensor for tensor in reader.tensors}, list(tensor_specs(metadata)),
                  folder / "model.safetensors", progress)
    return {"tokenizer_config.json": tokenizer_config(metadata, tokenizer, ids),
            "config.json": model_config(metadata, ids),
            "generation_config.json": {**ids, "eos_token_id": [ids["eos_token_id"]]}}


def tensor_specs(metadata: Metadata) -> Iterator[TensorSpec]:
    """Every tensor of the model, in the order of the folder's safetensors file."""
    heads = {"attn_q": metadata["llama.attention.head_count"], "attn_k": metadata["llama.attention.head_count_kv"]}
    yield TensorSpec("token_embd.weight", "model.embed_tokens.weight")
    for i in range(metadata["llama.block_count"]):
        for source, name in LAYER_TENSORS.items():
            yield TensorSpec(f"blk.{i}.{source}.weight", f"model.layers.{i}.{name}.weight", heads.get(source, 0))
    yield TensorSpec("output_norm.weight", "model.norm.weight")


def deinterleave(rows: Floats, heads: int) -> Floats:
    """Reorder rows, float32 [heads * D, in], from llama.cpp's rotary order (pairs side by side) to transformers' (two
    halves)."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows.shape))


def write_weights(tensors: Mapping[str, Any], specs: Sequence[TensorSpec], path: Path,
                  progress: Callable[[int, int], None]) -> None:
    """Write the safetensors file ``path``: float32, little-endian, in the order of ``specs``. tensors: the gguf
    library's, by name."""
    shapes = {spec.source: [int(size) for size in reversed(tensors[spec.source].shape)] for spec in specs}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    total = 0
    for spec in specs:
        end = total + 4 * math.prod(shapes[spec.source])
        header[spec.name] = {"dtype": "F32", "shape": shapes[spec.source], "data_offsets": [total, end]}
        total = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % HEADER_ALIGN)
    done = 0
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for spec in specs:
            stored = tensors[spec.source]
            values: Floats = gguf.dequantize(stored.data, stored.tensor_type).reshape(shapes[spec.source])
            if spec.interleaved_heads:
                values = deinterleave(values, spec.interleaved_heads)
            file.write(values.astype("<f4", copy=False).data)
            done += values.nbytes
            progress(done, total)


def build_tokenizer(metadata: Metadata) -> Tokenizer:
    """The byte-level BPE tokenizer that the metadata describes."""
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [(first, second) for first, second in map(str.split, metadata["tokenizer.ggml.merges"])]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    for wanted, special in ((CONTROL, True), (USER_DEFINED, False)):
        added = [token for token, found in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True)
                 if found == wanted]
        tokenizer.add_tokens([AddedToken(token, normalized=False, special=special) for token in added])
    return tokenizer


def tokenizer_config(metadata: Metadata, tokenizer: Tokenizer, ids: Mapping[str, int]) -> dict[str, Any]:
    """The content of tokenizer_config.json. ids: of the special tokens."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name.removesuffix("_id"): tokenizer.id_to_token(i) for name, i in ids.items()},
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
        "chat_template": metadata["tokenizer.chat_template"],
    }


def model_config(metadata: Metadata, ids: Mapping[str, int]) -> dict[str, Any]:
    """The content of config.json."""
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32",
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": metadata["llama.attention.head_count"],
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": metadata["llama.rope.dimension_count"],
        "vocab_size": metadata["llama.vocab_size"], "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": _shortest_decimal(metadata["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": _shortest_decimal(metadata["llama.rope.freq_base"]),
        "rope_scaling": None, "hidden_act": "silu", "tie_word_embeddings": True,
        "attention_bias": False, "mlp_bias": False, **ids,
    }


def _shortest_decimal(value: float) -> float:
    """The shortest decimal for a float32: 1e-05 for 9.999999747378752e-06, which is the same float32."""
    return float(f"{value:.7g}")
