"""Batch-invariant bfloat16: a row's bits do not depend on its company, so answers equal plain ones without float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.base.config import DraftSection, GrowthSection, ModelSection, Quantize
from slipstream.base.errors import ModelError
from slipstream.drafting import Drafter, create
from slipstream.engine.batch import BatchBuilder, ForwardBatch
from slipstream.engine.kv import KVPool
from slipstream.engine.loading import check_exact, load_model, passes_trial
from slipstream.engine.model import CausalModel
from slipstream.engine.native.program import NativeHead
from slipstream.engine.runner import ModelRunner
from slipstream.protocol.requests import Piece, Request, Sampling
from slipstream.protocol.tree import DraftTree
from tests.pair import drafting, local_link, target
from tests.sequences import run, run_tree
from tests.tiny import VOCAB, write_tiny_model
from tests.trees import random_tree

SHAPE = {"hidden_size": 192, "intermediate_size": 1536, "head_dim": 64}  # what the CPU kernels take
TEXT = list(b"Forty words of a prompt, so that a path behind it ends just before or just after a block of KV entries.")


class MoreWithCompany:
    """A model whose logits gain by the number of rows."""

    def __init__(self, model: CausalModel) -> None:
        self.config, self.dtype, self.device = model.config, model.dtype, model.device
        self._model = model

    def forward(self, batch: ForwardBatch, pool: KVPool,
                taps: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden, tapped = self._model.forward(batch, pool, taps)
        return hidden * (1 + batch.num_rows / 64), tapped

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.logits(hidden)


def load(folder: Path, quantize: str) -> ModelRunner:
    return ModelRunner(load_model(folder, ModelSection(kernels="native", quantize=quantize)), 1024)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("exact"), **SHAPE)


@pytest.fixture(params=[("llama", "none"), ("mistral", "none"), ("qwen3", "none"), ("llama", "int8")], ids=" ".join)
def runner(request: pytest.FixtureRequest, tmp_path: Path) -> ModelRunner:
    kind, quantize = request.param
    window = {"sliding_window": 70} if kind == "mistral" else {}
    return load(write_tiny_model(tmp_path, kind, **{**SHAPE, **window}), quantize)


def test_a_trees_rows_are_those_of_plain_steps(runner: ModelRunner) -> None:
    for seed, length in enumerate((20, 60, 61, 100)):
        context = run(runner, TEXT[:length])[1]
        tree = random_tree(np.random.default_rng(seed), 24, base=length + 1, vocab=VOCAB)
        logits, _ = run_tree(runner, tree, context)
        for node in (1, 11, 23):
            path, behind = tree.path(node), context
            for passed in path:
                alone, behind = run(runner, [tree.tokens[passed]], behind)
                assert torch.equal(alone[0], logits[passed]), f"seed {seed}, node {passed}"


def test_a_prompts_rows_are_those_of_plain_steps(runner: ModelRunner) -> None:
    whole, _ = run(runner, TEXT)
    halves, behind = run(runner, TEXT[:70])
    for i, token in enumerate(TEXT[70:], 70):
        alone, behind = run(runner, [token], behind)
        assert torch.equal(alone[0], whole[i]), f"row {i}"
    assert torch.equal(halves, whole[:70])


def test_a_chain_of_the_longest_word_is_like_plain_steps(runner: ModelRunner) -> None:
    context = run(runner, TEXT[:31])[1]
    tokens = np.random.default_rng(5).integers(VOCAB, size=64).tolist()
    chain = DraftTree(32, tokens, [*range(-1, 63)], [*range(64)], [0.0] * 64)
    logits, _ = run_tree(runner, chain, context)
    for node in range(64):
        alone, context = run(runner, [tokens[node]], context)
        assert torch.equal(alone[0], logits[node]), f"node {node}"


def test_neighbours_do_not_matter(runner: ModelRunner) -> None:
    lengths = (5, 63, 64, 90)
    contexts = [run(runner, TEXT[:length])[1] for length in lengths]
    alone = [run(runner, [65], context)[0] for context in contexts]
    builder = BatchBuilder()
    for length, context in zip(lengths, contexts, strict=True):
        builder.add([65], [length], runner.slots.alloc(1).tolist(), context)
    builder.add(TEXT, range(len(TEXT)), runner.slots.alloc(len(TEXT)).tolist(), np.zeros(0, np.int64), logits="none")
    assert torch.equal(runner.forward(builder.build()), torch.cat(alone))


def standalone(target_folder: Path, folder: Path, quantize: Quantize = "none") -> Drafter:
    section = DraftSection(drafter="standalone", model=str(write_tiny_model(folder, noise=0.1, **SHAPE)),
                           quantize=quantize, growth=GrowthSection(num_steps=4, topk=3, num_draft_tokens=12))
    return create(section, ModelSection(path=str(target_folder), dtype="bfloat16"))


@pytest.mark.parametrize("quantize", ["none", "int8"])
async def test_answers_equal_plain_ones(folder: Path, tmp_path: Path, quantize: Quantize,
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NativeHead, "_passes_trial", lambda self, screen: True)  # as where there are many tokens
    asked = [Request(str(seed), tuple(TEXT[: 30 + seed]), Sampling(temperature=seed / 4, seed=seed), 60)
             for seed in range(4)]

    def tokens(pieces: list[Piece]) -> list[int]:
        return [token for piece in pieces for token in piece.tokens]

    async with target(folder, dtype="bfloat16", exact=True, quantize=quantize) as rig:
        plain = [tokens(await rig.answer(request)) for request in asked]
        async with drafting(standalone(folder, tmp_path, quantize)) as peers, local_link(rig, peers):
            pieces = [await rig.answer(request) for request in asked]
        scored = [tokens(await rig.answer(replace(request, top_logprobs=0))) for request in asked]
    assert [tokens(answer) for answer in pieces] == plain
    assert scored == plain, "tokens that the model's own call chose are those chosen from its logits"
    assert sum(piece.accepted for answer in pieces for piece in answer) > 20


async def test_thresholds_look_at_all_logits_where_the_models_call_could_choose(
        folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NativeHead, "_passes_trial", lambda self, screen: True)
    async with (target(folder, dtype="bfloat16", exact=True, accept_threshold_single=0.1) as rig,
                drafting(standalone(folder, tmp_path)) as peers, local_link(rig, peers)):
        pieces = await rig.answer(Request("r", tuple(TEXT), Sampling(temperature=1.0, seed=3), 40))
    assert any(piece.lossy for piece in pieces)


def test_a_model_whose_rows_depend_on_their_company_fails_its_trial(folder: Path) -> None:
    model = load_model(folder, ModelSection(kernels="native"))
    assert passes_trial(model)
    assert not passes_trial(MoreWithCompany(model))
    with pytest.raises(ModelError, match="rows differ from plain steps"):
        check_exact(MoreWithCompany(model))


@pytest.mark.parametrize("other", [{"dtype": "float32"}, {"engine": "hf"}, {}])
def test_it_is_refused_elsewhere(folder: Path, other: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"model\.kernels: native is for"):
        load_model(folder, ModelSection(kernels="native", **other), compile_layers=not other)
