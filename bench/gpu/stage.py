"""Shared code of the stages of ``make gpu``: their input (``StageOptions``) and results (``Finding``), timing of
devices that run asynchronously, and attention and graph capture for the device.

It knows nothing about any one stage.
"""

from __future__ import annotations

import gc
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench.clock import timed
from bench.gpu.shapes import LLAMA_8B, TINY, config_of
from slipstream.engine.attention import PagedAttention, TorchAttention
from slipstream.engine.flashinfer import FlashInferAttention, unsupported_reason
from slipstream.engine.graphs import Capture, CudaCapture, capture_eager
from slipstream.engine.kv import KVPool
from slipstream.engine.model import CausalModel, ModelConfig
from slipstream.engine.ops.fused import triton_operations, triton_unsupported_reason
from slipstream.engine.ops.fused import unsupported_reason as no_triton
from slipstream.engine.ops.layer import TORCH, Operations
from slipstream.engine.ops.races import DeviceRace, race_kernels
from slipstream.engine.proof import What

MAX_NAME_LENGTH = 70  # of a kernel
MAX_KERNELS = 16  # in a table


@dataclass(frozen=True, slots=True)
class StageOptions:
    """The input of a stage. ``full`` False: a rehearsal on small shapes, whose numbers mean nothing. ``model``: a
    prepared folder or None. ``shape``: for a stage that has several. ``narrow``: measure only the first case."""

    device: torch.device
    full: bool = True
    model: Path | None = None
    repeats: int = 20
    shape: str = ""
    narrow: bool = False

    @property
    def config(self) -> ModelConfig:
        """The shape of the measured model, where ``model`` is None."""
        return config_of(LLAMA_8B if self.full else TINY)

    @property
    def draft_vocab(self) -> int:
        """The draft vocabulary of its head."""
        return 32_000 if self.full else 64

    def narrowed(self, values: tuple[int, ...]) -> tuple[int, ...]:
        """``values``, or with ``narrow`` only the first of them."""
        return values[:1] if self.narrow else values


@dataclass(frozen=True, slots=True)
class Finding:
    """One number. ``expected``: what it should be, in words; empty where nothing is expected."""

    what: str
    value: float | str
    unit: str = ""
    expected: str = ""


Stage = Callable[[StageOptions], Iterator[Finding]]


def without_trial(what: What, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> str:
    """A ``Proof`` that accepts all kernels: a job is already a process of its own."""
    return ""


def paged_attention(options: StageOptions, config: ModelConfig) -> PagedAttention:
    """FlashInfer on a GPU, torch's pages elsewhere. Raises RuntimeError where a GPU has no FlashInfer."""
    if options.device.type != "cuda":
        return TorchAttention(config, torch.bfloat16)
    if reason := unsupported_reason(config, torch.bfloat16, options.device):
        raise RuntimeError(f"FlashInfer: {reason}")
    return FlashInferAttention(config, torch.bfloat16, options.device)


def fused_operations(device: torch.device) -> Operations:
    """Triton's operations on a GPU, torch's elsewhere. Raises RuntimeError where a GPU has no Triton."""
    if device.type != "cuda":
        return TORCH
    if reason := no_triton(config_of(LLAMA_8B), torch.bfloat16, device):
        raise RuntimeError(f"fused operations: {reason}")
    return triton_operations()


def device_race(device: torch.device, width: int, vocabulary: torch.Tensor | None = None) -> DeviceRace | None:
    """The race for logits of ``width`` columns on a GPU; None elsewhere. Raises RuntimeError where a GPU has no
    Triton."""
    if device.type != "cuda":
        return None
    if reason := triton_unsupported_reason(device):
        raise RuntimeError(f"kernels that choose: {reason}")
    return DeviceRace(race_kernels(), width, vocabulary)


def pool_for(model: CausalModel, slots: int) -> KVPool:
    """A pool of ``slots`` slots with random KV."""
    config = model.config
    pool = KVPool(config.num_layers, slots, config.num_kv_heads, config.head_dim, model.dtype, model.device)
    pool.kv.normal_()
    return pool


def capture_of(options: StageOptions) -> Capture:
    return CudaCapture(options.device) if options.device.type == "cuda" else capture_eager


def wait(device: torch.device) -> None:
    """Wait until the device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_s(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The median of ``repeats`` runs, each until the device is done."""
    return statistics.median(timed({"": run}, repeats, partial(wait, device))[""])


def device_events(run: Callable[[], object], device: torch.device) -> list[Any]:
    """The kernels and copies of one run; none on a CPU and where the driver does not allow it."""
    if device.type != "cuda":
        return []
    run()
    wait(device)
    profiler: Any = profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU])
    try:
        with profiler:
            run()
            wait(device)
    except RuntimeError:  # not every driver lets a user profile
        return []
    return [event for event in profiler.events() if event.device_type.name == "CUDA"]


def busy_s(events: Sequence[Any]) -> float:
    """Seconds in which the device computed."""
    us: float = sum(event.time_range.elapsed_us() for event in events)
    return us / 1e6


def by_kernel(what: str, events: Sequence[Any], max_kernels: int) -> Iterator[Finding]:
    """The ``max_kernels`` kernels that took the most time, and how often each ran."""
    us_by_name, counts = Counter[str](), Counter(event.name for event in events)
    for event in events:
        us_by_name[event.name] += event.time_range.elapsed_us()
    for name, us in us_by_name.most_common(max_kernels):
        yield Finding(f"{what}: {counts[name]} x {name[:MAX_NAME_LENGTH]}", us, "us")


def copy_rate(options: StageOptions) -> float:
    """Bytes a second of a copy on the device, read and written: what the memory allows at most."""
    size = 1 << (32 if options.full and options.device.type == "cuda" else 24)
    source = torch.ones(size, dtype=torch.uint8, device=options.device)
    target = torch.empty_like(source)
    return 2 * size / median_s(lambda: target.copy_(source), options.device, 10)


def free_memory() -> None:
    """Free the device memory of a stage."""
    gc.collect()  # reference cycles would keep gigabytes
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
