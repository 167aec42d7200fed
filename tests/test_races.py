"""Keyed choices on the CPU kernels: what they tell is what ``choosing`` says, bit for bit, and they tell nearly all."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from slipstream.choosing.logits import TokenHistory
from slipstream.choosing.sampling import ChoiceRows, Race, Winners, choose, rank, ranked
from slipstream.engine.native.compiled_kernels import X86, kernels
from slipstream.engine.native.program import Team
from slipstream.engine.native.races import NativeRace
from slipstream.protocol.requests import Sampling
from slipstream.protocol.tree import DraftTree, walk
from tests.trees import lucky_tree, random_shape

Rows = NDArray[np.float32]
Dice = np.random.Generator


def peaked(dice: Dice, rows: int, vocab: int) -> Rows:
    """As a model's: Zipf's law in random order, as steep as it comes."""
    return np.float32(-dice.uniform(0.3, 4) * np.log1p(dice.permuted(np.tile(np.arange(vocab), (rows, 1)), axis=1))
                      + dice.normal(0, 0.1, (rows, vocab)) + dice.uniform(-30, 30))


def flat(dice: Dice, rows: int, vocab: int) -> Rows:
    return np.float32(dice.normal(0, dice.choice([0.0, 0.01, 1.0]), (rows, vocab)))


def equals(dice: Dice, rows: int, vocab: int) -> Rows:
    return np.float32(np.round(dice.normal(0, 3, (rows, vocab)), int(dice.integers(0, 2))))


def few(dice: Dice, rows: int, vocab: int) -> Rows:
    """Most are impossible, in some rows all but one."""
    found = np.float32(dice.normal(0, 3, (rows, vocab)))
    found[dice.random((rows, vocab)) < dice.choice([0.5, 0.99, 1.0])] = -np.inf
    found[:, int(dice.integers(0, vocab))] = 1.0
    return found


def odd(dice: Dice, rows: int, vocab: int) -> Rows:
    """Huge ones, and zeros of both signs."""
    found = np.float32(dice.normal(0, 3, (rows, vocab)) * dice.choice([0, 1e-30, 1e3, 1e6, 1e30], (rows, 1)))
    found[:, int(dice.integers(0, vocab))] *= -1
    return found


KINDS: tuple[Callable[[Dice, int, int], Rows], ...] = (peaked, flat, equals, few, odd)


def sampling_of(dice: Dice, vocab: int) -> Sampling:
    def maybe(value: float, off: float, chance: float = 0.4) -> float:
        return value if dice.random() < chance else off

    plain = dice.random() < 0.4
    tokens = dice.integers(0, vocab, 4).tolist()
    changes = {} if plain else {
        "presence_penalty": maybe(float(dice.uniform(-2, 2)), 0.0),
        "frequency_penalty": maybe(float(dice.uniform(-2, 2)), 0.0),
        "repetition_penalty": maybe(float(dice.uniform(0.5, 2)), 1.0), "min_tokens": int(maybe(3, 0)),
        "stop_token_ids": (tokens[0], 3, vocab + 7),
        "logit_bias": tuple((token, float(dice.uniform(-40, 40))) for token in [*tokens, tokens[1], -1, vocab])
        if dice.random() < 0.4 else ()}
    return Sampling(
        temperature=float(dice.choice([1.0, 0.7, 0.0, 1e-3, 1e-300, 100.0], p=[0.4, 0.3, 0.1, 0.1, 0.05, 0.05])),
        top_k=int(maybe(int(dice.choice([1, 2, 20, vocab, vocab + 3])), 0, 0.3)),
        top_p=maybe(float(dice.choice([1e-6, 0.1, 0.5, 0.9, 0.999])), 1.0, 0.5),
        min_p=maybe(float(dice.choice([1e-4, 0.05, 1.0])), 0.0, 0.2), seed=int(dice.integers(0, 1 << 63)) * 2 + 1,
        **changes)


def session_of(dice: Dice, vocab: int, first: int, count: int) -> ChoiceRows:
    sampling = sampling_of(dice, vocab)
    history = TokenHistory.of(sampling, dice.integers(0, vocab, 9).tolist())
    if history is not None:
        history.append(dice.integers(0, vocab, 5).tolist())
    paths = [dice.integers(-1, vocab + 2, depth % 4).tolist() for depth in range(count)]
    allowed = None
    if dice.random() < 0.2:
        allowed = dice.integers(0, 1 << 32, (count, -(-vocab // 32)), np.uint32)
        allowed[:, 0] |= 1
    positions = [int(dice.integers(0, 1 << 20)) + len(path) for path in paths]
    return ChoiceRows(sampling, range(first, first + count), positions, [len(path) for path in paths], history, paths,
                      allowed)


def cases(seed: int, most_rows: int) -> Iterator[tuple[torch.Tensor, list[ChoiceRows]]]:
    """Logits and the sessions that tile them, so many rows in all."""
    dice, left = np.random.default_rng(seed), most_rows
    while left > 0:
        vocab = int(dice.choice([1, 5, 63, 64, 65, 640, 1024, 1090, 5000]))
        counts = dice.integers(1, 5, dice.integers(1, 4)).tolist()
        kind = KINDS[int(dice.integers(0, len(KINDS)))]
        logits = torch.from_numpy(kind(dice, sum(counts), vocab))
        firsts = np.cumsum([0, *counts]).tolist()
        yield logits, [session_of(dice, vocab, first, count) for first, count in zip(firsts, counts, strict=False)]
        left -= sum(counts)


@pytest.fixture(scope="module", params=[1, 2], ids="{} threads".format)
def team(request: pytest.FixtureRequest) -> Team:
    return Team(kernels(), request.param)


class Counted:
    """A race, and how many rows it left to the specification."""

    def __init__(self, race: Race) -> None:
        self.race, self.rows, self.unsure = race, 0, 0

    def __call__(self, logits: torch.Tensor, sessions: list[ChoiceRows], most: int) -> Winners | None:
        won = self.race(logits, sessions, most)
        assert won is not None
        self.rows += len(won.sure)
        self.unsure += sum(not sure for sure in won.sure)
        return won


def agrees(race: Race, seed: int, rows: int) -> None:
    for logits, sessions in cases(seed, rows):
        assert choose(logits, sessions, None, race) == choose(logits, sessions), (seed, logits, sessions)


def test_choices_are_those_of_the_specification(team: Team) -> None:
    agrees(NativeRace(team), 1, 600)


def test_choices_that_a_walk_reaches_are_those_of_the_specification(team: Team) -> None:
    rng, race, longest, left_out = np.random.default_rng(5), NativeRace(team), 0, 0
    for logits, sessions in cases(6, 600):
        right, walks = choose(logits, sessions), list[tuple[slice, DraftTree]]()
        for session in sessions:
            cut = slice(session.rows.start, session.rows.stop)
            walks.append((cut, lucky_tree(random_shape(rng, len(session.rows)), right[cut])))
        found = choose(logits, [replace(session, tree=(tree.parents, tree.tokens))
                                for session, (_, tree) in zip(sessions, walks, strict=True)], None, race)
        for cut, tree in walks:
            verdict = walk(tree, found[cut])
            assert verdict == walk(tree, right[cut]), (logits[cut], tree)
            longest = max(longest, len(verdict.path))
        left_out += sum(one != other for one, other in zip(found, right, strict=True))
    assert longest >= 3 and left_out  # rows that no walk reaches are not chosen


@pytest.mark.parametrize("flags", [X86[-1][1], ()], ids=["AVX2", "any processor"])
def test_every_kind_of_processor_chooses_the_same(flags: tuple[str, ...]) -> None:
    if flags and platform.machine() != "x86_64":
        pytest.skip("not an x86-64 machine")
    agrees(NativeRace(Team(kernels(flags), 1)), 2, 300)


def test_children_are_those_of_the_specification(team: Team) -> None:
    race, dice = NativeRace(team), np.random.default_rng(3)
    for logits, sessions in cases(3, 250):
        k = min(4, logits.shape[1])
        some = torch.from_numpy(np.sort(dice.choice(9 * logits.shape[1], logits.shape[1], replace=False)))
        bare = [replace(s, allowed=None) for s in sessions]  # masks have no words for these ids
        for found, right in ((ranked(logits, sessions, k, None, race), ranked(logits, sessions, k)),
                             (ranked(logits, bare, k, some, NativeRace(team, some)), ranked(logits, bare, k, some))):
            for ours, theirs in zip(found, right, strict=True):
                is_one = np.isfinite(theirs[1])
                assert np.isfinite(ours[1]).tolist() == is_one.tolist(), sessions
                assert np.array(ours[0])[is_one].tolist() == np.array(theirs[0])[is_one].tolist(), sessions
                np.testing.assert_allclose(np.array(ours[1])[is_one], np.array(theirs[1])[is_one], rtol=2e-7, atol=2e-7)


def test_children_that_are_as_good_as_impossible_are_told_too(team: Team) -> None:
    logits = torch.full((1, 640), -1e30)
    logits[0, [5, 300, 639]] = torch.tensor([1.0, 2.0, 3.0])
    for temperature in (1.0, 0.5, 1e-3):
        session = ChoiceRows(Sampling(temperature=temperature), range(1), range(1), range(1), None, [()])
        (found,), (right,) = ranked(logits, [session], 4, None, NativeRace(team)), ranked(logits, [session], 4)
        assert list(found[0]) == list(right[0]) and np.isfinite(found[1]).all()


def test_hardly_a_row_is_left_to_the_specification(team: Team) -> None:
    race, dice = Counted(NativeRace(team)), np.random.default_rng(4)
    for seed in range(40):
        logits = torch.from_numpy(peaked(dice, 9, 5000))
        for temperature, top_p, top_k in ((1.0, 1.0, 0), (0.7, 0.9, 0), (1.0, 0.5, 40), (0.01, 0.99, 0)):
            sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
            race(logits, [ChoiceRows(sampling, range(9), range(9), range(9), None, [()] * 9)], 12)
    assert race.unsure <= race.rows / 200, (race.unsure, race.rows)


@pytest.mark.parametrize("top_k", [0, 40])
def test_a_nucleus_is_known_however_near_its_border_is(team: Team, top_k: int) -> None:
    race, dice = NativeRace(team), np.random.default_rng(6)
    for seed in range(60):
        logits = torch.from_numpy(peaked(dice, 4, 3000))
        mass = torch.softmax(logits[0].double().sort(descending=True).values[: top_k or None], 0).cumsum(0)
        top_p = float(mass[int(dice.integers(0, 12))]) * (1 + float(dice.choice([1e-6, -1e-6, 1e-9, -1e-9])))
        sampling = Sampling(temperature=1.0, top_p=min(top_p, 1.0), top_k=top_k, seed=seed)
        rows = [ChoiceRows(sampling, range(4), range(4), range(4), None, [()] * 4)]
        for most in (1, 12):
            won = race(logits, rows, most)
            assert won is not None and all(won.sure), (seed, most)
            assert list(won.tokens[::most]) == choose(logits, rows), (seed, most)


def test_what_is_no_number_or_cannot_be_ordered_is_left_to_the_specification(team: Team) -> None:
    race, logits = NativeRace(team), torch.randn(5, 200)
    logits[0, 3], logits[1, 199], logits[2], logits[3, :2] = math.nan, math.inf, -math.inf, 50.0
    for sampling, sure in ((Sampling(temperature=1.0), [0, 0, 0, 1, 1]), (Sampling(temperature=1e-12), [0] * 5),
                           (Sampling(temperature=1.0, top_p=0.5, top_k=3), [0, 0, 0, 1, 1])):
        won = race(logits, [ChoiceRows(sampling, range(5), range(5), [0] * 5, None, [()] * 5)], 1)
        assert won is not None and list(won.sure) == sure, sampling
    for other in (logits.double(), logits.bfloat16(), logits.t()):
        assert race(other, [], 1) is None
    assert NativeRace(team, torch.arange(200).flip(0))(logits, [], 1) is None


def test_only_what_a_mask_allows_is_chosen(team: Team) -> None:
    logits, race = torch.zeros(3, 70), NativeRace(team)
    allowed = np.zeros((3, 3), np.uint32)
    allowed[0, 2], allowed[1, 0], allowed[2, 1] = 1 << 4, 1 << 31, 0b110
    for temperature in (0.0, 1.0):
        sampling = Sampling(temperature=temperature, logit_bias=((5, 50.0),), seed=2)
        session = ChoiceRows(sampling, range(3), range(3), range(3), None, [()] * 3, allowed)
        for chosen in (choose(logits, [session]), choose(logits, [session], None, race)):
            assert chosen[:2] == [68, 31] and chosen[2] in (33, 34)
        ids, scores = rank(logits, session, 2)
        assert sorted(ids[2].tolist()) == [33, 34] and scores[2].isfinite().all()


def test_a_top_between_two_floats_hides_nobody_where_it_is_cold(team: Team) -> None:
    """Bounds are made of the top as a float; what it is off by weighs the more the colder it is."""
    dice, race = np.random.default_rng(6), NativeRace(team)
    for turn in range(150):
        heat = float(dice.choice([1e-6, 1e-5, 1e-3]))
        top = np.float32(heat * 10 ** dice.uniform(6, 6.8))
        logits = np.float32(top - heat * np.abs(dice.normal(0, 8, (16, 640))))
        logits[:, 5] = top
        amount = float(dice.uniform(-0.5, 0.5) * np.spacing(top) + heat * dice.uniform(0, 3))
        sampling = Sampling(temperature=heat, seed=turn, logit_bias=((5, amount),))
        session = ChoiceRows(sampling, range(16), range(16), range(16), None, [()] * 16)
        assert choose(torch.from_numpy(logits), [session], None, race) == choose(torch.from_numpy(logits), [session])


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}], ids=str)
def test_a_row_of_which_nothing_can_be_chosen_is_told_the_same_in_any_company(filters: dict[str, Any],
                                                                              team: Team) -> None:
    dice = np.random.default_rng(7)
    for vocab in (5, 700, 5000):
        logits = torch.from_numpy(peaked(dice, 5, vocab))
        logits[0], logits[1], logits[2, vocab - 1], logits[3, 2] = -math.inf, math.nan, math.nan, math.inf
        sampling = Sampling(temperature=1.0, seed=3, **filters)
        wide = Sampling(temperature=1.0, seed=3, top_k=vocab - 1)
        one = ChoiceRows(sampling, range(4), range(4), range(4), None, [()] * 4)
        apart = [choose(logits[row : row + 1], [replace(one.part(slice(row, row + 1)), rows=range(1))])[0]
                 for row in range(4)]
        other = ChoiceRows(wide, range(4, 5), range(1), range(1), None, [()])
        for race in (None, NativeRace(team)):
            assert choose(logits[:4], [one], None, race) == apart
            assert choose(logits, [one, other], None, race)[:4] == apart
        assert apart[:2] == [0, 0] and all(0 <= token < vocab for token in apart)
        assert rank(logits, one, 4)[0].shape == (4, 4)
