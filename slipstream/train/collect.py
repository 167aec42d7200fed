"""The first stage: the target generates conversations until there are enough or time is up (see ``talk``).

Rules:
1. Conversations in the folder count: their numbers are not generated again, so an interrupted run goes on. A kill loses
   at most one shard of tokens, or ``save_every_s`` of time.
2. Shards are of one target: its fingerprint, its weights and the layers that are kept are their identity.

It knows nothing about heads or training.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from slipstream.base.config import ModelSection
from slipstream.base.errors import ConfigError
from slipstream.engine.loading import load_model
from slipstream.engine.model import ModelConfig
from slipstream.models.folder import weights_hash
from slipstream.train.dialogue import numbered, read_prompts, read_turns
from slipstream.train.generate import tokens_at_most
from slipstream.train.head import taps_of
from slipstream.train.recipe import Recipe
from slipstream.train.shards import WEIGHTS, Shards, Totals, remove_halves
from slipstream.train.talk import Others, Task, talk

ENDS = 1 << 20  # bytes at both ends of a weights file that its fingerprint reads


def fingerprint(target: Path) -> str:
    """Of a target's folder: its configuration, and the names, sizes and ends of its weights."""
    digest = hashlib.sha256((target / "config.json").read_bytes())
    for path in sorted(target.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(ENDS))
            file.seek(max(0, size - ENDS))
            digest.update(file.read())
    return digest.hexdigest()[:16]


def identity_of(target: Path, config: ModelConfig) -> Mapping[str, Any]:
    """What all shards of one folder have in common. It reads all weights: what was trained of a target may be neither
    first nor last in its files."""
    return {"target": fingerprint(target), "layers": [*taps_of(config.num_layers), config.num_layers],
            WEIGHTS: weights_hash(target, ("*.safetensors",))}


def collect(target: Path, folder: Path, recipe: Recipe, report: Callable[[Totals, float], None],
            identity: Mapping[str, Any]) -> Totals:
    """Make conversations into ``folder`` until the recipe's tokens or time are used up, or its prompts. ``report`` gets
    the totals and the share done now and then; ``identity``: the target's. Returns the totals.
    Raises ConfigError, ModelError, CapacityError."""
    before = Shards([folder], identity).totals()
    if share_of(recipe, before) >= 1.0:
        return before
    model = load_model(target, ModelSection(dtype=recipe.dtype, device=recipe.device))
    remove_halves(folder)
    prompts = numbered(read_prompts(recipe.prompts)) if recipe.prompts else None
    turns = read_turns(target)
    over = tokens_at_most(turns, recipe.limits) - model.config.max_context
    if prompts is None and over > 0:  # no plan would ever fit, and there is no end of plans
        most = recipe.limits.max_answer - over
        raise ConfigError(f"--max-answer: the target's context holds {model.config.max_context} tokens, a question and "
                          f"such an answer {over} more; " + (f"give at most {most}" if most > 0 else "give --prompts"))
    task = Task(model, turns, prompts, folder, identity, recipe)
    others, account = Others(task), Account(task, report)
    try:
        talk(task, 0, lambda waiting, running: others.failed or account(waiting, running))
        others.join(lambda: account(0, 0, anew=True))
    finally:
        others.stop()
    made = Shards([folder], identity).totals()
    if not made.conversations:
        raise ConfigError("no conversation was made: the time was too short, or given prompts and their answers "
                          "were too long (see --max-prompt, --max-answer)")
    return made


class Account:
    """Says whether the recipe has what it asks for, and reports."""

    def __init__(self, task: Task, report: Callable[[Totals, float], None]) -> None:
        self._task, self._report = task, report
        self._made, self._waiting = self._read(), 0
        self._began = time.monotonic() - self._made.seconds  # as if all runs were one

    def __call__(self, waiting: int, running: int, anew: bool = False) -> bool:
        """waiting: tokens of the first process's shard in the making; running: of its unfinished conversations, which
        are shown and count for no limit. anew: the others may have made more."""
        if anew or waiting < self._waiting:  # another shard was begun
            self._made = self._read()
        self._waiting = waiting
        made = self._made
        ahead = Totals(made.conversations, made.tokens + waiting, made.answer_tokens, time.monotonic() - self._began)
        share = share_of(self._task.recipe, ahead)
        self._report(replace(ahead, tokens=ahead.tokens + running), min(1.0, share))
        return share >= 1.0

    def _read(self) -> Totals:
        return Shards([self._task.folder], self._task.identity).totals()


def share_of(recipe: Recipe, totals: Totals) -> float:
    """How much of what the recipe asks for is there."""
    tokens = totals.tokens / recipe.tokens if recipe.tokens else 0.0
    return max(tokens, totals.seconds / recipe.generate_seconds())

