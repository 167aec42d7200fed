"""The engine as a GPU runs it: on a device that is one in name, with FlashInfer's interface and CUDA's graphs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType

import numpy as np
import pytest
import torch

from slipstream.engine.attention import Attend, PagePlan, PageTensors, TorchAttention, attend_pages
from slipstream.engine.batch import BatchBuilder, ForwardBatch
from slipstream.engine.decoder import Decoder
from slipstream.engine.flashinfer import FlashInferAttention
from slipstream.engine.graphs import CudaCapture, GraphedDecoder, Size
from slipstream.engine.kv import KVPool, SlotTable
from slipstream.engine.model import ModelConfig, parse_config
from tests.pretended import GPU, Gpu, pretended
from tests.test_flashinfer import PlainWrapper
from tests.tiny import tiny_config, tiny_tensors
from tests.trees import random_tree

CPU, SLOTS = torch.device("cpu"), 400
SIZES = [Size(4, 2), Size(8, 3), Size(24, 5)]


def config() -> ModelConfig:
    return parse_config(tiny_config(num_attention_heads=4, num_key_value_heads=2, head_dim=64), "test")


Kernel = Callable[[torch.Tensor, torch.Tensor, PageTensors, float], torch.Tensor]
attended: Kernel = attend_pages


def library(gpu: Gpu, attends: Kernel = attended) -> ModuleType:
    class Wrapper(PlainWrapper):
        """Its kernel is a launch: what it reads, it reads when the launch is its turn."""

        def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor, firsts: torch.Tensor, limits: torch.Tensor,
                words: torch.Tensor, sm_scale: float, *, out: torch.Tensor) -> torch.Tensor:
            indptr, kv_indptr, indices, _ = self._buffers

            def kernel(q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor, *pages: torch.Tensor) -> None:
                out.copy_(attends(q, kv, PageTensors(*pages), sm_scale).view(out.shape))

            gpu.launch(kernel, q, paged_kv_cache[:, :, 0], out, indptr, kv_indptr, indices, firsts, limits, words)
            return out

    module = ModuleType("flashinfer")
    module.__spec__ = ModuleSpec("flashinfer", None)
    vars(module)["BatchPrefillWithPagedKVCacheWrapper"] = Wrapper
    return module


class LaunchedPages:
    """Torch's attention over pages as a kernel; see ``attention.PagedAttention``."""

    def __init__(self, config: ModelConfig, gpu: Gpu) -> None:
        self._scale, self._gpu = config.head_dim**-0.5, gpu

    def plan(self, batch: ForwardBatch) -> Attend:
        raise AssertionError("fixed ones only")

    def fixed(self, pages: PageTensors, own_plan: bool = False) -> FixedLaunchedPages:
        assert own_plan, "several are planned before one runs"
        return FixedLaunchedPages(pages, self._scale, self._gpu)


class FixedLaunchedPages:
    def __init__(self, pages: PageTensors, scale: float, gpu: Gpu) -> None:
        self._pages, self._scale, self._gpu = pages, scale, gpu

    def replan(self, plan: PagePlan) -> bool:
        return True

    def __call__(self, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        def kernel(q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor, *pages: torch.Tensor) -> None:
            out.copy_(attend_pages(q, kv, PageTensors(*pages), self._scale))

        out = torch.empty(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)
        self._gpu.launch(kernel, q, kv, out, *self._pages)
        return out


def batches(dice: np.random.Generator) -> list[BatchBuilder]:
    """Steps, trees and a chunk, behind contexts of 1 to 90 tokens."""
    order, found = dice.permutation(SLOTS - 24).astype(np.int64), []
    for count in (1, 1, 2, 1, 3, 2, 4):
        builder, taken = BatchBuilder(), 0
        for _ in range(count):
            tree = random_tree(dice, int(dice.integers(1, 6)))
            rows, context = len(tree), int(dice.integers(1, 90))
            own = order[taken + context : taken + context + rows]
            words = tree.ancestors() if rows > 1 else None
            builder.add(dice.integers(256, size=rows).tolist(), range(context, context + rows), own.tolist(),
                        order[taken : taken + context], words, rows if words else 0)
            taken += context + rows
        found.append(builder)
    return found


def kv_of(config: ModelConfig) -> torch.Tensor:
    shape = (config.num_layers, SLOTS, 2, config.num_kv_heads, config.head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(2)).bfloat16()


@dataclass(frozen=True)
class Captured:
    """A model whose steps a GPU in name captures, and the same one on a CPU; their pools hold the same."""

    gpu: Gpu
    model: GraphedDecoder
    far: KVPool
    right: Decoder
    pool: KVPool


@contextmanager
def captured(monkeypatch: pytest.MonkeyPatch) -> Iterator[Captured]:
    shape = config()
    tensors = tiny_tensors(tiny_config(num_attention_heads=4, num_key_value_heads=2, head_dim=64))
    right = Decoder(shape, tensors, torch.bfloat16, CPU, attention=TorchAttention(shape, torch.bfloat16))
    pool = KVPool(shape.num_layers, SLOTS, shape.num_kv_heads, shape.head_dim, torch.bfloat16)
    pool.kv.copy_(kv_of(shape))
    with pretended() as gpu:
        monkeypatch.setitem(sys.modules, "flashinfer", library(gpu))
        attention = FlashInferAttention(shape, torch.bfloat16, GPU)
        decoder = Decoder(shape, tensors, torch.bfloat16, GPU, attention=attention)
        model = GraphedDecoder(decoder, attention, CudaCapture(GPU), SIZES)
        slots = SLOTS + model.spare_slots
        far = KVPool(shape.num_layers, slots, shape.num_kv_heads, shape.head_dim, torch.bfloat16, GPU)
        assert model.warm(far, 3) == len(gpu.graphs) == len(SIZES)
        far.kv[:, :SLOTS].copy_(kv_of(shape))
        yield Captured(gpu, model, far, right, pool)


def test_captured_steps_on_a_gpu_in_name(monkeypatch: pytest.MonkeyPatch) -> None:
    dice = np.random.default_rng(5)
    with captured(monkeypatch) as c:
        gpu, model, far, right, pool = c.gpu, c.model, c.far, c.right, c.pool
        for turn, builder in enumerate(batches(dice)):
            gpu.waits.clear()
            found, tapped = model.forward(builder.build(GPU), far, (0, 2))
            assert not gpu.waits or len(gpu.graphs) > len(SIZES), gpu.waits
            logits = model.logits(found).cpu()
            expected, taps = right.forward(builder.build(), pool, (0, 2))
            assert tapped is not None and taps is not None
            difference = (logits - right.logits(expected)).abs().max()
            assert float(difference) < 0.05 * float(right.logits(expected).abs().max()), turn


def test_captured_steps_over_a_table_wait_for_nothing_on_a_gpu_in_name(monkeypatch: pytest.MonkeyPatch) -> None:
    dice = np.random.default_rng(6)
    with captured(monkeypatch) as c:
        gpu, model, far, right, pool = c.gpu, c.model, c.far, c.right, c.pool
        table, order = SlotTable(range(SLOTS, SLOTS + model.spare_slots)), dice.permutation(SLOTS - 24)
        rows = [table.add_row(200) for _ in range(3)]
        for row, own in zip(rows, np.split(order[:240], 3), strict=True):
            row.write(0, own)
        for turn in range(5):
            listed, by_row = BatchBuilder(), BatchBuilder()
            for row in rows[: 1 + turn % 3]:
                length = 20 + 5 * turn
                own = [int(row.slots[length])]
                listed.add([turn], [length], own, row.slots[:length].copy())
                by_row.add_row([turn], [length], own, row, length)
            gpu.waits.clear()
            found, _ = model.forward(by_row.build(GPU), far)
            assert not gpu.waits, gpu.waits
            expected = right.logits(right.forward(listed.build(), pool)[0])
            assert float((model.logits(found).cpu() - expected).abs().max()) < 0.05 * float(expected.abs().max()), turn
        assert len(gpu.graphs) == model.num_graphs == len(SIZES)
