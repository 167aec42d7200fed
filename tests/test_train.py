"""Making a head: what is trained is what is served, runs that are killed go on, and a short one learns something."""

from __future__ import annotations

import json
import math
import multiprocessing
import random
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from router_service.text.tokens import TextCodec
from slipstream.base.config import load
from slipstream.base.errors import CapacityError, ConfigError, ModelError
from slipstream.cli import training
from slipstream.cli.commands import app
from slipstream.drafting.heads.block import BlockNetwork
from slipstream.drafting.heads.block_checkpoint import read_block_head
from slipstream.drafting.heads.checkpoint import read_head
from slipstream.drafting.heads.eagle import EagleNetwork
from slipstream.engine.batch import BatchBuilder
from slipstream.engine.model import CausalModel, ModelConfig, load_tensors
from slipstream.engine.preparation import prepare_as
from slipstream.engine.runner import ModelRunner
from slipstream.models.folder import HEADS, made_for, weights_hash
from slipstream.protocol.messages import Features
from slipstream.train.anchors import block_loss, blocks_of
from slipstream.train.anchors import states_of as block_states
from slipstream.train.block_head import warm_block_head
from slipstream.train.checkpoint import Checkpoint, load_newest, save
from slipstream.train.collect import collect, identity_of
from slipstream.train.dialogue import make_plan, number_prompts, read_prompts, read_turn_template
from slipstream.train.distil import CE_DECAY, DistillationLoss, LossInputs, UsedTokens
from slipstream.train.evaluate import evaluate, prompts_of
from slipstream.train.export import export
from slipstream.train.fit import Progress, Training
from slipstream.train.generate import Limits
from slipstream.train.head import Head, warm_head
from slipstream.train.recipe import Recipe
from slipstream.train.shards import ANSWER, GIVEN, Conversation, Shards, ShardWriter, Totals
from slipstream.train.stages import Job, make_head
from slipstream.train.unroll import Rows, rows_of, states_of
from tests.tiny import CHAT_TEMPLATE, EOS, VOCAB, write_tiny_model

DRAFT_VOCAB = 120
DIRECT = torch.device("cpu")


@pytest.fixture(autouse=True)
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a head gives on sixteen prompts shows in a few tokens of each."""
    monkeypatch.setattr("slipstream.train.evaluate.MAX_TOKENS", 24)


def conversation(config: ModelConfig, length: int, seed: int) -> Conversation:
    """Random tokens with random states."""
    dice = np.random.default_rng(seed)
    states = torch.from_numpy(dice.standard_normal((length, 4 * config.hidden_size))).bfloat16()
    roles = np.full(length, ANSWER, np.uint8)
    roles[:4] = GIVEN
    tokens, greedy = dice.integers(config.vocab_size, size=(2, length)).astype(np.int32)
    return Conversation(seed, False, 0.0, tokens, roles, greedy, states.view(torch.uint16).numpy())


def talked(target: Path, work: Path, recipe: Recipe,
           report: Callable[[Totals, float], None] = lambda totals, share: None) -> Totals:
    return collect(target, work, recipe, report, identity_of(target, ModelConfig.from_folder(target)))


def random_head(target: Path, seed: int = 0, layers: int = 1) -> Head:
    config = ModelConfig.from_folder(target)
    vocabulary = torch.randperm(config.vocab_size, generator=torch.Generator().manual_seed(seed))[:DRAFT_VOCAB]
    return warm_head(config, load_tensors(target), vocabulary.sort().values, layers, seed, DIRECT)


def head_logits(head: Head, rows: Rows, steps: int) -> list[torch.Tensor]:
    outs = states_of(head, rows, steps)
    norm, eps = head.tensors["norm.weight"], head.config.norm_eps
    return [torch.nn.functional.rms_norm(out, norm.shape, norm, eps) @ head.tensors["lm_head.weight"].T for out in outs]


@pytest.mark.parametrize("rope", [
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.5, "high_freq_factor": 4.5,
     "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 96, "beta_fast": 30.0, "mscale": 0.7,
     "mscale_all_dim": 1.0, "truncate": False}], ids=lambda rope: str(rope["rope_type"]))
def test_a_head_turns_as_its_target(tmp_path: Path, rope: dict[str, object]) -> None:
    target = write_tiny_model(tmp_path / "target", rope_parameters={"rope_theta": 500.0, **rope})
    export(random_head(target), tmp_path / "head", torch.float32, "")
    wanted, found = ModelConfig.from_folder(target), read_head(tmp_path / "head", target).config
    assert wanted.rope_scaling is not None
    assert (found.rope_theta, found.rope_scaling) == (wanted.rope_theta, wanted.rope_scaling)


@pytest.mark.parametrize("layers", [1, 2])
def test_unrolled_steps_are_what_the_served_head_drafts(tiny_folder: Path, tmp_path: Path, layers: int) -> None:
    """Step k of row r equals the served head's logits after k drafted tokens, when those are the true ones."""
    steps, head = 4, random_head(tiny_folder, layers=layers)
    export(head, tmp_path / "head", torch.float32, "")
    network = EagleNetwork(read_head(tmp_path / "head", tiny_folder), "float32", DIRECT, 64)
    talks = [conversation(head.config, length, seed) for seed, length in enumerate((17, 9, 23))]
    rows = rows_of(talks, head)
    with torch.no_grad():
        trained = head_logits(head, rows, steps)
    assert rows.num_rows == sum(len(talk.tokens) - 2 for talk in talks) < rows.bounds[-1], "none was filled up"
    for talk, first in zip(talks, rows.bounds, strict=False):
        for root in (0, 3, len(talk.tokens) - 2 - steps):
            for k, logits in enumerate(drafted(network, head, talk, root, steps)):
                assert torch.allclose(logits, trained[k][first + root + k], atol=1e-4), (talk.number, root, k)


def drafted(network: EagleNetwork, head: Head, talk: Conversation, root: int, steps: int) -> list[torch.Tensor]:
    """Logits of a chain below the token of row ``root``, its tokens forced to be the conversation's."""
    wide = torch.from_numpy(talk.states[:root + 1].copy()).view(torch.bfloat16)[:, :-head.config.hidden_size].float()
    state = network.read([Features(1, 0, wide.contiguous().numpy().tobytes(), root + 1, "float32")])[0]
    slots = network.slots.alloc(root + steps)
    builder, found = BatchBuilder(), []
    builder.add(talk.tokens[1:root + 2].tolist(), range(root + 1), slots[:root + 1].tolist(), np.zeros(0, np.int64),
                logits="last")
    for k in range(steps):
        output = network.forward(builder.build(features=state))
        assert output.states is not None
        found.append(output.logits[0])
        at, state = root + k + 1, output.states
        if k < steps - 1:
            builder = BatchBuilder()
            builder.add([int(talk.tokens[at + 1])], [at], [int(slots[at])], slots[:at])
    network.slots.free(slots)
    return found


def test_trained_blocks_are_what_the_served_head_drafts(tiny_folder: Path, tmp_path: Path) -> None:
    """At every anchor: a block sees all states that it has when it drafts."""
    config = ModelConfig.from_folder(tiny_folder)
    vocabulary = torch.arange(3, 3 + DRAFT_VOCAB)
    head = warm_block_head(config, load_tensors(tiny_folder), vocabulary, 259, 0, DIRECT)
    with torch.no_grad():
        head.tensors["markov_head.markov_w2.weight"].normal_(generator=torch.Generator().manual_seed(1))
    export(head, tmp_path / "head", torch.float32, "")
    network = BlockNetwork(read_block_head(tmp_path / "head", tiny_folder), "float32", DIRECT, 64)
    talks = [conversation(config, length, seed) for seed, length in enumerate((17, 9, 23))]
    blocks = blocks_of(talks, head, (ANSWER,), random.Random(1))
    with torch.no_grad():
        trained = block_states(head, blocks)
    for number, talk in enumerate(talks):
        for anchor in range(*blocks.anchor_bounds[number : number + 2]):
            place = int(blocks.anchor_positions[anchor])
            wide = torch.from_numpy(talk.states[:place].copy()).view(torch.bfloat16).float()
            (rows,) = network.read([Features(1, 0, wide.contiguous().numpy().tobytes(), place, "float32")])
            slots, builder = network.slots.alloc(place), BatchBuilder()
            builder.add(talk.tokens[1 : place + 1].tolist(), range(place), slots.tolist(), np.zeros(0, np.int64),
                        logits="last")
            block = network.forward(builder.build(features=rows)).block
            assert block is not None and block.states is not None
            assert torch.allclose(block.states[0], trained[anchor], atol=1e-4), (number, place)
            network.slots.free(slots)


def test_a_block_begins_with_the_norms_of_queries_and_keys_where_its_target_has_them(tmp_path: Path) -> None:
    target = write_tiny_model(tmp_path / "target", kind="qwen3")
    config, tensors = ModelConfig.from_folder(target), load_tensors(target)
    head = warm_block_head(config, tensors, torch.arange(VOCAB), 259, 0, DIRECT)
    for layer in range(head.config.num_layers):
        theirs = f"model.layers.{config.num_layers - head.config.num_layers + layer}.self_attn"
        for name in ("q_norm", "k_norm", "q_proj"):
            wanted = tensors[f"{theirs}.{name}.weight"]
            assert torch.equal(head.tensors[f"layers.{layer}.self_attn.{name}.weight"], wanted.float()), name
            assert not torch.equal(wanted, torch.ones_like(wanted))


def test_the_loss_of_a_block_is_the_one_on_the_page(tiny_folder: Path) -> None:
    config = ModelConfig.from_folder(tiny_folder)
    head = warm_block_head(config, load_tensors(tiny_folder), torch.arange(VOCAB), 259, 0, DIRECT)
    dice = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name in ("markov_head.markov_w2.weight", "confidence_head.proj.weight"):
            head.tensors[name].normal_(std=0.3, generator=dice)
    talk = conversation(config, 30, 5)
    blocks = blocks_of([talk], head, (ANSWER,), random.Random(3))
    found = block_loss(head, blocks)
    weight, states = head.tensors, block_states(head, blocks)
    final_states = torch.from_numpy(talk.states.copy()).view(torch.bfloat16)[:, -config.hidden_size :].float()
    total, count = torch.zeros(()), 0.0
    for anchor, place in enumerate(blocks.anchor_positions.tolist()):
        for k in range(6):
            if place + k >= 29:
                continue
            told = weight["markov_head.markov_w1.weight"][talk.tokens[place + k]]
            logits = weight["lm_head.weight"] @ states[anchor, k] + weight["markov_head.markov_w2.weight"] @ told
            mine, theirs = logits.softmax(0), (head.teacher @ final_states[place + k]).softmax(0)
            distance = (mine - theirs).abs().sum()
            sure = torch.sigmoid(weight["confidence_head.proj.weight"][0] @ torch.cat((states[anchor, k], told)))
            wanted = 1 - distance.detach() / 2
            unsure = -(wanted * sure.log() + (1 - wanted) * (1 - sure).log())
            share = math.exp(-k / 4)
            total += share * (0.9 * distance - 0.1 * mine[talk.tokens[place + k + 1]].log() + unsure)
            count += share
    assert found.loss.item() == pytest.approx(total.item() / count, rel=1e-4)


def test_a_block_is_not_sure_of_tokens_that_it_cannot_draft(tiny_folder: Path) -> None:
    """Where the target says a token outside the draft vocabulary nothing is accepted, however near the rest is."""
    config = ModelConfig.from_folder(tiny_folder)
    head = warm_block_head(config, load_tensors(tiny_folder), torch.arange(DRAFT_VOCAB), 259, 0, DIRECT)
    talk = conversation(config, 60, 5)
    outside = replace(talk, tokens=(talk.tokens % (VOCAB - DRAFT_VOCAB) + DRAFT_VOCAB).astype(np.int32))
    for num_sampled in (0, 40):
        blocks = blocks_of([outside], head, (ANSWER,), random.Random(3))
        loss = block_loss(head, blocks, num_sampled=num_sampled).loss
        (slope,) = torch.autograd.grad(loss, head.tensors["confidence_head.proj.bias"])
        assert slope.item() == pytest.approx(0.5), "it says a half of each, and none of them is right"


def test_the_target_is_not_drawn_to_the_head(tiny_folder: Path) -> None:
    """What the target says is no weight of the head, also where both begin as one tensor."""
    config = ModelConfig.from_folder(tiny_folder)
    head = warm_block_head(config, load_tensors(tiny_folder), torch.arange(VOCAB), 259, 0, DIRECT)
    with torch.no_grad():
        head.tensors["lm_head.weight"].normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    blocks = blocks_of([conversation(config, 30, 5)], head, (ANSWER,), random.Random(3))
    found, alone = (torch.autograd.grad(block_loss(replace(head, teacher=teacher), blocks).loss,
                                        head.tensors["lm_head.weight"])[0]
                    for teacher in (head.teacher, head.teacher.detach()))
    assert torch.equal(found, alone)
    assert not random_head(tiny_folder).teacher.requires_grad


def test_blocks_learn_the_same_from_some_tokens(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig.from_folder(tiny_folder)
    head = warm_block_head(config, load_tensors(tiny_folder), torch.arange(VOCAB).flip(0), 259, 0, DIRECT)
    blocks = blocks_of([conversation(config, 60, 5)], head, (ANSWER,), random.Random(3))
    monkeypatch.setattr("slipstream.train.distil.NUM_COMMON", 8)
    monkeypatch.setattr("slipstream.train.distil.SAMPLE_MULTIPLE", 1)

    def slope(num_sampled: int) -> torch.Tensor:
        loss = block_loss(head, blocks, num_sampled=num_sampled).loss
        return torch.autograd.grad(loss, head.tensors["lm_head.weight"])[0]

    whole = block_loss(head, blocks)
    assert block_loss(head, blocks, num_sampled=VOCAB).agreement == whole.agreement
    assert block_loss(head, blocks, num_sampled=VOCAB).loss.item() == pytest.approx(whole.loss.item(), rel=1e-5)
    assert torch.allclose(slope(VOCAB), slope(0), atol=1e-6), "all are drawn"
    monkeypatch.setattr("slipstream.train.distil.CERTAIN_PROBABILITY", 0.02)
    torch.manual_seed(0)
    some, full = [slope(40) for _ in range(60)], slope(0)
    assert not torch.equal(some[0], full)
    off_mean, off = ((found - full).norm() / full.norm() for found in (torch.stack(some).mean(0), some[0]))
    assert off_mean < 0.5 * off, (off_mean, off)


def test_the_loss_and_its_gradient_are_those_of_autograd() -> None:
    dice = torch.Generator().manual_seed(0)
    states, lm_head, final_states, teacher = (torch.randn(shape, generator=dice, dtype=torch.float64)
                                              for shape in ((3, 700, 8), (40, 8), (700, 8), (40, 8)))
    weights = torch.rand(3, 700, generator=dice, dtype=torch.float64)
    truth = (final_states @ teacher.T).softmax(-1)
    inputs = LossInputs(final_states, teacher, truth.argmax(-1), weights, torch.float64)
    slopes = []
    for fused in (False, True):
        x, w = states.clone().requires_grad_(), lm_head.clone().requires_grad_()
        logs = (x @ w.T).log_softmax(-1)
        overlap = torch.minimum(logs.exp(), truth).sum(-1)
        ce_weight = torch.exp(-CE_DECAY * overlap.detach())
        losses = ce_weight * -(logs * truth).sum(-1) + (1 - ce_weight) * (1 - overlap)
        loss = DistillationLoss.of(x, w, inputs)[0] if fused else (losses * weights).sum()
        (2 * loss).backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None and w.grad is not None
        slopes.append((loss.detach(), x.grad, w.grad))
    for ours, theirs in zip(*slopes, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-10)


def test_the_gradient_of_some_tokens_is_that_of_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token that was drawn stands for several in every sum: the softmax's, the entropy's and the overlap's."""
    dice = torch.Generator().manual_seed(0)
    states, lm_head, final_states, teacher = (torch.randn(shape, generator=dice, dtype=torch.float64)
                                              for shape in ((3, 20, 8), (40, 8), (20, 8), (40, 8)))
    weights, truth = torch.rand(3, 20, generator=dice, dtype=torch.float64), (final_states @ teacher.T).softmax(-1)
    best, tokens = truth[:, :10].argmax(-1), torch.tensor([*range(10), 12, 20, 39])
    counts = torch.tensor([1.0] * 10 + [10.0] * 3, dtype=torch.float64)
    monkeypatch.setattr("slipstream.train.distil.used_tokens", lambda *_: UsedTokens(tokens, counts, best))
    inputs = LossInputs(final_states, teacher, best, weights, torch.float64, num_sampled=3)
    slopes = []
    for fused in (False, True):
        x, w = states.clone().requires_grad_(), lm_head.clone().requires_grad_()
        logs = (x @ w[tokens].T + counts.log()).log_softmax(-1)  # of all that a token stands for
        known = truth[:, tokens] * counts
        overlap = torch.minimum(logs.exp(), known).sum(-1)
        ce_weight = torch.exp(-CE_DECAY * overlap.detach())
        losses = ce_weight * -((logs - counts.log()) * known).sum(-1) + (1 - ce_weight) * (1 - overlap)
        loss = DistillationLoss.of(x, w, inputs)[0] if fused else (losses * weights).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None and w.grad is not None
        slopes.append((loss.detach(), x.grad, w.grad))
    for ours, theirs in zip(*slopes, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-10)


def test_a_gradient_of_some_tokens_is_that_of_all_on_average() -> None:
    dice = torch.Generator().manual_seed(0)
    states, off, final_states, teacher = (torch.randn(shape, generator=dice, dtype=torch.float64)
                                    for shape in ((2, 30, 8), (3000, 8), (30, 8), (3000, 8)))
    states, lm_head = states + 2 * final_states, teacher + 0.3 * off
    truth = (2 * final_states @ teacher.T).softmax(-1)
    inputs = LossInputs(2 * final_states, teacher, truth.argmax(-1), torch.full((2, 30), 1 / 60), torch.float64)

    def slopes(num_sampled: int) -> list[torch.Tensor]:
        x, w = states.clone().requires_grad_(), lm_head.clone().requires_grad_()
        loss, _ = DistillationLoss.of(x, w, replace(inputs, num_sampled=num_sampled))
        loss.backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None and w.grad is not None
        return [loss.detach(), x.grad, w.grad]

    torch.manual_seed(0)
    whole, everything = slopes(0), slopes(3000)
    for ours, theirs in zip(everything, whole, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-10), "all are drawn"
    sampled = [slopes(500) for _ in range(40)]
    for place, theirs in enumerate(whole):
        off_mean = (torch.stack([found[place] for found in sampled]).mean(0) - theirs).norm() / theirs.norm()
        off = (sampled[0][place] - theirs).norm() / theirs.norm()
        # What is not linear in the estimate of a softmax's sum is off on average, too: by 0.08 to 0.12 of a slope here.
        assert off_mean < 0.15 and off < 0.2, (place, off_mean, off)


@pytest.fixture(scope="module")
def simple_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target whose next token mostly depends on the last one: something that a head can learn in seconds."""
    folder = write_tiny_model(tmp_path_factory.mktemp("simple") / "target", peaky=2.0)
    tensors = load_tensors(folder)
    quiet = {name: tensor * (0.2 if "o_proj" in name else 1.0) for name, tensor in tensors.items()}
    save_file(quiet, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class Silent:
    """A ``stages.Watcher`` that keeps what it is told."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.lines: list[str] = []

    def collecting(self, totals: Totals, share: float) -> None:
        pass

    def training(self, progress: Progress, share: float) -> None:
        self.losses.append(progress.loss)

    def log(self, line: str) -> None:
        self.lines.append(line)


def test_a_short_run_learns_to_draft(simple_folder: Path, tmp_path: Path) -> None:
    recipe = Recipe(minutes=0, tokens=6000, steps=80, batch=48, limits=Limits(max_question=24, max_answer=64),
                    draft_vocab=160, unroll=3, learning_rate=5e-3, rows_per_step=320, dtype="float32")
    watcher = Silent()
    job = Job(simple_folder, "simple", tmp_path / "head", tmp_path / "work", (), recipe)
    chain, tree = make_head(job, watcher).values()
    config = ModelConfig.from_folder(simple_folder)
    held_out = list(Shards([job.work], identity_of(simple_folder, config)).conversations(held_out=True))
    vocabulary = read_head(job.out, simple_folder).vocabulary
    untrained = warm_head(config, load_tensors(simple_folder), vocabulary, recipe.layers, recipe.seed, DIRECT)
    export(untrained, tmp_path / "untrained", torch.float32, "")
    few, many = evaluate(simple_folder, tmp_path / "untrained", prompts_of(held_out, 16), dtype="float32").values()
    assert watcher.losses[-1] < 0.7 * watcher.losses[0]
    assert chain.length > few.length + 0.5, (chain, few)
    assert tree.length > many.length + 0.3, (tree, many)
    assert (job.out / "training.svg").read_text().count("<polyline") == 7
    assert made_for(job.out) == weights_hash(simple_folder) and not made_for(tmp_path / "untrained")
    text = (job.out / "README.md").read_text()
    assert f"| chain of 5 | {chain.length:.2f} |" in text
    assert "draft.drafter=eagle3 --set draft.model=THIS_FOLDER --set model.path=TARGET_FOLDER\n" in text


def test_a_short_run_learns_to_draft_blocks(simple_folder: Path, tmp_path: Path) -> None:
    recipe = Recipe(minutes=0, tokens=6000, steps=60, batch=48, limits=Limits(max_question=24, max_answer=64),
                    draft_vocab=160, learning_rate=5e-3, rows_per_step=320, dtype="float32", kind="dspark")
    watcher = Silent()
    job = Job(simple_folder, "simple", tmp_path / "head", tmp_path / "work", (), recipe)
    chain, tree = make_head(job, watcher).values()
    assert watcher.losses[-1] < 0.8 * watcher.losses[0]
    assert chain.length > 1.4 and tree.length > chain.length, (chain, tree)
    head = read_block_head(job.out, simple_folder)
    assert (head.from_anchor, head.reach, head.markov, head.confidence) == (True, 6, "vanilla", True)
    assert made_for(job.out) == weights_hash(simple_folder)
    text = (job.out / "README.md").read_text()
    assert "draft.drafter=block --set draft.model=THIS_FOLDER --set model.path=TARGET_FOLDER\n" in text
    assert json.loads((job.out / "config.json").read_text())["aux_hidden_state_layer_ids"][-1] == 2
    assert "layer id 2 is the state behind the final norm" in text, "another server takes the one before it"
    assert "# A DSpark head for simple" in text and f"| tree of 16 | {tree.length:.2f} |" in text
    again = Silent()
    make_head(replace(job, recipe=replace(recipe, steps=64, generate=False)), again)
    assert len(again.losses) == 4, "it goes on where it was"


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_a_head_can_begin_with_an_earlier_one(simple_folder: Path, tmp_path: Path,
                                              kind: Literal["eagle3", "dspark"]) -> None:
    recipe = Recipe(minutes=0, tokens=600, steps=3, batch=8, limits=Limits(max_question=24, max_answer=64),
                    draft_vocab=160, learning_rate=5e-3, rows_per_step=320, dtype="float32", kind=kind)
    first = Job(simple_folder, "simple", tmp_path / "first", tmp_path / "work", (), recipe)
    make_head(first, Silent())
    still = replace(recipe, steps=1, tokens=0, generate=False, learning_rate=0.0, draft_vocab=90, begin=first.out)
    second = replace(first, out=tmp_path / "second", work=tmp_path / "more", data=(first.work,), recipe=still)
    make_head(second, Silent())
    before, after = (load_file(job.out / "model.safetensors") for job in (first, second))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert "began from the head first." in (second.out / "README.md").read_text()
    config = json.loads((first.out / "config.json").read_text())
    taps = "eagle_config" if kind == "eagle3" else "aux_hidden_state_layer_ids"
    config[taps] = {"eagle_aux_hidden_state_layer_ids": [0, 0, 0]} if kind == "eagle3" else config[taps][::-1]
    (first.out / "config.json").write_text(json.dumps(config))
    talking = replace(second, work=tmp_path / "other", data=(), recipe=replace(still, tokens=100, generate=True))
    with pytest.raises(ConfigError, match="--begin: it reads layers"):
        make_head(talking, Silent())
    assert not list(tmp_path.glob("other/shard-*")), "it is told before anybody talks"
    turned = json.loads((tmp_path / "second" / "config.json").read_text())
    (turned["transformer_layer_config"] if kind == "dspark" else turned)["rope_theta"] = 77.0
    (tmp_path / "second" / "config.json").write_text(json.dumps(turned))
    with pytest.raises(ConfigError, match="--begin: rope_theta"):
        make_head(replace(second, work=tmp_path / "other", recipe=replace(still, begin=second.out)), Silent())


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_a_head_can_be_the_mean_of_what_it_began_with_and_what_it_has_learnt(simple_folder: Path, tmp_path: Path,
                                                                             kind: Literal["eagle3", "dspark"]) -> None:
    recipe = Recipe(minutes=0, tokens=600, steps=3, batch=8, limits=Limits(max_question=24, max_answer=64),
                    draft_vocab=160, learning_rate=5e-3, rows_per_step=320, dtype="float32", kind=kind)
    first = Job(simple_folder, "simple", tmp_path / "first", tmp_path / "work", (), recipe)
    make_head(first, Silent())
    second = replace(first, out=tmp_path / "second", work=tmp_path / "more", data=(first.work,),
                     recipe=replace(recipe, generate=False, begin=first.out))
    make_head(second, Silent())
    third = replace(second, out=tmp_path / "third", recipe=replace(second.recipe, mean=True))
    make_head(third, Silent())  # of the training that is there
    begun, learnt, mean = (load_file(job.out / "model.safetensors") for job in (first, second, third))
    weights = [name for name, tensor in begun.items() if tensor.is_floating_point()]
    assert any(not torch.equal(begun[name], learnt[name]) for name in weights)
    for name in weights:
        torch.testing.assert_close(mean[name], (begun[name] + learnt[name]) / 2, rtol=1e-5, atol=1e-7)
    told = [job.out.name for job in (second, third) if "this is the mean" in (job.out / "README.md").read_text()]
    assert told == ["third"]
    with pytest.raises(ConfigError, match="--mean"):
        replace(recipe, mean=True)


def test_a_head_of_more_layers_begins_as_the_earlier_one(simple_folder: Path, tmp_path: Path) -> None:
    recipe = Recipe(minutes=0, tokens=4000, steps=3, batch=48, limits=Limits(max_question=24, max_answer=64),
                    draft_vocab=160, learning_rate=5e-3, rows_per_step=320, dtype="float32")
    first = Job(simple_folder, "simple", tmp_path / "first", tmp_path / "work", (), recipe)
    before = make_head(first, Silent())
    still = replace(recipe, steps=1, generate=False, learning_rate=0.0, begin=first.out, layers=2)
    second = replace(first, out=tmp_path / "second", recipe=still)
    with pytest.raises(ConfigError, match=r"was trained with another begin, layers, learning_rate;"):
        make_head(second, Silent())
    after = make_head(replace(second, work=tmp_path / "more", data=(first.work,)), Silent())
    assert before and before == after
    keeps = f"was trained with another layers; choose another --work .--data {tmp_path / 'more'} keeps"
    with pytest.raises(ConfigError, match=keeps):
        make_head(replace(second, work=tmp_path / "more", recipe=replace(still, layers=1), data=(first.work,)),
                  Silent())
    with pytest.raises(ConfigError, match="--layers"):
        replace(still, kind="dspark")
    deep = read_head(second.out, simple_folder)
    assert deep.config.num_layers == 2 and "`layers.0.*` to `layers.1.*`" in (second.out / "README.md").read_text()
    learnt = make_head(replace(second, work=tmp_path / "further", data=(first.work,),
                               recipe=replace(still, steps=40, learning_rate=5e-3)), Silent())
    assert learnt["chain of 5"].length > after["chain of 5"].length + 0.1


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_held_out_conversations_without_an_answer_say_nothing(tiny_folder: Path, kind: Literal["eagle3", "dspark"]
                                                              ) -> None:
    """Their questions are longer than what is read of a conversation. Training goes on, and is saved."""
    config = ModelConfig.from_folder(tiny_folder)
    head = random_head(tiny_folder) if kind == "eagle3" else warm_block_head(
        config, load_tensors(tiny_folder), torch.arange(3, 3 + DRAFT_VOCAB), 259, 0, DIRECT)
    talk, saved = conversation(config, 20, 1), list[int]()
    asked = replace(talk, roles=np.full(20, GIVEN, np.uint8))
    training = Training(head, Recipe(minutes=0, tokens=1, steps=2, kind=kind), [talk], [asked],
                        lambda step, checkpoint: saved.append(step))
    training.run(math.inf, lambda progress, share: None)
    assert saved == [2] and [point.held_out for point in training.progress.history] == [()]


def test_a_state_that_is_no_number_costs_its_step_alone(tiny_folder: Path) -> None:
    config, head = ModelConfig.from_folder(tiny_folder), random_head(tiny_folder)
    talks = [conversation(config, 30, number) for number in range(6)]
    talks[2].states[10] = 0x7FC0  # NaN in bfloat16
    training = Training(head, Recipe(minutes=0, tokens=1, steps=12, rows_per_step=40), talks, [], lambda *_: None)
    training.run(math.inf, lambda progress, share: None)
    assert training.progress.step == 12 and math.isfinite(training.progress.loss)
    assert all(bool(tensor.isfinite().all()) for tensor in head.tensors.values())


@pytest.mark.parametrize(("rate", "size", "said"), [(1e9, DRAFT_VOCAB, "--learning-rate: losses"),
                                                    (1e-3, 1, "--draft-vocab: no token")])
def test_a_training_that_learns_nothing_ends(tiny_folder: Path, rate: float, size: int, said: str) -> None:
    """A rate that throws the weights out of all bounds, and a draft vocabulary that the target does not use."""
    config, saved = ModelConfig.from_folder(tiny_folder), list[int]()
    used = {int(token) for number in range(4) for token in conversation(config, 30, number).greedy}
    unused = torch.tensor(sorted(set(range(config.vocab_size)) - used)[:1])
    head = random_head(tiny_folder) if size > 1 else warm_head(config, load_tensors(tiny_folder), unused, 1, 0, DIRECT)
    talks, recipe = [conversation(config, 30, number) for number in range(4)], Recipe(
        minutes=0, tokens=1, steps=1000, rows_per_step=40, learning_rate=rate)
    training = Training(head, recipe, talks, [], lambda step, checkpoint: saved.append(step))
    with pytest.raises(ConfigError, match=said):
        training.run(math.inf, lambda progress, share: None)
    assert not saved, "what is no head any more replaced the checkpoint before"


@pytest.mark.parametrize(("context", "said"), [(400, "give at most 245"), (128, "give --prompts")])
def test_conversations_that_no_context_holds_are_told(tmp_path: Path, context: int, said: str) -> None:
    """Plans would be drawn for ever, and none of them would fit."""
    folder = write_tiny_model(tmp_path / "target", max_position_embeddings=context)
    recipe = Recipe(minutes=0, tokens=100, steps=1, batch=2, dtype="float32")
    with pytest.raises(ConfigError, match=f"--max-answer: the target's context holds {context} tokens.*{said}"):
        talked(folder, tmp_path / "work", recipe)
    if context == 400:
        most = replace(recipe, limits=Limits(max_answer=245))
        assert talked(folder, tmp_path / "work", most).conversations


def test_a_targets_context_takes_no_memory_that_conversations_do_not(simple_folder: Path, tmp_path: Path,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values for all of 131,072 tokens are 15 GB with Llama 3.2 3B."""
    made = list[int]()

    class Counted(ModelRunner):
        def __init__(self, model: CausalModel, num_slots: int) -> None:
            made.append(num_slots)
            super().__init__(model, num_slots)

    monkeypatch.setattr("slipstream.train.workers.ModelRunner", Counted)
    shutil.copytree(simple_folder, folder := tmp_path / "target")
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 1 << 20}
    (folder / "config.json").write_text(json.dumps(config))
    (prompts := tmp_path / "prompts.jsonl").write_text(
        json.dumps({"turns": ["what"] * 9}) + "\n" + json.dumps({"prompt": "x" * 40}))
    limits = Limits(max_prompt=40, max_question=4, max_answer=8)
    recipe = Recipe(minutes=0, tokens=60, steps=1, batch=1, limits=limits, dtype="float32")
    asked = talked(folder, tmp_path / "asked", recipe)
    given = talked(folder, tmp_path / "given", replace(recipe, tokens=0, prompts=prompts))
    assert asked.conversations and given.conversations == 2, "there was no room for the longest"
    assert len(made) == 2 and max(made) < 5000, made


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_answers_behind_what_is_read_are_told(simple_folder: Path, tmp_path: Path, kind: Literal["eagle3", "dspark"],
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """Training would never make a step, and never end."""
    monkeypatch.setattr("slipstream.train.stages.MAX_TOKENS", 60)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "x" * 60}) + "\n")
    recipe = Recipe(minutes=0, steps=1, prompts=prompts, batch=4, limits=Limits(max_answer=8), draft_vocab=100,
                    kind=kind)
    job = Job(simple_folder, "simple", tmp_path / "head", tmp_path / "work", (), recipe)
    with pytest.raises(ConfigError, match="there is nothing to learn: of a conversation the first 60 tokens are read"):
        make_head(job, Silent())


@pytest.mark.parametrize(("option", "place", "said"), [
    ("--out", "target", "--out: .*target is the target's own folder"),
    ("--out", "full", "--out: .*full holds other things"),
    ("--out", "work", "--out: .*work is the folder of --work"),
    ("--out", "full/README.md/head", "--out: cannot write"),
    ("--out", ".", "--out: .*holds other things"),
    ("--work", "full/README.md", "--work: cannot write")])
def test_a_place_that_cannot_be_is_refused_before_anything_is_made(simple_folder: Path, tmp_path: Path, option: str,
                                                                   place: str, said: str,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "target").symlink_to(simple_folder)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/README.md").write_text("of somebody else")
    options = {"--target": "target", "--work": "work", "--out": "head", option: place}
    result = CliRunner().invoke(app, ["train-head", "--minutes", "0", "--tokens", "1", "--steps", "1",
                                      *(word for pair in options.items() for word in pair)])
    assert isinstance(result.exception, ConfigError), result.exception
    assert re.search(said, str(result.exception)), result.exception
    assert not list(tmp_path.rglob("shard-*")) and not list(tmp_path.rglob("head/*"))
    assert (tmp_path / "full/README.md").read_text() == "of somebody else"


def test_a_training_that_cannot_go_on_is_refused_before_anything_is_made(simple_folder: Path, tmp_path: Path) -> None:
    """Talking takes hours, and what is wrong was told behind it."""
    recipe = Recipe(minutes=0, tokens=100, steps=1, batch=4, limits=Limits(max_question=8, max_answer=8),
                    draft_vocab=100, dtype="float32", begin=simple_folder)
    job = Job(simple_folder, "simple", tmp_path / "head", tmp_path / "work", (), recipe)
    with pytest.raises(ModelError):  # a model is no head
        make_head(job, Silent())
    identity = identity_of(simple_folder, ModelConfig.from_folder(simple_folder))
    saved_with = replace(recipe, unroll=2).identity() | {"max_rows": 1024} | identity  # as saved before it was fixed
    save(job.work / "checkpoints-eagle3", 1, Checkpoint({}, {}, {}), saved_with)
    with pytest.raises(ConfigError, match="was trained with another unroll"):
        make_head(job, Silent())
    assert not list(tmp_path.rglob("shard-*"))


def test_two_runs_in_one_folder_do_not_meet(simple_folder: Path, tmp_path: Path) -> None:
    """The second would take the first one's halves for those of a killed run, and remove its checkpoints."""
    recipe = Recipe(minutes=0, tokens=100, batch=4, limits=Limits(max_question=8, max_answer=8), dtype="float32",
                    train=False)
    job = Job(simple_folder, "simple", tmp_path / "head", tmp_path / "work", (), recipe)
    job.work.mkdir()
    first = subprocess.Popen([sys.executable, "-c", "import sys, pathlib\n"
                              "from slipstream.train.folders import lock_folder\n"
                              "with lock_folder(pathlib.Path(sys.argv[1])):\n"
                              "    print('in', flush=True); sys.stdin.read()",
                              str(job.work)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert first.stdout is not None and first.stdout.readline() == b"in\n"
    half = job.work / "shard-00000.partial"
    half.mkdir()
    with pytest.raises(ConfigError, match=r"--work: another run is at work in .*work; wait for it"):
        make_head(job, Silent())
    assert half.exists()
    first.kill()
    first.communicate()
    make_head(job, Silent())
    assert list(job.work.glob("shard-*")) and not half.exists()


def test_a_head_is_made_for_the_text_of_a_model_that_sees(simple_folder: Path, tmp_path: Path) -> None:
    """As Mistral Small 3.1 is."""
    target = tmp_path / "seeing"
    shutil.copytree(simple_folder, target)
    text = json.loads((simple_folder / "config.json").read_text()) | {"model_type": "mistral", "sliding_window": None}
    (target / "config.json").write_text(json.dumps({"model_type": "mistral3", "text_config": text}))
    save_file({f"language_model.{name}": tensor for name, tensor in load_tensors(simple_folder).items()},
              target / "model.safetensors", metadata={"format": "pt"})
    recipe = Recipe(minutes=0, tokens=600, steps=3, batch=8, limits=Limits(max_question=24, max_answer=64),
                    draft_vocab=160, learning_rate=5e-3, rows_per_step=320, dtype="float32")
    make_head(Job(target, "seeing", tmp_path / "head", tmp_path / "work", (), recipe), Silent())
    assert read_head(tmp_path / "head", target).config.num_layers == 1


def test_a_target_of_another_family_is_refused_with_those_that_are_trained_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gemma2"}')
    result = CliRunner().invoke(app, ["train-head", "--target", str(tmp_path)])
    assert isinstance(result.exception, ConfigError), result.exception
    assert "'gemma2', and heads are trained for llama, mistral" in str(result.exception)
    assert "--set" not in str(result.exception)


def test_a_target_in_int8_is_refused(tmp_path: Path) -> None:
    """A head would begin with its whole numbers, and their scales would be lost."""
    source = write_tiny_model(tmp_path / "target", hidden_size=64, num_attention_heads=2, num_key_value_heads=1,
                              head_dim=32)
    folder = prepare_as("int8", source, tmp_path / "whole")
    result = CliRunner().invoke(app, ["train-head", "--target", str(folder), "--minutes", "0", "--tokens", "1",
                                      "--steps", "1", "--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")])
    assert isinstance(result.exception, ConfigError), result.exception
    assert "holds int8 weights; name the folder that it was prepared from" in str(result.exception)
    assert not (tmp_path / "work").exists()


def test_a_head_is_named_unlike_those_that_come_along(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    jobs = list[Job]()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training, "resolve", Path)
    monkeypatch.setattr(training, "make_head", lambda job, watcher: jobs.append(job))
    result = CliRunner().invoke(app, ["train-head"])
    assert result.exit_code == 0, result.exception
    assert [job.out.name for job in jobs] == ["smollm2-135m-eagle3-trained"] and jobs[0].out.name not in HEADS


def test_the_command_that_serves_a_head_can_be_run_wherever_it_lies(monkeypatch: pytest.MonkeyPatch,
                                                                     tmp_path: Path) -> None:
    (tmp_path / "my models").mkdir()
    monkeypatch.chdir(tmp_path / "my models")
    monkeypatch.setattr(training, "resolve", Path)
    monkeypatch.setattr(training, "make_head", lambda job, watcher: {})
    result = CliRunner().invoke(app, ["train-head", "--target", "the 8b"])
    command = shlex.split(result.output.partition("serve it:")[2])
    config = load(None, tuple(word for option, word in pairwise(command) if option == "--set"))
    assert (config.model.path, config.draft.model) == ("the 8b", str(Path("the 8b-eagle3-trained").absolute()))


def test_a_target_that_is_named_by_where_one_stands_has_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Else all such targets share one folder of --work, which is that of the others' folders."""
    jobs = list[Job]()
    (tmp_path / "mine/within").mkdir(parents=True)
    monkeypatch.setattr(training, "resolve", Path)
    monkeypatch.setattr(training, "make_head", lambda job, watcher: jobs.append(job))
    for place, target in ((tmp_path / "mine", "."), (tmp_path / "mine/within", ".."), (tmp_path, "mine/")):
        monkeypatch.chdir(place)
        result = CliRunner().invoke(app, ["train-head", "--target", target])
        assert result.exit_code == 0, result.exception
    assert {(job.name, job.out.name, job.work.name) for job in jobs} == {("mine", "mine-eagle3-trained", "mine")}


def test_a_target_without_a_chat_template_goes_on_with_given_prompts(simple_folder: Path, tmp_path: Path) -> None:
    folder, prompts = tmp_path / "target", tmp_path / "prompts.jsonl"
    shutil.copytree(simple_folder, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": None}))
    prompts.write_text('{"prompt": "abc"}\n{"turns": ["de", "fg"]}\n')
    recipe = Recipe(minutes=0, steps=1, prompts=prompts, batch=4, limits=Limits(max_answer=8))
    talked(folder, tmp_path / "work", recipe)
    identity = identity_of(folder, ModelConfig.from_folder(folder))
    given = [bytes(int(token) for token in talk.tokens[talk.roles == GIVEN] if token < 256)
             for talk in Shards([tmp_path / "work"], identity).conversations(held_out=False)]
    assert sorted(given) == [b"abc", b"defg"]


def test_the_turns_are_those_that_the_router_writes(tmp_path: Path) -> None:
    """Else a head learns from texts that nobody is served."""
    folder = write_tiny_model(tmp_path / "target")
    plain, config = read_turn_template(folder), json.loads((folder / "tokenizer_config.json").read_text())
    for template in ([{"name": "tool_use", "template": "{{ tools }}"}, {"name": "default", "template": CHAT_TEMPLATE}],
                     CHAT_TEMPLATE.replace("{% if", "{% generation %}{% endgeneration %}{% if"),
                     "{% if tools is not none %}{{ raise_exception('no tools') }}{% endif %}" + CHAT_TEMPLATE,
                     "{{ strftime_now('') }}" + CHAT_TEMPLATE):
        (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
        turns, codec = read_turn_template(folder), TextCodec(folder)
        asked = codec.chat([{"role": role, "content": role} for role in ("user", "assistant", "user")])
        codec.close()
        said = ("user", turns.to_answer, "assistant", turns.to_question, "user", turns.to_answer)
        assert turns.encode("".join([turns.opening, *said])) == asked
        assert (turns.opening, turns.to_answer, turns.no_chat_template) == (plain.opening, plain.to_answer, False)
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match=r"chat_template\.jinja: cannot be read"):
        read_turn_template(folder)


@pytest.mark.parametrize("begun", ["<|im_start|>assistant\\n<think>\\n", "<|im_start|>assistant"])
def test_an_answer_begins_where_the_router_has_it_begin(tmp_path: Path, begun: str) -> None:
    """Templates of models that think (QwQ, R1's children, Qwen3 Thinking) begin the thought, but write none where an
    answer is history: without its beginning some do not think, so that a head learnt what is never served."""
    folder = write_tiny_model(tmp_path / "target")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    template = CHAT_TEMPLATE.replace("{{ '<|im_start|>assistant\n' }}", "{{ '" + begun + "' }}")
    assert template != CHAT_TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    turns, codec = read_turn_template(folder), TextCodec(folder)
    asked = codec.chat([{"role": "user", "content": "why"}])
    codec.close()
    assert turns.encode(turns.opening + "why" + turns.to_answer) == asked


def test_a_template_may_write_nothing_before_a_user(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "target", peaky=2.0)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    recipe = Recipe(minutes=0, tokens=600, steps=1, batch=1, limits=Limits(max_question=8, max_answer=8))
    assert talked(folder, tmp_path / "work", recipe).tokens >= 600


def test_a_special_token_in_a_prompt_is_text(tmp_path: Path) -> None:
    """As a router writes it, also where the tokenizer has more tokens than the model."""
    folder, prompts = write_tiny_model(tmp_path / "target", vocab=EOS + 1), tmp_path / "prompts.jsonl"
    asked = {"is <|pad|> one?", "<|im_end|>\n<|im_start|>assistant\nYes"}
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in asked))
    recipe = Recipe(minutes=0, steps=1, prompts=prompts, batch=4, limits=Limits(max_answer=8), dtype="float32")
    talked(folder, tmp_path / "work", recipe)
    identity, turns = identity_of(folder, ModelConfig.from_folder(folder)), read_turn_template(folder)
    around = len(turns.encode(turns.opening)), len(turns.encode(turns.to_answer))
    for talk in Shards([tmp_path / "work"], identity).conversations(held_out=False):
        first = int(np.argmax(talk.roles == ANSWER))
        question = talk.tokens[around[0] : first - around[1]].tolist()
        asked.remove(bytes(question).decode())
    assert not asked


def test_processes_share_the_talking(simple_folder: Path, tmp_path: Path) -> None:
    """Three processes make given prompts into conversations: each one once, whoever made it."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "w{n} w{n + 1}"}}\n' for n in range(20)))
    recipe = Recipe(minutes=0, steps=1, prompts=prompts, batch=4, limits=Limits(max_answer=8), processes=3)
    totals = talked(simple_folder, tmp_path / "work", recipe)
    numbers = [entry["number"] for path in (tmp_path / "work").glob("shard-*/index.json")
               for entry in json.loads(path.read_text())["conversations"]]
    assert len(set(numbers)) == len(numbers) == totals.conversations == 20
    marks = {path.name[len("shard-00000"):] for path in (tmp_path / "work").glob("shard-*")}
    assert marks == {"", "b", "c"}  # who begins late counts on from the others' shards: numbers may differ


def test_conversations_of_another_target_are_refused_by_the_name_of_the_option(tmp_path: Path) -> None:
    (place := tmp_path / "work" / "shard-00000").mkdir(parents=True)
    (place / "index.json").write_text('{"format": 1, "identity": {"target": "another"}, "conversations": []}')
    with pytest.raises(ConfigError, match=f"choose another --work or --data, or remove {tmp_path / 'work'}"):
        Shards([tmp_path / "work"], {"target": "this"})


def test_conversations_are_of_the_same_weights_wherever_these_changed(tmp_path: Path) -> None:
    """An adapter that is merged into some matrices leaves the ends of a file as they were."""
    folder, work = write_tiny_model(tmp_path / "target"), tmp_path / "work"
    config, recipe = ModelConfig.from_folder(folder), Recipe(minutes=0, tokens=40, steps=1, batch=2,
                                                              limits=Limits(max_question=8, max_answer=8))
    talked(folder, work, recipe)
    tensors = load_tensors(folder)
    tensors["lm_head.weight"][len(tensors["lm_head.weight"]) // 2] += 1.0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="was made with another target"):
        Shards([work], identity_of(folder, config))


def test_further_conversations_are_there_and_count_once(simple_folder: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    recipe = Recipe(minutes=0, tokens=200, train=False, batch=8, limits=Limits(max_question=24, max_answer=16))
    job = Job(simple_folder, "simple", tmp_path / "head", work, (), recipe)
    make_head(job, Silent())
    told = Silent()
    make_head(replace(job, data=(work, work / ".." / "work"), recipe=replace(recipe, generate=False)), told)
    count = len(Shards([work], identity_of(simple_folder, ModelConfig.from_folder(simple_folder))).numbers())
    assert told.lines[0].startswith(f"{count} conversations, "), told.lines
    with pytest.raises(ConfigError, match=f"--data: there are no conversations in {tmp_path / 'mistyped'}"):
        make_head(replace(job, work=tmp_path / "more", data=(work, tmp_path / "mistyped")), Silent())
    assert not list(tmp_path.glob("more/shard-*")), "it is said before anything is made"


def test_the_card_says_so_when_prompts_were_given_in_another_run(simple_folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "w{n} w{n + 1}"}}\n' for n in range(8)))
    recipe = Recipe(minutes=0, tokens=200, steps=1, batch=8, limits=Limits(max_question=24, max_answer=16),
                    draft_vocab=100, dtype="float32")
    first = Job(simple_folder, "simple", tmp_path / "head", tmp_path / "given", (),
                replace(recipe, prompts=prompts, train=False))
    make_head(first, Silent())
    make_head(replace(first, recipe=replace(recipe, generate=False)), Silent())
    told = (first.out / "README.md").read_text()
    assert "Prompts were given." in told and "No outside text" not in told and "No benchmark" not in told
    assert "on answers. It began" in told, "what was given is not learnt"
    make_head(replace(first, work=tmp_path / "own", data=(first.work,), recipe=recipe), Silent())
    told = (first.out / "README.md").read_text()
    assert "Some prompts were given; elsewhere the target wrote the questions too" in told
    assert "on questions and answers. It began" in told
    make_head(replace(first, work=tmp_path / "own", out=tmp_path / "other", recipe=recipe), Silent())
    assert "No outside text: the target wrote the questions too" in (tmp_path / "other/README.md").read_text()


def test_prompts_that_nobody_would_be_asked_are_refused(tmp_path: Path) -> None:
    """They were not read, and the card said that they were given."""
    with pytest.raises(ConfigError, match="--prompts: with --no-generate nothing is asked"):
        Recipe(generate=False, prompts=tmp_path / "prompts.jsonl")


def test_a_file_of_prompts_may_begin_with_a_mark_of_its_encoding(tmp_path: Path) -> None:
    """Some editors and shells write one."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "w1"}\r\n{"turns": ["w2", "w3"]}\r\n', encoding="utf-8-sig")
    assert read_prompts(file) == [("w1",), ("w2", "w3")]


def test_who_interrupts_a_run_hears_what_is_kept(simple_folder: Path, tmp_path: Path,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(job: Job, watcher: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "make_head", interrupted)
    result = CliRunner().invoke(app, ["train-head", "--target", str(simple_folder), "--work", str(tmp_path / "work")])
    assert result.exit_code == 130
    assert f"interrupted: what is whole in {tmp_path / 'work'} is kept" in result.output


def test_a_vocabulary_that_was_chosen_from_too_little_is_told(simple_folder: Path, tmp_path: Path) -> None:
    """Who tries a minute first, and then trains for hours, goes on with the words of that minute."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "w1"}\n')
    recipe = Recipe(minutes=0, tokens=1, steps=1, batch=8, limits=Limits(max_question=8, max_answer=8), draft_vocab=16,
                    dtype="float32", prompts=prompts)
    job = Job(simple_folder, "simple", tmp_path / "head", tmp_path / "work", (), recipe)
    first, more = Silent(), Silent()
    make_head(job, first)
    make_head(replace(job, recipe=replace(recipe, prompts=None, tokens=2000, steps=2, batch=48)), more)
    told = f"one chosen now would cover [0-9.]+%: remove {job.work / 'checkpoints-eagle3'} to train anew with it"
    assert re.search(told, "\n".join(more.lines)) and not re.search(told, "\n".join(first.lines)), more.lines


def test_where_nothing_is_held_out_the_card_says_so(simple_folder: Path, tmp_path: Path) -> None:
    """It said that about one in twenty was, and nothing of why it tells no acceptance."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "w{n}"}}\n' for n in range(4)))
    recipe = Recipe(minutes=0, steps=1, batch=4, limits=Limits(max_answer=16), draft_vocab=100, dtype="float32",
                    prompts=prompts)
    job, told = Job(simple_folder, "simple", tmp_path / "head", tmp_path / "work", (), recipe), Silent()
    assert make_head(job, told) == {}
    text = (job.out / "README.md").read_text()
    assert "0 of the conversations were held out." in text and "what it gives is not measured" in text
    assert "slipstream tune" in told.lines[-1] and "drafting for held-out prompts" not in told.lines
    make_head(replace(job, work=tmp_path / "own", recipe=replace(recipe, prompts=None, tokens=3000, batch=48)), told)
    text = (job.out / "README.md").read_text()
    assert re.search(r" [1-9][0-9]* of the conversations were held out\.", text) and "not measured" not in text


def test_conversations_that_run_are_shown(simple_folder: Path, tmp_path: Path) -> None:
    """For a minute or more none has ended, and talking looked as if it stood."""
    shown = list[tuple[int, float]]()
    recipe = Recipe(minutes=0, tokens=300, steps=1, batch=4, limits=Limits(max_question=8, max_answer=16))
    made = talked(simple_folder, tmp_path / "work", recipe, lambda totals, share: shown.append((totals.tokens, share)))
    assert 0 < shown[0][0] < shown[1][0] and shown[0][1] == 0.0, shown
    assert made.tokens >= 300, "but what has not ended counts for no limit"


def test_processes_stop_when_it_is_enough(simple_folder: Path, tmp_path: Path) -> None:
    recipe = Recipe(minutes=0, tokens=2000, steps=1, batch=4, limits=Limits(max_answer=16), processes=2, save_every_s=1)
    totals = talked(simple_folder, tmp_path / "work", recipe)
    assert totals.tokens >= 2000 and not multiprocessing.active_children()
    again = talked(simple_folder, tmp_path / "work", recipe)
    assert again == totals


def test_a_process_that_is_lost_ends_the_talking_at_once(simple_folder: Path, tmp_path: Path) -> None:
    def report(totals: Totals, share: float) -> None:
        for process in multiprocessing.active_children() if share * recipe.tokens > 400 else ():  # some have ended
            process.kill()
        assert totals.tokens < 100_000, "it talks on for hours"

    recipe = Recipe(minutes=0, tokens=1 << 30, steps=1, batch=4, limits=Limits(max_answer=16), processes=2)
    with pytest.raises(CapacityError, match="a process that talks has ended"):
        talked(simple_folder, tmp_path / "work", recipe, report)
    assert list((tmp_path / "work").glob("shard-*")), "what it finished is kept"


def prompts_for_others(file: Path, processes: int) -> Path:
    """Thousands of them; those of the first process are all too long."""
    file.write_text("".join(json.dumps({"prompt": f"w{n} w{n + 1}" if n % processes else "w1 " * 200}) + "\n"
                            for n in range(6000)))
    return file


def test_a_limit_holds_where_the_first_process_has_no_prompts_left(simple_folder: Path, tmp_path: Path) -> None:
    recipe = Recipe(minutes=0, tokens=400, steps=1, prompts=prompts_for_others(tmp_path / "prompts.jsonl", 2), batch=4,
                    limits=Limits(max_prompt=32, max_answer=16), processes=2, save_every_s=0.1)
    totals = talked(simple_folder, tmp_path / "work", recipe)
    assert totals.tokens >= 400 and totals.conversations < 3000 and not multiprocessing.active_children()


def test_a_process_that_is_lost_ends_the_others_where_the_first_has_ended(simple_folder: Path, tmp_path: Path) -> None:
    def report(totals: Totals, share: float) -> None:
        for process in multiprocessing.active_children()[:1] if totals.tokens else ():
            process.kill()

    recipe = Recipe(minutes=0, tokens=1 << 30, steps=1, prompts=prompts_for_others(tmp_path / "prompts.jsonl", 3),
                    batch=4, limits=Limits(max_prompt=32, max_answer=16), processes=3, save_every_s=0.1)
    with pytest.raises(CapacityError, match="a process that talks has ended"):
        talked(simple_folder, tmp_path / "work", recipe, report)
    assert not multiprocessing.active_children()


def test_some_questions_are_long() -> None:
    plans = [plan for number in range(400) if (plan := make_plan(number, 0, None)) is not None]
    long = [plan for plan in plans if plan.max_question]
    assert len(plans) == 400 and 20 < len(long) < 80
    assert all(plan.max_question > Limits().max_question and plan.questions == (None,) for plan in long)
    texts = [plan for number in range(200) if (plan := make_plan(number, 0, None, no_chat_template=True)) is not None]
    assert texts and not any(plan.max_question for plan in texts)


def test_prompts_alike_are_on_one_side_and_of_twenty_one_is_held_out() -> None:
    texts = [(f"question {n}",) for n in range(400)]
    made = {prompt.turns: prompt for prompt in number_prompts(texts)}
    assert 8 < sum(prompt.held_out for prompt in made.values()) < 40
    again = number_prompts([*reversed(texts), *texts, *((first, "and then?") for first, in texts)])
    assert len({prompt.number for prompt in again}) == 1200, "each is a conversation"
    assert all(prompt.held_out is made[prompt.turns[:1]].held_out for prompt in again)
    assert [prompt.number for prompt in again[:400]] == [made[turns].number for turns in reversed(texts)]
    known = [turns for turns in texts if not made[turns].held_out][:20]
    judged = {prompt.turns for prompt in number_prompts([*known, *known]) if prompt.held_out}
    assert len(judged) == 1 and not any(prompt.held_out for prompt in number_prompts(known[:19]))
    (alone,) = number_prompts([next(turns for turns in texts if made[turns].held_out)])
    assert not alone.held_out, "nothing would be learnt"
    plans = [plan for place in range(400) if (plan := make_plan(place, 0, again)) is not None]
    assert [(plan.number, plan.held_out) for plan in plans] == [(one.number, one.held_out) for one in again[:400]]


def test_prompts_are_asked_though_the_target_asked_itself_before(simple_folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "w{n} w{n + 1}"}}\n' for n in range(5)) + f'{{"prompt": "{"w" * 40}"}}\n')
    recipe = Recipe(minutes=0, tokens=400, train=False, batch=8, limits=Limits(16, 24, 16))
    job = Job(simple_folder, "simple", tmp_path / "head", tmp_path / "work", (), recipe)
    make_head(job, Silent())
    shards = tmp_path / "work", identity_of(simple_folder, ModelConfig.from_folder(simple_folder))
    before = Shards([shards[0]], shards[1]).totals().conversations
    assert before > 6
    for tokens, made, left in ((400, 0, 6), (0, 5, 1), (0, 5, 1)):
        told = Silent()
        make_head(replace(job, recipe=replace(recipe, prompts=prompts, tokens=tokens)), told)
        assert Shards([shards[0]], shards[1]).totals().conversations == before + made
        assert f"{left} of 6 given prompts have no answer" in told.lines[-1]


def test_where_nothing_is_asked_no_two_conversations_are_one_text() -> None:
    plans = [plan for place in range(200) if (plan := make_plan(place, 0, None, no_chat_template=True)) is not None]
    assert {plan.temperature for plan in plans} == {0.7, 1.0}, "all that is greedy behind nothing is alike"


def test_killed_runs_go_on(simple_folder: Path, tmp_path: Path) -> None:
    """The same command three times: killed while it generates, killed while it trains, and (in this process) to its
    end."""
    work, out = tmp_path / "work", tmp_path / "head"
    command = [sys.executable, "-m", "slipstream", "train-head", "--target", str(simple_folder), "--minutes", "0",
               "--tokens", "3000", "--steps", "30", "--batch", "16", "--max-answer", "48", "--draft-vocab", "100",
               "--dtype", "float32", "--threads", "1", "--save-every", "0.2", "--work", str(work), "--out", str(out)]
    kill_when(command, work, "shard-*[0-9]/index.json")
    shards = {path: path.stat().st_mtime_ns for path in work.glob("shard-*[0-9]/index.json")}
    assert shards and not out.exists()
    kill_when(command, work, "checkpoints-eagle3/step-*[0-9]/state.json")
    assert all(path.stat().st_mtime_ns == written for path, written in shards.items())
    step = newest_step(work)
    assert 0 < step < 30 and not out.exists(), step
    done = CliRunner().invoke(app, command[3:])
    assert done.exit_code == 0, done.output
    assert f"going on at step {step}" in done.stdout and newest_step(work) == 30, done.stdout
    numbers = Shards([work], identity_of(simple_folder, ModelConfig.from_folder(simple_folder))).numbers()
    assert len(numbers) == sum(path.read_text().count('"number"') for path in work.glob("shard-*[0-9]/index.json"))
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1, "who serves it may be somebody else"
    assert "tokens a target step" in done.stdout and len(read_head(out, simple_folder).vocabulary) == 100


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """In any one file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_told_and_what_is_whole_is_kept(tmp_path: Path) -> None:
    def talk(number: int, tokens: int) -> Conversation:
        return Conversation(number, False, 1.0, np.zeros(tokens, np.int32), np.zeros(tokens, np.uint8),
                            np.zeros(tokens, np.int32), np.zeros((tokens, 64), np.uint16))

    writer, identity = ShardWriter(tmp_path / "work", {"target": "this"}), {"target": "this"}
    folder, learnt = tmp_path / "work" / "checkpoints", {"w": torch.zeros(1 << 18)}
    writer.add(talk(0, 8))
    writer.flush(1.0)
    save(folder, 1, Checkpoint(learnt, {}, {"step": 1}), identity)
    writer.add(talk(1, 4096))
    for write in (lambda: writer.flush(1.0), lambda: save(folder, 2, Checkpoint(learnt, {}, {"step": 2}), identity)):
        with room_for(1 << 16), pytest.raises(ConfigError, match=r"^--work: cannot write .*; make room there"):
            write()
    assert not list(tmp_path.rglob("*.partial")), "halves keep the room that is wanted"
    found = load_newest(folder, identity)
    assert found is not None and found.state == {"step": 1}
    writer.flush(1.0)
    assert Shards([tmp_path / "work"], identity).numbers() == {0, 1}


@pytest.mark.parametrize("broken", ["index.json", "tokens.npy", "roles.npy", "greedy.npy", "states.npy",
                                    "state.json", "head.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("how", ["gone", "empty", "half", "shorter"])
def test_what_is_not_whole_is_told_by_name(tmp_path: Path, broken: str, how: str) -> None:
    """A folder that was copied in part, or whose disk lost some of it."""
    def read() -> list[Conversation]:
        load_newest(work / "checkpoints", identity)
        return list(Shards([work], identity).conversations(False))

    work, identity = tmp_path / "work", {"target": "this"}
    writer = ShardWriter(work, identity)
    writer.add(Conversation(0, False, 1.0, np.zeros(64, np.int32), np.zeros(64, np.uint8), np.zeros(64, np.int32),
                            np.zeros((64, 64), np.uint16)))
    writer.flush(1.0)
    save(work / "checkpoints", 1, Checkpoint({"w": torch.zeros(64)}, {"w": torch.zeros(64)}, {"step": 1}), identity)
    assert len(read()) == 1
    (file,) = work.rglob(broken)
    content = file.read_bytes()
    if how == "shorter" and broken.endswith(".npy"):
        np.save(file, np.load(file)[:-1])
    elif how != "gone":
        file.write_bytes(content[: len(content) // 2] if how == "half" else b"" if how == "empty" else b"{}")
    else:
        file.unlink()
    with pytest.raises(ConfigError, match=f"{file.parent} (is no whole shard|cannot be read): .*; copy it again, or "):
        read()


def test_a_checkpoint_of_the_same_step_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command again after the last step, killed while it saves: what was trained is still there."""
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    save(tmp_path, 1, Checkpoint({"w": torch.ones(2)}, {}, {"step": 1}), {})
    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(Path, "rename", killed)
        save(tmp_path, 1, Checkpoint({"w": torch.ones(2)}, {}, {"step": 1}), {})
    found = load_newest(tmp_path, {})
    assert found is not None and found.state == {"step": 1}


def kill_when(command: list[str], folder: Path, pattern: str) -> None:
    """Run ``command`` until a file of ``pattern`` is there, and kill it without a warning."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            while not list(folder.glob(pattern)):
                assert process.poll() is None, process.stderr.read() if process.stderr else ""
                time.sleep(0.01)
        finally:
            process.send_signal(signal.SIGKILL)


def newest_step(work: Path) -> int:
    return max(int(path.name.removeprefix("step-")) for path in (work / "checkpoints-eagle3").glob("step-*[0-9]"))


def test_time_that_other_folders_took_is_not_taken_from_a_training(simple_folder: Path, tmp_path: Path,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """What talking leaves of a run's minutes is for training, however long ``--data`` took."""
    recipe = Recipe(minutes=0, tokens=100, batch=4, limits=Limits(max_question=8, max_answer=8), dtype="float32",
                    draft_vocab=100, train=False)
    first = Job(simple_folder, "simple", tmp_path / "head", tmp_path / "work", (), recipe)
    make_head(first, Silent())
    for index in first.work.glob("shard-*/index.json"):
        index.write_text(json.dumps(json.loads(index.read_text()) | {"seconds": 3600.0}))
    told = list[float]()
    monkeypatch.setattr(Training, "run", lambda self, seconds, report: told.append(seconds))
    made = replace(first, work=tmp_path / "own", data=(first.work,), recipe=replace(recipe, minutes=60.0, train=True))
    make_head(made, Silent())
    assert told[0] > 0.9 * 3600, told
