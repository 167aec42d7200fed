"""Answers that begin alike, asked at once: their prompt is computed once, it is kept once, and no answer differs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import ArrayLike, NDArray

from slipstream.base.config import ModelSection, PolicySection, TargetSection
from slipstream.base.errors import Unavailable
from slipstream.decision.beliefs import StepCosts
from slipstream.engine import kv
from slipstream.engine.batch import BatchBuilder
from slipstream.engine.device import device_works
from slipstream.engine.kv import RadixCache
from slipstream.engine.loading import load_model
from slipstream.engine.runner import ModelRunner
from slipstream.observe.metrics import TargetMetrics
from slipstream.protocol.messages import PROTOCOL_VERSION, Commit, DraftBound, DraftHello, Growth, Open
from slipstream.protocol.requests import Piece, Request, Sampling
from target_service.loop import TargetWorker
from target_service.sequence import EVICTION_DIVISOR, KV, PREFIX_BLOCK
from target_service.service import deliver
from target_service.step import Limits

LONG = tuple(range(1, 201))
Told = list[Piece | Exception]


def target(folder: Path, metrics: TargetMetrics | None = None, slots: int = 2048,
           limits: Limits | None = None, prefix_cache: bool = True, always: bool = False) -> TargetWorker:
    runner = ModelRunner(load_model(folder, ModelSection(dtype="float64")), slots)
    config = TargetSection(slots=slots, policy=PolicySection(always=always))
    return TargetWorker(runner, config, StepCosts({1: 1e-3, 64: 2e-3}),
                        metrics or TargetMetrics("tiny"), deliver, limits=limits, prefix_cache=prefix_cache)


def alone(folder: Path, prompt: tuple[int, ...], tokens: int) -> list[int]:
    """The plain answer, by a worker of its own."""
    told, worker = Told(), target(folder)
    worker.add_request(2, Request("two", prompt, Sampling(), tokens), told.append)
    finished(worker)
    return said(told)


def finished(worker: TargetWorker, turns: int = 3000) -> None:
    """Turn until nobody is left, and prove that no slot is lost or owned twice, turn by turn."""
    for _ in range(turns):
        worker.poll()
        proved = worker.check_slots()
        worker.following.inbox.drain()
        proved.result(0)
        if not worker.num_running and not worker.num_waiting:
            worker.poll()
            assert not worker._runner.table.num_used_rows, "rows are kept for answers that ended"
            return
    raise AssertionError("somebody waits for ever")


def said(told: Told) -> list[int]:
    assert not [error for error in told if isinstance(error, Exception)]
    return [token for piece in told if isinstance(piece, Piece) for token in piece.tokens]


def test_answers_that_begin_alike_at_once_have_one_prompt_computed(tiny_folder: Path) -> None:
    """Also where their prompts part in the middle, and whoever begins otherwise is not held up."""
    worker = target(tiny_folder)
    prompts = {2: LONG, 3: LONG, 4: (*LONG[:150], 7, 7), 5: (9, 9, 9), 6: LONG}
    told: dict[int, Told] = {number: [] for number in prompts}
    for number, prompt in prompts.items():
        worker.add_request(number, Request(str(number), prompt, Sampling(), 20), told[number].append)
    worker.poll()
    assert worker.num_running == 2 and worker.num_waiting == 3, "of those who begin alike one is computed"
    finished(worker)
    cached = {number: sum(piece.cached_tokens for piece in pieces if isinstance(piece, Piece))
              for number, pieces in told.items()}
    assert cached == {2: 0, 3: 199, 4: 150, 5: 0, 6: 199}
    for number, prompt in prompts.items():
        assert said(told[number]) == alone(tiny_folder, prompt, 20), number


@pytest.mark.parametrize("apart", [[{"namespace": "a"}, {"namespace": "b"}], [{"prompt_logprobs": 1}] * 2], ids=str)
def test_who_will_not_share_a_prompt_waits_for_nobody_who_computes_it(tiny_folder: Path,
                                                                      apart: list[dict[str, Any]]) -> None:
    """One tenant's long prompts would hold up another's, and tell when they are computed."""
    worker = target(tiny_folder)
    for number, settings in enumerate(apart, start=2):
        worker.add_request(number, Request(str(number), LONG, Sampling(), 5, **settings), Told().append)
    worker.poll()
    assert worker.num_running == 2


def test_a_prompt_that_is_computed_in_chunks_is_shared_chunk_by_chunk(tiny_folder: Path) -> None:
    told: tuple[Told, Told] = ([], [])
    worker = target(tiny_folder, limits=Limits(8, 64, 32))
    for number, pieces in enumerate(told, start=2):
        worker.add_request(number, Request(str(number), (*LONG[: 90 * number], number), Sampling(), 5), pieces.append)
    finished(worker)
    (first, second) = (next(piece.cached_tokens for piece in pieces if isinstance(piece, Piece)) for pieces in told)
    assert first == 0 and 180 - 2 * PREFIX_BLOCK <= second <= 180, "it waited for what the first computes, no longer"
    assert [said(pieces) for pieces in told] == [alone(tiny_folder, (*LONG[: 90 * number], number), 5)
                                                 for number in (2, 3)]


def test_what_is_known_of_a_prompt_is_looked_up_once_for_all_its_samples(
        tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked, known = list[str](), RadixCache.peek

    def watched(cache: RadixCache, tokens: ArrayLike, namespace: str, usable: None) -> tuple[int, int]:
        looked.append(namespace)
        return known(cache, tokens, namespace, usable)

    monkeypatch.setattr(RadixCache, "peek", watched)
    worker, told = target(tiny_folder, limits=Limits(8, 16, 8)), [Told() for _ in range(6)]
    for number, pieces in enumerate(told):
        worker.add_request(number, Request(str(number), LONG, Sampling(), 4), pieces.append)
    worker.poll()  # the first is admitted
    looked.clear()
    for _ in range(10):
        worker.poll()
    assert worker.num_waiting == 5 and len(looked) == 10
    finished(worker)
    assert all(said(pieces) == alone(tiny_folder, LONG, 4) for pieces in told)


def test_prompts_that_agree_in_the_middle_alone_do_not_wait_for_each_other(tiny_folder: Path) -> None:
    known, other, middle = LONG[:PREFIX_BLOCK], LONG[100 : 100 + PREFIX_BLOCK], (7,) * PREFIX_BLOCK
    worker = target(tiny_folder, limits=Limits(8, 2 * PREFIX_BLOCK, PREFIX_BLOCK))
    worker.add_request(1, Request("1", (*known, 1), Sampling(), 1), Told().append)
    finished(worker)
    worker.add_request(2, Request("2", (*other, *middle, 1), Sampling(), 4), Told().append)
    worker.poll()
    worker.add_request(3, Request("3", (*known, *middle, 1), Sampling(), 4), Told().append)
    worker.poll()
    assert worker.num_running == 2
    finished(worker)


class Watched(list[int]):
    """Tokens that count how many of them are copied."""

    copied = 0

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            self.copied += len(range(*at.indices(len(self))))
        return super().__getitem__(at)


def test_a_prompt_that_is_computed_in_chunks_is_not_copied_whole_for_each(tiny_folder: Path) -> None:
    told, worker = Told(), target(tiny_folder, limits=Limits(8, 16, 8))
    worker.add_request(2, Request("two", LONG, Sampling(), 4), told.append)
    worker.following.inbox.drain()
    side = worker.following.sessions[2].side
    side.tokens = tokens = Watched(side.tokens)
    finished(worker)
    assert said(told) == alone(tiny_folder, LONG, 4)
    assert tokens.copied < 4 * len(LONG)


def test_answers_that_share_their_prompt_are_put_back_and_come_again(tiny_folder: Path) -> None:
    metrics = TargetMetrics("tiny")
    worker = target(tiny_folder, metrics, slots=260)
    told: list[Told] = [[] for _ in range(6)]
    for number, pieces in enumerate(told, start=2):
        worker.add_request(number, Request(str(number), LONG, Sampling(), 40), pieces.append)
    finished(worker)
    page = metrics.registry.page("")[1].decode()
    assert not re.search(r"preemptions_total\{.*\} 0\.0", page), "the slots sufficed, so nothing was tested"
    wanted = alone(tiny_folder, LONG, 40)
    assert all(said(pieces) == wanted for pieces in told)
    cached = [[piece.cached_tokens for piece in pieces if isinstance(piece, Piece)] for pieces in told]
    assert not any(any(counts[1:]) for counts in cached), "what it computed itself was not cached"


def test_answers_that_grow_beyond_the_slots_are_not_put_back_again_and_again(tiny_folder: Path) -> None:
    """Each answer that ended let one in for whose first tokens there was no room: it was put back at once."""
    metrics = TargetMetrics("tiny")
    worker = target(tiny_folder, metrics, slots=600, prefix_cache=False)
    told: list[Told] = [[] for _ in range(40)]
    for number, pieces in enumerate(told, start=2):
        prompt = tuple(range(number, number + 20))
        worker.add_request(number, Request(str(number), prompt, Sampling(), 40 + 7 * number % 40), pieces.append)
    finished(worker)
    put_back = re.search(r"preemptions_total\{.*\} (.*)", metrics.registry.page("")[1].decode())
    assert put_back is not None and 0 < float(put_back[1]) < 40, put_back[1]
    assert all(said(pieces) for pieces in told)


def test_where_slots_run_out_one_answer_makes_place_for_the_others(tiny_folder: Path) -> None:
    worker, told = target(tiny_folder, slots=120, prefix_cache=False), [Told() for _ in range(3)]
    for number, pieces in enumerate(told):
        request = Request(str(number), range(number, number + 20), Sampling(), 57, speculate=False)
        worker.add_request(number, request, pieces.append)
    worker.poll()
    while worker.num_running == 3:
        assert not worker.poll()
    assert worker.num_running == 2, "its slots are more than enough"
    finished(worker)


def test_what_is_cached_takes_room_from_those_who_run(tiny_folder: Path) -> None:
    """Slots that the cache would give up are free until somebody uses what is in them."""
    worker = target(tiny_folder, slots=120)
    worker.add_request(1, Request("1", LONG[:81], Sampling(), 1), Told().append)
    finished(worker)
    worker.add_request(2, Request("2", LONG[100:131], Sampling(), 20), Told().append)
    worker.poll()
    worker.add_request(3, Request("3", LONG[:81], Sampling(), 3), Told().append)
    worker.poll()
    assert (worker.num_running, worker.num_waiting) == (1, 1)
    finished(worker)


def test_a_prompt_that_is_scored_needs_room_though_another_answer_has_it(tiny_folder: Path) -> None:
    worker = target(tiny_folder, slots=120)
    for number, scores in enumerate((None, 0)):
        worker.add_request(number, Request(str(number), LONG[:61], Sampling(), 20, prompt_logprobs=scores),
                           Told().append)
        worker.poll()
    assert (worker.num_running, worker.num_waiting) == (1, 1)
    finished(worker)


def test_who_is_put_back_in_the_middle_of_its_prompt_is_scored_once(tiny_folder: Path) -> None:
    metrics, told = TargetMetrics("tiny"), Told()
    worker = target(tiny_folder, metrics, slots=120, limits=Limits(8, 64, 2), prefix_cache=False)
    worker.add_request(1, Request("1", LONG[:30], Sampling(), 57, speculate=False), Told().append)
    while worker.following.sessions.get(1) is None or not worker.following.sessions[1].side.num_output:
        worker.poll()
    worker.add_request(2, Request("2", LONG[:60], Sampling(), 4, prompt_logprobs=0), told.append)
    finished(worker)
    assert re.search(r"preemptions_total\{.*\} 1\.0", metrics.registry.page("")[1].decode())
    scores = [piece.prompt for piece in told if isinstance(piece, Piece) and piece.prompt is not None]
    assert [start for part in scores for start in range(part.start, part.start + len(part.logprobs))] == [*range(1, 60)]
    assert all(part.logprobs for part in scores)


def test_an_answer_that_soon_ends_needs_no_more_room_to_grow(tiny_folder: Path) -> None:
    worker = target(tiny_folder, slots=120, prefix_cache=False)
    worker.add_request(1, Request("1", LONG[:30], Sampling(), 3), Told().append)
    worker.poll()
    worker.add_request(2, Request("2", LONG[:80], Sampling(), 3), Told().append)
    worker.poll()
    assert worker.num_running == 2
    finished(worker)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_what_was_computed_behind_the_end_of_an_answer_is_given_back(tiny_folder: Path, prefix_cache: bool) -> None:
    """A stop token in the middle of drafts that are all right."""
    right, told = alone(tiny_folder, LONG[:20], 12), Told()

    class Right:
        address = "right"

        def send(self, items: Sequence[DraftBound]) -> None:
            if any(isinstance(item, Open | Commit) for item in items):
                base, ids = worker.following.sessions[1].side.base, np.arange(1, 12, dtype=np.int32)
                growth = Growth(1, base, ids, np.array([-base, *ids[:-1]], np.int32), np.array(right[1:], np.int32),
                                np.zeros(11, np.float32))
                worker.following.received(self, [growth], [])

        def refuse(self, field: str) -> None:
            raise AssertionError(field)

    worker = target(tiny_folder, slots=200, prefix_cache=prefix_cache, always=True)
    worker.following.link_up(Right(), DraftHello(PROTOCOL_VERSION, 0, "right", 0, "", None, 0, 4096, 16, 8))
    stop = next(place for place in range(3, 12) if right[place] not in right[:place])
    worker.add_request(1, Request("1", LONG[:20], Sampling(stop_token_ids=(right[stop],)), 40), told.append)
    finished(worker)
    assert said(told) == right[: stop + 1]
    assert any(piece.accepted > 1 for piece in told if isinstance(piece, Piece))
    assert worker.num_free_slots == 200


def test_a_wide_tree_at_the_end_of_an_answer_writes_into_no_other(
        tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slots are noted behind those of its answer, where another answer's begin."""
    monkeypatch.setattr(kv, "FIRST_WIDTH", 1)

    class Wide:
        address = "wide"

        def send(self, items: Sequence[DraftBound]) -> None:
            for item in items:
                if isinstance(item, Open | Commit):
                    base = len(item.tokens) + (item.base if isinstance(item, Commit) else 0)
                    ids, tokens = np.arange(1, 17, dtype=np.int32) + 16 * base, np.arange(16, dtype=np.int32)
                    scores = np.zeros(16, np.float32)
                    worker.following.received(
                        self, [Growth(item.session, base, ids, np.full(16, -base, np.int32), tokens, scores)], [])

        def refuse(self, field: str) -> None:
            raise AssertionError(field)

    worker, asked = target(tiny_folder, always=True), [(LONG[:20], 12), (LONG[30:42], 20)]
    told = [Told() for _ in asked]
    worker.following.link_up(Wide(), DraftHello(PROTOCOL_VERSION, 0, "wide", 0, "", None, 0, 4096, 16, 8))
    for number, (prompt, tokens) in enumerate(asked):
        worker.add_request(number, Request(str(number), prompt, Sampling(), tokens), told[number].append)
    finished(worker)
    assert any(piece.drafted == 16 for piece in told[0] if isinstance(piece, Piece))
    assert [said(pieces) for pieces in told] == [alone(tiny_folder, *one) for one in asked]


def test_who_waits_for_a_prompt_holds_nobody_up(tiny_folder: Path) -> None:
    worker = target(tiny_folder, limits=Limits(2, 64, 16))
    alike: list[Told] = [Told() for _ in range(5)]
    for number, pieces in enumerate(alike):
        worker.add_request(number, Request(str(number), LONG, Sampling(), 4), pieces.append)
    other = Told()
    worker.add_request(9, Request("9", (9, 9, 9), Sampling(), 4), other.append)
    for _ in range(8):
        worker.poll()
    assert said(other) and not any(alike), "it has waited for a prompt that is not its own"
    finished(worker)
    assert said(other) == alone(tiny_folder, (9, 9, 9), 4)
    assert all(said(pieces) == alone(tiny_folder, LONG, 4) for pieces in alike)


def test_without_a_prefix_cache_nobody_waits(tiny_folder: Path) -> None:
    worker = target(tiny_folder, prefix_cache=False)
    told: list[Told] = [Told() for _ in range(3)]
    for number, pieces in enumerate(told):
        worker.add_request(number, Request(str(number), LONG, Sampling(), 4), pieces.append)
    worker.poll()
    assert worker.num_running == 3
    finished(worker)
    assert all(said(pieces) == alone(tiny_folder, LONG, 4) for pieces in told)


def test_a_step_that_fails_with_the_end_of_a_prompt_ends_that_answer_alone(
        tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, broken, follows = target(tiny_folder), Told(), Told()

    def fails(*_: object) -> list[int]:
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patched:
        patched.setattr("target_service.step.greatest", fails)
        worker.add_request(1, Request("1", LONG, Sampling(), 4), broken.append)
        worker.poll()
        worker.poll()
    assert [type(error) for error in broken] == [RuntimeError]
    worker.add_request(2, Request("2", LONG, Sampling(), 4), follows.append)
    finished(worker)
    assert said(follows) == alone(tiny_folder, LONG, 4)
    assert sum(piece.cached_tokens for piece in follows if isinstance(piece, Piece)) == 0, "of a step that failed"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_gpu_that_is_lost_ends_the_target(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each further step would fail as well, while the target looked well and took requests."""
    def lost(*_: object, **__: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    assert device_works(torch.device("cpu"))
    with monkeypatch.context() as patched:
        patched.setattr(torch, "zeros", lost)
        assert not device_works(torch.device("cpu"))
    worker, told = target(tiny_folder), [Told(), Told()]
    monkeypatch.setattr("target_service.step.greatest", lost)
    monkeypatch.setattr("target_service.loop.device_works", lambda _device: False)
    heard = SimpleQueue[None]()
    for number, pieces in enumerate(told):
        worker.add_request(number, Request(str(number), (number, 1, 2), Sampling(), 4),
                      lambda piece, pieces=pieces: heard.put(pieces.append(piece)))
    worker.start()
    for _ in told:
        heard.get(timeout=30)
    worker.stop()
    assert [[type(error) for error in pieces] for pieces in told] == [[Unavailable], [Unavailable]]
    assert "illegal memory access" in str(told[0][0]) and not worker.alive and not worker.vitals.ready


def test_feature_rows_that_find_no_memory_on_their_way_are_not_there(tiny_folder: Path,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    runner = target(tiny_folder)._runner
    runner.set_taps((1,))
    builder = BatchBuilder()
    builder.add(LONG[:4], range(4), runner.slots.alloc(4).tolist(), np.zeros(0, np.int64), logits="last")
    runner.forward(builder.build())

    def full(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory to move rows")

    old, new = np.array([0, 1]), np.array([8, 9])
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "index_select", full)
        runner.copy_features(old, new)
    assert runner.features_from(new) == 2
    runner.copy_features(old, new)
    assert runner.features_from(new) == 0 and torch.equal(runner.features(new), runner.features(old))


def test_feature_rows_move_with_tokens_to_the_slots_that_the_cache_has(tiny_folder: Path) -> None:
    """A prompt was computed before anybody read its states, and then again, by who is to score it."""
    worker, first, second = target(tiny_folder), Told(), Told()
    worker.add_request(1, Request("1", LONG, Sampling(), 2), first.append)
    finished(worker)
    runner = worker._runner
    runner.set_taps((1,))
    worker.add_request(2, Request("2", LONG, Sampling(), 8, prompt_logprobs=0), second.append)
    worker.poll()  # the first half: scored rows count twice
    worker.poll()
    (one,) = worker._queues.running
    assert one.num_computed == len(LONG)
    assert runner.features_from(one.slots[: one.num_computed]) == 0, "its states are there"
    cached = runner.features(one.slots[: len(LONG)])
    fresh = ModelRunner(runner.model, 512)
    fresh.set_taps((1,))
    builder = BatchBuilder()
    builder.add(LONG, range(len(LONG)), fresh.slots.alloc(len(LONG)).tolist(), np.zeros(0, np.int64), logits="last")
    fresh.forward(builder.build())
    assert torch.allclose(cached, fresh.features(range(len(LONG))), atol=1e-9)
    finished(worker)
    assert said(second)[:2] == said(first)


def test_a_full_cache_gives_way_in_lumps(tiny_folder: Path) -> None:
    runner = ModelRunner(load_model(tiny_folder, ModelSection(dtype="float64")), 1024)
    kv = KV(runner, True)
    assert kv._cache is not None
    for start in range(0, 1024, 8):
        kv._cache.insert(range(start, start + 8), runner.slots.alloc(8))
    assert runner.slots.num_free == 0
    kv.make_room(1)
    assert runner.slots.num_free == 1024 // EVICTION_DIVISOR
    kv.make_room(100)
    assert runner.slots.num_free == 100


def test_a_chunk_of_a_prompt_is_shared_without_a_look_at_those_before_it(
        tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each was compared, copied and locked with all before it: of 100,000 tokens the last step took 1.6 ms for that."""
    looked, common, path = list[int](), kv._common, kv._path

    def compared(a: NDArray[np.int64], b: NDArray[np.int64]) -> int:
        looked.append(min(len(a), len(b)))
        return common(a, b)

    def walked(*args: Any) -> Iterator[kv.Node]:
        for node in path(*args):
            looked.append(1)
            yield node

    worker, told = target(tiny_folder, limits=Limits(8, 64, 4)), Told()
    monkeypatch.setattr(kv, "_common", compared)
    monkeypatch.setattr(kv, "_path", walked)
    worker.add_request(1, Request("one", LONG, Sampling(), 2), told.append)
    finished(worker)
    chunks = len(LONG) // 4
    assert said(told) == alone(tiny_folder, LONG, 2)
    assert sum(looked) < 2 * len(LONG) + 10 * chunks
