"""The fused operations of layers, and what rounds to 8 bits: who gets them, that a trial sees a wrong one, and, where
Triton is (`make triton`), that the kernels compute what torch does and compile for an H100."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.gpu.shapes import TINY, config_of, decoder_shapes, random_tensors
from slipstream.engine.batch import BatchBuilder
from slipstream.engine.decoder import Decoder
from slipstream.engine.fp8 import LARGEST, Rounding, rounded
from slipstream.engine.fp8_blocks import E4M3
from slipstream.engine.ops.compiled import CompiledOps, before_attention
from slipstream.engine.ops.fused import (
    MOST_WIDTH,
    block,
    difference,
    operations_for,
    rounding_difference,
    rounding_for,
    unsupported_reason,
    warps,
)
from slipstream.engine.ops.layer import TORCH, Heads, Operations, Step
from tests.on_device import Subject, random_words

ROOT = Path(__file__).parent.parent
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CONFIG = config_of(TINY)
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None,
                                  reason="Triton is not installed: make triton")


def test_a_cpu_keeps_what_it_had() -> None:
    for choice in ("auto", "native", "torch"):
        assert operations_for(choice, CONFIG, torch.bfloat16, CPU) is TORCH
        assert rounding_for(choice, CONFIG, CPU) is rounded


def test_what_cannot_have_them_says_why() -> None:
    assert "this one is 'cpu'" in unsupported_reason(CONFIG, torch.bfloat16, CPU)
    assert "this model is float32" in unsupported_reason(CONFIG, torch.float32, CUDA)
    assert f"at most {MOST_WIDTH}" in unsupported_reason(replace(CONFIG, hidden_size=MOST_WIDTH + 1), torch.bfloat16,
                                                         CUDA)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines where a GPU's kernels must fail")
def test_what_fails_in_its_trial_is_a_reason_in_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    assert operations_for("auto", CONFIG, torch.bfloat16, CUDA) is TORCH
    told = capsys.readouterr().out
    assert "torch's operations in layers" in told and "reason=" in told
    assert rounding_for("auto", CONFIG, CUDA) is rounded
    told = capsys.readouterr().out
    assert "torch's rounding to 8 bits" in told and "reason=" in told
    assert operations_for("torch", CONFIG, torch.bfloat16, CUDA) is TORCH
    assert rounding_for("torch", CONFIG, CUDA) is rounded and not capsys.readouterr().out


def wrong_sum(x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, ...]:
    return x, TORCH.add_norm(x, added, weight, eps)[1]


def wrong_norm(x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, ...]:
    return TORCH.add_norm(x, added, weight + 0.1, eps)


def last_row_forgotten(gate_up: torch.Tensor) -> torch.Tensor:
    found = TORCH.silu_mul(gate_up)
    found[-1] = 0
    return found


def other_slot(rows: torch.Tensor, heads: Heads, step: Step, kv: torch.Tensor) -> torch.Tensor:
    other = copy(step)
    other.slots = (step.slots + 1) % len(kv)
    return TORCH.rotate_and_store(rows, heads, other, kv)


def turned_back(rows: torch.Tensor, heads: Heads, step: Step, kv: torch.Tensor) -> torch.Tensor:
    other = copy(step)
    other.sin = -step.sin
    return TORCH.rotate_and_store(rows, heads, other, kv)


def norms_exchanged(rows: torch.Tensor, heads: Heads, step: Step, kv: torch.Tensor) -> torch.Tensor:
    return TORCH.rotate_and_store(rows, replace(heads, q_norm=heads.k_norm, k_norm=heads.q_norm), step, kv)


@pytest.mark.parametrize(("field", "wrong", "named"), [
    ("add_norm", wrong_sum, "sums"), ("add_norm", wrong_norm, "norms"), ("silu_mul", last_row_forgotten, "activations"),
    ("rotate_and_store", other_slot, "KV"), ("rotate_and_store", turned_back, "queries"),
    ("rotate_and_store", norms_exchanged, "queries"),
])
def test_a_trial_sees_what_is_wrong(field: str, wrong: Callable[..., object], named: str) -> None:
    config = replace(CONFIG, qk_norm=True)
    assert difference(TORCH, config, torch.bfloat16, CPU) == ""
    broken: Operations = replace(TORCH, **{field: wrong})
    assert difference(broken, config, torch.bfloat16, CPU).startswith(named)


def a_bit_more(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    numbers, scales = rounded(x)
    return numbers, scales.nextafter(torch.ones(()))


def away_from_zero(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = rounded(x)[1]
    return (x.float() / scales * (1 + 2**-20)).clamp(-LARGEST, LARGEST).to(E4M3), scales


@pytest.mark.parametrize(("wrong", "named"), [(a_bit_more, "scales"), (away_from_zero, "numbers")])
def test_a_trial_sees_a_bit_of_8(wrong: Rounding, named: str) -> None:
    assert rounding_difference(rounded, CONFIG, CPU) == ""
    assert rounding_difference(wrong, CONFIG, CPU).startswith(named)


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_halves_that_can_be_compiled_are_those_of_the_specification(model_type: str, dtype: torch.dtype) -> None:
    config = config_of(TINY | {"model_type": model_type})
    tensors = random_tensors(decoder_shapes(config), dtype, CPU)
    words, logits = random_words(np.random.default_rng(0), 5), []
    for ops in (TORCH, CompiledOps(before_attention, TORCH.after_attention)):
        subject = Subject.of(Decoder(config, tensors, dtype, CPU, ops), 40)
        prompt, tree = BatchBuilder(), BatchBuilder()
        prompt.add(list(range(9)), range(9), list(range(20, 29)), np.zeros(0, np.int64), logits="all")
        tree.add(list(range(5)), [8 + word.bit_count() for word in words], [3, 1, 4, 15, 9], np.arange(20, 29), words,
                 5)
        logits.append(torch.cat((subject.logits(prompt), subject.logits(tree))))
    assert torch.equal(*logits) and bool(logits[0].isfinite().all())


def test_a_block_holds_its_row_and_threads_hold_little_of_it() -> None:
    for width in (1, 2, 64, 65, 576, 4096, 5000, MOST_WIDTH):
        assert width <= block(width) < 2 * width and block(width) <= 32 * 32 * warps(width)


def own_python(folder: Path, *arguments: str, **environment: str) -> str:
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=560,
                          env={**os.environ, "TRITON_CACHE_DIR": str(folder), **environment})
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


@needs_triton
def test_kernels_compute_what_torch_does(tmp_path: Path) -> None:
    told = own_python(tmp_path, "-m", "tests.interpreted", TRITON_INTERPRET="1")
    assert "numbers compared" in told.splitlines()[-1]


@needs_triton
def test_kernels_compile_for_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    assert "kernels compiled" in own_python(tmp_path, "-m", "tests.for_h100").splitlines()[-1]
