"""``make bench-steps``: milliseconds of a step by its rows and threads, and what a plain step consists of.

*Floor* is the time in which the machine reads all weights once, at the rate of a sum over memory. *Products* are those
of all layers and the head on rows of their own, *attention* the calls of all layers behind the same context; *rest* is
what remains of a step: norms, rotary positions, KV writes, dispatch. All in turn, so that a slow moment hurts all
alike; medians and the fastest. Of torch's operations (``model.kernels: torch``).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from rich.progress import track

from bench.report import Row, write
from slipstream.config import ModelSection
from slipstream.engine.backend import TorchAttention
from slipstream.engine.batch import BatchBuilder, ForwardBatch
from slipstream.engine.decoder import Decoder
from slipstream.engine.runner import ModelRunner
from slipstream.engine.weights import load_model
from slipstream.errors import ModelError
from slipstream.models import resolve

ROWS = (1, 2, 4, 8, 16, 32, 64)
CONTEXT = 256
SUMMED = 1 << 26  # float32 numbers: more than caches hold

Part = Callable[[], object]


def batch_of(rows: int) -> ForwardBatch:
    """A chain of so many rows behind a context."""
    builder = BatchBuilder()
    words = None if rows == 1 else [(2 << i) - 1 for i in range(rows)]
    builder.add([0] * rows, range(CONTEXT, CONTEXT + rows), range(CONTEXT, CONTEXT + rows), np.arange(CONTEXT), words,
                0 if rows == 1 else rows)
    return builder.build()


def step(runner: ModelRunner, rows: int) -> object:
    return runner.forward(batch_of(rows)).argmax(-1).tolist()


def parts_of_a_plain_step(decoder: Decoder, runner: ModelRunner) -> dict[str, Part]:
    """What is timed besides whole steps."""
    linears = [(linear, torch.randn(1, linear.in_features).to(decoder.dtype)) for linear in decoder.linears()]
    attend = TorchAttention(decoder.config, decoder.dtype).plan(batch_of(1))
    q = torch.randn(1, decoder.config.num_heads, decoder.config.head_dim).to(decoder.dtype)
    memory = torch.zeros(SUMMED)
    return {"sum": memory.sum, "products": lambda: [linear(x) for linear, x in linears[:-1]],
            "head": lambda: linears[-1][0](linears[-1][1]),
            "attention": lambda: [attend(q, kv) for kv in runner.pool.kv]}


@torch.inference_mode()
def timed(parts: dict[str, Part], repeats: int) -> dict[str, tuple[float, float]]:
    """Seconds, median and least, of each; in turn, after a warm-up."""
    times: dict[str, list[float]] = {name: [] for name in parts}
    for run in range(repeats + 2):
        for name, part in parts.items():
            began = time.perf_counter()
            part()
            if run >= 2:
                times[name].append(time.perf_counter() - began)
    return {name: (statistics.median(taken), min(taken)) for name, taken in times.items()}


def loaded(model: str, dtype: str) -> Decoder:
    decoder = load_model(resolve(model), dtype, kernels="torch")
    if not isinstance(decoder, Decoder):
        raise ModelError("bench-steps measures the engine 'decoder' alone")
    return decoder


def bytes_read(decoder: Decoder) -> float:
    """By a plain step, of weights."""
    return sum(linear.in_features * linear.out_features * decoder.dtype.itemsize
               for linear in decoder.linears())


def run(decoder: Decoder, threads: list[int], repeats: int) -> tuple[list[Row], list[Row]]:
    """Steps by rows, and the parts of a plain one, for each number of threads."""
    runner = ModelRunner(decoder, CONTEXT + max(ROWS))
    runner.pool.kv.zero_()
    by_rows: list[Row] = []
    split: list[Row] = []
    for count in track(threads, description="threads"):
        torch.set_num_threads(count)
        found = timed({**{str(rows): partial(step, runner, rows) for rows in ROWS},
                       **parts_of_a_plain_step(decoder, runner)}, repeats)
        for rows in ROWS:
            median, least = found[str(rows)]
            by_rows.append({"threads": count, "rows": rows, "ms": 1e3 * median, "least_ms": 1e3 * least,
                            "against_one": median / found["1"][0]})
        split.append(consists_of(count, found, bytes_read(decoder)))
    return by_rows, split


def consists_of(threads: int, found: dict[str, tuple[float, float]], read: float) -> Row:
    median = {name: taken[0] for name, taken in found.items()}
    rate = 4 * SUMMED / found["sum"][1]
    known = sum(median[name] for name in ("products", "head", "attention"))
    return {"threads": threads, "step_ms": 1e3 * median["1"], "floor_ms": 1e3 * read / rate,
            "memory_gb_s": rate / 1e9, "products_ms": 1e3 * median["products"], "head_ms": 1e3 * median["head"],
            "attention_ms": 1e3 * median["attention"], "rest_ms": 1e3 * (median["1"] - known)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.steps", description=__doc__)
    parser.add_argument("--model", default=ModelSection().path, help="a name or a folder")
    parser.add_argument("--dtype", default=ModelSection().dtype)
    parser.add_argument("--threads", default="1,2", help="numbers of threads")
    parser.add_argument("--repeats", type=int, default=20)
    given = parser.parse_args()
    counts = [int(count) for count in given.threads.split(",")]
    decoder = loaded(given.model, given.dtype)
    by_rows, split = run(decoder, counts, given.repeats)
    name = given.dtype
    write("steps", by_rows, f"a step behind {CONTEXT} tokens, {name}")
    write("plain_step", split, f"what a plain step consists of, {name}, medians")


if __name__ == "__main__":
    main()
