"""What drafting costs the others is borne by those that it is for."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from slipstream.policy import StepCosts
from target_service.answers import Step
from target_service.burden import Burden


@dataclass
class One:
    """An answer."""

    stood: bool = False
    drafted_for: bool = False
    burden_s: float = 0.0


def test_who_the_step_was_held_for_bears_what_the_ready_ones_stood() -> None:
    burden, answers = Burden(StepCosts({1: 0.010})), [One(stood=True), One(stood=True), One(), One(), One()]
    burden.hold(1.0)
    burden.hold(1.001)
    burden.share(answers, answers, Step(1.004, 0.010, 5, 5, 0))
    assert [one.burden_s for one in answers] == pytest.approx([0.006, 0.006, 0.0, 0.0, 0.0])
    burden.share(answers, answers, Step(2.0, 0.010, 5, 5, 0))
    assert sum(one.burden_s for one in answers) == pytest.approx(0.012), "the next step was not held"


def test_who_is_drafted_for_beside_a_step_bears_that_it_is_slower() -> None:
    costs = StepCosts({1: 0.010, 8: 0.010})
    burden, plain, drafted_for = Burden(costs), [One() for _ in range(3)], One(drafted_for=True)
    for number in range(200):
        drafted_for.burden_s, drafted_for.drafted_for = 0.0, number % 2 == 1
        burden.share([*plain, drafted_for], plain, Step(0.0, 0.012 if number % 2 else 0.010, 3, 3, 0))
    assert costs.cost(3) == pytest.approx(0.010, rel=0.02)
    assert drafted_for.burden_s == pytest.approx(3 * 0.002, rel=0.1)
    assert not any(one.burden_s for one in plain)
