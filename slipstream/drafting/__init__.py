"""Drafters: algorithms that propose trees; ``create`` makes the configured one.

The code that loads models is imported only for a drafter with a model: an n-gram drafter needs no torch.
"""

from __future__ import annotations

from slipstream.base.config import DraftSection, ModelSection
from slipstream.base.errors import ConfigError
from slipstream.drafting.drafter import Drafter
from slipstream.drafting.ngram import NgramDrafter
from slipstream.models.folder import resolve_draft_section

__all__ = ["Drafter", "create"]

NO_TOKEN_MAP = {"ngram": "an ngram drafter scores no vocabulary",
                "eagle3": "an EAGLE-3 head has a vocabulary of its own (d2t in its checkpoint)",
                "block": "a block head has a vocabulary of its own (d2t in its checkpoint)"}


def create(section: DraftSection, model: ModelSection, num_slots: int = 0) -> Drafter:
    """The drafter that ``section`` asks for; ``model`` is the target's section (heads read its config and embedding).
    num_slots: its KV slots; 0: sized from ``max_sessions`` and memory.

    Raises ConfigError when no draft model is named or trees are too deep for its context, ModelError when the model
    cannot be used or does not fit the target.
    """
    section = resolve_draft_section(section, model)
    if section.token_map and section.drafter in NO_TOKEN_MAP:
        raise ConfigError(f"draft.token_map: {NO_TOKEN_MAP[section.drafter]}; leave it out")
    if section.drafter == "ngram":
        from slipstream.engine.device import limited_memory

        return NgramDrafter(section.max_sessions, free_bytes=lambda: (limited_memory() or (None, None))[0])
    if not section.model and section.drafter != "mtp":
        raise ConfigError(f"draft.model: the drafter {section.drafter} needs a draft model: give its name or folder")
    from slipstream.drafting.loading import load

    return load(section, model, num_slots)
