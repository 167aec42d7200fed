"""The EAGLE-3 drafter against the head written out straight in float64, and the folders that it refuses."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from slipstream.base.config import GrowthSection
from slipstream.base.errors import ModelError
from slipstream.drafting.heads.checkpoint import EagleHead, read_head
from slipstream.drafting.heads.eagle import EagleNetwork
from slipstream.drafting.neural import NeuralDrafter
from slipstream.engine.batch import BatchBuilder
from slipstream.protocol.messages import Commit, Features, Growth, Open
from slipstream.protocol.requests import Sampling
from tests.eagle_folder import eagle_config, eagle_tensors, write_eagle_folder
from tests.growth_rules import assert_same, best_paths, scored_paths
from tests.tiny import VOCAB, write_tiny_model
from tests.written import WrittenEagle3 as Written

WIDTH = 3 * 48
Tensor = torch.Tensor


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("eagle") / "target", num_hidden_layers=8)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory, target: Path) -> EagleHead:
    return read_head(write_eagle_folder(tmp_path_factory.mktemp("eagle") / "head"), target)


DEEP = eagle_config(num_hidden_layers=3)  # as vLLM and SGLang read a head of several layers


@pytest.fixture(scope="module")
def deep_head(tmp_path_factory: pytest.TempPathFactory, target: Path) -> EagleHead:
    return read_head(write_eagle_folder(tmp_path_factory.mktemp("eagle") / "deep", DEEP, eagle_tensors(DEEP)), target)


def states_of(count: int, seed: int) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def message(session: int, start: int, states: Tensor) -> Features:
    return Features(session, start, states.numpy().tobytes(), len(states), "float64")


def opening(session: int, tokens: Sequence[int], sampling: Sampling | None = None) -> Open:
    return Open(session, np.array(tokens, np.int32), min(4, len(tokens)), sampling or Sampling())


CHAIN = {"num_steps": 4, "topk": 1, "num_draft_tokens": 4}  # where a test says nothing else


def drafter(head: EagleHead, num_slots: int = 600, max_context: int = 0, **growth: int) -> NeuralDrafter:
    network = EagleNetwork(head, "float64", torch.device("cpu"), num_slots)
    return NeuralDrafter("eagle3", network, GrowthSection.model_validate(CHAIN | growth), 8, max_context)


def grow(of: NeuralDrafter, budget: int) -> Growth:
    (growth,) = of.grow([1], [budget])
    return growth


@pytest.mark.parametrize("config", [eagle_config(), DEEP], ids=["one layer", "three layers"])
def test_prefill_and_tree_rows_equal_the_head_written_out(head: EagleHead, deep_head: EagleHead,
                                                          config: dict[str, object]) -> None:
    written = Written(config)
    network = EagleNetwork(deep_head if config is DEEP else head, "float64", torch.device("cpu"), 64)
    tokens, states = list(range(40, 52)), states_of(11, seed=1)
    (rows,) = network.read([message(1, 0, states)])
    slots = network.slots.alloc(15)
    builder = BatchBuilder()
    builder.add(tokens[1:], range(11), slots[:11].tolist(), np.zeros(0, np.int64))
    prefill = network.forward(builder.build(features=rows))
    for row in (0, 5, 10):
        logits, out = written.run(tokens[:row + 2], states[:row + 1], ())
        assert torch.allclose(prefill.logits[row], logits, rtol=0, atol=1e-9)
        assert prefill.states is not None
        assert torch.allclose(prefill.states[row], out, rtol=0, atol=1e-9)
    # Two siblings below the root, then a child of each: words over four tree entries.
    assert prefill.states is not None
    root = prefill.states[-1:]
    builder = BatchBuilder()
    builder.add([70, 71], [11, 11], slots[11:13].tolist(), slots[:11], [0b01, 0b10], 2)
    level = network.forward(builder.build(features=root.expand(2, -1)))
    assert level.states is not None
    builder = BatchBuilder()
    builder.add([72, 73], [12, 12], slots[13:].tolist(), slots[:13], [0b0101, 0b1010], 4)
    leaves = network.forward(builder.build(features=level.states))
    for path, found in (((70,), level.logits[0]), ((71,), level.logits[1]), ((70, 72), leaves.logits[0]),
                        ((71, 73), leaves.logits[1])):
        assert torch.allclose(found, written.run(tokens, states, path)[0], rtol=0, atol=1e-9), path


@pytest.mark.parametrize(("topk", "steps", "nodes"), [(1, 3, 3), (3, 3, 6)])
def test_trees_follow_the_committed_states(head: EagleHead, topk: int, steps: int, nodes: int) -> None:
    rng, written = random.Random(3), Written()
    tokens, states = [rng.randrange(VOCAB) for _ in range(6)], states_of(40, seed=2)
    of = drafter(head, topk=topk, num_steps=steps, num_draft_tokens=nodes)
    of.open([opening(1, tokens)])
    assert len(grow(of, 63).ids) == 0  # no states yet
    of.absorb([message(1, 0, states[:3])])
    assert len(grow(of, 63).ids) == 0  # not all of them
    of.absorb([message(1, 3, states[3:5])])
    for turn in range(4):
        growth = grow(of, 63)
        known = states[:len(tokens) - 1]
        wanted = best_paths(partial(written.children, tokens=tokens, states=known, topk=topk), topk, steps, nodes)
        assert_same(growth, wanted, turn)
        new = [*max(scored_paths(growth), key=len)[:turn], rng.randrange(VOCAB)]
        base = len(tokens)
        rows = message(1, base - 1, states[base - 1:base - 1 + len(new)])
        of.commit([Commit(1, base, np.array(new, np.int32))])
        of.absorb([rows])
        tokens += new
    of.close([1])
    of.slots.check([])


def zeros(count: int) -> torch.Tensor:
    return torch.zeros_like(states_of(count, seed=0))


def test_states_that_begin_late_are_bridged_from_the_beginning(head: EagleHead) -> None:
    written, tokens, states = Written(), list(range(10, 30)), states_of(12, seed=4)
    of = drafter(head, num_steps=3, num_draft_tokens=3)
    of.open([opening(1, tokens)])
    of.absorb([message(1, 7, states)])
    known = torch.cat((zeros(7), states))
    assert_same(grow(of, 3), best_paths(partial(written.children, tokens=tokens, states=known), 1, 3, 3))


def test_behind_a_gap_of_half_a_window_the_context_begins_anew(head: EagleHead) -> None:
    written, tokens, states = Written(), list(range(10, 40)), states_of(6, seed=4)
    of = drafter(head, max_context=24, num_steps=3, num_draft_tokens=3)
    of.open([opening(1, tokens)])
    of.absorb([message(1, 0, states_of(5, seed=8)), message(1, 23, states)])
    known = torch.cat((zeros(12), states))
    wanted = best_paths(partial(written.children, tokens=tokens, states=known, first=12), 1, 3, 3)
    assert_same(grow(of, 3), wanted)
    of.close([1])
    of.slots.check([])


def test_a_gap_is_bridged_and_repeats_are_passed_over(head: EagleHead) -> None:
    written, tokens, states = Written(), list(range(10, 30)), states_of(19, seed=5)
    states[6:9] = 0.0
    of = drafter(head, num_steps=3, num_draft_tokens=3)
    of.open([opening(1, tokens)])
    of.absorb([message(1, 0, states[:6]), message(1, 9, states[9:14]), message(1, 10, states[10:14])])
    of.absorb([message(1, 12, states[12:]), message(1, 18, states[18:])])
    wanted = best_paths(partial(written.children, tokens=tokens, states=states), 1, 3, 3)
    assert_same(grow(of, 3), wanted)
    of.commit([Commit(1, 20, np.array([9, 8], np.int32))])  # a commit without states: nothing to go on with
    assert len(grow(of, 3).ids) == 0
    late = states_of(2, seed=6)
    of.absorb([message(1, 19, late)])
    tokens += [9, 8]
    known = torch.cat((states, late))
    assert_same(grow(of, 3), best_paths(partial(written.children, tokens=tokens, states=known), 1, 3, 3))


def test_a_long_session_slides_over_its_oldest_rows(head: EagleHead) -> None:
    written, rng, states = Written(), random.Random(6), states_of(80, seed=7)
    window, steps = 24, 2
    of = drafter(head, num_slots=30, max_context=window, num_steps=steps, num_draft_tokens=2)
    tokens, first = [rng.randrange(VOCAB) for _ in range(50)], 1
    of.open([opening(1, tokens)])
    of.absorb([message(1, 0, states[:49])])
    for turn in range(20):
        growth = grow(of, 2)
        if len(tokens) + steps - first > window:
            first = len(tokens) - window // 2
        known = states[first - 1:len(tokens) - 1]
        wanted = best_paths(partial(written.children, tokens=tokens, states=known, first=first), 1, steps, 2)
        assert_same(growth, wanted, turn)
        base = len(tokens)
        of.commit([Commit(1, base, np.array([turn], np.int32))])
        of.absorb([message(1, base - 1, states[base - 1:base])])
        tokens.append(turn)


def test_a_session_that_was_only_followed_grows_from_its_newest_states(head: EagleHead) -> None:
    written, states = Written(), states_of(80, seed=9)
    window, steps, tokens, first = 24, 2, [1, 2, 3, 4], 1
    of = drafter(head, num_slots=30, max_context=window, num_steps=steps, num_draft_tokens=2)
    of.open([opening(1, tokens)])
    of.absorb([message(1, 0, states[:3])])
    for turn in range(60):
        base = len(tokens)
        of.commit([Commit(1, base, np.array([turn], np.int32))])
        of.absorb([message(1, base - 1, states[base - 1:base])])
        tokens.append(turn)
        if len(tokens) + steps - first > window:
            first = len(tokens) - window // 2
    known = states[first - 1:len(tokens) - 1]
    wanted = best_paths(partial(written.children, tokens=tokens, states=known, first=first), 1, steps, 2)
    assert_same(grow(of, 2), wanted)


def test_states_that_do_not_fit_are_passed_over(head: EagleHead) -> None:
    of = drafter(head)
    of.open([opening(1, range(5))])
    of.absorb([Features(1, 0, b"1234", 4, "float64"), Features(1, 0, bytes(4 * WIDTH * 4), 4, "float32"),
               message(2, 0, states_of(4, 0))])
    assert len(grow(of, 4).ids) == 0


def test_sampled_children_carry_target_ids(head: EagleHead) -> None:
    of = drafter(head, topk=2, num_steps=3, num_draft_tokens=6)
    of.open([opening(1, range(8), Sampling(temperature=1.0, repetition_penalty=1.2, seed=5))])
    of.absorb([message(1, 0, states_of(7, seed=8))])
    growth = grow(of, 6)
    assert len(growth.ids) == 6 and set(growth.tokens.tolist()) <= set(head.vocabulary.tolist())


def test_what_a_head_declares(head: EagleHead) -> None:
    of = drafter(head)
    assert of.features is not None
    assert (of.features.layers, of.features.width, of.features.dtype) == ((2, 4, 5), WIDTH, "float64")
    assert (of.vocab_size, of.hidden_size, of.max_context) == (VOCAB, 48, 2048)


def test_explicit_layer_ids_name_outputs(tmp_path: Path, target: Path) -> None:
    config = eagle_config(eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 3, 6], "use_aux_hidden_state": True})
    assert read_head(write_eagle_folder(tmp_path, config), target).taps == (1, 4, 7)


@pytest.mark.parametrize("rename", [lambda n: n.replace("midlayer.", "layers.0."), lambda n: f"model.{n}",
                                    lambda n: f"model.{n.replace('midlayer.', 'layers.0.')}"])
def test_other_prefixes_are_the_same_head(tmp_path: Path, target: Path, head: EagleHead,
                                          rename: Callable[[str], str]) -> None:
    tensors = {rename(name): tensor for name, tensor in eagle_tensors(eagle_config()).items()}
    again = read_head(write_eagle_folder(tmp_path, tensors=tensors), target)
    assert set(again.tensors) == set(head.tensors)
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in head.tensors.items())


def test_without_an_embedding_the_target_lends_its_own(tmp_path: Path, target: Path) -> None:
    config = eagle_config(hidden_size=48)
    tensors = eagle_tensors(config)
    del tensors["embed_tokens.weight"]
    assert read_head(write_eagle_folder(tmp_path / "a", config, tensors), target).tensors["embed_tokens.weight"].shape \
        == (VOCAB, 48)
    tensors = eagle_tensors(eagle_config())
    del tensors["embed_tokens.weight"]
    with pytest.raises(ModelError, match=r"needs the target's embedding.*\(260, 48\), expected \(260, 32\)"):
        read_head(write_eagle_folder(tmp_path / "b", tensors=tensors), target)


@pytest.mark.parametrize("own", [True, False])
def test_tied_embeddings_are_the_head_s_own(tmp_path: Path, target: Path, own: bool) -> None:
    """A head without an embedding has none to tie: the target's would make a wrong lm_head where it ties none."""
    config = eagle_config(hidden_size=48, tie_word_embeddings=True)
    tensors, lent = eagle_tensors(config), load_file(target / "model.safetensors")
    del tensors["lm_head.weight"]
    rows = tensors["embed_tokens.weight"] if own else lent["lm_head.weight"]
    if not own:
        del tensors["embed_tokens.weight"]
    read = read_head(write_eagle_folder(tmp_path, config, tensors), target)
    assert read.vocabulary is not None and torch.equal(read.tensors["lm_head.weight"], rows[read.vocabulary])
    if not own:
        assert torch.equal(read.tensors["embed_tokens.weight"], lent["model.embed_tokens.weight"])


NEEDED = [name for name in eagle_tensors(eagle_config()) if name not in ("t2d", "embed_tokens.weight")]


@pytest.mark.parametrize("name", NEEDED)
def test_a_missing_tensor_is_named(tmp_path: Path, target: Path, name: str) -> None:
    tensors = eagle_tensors(eagle_config())
    del tensors[name]
    with pytest.raises(ModelError, match=f"^{tmp_path}: tensor {name.replace('midlayer', 'layers.0')} is missing"):
        read_head(write_eagle_folder(tmp_path, tensors=tensors), target)


@pytest.mark.parametrize("name", [*NEEDED, "t2d", "embed_tokens.weight"])
def test_a_wrong_shape_is_named(tmp_path: Path, target: Path, name: str) -> None:
    tensors = eagle_tensors(eagle_config())
    tensors[name] = tensors[name][:-1].clone()
    plain = name.replace("midlayer", "layers.0")
    with pytest.raises(ModelError, match=f"{plain} has shape .* expected"):
        read_head(write_eagle_folder(tmp_path, tensors=tensors), target)


@pytest.mark.parametrize(("change", "match"), [
    ({"vocab_size": 300}, "vocab_size: the head was made for 300 tokens, the target has 260"),
    ({"target_hidden_size": 64}, "target_hidden_size: the head was made for 64, the target has 48"),
    ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": None}, "architectures: .*eagle2"),
    ({"num_hidden_layers": 2}, "layers.1.input_layernorm.weight is missing"),
    ({"num_hidden_layers": 17}, "num_hidden_layers: expected 1 to 16, found 17"),
    ({"draft_vocab_size": 0}, "draft_vocab_size"),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 9]}}, "layer_ids: .* target with 8 layers"),
    ({"eagle_config": {"use_aux_hidden_state": False}}, "eagle_config"),
])
def test_a_config_that_does_not_fit_is_refused(tmp_path: Path, target: Path, change: dict[str, object],
                                               match: str) -> None:
    folder = write_eagle_folder(tmp_path, eagle_config(**change), eagle_tensors(eagle_config()))
    with pytest.raises(ModelError, match=match):
        read_head(folder, target)


@pytest.mark.parametrize(("name", "change", "match"), [
    ("d2t", lambda t: t + 200, "d2t: .*another vocabulary"),
    ("d2t", lambda t: t - 50, "d2t: .*another vocabulary"),
    ("d2t", lambda t: -torch.arange(len(t)), "d2t: .*differences"),
    ("d2t", lambda t: t.float(), "d2t: expected integers"),
    ("d2t", lambda t: t.to(torch.complex64), "d2t: expected integers"),
    ("t2d", lambda t: ~t, "t2d"),
])
def test_a_foreign_vocabulary_is_refused(tmp_path: Path, target: Path, name: str, change: Callable[[Tensor], Tensor],
                                         match: str) -> None:
    tensors = eagle_tensors(eagle_config())
    tensors[name] = change(tensors[name])
    with pytest.raises(ModelError, match=match):
        read_head(write_eagle_folder(tmp_path, tensors=tensors), target)
