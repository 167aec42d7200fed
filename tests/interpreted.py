"""``python -m tests.interpreted``, with TRITON_INTERPRET=1 set: the fused kernels in Triton's interpreter, on a CPU,
beside torch's operations and float64. What it prints last is how many numbers were compared, and that none differed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from bench.gpu.shapes import TINY, config_of, decoder_shapes, random_tensors
from slipstream.engine.attention import TorchAttention
from slipstream.engine.batch import BatchBuilder
from slipstream.engine.decoder import Decoder
from slipstream.engine.fp8 import LARGEST
from slipstream.engine.fp8_blocks import E4M3
from slipstream.engine.graphs import GraphedDecoder, Size, capture_eager
from slipstream.engine.model import ModelConfig
from slipstream.engine.ops.fused import (
    DTYPES,
    MOST_WIDTH,
    compared,
    difference,
    rounded_rows,
    triton_operations,
    triton_rounding,
)
from slipstream.engine.ops.layer import TORCH, Heads, Rope, Step, rms_norm
from tests.on_device import Subject, random_words

CPU, SEED, MANY = torch.device("cpu"), 13, 130
cast = interpreter.InterpreterBuilder.cast_impl


def nearest(builder: object, source: interpreter.TensorHandle, kind: tl.dtype) -> interpreter.TensorHandle:
    """float32 to bfloat16 as a GPU does it; the interpreter cuts the last bits off."""
    if kind.scalar != tl.bfloat16:
        return cast(builder, source, kind)
    rounded = torch.from_numpy(np.ascontiguousarray(source.data)).to(torch.bfloat16)
    return interpreter.TensorHandle(rounded.view(torch.int16).numpy().view(np.uint16), kind.scalar)


def widened(builder: object, source: interpreter.TensorHandle, kind: tl.dtype) -> interpreter.TensorHandle:
    """bfloat16 to float32 likewise; the interpreter misreads the smallest numbers."""
    if source.dtype.scalar != tl.bfloat16:
        return cast(builder, source, kind)
    return interpreter.TensorHandle((source.data.astype(np.uint32) << 16).view(np.float32), kind.scalar)


def nearest_of_8_bits(_builder: object, source: interpreter.TensorHandle, kind: tl.dtype,
                      _rounding: object) -> interpreter.TensorHandle:
    """float32 to e4m3 likewise; the interpreter takes the larger of two that are as near."""
    rounded = torch.from_numpy(np.ascontiguousarray(source.data)).to(E4M3)
    return interpreter.TensorHandle(rounded.view(torch.uint8).numpy(), kind.scalar)


def configs() -> Iterator[tuple[ModelConfig, int]]:
    """Shapes and row counts: every head size of the task, odd sizes, the widest row, many rows."""
    dice, base = np.random.default_rng(SEED), config_of(TINY)
    for size in (16, 64, 80, 96, 128):
        for qk_norm in (False, True):
            kv_heads = int(dice.integers(1, 4))
            yield replace(base, head_dim=size, num_kv_heads=kv_heads, num_heads=kv_heads * int(dice.integers(1, 6)),
                          hidden_size=int(dice.integers(3, 3000)), intermediate_size=int(dice.integers(3, 3000)),
                          qk_norm=qk_norm), int(dice.integers(1, 9))
    yield replace(base, hidden_size=MOST_WIDTH, intermediate_size=14_336), 2
    yield replace(base, hidden_size=24, intermediate_size=40, num_heads=1, num_kv_heads=1, head_dim=8), MANY


def against_torch() -> int:
    operations, count = triton_operations(), 0
    for config, rows in configs():
        for dtype in DTYPES if rows < MANY else DTYPES[:1]:
            assert difference(operations, config, dtype, CPU) == "", (SEED, config, dtype)
            for what, found, right in compared(operations, config, dtype, CPU, rows):
                steps = (found.view(torch.int16).int() - right.view(torch.int16).int()).abs()
                off, told = int((steps > 0).sum()), (SEED, what, config, rows, dtype)
                # A norm's sum has an order of its own, and an exponential a last bit of its own: now and then a number
                # falls to the other side of a step. Everything else is the same bits.
                exact = what == "sums" or (what in ("queries", "KV") and not config.qk_norm)
                assert off <= (0 if exact else 1e-3 * found.numel() + 1), (*told, off)
                assert what not in ("norms", "activations") or int(steps.max()) <= 2, told
                count += found.numel()
                print(f"{what:<12} {dtype!s:<15} {rows} rows, hidden {config.hidden_size}, heads of {config.head_dim}"
                      f"{', normed' * config.qk_norm}: {off} of {found.numel()} differ")
    return count


def in_8_bits() -> int:
    """Bit for bit, on rows of any width; what is no number stays none."""
    rounding, count = triton_rounding(), 0
    for width in (1, 16, 777, 4096, 14_336, 28_672):
        for what, found, right in rounded_rows(rounding, width, CPU):
            assert torch.equal(found, right), (what, width, int((found != right).sum()))
            count += found.numel()
    strange = torch.ones(3, 64, dtype=torch.bfloat16)
    strange[0, 5], strange[1, 7] = torch.nan, torch.inf
    numbers, scales = rounding(strange)
    assert bool((numbers.float() * scales).isnan()[[0, 1], [5, 7]].all())
    assert float(scales[2]) == 1 / np.float32(LARGEST)
    return count


def against_float64() -> None:
    """Each operation within the roundings that it makes, of numbers that were rounded once."""
    operations, base = triton_operations(), config_of(TINY)
    dice = torch.Generator().manual_seed(SEED)
    for dtype in DTYPES:
        eps = torch.finfo(dtype).eps
        x, added = (torch.randn(7, 777, generator=dice).to(dtype) for _ in range(2))
        weight = torch.randn(777, generator=dice).to(dtype)
        total, normed = operations.add_norm(x, added, weight, 1e-5)
        assert bool(((total.double() - x.double() - added.double()).abs() <= eps / 2 * total.double().abs()).all())
        right = rms_norm(total.double(), weight.double(), 1e-5)
        assert bool(((normed.double() - right).abs() <= 0.51 * eps * right.abs() + 1e-30).all()), SEED
        gate_up = 4 * torch.randn(7, 2 * 555, generator=dice).to(dtype)
        gate, up = gate_up.double().chunk(2, -1)
        right, found = torch.nn.functional.silu(gate) * up, operations.silu_mul(gate_up).double()
        assert bool(((found - right).abs() <= 1.05 * eps * right.abs() + torch.finfo(dtype).tiny).all()), SEED
        config = replace(base, head_dim=96)
        rows, slots = torch.randn(7, 5, 96, generator=dice).to(dtype), torch.arange(7)
        step = Step(slots * 31, slots, Rope(config, dtype, CPU), lambda q, _kv: q)
        kv = torch.zeros(7, 2, 1, 96, dtype=dtype)
        found = operations.rotate_and_store(rows, Heads(3, 1, 96, None, None, 1e-5), step, kv).double()
        right = rows.double() * step.cos.double() + rows.double().roll(48, -1) * step.sin.double()
        near = 1.01 * eps * rows[:, :3].double().abs().amax(-1, keepdim=True)
        assert bool(((found - right[:, :3]).abs() <= near).all()), SEED
        near = 1.01 * eps * rows[:, 3:4].double().abs().amax(-1, keepdim=True)
        assert bool(((kv[:, 0].double() - right[:, 3:4]).abs() <= near).all()), SEED
        assert torch.equal(kv[:, 1], rows[:, 4:])


def decoders() -> float:
    """A prompt and a tree on a whole decoder, with and without, and as captured steps with spoilt buffers. Returns the
    largest difference of a logit by the rows' root mean square."""
    config = config_of(TINY | {"model_type": "qwen3"})
    tensors, words = random_tensors(decoder_shapes(config), torch.bfloat16, CPU, SEED), random_words(
        np.random.default_rng(SEED), 5)
    pages = TorchAttention(config, torch.bfloat16)
    fused = Decoder(config, tensors, torch.bfloat16, CPU, triton_operations(), pages)
    graphed = GraphedDecoder(fused, pages, capture_eager, [Size(4, 2), Size(8, 3)])
    logits = []
    for model in (Decoder(config, tensors, torch.bfloat16, CPU, TORCH, pages), fused, graphed):
        subject = Subject.of(model, 40 + graphed.spare_slots)
        for kind in ("prompt", "tree"):
            builder = BatchBuilder()
            if kind == "prompt":
                builder.add(list(range(9)), range(9), list(range(20, 29)), np.zeros(0, np.int64), logits="all")
            else:
                builder.add(list(range(5)), [8 + word.bit_count() for word in words], [3, 1, 4, 15, 9],
                            np.arange(20, 29), words, 5)
            for buffer in graphed.buffers():
                buffer.fill_(torch.nan if buffer.is_floating_point() else 1 << 30)
            logits.append(subject.logits(builder))
    size = logits[1].square().mean().sqrt()
    assert torch.equal(logits[3], logits[5]) and torch.equal(logits[2], logits[4]), (SEED, "a graph of the same steps")
    return max(float((a - b).abs().max() / size) for a, b in zip(logits[:2], logits[2:4], strict=True))


def main() -> None:
    torch.set_num_threads(1)
    interpreter.InterpreterBuilder.create_fp_trunc = nearest
    interpreter.InterpreterBuilder.create_fp_ext = widened
    interpreter.InterpreterBuilder.create_fp_to_fp = nearest_of_8_bits
    count = against_torch() + in_8_bits()
    against_float64()
    far = decoders()
    assert far < 0.05, (SEED, far)
    print(f"{count} numbers compared; logits of a decoder differ by {far:.3g} of their size")


if __name__ == "__main__":
    main()
