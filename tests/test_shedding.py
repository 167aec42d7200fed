"""A device whose memory runs out is asked for less, and answers are what they would have been."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from slipstream.base.config import GrowthSection, ModelSection
from slipstream.base.errors import CapacityError, DeviceFull
from slipstream.choosing.scores import chosen_logprobs
from slipstream.drafting import neural
from slipstream.drafting.heads.checkpoint import EagleHead, read_head
from slipstream.drafting.heads.eagle import EagleNetwork
from slipstream.drafting.neural import NeuralDrafter
from slipstream.drafting.ngram import NgramDrafter
from slipstream.drafting.standalone import StandaloneNetwork
from slipstream.drafting.tree import DraftContext
from slipstream.engine.batch import ForwardBatch
from slipstream.engine.kv import KVPool
from slipstream.engine.loading import load_model
from slipstream.engine.model import CausalModel
from slipstream.engine.native.draft import Grown, Seed
from slipstream.engine.runner import FeatureReader, ModelRunner
from slipstream.following.pool import DraftPool
from slipstream.observe.metrics import TargetMetrics
from slipstream.protocol.messages import Commit, FeatureSpec, Open, Projection
from slipstream.protocol.requests import DraftStatus, Request, Sampling, TokenLogprob
from target_service.sequence import KV
from target_service.step import CALM_S, LEVELS, Limits, Queues, Shedding
from tests.both import Both
from tests.eagle_folder import eagle_config, eagle_tensors, write_eagle_folder
from tests.loop import eventually
from tests.pair import drafting, local_link, target
from tests.sequences import run
from tests.tiny import write_tiny_model

PROMPT = tuple(b"one two three one two three one two three one two ")
LIMITS = Limits(64, 512, 256)


class Cramped:
    """A model on a device that has memory for so many rows at a time."""

    def __init__(self, model: CausalModel, room: int) -> None:
        self._model = model
        self.room = room
        self.refused: list[int] = []
        self.config, self.dtype, self.device = model.config, model.dtype, model.device
        self.kernels = model.kernels

    def forward(self, batch: ForwardBatch, pool: KVPool,
                taps: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor | None]:
        if batch.num_rows > self.room:
            self.refused.append(batch.num_rows)
            raise torch.OutOfMemoryError(f"no memory for {batch.num_rows} rows")
        return self._model.forward(batch, pool, taps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.logits(hidden)


def request(tokens: tuple[int, ...] = PROMPT, max_tokens: int = 24) -> Request:
    return Request("r", tokens, Sampling(), max_tokens)


async def answers(folder: Path, room: int) -> tuple[list[list[int]], Cramped, int]:
    """Those of four prompts at once with n-grams, the device, and what was shed in the end, as a scrape sees it."""
    made: list[Cramped] = []

    def around(model: CausalModel) -> CausalModel:
        made.append(Cramped(model, room))
        return made[0]

    ngram = NgramDrafter(8)
    async with (target(folder, around=around, limits=Limits(64, 512, 32)) as rig, drafting(ngram) as peers,
                local_link(rig, peers)):
        done = await asyncio.gather(*(rig.answer(request((*PROMPT, 48 + i))) for i in range(4)))
        again = await rig.answer(request((*PROMPT, 48)))  # reads what the prefix cache holds
        await rig.check()
        texts = [[token for piece in pieces for token in piece.tokens] for pieces in (*done, again)]
        assert rig.count("device_full_total") == len(made[0].refused)
        assert rig.count("shedding_level") == rig.worker.shedding.level
        return texts, made[0], rig.worker.shedding.level


async def test_answers_are_the_same_on_a_device_that_is_too_small(tiny_folder: Path) -> None:
    right, roomy, level = await answers(tiny_folder, 1000)
    assert not roomy.refused and level == 0 and right[4] == right[0]
    found, cramped, level = await answers(tiny_folder, 40)
    assert cramped.refused and level > 0
    assert found == right


async def test_more_answers_than_a_step_has_rows_go_on_side_by_side(tiny_folder: Path) -> None:
    async with target(tiny_folder, limits=Limits(64, 4, 4)) as rig:
        ended: list[int] = []

        async def ask(number: int) -> None:
            await rig.answer(request((*PROMPT, 48 + number), max_tokens=8 if number == 7 else 200))
            ended.append(number)

        await asyncio.gather(*(ask(number) for number in range(8)))
        assert ended[0] == 7, "the youngest wants fewest"


async def test_memory_that_runs_out_behind_the_forward_loses_no_slots_and_no_answers(
        tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [replace(request((*PROMPT, 48 + i)), top_logprobs=2) for i in range(4)]
    full, seen = set[int](), [0]

    def cramped(*args: Any) -> list[list[TokenLogprob]]:
        seen[0] += 1
        if seen[0] in full:
            raise torch.OutOfMemoryError("no memory in float64")
        return chosen_logprobs(*args)

    monkeypatch.setattr("target_service.step.chosen_logprobs", cramped)

    async def found() -> tuple[list[list[int]], float]:
        ngram, seen[0] = NgramDrafter(8), 0
        async with target(tiny_folder, limits=Limits(64, 512, 32)) as rig, drafting(ngram) as peers:
            async with local_link(rig, peers):
                done = await asyncio.gather(*map(rig.answer, asked))
            await rig.check()
            assert all(len(piece.logprobs) == len(piece.tokens) for pieces in done for piece in pieces)
            texts = [[token for piece in pieces for token in piece.tokens] for pieces in done]
            return texts, rig.count("device_full_total")

    right, times = await found()
    assert times == 0
    full.update((2, 5))
    assert await found() == (right, 2)


async def test_a_device_with_no_room_at_all_ends_its_answers_and_refuses_new_ones(tiny_folder: Path) -> None:
    async with target(tiny_folder, around=lambda model: Cramped(model, 0)) as rig:
        with pytest.raises(DeviceFull):
            await rig.answer(request())
        with pytest.raises(CapacityError, match="running answers go on") as refused:
            await rig.answer(request())
        assert refused.value.retry_after_s == CALM_S
        await rig.check()


def problem(pool: DraftPool, status: DraftStatus, words: str) -> bool:
    return words in pool.with_problem(status).problem


HOSTILE = FeatureSpec((0,) * 64, 64 * 48, "float64")


async def test_a_draft_that_wants_more_rows_than_memory_holds_is_refused_by_name(
        tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And asks again: the target serves on, its rows are as they were, and other drafts have a part."""
    monkeypatch.setattr("slipstream.engine.runner.free_memory", lambda _: (16 << 20, 16 << 20))  # the pool is there
    usual, hungry = NgramDrafter(8), NgramDrafter(8)
    usual.features, hungry.features = FeatureSpec((1,), 48, "float64"), HOSTILE
    async with target(tiny_folder) as rig, drafting(usual) as peers, drafting(hungry) as others:
        pool = rig.worker.following.pool
        for _ in range(2):
            async with local_link(rig, others) as link:
                status = link.status()
                await eventually(partial(problem, pool, status, "no memory for them"))
        assert await rig.answer(request())
        async with local_link(rig, peers) as first, local_link(rig, others) as link, local_link(rig, others):
            assert await rig.answer(request())
            assert pool.is_usable(first) and not pool.is_usable(link) and rig.runner.taps == (1,)
        await rig.check()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError], ids=["memory", "something else"])
@pytest.mark.parametrize("times", [1, 2], ids=["the new ones", "not even the old ones"])
def test_rows_that_find_no_memory_leave_those_that_were_kept(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch,
                                                             times: int, error: type[Exception]) -> None:
    runner = ModelRunner(load_model(tiny_folder, ModelSection(dtype="float64")), 64)
    kv, failures, real = KV(runner, True), [0], torch.empty

    def full(*args: Any, **settings: Any) -> torch.Tensor:
        if args[0] == 64 and failures[0]:
            failures[0] -= 1
            raise error("no memory for rows")
        return real(*args, **settings)

    assert kv.set_feature_spec(FeatureSpec((1,), 48, "float64"))
    failures[0] = times
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", full)
        assert not kv.set_feature_spec(FeatureSpec((0, 1), 96, "float64"))
    assert runner.taps == ((1,) if times == 1 else ())
    row = runner.table.add_row(1)
    row.write(0, [3])
    reads = SimpleNamespace(row=row, num_computed=1, followed=SimpleNamespace(feature_spec=FeatureSpec((1,), 48)))
    (sent,) = kv.newest_feature_rows([(cast(Any, reads), 1)])
    assert (sent is not None) == (times == 1), "the drafter that was there goes on"
    assert kv.set_feature_spec(FeatureSpec((0, 1), 96, "float64")) and runner.features([3]).shape == (1, 96)


def test_a_projection_that_finds_no_memory_leaves_all_as_it_was(tiny_folder: Path) -> None:
    """And one by which nothing is joined on its way costs nobody the rows that are there."""
    runner = ModelRunner(load_model(tiny_folder, ModelSection(dtype="float64")), 64)
    kv = KV(runner, True)
    specs = [FeatureSpec((1,), 24, "float64", Projection(24, 48, "float64", bytes([n]) * 32, bytes(24 * 48 * 8)))
             for n in range(3)]
    assert kv.set_feature_spec(specs[0])
    slots = run(runner, list(range(8)))[1]
    sent = runner.feature_bytes(slots, runner.keep_features(specs[0]))
    with pytest.MonkeyPatch.context() as patched:
        def full(*_: Any) -> None:
            raise torch.OutOfMemoryError("no memory for a matrix")

        patched.setattr(ModelRunner, "linear", full)
        assert not kv.set_feature_spec(replace(specs[1], layers=(2,)))
    assert runner.taps == (1,) and runner.feature_bytes(slots, runner.keep_features(specs[0].without_weights())) == sent
    assert kv.set_feature_spec(specs[2]) and runner.features_from(slots) == 0, "they are joined when they are read"


def test_levels_go_up_one_by_one_and_come_back_one_by_one() -> None:
    now = [100.0]
    shedding = Shedding(LIMITS, lambda: now[0], TargetMetrics("tiny"))
    seen = [(shedding.limit_nodes(17), shedding.limits())]
    for level, rows in enumerate((400, 200, 100), start=1):
        assert shedding.step_failed(rows) and shedding.level == level and shedding.refuses_new == (level == 3)
        seen.append((shedding.limit_nodes(17), shedding.limits()))
    assert seen == [(17, LIMITS), (9, Limits(64, 200, 200)), (1, Limits(64, 100, 100)), (1, Limits(1, 50, 50))]
    assert shedding.step_failed(50) and shedding.limits() == Limits(1, 25, 25) and not shedding.step_failed(16)
    for level, rows in ((2, 50), (1, 100), (0, 512), (0, 512)):
        now[0] += CALM_S - 1
        shedding.limits()
        assert shedding.level == min(3, level + 1) or level == 0
        now[0] += 1
        shedding.limits()
        assert shedding.level == level and shedding.limits().max_step_rows == rows
    assert shedding.limits() == LIMITS


def test_a_target_that_nobody_asks_takes_new_answers_again() -> None:
    now = [0.0]
    shedding = Shedding(LIMITS, lambda: now[0], TargetMetrics("tiny"))
    for _ in LEVELS:
        shedding.step_failed(64)
    assert shedding.refuses_new
    now[0] += CALM_S
    Queues().schedule(now[0], cast(KV, SimpleNamespace(num_free=100)), shedding)
    assert not shedding.refuses_new


def test_a_step_of_few_rows_is_not_made_smaller_than_rows_can_be() -> None:
    shedding = Shedding(Limits(4, 16, 16), lambda: 0.0, TargetMetrics("tiny"))
    shedding.step_failed(16)
    assert shedding.limits() == Limits(4, 16, 16) and [shedding.limit_nodes(n) for n in (1, 2, 3)] == [1, 1, 2]


@pytest.mark.parametrize("room", [8, 3], ids=["in the prompt", "in the tree"])
def test_a_draft_whose_device_is_full_says_so_and_keeps_no_slots(tiny_draft_folder: Path, room: int) -> None:
    device = Cramped(load_model(tiny_draft_folder, ModelSection(dtype="float64")), 1000)
    network = StandaloneNetwork(ModelRunner(device, 200))
    drafter = NeuralDrafter("standalone", network, GrowthSection(topk=4, num_steps=3, num_draft_tokens=8), 4)
    opening = Open(1, np.array(PROMPT[:20], np.int32), 20, Sampling())
    drafter.open([opening])
    if room == 3:
        drafter.grow([1], [0])  # the prompt is computed while there is room
    device.room = room
    with pytest.raises(DeviceFull, match="draft's device"):
        drafter.grow([1], [8])
    drafter.close([1])
    drafter.slots.check([])
    device.room = 1000
    drafter.open([opening])
    assert len(drafter.grow([1], [8])[0].tokens) == 8


class NoLevels:
    """Grows no tree: there is no memory for any."""

    max_batch, prunes = 8, True

    def reshape(self, topk: int, levels: int) -> None:
        pass

    def supports(self, rows: int, levels: int, topk: int, sampling: Sampling | None) -> bool:
        return rows <= 64

    def grow_trees(self, seeds: Sequence[Seed], topk: int, alone: bool = False) -> Grown:
        raise torch.OutOfMemoryError("no memory for trees")


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> EagleHead:
    folder, config = tmp_path_factory.mktemp("full"), eagle_config()
    return read_head(write_eagle_folder(folder / "head", config, eagle_tensors(config)),
                     write_tiny_model(folder / "target", num_hidden_layers=8))


PLACES: dict[str, tuple[object, str]] = {
    "pending rows": (DraftContext, "take_inputs"), "levels": (DraftContext, "states_of"), "ranks": (neural, "ranked"),
    "states": (FeatureReader, "__call__"), "forwards": (EagleNetwork, "forward"), "gaps": (torch.Tensor, "new_zeros")}


def draft_on(drafter: NeuralDrafter) -> None:
    """Two sessions grow; one hears nothing of a long part, and goes beyond its window then."""
    both = Both([drafter], drafter.features.width if drafter.features else 0, torch.float64, 0.0)
    both.open(1, 12)
    both.open(2, 20)
    drafter.grow([1, 2], [8, 8])
    both.commit(2, [5, 6])
    drafter.commit([Commit(1, 12, np.arange(60, dtype=np.int32))])
    drafter.absorb([both.states(1, 70, 1)])
    drafter.grow([1, 2], [8, 8])
    both.bases[1] = 72
    both.commit(1, [*range(60)])
    drafter.grow([1, 2], [8, 8])


@pytest.mark.parametrize("levels", [None, NoLevels()], ids=["by levels", "whole"])
@pytest.mark.parametrize("place", PLACES)
def test_a_draft_keeps_no_slots_wherever_its_memory_runs_out(head: EagleHead, monkeypatch: pytest.MonkeyPatch,
                                                             place: str, levels: NoLevels | None) -> None:
    owner, name = PLACES[place]
    real, left = getattr(owner, name), [0]

    def full(*args: Any, **settings: Any) -> object:
        left[0] -= 1
        if left[0] == 0:
            raise torch.OutOfMemoryError(f"no memory for {place}")
        return real(*args, **settings)

    monkeypatch.setattr(owner, name, full)
    drafter = NeuralDrafter("eagle3", EagleNetwork(head, "float64", torch.device("cpu"), 400),
                            GrowthSection(topk=3, num_steps=3, num_draft_tokens=8), 4, 100, levels)
    call, done = 0, False
    while not done:
        call += 1
        left[0] = call
        try:
            draft_on(drafter)
            assert levels is None
        except (DeviceFull, torch.OutOfMemoryError):
            assert left[0] <= 0 or levels is not None
        done = left[0] > 0  # it was not called so often
        drafter.close([1, 2])
        drafter.slots.check([])
    assert call > 1 or levels is not None
