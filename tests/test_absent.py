"""What a configuration does not say means what transformers takes it for in that family, or is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from slipstream.base.errors import ModelError
from slipstream.drafting.heads.mtp_checkpoint import LAYOUTS
from slipstream.engine.model import FAMILIES, ModelConfig, parse_config
from tests.block_folder import deepspec_config, speculators_block_config, zlab_config
from tests.eagle_folder import eagle_config, speculators_config

KINDS = [kind for kind in FAMILIES if kind != "mimo"]  # which transformers lacks
REQUIRED = {"model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
# Every field that is read, as no family has it by default.
SAID: dict[str, Any] = {
    "vocab_size": 260, "hidden_size": 2048, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 64,
    "num_key_value_heads": 4, "head_dim": 48, "max_position_embeddings": 1000, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True, "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
OWN: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True}, "mistral": {"sliding_window": 128}, "qwen2": {},
    "qwen3": {"attention_bias": True, "use_sliding_window": False}}


def ours(raw: dict[str, Any]) -> ModelConfig:
    return parse_config(raw, "config.json")


def theirs(raw: dict[str, Any]) -> ModelConfig:
    """Ours of all that transformers makes of it."""
    return ours(AutoConfig.for_model(**raw).to_dict())


@pytest.mark.parametrize(("kind", "field"), [(kind, field) for kind in KINDS
                                             for field in ("", "model_type", *SAID, *OWN[kind])])
def test_a_field_that_is_absent_is_the_familys_own(kind: str, field: str) -> None:
    raw = {name: value for name, value in ({"model_type": kind} | SAID | OWN[kind]).items() if name != field}
    if field in REQUIRED:
        with pytest.raises(ModelError, match=field):
            ours(raw)
    else:
        assert ours(raw) == theirs(raw)


@pytest.mark.parametrize(("kind", "field"), [
    *((kind, "num_key_value_heads") for kind in KINDS if kind != "mistral"), ("mistral", "sliding_window"),
    ("llama", "head_dim"), ("mistral", "head_dim"), *((kind, "rope_parameters") for kind in KINDS)])
def test_null_is_not_absent(kind: str, field: str) -> None:
    raw = {"model_type": kind} | SAID | OWN[kind] | {field: None}
    assert ours(raw) == theirs(raw)


def test_mimo_is_read_as_the_qwen2_that_its_own_class_extends() -> None:
    bare = {name: SAID[name] for name in SAID if name in REQUIRED}
    mimo, qwen2 = ({"model_type": kind} | bare for kind in ("mimo", "qwen2"))
    assert replace(ours(mimo), model_type="qwen2") == ours(qwen2) == theirs(qwen2)


@pytest.mark.parametrize("kind", [kind for kind in LAYOUTS if kind != "mimo"])
def test_a_head_of_the_targets_kind_has_its_familys_norm(kind: str) -> None:
    assert LAYOUTS[kind].norm_eps == AutoConfig.for_model(kind).rms_norm_eps


@pytest.mark.parametrize("kind", [["llama"], {"llama": 1}, None, 3])
def test_a_model_type_that_is_no_name_is_refused(kind: Any) -> None:
    with pytest.raises(ModelError, match="model_type"):
        ours(SAID | {"model_type": kind})


@pytest.mark.parametrize("config", [eagle_config(), speculators_config(), zlab_config(), deepspec_config(),
                                    speculators_block_config()])
def test_a_head_in_a_models_place_is_told_so(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"config\.json: this is a draft head, no model: draft\.model takes it"):
        ModelConfig.from_folder(tmp_path)


def test_a_config_that_is_too_deep_to_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    with pytest.raises(ModelError, match=r"config\.json: cannot be read as JSON"):
        ModelConfig.from_folder(tmp_path)
