"""Beliefs and what is decided by them, number by number: each follows what was measured, and forgets it again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from slipstream.base.config import PolicySection
from slipstream.decision.beliefs import (
    FIRST_TEXTS,
    FORGET_AFTER,
    PRIOR_TRIALS,
    Acceptance,
    Beliefs,
    Ledger,
    StepCosts,
    whole_context,
)
from slipstream.decision.decide import Mode, Round, RoundInputs, SessionState
from slipstream.decision.policy import PROBE_AFTER_S, SpeculationPolicy
from slipstream.following.chains import GUESSED_COSTS
from slipstream.following.followed import RoundRecord, Step, Verified
from slipstream.protocol.messages import Commit, DraftBound, Growth, Open
from slipstream.protocol.requests import Piece
from slipstream.protocol.tree import MAX_NODES
from tests.test_target_worker import HELLO, Heard, plain_worker

STEP_S = 0.010
GOOD = Round(4, 4, STEP_S, 0.0, exchange_s=0.002)


def free() -> Beliefs:
    """Rows cost nothing."""
    return Beliefs(StepCosts({1: STEP_S, 64: STEP_S}))


def test_what_is_measured_at_a_row_count_is_believed_there() -> None:
    costs = StepCosts({1: 0.010, 8: 0.011, 16: 0.012, 32: 0.013})
    for _ in range(20):
        costs.observe(9, 0.022)
    assert costs.cost(8) > 0.020 and costs.cost(32) < 0.024
    for _ in range(200):
        costs.observe(48, 0.056)  # a prompt's, beyond the profile
    assert costs.cost(48) == pytest.approx(0.056, rel=0.1)


def test_a_profile_of_a_machine_that_was_busy_keeps_its_shape() -> None:
    costs = StepCosts({1: 0.030, 8: 0.045, 16: 0.060}, read_s=6e-7)
    for _ in range(30):
        costs.observe(1, 0.010)
    assert [costs.cost(rows) for rows in (1, 8, 16)] == pytest.approx([0.010, 0.015, 0.020], rel=0.02)
    assert costs.cost(1, 10_000) - costs.cost(1) == pytest.approx(2e-7 * 10_000, rel=0.02)


def test_a_few_slow_steps_do_not_make_a_row_count_dear_for_ever() -> None:
    costs = StepCosts({1: 0.010, 8: 0.0125, 64: 0.045})
    for _ in range(4):
        costs.observe(8, 0.040)  # the machine had other work
    assert costs.cost(8) > 0.018
    for _ in range(10_000):  # none has eight rows now, as they do not pay
        costs.observe(1, 0.010)
    assert costs.cost(8) == pytest.approx(0.0125, rel=0.03) and costs.cost(1) == pytest.approx(0.010, rel=0.01)


def test_slow_first_steps_with_drafts_do_not_end_speculation_in_an_engine_whose_costs_are_a_guess() -> None:
    """Engines compile in the first steps of each kind."""
    costs = StepCosts({1: 0.0200, 8: 0.0205, 64: 0.024}, guessed=True)
    for _ in range(100):
        costs.observe(1, 0.010)
    for _ in range(3):
        costs.observe(8, 1.0)
    assert costs.cost(8) > 0.05
    for seconds in (0.012, 0.018):
        for _ in range(FORGET_AFTER + 1):  # plain ones, as drafts do not pay
            costs.observe(1, 0.010)
        assert costs.cost(8) == pytest.approx(0.01025, rel=0.01)
        costs.observe(8, seconds)
        assert costs.cost(8) == pytest.approx(seconds, rel=0.01) and costs.cost(1) == pytest.approx(0.010, rel=0.01)


def test_first_steps_near_a_row_count_correct_what_was_believed_of_it() -> None:
    """It stood on the line through others. As a correction of the guess, it made further rows free for long."""
    costs = StepCosts(GUESSED_COSTS, guessed=True)
    for rows in (48, 48, 160, 160, 224, 224):
        costs.observe(rows, 0.020 + 0.002 * rows)
    for rows in (48, 96, 160, 240):
        assert costs.cost(rows) == pytest.approx(0.020 + 0.002 * rows, rel=0.15)


@pytest.mark.parametrize("slow_first", [True, False])
def test_one_step_alone_does_not_make_a_row_count_dear(slow_first: bool) -> None:
    """It may compile."""
    costs = StepCosts(GUESSED_COSTS, guessed=True)
    for rows in (16, 80, 16, 80):
        costs.observe(rows, 0.020)
    seconds = [0.022, 0.400]
    costs.observe(48, seconds.pop(slow_first))
    assert costs.cost(48) == pytest.approx(0.020)
    costs.observe(48, *seconds)
    assert costs.cost(48) == pytest.approx(0.022)


def test_of_the_first_two_steps_of_all_the_quicker_one_is_believed() -> None:
    for first_s, second_s in ((0.060, 0.020), (0.020, 0.060)):
        costs = StepCosts(GUESSED_COSTS, guessed=True)
        costs.observe(1, first_s)
        costs.observe(1, second_s)
        assert costs.cost(1) == pytest.approx(0.020)


def test_that_a_row_count_costs_less_than_was_guessed_is_believed_at_once() -> None:
    costs = StepCosts(GUESSED_COSTS, guessed=True)
    for rows, seconds in ((16, 0.020), (80, 0.040), (80, 0.040), (48, 0.022)):
        costs.observe(rows, seconds)
    assert costs.cost(48) == pytest.approx(0.022)


def test_an_engine_whose_costs_are_a_guess_is_slower_everywhere_where_it_is_slower() -> None:
    costs = StepCosts(GUESSED_COSTS, guessed=True)
    for rows in (1, 1, 64, 64):
        costs.observe(rows, 0.020)
    for _ in range(100):
        costs.observe(64, 0.040)
    assert costs.cost(64) == pytest.approx(0.040, rel=0.01) and 0.021 < costs.cost(1) < 0.024


def test_more_rows_never_cost_less() -> None:
    assert StepCosts({1: 0.010, 8: 0.008, 64: 0.020}).cost(8) == 0.010


def test_a_step_after_many_that_computed_prompts_may_be_the_first_one_near_its_row_count() -> None:
    costs = StepCosts(GUESSED_COSTS, guessed=True)
    costs.observe(1, 0.020)
    for _ in range(FORGET_AFTER):
        costs.skip_step()
    for _ in range(2):
        costs.observe(64, 0.030)
    assert costs.cost(64) == pytest.approx(0.030)


def test_one_tree_shows_what_smaller_trees_would_have_given() -> None:
    """Of 16 nodes the best ones are accepted most; a depth alone says nothing of how few would have been enough."""
    dice, acceptance = random.Random(1), Acceptance()
    for _ in range(2000):
        first = dice.random()
        ranks = [1, 3] if first < 0.4 else [1] if first < 0.6 else [2] if first < 0.7 else []
        acceptance.observe(16, len(ranks), ranks)
    for belief in (acceptance, acceptance.inherit(), acceptance.inherit().inherit()):
        expected = belief.expected(16)
        assert expected[1] == pytest.approx(0.6, abs=0.2) and expected[3] == pytest.approx(1.1, abs=0.25)
        assert expected[16] - expected[3] < 0.05
    heir = acceptance.inherit()
    for _ in range(20):
        heir.observe(2, 2, (1, 2))
    assert heir.expected(3)[3] > acceptance.expected(3)[3] + 0.4, "in an easier text further nodes are better, too"
    assert heir.expected(3)[3] > heir.expected(3)[2] + 0.5, "of nodes that were not drafted nothing was seen"


def test_of_nodes_that_were_seldom_seen_the_guess_is_a_chain() -> None:
    acceptance = Acceptance()
    acceptance.observe(2, 0, ())
    assert acceptance.expected(2)[1] == pytest.approx(0.7 * PRIOR_TRIALS / (1 + PRIOR_TRIALS))


def test_no_node_is_believed_to_be_better_than_one_that_scored_higher() -> None:
    acceptance = Acceptance()
    for _ in range(9):
        acceptance.observe(3, 1, (3,))
    gained = [more - less for less, more in pairwise(acceptance.expected(3))]
    assert gained == sorted(gained, reverse=True)


def test_the_worst_nodes_of_the_largest_tree_may_be_hopeless() -> None:
    acceptance = Acceptance()
    acceptance.observe(MAX_NODES - 1, 1, (MAX_NODES - 1,))
    for _ in range(2000):
        acceptance.observe(MAX_NODES - 1, 1, (1,))
    for belief in (acceptance, acceptance.inherit()):
        expected = belief.expected(MAX_NODES - 1)
        assert len(expected) == MAX_NODES and expected[-1] == pytest.approx(expected[1], abs=0.2)


def test_behind_a_long_text_fewer_draft_tokens_pay() -> None:
    costs = StepCosts({1: STEP_S, 64: 1.1 * STEP_S}, read_s=2e-7)
    chances = [0.8 ** (1 + depth) for depth in range(16)]
    for others in (0, 3):
        trees, chains = list[int](), list[int]()
        for context in (0, 2048, 16384):
            inputs = RoundInputs(others, followed=True, context=context)
            trees.append(SpeculationPolicy(PolicySection(), Beliefs(costs)).decide(inputs).verify)
            looked_up = RoundInputs(others, lookup_chances=chances, context=context)
            chains.append(SpeculationPolicy(PolicySection(), Beliefs(costs)).decide(looked_up).lookup)
        assert trees == sorted(trees, reverse=True) and trees[0] > trees[1] > trees[2], (others, trees)
        assert chains == sorted(chains, reverse=True) and chains[0] > chains[1] > chains[2], (others, chains)


def test_what_reading_a_long_text_takes_is_not_believed_of_short_ones() -> None:
    costs = StepCosts({1: STEP_S, 16: 2 * STEP_S}, read_s=2e-7)
    for _ in range(50):
        costs.observe(16, 2 * STEP_S + 15 * 4096 * 2e-7, 15 * whole_context(4200))
    assert costs.cost(16) == pytest.approx(2 * STEP_S) and costs.cost(1) == pytest.approx(STEP_S)
    assert costs.steps(1, 15, 4096)[15] == pytest.approx(costs.cost(16, 15 * 4096))
    assert costs.step_shares(4, 3, 4096)[3] == pytest.approx(
        costs.cost(4) + (costs.cost(16, 12 * 4096) - costs.cost(4)) / 4)


def test_what_reading_takes_on_a_machine_that_was_busy_at_start_does_not_forbid_drafts_for_ever() -> None:
    read_s, context = 2e-7, 4096
    costs = StepCosts({1: STEP_S, 64: 1.1 * STEP_S}, read_s=8 * read_s)
    for _ in range(20):
        policy = SpeculationPolicy(PolicySection(), Beliefs(costs))
        for _ in range(200):
            nodes = policy.decide(RoundInputs(followed=True, context=context)).verify
            seconds = STEP_S + nodes * read_s * context
            costs.observe(1 + nodes, seconds, nodes * context)
            policy.observe(0.0, Round(nodes, nodes, seconds, 0.0, exchange_s=0.001 if nodes else None))
    assert costs.cost(5, 4 * context) == pytest.approx(STEP_S + 4 * read_s * context, rel=0.1)
    for _ in range(20_000):  # short texts say nothing about it
        costs.steps(1, 7)
        costs.observe(1, STEP_S)
    assert costs.cost(5, 4 * context) == pytest.approx(STEP_S + 4 * read_s * context, rel=0.1)


def test_a_drafter_that_was_good_is_soon_believed_to_be_bad() -> None:
    acceptance = Acceptance()
    for _ in range(100):
        acceptance.observe(4, 4)
    assert acceptance.tokens(4) > 3.4
    for _ in range(60):
        acceptance.observe(4, 0)
    assert acceptance.tokens(4) < 0.7


def test_waits_of_long_ago_count_no_more_than_those_of_late() -> None:
    state = SessionState(Mode.SPECULATE, Acceptance(), 4)
    for _ in range(200):
        state.recent.add(0.020, 0.012, 0.002, True)
    assert state.recent_wait_s == pytest.approx(0.002, rel=0.01)
    for _ in range(100):
        state.recent.add(0.020, 0.010, 0.0, True)
    assert state.recent_wait_s < 1e-6 and Ledger().gain == 1.0


def test_who_often_has_nothing_to_propose_is_not_waited_for_long() -> None:
    for rare in (True, False):
        beliefs = free()
        policy = SpeculationPolicy(PolicySection(max_nodes=4), beliefs)
        for turn in range(2000):
            drafted = 0 if rare and turn % 10 else 4
            policy.observe(0.0, Round(drafted, drafted, STEP_S, 0.020))
        beliefs.budget.left_s = 0.0
        assert (policy.decide(RoundInputs(followed=True)).wait_s == 0.0) is rare
        beliefs.acceptance[False].num_texts = FIRST_TEXTS
        _, share, _ = beliefs.begin_session(False, 1.0)
        assert share == pytest.approx(0.1 if rare else 1.0, abs=0.05), "a new answer expects as much"


@pytest.mark.parametrize("end", ["closed", "forbidden", "drafted", "waited"])
def test_an_answer_that_drafts_nothing_does_not_use_up_a_guess(end: str) -> None:
    beliefs = free()
    beliefs.acceptance[False].num_texts, beliefs.budget.left_s = FIRST_TEXTS, 1.0
    policy = SpeculationPolicy(PolicySection(), beliefs)
    paid_s = 1.0 - beliefs.budget.left_s
    assert paid_s > 0.0
    if end == "forbidden":
        policy.forbid(0.0)
    elif end != "closed":
        policy.observe(0.0, GOOD if end == "drafted" else Round(0, 0, STEP_S, 0.002))
    policy.close()
    assert beliefs.budget.left_s == pytest.approx(1.0 if end in ("closed", "forbidden") else 1.0 - paid_s, abs=0.01)


def test_time_that_passes_begins_no_probe_of_what_is_in_use() -> None:
    policy = SpeculationPolicy(PolicySection(), free())
    for tick in range(100):
        policy.observe(tick * STEP_S, GOOD)
        policy.tick(tick * STEP_S + 10 * PROBE_AFTER_S)
        assert policy.mode is Mode.SPECULATE and not policy.probing


def test_a_draft_that_comes_ends_no_probe_of_one_that_answers() -> None:
    beliefs = free()
    policy = SpeculationPolicy(PolicySection(), beliefs)
    policy.drafter_lost(0.0)
    beliefs.budget.left_s = 10.0
    policy.drafter_ready(0.0)
    policy.tick(1.0)
    assert policy.probing
    policy.observe(1.01, GOOD)
    policy.drafter_ready(1.01)
    assert policy.probing, "its first rounds count"
    for turn in range(10):
        policy.observe(1.02 + turn * STEP_S, GOOD)
    assert policy.mode is Mode.SPECULATE


@pytest.mark.parametrize(("accepted", "exchange_s", "reason"), [
    (0, 0.004, "acceptance_low"), (2, 0.060, "draft_timeout")])
def test_who_is_wrong_and_who_is_slow_are_told_apart(accepted: int, exchange_s: float, reason: str) -> None:
    policy = SpeculationPolicy(PolicySection(max_nodes=4), free())
    told = [policy.observe(turn * 0.050, Round(4, accepted, STEP_S, exchange_s)) for turn in range(60)]
    assert [transition.reason for transition in told if transition is not None][:1] == [reason]


def test_nobody_follows_an_answer_for_which_no_tree_pays() -> None:
    beliefs = Beliefs(StepCosts({9: STEP_S, 18: 10 * STEP_S, 64: 90 * STEP_S}))
    decision = SpeculationPolicy(PolicySection(), beliefs).decide(RoundInputs(others=8))
    assert decision.verify == decision.num_wanted == 0 and not decision.follow


def test_the_policy_hears_which_places_of_a_tree_the_accepted_nodes_had(tiny_folder: Path) -> None:
    """The best nodes first: how many are worth their rows is learned from it."""
    told, ranks = list[Piece | Exception](), list[Sequence[int] | None]()
    worker = plain_worker(tiny_folder, told, tokens=9)
    while len(told) < 9:
        worker.poll()
    right = [1, 2, 3, *(token for piece in told if isinstance(piece, Piece) for token in piece.tokens)]

    class Forked(Heard):
        def send(self, items: Sequence[DraftBound]) -> None:
            for item in items:
                if isinstance(item, Open | Commit):
                    base = len(item.tokens) + (item.base if isinstance(item, Commit) else 0)
                    ids = np.array([2 * base, 2 * base + 1], np.int32)
                    tokens = np.array([(right[base] + 1) % 256, right[base]], np.int32)
                    growth = Growth(item.session, base, ids, np.full(2, -base, np.int32), tokens,
                                    np.array([-1.0, -2.0], np.float32))
                    drafted.following.received(self, [growth], [])

    drafted = plain_worker(tiny_folder, [], tokens=9, policy=PolicySection(always=True), prompt_lookup=False)
    drafted.following.link_up(Forked(), HELLO)
    committed = drafted.following.committed

    def watched(batch: Sequence[Verified], step: Step) -> list[RoundRecord]:
        ranks.extend(verified.ranks for verified in batch)
        return committed(batch, step)

    drafted.following.committed = watched  # type: ignore[method-assign, assignment]
    while drafted.num_open:
        drafted.poll()
    assert ranks[0] is None and [*ranks[1]] == [2], "a root alone is a chain"
