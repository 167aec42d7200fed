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
from bench.gpu.stage import Finding, Given, free, untried
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
class Asked:
    """A model folder, what it is asked, and who drafts: fields of ``DraftSection`` by name."""

    folder: Path
    prompts: list[list[int]]
    drafters: Mapping[str, Mapping[str, object]]
    max_tokens: int


def real(folder: Path) -> Asked:
    codec, head = TextCodec(folder), head_for(str(folder))
    drafters = {"ngram": {"drafter": "ngram"}} | (
        {"head": {"drafter": "eagle3", "model": head.name}} if head is not None else {})
    prompts = [codec.chat([{"role": "user", "content": text}]) for text in read_questions(SETS, "copy", 6)]
    return Asked(folder, prompts, drafters, 128)


def random(folder: Path, full: bool) -> Asked:
    dice = np.random.default_rng(0)
    prompts = [dice.integers(2, 100, size=24).tolist() for _ in range(4 if full else 2)]
    drafters = {"ngram": {"drafter": "ngram"}, "itself": {"drafter": "standalone", "model": str(folder)}}
    return Asked(write_folder(folder, SMALL if full else TINY), prompts, drafters, 64 if full else 12)


def answers_stage(given: Given) -> Iterator[Finding]:
    with tempfile.TemporaryDirectory() as scratch:
        asked = random(Path(scratch) / "random", given.full) if given.model is None else real(given.model)
        for dtype in DTYPES:
            yield from _in(dtype, asked, str(given.device))
            free()


def _in(dtype: Dtype, asked: Asked, device: str) -> Iterator[Finding]:
    slots = max(slots_needed([prompt], asked.max_tokens) for prompt in asked.prompts)
    model = ModelSection(path=str(asked.folder), dtype=dtype, device=device)
    served = graphed(load_model(asked.folder, model))  # with graphs where they can be, as in a target
    runner = ModelRunner(served, slots, served.spare_slots if isinstance(served, GraphedDecoder) else 0,
                         race_for("auto", served.config, served.device, proof=untried))
    for mode, temperature in TEMPERATURES.items():
        right, plain_rate, _ = _answers(runner, Rounds(runner, None, asked.max_tokens, temperature), asked.prompts, 0)
        yield Finding(f"{dtype} {mode}: plain", plain_rate, "tokens/s")
        for name, fields in asked.drafters.items():
            section = DraftSection.model_validate({"dtype": dtype, "device": device, **fields})
            rounds = Rounds(runner, create(section, model, 2 * slots), asked.max_tokens, temperature)
            found, rate, length = _answers(runner, rounds, asked.prompts, section.growth.num_draft_tokens)
            what = f"{dtype} {mode}, {name}"
            same = sum(_alike(a, b) for a, b in zip(right, found, strict=True))
            yield Finding(f"{what}: same as plain", same, f"of {len(right)}",
                          str(len(right)) if dtype == "float32" else "")
            yield Finding(f"{what}: acceptance length", length, "tokens")
            yield Finding(f"{what}: speed", rate, "tokens/s")
            yield Finding(f"{what}: by plain", rate / plain_rate, "ratio")


def _alike(a: Sequence[int], b: Sequence[int]) -> bool:
    # The last round of an answer may run past the limit: only what both have counts.
    return list(a[:len(b)]) == list(b[:len(a)])


def _answers(runner: ModelRunner, rounds: Rounds, prompts: Sequence[Sequence[int]],
             nodes: int) -> tuple[list[list[int]], float, float]:
    """The answers, one at a time; tokens a second, prefill included; and the acceptance length."""
    rounds.answer(prompts[:1], nodes, Tally())
    if isinstance(runner.model, GraphedDecoder):  # a drafter that reads states has graphs of its own
        runner.model.warm(runner.pool, 1, runner.taps)
    tally, began = Tally(), perf_counter()
    answers = [rounds.answer([prompt], nodes, tally)[0] for prompt in prompts]
    return answers, sum(map(len, answers)) / (perf_counter() - began), tally.acceptance.length
