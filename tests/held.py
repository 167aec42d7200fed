"""A model whose steps a test gives out: how far its answers are is then the test's to say, and not the machine's."""

from __future__ import annotations

import threading

import torch

from slipstream.engine.batch import ForwardBatch
from slipstream.engine.kv import KVPool
from slipstream.engine.model import CausalModel


class Held:
    """``model``, which takes steps freely until ``hold``."""

    def __init__(self, model: CausalModel) -> None:
        self._model = model
        self._held = False
        self._steps = threading.Semaphore(0)
        self.config, self.dtype, self.device = model.config, model.dtype, model.device
        self.kernels = model.kernels

    def forward(self, batch: ForwardBatch, pool: KVPool,
                taps: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self._held:
            self._steps.acquire()
        return self._model.forward(batch, pool, taps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.logits(hidden)

    def hold(self) -> None:
        self._held = True

    def step(self) -> None:
        """Give one step. It may be taken later."""
        self._steps.release()

    def let_go(self) -> None:
        self._held = False
        self._steps.release()


class HeldModels(list[Held]):
    """The ``around`` of targets: it makes each model a held one, in the order of their targets."""

    def __call__(self, model: CausalModel) -> CausalModel:
        self.append(Held(model))
        return self[-1]
