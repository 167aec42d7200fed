"""Weights that are published in 8 bits with a scale for each block are those of the same folder in bfloat16."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.base.config import ModelSection
from slipstream.base.errors import ModelError
from slipstream.drafting.heads.mtp import MtpNetwork
from slipstream.drafting.heads.mtp_checkpoint import read_mtp
from slipstream.drafting.heads.target_checkpoint import TargetCheckpoint
from slipstream.drafting.loading import mtp_layers
from slipstream.drafting.network import run_network
from slipstream.engine.fp8_blocks import FIELD, SCALE_INV, block_of, widened
from slipstream.engine.loading import load_model
from slipstream.engine.model import load_tensors
from slipstream.engine.preparation import prepare_as
from slipstream.engine.ranks import part_of
from slipstream.engine.runner import ModelRunner
from tests.mtp_folder import mtp_config, mtp_tensors, write_folder
from tests.sequences import run
from tests.tiny import write_tiny_model

BLOCK = (32, 20)  # divides few of the sides
NOTE = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [*BLOCK]}
TEXT = list(b"Eight bits and a scale.")
Tensors = dict[str, torch.Tensor]


def in_blocks(tensors: Tensors, kind: torch.dtype = torch.float32) -> Tensors:
    """Matrices of layers as they are published."""
    published = dict(tensors)
    for name, weight in tensors.items():
        if "_proj" not in name or not name.endswith(".weight"):
            continue
        numbers, (rows, columns) = torch.zeros(weight.shape), weight.shape
        scales = torch.zeros(-(-rows // BLOCK[0]), -(-columns // BLOCK[1]))
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                part = (slice(i * BLOCK[0], (i + 1) * BLOCK[0]), slice(j * BLOCK[1], (j + 1) * BLOCK[1]))
                scales[i, j] = (weight[part].abs().max() / 448).to(kind).float()
                numbers[part] = (weight[part] / scales[i, j]).clamp(-448, 448)
        published |= {name: numbers.to(torch.float8_e4m3fn), name + SCALE_INV: scales.to(kind)}
    return published


def converted(published: Tensors) -> Tensors:
    """The same as a publisher's own program converts it: number by number."""
    whole = {name: tensor for name, tensor in published.items() if not name.endswith(SCALE_INV)}
    for name, numbers in whole.items():
        if numbers.dtype == torch.float8_e4m3fn:
            wide, scales = numbers.float(), published[name + SCALE_INV].float()
            for i in range(numbers.shape[0]):
                for j in range(numbers.shape[1]):
                    wide[i, j] *= scales[i // BLOCK[0], j // BLOCK[1]]
            whole[name] = wide.to(torch.bfloat16)
    return whole


def noted(folder: Path, note: Any = NOTE) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {FIELD: note}))
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder in blocks, and the same converted."""
    folders = [write_tiny_model(tmp_path_factory.mktemp(name), "qwen3") for name in ("blocks", "bfloat16")]
    published = in_blocks(load_file(folders[0] / "model.safetensors"), torch.bfloat16)
    for folder, tensors in zip(folders, (published, converted(published)), strict=True):
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return noted(folders[0]), folders[1]


def test_a_target_in_blocks_says_what_its_conversion_says(pair: tuple[Path, Path]) -> None:
    section = ModelSection(dtype="float64")
    found, right = (run(ModelRunner(load_model(folder, section), 64), TEXT)[0] for folder in pair)
    assert torch.equal(found, right)


def test_it_is_prepared_and_shared_out_as_its_conversion(pair: tuple[Path, Path], tmp_path: Path) -> None:
    for kind in ("bfloat16", "int8"):
        prepared = [prepare_as(kind, folder, tmp_path / f"{kind}-{i}") for i, folder in enumerate(pair)]
        found, right = (load_tensors(folder) for folder in prepared)
        assert found.keys() == right.keys() and all(torch.equal(found[name], right[name]) for name in right)
        assert json.loads((prepared[0] / "config.json").read_text()) == json.loads(
            (prepared[1] / "config.json").read_text())
    assert part_of(pair[0], ModelSection(dtype="float32", tensor_parallel=2)).folder == str(pair[0])


def test_names_that_are_asked_for_bring_their_scales(pair: tuple[Path, Path]) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    found, right = (load_tensors(folder, [name]) for folder in pair)
    assert found.keys() == {name} and torch.equal(found[name], right[name])


def test_an_mtp_head_in_blocks_drafts_as_its_conversion(tmp_path: Path) -> None:
    config = mtp_config("deepseek_v3")
    published = in_blocks(mtp_tensors(config))
    folders = (noted(write_folder(tmp_path / "blocks", config, published)),
               write_folder(tmp_path / "bfloat16", config, converted(published)))
    heads = [read_mtp(folder, folder) for folder in folders]
    assert heads[0].tensors.keys() == heads[1].tensors.keys()
    for name, right in heads[1].tensors.items():
        assert torch.equal(heads[0].tensors[name], right), name
    head = heads[0]
    run_network(MtpNetwork(head, mtp_layers(head, "float32", "cpu"), "float32", 16), 3)
    assert not [name for name in head.tensors if name.endswith(SCALE_INV)]


MATRIX = "model.layers.0.self_attn.q_proj.weight"
SCALES = MATRIX + SCALE_INV


@pytest.mark.parametrize(("change", "said"), [
    (lambda t: t.pop(SCALES), f"{SCALES} is missing"),
    (lambda t: t.update({SCALES: t[SCALES][:, :-1].clone()}), f"{SCALES} holds .* of shape"),
    (lambda t: t.update({SCALES: t[SCALES].flatten()}), f"{SCALES} holds .* of shape"),
    (lambda t: t.update({SCALES: t[SCALES].int()}), f"{SCALES} holds torch.int32"),
    (lambda t: t[SCALES].fill_(torch.nan), f"{SCALES}: scales must be finite"),
    (lambda t: t.update({"model.norm.weight": t[MATRIX][0].clone()}), "model.norm.weight_scale_inv is missing"),
    (lambda t: t.update({MATRIX: t[MATRIX].float().to(torch.float8_e5m2)}), f"{MATRIX} holds torch.float8_e5m2"),
    (lambda t: t.update({MATRIX: t[MATRIX].view(torch.float8_e4m3fnuz)}), f"{MATRIX} holds torch.float8_e4m3fnuz"),
])
def test_blocks_that_do_not_fit_are_named(pair: tuple[Path, Path], tmp_path: Path,
                                          change: Callable[[Tensors], object], said: str) -> None:
    folder = noted(write_tiny_model(tmp_path, "qwen3"))
    tensors = load_file(pair[0] / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=said):
        load_model(folder, ModelSection())


def test_a_vector_and_numbers_of_three_sides_are_no_matrices() -> None:
    for shape, scales in (((8,), (1,)), ((2, 8, 8), (1, 1))):
        with pytest.raises(ModelError, match="w_scale_inv holds"):
            widened({"w": torch.zeros(shape).to(torch.float8_e4m3fn), "w_scale_inv": torch.ones(scales)}, (8, 8))


@pytest.mark.parametrize("change", [{"weight_block_size": [0, 128]}, {"weight_block_size": [128]}, {"fmt": "e5m2"},
                                    {"weight_block_size": [128, True]}, {"weight_block_size": [1 << 40, 8]},
                                    {"weight_block_size": "128"}])
def test_blocks_of_another_kind_are_refused_by_the_field(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = noted(write_tiny_model(tmp_path), NOTE | change)
    with pytest.raises(ModelError, match=r"config\.json: quantization_config: expected weight_block_size"):
        load_model(folder, ModelSection())


@pytest.mark.parametrize("note", [None, "fp8", {"quant_method": "fp8"}, {"quant_method": "gptq"}, []])
def test_other_notes_are_not_about_blocks(note: Any) -> None:
    assert block_of({FIELD: note}, "config.json") is None


def test_the_engine_of_transformers_refuses_them_before_it_reads(pair: tuple[Path, Path]) -> None:
    with pytest.raises(ModelError, match=r"config\.json: quantization_config: .*engine decoder alone"):
        load_model(pair[0], ModelSection(engine="hf"))


@pytest.mark.parametrize(("name", "lend"), [("model.embed_tokens.weight", lambda lender: lender.embedding(48)),
                                            ("lm_head.weight", TargetCheckpoint.lm_head)])
def test_a_target_lends_no_numbers_of_8_bits(tmp_path: Path, name: str,
                                             lend: Callable[[TargetCheckpoint], object]) -> None:
    folder = write_tiny_model(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {name: tensors[name].to(torch.float8_e4m3fn)}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"the target's embedding or head holds torch\.float8_e4m3fn"):
        lend(TargetCheckpoint.of(folder))
