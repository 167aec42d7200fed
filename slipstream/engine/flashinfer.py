"""FlashInfer's paged attention, with this engine's visibility rule (rule 2 of ``attention``) compiled into its kernel.

Rules:
1. One kernel serves every kind of row. For each score that only some rows of the segment see, the variant below checks
   the row's three numbers. There is no mask tensor, on the host or on the device.
2. The backend is always ``fa2``: fa3 takes no custom masks, and ``auto`` may choose a backend that downloads kernels.
3. Plans are made from arrays on the host, so planning waits for no device; results are written to a given tensor.
4. A plan is written to pinned memory of its wrapper, which is not written again before the device has read it.
5. All plans of an engine share one float workspace, as they run one after the other. Contexts that are split over the
   whole device need 17 MB of it on an H100, for any number of heads. The largest graphs of models with as many KV heads
   as query heads would need more, so they are not captured.
6. Before it serves, it is compared with torch's attention (``attention.disagreement``), first in another process
   (``proof``). If it fails, torch's attention serves.

It has run on an H100. It knows nothing about models or graphs. Written for flashinfer-python 0.7.2.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slipstream.base.errors import first_line
from slipstream.engine.attention import (
    Attend,
    Attention,
    FixedAttention,
    PagePlan,
    PageTensors,
    TorchAttention,
    disagreement,
    page_tensors,
    plan_pages,
)
from slipstream.engine.batch import ForwardBatch
from slipstream.engine.model import ModelConfig
from slipstream.engine.proof import Proof, rejection_reason
from slipstream.observe.log import logger

DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16"}
HEAD_DIMS = (64, 128, 256)
BFLOAT16 = (8, 0)  # the lowest compute capability of GPUs that multiply bfloat16
WORKSPACE_BYTES = 128 << 20
INT_WORKSPACE_BYTES = 2 << 20  # one plan, also in pinned memory: 16 bytes a row; FlashInfer refuses longer plans

VARIANT = r"""
struct RowRules : AttentionVariantBase {
  static constexpr bool use_softmax = true;
  uint32_t qo_len, kv_len, window_left, first_row;
  int32_t seen_from, seen_until;  // what every row of the segment sees
  float sm_scale_log2;

  template <typename Params>
  __device__ __host__ RowRules(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {
    qo_len = params.get_qo_len(batch_idx);
    kv_len = params.get_kv_len(batch_idx);
    window_left = kv_len;
    first_row = params.q_indptr[batch_idx];
    // Limits never fall from row to row. However far a row's window has moved on, it ends within the segment.
    seen_until = params.limits[first_row];
    seen_from = params.firsts[first_row] + static_cast<int32_t>(kv_len) - seen_until;
    sm_scale_log2 = params.sm_scale * math::log2e;
  }

  REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    const int32_t entry = static_cast<int32_t>(kv_idx);
    if (entry >= seen_from && entry < seen_until) return true;
    if (qo_idx >= qo_len || kv_idx >= kv_len) return false;
    const uint32_t row = first_row + qo_idx;
    const int32_t node = entry - params.limits[row];
    if (entry < params.firsts[row]) return false;
    return node < 0 || (node < 64 && ((params.words[row] >> node) & 1));
  })
};
"""


def variant(dtype: torch.dtype, head_dim: int) -> tuple[list[Any], dict[str, Any]]:
    """FlashInfer's arguments for this kernel: positional ones, which follow the backend's name, and keyword ones."""
    # FlashInfer finds compiled kernels by name, so each variant needs a name of its own.
    name = f"slipstream_rows_{DTYPES[dtype]}_d{head_dim}_{hashlib.sha256(VARIANT.encode()).hexdigest()[:8]}"
    return ([name, dtype, dtype, dtype, torch.int32, head_dim, head_dim, ["firsts", "limits", "words"],
             ["int32_t", "int32_t", "uint64_t"], ["sm_scale"], ["double"], "RowRules", VARIANT],
            {"paged_kv_stride_mode": "equal"})


def kernel_spec(dtype: torch.dtype, head_dim: int) -> Any:
    """FlashInfer's object for this kernel, which compiles it, or loads it if it was compiled before."""
    modules = importlib.import_module("flashinfer.jit.attention.modules")
    arguments, words = variant(dtype, head_dim)
    return modules.gen_customize_batch_prefill_module("fa2", *arguments, **words)


def prebuild(dtype: torch.dtype, head_dim: int) -> Path:
    """Compile the kernel for the architectures that FLASHINFER_CUDA_ARCH_LIST names; takes minutes. Returns the
    library."""
    spec = kernel_spec(dtype, head_dim)
    spec.build()
    return Path(spec.jit_library_path)


def unsupported_reason(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> str:
    """Why FlashInfer cannot be used here, in words; empty: it can."""
    if device.type != "cuda":
        return f"it runs on CUDA devices, and this one is '{device}'"
    if dtype not in DTYPES:
        return f"it computes in bfloat16 and float16, and this model in {str(dtype).removeprefix('torch.')}"
    if config.head_dim not in HEAD_DIMS:
        return f"its heads have {', '.join(map(str, HEAD_DIMS))} numbers, and this model's {config.head_dim}"
    if dtype == torch.bfloat16 and torch.cuda.is_available() and torch.cuda.get_device_capability(device) < BFLOAT16:
        return "this GPU multiplies no bfloat16 itself, and every product of the model is slow so: take dtype float16"
    if importlib.util.find_spec("flashinfer") is None:
        return "it is not installed (extra 'gpu': flashinfer-python)"
    return ""


def attention_for(config: ModelConfig, dtype: torch.dtype, device: torch.device,
                  proof: Proof = rejection_reason) -> Attention:
    """FlashInfer's attention if it passes its trials, in another process and in this one; else torch's, with a warning
    on a GPU."""
    try:
        reason = unsupported_reason(config, dtype, device) or proof("attention", config, dtype, device)
        if not reason:
            found = FlashInferAttention(config, dtype, device)
            reason = disagreement(found, config, dtype, device)
            if not reason:
                return found
    except Exception as error:  # compilers, loaders and launches fail in their own ways
        reason = first_line(error)
        _clear_cuda_error(device)
    if device.type == "cuda":
        logger("engine").warning("attention is torch's: slower, and without graphs", reason=reason)
    return TorchAttention(config, dtype)


def _clear_cuda_error(device: torch.device) -> None:
    """CUDA reports the error of a failed launch to the next call: make that call here, and ignore the error."""
    with suppress(RuntimeError):
        torch.zeros(1, device=device)


class FlashInferAttention:
    """See ``attention.PagedAttention``. ``workspace``: device memory for plans."""

    __slots__ = ("_config", "_device", "_dtype", "_float", "_planner", "_wrapper_type", "workspace")

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._config, self._dtype, self._device = config, dtype, device
        self._wrapper_type: Any = importlib.import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
        self._float = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self.workspace = torch.empty(INT_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._planner = self._make(self.workspace)

    def plan(self, batch: ForwardBatch) -> Attend:
        plan = plan_pages(batch, self._config.sliding_window)
        pages = page_tensors(plan, self._device)
        self._planner.plan(plan, pages.indices)
        return partial(self._planner.run, pages)

    def fixed(self, pages: PageTensors, own_plan: bool = False) -> FixedAttention:
        last = torch.ones(len(pages.q_indptr) - 1, dtype=torch.int32, device=self._device)
        plans = torch.empty_like(self.workspace) if own_plan else self.workspace
        return FixedFlashInfer(self._make(plans, use_cuda_graph=True, qo_indptr_buf=pages.q_indptr,
                                          paged_kv_indptr_buf=pages.kv_indptr, paged_kv_indices_buf=pages.indices,
                                          paged_kv_last_page_len_buf=last), pages)

    def _make(self, plans: torch.Tensor, **graph: Any) -> Planner:
        arguments, words = variant(self._dtype, self._config.head_dim)
        wrapper = self._wrapper_type(self._float, "NHD", backend="fa2", jit_args=arguments, jit_kwargs=words,
                                     variant_owns_mask=True, **graph)
        wrapper.reset_workspace_buffer(self._float, plans)
        return Planner(wrapper, self._config, self._dtype, self._device)


class Planner:
    """One of FlashInfer's wrappers, planned from the host and run for each layer."""

    __slots__ = ("_config", "_device", "_dtype", "_plan_read", "_wrapper")

    def __init__(self, wrapper: Any, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._wrapper, self._config, self._dtype, self._device = wrapper, config, dtype, device
        cuda: Any = torch.cuda
        self._plan_read = cuda.Event() if device.type == "cuda" else None

    def plan(self, plan: PagePlan, indices: torch.Tensor) -> tuple[int, ...]:
        """Plan the next ``run``. indices: int32, on the device. Returns FlashInfer's description of the launch."""
        self._wait()
        config = self._config
        segments = len(plan.q_indptr) - 1
        self._wrapper.plan(
            torch.from_numpy(plan.q_indptr), torch.from_numpy(plan.kv_indptr), indices,
            torch.ones(segments, dtype=torch.int32), config.num_heads, config.num_kv_heads, config.head_dim, 1,
            q_data_type=self._dtype, kv_data_type=self._dtype, o_data_type=self._dtype,
            seq_lens=torch.from_numpy(np.diff(plan.kv_indptr)))
        return self._planned(self._wrapper._plan_info)  # there is no public access to it

    def reschedule(self, plan: PagePlan) -> tuple[int, ...]:
        """As ``plan``, for a graph whose number of rows and segments was planned before: it makes the schedule only.
        The other arrays that ``plan`` copies are on the device already."""
        self._wait()
        wrapper, config, size = self._wrapper, self._config, self._config.head_dim
        return self._planned(wrapper._cached_module.plan(
            wrapper._float_workspace_buffer, wrapper._int_workspace_buffer, wrapper._pin_memory_int_workspace_buffer,
            torch.from_numpy(plan.q_indptr), torch.from_numpy(plan.kv_indptr),
            torch.from_numpy(np.diff(plan.kv_indptr)), plan.num_rows, len(plan.q_indptr) - 1, config.num_heads,
            config.num_kv_heads, 1, True, size, size, False, -1, -1, False, 0, 0))

    def _wait(self) -> None:
        if self._plan_read is not None:
            self._plan_read.synchronize()  # rule 4

    def _planned(self, info: Iterable[int]) -> tuple[int, ...]:
        if self._plan_read is not None:
            self._plan_read.record(torch.cuda.current_stream(self._device))
        return tuple(info)

    def run(self, pages: PageTensors, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._wrapper.run(q, kv[:, :, None], pages.firsts, pages.limits, pages.words, self._config.head_dim**-0.5,
                          out=out)
        return out.view(q.shape[0], -1)


class FixedFlashInfer:
    """See ``attention.FixedAttention``. Its wrapper reads the memory of ``pages``. ``launch``: FlashInfer's description
    of the captured launch."""

    __slots__ = ("_pages", "_planner", "launch")

    def __init__(self, planner: Planner, pages: PageTensors) -> None:
        self._planner, self._pages = planner, pages
        self.launch: tuple[int, ...] = ()

    def replan(self, plan: PagePlan) -> bool:
        if self.launch:
            return self._planner.reschedule(plan) == self.launch
        # A captured launch has the grid of its first plan: a batch that needs another grid must not replay it.
        self.launch = self._planner.plan(plan, self._pages.indices[: int(plan.kv_indptr[-1])])
        return True

    def __call__(self, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return self._planner.run(self._pages, q, kv)
