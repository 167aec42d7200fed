from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from slipstream.engine.int4 import FEW_ROWS, Int4Weights
from slipstream.engine.layers import Few, Linear
from slipstream.engine.runner import ModelRunner
from slipstream.engine.weights import load_model
from slipstream.errors import ModelError
from tests.sequences import run
from tests.tiny import write_tiny_model

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
TEXT = list(b"A draft tree is a tree of draft tokens.")


def in_groups(rows: int, columns: int) -> torch.Tensor:
    """bfloat16 weights that have 16 levels in each group of 32, both ends of them used."""
    dice = torch.Generator().manual_seed(0)
    levels = torch.randint(16, (rows, columns // 32, 32), generator=dice)
    levels[..., 0], levels[..., 1] = 0, 15
    least = -torch.rand(rows, columns // 32, 1, generator=dice)
    step = torch.rand(rows, columns // 32, 1, generator=dice) / 8
    return (least + step * levels).view(rows, columns).to(torch.bfloat16)


@pytest.mark.parametrize("bias", [None, torch.arange(48).to(torch.bfloat16)])
def test_weights_of_four_bits_are_read_as_they_are(bias: torch.Tensor | None) -> None:
    weight, x = in_groups(48, 64), torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    linear = Linear(weight, bias)
    assert torch.equal(linear.weight(), weight)
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    rounding = 2**-7 * F.linear(x.double().abs(), weight.double().abs()).max()
    usual = linear(x)
    linear.few = Few(Int4Weights(weight), FEW_ROWS)
    assert float((linear(x).double() - expected).abs().max()) < rounding
    assert not torch.equal(linear(x), usual)


def test_many_rows_read_the_weights_as_they_were(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, **SHAPE)
    usual, few = (ModelRunner(load_model(folder, "bfloat16", quantize=how), 256) for how in ("none", "int4"))
    assert torch.equal(run(usual, TEXT)[0], run(few, TEXT)[0])
    ours, theirs = run(usual, TEXT[:FEW_ROWS])[0], run(few, TEXT[:FEW_ROWS])[0]
    assert not torch.equal(ours, theirs)
    alike = float(torch.corrcoef(torch.stack((ours.flatten(), theirs.flatten())))[0, 1])
    assert alike > 0.97, alike  # random weights lose more than those of a trained model


@pytest.mark.parametrize(("other", "said"), [
    ({"dtype": "float32"}, "dtype bfloat16"), ({"exact": True}, "without exact"), ({"engine": "hf"}, "engine decoder")])
def test_it_is_refused_elsewhere(tmp_path: Path, other: dict[str, object], said: str) -> None:
    folder = write_tiny_model(tmp_path, **SHAPE)
    with pytest.raises(ModelError, match=rf"model\.quantize: .*{said}"):
        load_model(folder, **{"dtype": "bfloat16", "quantize": "int4", **other})


def test_a_shape_that_the_kernel_does_not_take_is_named(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)  # 48 columns
    with pytest.raises(ModelError, match=r"multiple of 16 rows and 32 columns; one of this model is \d+ x 48"):
        load_model(folder, "bfloat16", quantize="int4")
