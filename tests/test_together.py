"""Decisions where an engine steps all sessions together: while one waits for its draft, all others stand still."""

from __future__ import annotations

import random

import pytest

from slipstream.base.config import PolicySection
from slipstream.decision.beliefs import Beliefs, StepCosts
from slipstream.decision.decide import Decision, Round, RoundInputs
from slipstream.decision.policy import SpeculationPolicy
from slipstream.following.chains import GUESSED_COSTS

STEP_S = 0.010  # of any rows


def decided(accepted: tuple[int, ...], exchange_s: float, saved_s: float = 0.0, forbidden: int = 0,
            repeating: int = 0) -> tuple[list[Decision], Beliefs]:
    """The decisions of one step for sessions of which that many tokens of four were accepted in each round before.
    ``saved_s``: what the budget has. ``forbidden``: how many of the last may not be drafted for. ``repeating``: how
    many of the first repeat their text."""
    beliefs = Beliefs(StepCosts({1: STEP_S, 256: STEP_S}), lockstep=True)
    sessions = [SpeculationPolicy(PolicySection(max_nodes=4), beliefs) for _ in accepted]
    for _ in range(60):
        for one, tokens in zip(sessions, accepted, strict=True):
            one.observe(0.0, Round(4, tokens, STEP_S, 0.0, rows=5 * len(accepted), exchange_s=exchange_s))
    for one in sessions[len(sessions) - forbidden :]:
        one.forbid(0.0)
    beliefs.budget.left_s = saved_s
    others = len(accepted) - 1
    asking = [(one, RoundInputs(others, True, (0.9, 0.9, 0.9) if number < repeating else ()))
              for number, one in enumerate(sessions)]
    return SpeculationPolicy.decide_step(asking), beliefs


@pytest.mark.parametrize(("accepted", "exchange_s", "waiting"), [
    ((4,), 0.030, 1), ((4,), 0.045, 0),
    ((4, 4, 4, 4), 0.030, 4), ((4, 4, 4, 4), 0.045, 0),
    ((4, 4, 1, 1), 0.010, 4), ((4, 4, 1, 1), 0.012, 2), ((4, 4, 1, 1), 0.020, 0),
    ((4, 0, 0, 0), 0.009, 1), ((4, 0, 0, 0), 0.012, 0), ((4, *[0] * 15), 0.012, 0)])
def test_as_many_wait_as_are_together_worth_the_time_of_all(accepted: tuple[int, ...], exchange_s: float,
                                                            waiting: int) -> None:
    """One that gained 35 ms by its draft, whatever the others lost, stopped fifteen for 12 ms in each step."""
    decisions, beliefs = decided(accepted, exchange_s)
    assert [one.wait_s > 0 for one in decisions] == [True] * waiting + [False] * (len(accepted) - waiting)
    assert {one.why for one in decisions} <= {"drafts pay", "too slow"} and not any(one.is_trial for one in decisions)
    held = beliefs.latency.held_per_waiter
    assert held == ((len(accepted) - waiting) / waiting if waiting else 0)


@pytest.mark.parametrize(("accepted", "exchange_s", "saved_s", "tries"), [
    ((4, 0, 0, 0), 0.012, 0.040, 3), ((4, 0, 0, 0), 0.012, 0.030, 0), ((1, 1, 1, 1), 0.030, 0.125, 4),
    ((1, 1, 1, 1), 0.030, 0.110, 0)])
def test_a_wait_is_tried_by_all_or_by_nobody(accepted: tuple[int, ...], exchange_s: float, saved_s: float,
                                             tries: int) -> None:
    decisions, beliefs = decided(accepted, exchange_s, saved_s)
    assert [one.wait_s > 0 for one in decisions] == [tries > 0] * len(accepted)
    assert sum(one.is_trial for one in decisions) == tries
    assert beliefs.budget.left_s == (0.0 if tries else saved_s), "its price is paid once, and leaves no debt"


def test_a_wait_is_paid_for_where_the_first_of_those_who_could_try_it_repeats_its_text() -> None:
    decisions, beliefs = decided((1, 1, 1, 1), 0.030, saved_s=0.5, repeating=1)
    assert [(one.why, one.is_trial) for one in decisions] == [("prompt lookup", False), *[("tries a wait", True)] * 3]
    assert beliefs.budget.left_s == 0.0, "or it would be tried in each step, for nothing"


def test_who_needs_no_wait_has_none_and_tries_none() -> None:
    decisions, _ = decided((4, 4, 1, 1), 0.012, saved_s=1.0)
    assert [(one.wait_s > 0, one.is_trial) for one in decisions] == [(True, False)] * 2 + [(False, False)] * 2
    decisions, beliefs = decided((4, 4, 4, 4), 0.012, forbidden=2)
    assert [one.wait_s > 0 for one in decisions] == [True, True, False, False]
    assert beliefs.latency.held_per_waiter == 1.0
    decisions, _ = decided((4, 4, 4, 4), 0.022, forbidden=2)
    assert not any(one.wait_s > 0 for one in decisions), "two who may not be drafted for stand still with them"


def time_by_plain(sessions: int, acceptance: float, row_s: float, exchange_s: float = 0.004) -> float:
    """Of ten seconds in an engine whose costs are a guess and rise with each row, after the first five."""
    costs, chance = StepCosts(GUESSED_COSTS, guessed=True), random.Random(1)
    beliefs = Beliefs(costs, lockstep=True)
    policies = [SpeculationPolicy(PolicySection(max_nodes=4), beliefs) for _ in range(sessions)]
    now_s, tokens, began_s = 0.0, 0, 0.0
    while now_s < 15.0:
        if not began_s and now_s > 5.0:
            tokens, began_s = 0, now_s
        inputs = RoundInputs(sessions - 1, followed=True)
        decisions = SpeculationPolicy.decide_step([(policy, inputs) for policy in policies])
        drafted = [one.verify if one.wait_s > 0 else 0 for one in decisions]
        rows, wait_s = sessions + sum(drafted), exchange_s if any(drafted) else 0.0
        step_s = 0.020 + row_s * rows
        now_s += wait_s + step_s
        costs.observe(rows, step_s)
        for policy, nodes in zip(policies, drafted, strict=True):
            accepted = next((node for node in range(nodes) if chance.random() > acceptance), nodes)
            tokens += 1 + accepted
            policy.observe(now_s, Round(nodes, accepted, step_s, wait_s if nodes else 0.0, rows,
                                        exchange_s=exchange_s if nodes else None))
    return (now_s - began_s) / (tokens * (0.020 / sessions + row_s))


@pytest.mark.parametrize(("acceptance", "row_s", "most"), [
    (0.6, 0.0020, 1.03), (0.7, 0.0020, 1.03), (0.8, 0.0005, 0.96), (0.8, 0.0001, 0.62)])
def test_a_crowd_drafts_where_rows_are_cheap(acceptance: float, row_s: float, most: float) -> None:
    assert time_by_plain(48, acceptance, row_s) < most
