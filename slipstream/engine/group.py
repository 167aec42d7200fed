"""The devices that compute one model together: their sums, what one tells all, what all tell each.

Rules:
1. Ranks call the same operations in the same order; an operation that the others do not join ends after ``TIMEOUT_S``:
   with an error where the host waits for it (gloo), with the process where the device does (NCCL's watchdog).
2. No operation waits for the host on a GPU, so that a graph may capture it.
3. All ranks are processes of one machine. NCCL joins GPUs, gloo CPUs.

It knows nothing about models or who gives orders.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from slipstream.base.errors import ModelError

TIMEOUT_S = 60.0
HOST = "127.0.0.1"


class Meeting:
    """Where ranks find one another: a port of rank 0, on this machine alone."""

    __slots__ = ("_store", "port")

    def __init__(self, ranks: int, port: int = 0) -> None:
        """port: rank 0's; 0: this is rank 0."""
        self._store: Any = _distributed().TCPStore(HOST, port, ranks, port == 0, timedelta(seconds=TIMEOUT_S),
                                                   wait_for_workers=False)
        self.port: int = self._store.port

    def join(self, rank: int, ranks: int, device: torch.device) -> Group:
        """Waits for all others. Raises RuntimeError when they do not come."""
        backend = "nccl" if device.type == "cuda" else "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device)
        _distributed().init_process_group(backend, store=self._store, rank=rank, world_size=ranks,
                                          timeout=timedelta(seconds=TIMEOUT_S))
        return Group(rank, ranks)


class Group:
    """One process's place among the ranks. A process has one at a time."""

    __slots__ = ("_all", "rank", "ranks")

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self._all = _distributed()

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x, in x's place."""
        self._all.all_reduce(x)
        return x

    def told(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's x, in x's place."""
        self._all.broadcast(x, 0)
        return x

    def beside(self, x: torch.Tensor) -> torch.Tensor:
        """x [R, W] of all ranks side by side: [R, ranks * W]."""
        parts = x.new_empty(self.ranks, *x.shape)
        self._all.all_gather(list(parts.unbind(0)), x)
        return parts.transpose(0, 1).reshape(x.shape[0], -1)

    def leave(self) -> None:
        self._all.destroy_process_group()


def _distributed() -> Any:
    if not torch.distributed.is_available():
        raise ModelError("model.tensor_parallel: this build of torch has no torch.distributed; use 1")
    return torch.distributed
