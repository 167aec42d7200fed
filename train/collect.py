"""The first stage: the target talks, and its conversations become shards, until there are enough or time is up.

Rules:
1. What a folder holds already counts: numbers that are there are not made again, an interrupted run goes on. What a
   kill loses is at most a shard's worth of tokens, or ``save_every_s`` of time.
2. Shards are of one target: its fingerprint and the layers that are kept are their identity.

It knows nothing about heads or training.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from slipstream.engine.model import ModelConfig
from slipstream.engine.runner import ModelRunner
from slipstream.engine.weights import load_model
from slipstream.errors import ConfigError
from train.dialogue import Plan, plan_of, read_prompts, read_turns
from train.generate import Generator
from train.head import taps_of
from train.recipe import Recipe
from train.shards import Shards, ShardWriter, Totals

SHARD_TOKENS = 16384
SLOTS_PER_TALK = 512
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
    """What all shards of one folder have in common."""
    return {"target": fingerprint(target), "layers": [*taps_of(config.num_layers), config.num_layers]}


def collect(target: Path, folder: Path, recipe: Recipe, report: Callable[[Totals, float], None]) -> Totals:
    """Make conversations into ``folder`` until the recipe's tokens or time are used up, or its prompts. ``report`` gets
    the totals and the share done now and then. Returns the totals. Raises ConfigError, ModelError."""
    model = load_model(target, recipe.dtype, recipe.device)
    runner = ModelRunner(model, recipe.conversations_at_once * SLOTS_PER_TALK + model.config.max_context)
    identity = identity_of(target, model.config)
    runner.set_taps(tuple(identity["layers"]))
    shards = Shards([folder], identity)
    before = shards.totals()
    if share_of(recipe, before) >= 1.0:
        return before
    turns = read_turns(target)
    prompts = read_prompts(recipe.prompts) if recipe.prompts else None
    plans = _plans(shards.numbers(), recipe, prompts, turns.plain)
    generator = Generator(runner, turns, plans, recipe.conversations_at_once, recipe.limits, recipe.seed)
    writer = ShardWriter(folder, identity)
    began = time.monotonic()
    made = before

    def flush() -> None:
        nonlocal began, made
        now = time.monotonic()
        writer.flush(now - began)
        began, made = now, Shards([folder], identity).totals()

    while generator.running:
        for conversation in generator.step():
            writer.add(conversation)
        spent = time.monotonic() - began
        ahead = Totals(made.conversations, made.tokens + writer.num_waiting, made.answer_tokens,
                       made.seconds + spent)
        report(ahead, min(1.0, share_of(recipe, ahead)))
        if share_of(recipe, ahead) >= 1.0:
            break
        if writer.num_waiting >= SHARD_TOKENS or (writer.num_waiting and spent >= recipe.save_every_s):
            flush()
    for conversation in generator.stop():
        writer.add(conversation)
    flush()
    if not made.conversations:
        raise ConfigError("no conversation was made: the time was too short, or every given prompt was too long "
                          "(see --max-prompt)")
    return made


def share_of(recipe: Recipe, totals: Totals) -> float:
    """How much of what the recipe asks for is there."""
    tokens = totals.tokens / recipe.tokens if recipe.tokens else 0.0
    return max(tokens, totals.seconds / recipe.generate_seconds())


def _plans(made: set[int], recipe: Recipe, prompts: Sequence[tuple[str, ...]] | None, plain: bool) -> Iterator[Plan]:
    for number in count():
        if number in made:
            continue
        plan = plan_of(number, recipe.seed, prompts, plain)
        if plan is None:
            return
        yield plan
