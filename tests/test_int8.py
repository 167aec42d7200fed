"""Weights as whole numbers: what rounding is to be, products of the numbers, the stored folder, and who is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from slipstream.base.config import DraftSection, ModelSection
from slipstream.base.errors import ModelError
from slipstream.cli.commands import app
from slipstream.drafting.heads.checkpoint import read_head
from slipstream.drafting.heads.eagle import EagleNetwork
from slipstream.drafting.heads.target_checkpoint import TargetCheckpoint
from slipstream.drafting.loading import load
from slipstream.engine.batch import rows_batch
from slipstream.engine.fp8_blocks import FIELD
from slipstream.engine.int8 import LARGEST, NOTE, Int8Matrix, concatenated, rounded
from slipstream.engine.loading import load_model
from slipstream.engine.native.compiled_kernels import X86, kernels, processor
from slipstream.engine.native.program import BatchFrame, Frame, NativeHead, Packed, Program, Team
from slipstream.engine.preparation import prepare_as
from slipstream.engine.ranks import part_of
from slipstream.engine.runner import ModelRunner
from slipstream.models.folder import FORMAT, HEADS, RECEIPT, head_for, is_prepared, template_source
from slipstream.protocol.messages import Features, Open
from slipstream.protocol.requests import Sampling
from tests.eagle_folder import eagle_config, write_eagle_folder
from tests.sequences import run
from tests.tiny import VOCAB, store_as_the_head, write_tiny_model

SHAPE = {"hidden_size": 64, "intermediate_size": 176, "head_dim": 32}
TEXT = list(b"Whole numbers are what counting gives, and what eight bits hold.")
KINDS = [*X86, (set[str](), ())]  # of processors, and their flags


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def error(of: torch.Tensor, exact: torch.Tensor) -> float:
    """Root mean square of the difference, in units of the exact values' own."""
    return float((of.double() - exact.double()).pow(2).mean().sqrt() / exact.double().pow(2).mean().sqrt())


def tiny(folder: Path, **changes: Any) -> Path:
    return write_tiny_model(folder, **{**SHAPE, **changes})


def logits(folder: Path, **how: Any) -> torch.Tensor:
    return run(ModelRunner(load_model(folder, ModelSection(**how)), 256), TEXT)[0]


def test_a_row_has_a_scale_and_keeps_its_largest() -> None:
    weight = random(9, 70) * torch.logspace(-6, 6, 9)[:, None]
    weight[3] = 0
    found = rounded(weight)
    assert found.numbers.shape == weight.shape and found.scales.shape == (9,)
    assert bool(((found.dequantized() - weight).abs() <= 0.5001 * found.scales[:, None]).all())
    assert found.numbers.abs().amax(1).tolist() == [LARGEST, LARGEST, LARGEST, 0, *[LARGEST] * 5]


def test_matrices_below_one_another_are_rounded_as_each_alone() -> None:
    parts = random(8, 70), random(4, 70, seed=1)
    whole, below = rounded(torch.cat(parts)), concatenated([rounded(part) for part in parts])
    assert isinstance(below, Int8Matrix)
    assert torch.equal(whole.numbers, below.numbers) and torch.equal(whole.scales, below.scales)


@pytest.mark.parametrize(("needed", "flags"), KINDS, ids=[" ".join(flags) for _, flags in KINDS])
def test_a_product_is_that_of_the_numbers(needed: set[str], flags: tuple[str, ...]) -> None:
    if not needed <= processor() | {"AuthenticAMD"}:  # an Intel is slower with those of AMD, and knows them
        pytest.skip("this processor does not know these instructions")
    found = kernels(flags)
    weight, rows = rounded(random(75, 146, seed=7)), random(19, 146).to(torch.bfloat16)
    exact = rows.double() @ weight.dequantized().double().T
    whole = NativeHead(Team(found, 1), weight)(rows)
    # By instructions that multiply four bytes at once a row's inputs are whole numbers of 15 bits, too.
    assert error(whole, exact) < (1e-4 if "-mavx512vnni" in flags else 1e-6)
    for threads in (1, 2):
        head = NativeHead(Team(found, threads), weight)
        for count in range(1, len(rows) + 1):
            assert torch.equal(head(rows[-count:]), whole[-count:]), f"{count} rows, {threads} threads"


@pytest.mark.parametrize("flags", [flags for needed, flags in KINDS if needed <= processor()], ids=str)
def test_rows_that_are_odd_keep_to_themselves(flags: tuple[str, ...]) -> None:
    weight, rows = rounded(random(40, 70)), random(7, 70, seed=1).to(torch.bfloat16)
    head = NativeHead(Team(kernels(flags), 1), weight)
    usual = head(rows)
    rows[1, 3], rows[2, 69], rows[4] = torch.nan, -torch.inf, 0
    rows[5] *= 1e-34
    found = head(rows)
    assert not bool(found[[1, 2]].isfinite().any())
    assert not bool(found[4].any()) and bool((found[5].abs() < 1e-30).all())
    assert torch.equal(found[[0, 3, 6]], usual[[0, 3, 6]])
    alone = NativeHead(Team(kernels(flags), 1), weight)(rows[4:5])
    assert torch.equal(found[4:5].view(torch.int32), alone.view(torch.int32))  # zeros bear no sign of others


def test_every_number_and_place_of_a_line_counts() -> None:
    numbers = torch.arange(-LARGEST, LARGEST + 1).to(torch.int8)
    team = Team(kernels(), 1)
    for half in range(2):
        weight = torch.zeros(len(numbers), 2, dtype=torch.int8)
        weight[:, half] = numbers
        rows = torch.tensor([[3.0, 3.0]]).to(torch.bfloat16)
        out = NativeHead(team, Int8Matrix(weight, torch.full((len(numbers),), 0.5)))(rows)[0]
        assert torch.equal(out, 1.5 * numbers.float())


def test_gates_and_biases_are_where_they_are_without_rounding() -> None:
    team, x = Team(kernels(), 2), random(5, 64).to(torch.bfloat16)
    weight, bias = random(64, 64, seed=1), random(64, seed=2)
    found = []
    for matrix in (rounded(weight), rounded(weight).dequantized()):
        out, program = torch.empty(5, 32, dtype=torch.bfloat16), Program(team)
        program.product(x, Packed(team, matrix, bias, silu=True), out)
        program.run(BatchFrame(Frame(5)))
        found.append(out)
    assert error(*found) < 1e-2


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_says_nearly_the_same(tmp_path: Path, tied: bool) -> None:
    folder = tiny(tmp_path, tie_word_embeddings=tied)
    usual, found = logits(folder), logits(folder, quantize="int8")
    assert not torch.equal(usual, found) and error(found, usual) < 0.03


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_prepared_folder_gives_the_same_bits(tmp_path: Path, kind: str, tied: bool) -> None:
    folder = tiny(tmp_path / "model", kind=kind, tie_word_embeddings=tied)
    prepared = prepare_as("int8", folder, tmp_path / "int8")
    expected = logits(folder, quantize="int8")
    assert torch.equal(logits(prepared), expected)
    assert torch.equal(logits(prepared, quantize="int8", kernels="native"), expected)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    lent = TargetCheckpoint.of(prepared).lm_head(torch.tensor([3, 5]))
    assert error(lent, TargetCheckpoint.of(folder).lm_head(torch.tensor([3, 5]))) < 0.01
    size = sum(tensor.nbytes for tensor in load_file(prepared / "model.safetensors").values())
    assert size < 0.6 * sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())


def test_a_tied_embedding_that_is_stored_as_the_head_is_prepared_and_rounded_as_any(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "model", tie_word_embeddings=True)
    usual, whole = logits(folder), logits(folder, quantize="int8")
    store_as_the_head(folder)
    assert torch.equal(logits(folder), usual) and torch.equal(logits(folder, quantize="int8"), whole)
    assert torch.equal(logits(prepare_as("int8", folder, tmp_path / "int8")), whole)
    assert torch.equal(logits(prepare_as("bfloat16", folder, tmp_path / "other")), usual)


@pytest.mark.parametrize("kind", ["bfloat16", "float32"])
def test_other_kinds_are_rounded_once(tmp_path: Path, kind: str) -> None:
    folder = tiny(tmp_path / "model")
    prepared = prepare_as(kind, folder, tmp_path / kind)
    usual, found = load_file(folder / "model.safetensors"), load_file(prepared / "model.safetensors")
    dtype = getattr(torch, kind)
    assert found.keys() == usual.keys()
    assert all(torch.equal(found[name], tensor.to(dtype) if tensor.dim() == 2 else tensor)
               for name, tensor in usual.items())
    assert torch.equal(logits(prepared), logits(folder))


def test_it_is_prepared_once_and_never_over_something_else(tmp_path: Path) -> None:
    folder, place = tiny(tmp_path / "model"), tmp_path / "int8"
    prepare_as("int8", folder, place)
    assert len({path.stat().st_mode for path in place.iterdir()}) == 1, "who serves it may be somebody else"
    written = (place / "model.safetensors").stat().st_mtime_ns
    assert prepare_as("int8", folder, place) == place
    assert (place / "model.safetensors").stat().st_mtime_ns == written
    (place / "model.safetensors").write_bytes(b"")  # no longer complete
    prepare_as("int8", folder, place)
    with pytest.raises(ModelError, match=r"holds something else.*--to"):
        prepare_as("bfloat16", folder, place)
    with pytest.raises(ModelError, match=r"holds something else.*--to"):
        prepare_as("int8", tiny(tmp_path / "other", seed=1), place)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(ModelError, match="holds something else"):
        prepare_as("int8", folder, tmp_path / "mine")
    with pytest.raises(ModelError, match="int8 already"):
        prepare_as("int8", place, tmp_path / "again")
    with pytest.raises(ModelError, match=r"--dtype: 'int4' is not known; use one of int8, bfloat16, float32"):
        prepare_as("int4", folder, tmp_path / "four")


def test_what_stands_beside_the_weights_comes_along(tmp_path: Path) -> None:
    """The template for tools that transformers saves in a folder of its own stayed behind, and what was changed in the
    source since (a template, positions in config.json) was not seen: the command said that all was done."""
    folder, place = tiny(tmp_path / "model"), tmp_path / "int8"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("<tool_call>")
    (folder / "chat_template.jinja").write_text("plain")
    prepare_as("int8", folder, place)
    assert template_source(place) == template_source(folder) and is_prepared(place)
    receipt = json.loads((place / RECEIPT).read_text())
    (folder / "chat_template.jinja").write_text("other")
    with pytest.raises(ModelError, match=r"int8: was made before what stands beside .*model's weights was changed"):
        prepare_as("int8", folder, place)
    (place / RECEIPT).write_text(json.dumps({name: said for name, said in receipt.items() if name != "beside"}))
    assert prepare_as("int8", folder, place) == place, "one of an earlier version, which does not say"


def test_the_command_writes_beside_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny(tmp_path / "model")
    done = CliRunner().invoke(app, ["models", "prepare", str(folder), "--dtype", "int8"])
    assert done.exit_code == 0, done.output
    assert done.output.strip() == str(tmp_path / "model-int8")
    assert torch.equal(logits(tmp_path / "model-int8"), logits(folder, quantize="int8"))
    monkeypatch.chdir(folder)
    done = CliRunner().invoke(app, ["models", "prepare", ".", "--dtype", "bfloat16"])
    assert done.output.strip() == str(tmp_path / "model-bfloat16"), repr(done.exception)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "link").symlink_to(folder)
    done = CliRunner().invoke(app, ["models", "prepare", str(tmp_path / "mine" / "link"), "--dtype", "bfloat16"])
    assert done.output.strip() == str(tmp_path / "mine" / "link-bfloat16"), "not beside what is perhaps another's"


def test_the_command_writes_where_a_shell_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--to=~/there``, which no shell expands, made a folder called ~; ``--to .`` failed once all was converted."""
    folder = tiny(tmp_path / "model")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    for given, place in (("~/there", tmp_path / "there"), (".", tmp_path / "here")):
        done = CliRunner().invoke(app, ["models", "prepare", str(folder), "--dtype", "int8", f"--to={given}"])
        assert done.output.strip() == str(place), repr(done.exception)
        assert (place / "model.safetensors").is_file()


def broken(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


MATRIX = "model.layers.1.mlp.down_proj.weight"
SCALES = f"{MATRIX}_scale"


@pytest.mark.parametrize(("change", "said"), [
    (lambda t: t.pop(SCALES), f"tensor {SCALES} is missing"),
    (lambda t: t.pop(MATRIX), f"tensor {MATRIX} is missing"),
    (lambda t: t.update({SCALES: t[SCALES][:1].contiguous()}), rf"{SCALES} has shape \(1,\), expected \(64,\)"),
    (lambda t: t.update({MATRIX: t[MATRIX][:, :8].contiguous()}), rf"{MATRIX} has shape \(64, 8\), expected"),
    (lambda t: t.update({MATRIX: t[MATRIX].int()}), f"{MATRIX}: expected int8 with scales of float32, found int32"),
    (lambda t: t.update({SCALES: t[SCALES].double()}), f"{MATRIX}: .* found int8 with float64"),
    (lambda t: t[MATRIX].__setitem__((5, 5), -128), f"{MATRIX}: numbers must be from -127 to 127, found -128"),
    (lambda t: t[SCALES].__setitem__(5, 0), f"{SCALES}: scales must be finite and above 0"),
    (lambda t: t[SCALES].__setitem__(5, -1), f"{SCALES}: scales must be finite and above 0"),
    (lambda t: t[SCALES].__setitem__(5, torch.nan), f"{SCALES}: scales must be finite and above 0"),
    (lambda t: t[SCALES].__setitem__(5, torch.inf), f"{SCALES}: scales must be finite and above 0"),
    (lambda t: t.update({MATRIX: t[MATRIX].float()}), f"{MATRIX}: expected int8 with scales of float32, found float32"),
])
def test_a_stored_matrix_is_checked(tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object],
                                    said: str) -> None:
    prepared = prepare_as("int8", tiny(tmp_path / "model"), tmp_path / "int8")
    broken(prepared, change)
    with pytest.raises(ModelError, match=said):
        load_model(prepared, ModelSection())


@pytest.mark.parametrize("note", [{"ignore": ["gate"] * 999, "quant_method": "compressed-tensors"}, "int8", {},
                                  {"quant_method": "gptq", "bits": 4}, {**NOTE, "format": 2}])
def test_what_others_have_quantised_is_refused_by_the_field(tmp_path: Path, note: object) -> None:
    folder = tiny(tmp_path / "model")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {FIELD: note}))
    with pytest.raises(ModelError, match=r"config\.json: quantization_config: quant_method .{2,20} is not supported"):
        load_model(folder, ModelSection())


def test_whole_numbers_without_their_note_are_refused(tmp_path: Path) -> None:
    prepared = prepare_as("int8", tiny(tmp_path / "model"), tmp_path / "int8")
    path = prepared / "config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != FIELD}))
    with pytest.raises(ModelError, match=r"tensor .* holds int8.*quantization_config"):
        load_model(prepared, ModelSection(kernels="native"))


def in_eight_bits(tensors: dict[str, torch.Tensor], kind: torch.dtype, scale: str) -> dict[str, torch.Tensor]:
    """Matrices of layers as other programs quantise them, with scales beside them."""
    matrices = {name: tensor / 0.01 for name, tensor in tensors.items() if "_proj" in name}
    return (tensors | {name: numbers.clamp(-127, 127).to(kind) for name, numbers in matrices.items()}
            | {name.removesuffix("weight") + scale: torch.full((), 0.01) for name in matrices})


@pytest.mark.parametrize("engine", ["decoder", "hf"])
@pytest.mark.parametrize(("kind", "scale", "said"), [
    (torch.float8_e4m3fn, "weight_scale", "float8_e4m3fn"),  # ModelOpt: its note is a file of its own
    (torch.float8_e4m3fn, "weight_scale_inv", "float8_e4m3fn"), (torch.int8, "weight_scale", "int8"),
    (torch.float8_e4m3fnuz, "weight_scale", "float8_e4m3fnuz")])
def test_eight_bits_without_a_note_are_no_plain_numbers(tmp_path: Path, engine: str, kind: torch.dtype, scale: str,
                                                        said: str) -> None:
    folder = tiny(tmp_path / "model")
    save_file(in_eight_bits(load_file(folder / "model.safetensors"), kind, scale), folder / "model.safetensors",
              metadata={"format": "pt"})
    match = rf"tensor model\.layers\.0\..*_proj\.weight holds {said}, .* no quantization_config"
    with pytest.raises(ModelError, match=match):
        load_model(folder, ModelSection.model_validate({"dtype": "float32", "engine": engine}))
    with pytest.raises(ModelError, match=match):
        part_of(folder, ModelSection(dtype="float32", tensor_parallel=2))
    with pytest.raises(ModelError, match=match):
        prepare_as("bfloat16", folder, tmp_path / "prepared")


ELSEWHERE = [{"dtype": "float32"}, {"engine": "hf"}, {}, {"kernels": "torch"}]


@pytest.mark.parametrize("other", ELSEWHERE)
def test_it_is_refused_where_other_kernels_compute(tmp_path: Path, other: dict[str, Any]) -> None:
    folder = tiny(tmp_path / "model")
    prepared = prepare_as("int8", folder, tmp_path / "int8")
    for path, how in ((folder, {"quantize": "int8"}), (prepared, {})):
        with pytest.raises(ModelError, match=r"model\.quantize: int8 is for the CPU kernels of our own"):
            load_model(path, ModelSection(**how, **other), compile_layers=not other)
    with pytest.raises(ModelError, match=r"model\.quantize: .* int8 already"):
        load_model(prepared, ModelSection(quantize="fp8"))


def test_ranks_do_not_share_it_out(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "model")
    prepared = prepare_as("int8", folder, tmp_path / "int8")
    for path, quantize in ((folder, "int8"), (prepared, "none")):
        section = ModelSection.model_validate({"path": str(path), "tensor_parallel": 2, "quantize": quantize})
        with pytest.raises(ModelError, match=r"model\.tensor_parallel: int8"):
            part_of(path, section)


def test_a_prepared_known_model_keeps_its_head(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "model")
    receipt = {"format": FORMAT, "name": "smollm2-135m", "source": {"sha256": "0"},
               "files": {"model.safetensors": (folder / "model.safetensors").stat().st_size}}
    (folder / RECEIPT).write_text(json.dumps(receipt))
    prepared = prepare_as("int8", folder, tmp_path / "int8")
    assert is_prepared(prepared) and head_for(str(prepared)) is HEADS["smollm2-135m-eagle3"]


@pytest.mark.parametrize("kind", ["standalone", "eagle3"])
def test_a_draft_of_whole_numbers_grows_trees(tmp_path: Path, kind: str) -> None:
    target = tiny(tmp_path / "target", num_hidden_layers=6)
    head = target if kind == "standalone" else write_eagle_folder(
        tmp_path / "head", eagle_config(hidden_size=64, num_attention_heads=2, num_key_value_heads=1,
                                        target_hidden_size=64))

    def grown(quantize: str = "int8", kernels: str = "auto", **settings: Any) -> list[int]:
        model = ModelSection.model_validate({"path": str(target), "kernels": kernels})
        section = DraftSection.model_validate({"model": str(head), "quantize": quantize,
                                               "drafter": kind, **settings})
        drafter = load(section, model, 400)
        drafter.open([Open(1, np.array(TEXT, np.int32), len(TEXT), Sampling())])
        if drafter.features is not None:
            count = len(TEXT) - 1
            content = random(count, drafter.features.width).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
            drafter.absorb([Features(1, 0, content, count, "bfloat16")])
        (growth,) = drafter.grow([1], [8])
        return [int(token) for token in growth.tokens]

    assert len(grown()) == len(grown("auto", kernels="torch")) == 8
    assert grown("auto") == grown("int8" if kind == "eagle3" else "none")
    for other in ({"dtype": "float32"}, {"kernels": "torch"}, {"compile": True}):
        with pytest.raises(ModelError, match=r"draft\.quantize: int8 is for the CPU kernels of our own"):
            grown(**other)


@pytest.mark.parametrize("draft_vocab", [96, VOCAB])
def test_a_heads_matrices_are_whole_numbers_when_that_is_wanted_and_not_else(tmp_path: Path, draft_vocab: int) -> None:
    target, config = tiny(tmp_path / "target", num_hidden_layers=6), eagle_config(
        hidden_size=64, num_attention_heads=2, num_key_value_heads=1, target_hidden_size=64,
        draft_vocab_size=draft_vocab)
    head = read_head(write_eagle_folder(tmp_path / "head", config), target)
    found = {}
    for kernels_of, whole in (("torch", False), ("native", False), ("native", True)):
        network = EagleNetwork(head, "bfloat16", torch.device("cpu"), 64, kernels=kernels_of, to_int8=whole)
        content = random(20, network.features.width).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
        (rows,) = network.read([Features(0, 0, content, 20, "bfloat16")])
        found[kernels_of, whole] = network.forward(rows_batch(network.slots.alloc(20), network.device, rows)).logits
    usual = error(found["native", False], found["torch", False])
    assert usual < 8e-3 < error(found["native", True], found["torch", False]) < 0.04


def test_other_drafts_are_refused(tmp_path: Path) -> None:
    model = ModelSection(path=str(tmp_path))
    with pytest.raises(ModelError, match=r"draft\.quantize: int8 is for eagle3, standalone; use none with eagle2"):
        load(DraftSection(drafter="eagle2", quantize="int8"), model)
    with pytest.raises(ModelError, match=r"draft\.quantize: .* use none with mtp"):
        load(DraftSection(drafter="mtp", quantize="int8"), model)
