"""``slipstream tune`` at work: a pair from settings, prompts as tokens, a sweep with a bar, a table, a file.

It knows nothing about how shapes are measured.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from router_service.text.tokens import TextCodec
from slipstream.base.config import Config, GrowthSection
from slipstream.base.errors import ConfigError, InvalidRequest
from slipstream.cli.host import QUESTIONS
from slipstream.cli.terminal import plain_table
from slipstream.drafting import create
from slipstream.drafting.neural import NeuralDrafter
from slipstream.drafting.rounds import Measured, Sweep, largest, shapes, slots_needed, sweep
from slipstream.engine.loading import load_model
from slipstream.engine.native.decoder import NativeDecoder
from slipstream.engine.runner import ModelRunner
from slipstream.models.folder import resolve
from slipstream.train.dialogue import read_prompts

MOST = {"--steps": 16, "--topk": 16, "--nodes": 63}
MOST_PROMPT = 1024  # tokens; longer ones say nothing more about shapes


def numbers(option: str, text: str, most: int) -> list[int]:
    """The numbers of a list such as 1,2,4. Raises ConfigError naming the option."""
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError as error:
        raise ConfigError(f"{option} {text}: write numbers with commas between, such as 1,2,4") from error
    if found[0] < 1 or found[-1] > most:
        raise ConfigError(f"{option} {text}: must be between 1 and {most}")
    return found


def with_pair(config: Config, target: str, head: str, drafter: str) -> Config:
    """``config`` with what was given on the command line ("": nothing). Raises ConfigError when no head is named."""
    if drafter and drafter not in ("eagle3", "eagle2", "block", "mtp", "standalone"):
        raise ConfigError(f"--drafter {drafter}: choose eagle3, eagle2, block, mtp or standalone")
    kind = drafter or (config.draft.drafter if config.draft.drafter not in ("auto", "ngram") else "eagle3")
    if not head and not config.draft.model and kind != "mtp":
        raise ConfigError(f"--head: which {kind} head or draft model? give its name or folder")
    draft = config.draft.model_copy(update={"drafter": kind, "model": head or config.draft.model})
    model = config.model.model_copy(update={"path": target or config.model.path})
    return config.model_copy(update={"draft": draft, "model": model})


def prompts_of(file: Path | None, codec: TextCodec) -> list[list[int]]:
    """Questions (of a JSONL file with ``turns`` or ``prompt``; None: our own) as tokens. Raises ConfigError."""
    texts = list(QUESTIONS) if file is None else [turns[0] for turns in read_prompts(file)]
    try:
        tokens = [codec.chat([{"role": "user", "content": text}]) for text in texts]
    except InvalidRequest:  # a model without a chat template
        tokens = [codec.encode(text) for text in texts]
    return [prompt[-MOST_PROMPT:] for prompt in tokens]


def run(config: Config, lists: Mapping[str, str], file: Path | None, max_tokens: int, exchange_s: float, out: Path,
        console: Console) -> None:
    """Measure the shapes of ``lists`` (--steps, --topk, --nodes), show them, and write the best one to ``out``.
    Raises ModelError or ConfigError."""
    wanted = shapes(*(numbers(option, text, MOST[option]) for option, text in lists.items()))
    if not wanted:
        raise ConfigError("no tree has these shapes: --nodes must be at least --steps, and a tree of topk t has "
                          "at most t + (steps - 1) * t * t nodes")
    result = _measured(config, wanted, prompts_of(file, TextCodec(resolve(config.model.path))), max_tokens)
    console.print(_table(result, exchange_s))
    best = result.best(exchange_s)
    gain, shape = result.gain(best, exchange_s), best.growth
    console.print(f"best: {shape.num_steps} steps, topk {shape.topk}, {shape.num_draft_tokens} nodes, about {gain:.2f} "
                  "times plain decoding" + ("" if gain > 1 else "; speculation does not pay with this pair here"))
    try:
        out.write_text(_as_yaml(config, best, gain), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out: cannot write {out}: {error}") from error
    console.print(f"written to {out}; use it with: slipstream run --config {out}", soft_wrap=True)


def _measured(config: Config, wanted: Sequence[GrowthSection], prompts: Sequence[Sequence[int]],
              max_tokens: int) -> Sweep:
    """Load both models and measure, with a progress bar on standard error."""
    section = config.model
    torch.set_num_threads(section.threads or max(1, os.cpu_count() or 1))
    slots = max(slots_needed([prompt], max_tokens) for prompt in prompts)
    draft = config.draft.model_copy(update={"growth": largest(wanted)})
    runner = ModelRunner(load_model(resolve(section.path), section), slots)
    if isinstance(runner.model, NativeDecoder):
        torch.set_num_threads(1)  # as in a target: it has threads of its own, and torch's would take their cores
    drafter = create(draft, section, 2 * slots)
    if not isinstance(drafter, NeuralDrafter):
        raise ConfigError(f"draft.drafter: {drafter.name} has no tree shape to tune; choose a head or a draft model")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(f"{len(wanted)} shapes, {len(prompts)} prompts", total=(len(wanted) + 1) * len(prompts))
        return sweep(runner, drafter, wanted, prompts, max_tokens, lambda: bar.advance(task))


def _table(result: Sweep, exchange_s: float) -> Table:
    """The shapes, best first."""
    order = sorted(result.measured, key=lambda m: -m.tokens_per_s(exchange_s))
    rows = [("plain", "", "", "1.00", "", _ms(result.plain_s), f"{1 / result.plain_s:.1f}", "1.00")]
    rows += [(str(m.growth.num_steps), str(m.growth.topk), str(m.growth.num_draft_tokens), f"{m.acceptance_length:.2f}",
              _ms(m.draft_s), _ms(m.verify_s), f"{m.tokens_per_s(exchange_s):.1f}",
              f"{result.gain(m, exchange_s):.2f}") for m in order]
    columns = ("steps", "topk", "nodes", "acceptance length", "draft ms", "verify ms", "tokens/s (estimate)", "÷ plain")
    return plain_table(columns, rows)


def _as_yaml(config: Config, best: Measured, gain: float) -> str:
    """A configuration with the best shape, for ``--config``."""
    wanted = {
        "model": config.model.model_dump(mode="json", include={"path", "dtype", "device", "engine", "quantize"}),
        "draft": config.draft.model_dump(mode="json", include={"drafter", "model", "dtype", "device", "token_map",
                                                                 "quantize"})
        | {"growth": best.growth.model_dump(mode="json")},
        "target": {"policy": {"max_nodes": best.growth.num_draft_tokens}},
    }
    return (f"# Written by slipstream tune: acceptance length {best.acceptance_length:.2f}, about {gain:.2f} times "
            "plain decoding\n# on the device where it ran.\n" + yaml.safe_dump(wanted, sort_keys=False))


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"
