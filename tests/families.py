"""``make families``: which causal language models of transformers ``model.engine=hf`` serves; every type of the
installed version is tried. A type that sees or hears as well (``mistral3``) is tried where it is named.

Each is tried as its configuration class describes it, and once more with what that leaves off: with windows, or as a
decoder where it is an encoder. Nothing is downloaded; the weights are random (see ``slipstream.engine.trial``).
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import structlog
import transformers
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from slipstream.base.errors import ModelError, first_line
from slipstream.engine.hf import check_tiny_copy

# Configuration classes whose own defaults are no model: what they leave open, as published models have it.
OPEN: Mapping[str, Mapping[str, Any]] = MappingProxyType({
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    **{kind: {"text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": parts}}}
       for kind, parts in (("qwen2_5_vl", [16, 24, 24]), ("qwen2_vl", [16, 24, 24]), ("qwen3_vl", [24, 20, 20]),
                           ("qwen3_vl_moe", [24, 20, 20]), ("glm4v", [8, 12, 12]))},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 30},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "xmod": {"default_language": "en_XX"},
})


@dataclass(frozen=True, slots=True)
class Tried:
    """One type, as it was tried; ``why`` is empty where it is served."""

    kind: str
    way: str
    why: str


def kinds() -> list[str]:
    """Every type that transformers has a causal language model of."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def configurations(kind: str) -> Iterator[tuple[str, Any]]:
    """The ways of a type, and their configurations. Raises what the type's own code raises."""
    first = AutoConfig.for_model(kind, **OPEN.get(kind, {}))
    yield "as it is", first
    causal = {"is_decoder": True} if getattr(first, "is_decoder", None) is False else {}  # of an encoder
    for way, changes in (("with windows", windows(first)), ("as a decoder", causal)):
        if changes:
            yield way, AutoConfig.for_model(kind, **{**OPEN.get(kind, {}), **changes})


def windows(config: Any) -> dict[str, Any]:
    """What gives every second layer a window where a configuration may have windows and has none."""
    layers = getattr(config, "layer_types", None) or []
    if not hasattr(config, "sliding_window") or (config.sliding_window and set(layers) != {"full_attention"}):
        return {}
    changes: dict[str, Any] = {"sliding_window": 4096}
    if hasattr(config, "use_sliding_window"):
        changes |= {"use_sliding_window": True, "max_window_layers": 1}
    if set(layers) == {"full_attention"}:
        changes["layer_types"] = [("sliding_attention", "full_attention")[i % 2] for i in range(len(layers))]
    return changes


def verdicts(kind: str) -> Iterator[Tried]:
    """One type, in all of its ways."""
    way = "as it is"
    try:
        for way, config in configurations(kind):
            yield Tried(kind, way, objection(config))
    except Exception as error:  # a configuration class may raise anything
        yield Tried(kind, way, f"its configuration cannot be made: {first_line(error)}")


def objection(config: Any) -> str:
    try:
        check_tiny_copy(config)
    except ModelError as error:
        return str(error)
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", help="types; none: all")
    arguments = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    table = [verdict for kind in arguments.kinds or kinds() for verdict in verdicts(kind)]
    served = [verdict for verdict in table if not verdict.why]
    for verdict in table:
        print(f"{verdict.kind:26} {verdict.way:13} {verdict.why or 'served'}")
    print(f"transformers {transformers.__version__}: {len({verdict.kind for verdict in table})} types in {len(table)} "
          f"ways; {len({verdict.kind for verdict in served})} types are served in {len(served)} ways")


if __name__ == "__main__":
    main()
