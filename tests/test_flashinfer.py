"""What FlashInfer is told, and what happens where it is not. No kernel of it runs here: a library of its interface that
computes in plain torch stands in its place."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.engine.attention import (
    PageTensors,
    TorchAttention,
    attend_pages,
    packed,
    packed_size,
    plan_pages,
    visible,
    write_indices,
)
from slipstream.engine.batch import BatchBuilder, ForwardBatch
from slipstream.engine.flashinfer import VARIANT, FlashInferAttention, attention_for, unsupported_reason, variant
from slipstream.engine.model import ModelConfig, parse_config
from tests.test_attention import random_batch
from tests.tiny import tiny_config

CPU, HEAD_DIM = torch.device("cpu"), 64


def schedule(qo_indptr: torch.Tensor, seq_lens: torch.Tensor) -> list[int]:
    return [len(qo_indptr) - 1, int(qo_indptr[-1]), int(seq_lens.max() > 64)]


class Scheduler:
    """What the wrapper calls in the end, and touches no buffer but its workspaces."""

    def plan(self, floats: torch.Tensor, ints: torch.Tensor, pinned: torch.Tensor, qo_indptr: torch.Tensor,
             kv_indptr: torch.Tensor, kv_lens: torch.Tensor, rows: int, batch: int, *shape: object) -> list[int]:
        assert {t.dtype for t in (qo_indptr, kv_indptr, kv_lens)} == {torch.int32}
        assert torch.equal(kv_lens, kv_indptr.diff()) and (rows, batch) == (int(qo_indptr[-1]), len(qo_indptr) - 1)
        # Heads, KV heads, page size, in a graph, numbers of a head, causal, window, size of parts, none, others, even.
        assert shape == (4, 2, 1, True, HEAD_DIM, HEAD_DIM, False, -1, -1, False, 0, 0)
        return schedule(qo_indptr, kv_lens)


class PlainWrapper:
    """Takes what the real one takes (names and order are those of 0.7.2) and refuses what that would get wrong."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str, use_cuda_graph: bool = False,
                 qo_indptr_buf: Any = None, paged_kv_indptr_buf: Any = None, paged_kv_indices_buf: Any = None,
                 paged_kv_last_page_len_buf: Any = None, backend: str = "auto", jit_args: Any = None,
                 jit_kwargs: Any = None, variant_owns_mask: bool = False) -> None:
        assert (kv_layout, backend, variant_owns_mask) == ("NHD", "fa2", True)
        self._graph = use_cuda_graph
        self._buffers = (qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)
        self._plan_info: list[int] = []
        self._float_workspace_buffer = float_workspace_buffer
        self._cached_module = Scheduler()

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        assert float_workspace_buffer.dtype == int_workspace_buffer.dtype == torch.uint8
        self._int_workspace_buffer = self._pin_memory_int_workspace_buffer = int_workspace_buffer

    def plan(self, qo_indptr: torch.Tensor, paged_kv_indptr: torch.Tensor, paged_kv_indices: torch.Tensor,
             paged_kv_last_page_len: torch.Tensor, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int,
             page_size: int, q_data_type: torch.dtype = torch.float16, kv_data_type: Any = None,
             o_data_type: Any = None, seq_lens: Any = None) -> None:
        assert page_size == 1 and {t.dtype for t in (qo_indptr, paged_kv_indptr, paged_kv_indices)} == {torch.int32}
        assert q_data_type == kv_data_type == o_data_type == torch.bfloat16
        assert torch.equal(seq_lens, paged_kv_indptr.diff()) and bool((paged_kv_last_page_len == 1).all())
        given = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        if self._graph:
            for buffer, values in zip(self._buffers, given, strict=True):
                buffer[: len(values)].copy_(values, non_blocking=True)  # as FlashInfer does
        else:
            self._buffers = given
        self._plan_info = schedule(qo_indptr, seq_lens)

    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor, firsts: torch.Tensor, limits: torch.Tensor,
            words: torch.Tensor, sm_scale: float, *, out: torch.Tensor) -> torch.Tensor:
        assert paged_kv_cache.dim() == 5 and paged_kv_cache.shape[1:3] == (2, 1)
        indptr, kv_indptr, indices, last = self._buffers
        assert bool((last == 1).all()), "numbers of entries in the last pages are written once"
        pages = PageTensors(indptr, kv_indptr, indices, firsts, limits, words)
        return out.copy_(attend_pages(q, paged_kv_cache[:, :, 0], pages, sm_scale).view(out.shape))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("flashinfer")
    vars(module)["BatchPrefillWithPagedKVCacheWrapper"] = PlainWrapper
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    return module


def config() -> ModelConfig:
    return parse_config(tiny_config(num_attention_heads=4, num_key_value_heads=2, head_dim=HEAD_DIM), "test")


def batch_of(trees: int, context: int) -> ForwardBatch:
    builder = BatchBuilder()
    for i in range(trees):
        first = i * (context + 3)
        builder.add([0] * 3, [0] * 3, list(range(first + context, first + context + 3)),
                    np.arange(first, first + context), [1, 3, 5], 3)
    return builder.build()


def kv_and_queries(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    dice = torch.Generator().manual_seed(0)
    kv = torch.randn(400, 2, 2, HEAD_DIM, generator=dice).bfloat16()
    return kv, torch.randn(rows, 4, HEAD_DIM, generator=dice).bfloat16()


def test_a_plan_made_for_one_forward(library: ModuleType) -> None:
    batch = batch_of(3, 20)
    kv, q = kv_and_queries(9)
    found = FlashInferAttention(config(), torch.bfloat16, CPU).plan(batch)(q, kv)
    right = TorchAttention(config(), torch.bfloat16).plan(batch)(q, kv)
    assert float((found.float() - right.float()).abs().max()) < 0.02


def room() -> tuple[torch.Tensor, PageTensors]:
    """For plans of 9 rows in 3 segments: all but what they list, and all of it as a kernel reads it."""
    numbers = torch.zeros(packed_size(9, 3), dtype=torch.int64)
    return numbers, PageTensors.within(numbers, torch.zeros(400, dtype=torch.int32), 9)


def test_a_fixed_attention_takes_one_batch_after_the_other(library: ModuleType) -> None:
    numbers, pages = room()
    fixed = FlashInferAttention(config(), torch.bfloat16, CPU).fixed(pages)
    kv, q = kv_and_queries(9)
    for context in (20, 30, 10):
        batch = batch_of(3, context)
        plan = plan_pages(batch)
        numbers.copy_(torch.from_numpy(packed(plan)))
        write_indices(pages, plan)
        assert fixed.replan(plan)
        right = TorchAttention(config(), torch.bfloat16).plan(batch)(q, kv)
        assert float((fixed(q, kv).float() - right.float()).abs().max()) < 0.02, context


def test_a_plan_that_needs_another_launch_is_not_replayed(library: ModuleType) -> None:
    fixed = FlashInferAttention(config(), torch.bfloat16, CPU).fixed(room()[1])
    assert [fixed.replan(plan_pages(batch_of(3, context))) for context in (20, 100, 20)] == [True, False, True]


@pytest.mark.parametrize(("device", "dtype", "head_dim", "reason"), [
    ("cpu", torch.bfloat16, 64, "this one is 'cpu'"), ("cuda", torch.float32, 64, "this model in float32"),
    ("cuda", torch.bfloat16, 80, "this model's 80")])
def test_why_it_cannot_be_used_is_said(device: str, dtype: torch.dtype, head_dim: int, reason: str) -> None:
    shape = parse_config(tiny_config(head_dim=head_dim), "test")
    assert reason in unsupported_reason(shape, dtype, torch.device(device))


def test_bfloat16_is_not_tried_on_a_gpu_that_multiplies_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    gpu = torch.device("cuda")
    for capability, is_told in (((7, 5), True), ((8, 0), False), ((9, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None, found=capability: found)
        assert ("take dtype float16" in unsupported_reason(config(), torch.bfloat16, gpu)) is is_told
        assert "float16" not in unsupported_reason(config(), torch.float16, gpu)


def test_torch_serves_where_it_cannot_be() -> None:
    assert isinstance(attention_for(config(), torch.bfloat16, CPU), TorchAttention)


def test_kernels_of_different_kinds_have_different_names() -> None:
    names = {variant(dtype, size)[0][0] for dtype in (torch.bfloat16, torch.float16) for size in (64, 128)}
    assert len(names) == 4


SHIM = r"""
#include <cstdint>
#define __device__
#define __host__
namespace math { constexpr float log2e = 1.442695f; }
struct AttentionVariantBase {};
#define REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, ...) \
  template <typename Params> bool mask(const Params& params, uint32_t batch_idx, uint32_t qo_idx, uint32_t kv_idx, \
                                       uint32_t qo_head_idx, uint32_t kv_head_idx) { __VA_ARGS__ }
struct Params {
  const int32_t *q_indptr, *kv_indptr, *firsts, *limits;
  const uint64_t *words;
  float sm_scale;
  uint32_t get_qo_len(uint32_t b) const { return q_indptr[b + 1] - q_indptr[b]; }
  uint32_t get_kv_len(uint32_t b) const { return kv_indptr[b + 1] - kv_indptr[b]; }
};
"""
ASKED = r"""
extern "C" void seen(const int32_t* q_indptr, const int32_t* kv_indptr, const int32_t* firsts, const int32_t* limits,
                     const uint64_t* words, uint32_t segment, uint32_t rows, uint32_t entries, uint8_t* out) {
  Params params{q_indptr, kv_indptr, firsts, limits, words, 1.0f};
  RowRules rules(params, segment, nullptr);
  for (uint32_t row = 0; row < rows; ++row)
    for (uint32_t entry = 0; entry < entries; ++entry)
      out[row * entries + entry] = rules.mask(params, segment, row, entry, 0, 0);
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_the_kernels_rule_is_the_specification(tmp_path: Path) -> None:
    """The C++ that is compiled into the kernel, on the host, beside ``visible``; and beyond a segment's ends."""
    (tmp_path / "rule.cpp").write_text(SHIM + VARIANT + ASKED)
    subprocess.run(["g++", "-shared", "-fPIC", "-o", tmp_path / "rule.so", tmp_path / "rule.cpp"], check=True)
    seen = ctypes.CDLL(str(tmp_path / "rule.so")).seen
    for seed, window in ((0, 0), (1, 0), (2, 64)):
        batch = random_batch(np.random.default_rng(seed), 12, True, longest=200)
        plan = plan_pages(batch, window)
        for b in range(12):
            rows, entries = slice(*plan.q_indptr[b : b + 2]), int(np.diff(plan.kv_indptr)[b])
            count = rows.stop - rows.start
            found = np.zeros((count + 2, entries + 5), np.uint8)
            arrays = (plan.q_indptr, plan.kv_indptr, plan.firsts, plan.limits, plan.words)
            seen(*(array.ctypes.data_as(ctypes.c_void_p) for array in arrays), ctypes.c_uint32(b),
                 ctypes.c_uint32(count + 2), ctypes.c_uint32(entries + 5), found.ctypes.data_as(ctypes.c_void_p))
            assert np.array_equal(found[:count, :entries], visible(plan, rows, entries)), f"seed {seed}"
            assert not found[:, entries:].any()  # what rows beyond a segment's see is thrown away
