"""A model on some device, what it is given, and how far what it computes is from a reference.

Rules:
1. Differences are divided by the root mean square of the reference row: near zero any other ratio would be huge.
2. KV slots that nothing wrote hold NaN, and static buffers are spoilt before each replay: what reads foreign memory
   shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from slipstream.engine.batch import BatchBuilder, ForwardBatch
from slipstream.engine.graphs import GraphedDecoder
from slipstream.engine.kv import KVPool
from slipstream.engine.model import CausalModel

LENGTHS = (7, 33, 120, 258)  # of the sequences that are prefilled
TREES = (2, 9, 33, 64)  # rows of the trees below them
CONTEXT = 150  # tokens before the rows of a sweep


@dataclass(frozen=True, slots=True)
class Subject:
    """A model and a pool whose untouched slots are NaN."""

    model: CausalModel
    pool: KVPool

    @staticmethod
    def of(model: CausalModel, slots: int) -> Subject:
        config = model.config
        pool = KVPool(config.num_layers, slots, config.num_kv_heads, config.head_dim, model.dtype, model.device)
        pool.kv.fill_(torch.nan)
        return Subject(model, pool)

    @torch.inference_mode()
    def logits(self, builder: BatchBuilder) -> torch.Tensor:
        """float64 [R, V] on the CPU."""
        batch = builder.build(self.model.device)
        hidden, _ = self.model.forward(batch, self.pool)
        return self.model.logits(hidden.index_select(0, batch.logit_rows)).to("cpu", torch.float64)


def random_words(dice: np.random.Generator, nodes: int) -> list[int]:
    """Ancestor words of a random tree, its root first."""
    words = [1]
    for node in range(1, nodes):
        words.append(words[int(dice.integers(node))] | 1 << node)
    return words


def scripted(vocab: int, slots: int) -> Iterator[tuple[str, BatchBuilder]]:
    """Ragged prefill, then a plain step of each sequence, then a random tree below each; slots lie scattered."""
    dice = np.random.default_rng(0)
    order, taken = dice.permutation(slots).astype(np.int64), 0
    contexts = [np.zeros(0, np.int64) for _ in LENGTHS]
    for kind, sizes in (("prefill", LENGTHS), ("decode", [1] * len(LENGTHS)), ("tree", TREES)):
        builder = BatchBuilder()
        for i, size in enumerate(sizes):
            own, start = order[taken:taken + size], len(contexts[i])
            taken += size
            words = random_words(dice, size) if kind == "tree" else None
            depths = range(size) if words is None else [word.bit_count() - 1 for word in words]
            builder.add(dice.integers(vocab, size=size).tolist(), [start + depth for depth in depths], own.tolist(),
                        contexts[i], words, size if words else 0)
            contexts[i] = np.concatenate([contexts[i], own])
        yield kind, builder


def relative(found: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """[R, V]: differences by the root mean square of each reference row; infinite where a number is none."""
    size = reference.square().mean(1, keepdim=True).sqrt()
    return (found - reference).abs().div_(size).nan_to_num_(nan=torch.inf)


def sweep(subject: Subject, kind: str, sizes: Sequence[int]) -> Iterator[tuple[torch.Tensor, bool]]:
    """For each number of rows the first row's logits, and whether a second run gave the same bits. kind: the company
    is other "sessions", or other "nodes" of its tree."""
    vocab, dice = subject.model.config.vocab_size, np.random.default_rng(1)
    prompts = [dice.integers(vocab, size=CONTEXT).tolist() for _ in range(max(sizes) if kind == "sessions" else 1)]
    places = [np.arange(i * CONTEXT, (i + 1) * CONTEXT) for i in range(len(prompts))]
    for prompt, place in zip(prompts, places, strict=True):
        builder = BatchBuilder()
        builder.add(prompt, range(CONTEXT), place.tolist(), np.zeros(0, np.int64), logits="last")
        subject.logits(builder)
    free_slot = len(prompts) * CONTEXT
    tokens = dice.integers(vocab, size=max(sizes)).tolist()
    for size in sizes:
        builder, own = BatchBuilder(), list(range(free_slot, free_slot + size))
        if kind == "sessions":
            for i in range(size):
                builder.add([tokens[i]], [CONTEXT], [own[i]], places[i])
        else:
            words = random_words(np.random.default_rng(size), size)
            builder.add(tokens[:size], [CONTEXT + word.bit_count() - 1 for word in words], own, places[0], words, size)
        first, again = subject.logits(builder), subject.logits(builder)
        yield first[:1], torch.equal(first, again)


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
