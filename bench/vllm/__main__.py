"""``make bench-vllm``: vLLM plain, with drafters of its own, and with ours on another core, on this machine.

What is measured, and how:
1. One model, greedy, the same questions. Every engine is a process with one thread for its model; a draft service has
   one thread too. Both at once need two cores, as they would need two devices.
2. All engines are up at once and are asked in turn, in turning order: a slow minute of the machine hurts all alike.
3. ``tokens_per_s`` counts from the request to the last token of the last answer, the median of some runs;
   ``by_plain`` is the median over runs of the ratio to plain vLLM in the same run. ``propose_ms`` is the mean time of a
   step in the proposer, its own or ours, waiting included; ``equal`` is how many answers are plain vLLM's.
4. Rows are in ``build/bench/vllm.json`` after each run.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rich.progress import track

from bench.asking import SETS, builtin_questions, read_questions
from bench.fleet import service
from bench.report import Row, exit_on_error, save, write
from slipstream.models.folder import resolve
from tests_vllm.running import Engine

LOGS = Path("build/bench/logs/vllm")
PLAIN, CHAIN = "plain", 4
HEAD = "smollm2-135m-eagle3"
OWN: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "own n-gram": {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2},
    "own EAGLE-3": {"method": "eagle3", "model": HEAD},
}
# A head drafts chains, as vLLM verifies nothing else.
EAGLE3 = ("draft.drafter=auto", "draft.growth.topk=1", f"draft.growth.num_steps={CHAIN}",
          f"draft.growth.num_draft_tokens={CHAIN}")
REMOTE: dict[str, tuple[Sequence[str], dict[str, Any]]] = {
    "our n-gram": (("draft.drafter=ngram",), {"prompt_lookup": False}),
    "our EAGLE-3": (EAGLE3, {"prompt_lookup": False, "layers": [2, 15, 27]}),
    "our EAGLE-3, lookup": (EAGLE3, {"layers": [2, 15, 27]}),  # the default of users
}


@dataclass(frozen=True, slots=True)
class EngineRun:
    """One run of one engine, by the names that ``Engine.ask`` returns. ``propose_s``: in its proposer, in ``steps``
    steps."""

    tokens: list[list[int]]
    seconds: float
    propose_s: float
    steps: int

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds

    @property
    def propose_ms(self) -> float:
        return 1e3 * self.propose_s / max(1, self.steps)


Runs = dict[tuple[str, str, int], list[EngineRun]]  # (system, set, batch)


def rows_of(runs: Runs) -> list[Row]:
    return [_row(key, mine, runs[PLAIN, key[1], key[2]]) for key, mine in runs.items()]


def _row(key: tuple[str, str, int], mine: Sequence[EngineRun], plain: Sequence[EngineRun]) -> Row:
    pairs = list(zip(mine, plain, strict=False))
    answers = [(own, expected) for run, other in pairs for own, expected in zip(run.tokens, other.tokens, strict=True)]
    return {"system": key[0], "set": key[1], "batch": key[2],
            "tokens_per_s": statistics.median(run.tokens_per_s for run in mine),
            "by_plain": statistics.median(run.tokens_per_s / other.tokens_per_s for run, other in pairs),
            "propose_ms": statistics.median(run.propose_ms for run in mine),
            "equal": sum(own == expected for own, expected in answers), "answers": len(answers)}


@contextmanager
def start_engines(python: Path, dtype: str) -> Iterator[dict[str, Engine]]:
    """All engines, by name. Raises Unavailable."""
    common: dict[str, Any] = {"dtype": dtype, "max_num_batched_tokens": 2048, "max_num_seqs": 16}
    LOGS.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        engines = dict[str, Engine]()
        for name, method in track(OWN.items(), description="vLLM"):
            speculative = {**method, "num_speculative_tokens": CHAIN} if method else None
            if speculative and "model" in speculative:
                speculative["model"] = str(resolve(HEAD))
            engines[name] = Engine(python, None, LOGS / f"{name}.log", speculative_config=speculative, **common)
            stack.callback(engines[name].end)
        for name, (drafter, options) in track(REMOTE.items(), description="vLLM with our drafts"):
            pod = service("draft", name, LOGS, (*drafter, "model.threads=1"))
            pod.start()
            stack.callback(pod.stop)
            asyncio.run(pod.ready())
            engines[name] = Engine(python, {"drafts": [pod.address], **options}, LOGS / f"{name}.log", **common)
            stack.callback(engines[name].end)
        yield engines


def questions(folder: str | None, count: int) -> dict[str, list[str]]:
    chat = {"mt_bench": read_questions(folder, "mt_bench", count)} if folder else {
        "chat": builtin_questions()["chat"][:count]}
    return chat | {"copy": read_questions(SETS, "copy", count)}


@exit_on_error()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, required=True, help="what `make vllm` installed")
    parser.add_argument("--prompts", help="folder with mt_bench.jsonl; without one our own questions are asked")
    parser.add_argument("--count", type=int, default=4, help="questions of each set")
    parser.add_argument("--runs", type=int, default=3, help="of each batch size and set")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--dtype", default="float32", help="of vLLM; in bfloat16 its own answers differ with the batch")
    options = parser.parse_args()
    sets = questions(options.prompts, options.count)
    runs: Runs = defaultdict(list)
    with start_engines(options.vllm / "bin" / "python", options.dtype) as engines:
        for engine in engines.values():
            engine.ask(sets["copy"][:1], 1, 32)  # some things are made at the first request
        names = list(engines)
        turns = [(run, set_, batch) for run in range(options.runs) for set_ in sets for batch in options.batches]
        for number, (_, set_, batch) in enumerate(track(turns, description="asking")):
            for name in (*names[number % len(names):], *names[: number % len(names)]):
                result = engines[name].ask(sets[set_], batch, options.max_tokens)
                runs[name, set_, batch].append(EngineRun(*(result[field.name] for field in fields(EngineRun))))
            save("vllm", rows_of(runs))
    write("vllm", rows_of(runs), f"bench-vllm: default model, {options.dtype}, greedy, chains of {CHAIN}")


if __name__ == "__main__":
    main()
