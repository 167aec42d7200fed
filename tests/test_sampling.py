"""Choosing tokens: against an oracle in numpy, against the law it should have, and independent of company."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.choosing.logits import TokenHistory
from slipstream.choosing.noise import best_under_noise, noise, row_keys
from slipstream.choosing.sampling import ChoiceRows, choose, rank, ranked
from slipstream.choosing.scores import ScoredRows, chosen_logprobs
from slipstream.protocol.requests import Sampling, TokenLogprob
from tests.scored import adjusted

WORD = (1 << 64) - 1
CPU = torch.device("cpu")
Doubles = NDArray[np.float64]


def mix(word: int) -> int:
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & WORD
    return word ^ (word >> 31)


def gumbel(seed: int, position: int, token: int) -> float:
    """The noise in plain Python, with 64-bit masks."""
    golden = 0x9E3779B97F4A7C15
    key = mix((mix((seed + golden) & WORD) + position * golden) & WORD)
    block = mix((key + golden + token // 64 * 0xA0761D6478BD642F) & WORD)
    exponential = -math.log((2 * (block >> 12) + 1) / 2**53) / 64
    if token % 64 != block % 64:
        own = mix((key + token * 0xD1342543DE82EF95) & WORD)
        exponential -= math.log((2 * (own >> 12) + 1) / 2**53)
    return -math.log(exponential)


def oracle(logits: Doubles, sampling: Sampling, position: int, num_output: int, prompt: list[int],
           answer: list[int]) -> tuple[int, Doubles]:
    """The choice after ``prompt + answer`` (draft tokens included) and the survivors' log probs, one step at a time."""
    scores = logits.astype(np.float64).copy()
    for token in range(len(scores)):
        if token in prompt or token in answer:
            scores[token] *= 1 / sampling.repetition_penalty if scores[token] > 0 else sampling.repetition_penalty
        scores[token] -= sampling.frequency_penalty * answer.count(token)
        scores[token] -= sampling.presence_penalty * (token in answer)
    for token, amount in sampling.logit_bias:
        scores[token] += amount
    if num_output < sampling.min_tokens:
        scores[list(sampling.stop_token_ids)] = -np.inf
    if sampling.greedy:
        return int(np.argmax(scores)), scores
    scores = scores / sampling.temperature
    if sampling.top_k:
        scores[scores < np.sort(scores)[::-1][min(sampling.top_k, len(scores)) - 1]] = -np.inf
    probs = np.exp(scores - scores.max())
    probs /= probs.sum()
    if sampling.top_p < 1:
        order = np.argsort(-probs, kind="stable")
        before = np.cumsum(probs[order]) - probs[order]
        probs[probs < probs[order][before < sampling.top_p].min()] = 0
    probs[probs < sampling.min_p * probs.max()] = 0
    with np.errstate(divide="ignore"):
        survivors = np.log(probs / probs.sum())
    noisy = [survivors[t] + gumbel(sampling.seed, position, t) for t in range(len(scores))]
    return int(np.argmax(noisy)), survivors


def rows_of(sampling: Sampling, rows: range, position: int = 10, prompt: list[int] | None = None,
            answer: list[int] | None = None, paths: list[list[int]] | None = None) -> ChoiceRows:
    """A session whose rows stand at the depths of their paths below ``position``."""
    paths = paths or [[] for _ in rows]
    answer = answer or []
    history = TokenHistory.of(sampling, prompt or [])
    if history is not None:
        history.append(answer)
    return ChoiceRows(sampling, rows, [position + len(path) for path in paths],
                      [len(answer) + len(path) for path in paths], history, paths)


def random_sampling(rng: np.random.Generator, vocab: int) -> Sampling:
    def maybe(value: float, off: float) -> float:
        return value if rng.random() < 0.5 else off

    amounts = zip(rng.choice(vocab, 3, replace=False).tolist(), rng.normal(0, 3, 3).tolist(), strict=True)
    bias = tuple(amounts)
    return Sampling(
        temperature=maybe(float(rng.uniform(0.2, 2)), 0.0) if rng.random() < 0.5 else 1.0,
        top_k=int(maybe(int(rng.integers(1, vocab + 5)), 0)), top_p=maybe(float(rng.uniform(0.1, 1)), 1.0),
        min_p=maybe(float(rng.uniform(0, 0.5)), 0.0), presence_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        frequency_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        repetition_penalty=maybe(float(rng.uniform(0.5, 2)), 1.0), logit_bias=bias if rng.random() < 0.5 else (),
        min_tokens=int(maybe(12, 0)), stop_token_ids=(0, 3), seed=int(rng.integers(0, 1 << 63)) * 2 + 1)


def random_session(rng: np.random.Generator, vocab: int, first: int) -> tuple[ChoiceRows, list[int], list[int]]:
    sampling = random_sampling(rng, vocab)
    prompt, answer = rng.integers(0, vocab, 6).tolist(), rng.integers(0, vocab, rng.integers(0, 14)).tolist()
    chain = rng.integers(0, vocab, rng.integers(0, 5)).tolist()
    paths = [chain[:depth] for depth in range(len(chain) + 1)]
    return rows_of(sampling, range(first, first + len(paths)), 30, prompt, answer, paths), prompt, answer


def noise_at(seed: int, positions: list[int], tokens: torch.Tensor,
             device: torch.device = CPU) -> torch.Tensor:
    return noise(row_keys([seed] * len(positions), positions, device), tokens.to(device)).cpu()


def test_noise_is_the_hash_that_it_says(device: torch.device) -> None:
    rng = np.random.default_rng(1)
    seeds = [0, 1, WORD, *(int(s) for s in rng.integers(0, 1 << 63, 5))]
    positions, tokens = rng.integers(0, 1 << 20, 4), rng.integers(0, 1 << 18, (4, 70))
    for seed in seeds:
        ours = noise_at(seed, positions.tolist(), torch.from_numpy(tokens), device).numpy()
        theirs = [[gumbel(seed, int(p), int(t)) for t in row] for p, row in zip(positions, tokens, strict=True)]
        np.testing.assert_allclose(ours, theirs, rtol=1e-13, atol=1e-13)


def test_noise_does_not_depend_on_the_shape_it_is_asked_in() -> None:
    tokens = torch.arange(1000)
    whole = noise_at(9, list(range(5)), tokens[None])
    assert torch.equal(whole, noise_at(9, list(range(5)), tokens.expand(5, -1)))
    for row, start, stop in ((0, 0, 1), (3, 17, 48), (4, 999, 1000)):
        assert torch.equal(whole[row, start:stop], noise_at(9, [row], tokens[None, start:stop])[0])


@pytest.mark.parametrize("axis", ["token", "position", "seed"])
def test_noise_is_gumbel_and_uncorrelated_along(axis: str) -> None:
    many = torch.arange(40_000)
    if axis == "token":
        values = noise_at(1, [5], many[None])[0]
    elif axis == "position":
        values = noise_at(1, many.tolist(), torch.tensor([[5]]))[:, 0]
    else:
        values = torch.cat([noise_at(seed, [5], torch.arange(20)[None])[0] for seed in range(2000)])
    sample = values.numpy()
    assert stats.kstest(sample, "gumbel_r").pvalue > 1e-3
    for lag in (1, 2, 20, 64):
        correlation = np.corrcoef(sample[lag:], sample[:-lag])[0, 1]
        assert abs(correlation) < 4.5 / math.sqrt(len(sample)), (lag, correlation)


def test_the_whole_chain_equals_the_oracle(device: torch.device) -> None:
    rng = np.random.default_rng(2)
    for case in range(150):
        vocab = int(rng.integers(8, 200))
        sessions, wanted, first = [], [], 0
        logits = np.round(rng.normal(0, 3, (64, vocab)), int(rng.integers(0, 6)))
        for _ in range(rng.integers(1, 4)):
            session, prompt, answer = random_session(rng, vocab, first)
            for row, path, position, num in zip(session.rows, session.paths, session.positions, session.num_output,
                                                strict=True):
                wanted.append(oracle(logits[row], session.sampling, position, num, prompt, [*answer, *path])[0])
            sessions.append(session)
            first = session.rows.stop
        assert choose(torch.from_numpy(logits[:first]).to(device), sessions) == wanted, (case, sessions)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_its_company(dtype: torch.dtype, device: torch.device) -> None:
    rng = np.random.default_rng(3)
    vocab, sessions, first = 5000, [], 0
    for _ in range(24):
        session, _, _ = random_session(rng, vocab, first)
        sessions.append(session)
        first = session.rows.stop
    logits = torch.from_numpy(rng.normal(0, 2, (first, vocab))).to(device, dtype)
    together = choose(logits, sessions)
    scores = [adjusted(logits, session) for session in sessions]
    for session, score in zip(sessions, scores, strict=True):
        for offset, row in enumerate(session.rows):
            alone = ChoiceRows(session.sampling, range(1), session.positions[offset:][:1],
                               session.num_output[offset:][:1], session.history, session.paths[offset:][:1])
            assert choose(logits[row : row + 1], [alone]) == together[row : row + 1]
            assert torch.equal(adjusted(logits[row : row + 1], alone)[0], score[offset])


def test_what_a_model_has_ranked_is_not_ranked_again(device: torch.device) -> None:
    rng = np.random.default_rng(4)
    sessions, first = [rows_of(Sampling(), range(2))], 2
    for _ in range(12):
        sessions.append(random_session(rng, 300, first)[0])
        first = sessions[-1].rows.stop
    logits = torch.from_numpy(rng.normal(0, 2, (first, 300))).to(device)
    best = logits.argmax(1).tolist()
    assert choose(logits, sessions, best) == choose(logits, sessions)
    greedy = [rows_of(Sampling(), range(first))]
    assert choose(logits, greedy, best) == choose(logits, greedy) == best
    assert choose(logits * torch.nan, greedy, best) == best, "logits are not looked at"


def test_the_least_of_a_block_falls_to_each_of_its_tokens_alike() -> None:
    """The largest noise of 64 tokens has the law of the largest of 64, and any of them has it."""
    values = noise_at(3, list(range(6400)), torch.arange(64)[None])
    assert stats.kstest(values.amax(1).numpy() - math.log(64), "gumbel_r").pvalue > 1e-3
    assert stats.chisquare(np.bincount(values.argmax(1).numpy(), minlength=64)).pvalue > 1e-3
    rest = values.sort(1).values
    assert stats.kstest(np.exp(-rest[:, -2].numpy()) - np.exp(-rest[:, -1].numpy()), "expon",
                        args=(0, 1 / 63)).pvalue > 1e-3


@pytest.mark.parametrize("vocab", [1, 5, 63, 64, 65, 640, 5000, 49_152])
def test_leaders_are_the_best_of_all(vocab: int) -> None:
    dice = torch.Generator().manual_seed(vocab)
    for spread, most in ((0.0, 1), (1.0, 4), (4.0, 1), (4.0, 12), (40.0, 3)):
        most = min(most, vocab)
        logits = torch.randn(5, vocab, generator=dice) * spread
        logits[1, torch.rand(vocab, generator=dice) < 0.9] = -math.inf
        logits[1, vocab // 2] = 0.0
        heat = torch.tensor([1.0, 0.3, 1e-300, 2.0, 50.0], dtype=torch.float64)
        keys = row_keys([vocab] * 5, [3, 9, 4, 1, 7], torch.device("cpu"))
        whole = logits.to(torch.float64) / heat[:, None] + noise(keys, torch.arange(vocab)[None])
        ids, scores = best_under_noise(logits, heat, keys, most)
        assert ids.max() < vocab
        best, where = scores.topk(most, 1)
        truth = whole.topk(most, 1).values
        assert torch.equal(best, truth), (vocab, spread, most)
        finite = best.isfinite()
        assert torch.equal(whole.gather(1, ids.gather(1, where))[finite], truth[finite])


def test_a_nucleus_does_not_depend_on_a_penalised_neighbour() -> None:
    """Mass summed in another type moves a nucleus that ends exactly at its bound: it must be the row's own type."""
    dice = np.random.default_rng(4)
    for case in range(150):
        logits = torch.from_numpy(dice.normal(-9, 1, (2, 1000)).astype(np.float32))
        logits[:, :2] = torch.tensor([0.0, -0.01])
        top_p = float(torch.softmax(logits[0].to(torch.float64), 0)[0])
        alone = rows_of(Sampling(temperature=1.0, top_p=top_p, seed=case), range(1))
        neighbour = rows_of(Sampling(temperature=1.0, top_p=0.5, presence_penalty=0.1, seed=case), range(1, 2))
        assert choose(logits, [alone, neighbour])[0] == choose(logits[:1], [alone])[0], case


def test_choice_is_the_argmax_of_adjusted() -> None:
    rng = np.random.default_rng(4)
    for case in range(60):
        session, _, _ = random_session(rng, 300, 0)
        logits = torch.from_numpy(rng.normal(0, 3, (len(session.rows), 300)))
        assert choose(logits, [session]) == adjusted(logits, session).argmax(1).tolist(), (case, session)


FILTERS = [Sampling(temperature=1.0), Sampling(temperature=0.7, top_k=5), Sampling(temperature=1.3, top_p=0.8),
           Sampling(temperature=1.0, min_p=0.1), Sampling(temperature=0.9, top_k=12, top_p=0.9, min_p=0.05),
           Sampling(temperature=1.0, frequency_penalty=0.5, repetition_penalty=1.3, logit_bias=((2, 1.5),))]


@pytest.mark.parametrize("sampling", FILTERS)
def test_choices_over_seeds_follow_the_filtered_softmax(sampling: Sampling) -> None:
    rng = np.random.default_rng(5)
    logits, prompt, answer, draws = rng.normal(0, 1.5, 24), [1, 4], [7, 7, 9], 4000
    tiled = torch.from_numpy(np.tile(logits, (draws, 1)))
    sessions = [rows_of(replace(sampling, seed=seed), range(seed, seed + 1), 10, prompt, answer)
                for seed in range(draws)]
    counts = np.bincount(choose(tiled, sessions), minlength=24)
    law = np.exp(oracle(logits, sampling, 10, 3, prompt, answer)[1])
    assert counts[law == 0].sum() == 0
    common = law * draws >= 5
    observed, expected = counts[common], law[common] * draws
    rest = draws - expected.sum()
    if rest > 1:
        observed, expected = np.append(observed, draws - observed.sum()), np.append(expected, rest)
    else:
        expected *= observed.sum() / expected.sum()
    assert stats.chisquare(observed, expected).pvalue > 1e-3, (observed, expected)


def test_choices_along_positions_of_one_seed_follow_the_softmax() -> None:
    rng = np.random.default_rng(6)
    logits, draws = rng.normal(0, 1, 12), 6000
    session = ChoiceRows(Sampling(temperature=1.0, seed=3), range(draws), range(draws), [0] * draws, None, [[]] * draws)
    counts = np.bincount(choose(torch.from_numpy(np.tile(logits, (draws, 1))), [session]), minlength=12)
    law = np.exp(logits) / np.exp(logits).sum()
    assert stats.chisquare(counts, law * draws).pvalue > 1e-3


def test_penalties_along_a_path_equal_those_of_committed_tokens() -> None:
    rng = np.random.default_rng(7)
    sampling = Sampling(presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.4)
    logits = torch.from_numpy(rng.normal(0, 3, (1, 30)))
    answer, path = [3, 3, 5], [5, 8, 8, 29]
    on_path = adjusted(logits, rows_of(sampling, range(1), 10, [1, 8], answer, [path]))
    committed = adjusted(logits, rows_of(sampling, range(1), 14, [1, 8], answer + path))
    assert torch.equal(on_path, committed)


def test_a_penalty_is_subtracted_in_float64() -> None:
    """As kernels do it: 0.1 of float32 is a little more than 0.1, so the penalised token stays ahead."""
    penalised = rows_of(Sampling(presence_penalty=0.1), range(1), answer=[1])
    assert choose(torch.tensor([[0.0, 0.1]]), [penalised]) == [1]


def test_history_is_kept_only_where_it_is_needed() -> None:
    assert TokenHistory.of(Sampling(temperature=1.0, top_p=0.5, min_tokens=3), [1, 2]) is None
    only_answer = TokenHistory.of(Sampling(presence_penalty=1.0), [1, 2])
    both = TokenHistory.of(Sampling(repetition_penalty=1.1), [1, 2])
    assert only_answer is not None and both is not None
    both.append([2, 5, 3, 3])
    assert not only_answer.tokens and (both.tokens.tolist(), both.counts.tolist()) == ([1, 2, 3, 5], [0, 1, 2, 1])
    assert [both.count(token) for token in range(7)] == [0, 0, 1, 2, 0, 1, 0]


def test_ties_go_to_the_lowest_id_and_live_or_die_together() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 5.0, 0.0, 5.0]], dtype=torch.float64)
    assert choose(logits, [rows_of(Sampling(), range(1))]) == [1]
    assert choose(logits.to(torch.bfloat16), [rows_of(Sampling(), range(1))]) == [1]
    for sampling in (Sampling(temperature=1.0, top_k=2), Sampling(temperature=1.0, top_p=0.3),
                     Sampling(temperature=1.0, min_p=1.0)):
        survivors = adjusted(logits, rows_of(sampling, range(1))).isfinite()[0].nonzero()[:, 0].tolist()
        assert survivors == [1, 2, 3, 5], sampling
    all_equal = torch.zeros(1, 400, dtype=torch.float64)
    assert adjusted(all_equal, rows_of(Sampling(temperature=1.0, top_k=3), range(1))).isfinite().all()


def test_a_nucleus_wider_than_the_first_look() -> None:
    rng = np.random.default_rng(8)
    logits = rng.normal(0, 0.1, 9000)
    sampling = Sampling(temperature=1.0, top_p=0.93, seed=11)
    scores = adjusted(torch.from_numpy(logits[None]), rows_of(sampling, range(1)))
    _, law = oracle(logits, sampling, 10, 0, [], [])
    assert torch.equal(scores[0].isfinite(), torch.from_numpy(np.isfinite(law)))


def test_min_tokens_forbids_stops_until_then() -> None:
    logits = torch.tensor([[9.0, 1.0, 2.0]]).repeat(3, 1)
    sampling = Sampling(min_tokens=4, stop_token_ids=(0,))
    session = rows_of(sampling, range(3), 10, [], [1, 1], [[], [2], [2, 2]])
    assert choose(logits, [session]) == [2, 2, 0]


def test_rank_puts_the_targets_own_choice_first() -> None:
    rng = np.random.default_rng(9)
    for case in range(80):
        session, _, _ = random_session(rng, 500, 0)
        logits = torch.from_numpy(np.round(rng.normal(0, 3, (len(session.rows), 500)), 1))
        ids, scores = rank(logits, session, 4)
        assert ids[:, 0].tolist() == choose(logits, [session]), (case, session)
        assert ids.shape == scores.shape == (len(session.rows), 4) and scores.dtype == torch.float32
        assert (scores[:, :-1] >= scores[:, 1:]).all()


def test_rank_over_a_part_of_the_vocabulary_uses_target_ids() -> None:
    rng = np.random.default_rng(10)
    target = rng.normal(0, 3, (2, 100))
    kept = torch.from_numpy(np.sort(rng.choice(100, 40, replace=False)))
    elsewhere = np.setdiff1d(np.arange(100), kept.numpy())
    masked = torch.from_numpy(target.copy())
    masked[:, torch.from_numpy(elsewhere)] = -math.inf
    for temperature in (0.0, 1.0):
        sampling = Sampling(temperature=temperature, repetition_penalty=1.5, seed=4, stop_token_ids=(int(kept[0]),),
                            logit_bias=((int(kept[3]), 2.0), (int(elsewhere[0]), 50.0)), min_tokens=9)
        session = rows_of(sampling, range(2), 10, [int(kept[5]), int(elsewhere[1])], [], [[], [int(kept[7])]])
        ids, scores = rank(torch.from_numpy(target)[:, kept], session, 5, kept)
        whole_ids, whole_scores = rank(masked, session, 5)
        assert torch.equal(ids, whole_ids), temperature
        torch.testing.assert_close(scores, whole_scores)


def test_sessions_that_are_ranked_together_are_ranked_as_alone() -> None:
    """Greedy ones in one ranking, between others and in any order of rows; with equals at the edge."""
    logits = torch.randn(19, 40, generator=torch.Generator().manual_seed(2)).mul_(3).round_()
    filtered, biased = Sampling(temperature=0.7, top_p=0.9, seed=5), ((4, 9.0),)
    kinds = [(Sampling(), range(3, 5)), (Sampling(temperature=0.8, seed=3), range(2)), (Sampling(), range(8, 9)),
             (Sampling(logit_bias=biased), range(5, 7)), (filtered, range(9, 11)),
             (Sampling(logit_bias=biased), range(11, 12)),
             (Sampling(temperature=1.1, seed=6), range(12, 14)), (replace(filtered, top_k=3, seed=8), range(14, 16)),
             (replace(filtered, logit_bias=biased), range(16, 18)),
             (replace(filtered, logit_bias=biased, min_p=0.1), range(18, 19))]
    sessions = [ChoiceRows(sampling, rows, [7] * len(rows), [1] * len(rows), None, [()] * len(rows))
                for sampling, rows in kinds]
    for vocabulary in (None, torch.arange(40).flip(0)):
        alone = [row for session in sessions
                 for row in zip(*(part.tolist() for part in rank(logits, session, 4, vocabulary)), strict=True)]
        assert ranked(logits, sessions, 4, vocabulary) == alone


class Largest(TorchDispatchMode):
    """The most numbers that an operation gave."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for made in found if isinstance(found, tuple) else (found,):
            if isinstance(made, torch.Tensor):
                self.numbers = max(self.numbers, made.numel())
        return found


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(1.0, presence_penalty=1.0), Sampling(0.0, top_p=0.5),
                                      Sampling(1.0, top_p=0.5), Sampling(0.0, presence_penalty=1.0)], ids=str)
def test_many_sessions_take_no_more_memory_than_a_few(sampling: Sampling) -> None:
    """Beside their logits: those over a part of the vocabulary are spread over all of it, or copied to float64."""
    vocabulary, sessions = torch.arange(0, 64_000, 32), 200
    logits, history = torch.randn(4 * sessions, len(vocabulary)), TokenHistory.of(sampling, [1])
    rows = [ChoiceRows(replace(sampling, seed=one), range(4 * one, 4 * one + 4), [9] * 4, [0] * 4, history, [()] * 4)
            for one in range(sessions)]
    with Largest() as largest:
        ranked(logits, rows, 4, vocabulary)
    assert largest.numbers <= 4 * logits.numel()


def test_rank_scores_are_log_shares() -> None:
    logits = torch.from_numpy(np.random.default_rng(11).normal(0, 1, (1, 8)))
    for sampling in (Sampling(), Sampling(temperature=0.8, seed=1)):
        _, scores = rank(logits, rows_of(sampling, range(1)), 8)
        assert scores.exp().sum().item() == pytest.approx(1.0, abs=1e-6)
    ids, scores = rank(logits, rows_of(Sampling(temperature=1.0, top_k=1), range(1)), 3)
    assert ids[0, 0] == logits.argmax() and scores[0].tolist() == [0.0, -math.inf, -math.inf]


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.0, 0.0]])

    def told(top: int) -> list[TokenLogprob]:
        session = rows_of(Sampling(temperature=0.5), range(2))
        return chosen_logprobs(logits, [ScoredRows(session, [0, 1], [0, 0], top, "raw")])[0]

    rows = told(2)
    law = torch.log_softmax(logits.double(), 1)
    assert rows[0].logprob == pytest.approx(law[0, 0].item()) and rows[1].logprob == pytest.approx(law[1, 0].item())
    assert [token for token, _ in rows[0].top] == [2, 1]
    assert rows[0].top[0][1] == pytest.approx(law[0, 2].item())
    assert told(0)[0].top == () and len(told(20)[0].top) == 3


def test_a_tiny_temperature_is_greedy() -> None:
    logits = torch.tensor([[0.5, 0.75, -1.0]])
    for temperature in (1e-3, 1e-308):
        for top_p in (1.0, 0.5):
            session = rows_of(Sampling(temperature=temperature, top_p=top_p, seed=5), range(1))
            assert choose(logits, [session]) == [1], (temperature, top_p)
