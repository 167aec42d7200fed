"""Draft heads as they are published: every layout loads from a folder written to its letter, and its logits are those
of the head written out straight in float64."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from slipstream.base.errors import ModelError
from slipstream.drafting.heads.checkpoint import read_eagle2_head, read_head
from slipstream.drafting.heads.eagle import EagleNetwork
from slipstream.drafting.network import Network
from slipstream.engine.batch import BatchBuilder
from slipstream.engine.model import load_tensors
from slipstream.protocol.messages import Features
from tests.eagle_folder import (
    HIDDEN,
    eagle2_config,
    eagle2_tensors,
    eagle_config,
    eagle_tensors,
    speculators_config,
    speculators_tensors,
    write_eagle_folder,
)
from tests.tiny import VOCAB, write_tiny_model
from tests.written import WrittenEagle2, WrittenEagle3

Tensor = torch.Tensor
Tensors = dict[str, Tensor]
Config = dict[str, Any]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("layouts") / "target", num_hidden_layers=8)


@dataclass(frozen=True)
class Case:
    """One published folder, and what of it differs from the plain head that the oracle is."""

    config: Config
    tensors: Tensors  # by their published names
    plain: Tensors = field(default_factory=dict)  # by the oracle's names; empty: the published ones
    taps: tuple[int, ...] = (2, 4, 5)
    prefix: str = "midlayer"


def renamed(tensors: Mapping[str, Tensor], *pairs: tuple[str, str]) -> Tensors:
    """The same tensors, with the beginnings of their names replaced."""
    names = {}
    for name in tensors:
        new = name
        for old, instead in pairs:
            new = instead + new.removeprefix(old) if new.startswith(old) else new
        names[name] = new
    return {names[name]: tensor for name, tensor in tensors.items()}


def without(tensors: Mapping[str, Tensor], *names: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name not in names}


def biased(tensors: Mapping[str, Tensor], *names: str) -> Tensors:
    """With a bias beside each of ``names``."""
    generator = torch.Generator().manual_seed(7)
    return dict(tensors) | {f"{name}.bias": 0.3 * torch.randn(len(tensors[f"{name}.weight"]), generator=generator)
                            for name in names}


def authors_eagle3(target: Path) -> Case:
    """A whole model's name; the embedding is the target's; nothing says which layers, how wide, how rotated."""
    config = without(eagle_config(hidden_size=48, architectures=["LlamaForCausalLM"]), "target_hidden_size",
                     "rope_theta")
    tensors = eagle_tensors(config | {"target_hidden_size": 48})
    own = load_tensors(target, ("model.embed_tokens.weight",))["model.embed_tokens.weight"]
    return Case(config, without(tensors, "embed_tokens.weight"), tensors | {"embed_tokens.weight": own})


def specforge(_target: Path) -> Case:
    """SGLang's trainer: layers by their outputs, a copy of the embedding, no biases, in bfloat16."""
    config = eagle_config(attention_bias=False, attention_dropout=0.0, mlp_bias=False, head_dim=8, rope_scaling=None,
                          pretraining_tp=1, num_aux_hidden_states=3, model_type="phi3", torch_dtype="bfloat16",
                          eagle_config={"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 3, 6]})
    tensors = {name: t.bfloat16() if t.is_floating_point() else t for name, t in eagle_tensors(config).items()}
    return Case(config, tensors, taps=(1, 4, 7))


VLLMS: Config = {"architectures": ["Eagle3LlamaForCausalLM"]}


def angelslim(_target: Path) -> Case:
    """The authors' head under vLLM's name for it, for a Hunyuan: its trainer passes ``alpha`` over."""
    rope = {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "type": "dynamic"}
    config = eagle_config(attention_bias=False, head_dim=8, max_window_layers=8, rope_scaling=rope, sliding_window=None,
                          use_sliding_window=False, **VLLMS)
    return Case(config, eagle_tensors(config))


def angelslim_by_its_target(_target: Path) -> Case:
    """With the type of its Qwen3: the layer is Llama's all the same, without norms of queries and keys."""
    config = eagle_config(model_type="qwen3", attention_bias=False, max_window_layers=28, sliding_window=None,
                          use_sliding_window=False)
    return Case(config, eagle_tensors(config))


def specforge_by_its_target(_target: Path) -> Case:
    """With the type of its QwQ: without the biases of a Qwen2."""
    config = eagle_config(model_type="qwen2", max_window_layers=64, sliding_window=32768, use_sliding_window=False)
    return Case(config, eagle_tensors(config))


def of_a_model_that_sees(_target: Path) -> Case:
    """SpecForge's and AngelSlim's for Qwen2.5-VL: in text all three of its positions are one."""
    rope = {"type": "mrope", "mrope_section": [1, 1, 2]}
    config = eagle_config(head_dim=8, rope_scaling=rope, rope_theta=1000000, sliding_window=32768,
                          target_model_type="qwen2_5_vl", use_sliding_window=False, **VLLMS)
    return Case(config, eagle_tensors(config))


def deepspec(_target: Path) -> Case:
    """Qwen3's layer, five states by the outputs of their layers, the whole vocabulary."""
    config = eagle_config(architectures=["Qwen3Eagle3Model"], model_type="qwen3", hidden_size=48, head_dim=12,
                          draft_vocab_size=VOCAB, layer_types=["full_attention"], max_window_layers=8, ttt_length=7,
                          draft_num_hidden_layers=1, num_target_layers=8, step_loss_decay=0.8, sliding_window=None,
                          use_sliding_window=False, target_layer_ids=[0, 1, 3, 4, 6])
    tensors = renamed(eagle_tensors(config, num_taps=5), ("midlayer.", "layers.0."))
    norms = {f"layers.0.self_attn.{name}_norm.weight": 1 + torch.arange(12) / 24 for name in "qk"}
    return Case(without(config, "draft_vocab_size", "target_hidden_size"), without(tensors, "d2t", "t2d") | norms,
                taps=(1, 2, 4, 5, 7), prefix="layers.0")


def two_states(_target: Path) -> Case:
    config = eagle_config(num_aux_hidden_states=2, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 5]})
    return Case(config, eagle_tensors(config, num_taps=2), taps=(2, 6))


def nested_names(_target: Path) -> Case:
    """As engines save it back: everything below ``model.``, the layer by its number."""
    tensors = eagle_tensors(eagle_config())
    saved = renamed(tensors, ("midlayer.", "layers.0."), ("", "model."))
    return Case(eagle_config(), renamed(saved, ("model.lm_head.", "lm_head.")), tensors)


def tied_lm_head(_target: Path) -> Case:
    tensors = eagle_tensors(eagle_config())
    rows = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    return Case(eagle_config(tie_word_embeddings=True), without(tensors, "lm_head.weight"),
                tensors | {"lm_head.weight": tensors["embed_tokens.weight"][rows]})


def absent_lm_head(target: Path) -> Case:
    config = eagle_config(hidden_size=48)
    tensors = eagle_tensors(config)
    rows = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    return Case(config, without(tensors, "lm_head.weight"),
                tensors | {"lm_head.weight": load_tensors(target)["lm_head.weight"][rows]})


def whole_vocabulary(_target: Path) -> Case:
    config = eagle_config(draft_vocab_size=260)
    tensors = eagle_tensors(config)
    return Case(config, without(tensors, "d2t", "t2d"), tensors)


def biases_everywhere(_target: Path) -> Case:
    names = [f"midlayer.self_attn.{name}_proj" for name in "qkvo"]
    names += [f"midlayer.mlp.{name}_proj" for name in ("gate", "up", "down")]
    return Case(eagle_config(attention_bias=True, mlp_bias=True, bias=True),
                biased(eagle_tensors(eagle_config()), *names, "fc"))


def speculators(_target: Path) -> Case:
    config = speculators_config()
    return Case(config, speculators_tensors(config), prefix="layers.0")


def speculators_norms(_target: Path) -> Case:
    """The other way round in both switches, and layers named by what enters them."""
    config = speculators_config(norm_before_residual=False, norm_before_fc=True,
                                eagle_aux_hidden_state_layer_ids=[1, 3, 7])
    return Case(config, speculators_tensors(config), taps=(1, 3, 7), prefix="layers.0")


def eagle31(_target: Path) -> Case:
    """A norm of its own for each state before ``fc``, and what is handed on has been through the final norm."""
    config = speculators_config(fc_norm=True, norm_output=True)
    return Case(config, speculators_tensors(config), prefix="layers.0")


EAGLE3 = (authors_eagle3, specforge, angelslim, deepspec, two_states, nested_names, tied_lm_head, absent_lm_head,
          whole_vocabulary, biases_everywhere, speculators, speculators_norms, eagle31, of_a_model_that_sees,
          angelslim_by_its_target, specforge_by_its_target)


def authors_eagle1(_target: Path) -> Case:
    """Whose layer is Llama's, whatever the target is."""
    config = eagle2_config(bias=True, model_type="mixtral")
    return Case(config, eagle2_tensors(config))


def authors_eagle2(_target: Path) -> Case:
    """Without a word on biases, and with the buffers that old transformers saved."""
    config = without(eagle2_config(), "bias")
    tensors = eagle2_tensors(config)
    buffers = {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}
    return Case(config, {name: t.half() for name, t in tensors.items()} | buffers,
                {name: t.half() for name, t in tensors.items()})


def authors_qwen2(_target: Path) -> Case:
    config = eagle2_config(qkv_bias=True)
    return Case(config, eagle2_tensors(config))


def authors_qwen2_by_its_own_name(_target: Path) -> Case:
    """The target's kind in ``model_type`` and ``architectures``, and no word on biases."""
    config = eagle2_config(architectures=["Qwen2ForCausalLM"], model_type="qwen2", max_window_layers=28,
                           sliding_window=131072, use_sliding_window=False)
    return Case(without(config, "bias"), eagle2_tensors(config | {"bias": True, "qkv_bias": True}))


def sglang_qwen2(target: Path) -> Case:
    case = authors_qwen2_by_its_own_name(target)
    return replace(case, config=case.config | {"architectures": ["Qwen2ForCausalLMEagle"]})


def speculators_eagle1(_target: Path) -> Case:
    flat = eagle2_config(bias=True)
    tensors = eagle2_tensors(flat)
    saved = renamed(without(tensors, "embed_tokens.weight"), ("layers.0.", "transformer."), ("fc.", "fusion_fc."))
    config = {"architectures": ["EagleSpeculator"], "fusion_bias": True, "layernorms": False,
              "speculators_config": {"algorithm": "eagle", "default_proposal_method": "greedy", "proposal_methods": [
                  {"proposal_type": "greedy", "speculative_tokens": 5}], "verifier": {"name_or_path": "somebody/tiny"}},
              "speculators_model_type": "eagle", "transformer_layer_config": without(flat, "architectures", "bias")}
    return Case(config, saved, tensors)


EAGLE2 = (authors_eagle1, authors_eagle2, authors_qwen2, authors_qwen2_by_its_own_name, sglang_qwen2,
          speculators_eagle1)


def drafted(network: Network, tokens: list[int], states: Tensor) -> dict[tuple[int, ...], Tensor]:
    """Logits of a network at the last token, at two siblings below it and at a child of each, by draft path."""
    assert network.features is not None
    message = Features(1, 0, states.numpy().tobytes(), len(states), "float64")
    (rows,) = network.read([message])
    count = len(rows)
    slots = network.slots.alloc(count + 4)
    builder = BatchBuilder()
    builder.add(tokens[1:], range(count), slots[:count].tolist(), np.zeros(0, np.int64), logits="last")
    root = network.forward(builder.build(features=rows))
    assert root.states is not None
    builder = BatchBuilder()
    builder.add([70, 71], [count, count], slots[count:count + 2].tolist(), slots[:count], [0b01, 0b10], 2)
    level = network.forward(builder.build(features=root.states.expand(2, -1)))
    builder = BatchBuilder()
    builder.add([72, 73], [count + 1] * 2, slots[count + 2:].tolist(), slots[:count + 2], [0b0101, 0b1010], 4)
    leaves = network.forward(builder.build(features=level.states))
    network.slots.free(slots)
    return dict(zip([(), (70,), (71,), (70, 72), (71, 73)], [*root.logits, *level.logits, *leaves.logits], strict=True))


def text_and_states(width: int) -> tuple[list[int], Tensor]:
    generator = torch.Generator().manual_seed(3)
    return list(range(40, 49)), torch.randn(8, width, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("layout", EAGLE3)
def test_eagle3(tmp_path: Path, target: Path, layout: Callable[[Path], Case]) -> None:
    case = layout(target)
    head = read_head(write_eagle_folder(tmp_path, case.config, case.tensors), target)
    assert head.taps == case.taps
    tensors = case.plain or case.tensors
    d2t = tensors.get("d2t", torch.zeros(len(head.vocabulary), dtype=torch.int64))
    flat = case.config | case.config.get("transformer_layer_config", {})
    written = WrittenEagle3(flat, tensors | {"d2t": d2t}, case.prefix, flat.get("norm_before_residual", False))
    network = EagleNetwork(head, "float64", torch.device("cpu"), 16)
    assert network.features is not None and network.features.width == len(case.taps) * 48
    tokens, states = text_and_states(network.features.width)
    for path, logits in drafted(network, tokens, states).items():
        expected = written.run(tokens, states, path)[0]
        assert torch.allclose(logits, expected, rtol=0, atol=1e-9), (path, float((logits - expected).abs().max()))
    ids = torch.arange(len(written.ids)) if network.vocabulary is None else network.vocabulary
    assert torch.equal(ids, written.ids)


def test_the_authors_heads_have_one_layer_whatever_their_config_says(tmp_path: Path, target: Path) -> None:
    """Vicuna 13B's names the 40 layers of its target."""
    case = authors_eagle3(target)
    read = [read_head(write_eagle_folder(tmp_path / str(layers), case.config | {"num_hidden_layers": layers},
                                         case.tensors), target) for layers in (1, 40)]
    assert read[1].config == read[0].config


@pytest.mark.parametrize("layout", EAGLE2)
def test_eagle1_and_eagle2(tmp_path: Path, target: Path, layout: Callable[[Path], Case]) -> None:
    case = layout(target)
    head = read_eagle2_head(write_eagle_folder(tmp_path, case.config, case.tensors), target)
    flat = case.config | case.config.get("transformer_layer_config", {})
    own = load_tensors(target)
    written = WrittenEagle2(own["model.embed_tokens.weight"], own["lm_head.weight"], flat, case.plain or case.tensors)
    network = EagleNetwork(head, "float64", torch.device("cpu"), 16)
    assert network.features is not None
    assert (network.features.layers, network.features.width) == ((8,), 48), "the state after the final norm"
    tokens, states = text_and_states(48)
    for path, logits in drafted(network, tokens, states).items():
        expected = written.run(tokens, states, path)[0]
        assert torch.allclose(logits, expected, rtol=0, atol=1e-9), (path, float((logits - expected).abs().max()))


def test_a_target_that_lacks_what_a_head_borrows_is_named(tmp_path: Path) -> None:
    target = write_tiny_model(tmp_path / "target", num_hidden_layers=8)
    case, tensors = absent_lm_head(target), load_tensors(target)
    write_eagle_folder(tmp_path / "head", case.config, case.tensors)
    save_file(without(tensors, "lm_head.weight"), target / "model.safetensors")
    with pytest.raises(ModelError, match=f"^{target}: tensor lm_head.weight is missing"):
        read_head(tmp_path / "head", target)


def test_the_authors_triple_means_what_enters_its_layers(tmp_path: Path, target: Path) -> None:
    config = eagle_config(eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 4, 5]})
    assert read_head(write_eagle_folder(tmp_path, config), target).taps == (2, 4, 5)


@pytest.mark.parametrize(("change", "taps"), [
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}, (2, 4, 5)),
    ({"eagle_aux_hidden_state_layer_ids": []}, (2, 4, 5)),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": None}, "eagle_aux_hidden_state_layer_ids": [0, 3, 6]},
     (1, 4, 7))])
def test_no_layer_ids_at_all_are_the_usual_ones(tmp_path: Path, target: Path, change: Config,
                                                taps: tuple[int, ...]) -> None:
    config = eagle_config(**change)
    assert read_head(write_eagle_folder(tmp_path, config), target).taps == taps


@pytest.mark.parametrize("name", ["eagle_aux_hidden_state_layer_ids", "aux_hidden_states_layer_ids"])
@pytest.mark.parametrize("ids", [[2, 4, 5], [1, 3, 4]])
def test_the_usual_layers_are_known_by_either_reading(tmp_path: Path, target: Path, name: str, ids: list[int]) -> None:
    config = eagle_config(**VLLMS, **{name: ids})
    assert read_head(write_eagle_folder(tmp_path, config, eagle_tensors(config)), target).taps == (2, 4, 5)


def test_shards_are_read(tmp_path: Path, target: Path) -> None:
    folder, tensors = write_eagle_folder(tmp_path / "whole"), eagle_tensors(eagle_config())
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    whole = read_head(folder, target)
    (folder / "model.safetensors").unlink()
    for file, part in parts.items():
        write_eagle_folder(tmp_path / "part", tensors={name: tensors[name] for name in part})
        (tmp_path / "part" / "model.safetensors").rename(folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps(
        {"weight_map": {name: file for file, part in parts.items() for name in part}}))
    again = read_head(folder, target)
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in whole.tensors.items())


def test_a_folder_of_pickles_is_refused_with_the_way_out(tmp_path: Path, target: Path) -> None:
    write_eagle_folder(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is a pickle.*convert it once.*save_file"):
        read_head(tmp_path, target)


SPECULATORS_REFUSED = [
    ({"speculators_model_type": "eagle"}, "speculators_model_type: .*eagle2"),
    ({"transformer_layer_config": None}, "transformer_layer_config: expected an object"),
    ({"norm_before_residual": None}, "norm_before_residual: expected true or false"),
    ({"norm_before_fc": True}, "tensor input_norm.weight is missing"),
    ({"fc_norm": True}, "tensor fc_norm.0.weight is missing"),
    ({"fc_norm": True, "norm_before_fc": True}, "fc_norm: norm_before_fc is set, too"),
    ({"norm_output": "yes"}, "norm_output: expected true or false"),
    ({"target_hidden_size": 64}, "target_hidden_size: the head was made for 64, the target has 48"),
    ({"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, "eagle_aux_hidden_state_layer_ids: .*8 layers"),
    ({"eagle_aux_hidden_state_layer_ids": [4, 6, 8]}, "layer_ids: .*8 layers, before the final norm"),
    ({"eagle_aux_hidden_state_layer_ids": "2"}, "eagle_aux_hidden_state_layer_ids: expected 1 to 64 layer numbers"),
    ({"eagle_aux_hidden_state_layer_ids": [2, 4]}, r"fc.weight has shape \(48, 144\), expected \(48, 96\)"),
]


@pytest.mark.parametrize(("change", "match"), SPECULATORS_REFUSED)
def test_a_speculators_config_that_does_not_fit_is_refused(tmp_path: Path, target: Path, change: Config,
                                                           match: str) -> None:
    folder = write_eagle_folder(tmp_path, speculators_config(**change), speculators_tensors(speculators_config()))
    with pytest.raises(ModelError, match=match):
        read_head(folder, target)


LEFT_OVER = [
    ("midlayer.self_attn.q_proj.bias", "layers.0.self_attn.q_proj.bias is no part of the head.*attention_bias"),
    ("midlayer.self_attn.q_norm.weight", "layers.0.self_attn.q_norm.weight is no part"),
    ("input_norm.weight", "norm_before_fc"),
    ("fc_norm.0.weight", "fc_norm: it is not set"),
    ("layers.1.mlp.up_proj.weight", "layers.1.mlp.up_proj.weight is no part"),
]


@pytest.mark.parametrize(("name", "match"), LEFT_OVER)
def test_what_nothing_would_read_is_refused(tmp_path: Path, target: Path, name: str, match: str) -> None:
    tensors = eagle_tensors(eagle_config()) | {name: torch.ones(HIDDEN)}
    with pytest.raises(ModelError, match=match):
        read_head(write_eagle_folder(tmp_path, tensors=tensors), target)


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
def test_weights_of_a_kind_that_is_not_computed_with_are_refused(tmp_path: Path, target: Path,
                                                                 kind: torch.dtype) -> None:
    tensors = eagle_tensors(eagle_config())
    tensors["fc.weight"] = tensors["fc.weight"].to(kind)
    with pytest.raises(ModelError, match=f"tensor fc.weight holds {kind}: quantized heads are not read"):
        read_head(write_eagle_folder(tmp_path, tensors=tensors), target)


@pytest.mark.parametrize(("change", "match"), [
    ({"eagle_aux_hidden_state_layer_ids": [4, 6, 8]}, "8 layers, before the final norm"),
    ({"num_aux_hidden_states": 2}, "num_aux_hidden_states: 2, but .* names 3 layers"),
    ({"bias": True}, "bias: True, but tensor fc.bias is missing"),
    ({"attention_bias": True}, "self_attn.q_proj.bias is missing"),
    ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "rope_type: 'longrope'"),
    ({"num_attention_heads": 5}, "num_key_value_heads"),
    ({"draft_vocab_size": 95}, "lm_head.weight has shape|d2t has shape"),
    ({"hidden_size": 0}, "hidden_size"),
    (VLLMS | {"eagle_aux_hidden_state_layer_ids": [1, 4, 7]}, "eagle_aux_hidden_state_layer_ids: .*does not say"),
    (VLLMS | {"aux_hidden_states_layer_ids": [1, 4, 7]}, "aux_hidden_states_layer_ids: .*does not say"),
])
def test_an_eagle3_config_that_does_not_fit_is_refused(tmp_path: Path, target: Path, change: Config,
                                                       match: str) -> None:
    folder = write_eagle_folder(tmp_path, eagle_config(**change), eagle_tensors(eagle_config()))
    with pytest.raises(ModelError, match=match):
        read_head(folder, target)


@pytest.mark.parametrize(("change", "match"), [
    ({"logit_scale": 0.0625}, "logit_scale: heads with 0.0625"),
    ({"logits_scaling": 16.0}, "logits_scaling: heads with 16.0"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping: heads with 30.0"),
    ({"embedding_multiplier": 12}, "embedding_multiplier: heads with 12"),
    ({"residual_multiplier": 0.22}, "residual_multiplier: heads with 0.22"),
    ({"attention_multiplier": 0.0078125}, "attention_multiplier: heads with"),
    ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: heads with 50.0"),
    ({"hidden_activation": "gelu_pytorch_tanh"}, "hidden_activation: heads with 'gelu_pytorch_tanh'"),
    ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported"),
    ({"rope_interleave": True}, "rope_interleave: heads with True"),
    ({"is_neox_style": False}, "is_neox_style: heads with False"),
    ({"rope_is_neox_style": False}, "rope_is_neox_style: heads with False"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5 is not supported by this engine; as a target"),
    ({"is_causal": False}, "is_causal: heads with False"),
    ({"layer_types": ["chunked_attention"]}, r"layer_types: expected full_attention .* found \['chunked_attention'\]"),
    ({"layer_types": "sliding_attention"}, "layer_types: .* or sliding_attention, found"),
    ({"layer_types": ["sliding_attention"]}, "sliding_window: expected a number from 64"),
    ({"layer_types": ["sliding_attention"], "sliding_window": 8}, "sliding_window: expected a number from 64"),
    ({"model_type": "gemma2"}, "model_type: 'gemma2' is not one of"),
])
def test_a_field_that_nothing_computes_with_is_refused(tmp_path: Path, target: Path, change: Config,
                                                       match: str) -> None:
    speculator = speculators_config()
    speculator["transformer_layer_config"] |= change
    heads = {"eagle3": (eagle_config(**change), eagle_tensors(eagle_config()), read_head),
             "speculators": (speculator, speculators_tensors(speculators_config()), read_head),
             "eagle2": (eagle2_config(**change), eagle2_tensors(eagle2_config()), read_eagle2_head)}
    for name, (config, tensors, read) in heads.items():
        with pytest.raises(ModelError, match=match):
            read(write_eagle_folder(tmp_path / name, config, tensors), target)


def test_fields_that_change_nothing_are_no_matter(tmp_path: Path, target: Path) -> None:
    config = eagle_config(logit_scale=1.0, logits_scaling=1, embedding_multiplier=1.0, residual_multiplier=1.0,
                          attention_multiplier=None, final_logit_softcapping=None, attn_logit_softcapping=None,
                          hidden_activation="silu", rope_interleave=False, is_neox_style=True, is_causal=True,
                          layer_types=["full_attention", "sliding_attention"], sliding_window=4096)
    assert read_head(write_eagle_folder(tmp_path, config), target).config.sliding_window == 0


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_layer_that_slides_sees_its_window(tmp_path: Path, target: Path, kind: str) -> None:
    layer = speculators_config()["transformer_layer_config"] | {
        "layer_types": ["sliding_attention"], "model_type": kind, "sliding_window": 64, "use_sliding_window": True}
    config = speculators_config(transformer_layer_config=layer)
    tensors = speculators_tensors(config)
    if kind == "qwen3":
        tensors |= {f"layers.0.self_attn.{name}_norm.weight": torch.ones(12) for name in "qk"}
    head = read_head(write_eagle_folder(tmp_path, config, tensors), target)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCAB, (102,), generator=generator).tolist()
    states = torch.randn(101, 3 * 48, generator=generator, dtype=torch.float64)

    def logits(replaced: int) -> Tensor:
        """With other tokens in the first rows, of which there are 101."""
        network = EagleNetwork(head, "float64", torch.device("cpu"), 128)
        text = [5] * (replaced + 1) + tokens[replaced + 1:]
        return drafted(network, text, states)[()]

    usual = logits(0)
    assert torch.allclose(logits(101 - 64), usual, rtol=0, atol=1e-12)
    assert not torch.allclose(logits(101 - 63), usual, rtol=0, atol=1e-6)


def test_a_missing_lm_head_that_the_target_cannot_lend_is_refused(tmp_path: Path, target: Path) -> None:
    tensors = without(eagle_tensors(eagle_config()), "lm_head.weight")
    with pytest.raises(ModelError, match=r"lm_head\.weight is missing.*32 numbers.*the target's 48"):
        read_head(write_eagle_folder(tmp_path, tensors=tensors), target)
