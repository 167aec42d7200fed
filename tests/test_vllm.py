"""slipstream-vllm beside a runner that has what vLLM 0.32's has, without vLLM."""

from __future__ import annotations

import ast
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import slipstream_vllm
from huggingface_hub import constants
from slipstream_vllm import versions
from slipstream_vllm.adapter_0_32 import PARTS, rows_of
from slipstream_vllm.options import Options
from slipstream_vllm.remote import RemoteDrafter
from slipstream_vllm.tokenizer import digest_of
from slipstream_vllm.versions import adapter_fits
from structlog.testing import capture_logs

from bench.vllm.host import SleepingRunner
from draft_service.worker import DraftWorker
from slipstream.base.errors import ConfigError
from slipstream.drafting.ngram import ORDERS, NgramDrafter
from slipstream.following.chains import MAX_REMEMBERED, PLAIN, SWITCH, Chains, Row
from slipstream.following.rounds import StepReport
from slipstream.models.folder import tokenizer_hash
from slipstream.observe.metrics import TargetMetrics
from slipstream.protocol.messages import PROTOCOL_VERSION, DraftBound, DraftHello, Open, TargetHello
from slipstream.simulate.timed import Timing
from tests.pair import local_link_to
from tests.test_following import Heard, chosen, plain

PROMPT = list(b"one two three one two three")
HELLO = TargetHello(PROTOCOL_VERSION, 0, "function", 260, "", 4, 2, 4096)
PARENT = f"00-{'ab' * 16}-{'cd' * 8}-01"
ROOM = Path(versions.__file__).parent
PICTURE = 300  # above the model's tokens
OPTIONS = Options(("127.0.0.1:8052",), deadline_s=0.2, prompt_lookup=False, always=True)
ALLOWED = {"base", "choosing", "protocol", "decision", "following", "wire", "observe", "models"}


class Runner:
    """As much of ``GPUModelRunner`` as the adapter reads, with an engine that ``chosen`` speaks for."""

    def __init__(self, requests: Sequence[str], max_tokens: int, temperature: float = 0.0, device: str = "cpu") -> None:
        self.max_model_len, self.device, self.most = 4096, SimpleNamespace(type=device), 4
        self.requests = {request: SimpleNamespace(sampling_params=SimpleNamespace(
            max_tokens=max_tokens, temperature=temperature, extra_args=None, min_tokens=0, stop_token_ids=[],
            eos_token_id=None))
            for request in requests}
        self.texts = {request: list(PROMPT) for request in requests}
        self.input_batch = SimpleNamespace(req_ids=list(requests), vocab_size=260)
        self._lay_out()

    def _lay_out(self) -> None:
        batch = self.input_batch
        batch.num_tokens_no_spec = np.array([len(self.texts[request]) for request in batch.req_ids])
        batch.num_prompt_tokens = np.array([len(PROMPT)] * len(batch.req_ids))
        batch.token_ids_cpu = np.zeros((len(batch.req_ids), 512), np.int32)
        for place, request in enumerate(batch.req_ids):
            batch.token_ids_cpu[place, : len(self.texts[request])] = self.texts[request]

    def step(self, chains: Sequence[Sequence[int]], finished: Sequence[str] = ()) -> tuple[Any, list[list[int]]]:
        """Verify a chain for each request of the batch. Returns what vLLM hands to its proposer."""
        sampled = list[list[int]]()
        for request, chain in zip(self.input_batch.req_ids, chains, strict=True):
            text, new = self.texts[request], list[int]()
            for token in chain:
                if chosen([*text, *new]) != token:
                    break
                new.append(token)
            new.append(chosen([*text, *new]))
            text += new
            sampled.append(new)
        self._lay_out()
        spoken = {request: chain for request, chain in zip(self.input_batch.req_ids, chains, strict=True) if chain}
        total = len(chains) + sum(map(len, chains))
        return SimpleNamespace(finished_req_ids=set(finished), scheduled_spec_decode_tokens=spoken,
                               total_num_scheduled_tokens=total, num_spec_tokens_to_schedule=self.most), sampled


@contextmanager
def drafted(chains: Chains) -> Iterator[None]:
    worker = DraftWorker(NgramDrafter(8, orders=(1, *ORDERS)), "", 30.0)
    worker.start()
    try:
        with local_link_to(HELLO, chains.following, worker):
            yield
    finally:
        worker.stop()


def fresh(deadline_s: float = 30.0) -> Chains:
    """Nothing that a test counts may hang on how busy the machine is: a draft has all the time that it needs."""
    return Chains(replace(OPTIONS, deadline_s=deadline_s).section(4), TargetMetrics("function"))


def play(runner: Runner, chains: Chains, steps: int) -> int:
    """Returns how many draft tokens were accepted."""
    proposed: list[list[int]] = [[] for _ in runner.input_batch.req_ids]
    accepted = 0
    for _ in range(steps):
        output, sampled = runner.step(proposed)
        accepted += sum(len(new) - 1 for new in sampled)
        proposed = chains.step(rows_of(runner, output, sampled), output.finished_req_ids,
                               output.total_num_scheduled_tokens)
    return accepted


def test_the_runner_that_is_measured_has_all_that_the_adapter_reads() -> None:
    """``bench.vllm.host``: each request is given the law's token behind its prompt, and counts as a row."""
    runner = SleepingRunner(3, Timing(step_s=0.0))
    output, sampled = runner.step([[]] * 3)
    rows = rows_of(runner, output, sampled)
    assert [row.tokens()[2:] for row in rows] == sampled and all(row.can_verify for row in rows)


def test_an_engine_may_count_with_numpy() -> None:
    chains = fresh()
    assert chains.step([], (), np.int64(1)) == []
    assert chains.step_lazily(lambda: [][0], np.int64(2), (), np.int64(1)) == [[], []]


def test_answers_are_the_engines_own_and_drafts_are_used() -> None:
    runner, chains = Runner(["a", "b", "c"], 400), fresh()
    with drafted(chains):
        assert play(runner, chains, 40) > 60
    for text in runner.texts.values():
        assert text[len(PROMPT) :] == plain(len(text) - len(PROMPT))


@pytest.mark.parametrize("least", [1, 12, 30])
def test_the_token_behind_draft_tokens_is_one_of_the_least_or_none_of_them_is(least: int) -> None:
    """vLLM knows what a step committed when it forbids that token to end the answer."""
    runner, chains = Runner(["a"], 400), fresh()
    runner.requests["a"].sampling_params.min_tokens = least
    proposed, behind = [list[int]()], list[tuple[int, int]]()
    with drafted(chains):
        for _ in range(40):
            output, sampled = runner.step(proposed)
            proposed = chains.step(rows_of(runner, output, sampled), (), output.total_num_scheduled_tokens)
            behind.append((len(runner.texts["a"]) - len(PROMPT), len(proposed[0])))
    assert all(count >= least or count + chain < least for count, chain in behind)
    assert any(chain for count, chain in behind if count < least) == (least > 1)
    assert any(chain == 4 for count, chain in behind if count >= least)


@pytest.mark.parametrize("most", [0, 1])
def test_a_schedule_of_vllm_by_the_size_of_a_batch_is_kept_to(most: int) -> None:
    """``num_speculative_tokens_per_batch_size``, as its own drafts are told it with each step."""
    runner, chains = Runner(["a", "b"], 400), fresh()
    with drafted(chains):
        assert play(runner, chains, 10) > 0
        runner.most, proposed = most, list[list[int]]([[], []])
        for _ in range(10):
            output, sampled = runner.step(proposed)
            proposed = chains.step(rows_of(runner, output, sampled), (), output.total_num_scheduled_tokens)
            assert {len(chain) for chain in proposed} <= {0, most}
        runner.most = 4
        assert play(runner, chains, 20) > 10


@pytest.mark.parametrize("stop", [{"stop_token_ids": [chosen(PROMPT)]}, {"eos_token_id": chosen(PROMPT)}])
def test_nobody_is_asked_behind_the_token_that_ends_an_answer(stop: dict[str, Any]) -> None:
    """A draft that is silent would hold the step's tokens back until the deadline, and all who are in its batch."""
    runner, chains, silent = Runner(["a", "b"], 400), fresh(0.01), Heard()
    chains.following.link_up(silent, DraftHello(PROTOCOL_VERSION, 0, "silent", 0, "", None, 0, 4096, 16, 8))
    vars(runner.requests["a"].sampling_params).update(stop)
    play(runner, chains, 1)
    assert len([item for item in silent.items if isinstance(item, Open)]) == 1, "a was over before it began"
    vars(runner.requests["b"].sampling_params).update({"stop_token_ids": [chosen(runner.texts["b"])]})
    silent.items.clear()
    output, sampled = runner.step([[], [chosen(runner.texts["b"])]])
    assert chains.step(rows_of(runner, output, sampled)[1:], ["a"], 2) == [[]] and not silent.items


def test_a_request_that_was_computed_anew_is_followed_again() -> None:
    runner, chains = Runner(["a"], 400), fresh()
    with drafted(chains):
        play(runner, chains, 5)
        runner.step([[]])  # a step that nobody tells us of, as while it was put back
        assert play(runner, chains, 30) > 20
    assert runner.texts["a"][len(PROMPT) :] == plain(len(runner.texts["a"]) - len(PROMPT))


def test_what_stands_for_a_picture_may_be_no_token_of_the_model() -> None:
    """A draft refuses a text that holds one, and the stream of whoever sends many; an engine that is told to verify one
    ends."""
    for lookup in (False, True):
        runner, proposed = Runner(["a"], 400), [list[int]()]
        runner.texts["a"][3] = runner.texts["a"][17] = PICTURE
        chains, drafts = Chains(replace(OPTIONS, deadline_s=30.0, prompt_lookup=lookup).section(4),
                                TargetMetrics("function")), list[int]()
        with drafted(chains):
            for _ in range(40):
                output, sampled = runner.step(proposed)
                proposed = chains.step(rows_of(runner, output, sampled), (), output.total_num_scheduled_tokens)
                drafts += proposed[0]
        assert len(drafts) > 20 and max(drafts) < PICTURE


def test_finished_requests_are_closed() -> None:
    runner, chains = Runner(["a", "b"], 400), fresh()
    play(runner, chains, 3)
    assert len(chains.following.sessions) == 2
    runner.input_batch.req_ids.remove("a")
    output, sampled = runner.step([[]], finished=["a"])
    chains.step(rows_of(runner, output, sampled), output.finished_req_ids, 1)
    assert len(chains.following.sessions) == 1


def test_nothing_that_goes_wrong_reaches_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    runner, chains = Runner(["a"], 400), fresh()
    output, sampled = runner.step([[]])
    (row,) = rows_of(runner, output, sampled)
    broken = Row(row.request, row.length, row.new_tokens, 0, row.prompt_len, row.limit, lambda: [][0])
    for _ in range(2):
        assert chains.step([broken], (), 1) == [[]]
    with drafted(chains):
        assert play(runner, chains, 30) > 20


class Broken(Heard):
    def send(self, items: Sequence[DraftBound]) -> None:
        raise RuntimeError("this link cannot send")


def test_a_link_that_raises_does_not_reach_the_engine() -> None:
    runner, chains = Runner(["a", "b"], 400), fresh(0.05)
    chains.following.link_up(Broken(), DraftHello(PROTOCOL_VERSION, 0, "broken", 0, "", None, 0, 4096, 16, 8))
    output, sampled = runner.step([[], []])
    for _ in range(3):
        assert chains.step(rows_of(runner, output, sampled), (), 2) == [[], []]
        assert not chains.following.sessions, "a session was left behind"


def test_a_silent_draft_costs_its_deadline_and_no_draft_nothing() -> None:
    runner, chains = Runner(["a"], 400), fresh(0.05)
    assert play(runner, chains, 5) == 0
    silent = Heard()
    chains.following.link_up(silent, DraftHello(PROTOCOL_VERSION, 0, "silent", 0, "", None, 0, 4096, 16, 8))
    assert play(runner, chains, 5) == 0
    assert silent.items, "it was not asked"


def test_sampled_requests_are_not_drafted_where_vllm_verifies_them_wrongly() -> None:
    for device, temperature, drafts in (("cpu", 0.0, True), ("cpu", 0.7, False), ("cuda", 0.7, True)):
        runner = Runner(["a"], 400, temperature, device)
        output, sampled = runner.step([[]])
        (row,) = rows_of(runner, output, sampled)
        assert row.can_verify is drafts
        chains = fresh()
        chains.step([row], (), 1)
        assert len(chains.following.sessions) == drafts


@pytest.mark.parametrize(("given", "continued"), [(PARENT, PARENT), ("no such thing", ""), (7, ""), (None, "")])
def test_a_request_s_trace_goes_on_in_its_draft(given: object, continued: str) -> None:
    runner, chains, heard = Runner(["a"], 400), fresh(0.01), Heard()
    chains.following.link_up(heard, DraftHello(PROTOCOL_VERSION, 0, "silent", 0, "", None, 0, 4096, 16, 8))
    runner.requests["a"].sampling_params.extra_args = {"traceparent": given}
    play(runner, chains, 1)
    assert [item.trace for item in heard.items if isinstance(item, Open)] == [continued]


@pytest.mark.parametrize(("given", "field"), [
    (None, "slipstream.drafts"), ({}, "slipstream.drafts"), ({"drafts": []}, "slipstream.drafts"),
    ({"drafts": ["a:1"], "deadline": 1}, "slipstream.deadline"),
    ({"drafts": ["a:1"], "deadline_s": 0}, "deadline"), ({"drafts": ["nowhere"]}, "drafts"),
    ({"drafts": "a:1"}, "drafts"), ({"drafts": ["kubernetes:///draft"]}, "drafts"),
    ({"drafts": ["a:1"], "tls": {"certificate": "a"}}, "slipstream.tls"),
])
def test_options_that_cannot_be_are_refused_by_name(given: object, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        Options.of(given)


def test_versions_that_are_not_known_are_refused_by_name() -> None:
    for found in ("0.33.1", "1.0", ""):
        with pytest.raises(ConfigError, match=found or "none installed"):
            adapter_fits(found)
    adapter_fits("0.32.7")


def test_a_vllm_that_is_not_known_starts_without_us_and_is_refused_where_drafts_are_asked_for(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM calls it in each of its processes, whatever was asked for, and ends with what it raises."""
    monkeypatch.setattr(versions, "installed", lambda: "0.33.0")
    with capture_logs() as lines:
        slipstream_vllm.register()
    assert [(line["log_level"], "0.33.0" in line["why"]) for line in lines] == [("warning", True)]
    with pytest.raises(ConfigError, match=r"vLLM 0\.33\.0 is not known"):
        RemoteDrafter(SimpleNamespace())
    monkeypatch.setattr(versions, "installed", lambda: "0.32.0")
    monkeypatch.setitem(sys.modules, "vllm", None)  # cannot be imported
    slipstream_vllm.register()


@pytest.mark.parametrize("lacking", [part for parts in PARTS for part in parts])
def test_a_release_without_what_we_stand_in_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch, lacking: str) -> None:
    names = ("worker.gpu_model_runner", "GPUModelRunner"), ("sample.sampler", "Sampler"), (
        "sample.rejection_sampler", "RejectionSampler")
    kinds = []
    for (module, name), parts in zip(names, PARTS, strict=True):
        kinds.append(type(name, (), {part: print for part in parts if part != lacking}))
        monkeypatch.setitem(sys.modules, f"vllm.v1.{module}", SimpleNamespace(**{name: kinds[-1]}))
    before = [dict(vars(kind)) for kind in kinds]
    monkeypatch.setattr(versions, "installed", lambda: "0.32.1")
    slipstream_vllm.register()
    assert [dict(vars(kind)) for kind in kinds] == before
    with pytest.raises(ConfigError, match=rf"has no \w+\.{lacking}: install vLLM"):
        RemoteDrafter(SimpleNamespace())


def test_a_model_is_known_by_its_name_on_the_hub_too(tiny_folder: Path, tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``vllm serve ORGANISATION/MODEL`` has it; the engine has fetched its files."""
    snapshot = tmp_path / "models--some--model" / "snapshots" / "1f"
    snapshot.mkdir(parents=True)
    shutil.copy(tiny_folder / "tokenizer.json", snapshot)
    (tmp_path / "models--some--model" / "refs").mkdir()
    (tmp_path / "models--some--model" / "refs" / "main").write_text("1f")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert digest_of(str(tiny_folder)) == digest_of("some/model") == tokenizer_hash(tiny_folder) != ""
    with capture_logs() as lines:
        names = ["some/other", str(tmp_path), "no name"]
        assert list(map(digest_of, names)) == [""] * 3, "no engine ends by it"
    assert [line["model"] for line in lines] == names


def test_it_needs_the_light_half_alone() -> None:
    imported = {node.module for path in ROOM.glob("*.py") for node in ast.walk(ast.parse(path.read_text("utf-8")))
                if isinstance(node, ast.ImportFrom) and node.module}
    ours = {name.split(".")[1] for name in imported if name.startswith("slipstream.")}
    assert ours and ours <= ALLOWED
    assert not {name.split(".")[0] for name in imported} & {"torch", "transformers", "fastapi", "draft_service",
                                                           "target_service", "router_service"}


def test_one_bad_row_costs_its_own_session_alone() -> None:
    runner, chains = Runner(["a", "b"], 400), fresh()
    with drafted(chains):
        play(runner, chains, 5)
        kept = next(iter(chains.following.sessions.values()))
        output, sampled = runner.step([[], []])
        good, bad = rows_of(runner, output, sampled)
        wrong = replace(bad, length=bad.length + 3, tokens=lambda: [][0])
        assert chains.step([good, wrong], (), 2)[1] == []
        assert list(chains.following.sessions.values()) == [kept]
        assert play(runner, chains, 30) > 40
    for text in runner.texts.values():
        assert text[len(PROMPT) :] == plain(len(text) - len(PROMPT))


def test_a_request_that_wants_no_drafts_gets_none() -> None:
    for asked, drafts in ((None, True), (False, False), (0, False), (True, True), ("off", True), ([0], True)):
        runner, chains = Runner(["a"], 400), fresh()
        runner.requests["a"].sampling_params.extra_args = {"slipstream": asked, "other": 1}
        with drafted(chains):
            accepted = play(runner, chains, 20)
        assert (accepted > 0) is drafts is bool(chains.following.sessions)


def test_what_many_users_say_of_drafts_is_told_once_and_silences_nothing() -> None:
    runner = Runner([str(number) for number in range(100)], 400)
    for request, known in runner.requests.items():
        known.sampling_params = SimpleNamespace(max_tokens=400, temperature=0.0, min_tokens=0,
                                                stop_token_ids=[], eos_token_id=None,
                                                extra_args={"slipstream": ["no", request], "traceparent": ["x"] * 9})
    with capture_logs() as lines:
        chains = fresh(0.01)
        play(runner, chains, 2)
        chains.step_lazily(lambda: [][0], 100, (), 100)
    assert [line["log_level"] for line in lines if line["log_level"] != "debug"] == ["warning", "error"]


def test_what_ended_in_a_step_that_computes_nothing_is_closed() -> None:
    runner, chains = Runner(["a", "b"], 400), fresh()
    play(runner, chains, 3)
    chains.close_finished(["a", "b", "never seen"])
    assert not chains.following.sessions
    page = chains._metrics.registry.page("")[1].decode()
    assert re.search(r'^slipstream_sessions\{.*state="running"\} 0\.0$', page, re.M), "an idle engine tells of answers"


@pytest.mark.parametrize("known", [False, True])
def test_a_request_without_drafts_is_looked_up_for_and_says_so(known: bool) -> None:
    """Whether the router's switch comes before its first step or behind some."""
    told, runner = list[StepReport](), Runner(["a"], 400)
    section, ticks = replace(OPTIONS, prompt_lookup=True, always=False).section(4), count()
    chains = Chains(section, TargetMetrics("function"), lambda: 1e-3 * next(ticks), on_step=told.append)
    if known:
        play(runner, chains, 3)
    chains.allow("a", False)
    assert play(runner, chains, 60) > 10
    assert {one.state for step in told[4:] for one in step.requests} == {"plain"}
    rows = [one for step in told for one in step.requests]
    assert all(one.looked_up is (one.drafted > 0) for one in rows) and any(one.looked_up for one in rows)


def test_plain_decoding_is_not_looked_up_for_and_teaches_what_steps_cost() -> None:
    runner, told = Runner(["a"], 400), list[StepReport]()
    runner.requests["a"].sampling_params.extra_args = {SWITCH: PLAIN}
    chains = Chains(replace(OPTIONS, prompt_lookup=True, always=False).section(4), TargetMetrics("function"),
                    on_step=told.append)
    with drafted(chains):
        assert play(runner, chains, 40) == 0
        assert {one.state for step in told for one in step.requests} == {"plain"} and len(told) > 30


def test_requests_of_all_lengths_share_the_prices_of_a_step() -> None:
    runner = Runner(["a"], 400)
    chains = Chains(replace(OPTIONS, prompt_lookup=True, always=False).section(4), TargetMetrics("function"))
    while len(runner.texts["a"]) < 280:  # how many steps that takes depends on the clock, by which drafts pay
        play(runner, chains, 8)
    followed = chains._sessions["a"]
    assert followed.side.base > 256 and followed.policy._inputs is not None and not followed.policy._inputs.context


@pytest.mark.parametrize("known", [False, True])
def test_a_request_that_began_without_drafts_is_drafted_for_once_it_may_be(known: bool) -> None:
    """Whether the router's switch comes while its prompt waits, or before it is opened anew."""
    runner, chains = Runner(["a"], 400), fresh()
    runner.requests["a"].sampling_params.extra_args = {SWITCH: PLAIN}
    with drafted(chains):
        if known:
            assert play(runner, chains, 3) == 0
        chains.allow("a", True)
        if known:
            runner.step([[]])  # a step that nobody tells us of, as while it was put back
        assert play(runner, chains, 30) > 20
        chains.close_finished(["a"])
        assert play(runner, chains, 30) == 0, "it is held for another of its name"


def test_what_is_said_of_a_request_behind_its_end_is_not_kept() -> None:
    runner, chains = Runner(["a"], 400), fresh()
    play(runner, chains, 2)
    chains.close_finished(["a"])
    chains.allow("a", False)
    with drafted(chains):
        assert play(runner, chains, 30) > 20, "it is held against another of its name"


def test_what_is_said_of_requests_that_another_engine_runs_is_not_kept_for_ever() -> None:
    """With ``data_parallel_size`` each engine hears of all requests, and of the end of its own alone."""
    chains = fresh()
    for number in range(3 * MAX_REMEMBERED):
        chains.allow(f"another's {number}", False)
    assert len(chains._allowed) <= MAX_REMEMBERED
    runner = Runner(["a"], 400)
    chains.allow("a", False)
    with drafted(chains):
        assert play(runner, chains, 20) == 0, "what is said of its own holds"


def test_a_batch_that_an_adapter_cannot_read_costs_its_drafts_alone() -> None:
    runner, chains = Runner(["a", "b"], 400), fresh()
    with drafted(chains):
        play(runner, chains, 3)
        runner.step([[], []])
        assert chains.step_lazily(lambda: [][0], 2, (), 2) == [[], []]
        assert play(runner, chains, 30) > 40


def test_what_is_no_token_of_an_embedded_prompt_is_not_the_text_of_the_request_before() -> None:
    runner = Runner(["embedded", "other"], 8)
    batch = runner.input_batch
    batch.req_prompt_embeds, batch.is_token_ids = {0: "embeddings"}, batch.token_ids_cpu > 255
    batch.is_token_ids[0, len(PROMPT) - 2 :] = True
    output = SimpleNamespace(scheduled_spec_decode_tokens={}, num_spec_tokens_to_schedule=4)
    embedded, other = [row.tokens() for row in rows_of(runner, output, [[PROMPT[-1]], [PROMPT[-1]]])]
    assert embedded == [0] * (len(PROMPT) - 2) + PROMPT[-2:] and other == PROMPT
