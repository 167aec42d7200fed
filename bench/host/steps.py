"""``make bench-steps``: milliseconds of a step by its rows and threads, what a plain step consists of, and steps of
several answers, each with a context of its own.

Kernels side by side: those of our own in bfloat16 (``native``) and with int8 weights (``int8``), and torch's operations
(``torch``), in turn, so that a slow moment hurts all alike; medians and the fastest. *Floor* is the time in which the
machine reads all weights once, at the rate of a sum over memory. *Products* are those of all layers, *attention* what
stands behind the same context; *rest* is what remains of a step: norms, rotary positions, KV writes, dispatch.
``GOMP_SPINCOUNT`` rules torch's threads alone.
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

from bench.gpu.shapes import read_bytes
from bench.inputs import chains
from bench.memory import Memory, rate
from bench.report import Row, write
from slipstream.base.config import ModelSection
from slipstream.choosing.sampling import GREEDY
from slipstream.engine.attention import TorchAttention
from slipstream.engine.batch import ForwardBatch
from slipstream.engine.decoder import Decoder
from slipstream.engine.kv import RUN
from slipstream.engine.loading import load_model
from slipstream.engine.native.decoder import NativeDecoder
from slipstream.engine.native.program import ATTEND, PRODUCT
from slipstream.engine.runner import ModelRunner
from slipstream.models.folder import resolve

ROWS = (1, 2, 4, 8, 16, 32, 64)
CONTEXT = 256
ANSWERS, CONTEXTS = (1, 4, 16), (256, 1024)  # of several answers

Part = Callable[[], object]


def batch_of(rows: int) -> ForwardBatch:
    return chains([np.arange(CONTEXT + rows)], rows).build()


def of_answers(count: int, context: int) -> ForwardBatch:
    """A plain step of so many answers. Their runs of slots alternate in memory, as those of answers that decode
    together."""
    runs = -(-(context + 1) // RUN)
    slots = np.arange(runs * count * RUN).reshape(runs, count, RUN).swapaxes(0, 1).reshape(count, -1)
    return chains(slots[:, : context + 1], 1).build()


def chosen(runner: ModelRunner, batch: ForwardBatch) -> object:
    """A whole step."""
    logits, best = runner.scored(batch, GREEDY)
    return logits.argmax(-1).tolist() if best is None else best


def step(runner: ModelRunner, rows: int) -> object:
    return chosen(runner, batch_of(rows))


def attention(runner: ModelRunner, batch: ForwardBatch) -> Part:
    """That of all layers."""
    model = runner.model
    if isinstance(model, NativeDecoder):
        program, frame = model.listed(batch.num_rows, ()).program.only(ATTEND), model.frame(batch, runner.pool)
        return lambda: program.run(frame)
    attend = TorchAttention(model.config, model.dtype).plan(batch)
    q = torch.randn(batch.num_rows, model.config.num_heads, model.config.head_dim).to(model.dtype)
    return lambda: [attend(q, kv) for kv in runner.pool.kv]


def parts_of_a_plain_step(runner: ModelRunner) -> dict[str, Part]:
    """What is timed besides whole steps."""
    model = runner.model
    if isinstance(model, NativeDecoder):
        program, frame = model.listed(1, ()).program, model.frame(batch_of(1), runner.pool)
        state = torch.randn(1, model.config.hidden_size).to(model.dtype)
        products = program.only(PRODUCT)
        return {"products": lambda: products.run(frame), "head": lambda: model.logits(state),
                "attention": attention(runner, batch_of(1))}
    assert isinstance(model, Decoder)
    linears = [(linear, torch.randn(1, linear.in_features).to(model.dtype)) for linear in model.linears()]
    return {"products": lambda: [linear(x) for linear, x in linears[:-1]],
            "head": lambda: linears[-1][0](linears[-1][1]), "attention": attention(runner, batch_of(1))}


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


def loaded(kernels: str, slots: int) -> ModelRunner:
    how = ModelSection(quantize="int8") if kernels == "int8" else ModelSection(kernels=kernels)
    runner = ModelRunner(load_model(resolve(how.path), how), slots)
    runner.pool.kv.zero_()
    return runner


def run(threads: list[int], kinds: list[str], repeats: int) -> tuple[list[Row], list[Row]]:
    """Steps by rows, and the parts of a plain one, for each number of threads and both kernels."""
    by_rows: list[Row] = []
    split: list[Row] = []
    memory = Memory()
    for count in track(threads, description="threads"):
        torch.set_num_threads(count)  # the kernels of our own have as many as torch when they are loaded
        runners = {kind: loaded(kind, CONTEXT + max(ROWS)) for kind in kinds}
        parts: dict[str, Part] = {"sum": memory.read}
        for kind, runner in runners.items():
            parts |= {f"{kind} {rows}": partial(step, runner, rows) for rows in ROWS}
            parts |= {f"{kind} {name}": part for name, part in parts_of_a_plain_step(runner).items()}
        found = timed(parts, repeats)
        for kind in kinds:
            for rows in ROWS:
                median, least = found[f"{kind} {rows}"]
                by_rows.append({"kernels": kind, "threads": count, "rows": rows, "ms": 1e3 * median,
                                "least_ms": 1e3 * least, "against_one": median / found[f"{kind} 1"][0]})
            model = runners[kind].model
            read = read_bytes(model.config, 1 if kind == "int8" else model.dtype.itemsize, 0)
            split.append(consists_of(kind, count, found, read))
    return by_rows, split


def side_by_side(threads: int, kinds: list[str], repeats: int) -> list[Row]:
    """Plain steps of several answers behind contexts of several lengths, and the attention in them."""
    torch.set_num_threads(threads)
    runners = {kind: loaded(kind, max(ANSWERS) * (RUN + max(CONTEXTS))) for kind in kinds}
    rows: list[Row] = []
    for context in track(CONTEXTS, description="contexts"):
        keys = [(kind, answers) for kind in kinds for answers in ANSWERS]
        batches = {answers: of_answers(answers, context) for answers in ANSWERS}
        parts: dict[str, Part] = {f"{kind} {answers}": partial(chosen, runners[kind], batches[answers])
                                  for kind, answers in keys}
        parts |= {f"{kind} {answers} attention": attention(runners[kind], batches[answers]) for kind, answers in keys}
        found = timed(parts, repeats)
        rows += [{"kernels": kind, "threads": threads, "answers": answers, "context": context,
                  "ms": 1e3 * found[f"{kind} {answers}"][0],
                  "attention_ms": 1e3 * found[f"{kind} {answers} attention"][0]} for kind, answers in keys]
    return rows


def consists_of(kind: str, threads: int, found: dict[str, tuple[float, float]], read: float) -> Row:
    median = {name.removeprefix(f"{kind} "): taken[0] for name, taken in found.items() if name.startswith(f"{kind} ")}
    gb_s = rate(found["sum"][1])
    known = sum(median[name] for name in ("products", "head", "attention"))
    return {"kernels": kind, "threads": threads, "step_ms": 1e3 * median["1"], "floor_ms": read / gb_s / 1e6,
            "memory_gb_s": gb_s, "products_ms": 1e3 * median["products"], "head_ms": 1e3 * median["head"],
            "attention_ms": 1e3 * median["attention"], "rest_ms": 1e3 * (median["1"] - known)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.host.steps", description=__doc__)
    parser.add_argument("--threads", default="1,2", help="numbers of threads")
    parser.add_argument("--kernels", default="native,int8,torch", help="which to time, in turn")
    parser.add_argument("--repeats", type=int, default=20)
    given = parser.parse_args()
    counts, kinds = [int(count) for count in given.threads.split(",")], given.kernels.split(",")
    by_rows, split = run(counts, kinds, given.repeats)
    write("steps", by_rows, f"a step behind {CONTEXT} tokens")
    write("plain_step", split, "what a plain step consists of, medians")
    together = side_by_side(max(counts), kinds, given.repeats)
    write("steps_of_answers", together, "a plain step of several answers, medians")


if __name__ == "__main__":
    main()
