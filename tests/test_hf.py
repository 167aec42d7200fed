from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM

from slipstream.base.config import ModelSection
from slipstream.base.errors import ModelError
from slipstream.engine.hf import HFModel
from slipstream.engine.loading import load_model
from slipstream.engine.runner import ModelRunner
from tests.sequences import NOTHING, run, run_tree
from tests.tiny import KINDS, VOCAB, write_tiny_model
from tests.trees import random_tree

TEXT = np.random.default_rng(0).integers(VOCAB, size=90).tolist()
SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "pad_token_id": 0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
REACH = 96  # tokens, within which these do not depend on how many there are
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4}
LONG = {"type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.1, 1.2, 1.3], "short_mscale": 1.2,
        "long_factor": [4.0, 5.0, 6.0, 7.0], "long_mscale": 1.3, "original_max_position_embeddings": REACH}


class KeepFloat64(TorchFunctionMode):
    """transformers computes norms in float32 whatever the model's dtype; this leaves float64 as it is."""

    def __torch_function__(self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.Tensor.to and args[1:] == (torch.float32,) and args[0].dtype == torch.float64:
            return args[0]
        return func(*args, **(kwargs or {}))


def pair(folder: Path, kind: str, **changes: Any) -> tuple[ModelRunner, ModelRunner]:
    write_tiny_model(folder, kind, **changes)
    return tuple(ModelRunner(load_model(folder, ModelSection(dtype="float64", engine=engine)), 512)  # type: ignore[return-value]
                 for engine in ("decoder", "hf"))


def random_model(config: Any) -> Any:
    """A transformers model with random weights, on its own reference attention."""
    auto: Any = AutoModelForCausalLM
    return auto.from_config(config, attn_implementation="eager").eval()


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


@pytest.mark.parametrize(("kind", "changes"), [
    *((kind, {}) for kind in KINDS), ("llama", {"rope_parameters": LLAMA3}), ("llama", {"rope_parameters": LINEAR}),
    *(("qwen3", {"rope_parameters": YARN | changes}) for changes in (
        {}, {"factor": None}, {"mscale": 0.7, "mscale_all_dim": 1.5}, {"attention_factor": 0.9, "truncate": False},
        {"attn_factor": 0.5},
        {"beta_fast": 4.0, "beta_slow": 4.0}, {"original_max_position_embeddings": 4096}, {"factor": 0.5})),
    ("llama", {"tie_word_embeddings": True}), ("mistral", {"sliding_window": 64}),
])
def test_both_engines_give_the_same_logits(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    ours, theirs = pair(tmp_path, kind, **changes)
    tree = random_tree(np.random.default_rng(1), 14, base=len(TEXT) + 1, vocab=VOCAB)
    with KeepFloat64():
        rows = []
        for runner in (ours, theirs):
            runner.set_taps((0, 1, 2))
            whole, slots = run(runner, TEXT)
            chunked = NOTHING
            for chunk in (TEXT[:33], TEXT[33:89]):
                chunked = run(runner, chunk, chunked)[1]
            step, chunked = run(runner, TEXT[89:], chunked)
            verified, nodes = run_tree(runner, tree, chunked)
            assert far(step, whole[-1:]) < 1e-9
            rows.append((whole, verified, runner.features(slots), runner.features(nodes)))
    for name, a, b in zip(("prefill", "tree", "features", "features of nodes"), *rows, strict=True):
        assert far(a, b) < 1e-9, name


def test_the_oracle_is_transformers_itself(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "qwen3")
    ours = run(ModelRunner(load_model(folder, ModelSection(dtype="float64", engine="hf")), 128), TEXT)[0]
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa")
    with torch.inference_mode():
        assert far(ours, plain(torch.tensor([TEXT])).logits[0]) < 1e-9


@pytest.mark.parametrize(("kind", "changes"), [
    ("gemma3_text", {"sliding_window": 64, "num_hidden_layers": 6}),
    ("deepseek_v3", {"first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
                     "topk_group": 1, "moe_intermediate_size": 16, "q_lora_rank": 16, "kv_lora_rank": 16,
                     "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12, "num_key_value_heads": 4}),
    ("glm4", {"partial_rotary_factor": 0.5}), ("olmo2", {}), ("gpt2", {"n_positions": 512}),
    *((kind, {"rope_parameters": DYNAMIC | changes, "max_position_embeddings": REACH}) for kind, changes in (
        ("internlm3", {"factor": 6.0}), ("hunyuan_v1_dense", {"factor": 1.0, "alpha": 1000.0}))),
    ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": REACH}),
    ("phimoe", {"rope_parameters": LONG}),
])
def test_the_breadth_path_serves_other_families(kind: str, changes: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SMALL | changes)
    plain = random_model(config)
    text = [token % 64 for token in TEXT]
    with torch.inference_mode():
        expected = plain(torch.tensor([text])).logits[0]
    runner = ModelRunner(HFModel(plain), 256)
    assert runner.config.max_context == (REACH if "rope_parameters" in changes else 512)
    slots = run(runner, text[:40])[1]
    after, slots = run(runner, text[40:80], slots)
    tree = random_tree(np.random.default_rng(1), 8, base=81, vocab=64)
    verified, nodes = run_tree(runner, tree, slots)
    path = tree.path(len(tree) - 1)
    runner.slots.free(nodes)
    assert far(after, expected[40:80]) < 1e-4
    assert far(verified[path], run(runner, [tree.tokens[at] for at in path], slots)[0]) < 1e-4


def test_a_context_beyond_max_position_embeddings_is_what_model_max_length_says() -> None:
    """As Command R's first models have them, 131,072 and 8,192: clients were told the latter."""
    cohere = {"model_max_length": 2048, "layer_norm_eps": 1e-5}
    assert HFModel(random_model(AutoConfig.for_model("cohere", **SMALL | cohere))).config.max_context == 2048
    rope = {"rope_parameters": DYNAMIC | {"factor": 2.0}}
    for kind, fields in (("llama", rope), ("gpt2", {"n_positions": 512})):
        config = AutoConfig.for_model(kind, **SMALL | fields, model_max_length=2048)
        assert HFModel(random_model(config)).config.max_context == 512, "where no position may be beyond"


@pytest.mark.parametrize(("kind", "changes", "message"), [
    ("gemma2", {}, "softcap"), ("nemotron", {}, "cannot attend over slots"),
    ("mistral", {"sliding_window": 32}, "a window of 32 tokens does not hold a whole tree"),
    ("mamba", {"state_size": 4}, "attention|head"),
])
def test_what_cannot_be_exact_is_refused(kind: str, changes: dict[str, Any], message: str) -> None:
    config = AutoConfig.for_model(kind, **SMALL | changes)
    with pytest.raises(ModelError, match=message):
        HFModel(random_model(config))


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, vocab=300)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"vocab_size": 300', '"vocab_size": 298'))
    with pytest.raises(ModelError, match=rf"{tmp_path}: tensor lm_head.weight has shape \(300, 48\), expected \(298,"):
        load_model(tmp_path, ModelSection(dtype="float32", engine="hf"))


def test_a_folder_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: no such file"):
        load_model(tmp_path, ModelSection(dtype="float32", engine="hf"))
