"""Measures a head: acceptance length and acceptance by depth, in real drafting for the real target.

Rules:
1. The head is loaded from its exported folder by the code that serves it, and its trees are verified by the engine that
   serves: a fault of the export shows here.
2. The first answers of held-out conversations are generated greedily, all at once.

It knows nothing about training.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from slipstream.base.config import DraftSection, Dtype, GrowthSection, ModelSection
from slipstream.drafting import create
from slipstream.drafting.rounds import Acceptance, Rounds, Tally, slots_needed
from slipstream.engine.loading import load_model
from slipstream.engine.runner import ModelRunner
from slipstream.train.shards import ANSWER, Conversation

SHAPES = {"chain of 5": GrowthSection(num_steps=5, topk=1, num_draft_tokens=5),
          "tree of 16": GrowthSection(num_steps=5, topk=4, num_draft_tokens=16)}
MAX_PROMPT, MAX_TOKENS = 512, 96  # tokens of a prompt, and of an answer
SLOTS = 2048  # KV slots of a head, at least


def prompts_of(conversations: Sequence[Conversation], most: int) -> list[list[int]]:
    """The tokens before the first answer of conversations, at most ``most`` of them, at most MAX_PROMPT tokens each;
    conversations that begin with an answer are left out."""
    prompts = []
    for conversation in conversations:
        first = int(np.argmax(np.asarray(conversation.roles) == ANSWER))
        if 1 <= first <= MAX_PROMPT:
            prompts.append([int(token) for token in conversation.tokens[:first]])
    return prompts[:most]


def evaluate(target: Path, head: Path, prompts: Sequence[Sequence[int]], dtype: Dtype = "bfloat16",
             device: str = "cpu", drafter: Literal["eagle3", "block"] = "eagle3") -> dict[str, Acceptance]:
    """The acceptance of the head in folder ``head`` on ``prompts`` (token ids), by the name of a tree shape in SHAPES.
    Raises ModelError."""
    slots = slots_needed(prompts, MAX_TOKENS)
    runner = ModelRunner(load_model(target, ModelSection(dtype=dtype, device=device)), slots)
    model = ModelSection(path=str(target), dtype=dtype, device=device)
    found = {}
    for shape, growth in SHAPES.items():
        section = DraftSection(drafter=drafter, model=str(head), dtype=dtype, device=device, growth=growth)
        tally = Tally()
        made = create(section, model, max(SLOTS, slots))
        Rounds(runner, made, MAX_TOKENS).answer(prompts, growth.num_draft_tokens, tally)
        found[shape] = tally.acceptance
    return found
