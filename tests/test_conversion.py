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

from slipstream.base.errors import ModelError
from slipstream.models.folder import write_json
from slipstream.models.gguf import GgufFile, convert, deinterleave
from tests.small_gguf import (
    F16,
    F32,
    FFN,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    Q4_1,
    Q8_0,
    SEED,
    TOKENS,
    small_metadata,
    small_tensors,
    write_gguf,
)

ZEROS = np.zeros((2, 32), np.float32)


@pytest.fixture(scope="module")
def small_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "small.gguf", small_metadata(), small_tensors())


@pytest.fixture(scope="module")
def converted(small_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    for name, content in convert(GgufFile(small_gguf), folder, lambda done, total: None).items():
        write_json(folder / name, content)
    return folder


@pytest.mark.parametrize("kind", [Q4_1, Q8_0, F16, F32], ids=lambda kind: kind.name)
def test_dequantised_values_are_those_of_the_gguf_library(tmp_path: Path, kind: Any) -> None:
    values = np.random.default_rng(SEED).normal(0, 3, size=(5, 7, 64)).astype(np.float32)
    raw = gguf.quantize(values, kind)
    path = write_gguf(tmp_path / "one.gguf", {}, {"t": (values, kind)})
    found = GgufFile(path).tensor("t")
    assert found.dtype == np.float32 and found.shape == values.shape, SEED
    assert np.array_equal(found, gguf.dequantize(raw, kind).reshape(values.shape)), SEED


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


DAMAGED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "kind": ({"tokenizer.ggml.pre": "llama3"}, {}, "tokenizer.ggml.pre"),
    "sizes": ({"llama.attention.head_count": 3}, {}, "llama.attention.head_count"),
    "huge": ({"llama.block_count": 1 << 31}, {}, "llama.block_count"),
    "type": ({"llama.block_count": "two"}, {}, "llama.block_count"),
    "merges": ({"tokenizer.ggml.merges": ["h e", "zz top"]}, {}, "tokenizer.ggml.merges"),
    "tokens": ({"tokenizer.ggml.tokens": TOKENS[:-1]}, {}, "tokenizer.ggml.tokens"),
    "eos": ({"tokenizer.ggml.eos_token_id": len(TOKENS)}, {}, "tokenizer.ggml.eos_token_id"),
    "extra": ({}, {"blk.0.attn_q.bias": (ZEROS, F32)}, "blk.0.attn_q.bias"),
    "shape": ({}, {"blk.0.attn_v.weight": (ZEROS, F32)}, "blk.0.attn_v.weight"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_unfit_files_are_refused_by_name(tmp_path: Path, name: str) -> None:
    metadata, tensors, wanted = DAMAGED[name]
    path = write_gguf(tmp_path / "bad.gguf", small_metadata() | metadata, small_tensors() | tensors)
    with pytest.raises(ModelError, match=wanted):
        convert(GgufFile(path), tmp_path, lambda done, total: None)
    assert not (tmp_path / "model.safetensors").exists()


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "bad.gguf", {}, {"t": (ZEROS, F32)}, architecture="mamba")
    with pytest.raises(ModelError, match="mamba"):
        convert(GgufFile(path), tmp_path, lambda done, total: None)


@pytest.mark.parametrize("keep", [3, 4, 40, 2000, -64])
def test_cut_files_are_refused(small_gguf: Path, tmp_path: Path, keep: int) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(small_gguf.read_bytes()[:keep])
    with pytest.raises(ModelError):
        GgufFile(path)


def test_a_length_beyond_the_file_is_refused_before_it_is_read(small_gguf: Path, tmp_path: Path) -> None:
    """The list of tokens says that it has 2 ** 40 entries: its reader would believe that for hours."""
    key = b"tokenizer.ggml.tokens"
    whole = bytearray(small_gguf.read_bytes())
    length = whole.index(key) + len(key) + 8  # after the kind of the value and of its entries
    assert int.from_bytes(whole[length:length + 8], "little") == len(TOKENS)
    whole[length:length + 8] = (1 << 40).to_bytes(8, "little")
    path = tmp_path / "long.gguf"
    path.write_bytes(whole)
    with pytest.raises(ModelError, match="damaged"):
        GgufFile(path)


def test_missing_file_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nothing\.gguf"):
        GgufFile(tmp_path / "nothing.gguf")
