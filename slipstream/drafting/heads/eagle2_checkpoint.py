"""An EAGLE-1 or EAGLE-2 head as it is published, read and checked against its target. (EAGLE-2 is EAGLE-1's head with
trees by joint probability; one head, one drafter.)

Rules:
1. Tensors, by the plain names of ``layout.py``: ``fc.weight`` (``fc.bias`` where the config's ``bias``, or
   ``fusion_bias`` in the speculators layout, says so; where it says nothing, where there is one) and ``layers.0.*``
   without an input norm. There is no final norm.
2. Embedding and lm_head are the target's. Heads carry a copy of the embedding: it is left unread.
3. The one target state is that after the final norm, from which the target's own logits come.
4. With a token map the lm_head is its rows (``token_map.py``).

It knows nothing about sessions or forwards. Format: arXiv 2401.15077 and 2406.16858 and their reference repository's
checkpoints (architecture ``LlamaForCausalLM``, which is why a whole model's folder is told by its missing ``fc``).
"""

from __future__ import annotations

from pathlib import Path

import torch

from slipstream.base.errors import ModelError
from slipstream.drafting.heads.eagle_checkpoint import EagleHead
from slipstream.drafting.heads.layout import (
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

ARCHITECTURES = ("LlamaForCausalLM", "LlamaForCausalLMEagle")
SPECULATORS = "eagle"


def read_eagle2_head(folder: str | Path, target_folder: str | Path,
                     vocabulary: torch.Tensor | None = None) -> EagleHead:
    """Read and check the head in ``folder`` for the target in ``target_folder``. vocabulary: int64 [K], a token map.
    Raises ModelError."""
    published, target = read_published(folder), ModelConfig.from_folder(target_folder)
    _check_kind(published)
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
                             f"{published.speculators!r}; 'eagle3' heads are for draft.drafter: eagle3")
        if published.flag("layernorms", False):
            raise ModelError(f"{where}: layernorms: heads with norms of their own are not supported; use an EAGLE-3 "
                             "head")
        return
    architectures = published.fields.get("architectures")
    if architectures not in [[name] for name in ARCHITECTURES]:
        raise ModelError(f"{where}: architectures: expected {' or '.join(ARCHITECTURES)}, found {architectures!r}; "
                         "EAGLE-3 heads are for draft.drafter: eagle3")
