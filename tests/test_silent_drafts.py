"""How long a policy goes on with a drafter that says nothing, or that costs more than it gives."""

from __future__ import annotations

import pytest

from slipstream.base.config import PolicySection
from slipstream.decision.beliefs import Beliefs, StepCosts
from slipstream.decision.decide import Round, RoundInputs
from slipstream.decision.policy import SpeculationPolicy

GOOD_S = 1.0  # of good rounds before


def steps_until_left(later: Round, first: Round | None = None, answers: int = 1, pause_s: float = 0.0) -> int:
    """Steps with rounds like ``first`` and then ``later``, one of each answer, until the drafter is left. ``pause_s``:
    between two steps nothing is computed."""
    costs = StepCosts({1: later.verify_s, 64: later.verify_s})
    policy, now_s = SpeculationPolicy(PolicySection(), Beliefs(costs)), 0.0
    policy.num_answers = answers
    while now_s < GOOD_S:
        now_s += later.verify_s
        assert policy.observe(now_s, Round(4, 4, later.verify_s, 0.0, exchange_s=0.002)) is None
    for step in range(1, 1000):
        round_ = first if first is not None and step == 1 else later
        now_s += round_.verify_s + round_.wait_s + pause_s
        for _ in range(answers):
            policy.decide(RoundInputs(followed=True))
            if policy.observe(now_s, round_) is not None:
                return step
    raise AssertionError("it was never left")


@pytest.mark.parametrize(("step_s", "wait_s", "pause_s", "answers", "steps"), [
    (0.010, 0.005, 0.0, 1, 25),
    (0.100, 0.005, 0.0, 1, 8),  # few long steps may be one stall
    (0.010, 0.100, 0.0, 1, 15),
    (0.010, 0.005, 1.0, 1, 25),  # between two questions nobody is silent
    (0.010, 0.005, 0.0, 16, 25)], ids=str)
def test_a_drafter_is_silent_after_a_quarter_of_a_second_and_eight_rounds(step_s: float, wait_s: float, pause_s: float,
                                                                         answers: int, steps: int) -> None:
    first = Round(0, 0, step_s, wait_s, late=True)
    assert abs(steps_until_left(Round(0, 0, step_s, 0.0), first, answers, pause_s) - steps) <= 1


def test_what_many_answers_lose_in_one_step_counts_once() -> None:
    wrong = Round(4, 0, 0.1, 0.1, exchange_s=0.1)
    assert abs(steps_until_left(wrong, answers=4) - steps_until_left(wrong)) <= 2
