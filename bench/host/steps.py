"""``make bench-steps``: milliseconds of a step by its answers, rows, context and threads, and what a plain step of one
answer consists of.

Kernels side by side: those of our own in bfloat16 (``native``) and with int8 weights (``int8``), and torch's operations
(``torch``), in turn, so that a slow moment hurts all alike; medians and the fastest. *Floor* is the time in which the
machine reads all weights once, at the rate of a sum over memory; *drawn* is a step at temperature 1. *Products* and
*attention* are those of all layers; *rest* is what remains of a step: norms, rotary positions, KV writes, dispatch.
``GOMP_SPINCOUNT`` affects only torch's threads.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import track

from bench.clock import Memory, Part, gb_per_s, timed
from bench.gpu.shapes import read_bytes
from bench.inputs import FIRST, answer_slots, chains, choice_rows
from bench.report import Row, write
from slipstream.base.config import ModelSection
from slipstream.choosing.sampling import GREEDY, Draws, choose
from slipstream.engine.attention import TorchAttention
from slipstream.engine.batch import ForwardBatch
from slipstream.engine.decoder import Decoder
from slipstream.engine.loading import load_model
from slipstream.engine.native.decoder import NativeDecoder, Taps
from slipstream.engine.native.program import ATTEND, PRODUCT
from slipstream.engine.runner import ModelRunner
from slipstream.models.folder import resolve
from slipstream.protocol.requests import Sampling

# (answers, rows of each, tokens that each has)
PLAIN = (1, 1, 256)
STEPS = (*((1, rows, 256) for rows in (1, 2, 4, 8, 16, 32, 64)), (4, 1, 256), (16, 1, 256),
         *((answers, 1, 1024) for answers in (1, 4, 16)), (1, 8, 1024), (1, 8, 4096))
SLOTS = 1 + max(int(answer_slots(*cell).max()) for cell in STEPS)


def step(runner: ModelRunner, places: NDArray[np.int64], rows: int, heat: float = 0.0) -> list[int]:
    """Compute a whole step, greedy or at a temperature. Returns the chosen tokens."""
    batch = chains(places, rows).build()
    count = len(batch.host.logit_rows)
    draws = Draws([Sampling(temperature=heat)] * count, range(FIRST, FIRST + count), [1] * count) if heat else GREEDY
    logits, best = runner.logits_and_best(batch, draws)
    return best or choose(logits, choice_rows(Sampling(temperature=heat), count), None, runner.race)


def attention(runner: ModelRunner, batch: ForwardBatch) -> Part:
    """The attention of all layers."""
    model = runner.model
    if isinstance(model, NativeDecoder):
        program, frame = model.prepared(batch.num_rows, Taps(())).program.only(ATTEND), model.frame(batch, runner.pool)
        return lambda: program.run(frame)
    attend = TorchAttention(model.config, model.dtype).plan(batch)
    q = torch.randn(batch.num_rows, model.config.num_heads, model.config.head_dim).to(model.dtype)
    return lambda: [attend(q, kv) for kv in runner.pool.kv]


def products_and_head(runner: ModelRunner) -> tuple[Part, Part]:
    """The products of all layers, and the head, of a plain step."""
    model = runner.model
    if isinstance(model, NativeDecoder):
        batch, state = chains(answer_slots(*PLAIN), 1).build(), torch.randn(1, model.config.hidden_size).to(model.dtype)
        return partial(model.prepared(1, Taps(())).program.only(PRODUCT).run, model.frame(batch, runner.pool)), partial(
            model.logits, state)
    assert isinstance(model, Decoder)
    linears = [(linear, torch.randn(1, linear.in_features).to(model.dtype)) for linear in model.linears()]
    return lambda: [linear(x) for linear, x in linears[:-1]], lambda: linears[-1][0](linears[-1][1])


def loaded(kernels: str, slots: int) -> ModelRunner:
    how = ModelSection(quantize="int8") if kernels == "int8" else ModelSection(kernels=kernels)
    runner = ModelRunner(load_model(resolve(how.path), how), slots)
    runner.pool.kv.zero_()
    return runner


def run(threads: list[int], kinds: list[str], repeats: int) -> tuple[list[Row], list[Row]]:
    """Steps, and what a plain one consists of, for each number of threads and all kernels."""
    steps, split, memory = list[Row](), list[Row](), Memory()
    for count in track(threads, description="threads"):
        torch.set_num_threads(count)  # the kernels of our own have as many as torch when they are loaded
        runners = {kind: loaded(kind, SLOTS) for kind in kinds}
        parts: dict[tuple[object, ...], Part] = {("sum",): memory.read}
        for kind, runner in runners.items():
            for cell in STEPS:
                parts[kind, cell] = partial(step, runner, answer_slots(*cell), cell[1])
                parts[kind, cell, "drawn"] = partial(step, runner, answer_slots(*cell), cell[1], 1.0)
        for kind, runner in runners.items():
            parts |= {(kind, cell, "attention"): attention(runner, chains(answer_slots(*cell), cell[1]).build())
                      for cell in STEPS}
            parts[kind, "products"], parts[kind, "head"] = products_and_head(runner)
        with torch.inference_mode():
            took = timed(parts, repeats)
        ms = {part: 1e3 * statistics.median(times) for part, times in took.items()}
        gb_s = gb_per_s(min(took["sum",]))
        for kind, runner in runners.items():
            of: Row = {"kernels": kind, "threads": count}
            steps += [{**of, "answers": cell[0], "rows": cell[1], "context": cell[2], "ms": ms[kind, cell],
                       "least_ms": 1e3 * min(took[kind, cell]), "drawn_ms": ms[kind, cell, "drawn"],
                       "attention_ms": ms[kind, cell, "attention"]}
                      for cell in STEPS]
            read = read_bytes(runner.model.config, 1 if kind == "int8" else runner.model.dtype.itemsize, 0)
            known = {"products_ms": ms[kind, "products"], "head_ms": ms[kind, "head"],
                     "attention_ms": ms[kind, PLAIN, "attention"]}
            split.append({**of, "step_ms": ms[kind, PLAIN], "floor_ms": read / gb_s / 1e6, "memory_gb_s": gb_s, **known,
                          "rest_ms": ms[kind, PLAIN] - sum(known.values())})
    return steps, split


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.host.steps", description=__doc__)
    parser.add_argument("--threads", default="1,2", help="numbers of threads")
    parser.add_argument("--kernels", default="native,int8,torch", help="which to time, in turn")
    parser.add_argument("--repeats", type=int, default=20)
    given = parser.parse_args()
    steps, split = run([*map(int, given.threads.split(","))], given.kernels.split(","), given.repeats)
    write("steps", steps, "steps, medians")
    write("plain_step", split, "what a plain step consists of, medians")


if __name__ == "__main__":
    main()
