"""Who plays in a simulation: timed devices that compute nothing, or a real model and drafter charged set times.

Rules:
1. A charged model computes what it always does. Its device's time moves on by what ``Timing`` says, not by what the
   computing took: so a model's own hits and acceptance are seen as they would be on two devices, on any machine.
2. A charged drafter pays for every level that it was asked for, be it that n-grams answered without one.

It knows nothing about schedules or wires.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from slipstream.drafting.base import Drafter
from slipstream.drafting.tree import GrowingTree
from slipstream.engine.batch import ForwardBatch
from slipstream.engine.kv import KVPool
from slipstream.engine.model import CausalModel
from slipstream.protocol.messages import PROTOCOL_VERSION, Commit, Features, Growth, Open, Sampling, TargetHello
from slipstream.simulate.timed import MAX_CONTEXT, STREAMS, SYMBOLS, Device, TimedDrafter, TimedModel, Timing


class Cast(Protocol):
    """A target, its drafter and what they are asked."""

    @property
    def slots(self) -> int: ...

    @property
    def answer(self) -> int:
        """Tokens at most."""
        ...

    @property
    def sampling(self) -> Sampling: ...

    def model(self, timing: Timing, device: Device) -> CausalModel: ...

    def drafter(self, timing: Timing, device: Device, keep: bool) -> Drafter:
        """``keep``: it grows ahead."""
        ...

    def prompt(self, stream: int) -> tuple[int, ...]: ...


class TimedCast:
    """Nothing is computed."""

    slots, answer, sampling = MAX_CONTEXT, 2000, Sampling()

    def model(self, timing: Timing, device: Device) -> CausalModel:
        return TimedModel(timing, device)

    def drafter(self, timing: Timing, device: Device, keep: bool) -> Drafter:
        return TimedDrafter(timing, device, keep)

    def prompt(self, stream: int) -> tuple[int, ...]:
        return (stream % STREAMS * SYMBOLS,) * 2


@dataclass(frozen=True, slots=True)
class RealCast:
    """A loaded model, a drafter that is made anew for each simulation, and prompts that are asked in turn."""

    loaded: CausalModel
    create: Callable[[], Drafter]
    prompts: Sequence[tuple[int, ...]]
    sampling: Sampling
    answer: int
    slots: int = 4096

    def model(self, timing: Timing, device: Device) -> CausalModel:
        return ChargedModel(self.loaded, timing, device)

    def drafter(self, timing: Timing, device: Device, keep: bool) -> Drafter:
        return ChargedDrafter(self.create(), timing, device)

    def prompt(self, stream: int) -> tuple[int, ...]:
        return self.prompts[stream % len(self.prompts)]


class ChargedModel:
    """An ``engine.model.CausalModel``."""

    def __init__(self, model: CausalModel, timing: Timing, device: Device) -> None:
        self._model, self._timing, self._device = model, timing, device
        self.config, self.dtype, self.device = model.config, model.dtype, model.device

    def forward(self, batch: ForwardBatch, pool: KVPool,
                taps: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor | None]:
        self._device.busy(time.perf_counter(), self._timing.step_of(batch.num_rows))
        return self._model.forward(batch, pool, taps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.logits(hidden)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._model.embed(tokens)


class ChargedDrafter:
    """A ``drafters.base.Drafter``."""

    def __init__(self, drafter: Drafter, timing: Timing, device: Device) -> None:
        self._drafter, self._timing, self._device = drafter, timing, device
        self.name, self.features = drafter.name, drafter.features
        self.vocab_size, self.hidden_size = drafter.vocab_size, drafter.hidden_size
        self.max_context, self.max_nodes, self.max_sessions = (drafter.max_context, drafter.max_nodes,
                                                               drafter.max_sessions)

    def open(self, opens: Sequence[Open]) -> list[int]:
        return self._drafter.open(opens)

    def absorb(self, features: Sequence[Features]) -> None:
        self._drafter.absorb(features)

    def commit(self, commits: Sequence[Commit]) -> None:
        self._drafter.commit(commits)

    def grow(self, ids: Sequence[int], budgets: Sequence[int], steps: int = 0) -> list[Growth]:
        levels = steps or self._timing.levels
        self._device.busy(time.perf_counter(), levels * self._timing.draft_s / self._timing.levels)
        return self._drafter.grow(ids, budgets, steps)

    def tree(self, session: int) -> GrowingTree:
        return self._drafter.tree(session)

    def close(self, ids: Sequence[int]) -> None:
        self._drafter.close(ids)


def hello_of(model: CausalModel, slots: int) -> TargetHello:
    """What a target with ``model`` says to its drafts."""
    config = model.config
    return TargetHello(PROTOCOL_VERSION, 1, "simulated", config.vocab_size, "", config.hidden_size, config.num_layers,
                       slots)

