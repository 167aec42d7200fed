"""What middle layers foretell: outcomes of rounds, their ranks, and the arithmetic of simulated time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.drafters.early import ExitHead, Round, Watched, share, speeds
from slipstream.base.config import DraftSection, GrowthSection, ModelSection
from slipstream.drafting import create
from slipstream.drafting.rounds import Rounds, Tally
from slipstream.engine.loading import load_model
from slipstream.protocol.tree import DraftTree, walk
from tests.tiny import write_tiny_model

VOCAB = 6


def knowing(logits: list[list[float]]) -> tuple[ExitHead, torch.Tensor]:
    """A head whose scores are those of ``logits`` [N, V], and the states that it reads: of one size each."""
    states = torch.eye(len(logits), 8)
    head = ExitHead(torch.arange(VOCAB), torch.eye(VOCAB))
    size = float(torch.nn.functional.rms_norm(states, (8,))[0, 0])
    head.matrix = torch.cat((torch.tensor(logits) / size, torch.zeros(9 - len(logits), VOCAB)))
    return head, states


def test_outcomes_are_ranked_by_the_chance_that_the_walk_ends_there() -> None:
    """The root has children 1 and 2; below 1 stands 3."""
    even = [0.0] * VOCAB
    head, states = knowing([[0, 4.0, 2.0, 0, 0, 0], [0, 0, 0, 3.0, 2.5, 0], even, [0, 0, 0, 0, 0, 1.0]])
    tree = ([-1, 0, 0, 1], [9, 1, 2, 3])

    def rank(choices: list[int]) -> int:
        return head.rank_of(Round(*tree, choices, states), states)

    assert Round(*tree, [1, 3, 0, 5], states).outcome() == (3, 5)
    assert Round(*tree, [1, 4, 0, 5], states).outcome() == (1, 4)
    assert Round(*tree, [4, 4, 0, 5], states).outcome() == (0, 4)
    assert rank([1, 4, 0, 0]) == 0  # 1 is likely, and then 4 nearly as likely as 3, which is in the tree
    assert rank([1, 3, 0, 5]) == 1
    assert rank([2, 0, 0, 0]) > rank([1, 3, 0, 0]) > 1
    assert share([0, 1, 5, 9], 2) == 0.5


def test_speeds_follow_from_hits() -> None:
    every, none = [True] * 4, [False] * 4
    assert speeds(every, 2.0, 0.8, 1.0, 2.0)[0] == pytest.approx(100.0)  # 16 + 1 + 2 ms are over before the step is
    assert speeds(every, 2.0, 0.8, 5.0, 2.0)[0] == pytest.approx(2000 / 23)
    early, serial, together = speeds(none, 2.0, 0.8, 5.0, 2.0)
    assert early == serial == pytest.approx(2000 / 27) and together == pytest.approx(2000 / 22)


def test_rounds_are_watched_as_they_are_verified(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    runner = Watched(load_model(folder, ModelSection(dtype="float64")), 2000, (1, 2))
    runner.set_taps(())
    rounds = Rounds(runner, None, 12)
    plain = rounds.answer([[5, 6, 7]], 0, Tally())
    assert not runner.rounds and [token for _, chosen in runner.plain for token in chosen] == plain[0][1:]
    drafter = create(DraftSection(drafter="standalone", model=str(folder), dtype="float64", growth=GrowthSection(
        num_steps=3, topk=2, num_draft_tokens=6)), ModelSection(path=str(folder)), 600)
    tally = Tally()
    assert Rounds(runner, drafter, 12).answer([[5, 6, 7]], 6, tally) == plain
    assert tally.acceptance.rounds == len(runner.rounds) > 1
    for found in runner.rounds:
        tree = DraftTree.root_only(10, found.tokens[0]).append(
            range(1, len(found.tokens)), [parent or -10 for parent in found.parents[1:]], found.tokens[1:],
            [0.0] * (len(found.tokens) - 1))
        verdict = walk(tree, found.choices)
        assert found.outcome()[1] == verdict.tokens[-1] and found.early.shape == (len(found.tokens), 2 * 48)
