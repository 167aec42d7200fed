"""Stage ``answers`` of ``make gpu``: speculation against plain decoding on one device, without services between.

Rules:
1. Every answer is asked plain and with each drafter; one at a time, as a single user would.
2. A given model is asked our own questions with its shipped head and with n-grams; a random one, which
   has no head, continues random text with itself as its draft.
3. float32 must give the same tokens; bfloat16 may differ where two tokens are nearly as likely, and that is counted.

It knows nothing about how drafters work.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np

from bench.asking import SETS, read_questions
from bench.gpu.shapes import SMALL, TINY, write_folder
from bench.gpu.stage import Finding, StageOptions, free_memory, without_trial
from router_service.text.tokens import TextCodec
from slipstream.base.config import DraftSection, Dtype, ModelSection
from slipstream.drafting import create
from slipstream.drafting.rounds import Rounds, Tally, slots_needed
from slipstream.engine.graphs import GraphedDecoder
from slipstream.engine.loading import graphed, load_model
from slipstream.engine.ops.races import race_for
from slipstream.engine.runner import ModelRunner
from slipstream.models.folder import head_for

DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")
TEMPERATURES = {"greedy": 0.0, "T = 1": 1.0}


@dataclass(frozen=True, slots=True)
class Workload:
    """A model folder, its prompts, and by name the fields of each drafter's ``DraftSection``."""

    folder: Path
    prompts: list[list[int]]
    drafters: Mapping[str, Mapping[str, object]]
    max_tokens: int


def real_workload(folder: Path) -> Workload:
    codec, head = TextCodec(folder), head_for(str(folder))
    drafters = {"ngram": {"drafter": "ngram"}} | (
        {"head": {"drafter": "eagle3", "model": head.name}} if head is not None else {})
    prompts = [codec.chat([{"role": "user", "content": text}]) for text in read_questions(SETS, "copy", 6)]
    return Workload(folder, prompts, drafters, 128)


def random_workload(folder: Path, full: bool) -> Workload:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 100, size=24).tolist() for _ in range(4 if full else 2)]
    drafters = {"ngram": {"drafter": "ngram"}, "itself": {"drafter": "standalone", "model": str(folder)}}
    return Workload(write_folder(folder, SMALL if full else TINY), prompts, drafters, 64 if full else 12)


def answers_stage(options: StageOptions) -> Iterator[Finding]:
    with tempfile.TemporaryDirectory() as scratch:
        workload = (random_workload(Path(scratch) / "random", options.full) if options.model is None
                    else real_workload(options.model))
        for dtype in DTYPES:
            yield from _compare(dtype, workload, str(options.device))
            free_memory()


def _compare(dtype: Dtype, workload: Workload, device: str) -> Iterator[Finding]:
    slots = max(slots_needed([prompt], workload.max_tokens) for prompt in workload.prompts)
    model = ModelSection(path=str(workload.folder), dtype=dtype, device=device)
    served = graphed(load_model(workload.folder, model))  # with graphs where possible, as in a target
    runner = ModelRunner(served, slots, served.spare_slots if isinstance(served, GraphedDecoder) else 0,
                         race_for("auto", served.config, served.device, proof=without_trial))
    for mode, temperature in TEMPERATURES.items():
        plain = Rounds(runner, None, workload.max_tokens, temperature)
        expected, plain_rate, _ = _answer_all(runner, plain, workload.prompts, 0)
        yield Finding(f"{dtype} {mode}: plain", plain_rate, "tokens/s")
        for name, fields in workload.drafters.items():
            section = DraftSection.model_validate({"dtype": dtype, "device": device, **fields})
            rounds = Rounds(runner, create(section, model, 2 * slots), workload.max_tokens, temperature)
            found, rate, length = _answer_all(runner, rounds, workload.prompts, section.growth.num_draft_tokens)
            what = f"{dtype} {mode}, {name}"
            same = sum(_same(a, b) for a, b in zip(expected, found, strict=True))
            yield Finding(f"{what}: same as plain", same, f"of {len(expected)}",
                          str(len(expected)) if dtype == "float32" else "")
            yield Finding(f"{what}: acceptance length", length, "tokens")
            yield Finding(f"{what}: speed", rate, "tokens/s")
            yield Finding(f"{what}: by plain", rate / plain_rate, "ratio")


def _same(a: Sequence[int], b: Sequence[int]) -> bool:
    # The last round of an answer may run past the limit: only what both have counts.
    return list(a[:len(b)]) == list(b[:len(a)])


def _answer_all(runner: ModelRunner, rounds: Rounds, prompts: Sequence[Sequence[int]],
                num_draft_tokens: int) -> tuple[list[list[int]], float, float]:
    """Answer one prompt at a time. Returns answers, tokens a second (prefill included) and the acceptance length."""
    rounds.answer(prompts[:1], num_draft_tokens, Tally())
    if isinstance(runner.model, GraphedDecoder):  # a drafter that reads states has graphs of its own
        runner.model.warm(runner.pool, 1, runner.taps)
    tally, began_s = Tally(), perf_counter()
    answers = [rounds.answer([prompt], num_draft_tokens, tally)[0] for prompt in prompts]
    return answers, sum(map(len, answers)) / (perf_counter() - began_s), tally.acceptance.length
