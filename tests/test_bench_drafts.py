"""The benchmark of drafters: what it counts, and that its measuring target verifies whole trees whatever they bring."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from bench.asking import ask
from bench.drafters.drafts import WHOLE_TREES, Asked, Contender, Score, draft_settings, measure, rows_of
from slipstream.base.config import DraftSection, GrowthSection, ModelSection, PolicySection, load
from slipstream.base.errors import ConfigError
from slipstream.drafting import create
from slipstream.drafting.rounds import Acceptance
from slipstream.protocol.requests import Piece, Sampling
from tests.pair import Rig, drafting, local_link, target
from tests.tiny import write_tiny_model

ASKED = [Asked("one", list(b"the cat sat on the mat and")), Asked("two", list(b"one two three one two"))]
WHOLE = load(None, WHOLE_TREES).target.policy


@asynccontextmanager
async def served(folder: Path, draft: Path, policy: PolicySection, shape: GrowthSection) -> AsyncIterator[Rig]:
    section = DraftSection(drafter="standalone", model=str(draft), dtype="float64", growth=shape)
    async with AsyncExitStack() as stack:
        rig = await stack.enter_async_context(target(folder, policy))
        drafter = create(section, ModelSection(path=str(folder), dtype="float64"), 2048)
        await stack.enter_async_context(local_link(rig, await stack.enter_async_context(drafting(drafter))))
        yield rig


async def test_rows_say_what_a_good_drafter_is_worth(tiny_folder: Path, tiny_draft_folder: Path) -> None:
    shape = GrowthSection(num_steps=5, topk=1, num_draft_tokens=5)
    async with (target(tiny_folder) as plain, served(tiny_folder, tiny_draft_folder, WHOLE, shape) as whole,
                served(tiny_folder, tiny_draft_folder, PolicySection(), shape) as usual):
        done: list[int] = []
        scores = await measure(plain.service, [Contender("good", whole.service, usual.service)], ASKED, (), 40,
                               lambda: done.append(1))
    rows = {(row["drafter"], row["set"], row["temperature"]): row for row in rows_of(scores, ["plain", "good"],
                                                                                    ["one", "two"])}
    assert len(done) == 2
    assert set(rows) == {(name, set_, t) for name in ("plain", "good") for set_ in ("one", "two", "all")
                         for t in (0.0, 1.0)}
    assert all(row["acceptance_length"] == row["speed_ratio"] == 1.0 for key, row in rows.items() if key[0] == "plain")
    for set_, answers in (("one", 1), ("two", 1), ("all", 2)):
        greedy, sampled = rows["good", set_, 0.0], rows["good", set_, 1.0]
        assert greedy["answers"] == answers
        assert 2.0 < greedy["acceptance_length"] <= 6.0 and sampled["acceptance_length"] > 2.0
        assert sampled["of_greedy"] == pytest.approx(sampled["acceptance_length"] / greedy["acceptance_length"])
        assert 0.5 < greedy["by_depth"][0] <= 1.0 and len(greedy["by_depth"]) <= 5
        assert greedy["speed_ratio"] > 0.0


async def test_whole_trees_are_verified_even_if_nothing_is_accepted(tiny_folder: Path, tmp_path: Path) -> None:
    """A policy left to itself would verify fewer nodes, and soon none."""
    stranger = write_tiny_model(tmp_path / "stranger", seed=77)
    shape = GrowthSection(num_steps=4, topk=4, num_draft_tokens=16)
    drafted = {}
    for name, policy in (("whole", WHOLE), ("usual", PolicySection())):
        async with served(tiny_folder, stranger, policy, shape) as rig:
            pieces: list[Piece] = []
            await ask(rig.service, ASKED[0].prompt, Sampling(), 60, True, on_piece=pieces.append)
            drafted[name] = [piece.drafted for piece in pieces[1:-1]]
    assert set(drafted["whole"]) == {16}
    assert 0 in drafted["usual"], "the policy never gave up, so nothing was shown"


def test_only_rounds_that_could_be_drafted_and_were_not_cut_are_counted() -> None:
    score = Score()
    score.add_whole([Piece((1,)), Piece((1, 2, 3), 2, 5), Piece((1,), 0, 5), Piece((1, 2), 1, 5), Piece((1,), 1, 5)])
    assert (score.acceptance.rounds, score.acceptance.length) == (3, 2.0)
    assert score.acceptance.by_depth == [2 / 3, 1 / 2]
    other = Score(acceptance=Acceptance(1, [1, 1, 1]))
    other.join(score)
    assert (other.acceptance.rounds, other.acceptance.reached) == (4, [3, 2, 1])


def test_a_drafter_that_is_not_known_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'eagle9'.*eagle3-tree16"):
        draft_settings("eagle9", "target", "head")


@pytest.mark.long
def test_the_command_on_real_processes(tiny_folder: Path, tmp_path: Path) -> None:
    """About 15 s: four processes."""
    (tmp_path / "short.jsonl").write_text("\n".join(json.dumps({"turns": [f"say {i}"]}) for i in range(3)))
    arguments = ("--prompts", str(tmp_path), "--sets", "short", "--target", str(tiny_folder), "--drafters", "ngram",
                 "--count", "2", "--max-tokens", "24", "--set", "model.dtype=float32", "--set", "model.threads=1")
    done = subprocess.run([sys.executable, "-m", "bench.drafters.drafts", *arguments], cwd=tmp_path,
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "build" / "bench" / "drafts.json").read_text())["rows"]
    assert [(row["drafter"], row["temperature"]) for row in rows] == [
        ("plain", 0.0), ("plain", 1.0), ("ngram", 0.0), ("ngram", 1.0)]
    assert all(row["acceptance_length"] >= 1.0 and row["speed_ratio"] > 0.0 for row in rows)
