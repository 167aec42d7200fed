"""``python -m bench.quality``: what a cheaper arithmetic changes in answers.

Greedy texts of the model in bfloat16 are read again, at most 8 rows at a time, by the same model in float32, bfloat16,
int8 and fp8 (``model.quantize``). *Agrees* is the share of positions whose best token is the text's;
*error* is the root mean square of the difference to float32's logits.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from rich.progress import track

from bench.prompts import own, read
from bench.report import Row, write
from router_service.tokens import TextCodec
from slipstream.base.config import ModelSection
from slipstream.engine.batch import BatchBuilder
from slipstream.engine.runner import ModelRunner
from slipstream.engine.weights import load_model
from slipstream.models.folder import resolve

KINDS = {"float32": ("float32", "none"), "bfloat16": ("bfloat16", "none"),
         "int8": ("bfloat16", "int8"), "fp8": ("bfloat16", "fp8")}
ROWS = 8


class Reader:
    """One sequence on a model."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.slots = np.zeros(0, np.int64)

    def read(self, tokens: list[int]) -> torch.Tensor:
        """float32 [len, V]"""
        found = []
        for first in range(0, len(tokens), ROWS):
            some, start = tokens[first : first + ROWS], len(self.slots)
            slots, builder = self.runner.slots.alloc(len(some)), BatchBuilder()
            builder.add(some, range(start, start + len(some)), slots.tolist(), self.slots)
            found.append(self.runner.forward(builder.build()))
            self.slots = np.concatenate((self.slots, slots))
        return torch.cat(found)

    def close(self) -> None:
        self.runner.slots.free(self.slots)


def written(runner: ModelRunner, prompt: list[int], most: int, ends: set[int]) -> list[int]:
    """The greedy answer."""
    reader, answer = Reader(runner), list[int]()
    logits = reader.read(prompt)[-1]
    while len(answer) < most and (token := int(logits.argmax())) not in ends:
        answer.append(token)
        logits = reader.read([token])[-1]
    reader.close()
    return answer


def again(runner: ModelRunner, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Logits from which each token of the answer was, or would have been, chosen."""
    reader = Reader(runner)
    logits = reader.read([*prompt, *answer[:-1]])[len(prompt) - 1 :]
    reader.close()
    return logits


def run(model: str, prompts: list[str], most: int) -> list[Row]:
    folder = resolve(model)
    codec = TextCodec(folder)
    runners = {kind: ModelRunner(load_model(folder, dtype, quantize=how), 4096) for kind, (dtype, how) in KINDS.items()}
    same, positions = dict.fromkeys(KINDS, 0), 0
    squares: dict[str, list[float]] = {kind: [] for kind in KINDS}
    texts = dict.fromkeys(KINDS, 0)
    for text in track(prompts, description="prompts"):
        prompt = codec.chat([{"role": "user", "content": text}])
        answer = written(runners["bfloat16"], prompt, most, set(codec.stop_token_ids))
        exact = again(runners["float32"], prompt, answer)
        positions += len(answer)
        for kind, runner in runners.items():
            logits = again(runner, prompt, answer)
            agreeing = int((logits.argmax(1) == torch.tensor(answer)).sum())
            same[kind] += agreeing
            texts[kind] += agreeing == len(answer)
            squares[kind].append(float((logits - exact).square().mean()))
    return [{"weights": kind, "prompts": len(prompts), "tokens": positions, "agrees": same[kind] / positions,
             "whole_answers": texts[kind], "error": float(np.mean(squares[kind])) ** 0.5} for kind in KINDS]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.quality", description=__doc__)
    parser.add_argument("--model", default=ModelSection().path, help="a name or a folder")
    parser.add_argument("--prompts", help="folder of JSONL sets; without it our own dozen is read")
    parser.add_argument("--set", default="mt_bench", help="which set of the folder")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=64)
    given = parser.parse_args()
    questions = read(given.prompts, given.set, given.count) if given.prompts else own()
    write("quality", run(given.model, [question.text for question in questions], given.max_tokens),
          "answers read again by cheaper weights")


if __name__ == "__main__":
    main()
