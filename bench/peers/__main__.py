"""``make bench PROMPTS=folder``: Slipstream compared with what one would install instead, on this machine.

What is measured, and how:
1. One model, one precision, greedy, the same prompt tokens, each system as its user would start it (``systems``).
   mt_bench is asked sampled, too, with a seed: Slipstream plain and drafted, whose answers are the same.
2. All systems are up at once and are asked in turn, question by question and in turning order: a slow minute of the
   machine hurts all alike. A system that cannot start is named, and the others go on.
3. ``tokens_per_s`` is the median over a set's questions of decoding (first token to last); ``end_to_end`` counts from
   the request on. Ratios are medians over questions of the ratio at the same question.
4. Batches: Slipstream alone, a number of streams, each of which asks ``--waves`` questions, one after the other; all
   tokens divided by the time until the last answer ends, the median of some runs, plain and drafted in turn. With one
   wave that time is the slowest answer's: faster others do not count. A group is one prompt of copy, answered GROUP
   times at once at T = 1.
5. Sets: those of the folder, mt_bench where none is named, and ours of ``bench/sets``: copy, in which answers repeat
   their prompts; extraction and record, in which Slipstream's are bound to a schema of JSON, of several people and of
   one. Where the folder has cnn_dm, also long: ARTICLES of it in each prompt, some 3,600 tokens, for plain and default.
6. Between questions, while nobody works, a sum over memory is timed. The table's title tells its rates, as a machine
   has fast and slow hours, and ratios to others differ between them.
7. Rows are in ``build/bench/peers.json`` after each question; table, a verdict for each goal, and memory come last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from rich.progress import track

from bench.asking import SETS, builtin_questions, read_questions
from bench.clock import Memory
from bench.completions import TimedCompletion
from bench.peers.systems import GREEDY, System, Transformers, in_bfloat16, llama_server, llamacpp, slipstream, vllm
from bench.report import FOLDER, Row, exit_on_error, save, write
from router_service.text.tokens import TextCodec
from slipstream.base.config import ModelSection
from slipstream.base.errors import ConfigError, SlipstreamError
from slipstream.models.folder import KNOWN, packaged_file, resolve

LOGS = Path("build/bench/logs/peers")
MODEL, DTYPE = ModelSection().path, "bfloat16"
WARM_UP = "Name three rivers."
BATCHES, GROUP = (4, 16), 8
NAMES = ("slipstream-plain", "slipstream-alone", "slipstream-ngram", "slipstream-standalone", "slipstream-default",
         "slipstream-colocated", "transformers-plain", "transformers-lookup", "transformers-assisted", "llamacpp-plain",
         "llamacpp-speculative", "vllm-plain")
OURS = tuple(name for name in NAMES if name.startswith("slipstream-"))
BATCH_SYSTEMS = ("slipstream-plain", "slipstream-alone", "slipstream-default")
PAIR = ("slipstream-plain", "slipstream-default")
LONG, ARTICLES = "long", 6
SAMPLED: Mapping[str, Mapping[str, Any]] = {
    "mt_bench, T = 1": {"temperature": 1.0, "seed": 7},
    "mt_bench, T = 0.7, top-p 0.9": {"temperature": 0.7, "top_p": 0.9, "seed": 7}}
WITH_SCHEMA: Mapping[str, Mapping[str, Any]] = {name: {"structured_outputs": {"json": json.loads(
    (SETS / f"{name}.schema.json").read_text())}} for name in ("extraction", "record")}
NO_ANSWER = TimedCompletion(0, 0.0, 1.0)
Sets = dict[str, list[list[int]]]  # prompts as tokens
Results = dict[tuple[str, int, str], list[TimedCompletion]]  # (system, batch, set)


@dataclass(frozen=True, slots=True)
class Turn:
    """What each of ``systems`` is asked, one system after the other: a question, or ``batch`` streams that share
    ``prompts``. ``extras``: further request fields of each prompt; empty: greedy."""

    set: str
    prompts: Sequence[list[int]]
    systems: Sequence[str] = NAMES
    batch: int = 1
    extras: Sequence[Mapping[str, Any]] = ()


# system, the one it is compared with, batch, set, and the least ratio of their speeds
GOALS = (
    ("slipstream-default", "slipstream-plain", 1, "mt_bench", 1.3),
    ("slipstream-default", "slipstream-plain", 1, "copy", 1.9),
    ("slipstream-default", "transformers-plain", 1, "mt_bench", 2.5),
    ("slipstream-default", "transformers-plain", 1, "copy", 2.5),
    ("slipstream-plain", "llamacpp-plain", 1, "mt_bench", 0.9),
    ("slipstream-plain", "llamacpp-plain", 1, "copy", 0.9),
    *(("slipstream-default", "slipstream-plain", 1, set_, 1.3) for set_ in SAMPLED),
    *(("slipstream-default", "slipstream-plain", batch, set_, 1.0)
      for batch in (4, 16) for set_ in ("mt_bench", "copy")),
)


def speed(answer: TimedCompletion, batch: int) -> float:
    """Tokens a second: of decoding, and of a whole batch from the first request to the last token."""
    return answer.tokens_per_s if batch == 1 else answer.end_to_end


def ratio(results: Results, system: str, other: str, batch: int, set_: str) -> float:
    """The median over questions (or runs) of ``system``'s speed divided by ``other``'s; 0 where one is missing."""
    both = zip(results.get((system, batch, set_), ()), results.get((other, batch, set_), ()), strict=False)
    pairs = [(speed(mine, batch), speed(theirs, batch)) for mine, theirs in both]
    ratios = [mine / theirs for mine, theirs in pairs if mine and theirs]
    return statistics.median(ratios) if ratios else 0.0


def verdicts(results: Results) -> list[str]:
    """One line a goal."""
    lines = []
    for system, other, batch, set_, goal in GOALS:
        measured = ratio(results, system, other, batch, set_)
        verdict = "not measured" if not measured else f"{measured:.2f} ×, {'reached' if measured >= goal else 'MISSED'}"
        lines.append(f"{system} by {other}, batch {batch}, {set_}: goal {goal:g} ×: {verdict}")
    return lines


def system_of(name: str, arguments: argparse.Namespace) -> System:
    """Raises ConfigError for a peer that is not installed."""
    family, kind = name.split("-", 1)
    if family == "slipstream":
        return slipstream(kind, LOGS, MODEL, DTYPE)
    if family == "transformers":
        return Transformers(kind, LOGS, resolve(MODEL), DTYPE)
    if family == "vllm":
        if arguments.vllm is None:
            raise ConfigError("--vllm: give the environment that `make vllm` made")
        return vllm(LOGS, arguments.vllm, resolve(MODEL), DTYPE)
    if arguments.peers is None:
        raise ConfigError("--peers: give the folder that `make bench-peers` installed")
    binary, file = llama_server(arguments.peers), FOLDER / f"{MODEL}-bf16.gguf"
    source = packaged_file(KNOWN[MODEL])
    return llamacpp(kind, LOGS, binary, in_bfloat16(binary.with_name("llama-quantize"), source, file))


async def start_systems(names: Sequence[str], arguments: argparse.Namespace, stack: AsyncExitStack) -> list[System]:
    """Start and warm up each. Returns those that started."""
    codec, running = TextCodec(resolve(MODEL)), list[System]()
    for name in track(names, "starting"):
        try:
            system = system_of(name, arguments)
            stack.push_async_callback(system.stop)
            await system.start()
            await system.ask(codec.chat([{"role": "user", "content": WARM_UP}]), 16)
            running.append(system)
        except SlipstreamError as error:
            print(f"without {name}: {error}", file=sys.stderr)
    return running


async def ask_or_no_answer(system: System, prompt: Sequence[int], max_tokens: int,
                           extra: Mapping[str, Any]) -> TimedCompletion:
    """Ask ``system``. Returns NO_ANSWER if it fails, so that the others go on and questions stay paired."""
    try:
        return await system.ask(prompt, max_tokens, extra)
    except SlipstreamError as error:
        print(f"{system.name}: no answer: {error}", file=sys.stderr)
        return NO_ANSWER


async def ask_batch(system: System, turn: Turn, max_tokens: int) -> TimedCompletion:
    """All prompts of a turn as one answer; NO_ANSWER when one of them fails, as the rest is less work."""
    began_s = time.perf_counter()
    pending = list(zip(turn.prompts, turn.extras or [GREEDY] * len(turn.prompts), strict=True))[::-1]
    answers = list[TimedCompletion]()

    async def stream() -> None:
        while pending:
            prompt, extra = pending.pop()
            answers.append(await ask_or_no_answer(system, prompt, max_tokens, extra))

    await asyncio.gather(*(stream() for _ in range(turn.batch)))
    if len(answers) == 1:
        return answers[0]
    if not all(answer.tokens for answer in answers):
        return NO_ANSWER
    took_s = time.perf_counter() - began_s
    return TimedCompletion(sum(a.tokens for a in answers), min(a.first_s for a in answers), took_s,
                           sum(a.rounds for a in answers))


async def ask_in_turn(number: int, turn: Turn, systems: Sequence[System], max_tokens: int, results: Results) -> None:
    """Ask the systems of a turn. Which one is first changes from turn to turn."""
    asked = [system for system in systems if system.name in turn.systems]
    for place in range(len(asked)):
        system = asked[(number + place) % len(asked)]
        results[system.name, turn.batch, turn.set].append(await ask_batch(system, turn, max_tokens))


def one_by_one(sets: Sets) -> Iterator[Turn]:
    """Every question: greedy to every system; those of mt_bench also sampled, to plain and default; those with a schema
    to all systems of Slipstream; long ones to plain and default."""
    for name, prompts in sets.items():
        systems, extras = (OURS, [WITH_SCHEMA[name]]) if name in WITH_SCHEMA else (PAIR if name == LONG else NAMES, ())
        yield from (Turn(name, [prompt], systems, extras=extras) for prompt in prompts)
    for name, sampled in SAMPLED.items():
        yield from (Turn(name, [prompt], PAIR, extras=[sampled]) for prompt in sets.get("mt_bench", ()))


def in_batches(sets: Sets, runs: int, waves: int) -> Iterator[Turn]:
    """Short questions without a schema in batches of streams, and groups of samples of one prompt."""
    for name, prompts in sets.items():
        for batch, run in product(BATCHES if name not in (*WITH_SCHEMA, LONG) else (), range(runs)):
            count = waves * batch
            yield Turn(name, [prompts[(run * count + i) % len(prompts)] for i in range(count)], BATCH_SYSTEMS, batch)
    seeds = [{"temperature": 1.0, "seed": seed} for seed in range(GROUP)]
    for run in range(runs):
        yield Turn("group", [sets["copy"][run % len(sets["copy"])]] * GROUP, BATCH_SYSTEMS, GROUP, seeds)


def rows_of(results: Results) -> list[Row]:
    """One row for each system, batch and set, in the order in which they were asked."""
    return [row_of(key, results) for key in sorted(results, key=lambda k: (k[1], k[2], NAMES.index(k[0])))]


def row_of(key: tuple[str, int, str], results: Results) -> Row:
    system, batch, set_ = key
    answers = [answer for answer in results[key] if answer.tokens] or [NO_ANSWER]
    rounds = sum(a.rounds for a in answers)
    return {"system": system, "precision": DTYPE, "batch": batch, "set": set_,
            "tokens_per_s": statistics.median([rate for a in answers if (rate := speed(a, batch))] or [0.0]),
            "against_plain": ratio(results, system, "slipstream-plain", batch, set_),
            "end_to_end": statistics.median(a.end_to_end for a in answers),
            "first_ms": 1e3 * statistics.median(a.first_s for a in answers),
            "acceptance_length": sum(a.tokens for a in answers) / rounds if rounds else 0.0,
            "answers": sum(answer.tokens > 0 for answer in answers)}


def questions_of(folder: str | None, sets: Sequence[str]) -> dict[str, list[str]]:
    """By set: those of the folder, our own and the long ones, or only our own. Raises ConfigError."""
    if folder is None:
        return builtin_questions() | {name: read_questions(SETS, name, 99) for name in WITH_SCHEMA}
    own = {name: read_questions(SETS, name, 99) for name in ("copy", *WITH_SCHEMA)}
    if (Path(folder) / "cnn_dm.jsonl").exists():
        articles = read_questions(folder, "cnn_dm", 99)
        own[LONG] = ["\n\n".join(articles[first : first + ARTICLES])
                     for first in range(0, len(articles) - ARTICLES + 1, ARTICLES)]
    return {name: read_questions(folder, name, 99) for name in sets} | own


async def run(arguments: argparse.Namespace) -> None:
    """Start, ask, print. Rows are saved after each turn, so an early end keeps what was measured."""
    codec = TextCodec(resolve(MODEL))
    name, questions = "peers" if arguments.prompts else "smoke", questions_of(arguments.prompts, arguments.sets)
    sets = {set_: [codec.chat([{"role": "user", "content": q}]) for q in texts] for set_, texts in questions.items()}
    selected = {set_: prompts[::max(1, len(prompts) // arguments.count)][:arguments.count]
                for set_, prompts in sets.items()}
    turns = [*one_by_one(selected), *in_batches(sets, arguments.runs, arguments.waves)]
    results: Results = defaultdict(list)
    memory_speed = Memory()
    gb_s = [memory_speed.gb_s()]
    async with AsyncExitStack() as stack:
        systems = await start_systems(arguments.systems, arguments, stack)
        for number, turn in enumerate(track(turns, "asking")):
            await ask_in_turn(number, turn, systems, arguments.max_tokens, results)
            gb_s.append(memory_speed.gb_s())
            save(name, rows_of(results))
        memory = {system.name: system.memory() for system in systems}
    rows = rows_of(results)
    least, median, most = min(gb_s), statistics.median(gb_s), max(gb_s)
    write(name, rows, f"bench: {MODEL}, {DTYPE}, at most {arguments.max_tokens} tokens; memory reads {median:.0f} GB/s "
          f"({least:.0f} to {most:.0f})")
    print("\n".join(verdicts(results) if arguments.prompts else ()))
    for name, parts in memory.items():
        print(f"{name}: {', '.join(f'{part} {mib:.0f} MiB' for part, mib in parts.items())}")


@exit_on_error()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", help="folder with mt_bench.jsonl; without one our own dozen is asked")
    parser.add_argument("--sets", nargs="+", default=["mt_bench"], help="names of JSONL sets in the folder")
    parser.add_argument("--count", type=int, default=8, help="questions of each set, one at a time")
    parser.add_argument("--runs", type=int, default=3, help="of each batch size and set; 0: no batches")
    parser.add_argument("--waves", type=int, default=3, help="questions of each stream of a batch; 1: all at once")
    parser.add_argument("--max-tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--systems", nargs="*", default=NAMES, choices=NAMES)
    parser.add_argument("--peers", type=Path, help="what `make bench-peers` installed; for systems of llama.cpp")
    parser.add_argument("--vllm", type=Path, help="the environment that `make vllm` made; for vLLM")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
