"""``make bench-exact PROMPTS=folder``: does speculation change an answer, on the real model, between real processes?

Each question of a set is answered plain and with the default drafter over gRPC, greedy and sampled with a seed. Every
difference is counted and shown with the margin of the plain answer at the first different token: the log probability
of its token minus that of the best other one. ``--dtype`` chooses the arithmetic. ``--kernels torch native`` asks
a target on each in turn.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import product

from rich.progress import track

from bench.asking import TimedAnswer, ask, builtin_questions, read_questions
from bench.fleet import LOGS, target_with_draft
from bench.report import Row, exit_on_error, number, write
from router_service.text.tokens import TextCodec
from slipstream.base.config import ModelSection
from slipstream.models.folder import resolve
from slipstream.protocol.requests import Backend, Sampling


def modes(codec: TextCodec) -> dict[str, Sampling]:
    stops = tuple(codec.stop_token_ids)
    return {"greedy": Sampling(stop_token_ids=stops),
            "T=0.8 top_p=0.95 seed=7": Sampling(temperature=0.8, top_p=0.95, seed=7, stop_token_ids=stops)}


async def run(sets: Mapping[str, Sequence[str]], dtype: str, max_tokens: int, kernels: Sequence[str]) -> list[Row]:
    """Ask all; a row for each sampling, set and kind of kernels."""
    codec = TextCodec(resolve(ModelSection().path))
    rows: list[Row] = []
    async with AsyncExitStack() as stack:
        # The policy always speculates, so that every answer tests it.
        pairs = [await stack.enter_async_context(target_with_draft(f"exact-{mode}", LOGS, (
            f"model.dtype={dtype}", f"model.kernels={mode}", "target.policy.always=true"))) for mode in kernels]
        for (name, sampling), (set_, questions) in product(modes(codec).items(), sets.items()):
            answers: list[list[tuple[TimedAnswer, TimedAnswer]]] = [[] for _ in pairs]
            for question in track(questions, description=f"{name}, {set_}"):
                prompt = codec.chat([{"role": "user", "content": question}])
                for services, asked in zip(pairs, answers, strict=True):
                    asked.append(await ask_both(services.clients[0], prompt, sampling, max_tokens))
            for mode, asked in zip(kernels, answers, strict=True):
                rows.append(row(name, dtype, mode, set_, asked))
                for index, (plain, drafted) in enumerate(asked):
                    if plain.tokens != drafted.tokens:
                        print(f"{name}, kernels {mode}, {set_}, question {index}: "
                              f"{describe_difference(plain, drafted)}")
    return rows


async def ask_both(backend: Backend, prompt: list[int], sampling: Sampling,
                   max_tokens: int) -> tuple[TimedAnswer, TimedAnswer]:
    """Ask plain and drafted in the same way. Log probabilities make a step slower, so where the two differ, one more
    plain answer is asked for with them."""
    plain, drafted = [await ask(backend, prompt, sampling, max_tokens, speculate) for speculate in (False, True)]
    if plain.tokens != drafted.tokens:
        with_logprobs = await ask(backend, prompt, sampling, max_tokens, False, top_logprobs=2)
        plain = replace(plain, logprobs=with_logprobs.logprobs)
    return plain, drafted


def row(name: str, dtype: str, kernels: str, set_name: str, answers: list[tuple[TimedAnswer, TimedAnswer]]) -> Row:
    drafted = [d for _, d in answers]
    return {"sampling": name, "dtype": dtype, "kernels": kernels, "set": set_name, "answers": len(answers),
            "equal": sum(p.tokens == d.tokens for p, d in answers),
            "different": sum(p.tokens != d.tokens for p, d in answers),
            "tokens": sum(len(d.tokens) for d in drafted), "from_drafts": sum(d.accepted for d in drafted),
            "acceptance_length": sum(len(d.tokens) for d in drafted) / max(1, sum(d.rounds for d in drafted))}


def describe_difference(plain: TimedAnswer, drafted: TimedAnswer) -> str:
    """Where two answers first differ, and by how much plain decoding preferred its token there."""
    shared = min(len(plain.tokens), len(drafted.tokens))
    at = next((i for i in range(shared) if plain.tokens[i] != drafted.tokens[i]), shared)
    if at >= len(plain.logprobs):
        return f"one ends at token {at}, the other goes on"
    chosen, other = plain.logprobs[at]
    return f"they part at token {at}, where the margin is {chosen - other:.5f} (log probability)"


@exit_on_error()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", help="folder of JSONL sets; without it our own dozen is asked")
    parser.add_argument("--set", default="mt_bench", help="which set of the folder")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--dtype", default=ModelSection().dtype)
    parser.add_argument("--kernels", nargs="+", choices=("auto", "torch", "native"), default=["auto"],
                        help="model.kernels, in turn")
    arguments = parser.parse_args()
    sets = builtin_questions() if not arguments.prompts else {
        arguments.set: read_questions(arguments.prompts, arguments.set, arguments.count)}
    rows = asyncio.run(run(sets, arguments.dtype, arguments.max_tokens, arguments.kernels))
    write("exact", rows, "bench-exact: speculation as configured by default, over gRPC, against plain decoding")
    print(f"{sum(number(row, 'different') for row in rows):.0f} answers differ")


if __name__ == "__main__":
    main()
