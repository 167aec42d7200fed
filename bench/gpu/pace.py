"""Stages ``choose``, ``graphs``, ``fp8`` and ``tree`` of ``make gpu``: how long does choosing take, a step of an 8B
model, a tree of its head?

Rules:
1. A time is what a service would see: from the host's lists to numbers on the host again.
2. Next to it is the time in which the device computed: in the rest, the device waits for the host.
3. The roof of a step is the time of a copy of the bytes that it must read.
4. Without FlashInfer or Triton on a GPU their stages fail, and say why; in a rehearsal torch stands in their place.

It knows nothing about whether results are right: see ``tests/test_device.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from bench.clock import Part
from bench.gpu.shapes import LLAMA_8B, decoder_shapes, head_bytes, random_head, random_tensors, read_bytes
from bench.gpu.stage import (
    MAX_KERNELS,
    Finding,
    StageOptions,
    busy_s,
    by_kernel,
    capture_of,
    copy_rate,
    device_events,
    device_race,
    free_memory,
    median_s,
    paged_attention,
    pool_for,
    without_trial,
)
from bench.inputs import SAMPLINGS, answer_slots, chains, choice_rows, zipf_logits
from slipstream.base.config import GrowthSection
from slipstream.choosing.sampling import choose
from slipstream.drafting.graph import GraphBackend, spare_slots
from slipstream.drafting.heads.eagle import EagleNetwork
from slipstream.drafting.network import some_tokens
from slipstream.drafting.neural import NeuralDrafter
from slipstream.engine.attention import Attention
from slipstream.engine.decoder import Decoder
from slipstream.engine.fp8 import with_fp8
from slipstream.engine.graphs import GraphedDecoder
from slipstream.engine.model import CausalModel, ModelConfig
from slipstream.engine.ops.fused import operations_for, rounding_for
from slipstream.engine.ops.races import race_for, supports
from slipstream.protocol.messages import Commit, Features, Open
from slipstream.protocol.requests import Sampling

ROWS = (1, 2, 4, 8, 16, 32, 64)
SESSIONS = (8, 32, 64)
CONTEXT, LONG, DEEP = 256, 4096, 1024
RATIOS = {8: "<= 1.03", 16: "<= 1.05", 32: "<= 1.08", 64: "<= 1.15"}
RATES = {8: "1210 modelled on H100", 32: "4111 modelled on H100", 64: "6823 modelled on H100"}
TOPK, STEPS, NODES = 8, 9, 60  # of a tree; the root's own row is a step without a loop


def stepper(model: CausalModel, slots: int) -> Callable[[int, int, int], Part]:
    """Steps of a model with random KV, by number of answers, rows of each (a chain), and tokens of context."""
    pool = pool_for(model, slots)

    @torch.inference_mode()
    def run(places: NDArray[np.int64], rows: int) -> object:
        hidden, _ = model.forward(chains(places, rows).build(model.device), pool)
        return model.logits(hidden).argmax(-1).tolist()

    return lambda answers, rows, context: partial(run, answer_slots(answers, rows, context), rows)


def graphed(options: StageOptions, fp8: bool = False) -> GraphedDecoder:
    """A decoder of the large shape, its steps captured. fp8: for the products of its layers."""
    config, attention = options.config, paged_attention(options, options.config)
    model = decoder_of(config, options, attention)
    if fp8:
        with_fp8(model, rounding_for("auto", config, options.device, without_trial))
        free_memory()
    return GraphedDecoder(model, attention, capture_of(options))


def head_of(options: StageOptions, growth: GrowthSection, slots: int,
            sessions: int) -> tuple[EagleNetwork, GraphBackend]:
    """An EAGLE-3 head for it with random weights, and what captures trees of at most so many sessions."""
    head = random_head(options.config, options.draft_vocab, torch.bfloat16, options.device)
    levels = growth.num_steps - 1
    vocabulary = some_tokens(head.vocabulary, head.config.vocab_size, options.device)
    race = race_for("auto", head.config, options.device, vocabulary, without_trial)
    network = EagleNetwork(head, "bfloat16", options.device, slots, True,
                           operations_for("auto", head.config, torch.bfloat16, options.device, without_trial),
                           spare_slots=spare_slots(growth.topk, levels), race=race)
    return network, GraphBackend(network, paged_attention(options, head.config), growth.topk, levels,
                                 capture_of(options), sessions)


def decoder_of(config: ModelConfig, options: StageOptions, attention: Attention | None = None) -> Decoder:
    """A decoder of any shape with random weights."""
    dtype, device = torch.bfloat16, options.device
    return Decoder(config, random_tensors(decoder_shapes(config), dtype, device), dtype, device,
                   operations_for("auto", config, dtype, device, without_trial), attention)


def steps_of(model: CausalModel, options: StageOptions, expected: str = ">= 0.80", layer_itemsize: int = 0,
             spare_slots: int = 0) -> Iterator[Finding]:
    """Plain steps, trees by plain steps, and steps of several sessions. ``layer_itemsize``: see ``read_bytes``."""
    deep, rate = DEEP if options.full else 32, copy_rate(options)
    step = stepper(model, int(max(answer_slots(max(SESSIONS), 1, deep).max(), LONG)) + 1 + spare_slots)
    for context in options.narrowed((CONTEXT, LONG)):
        roof_s, what = read_bytes(model.config, 2, context, layer_itemsize) / rate, f"1 row behind {context}"
        taken_s = median_s(step(1, 1, context), options.device, options.repeats)
        yield Finding(what, 1e3 * taken_s, "ms")
        yield Finding(f"{what}: of the copy roof", roof_s / taken_s, "share", expected)
        yield from device_work(what, step(1, 1, context), options, roof_s)
    plain_s = median_s(step(1, 1, CONTEXT), options.device, options.repeats)
    for rows in options.narrowed(ROWS[1:]):
        taken_s = median_s(step(1, rows, CONTEXT), options.device, options.repeats)
        yield Finding(f"{rows} rows by 1 row", taken_s / plain_s, "ratio", RATIOS.get(rows, ""))
    yield from device_work("64 rows", step(1, 64, CONTEXT), options)
    for count in options.narrowed(SESSIONS):
        taken_s = median_s(step(count, 1, deep), options.device, options.repeats)
        yield Finding(f"{count} sessions behind {deep}", count / taken_s, "tokens/s", RATES.get(count, ""))
    free_memory()


def graphs_stage(options: StageOptions) -> Iterator[Finding]:
    model = graphed(options)
    yield from steps_of(model, options, spare_slots=model.spare_slots)


def fp8_stage(options: StageOptions) -> Iterator[Finding]:
    """Captured steps of a model whose layers have products in 8 bits."""
    model = graphed(options, fp8=True)
    yield from steps_of(model, options, ">= 0.70", layer_itemsize=1, spare_slots=model.spare_slots)


def device_work(what: str, step: Part, options: StageOptions, roof_s: float = 0.0,
                max_kernels: int = 0) -> Iterator[Finding]:
    """How long the device computed; in the rest of the step's time it waits for the host. max_kernels: how many are
    listed."""
    if events := device_events(step, options.device):
        yield Finding(f"{what}: device computes", 1e3 * busy_s(events), "ms")
        yield Finding(f"{what}: kernels and copies", len(events))
        if roof_s:
            yield Finding(f"{what}: of the copy roof without the host", roof_s / busy_s(events), "share")
        yield from by_kernel(what, events, max_kernels)


def choose_stage(options: StageOptions) -> Iterator[Finding]:
    vocab = LLAMA_8B["vocab_size"] if options.full else 4096
    assert isinstance(vocab, int)
    logits = zipf_logits(max(ROWS), vocab).to(options.device)
    race = device_race(options.device, vocab)
    for name, sampling in SAMPLINGS.items():
        for rows in options.narrowed((1, 9, 64)):
            choices, what = choice_rows(sampling, rows), f"{name}, {rows} rows of {vocab} tokens"
            choosing = partial(choose, logits[:rows], choices)
            yield Finding(what, 1e6 * median_s(choosing, options.device, options.repeats), "us")
            if all(supports(session, True, vocab) for session in choices):
                label = f"{what}, by kernels of our own"
                choosing = partial(choose, logits[:rows], choices, None, race)
                yield Finding(label, 1e6 * median_s(choosing, options.device, options.repeats), "us", "< 200 on H100")
                yield from device_work(label, choosing, options)


def tree_stage(options: StageOptions) -> Iterator[Finding]:
    growth = GrowthSection(num_steps=STEPS if options.full else 4, topk=TOPK, num_draft_tokens=NODES)
    steps = growth.num_steps
    network, at_once = head_of(options, growth, 2 * CONTEXT + 2 * spare_slots(TOPK, steps - 1), 1)
    roof_s = (steps - 1) * head_bytes(options.config, options.draft_vocab) / copy_rate(options)
    yield Finding("roof of the levels", 1e3 * roof_s, "ms")
    for prefix, sampling in (("", Sampling()), ("T = 1, ", Sampling(temperature=1.0, seed=7))):
        trees = []
        for name, loop in ((f"{prefix}at once", at_once), (f"{prefix}level by level", None)):
            grower = Grower(NeuralDrafter("eagle3", network, growth, 4, backend=loop), sampling)
            trees.append(grower())
            taken_s = median_s(grower, options.device, options.repeats)
            yield Finding(f"{name}: {steps} levels of {TOPK} rows", 1e3 * taken_s, "ms",
                          "<= 3.0 on H100, 2.2 on H200" if loop else "")
            yield from device_work(name, grower, options, max_kernels=MAX_KERNELS)
            grower.drafter.close([1])
        yield Finding(f"{prefix}nodes in both trees", len(set(trees[0]) & set(trees[1])), f"of {len(set(trees[1]))}",
                      "all but for equal scores")
    free_memory()


class Grower:
    """Grows a tree, again and again below the same text."""

    def __init__(self, drafter: NeuralDrafter, sampling: Sampling) -> None:
        self.drafter, self._base = drafter, CONTEXT
        drafter.open([Open(1, np.arange(CONTEXT, dtype=np.int32), 1, sampling)])
        drafter.absorb([self._states(0, CONTEXT - 1)])

    def __call__(self) -> list[tuple[int, float]]:
        """Tokens and scores of a new tree."""
        self.drafter.commit([Commit(1, self._base, np.array([5], np.int32))])
        self.drafter.absorb([self._states(self._base - 1, 1)])
        self._base += 1
        (growth,) = self.drafter.grow([1], [NODES])
        return list(zip(growth.tokens.tolist(), np.round(growth.scores, 2).tolist(), strict=True))

    def _states(self, start: int, count: int) -> Features:
        spec = self.drafter.features
        assert spec is not None
        rows = torch.ones(count, spec.width, dtype=torch.bfloat16)
        return Features(1, start, rows.view(torch.uint8).numpy().tobytes(), count, "bfloat16")
