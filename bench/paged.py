"""Stages ``kernel`` and ``graphs`` of ``make gpu``: FlashInfer's attention against float64, and captured steps.

Rules:
1. Without FlashInfer on a GPU the stages fail, and say why; in a rehearsal torch's pages stand in its place, and the
   function itself in a graph's.
2. KV slots that nothing wrote hold NaN, and static buffers are spoilt before each replay: what reads foreign memory
   shows.

It knows nothing about services.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from bench.exactness import CONTEXT, MOST_ROWS, Subject, Weights, random_words, relative, sweep
from bench.pace import decoder, steps_of
from bench.shapes import LLAMA_8B, SMALL, TINY, Fields, config_of
from bench.stage import Finding, Given, free
from slipstream.engine.backend import PagedAttention, TorchAttention
from slipstream.engine.batch import BatchBuilder, ForwardBatch
from slipstream.engine.decoder import Decoder
from slipstream.engine.flashinfer import FlashInferAttention, missing
from slipstream.engine.graphs import Capture, CudaCapture, GraphedDecoder, capture_eager
from slipstream.engine.kv import KVPool
from slipstream.engine.model import ModelConfig
from slipstream.engine.ops.fused import operations_for

HEADS = ((8, 8), (9, 3), (32, 8), (16, 2))  # query and KV heads: groups of 1, 3, 4 and 8
HEAD_DIMS = (64, 128)
LONGEST = 8192
LIMIT = 1e-2


def paged(given: Given, config: ModelConfig) -> PagedAttention:
    """FlashInfer on a GPU, torch's pages elsewhere. Raises RuntimeError where a GPU has no FlashInfer."""
    if given.device.type != "cuda":
        return TorchAttention(config, torch.bfloat16)
    if reason := missing(config, torch.bfloat16, given.device):
        raise RuntimeError(f"FlashInfer: {reason}")
    return FlashInferAttention(config, torch.bfloat16, given.device)


def capture_of(given: Given) -> Capture:
    return CudaCapture(given.device) if given.device.type == "cuda" else capture_eager


def mixed(dice: np.random.Generator, slots: int, longest: int) -> BatchBuilder:
    """A chunk of a prompt, plain steps and trees behind contexts of any length, on slots in any order."""
    builder, order, taken = BatchBuilder(), dice.permutation(slots).astype(np.int64), 0
    for kind, rows in (("chunk", 48), ("plain", 1), ("tree", 64), ("plain", 1), ("tree", 9), ("tree", 2)):
        context = int(dice.integers(1, longest))
        own = order[taken + context : taken + context + rows]
        words = random_words(dice, rows) if kind == "tree" else None
        builder.add([0] * rows, [0] * rows, own.tolist(), order[taken : taken + context], words, rows if words else 0)
        taken += context + rows
    return builder


def kernel_stage(given: Given) -> Iterator[Finding]:
    longest = LONGEST if given.full else 64
    for head_dim in HEAD_DIMS if given.full else (16,):
        for heads, kv_heads in HEADS:
            fields = (SMALL if given.full else TINY) | {"head_dim": head_dim, "num_attention_heads": heads,
                                                        "num_key_value_heads": kv_heads}
            yield Finding(f"{heads} heads on {kv_heads} of {head_dim}: largest error of a row",
                          _kernel_error(given, fields, longest), "rms", f"<= {LIMIT:g}")
    free()


def _kernel_error(given: Given, fields: Fields, longest: int) -> float:
    """Of random batches, against float64 on the CPU over the same bfloat16 numbers."""
    config, slots, worst = config_of(fields), 6 * longest + 200, 0.0
    attention = paged(given, config)
    for seed in range(3):
        dice = np.random.default_rng(seed)
        batch = mixed(dice, slots, longest).build()
        kv = torch.full((slots, 2, config.num_kv_heads, config.head_dim), torch.nan, dtype=torch.bfloat16)
        known = torch.from_numpy(dice.standard_normal((len(batch.kv_slots), *kv.shape[1:]), np.float32)).bfloat16()
        kv[batch.kv_slots] = known
        q = torch.from_numpy(dice.standard_normal((batch.num_rows, config.num_heads, config.head_dim), np.float32))
        right = TorchAttention(config, torch.float64).plan(batch)(q.bfloat16().double(), kv.double())
        there = _placed(batch, given.device)
        found = attention.plan(there)(q.bfloat16().to(given.device), kv.to(given.device))
        distance = (found.to("cpu", torch.float64) - right).norm(dim=1) / right.norm(dim=1)
        worst = max(worst, float(distance.nan_to_num_(nan=torch.inf).max()))
    return worst


def _placed(batch: ForwardBatch, device: torch.device) -> ForwardBatch:
    return ForwardBatch.of(batch.host, batch.q_indptr, batch.kv_indptr, batch.mask_lens, batch.host.placed(device))


class Spoiling:
    """A model that spoils its static buffers before each forward; see ``model.CausalModel``."""

    __slots__ = ("_graphed", "config", "device", "dtype")

    def __init__(self, graphed: GraphedDecoder) -> None:
        self._graphed = graphed
        self.config, self.dtype, self.device = graphed.config, graphed.dtype, graphed.device

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, pool: KVPool,
                taps: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor | None]:
        for buffer in self._graphed.buffers():
            buffer.fill_(torch.nan if buffer.is_floating_point() else 1 << 30)
        return self._graphed.forward(batch, pool, taps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._graphed.logits(hidden)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._graphed.embed(tokens)


def graphs_stage(given: Given) -> Iterator[Finding]:
    yield from _same(given)
    free()
    attention = paged(given, config_of(LLAMA_8B if given.full else TINY))
    model = GraphedDecoder(decoder(given, attention), attention, capture_of(given))
    yield from steps_of(model, given, spare_slots=model.spare_slots)


def _same(given: Given) -> Iterator[Finding]:
    """Every row count with and without graphs, all static buffers spoilt before each."""
    weights = Weights.of(replace(given, model=None))
    attention = paged(given, weights.config)
    ops = operations_for("auto", weights.config, torch.bfloat16, given.device)
    model = Decoder.from_tensors(weights.config, weights.tensors, torch.bfloat16, given.device, ops, attention)
    sizes = range(1, MOST_ROWS + 1) if given.full else (1, 2, 5, 8)
    for kind in ("sessions", "nodes"):
        graphed = GraphedDecoder(model, attention, capture_of(given))
        slots = (CONTEXT + 1) * MOST_ROWS
        with_graphs = sweep(Subject.of(Spoiling(graphed), slots + graphed.spare_slots), kind, sizes)
        without = sweep(Subject.of(model, slots), kind, sizes)
        errors, again = [], 0
        for (found, same), (right, _) in zip(with_graphs, without, strict=True):
            errors.append(float(relative(found, right).max()))
            again += same
        yield Finding(f"graph against none, with other {kind}: largest change of a row", max(errors), "rms", "<= 0.1")
        yield Finding(f"graph, with other {kind}: same bits when replayed", again, f"of {len(sizes)}", f"{len(sizes)}")
