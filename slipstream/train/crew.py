"""A crew: processes that compute one training step together (data parallelism), each some of its conversations with one
thread.

Rules:
1. Weights are in shared memory, so the optimiser's step in one process changes them for all. Gradients are returned in
   shared memory, too.
2. The gradient of a step is the mean over its rows, however they are divided: a part is weighted by its rows with a
   loss.
3. A crew of one is this process alone. The other processes end when this one does, however it ends.

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
class Part:
    """The result of a part of a step; its gradients are in the weights' ``grad``."""

    rows: int
    weight: int  # rows with a loss; 0: there are no gradients
    loss: float  # the mean over these
    agreement: tuple[float, ...]  # share of tokens on which head and target agree, by drafted token


Compute = Callable[[Sequence[int]], Part]


class Crew:
    """``size`` processes that share ``weights``. It forks, so it must be made before this process's first backward
    pass."""

    def __init__(self, weights: Mapping[str, torch.Tensor], compute: Compute, size: int) -> None:
        self._weights, self._compute = list(weights.values()), compute
        self._mates: list[tuple[Connection, list[torch.Tensor]]] = []
        if size > 1:
            for weight in self._weights:
                _share(weight)
        context = multiprocessing.get_context("fork")
        for _ in range(size - 1):
            gradients = [_share(torch.zeros_like(weight, requires_grad=False)) for weight in self._weights]
            ours, theirs = context.Pipe()
            inherited = [*(pipe for pipe, _ in self._mates), ours]
            context.Process(target=_serve, args=(theirs, inherited, compute, self._weights, gradients),
                            daemon=True).start()
            theirs.close()
            self._mates.append((ours, gradients))

    def run(self, batch: Sequence[int], sizes: Sequence[int]) -> Part:
        """Compute ``batch``; its gradients are then in the weights. sizes: rows of each item. Raises CapacityError if a
        process has ended."""
        parts = divided(batch, sizes, len(self._mates) + 1)
        try:
            for (pipe, _), part in zip(self._mates, parts[1:], strict=True):
                pipe.send(part)
            found = [self._compute(parts[0]), *(pipe.recv() for pipe, _ in self._mates)]
        except (EOFError, ConnectionError) as error:  # ConnectionError: it ended between two steps
            raise CapacityError("a process that trains has ended, for want of memory perhaps; go on with the same "
                                "command and fewer --threads") from error
        total = sum(part.weight for part in found)
        if total:
            self._gather([part.weight / total for part in found])
        return merged(found)

    @torch.no_grad()
    def _gather(self, shares: Sequence[float]) -> None:
        for i, weight in enumerate(self._weights):
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            weight.grad.mul_(shares[0])
            for (_, gradients), share in zip(self._mates, shares[1:], strict=True):
                if share:
                    weight.grad.add_(gradients[i], alpha=share)


def divided(batch: Sequence[int], sizes: Sequence[int], count: int) -> list[list[int]]:
    """``batch`` in ``count`` parts of about the same size, the largest items first."""
    parts: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for size, item in sorted(zip(sizes, batch, strict=True), reverse=True):
        least = loads.index(min(loads))
        parts[least].append(item)
        loads[least] += size
    return parts


def merged(parts: Sequence[Part]) -> Part:
    """One part from several; losses and agreements are means weighted by ``weight``."""
    counted = [part for part in parts if part.weight]
    total = sum(part.weight for part in counted)
    rows = sum(part.rows for part in parts)
    if not total:
        return Part(rows, 0, 0.0, ())
    loss = sum(part.loss * part.weight for part in counted) / total
    depths = zip(*(part.agreement for part in counted), strict=True)
    shares = [part.weight / total for part in counted]
    return Part(rows, total, loss, tuple(sum(a * s for a, s in zip(d, shares, strict=True)) for d in depths))


def _share(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.share_memory_()  # type: ignore[no-untyped-call, no-any-return]


def _serve(pipe: Connection, inherited: Sequence[Connection], compute: Compute, weights: Sequence[torch.Tensor],
           gradients: Sequence[torch.Tensor]) -> None:
    for end in inherited:  # open copies would hide the end of the process that trains
        end.close()
    torch.set_num_threads(1)
    try:
        while True:
            part = compute(pipe.recv())
            if part.weight:
                for weight, gradient in zip(weights, gradients, strict=True):
                    if weight.grad is not None:
                        gradient.copy_(weight.grad)
            pipe.send(part)
    except (EOFError, OSError, KeyboardInterrupt):
        return  # the process that trains has ended
