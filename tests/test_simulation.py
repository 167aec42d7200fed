"""Deployments in simulated time: what the design promises of schedules, without the noise of a machine."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from slipstream.base.errors import ConfigError
from slipstream.observe.trace import Trace, commit_key, growth_key
from slipstream.protocol.messages import DraftBound, Growth
from slipstream.protocol.requests import Piece
from slipstream.simulate.simulation import (
    Accelerator,
    Deployment,
    Draft,
    SimulatedLink,
    Target,
    World,
    simulate,
    with_schedule,
)
from slipstream.simulate.timed import Timing
from target_service.step import should_hold

SOME = Deployment()


@cache
def rate(schedule: str, deployment: Deployment = SOME, seconds: float = 2.5) -> float:
    return simulate(with_schedule(schedule, deployment), seconds, 1.0).tokens_per_s


def play(deployment: Deployment) -> list[tuple[float, Piece]]:
    """The pieces of an answer, and when they came."""
    world = World()
    target, draft = Target(world, Accelerator(), deployment, 0), Draft(world, Accelerator(), deployment)
    SimulatedLink("one", target, draft, deployment.rtt_s / 2 + deployment.hop_s).connect()
    target.actor.wake(0.0)
    for second in itertools.count(1):
        world.run(second)
        for place, (_, piece) in enumerate(target.pieces):
            if piece.finish:
                return target.pieces[:place + 1]
    raise AssertionError


@cache
def with_drafts(*slowness: float, seconds: float = 8.0) -> float:
    """Tokens a second of four streams with drafts that take so many times what one should, once all have settled."""
    deployment, world = Deployment(Timing(step_s=0.02, draft_s=0.003, acceptance=(0.75, 0.12, 0.05)), batch=4), World()
    target = Target(world, Accelerator(), deployment, 0)
    for number, times in enumerate(slowness):
        slow = replace(deployment, timing=replace(deployment.timing, draft_s=times * deployment.timing.draft_s))
        delay_s = deployment.rtt_s / 2 + deployment.hop_s
        SimulatedLink(str(number), target, Draft(world, Accelerator(), slow), delay_s).connect()
    target.actor.wake(0.0)
    world.run(14.0 + seconds)
    return sum(len(piece.tokens) for at_s, piece in target.pieces if at_s >= 14.0) / seconds


@pytest.mark.parametrize("times", [3, pytest.param(40, marks=pytest.mark.long), 200])
def test_answers_go_on_with_another_draft_where_one_is_slow(times: float) -> None:
    assert with_drafts(times, 1) > 0.9 * with_drafts(1)


class Wearing(Accelerator):
    """It takes so many times what it should."""

    times = 1.0

    def busy(self, began_s: float, seconds: float) -> None:
        super().busy(began_s, self.times * seconds)


def test_answers_that_have_begun_leave_a_draft_that_becomes_slow() -> None:
    """They stopped drafting before it was known how slow it was, and stayed with it."""
    deployment, world = Deployment(Timing(step_s=0.02, draft_s=0.003, acceptance=(0.75, 0.12, 0.05)), batch=4), World()
    target, devices = Target(world, Accelerator(), deployment, 0), (Wearing(), Wearing())
    for number, device in enumerate(devices):
        SimulatedLink(str(number), target, Draft(world, device, deployment), deployment.rtt_s / 2).connect()
    target.actor.wake(0.0)
    world.run(2.0)
    devices[0].times = 50
    world.run(9.0)
    assert sum(len(piece.tokens) for at_s, piece in target.pieces if at_s >= 4.0) / 5.0 > 0.9 * with_drafts(1)


def test_a_run_depends_on_its_seed_alone() -> None:
    ahead = with_schedule("run-ahead", SOME)
    once, again, other = (simulate(replace(ahead, timing=Timing(seed=seed)), 1.0, 0.5) for seed in (0, 0, 1))
    assert once == again != other


def test_who_waits_for_a_simulation_is_told_how_far_it_is() -> None:
    """Thousands of streams take minutes, and nothing was shown of them."""
    told = list[float]()
    found = simulate(with_schedule("serial", SOME), 1.0, 0.5, told.append)
    assert found == simulate(with_schedule("serial", SOME), 1.0, 0.5)
    assert len(told) > 100 and told == sorted(told) and told[-1] == 1.0


def test_whole_answers_of_a_large_batch_have_their_place() -> None:
    """Who is put back computes anew: 64 streams gave a sixth less than their steps do."""
    deployment = Deployment(batch=100)
    target = Target(World(), Accelerator(), deployment, 0)
    assert target.worker.num_free_slots >= deployment.batch * (2 + deployment.workload.answer)


def test_plain_decoding_takes_a_step_a_token() -> None:
    found = simulate(with_schedule("plain", replace(SOME, host_s=0.0)), 5.0)
    assert found.tokens_per_s == pytest.approx(50.0, rel=0.01) and found.waiting_share < 0.01
    assert found.acceptance_length == 1.0


def test_a_serial_round_is_a_step_a_tree_and_a_round_trip() -> None:
    found = simulate(with_schedule("serial", replace(SOME, rtt_s=0.002, host_s=0.0)), 10.0)
    round_s = found.acceptance_length / found.tokens_per_s
    assert round_s == pytest.approx(0.020 + 0.005 + 0.002 + 2 * SOME.hop_s, rel=0.02)


def test_running_ahead_beats_one_growth_a_commit() -> None:
    for batch in (1, 4):
        deployment = replace(SOME, batch=batch, rtt_s=0.005)
        assert rate("run-ahead", deployment) > 1.03 * rate("serial", deployment), batch


def test_running_ahead_hardly_feels_a_round_trip() -> None:
    near, far = (simulate(with_schedule("run-ahead", replace(SOME, rtt_s=rtt_s)), 4.0) for rtt_s in (0.0, 0.001))
    assert far.tokens_per_s > 0.95 * near.tokens_per_s


def test_running_ahead_beats_a_drafter_on_the_targets_own_device() -> None:
    """Where drafting takes a fifth of its round, and the bonus token is mostly among a node's first four children."""
    good = replace(SOME, timing=Timing(acceptance=(0.8, 0.08, 0.05, 0.02), width=4))
    assert rate("run-ahead", good) > 1.1 * rate("colocated", good)


@pytest.mark.parametrize("draft_s", [0.005, 0.010])
def test_growth_far_ahead_beats_one_device_with_a_usual_drafter(draft_s: float) -> None:
    """Where what may be held is wide enough for most outcomes of a round."""
    dear = replace(SOME, timing=Timing(draft_s=draft_s))
    found = simulate(with_schedule("outcomes", dear), 4.0)
    assert found.tokens_per_s > 1.12 * rate("colocated", dear)
    assert found.tokens_per_s > 1.03 * rate("run-ahead", dear)
    assert found.hit_length > 3.0


def test_streams_that_wait_share_a_step() -> None:
    """Two groups that take turns would read the weights twice: eight streams make more than five times one's tokens."""
    assert rate("serial", replace(SOME, batch=8)) > 6 * rate("serial")


@pytest.mark.parametrize("schedule", ["serial", "colocated"])
def test_trees_of_a_crowd_are_no_larger_than_its_device_takes(schedule: str) -> None:
    crowd = Deployment(Timing(knee_rows=50), batch=16)
    assert rate(schedule, crowd, 2.0) > 1.3 * rate("plain", crowd, 2.0)


def test_a_draft_serves_two_targets_and_a_target_two_drafts() -> None:
    one = rate("run-ahead", SOME, 1.0)
    assert rate("run-ahead", replace(SOME, targets=2), 1.0) > 1.6 * one
    assert rate("run-ahead", replace(SOME, drafts=2, batch=4), 1.0) > 3 * one


@pytest.mark.parametrize(("rtt_s", "seconds"), [(0.02, 5.0), (0.1, 20.0)])
def test_a_drafter_far_away_costs_little_against_plain(rtt_s: float, seconds: float) -> None:
    """An exchange longer than a step: the policy may not lose what speculation does not bring."""
    for schedule in ("serial", "run-ahead"):
        assert rate(schedule, replace(SOME, rtt_s=rtt_s), seconds) > 0.95 * rate("plain"), schedule


@pytest.mark.parametrize(("schedule", "seed"), [("serial", 0), ("run-ahead", 1)])
def test_a_drafter_that_turns_bad_is_left_and_used_again_when_it_is_good(schedule: str, seed: int) -> None:
    """In mid-answer, and seen as a client sees it: by its pieces, each with the state in which it was made."""
    bad_from, bad_to = 400, 900  # positions; the prompt has two
    timing = Timing(seed=seed, wrong=(bad_from, bad_to))
    plain, drafted = (play(with_schedule(name, replace(SOME, timing=timing))) for name in ("plain", schedule))
    assert [token for _, piece in drafted for token in piece.tokens] == [
        token for _, piece in plain for token in piece.tokens]
    ends = list(itertools.accumulate(len(piece.tokens) for _, piece in drafted))
    changes = [(end, piece.state) for end, (_, piece), (_, before) in
               zip(ends[1:], drafted[1:], drafted, strict=False) if piece.state != before.state]
    left = next(end for end, state in changes if end >= bad_from and state != "speculate")
    back = max(end for end, state in changes if state == "speculate")
    assert left < bad_from + 60 and bad_to <= back < bad_to + 600, changes
    assert len(changes) <= 14, f"it flaps: {changes}"
    spent_s = [now_s for end, (now_s, _) in zip(ends, drafted, strict=True) if bad_from <= end < bad_to]
    assert spent_s[-1] - spent_s[0] < 1.1 * (bad_to - bad_from) / 50, "what was tried in vain cost too much"


class Deaf(SimulatedLink):
    """Its draft hears nothing, and says nothing."""

    def send(self, items: Sequence[DraftBound]) -> None:
        pass


@pytest.mark.parametrize("batch", [1, 4])
def test_a_draft_that_says_nothing_costs_nothing(batch: int) -> None:
    world, deployment = World(), Deployment(batch=batch)
    target = Target(world, Accelerator(), deployment, 0)
    Deaf("deaf", target, Draft(world, Accelerator(), deployment), 0.0).connect()
    target.actor.wake(0.0)
    world.run(2.0)
    step_s = deployment.timing.step_of(batch) + deployment.host_s
    assert step_s * len(target.pieces) / batch == pytest.approx(2.0, abs=2 * step_s)
    assert not any(piece.wait_s for _, piece in target.pieces)
    assert {piece.state for _, piece in target.pieces[-batch:]} == {"shadow"}


def test_chances_that_cannot_be_are_refused_with_what_they_must_be() -> None:
    for chances in ((0.9, 0.9), (0.0,), ()):
        with pytest.raises(ConfigError, match=r"^acceptance: must be chances above 0 that add up to 1 at most"):
            Timing(acceptance=chances)


def test_unknown_schedules_are_refused() -> None:
    with pytest.raises(ConfigError, match="schedule"):
        with_schedule("psychic", SOME)


def test_a_step_is_held_where_one_is_sooner_over_than_two() -> None:
    def flat(rows: int) -> float:
        return 0.02 if rows else 0.0

    assert should_hold(10, 10, 0.015, flat)
    assert not should_hold(10, 10, 0.025, flat), "the others come later than a step of their own would take"
    assert not should_hold(10, 10, 0.001, lambda rows: 0.001 * rows), "rows that cost what they cost gain nothing"


def test_traces_of_two_processes_fit_together(tmp_path: Path) -> None:
    target, draft = Trace(str(tmp_path / "target"), "target"), Trace(str(tmp_path / "draft"), "draft")
    target.span("device", "verify", 1.0, 1.02, rows=4)
    target.sent("commit", commit_key(1, 9), 1.02)
    draft.received("commit", commit_key(1, 9), 1.021)
    draft.sent("growth", growth_key(Growth.empty(1, 10)), 1.03)
    target.write()
    draft.write()
    events = [event for name in ("target", "draft")
              for event in json.loads((tmp_path / name).read_text())["traceEvents"]]
    (verify,) = [event for event in events if event["ph"] == "X"]
    assert verify["dur"] == pytest.approx(20_000) and verify["args"] == {"rows": 4}
    (left,), (came,) = ([e for e in events if e["ph"] == kind and e["name"] == "commit"] for kind in "sf")
    assert left["id"] == came["id"] and came["ts"] - left["ts"] == pytest.approx(1000, abs=500)
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"target", "draft"}


def test_services_with_one_file_keep_each_others_events(tmp_path: Path) -> None:
    """As those of a launch, which end one after the other."""
    file = tmp_path / "trace"
    file.write_text("of yesterday")
    target, draft = Trace(str(file), "target"), Trace(str(file), "draft")
    target.span("device", "one", 1.0, 2.0)
    draft.span("device", "two", 2.0, 3.0)
    target.write()
    draft.write()
    told = json.loads(file.read_text())["traceEvents"]
    assert {event["name"] for event in told if event["ph"] == "X"} == {"one", "two"}
    with pytest.raises(ConfigError, match=r"log\.trace: cannot write .*: No such file or directory"):
        Trace(str(tmp_path / "none" / "trace"), "target")


def test_a_trace_without_a_path_keeps_nothing(tmp_path: Path) -> None:
    trace = Trace("", "target")
    trace.span("device", "nothing", 0.0, 1.0)
    trace.write()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("batch", "draft_s"), [(1, 0.002), (8, 0.002), (8, 0.010)])
def test_running_ahead_is_never_much_worse_than_a_growth_a_commit(batch: int, draft_s: float) -> None:
    """Also where the drafter is always busy, and where an exchange is so short that a moment decides who shares a
    step."""
    deployment = replace(SOME, batch=batch, timing=Timing(draft_s=draft_s))
    assert rate("run-ahead", deployment, 3.0) > 0.95 * rate("serial", deployment, 3.0)
