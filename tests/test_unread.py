"""Tensors of a file that nothing reads are told, and those that are missing are an error, in every engine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.base.config import DraftSection, ModelSection
from slipstream.base.errors import ModelError
from slipstream.drafting.loading import load
from slipstream.engine.decoder import decoder_names
from slipstream.engine.loading import load_model
from slipstream.engine.model import NAME_SHOWN, NAMES_SHOWN, ModelConfig, load_tensors
from tests.mtp_folder import KINDS as HEADS
from tests.mtp_folder import mtp_config, write_mtp_target
from tests.tiny import KINDS, write_tiny_model

TOLD = "tensors that nothing reads"
ENGINES = ("decoder", "hf")


def changed(folder: Path, add: tuple[str, ...] = (), drop: str = "") -> Path:
    tensors = load_file(folder / "model.safetensors") | {name: torch.zeros(4) for name in add}
    tensors.pop(drop, None)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def loaded(folder: Path, engine: str) -> None:
    load_model(folder, ModelSection.model_validate({"dtype": "float32", "engine": engine}))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_nothing_reads_is_told(tmp_path: Path, kind: str, engine: str,
                                    capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_tiny_model(tmp_path, kind)
    loaded(changed(folder, ("model.layers.0.self_attn.rotary_emb.inv_freq",)), engine)
    assert TOLD not in capsys.readouterr().out
    loaded(changed(folder, ("model.layers.1.self_attn.o_proj.bias",)), engine)
    told = capsys.readouterr().out
    assert TOLD in told and "model.layers.1.self_attn.o_proj.bias" in told and "rotary" not in told.split(TOLD)[1]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_tied_head_is_known(tmp_path: Path, engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_tiny_model(tmp_path, tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, folder / "model.safetensors",
              metadata={"format": "pt"})
    loaded(folder, engine)
    assert TOLD not in capsys.readouterr().out


def test_a_head_that_a_config_wrongly_calls_tied_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_tiny_model(tmp_path, tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    head[5, 5] += 1
    save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors", metadata={"format": "pt"})
    loaded(folder, "decoder")
    told = capsys.readouterr().out
    assert TOLD in told and "lm_head.weight" in told


def indexed(folder: Path, file: str) -> None:
    names = dict.fromkeys(load_file(folder / "model.safetensors"), file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


@pytest.mark.parametrize("engine", ENGINES)
def test_an_index_that_an_earlier_save_left_is_passed_over(tmp_path: Path, engine: str) -> None:
    """transformers takes away earlier shards where it saves one file, and leaves their index."""
    folder = write_tiny_model(tmp_path)
    indexed(folder, "model-00001-of-00002.safetensors")
    loaded(folder, engine)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="model-00001-of-00002"):
        loaded(folder, engine)


def test_a_file_beside_the_shards_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_tiny_model(tmp_path)
    indexed(folder, "model.safetensors")
    loaded(folder, "decoder")
    assert "model.safetensors is not read" not in capsys.readouterr().out
    indexed(folder, "model-00001-of-00001.safetensors")
    shutil.copyfile(folder / "model.safetensors", folder / "model-00001-of-00001.safetensors")
    loaded(folder, "decoder")
    told = capsys.readouterr().out
    assert "model.safetensors is not read" in told and TOLD not in told


def test_a_flood_of_names_is_a_short_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loaded(changed(write_tiny_model(tmp_path), tuple(f"{i}{'x' * 5000}" for i in range(100))), "decoder")
    told = capsys.readouterr().out
    assert "count=100" in told and len(told) < 2 * NAMES_SHOWN * NAME_SHOWN


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_missing_is_an_error(tmp_path: Path, engine: str) -> None:
    with pytest.raises(ModelError, match=r"tensor model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        loaded(changed(write_tiny_model(tmp_path), drop="model.layers.1.mlp.up_proj.weight"), engine)


@pytest.mark.parametrize("kind", KINDS)
def test_the_decoder_names_what_it_takes(tmp_path: Path, kind: str) -> None:
    folder = write_tiny_model(tmp_path, kind)
    assert decoder_names(ModelConfig.from_folder(folder)) == set(load_tensors(folder))


def test_biases_that_a_config_speaks_of_are_taken(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    raw = json.loads((folder / "config.json").read_text()) | {"attention_bias": True, "mlp_bias": True}
    (folder / "config.json").write_text(json.dumps(raw))
    config = ModelConfig.from_folder(folder)
    layers = [f"model.layers.{i}.{part}_proj.bias" for i in range(2) for part in
              ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")]
    assert decoder_names(config) == set(load_tensors(folder)) | set(layers)


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_in_the_target_tells_too(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_mtp_target(tmp_path, mtp_config(kind, num_nextn_predict_layers=2))
    section = DraftSection(drafter="mtp", dtype="float32")
    load(section, ModelSection(path=str(folder)), 64)
    assert TOLD not in capsys.readouterr().out
    prefix = "model.mtp_layers.1" if kind == "mimo" else f"model.layers.{mtp_config(kind)['num_hidden_layers']}"
    load(section, ModelSection(path=str(changed(folder, (f"{prefix}.self_attn.sinks",)))), 64)
    told = capsys.readouterr().out
    assert TOLD in told and f"{prefix}.self_attn.sinks" in told
