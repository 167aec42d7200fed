"""A device's memory, sized before anything is served: what is free beside the model, what a step may need, what is left
for tokens.

Rules:
1. What a step needs is bounded from shapes, for the most rows that it may have: logits in float32 with two more copies
   for choosing, and the widest activations twice.
2. Feature rows lie beside the KV, one a slot, as soon as a drafter asks for them; they are counted from the start.
3. What cannot fit is a ConfigError with numbers, before it is allocated.

It knows nothing about how memory is given back when it runs out all the same (see the target's ``Shedding``).
"""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch

from slipstream.base.errors import ConfigError
from slipstream.engine.model import ModelConfig

SHARE = 0.9  # of what is free is planned with: allocators waste some, and graphs keep some
MOST_TAPS = 3  # that a head of a known kind reads


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one device, the model being there already."""

    total: int
    free: int
    slot: int  # one token's KV and feature rows
    step: int  # what the largest step may need beside them

    @staticmethod
    def of(config: ModelConfig, dtype: torch.dtype, device: torch.device, max_rows: int) -> Memory:
        """As it is now. max_rows: of one step."""
        free, total = free_memory(device)
        return Memory(total, free, slot_bytes(config, dtype), step_bytes(config, dtype, max_rows))

    def slots(self, wanted: int) -> int:
        """How many of ``wanted`` slots there is room for."""
        return max(0, min(wanted, (int(self.free * SHARE) - self.step) // self.slot))

    def check(self, slots: int) -> None:
        """Raises ConfigError where so many slots do not fit."""
        if slots > self.slots(slots):
            raise ConfigError(
                f"target.slots: {slots} tokens need {_gb(slots * self.slot)} GB and a step up to {_gb(self.step)} GB, "
                f"of {_gb(self.free)} GB that are free beside the model; {self.slots(slots)} fit: lower target.slots "
                "or target.max_context")

    def report(self, slots: int) -> dict[str, float]:
        """Gigabytes, for the log."""
        return {"total": _gb(self.total), "free_beside_model": _gb(self.free), "slots": _gb(slots * self.slot),
                "largest_step": _gb(self.step), "left": _gb(self.free - slots * self.slot - self.step)}


def free_memory(device: torch.device) -> tuple[int, int]:
    """Free and total bytes. What torch keeps for later, as after loading, is free."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)
    now = psutil.virtual_memory()
    return int(now.available), int(now.total)


def default_slots(config: ModelConfig, dtype: torch.dtype, max_sessions: int, max_context: int = 0,
                  share: float = 0.5, device: torch.device | str = "cpu") -> int:
    """How many slots to give a pool: room for ``max_sessions`` whole contexts (0: the model's), or what fits into
    ``share`` of the memory that is free on the device now; at least one context of 1024 tokens."""
    context = min(max_context or config.max_context, config.max_context)
    fits = int(free_memory(torch.device(device))[0] * share) // kv_bytes(config, dtype)
    return max(min(max_sessions * context, fits), min(context, 1024))


def kv_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Of one token."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize


def slot_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    return kv_bytes(config, dtype) + MOST_TAPS * config.hidden_size * dtype.itemsize


def step_bytes(config: ModelConfig, dtype: torch.dtype, rows: int) -> int:
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    widest = max(3 * config.intermediate_size, 2 * heads) + (4 + MOST_TAPS) * config.hidden_size
    return rows * (2 * widest * dtype.itemsize + config.vocab_size * (4 + 4 + 8))


def _gb(size: int) -> float:
    return round(size / 1e9, 2)
