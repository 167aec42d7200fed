"""How many sessions are drafted for ahead, against worlds in which it pays, costs, makes no difference, or changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from slipstream.decision.leads import CROWD, FEW, Change, Leads

SEEDS = range(4)
SETTLED = 0.05
Gain = Callable[[float], float]  # share of the sessions that lead -> goodput by that of serial rounds


def gains(none: float, few: float, all_: float) -> Gain:
    """Of none, some and all of the sessions leading."""
    return lambda share: none if share == 0 else all_ if share == 1 else few


@dataclass
class Play:
    """Sessions in one target: each round makes a few tokens, as chance and the world will have it."""

    gain: Gain
    sessions: int
    seed: int
    leads: Leads = field(default_factory=Leads)
    changes: list[Change] = field(default_factory=list)
    blips: float = 0.0  # share of rounds that take thirty times as long

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def run(self, rounds: int) -> float:
        """Play so many rounds of each session. Returns goodput by that of serial rounds."""
        seconds = 0.0
        for _ in range(rounds):
            leading = sum(self.leads.grant(session) for session in range(self.sessions))
            usual_s = 0.03 / self.gain(leading / self.sessions)
            seconds += usual_s * self.sessions
            for _ in range(self.sessions):
                took_s = usual_s * (1 + 0.1 * self.rng.standard_normal())
                took_s *= 30 if self.rng.random() < self.blips else 1
                tokens = 1 + min(4, int(self.rng.geometric(0.3)) - 1)
                change = self.leads.observe(tokens, took_s)
                if change is not None:
                    self.changes.append(change)
        return 0.03 * rounds * self.sessions / seconds


WORLDS = [gains(1.0, 1.15, 1.15), gains(1.0, 0.97, 0.85), gains(1.0, 1.05, 0.9), gains(1.0, 1.02, 1.25),
          gains(1.0, 0.9, 0.7), gains(1.0, 1.0, 1.0)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("sessions", [1, 8, 32])
@pytest.mark.parametrize("world", range(len(WORLDS)))
def test_once_settled_it_is_never_much_below_the_best(world: int, sessions: int, seed: int) -> None:
    gain = WORLDS[world]
    play = Play(gain, sessions, seed)
    play.run(16_000 // sessions + 200)
    shares = {min(1.0, FEW / sessions), 0.0, 1.0}
    assert play.run(16_000 // sessions) > (1 - SETTLED) * max(map(gain, shares)), (seed, play.changes)
    assert len(play.changes) <= 6, (seed, play.changes)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("sessions", [1, 8, 32])
@pytest.mark.parametrize("world", range(len(WORLDS)))
def test_finding_out_costs_little(world: int, sessions: int, seed: int) -> None:
    """Even from the first round on, against serial rounds."""
    play = Play(WORLDS[world], sessions, seed)
    assert play.run(2000 // sessions + 100) > 0.95 * min(1.0, WORLDS[world](min(1.0, FEW / sessions))), play.changes


def test_a_crowd_begins_with_none_and_a_few_sessions_with_all() -> None:
    few, crowd = Play(gains(1, 1, 1), FEW, 0), Play(gains(1, 1, 1), CROWD + 8, 0)
    few.run(3)
    crowd.run(3)
    assert (few.leads.most, crowd.leads.most) == (FEW, 0)


@pytest.mark.parametrize("seed", SEEDS)
def test_it_sees_that_the_world_has_changed(seed: int) -> None:
    play = Play(gains(1.0, 1.2, 1.2), 2, seed)
    play.run(3000)
    assert play.leads.most == FEW, seed
    play.gain = gains(1.0, 0.7, 0.7)
    play.run(1500)
    assert play.run(1500) > 0.95, (seed, play.changes)
    play.gain = gains(0.7, 1.0, 1.0)
    play.run(3000)
    assert play.run(1500) > 0.95, (seed, play.changes)


@pytest.mark.parametrize("seed", SEEDS)
def test_rounds_that_hang_do_not_decide(seed: int) -> None:
    play = Play(gains(1.0, 1.15, 1.15), 2, seed, blips=0.002)
    play.run(6000)
    assert play.leads.most == FEW and len(play.changes) <= 4, (seed, play.changes)


def test_each_load_is_learned_for_itself() -> None:
    play = Play(gains(1.0, 0.7, 0.7), 2, 0)
    play.run(4000)
    assert play.changes[-1].after == 0
    play.sessions = 12
    play.run(4)
    assert play.leads.most == FEW, "twelve are no two"
    for session in range(2, 12):
        play.leads.end(session)
    play.sessions = 2
    assert play.run(300) > 0.9, "what was learned is still known"


def test_who_leads_goes_on_leading_and_a_place_that_comes_free_is_taken() -> None:
    leads = Leads()
    granted = [leads.grant(session) for session in range(6)]
    assert granted == [True] * FEW + [False] * (6 - FEW)
    assert [leads.grant(session) for session in range(6)] == granted
    leads.end(1)
    assert leads.grant(5) and not leads.grant(4)
