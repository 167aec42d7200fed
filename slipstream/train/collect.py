"""The first stage of training a head: the target generates conversations until there are enough, or time is up (see
``talk``).

Rules:
1. Conversations that are in the folder already count and are not made again, so an interrupted run is resumed. A kill
   loses the conversations that were running, and finished ones of at most one shard, or of ``save_every_s`` seconds.
2. All shards of a folder have one identity: the target's fingerprint, its weights and the layers whose states are kept.

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
    """A hash of a target's configuration and of the names, sizes and ends (ENDS bytes) of its weight files."""
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
    """The identity of shards of this target (rule 2). It reads all weights, as a fine-tuned target may differ from its
    base model neither at the beginning nor at the end of its files."""
    return {"target": fingerprint(target), "layers": [*taps_of(config.num_layers), config.num_layers],
            WEIGHTS: weights_hash(target, ("*.safetensors",))}


def collect(target: Path, folder: Path, recipe: Recipe, report: Callable[[Totals, float], None],
            identity: Mapping[str, Any]) -> Totals:
    """Write conversations into ``folder`` until the recipe's tokens, time or prompts are used up. report: called from
    time to time with the totals and the share that is done; identity: the target's. Returns the totals.
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
    """Decides whether there are enough conversations for the recipe, and reports the progress."""

    def __init__(self, task: Task, report: Callable[[Totals, float], None]) -> None:
        self._task, self._report = task, report
        self._made, self._waiting = self._read(), 0
        self._began = time.monotonic() - self._made.seconds  # as if all runs were one

    def __call__(self, waiting: int, running: int, anew: bool = False) -> bool:
        """Whether there is enough. waiting: tokens that the first process has not written yet; running: tokens of its
        unfinished conversations, which are reported but count for no limit; anew: read the folder again, as the other
        processes may have written shards."""
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
    """The share of the recipe's tokens or time that is used up, whichever is larger."""
    tokens = totals.tokens / recipe.tokens if recipe.tokens else 0.0
    return max(tokens, totals.seconds / recipe.generate_seconds())

