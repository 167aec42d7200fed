"""Data parallelism: processes compute one training step together, each some of its conversations with one thread.

Rules:
1. Weights are in shared memory, so the optimiser's step in one process changes them for all. Gradients are returned in
   shared memory, too.
2. The gradient of a step is the mean over its rows, however they are divided: a part is weighted by its rows with a
   loss.
3. A group of one is this process alone. The other processes end when this one does, however it ends.

On a CPU this scales where threads inside an operation do not: on two cores a second thread brought nothing, a second
process did. It knows nothing about heads, losses or data; a batch is a list of indices that mean the same to all.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from slipstream.base.errors import CapacityError


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
        self._workers: list[tuple[Connection, list[torch.Tensor]]] = []
        if size > 1:
            for weight in self._weights:
                _share_memory(weight)
        context = multiprocessing.get_context("fork")
        for _ in range(size - 1):
            gradients = [_share_memory(torch.zeros_like(weight, requires_grad=False)) for weight in self._weights]
            own_end, worker_end = context.Pipe()
            inherited = [*(pipe for pipe, _ in self._workers), own_end]
            context.Process(target=_worker_main, args=(worker_end, inherited, compute, self._weights, gradients),
                            daemon=True).start()
            worker_end.close()
            self._workers.append((own_end, gradients))

    def run(self, batch: Sequence[int], sizes: Sequence[int]) -> StepResult:
        """Compute ``batch``; its gradients are then in the weights. sizes: rows of each item. Raises CapacityError if a
        process has ended."""
        parts = split_evenly(batch, sizes, len(self._workers) + 1)
        try:
            for (pipe, _), part in zip(self._workers, parts[1:], strict=True):
                pipe.send(part)
            results = [self._compute(parts[0]), *(pipe.recv() for pipe, _ in self._workers)]
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
            for (_, gradients), share in zip(self._workers, shares[1:], strict=True):
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


def _worker_main(pipe: Connection, inherited: Sequence[Connection], compute: Compute, weights: Sequence[torch.Tensor],
           gradients: Sequence[torch.Tensor]) -> None:
    for connection in inherited:  # open copies would hide the end of the process that trains
        connection.close()
    torch.set_num_threads(1)
    try:
        while True:
            result = compute(pipe.recv())
            if result.weight:
                for weight, gradient in zip(weights, gradients, strict=True):
                    if weight.grad is not None:
                        gradient.copy_(weight.grad)
            pipe.send(result)
    except (EOFError, OSError, KeyboardInterrupt):
        return  # the process that trains has ended
