"""Accept thresholds: what they take, with which probability, and that nobody can overlook them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from slipstream.base.config import Config, DraftSection, GrowthSection, ModelSection, load
from slipstream.base.errors import ConfigError
from slipstream.choosing.sampling import ChoiceRows, choose, log_probabilities, uniform_draws
from slipstream.cli.doctor import checks
from slipstream.drafting import Drafter, create
from slipstream.protocol.requests import Piece, Request, Sampling
from slipstream.protocol.tree import DraftTree, Thresholds, relaxed_choices
from slipstream.wire.answers import decode_answer_responses, decode_info, encode_answer_response, encode_info
from tests.echo import EchoTarget
from tests.pair import drafting, local_link, target
from tests.routing import CHAT, HELLO, routing
from tests.scored import adjusted
from tests.tiny import write_tiny_model

PROMPTS = (b"the cat sat on the mat. the cat", b"one two three one two")


def tree_of(*children: tuple[int, float]) -> DraftTree:
    """A root with children of these tokens and scores."""
    tokens, scores = zip(*children, strict=True)
    return DraftTree.root_only(10, 0).append(range(1, len(children) + 1), [-10] * len(children), tokens, scores)


def rows(sampling: Sampling, count: int, first: int = 5) -> ChoiceRows:
    return ChoiceRows(sampling, range(count), range(first, first + count), [0] * count, None, [[]] * count)


def test_thresholds_of_one_change_nothing() -> None:
    tree = tree_of((3, -0.1), (4, -0.2))
    for choice in (3, 4, 9):
        assert relaxed_choices(tree, [choice, 7, 7], [1, 0.6, 0.3], [1e-9] * 3, Thresholds()) == [choice, 7, 7]


def test_the_targets_own_choice_is_always_taken() -> None:
    tree = tree_of((3, -0.1), (4, -0.2))
    assert relaxed_choices(tree, [4, 7, 7], [1, 0.9, 0.1], [1e-9] * 3, Thresholds(0.1, 0.1))[0] == 4


def test_single_takes_the_best_scored_child_that_is_likely_enough() -> None:
    tree = tree_of((3, -0.3), (4, -0.2), (5, -0.1))
    chances = [1, 0.5, 0.3, 0.1]
    assert relaxed_choices(tree, [9, 7, 7, 7], chances, [0.99] * 4, Thresholds(single=0.3))[0] == 4
    assert relaxed_choices(tree, [9, 7, 7, 7], chances, [0.99] * 4, Thresholds(single=0.4))[0] == 3
    assert relaxed_choices(tree, [9, 7, 7, 7], chances, [0.99] * 4, Thresholds(single=0.6))[0] == 9


def test_a_forbidden_token_is_never_taken() -> None:
    tree = tree_of((3, -0.1), (4, -0.2))
    assert relaxed_choices(tree, [9, 7, 7], [1, 0.0, 0.0], [1e-12] * 3, Thresholds(1e-9, 1e-9))[0] == 9


@pytest.mark.parametrize("acc", [0.2, 0.5, 0.9])
def test_acc_takes_children_as_often_as_it_says(acc: float) -> None:
    """With the choice itself: min(1, share / acc); what it takes beyond the choice is the rest of that."""
    tree, chances = tree_of((3, -0.1), (4, -0.2)), [0.25, 0.15]
    rng = np.random.default_rng(1)
    share, draws = sum(chances), 20_000
    taken = 0
    for choice, coin in zip(rng.choice([3, 4, 9], draws, p=[*chances, 1 - share]), rng.random(draws), strict=True):
        choices = relaxed_choices(tree, [int(choice), 7, 7], [1, *chances], [float(coin)] * 3, Thresholds(acc=acc))
        taken += choices[0] in (3, 4)
    expected = min(1.0, share / acc)
    assert abs(taken / draws - expected) <= 4 * math.sqrt(expected * (1 - expected) / draws), (taken / draws, expected)


@pytest.mark.parametrize("sampling", [
    Sampling(temperature=1.3), Sampling(temperature=0.7, top_p=0.8), Sampling(temperature=1.0, top_k=4, min_p=0.05),
    Sampling(temperature=1.0, logit_bias=((2, 5.0), (7, -100.0)))])
def test_probabilities_are_those_that_choices_are_drawn_by(sampling: Sampling) -> None:
    logits = torch.randn(3, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2
    law = log_probabilities(logits, rows(sampling, 3)).exp()
    assert torch.allclose(law.sum(1), torch.ones(3, dtype=torch.float64))
    assert torch.equal(law > 0, adjusted(logits, rows(sampling, 3)) > -math.inf)
    wide = logits[:1].expand(4000, -1)
    drawn = np.bincount(choose(wide, [rows(sampling, 4000)]), minlength=40)
    likely = law[0].numpy() > 5 / 4000
    expected = np.append(law[0].numpy()[likely], max(1e-12, float(law[0].numpy()[~likely].sum()))) * 4000
    seen = np.append(drawn[likely], drawn[~likely].sum())
    assert stats.chisquare(seen, expected * seen.sum() / expected.sum()).pvalue > 1e-4


def test_coins_are_uniform_and_keyed() -> None:
    sampling = Sampling(temperature=1.0, seed=3)
    values = uniform_draws(rows(sampling, 4000))
    assert stats.kstest(values, "uniform").pvalue > 1e-4 and min(values) > 0 and max(values) < 1
    assert uniform_draws(rows(sampling, 1, first=100)) == [values[95]]
    assert uniform_draws(rows(Sampling(temperature=1.0, seed=4), 1, first=100)) != [values[95]]


SAMPLED = Sampling(temperature=1.0, seed=5)
Answered = tuple[list[list[Piece]], float, float]  # pieces, and the gauge and counter about thresholds


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("lenient")
    return write_tiny_model(root / "target"), write_tiny_model(root / "draft", noise=0.4)


def drafter(folder: Path, target_folder: Path) -> Drafter:
    section = DraftSection(drafter="standalone", model=str(folder), dtype="float64",
                           growth=GrowthSection(num_steps=3, topk=2, num_draft_tokens=6))
    return create(section, ModelSection(path=str(target_folder), dtype="float64"), 2048)


async def answers(folders: tuple[Path, Path], sampling: Sampling, drafted: bool, **settings: float) -> Answered:
    """The pieces of some answers, and the target's gauge and counter about thresholds."""
    async with target(folders[0], **settings) as rig:
        wanted = [Request(str(i), tuple(prompt), sampling, 60) for i, prompt in enumerate(PROMPTS)]
        if not drafted:
            pieces = [await rig.answer(request) for request in wanted]
        else:
            async with drafting(drafter(folders[1], folders[0])) as peers, local_link(rig, peers):
                pieces = [await rig.answer(request) for request in wanted]
        await rig.check()
        return pieces, rig.count("lossy"), rig.count("lenient_tokens_total")


def tokens(pieces: list[list[Piece]]) -> list[list[int]]:
    return [[token for piece in answer for token in piece.tokens] for answer in pieces]


def length(pieces: list[list[Piece]]) -> float:
    """Tokens a round."""
    return sum(len(p.tokens) for answer in pieces for p in answer) / sum(map(len, pieces))


@pytest.fixture(scope="module")
async def plain(folders: tuple[Path, Path]) -> Answered:
    return await answers(folders, SAMPLED, drafted=False)


@pytest.fixture(scope="module")
async def exact(folders: tuple[Path, Path]) -> Answered:
    return await answers(folders, SAMPLED, drafted=True, accept_threshold_single=1.0, accept_threshold_acc=1.0)


def test_at_one_drafts_change_nothing(plain: Answered, exact: Answered) -> None:
    assert tokens(exact[0]) == tokens(plain[0]) and exact[1:] == (0, 0)
    assert not any(piece.lossy for answer in exact[0] for piece in answer)


@pytest.mark.parametrize("settings", [{"accept_threshold_single": 0.05}, {"accept_threshold_acc": 0.1}])
async def test_below_one_more_is_accepted_and_the_answer_says_lossy(
        folders: tuple[Path, Path], settings: dict[str, float], plain: Answered, exact: Answered) -> None:
    lossy, gauge, lenient = await answers(folders, SAMPLED, drafted=True, **settings)
    assert length(lossy) > 1.1 * length(exact[0]), (length(lossy), length(exact[0]))
    assert tokens(lossy) != tokens(plain[0]) and gauge == 1 and lenient > 0
    assert all(any(piece.lossy for piece in answer) for answer in lossy)


async def test_greedy_and_plain_answers_know_no_thresholds(folders: tuple[Path, Path], plain: Answered) -> None:
    settings = {"accept_threshold_single": 0.05, "accept_threshold_acc": 0.05}
    greedy = await answers(folders, Sampling(), drafted=False)
    for expected, sampling, drafted in ((greedy, Sampling(), True), (plain, SAMPLED, False)):
        same, gauge, lenient = await answers(folders, sampling, drafted, **settings)
        assert tokens(same) == tokens(expected[0]) and (gauge, lenient) == (1, 0)
        assert not any(piece.lossy for answer in same for piece in answer)


@pytest.mark.parametrize("lossy", [False, True])
async def test_the_label_reaches_the_client(folders: tuple[Path, Path], lossy: bool) -> None:
    assert decode_answer_responses(encode_answer_response(1, Piece((1,), lossy=lossy)))[0][1].lossy is lossy
    backend = EchoTarget()
    backend.lossy = lossy
    info = await backend.info()
    assert decode_info(encode_info(info)) == info
    async with routing(folders[0], backend) as r:
        answer = (await r.post(CHAT, messages=HELLO)).json()
        models = (await r.http.get("/v1/models")).json()
    assert answer["slipstream"]["lossy"] is lossy and models["data"][0]["slipstream"] == {"lossy": lossy}


def test_the_doctor_warns_and_zero_is_refused(tiny_folder: Path) -> None:
    config = Config.model_validate({"target": {"accept_threshold_acc": 0.5}, "model": {"path": str(tiny_folder)}})
    (check,) = [check for check in checks(config) if check.name == "exactness"]
    assert check.status == "warn" and "LOSSY" in check.found
    with pytest.raises(ConfigError, match="accept_threshold_single"):
        load(None, ("target.accept_threshold_single=0",))
