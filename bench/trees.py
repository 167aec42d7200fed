"""Stage ``tree`` of ``make gpu``: all levels of a head's tree at once, beside the same level by level.

Without FlashInfer on a GPU it fails, and says so; in a rehearsal torch's pages stand in its place.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from bench.pace import CONTEXT
from bench.paged import capture_of, paged
from bench.shapes import LLAMA_8B, TINY, config_of, head_bytes, random_head
from bench.stage import Finding, Given, copy_rate, device_work, free, seconds
from slipstream.base.config import GrowthSection
from slipstream.drafting.graph import GraphLevels, spare_slots
from slipstream.drafting.heads.eagle import EagleNetwork
from slipstream.drafting.neural import NeuralDrafter
from slipstream.protocol.messages import Commit, Features, Open, Sampling

TOPK, STEPS = 8, 9  # the root's own row is a step without a loop
TOKENS = 60


def tree_stage(given: Given) -> Iterator[Finding]:
    config = config_of(LLAMA_8B if given.full else TINY)
    draft_vocab, steps = (32_000, STEPS) if given.full else (64, 4)
    head = random_head(config, draft_vocab, torch.bfloat16, given.device)
    growth = GrowthSection(num_steps=steps, topk=TOPK, num_draft_tokens=TOKENS)
    spare = spare_slots(TOPK, steps - 1)
    network = EagleNetwork(head, "bfloat16", given.device, 2 * CONTEXT + 2 * spare, spare_slots=spare)
    at_once = GraphLevels(network, paged(given, config), TOPK, steps - 1, capture_of(given))
    roof_s = (steps - 1) * head_bytes(config, draft_vocab, 2) / copy_rate(given)
    yield Finding("roof of the levels", 1e3 * roof_s, "ms")
    trees = []
    for name, loop in (("at once", at_once), ("level by level", None)):
        grower = Grower(NeuralDrafter("eagle3", network, growth, 4, levels=loop), config.hidden_size)
        trees.append(grower())
        taken_s = seconds(grower, given.device, given.repeats)
        yield Finding(f"{name}: {steps} levels of {TOPK} rows", 1e3 * taken_s, "ms",
                      "<= 3.0 on H100, 2.2 on H200" if loop else "")
        busy_s, launches = device_work(grower, given.device)
        if launches:
            yield Finding(f"{name}: device computes", 1e3 * busy_s, "ms")
        grower.drafter.close([1])
    yield Finding("nodes in both trees", len(set(trees[0]) & set(trees[1])), f"of {len(set(trees[1]))}",
                  "all but for equal scores")
    free()


class Grower:
    """Grows a tree, again and again below the same text."""

    def __init__(self, drafter: NeuralDrafter, width: int) -> None:
        self.drafter = drafter
        tokens = np.arange(CONTEXT, dtype=np.int32)
        drafter.open([Open(1, tokens, 1, Sampling())])
        drafter.absorb([self._states(0, CONTEXT - 1, width)])
        self._width, self._base = width, CONTEXT

    def __call__(self) -> list[tuple[int, float]]:
        """Tokens and scores of a new tree."""
        states = self._states(self._base - 1, 1, self._width)
        self.drafter.commit([Commit(1, self._base, np.array([5], np.int32), states)])
        self._base += 1
        (growth,) = self.drafter.grow([1], [TOKENS])
        return list(zip(growth.tokens.tolist(), np.round(growth.scores, 2).tolist(), strict=True))

    def _states(self, start: int, count: int, width: int) -> Features:
        spec = self.drafter.features
        assert spec is not None
        rows = torch.ones(count, spec.width, dtype=torch.bfloat16)
        return Features(1, start, rows.view(torch.uint8).numpy().tobytes(), count, "bfloat16")
