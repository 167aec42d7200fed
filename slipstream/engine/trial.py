"""The trial of a transformers model: logits of a tiny copy, computed over our slots, are compared with those of the
copy's own forward.

Rules:
1. The copy has the folder's configuration and random float32 weights. It has few layers, but one of each kind; small
   widths where the family allows it; and every length (window, chunk, reach) is so small that the text is longer.
2. Our logits must be those of its own forward: for a prompt in one piece, for one in chunks, for single steps, for a
   tree, and for two sessions that share batches.
3. A model that differs is refused; the error names the first case that differs. A model that raises is refused, too.
4. The trial runs on the CPU, whatever device serves, before any weight is read; most take less than a second.

It cannot find what depends on lengths with other names than those below, nor faults of a device or of 16-bit floats.
It knows nothing about transformers: functions that build and serve a copy are arguments.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch

from slipstream.base.errors import ModelError, first_line
from slipstream.engine.batch import BatchBuilder
from slipstream.engine.device import threads
from slipstream.engine.kv import KVPool
from slipstream.engine.model import CausalModel
from slipstream.protocol.tree import MAX_NODES, DraftTree

# Upper bounds of configuration fields in a copy. A field matches by its last words: moe_intermediate_size, too.
LENGTHS: Mapping[str, int] = {
    "window": MAX_NODES, "window_size": MAX_NODES, "sliding_window": MAX_NODES, "attention_chunk_size": MAX_NODES,
    "local_attention": 2 * MAX_NODES,  # half of it lies before a row
    "rel_extent": MAX_NODES, "original_max_position_embeddings": MAX_NODES, "index_topk": 16, "index_topk_blocks": 1,
    "index_block_size": 16, "floor_scale": 16, "log_scaling_n_floor": 16}
TABLES: Mapping[str, int] = {
    "vocab_size": 256, "vocab_size_per_layer_input": 256, "max_position_embeddings": 512, "n_positions": 512,
    "n_ctx": 512, "max_seq_len": 512, "num_experts": 8, "n_routed_experts": 8, "num_local_experts": 8,
    "zero_expert_num": 2, "experts_per_tok": 2, "experts_per_token": 2, "moe_topk": 2, "moe_k": 2, "n_group": 2,
    "num_expert_group": 2, "topk_group": 1}
WIDTHS: Mapping[str, int] = {
    "hidden_size": 64, "d_model": 64, "n_embd": 64, "emb_dim": 64, "embed_dim": 64, "embedding_size": 64,
    "embed_proj_dim": 64, "intermediate_size": 96, "intermediate_size_mlp": 96, "ffn_dim": 96, "ffn_hidden_size": 96,
    "n_inner": 96, "dff": 96, "dim_ff": 96, "attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4,
    "key_value_heads": 2, "kv_heads": 2, "head_dim": 16, "kv_channels": 16, "dim_head": 16, "rotary_dim": 8,
    "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "qk_head_dim": 24,
    "v_head_dim": 12, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 16}
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers", "depth",
          "num_decoder_layers", "num_encoder_layers")
# So many layers are of a kind of their own.
FIRST, LAST = ("first_k_dense_replace", "num_dense_layers"), ("num_kv_shared_layers",)
KV_HEADS = ("key_value_heads", "kv_heads")
FACTORS = ("short_factor", "long_factor")  # of positions
FEW_LAYERS, MOST_LAYERS = 4, 1024
LEFT_OUT = ("quantization_config", "dtype", "torch_dtype", "auto_map", "id2label", "label2id")
MOST_WEIGHTS = 64_000_000  # of a copy, for families that cannot be made small: a quarter of a GB, and seconds

# In tokens: the chunks of a prompt, where the later ones begin after every length above; single steps after it; and how
# many rows two sessions add to each batch that they share.
CHUNKS, STEPS, SHARED = (70, 50, 30), 4, ((70, 90), (50, 34), (1, 1))
PARENTS = (-1, 0, 0, 1, 1, 2, 2)  # of the tree's nodes
# Relative to the largest logit. Right results differ by 1e-6 to 1e-5, as float32 sums in another order do over a few
# layers; a row that sees one token too many, by 1e-2 and more. The bound is far from both.
TOLERANCE = 3e-4

Build = Callable[[Any], Any]  # a configuration -> a transformers model with float32 weights, on the CPU
Serve = Callable[[Any], CausalModel]  # such a model -> the same as our engine serves it


def check_layers(raw: Mapping[str, Any], where: str) -> None:
    """Raises ModelError for more layers than any model has: configuration classes would make lists of that length."""
    for name, value in raw.items():
        if name in LAYERS and isinstance(value, (int, float)) and value > MOST_LAYERS:
            raise ModelError(f"{where}: {name}: {value} layers are more than {MOST_LAYERS}")
        if isinstance(value, dict):
            check_layers(value, where)


def check(config: Any, build: Build, serve: Serve) -> None:
    """Try the model that a transformers configuration describes. Raises ModelError that names what differs."""
    where = f"{config.model_type} model"
    # One thread: tiny products gain nothing from more, which wait for one another on busy cores.
    with torch.random.fork_rng(devices=[]), threads(1), torch.no_grad():
        torch.manual_seed(0)
        model = tiny(config, build)
        try:
            for name, actual, expected in _compared(model, serve):
                off = float(((actual - expected).abs().max() / expected.abs().max()).nan_to_num(nan=torch.inf))
                if off > TOLERANCE or not torch.equal(actual.argmax(-1), expected.argmax(-1)):
                    raise ModelError(
                        f"{where}: engine hf would answer wrongly: on a tiny copy {name} differs from the model's own "
                        f"forward by {off:.1g} of the largest logit, where rounding explains {TOLERANCE:g}")
        except ModelError:
            raise
        except Exception as error:  # what a family's own code raises has no class in common
            raise ModelError(f"{where}: engine hf cannot serve it: a tiny copy raises {first_line(error)}") from error


def _compared(model: Any, serve: Serve) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """For each case of rule 2: its name, our logits, and those of the model's own forward."""
    rng, vocab = np.random.default_rng(0), int(model.config.get_text_config().vocab_size)
    prompt, length = sum(CHUNKS), sum(CHUNKS) + STEPS
    # Tokens of the upper half only: low ids may be special, as padding is.
    tokens = rng.integers(vocab // 2, vocab, size=length + sum(part for _, part in SHARED)).tolist()
    text, other = tokens[:length], tokens[length:]
    nodes = list(range(len(PARENTS)))
    tree = DraftTree(length + 1, [vocab - 1 - node for node in nodes], list(PARENTS), nodes, [-1.0 * n for n in nodes])
    expected, expected_other = _own_logits(model, text), _own_logits(model, other)
    paths = [tree.path(node) for node in range(len(tree))]
    branches = torch.cat([_own_logits(model, [*text, *[tree.tokens[node] for node in path]])[-1:] for path in paths])

    sessions, rest = Sessions(serve(model)), iter(text)
    parts = [list(islice(rest, rows)) for rows in CHUNKS]
    unchunked, chunked, first, second = range(4)
    yield "a prompt", sessions.run({unchunked: text[:prompt]}), expected[:prompt]
    yield "a prompt in chunks", torch.cat([sessions.run({chunked: part}) for part in parts]), expected[:prompt]
    yield "a step", torch.cat([sessions.run({chunked: [token]}) for token in text[prompt:]]), expected[prompt:]
    yield "a tree", sessions.run_tree(chunked, tree), branches
    actual_parts, expected_parts, start, other_start = [], [], 0, 0
    for rows, others in SHARED:
        actual_parts.append(sessions.run({first: text[start : start + rows],
                                          second: other[other_start : other_start + others]}))
        expected_parts += [expected[start : start + rows], expected_other[other_start : other_start + others]]
        start, other_start = start + rows, other_start + others
    yield "one of two sessions", torch.cat(actual_parts), torch.cat(expected_parts)


class Sessions:
    """Some sessions of a model, by number, on a pool of their own with slots in random order; it has room for four
    times the text of a trial, and a tree."""

    def __init__(self, model: CausalModel) -> None:
        count = 4 * (sum(CHUNKS) + STEPS) + len(PARENTS)
        config = model.config
        self._model = model
        self._pool = KVPool(config.num_layers, count, config.num_kv_heads, config.head_dim, model.dtype)
        self._free: list[int] = np.random.default_rng(0).permutation(count).tolist()
        self._slots: dict[int, list[int]] = defaultdict(list)

    def run(self, parts: Mapping[int, Sequence[int]]) -> torch.Tensor:
        """Add tokens to some sessions, in one batch; logits [T, V] of these. parts: tokens by session."""
        builder = BatchBuilder()
        for session, tokens in parts.items():
            context, own = self._slots[session], [self._free.pop() for _ in tokens]
            builder.add(tokens, range(len(context), len(context) + len(tokens)), own, np.array(context, np.int64))
            self._slots[session] = context + own
        return self._logits(builder)

    def run_tree(self, session: int, tree: DraftTree) -> torch.Tensor:
        """Logits [N, V] of a tree's nodes below a session's text, which does not change."""
        builder, context, own = BatchBuilder(), self._slots[session], [self._free.pop() for _ in range(len(tree))]
        builder.add(tree.tokens, [len(context) + level for level in tree.levels()], own, np.array(context, np.int64),
                    tree.ancestors(), len(tree))
        return self._logits(builder)

    def _logits(self, builder: BatchBuilder) -> torch.Tensor:
        return self._model.logits(self._model.forward(builder.build(), self._pool)[0])


def _own_logits(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """Logits [T, V] of the model's own forward."""
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def tiny(config: Any, build: Build) -> Any:
    """The smallest copy of the model whose own forward runs and gives finite logits. Raises ModelError if there is
    none."""
    why = ""
    for widths in (WIDTHS, {}):
        try:
            model = _built(type(config).from_dict(shrunk(config.to_dict(), {**LENGTHS, **TABLES, **widths})), build)
            if bool(_own_logits(model, [1, 2, 3]).isfinite().all()):
                return model
            why = why or "its own answers are not finite"
        except Exception as error:  # what a family's own code raises has no class in common
            why = why or first_line(error)
    raise ModelError(f"{config.model_type} model: engine hf cannot try it and does not serve it: no tiny copy of it "
                     f"runs ({why})")


def _built(config: Any, build: Build) -> Any:
    with torch.device("meta"):
        weights = sum(parameter.numel() for parameter in build(config).parameters())
    if weights > MOST_WEIGHTS:
        raise ModelError(f"it has {weights} weights, more than {MOST_WEIGHTS}")
    model = build(config)
    with torch.no_grad():
        _randomise(model)
    return model


def _randomise(model: Any) -> None:
    """Random weights with which a wrong mask changes the logits. As families initialise weights, attention is nearly
    uniform and biases are 0, so it would not."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, parameter.shape[-1] ** -0.5)
        else:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)


def shrunk(raw: Mapping[str, Any], most: Mapping[str, int]) -> dict[str, Any]:
    """A smaller configuration: few layers, and numbers of at most ``most``, by the last words of their names."""
    layers = next((raw[name] for name in LAYERS if isinstance(raw.get(name), int)), 0)
    layer_settings = {int(layer): value for layer, value in (raw.get("per_layer_config") or {}).items()}
    kept = _kept_layers(raw, layers, layer_settings)
    small: dict[str, Any] = {}
    for name, value in raw.items():
        limit = _limit(name, most)
        if name in LEFT_OUT:
            continue
        if name == "per_layer_config":
            more = {end: 2 * limit for end, limit in most.items()}  # so that special layers still differ
            small[name] = {place: shrunk(layer_settings[layer], more) for place, layer in enumerate(kept)
                           if layer in layer_settings}
        elif isinstance(value, dict):
            small[name] = shrunk(value, most)
        elif name in LAYERS and value == layers:
            small[name] = len(kept)
        elif name in (*FIRST, *LAST) and isinstance(value, int):
            small[name] = sum(_is_special(name, value, layer, layers) for layer in kept)
        elif _of_layers(value, layers):
            small[name] = [_limited(value[layer], limit) for layer in kept]
        elif _names_layers(name, value):
            small[name] = [kept.index(layer) for layer in value if layer in kept]
        elif name.endswith("token_id"):
            small[name] = [token % 64 for token in value] if isinstance(value, list) else _limited(value, 63)
        else:
            small[name] = _limited(value, limit)
    return _consistent(small, raw)


def _consistent(small: dict[str, Any], raw: Mapping[str, Any]) -> dict[str, Any]:
    """``small``, corrected: numbers that depend on one another in ``raw`` do so in it, too."""
    for name in small:
        if name.endswith(KV_HEADS) and raw[name] == raw.get("num_attention_heads", 0):  # not grouped
            small[name] = small["num_attention_heads"]
    if "qk_rope_head_dim" in raw and raw.get("head_dim") == raw["qk_rope_head_dim"]:
        small["head_dim"] = small["qk_rope_head_dim"]
    if isinstance(raw.get("mamba_d_ssm"), int):
        small["mamba_d_ssm"] = small["mamba_n_heads"] * small["mamba_d_head"]
    rope = small.get("rope_parameters") or {}
    for name in FACTORS:
        if name in rope:  # one for each pair that turns
            size = small.get("head_dim") or small["hidden_size"] // small["num_attention_heads"]
            rope[name] = rope[name][: int(size * rope.get("partial_rotary_factor", 1)) // 2]
    if isinstance(parts := rope.get("mrope_section"), list) and sum(parts) > 0:  # of the pairs, to time, height, width
        size = small.get("head_dim") or small["hidden_size"] // small["num_attention_heads"]
        pairs = int(size * rope.get("partial_rotary_factor", 1)) // 2
        rope["mrope_section"] = [pairs - sum(rest := [pairs * part // sum(parts) for part in parts[1:]]), *rest]
    return small


def _kept_layers(raw: Mapping[str, Any], layers: int, layer_settings: Mapping[int, Any]) -> list[int]:
    """The numbers of the layers that a copy keeps: the first of each kind, and more up to FEW_LAYERS.
    layer_settings: those of single layers."""
    lists = [value for value in raw.values() if _of_layers(value, layers)]
    named = [value for name, value in raw.items() if not _of_layers(value, layers) and _names_layers(name, value)]
    counts = [(name, value) for name, value in raw.items() if name in (*FIRST, *LAST) and isinstance(value, int)]
    kinds: dict[str, int] = {}
    for layer in range(layers):
        kind = [[value[layer] for value in lists], [layer in value for value in named], layer_settings.get(layer),
                [_is_special(name, value, layer, layers) for name, value in counts]]
        kinds.setdefault(repr(kind), layer)
    first = set(kinds.values())
    more = [layer for layer in range(layers) if layer not in first]
    return sorted([*first, *more[: max(0, FEW_LAYERS - len(first))]])


def _is_special(name: str, count: int, layer: int, layers: int) -> bool:
    return layer < count if name in FIRST else layer >= layers - count


def _of_layers(value: Any, layers: int) -> bool:
    return isinstance(value, list) and len(value) == layers > 1


def _names_layers(name: str, value: Any) -> bool:
    """Whether the field is a list of layer numbers."""
    return (isinstance(value, list) and name.endswith(("layers", "layer_ids", "idxs", "indexes", "indices"))
            and all(isinstance(layer, int) for layer in value))


def _limit(name: str, most: Mapping[str, int]) -> int | None:
    words = name.removesuffix("_per_layer").lstrip("_").split("_")
    return next((most[end] for end in ("_".join(words[start:]) for start in range(len(words))) if end in most), None)


def _limited(value: Any, limit: int | None) -> Any:
    plain = isinstance(value, int) and not isinstance(value, bool)
    return min(value, limit) if plain and limit is not None else value
