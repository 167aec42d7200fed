"""Algorithms that propose trees, behind one small protocol (``base.Drafter``), and the one place that picks among them.

An n-gram drafter loads no model: what needs torch is imported only when it is asked for.
"""

from __future__ import annotations

from slipstream.base.config import DraftSection, ModelSection
from slipstream.base.errors import ConfigError
from slipstream.drafting.base import Drafter
from slipstream.drafting.ngram import NgramDrafter
from slipstream.models.folder import settled_draft

NO_TOKEN_MAP = {"ngram": "an ngram drafter scores no vocabulary",
                "eagle3": "an EAGLE-3 head has a vocabulary of its own (d2t in its checkpoint)"}


def create(section: DraftSection, model: ModelSection, num_slots: int = 0) -> Drafter:
    """The drafter that ``section`` asks for; ``model`` is the target's section (heads read its config and embedding).
    num_slots: of its KV; 0: sized from ``max_sessions`` and memory.

    Raises ConfigError when no draft model is named, ModelError when it cannot be used or does not fit the target.
    """
    section = settled_draft(section, model)
    if section.token_map and section.drafter in NO_TOKEN_MAP:
        raise ConfigError(f"draft.token_map: {NO_TOKEN_MAP[section.drafter]}; leave it out")
    if section.drafter == "ngram":
        return NgramDrafter(section.max_sessions)
    if section.drafter == "mtp":
        from slipstream.drafting.loading import load_mtp

        return load_mtp(section, model, num_slots)
    if not section.model:
        raise ConfigError(f"draft.model: the drafter {section.drafter} needs a draft model: give its name or folder")
    if section.drafter == "standalone":
        from slipstream.drafting.loading import load_standalone

        return load_standalone(section, model, num_slots)
    if section.drafter == "eagle2":
        from slipstream.drafting.loading import load_eagle2

        return load_eagle2(section, model, num_slots)
    from slipstream.drafting.loading import load_eagle

    return load_eagle(section, model, num_slots)
