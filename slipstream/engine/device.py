"""A device and this process's share of the machine: memory, cores, threads, streams; and how much memory a model's
slots may take.

Rules:
1. Memory is planned before anything is served: free memory, minus the largest step, is for slots. The bound of a step
   follows from shapes and its most rows: logits in float32 with two more copies for choosing, the widest activations
   twice, and the KV and masks that torch's attention gathers. Feature rows are counted from the start.
2. Sizes that do not fit are a ConfigError with numbers, before anything is allocated.
3. In a container its limits count, not the machine's.

It knows nothing about what the target does when memory runs out in spite of this plan (see ``Shedding`` there).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from slipstream.base.errors import ConfigError
from slipstream.engine.attention import PADDED_ENTRIES_CUDA
from slipstream.engine.model import ModelConfig

CGROUP = Path("/sys/fs/cgroup")  # a container sees its own cgroup there
# Files with the limit, the memory in use and its statistics, and the prefix of field names there: cgroup v2, then v1.
MEMORY_FILES = (("memory.max", "memory.current", "memory.stat", ""),
                ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_"))
UNLIMITED = 1 << 62  # bytes; cgroup v1 writes a limit above this for "no limit"
SHARE = 0.9  # the share of free memory that the plan uses: allocators waste some, and graphs keep some
TYPICAL_CONTEXT = 1024  # tokens of an answer that slots are planned for: few answers use the whole context
MOST_TAPS = 3  # layers whose states a draft head of a known kind reads


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of one device in bytes, after the model was loaded."""

    total: int
    free: int
    slot: int  # KV and feature row of one token
    step: int  # working memory of the largest step, beside the slots

    @staticmethod
    def of(config: ModelConfig, dtype: torch.dtype, device: torch.device, max_rows: int, context: int = 0) -> Memory:
        """The device's memory now. max_rows: the most rows of one step; context: see ``step_bytes``."""
        free, total = free_memory(device)
        return Memory(total, free, slot_bytes(config, dtype), step_bytes(config, dtype, max_rows, context))

    def slots(self, wanted: int) -> int:
        """How many of ``wanted`` slots there is room for."""
        return max(0, min(wanted, (int(self.free * SHARE) - self.step) // self.slot))

    def check(self, slots: int) -> None:
        """Raises ConfigError if so many slots do not fit."""
        if slots > self.slots(slots):
            raise ConfigError(
                f"target.slots: {slots} tokens need {gb(slots * self.slot)} GB and a step up to {gb(self.step)} GB, "
                f"of {gb(self.free)} GB that are free beside the model; {self.slots(slots)} fit: lower target.slots "
                "or target.max_context")

    def report(self, slots: int) -> dict[str, float]:
        """Gigabytes, for the log."""
        return {"total": gb(self.total), "free_beside_model": gb(self.free), "slots": gb(slots * self.slot),
                "largest_step": gb(self.step), "left": gb(self.free - slots * self.slot - self.step)}


def free_memory(device: torch.device) -> tuple[int, int]:
    """Free and total bytes. On a GPU torch's cache is emptied first, so memory that it kept after loading is free."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)
    now = psutil.virtual_memory()
    free, total = int(now.available), int(now.total)
    if (limited := limited_memory()) is not None:
        free, total = min(free, limited[0]), min(total, limited[1])
    return free, total


def device_works(device: torch.device) -> bool:
    """Whether the device still computes: after a kernel has read an invalid address, a process can never use its GPU
    again. A full GPU counts as one that computes."""
    try:
        torch.zeros(1, device=device).item()
    except torch.OutOfMemoryError:
        return True
    except RuntimeError:
        return False
    return True


def own_stream(device: torch.device) -> AbstractContextManager[object]:
    """A context with a new CUDA stream: GPU work of this thread inside it does not queue behind other threads' later
    work. On a CPU it does nothing."""
    if device.type != "cuda":
        return nullcontext()
    cuda: Any = torch.cuda
    stream = cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(stream)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Inside this context torch uses so many threads within an operation."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def cores(group: Path = CGROUP) -> int:
    """How many CPU cores this process may use: its CPU affinity, bounded by its container's quota (at least 1)."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        with suppress(OSError, ValueError):  # without a quota the file says "max", or -1
            quota, period = map(int, " ".join((group / name).read_text() for name in files).split())
            count = min(count, max(1, quota // period)) if quota > 0 else count
    return count


def limited_memory(group: Path = CGROUP) -> tuple[int, int] | None:
    """Free bytes and limit of this process's container; None: it has no limit. Cached files count as free."""
    for limit_file, used_file, stat_file, prefix in MEMORY_FILES:
        with suppress(OSError, ValueError, KeyError):
            limit = int((group / limit_file).read_text())  # ValueError: the file says "max"
            stat = dict(line.split() for line in (group / stat_file).read_text().splitlines())
            cached = int(stat[f"{prefix}inactive_file"]) + int(stat[f"{prefix}active_file"])
            used = int((group / used_file).read_text()) - cached
            return (max(0, limit - used), limit) if limit < UNLIMITED else None
    return None


def default_slots(config: ModelConfig, dtype: torch.dtype, max_sessions: int, max_context: int = 0,
                  share: float = 0.5, device: torch.device | str = "cpu") -> int:
    """How many slots to give a pool: for ``max_sessions`` answers of TYPICAL_CONTEXT tokens, or for one whole context
    if that is more; at most the KV that fits into ``share`` of the device's free memory; at least one typical answer.
    max_context: tokens; 0: the model's."""
    context = min(max_context or config.max_context, config.max_context)
    typical = min(context, TYPICAL_CONTEXT)
    fitting = int(free_memory(torch.device(device))[0] * share) // kv_bytes(config, dtype)
    return max(min(max(max_sessions * typical, context), fitting), typical)


def kv_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one token's keys and values, all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize


def slot_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one token's KV and of a feature row of MOST_TAPS layers."""
    return kv_bytes(config, dtype) + MOST_TAPS * config.hidden_size * dtype.itemsize


def step_bytes(config: ModelConfig, dtype: torch.dtype, rows: int, context: int = 0) -> int:
    """An upper bound for the working memory of one step, in bytes. context: tokens of the longest answer where torch's
    attention copies the KV of a layer and makes masks; 0: the kernels read KV in its slots, without a copy."""
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    widest = max(3 * config.intermediate_size, 2 * heads) + (4 + MOST_TAPS) * config.hidden_size
    attention = (rows * config.group * context * dtype.itemsize
                 + max(context, PADDED_ENTRIES_CUDA) * kv_bytes(config, dtype) // config.num_layers if context else 0)
    return rows * (2 * widest * dtype.itemsize + config.vocab_size * (4 + 4 + 8)) + attention


def gb(size: int) -> float:
    """Gigabytes, rounded for a message."""
    return round(size / 1e9, 2)
