"""``python -m bench.compiled``: milliseconds of one forward, eager against compiled, and the seconds of compiling.

Eager and compiled run in turn on the same rows behind the same context, so that a slow moment of the machine hurts
both alike; medians are shown. The head is an EAGLE-3 head's folder or name; without one only the model is measured.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from rich.progress import track

from bench.report import Row, write
from slipstream.base.config import ModelSection
from slipstream.drafting.heads.eagle import EagleNetwork
from slipstream.drafting.heads.eagle_checkpoint import read_head
from slipstream.drafting.network import run_network
from slipstream.engine.batch import BatchBuilder
from slipstream.engine.compiled import compiled
from slipstream.engine.halves import EAGER
from slipstream.engine.kv import KVPool
from slipstream.engine.model import CausalModel, device_of
from slipstream.engine.weights import load_model
from slipstream.models.folder import resolve

ROWS = (1, 4, 8)
CONTEXT = 256

Forward = Callable[[int], object]  # a number of rows -> whatever a forward gives


def medians(eager: Forward, fast: Forward, rows: int, repeats: int) -> tuple[float, float]:
    """Seconds of each, run in turn."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for forward, taken in zip((eager, fast), times, strict=True):
            began = time.perf_counter()
            forward(rows)
            taken.append(time.perf_counter() - began)
    return statistics.median(times[0]), statistics.median(times[1])


def of_model(model: CausalModel) -> Forward:
    """A tree of so many rows behind a context, and its logits."""
    config = model.config
    pool = KVPool(config.num_layers, CONTEXT + max(ROWS), config.num_kv_heads, config.head_dim, model.dtype,
                  model.device)
    pool.kv.zero_()
    context = np.arange(CONTEXT)

    def forward(rows: int) -> float:
        builder = BatchBuilder()
        builder.add([0] * rows, range(CONTEXT, CONTEXT + rows), range(CONTEXT, CONTEXT + rows), context,
                    [(2 << i) - 1 for i in range(rows)], rows)
        return float(model.logits(model.forward(builder.build(model.device), pool)[0])[0, 0])

    return forward


def pairs(model: str, head: str, dtype: str, device: str) -> list[tuple[str, Forward, Forward, float]]:
    """What is compared: name, eager, compiled, and the seconds that compiling took."""
    began = time.perf_counter()
    fast = load_model(resolve(model), dtype, device, compile_layers=True)
    found = [(model, of_model(load_model(resolve(model), dtype, device)), of_model(fast), time.perf_counter() - began)]
    if head:
        weights = read_head(resolve(head), resolve(model))
        eager = EagleNetwork(weights, dtype, device_of(device), 64, halves=EAGER)
        began = time.perf_counter()
        quick = compiled(lambda halves: EagleNetwork(weights, dtype, device_of(device), 64, halves=halves), run_network,
                         "head")
        found.append((head, lambda rows: run_network(eager, rows), lambda rows: run_network(quick, rows),
                      time.perf_counter() - began))
    return found


def run(model: str, head: str, dtype: str, device: str, repeats: int) -> list[Row]:
    """The rows of the table."""
    rows: list[Row] = []
    for name, eager, fast, seconds in pairs(model, head, dtype, device):
        for count in track(ROWS, description=name):
            slow, quick = medians(eager, fast, count, repeats)
            rows.append({"what": name, "rows": count, "eager_ms": 1e3 * slow, "compiled_ms": 1e3 * quick,
                         "gain": slow / quick, "load_and_compile_s": seconds})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.compiled", description=__doc__)
    parser.add_argument("--model", default=ModelSection().path, help="a name or a folder")
    parser.add_argument("--head", default="", help="an EAGLE-3 head for it: a name or a folder")
    parser.add_argument("--dtype", default=ModelSection().dtype)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=0, help="0: as torch has them")
    parser.add_argument("--repeats", type=int, default=30)
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    write("compiled", run(given.model, given.head, given.dtype, given.device, given.repeats),
          f"torch.compile, {given.dtype} on {given.device}, {torch.get_num_threads()} threads")


if __name__ == "__main__":
    main()
