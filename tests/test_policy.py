"""The policy in simulated time: it pays, it gives up, it comes back, it does not flap, and it never costs much."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from slipstream.base.config import PolicySection
from slipstream.decision.beliefs import (
    FIRST_TEXTS,
    KEPT_EXCHANGES,
    MAX_RUN_AHEAD,
    PLAIN_EVERY,
    SHARE,
    TRIALS_IN_A_ROW,
    Acceptance,
    Beliefs,
    DraftLatency,
    ExplorationBudget,
    StepCosts,
)
from slipstream.decision.decide import IDLE_TOKENS, Decision, Mode, Round, RoundInputs
from slipstream.decision.policy import MIN_DWELL_S, PROBE_AFTER_S, PROBE_MAX_S, SpeculationPolicy
from slipstream.following.chains import GUESSED_COSTS
from tests.simulated import PROFILE, Simulation, World, always, steps

CONFIG = PolicySection()
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))]
SETTLED = 1.05
RETURN_S = PROBE_MAX_S + 5.0  # the longest wait between probes, and one that goes wrong


def policy_of(profile: dict[int, float], exchange_s: float | None = None, shared: bool = False,
              load: int = 1) -> tuple[SpeculationPolicy, Beliefs]:
    """A session of a target whose steps and exchanges take so long."""
    beliefs = Beliefs(StepCosts(profile), shared)
    if exchange_s is not None:
        beliefs.latency.observe(exchange_s)
    beliefs.latency.load = load
    return SpeculationPolicy(CONFIG, beliefs), beliefs


def decided(policy: SpeculationPolicy, others: int = 0, followed: bool = True) -> Decision:
    return policy.decide(RoundInputs(others, followed))


def played(world: World, until_s: float, seed: int, config: PolicySection = CONFIG) -> Simulation:
    simulation = Simulation(world, config, seed)
    simulation.run(until_s)
    return simulation


@pytest.mark.parametrize("seed", SEEDS)
def test_a_good_drafter_pays_without_a_pause(seed: int) -> None:
    simulation = played(World(), 30, seed)
    assert not simulation.transitions, (seed, simulation.transitions)
    assert simulation.overhead(0, 30) < 0.45, seed


@pytest.mark.parametrize("seed", SEEDS)
def test_good_then_bad_then_good(seed: int) -> None:
    simulation = played(World(acceptance=steps((0, 0.8), (30, 0.02), (90, 0.8))), 150, seed)
    assert simulation.overhead(0, 30) < 0.45, seed
    assert simulation.first(Mode.SHADOW, 30) < 3, (seed, simulation.transitions)
    assert simulation.overhead(35, 90) <= SETTLED, seed
    assert simulation.first(Mode.SPECULATE, 90) < RETURN_S, (seed, simulation.transitions)
    assert simulation.overhead(90 + RETURN_S, 150) < 0.45, seed
    assert simulation.transitions[0].reason == "acceptance_low"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("acceptance", [0.2, 0.27, 0.35])
def test_noise_at_the_threshold_does_not_make_it_flap(acceptance: float, seed: int) -> None:
    simulation = played(World(acceptance=always(acceptance), exchange_s=always(0.004), noise=0.2), 120, seed)
    assert len(simulation.transitions) <= 10, (seed, simulation.transitions)
    assert simulation.overhead(20, 120) <= SETTLED, seed


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("period_s", [0.5, 1.0, 5.0])
def test_alternating_good_and_bad_is_a_win(period_s: float, seed: int) -> None:
    world = World(acceptance=lambda now_s: 0.8 if int(now_s / period_s) % 2 else 0.02)
    simulation = played(world, 60, seed)
    assert simulation.overhead(10, 60) < 1.0, seed
    fastest = MIN_DWELL_S + PROBE_AFTER_S
    assert len(simulation.transitions) <= 2 * 60 / fastest, seed


@pytest.mark.parametrize("seed", SEEDS)
def test_slow_but_right_costs_nothing_and_is_used_once_it_is_fast(seed: int) -> None:
    simulation = played(World(acceptance=always(0.95), exchange_s=steps((0, 0.08), (60, 0.002))), 120, seed)
    assert simulation.overhead(10, 60) <= SETTLED, seed
    assert simulation.overhead(60 + RETURN_S, 120) < 0.45, (seed, simulation.transitions)


@pytest.mark.parametrize(("deadline_s", "seed"), [
    pytest.param(deadline_s, seed, marks=() if seed == deadline_s else pytest.mark.long)
    for deadline_s in (1.0, 2.0) for seed in range(3)])
def test_a_wait_that_costs_more_than_a_purse_holds_is_tried_rarely_not_never(deadline_s: float, seed: int) -> None:
    world = World(exchange_s=steps((0.0, 0.002), (30.0, 3.0), (200.0, 0.002)))
    simulation = played(world, 400.0, seed, PolicySection(deadline_max_s=deadline_s))
    assert simulation.first(Mode.SPECULATE, 200.0) < 200.0
    assert simulation.overhead(60.0, 200.0) < SETTLED


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("exchange_s", [0.0005, 0.001, 0.005])
def test_rare_matches_are_used_and_empty_answers_are_not_punished(exchange_s: float, seed: int) -> None:
    world = World(acceptance=always(0.7), exchange_s=always(exchange_s), matches=always(0.1))
    simulation = played(world, 60, seed)
    assert not simulation.transitions, (seed, simulation.transitions)
    assert simulation.overhead(5, 60) <= 1.0, seed


def test_no_matches_for_long_then_many() -> None:
    simulation = played(World(acceptance=always(0.9), matches=steps((0, 0.0), (40, 0.8))), 60, seed=0)
    assert not simulation.transitions
    assert simulation.overhead(2, 40) <= SETTLED
    assert simulation.overhead(45, 60) < 0.6


@pytest.mark.parametrize("seed", SEEDS)
def test_a_drafter_that_falls_silent(seed: int) -> None:
    simulation = played(World(present=steps((0, 1), (20, 0), (60, 1))), 120, seed)
    assert simulation.first(Mode.SHADOW, 20) < 5, (seed, simulation.transitions)
    assert simulation.transitions[0].reason == "draft_timeout"
    assert simulation.overhead(25, 60) <= SETTLED, seed
    assert simulation.first(Mode.SPECULATE, 60) < RETURN_S, (seed, simulation.transitions)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_drafter_lost_and_back(seed: int) -> None:
    simulation = played(World(present=steps((0, 1), (10, 0), (30, 1))), 10, seed)
    simulation.note(simulation.policy.drafter_lost(simulation.now_s, "draft_unavailable"))
    assert (simulation.transitions[-1].after, simulation.transitions[-1].reason) == (Mode.PLAIN, "draft_unavailable")
    plain = decided(simulation.policy)
    assert not plain.num_wanted and plain.wait_s == 0.0 and not plain.follow
    simulation.run(30)
    assert simulation.overhead(10.1, 30) <= SETTLED, seed
    simulation.policy.drafter_ready(simulation.now_s)
    simulation.run(60)
    assert simulation.first(Mode.SPECULATE, 30) < 5, (seed, simulation.transitions)
    assert simulation.overhead(36, 60) < 0.45, seed


def test_a_drafter_that_reads_long_before_it_drafts_is_used_again_all_the_same() -> None:
    """Plain steps go on meanwhile, so no time is lost that its tokens would have to bring back."""
    world = World(always(0.5), always(0.004), steps((0, 1), (5, 0), (45, 1)), restart_s=4.0)
    simulation = played(world, 120, 0)
    assert simulation.first(Mode.SPECULATE, 45) < RETURN_S, simulation.transitions
    assert simulation.overhead(45 + RETURN_S, 120) < 0.85


def test_a_drafter_that_is_back_is_used_again_though_it_has_nothing_to_propose() -> None:
    """An empty answer costs only its wait, and the next text may be another."""
    simulation = played(World(matches=always(0.0), present=steps((0, 1), (5, 0), (45, 1))), 60, 0)
    assert simulation.first(Mode.SHADOW, 5) < 5 and simulation.first(Mode.SPECULATE, 45) < RETURN_S


def test_on_shared_cores_whoever_drafts_nothing_for_long_is_let_go() -> None:
    """A drafter that reads commits takes time from the target there."""
    for shared in (False, True):
        policy, _ = policy_of(PROFILE, exchange_s=0.002, shared=shared)
        follows = [policy.decide(RoundInputs(followed=True, num_since_request=count)).follow
                   for count in (0, IDLE_TOKENS, IDLE_TOKENS + 1)]
        assert follows == [True, True, not shared]


def test_a_drafter_that_comes_and_goes_is_tried_ever_more_rarely() -> None:
    policy, _ = policy_of(PROFILE)
    lost_s = []
    for now_s in np.arange(0.0, 60.0, 0.01):
        policy.observe(now_s, Round(0, 0, 0.01, 0.0, 1))
        if decided(policy).num_wanted:
            policy.drafter_lost(now_s)
            policy.drafter_ready(now_s)
            lost_s.append(now_s)
    assert 2 < len(lost_s) <= 21


def test_an_incompatible_drafter_is_not_tried_again_soon() -> None:
    policy, _ = policy_of(PROFILE)
    transition = policy.drafter_lost(1.0, "incompatible")
    assert transition is not None and transition.reason == "incompatible"
    for now_s in np.arange(1.0, PROBE_MAX_S, 0.1):
        policy.observe(now_s, Round(0, 0, 0.01, 0.0, 1))
        assert not policy.probing
    for lost_s in (32.0, 64.0):
        for now_s in np.arange(lost_s, lost_s + PROBE_MAX_S + 0.2, 0.1):
            policy.observe(now_s, Round(0, 0, 0.01, 0.0, 1))
        assert policy.probing, "but never more rarely than this"
        policy.drafter_lost(now_s)


def test_drafters_that_come_every_second_do_not_put_the_next_probe_off() -> None:
    policy, _ = policy_of(PROFILE)
    policy.drafter_lost(1.0, "incompatible")
    for now_s in np.arange(1.0, PROBE_MAX_S, 0.1):
        if now_s % 1.0 < 0.1:
            policy.drafter_ready(now_s)
        policy.observe(now_s, Round(0, 0, 0.01, 0.0, 1))
        if policy.probing:
            break
    assert policy.probing and now_s < PROBE_MAX_S / 2


@pytest.mark.parametrize("seed", SEEDS)
def test_load_comes_and_goes(seed: int) -> None:
    world = World(others=lambda now_s: float(np.clip(np.interp(now_s, [10, 40, 80, 100], [0, 63, 63, 0]), 0, 63)))
    simulation = played(world, 160, seed)
    drafted = [n for end_s, _, _, n in simulation.rounds if 45 < end_s < 80]
    assert sum(drafted) < 0.02 * len(drafted), (seed, sum(drafted))
    assert simulation.overhead(0, 10) < 0.45 and simulation.overhead(20, 100) <= SETTLED, seed
    assert simulation.first(Mode.SPECULATE, 100) < RETURN_S, (seed, simulation.transitions)
    assert simulation.overhead(100 + RETURN_S, 160) < 0.45, seed


def test_budget_falls_with_load_down_to_zero() -> None:
    policy, _ = policy_of(PROFILE)
    budgets = [decided(policy, others).verify for others in range(64)]
    assert budgets[0] > 2 and budgets[-1] == 0
    assert all(later <= earlier + 1 for earlier, later in zip(budgets, budgets[8:], strict=False)), budgets


def test_a_prompt_in_the_step_is_no_crowd() -> None:
    policy, beliefs = policy_of({1: 0.010, 512: 0.100})
    for now_s in np.arange(0.0, 5.0, 0.06):
        decided(policy, others=1)
        policy.observe(now_s, Round(4, 1, beliefs.costs.cost(262), 0.0, 262))
    assert policy.mode is Mode.SPECULATE and policy.gain > 1


def test_overload_is_left_for_plain() -> None:
    policy, _ = policy_of(PROFILE)
    transitions = []
    for now_s in np.arange(0.0, 2.0, 0.03):
        assert decided(policy, others=63).verify == 0
        transitions.append(policy.observe(now_s, Round(0, 0, 0.03, 0.0, 64)))
    (transition,) = [t for t in transitions if t is not None]
    assert (transition.after, transition.reason) == (Mode.PLAIN, "overload")
    for now_s in np.arange(2.0, 100.0, 0.03):
        policy.observe(now_s, Round(0, 0, 0.03, 0.0, 64))
        assert not policy.probing


@pytest.mark.parametrize("seed", SEEDS)
def test_a_profile_that_is_wrong_about_trees_is_found_out(seed: int) -> None:
    simulation = played(World(verify_factor=always(4.0)), 60, seed)
    assert simulation.first(Mode.SHADOW, 0) < 15, (seed, simulation.transitions)
    assert simulation.overhead(20, 60) <= SETTLED, seed


@pytest.mark.parametrize(("others", "seconds", "least", "most"), [
    (0.0, 1.0, 0.0, 0.5), (7.0, 1.0, 0.0, 0.9), (0.0, 60.0, 0.95, 1.02), (7.0, 60.0, 0.95, 1.02)])
def test_slow_steps_with_drafts_in_an_engine_whose_costs_are_a_guess(others: float, seconds: float, least: float,
                                                                    most: float) -> None:
    """Slow at first only, as engines compile: speculation returns. Always slow: it stays off."""
    world = World(verify_factor=steps((0.0, 10.0), (seconds, 1.0)), others=always(others))
    simulation = Simulation(world, CONFIG, beliefs=Beliefs(StepCosts(GUESSED_COSTS, guessed=True), lockstep=True))
    simulation.run(60)
    assert least < simulation.overhead(20, 60) < most, simulation.transitions


@pytest.mark.parametrize("seed", SEEDS)
def test_a_slow_machine_is_no_reason_to_stop(seed: int) -> None:
    simulation = played(World(slowness=steps((0, 1.0), (10, 4.0), (30, 1.0))), 50, seed)
    assert simulation.overhead(0, 50) < 0.5, (seed, simulation.transitions)


@pytest.mark.parametrize("seed", SEEDS)
def test_forbid_and_allow(seed: int) -> None:
    simulation = played(World(), 5, seed)
    simulation.note(simulation.policy.forbid(simulation.now_s))
    assert simulation.policy.forbid(simulation.now_s) is None
    simulation.run(20)
    assert simulation.transitions[-1].reason == "operator" and simulation.policy.mode is Mode.PLAIN
    assert sum(drafted for end_s, _, _, drafted in simulation.rounds if end_s > 5.1) == 0
    assert simulation.overhead(5.1, 20) <= 1.01, seed
    simulation.policy.allow(simulation.now_s)
    simulation.run(30)
    assert simulation.first(Mode.SPECULATE, 20) < 2, (seed, simulation.transitions)
    assert simulation.transitions[-1].reason == "operator"


def test_switched_off_stays_off() -> None:
    simulation = played(World(), 5, 0, PolicySection(max_nodes=0))
    simulation.policy.allow(simulation.now_s)
    simulation.policy.drafter_ready(simulation.now_s)
    simulation.run(30)
    assert simulation.policy.mode is Mode.PLAIN and not simulation.transitions
    assert not any(drafted for _, _, _, drafted in simulation.rounds)


def test_plain_step_is_measured_now_and_then() -> None:
    simulation = played(World(), 20, seed=0)
    plain = sum(drafted == 0 for _, _, _, drafted in simulation.rounds)
    assert 0 < plain < 0.03 * len(simulation.rounds)


def test_the_router_feeds_rounds_of_many_answers_with_its_own_plain_time() -> None:
    rng = np.random.default_rng(7)
    policy, _ = policy_of({1: 0.010, 5: 0.013})
    modes = []
    for tick in range(12_000):
        now_s = tick * 0.005
        chance = 0.8 if now_s < 10 or now_s > 30 else 0.0
        if policy.mode is Mode.SPECULATE or policy.probing:
            accepted = int(np.argmin(np.append(rng.random(4) < chance, False)))
            policy.observe(now_s, Round(4, accepted, 0.013, 0.002, plain_s=0.010))
        else:
            policy.observe(now_s, Round(0, 0, 0.010, 0.0, plain_s=0.010))
        modes.append(policy.mode)
    assert modes[1900] is Mode.SPECULATE and modes[2400] is Mode.SHADOW and modes[5000] is Mode.PLAIN
    assert modes[-1] is Mode.SPECULATE
    assert sum(a is not b for a, b in pairwise(modes)) == 3


def test_step_costs_interpolate_never_fall_and_follow_what_is_measured() -> None:
    costs = StepCosts({1: 0.010, 8: 0.009, 16: 0.020})
    assert costs.cost(1) == costs.cost(8) == 0.010
    assert costs.cost(12) == pytest.approx(0.015) and costs.cost(24) == pytest.approx(0.030)
    for _ in range(200):
        costs.observe(8, 0.040)
    assert costs.cost(8) == pytest.approx(0.040, rel=0.05)
    assert costs.cost(1) < 0.030 and costs.cost(16) >= costs.cost(8)
    costs.observe(8, float("nan"))
    costs.observe(8, -1.0)
    assert costs.cost(8) == pytest.approx(0.040, rel=0.05)


def test_acceptance_is_censored_at_what_was_offered() -> None:
    acceptance = Acceptance()
    deep = [acceptance.tokens(8)]
    for _ in range(50):
        acceptance.observe(drafted=2, accepted=2)
        deep.append(acceptance.tokens(8))
    assert deep == sorted(deep)
    for _ in range(50):
        acceptance.observe(drafted=4, accepted=2)
    assert acceptance.tokens(2) > 1.8 and acceptance.tokens(8) == pytest.approx(acceptance.tokens(3), abs=0.1)
    before = acceptance.tokens(8)
    acceptance.observe(drafted=0, accepted=0)
    assert acceptance.tokens(8) == before


def short_answers(world: World, count: int, beliefs: Beliefs, seed: int, told: bool = True) -> list[float]:
    """What ``count`` answers of 0.6 s each took, one after another, by what plain decoding would have. Who is not
    ``told`` knows of draft latency alone."""
    overheads = []
    for number in range(count):
        if not told:
            beliefs, latency = Beliefs(StepCosts(PROFILE)), beliefs.latency
            beliefs.latency = latency
        simulation = Simulation(world, CONFIG, seed * 1000 + number, beliefs=beliefs)
        simulation.run(0.6)
        overheads.append(simulation.overhead(0, 0.6))
    return overheads


@pytest.mark.parametrize("seed", SEEDS)
def test_a_new_answer_knows_what_others_have_seen(seed: int) -> None:
    poor = World(acceptance=always(0.05), exchange_s=always(0.004))
    beliefs = Beliefs(StepCosts(PROFILE))
    told = short_answers(poor, 30, beliefs, seed)
    untold = short_answers(poor, 30, Beliefs(StepCosts(PROFILE)), seed, told=False)
    assert np.mean(untold) > 1.02, (seed, untold)
    assert np.mean(told) < 1 + 0.3 * (np.mean(untold) - 1), (seed, told)
    better = short_answers(World(), 64, beliefs, seed)
    assert np.mean(better[-16:]) < 0.5, (seed, better)


def test_exchange_times_cover_all_but_a_few() -> None:
    times = DraftLatency()
    assert times.usual_s(0.25) == 0.25
    rng = np.random.default_rng(0)
    samples = 0.01 + 0.002 * rng.standard_normal(500)
    for sample in samples:
        times.observe(float(sample))
    assert times.mean_s == pytest.approx(0.01, rel=0.2)
    assert np.mean(samples < times.usual_s(0.25)) > 0.97


def test_what_others_wait_for_our_rows_counts() -> None:
    policy, beliefs = policy_of({1: 0.010, 64: 0.073})
    costs = beliefs.costs
    for now_s in np.arange(0.0, 0.3, 0.03):
        decided(policy, others=15)
        policy.observe(now_s, Round(4, 1, costs.cost(20), 0.0, 20))
    alone = 2 * costs.cost(16) / costs.cost(20)
    assert alone > 1.5 and policy.gain == pytest.approx(2 * 0.025 / (0.025 + 16 * 0.004))


def test_silence_is_noticed_even_when_the_waits_are_cheap() -> None:
    policy, _ = policy_of(PROFILE)
    seen = [policy.observe(now_s, Round(0, 0, 0.01, 1e-4, 1, late=True)) for now_s in np.arange(0.0, 1.0, 0.01)]
    (transition,) = [t for t in seen if t is not None]
    assert (transition.after, transition.reason) == (Mode.SHADOW, "draft_timeout")


def test_reading_the_prompt_says_nothing_about_exchanges() -> None:
    """A drafter's first answer comes late, as it reads the whole prompt before: others must not be given up for it."""
    first, beliefs = policy_of({1: 0.015, 64: 0.060})
    costs, latency = beliefs.costs, beliefs.latency
    first.observe(0.1, Round(4, 0, costs.cost(5), 0.2, 5, exchange_s=0.2, first_exchange=True))
    assert latency.mean_s is None
    assert decided(SpeculationPolicy(CONFIG, beliefs)).wait_s > 0.0
    first.observe(0.2, Round(4, 2, costs.cost(5), 0.005, 5, exchange_s=0.005))
    assert latency.mean_s == 0.005


def test_a_drafter_that_still_reads_is_asked_and_not_waited_for_unless_it_soon_has() -> None:
    policy, _ = policy_of({1: 0.015, 64: 0.0150001}, exchange_s=0.010)
    waits = {unread_s: policy.decide(RoundInputs(followed=True, unread_s=unread_s))
             for unread_s in (0.0, 0.002, 0.050, float("inf"))}
    assert all(decision.num_wanted for decision in waits.values())
    assert [decision.wait_s > 0 for decision in waits.values()] == [True, True, False, False]
    assert waits[0.002].wait_s == pytest.approx(waits[0.0].wait_s + 0.002), "its answer comes behind its reading"


def test_who_cannot_wait_yet_stands_still_with_those_who_do() -> None:
    """In an engine that steps all together one that drafts held fifteen whose drafter still read."""
    beliefs = Beliefs(StepCosts({1: 0.010, 256: 0.010}), lockstep=True)
    beliefs.latency.observe(0.008)
    for reading, waiting in ((0, 16), (15, 0)):
        asking = [(SpeculationPolicy(CONFIG, beliefs), RoundInputs(15, True, unread_s=1.0 if number < reading else 0.0))
                  for number in range(16)]
        decisions = SpeculationPolicy.decide_step(asking)
        assert sum(decision.wait_s > 0 for decision in decisions) == waiting
        assert all(decision.num_wanted for decision in decisions[:reading]), "it reads all the same"


def test_a_tree_that_is_not_worth_a_wait_is_not_waited_for() -> None:
    policy, beliefs = policy_of({1: 0.008, 64: 0.030})
    assert decided(policy).wait_s > 0.0, "nobody knows yet what an exchange takes"
    beliefs.latency.observe(0.004)
    assert decided(policy).wait_s > 0.0
    beliefs.latency.forget()
    beliefs.latency.observe(0.200)
    slow = decided(policy)
    assert slow.wait_s == 0.0 and slow.why == "too slow" and slow.num_wanted, "on a device of its own it costs nobody"
    plain = Round(0, 0, beliefs.costs.cost(1), 0.0, 1)
    tries = sum(decided(policy).wait_s > 0.0 or policy.observe(now_s, plain) is not None
                for now_s in np.arange(0.0, 30.0, 0.008))
    assert tries > 0, "it is tried again once that is cheap"
    policy.forbid(31.0)
    forbidden = decided(policy)
    assert not forbidden.num_wanted and not forbidden.follow and forbidden.why == "forbidden"


def test_what_is_waited_for_in_vain_may_still_come() -> None:
    policy, beliefs = policy_of({1: 0.008, 64: 0.030}, exchange_s=0.004, shared=True)
    assert decided(policy).num_wanted
    policy.observe(30.0, Round(0, 0, beliefs.costs.cost(1), 0.02, 1, late=True))
    still = decided(policy)
    assert still.num_wanted and still.wait_s == 0.0


def test_no_tree_is_asked_for_in_the_round_that_measures_a_plain_step() -> None:
    policy, beliefs = policy_of({1: 0.008, 64: 0.0080001}, exchange_s=0.001)
    for _ in range(PLAIN_EVERY):
        assert decided(policy).num_wanted
        policy.observe(0.0, Round(4, 3, beliefs.costs.cost(5), 0.001, 5))
    plain = decided(policy)
    assert not plain.num_wanted and plain.wait_s == 0.0 and plain.why == "measures plain" and plain.budget_s > 0.0
    policy.observe(0.0, Round(0, 0, beliefs.costs.cost(1), 0.0, 1))
    again = decided(policy)
    assert again.num_wanted and again.wait_s > 0.0


def test_a_drafter_that_must_read_the_prompt_first_has_to_pay_more() -> None:
    policy, beliefs = policy_of({1: 0.008, 64: 0.0080001}, shared=True)
    tokens = 1 + Acceptance().tokens(decided(policy).verify)
    beliefs.latency.observe(tokens * 0.008 / 1.02 - 0.008)  # a gain of 1.02
    assert decided(policy).num_wanted and not decided(policy, followed=False).follow


def test_draft_latency_is_not_moved_by_one_that_was_odd() -> None:
    times = DraftLatency()
    for seconds in (0.100, 0.005, 0.030):
        times.observe(seconds)
    assert times.mean_s == 0.005, "the first ones are cold"
    for _ in range(KEPT_EXCHANGES):
        times.observe(0.005)
    times.observe(0.500)
    assert times.mean_s == 0.005
    for _ in range(KEPT_EXCHANGES // 2):
        times.observe(0.020)
    assert times.mean_s == 0.020, "half of those that are kept are another time: it is the time now"


def test_on_shared_cores_all_pay_for_the_tree_of_one() -> None:
    policy, beliefs = policy_of({1: 0.008, 64: 0.0080001}, exchange_s=0.004, shared=True)
    alone = decided(policy)
    assert alone.num_wanted and alone.verify > 0
    beliefs.latency.load = 16
    assert beliefs.latency.cost_to_others_s(1.0, 0.010) == pytest.approx(0.060)
    assert DraftLatency().cost_to_others_s(1.0, 0.010) == 0.0
    crowd = decided(policy, others=15)
    assert not crowd.num_wanted and crowd.verify == 0, "one answer's tree would keep fifteen others waiting"


def test_a_draft_has_to_beat_what_the_text_foretells() -> None:
    """Against plain steps the same tree pays; the seconds that it takes would make more tokens without a drafter."""
    policy, beliefs = policy_of({1: 0.008, 64: 0.0400}, exchange_s=0.008, shared=True)
    tokens = 1 + Acceptance().tokens(decided(policy).verify)
    assert decided(policy).num_wanted and tokens > 2
    text = Round(4, 3, beliefs.costs.cost(5), 0.0, 5, lookup=True)
    while beliefs.time_value < 1.5:
        policy.observe(0.0, text)
    spent = decided(policy)
    assert not spent.num_wanted and spent.why in ("too slow", "drafts do not pay")


def test_others_pay_for_each_row_of_a_tree_that_is_waited_for() -> None:
    alone, few = (policy_of({1: 0.010, 64: 0.060}, exchange_s=0.014)[0] for _ in range(2))
    assert decided(alone).wait_s > 0.0 and decided(few, others=3).wait_s == 0.0


@pytest.mark.parametrize("sessions", [1, 4, 16, 32, 64, 128])
def test_all_who_draft_in_one_step_see_what_it_costs_them_together(sessions: int) -> None:
    """Rows are nearly free until there are many, and each session thinks of a few more."""
    def step_s(rows: int) -> float:
        return 0.020 * (1 + (rows / 200) ** 3) ** (1 / 3)

    costs = {rows: step_s(rows) for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)}
    policy, _ = policy_of(costs, exchange_s=0.001)
    tokens, most = Acceptance(), CONFIG.max_nodes
    rates = [(1 + tokens.tokens(nodes)) / step_s(sessions * (1 + nodes)) for nodes in range(most + 1)]
    verify = decided(policy, others=sessions - 1).verify
    assert verify > 0 and rates[verify] > 0.95 * max(rates), (verify, [round(rate, 1) for rate in rates])


def test_the_first_texts_do_not_judge_for_all_others() -> None:
    """The first one is hard, and drafts stop. The next few find out for themselves; later ones are told. Who never had
    a draft is none of them."""
    policy, beliefs = policy_of({1: 0.005, 64: 0.0250}, exchange_s=0.004, shared=True)
    for _ in range(FIRST_TEXTS):
        SpeculationPolicy(CONFIG, beliefs).observe(0.0, Round(0, 0, beliefs.costs.cost(1), 0.0, 1))
    missed = Round(4, 0, beliefs.costs.cost(5), 0.004, 5)
    for text in range(FIRST_TEXTS):
        policy = SpeculationPolicy(CONFIG, beliefs)
        assert decided(policy).why == "drafts pay", text
        for _ in range(40):
            policy.observe(0.0, missed)
        assert decided(policy).why != "drafts pay", "it does not go on for ever"
        policy.close()
    assert decided(SpeculationPolicy(CONFIG, beliefs)).why != "drafts pay"
    assert decided(SpeculationPolicy(CONFIG, beliefs, sampled=True)).why == "drafts pay", "nobody has seen that kind"


def test_answers_share_their_tries_on_shared_cores() -> None:
    """One answer is over before it could afford a try: what they all save is spent by whoever comes next."""
    policy, beliefs = policy_of({1: 0.008, 64: 0.0080001}, exchange_s=0.100, shared=True)
    costs = beliefs.costs
    plain, waited = Round(0, 0, costs.cost(1), 0.0, 1), Round(4, 3, costs.cost(5), 0.004, 5)
    rounds = 0
    while not decided(policy := SpeculationPolicy(CONFIG, beliefs)).num_wanted:
        for _ in range(50):
            policy.observe(0.0, plain)
            rounds += 1
    assert 1000 < rounds < 20_000
    for _ in range(TRIALS_IN_A_ROW):
        assert decided(policy).num_wanted, "one exchange alone would not be believed"
        policy.observe(0.0, waited)
    assert beliefs.latency.mean_s == 0.004 and decided(policy).num_wanted, "three quick ones are"


def test_tried_waits_come_in_rows_that_are_saved_for() -> None:
    budget, added = ExplorationBudget(TRIALS_IN_A_ROW), 0
    while not budget.affords_wait(0.004):
        budget.earn(0.010)
        added += 1
    assert added == pytest.approx(TRIALS_IN_A_ROW * 0.004 / (SHARE * 0.010), abs=1), "the first waits for its row"
    for _ in range(TRIALS_IN_A_ROW):
        assert budget.affords_wait(0.004)
        budget.pay_wait(0.004)
    assert not budget.affords_wait(0.004)
    budget.earn(100.0)
    for _ in range(TRIALS_IN_A_ROW):
        budget.pay_wait(0.004)
    assert not budget.affords_wait(0.0001), "what was saved for long is not spent on one row behind another"


def test_what_is_affordable_for_one_is_not_for_sixteen() -> None:
    budget = ExplorationBudget(TRIALS_IN_A_ROW)
    budget.earn(TRIALS_IN_A_ROW * 0.004 / SHARE)
    assert budget.affords_wait(0.004)
    budget.pay_wait(0.004)
    assert not budget.affords_wait(16 * 0.004), "the rest of a row costs what it costs now"
    assert budget.affords_wait(0.0039)


def test_a_purse_holds_what_was_saved_of_late_and_no_more() -> None:
    budget = ExplorationBudget()
    for _ in range(100_000):
        budget.earn(0.010)
    assert budget.left_s == pytest.approx(0.6, abs=0.01)
    budget.earn(0.010, sessions=4)
    assert budget.left_s > 0.6, "of each session"


def test_a_first_exchange_is_not_the_end_of_a_try() -> None:
    """It teaches nothing: the one behind it does."""
    policy, beliefs = policy_of({1: 0.008, 64: 0.0080001}, exchange_s=0.100, shared=True)
    costs = beliefs.costs
    while not decided(policy, followed=False).follow:
        policy.observe(0.0, Round(0, 0, costs.cost(1), 0.0, 1))
    left_s = beliefs.budget.left_s
    policy.observe(0.0, Round(4, 0, costs.cost(5), 0.004, 5, first_exchange=True))
    going_on = decided(policy)
    assert going_on.num_wanted and going_on.wait_s > 0.0 and going_on.budget_s == 0.0
    assert beliefs.budget.left_s >= left_s, "the rest of its row is there for others"


def test_a_decision_that_is_asked_for_again_is_paid_once() -> None:
    policy, beliefs = policy_of({1: 0.008, 64: 0.0080001}, exchange_s=0.100, shared=True)
    beliefs.budget.earn(100.0)
    left_s, row = beliefs.budget.left_s, beliefs.budget.trials_left
    first, second = decided(policy), decided(policy)
    assert first == second and first.why == "tries a wait"
    assert beliefs.budget.left_s == pytest.approx(left_s - first.budget_s) and beliefs.budget.trials_left == row - 1


def test_draft_latency_is_known_by_load_on_shared_cores() -> None:
    times = DraftLatency(shared=True)
    assert times.mean_s is None and times.usual_s(9.0) == 9.0
    times.observe(0.005)
    times.load = 16
    assert times.mean_s == 0.005, "of a load that nobody has seen, what a smaller one took is believed"
    times.observe(0.040)
    assert times.mean_s == 0.040 and times.usual_s(9.0) > 0.040
    times.load = 1
    assert times.mean_s == 0.005
    times.forget()
    assert times.mean_s is None


def test_a_few_sessions_are_drafted_for_ahead_and_of_a_crowd_none() -> None:
    beliefs = Beliefs(StepCosts(PROFILE))
    beliefs.latency.observe(0.002)
    sessions = [SpeculationPolicy(CONFIG, beliefs) for _ in range(MAX_RUN_AHEAD + 1)]
    ahead = RoundInputs(followed=True, grows_ahead=True)
    led = [session.decide(ahead).ahead for session in sessions]
    assert led == [True] * MAX_RUN_AHEAD + [False]
    assert not any(session.decide(ahead).ahead for session in sessions), "they are a crowd"
    sessions.pop().drafter_lost(1.0)
    assert all(session.decide(ahead).ahead for session in sessions), "few again"
    sessions[0].forbid(2.0)
    sessions.append(SpeculationPolicy(CONFIG, beliefs))
    assert sessions[-1].decide(ahead).ahead, "a free place is taken"
    sessions[1].close()
    sessions[1].close()
    sessions.append(SpeculationPolicy(CONFIG, beliefs))
    assert sessions[-1].decide(ahead).ahead, "who goes leaves a place, and one only"
    assert not SpeculationPolicy(CONFIG, beliefs).decide(ahead).ahead
    shared = SpeculationPolicy(CONFIG, Beliefs(StepCosts(PROFILE), shared_cores=True))
    assert not shared.decide(ahead).ahead, "what is grown ahead would take the target's own time"


def test_an_answer_that_ends_in_its_probe_leaves_what_it_has_not_lost() -> None:
    policy, beliefs = policy_of(PROFILE)
    beliefs.budget.left_s = 0.6
    policy.forbid(0.0)
    policy.allow(0.1)
    assert policy.probing and beliefs.budget.left_s < 0.6
    policy.close()
    assert beliefs.budget.left_s == pytest.approx(0.6)


def test_a_probe_that_wins_back_the_wait_for_its_drafter_costs_nothing() -> None:
    policy, beliefs = policy_of(PROFILE)
    beliefs.budget.left_s = 0.6
    policy.forbid(0.0)
    policy.allow(now_s := 0.1)
    for exchange_s in (0.1, *[0.004] * 7):
        nodes = decided(policy).verify
        now_s += 0.021 + exchange_s
        policy.observe(now_s, Round(nodes, 3, 0.021, exchange_s, 1 + nodes, exchange_s=exchange_s,
                                    first_exchange=exchange_s == 0.1))
    assert policy.mode is Mode.SPECULATE
    assert beliefs.budget.left_s >= 0.6, "what the probe may lose is put back whole"


def answered_by(beliefs: Beliefs, now_s: float, exchange_s: float, rounds: int = 150) -> tuple[float, int]:
    """One answer alone on shared cores, whose exchanges take so long. Returns when it ends, and its drafted rounds."""
    policy, followed, drafted = SpeculationPolicy(CONFIG, beliefs, now_s), False, 0
    for _ in range(rounds):
        decision = policy.decide(RoundInputs(0, followed))
        first, followed = not followed, decision.follow
        wait_s = min(decision.wait_s, exchange_s)
        late = exchange_s > wait_s
        nodes = decision.verify if wait_s and not late else 0
        now_s += 0.050 + wait_s
        drafted += nodes > 0
        policy.observe(now_s, Round(nodes, min(3, nodes), 0.050, wait_s, 1 + nodes, late,
                                    exchange_s=exchange_s if nodes else None, first_exchange=first))
    policy.close()
    return now_s, drafted


def test_a_slow_hour_is_not_the_end_of_drafting_on_shared_cores() -> None:
    """A neighbour makes every exchange too long for its deadline. When he is gone, somebody has to find out."""
    beliefs, now_s = Beliefs(StepCosts({1: 0.050, 8: 0.051, 64: 0.100}), shared_cores=True), 0.0
    beliefs.latency.load = 1
    for exchange_s, answers in ((0.030, 4), (0.400, 30)):
        for _ in range(answers):
            now_s, drafted = answered_by(beliefs, now_s, exchange_s)
    assert drafted == 0 and beliefs.latency.mean_s == 0.25
    for _ in range(40):
        now_s, drafted = answered_by(beliefs, now_s, 0.030)
    assert drafted > 100


def test_four_that_begin_at_once_on_shared_cores_find_out_whether_drafts_pay() -> None:
    """Nobody knows what an exchange takes, and the guess forbids it: one of them has to be tried all the same."""
    beliefs = Beliefs(StepCosts({1: 0.010, 64: 0.012}), shared_cores=True)
    beliefs.latency.load = 4
    four, spent_s, tried = [SpeculationPolicy(CONFIG, beliefs) for _ in range(4)], 0.0, 0
    for _ in range(4000):
        waits = [decided(policy, others=3).wait_s > 0 for policy in four]
        if all(waits):
            break
        exchange_s = 0.002 if any(waits) else 0.0
        spent_s, tried = spent_s + exchange_s, tried + any(waits)
        for policy, waited in zip(four, waits, strict=True):
            drafted = 7 if waited else 0
            policy.observe(0.0, Round(drafted, min(drafted, 3), 0.010, exchange_s if waited else 0.0,
                                      4 + drafted, exchange_s=exchange_s if waited else None))
    assert all(waits), "exchanges are short, and three of four draft tokens are right"
    assert 0 < tried < 40 and spent_s < 0.1


def test_what_exchanges_take_is_still_known_when_a_draft_comes_back_on_shared_cores() -> None:
    policy, beliefs = policy_of({1: 0.010, 64: 0.012}, exchange_s=0.002, shared=True)
    policy.drafter_lost(1.0)
    policy.drafter_ready(2.0)
    assert beliefs.latency.mean_s == 0.002
