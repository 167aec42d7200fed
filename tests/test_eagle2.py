"""The EAGLE-1 and EAGLE-2 drafter against the head written out straight in float64, and the folders that it refuses."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.base.config import GrowthSection, ModelSection
from slipstream.base.errors import ModelError
from slipstream.drafting.heads.checkpoint import EagleHead, read_eagle2_head
from slipstream.drafting.heads.eagle import EagleNetwork
from slipstream.drafting.neural import NeuralDrafter
from slipstream.engine.batch import BatchBuilder
from slipstream.engine.loading import load_model
from slipstream.engine.model import load_tensors
from slipstream.engine.runner import ModelRunner
from slipstream.protocol.messages import Commit, Features, Growth, Open
from slipstream.protocol.requests import Sampling
from tests.eagle_folder import (
    eagle2_config,
    eagle2_tensors,
    eagle_config,
    eagle_tensors,
    write_eagle2_folder,
    write_eagle_folder,
)
from tests.growth_rules import GrowthLedger, assert_same, best_paths, scored_paths
from tests.tiny import VOCAB, tiny_config, tiny_tensors, write_tiny_model
from tests.written import WrittenEagle2

WIDTH = 48
Tensor = torch.Tensor
MAP = torch.arange(3, 250, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_eagle2_folder(tmp_path_factory.mktemp("eagle2") / "head", eagle2_config(bias=True))


@pytest.fixture(scope="module")
def head(folder: Path, tiny_folder: Path) -> EagleHead:
    return read_eagle2_head(folder, tiny_folder)


@pytest.fixture(scope="module")
def written(tiny_folder: Path) -> WrittenEagle2:
    own, config = load_tensors(tiny_folder), eagle2_config(bias=True)
    return WrittenEagle2(own["model.embed_tokens.weight"], own["lm_head.weight"], config)


def states_of(count: int, seed: int) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def message(start: int, states: Tensor) -> Features:
    return Features(1, start, states.numpy().tobytes(), len(states), "float64")


def drafter(head: EagleHead, num_slots: int = 300, max_context: int = 0, **growth: int) -> NeuralDrafter:
    network = EagleNetwork(head, "float64", torch.device("cpu"), num_slots)
    return NeuralDrafter("eagle2", network, GrowthSection.model_validate(growth), 8, max_context)


def opening(tokens: list[int], sampling: Sampling | None = None) -> Open:
    return Open(1, np.array(tokens, np.int32), min(4, len(tokens)), sampling or Sampling())


def grow(of: NeuralDrafter, budget: int) -> Growth:
    (growth,) = of.grow([1], [budget])
    return growth


@pytest.mark.parametrize("ids", [None, MAP], ids=["whole", "mapped"])
@pytest.mark.parametrize(("topk", "steps", "nodes"), [(1, 3, 3), (3, 3, 7)])
def test_trees_follow_the_committed_states(folder: Path, tiny_folder: Path, written: WrittenEagle2, topk: int,
                                           steps: int, nodes: int, ids: Tensor | None) -> None:
    """Joint probability, the best nodes of the last level, a re-rank to N: with the target's states and its own."""
    rng = random.Random(3)
    tokens, states = [rng.randrange(VOCAB) for _ in range(6)], states_of(40, seed=2)
    of = drafter(read_eagle2_head(folder, tiny_folder, ids), topk=topk, num_steps=steps, num_draft_tokens=nodes)
    of.open([opening(tokens)])
    of.absorb([message(0, states[:3])])
    assert len(grow(of, 63).ids) == 0  # not all of them
    of.absorb([message(3, states[3:5])])
    ledger = GrowthLedger(tokens)
    for turn in range(3):
        growth = grow(of, 63)
        known = states[:len(tokens) - 1]
        children = partial(written.children, tokens=tokens, states=known, topk=topk, ids=ids)
        assert_same(growth, best_paths(children, topk, steps, nodes), turn)
        ledger.take(growth, nodes, VOCAB)
        new = [*max(scored_paths(growth), key=len)[:turn], rng.randrange(VOCAB)]
        base = len(tokens)
        rows = message(base - 1, states[base - 1:base - 1 + len(new)])
        of.commit([Commit(1, base, np.array(new, np.int32))])
        of.absorb([rows])
        ledger.commit(new)
        tokens += new
    of.close([1])
    of.slots.check([])


def test_a_long_session_slides_over_its_oldest_rows(head: EagleHead, written: WrittenEagle2) -> None:
    states, window, steps = states_of(60, seed=7), 24, 2
    of = drafter(head, num_slots=30, max_context=window, num_steps=steps, num_draft_tokens=2)
    rng = random.Random(6)
    tokens, first = [rng.randrange(VOCAB) for _ in range(40)], 1
    of.open([opening(tokens)])
    of.absorb([message(0, states[:39])])
    for turn in range(14):
        growth = grow(of, 2)
        if len(tokens) + steps - first > window:
            first = len(tokens) - window // 2
        children = partial(written.children, tokens=tokens, states=states[first - 1:len(tokens) - 1], first=first)
        assert_same(growth, best_paths(children, 1, steps, 2), turn)
        base = len(tokens)
        of.commit([Commit(1, base, np.array([turn], np.int32))])
        of.absorb([message(base - 1, states[base - 1:base])])
        tokens.append(turn)


def test_the_state_that_it_reads_is_the_one_that_the_logits_come_from(head: EagleHead, tiny_folder: Path) -> None:
    runner = ModelRunner(load_model(tiny_folder, ModelSection(dtype="float64")), 16)
    of = drafter(head)
    assert of.features is not None
    runner.set_taps(of.features.layers)
    slots, builder = runner.slots.alloc(9), BatchBuilder()
    builder.add(list(b"the cat s"), range(9), slots.tolist(), np.zeros(0, np.int64))
    logits = runner.forward(builder.build())
    assert torch.allclose(runner.features(slots) @ head.tensors["lm_head.weight"].double().T, logits, rtol=0, atol=1e-9)


def test_what_a_head_declares(head: EagleHead) -> None:
    of = drafter(head)
    assert of.features is not None
    assert (of.features.layers, of.features.width, of.features.dtype) == ((2,), WIDTH, "float64")
    assert (of.name, of.vocab_size, of.hidden_size, of.max_context) == ("eagle2", VOCAB, WIDTH, 2048)


def test_sampled_children_stay_in_the_token_map(folder: Path, tiny_folder: Path) -> None:
    of = drafter(read_eagle2_head(folder, tiny_folder, MAP), topk=2, num_steps=3, num_draft_tokens=6)
    of.open([opening(list(range(8)), Sampling(temperature=1.0, repetition_penalty=1.2, seed=5))])
    of.absorb([message(0, states_of(7, seed=8))])
    growth = grow(of, 6)
    assert len(growth.ids) == 6 and set(growth.tokens.tolist()) <= set(MAP.tolist())


def test_the_targets_embedding_is_used_where_both_are_tied(tmp_path: Path, folder: Path) -> None:
    target = write_tiny_model(tmp_path, tie_word_embeddings=True)
    lent = read_eagle2_head(folder, target)
    own = load_tensors(target)["model.embed_tokens.weight"]
    assert all(
        torch.equal(lent.tensors[name], own) for name in ("embed_tokens.weight", "lm_head.weight"))


NEEDED = [name for name in eagle2_tensors(eagle2_config(bias=True)) if name != "embed_tokens.weight"]


@pytest.mark.parametrize("name", NEEDED)
def test_a_missing_or_misshapen_tensor_is_named(tmp_path: Path, tiny_folder: Path, name: str) -> None:
    config = eagle2_config(bias=True)
    tensors = eagle2_tensors(config)
    cut = tensors | {name: tensors[name][:-1].clone()}
    with pytest.raises(ModelError, match=f"{name} has shape .* expected"):
        read_eagle2_head(write_eagle2_folder(tmp_path / "cut", config, cut), tiny_folder)
    del tensors[name]
    with pytest.raises(ModelError, match=f"{name} is missing"):
        read_eagle2_head(write_eagle2_folder(tmp_path / "missing", config, tensors), tiny_folder)


@pytest.mark.parametrize(("change", "match"), [
    ({"vocab_size": 300}, "vocab_size: the head was made for 300 tokens, the target has 260"),
    ({"hidden_size": 64, "num_attention_heads": 4}, "hidden_size: the head was made for 64, the target has 48"),
    ({"architectures": ["LlamaForCausalLMEagle3"]}, "architectures: .*eagle3"),
    ({"num_hidden_layers": 2}, "num_hidden_layers: expected 1, found 2"),
    ({"bias": True}, r"bias: True, but tensor fc\.bias is missing"),
    ({"bias": "yes"}, "bias: expected true or false, found 'yes'"),
    ({"qkv_bias": True}, "self_attn.q_proj.bias is missing"),
])
def test_a_config_that_does_not_fit_is_refused(tmp_path: Path, tiny_folder: Path, change: dict[str, Any],
                                               match: str) -> None:
    folder = write_eagle2_folder(tmp_path, eagle2_config(**change), eagle2_tensors(eagle2_config()))
    with pytest.raises(ModelError, match=match):
        read_eagle2_head(folder, tiny_folder)


def a_whole_model(folder: Path) -> Path:
    config = tiny_config(num_hidden_layers=1)
    return write_eagle2_folder(folder, config, tiny_tensors(config))


def an_eagle3_head(folder: Path) -> Path:
    config = eagle_config(architectures=["LlamaForCausalLM"])
    return write_eagle_folder(folder, config | {"hidden_size": 48}, eagle_tensors(config))


def a_head_with_an_input_norm(folder: Path) -> Path:
    tensors = eagle2_tensors(eagle2_config()) | {"layers.0.input_layernorm.weight": torch.ones(48)}
    return write_eagle2_folder(folder, tensors=tensors)


def an_unspoken_bias(folder: Path) -> Path:
    return write_eagle2_folder(folder, eagle2_config(bias=False), eagle2_tensors(eagle2_config(bias=True)))


def speculators_with_norms(folder: Path) -> Path:
    config = {"speculators_model_type": "eagle", "layernorms": True, "transformer_layer_config": eagle2_config()}
    return write_eagle2_folder(folder, config, eagle2_tensors(eagle2_config()))


@pytest.mark.parametrize(("write", "match"), [
    (a_whole_model, "fc.weight is missing: this is no EAGLE-1 or EAGLE-2 head; .*standalone"),
    (an_eagle3_head, "fc.weight has shape"),
    (a_head_with_an_input_norm, "layers.0.input_layernorm.weight is no part of the head"),
    (an_unspoken_bias, "bias: False, but tensor fc.bias is there"),
    (speculators_with_norms, "layernorms: .*not supported"),
])
def test_what_is_no_such_head_is_refused(tmp_path: Path, tiny_folder: Path, write: Callable[[Path], Path],
                                         match: str) -> None:
    with pytest.raises(ModelError, match=match):
        read_eagle2_head(write(tmp_path), tiny_folder)


def test_a_folder_of_pickles_is_refused_with_the_way_out(tmp_path: Path, tiny_folder: Path) -> None:
    write_eagle2_folder(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is a pickle.*convert it once.*save_file"):
        read_eagle2_head(tmp_path, tiny_folder)
