"""Which tree shape pays for a target and a drafter on this device: every shape drafts and verifies the same prompts.

Rules:
1. One answer at a time. What counts of times is the median over rounds, so that a hiccup of the machine does not.
2. Prompt by prompt, plain decoding and all shapes take turns: a slow minute hurts all of them.
3. A shape is judged by acceptance length / (draft + verify + exchange), an estimate: services that draft ahead while
   the target verifies are faster than that.

It knows nothing about text, terminals or files.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from slipstream.base.config import GrowthSection
from slipstream.drafting.neural import NeuralDrafter
from slipstream.drafting.rounds import Rounds, Tally
from slipstream.engine.runner import ModelRunner

Report = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Measured:
    """A shape, and what its rounds gave. Seconds are medians."""

    growth: GrowthSection
    acceptance_length: float
    draft_s: float
    verify_s: float

    def tokens_per_s(self, exchange_s: float) -> float:
        """With so many seconds a round for the way between the services."""
        return self.acceptance_length / (self.draft_s + self.verify_s + exchange_s)


@dataclass(frozen=True, slots=True)
class Sweep:
    """All that was measured. ``plain_s``: one plain step."""

    plain_s: float
    measured: tuple[Measured, ...]

    def best(self, exchange_s: float) -> Measured:
        return max(self.measured, key=lambda m: m.tokens_per_s(exchange_s))

    def gain(self, measured: Measured, exchange_s: float) -> float:
        """Tokens a second with the shape by those of plain decoding."""
        return measured.tokens_per_s(exchange_s) * self.plain_s


def shapes(steps: Iterable[int], topks: Iterable[int], nodes: Iterable[int]) -> list[GrowthSection]:
    """Chains of all ``steps`` if 1 is among ``topks``; else trees that have room for so many nodes and reach their
    depth. Raises pydantic's ValidationError for what no tree can have."""
    found = []
    topks, nodes = list(topks), list(nodes)
    for topk in topks:
        for depth in steps:
            most = topk + (depth - 1) * topk * topk  # candidates that growth looks at
            counts = [depth] if topk == 1 else [n for n in nodes if depth <= n <= most]
            found += [GrowthSection(num_steps=depth, topk=topk, num_draft_tokens=n) for n in counts]
    return found


def largest(all_: Sequence[GrowthSection]) -> GrowthSection:
    """A shape that is no smaller than any in any way: what a drafter is made for that shall take them all."""
    return GrowthSection(num_steps=max(g.num_steps for g in all_), topk=max(g.topk for g in all_),
                         num_draft_tokens=max(g.num_draft_tokens for g in all_))


def sweep(runner: ModelRunner, drafter: NeuralDrafter, all_: Sequence[GrowthSection], prompts: Sequence[Sequence[int]],
          max_tokens: int, report: Report = lambda: None) -> Sweep:
    """Answer each prompt plain and with each shape. ``report`` is called after each answer, (shapes + 1) * prompts in
    all. Raises ConfigError for a shape that is too deep for the drafter."""
    plain, tallies = Tally(), [Tally() for _ in all_]
    alone, drafting = Rounds(runner, None, max_tokens), Rounds(runner, drafter, max_tokens)
    for prompt in prompts:
        alone.answer([prompt], 0, plain)
        report()
        for growth, tally in zip(all_, tallies, strict=True):
            drafter.reshape(growth)
            drafting.answer([prompt], growth.num_draft_tokens, tally)
            report()
    return Sweep(_median(plain.verify_s), tuple(
        Measured(growth, tally.acceptance.length, _median(tally.draft_s), _median(tally.verify_s))
        for growth, tally in zip(all_, tallies, strict=True)))


def _median(seconds: Sequence[float]) -> float:
    # An answer that ended with its first token had no round.
    return statistics.median(seconds) if seconds else float("inf")
