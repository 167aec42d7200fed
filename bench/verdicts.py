"""What the rows of ``make bench`` say: a verdict for each goal.

It knows nothing about how they were measured.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from bench.completions import Answered

Results = dict[tuple[str, int, str], list[Answered]]  # (system, batch, set)


@dataclass(frozen=True, slots=True)
class Goal:
    """``system`` should reach so many times ``other``."""

    system: str
    other: str
    batch: int
    set: str
    least: float


GOALS = (
    Goal("slipstream-default", "slipstream-plain", 1, "mt_bench", 1.3),
    Goal("slipstream-default", "slipstream-plain", 1, "copy", 1.9),
    Goal("slipstream-default", "transformers-plain", 1, "mt_bench", 2.5),
    Goal("slipstream-default", "transformers-plain", 1, "copy", 2.5),
    Goal("slipstream-plain", "llamacpp-plain", 1, "mt_bench", 0.9),
    Goal("slipstream-plain", "llamacpp-plain", 1, "copy", 0.9),
    *(Goal("slipstream-default", "slipstream-plain", batch, set_, 1.0)
      for batch in (4, 16) for set_ in ("mt_bench", "copy")),
)


def speed(answer: Answered, batch: int) -> float:
    """Tokens a second: of decoding, and of a whole batch from the first request to the last token."""
    return answer.tokens_per_s if batch == 1 else answer.end_to_end


def ratio(results: Results, system: str, other: str, batch: int, set_: str) -> float:
    """The median over questions (or runs) of ``system``'s speed by ``other``'s; 0 where one is missing."""
    both = zip(results.get((system, batch, set_), ()), results.get((other, batch, set_), ()), strict=False)
    pairs = [(speed(mine, batch), speed(theirs, batch)) for mine, theirs in both]
    ratios = [mine / theirs for mine, theirs in pairs if mine and theirs]
    return statistics.median(ratios) if ratios else 0.0


def verdicts(results: Results) -> list[str]:
    """One line a goal."""
    lines = []
    for goal in GOALS:
        got = ratio(results, goal.system, goal.other, goal.batch, goal.set)
        word = "not measured" if not got else f"{got:.2f} ×, {'reached' if got >= goal.least else 'MISSED'}"
        lines.append(f"{goal.system} by {goal.other}, batch {goal.batch}, {goal.set}: goal {goal.least:g} ×: {word}")
    return lines
