"""``slipstream tune``: loads the pair and the prompts, runs the sweep, prints tables and writes the best setting; with
--apart it also compares with a draft on another device.

It knows nothing about how shapes are measured or schedules are simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shlex import quote
from tempfile import TemporaryFile
from time import perf_counter

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from router_service.text.tokens import TextCodec
from slipstream.base.config import Config, GrowthSection, LogSection, dump_yaml
from slipstream.base.errors import ConfigError, InvalidRequest, Unavailable
from slipstream.cli.host import QUESTIONS
from slipstream.cli.terminal import plain_table
from slipstream.drafting import create
from slipstream.drafting.network import run_network
from slipstream.drafting.neural import NeuralDrafter
from slipstream.drafting.records import ROWS, Record, record, slots_for
from slipstream.drafting.rounds import Measured, Sweep, largest, shapes, slots_needed, sweep
from slipstream.engine.device import cores
from slipstream.engine.graphs import GraphedDecoder
from slipstream.engine.loading import graphed, load_model
from slipstream.engine.native.decoder import NativeDecoder
from slipstream.engine.ops.races import race_for
from slipstream.engine.runner import ModelRunner
from slipstream.models.folder import resolve, resolve_draft_section, tokenizer_hash
from slipstream.observe.log import configure
from slipstream.simulate.apart import Compared, compared, timing_of
from slipstream.simulate.simulation import SCHEDULES
from slipstream.train.dialogue import read_prompts
from slipstream.wire.channel import round_trip_s
from slipstream.wire.tls import tls_files

MAX_VALUES = {"--steps": 16, "--topk": 16, "--nodes": 63}
MAX_PROMPT_TOKENS = 1024  # longer prompts tell nothing more about shapes
NUM_TIMED = 8  # forwards


def parse_numbers(option: str, text: str, maximum: int) -> list[int]:
    """The numbers of a list such as 1,2,4. Raises ConfigError naming the option."""
    try:
        values = sorted({int(part) for part in text.split(",")})
    except ValueError as error:
        raise ConfigError(f"{option} {text}: write numbers with commas between, such as 1,2,4") from error
    if values[0] < 1 or values[-1] > maximum:
        raise ConfigError(f"{option} {text}: must be between 1 and {maximum}")
    return values


def with_pair(config: Config, target: str, head: str, drafter: str) -> Config:
    """``config`` with the values of the command line ("": not given), and the shipped head where none is named. Raises
    ConfigError when there is none, ModelError where there is no such target or head."""
    if drafter and drafter not in ("eagle3", "eagle2", "block", "mtp", "standalone"):
        raise ConfigError(f"--drafter {drafter}: choose eagle3, eagle2, block, mtp or standalone")
    model = config.model.model_copy(update={"path": target or config.model.path})
    draft = config.draft if head or drafter else resolve_draft_section(config.draft, model)
    kind = drafter or (draft.drafter if draft.drafter not in ("auto", "ngram") else "eagle3")
    if not head and not draft.model and kind != "mtp":
        resolve(model.path)  # if it is misspelt, that is why no head is known
        raise ConfigError(f"--head: which {kind} head or draft model? give its name or folder")
    if head:
        resolve(head)  # else one would hear that it is misspelt only when the target is loaded
    draft = draft.model_copy(update={"drafter": kind, "model": head or draft.model})
    return config.model_copy(update={"draft": draft, "model": model})


def load_prompts(file: Path | None, codec: TextCodec) -> list[list[int]]:
    """Questions (of a JSONL file with ``turns`` or ``prompt``; None: our own) as tokens. Raises ConfigError."""
    texts = list(QUESTIONS) if file is None else [turns[0] for turns in read_prompts(file)]
    try:
        tokens = [codec.chat([{"role": "user", "content": text}]) for text in texts]
    except InvalidRequest:  # a model without a chat template
        tokens = [codec.encode(text) for text in texts]
    return [prompt[-MAX_PROMPT_TOKENS:] for prompt in tokens]


@dataclass(frozen=True, slots=True)
class RemoteDraft:
    """What a draft elsewhere takes. ``exchange_s``: time of a round on the network; ``address``: of a running draft, to
    measure that time instead; ``draft_s``: time of a tree on the draft's own device; 0: same as here."""

    exchange_s: float
    address: str = ""
    draft_s: float = 0.0


def run(config: Config, shape_lists: Mapping[str, str], prompts_file: Path | None, max_tokens: int, temperature: float,
        remote: RemoteDraft, apart: bool, out: Path, console: Console) -> None:
    """Measure the shapes of ``shape_lists`` (--steps, --topk, --nodes), show them, and write the best one to ``out``.
    ``apart``: also compare with a draft on its own device. Raises ModelError, ConfigError or Unavailable."""
    candidates = shapes(*(parse_numbers(option, text, MAX_VALUES[option]) for option, text in shape_lists.items()))
    if not candidates:
        raise ConfigError("no tree has these shapes: --nodes must be at least --steps, and a tree of topk t has "
                          "at most t + (steps - 1) * t * t nodes")
    _check_writable(out)
    if temperature and apart:
        raise ConfigError("--temperature: --apart plays greedy answers; leave out one of them")
    if remote.draft_s and not apart:
        raise ConfigError("--draft-ms: it says what a draft on a device of its own takes; add --apart, or leave it out")
    exchange_s = _exchange_s(config, remote, console)
    prompts = load_prompts(prompts_file, TextCodec(resolve(config.model.path)))
    runner, drafter = _load_pair(config, candidates, prompts, max_tokens)
    prompts = _cut_prompts(runner.config.max_context, prompts, max_tokens)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(f"{len(candidates)} shapes, {len(prompts)} prompts",
                            total=(len(candidates) + 1) * len(prompts))
        result = sweep(runner, drafter, candidates, prompts, max_tokens, lambda: bar.advance(task), temperature)
        best = result.best(exchange_s)
        comparison = _compare_schedules(config, runner, drafter, result, exchange_s, remote, prompts, max_tokens,
                                        bar) if apart else None
    console.print(_shape_table(result, exchange_s))
    gain, shape = result.gain(best, exchange_s), best.growth
    console.print(f"best: {shape.num_steps} steps, topk {shape.topk}, {shape.num_draft_tokens} nodes, about {gain:.2f} "
                  "times plain decoding" + ("" if gain > 1 else "; speculation does not pay with this pair here"))
    if comparison is not None:
        console.print("trees above are verified whole; below, in simulated time, the policy verifies as much as pays:")
        console.print(_schedule_table(comparison))
        console.print("\n".join(comparison.why()), soft_wrap=True)
    try:
        out.write_text(_as_yaml(config, best, gain, comparison), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out: cannot write {out}: {error}") from error
    console.print(f"written to {out}; use it with: slipstream run --config {quote(str(out))}", markup=False,
                  soft_wrap=True)


def _exchange_s(config: Config, remote: RemoteDraft, console: Console) -> float:
    """The time of a round on the network, measured where there is an address. Raises Unavailable."""
    if not remote.address:
        return remote.exchange_s
    try:
        exchange_s = round_trip_s(remote.address, tls_files(config.wire.tls))
    except Unavailable as error:
        raise Unavailable(f"--link: {error}; give the address of a draft that runs, as target.drafts has it") from error
    console.print(f"a message to {remote.address} and back takes {1e3 * exchange_s:.2f} ms")
    return exchange_s


def _check_vocabulary(config: Config) -> None:
    """Raises ConfigError for a draft model that its target would refuse."""
    if config.draft.drafter == "standalone":
        draft = resolve(config.draft.model)
        if tokenizer_hash(draft) != tokenizer_hash(resolve(config.model.path)):
            raise ConfigError(f"--head: the vocabulary of {draft} differs from the target's, so that a target would "
                              "refuse it and decode plain; choose one with the same tokenizer")


def _check_writable(out: Path) -> None:
    """Raises ConfigError if ``out`` cannot be written."""
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"--out: cannot write {out}: there is no folder {out.parent}")
    if out.is_dir():
        raise ConfigError(f"--out: {out} is a folder; name a file, such as {out / 'tuned.yaml'}")
    try:
        with open(out, "ab") if out.exists() else TemporaryFile(dir=out.absolute().parent):
            pass
    except OSError as error:
        raise ConfigError(f"--out: cannot write {out}: {error}") from error


def _cut_prompts(context: int, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
    """The prompts, cut to their last tokens, so that an answer fits into ``context``. Raises ConfigError."""
    max_prompt = context - max_tokens - 2 * MAX_VALUES["--steps"]  # the last tree may reach beyond the end of an answer
    if max_prompt < 1:
        raise ConfigError(f"--tokens {max_tokens}: the target's context of {context} tokens has no room for such "
                          "answers; give fewer")
    return [prompt[-max_prompt:] for prompt in prompts]


def _load_pair(config: Config, candidates: Sequence[GrowthSection], prompts: Sequence[Sequence[int]],
          max_tokens: int) -> tuple[ModelRunner, NeuralDrafter]:
    """Both models, with room for one prompt. Raises ModelError, ConfigError."""
    _check_vocabulary(config)
    section = config.model
    torch.set_num_threads(section.threads or cores())
    slots = max(slots_needed([prompt], max_tokens) for prompt in prompts)
    draft = config.draft.model_copy(update={"growth": largest(candidates)})
    model = graphed(load_model(resolve(section.path), section))  # and what chooses tokens, as in a target
    spare = model.spare_slots if isinstance(model, GraphedDecoder) else 0
    runner = ModelRunner(model, slots, spare, race_for(section.kernels, model.config, model.device))
    if isinstance(model, NativeDecoder):
        torch.set_num_threads(1)  # as in a target: it has its own threads, and torch's would take their cores
    drafter = create(draft, section, 2 * slots + slots_for(0, 0))
    if not isinstance(drafter, NeuralDrafter):
        raise ConfigError(f"draft.drafter: {drafter.name} has no tree shape to tune; choose a head or a draft model")
    if isinstance(model, GraphedDecoder):  # before anything is timed
        if drafter.features is not None:
            runner.keep_features(drafter.features)
        model.warm(runner.pool, 1, runner.taps)
    return runner, drafter


def _compare_schedules(config: Config, runner: ModelRunner, drafter: NeuralDrafter, result: Sweep, exchange_s: float,
                       remote: RemoteDraft, prompts: Sequence[Sequence[int]], max_tokens: int,
                       bar: Progress) -> Compared:
    """The best shape under each schedule."""
    best = result.best(exchange_s)
    configure(LogSection(level="error"))  # simulated services log their starts
    task = bar.add_task("together or apart", total=len(prompts) + len(SCHEDULES))
    records = list[Record]()
    for prompt in prompts:
        records += record(runner, drafter.network, max_tokens, [prompt])
        bar.advance(task)
    few_s, many_s = (_fastest_s(partial(run_network, drafter.network, rows)) for rows in (best.growth.topk, ROWS))
    timing = timing_of(result.plain_s, best, many_s / few_s, ROWS)
    return compared(timing, best.growth.num_draft_tokens, exchange_s, records, remote.draft_s or best.draft_s,
                    config.on_one_machine().target.shared_cores, lambda: bar.advance(task))


def _fastest_s(work: Callable[[], object]) -> float:
    times = list[float]()
    for _ in range(NUM_TIMED + 1):
        began_s = perf_counter()
        work()
        times.append(perf_counter() - began_s)
    return min(times[1:])


def _schedule_table(comparison: Compared) -> Table:
    """The table of schedules."""
    names = {"plain": "plain", "colocated": "one device", "serial": "apart", "run-ahead": "apart, ahead",
             "outcomes": "apart, far ahead"}
    rows = [(names[name], f"{predicted.tokens_per_s:.1f}", f"{comparison.ratio(name):.2f}",
             f"{predicted.acceptance_length:.2f}", f"{predicted.hit_rate:.0%}")
            for name, predicted in comparison.found.items()]
    return plain_table(("where (simulated)", "tokens/s", "÷ one device", "tokens a round", "tree was there"), rows)


def _shape_table(result: Sweep, exchange_s: float) -> Table:
    """The shapes, best first."""
    order = sorted(result.measured, key=lambda m: -m.tokens_per_s(exchange_s))
    rows = [("plain", "", "", "1.00", "", _as_ms(result.plain_s), f"{1 / result.plain_s:.1f}", "1.00")]
    rows += [(str(m.growth.num_steps), str(m.growth.topk), str(m.growth.num_draft_tokens), f"{m.acceptance_length:.2f}",
              _as_ms(m.draft_s), _as_ms(m.verify_s), f"{m.tokens_per_s(exchange_s):.1f}",
              f"{result.gain(m, exchange_s):.2f}") for m in order]
    columns = ("steps", "topk", "nodes", "acceptance length", "draft ms", "verify ms", "tokens/s (estimate)", "÷ plain")
    return plain_table(columns, rows)


def _as_yaml(config: Config, best: Measured, gain: float, comparison: Compared | None) -> str:
    """A configuration with the best shape, for ``--config``, and how far ahead to draft."""
    settings = {
        "model": config.model.model_dump(mode="json"),
        "draft": config.draft.model_dump(mode="json", include={"drafter", "model", "dtype", "device", "token_map",
                                                                 "quantize", "compile"})
        | {"growth": best.growth.model_dump(mode="json")} | ({} if comparison is None else
                                                                 {"run_ahead": comparison.run_ahead}),
        # Enough for its trees; prompt lookup may propose longer chains.
        "target": {"policy": {"max_nodes": max(config.target.policy.max_nodes, best.growth.num_draft_tokens)}},
    }
    comments = "".join(f"# {line}.\n" for line in (comparison.why() if comparison is not None else ()))
    return (f"# Written by slipstream tune: acceptance length {best.acceptance_length:.2f}, about {gain:.2f} times "
            f"plain decoding\n# on the device where it ran.\n{comments}" + dump_yaml(settings))


def _as_ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"
