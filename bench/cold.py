"""What a greedy draft tree costs where nothing is in a cache: between two trees of a round a target reads all of its
weights, and what Python, numpy and torch need in between is in memory again. A part of ``make bench-host``.

The drafter is the one that ``make run`` has: the head that is shipped for the default model. Tokens
and states are random, and shapes are those of any text. It knows nothing about services.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from slipstream.base.config import DraftSection, ModelSection
from slipstream.drafting.heads.eagle import EagleNetwork
from slipstream.drafting.heads.eagle_checkpoint import read_head
from slipstream.drafting.levels import Levels
from slipstream.drafting.neural import NeuralDrafter
from slipstream.engine.model import device_of
from slipstream.engine.native.draft import Grown, Seed
from slipstream.models.folder import resolve
from slipstream.models.shipped import settled_draft
from slipstream.protocol.messages import Commit, Features, Open, Sampling

READ = 300 << 20  # bytes between two trees: more than a plain step of the default target reads
CONTEXT, ACCEPTED = 256, 2
BUDGET = 8  # nodes
SLOTS = 4096


class TimedTrees:
    """A network's trees, and how long they took."""

    def __init__(self, levels: Levels) -> None:
        self._levels, self.most_rows = levels, levels.most_rows
        self.taken_s = 0.0

    def takes(self, levels: int, topk: int) -> bool:
        return self._levels.takes(levels, topk)

    def trees(self, seeds: Sequence[Seed], topk: int) -> list[Grown]:
        began_s = time.perf_counter()
        grown = self._levels.trees(seeds, topk)
        self.taken_s += time.perf_counter() - began_s
        return grown


class ColdTrees:
    """A session whose rounds come one after the other."""

    def __init__(self, model: ModelSection, whole: bool = True) -> None:
        """whole: grown by one call where the kernels can; else level by level. Raises ModelError where the model or its
        head cannot be had."""
        section = settled_draft(DraftSection(), model)
        head = read_head(resolve(section.model), resolve(model.path))
        network = EagleNetwork(head, section.dtype, device_of(section.device), SLOTS, section.project_features,
                               kernels=model.kernels, whole=section.quantize in ("auto", "int8"))
        self.timed = TimedTrees(network.native) if whole and network.native is not None else None
        self._drafter = NeuralDrafter(section.drafter, network, section.growth, 1, levels=self.timed)
        self._dice = np.random.default_rng(0)
        self._vocab_size, self._base = network.vocab_size, CONTEXT
        self._memory = torch.ones(READ // 8, dtype=torch.int64)
        self._drafter.open([Open(1, self._tokens(CONTEXT), 1, Sampling())])
        self._drafter.absorb([self._states(0, CONTEXT - 1)])
        self._drafter.grow([1], [BUDGET])

    def rounds(self, count: int, cold: bool) -> Iterator[tuple[float, float]]:
        """Seconds of so many rounds, from a commit to a tree, and of the call on the network inside of it (0: it was
        not one call)."""
        for _ in range(count):
            commit = Commit(1, self._base, self._tokens(ACCEPTED + 1), self._states(self._base - 1, ACCEPTED + 1))
            self._base += ACCEPTED + 1
            if cold:
                self._memory.sum()
            before_s = 0.0 if self.timed is None else self.timed.taken_s
            began_s = time.perf_counter()
            self._drafter.commit([commit])
            self._drafter.grow([1], [BUDGET])
            taken_s = time.perf_counter() - began_s
            yield taken_s, 0.0 if self.timed is None else self.timed.taken_s - before_s

    def _tokens(self, count: int) -> np.ndarray:
        return self._dice.integers(self._vocab_size, size=count).astype(np.int32)

    def _states(self, start: int, count: int) -> Features:
        spec = self._drafter.features
        assert spec is not None
        rows = torch.from_numpy(self._dice.standard_normal((count, spec.width))).to(torch.bfloat16)
        return Features(1, start, rows.view(torch.uint8).numpy().tobytes(), count, spec.dtype)
