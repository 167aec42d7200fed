"""A target whose engine is vLLM, beside an engine that has what vLLM's ``AsyncLLM`` has, without vLLM."""

from __future__ import annotations

import asyncio
import math
import re
import socket
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
from slipstream_vllm.options import Options
from slipstream_vllm.remote import RemoteDrafter, StepReporter, step_reporter
from slipstream_vllm.worker import Drafted

from slipstream.base.config import Config, TargetSection, load
from slipstream.base.errors import CapacityError, ConfigError, Draining, InvalidRequest, SlipstreamError, Unavailable
from slipstream.base.offload import ChildProcess
from slipstream.following.chains import Chains
from slipstream.following.following import Inbox
from slipstream.following.rounds import SOCKET, RequestReport, StepReport, decode
from slipstream.grammar.trial import Trials
from slipstream.observe.metrics import TargetMetrics
from slipstream.observe.spans import HEADER, Spans, Value
from slipstream.protocol.grammar import Grammar
from slipstream.protocol.identity import Identity
from slipstream.protocol.requests import MAX_WAITING, DraftStatus, Piece, Request, Sampling, ServedModel, TokenLogprob
from slipstream.wire.server import GrpcServer
from slipstream.wire.target import TargetClient, TargetServicer
from target_service import vllm_start, vllm_words
from target_service.__main__ import serve
from target_service.vllm import ALLOW, DRAFTS, HEALTH, CacheUsage, LoadedEngine, StepReports, VllmService
from target_service.vllm_start import arguments, check_layers, trials_of
from tests.loop import hurried, still
from tests.test_following import PROMPT as SAID
from tests.test_following import SILENT, Heard, chosen, plain
from tests.test_vllm import OPTIONS, Runner, play
from tests.test_vllm import drafted as following

pytestmark = pytest.mark.usefixtures("servers_end")

IDENTITY = Identity("of-its-weights", "float32", "none", "of-its-kind")
PROMPT = tuple(SAID)
ARGUMENTS = ["model", "tokenizer", "served_model_name", "dtype", "max_num_seqs", "max_model_len", "quantization",
             "tensor_parallel_size", "pipeline_parallel_size", "structured_outputs_config", "speculative_config",
             "additional_config", "worker_extension_cls", "per_request_spec_decode_metrics", "gpu_memory_utilization",
             "logprobs_mode", "stream_interval"]
DRAFT = ("127.0.0.1:8052", True, "ngram", "")
PLAIN = {"folder": "", "allowed_names": []}


class Refused(Exception):
    """As vLLM's VLLMClientError."""

    parameter = "top_k"


@dataclass
class Collected:
    """As vLLM's RequestOutputCollector: one output, those that nobody took are joined."""

    request_id: str
    output: Any = None

    def put(self, output: Any) -> None:
        assert self.output is None, "this test's reader fell behind"
        self.output = output

    def get_nowait(self) -> Any:
        output, self.output = self.output, None
        return output


@dataclass
class FakeEngine:
    """As much of ``AsyncLLM`` as is used; ``chosen`` speaks for its model. ``steps``: tokens of each output, then
    singles."""

    steps: Sequence[int] = (1, 3, 1, 2)
    hold: bool = False  # no answer gets further than its first token
    tells: bool = False  # its workers tell of their steps
    looked_up: bool = False  # the texts' own chains, and tells so
    last: str = "length"  # why an answer ends that no token ends
    rounds: StepReports | None = None
    errored: bool = False
    stuck: bool = False  # nothing comes from it any more
    expected: int = 1
    drafts: Sequence[tuple[str, bool, str, str]] = (DRAFT,)
    counts: TargetMetrics = field(default_factory=lambda: TargetMetrics("of its worker"))
    asked: list[dict[str, Any]] = field(default_factory=list)
    salts: list[str | None] = field(default_factory=list)  # of their prompts
    aborted: list[str] = field(default_factory=list)
    said: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    collected: list[Collected] = field(default_factory=list)
    others: Sequence[FakeEngine] = ()  # data-parallel ones

    async def add_request(self, request_id: str, prompt: Any, params: dict[str, Any]) -> Collected:
        if params["top_k"] == 13:
            raise Refused("top_k: not 13")
        collected = Collected(f"{request_id}-0a1b2c3d")
        self.salts.append(prompt.get("cache_salt"))
        self.asked.append({"name": request_id, "prompt": list(prompt["prompt_token_ids"]), **params})
        self.collected.append(collected)
        self.tasks.append(asyncio.create_task(self._speak(collected, list(prompt["prompt_token_ids"]), params)))
        await asyncio.sleep(0)  # the first output may come before vLLM has told that the request is in
        return collected

    async def _speak(self, collected: Collected, prompt: list[int], params: dict[str, Any]) -> None:
        left, drafted, kept, text = params["max_tokens"], list[int](), list[int](), list(prompt)
        for step in range(left):
            await self._goes_on()
            count = min(left, self.steps[step] if step < len(self.steps) else 1)
            new = list[int]()
            for _ in range(count):
                new.append(chosen([*text, *new]))
                if new[-1] in params["stop_token_ids"]:
                    break
            text += new
            left -= len(new)
            stopped = new[-1] in params["stop_token_ids"]
            if count > 1:
                drafted.append(4)
                kept.append(count - 1)
            over = stopped or left == 0
            if self.tells and self.rounds is not None:
                told = RequestReport(collected.request_id, len(text), 4 * (count > 1), 0.01, "shadow", self.looked_up)
                StepReporter(str(self.rounds.path)).send(StepReport(0.03, 0.02, (told,)))
                await asyncio.sleep(0)
            collected.put(output(new, "stop" if stopped else self.last if over else None, params["logprobs"],
                                 SimpleNamespace(num_draft_tokens=sum(drafted), per_step_drafted=drafted,
                                                 per_step_accepted=kept) if over else None,
                                 scored(params, len(prompt)) if step == 0 else []))
            if over:
                return
            await asyncio.sleep(3600 if self.hold else 0)

    async def abort(self, request_id: str, internal: bool = False) -> None:
        if self.errored:
            raise RuntimeError("it has ended")
        self.aborted.append(request_id if internal else f"{request_id}-0a1b2c3d")

    async def collective_rpc(self, method: str, *, args: tuple[Any, ...] = ()) -> Any:
        self.said.append((method, args))
        await self._goes_on()
        told = self.expected, list(self.drafts), self.counts.engine_samples()
        return [None, told] if method == DRAFTS else [None, None]

    @property
    def engine_core(self) -> FakeEngine:
        return self

    async def call_utility_all_async(self, method: str, *args: Any) -> list[Any]:
        """Of each core; vLLM's ``collective_rpc`` gives the first one's answer."""
        assert method == "collective_rpc"
        return [await core.collective_rpc(args[0], args=args[2]) for core in (self, *self.others)]

    async def _goes_on(self) -> None:
        while self.stuck:
            await asyncio.sleep(0.5)

    def shutdown(self) -> None:
        for task in self.tasks:
            task.cancel()


def scored(params: dict[str, Any], tokens: int) -> Any:
    """As vLLM's FlatLogprobs of a prompt of so many tokens; its ranks count equals."""
    if (top := params["prompt_logprobs"]) is None:
        return None
    rows = range(1, tokens)
    return SimpleNamespace(token_ids=[i for row in rows for i in (row, *range(500, 500 + top))],
                           logprobs=[i for row in rows for i in (-1.0 - row % 2, *(-1.0 - at for at in range(top)))],
                           ranks=[i for row in rows for i in (9, *range(1, top + 1))])


def params(**asked: Any) -> dict[str, Any]:
    """As vLLM's SamplingParams."""
    if asked["temperature"] > 2.0:
        raise Refused("temperature must be in [0, 2]")
    return asked


def output(tokens: Sequence[int], finish: str | None, logprobs: int | None, counts: Any, prompt: Any) -> Any:
    """As vLLM's RequestOutput of one step."""
    places = [{token: SimpleNamespace(rank=2, logprob=-1.5), 7: SimpleNamespace(rank=1, logprob=-0.5),
               8: SimpleNamespace(rank=3, logprob=-2.5), 9: SimpleNamespace(rank=4, logprob=-math.inf)}
              for token in tokens]
    completion = SimpleNamespace(token_ids=list(tokens), finish_reason=finish, spec_decode_metrics=counts,
                                 logprobs=places if logprobs is not None else None)
    return SimpleNamespace(outputs=[completion], finished=finish is not None, num_cached_tokens=16,
                           prompt_logprobs=prompt)


class Tried:
    """As ``Trial``: one regular expression is none."""

    def check(self, grammar: Grammar, namespace: str = "") -> None:
        if grammar.source == "(":
            raise InvalidRequest("grammar", "unclosed group")


@asynccontextmanager
async def served(engine: FakeEngine, drafted: bool = True, keyed: bool = False, spans: Spans | None = None,
                 tries: bool = True, metrics: TargetMetrics | None = None, fill: CacheUsage | None = None,
                 num_slots: int = 1024, **settings: Any) -> AsyncIterator[VllmService]:
    engine.rounds = StepReports(Path(tempfile.mkdtemp()) / "rounds")
    served = ServedModel("function", 260, 512, "", num_slots, IDENTITY)
    running = LoadedEngine(engine, params, (Refused,), served, drafted, keyed,
                           fill or CacheUsage({0: 0.25}), engine.rounds, Trials(Tried()) if tries else None,
                           cores=1 + len(engine.others))
    loop = asyncio.get_running_loop()
    service = VllmService(running, TargetSection(**settings), metrics or TargetMetrics("function"), spans,
                          lambda: loop.time())
    with engine.rounds.receiving():
        yield service
    service.end()


def request(max_tokens: int = 12, **sampling: Any) -> Request:
    return Request("r", PROMPT, Sampling(**sampling), max_tokens)


async def taken(answer: Any) -> list[Piece]:
    return [piece async for piece in answer]


async def test_a_cache_for_less_than_the_models_context_is_the_context_that_clients_are_told() -> None:
    """A chat that named no max_tokens was given all of the model's context, and then refused, always."""
    async with served(FakeEngine(), num_slots=256) as service:
        info = await service.info()
        answer = service.submit(request(info.max_context - len(PROMPT)))
        with pytest.raises(InvalidRequest, match="256 tokens that fit"):
            service.submit(request(info.max_context - len(PROMPT) + 1))
        await answer.aclose()
    assert info.max_context == 256
    async with served(replace(FakeEngine(), others=[FakeEngine()]), num_slots=512) as service:
        assert (await service.info()).max_context == 256, "each of two cores has a cache of its own"


def test_what_vllm_says_that_its_cache_holds_counts_before_its_blocks() -> None:
    """With decode_context_parallel_size 2 a block has 16 tokens on each of two ranks: half of the context was given."""
    cache = SimpleNamespace(num_gpu_blocks=100, block_size=16, kv_cache_size_tokens=3200)
    assert vllm_start.num_slots(cache, 1) == 3200 and vllm_start.num_slots(cache, 2) == 6400
    assert vllm_start.num_slots(SimpleNamespace(num_gpu_blocks=100, block_size=16), 2) == 1600, "all cores' blocks"


async def pass_by(passes: Callable[[float], None], seconds: float) -> None:
    for _ in range(round(2 * seconds)):
        passes(0.5)
        for _ in range(10):  # what is ready, and what follows from it
            await asyncio.sleep(0)


def tokens_of(pieces: Sequence[Piece]) -> list[int]:
    return [token for piece in pieces for token in piece.tokens]


async def test_pieces_are_steps_and_say_what_was_accepted() -> None:
    engine = FakeEngine()
    async with served(engine) as service:
        pieces = await taken(service.submit(request()))
    assert tokens_of(pieces) == plain(12)
    assert [len(piece.tokens) for piece in pieces] == [1, 3, 1, 2, 1, 1, 1, 1, 1]
    assert [piece.accepted for piece in pieces] == [0, 2, 0, 1, 0, 0, 0, 0, 0]
    assert sum(piece.drafted for piece in pieces) == 8
    assert (pieces[0].cached_tokens, pieces[-1].finish) == (16, "length")
    assert {piece.state for piece in pieces} == {"speculate"}
    assert not engine.aborted, "it had ended by itself"


async def test_what_workers_tell_of_a_step_goes_with_its_pieces() -> None:
    async with served(FakeEngine(tells=True)) as service:
        pieces = await taken(service.submit(request()))
    assert tokens_of(pieces) == plain(12)
    told = [piece for piece in pieces[1:] if piece.plain_s]
    assert len(told) >= len(pieces) - 2, "most came in time"
    assert {(piece.verify_s, piece.plain_s, piece.wait_s, piece.state) for piece in told} == {
        (0.03, 0.02, 0.01, "shadow")}
    assert [piece.drafted for piece in told if len(piece.tokens) > 1] == [4, 4]
    assert sum(piece.drafted for piece in pieces) == 8, "vLLM's own count"


@pytest.mark.parametrize(("looked_up", "outcome"), [(False, "used"), (True, "prompt_lookup")])
async def test_rounds_are_counted_by_who_drafted(looked_up: bool, outcome: str) -> None:
    metrics = TargetMetrics("function")
    async with served(FakeEngine(tells=True, looked_up=looked_up), metrics=metrics) as service:
        await taken(service.submit(request()))
    page = metrics.registry.page("")[1].decode()
    for name in ("used", "prompt_lookup"):
        assert f'outcome="{name}",service="target"}} {2.0 * (name == outcome)}' in page


async def test_what_a_step_made_behind_an_answers_end_is_not_counted_as_emitted() -> None:
    """vLLM counts drafts that it accepted, and drops those behind a token that ends the answer."""
    metrics, whole = TargetMetrics("function"), plain(12)
    end = next(i for i in range(2, 12) if whole[i] not in whole[:i])
    async with served(FakeEngine(steps=(1, 5)), metrics=metrics) as service:
        pieces = await taken(service.submit(request(stop_token_ids=(whole[end],))))
    page = metrics.registry.page("")[1].decode()
    of = '{model="function",service="target"}'
    emitted = [float(found) for name in ("accepted", "bonus")
               for found in re.findall(rf"slipstream_{name}_tokens_total{re.escape(of)} (.*)", page)]
    assert len(pieces) == 2 and emitted == [end - 1, 2]


@dataclass
class Noted:
    """Spans that remember what happened; each is continued as ``parent``."""

    parent: str = f"00-{'ab' * 16}-{'cd' * 8}-01"
    begun: list[tuple[str, str]] = field(default_factory=list)
    rounds: list[dict[str, Value]] = field(default_factory=list)
    ended: list[dict[str, Value]] = field(default_factory=list)

    def begin(self, name: str, parent: str = "", **values: Value) -> Noted:
        self.begun.append((name, parent))
        return self

    def event(self, name: str, **values: Value) -> None:
        self.rounds.append(values)

    def end(self, **values: Value) -> None:
        self.ended.append(values)


async def test_a_trace_goes_through_vllm_to_its_workers_and_rounds_are_told_in_its_span() -> None:
    engine, spans = FakeEngine(tells=True), Noted()
    async with served(engine, spans=spans) as service:
        await taken(service.submit(replace(request(), trace="from-outside")))
    assert spans.begun == [("target.answer", "from-outside")] and spans.ended == [{"tokens": 12, "failed": 0}]
    assert engine.asked[0]["extra_args"] == {HEADER: spans.parent}
    assert {(told["drafted"], told["accepted"]) for told in spans.rounds} >= {(4, 2), (4, 1), (0, 0)}
    async with served(engine, spans=spans) as service:
        with pytest.raises(InvalidRequest):
            service.submit(request(temperature=3.0))
    assert len(spans.begun) == len(spans.ended) == 2, "what is refused has no span that stays open"
    assert spans.ended[1]["failed"] == 1
    async with served(engine) as service:
        await taken(service.submit(request()))
    assert "extra_args" not in engine.asked[1], "nobody follows"


def test_a_request_is_barred_in_mid_answer_and_allowed_again() -> None:
    runner, chains = Runner(["a", "b"], 400), Chains(OPTIONS.section(4), TargetMetrics("function"))
    worker = Drafted()
    worker.model_runner = SimpleNamespace(drafter=RemoteDrafter.__new__(RemoteDrafter))
    worker.model_runner.drafter.chains = chains
    worker.slipstream_allow("a", False)  # before it is known
    worker.slipstream_allow("b", False)
    with following(chains):
        assert play(runner, chains, 20) == 0
        worker.slipstream_allow("b", True)
        assert play(runner, chains, 30) > 0, "the policy did not try again"
        worker.slipstream_allow("b", False)
        assert play(runner, chains, 10) == 0
    assert chosen_all(runner)
    worker.model_runner = SimpleNamespace(drafter=None)
    assert worker.slipstream_drafts() is None
    worker.slipstream_allow("a", True)  # nobody is here to hear of it


def test_an_engine_with_nothing_to_do_hears_of_its_drafts_when_it_is_asked() -> None:
    """It makes no step, and a draft that comes and goes would fill its inbox for days."""
    events, metrics = SimpleQueue[Callable[[], None] | None](), TargetMetrics("function")
    drafter = RemoteDrafter.__new__(RemoteDrafter)
    drafter.chains = Chains(OPTIONS.section(4), metrics, inbox=Inbox(events=events))
    drafter.metrics, drafter.connects, drafter._links = metrics, True, SimpleNamespace(expected=1, statuses=list)
    worker, link = Drafted(), Heard()
    worker.model_runner = SimpleNamespace(drafter=drafter)

    def lost() -> float:
        told = worker.slipstream_drafts()
        assert told is not None and events.empty()
        return sum(value for _, samples in told[2] for name, labels, value in samples
                   if name == "slipstream_drafter_lost_total" and labels["reason"] == "closed")

    for count in range(3):
        drafter.chains.following.link_up(link, SILENT)
        assert lost() == count
        drafter.chains.following.link_down(link, "closed")
        assert lost() == count + 1


def chosen_all(runner: Runner) -> bool:
    """Whether each answer is the engine's own."""
    return all(text[len(PROMPT) :] == plain(len(text) - len(PROMPT)) for text in runner.texts.values())


def test_workers_tell_of_each_step_and_need_nobody_who_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert step_reporter() is None
    path = tmp_path / "rounds"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        ear.bind(str(path))
        ear.setblocking(False)
        runner = Runner(["a", "b"], 400)
        monkeypatch.setenv(SOCKET, str(path))  # by the target that has it
        chains = Chains(OPTIONS.section(4), TargetMetrics("function"), on_step=step_reporter())
        with following(chains):
            accepted = play(runner, chains, 10)  # the system keeps ten until somebody reads
            steps = list[StepReport]()
            with suppress(BlockingIOError):
                while (step := decode(ear.recv(1 << 16))) is not None:
                    steps.append(step)
            path.unlink()
            assert play(runner, chains, 5) >= 0, "nobody listens any more"
    told = [one for step in steps for one in step.requests if one.request == "a"]
    assert len(steps) == 9, "all but the one that began them"
    assert accepted and sum(one.drafted for step in steps for one in step.requests) >= accepted
    assert [one.length for one in told] == sorted({one.length for one in told})
    assert {one.state for one in told} == {"speculate"} and all(step.plain_s > 0.0 for step in steps)


@pytest.mark.parametrize("data", [b"", b"\xff", b"3", b"[]", b"[1, 2, [3]]", b"[-1, 2, []]", b"[1e999, 2, {}]",
                                  b"[" * 100_000,
                                  b'[1, 2, [["r", 4, 1, 0.1, "angry", false]]]',
                                  b'[1, 2, [["r", 4, -1, 0.1, "plain", false]]]'])
async def test_what_is_no_step_is_nothing(data: bytes) -> None:
    assert decode(data) is None
    engine = FakeEngine()
    async with served(engine) as service:
        assert engine.rounds is not None
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
            stranger.sendto(data, str(engine.rounds.path))
        assert tokens_of(await taken(service.submit(request()))) == plain(12)


async def test_what_is_asked_reaches_vllm_in_its_words() -> None:
    engine = FakeEngine()
    sampling = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "presence_penalty": 0.5, "frequency_penalty": -0.5,
                "repetition_penalty": 1.1, "min_tokens": 3, "stop_token_ids": (2, 0), "seed": 2**64 - 1}
    async with served(engine) as service:
        await taken(service.submit(request(**sampling)))
        await taken(service.submit(replace(request(min_p=0.1), top_logprobs=2, namespace="0a1b")))
    first, greedy = engine.asked
    assert engine.salts == [None, "0a1b"], "vLLM's prefix cache keeps them apart"
    given = {**sampling, "seed": 2**63 - 1, "stop_token_ids": [2, 0], "ignore_eos": True, "max_tokens": 12,
             "logprobs": None, "logit_bias": None, "min_p": 0.0}
    assert {name: first[name] for name in given} == given
    assert first["prompt"] == list(PROMPT)
    assert (greedy["seed"], greedy["min_p"], greedy["logprobs"]) == (None, 0.0, 2)


@pytest.mark.parametrize(("asked", "field"), [
    ({"temperature": 0.7, "min_p": 0.1}, "min_p"), ({"logit_bias": ((3, 1.0),)}, "logit_bias"),
])
async def test_what_vllm_cannot_do_while_drafts_are_asked_is_refused_by_field(asked: dict[str, Any],
                                                                              field: str) -> None:
    async with served(FakeEngine()) as service:
        with pytest.raises(InvalidRequest) as refused:
            service.submit(request(**asked))
        assert refused.value.field == field
        assert (await service.info()).sessions_running == 0
    engine = FakeEngine()
    async with served(engine, drafted=False) as service:
        pieces = await taken(service.submit(request(**asked)))
    assert pieces[-1].finish == "length" and {piece.state for piece in pieces} == {"plain"}


async def test_what_vllm_refuses_is_refused_by_its_field() -> None:
    async with served(FakeEngine()) as service:
        with pytest.raises(InvalidRequest) as refused:
            await taken(service.submit(request(top_k=13, temperature=1.0)))
        assert refused.value.field == "top_k"
        with pytest.raises(InvalidRequest, match="max_tokens"):
            service.submit(request(max_tokens=1000))
        with pytest.raises(InvalidRequest, match="temperature must be"):
            service.submit(request(temperature=3.0))
        assert (await service.info()).sessions_running == 0


async def test_an_answer_is_bound_to_a_grammar_that_was_tried() -> None:
    engine = FakeEngine()
    bound = replace(request(stop_token_ids=(2,)), grammar=Grammar("regex", "[a-z]+"))
    async with served(engine) as service:
        assert "grammar" in (await service.info()).takes
        await taken(service.submit(bound))
        assert (engine.asked[0]["structured_outputs"], engine.asked[0]["ignore_eos"]) == ({"regex": "[a-z]+"}, False)
        with pytest.raises(InvalidRequest, match="unclosed group"):
            await taken(service.submit(replace(bound, grammar=Grammar("regex", "("))))
        with pytest.raises(InvalidRequest, match="stop_token_ids"):
            service.submit(replace(bound, sampling=Sampling()))
        with pytest.raises(InvalidRequest, match="answered"):
            service.submit(bound.after((7,)))
        with pytest.raises(InvalidRequest) as refused:
            await taken(service.submit(replace(bound, sampling=Sampling(top_k=13, stop_token_ids=(2,)))))
        assert refused.value.field == "top_k"
        assert len(engine.asked) == 1 and (await service.info()).sessions_running == 0
    async with served(engine, tries=False) as service:
        assert "grammar" not in (await service.info()).takes
        with pytest.raises(InvalidRequest, match="grammar"):
            service.submit(bound)


async def test_log_probabilities_are_those_of_the_best_and_of_the_chosen() -> None:
    engine = FakeEngine()
    async with served(engine) as service:
        pieces = await taken(service.submit(replace(request(4), top_logprobs=1)))
        alone = await taken(service.submit(replace(request(4), top_logprobs=0)))
        many = await taken(service.submit(replace(request(4), top_logprobs=5)))
    assert [len(piece.logprobs) for piece in pieces] == [len(piece.tokens) for piece in pieces]
    assert pieces[1].logprobs[0] == TokenLogprob(-1.5, ((7, -0.5),))
    assert alone[0].logprobs == (TokenLogprob(-1.5),)
    assert [token for token, _ in many[0].logprobs[0].top[1:]] == [many[0].tokens[0], 8], "nothing forbidden"


@pytest.mark.parametrize("top", [0, 1, 2, 3])
async def test_scores_of_a_prompt_come_first_in_parts(top: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_words, "ENTRIES", 8)
    engine = FakeEngine()
    async with served(engine) as service:
        pieces = await taken(service.submit(replace(request(), prompt_logprobs=top)))
        alone = await taken(service.submit(replace(request(max_tokens=0), prompt_logprobs=top)))
        one = await taken(service.submit(replace(request(max_tokens=0), tokens=PROMPT[:1], prompt_logprobs=top)))
    parts = [piece.prompt for piece in pieces if piece.prompt is not None]
    assert [piece.prompt is not None for piece in pieces] == [True] * len(parts) + [False] * (len(pieces) - len(parts))
    assert tokens_of(pieces) == plain(12) and (pieces[0].cached_tokens, pieces[1].cached_tokens) == (16, 0)
    own = [-1.0 - row % 2 for row in range(1, len(PROMPT))]
    assert [value for part in parts for value in part.logprobs] == own
    assert [part.start for part in parts] == list(range(1, len(PROMPT), 8 // (1 + top)))
    # An alternative that is as good as the token itself does not stand before it.
    told = [[9, 9], [1, 9], [1, 2], [1, 2]][top]
    assert [rank for part in parts for rank in part.ranks] == [told[score == -2.0] for score in own]
    assert parts[0].tops(9)[0] == [(500 + at, -1.0 - at) for at in range(top)] and parts[-1].width == top
    assert [piece.prompt for piece in alone[:-1]] == parts and engine.asked[1]["max_tokens"] == 1
    assert alone[-1] == alone[-1]._replace(tokens=(), accepted=0, drafted=0, finish="length")
    assert [(piece.tokens, piece.finish, piece.prompt) for piece in one] == [((), "length", None)]


async def test_what_an_answer_may_say_reaches_vllm_as_tokens() -> None:
    engine = FakeEngine()
    async with served(engine) as service:
        assert (await service.info()).takes == (
            "grammar", "prompt_logprobs", "allowed_token_ids", "bad_words", "no_tokens")
        await taken(service.submit(replace(request(), allowed_token_ids=(5, 6), bad_words=((7,), (5, 7)))))
        with pytest.raises(InvalidRequest, match="logprobs_mode"):
            service.submit(replace(request(), logprobs_mode="processed"))
    assert (engine.asked[0]["allowed_token_ids"], engine.asked[0]["bad_words"]) == ([5, 6], [[7], [5, 7]])


async def test_a_greedy_answer_goes_on_and_a_sampled_one_is_refused() -> None:
    engine, whole = FakeEngine(), plain(12)
    async with served(engine) as service:
        pieces = await taken(service.submit(request(min_tokens=7, stop_token_ids=(2,)).after(whole[:5])))
        assert tokens_of(pieces) == whole[5:]
        assert (engine.asked[0]["max_tokens"], engine.asked[0]["min_tokens"]) == (7, 2)
        for sampling in ({"temperature": 0.7}, {"presence_penalty": 0.5}):
            with pytest.raises(InvalidRequest) as refused:
                service.submit(request(**sampling).after(whole[:5]))
            assert refused.value.field == "answered"
        assert (await service.info()).without == ("keyed_sampling",)
    async with served(engine, keyed=True) as service:
        assert tokens_of(await taken(service.submit(request(temperature=0.7).after(whole[:5])))) == whole[5:]
        assert (await service.info()).without == ()


async def test_stop_tokens_end_an_answer_and_are_its_last() -> None:
    whole = plain(12)
    end = whole.index(next(token for token in whole[4:] if token not in whole[:4]))
    async with served(FakeEngine()) as service:
        pieces = await taken(service.submit(request(stop_token_ids=(whole[end],))))
    assert tokens_of(pieces) == whole[: end + 1] and pieces[-1].finish == "stop"


async def test_an_answer_that_vllm_ends_with_an_error_is_not_whole() -> None:
    async with served(FakeEngine(last="error")) as service:
        with pytest.raises(Unavailable, match="vLLM ended the answer: error"):
            await taken(service.submit(request()))


async def test_an_answer_that_is_left_is_aborted() -> None:
    engine = FakeEngine(hold=True)
    async with served(engine) as service:
        answer = service.submit(request())
        pieces = aiter(answer)
        await anext(pieces)
        await pieces.aclose()  # type: ignore[attr-defined]
        assert engine.aborted == ["r-1-0a1b2c3d"]
        await answer.aclose()
        assert len(engine.aborted) == 1 and (await service.info()).sessions_running == 0
        never_read = service.submit(request())
        await never_read.aclose()
        assert (await service.info()).sessions_running == 0


async def test_an_answer_that_is_left_while_vllm_takes_it_is_aborted() -> None:
    """It ran to its end for nobody: its name was not known yet."""
    engine = FakeEngine(hold=True)
    async with served(engine) as service:
        reading = asyncio.create_task(taken(service.submit(request())))
        while not engine.asked:
            await asyncio.sleep(0)
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading
        for _ in range(5):
            await asyncio.sleep(0)
        assert engine.aborted == ["r-1-0a1b2c3d"] and (await service.info()).sessions_running == 0


async def test_speculation_is_switched_in_mid_answer() -> None:
    engine = FakeEngine(hold=True)
    async with served(engine) as service:
        answer = service.submit(request())
        await anext(aiter(answer))
        answer.set_speculation(False)
        answer.set_speculation(False)
        answer.set_speculation(True)
        barred = service.submit(replace(request(), speculate=False))
        assert (await anext(aiter(barred))).state == "plain"
        await asyncio.sleep(0)
        assert engine.said == [(ALLOW, ("r-1-0a1b2c3d", False)), (ALLOW, ("r-1-0a1b2c3d", True))]
        switched = service.submit(request())
        switched.set_speculation(False)
        await anext(aiter(switched))
        await asyncio.sleep(0)
        assert engine.said[2:] == [(ALLOW, ("r-3-0a1b2c3d", False))]


async def test_what_it_says_of_itself() -> None:
    async with served(FakeEngine(), drafts=["127.0.0.1:8052"], max_sessions=1) as service:
        info = await service.info()
        assert info.drafts == (DraftStatus("127.0.0.1:8052", False, problem="not connected yet"),)
        await service.poll_workers()
        service.submit(request())
        service.submit(request())
        info = await service.info()
    assert info.drafts == (DraftStatus(*DRAFT),)
    assert (info.sessions_running, info.sessions_waiting) == (1, 1)


async def test_drafts_that_are_gone_are_not_told_as_they_were() -> None:
    """With discovery a draft that went is forgotten, and none may be left. Their Deployment still lists two."""
    engine, metrics = FakeEngine(expected=2), TargetMetrics("function")
    async with served(engine, metrics=metrics, drafts=["kubernetes:///draft.llm:50052"]) as service:
        await service.poll_workers()
        engine.drafts = ()
        await service.poll_workers()
        assert (await service.info()).drafts == ()
    page = metrics.registry.page("")[1].decode()
    assert 'slipstream_drafts_connected{model="function",service="target"} 0.0' in page
    assert 'slipstream_drafts_expected{model="function",service="target"} 2.0' in page


async def test_what_workers_count_of_drafts_is_on_the_targets_page() -> None:
    """Alerts and boards read it there: the workers are processes that nobody scrapes."""
    engine, metrics = FakeEngine(), TargetMetrics("function")
    engine.counts.invalid_growth()
    engine.counts.wire_bytes("in", 7)
    engine.counts.step(3, 0.1, 0.2, 0.3)
    engine.counts.verified("eagle3", 4, 2)
    engine.counts.rounds([(4, 2, "used")])  # which the target counts itself, of its answers
    async with served(engine, metrics=metrics) as service:
        await service.poll_workers()
        page = metrics.registry.page("")[1].decode().splitlines()
        engine.counts.invalid_growth()
        await service.poll_workers()
        later = metrics.registry.page("")[1].decode().splitlines()
    of = 'model="function",service="target"'
    assert f"slipstream_invalid_growths_total{{{of}}} 1.0" in page
    assert f"slipstream_invalid_growths_total{{{of}}} 2.0" in later
    assert f'slipstream_wire_bytes_total{{direction="in",{of}}} 7.0' in page
    assert 'slipstream_step_seconds_sum{model="function",phase="verify",service="target"} 0.2' in page
    assert f'slipstream_drafter_tokens_total{{drafter="eagle3",kind="accepted",{of}}} 2.0' in page
    assert f"slipstream_drafts_total{{{of}}} 0.0" in page and not [line for line in page if "of its worker" in line]


async def test_of_data_parallel_cores_all_are_told_of() -> None:
    """``data_parallel_size``: each has a KV cache of its own and talks to drafts."""
    lost = ("127.0.0.1:8053", False, "", "not reachable")
    first = FakeEngine(drafts=(DRAFT, (lost[0], True, "ngram", "")))
    engine, metrics = replace(first, others=[FakeEngine(drafts=(lost, DRAFT))]), TargetMetrics("function")
    for core, wrong in ((engine, 1), (engine.others[0], 2)):
        for _ in range(wrong):
            core.counts.invalid_growth()
        core.counts.step(3, 0.1, 0.2, 0.3)
    async with served(engine, metrics=metrics, fill=CacheUsage({0: 0.75, 1: 0.25}), max_sessions=1) as service:
        await service.poll_workers()
        for _ in range(3):
            service.submit(request())
        info = await service.info()
        service._check_engine()
    assert info.drafts == (DraftStatus(*DRAFT), DraftStatus(*lost))
    assert (info.sessions_running, info.sessions_waiting) == (2, 1)
    page, of = metrics.registry.page("")[1].decode(), 'model="function",service="target"'
    assert f"slipstream_invalid_growths_total{{{of}}} 3.0" in page
    assert 'slipstream_step_seconds_count{model="function",phase="verify",service="target"} 2.0' in page
    assert f'slipstream_drafts_connected{{{of}}} 1.0' in page
    assert f'slipstream_kv_slots{{{of},state="free"}} 512.0' in page


async def test_a_machine_that_is_told_to_end_computes_until_the_first_one_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where its node is drained: the pods of a group end together, and the first has answers to finish."""
    first_ended = threading.Event()

    class Part:
        """As Node."""

        def __init__(self, config: Config) -> None: ...

        def run(self, begun: Callable[[], object]) -> None:
            begun()
            first_ended.wait(60)
            raise Unavailable("another machine has ended")

        def end(self) -> None:
            first_ended.set()

    monkeypatch.setattr(vllm_start, "Node", Part)
    config = load(overrides=("target.engine={vllm: {nnodes: 2, node_rank: 1}}", "target.listen=127.0.0.1:0",
                             "target.metrics_listen=127.0.0.1:0"))
    stop, ready = asyncio.Event(), asyncio.Event()
    serving = asyncio.create_task(serve(config, stop, ready.set))
    await asyncio.wait({serving, asyncio.create_task(ready.wait())}, return_when=asyncio.FIRST_COMPLETED)
    stop.set()
    await asyncio.wait({serving}, timeout=2.0)
    assert not serving.done() and not first_ended.is_set()
    first_ended.set()
    await serving


async def test_answers_that_vllm_puts_back_for_others_are_counted() -> None:
    engine, metrics, fill = FakeEngine(), TargetMetrics("function"), CacheUsage({0: 0.25}, 3)
    async with served(engine, metrics=metrics, fill=fill) as service:
        watch = asyncio.create_task(service.watch())
        with still() as passes:
            await pass_by(passes, 2.0)
            before = metrics.registry.page("")[1].decode()
            fill.num_preempted = 5
            await pass_by(passes, 2.0)
        watch.cancel()
    found = 'slipstream_preemptions_total{model="function",service="target"}'
    assert 'slipstream_kv_slots{model="function",service="target",state="free"} 768.0' in before
    assert f"{found} 3.0" in before and f"{found} 5.0" in metrics.registry.page("")[1].decode()


async def test_a_drain_waits_for_running_answers_and_hands_back_the_rest() -> None:
    engine = FakeEngine(hold=True)
    async with served(engine) as service:
        answer = service.submit(request())
        pieces = aiter(answer)
        await anext(pieces)
        assert not await service.drain(0.0)
        with pytest.raises(Draining):
            await anext(pieces)
        with pytest.raises(Draining):
            service.submit(request())
        assert engine.aborted and (await service.info()).draining
        assert await service.drain(0.0), "nobody runs any more"


async def test_a_drain_keeps_what_no_other_could_go_on_with_and_takes_back_what_none_has() -> None:
    engine = FakeEngine(hold=True)
    async with served(engine) as service:
        sampled = service.submit(request(temperature=1.0))
        await anext(aiter(sampled))
        draining = asyncio.create_task(service.drain(0.0))
        await asyncio.sleep(0)
        begun = service.submit(request().after((7,)))
        first = await anext(aiter(begun))
        assert len(first.tokens) == 1 and not draining.done()
        await begun.aclose()
        await sampled.aclose()
        assert not await draining


async def test_a_drain_keeps_what_is_begun_though_its_reader_is_among_the_scores_of_its_prompt() -> None:
    async with served(FakeEngine()) as service:
        pieces = aiter(service.submit(replace(request(temperature=1.0), prompt_logprobs=0)))
        assert (await anext(pieces)).prompt is not None
        draining = asyncio.create_task(service.drain(0.0))
        await asyncio.sleep(0)
        rest = [piece async for piece in pieces]
        assert len(tokens_of(rest)) == 12 and rest[-1].finish == "length"
        draining.cancel()


async def test_too_many_requests_are_refused() -> None:
    async with served(FakeEngine(hold=True), max_sessions=1) as service:
        for _ in range(MAX_WAITING + 2):
            service.submit(request())
        with pytest.raises(CapacityError):
            service.submit(request())


async def test_an_engine_that_ends_is_told_to_answers_and_to_whoever_serves() -> None:
    engine = FakeEngine(hold=True)
    async with served(engine) as service:
        pieces = aiter(service.submit(request()))
        await anext(pieces)
        engine.errored = True
        engine.collected[0].put(RuntimeError("EngineDeadError"))
        with pytest.raises(Unavailable, match="restarted"):
            await anext(pieces)
        with pytest.raises(Unavailable):
            service.submit(request())
        with pytest.raises(Unavailable, match="restarted"):
            await service.watch()


async def test_an_engine_that_ends_while_it_is_asked_is_seen() -> None:
    engine = FakeEngine(stuck=True)
    async with served(engine) as service:
        asyncio.get_running_loop().call_later(5.0, setattr, engine, "errored", True)
        with pytest.raises(Unavailable, match="ended"):
            await hurried(service.watch())
    assert [method for method, _ in engine.said] == [DRAFTS]


@pytest.mark.parametrize(("drafted", "question"), [(True, DRAFTS), (False, HEALTH)])
async def test_an_engine_that_is_stuck_with_nothing_to_do_ends_the_service(drafted: bool, question: str) -> None:
    """As vLLM's, which waits for ever for a machine that is gone."""
    engine = FakeEngine()
    async with served(engine, drafted) as service:
        watch = asyncio.create_task(service.watch())
        with still() as passes:
            await pass_by(passes, 3.0)
            assert {asked for asked, _ in engine.said} == {question} and len(engine.said) > 2, "once a second"
            engine.stuck = True
            await pass_by(passes, 55.0)
            assert not watch.done()
            answer = asyncio.create_task(taken(service.submit(request())))
            await pass_by(passes, 10.0)
        for ended in (watch, answer):
            with pytest.raises(Unavailable, match=r"no sign for 60 s with nothing to do.* restarted, on all its mach"):
                await ended
        with pytest.raises(Unavailable, match="no sign"):
            service.submit(request())


async def test_an_engine_whose_step_does_not_end_has_the_time_of_two() -> None:
    """A first step may compile, and a step may wait for another."""
    engine = FakeEngine(hold=True)
    async with served(engine) as service:
        watch = asyncio.create_task(service.watch())
        with still() as passes:
            await pass_by(passes, 3.0)
            answer = aiter(service.submit(request()))
            await anext(answer)
            engine.stuck = True
            await pass_by(passes, 600.0)
            assert not watch.done() and not service.vitals.ready
            await pass_by(passes, 15.0)
        with pytest.raises(Unavailable, match=r"no sign for 600 s while answers ran.* raise VLLM_EXECUTE_MODEL_TIME"):
            await anext(answer)
        with pytest.raises(Unavailable):
            await watch


async def test_an_aborted_answers_step_may_take_its_time() -> None:
    engine = FakeEngine(hold=True)
    async with served(engine) as service:
        watch = asyncio.create_task(service.watch())
        with still() as passes:
            await pass_by(passes, 3.0)
            answer = service.submit(request())
            await anext(aiter(answer))
            engine.stuck = True
            await answer.aclose()
            await pass_by(passes, 200.0)
            assert not watch.done() and not service.vitals.ready
            engine.stuck = False
            await pass_by(passes, 3.0)
            assert service.vitals.ready, "it went on"
        watch.cancel()


async def test_it_is_served_over_the_wire_like_any_target() -> None:
    async with served(FakeEngine()) as service:
        server = GrpcServer("127.0.0.1:0", Config().wire, [TargetServicer(service)])
        client = TargetClient(f"127.0.0.1:{await server.start()}")
        info = await client.info()
        pieces = await taken(client.submit(request()))
        with pytest.raises(InvalidRequest, match="logit_bias"):
            await taken(client.submit(request(logit_bias=((3, 1.0),))))
        await client.aclose()
        await server.drain(0.0)
    assert info == await service.info()
    assert tokens_of(pieces) == plain(12) and sum(piece.accepted for piece in pieces) == 3


def settings(*overrides: str) -> Config:
    return load(overrides=("target.engine=vllm", *overrides))


def test_settings_become_vllms_arguments() -> None:
    given = arguments(settings("target.max_sessions=8", "target.policy.max_nodes=4", "target.max_context=1024",
                               "model.tensor_parallel=2", "target.engine={vllm: {gpu_memory_utilization: 0.8, "
                               "additional_config: {slipstream: {layers: [2]}, other: 1}}}"),
                      Path("/models/m"), "m", ARGUMENTS)
    assert given == {
        "model": "/models/m", "served_model_name": "m", "dtype": "bfloat16", "max_num_seqs": 8, "max_model_len": 1024,
        "tensor_parallel_size": 2, "gpu_memory_utilization": 0.8,
        "structured_outputs_config": {"backend": "guidance"}, "per_request_spec_decode_metrics": "detailed",
        "worker_extension_cls": "slipstream_vllm.worker.Drafted",
        "speculative_config": {"method": "custom_class", "model": "slipstream_vllm.RemoteDrafter",
                               "num_speculative_tokens": 4},
        "additional_config": {"slipstream": {"drafts": ["127.0.0.1:8052"], "deadline_s": 0.25, "prompt_lookup": True,
                                             "always": False, "layers": [2], "kubeconfig": "", "tls": PLAIN},
                              "other": 1},
    }
    secured = settings("log.spans=http://collector:4317", "wire.tls.folder=a", "wire.tls.allowed_names=[router]")
    followed = Options.of(arguments(secured, Path("/m"), "m", ARGUMENTS)["additional_config"]["slipstream"])
    assert followed.tls == secured.wire.tls, "what we write, a worker reads"
    for plainly in ("target.drafts=[]", "target.policy.max_nodes=0"):
        assert "speculative_config" not in arguments(settings(plainly), Path("/m"), "m", ARGUMENTS)


@pytest.mark.parametrize(("overrides", "words"), [
    (("model.engine=hf",), "model.engine: hf means nothing"), (("model.kernels=native",), "model.kernels"),
    (("target.slots=4096",), "gpu_memory_utilization"), (("target.accept_threshold_acc=0.9",), "accept_threshold_acc"),
    (("model.quantize=int8",), "model.quantize"),
    (("target.engine={vllm: {gpu_memory_utilisation: 0.8}}",), "did you mean gpu_memory_utilization"),
    (("target.engine={vllm: {model: x}}",), "model.path says it"),
    (("target.engine={vllm: {structured_outputs_config: x}}",), "structured_outputs_config: must be a table"),
    (("target.engine={vllm: {additional_config: '{}'}}",), "additional_config: must be a table"),  # as vLLM's flag is
    (("target.engine={vllm: {additional_config: {slipstream: [2]}}}",), "additional_config: must be a table"),
    (("target.engine={vllm: {additional_config: {slipstream: {layer: [2]}}}}",),
     r"target\.engine\.vllm\.additional_config\.slipstream\.layer: not known; use one of .*layers"),
    (("target.engine={vllm: {additional_config: {slipstream: {features_gb: many}}}}",), "slipstream.features_gb"),
    (("target.engine={vllm: {speculative_config: {}}}",), "target.drafts"),
    (("target.engine={vllm: {logprobs_mode: raw_logits}}",), "logprobs_mode: raw_logits is not"),
    (("target.engine={vllm: {pipeline_parallel_size: 2}}",), "pipeline_parallel_size: .* target.drafts to"),
    (("target.engine={vllm: {stream_interval: 8}}",), "stream_interval: tokens are told step by step"),
])
def test_settings_that_contradict_are_refused_by_name(overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        arguments(settings(*overrides), Path("/m"), "m", ARGUMENTS)


def test_layers_that_the_model_has_not_are_refused_before_vllm_begins() -> None:
    def shape(more: dict[str, Any]) -> Any:
        model = SimpleNamespace(hf_text_config=SimpleNamespace(num_hidden_layers=30))
        return SimpleNamespace(additional_config=more, model_config=model)

    for known in ({"slipstream": {}}, {"slipstream": {"layers": [2, 15, 30]}}):
        check_layers(shape(known))
    with pytest.raises(ConfigError, match=r"vllm\.additional_config\.slipstream\.layers: \[2, 40\] are not layers of a "
                                          "target with 30"):
        check_layers(shape({"slipstream": {"layers": [2, 40]}}))


@pytest.mark.parametrize("wrong", ["sglang", "{vllm: 3}", "{sglang: {}}", "3"])
def test_an_engine_that_is_not_known_is_refused(wrong: str) -> None:
    with pytest.raises(SlipstreamError, match=r"target\.engine: .* is not known; write ours, vllm"):
        load(overrides=(f"target.engine={wrong}",))


def test_a_tokenizer_that_ends_the_process_for_trials_costs_the_grammars_alone(
        tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert trials_of(tiny_folder) is not None
    monkeypatch.setattr(ChildProcess, "ask", lambda child, line: child.kill())
    assert trials_of(tiny_folder) is None
