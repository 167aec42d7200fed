"""The first stage of training a head: the target generates conversations until there are enough, or time is up (see
``workers``).

Rules:
1. Conversations that are in the folder already count and are not made again, so an interrupted run is resumed. A kill
   loses the conversations that were running, and finished ones of at most one shard, or of ``save_every_s`` seconds.
2. All shards of a folder have one identity: the hash of the target's configuration and weights, and the layers whose
   states are kept.

It knows nothing about heads or training.
"""

from __future__ import annotations

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
from slipstream.train.dialogue import number_prompts, read_prompts, read_turn_template
from slipstream.train.generate import max_tokens
from slipstream.train.head import taps_of
from slipstream.train.recipe import Recipe
from slipstream.train.shards import Shards, Totals, remove_partial
from slipstream.train.workers import OtherProcesses, Task, generate_shards


def identity_of(target: Path, config: ModelConfig) -> Mapping[str, Any]:
    """The identity of shards of this target (rule 2). It reads all weights, as a fine-tuned target may differ from its
    base model neither at the beginning nor at the end of its files."""
    return {"target": weights_hash(target, ("config.json", "*.safetensors")),
            "taps": [*taps_of(config.num_layers), config.num_layers]}


def collect(target: Path, folder: Path, recipe: Recipe, report: Callable[[Totals, float], None],
            identity: Mapping[str, Any]) -> Totals:
    """Write conversations into ``folder`` until the recipe's tokens, time or prompts are used up. report: called from
    time to time with the totals and the share that is done; identity: the target's. Returns the totals.
    Raises ConfigError, ModelError, CapacityError."""
    before = Shards([folder], identity).totals()
    if used_share(recipe, before) >= 1.0:
        return before
    model = load_model(target, ModelSection(dtype=recipe.dtype, device=recipe.device))
    remove_partial(folder)
    prompts = number_prompts(read_prompts(recipe.prompts)) if recipe.prompts else None
    template = read_turn_template(target)
    excess = max_tokens(template, recipe.limits) - model.config.max_context
    if prompts is None and excess > 0:  # no plan would ever fit, and there is no end of plans
        max_answer = recipe.limits.max_answer - excess
        raise ConfigError(f"--max-answer: the target's context holds {model.config.max_context} tokens, a question and "
                          f"such an answer {excess} more; "
                          + (f"give at most {max_answer}" if max_answer > 0 else "give --prompts"))
    task = Task(model, template, prompts, folder, identity, recipe)
    others, quota = OtherProcesses(task), Quota(task, report)
    try:
        generate_shards(task, 0, lambda pending, active: others.failed or quota.reached(pending, active))
        others.join(lambda: quota.reached(0, 0, reread=True))
    finally:
        others.stop()
    made = Shards([folder], identity).totals()
    if not made.conversations:
        raise ConfigError("no conversation was made: the time was too short, or given prompts and their answers "
                          "were too long (see --max-prompt, --max-answer)")
    return made


class Quota:
    """Decides whether there are enough conversations for the recipe, and reports the progress."""

    def __init__(self, task: Task, report: Callable[[Totals, float], None]) -> None:
        self._task, self._report = task, report
        self._made, self._pending = self._read(), 0
        self._began = time.monotonic() - self._made.seconds  # as if all runs were one

    def reached(self, pending: int, active: int, reread: bool = False) -> bool:
        """Whether there is enough. pending: tokens that the first process has not written yet; active: tokens of its
        unfinished conversations, which are reported but count for no limit; reread: read the folder again, as the other
        processes may have written shards."""
        if reread or pending < self._pending:  # another shard was begun
            self._made = self._read()
        self._pending = pending
        made = self._made
        totals = Totals(made.conversations, made.tokens + pending, made.answer_tokens, time.monotonic() - self._began)
        share = used_share(self._task.recipe, totals)
        self._report(replace(totals, tokens=totals.tokens + active), min(1.0, share))
        return share >= 1.0

    def _read(self) -> Totals:
        return Shards([self._task.folder], self._task.identity).totals()


def used_share(recipe: Recipe, totals: Totals) -> float:
    """The share of the recipe's tokens or time that is used up, whichever is larger."""
    tokens = totals.tokens / recipe.tokens if recipe.tokens else 0.0
    return max(tokens, totals.seconds / recipe.generate_seconds())

