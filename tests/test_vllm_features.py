"""What drafters are told of states in vLLM: each row is the one of its token, whatever the engine did with its KV."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from slipstream_vllm import features
from slipstream_vllm.adapter_0_32 import batch_of, final_norm, rows_of
from slipstream_vllm.features import FeatureStore, RowEncoder, Taps
from slipstream_vllm.options import Options

from slipstream.base.errors import ConfigError, PairingError
from slipstream.following.chains import Chains
from slipstream.observe.metrics import TargetMetrics
from slipstream.protocol.messages import (
    PROTOCOL_VERSION,
    Commit,
    DraftBound,
    DraftHello,
    Features,
    FeatureSpec,
    Open,
    Projection,
    TargetHello,
)
from slipstream.protocol.requests import DraftStatus
from tests.test_following import Heard, chosen

LAYERS, NUM_LAYERS, HIDDEN, BLOCK = (2, 0, 3), 3, 2, 4
HELLO = TargetHello(PROTOCOL_VERSION, 0, "function", 260, "", HIDDEN, NUM_LAYERS, 4096)
OPTIONS = Options(("127.0.0.1:50052",), deadline_s=0.01, prompt_lookup=False, always=True)
PROMPT = list(b"one two three one two three")
WEIGHTS = np.arange(1, 13, dtype="<f4").reshape(2, 6)
PLAIN = FeatureSpec(LAYERS, 6, "float32")
PROJECTED = FeatureSpec(LAYERS, 2, "float32", Projection(2, 6, "float32", b"d" * 32, WEIGHTS.tobytes()))
NORMS = np.arange(1, 7, dtype="<f4")
NORMED = FeatureSpec(LAYERS, 2, "float32", Projection(2, 6, "float32", b"n" * 32, WEIGHTS.tobytes() + NORMS.tobytes(),
                                                      norm_width=HIDDEN, norm_eps=1e-5))


def test_states_are_normed_one_by_one_before_a_projection() -> None:
    states = torch.tensor([[3.0, 4.0, 0.0, 2.0, -1.0, 1.0]])
    wanted = [part / (part.pow(2).mean() + 1e-5).sqrt() for part in states[0].split(2)]
    found = RowEncoder(NORMED, torch.device("cpu"))(states)[0]
    assert torch.allclose(found, torch.from_numpy(WEIGHTS) @ (torch.cat(wanted) * torch.from_numpy(NORMS)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", [
    FeatureSpec(LAYERS, 6, "float16"),
    FeatureSpec(LAYERS, 2, "float16", Projection(2, 6, "float16", b"h" * 32, WEIGHTS.astype("<f2").tobytes()))])
def test_a_state_that_float16_cannot_hold_is_its_largest_number(spec: FeatureSpec, dtype: torch.dtype) -> None:
    found = RowEncoder(spec, torch.device("cpu"))(torch.tensor([[1e6, 0.0, -1.0, 2.0, 0.0, 1.0]], dtype=dtype))
    assert found[0, 0] == torch.finfo(torch.float16).max and bool(found.isfinite().all())


def state(tokens: Sequence[int], layer: int) -> list[float]:
    """Of the last of ``tokens``: it depends on all of them."""
    return [float(layer), float(sum((at + 1) * token for at, token in enumerate(tokens)) % 9973)]


def row(tokens: Sequence[int], spec: FeatureSpec) -> list[float]:
    taps = np.array([state(tokens, layer) for layer in LAYERS], "<f4").reshape(-1)
    return list((WEIGHTS @ taps if spec.projection is not None else taps).tolist())


class Runner:
    """As much of vLLM's runner as is read, with paged KV: ``blocks`` of a request are as many as its text needs."""

    def __init__(self, texts: Mapping[str, Sequence[int]], blocks: Mapping[str, Sequence[int]]) -> None:
        self.max_model_len, self.device = 4096, SimpleNamespace(type="cpu")
        sampling = SimpleNamespace(max_tokens=400, temperature=0.0, extra_args=None, min_tokens=0,
                                   stop_token_ids=[], eos_token_id=None)
        self.requests = {request: SimpleNamespace(sampling_params=sampling) for request in texts}
        self.texts = {request: list(text) for request, text in texts.items()}
        self.prompts = {request: len(text) for request, text in texts.items()}
        self.computed = dict.fromkeys(texts, 0)
        self.blocks = blocks
        self.input_batch = SimpleNamespace(vocab_size=260)
        self.num_sharing = 1  # ranks that have a part of each text's KV
        self.set_groups("full")

    def set_groups(self, *kinds: str) -> None:
        """The kinds of the model's KV groups, by its layers."""
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=kind) for kind in kinds])

    def step(self, scheduled: Mapping[str, int],
             chains: Mapping[str, Sequence[int]]) -> tuple[Any, list[list[int]], list[torch.Tensor], torch.Tensor]:
        """So many tokens of each, the chains not counted. Returns the scheduler's output, what was sampled, states."""
        taps: dict[int, list[list[float]]] = {layer: [] for layer in (0, 2, 3)}
        batch, sampled, computed = self.input_batch, list[list[int]](), dict(self.computed)
        for request, count in scheduled.items():
            text, chain = self.texts[request], chains.get(request, ())
            rows = range(computed[request], computed[request] + count + len(chain))
            for layer, states in taps.items():
                states += [state([*text, *chain][: at + 1], layer) for at in rows]
            new = list[int]()
            if computed[request] + count == len(text):
                while len(new) < len(chain) and chosen([*text, *new]) == chain[len(new)]:
                    new.append(chain[len(new)])
                new.append(chosen([*text, *new]))
            text += new
            self.computed[request] = len(text) - 1 if new else computed[request] + count
            sampled.append(new)
        batch.req_ids = list(scheduled)
        batch.num_tokens_no_spec = np.array([len(self.texts[request]) for request in scheduled], np.int32)
        batch.num_prompt_tokens = np.array([self.prompts[request] for request in scheduled], np.int32)
        batch.num_computed_tokens_cpu = np.array([computed[request] for request in scheduled], np.int32)
        batch.token_ids_cpu = np.zeros((len(scheduled), 512), np.int32)
        table = np.zeros((len(scheduled), 128), np.int32)
        for place, request in enumerate(scheduled):
            batch.token_ids_cpu[place, : len(self.texts[request])] = self.texts[request]
            table[place, : len(self.blocks[request])] = self.blocks[request]
        # A window's blocks go round, and the table still names those of the tokens before it.
        tables = {"full": table, "window": np.where(table, 1 + table % 2, 0)}
        batch.block_table = [SimpleNamespace(block_size=BLOCK, dcp_world_size=self.num_sharing,
                                             get_numpy_array=lambda blocks=tables[kind]: blocks)
                             for kind in (group.kv_cache_spec for group in self.kv_cache_config.kv_cache_groups)]
        total = {request: count + len(chains.get(request, ())) for request, count in scheduled.items()}
        output = SimpleNamespace(finished_req_ids=set(), scheduled_spec_decode_tokens=dict(chains),
                                 num_scheduled_tokens=total, total_num_scheduled_tokens=sum(total.values()),
                                 num_spec_tokens_to_schedule=4)
        # Padding behind the rows, as captured graphs have it.
        given = {layer: torch.tensor([*states, [-1.0, -1.0]]) for layer, states in taps.items()}
        return output, sampled, [given[0], given[2]], given[3]


class Model(torch.nn.Module):
    """As vLLM's models are built: the final norm stands before the last states, or before the logits (``late``)."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.late, self.lm_head = late, torch.nn.Linear(HIDDEN, 5)
        self.model, self.logits_processor = torch.nn.Module(), Logits()
        self.model.norm = torch.nn.RMSNorm(HIDDEN)
        self.model.norm.weight.data.mul_(3.0)

    def compute_logits(self, states: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.logits_processor(self.lm_head, self.model.norm(states) if self.late else states)
        return logits


class Logits(torch.nn.Module):
    asked = 0

    def forward(self, head: torch.nn.Module, states: torch.Tensor) -> torch.Tensor:
        self.asked += 1
        logits: torch.Tensor = head(states)
        return logits


class Engine:
    """A runner, our half beside it, and a drafter that reads ``spec`` and listens."""

    def __init__(self, runner: Runner, spec: FeatureSpec = PLAIN, places: int = 512, late: bool = False) -> None:
        """late: the model gives its last states before what stands for its final norm."""
        self.runner, self.spec, self.late = runner, spec, late
        self.states = FeatureStore(Taps(LAYERS, NUM_LAYERS), places * 3 * HIDDEN * 4)
        self.states.allocate(HIDDEN, torch.float32, torch.device("cpu"), torch.neg if late else None)
        self._later_s = 0.0
        self.chains = Chains(OPTIONS.section(4), TargetMetrics("function"), lambda: time.monotonic() + self._later_s,
                             self.states)
        self.link = Heard()

    def comes(self) -> None:
        self._later_s += 60.0  # so that who lost its drafter looks for one again
        self.link = Heard()
        self.chains.following.link_up(self.link, hello(self.spec))

    def goes(self) -> None:
        self.chains.following.link_down(self.link, "reset")

    def step(self, scheduled: Mapping[str, int], chains: Mapping[str, Sequence[int]] | None = None) -> None:
        output, sampled, inner, last = self.runner.step(scheduled, chains or {})
        last = -last if self.late else last
        self.states.keep(lambda: batch_of(self.runner, output, sampled, "full".__eq__), inner, last,
                         self.chains.reads_features)
        self.chains.step(rows_of(self.runner, output, sampled), (), output.total_num_scheduled_tokens)

    def told(self, request: str) -> list[int]:
        """Positions of ``request`` whose rows the drafter has had since it was last opened. Each is the right one."""
        text, known = self.runner.texts[request], dict[int, list[float]]()
        session = None
        for item in self.link.items:
            if isinstance(item, Open):
                if item.tokens.tolist() == text[: len(item.tokens)]:
                    session, known = item.session, {}
            elif (features := _features_of(item)) is not None and features.session == session:
                rows = np.frombuffer(features.rows, "<f4").reshape(features.num_rows, self.spec.width)
                known |= dict(enumerate(rows.tolist(), features.start))
        assert known == {at: row(text[: at + 1], self.spec) for at in known}
        return sorted(known)


def _features_of(item: DraftBound) -> Features | None:
    return item if isinstance(item, Features) else item.features if isinstance(item, Commit) else None


def hello(spec: FeatureSpec) -> DraftHello:
    return DraftHello(PROTOCOL_VERSION, 0, "head", 260, "", spec, HIDDEN, 4096, 16, 8)


def test_the_last_states_are_those_that_logits_come_from() -> None:
    late, early, other = Model(True), Model(False), torch.nn.Linear(2, 2)
    like = (HIDDEN, torch.float32, torch.device("cpu"))
    assert final_norm(late, *like) is late.model.norm and final_norm(early, *like) is None
    assert final_norm(other, *like) is None, "it is built in another way"
    assert late.logits_processor.asked == early.logits_processor.asked == 0, "logits need all ranks"
    late.compute_logits(torch.ones(1, HIDDEN))
    assert late.logits_processor.asked == 1, "nothing is left behind"
    late.model.norm = torch.nn.Identity()
    late.logits_processor = torch.nn.Bilinear(1, 1, 1)
    late.compute_logits = None  # type: ignore[method-assign, assignment]
    assert final_norm(late, *like) is None, "whatever goes wrong, the model loads"


def wrong(token: int) -> int:
    return (token + 1) % 256


def everything(engine: Engine, request: str) -> list[int]:
    return list(range(len(engine.runner.texts[request]) - 1))


@pytest.mark.parametrize(("spec", "late"), [(PLAIN, False), (PROJECTED, False), (PROJECTED, True)])
def test_rows_of_prompts_in_chunks_and_of_draft_tokens_that_were_accepted_or_refused(spec: FeatureSpec,
                                                                                     late: bool) -> None:
    other = PROMPT[3:]
    runner = Runner({"a": PROMPT, "b": other}, {"a": range(1, 30), "b": range(30, 60)})
    engine = Engine(runner, spec, late=late)
    engine.comes()
    engine.step({"b": 10, "a": 20})
    engine.step({"a": len(PROMPT) - 20})
    right = chosen(runner.texts["a"])
    engine.step({"b": 5, "a": 1}, {"a": [right, wrong(chosen([*runner.texts["a"], right])), 7]})
    engine.step({"a": 1, "b": len(other) - 15}, {"a": [wrong(chosen(runner.texts["a"]))]})
    right = chosen(runner.texts["b"])
    engine.step({"b": 1, "a": 1}, {"b": [right]})
    for request in ("a", "b"):
        assert engine.told(request) == everything(engine, request)


def test_a_prefix_hit_a_resumed_request_and_a_draft_that_comes_back_have_all_their_rows() -> None:
    runner = Runner({"a": PROMPT, "b": [*PROMPT[:16], *b"another end"]},
                    {"a": range(1, 30), "b": [*range(1, 5), *range(30, 60)]})
    engine = Engine(runner)
    engine.step({"a": len(PROMPT)})
    engine.comes()
    engine.step({"a": 1})
    assert engine.told("a") == everything(engine, "a"), "the draft came later"
    runner.computed["b"] = 16  # of four blocks of a
    engine.step({"a": 1, "b": 11})
    assert engine.told("b") == everything(engine, "b"), "the first were in the prefix cache"
    engine.goes()
    engine.step({"a": 1, "b": 1})
    engine.comes()
    engine.step({"a": 1, "b": 1})
    runner.blocks = {**runner.blocks, "a": range(60, 90)}
    runner.computed["a"] = 0
    engine.step({"b": 1})
    engine.step({"a": 10, "b": 1})
    engine.step({"a": len(runner.texts["a"]) - 10, "b": 1})
    engine.step({"a": 1, "b": 1})
    for request in ("a", "b"):
        assert engine.told(request) == everything(engine, request)


def check_two_prompts(engine: Engine) -> None:
    """Drafts get the rows of two prompts, one of them computed in two parts."""
    engine.comes()
    engine.step({"a": 20})
    engine.step({"a": len(PROMPT) - 20, "b": len(PROMPT) - 3})
    engine.step({"a": 1, "b": 1})
    for request in ("a", "b"):
        assert engine.told(request) == everything(engine, request)


@pytest.mark.parametrize("groups", [("window", "full"), ("window", "window", "full", "window")])
def test_where_layers_see_a_window_rows_are_kept_by_the_blocks_of_those_that_see_all(groups: Sequence[str]) -> None:
    runner = Runner({"a": PROMPT, "b": PROMPT[3:]}, {"a": range(1, 30), "b": range(30, 60)})
    runner.set_groups(*groups)
    check_two_prompts(Engine(runner))


def test_where_ranks_share_the_kv_of_a_text_rows_of_all_of_it_are_kept() -> None:
    """With decode_context_parallel_size 2 the half of each block is another rank's."""
    runner = Runner({"a": PROMPT}, {"a": range(1, 5)})
    runner.num_sharing = 2
    engine = Engine(runner)
    engine.comes()
    engine.step({"a": len(PROMPT)})
    engine.step({"a": 1})
    assert engine.told("a") == everything(engine, "a")


def test_the_newest_rows_are_kept_wherever_vllm_puts_their_kv() -> None:
    """A row's place followed from its slot: of a prompt of 2,000 tokens, beside 4,000 of others, one GiB held the
    newest 200, where 43,690 of an 8B model have room."""
    runner = Runner({"a": PROMPT, "b": PROMPT[3:]}, {"a": range(1, 500, 16), "b": range(2, 500, 16)})
    check_two_prompts(Engine(runner, places=64))


def test_where_all_slots_have_room_no_row_is_ever_gone() -> None:
    """Of a prompt that all requests begin with only the first one's rows are computed. After as many others as there
    are places they were gone, with room for all of vLLM's slots."""
    begin, blocks = PROMPT[:16], {str(number): [*range(1, 5), *range(8, 16)] for number in range(9)}
    runner = Runner({number: [*begin, *b"another end"] for number in blocks}, blocks)
    engine = Engine(runner, places=64)
    engine.comes()
    for number in blocks:
        runner.computed[number] = 0 if number == "0" else len(begin)
        engine.step({number: len(runner.texts[number]) - runner.computed[number]})
        engine.step({number: 1})
        assert engine.told(number) == everything(engine, number)


def test_rows_that_are_gone_are_a_gap_at_the_beginning_and_never_somebody_elses() -> None:
    runner = Runner({"a": PROMPT, "b": PROMPT[:14]}, {"a": range(12, 20), "b": range(1, 9)})
    engine = Engine(runner, places=36)
    engine.step({"a": len(PROMPT)})
    engine.step({"a": 1, "b": 14})
    engine.comes()
    engine.step({"a": 1, "b": 1})
    assert engine.told("a") == everything(engine, "a")[8:], "44 rows were written, the first of them a's"
    assert engine.told("b") == everything(engine, "b")
    engine.step({"a": 1, "b": 1})
    assert engine.told("a") == everything(engine, "a")[8:]
    # KV of another text that was not computed here, as where another process fills it.
    runner.texts["b"][:14] = [wrong(token) for token in PROMPT[:14]]
    engine.step({"b": 1})
    assert engine.states.rows_since("b", 0)[0] == 14


def test_what_cannot_be_given_is_refused_by_name_and_nothing_raises() -> None:
    taps = Taps(LAYERS, NUM_LAYERS)
    taps.check(HELLO, hello(PLAIN))
    with pytest.raises(PairingError, match=r"features\.layers.*\[1\].*slipstream\.layers"):
        taps.check(HELLO, hello(FeatureSpec((1,), 2)))
    with pytest.raises(ConfigError, match=r"slipstream\.layers"):
        Taps((4,), NUM_LAYERS)
    engine = Engine(Runner({"a": PROMPT}, {"a": range(1, 30)}))
    engine.chains.following.link_up(engine.link, hello(FeatureSpec((1,), 2)))
    engine.step({"a": len(PROMPT)})
    assert not engine.link.items, "it was opened for a drafter whose rows nobody has"
    engine.states.keep(lambda: SimpleNamespace(), None, torch.zeros(1, HIDDEN), engine.chains.reads_features)  # type: ignore[arg-type,return-value]
    assert engine.states.newest_rows("a") is None and engine.states.rows_since("a", 0)[1] == 0
    engine.comes()
    engine.step({"a": 1})
    assert engine.told("a") == everything(engine, "a")


def test_a_projection_that_there_is_no_memory_for_costs_its_draft_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(spec: FeatureSpec, device: torch.device) -> RowEncoder:
        if spec.projection is not None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return RowEncoder(spec, device)

    monkeypatch.setattr(features, "RowEncoder", full)
    engine, large = Engine(Runner({"a": PROMPT}, {"a": range(1, 30)})), Heard()
    engine.comes()
    engine.step({"a": len(PROMPT)})
    (before,) = engine.chains.following.sessions
    engine.chains.following.link_up(large, hello(PROJECTED))
    engine.chains.following.link_up(Heard(), hello(PROJECTED))  # they are more: rows should be theirs
    engine.step({"a": 1})
    assert list(engine.chains.following.sessions) == [before], "others lost their sessions"
    assert engine.told("a") == everything(engine, "a") and not large.items
    told = engine.chains.following.pool.with_problem(DraftStatus(large.address, True))
    assert "no memory" in told.problem


def test_where_there_is_no_memory_for_a_texts_rows_they_are_a_gap_and_it_is_opened_once(
        monkeypatch: pytest.MonkeyPatch) -> None:
    def few(self: RowEncoder, states: torch.Tensor) -> torch.Tensor:
        if len(states) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return states

    monkeypatch.setattr(RowEncoder, "__call__", few)
    engine = Engine(Runner({"a": PROMPT}, {"a": range(1, 30)}))
    engine.comes()
    engine.step({"a": len(PROMPT)})
    for _ in range(3):
        engine.step({"a": 1})
    assert [type(item) for item in engine.link.items] == [Open, Commit, Commit, Commit]
    assert engine.told("a") == everything(engine, "a")[-3:]


@pytest.mark.parametrize(("given", "field"), [({"layers": "2"}, "layers"), ({"layers": ["2"]}, "layers"),
                                              ({"features_gb": 0}, "features_gb"),
                                              ({"features_gb": "1"}, "features_gb")])
def test_options_that_cannot_be_are_refused_by_name(given: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        Options.of({"drafts": ["a:1"], **given})
    assert Options.of({"drafts": ["a:1"], "layers": [2, 15, 27]}).layers == (2, 15, 27)
