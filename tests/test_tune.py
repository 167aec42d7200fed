"""Rounds in one process, the sweep over tree shapes, and the command that writes the best one as a configuration."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health import HealthServicer
from rich.console import Console
from typer.testing import CliRunner

from slipstream.base.config import Config, DraftSection, GrowthSection, ModelSection, PolicySection, load
from slipstream.base.errors import ConfigError, ModelError, Unavailable
from slipstream.cli.commands import app
from slipstream.cli.tuning import RemoteDraft, load_prompts, parse_numbers, with_pair
from slipstream.cli.tuning import run as tune
from slipstream.drafting import create
from slipstream.drafting.neural import NeuralDrafter
from slipstream.drafting.records import Place, Record
from slipstream.drafting.rounds import Acceptance, Measured, Rounds, Sweep, Tally, largest, shapes, slots_needed, sweep
from slipstream.engine import loading
from slipstream.engine.attention import TorchAttention
from slipstream.engine.graphs import capture_eager
from slipstream.engine.loading import load_model
from slipstream.engine.runner import ModelRunner
from slipstream.models.folder import resolve_draft_section
from slipstream.simulate import apart
from slipstream.simulate.apart import Compared, compared, knee, timing_of
from slipstream.simulate.simulation import RUN_AHEAD, Predicted
from slipstream.train.dialogue import read_prompts
from tests.eagle_folder import eagle_config, write_eagle_folder
from tests.tiny import write_tiny_model

PROMPTS = [list(b"the cat sat on the mat and"), list(b"one two three one two")]


def runner(folder: Path) -> ModelRunner:
    return ModelRunner(load_model(folder, ModelSection(dtype="float64")), slots_needed(PROMPTS, 32))


def drafter(folder: Path, model: Path, growth: GrowthSection, kind: str = "standalone") -> NeuralDrafter:
    section = DraftSection(drafter=kind, model=str(model), dtype="float64", growth=growth)
    made = create(section, ModelSection(path=str(folder), dtype="float64"), 1024)
    assert isinstance(made, NeuralDrafter)
    return made


def test_acceptance_counts_by_depth() -> None:
    acceptance = Acceptance()
    for accepted in (2, 0, 3, 1):
        acceptance.add(accepted)
    assert acceptance.length == 2.5
    assert acceptance.by_depth == [3 / 4, 2 / 3, 1 / 2]


@pytest.mark.parametrize("kind", ["good", "head"])
def test_rounds_answer_as_plain_decoding_does(kind: str, tiny_folder: Path, tiny_draft_folder: Path,
                                              tmp_path: Path) -> None:
    growth = GrowthSection(num_steps=4, topk=2, num_draft_tokens=8)
    if kind == "good":
        made = drafter(tiny_folder, tiny_draft_folder, growth)
    else:
        head = write_eagle_folder(tmp_path / "head", eagle_config(eagle_config={
            "use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [-1, 0, 0]}))
        made = drafter(tiny_folder, head, growth, "eagle3")
    target, plain, drafted = runner(tiny_folder), Tally(), Tally()
    expected = Rounds(target, None, 32).answer(PROMPTS, 0, plain)
    found = Rounds(target, made, 32).answer(PROMPTS, 8, drafted)
    assert [answer[:32] for answer in found] == [answer[:32] for answer in expected]
    assert plain.acceptance.length == 1.0 and len(plain.verify_s) == 31
    if kind == "good":
        assert drafted.acceptance.length > 2.0 and len(drafted.draft_s) < 31
    assert target.slots.num_free == target.slots.num_slots and made.slots.num_free == made.slots.num_slots


def test_an_answer_that_ends_in_its_tree_has_no_token_behind_its_end(tiny_folder: Path, tiny_draft_folder: Path,
                                                                      tmp_path: Path) -> None:
    (plain,) = Rounds(runner(tiny_folder), None, 32).answer(PROMPTS[:1], 0, Tally())
    end = next(i for i in range(16, 32) if plain[i] not in plain[:i])
    folder, tally = tmp_path / "target", Tally()
    shutil.copytree(tiny_folder, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": plain[end]}))
    made = drafter(folder, tiny_draft_folder, GrowthSection(num_steps=6, topk=2, num_draft_tokens=12))
    Rounds(runner(folder), made, 32).answer(PROMPTS[:1], 12, tally)
    assert sum(tally.acceptance.reached) + tally.acceptance.rounds == end + 1, "the end was not drafted"
    assert tally.acceptance.length == pytest.approx(end / tally.acceptance.rounds)  # the first came with the prompt


def test_shapes_are_chains_and_trees_that_can_be() -> None:
    found = [(g.num_steps, g.topk, g.num_draft_tokens) for g in shapes([2, 5], [1, 2], [4, 8, 63])]
    assert found == [(2, 1, 2), (5, 1, 5), (2, 2, 4), (5, 2, 8)]
    assert largest(shapes([2, 5], [1, 2], [4, 8])) == GrowthSection(num_steps=5, topk=2, num_draft_tokens=8)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_sweep_measures_each_shape_as_if_it_were_alone(temperature: float, tiny_folder: Path,
                                                         tiny_draft_folder: Path) -> None:
    wanted, reports = shapes([1, 4], [1, 2], [8]), list[int]()
    made = drafter(tiny_folder, tiny_draft_folder, largest(wanted))
    result = sweep(runner(tiny_folder), made, wanted, PROMPTS, 24, lambda: reports.append(1), temperature)
    assert [m.growth for m in result.measured] == wanted and len(reports) == (1 + len(wanted)) * len(PROMPTS)
    for measured in result.measured:
        alone, tally = drafter(tiny_folder, tiny_draft_folder, measured.growth), Tally()
        for prompt in PROMPTS:
            rounds = Rounds(runner(tiny_folder), alone, 24, temperature)
            rounds.answer([prompt], measured.growth.num_draft_tokens, tally)
        assert measured.acceptance_length == tally.acceptance.length
    assert result.measured[0].acceptance_length <= 2.0
    assert temperature or result.measured[-1].acceptance_length > 2.0


def test_the_best_shape_depends_on_the_way_between_the_services() -> None:
    quick = Measured(GrowthSection(num_steps=1, num_draft_tokens=1), 1.6, 0.001, 0.010)
    long = Measured(GrowthSection(num_steps=5, num_draft_tokens=5), 3.0, 0.012, 0.015)
    result = Sweep(0.010, (quick, long))
    assert result.best(0.0) is quick and result.best(0.020) is long
    assert result.gain(quick, 0.0) == pytest.approx(1.6 * 10 / 11)


def test_the_command_writes_a_configuration(tiny_folder: Path, tiny_draft_folder: Path, tmp_path: Path) -> None:
    questions, out = tmp_path / "questions.jsonl", tmp_path / "tuned [here].yaml"
    questions.write_text(json.dumps({"prompt": "hello"}) + "\n" + json.dumps({"turns": ["one two"]}))
    result = CliRunner().invoke(app, [
        "tune", "--target", str(tiny_folder), "--head", str(tiny_draft_folder), "--drafter", "standalone", "--prompts",
        str(questions), "--out", str(out), "--tokens", "16", "--steps", "1,3", "--topk", "1,2", "--nodes", "6",
        "--set", "model.dtype=float32", "--set", "draft.dtype=float32", "--set", "model.threads=1",
        "--set", "model.kernels=torch"])
    assert result.exit_code == 0, result.exception
    assert "÷ plain" in result.output and "best:" in result.output
    assert shlex.split(result.output.partition("use it with:")[2]) == ["slipstream", "run", "--config", str(out)]
    config = load(out)
    assert config.draft.growth in shapes([1, 3], [1, 2], [6])
    assert config.target.policy.max_nodes == PolicySection().max_nodes, "what the target copies by itself is cut short"
    assert config.draft.growth.num_draft_tokens < config.target.policy.max_nodes
    assert (config.model.path, config.draft.model, config.draft.drafter, config.draft.dtype) == (
        str(tiny_folder), str(tiny_draft_folder), "standalone", "float32")
    assert (config.model.kernels, config.model.threads) == ("torch", 1), "what serves is not what was measured"


def test_answers_that_end_at_once_measure_nothing(tiny_folder: Path, tiny_draft_folder: Path, tmp_path: Path) -> None:
    folder, out = tmp_path / "target", tmp_path / "tuned.yaml"
    shutil.copytree(tiny_folder, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(260))}))
    result = CliRunner().invoke(app, [
        "tune", "--target", str(folder), "--head", str(tiny_draft_folder), "--drafter", "standalone", "--out", str(out),
        "--tokens", "8", "--steps", "1", "--topk", "1", "--set", "model.dtype=float32", "--set", "draft.dtype=float32"])
    assert isinstance(result.exception, ConfigError) and "ended with its first token" in str(result.exception)
    assert not out.exists()


def test_the_command_says_whether_a_device_more_pays(tiny_folder: Path, tiny_draft_folder: Path, tmp_path: Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "STEPS", 60)
    monkeypatch.setattr(apart, "WARM_UP", 20)
    questions, out = tmp_path / "questions.jsonl", tmp_path / "tuned.yaml"
    questions.write_text(json.dumps({"prompt": "hello"}))
    called = ["tune", "--target", str(tiny_folder), "--head", str(tiny_draft_folder), "--drafter", "standalone",
              "--tokens", "16", "--steps", "3", "--topk", "2", "--nodes", "6", "--out", str(out), "--apart",
              "--prompts", str(questions), "--set", "model.dtype=float32", "--set", "draft.dtype=float32"]
    with health_server() as address:
        result = CliRunner().invoke(app, [*called, "--link", address])
    assert result.exit_code == 0, result.exception
    assert f"a message to {address} and back takes" in result.output and "÷ one device" in result.output
    assert load(out).draft.run_ahead in (0, *RUN_AHEAD.values())
    if "take them apart" in result.output or load(out).draft.run_ahead:
        assert f"draft.run_ahead={load(out).draft.run_ahead}:" in result.output
    result = CliRunner().invoke(app, [*called, "--link", address])
    assert isinstance(result.exception, Unavailable) and f"--link: nobody answers over gRPC at {address}" in str(
        result.exception)


@contextmanager
def health_server() -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield address
    finally:
        server.stop(0).wait()


def test_a_device_more_has_to_pay_by_more_than_a_simulation_is_wrong() -> None:
    def given(**rates: float) -> Compared:
        return Compared({name: Predicted(rate, 0.5, 2.0, 0.1, 2.5, 0.2) for name, rate in rates.items()}, 1.2)

    rates = {"plain": 50.0, "colocated": 100.0, "serial": 90.0, "outcomes": 95.0}
    little, much = given(**rates, **{"run-ahead": 102.0}), given(**rates, **{"run-ahead": 110.0})
    assert little.best == "colocated" and little.run_ahead == 0 and "keep both on one device" in little.why()[0]
    assert much.best == "run-ahead" and much.run_ahead == 239 and "1.10 times" in much.why()[0]
    assert given(**rates | {"plain": 120.0}, **{"run-ahead": 110.0}).best == "plain"
    endless = given(**rates | {"colocated": 0.0}, **{"run-ahead": 49.0})  # its first tree took longer than was played
    assert endless.best == "outcomes" and "inf times" in endless.why()[0]


def test_simulated_devices_take_what_was_measured() -> None:
    growth = GrowthSection(num_steps=3, topk=4, num_draft_tokens=8)
    timing = timing_of(0.014, Measured(growth, 2.0, 0.006, 0.023), 3.0, 32)
    assert [timing.step_of(rows) for rows in (1, 9)] == pytest.approx([0.014, 0.023], rel=0.05)
    assert [timing.level_of(rows) for rows in (1, 32)] == pytest.approx([0.002, 0.006], rel=0.05)
    assert knee(9, 1.0) == knee(9, 0.7) == 1 << 30


def test_questions_end_within_the_context_of_the_target(tmp_path: Path, tiny_draft_folder: Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind it there is nothing to measure: no answer is served there, and a model may have no positions."""
    seen = list[int]()

    def swept(runner: ModelRunner, drafter: NeuralDrafter, all_: object, prompts: list[list[int]],
              *rest: object) -> Sweep:
        seen.extend(map(len, prompts))
        return Sweep(0.01, (Measured(GrowthSection(), 2.0, 0.001, 0.01),))

    monkeypatch.setattr("slipstream.cli.tuning.sweep", swept)
    folder, questions = write_tiny_model(tmp_path / "target", max_position_embeddings=160), tmp_path / "q.jsonl"
    questions.write_text(json.dumps({"prompt": "word " * 100}) + "\n" + json.dumps({"prompt": "short"}))
    called = ["tune", "--target", str(folder), "--head", str(tiny_draft_folder), "--drafter", "standalone", "--prompts",
              str(questions), "--out", str(tmp_path / "tuned.yaml"), "--steps", "2", "--topk", "1", "--set",
              "model.dtype=float32", "--set", "draft.dtype=float32"]
    result = CliRunner().invoke(app, [*called, "--tokens", "16"])
    assert result.exit_code == 0 and max(seen) + 16 < 160 and min(seen) < max(seen), (result.exception, seen)
    result = CliRunner().invoke(app, [*called, "--tokens", "160"])
    assert isinstance(result.exception, ConfigError) and "--tokens" in str(result.exception)


def test_what_a_target_captures_is_measured_captured(tiny_folder: Path, tiny_draft_folder: Path, tmp_path: Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """A step without its graph takes up to three times as long on a GPU."""
    captures, asked = list[object](), list[str]()

    def capture(run: Callable[[], None]) -> Callable[[], None]:
        captures.append(run)
        return capture_eager(run)

    def race(kernels: str, config: object, device: object) -> None:
        asked.append(kernels)

    monkeypatch.setattr(loading, "FlashInferAttention", TorchAttention)
    monkeypatch.setattr(loading, "CudaCapture", lambda device: capture)
    monkeypatch.setattr("slipstream.cli.tuning.race_for", race)
    called = ["tune", "--target", str(tiny_folder), "--head", str(tiny_draft_folder), "--drafter", "standalone",
              "--tokens", "16", "--steps", "2", "--topk", "1", "--out", str(tmp_path / "tuned.yaml"),
              "--set", "model.dtype=float32", "--set", "draft.dtype=float32",
              "--set", "model.kernels=torch", "--set", "model.threads=1"]
    result = CliRunner().invoke(app, called)
    assert result.exit_code == 0 and captures and asked == ["torch"], result.output


def test_a_simulated_step_takes_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host work is in it already: the plain row of one table says what that of the other says."""
    monkeypatch.setattr(apart, "STEPS", 200)
    place = Place(np.zeros(1, np.int32), np.zeros(1, np.float32), np.full(1, -1, np.int32), np.zeros(1, np.int32))
    growth = GrowthSection(num_steps=3, topk=4, num_draft_tokens=8)
    timing = timing_of(0.002, Measured(growth, 2.0, 0.001, 0.003), 3.0, 32)
    found = compared(timing, 8, 0.001, [Record([*range(40)], [place] * 40)], 0.001).found
    assert found["plain"].tokens_per_s == pytest.approx(1 / 0.002, rel=0.01)


def test_drafts_that_do_not_pay_cost_nothing_on_cores_that_both_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU, where ``slipstream run`` says so: another device would not be worth three of it."""
    monkeypatch.setattr(apart, "STEPS", 300)
    wrong = Place(np.array([0, 99], np.int32), np.array([0, -2.0], np.float32), np.array([1, -1], np.int32),
                  np.array([1, 0], np.int32))
    growth = GrowthSection(num_steps=1, topk=1, num_draft_tokens=1)
    timing = timing_of(0.002, Measured(growth, 1.0, 0.004, 0.002), 1.0, 32)
    found = compared(timing, 8, 0.001, [Record([*range(40)], [wrong] * 40)], 0.004, shared_cores=True)
    assert found.ratio("plain") < 1.1 and found.ratio("serial") < 1.1, found


@pytest.mark.parametrize(("wrong", "named"), [
    (lambda: parse_numbers("--steps", "1;2", 16), "--steps"),
    (lambda: parse_numbers("--topk", "0,4", 16), "between 1 and 16"),
    (lambda: with_pair(Config(), "", "x", "eagle9"), "eagle9"),
    (lambda: tune(Config(), {"--steps": "2", "--topk": "1", "--nodes": "2"}, None, 8, 0.0, RemoteDraft(0.001), False,
                  Path("/none/x.yaml"), Console()), "--out: cannot write /none/x.yaml: there is no folder /none"),
    (lambda: tune(Config(), {"--steps": "2", "--topk": "1", "--nodes": "2"}, None, 8, 0.0,
                  RemoteDraft(0.001, draft_s=0.001), False, Path("x"), Console()), "--draft-ms.*--apart"),
    (lambda: tune(Config(), {"--steps": "2", "--topk": "1", "--nodes": "2"}, None, 8, 1.0, RemoteDraft(0.001), True,
                  Path("x"), Console()), "--temperature.*--apart"),
    (lambda: tune(Config(), {"--steps": "2", "--topk": "1", "--nodes": "2"}, None, 8, 0.0, RemoteDraft(0.001), False,
                  Path("/tmp"), Console()), "--out: /tmp is a folder; name a file, such as /tmp/tuned.yaml"),
    (lambda: tune(Config.model_validate({"model": {"path": "none"}}), {"--steps": "2", "--topk": "1", "--nodes": "2"},
                  None, 8, 0.0, RemoteDraft(0.001), False, Path("/proc/x.yaml"), Console()),
     "--out: cannot write /proc/x.yaml"),
])
def test_what_cannot_be_tuned_is_named(wrong: object, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        wrong()  # type: ignore[operator]


def test_a_draft_that_serving_would_refuse_is_not_tuned(tiny_folder: Path, tiny_draft_folder: Path,
                                                        tmp_path: Path) -> None:
    """A configuration was written for it, by which everything decodes plain."""
    shutil.copytree(tiny_draft_folder, other := tmp_path / "other")
    text = (other / "tokenizer.json").read_text(encoding="utf-8")
    (other / "tokenizer.json").write_text(text.replace("<|im_end|>", "<|another|>"), encoding="utf-8")
    result = CliRunner().invoke(app, [
        "tune", "--target", str(tiny_folder), "--head", str(other), "--drafter", "standalone", "--out",
        str(tmp_path / "tuned.yaml"), "--tokens", "8", "--steps", "1", "--topk", "1", "--set", "model.dtype=float32"])
    assert isinstance(result.exception, ConfigError), result.output
    assert f"--head: the vocabulary of {other} differs from the target's" in str(result.exception)
    assert not (tmp_path / "tuned.yaml").exists()


@pytest.mark.parametrize("drafter", ["", "eagle2"])
def test_a_head_is_asked_for_where_the_target_is_there_and_has_none(drafter: str, tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--head: which eagle"):
        with_pair(Config(), str(tiny_folder), "", drafter)
    with pytest.raises(ModelError, match=r"^no model 'smolm'"):  # misspelt; it asked for a head
        with_pair(Config(), "smolm", "", drafter)


def test_a_misspelt_head_is_told_before_the_target_is_loaded(tiny_folder: Path) -> None:
    with pytest.raises(ModelError, match=r"^no model 'my-haed'"):
        with_pair(Config(), str(tiny_folder), "my-haed", "")


def test_the_shipped_head_is_tuned_where_none_is_named() -> None:
    """As a launch would take it."""
    found = with_pair(Config(), "", "", "").draft
    assert found == resolve_draft_section(DraftSection(), ModelSection()) and found.drafter == "eagle3"


def test_a_question_that_is_none_is_named_by_its_line(tmp_path: Path, tiny_folder: Path) -> None:
    from router_service.text.tokens import TextCodec

    file = tmp_path / "questions.jsonl"
    file.write_text('{"prompt": "fine"}\n["not"]\n')
    with pytest.raises(ConfigError, match="line 2"):
        load_prompts(file, TextCodec(tiny_folder))
    file.write_text('{"prompt": "fine"}\n{"turns": ["cut in a pair \\ud83d"]}\n')
    with pytest.raises(ConfigError, match="line 2: not Unicode text"):
        read_prompts(file)  # before anybody talks
    assert len(load_prompts(None, TextCodec(tiny_folder))) == 6
