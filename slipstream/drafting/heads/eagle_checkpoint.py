"""An EAGLE head of any generation as it is published: ``config.json`` and safetensors, read and checked against its
target.

Rules of EAGLE-3 (``read_head``):
1. Tensors, by the plain names of ``layout.py``: ``fc.weight`` (``fc.bias``), ``layers.0.*``, ``norm.weight``, ``d2t``,
   ``t2d``, ``embed_tokens.weight`` or else the target's, ``lm_head.weight`` or else the head's own embedding where the
   config ties them, or else the target's rows; ``input_norm.weight`` where ``norm_before_fc`` says so.
2. ``d2t`` holds differences: draft id i means target id ``i + d2t[i]``. ``t2d`` is a mask and only checked.
3. Target states: without ``eagle_aux_hidden_state_layer_ids`` those that *enter* layers 2, n // 2 and n - 3 of a target
   with n layers. Explicit ids name, in the authors' layout, layers by their *output*, so id i is what enters layer
   i + 1; but when they are that same triple they mean it (heads of both readings are published; SGLang tells them apart
   by their first id). In the speculators layout ids name what *enters* a layer.
4. ``norm_before_residual`` (speculators): the residual stream begins after ``hidden_norm``, not before it.

Rules of EAGLE-1 and EAGLE-2 (``read_eagle2_head``; EAGLE-2 is EAGLE-1's head with trees by joint probability):
5. Tensors: ``fc.weight`` (``fc.bias`` where the config's ``bias``, or ``fusion_bias`` in the speculators layout, says
   so; where it says nothing, where there is one) and ``layers.0.*`` without an input norm. There is no final norm.
6. Embedding and lm_head are the target's (heads carry a copy of the embedding: it is left unread); with a token map the
   lm_head is its rows (``token_map.py``). The one target state is that after the final norm.

Whatever is missing, of a wrong shape or of a foreign vocabulary is a ModelError that names it, expected and found. It
knows nothing about sessions or forwards. Formats: arXiv 2401.15077, 2406.16858, 2503.01840, their reference
repositories' checkpoints (``LlamaForCausalLMEagle3``; of the older ones ``LlamaForCausalLM``, which is why a whole
model's folder is told by its missing ``fc``) and those of vLLM's speculators library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from slipstream.base.errors import ModelError
from slipstream.drafting.heads.layout import (
    LAYER,
    Published,
    check_tensors,
    fc_bias,
    layer_config,
    layer_shapes,
    read_published,
    read_tensors,
)
from slipstream.drafting.heads.lent import lent_embedding, lent_lm_head
from slipstream.engine.model import ModelConfig

ARCHITECTURE = "LlamaForCausalLMEagle3"
SPECULATORS = "eagle3"
OLD_ARCHITECTURES = ("LlamaForCausalLM", "LlamaForCausalLMEagle")
OLD_SPECULATORS = "eagle"


@dataclass(frozen=True, slots=True)
class EagleHead:
    """A checked head, on the CPU and in its stored dtypes."""

    config: ModelConfig  # the layer's measures; vocab_size is the target's
    target_hidden_size: int
    draft_vocab_size: int
    taps: tuple[int, ...]  # as FeatureSpec.layers
    tensors: Mapping[str, torch.Tensor]  # names of rule 1
    vocabulary: torch.Tensor | None  # int64 [draft_vocab_size] target ids; None: all of them
    norm_before_residual: bool = False
    joint: bool = False  # EAGLE-1 and EAGLE-2: ``fc`` joins token and state, and there are no norms around the layer


def read_head(folder: str | Path, target_folder: str | Path) -> EagleHead:
    """Read and check the head in ``folder`` for the target in ``target_folder``. Raises ModelError."""
    published, target = read_published(folder), ModelConfig.from_folder(target_folder)
    _check_kind(published)
    config = layer_config(published, target)
    hidden = published.size("target_hidden_size", target.hidden_size)
    published.must_fit("target_hidden_size", hidden, target.hidden_size)
    tensors = read_tensors(folder)
    default_vocab = len(tensors["d2t"]) if "d2t" in tensors and tensors["d2t"].ndim == 1 else config.vocab_size
    draft_vocab = published.size("draft_vocab_size", default_vocab)
    taps = _taps(published, target.num_layers)
    check_tensors(folder, tensors, _shapes(published, tensors, config, draft_vocab, len(taps) * hidden))
    vocabulary = _vocabulary(tensors, draft_vocab, config.vocab_size)
    if "embed_tokens.weight" not in tensors:
        tensors["embed_tokens.weight"] = lent_embedding(target_folder, config.vocab_size, config.hidden_size)
    if "lm_head.weight" not in tensors:
        tensors["lm_head.weight"] = _lm_head(tensors, config, target, target_folder, vocabulary)
    return EagleHead(config, hidden, draft_vocab, taps, tensors, vocabulary,
                     published.flag("norm_before_residual", None if published.speculators else False))


def read_eagle2_head(folder: str | Path, target_folder: str | Path,
                     vocabulary: torch.Tensor | None = None) -> EagleHead:
    """Read and check the head in ``folder`` for the target in ``target_folder``. vocabulary: int64 [K], a token map.
    Raises ModelError."""
    published, target = read_published(folder), ModelConfig.from_folder(target_folder)
    _check_old_kind(published)
    config = layer_config(published, target)
    published.must_fit("hidden_size", config.hidden_size, target.hidden_size)
    tensors = read_tensors(folder)
    if "fc.weight" not in tensors:
        raise ModelError(f"{folder}: tensor fc.weight is missing: this is no EAGLE-1 or EAGLE-2 head; a whole model is "
                         "for draft.drafter: standalone")
    hidden = config.hidden_size
    shapes = {"fc.weight": (hidden, 2 * hidden)} | layer_shapes(config, hidden) | fc_bias(published, tensors, hidden)
    check_tensors(folder, tensors, shapes)
    lent = {"embed_tokens.weight": lent_embedding(target_folder, target.vocab_size, hidden),
            "lm_head.weight": lent_lm_head(target_folder, target, vocabulary)}
    return EagleHead(config, hidden, target.vocab_size if vocabulary is None else len(vocabulary),
                     (target.num_layers,), tensors | lent, vocabulary, joint=True)


def _check_kind(published: Published) -> None:
    where = published.where
    if published.speculators:
        if published.speculators != SPECULATORS:
            raise ModelError(f"{where}: speculators_model_type: expected '{SPECULATORS}', found "
                             f"{published.speculators!r}; 'eagle' heads are for draft.drafter: eagle2")
        for name in ("fc_norm", "norm_output"):
            if published.flag(name, False):
                raise ModelError(f"{where}: {name}: heads with norms of this kind are not supported; use one without")
        return
    architectures = published.fields.get("architectures")
    if architectures != [ARCHITECTURE]:
        raise ModelError(f"{where}: architectures: expected [{ARCHITECTURE!r}], found {architectures!r}; EAGLE-1 and "
                         "EAGLE-2 heads are for draft.drafter: eagle2")


def _taps(published: Published, num_layers: int) -> tuple[int, ...]:
    fields, where = published.fields, published.where
    section = fields.get("eagle_config") or {}
    if not isinstance(section, dict) or section.get("use_aux_hidden_state", True) is not True:
        raise ModelError(f"{where}: eagle_config: heads that read the last state alone are not EAGLE-3 heads")
    ids = section.get("eagle_aux_hidden_state_layer_ids", fields.get("eagle_aux_hidden_state_layer_ids"))
    default = (2, num_layers // 2, num_layers - 3)
    if ids is None:
        taps = default
    elif isinstance(ids, list) and ids and all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        inputs = bool(published.speculators) or tuple(ids) == default
        taps = tuple(i if inputs else i + 1 for i in ids)
    else:
        raise ModelError(f"{where}: eagle_aux_hidden_state_layer_ids: expected layer numbers, found {ids!r}")
    if any(not 0 <= tap <= num_layers for tap in taps):
        raise ModelError(f"{where}: eagle_aux_hidden_state_layer_ids: {ids or 'the default'} does not fit a target "
                         f"with {num_layers} layers")
    count = published.size("num_aux_hidden_states", len(taps))
    if count != len(taps):
        raise ModelError(f"{where}: num_aux_hidden_states: {count}, but eagle_aux_hidden_state_layer_ids "
                         f"({ids or 'the default'}) names {len(taps)} layers")
    return taps


def _lm_head(tensors: Mapping[str, torch.Tensor], config: ModelConfig, target: ModelConfig, target_folder: str | Path,
             vocabulary: torch.Tensor) -> torch.Tensor:
    if config.tied_embeddings:
        return tensors["embed_tokens.weight"].index_select(0, vocabulary)
    if config.hidden_size != target.hidden_size:
        raise ModelError(f"tensor lm_head.weight is missing, and the target's does not fit: the head's states have "
                         f"{config.hidden_size} numbers (hidden_size), the target's {target.hidden_size}")
    return lent_lm_head(target_folder, target, vocabulary)


def _shapes(published: Published, tensors: Mapping[str, torch.Tensor], config: ModelConfig, draft_vocab: int,
            width: int) -> dict[str, tuple[int, ...]]:
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, width),
        "norm.weight": (hidden,),
        f"{LAYER}.hidden_norm.weight": (hidden,),
        f"{LAYER}.input_layernorm.weight": (hidden,),
        **layer_shapes(config, 2 * hidden),
        **fc_bias(published, tensors, hidden),
    }
    if published.flag("norm_before_fc", False):
        shapes["input_norm.weight"] = (width,)
    elif "input_norm.weight" in tensors:
        raise ModelError(f"{published.where}: norm_before_fc: it is not set, but tensor input_norm.weight is there")
    optional = {"embed_tokens.weight": (config.vocab_size, hidden), "lm_head.weight": (draft_vocab, hidden),
                "t2d": (config.vocab_size,)}
    if draft_vocab != config.vocab_size or "d2t" in tensors:
        shapes["d2t"] = (draft_vocab,)
    return shapes | {name: shape for name, shape in optional.items() if name in tensors}


def _vocabulary(tensors: Mapping[str, torch.Tensor], draft_vocab: int, vocab: int) -> torch.Tensor:
    own = torch.arange(draft_vocab)
    if "d2t" not in tensors:
        return own
    difference = tensors["d2t"]
    if difference.is_floating_point() or difference.dtype is torch.bool:
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


def _check_old_kind(published: Published) -> None:
    where = published.where
    if published.speculators:
        if published.speculators != OLD_SPECULATORS:
            raise ModelError(f"{where}: speculators_model_type: expected '{OLD_SPECULATORS}', found "
                             f"{published.speculators!r}; 'eagle3' heads are for draft.drafter: eagle3")
        if published.flag("layernorms", False):
            raise ModelError(f"{where}: layernorms: heads with norms of their own are not supported; use an EAGLE-3 "
                             "head")
        return
    architectures = published.fields.get("architectures")
    if architectures not in [[name] for name in OLD_ARCHITECTURES]:
        raise ModelError(f"{where}: architectures: expected {' or '.join(OLD_ARCHITECTURES)}, found {architectures!r}; "
                         "EAGLE-3 heads are for draft.drafter: eagle3")
