"""Products in 8 bits: what they are to be, that the kernel is given what it wants, and who may have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.base.config import DraftSection, ModelSection
from slipstream.base.errors import ModelError
from slipstream.drafting import Drafter
from slipstream.drafting.heads.checkpoint import read_eagle2_head, read_head
from slipstream.drafting.heads.eagle import EagleNetwork
from slipstream.drafting.loading import load
from slipstream.engine.batch import rows_batch
from slipstream.engine.fp8 import LARGEST, Fp8Weights, gpu_product, into_fp8, reference_product, rounded
from slipstream.engine.loading import load_model
from slipstream.engine.ops.layer import Linear
from slipstream.engine.runner import ModelRunner
from slipstream.protocol.messages import Features, Open
from slipstream.protocol.requests import Sampling
from tests.eagle_folder import eagle2_config, eagle_config, write_eagle2_folder, write_eagle_folder
from tests.sequences import run
from tests.tiny import write_tiny_model

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
TEXT = list(b"A draft tree is a tree of draft tokens.")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def alike(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack((a.flatten().float(), b.flatten().float())))[0, 1])


def test_numbers_keep_four_bits_and_a_row_its_largest() -> None:
    x = random(7, 64) * torch.logspace(-6, 6, 7)[:, None]
    x[3] = 0
    found, scale = rounded(x)
    error = (found.double() * scale.double() - x.double()).abs()
    finest = scale.double() * 2.0**-10  # half of the least number of e4m3
    assert bool((error <= torch.maximum(x.double().abs() * 2**-4 * 1.001, finest)).all())
    assert float(found.float().abs().amax(-1)[0]) == LARGEST and not bool(found[3].float().any())
    assert not bool(found.float().isnan().any())


def test_a_row_does_not_depend_on_its_company() -> None:
    x = random(9, 64)
    found, scale = rounded(x)
    alone, own = rounded(x[4:5])
    assert torch.equal(found[4:5].float(), alone.float()) and torch.equal(scale[4:5], own)


def test_the_rule_is_the_product_of_what_was_rounded(device: torch.device) -> None:
    x, weight = rounded(random(5, 64)), rounded(random(48, 64, seed=1))
    (a, a_scale), (b, b_scale) = ((part.double() * scale.double(), scale) for part, scale in (x, weight))
    right = a @ b.t()
    assert float((reference_product(*x, *weight).double() - right).abs().max()) < 2**-8 * float(right.abs().max())
    found = gpu_product(*(part.to(device) for part in (*x, *weight))).cpu()
    assert found.dtype == torch.bfloat16
    assert float((found.double() - right).abs().max()) < 2**-7 * float(right.abs().max())
    assert a_scale.shape == (5, 1) and b_scale.shape == (48, 1)


@pytest.mark.parametrize("bias", [None, random(48, seed=2)])
def test_a_linear_in_fp8_gives_its_weights_up(bias: torch.Tensor | None) -> None:
    weight, x = random(48, 64, seed=1), random(200, 64)
    linear = Linear(weight, bias)
    usual = linear(x)
    linear.replace_product(Fp8Weights(weight))
    assert linear.weight().numel() == 0
    for rows in (1, 200):
        assert alike(linear(x[:rows]), usual[:rows]) > 0.998


def test_a_model_in_fp8_says_nearly_the_same(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, **SHAPE)
    usual, found = (run(ModelRunner(load_model(folder, ModelSection(quantize=how)), 256), TEXT)[0]
                    for how in ("none", "fp8"))
    assert not torch.equal(usual, found) and alike(usual, found) > 0.99, alike(usual, found)


@pytest.mark.parametrize(("other", "said"), [
    ({"dtype": "float32"}, "dtype bfloat16, and this is float32"), ({"kernels": "native"}, "without kernels native"),
    ({"engine": "hf"}, "engine decoder"), ({}, "without compile")])
def test_it_is_refused_elsewhere(tmp_path: Path, other: dict[str, Any], said: str) -> None:
    folder = write_tiny_model(tmp_path, **SHAPE)
    with pytest.raises(ModelError, match=rf"quantize: .*{said}"):
        load_model(folder, ModelSection(quantize="fp8", **other), compile_layers=not other)


def test_a_shape_that_the_kernel_does_not_take_stays_as_it_is() -> None:
    linears = [Linear(random(rows, columns)) for rows, columns in ((48, 64), (48, 50), (50, 64))]
    into_fp8(linears)
    assert [linear.weight().numel() for linear in linears] == [0, 48 * 50, 50 * 64]


def head_of(kind: str, folder: Path) -> Path:
    if kind == "eagle3":
        return write_eagle_folder(folder, eagle_config(target_hidden_size=64))
    return write_eagle2_folder(folder, eagle2_config(hidden_size=64, head_dim=16))


@pytest.mark.parametrize("kind", ["eagle3", "eagle2"])
def test_a_head_in_fp8_says_nearly_the_same(tmp_path: Path, kind: str) -> None:
    target = write_tiny_model(tmp_path / "target", num_hidden_layers=6, **SHAPE)
    folder, cpu = head_of(kind, tmp_path / "head"), torch.device("cpu")

    def logits(eight: bool) -> torch.Tensor:
        network = (EagleNetwork(read_head(folder, target), "bfloat16", cpu, 64) if kind == "eagle3"
                   else EagleNetwork(read_eagle2_head(folder, target, None), "bfloat16", cpu, 64))
        if eight:
            into_fp8(network.linears())
        states = random(20, network.features.width)
        content = states.view(torch.uint8).numpy().tobytes()
        (rows,) = network.read([Features(0, 0, content, 20, "bfloat16")])
        return network.forward(rows_batch(network.slots.alloc(20), cpu, rows)).logits

    usual, found = logits(False), logits(True)
    assert not torch.equal(usual, found) and alike(usual, found) > 0.97, alike(usual, found)


@pytest.mark.parametrize("kind", ["standalone", "eagle3", "eagle2"])
def test_a_draft_in_fp8_grows_trees(tmp_path: Path, kind: str) -> None:
    target = write_tiny_model(tmp_path / "target", num_hidden_layers=6, **SHAPE)
    head = target if kind == "standalone" else head_of(kind, tmp_path / "head")
    model = ModelSection(path=str(target))

    def drafter(**settings: object) -> Drafter:
        section = DraftSection.model_validate({"model": str(head), "quantize": "fp8", "drafter": kind,
                                               **settings})
        return load(section, model, 400)

    eight = drafter()
    eight.open([Open(1, np.array(TEXT, np.int32), len(TEXT), Sampling())])
    if eight.features is not None:
        count = len(TEXT) - 1
        content = random(count, eight.features.width).view(torch.uint8).numpy().tobytes()
        eight.absorb([Features(1, 0, content, count, "bfloat16")])
    (growth,) = eight.grow([1], [8])
    assert len(growth.tokens) == 8
    with pytest.raises(ModelError, match=r"quantize: fp8 is for dtype bfloat16"):
        drafter(dtype="float32")
    if kind != "standalone":
        with pytest.raises(ModelError, match=r"draft\.quantize: it is for drafters without compile"):
            drafter(compile=True)


def test_layers_of_a_model_that_predict_further_tokens_are_not_quantized(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"draft\.quantize: fp8 is for block, eagle2, eagle3, standalone; use none"):
        load(DraftSection(drafter="mtp", quantize="fp8"), ModelSection(path=str(tmp_path)))
