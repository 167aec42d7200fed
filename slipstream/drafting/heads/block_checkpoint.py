"""A DFlash or DSpark head as it is published: ``config.json`` and safetensors, read and checked against its target.

Rules (those of every head stand in ``checkpoint``):
1. Two layouts: flat, as z-lab, DeepSpec and SpecForge write it (``architectures``; ids, mask and a head's own at the
   top or in ``dflash_config``), and vLLM's "speculators" (``speculators_model_type``, layers in
   ``transformer_layer_config``).
2. Target states: ``target_layer_ids`` of the flat layout name layers by their *output*, so id i is what enters layer
   i + 1; ``aux_hidden_state_layer_ids`` of speculators name what *enters* a layer. What leaves the last layer is taken
   behind the final norm, as in training here. vLLM's library (it alone writes ``speculators_version``) takes it before
   the norm: such heads are refused.
3. ``sample_from_anchor`` says what a slot predicts. True: slot k predicts the token after its place, slot 0 too. False:
   slot k predicts the token at its place, and slot 0 nothing. A wrong reading shows only in the acceptance, so it is
   taken from the field (also called ``query_zero_predicts_next``), or else from what is certain: DeepSpec's class means
   true, and so does SpecForge's of DSpark, as vLLM and SGLang read it; z-lab's without a markov head and speculators'
   ``dflash`` mean false; a speculators folder that proposes ``block_size`` tokens means true, one less false. Any other
   folder is refused, and the error names the field.
4. Tensors, by plain names: ``fc.weight``, ``hidden_norm.weight``, ``layers.i.*`` with ``input_layernorm``,
   ``norm.weight``; with ``markov_rank`` above 0 ``markov_head.markov_w1`` (rows of the target's vocabulary) and
   ``markov_w2`` (of the draft's), ``gate_proj`` for gated and ``joint_proj`` for rnn heads; ``confidence_head.proj``;
   ``d2t``, ``embed_tokens``, ``lm_head`` where they are there, else the target's.
5. ``layer_types`` says which layers slide, over ``sliding_window`` tokens (``swa_window_size`` of the flat layout). In
   sliding layers a slot does not see later slots of its block, unless ``sliding_window_non_causal`` says so or the flat
   layout's ``causal`` is false; then the window ends before the block. In other layers every slot sees all slots. Heads
   with only causal layers are refused, and the error names the field: they would run, and draft badly.

It knows nothing about sessions or forwards. Formats: arXiv 2602.06036, the checkpoints of z-lab/dflash and
deepseek-ai/DeepSpec, and those of vLLM's speculators library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from slipstream.base.errors import ModelError
from slipstream.drafting.heads.checkpoint import (
    MAX_LAYERS,
    PublishedConfig,
    draft_vocab_size,
    layer_config,
    read_published_config,
    read_tensors,
    with_target_tensors,
)
from slipstream.drafting.heads.target_checkpoint import TargetCheckpoint
from slipstream.engine.model import ModelConfig
from slipstream.engine.ops.layer import layer_shapes
from slipstream.protocol.tree import MAX_NODES

FLAT = ("DFlashDraftModel", "Qwen3DSparkModel", "DSparkDraftModel")
BEHIND = (["Qwen3DSparkModel"], ["DSparkDraftModel"])  # DeepSpec's, SpecForge's: their slots predict what comes next
SPECULATORS = ("dflash", "dspark")
MARKOV = ("vanilla", "gated", "rnn")
ANCHOR = ("sample_from_anchor", "query_zero_predicts_next")  # one field under two names
FULL, SLIDING = "full_attention", "sliding_attention"
CAUSAL = ("causal", "is_causal")
NEUTRAL = {"projector_type": ("dflash", "dspark"), "input_embedding_scale": (1,), "output_multiplier": (1,),
           "use_swa": (False,), "causal": (False,), "is_causal": (False,), "attention_sink_bias": (False,),
           "add_swa_attention_sink_bias": (False,), "shift_label": (False,), "attention_mode": ("gqa", "mha"),
           "fc_norm": (False,)}  # fields of further kinds of head, and the values that change nothing


@dataclass(frozen=True, slots=True)
class BlockHead:
    """A checked head, on the CPU and in its stored dtypes."""

    config: ModelConfig  # the layers' measures; vocab_size is the target's
    target_hidden_size: int
    taps: tuple[int, ...]  # as FeatureSpec.layers
    block_size: int  # slots
    mask_token: int
    from_anchor: bool
    markov: str  # one of MARKOV; empty: none
    markov_rank: int
    confidence: bool
    confidence_with_markov: bool
    sliding: tuple[bool, ...]  # layers over the last ``config.sliding_window`` tokens
    ahead: bool  # whether slots in sliding layers see later slots of their block
    tensors: Mapping[str, torch.Tensor]  # names of rule 4
    vocabulary: torch.Tensor  # int64 [V'] target ids of the draft's

    @property
    def reach(self) -> int:
        """Tokens that a block predicts."""
        return self.block_size if self.from_anchor else self.block_size - 1


def read_block_head(folder: str | Path, target_folder: str | Path) -> BlockHead:
    """Read and check the head in ``folder`` for the target in ``target_folder``. Raises ModelError."""
    published, target = _published(folder), TargetCheckpoint.of(target_folder)
    config = layer_config(published, target, MAX_LAYERS)
    sliding = _sliding(published, config)
    if not published.speculators:
        layers = published.integer("num_target_layers", target.num_layers)
        published.require_equal("num_target_layers", layers, target.num_layers, " layers")
    markov, rank = _markov(published)
    confidence = published.flag("enable_confidence_head", False)
    with_markov = confidence and published.flag("confidence_head_with_markov", False)
    if with_markov and not markov:
        raise ModelError(f"{published.where}: confidence_head_with_markov: it needs a markov_rank above 0")
    from_anchor, flat = _from_anchor(published, bool(markov)), not published.speculators
    field = "target_layer_ids" if flat else "aux_hidden_state_layer_ids"
    taps = published.taps(field, published.raw.get(field), flat, target.num_layers)
    if published.raw.get("speculators_version") is not None and target.num_layers in taps:
        raise ModelError(f"{published.where}: {field}: {[*taps]}: what leaves the last of the target's "
                         f"{target.num_layers} layers, before the final norm, is not sent; use a head that reads "
                         "earlier ones")
    block = published.integer("block_size", low=1 if from_anchor else 2, high=MAX_NODES)
    ahead = _ahead(published)
    if any(sliding):
        config = replace(config, sliding_window=_window(published) + (block if ahead else 0))
    head = BlockHead(config, target.hidden_size, taps, block,
                     published.integer("mask_token_id", low=0, high=config.vocab_size - 1), from_anchor, markov, rank,
                     confidence, with_markov, sliding, ahead, {}, torch.zeros(0, dtype=torch.int64))
    tensors = read_tensors(folder)
    draft_vocab = draft_vocab_size(published, tensors, config)
    shapes = _shapes(head, tensors, draft_vocab)
    tensors, vocabulary = with_target_tensors(folder, tensors, shapes, draft_vocab, config, target)
    return replace(head, tensors=tensors, vocabulary=vocabulary)


def _published(folder: str | Path) -> PublishedConfig:
    published = read_published_config(folder)
    where, raw = published.where, published.raw
    if published.speculators:
        if published.speculators not in SPECULATORS:
            raise ModelError(f"{where}: speculators_model_type: expected {' or '.join(SPECULATORS)}, found "
                             f"{published.speculators!r}")
    elif raw.get("architectures") not in [[name] for name in FLAT]:
        raise ModelError(f"{where}: architectures: expected {' or '.join(FLAT)}, found {raw.get('architectures')!r}")
    nested = raw.get("dflash_config") or {}
    if not isinstance(nested, dict):
        raise ModelError(f"{where}: dflash_config: expected an object, found {type(nested).__name__}")
    flat = replace(published, raw=raw | nested)
    flat.require_neutral(NEUTRAL)
    return flat


def _sliding(published: PublishedConfig, config: ModelConfig) -> tuple[bool, ...]:
    """Rule 5. Of a longer list the first ones count."""
    kinds = published.raw.get("layer_types")
    own = ([FULL] * config.num_layers if kinds is None else kinds[: config.num_layers] if isinstance(kinds, list)
           else [])
    if len(own) < config.num_layers or not all(kind in (FULL, SLIDING) for kind in own):
        raise ModelError(f"{published.where}: layer_types: expected {FULL} or {SLIDING} for each layer of the head, "
                         f"found {kinds!r}")
    if config.sliding_window and SLIDING not in own:
        raise ModelError(f"{published.where}: sliding_window: no layer slides by layer_types; take one of them out")
    return tuple(kind == SLIDING for kind in own)


def _ahead(published: PublishedConfig) -> bool:
    said = published.speculators == "" and any(published.raw.get(name) is False for name in CAUSAL)
    return published.flag("sliding_window_non_causal", said)


def _window(published: PublishedConfig) -> int:
    own = "swa_window_size"
    return published.integer(own if published.raw.get(own) is not None else "sliding_window", low=MAX_NODES)


def _markov(published: PublishedConfig) -> tuple[str, int]:
    rank = published.integer("markov_rank", 0, low=0, high=1 << 14)
    kind = published.raw.get("markov_head_type") or "vanilla"
    if rank and kind not in MARKOV:
        raise ModelError(f"{published.where}: markov_head_type: expected {', '.join(MARKOV)}, found {kind!r}")
    return (kind, rank) if rank else ("", 0)


def _from_anchor(published: PublishedConfig, markov: bool) -> bool:
    """Rule 3."""
    said = {name: published.flag(name) for name in ANCHOR if published.raw.get(name) is not None}
    if len(set(said.values())) == 2:
        raise ModelError(f"{published.where}: {ANCHOR[1]}: {said[ANCHOR[1]]}, but {ANCHOR[0]}, which means the same, "
                         f"is {said[ANCHOR[0]]}")
    if said:
        return said.popitem()[1]
    if published.speculators:
        proposed, block = _proposed(published), published.integer("block_size", high=MAX_NODES)
        if published.speculators == "dflash" or proposed == block - 1:
            return False
        if proposed == block:
            return True
    elif published.raw["architectures"] in BEHIND:
        return True
    elif not markov:
        return False
    raise ModelError(f"{published.where}: sample_from_anchor: it is missing, and nothing else says whether the first "
                     "slot of a block predicts (true, as DeepSpec trains) or not (false, as z-lab does); add it")


def _proposed(published: PublishedConfig) -> int | None:
    section = published.raw.get("speculators_config")
    methods = section.get("proposal_methods") if isinstance(section, dict) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    found = first.get("speculative_tokens") if isinstance(first, dict) else None
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def _shapes(head: BlockHead, tensors: Mapping[str, torch.Tensor], draft_vocab: int) -> dict[str, tuple[int, ...]]:
    config, rank = head.config, head.markov_rank
    hidden, vocab = config.hidden_size, config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, len(head.taps) * head.target_hidden_size),
                                          "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for layer in range(config.num_layers):
        shapes |= layer_shapes(config, f"layers.{layer}")
    if head.markov:
        shapes |= {"markov_head.markov_w1.weight": (vocab, rank), "markov_head.markov_w2.weight": (draft_vocab, rank)}
    if head.markov == "gated":
        shapes |= {"markov_head.gate_proj.weight": (rank, hidden + rank), "markov_head.gate_proj.bias": (rank,)}
    if head.markov == "rnn":
        shapes |= {"markov_head.joint_proj.weight": (3 * rank, 2 * rank + hidden),
                   "markov_head.joint_proj.bias": (3 * rank,)}
    if head.confidence:
        shapes["confidence_head.proj.weight"] = (1, hidden + (rank if head.confidence_with_markov else 0))
    if head.confidence and "confidence_head.proj.bias" in tensors:
        shapes["confidence_head.proj.bias"] = (1,)
    return shapes
