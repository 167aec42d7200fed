"""Stage ``profile`` of ``make gpu``: what does a captured step of an 8B model spend its time on?

Rules:
1. The device's table is by kernel, with the most time first; the host's is a line of parts, each until it returns.
2. What waits for the device where nothing should is counted (``torch.cuda.set_sync_debug_mode``).
3. The last part, the copy of the result, is where the host has to wait.

On a CPU there are no kernels to list, only the line of parts.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from bench.clock import Part, timed
from bench.gpu.pace import device_work, graphed
from bench.gpu.stage import MAX_KERNELS, Finding, StageOptions, median_s, pool_for
from bench.inputs import answer_slots, chains
from slipstream.engine.attention import plan_pages
from slipstream.engine.batch import ForwardBatch

CONTEXT = 1024
SYNC_WARNING = "called a synchronizing"  # as torch warns; another warning, that the mode is new, comes once


def profile_stage(options: StageOptions) -> Iterator[Finding]:
    """``options.shape``: how many sessions make a plain step."""
    count, context = int(options.shape), CONTEXT if options.full else 32
    model, places = graphed(options), answer_slots(count, 1, context)
    pool = pool_for(model, int(places.max()) + 1 + model.spare_slots)

    def build(_: object) -> ForwardBatch:
        return chains(places, 1).build(model.device)

    parts = chained({"build the batch": build, "forward": lambda batch: model.forward(batch, pool)[0],
                     "head": model.logits, "argmax, and wait": lambda logits: logits.argmax(-1).tolist()})
    for name, times in timed(parts, options.repeats).items():
        yield Finding(f"host: {name}", 1e6 * statistics.median(times), "us")
    plan_s = median_s(partial(plan_pages, build(None)), torch.device("cpu"), options.repeats)
    yield Finding("host: plan of the pages, of forward", 1e6 * plan_s, "us")

    def step() -> None:
        for part in parts.values():
            part()

    yield Finding("a step", 1e6 * median_s(step, options.device, options.repeats), "us")
    if options.device.type == "cuda":
        yield from waits(parts)
        yield from device_work("a step", step, options, max_kernels=MAX_KERNELS)


def chained(parts: Mapping[str, Callable[[Any], Any]]) -> dict[str, Part]:
    """Parts of which each gets the result of the one before it."""
    result: list[Any] = [None]

    @torch.inference_mode()
    def do(part: Callable[[Any], Any]) -> None:
        result[0] = part(result[0])

    return {name: partial(do, part) for name, part in parts.items()}


def waits(parts: Mapping[str, Part]) -> Iterator[Finding]:
    """How often each part waits for the device where nothing says so."""
    for name, part in parts.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                part()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        count = sum(SYNC_WARNING in str(warning.message) for warning in caught)
        yield Finding(f"waits for the device: {name}", count, expected="1" if "wait" in name else "0")
