"""``make bench PROMPTS=folder``: Slipstream beside what one would install instead, on this machine.

What is measured, and how:
1. One model, one precision, greedy, the same prompt tokens, each system as its user would start it (``bench.systems``).
2. All systems are up at once and are asked in turn, question by question and in turning order: a slow minute of the
   machine hurts all alike. A system that cannot start is named, and the others go on.
3. ``tokens_per_s`` is the median over a set's questions of decoding (first token to last); ``end_to_end`` counts from
   the request on. Ratios are medians over questions of the ratio at the same question.
4. Batches: Slipstream alone, so many streams, each of which asks ``--waves`` questions, one behind the other; all
   tokens by the time until the last answer ends, the median of some runs, plain and drafted in turn. With one wave that
   time is the slowest answer's, and what makes others faster does not count.
5. Sets: mt_bench of the folder, and ``bench/sets/copy.jsonl``, ours, in which answers repeat their prompts.
6. Rows are in ``build/bench/peers.json`` after each question; table, verdicts and memory come last.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.asking import SETS, Question, own, read
from bench.completions import Answered
from bench.gguf_copy import write_bfloat16
from bench.report import FOLDER, Row, save, write
from bench.systems import LlamaCpp, Slipstream, System, Transformers, llama_server
from bench.verdicts import Results, ratio, speed, verdicts
from router_service.tokens import TextCodec
from slipstream.base.config import ModelSection
from slipstream.base.errors import SlipstreamError
from slipstream.cli.terminal import complain
from slipstream.models.folder import KNOWN, packaged_file, resolve

LOGS = Path("build/bench/logs/peers")
WARM_UP = "Name three rivers."
BATCHES = (4, 16)
NAMES = ("slipstream-plain", "slipstream-alone", "slipstream-ngram", "slipstream-standalone", "slipstream-default",
         "slipstream-colocated", "transformers-plain", "transformers-lookup", "transformers-assisted", "llamacpp-plain",
         "llamacpp-speculative")
TOGETHER = ("slipstream-plain", "slipstream-alone", "slipstream-default")
NOTHING = Answered(0, 0.0, 1.0)
Sets = dict[str, list[list[int]]]  # prompts as tokens


def system_of(name: str, arguments: argparse.Namespace) -> System:
    """Raises ConfigError for a peer that is not installed and for a name that is not in NAMES."""
    family, kind = name.split("-", 1)
    model = resolve(arguments.model)
    if family == "slipstream":
        colocated = kind == "colocated"
        return Slipstream("default" if colocated else kind, LOGS, arguments.model, arguments.dtype, colocated)
    if family == "transformers":
        return Transformers(kind, LOGS, model, arguments.dtype)
    binary, file = llama_server(arguments.peers), FOLDER / f"{arguments.model}-bf16.gguf"
    return LlamaCpp(kind, LOGS, binary, write_bfloat16(packaged_file(KNOWN[arguments.model]), file))


async def started(names: Sequence[str], arguments: argparse.Namespace, stack: AsyncExitStack,
                  progress: Progress) -> list[System]:
    """Those that could be started, warm."""
    task = progress.add_task("starting", total=len(names))
    codec, up = TextCodec(resolve(arguments.model)), list[System]()
    for name in names:
        try:
            system = system_of(name, arguments)
            stack.push_async_callback(system.stop)
            await system.start()
            await system.ask(codec.chat([{"role": "user", "content": WARM_UP}]), 16)
            up.append(system)
        except SlipstreamError as error:
            progress.console.print(f"without {name}: {error}")
        progress.advance(task)
    return up


async def answer_of(system: System, prompt: Sequence[int], max_tokens: int) -> Answered:
    """What ``system`` answers; nothing when it fails, so that the others go on and questions stay paired."""
    try:
        return await system.ask(prompt, max_tokens)
    except SlipstreamError as error:
        print(f"{system.name}: no answer: {error}", file=sys.stderr)
        return NOTHING


async def one_by_one(systems: Sequence[System], sets: Sets, max_tokens: int, results: Results) -> AsyncIterator[None]:
    """Every question to every system."""
    for name, prompts in sets.items():
        for number, prompt in enumerate(prompts):
            for turn in range(len(systems)):
                system = systems[(number + turn) % len(systems)]
                results[system.name, 1, name].append(await answer_of(system, prompt, max_tokens))
                yield


async def together(system: System, prompts: Sequence[Sequence[int]], streams: int, max_tokens: int) -> Answered:
    """All prompts, ``streams`` at a time, as one answer."""
    began_s = asyncio.get_running_loop().time()
    left, all_ = list(reversed(prompts)), list[Answered]()

    async def stream() -> None:
        while left:
            all_.append(await answer_of(system, left.pop(), max_tokens))

    await asyncio.gather(*(stream() for _ in range(streams)))
    took_s = asyncio.get_running_loop().time() - began_s
    return Answered(sum(a.tokens for a in all_), min(a.first_s for a in all_), took_s, sum(a.rounds for a in all_))


async def in_batches(systems: Sequence[System], sets: Sets, arguments: argparse.Namespace,
                     results: Results) -> AsyncIterator[None]:
    for name, prompts in sets.items():
        for batch in BATCHES:
            count = arguments.waves * batch
            for run in range(arguments.runs):
                few = [prompts[(run * count + i) % len(prompts)] for i in range(count)]
                for turn in range(len(systems)):
                    system = systems[(run + turn) % len(systems)]
                    results[system.name, batch, name].append(await together(system, few, batch, arguments.max_tokens))
                    yield


def rows_of(results: Results, dtype: str) -> list[Row]:
    """One row for each system, batch and set, in the order in which they were asked."""
    return [row_of(key, results, dtype) for key in sorted(results, key=lambda k: (k[1], k[2], NAMES.index(k[0])))]


def row_of(key: tuple[str, int, str], results: Results, dtype: str) -> Row:
    system, batch, set_ = key
    answers = [answer for answer in results[key] if answer.tokens] or [NOTHING]
    rounds = sum(a.rounds for a in answers)
    return {"system": system, "precision": dtype, "batch": batch, "set": set_,
            "tokens_per_s": statistics.median(speed(a, batch) for a in answers),
            "against_plain": ratio(results, system, "slipstream-plain", batch, set_),
            "end_to_end": statistics.median(a.end_to_end for a in answers),
            "first_ms": 1e3 * statistics.median(a.first_s for a in answers),
            "acceptance_length": sum(a.tokens for a in answers) / rounds if rounds else 0.0,
            "answers": sum(answer.tokens > 0 for answer in answers)}


def questions_of(folder: str | None) -> dict[str, list[Question]]:
    """By set: those of the folder and ours, or our own dozen."""
    if folder is not None:
        return {"mt_bench": read(folder, "mt_bench", 99), "copy": read(SETS, "copy", 99)}
    return {set_: [question for question in own() if question.set == set_] for set_ in ("chat", "copy")}


async def run(arguments: argparse.Namespace) -> None:
    """Start, ask, print; what was measured stays, whatever ends it."""
    codec = TextCodec(resolve(arguments.model))
    name, questions = "peers" if arguments.prompts else "smoke", questions_of(arguments.prompts)
    sets = {set_: [codec.chat([{"role": "user", "content": q.text}]) for q in all_] for set_, all_ in questions.items()}
    few = {set_: prompts[::max(1, len(prompts) // arguments.count)][:arguments.count] for set_, prompts in sets.items()}
    results: Results = defaultdict(list)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    async with AsyncExitStack() as stack:
        progress = stack.enter_context(Progress(*columns))
        systems = await started(arguments.systems, arguments, stack, progress)
        many = [s for s in systems if s.name in TOGETHER] if arguments.runs else []
        task = progress.add_task("one by one", total=len(systems) * sum(map(len, few.values())))
        async for _ in one_by_one(systems, few, arguments.max_tokens, results):
            progress.advance(task)
            save(name, rows_of(results, arguments.dtype))
        task = progress.add_task("in batches", total=len(many) * len(sets) * len(BATCHES) * arguments.runs)
        async for _ in in_batches(many, sets, arguments, results):
            progress.advance(task)
            save(name, rows_of(results, arguments.dtype))
        memory = {system.name: system.memory() for system in systems}
    rows = rows_of(results, arguments.dtype)
    write(name, rows, f"bench: {arguments.model}, {arguments.dtype}, greedy, at most {arguments.max_tokens} tokens")
    print("\n".join(verdicts(results) if arguments.prompts else ()))
    for name, parts in memory.items():
        print(f"{name}: {', '.join(f'{part} {mib:.0f} MiB' for part, mib in parts.items())}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", help="folder with mt_bench.jsonl; without one our own dozen is asked")
    parser.add_argument("--count", type=int, default=8, help="questions of each set, one at a time")
    parser.add_argument("--runs", type=int, default=3, help="of each batch size and set; 0: no batches")
    parser.add_argument("--waves", type=int, default=3, help="questions of each stream of a batch; 1: all at once")
    parser.add_argument("--max-tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--systems", type=lambda text: text.replace(",", " ").split(), default=list(NAMES))
    parser.add_argument("--peers", type=Path, required=True, help="what `make bench-peers` installed")
    parser.add_argument("--model", default=ModelSection().path, help="name of a known model")
    parser.add_argument("--dtype", choices=("bfloat16",), default="bfloat16")
    try:
        asyncio.run(run(parser.parse_args()))
    except SlipstreamError as error:
        complain(error)
        sys.exit(1)


if __name__ == "__main__":
    main()
