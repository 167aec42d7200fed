"""Multi-token prediction heads against transformers' own prediction layers (GLM-4.5, DeepSeek-V3) and the head written
out (MiMo), in float64; and the folders that are read or refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.base.config import DraftSection, GrowthSection, ModelSection
from slipstream.base.errors import ModelError
from slipstream.drafting import Drafter, create
from slipstream.drafting.heads.mtp import MtpNetwork
from slipstream.drafting.heads.mtp_checkpoint import MtpHead, read_mtp
from slipstream.drafting.loading import mtp_layers
from slipstream.engine.batch import BatchBuilder
from slipstream.engine.hf import HFLayers
from slipstream.protocol.messages import Commit, Features, Growth, Open
from slipstream.protocol.requests import Sampling
from tests.growth_rules import GrowthLedger, best_paths, scored_paths
from tests.mtp_folder import (
    HIDDEN,
    KINDS,
    head_prefix,
    head_shapes,
    mtp_config,
    mtp_tensors,
    projection,
    write_folder,
    write_mtp_target,
    write_nextn_folder,
)
from tests.mtp_written import KeepFloat64, WrittenMimo, WrittenMtp, WrittenNextN
from tests.tiny import VOCAB

Tensor = torch.Tensor
NEXTN = ("glm4_moe", "deepseek_v3")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("mtp")
    return {kind: write_mtp_target(root / kind, mtp_config(kind)) for kind in KINDS}


def written(kind: str, folder: Path, **changes: Any) -> WrittenMtp:
    config = mtp_config(kind, **changes)
    tensors = mtp_tensors(config)
    return WrittenMimo(config, tensors) if kind == "mimo" else WrittenNextN(config, tensors, folder)


def network(head: MtpHead, num_slots: int = 64) -> MtpNetwork:
    return MtpNetwork(head, mtp_layers(head, "float64", "cpu"), "float64", num_slots)


def states_of(count: int, seed: int) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def message(session: int, start: int, states: Tensor) -> Features:
    return Features(session, start, states.numpy().tobytes(), len(states), "float64")


def children(of: WrittenMtp, path: tuple[int, ...], tokens: Sequence[int], states: Tensor, topk: int,
             ids: Tensor) -> tuple[list[int], list[float]]:
    scores, best = of.run(tokens, states, path)[0][ids].log_softmax(0).topk(topk)
    return ids[best].tolist(), scores.tolist()


def assert_rows_equal(net: MtpNetwork, of: WrittenMtp) -> None:
    """Prefill in two chunks, two siblings below the root, a child of each, a child of one of those."""
    tokens, states, level = list(range(40, 52)), states_of(11, seed=1), torch.empty(0)
    (rows,) = net.read([message(1, 0, states)])
    slots = net.slots.alloc(16)
    with KeepFloat64():
        for start, stop in ((0, 4), (4, 11)):
            builder = BatchBuilder()
            builder.add(tokens[start + 1:stop + 1], range(start, stop), slots[start:stop].tolist(), slots[:start])
            prefill = net.forward(builder.build(features=rows[start:stop]))
            assert prefill.states is not None
            for row in range(start, stop, 3):
                logits, out = of.run(tokens[:row + 2], states[:row + 1], ())
                torch.testing.assert_close(prefill.logits[row - start], logits, rtol=0, atol=1e-9)
                torch.testing.assert_close(prefill.states[row - start], out, rtol=0, atol=1e-9)
            level = prefill.states[-1:].expand(2, -1)
        for depth, drafted, words, paths in ((1, [70, 71], [0b01, 0b10], [(70,), (71,)]),
                                             (2, [72, 73], [0b0101, 0b1010], [(70, 72), (71, 73)]),
                                             (3, [74], [0b11010], [(71, 73, 74)])):
            used = 11 + 2 * (depth - 1)
            builder = BatchBuilder()
            builder.add(drafted, [10 + depth] * len(drafted), slots[used:used + len(drafted)].tolist(), slots[:used],
                        words, used + len(drafted) - 11)
            output = net.forward(builder.build(features=level))
            assert output.states is not None
            for path, logits in zip(paths, output.logits, strict=True):
                torch.testing.assert_close(logits, of.run(tokens, states, path)[0], rtol=0, atol=1e-9, msg=str(path))
            level = output.states[-1:] if depth == 2 else output.states


@pytest.mark.parametrize("kind", KINDS)
def test_rows_equal_the_head_written_out(kind: str, folders: dict[str, Path]) -> None:
    assert_rows_equal(network(read_mtp(folders[kind], folders[kind])), written(kind, folders[kind]))


@pytest.mark.parametrize("kind", NEXTN)
def test_experts_may_lie_in_one_tensor(kind: str, tmp_path: Path, folders: dict[str, Path]) -> None:
    config = mtp_config(kind)
    prefix = f"{head_prefix(config)}.mlp.experts"
    stacked = {name: tensor for name, tensor in mtp_tensors(config).items() if not name.startswith(prefix)}
    apart = mtp_tensors(config)
    for whole, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        stacked[f"{prefix}.{whole}"] = torch.stack([
            torch.cat([apart[f"{prefix}.{expert}.{part}.weight"] for part in parts])
            for expert in range(config["n_routed_experts"])])
    folder = write_folder(tmp_path, config, stacked)
    assert_rows_equal(network(read_mtp(folder, folder)), written(kind, folders[kind]))


@pytest.mark.parametrize("layers", [2, 4])
def test_several_layers_follow_one_another(tmp_path: Path, layers: int) -> None:
    folder = write_mtp_target(tmp_path, mtp_config("mimo", num_nextn_predict_layers=layers))
    assert_rows_equal(network(read_mtp(folder, folder)), written("mimo", folder, num_nextn_predict_layers=layers))


@pytest.mark.parametrize("kind", NEXTN)
def test_a_head_of_its_own_folder_is_the_same_head(kind: str, tmp_path: Path, folders: dict[str, Path]) -> None:
    config = mtp_config(kind)
    head = read_mtp(write_nextn_folder(tmp_path, config, mtp_tensors(config)), folders[kind])
    assert_rows_equal(network(head), written(kind, folders[kind]))


def test_further_mimo_layers_may_come_in_a_folder_of_their_own(tmp_path: Path) -> None:
    config = mtp_config("mimo", num_nextn_predict_layers=2)
    tensors = mtp_tensors(config)
    further = {name: tensor for name, tensor in tensors.items() if name.startswith(head_prefix(config, 1))}
    target = write_mtp_target(tmp_path / "target", mtp_config("mimo"),
                              {name: tensor for name, tensor in tensors.items() if name not in further})
    head = read_mtp(write_folder(tmp_path / "head", config, further), target)
    assert_rows_equal(network(head), WrittenMimo(config, tensors))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("half", [0, 1])
def test_the_order_of_concatenation(kind: str, half: int, tmp_path: Path) -> None:
    """A projection that reads one half of its input alone: MiMo's first half is the state, NextN's the token."""
    config = mtp_config(kind)
    tensors = mtp_tensors(config)
    tensors[f"{head_prefix(config)}.{projection(config)}.weight"][:, (1 - half) * HIDDEN:(2 - half) * HIDDEN] = 0
    folder = write_mtp_target(tmp_path, config, tensors)
    net = network(read_mtp(folder, folder))

    def logits(tokens: list[int], states: Tensor) -> Tensor:
        builder, slots = BatchBuilder(), net.slots.alloc(len(tokens))
        builder.add(tokens, range(1, len(tokens) + 1), slots.tolist(), np.zeros(0, np.int64), logits="last")
        return net.forward(builder.build(features=net.read([message(1, 0, states)])[0])).logits

    first = logits([5, 6, 7], states_of(3, 1))
    other_tokens, other_states = logits([8, 9, 10], states_of(3, 1)), logits([5, 6, 7], states_of(3, 2))
    reads_states = (kind == "mimo") == (half == 0)
    assert torch.equal(first, other_tokens) == reads_states
    assert torch.equal(first, other_states) != reads_states


def make(kind: str, folders: dict[str, Path], token_map: str = "", **growth: int) -> Drafter:
    section = DraftSection(drafter="mtp", dtype="float64", token_map=token_map,
                           growth=GrowthSection.model_validate(growth))
    return create(section, ModelSection(path=str(folders[kind])), 600)


def opening(tokens: Sequence[int], sampling: Sampling | None = None) -> Open:
    return Open(1, np.array(tokens, np.int32), min(4, len(tokens)), sampling or Sampling())


def assert_same(found: Growth, wanted: dict[tuple[int, ...], float], note: object = "") -> None:
    paths = scored_paths(found)
    assert set(paths) == set(wanted), note
    for path, score in paths.items():
        assert score == pytest.approx(wanted[path], abs=1e-5), (note, path)


def test_a_large_tree_ahead_has_at_each_depth_the_layer_of_that_depth(tmp_path: Path) -> None:
    """Beyond the nodes of an ancestor word each node is a chain of its own: it was read by the first layer, as a
    committed token is."""
    folder = write_mtp_target(tmp_path, mtp_config("mimo", num_nextn_predict_layers=3))
    tokens, states = [9, 8, 7], states_of(2, seed=2)
    of, drafter = written("mimo", folder, num_nextn_predict_layers=3), make("mimo", {"mimo": folder}, topk=3)
    ledger, turns = GrowthLedger(tokens), 0
    drafter.open([opening(tokens)])
    drafter.absorb([message(1, 0, states)])
    while len(drafter.tree(1).computed) < 120:
        (growth,) = drafter.grow([1], [63], 1)
        ledger.take(growth, 63, VOCAB)
        turns += 1
        assert turns < 20
    for node in range(1, len(ledger.tree), 9):
        path, score = tuple(ledger.tree.tokens[at] for at in ledger.tree.path(node)[1:]), 0.0
        for depth, token in enumerate(path):
            ids, scores = children(of, path[:depth], tokens, states, 3, torch.arange(VOCAB))
            score += scores[ids.index(token)]
        assert ledger.tree.scores[node] == pytest.approx(score, abs=1e-5), path


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize(("topk", "steps", "nodes"), [(1, 3, 3), (2, 3, 6)])
@pytest.mark.parametrize("kind", KINDS)
def test_trees_follow_the_committed_states(kind: str, topk: int, steps: int, nodes: int, mapped: bool, tmp_path: Path,
                                           folders: dict[str, Path]) -> None:
    """Chains and trees, from the target's own folder, with and without a token map (FR-Spec)."""
    of, ids, name = written(kind, folders[kind]), torch.arange(VOCAB), ""
    if mapped:
        ids = torch.arange(3, VOCAB, 4)
        path = tmp_path / "map.json"
        path.write_text(json.dumps(ids.tolist()))
        name = str(path)
    tokens, states = [9, 8, 7, 60, 61], states_of(40, seed=2)
    drafter = make(kind, folders, name, topk=topk, num_steps=steps, num_draft_tokens=nodes)
    assert drafter.features is not None
    assert (drafter.features.layers, drafter.features.width) == ((2,), HIDDEN)
    drafter.open([opening(tokens)])
    drafter.absorb([message(1, 0, states[:4])])
    for turn in range(3):
        with KeepFloat64():
            (growth,) = drafter.grow([1], [63])
        rank = partial(children, of, tokens=tokens, states=states[:len(tokens) - 1], topk=topk, ids=ids)
        assert_same(growth, best_paths(rank, topk, steps, nodes), turn)
        new, base = [*max(scored_paths(growth), key=len)[:turn], 90 + turn], len(tokens)
        rows = message(1, base - 1, states[base - 1:base - 1 + len(new)])
        drafter.commit([Commit(1, base, np.array(new, np.int32))])
        drafter.absorb([rows])
        tokens += new
    drafter.close([1])


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_heads_draft_from_other_dtypes(kind: str, folders: dict[str, Path]) -> None:
    """The head's dtype is its own; the wire's is what it asks the target for."""
    section = DraftSection(drafter="mtp", dtype="bfloat16")
    drafter = create(section, ModelSection(path=str(folders[kind])), 100)
    assert drafter.features is not None and drafter.features.dtype == "bfloat16"
    drafter.open([opening(range(6), Sampling(temperature=1.0, seed=3))])
    rows = states_of(5, 1).to(torch.bfloat16).view(torch.int16).numpy().tobytes()
    drafter.absorb([Features(1, 0, rows, 5, "bfloat16")])
    (growth,) = drafter.grow([1], [4])
    assert len(growth.ids) == 4 and growth.tokens.max() < VOCAB


def needed(kind: str) -> list[str]:
    """Names of a head's tensors, one expert for all of them."""
    config = mtp_config(kind)
    names = [name for name in head_shapes(config) if "experts." not in name or "experts.3" in name]
    return [name for name in names if "embed_tokens" not in name and "shared_head.head" not in name]


NEEDED = [(kind, name) for kind in KINDS for name in needed(kind)]


@pytest.mark.parametrize(("kind", "name"), NEEDED)
def test_a_missing_tensor_is_named(kind: str, name: str, tmp_path: Path) -> None:
    config = mtp_config(kind)
    tensors = mtp_tensors(config)
    del tensors[name]
    folder = write_folder(tmp_path, config, tensors)
    with pytest.raises(ModelError, match=f"tensor {name} is missing"):
        network(read_mtp(folder, folder))


@pytest.mark.parametrize(("kind", "name"), [
    *NEEDED, *(("glm4_moe", f"model.layers.2.{name}.weight") for name in ("embed_tokens", "shared_head.head"))])
def test_a_wrong_shape_is_named(kind: str, name: str, tmp_path: Path) -> None:
    config = mtp_config(kind)
    tensors = mtp_tensors(config)
    tensors[name] = tensors[name][:-1].clone()
    folder = write_folder(tmp_path, config, tensors)
    with pytest.raises(ModelError, match=f"tensor {name} has shape .* expected"):
        network(read_mtp(folder, folder))


@pytest.mark.parametrize(("change", "match"), [
    ({"model_type": "qwen2"}, "model_type: 'qwen2' has no multi-token prediction head"),
    ({"num_nextn_predict_layers": None}, "num_nextn_predict_layers: expected a number"),
    ({"num_nextn_predict_layers": 0}, "num_nextn_predict_layers: expected a number"),
    ({"num_nextn_predict_layers": 400}, "num_nextn_predict_layers: expected a number"),
    ({"hidden_size": 64}, "hidden_size: the head was made for 64, the target has 48"),
    ({"vocab_size": 300}, "vocab_size: the head was made for 300, the target has 260"),
    ({"rms_norm_eps": "small"}, "rms_norm_eps: expected a positive number"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config: quantized heads are not read"),
])
def test_a_config_that_does_not_fit_is_refused(change: dict[str, Any], match: str, tmp_path: Path,
                                               folders: dict[str, Path]) -> None:
    config = mtp_config("glm4_moe")
    folder = write_nextn_folder(tmp_path, config, mtp_tensors(config))
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1, **change}))
    with pytest.raises(ModelError, match=match):
        read_mtp(folder, folders["glm4_moe"])


def test_a_head_of_another_family_is_refused(tmp_path: Path, folders: dict[str, Path]) -> None:
    config = mtp_config("glm4_moe")
    folder = write_nextn_folder(tmp_path, config, mtp_tensors(config))
    with pytest.raises(ModelError, match="model_type: the head was made for 'glm4_moe', the target has 'deepseek_v3'"):
        read_mtp(folder, folders["deepseek_v3"])


def test_quantized_weights_are_refused_by_name(tmp_path: Path) -> None:
    config = mtp_config("deepseek_v3")
    tensors, name = mtp_tensors(config), "model.layers.2.self_attn.o_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    folder = write_folder(tmp_path, config, tensors)
    with pytest.raises(ModelError, match=rf"tensor {name} holds torch.float8_e4m3fn: quantized"):
        read_mtp(folder, folder)


@pytest.mark.parametrize("kind", NEXTN)
def test_a_layer_of_the_targets_body_never_stands_in_for_a_head(kind: str, tmp_path: Path) -> None:
    config = mtp_config(kind)
    body = {name: tensor for name, tensor in mtp_tensors(config).items() if not name.startswith(head_prefix(config))}
    folder, other = write_folder(tmp_path / "a", config, body), write_folder(tmp_path / "b", config, body)
    with pytest.raises(ModelError, match=r"tensor model\.layers\.2\.enorm\.weight is missing"):
        read_mtp(folder, folder)
    with pytest.raises(ModelError, match=r"tensor model\.layers\.0\.enorm\.weight is missing"):
        read_mtp(other, folder)


def test_a_tied_target_lends_its_embedding_as_the_head(tmp_path: Path) -> None:
    config = mtp_config("mimo", tie_word_embeddings=True)
    tensors = mtp_tensors(config)
    del tensors["lm_head.weight"]
    folder = write_folder(tmp_path, config, tensors)
    head = read_mtp(folder, folder)
    assert torch.equal(head.lm_head, tensors["model.embed_tokens.weight"])


@pytest.mark.parametrize("kind", ["mimo", "glm4_moe"])
def test_a_tied_target_may_hold_its_embedding_as_the_head(kind: str, tmp_path: Path) -> None:
    """As safetensors' own ``save_model`` leaves it: of two names of a tensor the first in the alphabet."""
    config = mtp_config(kind, tie_word_embeddings=True)
    tensors = {name: tensor for name, tensor in mtp_tensors(config).items()
               if not name.endswith(("embed_tokens.weight", "shared_head.head.weight"))}
    target = write_folder(tmp_path / "target", config, tensors)
    apart = write_nextn_folder(tmp_path / "apart", config, tensors) if kind == "glm4_moe" else target
    for folder in (target, apart):
        head = read_mtp(folder, target)
        assert torch.equal(head.embedding, tensors["lm_head.weight"])
        assert torch.equal(head.lm_head, tensors["lm_head.weight"])
    untied = write_folder(tmp_path / "untied", config | {"tie_word_embeddings": False}, tensors)
    with pytest.raises(ModelError, match=r"tensor model\.embed_tokens\.weight is missing"):
        read_mtp(untied, untied)


def test_layers_that_transformers_cannot_build_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nothing"}')
    with pytest.raises(ModelError, match=rf"{tmp_path}: transformers cannot build it: "):
        HFLayers(tmp_path, {}, ["model.layers.1"], torch.float32, torch.device("cpu"))


def test_layers_that_transformers_cannot_run_are_named(tmp_path: Path) -> None:
    """As where experts were taken out, and the number of those that a token is sent to stayed."""
    config = mtp_config("deepseek_v3")
    folder = write_folder(tmp_path, config | {"num_experts_per_tok": 9}, mtp_tensors(config))
    head = read_mtp(folder, folder)
    with pytest.raises(ModelError, match=rf"{tmp_path}: transformers cannot run its layers: "):
        network(head)
