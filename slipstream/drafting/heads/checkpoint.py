"""A head as it is published, of any kind: ``config.json`` and safetensors, read and checked against its target.

Rules of every head:
1. A tensor that is missing, has a wrong shape or belongs to another vocabulary raises a ModelError with its name, what
   was expected and what was found.
2. Only safetensors are read. A folder of pickles is refused with the command that converts it.
3. The target may be of any family. Tensors that the head's folder lacks are read from the target's
   (``target_checkpoint``).

Rules of EAGLE:
4. Two layouts: the authors' (fields at the top of ``config.json``, as SGLang and SpecForge write it too) and vLLM's
   "speculators" (``speculators_model_type``, the layer's fields in ``transformer_layer_config``).
5. Plain names: no leading ``model.``, layers as ``layers.i``. The authors call EAGLE-3's layer ``midlayer``;
   speculators call EAGLE-1's ``transformer`` and its ``fc`` ``fusion_fc``.
6. Rotary positions are the head's own, also where they differ from the target's: it was trained with them. A config
   without ``rope_theta`` means 10000, as it does where such heads are trained and served. A difference is warned of,
   because converted configs are known to carry a wrong value.
7. A tensor that our code does not read (a norm, a bias without its config field) is refused by name: without it the
   head would run, and draft badly. So is a config field that only other engines compute with (``NEUTRAL``).
   ``layer_types`` says whether layers slide (vLLM's speculators are trained so), whatever the layer's family.

Rules of EAGLE-3 (``read_head``):
8. Tensors, by plain names: ``fc.weight`` (``fc.bias``), ``layers.i.*``, ``norm.weight``, ``d2t``, ``t2d``,
   ``embed_tokens.weight`` or else the target's, ``lm_head.weight`` or else the head's own embedding where the config
   ties them, or else the target's rows; ``input_norm.weight`` over all taps where ``norm_before_fc`` says so, or
   ``fc_norm.i.weight`` over each where ``fc_norm`` does (EAGLE-3.1, where ``norm_output``: what a row hands on has been
   through the final norm). The authors' own heads have one layer, also where ``num_hidden_layers`` is the target's.
9. ``d2t`` holds differences: draft id i means target id ``i + d2t[i]``. ``t2d`` is a mask and only checked.
10. Target states: tap t is the state that *enters* layer t. What leaves the last layer, before the final norm, is not
   sent, so heads that read it are refused. A config without ids means taps 2, n // 2 and n - 3 of a
   target with n layers. How ids are read depends on who wrote the config:
   - Authors, ``eagle_aux_hidden_state_layer_ids``: id i is the *output* of layer i, so tap i + 1. But ids that equal
     the default taps are taps themselves (heads of both readings are published; SGLang tells them apart by the first
     id).
   - DeepSpec, ``target_layer_ids``: outputs.
   - Speculators: taps.
   - vLLM's name for the architecture: both readings occur, so ids that give the default taps under neither are refused.
11. ``norm_before_residual`` (speculators): the residual stream begins after ``hidden_norm``, not before it.

Rules of EAGLE-1 and EAGLE-2 (``read_eagle2_head``; EAGLE-2 is EAGLE-1's head with trees by joint probability):
12. Tensors: ``fc.weight`` (``fc.bias`` where the config's ``bias``, or ``fusion_bias`` in the speculators layout, says
   so; where it says nothing, where there is one) and ``layers.0.*`` without an input norm. There is no final norm.
13. Embedding and lm_head are the target's (heads carry a copy of the embedding: it is left unread); with a token map
   the lm_head is its rows (``token_map.py``). The one target state is that after the final norm.

It knows nothing about sessions or forwards. Formats: arXiv 2401.15077, 2406.16858, 2503.01840, their reference
repositories' checkpoints (``LlamaForCausalLMEagle3``, which AngelSlim calls as vLLM does; of the authors'
``LlamaForCausalLM`` or, for Qwen2, that one's name, so a whole model's folder is recognised by its missing ``fc``;
SGLang adds ``Eagle``) and those of vLLM's speculators library; tensor names of targets as in transformers' checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from slipstream.base.errors import ModelError
from slipstream.drafting.heads.target_checkpoint import TargetCheckpoint
from slipstream.engine.model import DTYPES, Fields, ModelConfig, load_tensors, of_folder, parse_config, require_tensor
from slipstream.engine.ops.layer import layer_shapes
from slipstream.models.folder import read_json
from slipstream.observe.log import logger
from slipstream.protocol.tree import MAX_NODES

LAYER = "layers.0"
MAX_LAYERS = 16  # of heads that have several
MAX_TAPS = 64  # as on the wire
PREFIXES = (("model.", ""), ("midlayer.", f"{LAYER}."), ("transformer.", f"{LAYER}."), ("fusion_fc.", "fc."))
IGNORED_TENSORS = ("rotary_emb.inv_freq", "embed_tokens.weight", "lm_head.weight", "verifier_norm.weight",
          "verifier_lm_head.weight", "t2d")  # what published files hold beside what a head computes with
# Types that published configs copy from the target. Without this tensor, if one is named, the head's layer is Llama's.
LLAMA_TYPES = {"mixtral": "", "phi3": "", "qwen2": f"{LAYER}.self_attn.q_proj.bias",
               "qwen3": f"{LAYER}.self_attn.q_norm.weight"}
VOCABULARY_MAPS = ("d2t", "t2d")  # tensors that are no weights
NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType({
    "logit_scale": (1,), "logits_scaling": (1,), "final_logit_softcapping": (), "embedding_multiplier": (1,),
    "residual_multiplier": (1,), "attention_multiplier": (), "attn_logit_softcapping": (),
    "hidden_activation": ("silu", "swish"), "rope_interleave": (False,), "is_neox_style": (True,),
    "rope_is_neox_style": (True,)})  # fields that nothing here reads, and the values that change nothing


@dataclass(frozen=True, slots=True)
class PublishedConfig(Fields):
    """The content of a head's ``config.json``: the layer's fields and the head's own side by side."""

    speculators: str  # the ``speculators_model_type``; empty: the authors' layout

    def require_equal(self, name: str, found: int, expected: int, what: str = "") -> None:
        """Raises ModelError unless both are equal."""
        if found != expected:
            raise ModelError(f"{self.where}: {name}: the head was made for {found}{what}, the target has {expected}")

    def require_neutral(self, fields: Mapping[str, tuple[Any, ...]]) -> None:
        """Raises ModelError for a field that has none of the values that ``fields`` allows. Null is allowed."""
        for name, allowed in fields.items():
            found = self.raw.get(name)
            if found is not None and found not in allowed:
                raise ModelError(f"{self.where}: {name}: heads with {found!r} are not supported")

    def taps(self, name: str, ids: Any, by_output: bool, num_layers: int) -> tuple[int, ...]:
        """The layer ``ids`` of the field ``name`` as FeatureSpec.layers. by_output: an id means a layer's output, not
        what enters it. Raises ModelError."""
        if (not isinstance(ids, list) or not 1 <= len(ids) <= MAX_TAPS
                or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids)):
            raise ModelError(f"{self.where}: {name}: expected 1 to {MAX_TAPS} layer numbers, found {ids!r}")
        taps = tuple(i + by_output for i in ids)
        if not all(0 <= tap <= num_layers for tap in taps):
            raise ModelError(f"{self.where}: {name}: {ids} does not fit a target with {num_layers} layers")
        return taps


def read_published_config(folder: str | Path) -> PublishedConfig:
    """Read ``config.json`` in either layout. Raises ModelError."""
    path = Path(folder) / "config.json"
    raw = read_json(path)
    kind = raw.get("speculators_model_type")
    if kind is None:
        return PublishedConfig(str(path), raw, "")
    layer = raw.get("transformer_layer_config")
    if not isinstance(kind, str) or not isinstance(layer, dict):
        raise ModelError(f"{path}: transformer_layer_config: expected an object beside speculators_model_type, found "
                         f"{type(layer).__name__}")
    # Whether embeddings are tied is the layer's to say: on the whole it is transformers' default.
    head = {name: value for name, value in raw.items() if name != "tie_word_embeddings"}
    return PublishedConfig(str(path), head | layer, kind)


def layer_config(published: PublishedConfig, target: TargetCheckpoint, most_layers: int = 1) -> ModelConfig:
    """The measures of the head's layers, checked against the target's vocabulary. Raises ModelError."""
    raw, where = dict(published.raw), published.where
    published.require_neutral(NEUTRAL)
    if raw.get("layer_types") is not None:
        raw["use_sliding_window"] = False  # the list says which layers do
    config = parse_config({"model_type": "llama"} | raw, where)
    if config.num_layers > most_layers:
        expected = "1" if most_layers == 1 else f"1 to {most_layers}"
        raise ModelError(f"{where}: num_hidden_layers: expected {expected}, found {config.num_layers}")
    published.require_equal("vocab_size", config.vocab_size, target.vocab_size, " tokens")
    hidden = published.integer("target_hidden_size", target.hidden_size)
    published.require_equal("target_hidden_size", hidden, target.hidden_size)
    if "qkv_bias" in raw:  # heads for Qwen2: a bias on q, k and v, none on o
        config = replace(config, qkv_bias=published.flag("qkv_bias", None))
    if target.rope not in (None, (config.rope_theta, config.rope_scaling)):
        logger("draft").warning("the head's rotary positions differ from the target's; if it accepts little, correct "
                                "rope_theta in its config.json", file=where, head=config.rope_theta,
                                target=target.rope[0])
    return config


def read_tensors(folder: str | Path) -> dict[str, torch.Tensor]:
    """Every tensor of a head by its plain name. Raises ModelError."""
    return {_plain_name(name): tensor for name, tensor in load_tensors(folder).items()}


def check_tensors(folder: str | Path, tensors: Mapping[str, torch.Tensor],
                  shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ModelError for a tensor of ``shapes`` that is missing, of another shape or quantized, and for one left
    over."""
    for name, shape in shapes.items():
        with of_folder(folder):
            tensor = require_tensor(tensors, name, *shape)
        if name not in VOCABULARY_MAPS:
            check_float(folder, name, tensor)
    left = [name for name in sorted(tensors.keys() - shapes.keys()) if not name.endswith(IGNORED_TENSORS)]
    if left:
        raise ModelError(f"{folder}: tensor {left[0]} is no part of the head that config.json describes; a head of "
                         "another kind, or a field that is missing (attention_bias, qkv_bias, norm_before_fc)")


def check_float(folder: str | Path, name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in DTYPES.values():
        raise ModelError(f"{folder}: tensor {name} holds {tensor.dtype}: quantized heads are not read; convert the "
                         "checkpoint to bfloat16")


def fc_bias(published: PublishedConfig, tensors: Mapping[str, torch.Tensor],
            hidden_size: int) -> dict[str, tuple[int, ...]]:
    """The shape of ``fc.bias`` where there is one. Raises ModelError when config and tensors disagree."""
    name = "fusion_bias" if published.speculators else "bias"
    found = "fc.bias" in tensors
    if published.flag(name, found) != found:
        raise ModelError(f"{published.where}: {name}: {not found}, but tensor fc.bias is "
                         f"{'there' if found else 'missing'}")
    return {"fc.bias": (hidden_size,)} if found else {}


def _plain_name(name: str) -> str:
    for prefix, plain in PREFIXES:
        if name.startswith(prefix):
            name = plain + name.removeprefix(prefix)
    return name


def draft_vocab_size(published: PublishedConfig, tensors: Mapping[str, torch.Tensor], config: ModelConfig) -> int:
    """Tokens that a head scores. Raises ModelError."""
    own = tensors.get("d2t")
    return published.integer("draft_vocab_size", config.vocab_size if own is None or own.ndim != 1 else len(own))


def with_target_tensors(folder: str | Path, tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]],
                        draft_vocab: int, config: ModelConfig,
                        target: TargetCheckpoint) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A head's ``tensors`` (those of ``shapes``, and of vocabulary and lm_head) completed from the target's; and the
    int64 [draft_vocab] target ids of the tokens that it scores. The lm_head is the head's own, or its own embedding
    where it ties them, or else the target's rows. Raises ModelError."""
    vocab, hidden = config.vocab_size, config.hidden_size
    optional = {"embed_tokens.weight": (vocab, hidden), "lm_head.weight": (draft_vocab, hidden), "t2d": (vocab,),
            "d2t": (draft_vocab,)}
    needed = ("d2t",) if draft_vocab != vocab else ()
    check_tensors(folder, tensors, {**shapes, **{name: shape for name, shape in optional.items()
                                                 if name in tensors or name in needed}})
    vocabulary, completed = draft_vocabulary(tensors, draft_vocab, vocab), dict(tensors)
    embedding = tensors.get("embed_tokens.weight")
    if embedding is None:
        completed["embed_tokens.weight"] = target.embedding(hidden)
    if "lm_head.weight" in tensors:
        return completed, vocabulary
    if embedding is not None and config.tied_embeddings:
        completed["lm_head.weight"] = embedding.index_select(0, vocabulary)
    elif hidden == target.hidden_size:
        completed["lm_head.weight"] = target.lm_head(vocabulary)
    else:
        raise ModelError(f"{folder}: tensor lm_head.weight is missing, and the target's does not fit: the head's "
                         f"states have {hidden} numbers (hidden_size), the target's {target.hidden_size}")
    return completed, vocabulary


ARCHITECTURE = "LlamaForCausalLMEagle3"
VLLM_ARCHITECTURE = "Eagle3LlamaForCausalLM"  # of the same layout
DEEPSPEC_ARCHITECTURE = "Qwen3Eagle3Model"  # of the same layout, except for the ids of target layers
AUTHORS_ARCHITECTURE = "LlamaForCausalLM"  # also of whole models and EAGLE-1 heads, which have no ``draft_vocab_size``


@dataclass(frozen=True, slots=True)
class HeadKind:
    """What the config of one drafter's heads says."""

    speculators: str
    architectures: tuple[str, ...]
    norms: tuple[str, ...]  # flags of norms that speculators may have and nothing here computes
    hint: str  # for a head of another kind


EAGLE3 = HeadKind("eagle3", (ARCHITECTURE, VLLM_ARCHITECTURE, DEEPSPEC_ARCHITECTURE), (),
              "EAGLE-1 and EAGLE-2 heads are for draft.drafter: eagle2")
EAGLE2 = HeadKind("eagle", ("LlamaForCausalLM", "LlamaForCausalLMEagle", "Qwen2ForCausalLM", "Qwen2ForCausalLMEagle"),
              ("layernorms",),
              "EAGLE-3 heads are for draft.drafter: eagle3")


@dataclass(frozen=True, slots=True)
class EagleHead:
    """A checked head, on the CPU and in its stored dtypes."""

    config: ModelConfig  # the layers' measures; vocab_size is the target's
    target_hidden_size: int
    taps: tuple[int, ...]  # as FeatureSpec.layers
    tensors: Mapping[str, torch.Tensor]  # by plain names
    vocabulary: torch.Tensor  # int64 [V'] target ids of the draft's
    norm_before_residual: bool = False
    norm_output: bool = False  # EAGLE-3.1: what is handed on has been through the final norm
    joint: bool = False  # EAGLE-1 and EAGLE-2: ``fc`` joins token and state, and there are no norms around the layer


def read_head(folder: str | Path, target_folder: str | Path) -> EagleHead:
    """Read and check the head in ``folder`` for the target in ``target_folder``. Raises ModelError."""
    published, target = read_published_config(folder), TargetCheckpoint.of(target_folder)
    _check_kind(published, EAGLE3)
    tensors, taps = read_tensors(folder), _taps(published, target)
    if published.raw.get("architectures") == [AUTHORS_ARCHITECTURE] and not _has_layer(tensors, 1):
        published = replace(published, raw=published.raw | {"num_hidden_layers": 1})
    config = _eagle_config(published, target, tensors, MAX_LAYERS)
    draft_vocab = draft_vocab_size(published, tensors, config)
    shapes = _shapes(published, tensors, config, len(taps), target.hidden_size)
    tensors, vocabulary = with_target_tensors(folder, tensors, shapes, draft_vocab, config, target)
    return EagleHead(config, target.hidden_size, taps, tensors, vocabulary,
                     published.flag("norm_before_residual", None if published.speculators else False),
                     published.flag("norm_output", False))


def _has_layer(tensors: Mapping[str, torch.Tensor], layer: int) -> bool:
    return any(name.startswith(f"layers.{layer}.") for name in tensors)


def read_eagle2_head(folder: str | Path, target_folder: str | Path,
                     vocabulary: torch.Tensor | None = None) -> EagleHead:
    """Read and check the head in ``folder`` for the target in ``target_folder``. vocabulary: int64 [K], a token map.
    Raises ModelError."""
    published, target = read_published_config(folder), TargetCheckpoint.of(target_folder)
    _check_kind(published, EAGLE2)
    tensors = read_tensors(folder)
    config = _eagle_config(published, target, tensors)
    published.require_equal("hidden_size", config.hidden_size, target.hidden_size)
    if "fc.weight" not in tensors:
        raise ModelError(f"{folder}: tensor fc.weight is missing: this is no EAGLE-1 or EAGLE-2 head; a whole model is "
                         "for draft.drafter: standalone")
    hidden = config.hidden_size
    shapes = {"fc.weight": (hidden, 2 * hidden), **layer_shapes(config, LAYER, input_norm=False),
              **fc_bias(published, tensors, hidden)}
    check_tensors(folder, tensors, shapes)
    lent = {"embed_tokens.weight": target.embedding(hidden), "lm_head.weight": target.lm_head(vocabulary)}
    every = torch.arange(target.vocab_size)
    return EagleHead(config, hidden, (target.num_layers,), tensors | lent, every if vocabulary is None else vocabulary,
                     joint=True)


def _eagle_config(published: PublishedConfig, target: TargetCheckpoint, tensors: Mapping[str, torch.Tensor],
                  most_layers: int = 1) -> ModelConfig:
    """``layer_config`` of layers that may slide, all of them with one window. Of a longer list the first ones count."""
    published.require_neutral({"is_causal": (True,)})
    own = LLAMA_TYPES.get(str(published.raw.get("model_type")))
    if own is not None and own not in tensors and "LlamaForCausalLM" in str(published.raw.get("architectures")):
        published = replace(published, raw=published.raw | {"model_type": "llama"})
    config, kinds = layer_config(published, target, most_layers), published.raw.get("layer_types") or []
    listed = isinstance(kinds, list)
    first = kinds[: config.num_layers] if listed else kinds
    if listed and first and all(kind == "sliding_attention" for kind in first):
        return replace(config, sliding_window=published.integer("sliding_window", low=MAX_NODES))
    if not listed or not all(kind == "full_attention" for kind in first):
        raise ModelError(f"{published.where}: layer_types: expected full_attention for all of the head's layers, or "
                         f"sliding_attention, found {first!r}")
    return config


def _check_kind(published: PublishedConfig, kind: HeadKind) -> None:
    where, found = published.where, published.raw.get("architectures")
    if not published.speculators:
        own_vocabulary = kind is EAGLE3 and published.raw.get("draft_vocab_size") is not None
        allowed = [*kind.architectures, *([AUTHORS_ARCHITECTURE] if own_vocabulary else [])]
        if found not in [[name] for name in allowed]:
            raise ModelError(f"{where}: architectures: expected {' or '.join(kind.architectures)}, found {found!r}; "
                             f"{kind.hint}")
        return
    if published.speculators != kind.speculators:
        raise ModelError(f"{where}: speculators_model_type: expected '{kind.speculators}', found "
                         f"{published.speculators!r}; {kind.hint}")
    for name in kind.norms:
        if published.flag(name, False):
            raise ModelError(f"{where}: {name}: heads with norms of this kind are not supported; use one without")


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """The default layers that an EAGLE-3 head reads if its config names none."""
    return 2, num_layers // 2, num_layers - 3


def _taps(published: PublishedConfig, target: TargetCheckpoint) -> tuple[int, ...]:
    fields, where, num_layers = published.raw, published.where, target.num_layers
    if fields.get("architectures") == [DEEPSPEC_ARCHITECTURE]:
        return published.taps("target_layer_ids", fields.get("target_layer_ids"), True, num_layers)
    section = fields.get("eagle_config") or {}
    if not isinstance(section, dict) or section.get("use_aux_hidden_state", True) is not True:
        raise ModelError(f"{where}: eagle_config: heads that read the last state alone are not EAGLE-3 heads")
    given = [found.get("eagle_aux_hidden_state_layer_ids") for found in (section, fields)]
    ids = next((ids for ids in given if ids not in (None, [])), None)  # exporters write [] where they mean the default
    default = default_taps(num_layers)
    if fields.get("architectures") == [VLLM_ARCHITECTURE]:
        usual = [[*default], [i - 1 for i in default]]
        for name, found in (("eagle_aux_hidden_state_layer_ids", ids),
                            ("aux_hidden_states_layer_ids", fields.get("aux_hidden_states_layer_ids"))):
            if found is not None and found not in usual:
                raise ModelError(f"{where}: {name}: {VLLM_ARCHITECTURE} does not say whether {found} names what enters "
                                 f"layers or what leaves them; call it {ARCHITECTURE}, with "
                                 "eagle_aux_hidden_state_layer_ids by their output")
    ids = [*default] if ids is None else ids
    by_output = not published.speculators and ids != [*default]
    if isinstance(ids, list) and (num_layers in ids or num_layers - by_output in ids):
        raise ModelError(f"{where}: eagle_aux_hidden_state_layer_ids: {ids}: what leaves the last of the target's "
                         f"{num_layers} layers, before the final norm, is not sent; use a head that reads earlier ones")
    taps = published.taps("eagle_aux_hidden_state_layer_ids", ids, by_output, num_layers)
    count = published.integer("num_aux_hidden_states", len(taps))
    if count != len(taps):
        raise ModelError(f"{where}: num_aux_hidden_states: {count}, but eagle_aux_hidden_state_layer_ids "
                         f"({ids}) names {len(taps)} layers")
    return taps


def _shapes(published: PublishedConfig, tensors: Mapping[str, torch.Tensor], config: ModelConfig, num_taps: int,
            hidden_in: int) -> dict[str, tuple[int, ...]]:
    hidden, width = config.hidden_size, num_taps * hidden_in
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, width),
        "norm.weight": (hidden,),
        f"{LAYER}.hidden_norm.weight": (hidden,),
        **layer_shapes(config, LAYER, 2 * hidden),
        **fc_bias(published, tensors, hidden),
    }
    for layer in range(1, config.num_layers):
        shapes |= layer_shapes(config, f"layers.{layer}")
    if published.flag("norm_before_fc", False):
        shapes["input_norm.weight"] = (width,)
    elif "input_norm.weight" in tensors:
        raise ModelError(f"{published.where}: norm_before_fc: it is not set, but tensor input_norm.weight is there")
    if published.flag("fc_norm", False):
        if "input_norm.weight" in shapes:
            raise ModelError(f"{published.where}: fc_norm: norm_before_fc is set, too; a head has one of them")
        shapes |= {f"fc_norm.{i}.weight": (hidden_in,) for i in range(num_taps)}
    elif "fc_norm.0.weight" in tensors:
        raise ModelError(f"{published.where}: fc_norm: it is not set, but tensor fc_norm.0.weight is there")
    return shapes


def draft_vocabulary(tensors: Mapping[str, torch.Tensor], draft_vocab: int, vocab: int) -> torch.Tensor:
    """int64 [draft_vocab] target ids (rule 9). Raises ModelError."""
    own = torch.arange(draft_vocab)
    if "d2t" not in tensors:
        return own
    difference = tensors["d2t"]
    if difference.is_floating_point() or difference.is_complex() or difference.dtype is torch.bool:
        raise ModelError(f"tensor d2t: expected integers, found {difference.dtype}")
    ids = own + difference.long()
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab:
        raise ModelError(f"tensor d2t: it leads to token ids from {low} to {high}, expected 0 to {vocab - 1}: "
                         "the head is of another vocabulary")
    distinct = len(set(ids.tolist()))
    if distinct != draft_vocab:
        raise ModelError(f"tensor d2t: {draft_vocab} draft tokens lead to {distinct} distinct token ids; "
                         "it must hold differences (target id - draft id)")
    if "t2d" in tensors:
        mask = tensors["t2d"].bool()
        if int(mask.sum()) != draft_vocab or not bool(mask[ids].all()):
            raise ModelError("tensor t2d: it does not mark exactly the tokens that d2t leads to")
    return ids
