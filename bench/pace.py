"""Stages ``decode``, ``fp8``, ``head`` and ``choose`` of ``make gpu``: steps of an 8B model and its head, and choosing.

Rules:
1. A time is what a service would see: from the host's lists to numbers on the host again.
2. Beside it stands the time in which the device computed: the difference is what the device waits for the host.
3. The roof of a step is the time of a copy of the bytes that it must read.

It knows nothing about whether results are right, but for ``choose`` and products in 8 bits, compared with the CPU's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from bench.shapes import (
    LLAMA_8B,
    TINY,
    config_of,
    decoder_shapes,
    head_bytes,
    random_head,
    random_tensors,
    read_bytes,
)
from bench.stage import Finding, Given, copy_rate, device_work, free, seconds
from slipstream.drafting.heads.eagle import EagleNetwork
from slipstream.drafting.network import run_network
from slipstream.engine.backend import Attention
from slipstream.engine.batch import BatchBuilder
from slipstream.engine.decoder import Decoder
from slipstream.engine.fp8 import multiplied, rounded, specified, with_fp8
from slipstream.engine.kv import KVPool
from slipstream.engine.model import CausalModel
from slipstream.engine.ops.fused import operations_for
from slipstream.engine.sampling import ChoiceRows, choose, rank
from slipstream.protocol.messages import Sampling

ROWS = (1, 2, 4, 8, 16, 32, 64)
SESSIONS = (8, 32, 64)
CONTEXT, LONG, DEEP = 256, 4096, 1024
RATIOS = {8: "<= 1.03", 16: "<= 1.05", 32: "<= 1.08", 64: "<= 1.15"}
RATES = {8: "1210 modelled on H100", 32: "4111 modelled on H100", 64: "6823 modelled on H100"}
SAMPLINGS = {"greedy": Sampling(), "T = 1": Sampling(temperature=1.0, seed=7),
             "T = 0.7, top-p 0.9": Sampling(temperature=0.7, top_p=0.9, seed=7)}
PRODUCTS = (("qkv", 6144, 4096), ("gate and up", 28672, 4096), ("down", 4096, 14336))  # of an 8B Llama
FP8_LIMIT = 5e-2  # sums of a GPU's fp8 are rounded on the way
STEEPNESS = 1.3  # of the fall from the likeliest token to the next

Step = Callable[[], object]


class Stepper:
    """A model with random KV, and steps behind it."""

    __slots__ = ("_model", "_pool")

    def __init__(self, model: CausalModel, slots: int) -> None:
        config = model.config
        self._model = model
        self._pool = KVPool(config.num_layers, slots, config.num_kv_heads, config.head_dim, model.dtype, model.device)
        self._pool.kv.normal_()

    def tree(self, rows: int, context: int) -> Step:
        """A chain of so many rows behind a context; one row is a plain step."""
        own = range(context, context + rows)
        words = [(2 << i) - 1 for i in range(rows)] if rows > 1 else None
        return partial(self._run, [(own, np.arange(context), words)])

    def sessions(self, count: int, context: int) -> Step:
        """A plain step of so many sessions."""
        first = count * context
        return partial(self._run, [(range(first + i, first + i + 1), np.arange(i * context, (i + 1) * context), None)
                                   for i in range(count)])

    @torch.inference_mode()
    def _run(self, segments: list[tuple[range, np.ndarray, list[int] | None]]) -> list[int]:
        builder = BatchBuilder()
        for own, context, words in segments:
            builder.add([1] * len(own), range(len(context), len(context) + len(own)), list(own), context, words,
                        len(own) if words else 0)
        hidden, _ = self._model.forward(builder.build(self._model.device), self._pool)
        best: list[int] = self._model.logits(hidden).argmax(-1).tolist()
        return best


def decoder(given: Given, attention: Attention | None = None) -> Decoder:
    """An 8B Llama's, with random weights."""
    config = config_of(LLAMA_8B if given.full else TINY)
    return Decoder(config, random_tensors(decoder_shapes(config), torch.bfloat16, given.device),
                   operations_for("auto", config, torch.bfloat16, given.device), attention)


def steps_of(model: CausalModel, given: Given, expected: str = ">= 0.80", layer_itemsize: int = 0,
             spare_slots: int = 0) -> Iterator[Finding]:
    """Plain steps, trees by plain steps, and steps of several sessions. ``layer_itemsize``: see ``read_bytes``."""
    deep, rate = DEEP if given.full else 32, copy_rate(given)
    stepper = Stepper(model, max(SESSIONS) * (deep + 1) + LONG + spare_slots)
    for context in (CONTEXT, LONG):
        roof_s = read_bytes(model.config, 2, context, layer_itemsize) / rate
        yield from step_findings(f"1 row behind {context}", stepper.tree(1, context), given, roof_s, expected)
    plain_s = seconds(stepper.tree(1, CONTEXT), given.device, given.repeats)
    for rows in ROWS[1:]:
        taken_s = seconds(stepper.tree(rows, CONTEXT), given.device, given.repeats)
        yield Finding(f"{rows} rows by 1 row", taken_s / plain_s, "ratio", RATIOS.get(rows, ""))
    yield from _work("64 rows", stepper.tree(64, CONTEXT), given)
    for count in SESSIONS:
        taken_s = seconds(stepper.sessions(count, deep), given.device, given.repeats)
        yield Finding(f"{count} sessions behind {deep}", count / taken_s, "tokens/s", RATES.get(count, ""))
    free()


def decode_stage(given: Given) -> Iterator[Finding]:
    yield from steps_of(decoder(given), given)


def fp8_stage(given: Given) -> Iterator[Finding]:
    """Products in 8 bits against their specification, and steps of a model whose layers have them."""
    for name, rows, columns in PRODUCTS if given.full else (("all", 48, 32),):
        dice = torch.Generator(given.device).manual_seed(0)
        weight = rounded(torch.randn(rows, columns, dtype=torch.bfloat16, device=given.device, generator=dice))
        for count in (1, 64):
            x = rounded(torch.randn(count, columns, dtype=torch.bfloat16, device=given.device, generator=dice))
            right = specified(*(part.cpu() for part in (*x, *weight))).float()
            off = (multiplied(*x, *weight).cpu().float() - right).abs() / right.square().mean(1, keepdim=True).sqrt()
            yield Finding(f"{name}, {count} rows: largest error", float(off.nan_to_num_(nan=torch.inf).max()), "rms",
                          f"<= {FP8_LIMIT:g}")
    model = decoder(given)
    with_fp8(model)
    free()
    yield from steps_of(model, given, ">= 0.70", layer_itemsize=1)


def step_findings(what: str, step: Step, given: Given, roof_s: float, expected: str) -> Iterator[Finding]:
    taken_s = seconds(step, given.device, given.repeats)
    yield Finding(what, 1e3 * taken_s, "ms")
    yield Finding(f"{what}: of the copy roof", roof_s / taken_s, "share", expected)
    yield from _work(what, step, given, roof_s)


def _work(what: str, step: Step, given: Given, roof_s: float = 0.0) -> Iterator[Finding]:
    busy_s, launches = device_work(step, given.device)
    if launches:
        yield Finding(f"{what}: device computes", 1e3 * busy_s, "ms")
        yield Finding(f"{what}: kernels and copies", launches)
        if roof_s:
            yield Finding(f"{what}: of the copy roof without the host", roof_s / busy_s, "share")


def head_stage(given: Given) -> Iterator[Finding]:
    config = config_of(LLAMA_8B if given.full else TINY)
    draft_vocab = 32_000 if given.full else 64
    rate = copy_rate(given)
    head = random_head(config, draft_vocab, torch.bfloat16, given.device)
    network = EagleNetwork(head, "bfloat16", given.device, CONTEXT + 64,
                           ops=operations_for("auto", head.config, torch.bfloat16, given.device))
    run_network(network, CONTEXT)  # writes the KV of the context
    roof_s = head_bytes(config, draft_vocab, 2) / rate
    yield Finding("roof of a step", 1e3 * roof_s, "ms")
    for rows in (1, 4, 10):
        step = partial(_head_step, network, rows)
        yield from step_findings(f"a step of {rows} rows, ranked", step, given, roof_s,
                         "<= 0.36 ms on H100, 0.27 on H200" if rows == 10 else "")
    free()


def _head_step(network: EagleNetwork, rows: int) -> list[list[int]]:
    builder, own = BatchBuilder(), range(CONTEXT, CONTEXT + rows)
    words = [1 << i for i in range(rows)] if rows > 1 else None
    builder.add([1] * rows, [CONTEXT] * rows, list(own), np.arange(CONTEXT), words, rows if words else 0)
    states = torch.ones(rows, network.hidden_size, dtype=torch.bfloat16, device=network.device)
    logits = network.forward(builder.build(network.device, states)).logits
    k = min(10, logits.shape[1])
    ids: list[list[int]] = rank(logits, _choices(Sampling(), rows), k, network.vocabulary)[0].tolist()
    return ids


def choose_stage(given: Given) -> Iterator[Finding]:
    vocab = LLAMA_8B["vocab_size"] if given.full else 4096
    assert isinstance(vocab, int)
    dice = torch.Generator().manual_seed(0)
    ranks = torch.stack([torch.randperm(vocab, generator=dice) for _ in range(max(ROWS))])
    logits = -STEEPNESS * torch.log1p(ranks.float()) + 0.1 * torch.randn(ranks.shape, generator=dice)
    placed = logits.to(given.device)
    for name, sampling in SAMPLINGS.items():
        for rows in (1, 9, 64):
            choices = [_choices(sampling, rows)]
            taken_s = seconds(partial(choose, placed[:rows], choices), given.device, given.repeats)
            yield Finding(f"{name}, {rows} rows of {vocab} tokens", 1e6 * taken_s, "us")
        right, found = choose(logits, choices), choose(placed, choices)
        yield Finding(f"{name}: same choice as on a CPU", sum(a == b for a, b in zip(right, found, strict=True)),
                      f"of {len(right)}", str(len(right)))


def _choices(sampling: Sampling, rows: int) -> ChoiceRows:
    return ChoiceRows(sampling, range(rows), range(CONTEXT, CONTEXT + rows), range(rows), None, [()] * rows)
