"""Times parts in turn, and measures how fast this machine reads memory: a plain step on a CPU depends on it, and it
varies from hour to hour."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

NUMBERS = 1 << 26  # float32: more than caches hold
WARM_UP = 3

Key = TypeVar("Key")
Part = Callable[[], object]


def timed(parts: Mapping[Key, Part], repeats: int, settle: Part = lambda: None) -> dict[Key, list[float]]:
    """Seconds of each run of each part. Parts run in turn, so that a slow moment affects all of them; the first WARM_UP
    runs do not count. settle: waits until no work is pending on the device."""
    times: dict[Key, list[float]] = {name: [] for name in parts}
    for run in range(-WARM_UP, repeats):
        for name, part in parts.items():
            settle()
            began_s = time.perf_counter()
            part()
            settle()
            if run >= 0:
                times[name].append(time.perf_counter() - began_s)
    return times


class Memory:
    """A tensor larger than the caches, to measure the speed of memory."""

    def __init__(self) -> None:
        self._numbers = torch.zeros(NUMBERS)

    def read(self) -> None:
        """Read all of it, with torch's threads."""
        self._numbers.sum()

    def gb_s(self) -> float:
        """GB/s, the best of a few sums, because other programs may disturb one."""
        return gb_per_s(min(timed({"sum": self.read}, 2)["sum"]))


def gb_per_s(took_s: float) -> float:
    """GB/s of one ``read`` in so many seconds."""
    return 4 * NUMBERS / took_s / 1e9
