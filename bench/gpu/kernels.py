"""Stages ``kernel`` and ``equal`` of ``make gpu``: is attention's kernel right for a shape of heads, and is a captured
step the step that it was captured from?

It knows nothing about speed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from bench.gpu.pace import decoder_of
from bench.gpu.shapes import LLAMA_8B, config_of
from bench.gpu.stage import Finding, Given, capture_of, paged, pool_for
from bench.inputs import chains
from slipstream.engine.attention import disagreement, farthest
from slipstream.engine.graphs import TRIAL_LIMIT, GraphedDecoder

FEW_LAYERS, CONTEXT = 2, 100
STEPS = ((1, 1), (9, 1), (64, 1), (8, 8), (72, 8), (64, 64))  # rows, sessions


def kernel_stage(given: Given) -> Iterator[Finding]:
    """``given.shape``: numbers of a head x query heads of a KV head."""
    size, group = map(int, given.shape.split("x"))
    config = replace(config_of(LLAMA_8B), head_dim=size, num_kv_heads=2, num_heads=2 * group)
    off = disagreement(paged(given, config), config, torch.bfloat16, given.device)
    yield Finding("trial beside torch's attention", off or "the same", expected="the same")


@torch.inference_mode()
def equal_stage(given: Given) -> Iterator[Finding]:
    """A few layers of the large shape; each number of rows once, on slots in any order."""
    config = replace(given.config, num_layers=FEW_LAYERS)
    attention = paged(given, config)
    plain = decoder_of(config, given, attention)
    graphed = GraphedDecoder(plain, attention, capture_of(given))
    slots = 64 * (CONTEXT + 64)
    pool = pool_for(plain, slots + graphed.spare_slots)
    steps = STEPS[:1] if given.narrow else STEPS
    for rows, sessions in steps:
        each, order = rows // sessions, np.random.default_rng(0).permutation(slots)
        places = np.split(order[: sessions * (CONTEXT + each)], sessions)
        batch = chains(places, each).build(plain.device)
        right, _ = plain.forward(batch, pool)
        found, _ = graphed.forward(batch, pool)
        off = farthest(found, right)
        yield Finding(f"{rows} rows of {sessions} sessions: off by", off, "of a row's length", f"< {TRIAL_LIMIT}")
    yield Finding("graphs that serve", graphed.num_serving, f"of {len(steps)}")
