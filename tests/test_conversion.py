"""From GGUF to a model folder, against the gguf library's own quantisation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from slipstream.models.folder import write_json
from slipstream.models.gguf import convert, deinterleave
from tests.small_gguf import (
    FFN,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    TOKENS,
    small_metadata,
    small_tensors,
    write_gguf,
)


@pytest.fixture(scope="module")
def small_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "small.gguf", small_metadata(), small_tensors())


@pytest.fixture(scope="module")
def converted(small_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    for name, content in convert(small_gguf, folder, lambda done, total: None).items():
        write_json(folder / name, content)
    return folder


def test_deinterleave_puts_pairs_into_halves() -> None:
    rows = np.arange(8, dtype=np.float32)[:, None].repeat(3, axis=1)  # 2 heads of 4: (0 1)(2 3) and (4 5)(6 7)
    assert deinterleave(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_weights_arrive_under_their_names(converted: Path) -> None:
    found, sources = load_file(converted / "model.safetensors"), small_tensors()

    def stored(name: str) -> np.ndarray[Any, Any]:
        values, kind = sources[name]
        return np.asarray(gguf.dequantize(gguf.quantize(values, kind), kind)).reshape(values.shape)

    layer = "model.layers.1."
    assert len(found) == len(sources)
    assert np.array_equal(found["model.embed_tokens.weight"], stored("token_embd.weight"))
    assert np.array_equal(found["model.norm.weight"], stored("output_norm.weight"))
    assert np.array_equal(found[f"{layer}self_attn.v_proj.weight"], stored("blk.1.attn_v.weight"))
    assert np.array_equal(found[f"{layer}mlp.down_proj.weight"], stored("blk.1.ffn_down.weight"))
    assert np.array_equal(found[f"{layer}post_attention_layernorm.weight"], stored("blk.1.ffn_norm.weight"))
    for name, heads in (("q", HEADS), ("k", KV_HEADS)):
        wanted = deinterleave(stored(f"blk.1.attn_{name}.weight"), heads)
        assert np.array_equal(found[f"{layer}self_attn.{name}_proj.weight"], wanted), name


def test_configs_carry_the_metadata(converted: Path) -> None:
    config = json.loads((converted / "config.json").read_text())
    wanted = {"model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": LAYERS,
              "num_key_value_heads": KV_HEADS, "head_dim": 16, "rope_theta": 100000.0, "rms_norm_eps": 1e-5,
              "tie_word_embeddings": True, "eos_token_id": 2, "vocab_size": len(TOKENS)}
    assert wanted.items() <= config.items()
    assert json.loads((converted / "generation_config.json").read_text())["eos_token_id"] == [2]
    tokens = json.loads((converted / "tokenizer_config.json").read_text())
    assert (tokens["bos_token"], tokens["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert "messages" in tokens["chat_template"]


def test_tokenizer_merges_splits_digits_and_knows_specials(converted: Path) -> None:
    tokenizer = Tokenizer.from_file(str(converted / "tokenizer.json"))
    assert tokenizer.encode("hello<|im_end|>").tokens == ["he", "ll", "o", "<|im_end|>"]
    # The digit is split off before the space can join it, although a merge for the two exists.
    assert tokenizer.encode("o 12").tokens == ["o", "Ġ", "1", "2"]
    for text in ("naïve – 字 🙂\n\ttabs", "  12 + 34", ""):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
