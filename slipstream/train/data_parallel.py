"""Data parallelism: processes compute one training step together, each some of its conversations with one thread.

Rules:
1. Weights are in shared memory, so the optimiser's step in one process changes them for all. Gradients are returned in
   shared memory, too.
2. The gradient of a step is the mean over its rows, however they are divided: a part is weighted by its rows with a
   loss.
3. A group of one is this process alone.

It knows nothing about heads, losses or data; a batch is a list of indices that mean the same to all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

import torch

from slipstream.base.errors import CapacityError
from slipstream.train.forks import fork


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one process's part of a step; its gradients are in the weights' ``grad``."""

    rows: int
    weight: int  # rows with a loss; 0: there are no gradients
    loss: float  # the mean over these
    agreement: tuple[float, ...]  # share of tokens on which head and target agree, by drafted token


Compute = Callable[[Sequence[int]], StepResult]


class WorkerGroup:
    """``size`` processes that share ``weights``. It forks, so it must be made before this process's first backward
    pass."""

    def __init__(self, weights: Mapping[str, torch.Tensor], compute: Compute, size: int) -> None:
        self._weights, self._compute = list(weights.values()), compute
        self._pipes = list[Connection]()
        self._gradients = list[list[torch.Tensor]]()  # of the other processes
        if size > 1:
            for weight in self._weights:
                _share_memory(weight)
        for _ in range(size - 1):
            gradients = [_share_memory(torch.zeros_like(weight, requires_grad=False)) for weight in self._weights]
            fork(partial(_compute_parts, compute, self._weights, gradients), self._pipes)
            self._gradients.append(gradients)

    def run(self, batch: Sequence[int], sizes: Sequence[int]) -> StepResult:
        """Compute ``batch``; its gradients are then in the weights. sizes: rows of each item. Raises CapacityError if a
        process has ended."""
        parts = split_evenly(batch, sizes, len(self._pipes) + 1)
        try:
            for pipe, part in zip(self._pipes, parts[1:], strict=True):
                pipe.send(part)
            results = [self._compute(parts[0]), *(pipe.recv() for pipe in self._pipes)]
        except (EOFError, ConnectionError) as error:  # ConnectionError: it ended between two steps
            raise CapacityError("a process that trains has ended, for want of memory perhaps; go on with the same "
                                "command and fewer --threads") from error
        total = sum(result.weight for result in results)
        if total:
            self._gather([result.weight / total for result in results])
        return merge_results(results)

    @torch.no_grad()
    def _gather(self, shares: Sequence[float]) -> None:
        for i, weight in enumerate(self._weights):
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            weight.grad.mul_(shares[0])
            for gradients, share in zip(self._gradients, shares[1:], strict=True):
                if share:
                    weight.grad.add_(gradients[i], alpha=share)


def split_evenly(batch: Sequence[int], sizes: Sequence[int], count: int) -> list[list[int]]:
    """``batch`` in ``count`` parts of about the same size, the largest items first."""
    parts: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for size, item in sorted(zip(sizes, batch, strict=True), reverse=True):
        smallest = loads.index(min(loads))
        parts[smallest].append(item)
        loads[smallest] += size
    return parts


def merge_results(results: Sequence[StepResult]) -> StepResult:
    """One result from several; losses and agreements are means weighted by ``weight``."""
    counted = [result for result in results if result.weight]
    total = sum(result.weight for result in counted)
    rows = sum(result.rows for result in results)
    if not total:
        return StepResult(rows, 0, 0.0, ())
    loss = sum(result.loss * result.weight for result in counted) / total
    depths = zip(*(result.agreement for result in counted), strict=True)
    shares = [result.weight / total for result in counted]
    return StepResult(rows, total, loss, tuple(sum(a * s for a, s in zip(d, shares, strict=True)) for d in depths))


def _share_memory(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.share_memory_()  # type: ignore[no-untyped-call, no-any-return]


def _compute_parts(compute: Compute, weights: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor],
                   pipe: Connection) -> None:
    with suppress(EOFError, OSError):  # the process that trains has ended
        while True:
            result = compute(pipe.recv())
            if result.weight:
                for weight, gradient in zip(weights, gradients, strict=True):
                    if weight.grad is not None:
                        gradient.copy_(weight.grad)
            pipe.send(result)
