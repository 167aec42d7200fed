"""What a target lends its head: the embedding, and rows of the lm_head.

Both are read from the target's folder, two tensors and no more, so a draft pod never holds the whole target.
It knows nothing about heads. Format: tensor names as in transformers' checkpoints.
"""

from __future__ import annotations

from pathlib import Path

import torch

from slipstream.base.errors import ModelError
from slipstream.engine.int8 import SCALE, Whole, matrix
from slipstream.engine.model import ModelConfig
from slipstream.engine.weights import load_tensors, take

EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"


def lent_embedding(folder: str | Path, vocab_size: int, hidden_size: int) -> torch.Tensor:
    """[V, H] in the stored dtype. Raises ModelError, also when the head's measures are others than the target's."""
    try:
        return take(load_tensors(folder, (EMBEDDING,)), EMBEDDING, vocab_size, hidden_size)
    except ModelError as error:
        raise ModelError(f"the head has no embed_tokens.weight, so it needs the target's embedding: {error}") from error


def lent_lm_head(folder: str | Path, config: ModelConfig, rows: torch.Tensor | None = None) -> torch.Tensor:
    """[V, H] of the model in ``folder``, or [K, H] of ``rows`` int64 [K], in the stored dtype; the embedding where the
    two are tied. Raises ModelError."""
    name = EMBEDDING if config.tied_embeddings else LM_HEAD
    found = matrix(load_tensors(folder, (name, name + SCALE)), name, config.vocab_size, config.hidden_size)
    weight = found.wide() if isinstance(found, Whole) else found
    return weight if rows is None else weight.index_select(0, rows)
