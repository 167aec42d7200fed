"""Burden: what drafting costs answers that it is not for, shared by those that it is for.

Rules:
1. Ready answers that stood still because their step was held: their seconds are shared by those that it was held for.
2. A drafter at work on the same cores or memory makes the step of all slower, by what ``StepCosts`` has learnt: shared
   by those that it works for.

What an answer has to bear is told to its policy with its next round. It knows nothing about drafters or links.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.policy import StepCosts
from target_service.answers import Step
from target_service.running import Running


class Burden:
    __slots__ = ("_costs", "_held_from_s")

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._held_from_s: float | None = None

    def hold(self, now_s: float) -> None:
        """The step is held, or still is."""
        if self._held_from_s is None:
            self._held_from_s = now_s

    def share(self, running: Sequence[Running], stepped: Sequence[Running], step: Step) -> None:
        """A step of ``stepped`` is over, but for its commits."""
        held_from_s, self._held_from_s = self._held_from_s, None
        stood = [one for one in stepped if one.stood]
        if held_from_s is not None:
            for one in stood:
                one.burden_s += (step.started_s - held_from_s) * (len(stepped) - len(stood)) / len(stood)
        drafted_for = [one for one in running if one.drafted_for]
        for one in drafted_for:
            one.burden_s += self._costs.slowed_s(step.rows) * len(stepped) / len(drafted_for)
        self._costs.observe(step.rows, step.seconds, bool(drafted_for))
