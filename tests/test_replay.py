"""Records of real answers, and schedules that are played on them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.report import number
from bench.traffic.real import compare_schedules, recorder_of, second_device
from slipstream.base.config import DraftSection, GrowthSection, ModelSection
from slipstream.drafting import create
from slipstream.drafting.records import Place, Record, place_of
from slipstream.drafting.rounds import Rounds, Tally
from slipstream.drafting.tree import GrowingTree
from slipstream.engine.loading import load_model
from slipstream.engine.runner import ModelRunner
from slipstream.simulate.replay import RecordedText, ReplayedWorkload
from slipstream.simulate.simulation import Deployment, simulate, with_schedule
from slipstream.simulate.timed import Timing
from tests.eagle_folder import eagle_config, write_eagle_folder
from tests.tiny import write_tiny_model

PROMPTS = [[5, 6, 7, 8], [40, 41]]
TIMING = Timing(draft_s=0.005, levels=2, width=2)


def place(*children: tuple[int, float]) -> Place:
    """A root, and what the head says of it."""
    tokens, scores = [0, *(token for token, _ in children)], [0.0, *(score for _, score in children)]
    count = len(children)
    return Place(np.array(tokens, np.int32), np.array(scores, np.float32), np.array([1, *[-1] * count], np.int32),
                 np.array([count, *[0] * count], np.int32))


def written() -> Record:
    """Every second token is foretold, as second best."""
    answer = [10 + number % 7 for number in range(40)]
    return Record(answer, [place((99, -0.2), (answer[(at + 1) % 40] if at % 2 else 98, -1.5)) for at in range(40)])


def test_a_place_of_which_nothing_is_said_is_a_root_alone() -> None:
    said = place_of(7, GrowingTree(4))
    assert said.tokens.tolist() == [7] and list(said.children(0)) == []


def test_plain_decoding_says_the_text_and_drafts_follow_the_head() -> None:
    workload = ReplayedWorkload(RecordedText([written()]))
    deployment = Deployment(TIMING, workload=workload, host_s=0.0)
    plain, serial = (simulate(with_schedule(name, deployment), 2.0, 0.5) for name in ("plain", "serial"))
    assert plain.tokens_per_s == pytest.approx(50.0, rel=0.03) and plain.acceptance_length == 1.0
    # From an odd place a token is accepted and the bonus token behind it ends at an odd place again.
    assert serial.acceptance_length == pytest.approx(2.0, abs=0.1)


def test_tables_compare_with_one_device() -> None:
    workload = ReplayedWorkload(RecordedText([written()]))
    row = compare_schedules(workload, 5.0, 1.0, 1.0)
    assert row["bound"] == 1.25 and row["outcomes_by_together"] == number(row, "outcomes") / number(row, "together")
    beside = second_device(workload, 5.0, 2, 1.0)
    assert beside["replicas"] == 3 * number(beside, "together")
    assert beside["serial_by_device"] == pytest.approx(number(beside, "serial") / 3 / number(beside, "together"))
    assert beside["serial_by_money"] == pytest.approx(number(beside, "serial") / 2.25 / number(beside, "together"))


def test_records_are_what_the_drafter_that_serves_would_say(tmp_path: Path) -> None:
    """In float64: the rounds that follow from a record are those of real drafting."""
    folder = write_tiny_model(tmp_path / "target")
    head = write_eagle_folder(tmp_path / "head", eagle_config(eagle_config={
        "use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [-1, 0, 0]}))
    records = recorder_of(folder, head, 24, "float64")(PROMPTS)
    assert len(records[0].places) == len(records[0].answer)
    runner = ModelRunner(load_model(folder, ModelSection(dtype="float64")), 2000)
    drafter = create(DraftSection(drafter="eagle3", model=str(head), dtype="float64", growth=GrowthSection(
        num_steps=2, topk=3, num_draft_tokens=12)), ModelSection(path=str(folder), dtype="float64"), 1000)
    for prompt, record in zip(PROMPTS, records, strict=True):
        tally = Tally()
        assert Rounds(runner, drafter, 24).answer([prompt], 12, tally)[0][:24] == record.answer
        expected, at = list[int](), 0
        while at + 1 < len(record.answer):
            node, accepted, said = 0, 0, record.places[at]
            for token in record.answer[at + 1 : at + 3]:
                found = [child for child in said.children(node)[:3] if said.tokens[child] == token]
                if not found:
                    break
                node, accepted = found[0], accepted + 1
            expected.append(accepted)
            at += accepted + 1
        assert tally.acceptance.rounds == len(expected)
        assert abs(sum(tally.acceptance.reached) - sum(expected)) <= 2, "a round may end behind the answer"
