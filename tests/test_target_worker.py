"""The turn of the target's worker: who hears of a step first."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from transformers import AutoConfig, AutoModelForCausalLM

from slipstream.base.config import ModelSection, PolicySection, TargetSection
from slipstream.base.errors import Draining, InvalidRequest
from slipstream.decision.beliefs import StepCosts
from slipstream.engine.device import threads
from slipstream.engine.hf import HFModel
from slipstream.engine.loading import load_model
from slipstream.engine.runner import ModelRunner
from slipstream.following import following
from slipstream.observe.metrics import TargetMetrics
from slipstream.observe.spans import Spans, Value
from slipstream.protocol.messages import (
    PROTOCOL_VERSION,
    Close,
    Commit,
    DraftBound,
    DraftHello,
    Features,
    FeatureSpec,
    Growth,
    Open,
)
from slipstream.protocol.requests import Piece, Request, Sampling
from slipstream.protocol.tree import DraftTree
from target_service.loop import TargetWorker
from target_service.sequence import Sink
from target_service.service import deliver
from tests.loop import eventually
from tests.sequences import run

HELLO = DraftHello(PROTOCOL_VERSION, 0, "silent", 0, "", None, 0, 4096, 16, 8)


@dataclass(eq=False)
class Heard:
    """A link and a client in one: what they hear, in order."""

    address: str = "heard"
    log: list[str] = field(default_factory=list)

    def send(self, items: Sequence[DraftBound]) -> None:
        self.log.extend(type(item).__name__ for item in items if isinstance(item, Commit | Close))

    def dispatch(self, pieces: list[tuple[Sink, Piece | Exception]]) -> None:
        for sink, piece in pieces:
            sink(piece)
            self.log.append(type(piece).__name__)


def test_the_drafter_hears_of_a_commit_before_the_client(tiny_folder: Path) -> None:
    heard, told = Heard(), list[Piece | Exception]()
    policy = PolicySection(always=True, deadline_max_s=1e-3)
    runner = ModelRunner(load_model(tiny_folder, ModelSection(dtype="float64")), 512)
    worker = TargetWorker(runner, TargetSection(policy=policy, slots=512),
                          StepCosts({1: 1e-3, 64: 2e-3}), TargetMetrics("tiny"), heard.dispatch)
    worker.following.link_up(heard, HELLO)
    worker.add_request(1, Request("one", (1, 2, 3), Sampling(), 3), told.append)
    for _ in range(10_000):
        worker.poll()
        if len(told) == 3:
            break
    assert [len(piece.tokens) for piece in told if isinstance(piece, Piece)] == [1, 1, 1]
    assert heard.log == ["Commit", "Piece", "Commit", "Close", "Piece", "Piece"], "nothing is drafted for a last token"


def plain_worker(folder: Path, told: list[Piece | Exception], metrics: TargetMetrics | None = None,
                 tokens: int = 3, clock: Callable[[], float] = time.monotonic, spans: Spans | None = None,
                 slots: int = 512, **settings: Any) -> TargetWorker:
    worker = TargetWorker(ModelRunner(load_model(folder, ModelSection(dtype="float64")), slots),
                          TargetSection(slots=slots, **settings), StepCosts({1: 1e-3, 64: 2e-3}),
                          metrics or TargetMetrics("tiny"), deliver, clock, spans=spans)
    worker.add_request(1, Request("one", (1, 2, 3), Sampling(), tokens), told.append)
    return worker


def test_the_engine_thread_has_the_threads_that_its_model_was_made_with(tiny_folder: Path) -> None:
    """Not those that a draft in the same process takes for itself, which is made behind it."""
    runs, inside = threading.Event(), list[int]()
    with threads(3):
        worker = plain_worker(tiny_folder, [])
    worker.post(runs.set)
    worker.start()
    assert runs.wait(30)
    with threads(1):
        worker.post(lambda: inside.append(torch.get_num_threads()))
        worker.stop()
    assert inside == [3]


def test_answers_that_begin_together_get_equal_parts_of_the_rows_that_may_be_sent(
        tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of one long prompt: the first got all of its rows, the last none, and their drafts were worse for it."""
    prompt, told, rows = tuple(range(1, 101)), list[Piece | Exception](), Counter[int]()
    runner = ModelRunner(load_model(tiny_folder, ModelSection(dtype="float64")), 2048)
    width = runner.model.config.hidden_size
    monkeypatch.setattr(following, "MAX_ROW_BYTES", 2 * len(prompt) * 4 * width)

    class Link(Heard):
        def send(self, items: Sequence[DraftBound]) -> None:
            rows.update({item.session: item.num_rows for item in items if isinstance(item, Features)})

    policy = PolicySection(always=True, deadline_max_s=1e-3)
    worker = TargetWorker(runner, TargetSection(policy=policy, slots=2048), StepCosts({1: 1e-3, 64: 2e-3}),
                          TargetMetrics("tiny"), deliver)
    worker.following.link_up(Link(), replace(HELLO, features=FeatureSpec((1,), width)))
    worker.add_request(1, Request("first", prompt, Sampling(), 1), told.append)
    while not told:
        worker.poll()
    rows.clear()
    for number in range(2, 6):
        worker.add_request(number, Request(str(number), prompt, Sampling(), 8), told.append)
    while len(told) < 9:
        worker.poll()
    assert set(rows.values()) == {len(prompt) // 2} and len(rows) == 4


@pytest.mark.parametrize("from_token", [0, 9])
def test_a_drafter_gets_each_row_once_and_none_that_was_not_kept(tiny_folder: Path, from_token: int) -> None:
    """One that comes in the middle reads on from there: of what was computed before nobody has rows."""
    told, received = list[Piece | Exception](), list[Features]()

    class Link(Heard):
        def send(self, items: Sequence[DraftBound]) -> None:
            for item in items:
                rows = item.features if isinstance(item, Commit) else item
                received.extend([rows] if isinstance(rows, Features) else [])

    policy = PolicySection(always=True, deadline_max_s=1e-3)
    worker = plain_worker(tiny_folder, told, tokens=20, policy=policy, prompt_lookup=False)
    model = worker._runner.model
    worker.following.inbox.drain()
    while worker.following.sessions[1].side.num_output < from_token:
        worker.poll()
    worker.following.link_up(Link(), replace(HELLO, features=FeatureSpec((1,), model.config.hidden_size)))
    while worker.num_open:
        worker.poll()
    worker.poll()
    first = 2 + from_token if from_token else 0
    assert [rows.start for rows in received] == [first, *range(first + received[0].num_rows, 22)][: len(received)]
    assert len(received) > 5 and received[0].num_rows == (1 if from_token else 2)
    text = [1, 2, 3, *(token for piece in told if isinstance(piece, Piece) for token in piece.tokens)]
    alone = ModelRunner(model, 64)
    alone.set_taps((1,))
    right = alone.features(run(alone, text)[1]).float().numpy()
    sent = np.concatenate([np.frombuffer(rows.rows, np.float32).reshape(rows.num_rows, -1) for rows in received])
    assert np.allclose(sent, right[first : first + len(sent)], atol=1e-5)


def test_a_cached_prompt_without_rows_is_computed_again_for_who_reads_them(tiny_folder: Path) -> None:
    received, width = list[Features](), 48

    class Link(Heard):
        def send(self, items: Sequence[DraftBound]) -> None:
            received.extend(item for item in items if isinstance(item, Features))

    worker = plain_worker(tiny_folder, [], policy=PolicySection(always=True, deadline_max_s=1e-3))
    while worker.num_open:
        worker.poll()
    worker.following.link_up(Link(), replace(HELLO, features=FeatureSpec((1,), width)))
    worker.add_request(2, Request("two", (1, 2, 3, 4, 5), Sampling(), 3), [].append)
    while worker.num_open:
        worker.poll()
    assert [(rows.start, rows.num_rows) for rows in received] == [(0, 4)]


def test_an_answer_that_is_left_alone_is_shown_as_gone(tiny_folder: Path) -> None:
    """Without a step behind it, on which the page would wait: what scales targets reads it."""
    told, metrics = list[Piece | Exception](), TargetMetrics("tiny")
    worker = plain_worker(tiny_folder, told, metrics, tokens=99)

    def shown(state: str) -> str:
        page = metrics.registry.page("")[1].decode()
        return re.findall(rf'^slipstream_(?:sessions|kv_slots){{.*state="{state}"}} (.*)$', page, re.MULTILINE)[0]

    while len(told) < 3:
        worker.poll()
    assert shown("running") == "1.0" and shown("used") != "0.0"
    worker.cancel(1)
    worker.poll()
    assert shown("running") == shown("used") == "0.0"
    assert re.search(r'^slipstream_answers_total{.*outcome="cancelled".*} 1', metrics.registry.page("")[1].decode(),
                     re.MULTILINE)


def test_what_is_asked_waits_before_the_thread_has_seen_it(tiny_folder: Path) -> None:
    worker = plain_worker(tiny_folder, [])
    assert worker.num_waiting == 1, "a drain, and the bound of those who wait, count it"
    worker.poll()
    assert (worker.num_waiting, worker.num_running) == (0, 1)


def test_no_look_misses_an_answer_that_is_not_over(tiny_folder: Path) -> None:
    """A drain looks from another thread, at any moment: between the inbox and the queue, too."""
    workers, told, open_ = list[TargetWorker](), list[Piece | Exception](), set[int]()

    def clock() -> float:
        open_.update(worker.num_waiting + worker.num_running for worker in workers)
        return time.monotonic()

    workers.append(plain_worker(tiny_folder, told, clock=clock))
    open_.clear()
    while not told:
        workers[0].poll()
    assert open_ == {1}
    while workers[0].num_open:
        workers[0].poll()
    assert workers[0].num_running == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("dies", [False, True])
def test_pieces_that_wait_for_the_next_step_are_not_lost_with_the_thread(tiny_folder: Path, dies: bool) -> None:
    """What a step gave leaves while the next one computes; without one it leaves all the same."""
    told = list[Piece | Exception]()
    worker = plain_worker(tiny_folder, told)
    while len(told) < 2 or worker.num_running:
        worker.poll()
    assert len(told) == 2, "the last piece is there and has not left"

    def fail() -> None:
        raise RuntimeError("a bug")

    if dies:
        worker.post(fail)
    worker.stop()
    worker.start()
    worker.stop()
    assert [len(piece.tokens) for piece in told if isinstance(piece, Piece)] == [1, 1, 1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_an_engine_thread_that_died(tiny_folder: Path) -> None:
    """Neither who runs, nor who waits, nor who is in the inbox behind other bugs, nor who comes later."""
    told = [list[Piece | Exception]() for _ in range(4)]
    worker = plain_worker(tiny_folder, told[0], tokens=99, max_sessions=1)

    def fail() -> None:
        raise RuntimeError("a bug")

    def ask(number: int) -> None:
        worker.add_request(1 + number, Request(str(number), (1, 2, 3), Sampling(), 3), told[number].append)

    ask(1)
    for _ in range(3):
        worker.poll()
    assert (worker.num_running, worker.num_waiting) == (1, 1)
    worker.post(fail)
    worker.post(fail)
    ask(2)
    worker.start()
    worker.stop()
    ask(3)
    assert [[str(piece) for piece in pieces if isinstance(piece, Exception)] for pieces in told] == [["a bug"]] * 4
    assert not worker.alive and (worker.num_open, worker.num_waiting) == (0, 0)


async def test_an_idle_engine_beats(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a target that nobody has asked anything for two minutes would not be ready."""
    monkeypatch.setattr("target_service.loop.BEAT_S", 0.001)
    worker, beats = plain_worker(tiny_folder, []), list[str]()

    def clock() -> float:
        beats.append(threading.current_thread().name)
        return 0.0

    worker.vitals.clock = clock
    worker.start()
    await eventually(lambda: not worker.num_open)
    beats.clear()
    await eventually(lambda: beats.count("target-worker") > 3)
    await asyncio.to_thread(worker.stop)


async def test_events_without_end_do_not_keep_an_answer_from_its_steps(tiny_folder: Path) -> None:
    told, now_s, ends = list[Piece | Exception](), [0.0], threading.Event()

    def clock() -> float:
        now_s[0] += 1e-3
        return now_s[0]

    worker = plain_worker(tiny_folder, told, clock=clock)

    def flood() -> None:
        if not ends.is_set():
            worker.post(flood)

    flood()
    worker.start()
    await eventually(lambda: len(told) == 3)
    ends.set()
    await asyncio.to_thread(worker.stop)


def test_a_drafter_hears_at_once_that_an_answer_was_left(tiny_folder: Path) -> None:
    """Also where no step comes after it: it kept the session until its lease was over."""
    heard = Heard()
    worker = plain_worker(tiny_folder, [], tokens=99)
    worker.following.link_up(heard, HELLO)
    worker.poll()
    worker.cancel(1)
    worker.poll()
    assert heard.log[-1] == "Close"


def test_drafters_follow_only_who_runs(tiny_folder: Path) -> None:
    """A draft's places are few: who is put back gives its own up."""
    followed, seen, metrics = set[int](), set[int](), TargetMetrics("tiny")

    class Link(Heard):
        def send(self, items: Sequence[DraftBound]) -> None:
            followed.update(item.session for item in items if isinstance(item, Open))
            followed.difference_update([item.session for item in items if isinstance(item, Close)])

    policy = PolicySection(always=True, deadline_max_s=1e-3)
    worker = plain_worker(tiny_folder, [], metrics, tokens=57, slots=120, policy=policy, prompt_lookup=False)
    worker.following.link_up(Link(), HELLO)
    for number in (2, 3):
        worker.add_request(number, Request(str(number), range(number, 20), Sampling(), 57), [].append)
    while worker.num_open:
        worker.poll()
        worker.following.flush()
        assert followed <= {sequence.number for sequence in worker._queues.running}
        seen |= followed
    assert seen == {1, 2, 3}
    assert not re.search(r"preemptions_total\{.*\} 0\.0", metrics.registry.page("")[1].decode())


def test_who_was_put_back_comes_before_those_behind_it(tiny_folder: Path) -> None:
    worker = plain_worker(tiny_folder, [], max_sessions=2)
    for number in (2, 3):
        worker.add_request(number, Request(str(number), (number,), Sampling(), 9), [].append)
    worker.poll()
    queues = worker._queues
    queues.put_back(2)
    queues.put_back(1)
    assert [sequence.number for sequence in queues.waiting] == [1, 2, 3]
    for number in (2, 3, 1):
        queues.admit(number)
    assert [sequence.number for sequence in queues.running] == [1, 2, 3]


def test_of_answers_that_wait_for_growth_the_first_goes_on_at_its_own_time(tiny_folder: Path) -> None:
    heard, now_s, told = Heard(), [100.0], list[Piece | Exception]()
    policy = PolicySection(always=True, deadline_max_s=1.0)
    worker = plain_worker(tiny_folder, told, tokens=9, clock=lambda: now_s[0], policy=policy)
    worker.following.link_up(heard, HELLO)
    assert worker.poll() == 0.0
    now_s[0] += 0.4
    worker.add_request(2, Request("two", (4, 5, 6), Sampling(), 9), [].append)
    assert worker.poll() == 0.0
    assert worker.poll() == pytest.approx(0.6)
    now_s[0] += 0.7
    assert worker.poll() == 0.0, "it goes on alone"
    worker.poll()
    assert [piece.wait_s for piece in told if isinstance(piece, Piece)] == [0.0, pytest.approx(1.0)]


def test_no_answer_waits_for_a_drafter_before_its_first_token(tiny_folder: Path) -> None:
    worker = plain_worker(tiny_folder, [], policy=PolicySection(always=True, deadline_max_s=1.0))
    worker.following.link_up(Heard(), HELLO)
    worker.add_request(2, Request("two", (7,), Sampling(), 9), [].append)
    worker.poll()
    assert worker.following.sessions[2].side.num_output == 1


def test_a_step_is_held_for_growth_that_is_due_but_not_a_prompt(tiny_folder: Path) -> None:
    now_s, plain = [100.0], [list[Piece | Exception]() for _ in range(2)]
    policy = PolicySection(always=True, deadline_max_s=1.0)
    worker = plain_worker(tiny_folder, [], tokens=9, clock=lambda: now_s[0], policy=policy, prompt_lookup=False)
    worker.following.link_up(Heard(), HELLO)
    worker.poll()
    now_s[0] += 1.0 - 5e-4

    def ask(number: int, prompt: Sequence[int]) -> None:
        request = Request(str(number), prompt, Sampling(), 9, speculate=False)
        worker.add_request(2 + number, request, plain[number].append)

    ask(0, (4, 5, 6))
    assert worker.poll() == 0.0 and len(worker.following.sessions[2].side.tokens) == 4
    assert worker.poll() == pytest.approx(5e-4), "one step of both ends sooner than two"
    ask(1, [7] * 300)  # two chunks
    assert [worker.poll() for _ in range(3)] == [0.0, 0.0, pytest.approx(5e-4)]


@dataclass
class Noted:
    """Spans that remember how they ended."""

    parent: str = ""
    ended: list[dict[str, Value]] = field(default_factory=list)

    def begin(self, name: str, parent: str = "", **values: Value) -> Noted:
        return self

    def event(self, name: str, **values: Value) -> None: ...

    def end(self, **values: Value) -> None:
        self.ended.append(values)


def test_a_step_that_fails_says_whose_it_was(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the log by the id that the router has, too, and in the answer's span, which said that all was well."""
    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    told, spans = list[Piece | Exception](), Noted()
    worker = plain_worker(tiny_folder, told, spans=spans)
    monkeypatch.setattr("slipstream.engine.runner.ModelRunner.logits_and_best", fail)  # not compiled
    with capture_logs() as lines:
        while not told:
            worker.poll()
    (line,) = [line for line in lines if line["event"] == "step failed"]
    assert line["answer_ids"] == ["one"]
    assert spans.ended == [{"tokens": 0, "failed": 1}]
    monkeypatch.undo()
    worker = plain_worker(tiny_folder, told, spans=spans)
    worker.poll()
    worker.hand_back()
    worker = plain_worker(tiny_folder, told, spans=spans)
    worker.poll()
    worker.cancel(1)
    worker.poll()
    assert [values["failed"] for values in spans.ended[1:]] == [0, 0], "it goes on elsewhere, or nobody wants it"


class Stuck:
    """A grammar that takes too much work to follow, after ``left`` tokens."""

    ended, left = False, 1

    def commit(self, tokens: Sequence[int]) -> int:
        self.left -= len(tokens)
        return len(tokens)

    def forced(self) -> Sequence[int]:
        return ()

    def forced_behind(self, path: Sequence[int]) -> Sequence[int]:
        return ()

    def allowed_nodes(self, tree: DraftTree) -> list[int]:
        return [0]

    def masks(self, tree: DraftTree) -> tuple[Any, frozenset[int]]:
        return None, frozenset(range(min(1, self.left)))


def test_an_answer_whose_grammar_can_be_followed_no_further_ends_by_itself(tiny_folder: Path) -> None:
    told, other = list[Piece | Exception](), list[Piece | Exception]()
    worker = plain_worker(tiny_folder, other)
    worker.add_request(2, Request("two", (4, 5, 6), Sampling(), 3), told.append, Stuck())
    for _ in range(20):
        worker.poll()
    assert [type(piece) for piece in told] == [Piece, InvalidRequest]
    assert isinstance(other[-1], Piece) and other[-1].finish == "length" and len(other) == 3
    assert not worker.num_open and worker.num_free_slots == 512


def test_an_answer_that_is_handed_back_has_all_its_pieces_before(tiny_folder: Path) -> None:
    told = list[Piece | Exception]()
    worker = plain_worker(tiny_folder, told)
    while not told:
        worker.poll()
    worker.hand_back()
    assert [type(piece) for piece in told] == [Piece, Piece, Draining]


def test_a_target_that_rests_uses_no_slot_though_its_cache_has_some(tiny_folder: Path) -> None:
    metrics, told = TargetMetrics("tiny"), list[Piece | Exception]()

    def slots() -> dict[str, str]:
        return dict(re.findall(r'kv_slots\{.*state="(\w+)"\} (\S+)', metrics.registry.page("")[1].decode()))

    worker = plain_worker(tiny_folder, told, metrics)
    assert slots() == {"used": "0.0", "cached": "0.0", "free": "512.0"}
    while not told or worker.num_running:
        worker.poll()
    assert slots() == {"used": "0.0", "cached": "5.0", "free": "507.0"}


def test_rounds_of_the_text_s_own_chain_say_nothing_of_drafts(tiny_folder: Path) -> None:
    told = list[Piece | Exception]()
    worker = plain_worker(tiny_folder, told, tokens=100)
    while not told or worker.num_running:
        worker.poll()
    pieces = [piece for piece in told if isinstance(piece, Piece)][1:]
    looked_up = [piece for piece in pieces if piece.drafted]
    assert len(looked_up) > 5 and not any(piece.plain_s for piece in looked_up)
    assert all(piece.plain_s for piece in pieces if not piece.drafted)


def test_a_bias_alone_is_heeded(tiny_folder: Path) -> None:
    told = list[Piece | Exception]()
    worker = plain_worker(tiny_folder, [])
    worker.add_request(2, Request("two", (1, 2, 3), Sampling(logit_bias=((65, 100.0),)), 3), told.append)
    while worker.num_open or worker.poll() is not None:
        worker.poll()
    assert [piece.tokens for piece in told if isinstance(piece, Piece)] == [(65,)] * 3


class Deep(Heard):
    """A draft that answers with one deep chain each time."""

    worker: TargetWorker | None = None
    _ids = 1

    def send(self, items: Sequence[DraftBound]) -> None:
        assert self.worker is not None
        for item in items:
            if not isinstance(item, Open | Commit):
                continue
            base = len(item.tokens) + (item.base if isinstance(item, Commit) else 0)
            ids = np.arange(self._ids, self._ids + 12, dtype=np.int32)
            parents = np.array([-base, *ids[:-1]], np.int32)
            self._ids += 12
            growth = Growth(item.session, base, ids, parents, np.full(12, 7, np.int32), np.zeros(12, np.float32))
            self.worker.following.received(self, [growth], [])


class Forcing(Stuck):
    """A grammar that allows all, and says of each path that much is forced behind it."""

    def forced_behind(self, path: Sequence[int]) -> Sequence[int]:
        return (7,) * 12

    def allowed_nodes(self, tree: DraftTree) -> list[int]:
        return [*range(len(tree))]

    def masks(self, tree: DraftTree) -> tuple[Any, frozenset[int]]:
        return None, frozenset(range(len(tree)))


@pytest.mark.parametrize("rule", [None, Forcing()], ids=["free", "bound"])
def test_no_draft_reaches_beyond_the_positions_that_a_model_has(rule: Forcing | None) -> None:
    """One that learned its positions has a table of them: a row behind its end ended the step for all."""
    auto: Any = AutoModelForCausalLM
    small = AutoConfig.for_model("gpt2", vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    runner, told, link = ModelRunner(HFModel(auto.from_config(small).eval()), 512), list[Piece | Exception](), Deep()
    worker = TargetWorker(runner, TargetSection(policy=PolicySection(always=True, deadline_max_s=1.0), slots=512),
                          StepCosts({1: 1e-3, 64: 2e-3}), TargetMetrics("tiny"), link.dispatch)
    link.worker = worker
    worker.following.link_up(link, HELLO)
    worker.add_request(1, Request("one", tuple(range(54)), Sampling(), 10), told.append, rule)
    while worker.poll() is not None:
        pass
    assert [piece for piece in told if isinstance(piece, Exception)] == []
    assert sum(len(piece.tokens) for piece in told if isinstance(piece, Piece)) == 10
    assert any(piece.drafted for piece in told if isinstance(piece, Piece))


def test_trees_become_smaller_when_memory_runs_out_and_then_there_are_none(tiny_folder: Path) -> None:
    told, link = list[Piece | Exception](), Deep()
    worker = plain_worker(tiny_folder, told, tokens=200, policy=PolicySection(always=True, deadline_max_s=1.0))
    link.worker = worker
    worker.following.link_up(link, HELLO)
    most = list[int]()
    for _ in range(3):
        told.clear()
        while len(told) < 5:
            worker.poll()
        most.append(max(piece.drafted for piece in told[2:] if isinstance(piece, Piece)))
        assert worker.shedding.step_failed(500)
    assert most == [12, 6, 0]
