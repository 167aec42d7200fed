"""Stages ``choose``, ``decode``, ``graphs``, ``fp8``, ``tree`` and ``fused`` of ``make gpu``: how long does choosing
take, a step of an 8B model, a tree of its head, a layer?

Rules:
1. A time is what a service would see: from the host's lists to numbers on the host again.
2. Beside it stands the time in which the device computed: the difference is what the device waits for the host.
3. The roof of a step is the time of a copy of the bytes that it must read.
4. Without FlashInfer or Triton on a GPU their stages fail, and say why; in a rehearsal torch stands in their place.

It knows nothing about whether results are right: see ``tests/test_device.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from bench.clock import Part
from bench.gpu.shapes import LLAMA_8B, decoder_shapes, head_bytes, random_head, random_tensors, read_bytes
from bench.gpu.stage import (
    MOST_KERNELS,
    Finding,
    Given,
    busy_s,
    by_kernel,
    capture_of,
    copy_rate,
    device_events,
    free,
    fused,
    paged,
    pool_for,
    raced,
    seconds,
    untried,
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
from slipstream.engine.ops.layer import TORCH, DecoderLayer, LayerOps, LayerWeights, Rope, Step, linear
from slipstream.engine.ops.races import race_for, supports
from slipstream.protocol.messages import Commit, Features, Open
from slipstream.protocol.requests import Sampling

ROWS = (1, 2, 4, 8, 16, 32, 64)
SESSIONS = (8, 32, 64)
CONTEXT, LONG, DEEP = 256, 4096, 1024
RATIOS = {8: "<= 1.03", 16: "<= 1.05", 32: "<= 1.08", 64: "<= 1.15"}
RATES = {8: "1210 modelled on H100", 32: "4111 modelled on H100", 64: "6823 modelled on H100"}
TOPK, STEPS, NODES = 8, 9, 60  # of a tree; the root's own row is a step without a loop
LISTED = ("T = 1", 1)  # the choice whose kernels are listed, and its rows
LAYERS = 16  # of one graph: what its start takes is shared among them


def stepper(model: CausalModel, slots: int) -> Callable[[int, int, int], Part]:
    """Steps of a model with random KV, by how many answers, rows of each (a chain), and tokens behind which."""
    pool = pool_for(model, slots)

    @torch.inference_mode()
    def run(places: NDArray[np.int64], rows: int) -> object:
        hidden, _ = model.forward(chains(places, rows).build(model.device), pool)
        return model.logits(hidden).argmax(-1).tolist()

    return lambda answers, rows, context: partial(run, answer_slots(answers, rows, context), rows)


def graphed(given: Given, in_8_bits: bool = False) -> GraphedDecoder:
    """A decoder of the large shape, its steps captured. in_8_bits: the products of its layers."""
    config, attention = given.config, paged(given, given.config)
    model = decoder_of(config, given, attention)
    if in_8_bits:
        with_fp8(model, rounding_for("auto", config, given.device, untried))
        free()
    return GraphedDecoder(model, attention, capture_of(given))


def head_of(given: Given, growth: GrowthSection, slots: int, sessions: int) -> tuple[EagleNetwork, GraphBackend]:
    """An EAGLE-3 head for it with random weights, and what captures trees of at most so many sessions."""
    head = random_head(given.config, given.draft_vocab, torch.bfloat16, given.device)
    levels = growth.num_steps - 1
    vocabulary = some_tokens(head.vocabulary, head.config.vocab_size, given.device)
    race = race_for("auto", head.config, given.device, vocabulary, untried)
    network = EagleNetwork(head, "bfloat16", given.device, slots, True,
                           operations_for("auto", head.config, torch.bfloat16, given.device, untried),
                           spare_slots=spare_slots(growth.topk, levels), race=race)
    return network, GraphBackend(network, paged(given, head.config), growth.topk, levels, capture_of(given),
                                sessions)


def decoder_of(config: ModelConfig, given: Given, attention: Attention | None = None) -> Decoder:
    """One of any shape, with random weights."""
    return Decoder(config, random_tensors(decoder_shapes(config), torch.bfloat16, given.device),
                   operations_for("auto", config, torch.bfloat16, given.device, untried), attention)


def steps_of(model: CausalModel, given: Given, expected: str = ">= 0.80", layer_itemsize: int = 0,
             spare_slots: int = 0) -> Iterator[Finding]:
    """Plain steps, trees by plain steps, and steps of several sessions. ``layer_itemsize``: see ``read_bytes``."""
    deep, rate = DEEP if given.full else 32, copy_rate(given)
    step = stepper(model, int(max(answer_slots(max(SESSIONS), 1, deep).max(), LONG)) + 1 + spare_slots)
    for context in given.few((CONTEXT, LONG)):
        roof_s, what = read_bytes(model.config, 2, context, layer_itemsize) / rate, f"1 row behind {context}"
        taken_s = seconds(step(1, 1, context), given.device, given.repeats)
        yield Finding(what, 1e3 * taken_s, "ms")
        yield Finding(f"{what}: of the copy roof", roof_s / taken_s, "share", expected)
        yield from work(what, step(1, 1, context), given, roof_s)
    plain_s = seconds(step(1, 1, CONTEXT), given.device, given.repeats)
    for rows in given.few(ROWS[1:]):
        taken_s = seconds(step(1, rows, CONTEXT), given.device, given.repeats)
        yield Finding(f"{rows} rows by 1 row", taken_s / plain_s, "ratio", RATIOS.get(rows, ""))
    yield from work("64 rows", step(1, 64, CONTEXT), given)
    for count in given.few(SESSIONS):
        taken_s = seconds(step(count, 1, deep), given.device, given.repeats)
        yield Finding(f"{count} sessions behind {deep}", count / taken_s, "tokens/s", RATES.get(count, ""))
    free()


def decode_stage(given: Given) -> Iterator[Finding]:
    yield from steps_of(decoder_of(given.config, given), given)


def graphs_stage(given: Given) -> Iterator[Finding]:
    model = graphed(given)
    yield from steps_of(model, given, spare_slots=model.spare_slots)


def fp8_stage(given: Given) -> Iterator[Finding]:
    """Captured, of a model whose layers have products in 8 bits."""
    model = graphed(given, in_8_bits=True)
    yield from steps_of(model, given, ">= 0.70", layer_itemsize=1, spare_slots=model.spare_slots)


def work(what: str, step: Part, given: Given, roof_s: float = 0.0, most: int = 0) -> Iterator[Finding]:
    """How long the device computed: what the time of the step has above it, the device waits for the host. most:
    kernels that are listed."""
    if events := device_events(step, given.device):
        yield Finding(f"{what}: device computes", 1e3 * busy_s(events), "ms")
        yield Finding(f"{what}: kernels and copies", len(events))
        if roof_s:
            yield Finding(f"{what}: of the copy roof without the host", roof_s / busy_s(events), "share")
        yield from by_kernel(what, events, most)


def choose_stage(given: Given) -> Iterator[Finding]:
    vocab = LLAMA_8B["vocab_size"] if given.full else 4096
    assert isinstance(vocab, int)
    logits = zipf_logits(max(ROWS), vocab).to(given.device)
    race = raced(given.device, vocab)
    for name, sampling in SAMPLINGS.items():
        for rows in given.few((1, 9, 64)):
            asked, what = choice_rows(sampling, rows), f"{name}, {rows} rows of {vocab} tokens"
            choosing = partial(choose, logits[:rows], asked)
            yield Finding(what, 1e6 * seconds(choosing, given.device, given.repeats), "us")
            if all(supports(session, True, vocab) for session in asked):
                ours = f"{what}, by kernels of our own"
                choosing = partial(choose, logits[:rows], asked, None, race)
                yield Finding(ours, 1e6 * seconds(choosing, given.device, given.repeats), "us", "< 200 on H100")
                yield from work(ours, choosing, given)
            elif (name, rows) == LISTED:
                yield from work(what, choosing, given, most=MOST_KERNELS // 2)


def tree_stage(given: Given) -> Iterator[Finding]:
    growth = GrowthSection(num_steps=STEPS if given.full else 4, topk=TOPK, num_draft_tokens=NODES)
    steps = growth.num_steps
    network, at_once = head_of(given, growth, 2 * CONTEXT + 2 * spare_slots(TOPK, steps - 1), 1)
    roof_s = (steps - 1) * head_bytes(given.config, given.draft_vocab, 2) / copy_rate(given)
    yield Finding("roof of the levels", 1e3 * roof_s, "ms")
    for way, sampling in (("", Sampling()), ("T = 1, ", Sampling(temperature=1.0, seed=7))):
        trees = []
        for name, loop in ((f"{way}at once", at_once), (f"{way}level by level", None)):
            grower = Grower(NeuralDrafter("eagle3", network, growth, 4, backend=loop), sampling)
            trees.append(grower())
            taken_s = seconds(grower, given.device, given.repeats)
            yield Finding(f"{name}: {steps} levels of {TOPK} rows", 1e3 * taken_s, "ms",
                          "<= 3.0 on H100, 2.2 on H200" if loop else "")
            yield from work(name, grower, given, most=MOST_KERNELS)
            grower.drafter.close([1])
        yield Finding(f"{way}nodes in both trees", len(set(trees[0]) & set(trees[1])), f"of {len(set(trees[1]))}",
                      "all but for equal scores")
    free()


class Grower:
    """Grows a tree, again and again below the same text."""

    def __init__(self, drafter: NeuralDrafter, sampling: Sampling) -> None:
        self.drafter, self._base = drafter, CONTEXT
        drafter.open([Open(1, np.arange(CONTEXT, dtype=np.int32), 1, sampling)])
        drafter.absorb([self._states(0, CONTEXT - 1)])

    def __call__(self) -> list[tuple[int, float]]:
        """Tokens and scores of a new tree."""
        self.drafter.commit([Commit(1, self._base, np.array([5], np.int32), self._states(self._base - 1, 1))])
        self._base += 1
        (growth,) = self.drafter.grow([1], [NODES])
        return list(zip(growth.tokens.tolist(), np.round(growth.scores, 2).tolist(), strict=True))

    def _states(self, start: int, count: int) -> Features:
        spec = self.drafter.features
        assert spec is not None
        rows = torch.ones(count, spec.width, dtype=torch.bfloat16)
        return Features(1, start, rows.view(torch.uint8).numpy().tobytes(), count, "bfloat16")


def fused_stage(given: Given) -> Iterator[Finding]:
    """``given.shape``: rows."""
    operations, rows = fused(given.device), int(given.shape)
    took = {}
    for name, ops in (("torch's", TORCH), ("fused", operations)):
        run, what = layers_in_graph(ops, given, rows), f"{LAYERS} layers of {rows} rows, {name} operations"
        took[name] = seconds(run, given.device, given.repeats)
        yield Finding(what, 1e3 * took[name], "ms")
        yield from work(what, run, given)
        free()
    yield Finding(f"layers of {rows} rows, fused by torch's", took["fused"] / took["torch's"], "ratio", "< 1")


def layers_in_graph(ops: LayerOps, given: Given, rows: int) -> Part:
    """``LAYERS`` layers of random weights on random rows; each reads weights that no cache holds."""
    config = given.config
    single = replace(config, num_layers=1)
    tensors = random_tensors({name: shape for name, shape in decoder_shapes(single).items() if ".layers." in name},
                             torch.bfloat16, given.device)
    layer = DecoderLayer(LayerWeights.from_tensors(single, tensors, "model.layers.0", linear), ops)
    kv = torch.zeros(rows, 2, config.num_kv_heads, config.head_dim, dtype=torch.bfloat16, device=given.device)
    states = torch.randn(rows, config.hidden_size, dtype=torch.bfloat16, device=given.device)
    places = torch.arange(rows, device=given.device)
    step = Step(places, places, Rope(config, torch.bfloat16, given.device), lambda q, kv: q.reshape(rows, -1))

    @torch.inference_mode()
    def run() -> None:
        x, read = states, layer.norm_input(states)
        for _ in range(LAYERS):
            x, read = layer(x, read, step, kv, layer.weights.norm)

    kept = (run, capture_of(given)(run))  # a graph holds none of the tensors that it reads
    return lambda: kept[1]()
