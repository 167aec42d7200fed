"""TargetCheckpoint: reads from a target's folder what a head needs: a few sizes, the embedding and the lm_head.

Rules:
1. The target may be of any family, because another engine may serve it. Fields of its layers are not read.
2. A target for images or audio has its decoder's fields in ``text_config``, and a longer prefix in tensor names.
3. Only the tensors that a head needs are read: a target may be larger than this machine's memory.

It knows nothing about heads' own files. Formats: tensor names of targets as in transformers' checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from slipstream.base.errors import ModelError
from slipstream.engine.int8 import EMBEDDING, HEAD, SCALE, Int8Matrix, matrix
from slipstream.engine.model import DTYPES, Fields, RopeScaling, load_tensors, of_folder, require_tensor, rope_of
from slipstream.models.folder import read_json

EMBEDDINGS = (EMBEDDING, "language_model.model.embed_tokens.weight", "model.language_model.embed_tokens.weight")
LM_HEADS = (HEAD, "language_model.lm_head.weight")


@dataclass(frozen=True, slots=True)
class TargetCheckpoint:
    """The target of a head."""

    folder: Path
    vocab_size: int
    hidden_size: int
    num_layers: int
    rope: tuple[float, RopeScaling | None] | None  # None: of a kind that no head has
    tied: bool | None  # lm_head and embedding; None: its config does not say

    @staticmethod
    def of(folder: str | Path) -> TargetCheckpoint:
        """Raises ModelError."""
        path = Path(folder) / "config.json"
        raw = read_json(path)
        text = raw.get("text_config")
        fields = Fields(str(path), raw | text if isinstance(text, dict) else raw)
        tied = None if fields.raw.get("tie_word_embeddings") is None else fields.flag("tie_word_embeddings")
        if raw.get("tie_word_embeddings") not in (None, tied):  # libraries write defaults of either part
            tied = None
        vocab = fields.raw.get("vocab_size")
        vocab_size = len(_embedding(folder, tied)) if vocab is None else fields.integer("vocab_size")
        return TargetCheckpoint(Path(folder), vocab_size, fields.integer("hidden_size"),
                                fields.integer("num_hidden_layers", high=1024), _rope(fields), tied)

    def embedding(self, hidden_size: int) -> torch.Tensor:
        """[V, H] in the stored dtype; hidden_size: the head's. Raises ModelError when the target's sizes differ."""
        try:
            with of_folder(self.folder):
                return self._floats(require_tensor({EMBEDDING: _embedding(self.folder, self.tied)}, EMBEDDING,
                                                   self.vocab_size, hidden_size))
        except ModelError as error:
            raise ModelError(f"the head has no embed_tokens.weight, so it needs the target's embedding: {error}"
                             ) from error

    def lm_head(self, rows: torch.Tensor | None = None) -> torch.Tensor:
        """[V, H], or [K, H] of ``rows`` int64 [K], in the stored dtype; the embedding where the two are tied: either
        name may be all that there is of them. Raises ModelError."""
        first, second = (EMBEDDINGS, LM_HEADS) if self.tied else (LM_HEADS, EMBEDDINGS)
        tensors = _load(self.folder, first)
        if not tensors and self.tied is not False:
            tensors = _load(self.folder, second)
        name = next((name for name in tensors if not name.endswith(SCALE)), HEAD)
        with of_folder(self.folder):
            found = matrix(tensors, name, self.vocab_size, self.hidden_size)
        weight = found.dequantized() if isinstance(found, Int8Matrix) else self._floats(found)
        return weight if rows is None else weight.index_select(0, rows)

    def _floats(self, found: torch.Tensor) -> torch.Tensor:
        if found.dtype not in DTYPES.values():
            raise ModelError(f"{self.folder}: the target's embedding or head holds {found.dtype}, whose scales are not "
                             "read; give the head a copy of its own")
        return found


def _embedding(folder: str | Path, tied: bool | None) -> torch.Tensor:
    tensors = load_tensors(folder, EMBEDDINGS) or (load_tensors(folder, LM_HEADS) if tied else {})
    if not tensors:
        raise ModelError(f"{folder}: tensor {EMBEDDING} is missing from the model's safetensors")
    return next(iter(tensors.values()))


def _load(folder: Path, names: Sequence[str]) -> dict[str, torch.Tensor]:
    return load_tensors(folder, [*names, *(name + SCALE for name in names)])


def _rope(fields: Fields) -> tuple[float, RopeScaling | None] | None:
    try:
        return rope_of(fields)
    except ModelError:
        return None
