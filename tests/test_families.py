"""What transformers can load is served rightly, or refused by name: never wrongly."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from slipstream.base.config import ModelSection
from slipstream.base.errors import ModelError
from slipstream.engine.batch import ForwardBatch
from slipstream.engine.hf import HFModel, with_random_weights
from slipstream.engine.kv import KVPool
from slipstream.engine.loading import load_model
from slipstream.engine.model import ModelConfig
from slipstream.engine.runner import ModelRunner
from slipstream.engine.trial import LENGTHS, TABLES, WIDTHS, check, shrunk, tiny
from slipstream.protocol.tree import MAX_NODES
from tests.families import configurations, kinds, verdicts
from tests.sequences import NOTHING, run, run_tree
from tests.trees import random_tree

ROOT = Path(__file__).parent.parent
SERVED = ("llama", "gemma3_text", "gpt2", "qwen2_moe", "phimoe", "minicpm3", "cohere2", "deepseek_v3",
          "mistral3", "qwen2_5_vl", "qwen3_vl", "llava")
REFUSED = {"falcon_h1": "a prompt in chunks differs", "diffllama": "a prompt in chunks differs",
           "bert": "a prompt differs", "mamba": "attention", "gpt_oss": "s_aux", "zaya": "differs",
           "llama4_text": "raises", "dbrx": "no tiny copy of it runs", "gemma4_text": "heads differ"}


def wrong(config: Any, seed: int) -> float:
    """How far a tiny copy is from its own forward, of the largest logit: chunks of any size, a step, random trees."""
    torch.manual_seed(seed)
    dice, plain = np.random.default_rng(seed), tiny(config, with_random_weights)
    vocab = int(plain.config.get_text_config().vocab_size)
    text = dice.integers(vocab // 2, vocab, size=200).tolist()
    tree = random_tree(dice, 12, base=len(text) + 1, vocab=vocab)
    with torch.inference_mode():
        whole = plain(torch.tensor([text]), use_cache=False).logits[0]
        paths = [[tree.tokens[at] for at in tree.path(node)] for node in range(len(tree))]
        ends = [plain(torch.tensor([[*text, *path]]), use_cache=False).logits[0, -1] for path in paths]
    runner = ModelRunner(HFModel(plain), 512)
    rows, slots = [], NOTHING
    cuts = [0, *sorted(dice.choice(np.arange(1, 199), 3, replace=False).tolist()), 199, 200]
    for start, end in pairwise(cuts):
        found, slots = run(runner, text[start:end], slots)
        rows.append(found)
    far = (torch.cat([*rows, run_tree(runner, tree, slots)[0]]) - torch.cat([whole, torch.stack(ends)])).abs().max()
    return float(far / whole.abs().max())


def served_rightly(kind: str) -> bool:
    """Whether any way of a type is served; what is served is compared once more, on another text."""
    ways = {verdict.way for verdict in verdicts(kind) if not verdict.why}
    for way, config in configurations(kind) if ways else ():
        assert way not in ways or wrong(config, seed=7) < 1e-4, (kind, way)
    return bool(ways)


@pytest.mark.parametrize("kind", SERVED)
def test_what_is_served_is_right(kind: str) -> None:
    assert served_rightly(kind)
    assert not [verdict for verdict in verdicts(kind) if verdict.why]


@pytest.mark.parametrize("kind", REFUSED)
def test_what_would_be_wrong_is_refused_by_name(kind: str) -> None:
    verdict = next(verdicts(kind))  # as a decoder an encoder may be right
    assert kind in verdict.why or "Attention" in verdict.why
    assert REFUSED[kind] in verdict.why


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_type_is_right_or_refused_and_the_documentation_names_those_that_are_served() -> None:
    page = (ROOT / "docs" / "ENGINES.md").read_text(encoding="utf-8")
    listed = re.search(r"<!-- families -->\n(.*?)\n<!-- end -->", page, re.DOTALL)
    assert listed
    assert [kind for kind in kinds() if served_rightly(kind)] == re.findall(r"[\w-]+", listed[1])


class Faulty:
    """A model that gets batches other than those that are meant."""

    def __init__(self, model: HFModel, change: Callable[[ForwardBatch], None]) -> None:
        self._model, self._change = model, change

    @property
    def config(self) -> ModelConfig:
        return self._model.config

    @property
    def dtype(self) -> torch.dtype:
        return self._model.dtype

    @property
    def device(self) -> torch.device:
        return self._model.device

    def forward(self, batch: ForwardBatch, pool: KVPool,
                taps: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor | None]:
        self._change(batch)
        return self._model.forward(batch, pool, taps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.logits(hidden)


def blind_to_trees(batch: ForwardBatch) -> None:
    if any(batch.mask_lens):
        batch.host.words[:] = (1 << len(batch.host.words)) - 1


def steps_at_the_start(batch: ForwardBatch) -> None:
    if batch.num_rows == 1:
        batch.positions[:] = 0


def sessions_mixed(batch: ForwardBatch) -> None:
    if len(batch.mask_lens) > 1:
        batch.host.kv_slots[0] = batch.host.kv_slots[-1]


@pytest.mark.parametrize(("change", "name"), [
    (blind_to_trees, "a tree differs"), (steps_at_the_start, "a step differs"),
    (sessions_mixed, "one of two sessions differs")])
def test_a_trial_names_what_differs(change: Callable[[ForwardBatch], None], name: str) -> None:
    with pytest.raises(ModelError, match=f"llama model: engine hf would answer wrongly: .*{name}"):
        check(AutoConfig.for_model("llama"), with_random_weights, lambda model: Faulty(HFModel(model), change))


def test_a_window_that_is_one_token_too_long_shows() -> None:
    def one_more(model: Any) -> HFModel:
        other = deepcopy(model)
        other.config.sliding_window += 1
        return HFModel(other)

    with pytest.raises(ModelError, match="a prompt differs"):
        check(AutoConfig.for_model("mistral"), with_random_weights, one_more)


def test_a_copy_has_every_kind_of_layer_and_short_windows() -> None:
    layers = ["sliding_attention"] * 5 + ["full_attention"]
    raw = {"num_hidden_layers": 6, "layer_types": layers, "sliding_window": 4096, "moe_layers": [2, 3, 4, 5],
           "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "moe_intermediate_size": 1408,
           "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}}
    small = shrunk(raw, {**LENGTHS, **TABLES, **WIDTHS})
    assert small["layer_types"] == ["sliding_attention"] * 3 + ["full_attention"] and small["num_hidden_layers"] == 4
    assert small["moe_layers"] == [2, 3]  # layers 0, 1, 2 and 5
    assert (small["sliding_window"], small["hidden_size"], small["moe_intermediate_size"]) == (MAX_NODES, 64, 96)
    assert (small["num_attention_heads"], small["num_key_value_heads"]) == (4, 2)
    assert small["rope_parameters"] == {**raw["rope_parameters"], "original_max_position_embeddings": MAX_NODES}


@pytest.mark.parametrize(("kind", "fields"), [
    ("phi3", {"hidden_size": 3072, "num_attention_heads": 24, "num_key_value_heads": 8, "partial_rotary_factor": 0.75,
              "original_max_position_embeddings": 4096}),
    ("minicpm3", {"qk_rope_head_dim": 96, "original_max_position_embeddings": 4096}), ("phimoe", {"head_dim": 96}),
    ("internlm3", {"rope_scaling": {"rope_type": "dynamic", "factor": 6.0}}),
    ("hunyuan_v1_dense", {"head_dim": 128, "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}}),
])
def test_positions_that_depend_on_the_length_are_tried_as_they_are_published(kind: str, fields: dict[str, Any]) -> None:
    each = [1.0 + place / 48 for place in range(48)]
    longrope = {"type": "longrope", "short_factor": each, "long_factor": each, "short_mscale": 1.2, "long_mscale": 1.3,
                "original_max_position_embeddings": 4096}
    config = AutoConfig.for_model(kind, **{"rope_scaling": longrope, **fields})
    assert config.rope_parameters["rope_type"] in ("longrope", "dynamic")
    check(config, with_random_weights, HFModel)


@pytest.mark.parametrize(("config", "message"), [
    (AutoConfig.for_model("diffllama").to_dict(), "diffllama model: engine hf would answer wrongly"),
    ({"model_type": ["llama"]}, "transformers cannot load it"),
    ({"model_type": "llama", "num_attention_heads": 0}, "transformers cannot load it"),
    ({"model_type": "qwen2", "num_hidden_layers": 10**15}, "num_hidden_layers: 1000000000000000 layers"),
    ({"model_type": "gemma3", "text_config": {"num_hidden_layers": 1025}}, "num_hidden_layers: 1025 layers"),
])
def test_a_folder_is_tried_before_its_weights_are_read(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        load_model(tmp_path, ModelSection(dtype="float32", engine="hf"))
