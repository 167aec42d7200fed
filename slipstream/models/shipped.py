"""What ``draft.drafter: auto`` stands for: the head that comes with Slipstream for this target, or n-grams.

Rules:
1. A head is for the model that it was trained for, known by its name or by its prepared folder, wherever that is. Any
   other target gets n-grams, which fit all.
2. A shipped head drafts alone: where text repeats itself the target looks up by itself what comes next.

It knows nothing about how drafters work.
"""

from __future__ import annotations

from pathlib import Path

from slipstream.base.config import Config, DraftSection, ModelSection
from slipstream.base.errors import ConfigError
from slipstream.models.folder import HEADS, HEADS_ROOT, KnownHead, default_root, is_head, prepared_name


def settled(config: Config) -> Config:
    """``config`` with a drafter in the place of ``auto``. Raises ConfigError where a setting needs a named drafter."""
    return config.model_copy(update={"draft": settled_draft(config.draft, config.model)})


def settled_draft(draft: DraftSection, model: ModelSection) -> DraftSection:
    """The same for the section alone."""
    if draft.drafter != "auto":
        return draft
    for field in ("model", "token_map"):
        if getattr(draft, field):
            raise ConfigError(f"draft.{field}: say for which drafter, as in draft.drafter: eagle3")
    head = head_for(model.path)
    if head is None:
        return draft.model_copy(update={"drafter": "ngram"})
    return draft.model_copy(update={"drafter": "eagle3", "model": head.name})


def head_for(target: str, heads: Path = HEADS_ROOT) -> KnownHead | None:
    """The shipped head of a target, a name or a folder; None when there is none."""
    for head in HEADS.values():
        places = {head.target, str(default_root() / head.target)}
        if (target in places or prepared_name(Path(target)) == head.target) and is_head(heads / head.name):
            return head
    return None
