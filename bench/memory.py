"""How fast this machine reads memory right now: a plain step on a CPU hangs on it, and it varies from hour to hour."""

from __future__ import annotations

import time

import torch

NUMBERS = 1 << 26  # float32: more than caches hold


class Memory:
    """Something large to read."""

    def __init__(self) -> None:
        self._numbers = torch.zeros(NUMBERS)

    def read(self) -> None:
        """All of it, on torch's threads."""
        self._numbers.sum()

    def gb_s(self, repeats: int = 3) -> float:
        """GB/s, the best of some sums: others may disturb each of them."""
        took_s = float("inf")
        for _ in range(repeats):
            began_s = time.perf_counter()
            self.read()
            took_s = min(took_s, time.perf_counter() - began_s)
        return rate(took_s)


def rate(took_s: float) -> float:
    """GB/s of one ``read`` in so many seconds."""
    return 4 * NUMBERS / took_s / 1e9
