"""Stage ``fp8`` of ``make gpu``: products in 8 bits against their specification, and steps of an 8B model with them.

It knows nothing about what 8 bits do to answers: see ``bench.quality``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bench.exactness import relative
from bench.pace import CONTEXT, LONG, RATIOS, Stepper, step_findings
from bench.shapes import LLAMA_8B, TINY, config_of, decoder_shapes, random_tensors, read_bytes
from bench.stage import Finding, Given, copy_rate, free, seconds
from slipstream.engine.decoder import Decoder
from slipstream.engine.fp8 import multiplied, rounded, specified, with_fp8
from slipstream.engine.ops.fused import operations_for

PRODUCTS = (("qkv", 6144, 4096), ("gate and up", 28672, 4096), ("down", 4096, 14336))  # of an 8B Llama
TINY_PRODUCTS = (("all", 48, 32),)
LIMIT = 5e-2  # sums of a GPU's fp8 are rounded on the way


def fp8_stage(given: Given) -> Iterator[Finding]:
    for name, rows, columns in PRODUCTS if given.full else TINY_PRODUCTS:
        yield from _product(given, name, rows, columns)
    config = config_of(LLAMA_8B if given.full else TINY)
    rate = copy_rate(given)
    model = Decoder(config, random_tensors(decoder_shapes(config), torch.bfloat16, given.device),
                    operations_for("auto", config, torch.bfloat16, given.device))
    stepper = Stepper(model, LONG + 64)
    usual_s = seconds(stepper.tree(1, CONTEXT), given.device, given.repeats)
    with_fp8(model)
    free()
    for context in (CONTEXT, LONG):
        roof_s = read_bytes(config, 2, context, layer_itemsize=1) / rate
        yield from step_findings(f"1 row behind {context}", stepper.tree(1, context), given, roof_s, ">= 0.70")
    plain_s = seconds(stepper.tree(1, CONTEXT), given.device, given.repeats)
    yield Finding("1 row by 1 row in bfloat16", plain_s / usual_s, "ratio", "about 0.6")
    for count in (8, 64):
        taken_s = seconds(stepper.tree(count, CONTEXT), given.device, given.repeats)
        yield Finding(f"{count} rows by 1 row", taken_s / plain_s, "ratio", RATIOS[count])
    free()


def _product(given: Given, name: str, rows: int, columns: int) -> Iterator[Finding]:
    dice = torch.Generator(given.device).manual_seed(0)
    weight = rounded(torch.randn(rows, columns, dtype=torch.bfloat16, device=given.device, generator=dice))
    for count in (1, 64):
        x = rounded(torch.randn(count, columns, dtype=torch.bfloat16, device=given.device, generator=dice))
        right = specified(*(part.cpu() for part in (*x, *weight)))
        error = relative(multiplied(*x, *weight).cpu().float(), right.float())
        yield Finding(f"{name}, {count} rows: largest error", float(error.max()), "rms", f"<= {LIMIT:g}")
