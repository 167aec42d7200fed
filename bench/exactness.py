"""Stages ``logits`` and ``padding`` of ``make gpu``: are a device's logits right, and do they depend on their company?

Rules:
1. The reference is the same model in float64 on the CPU, its weights rounded to bfloat16 as in all that is compared, so
   that a difference is arithmetic alone.
2. Differences are divided by the root mean square of the reference row: near zero any other ratio would be huge.
3. KV slots that nothing wrote hold NaN: what reads a foreign slot shows.

It knows nothing about time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from bench.shapes import SMALL, TINY, config_of, decoder_shapes, random_tensors
from bench.stage import Finding, Given, free
from slipstream.engine.batch import BatchBuilder
from slipstream.engine.decoder import Decoder
from slipstream.engine.kv import KVPool
from slipstream.engine.model import CausalModel, ModelConfig
from slipstream.engine.ops.fused import operations_for
from slipstream.engine.weights import load_tensors

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LIMITS = {"float32": 1e-4, "bfloat16": 1e-1}
LENGTHS = (7, 33, 120, 258)  # of the sequences that are prefilled
TREES = (2, 9, 33, 64)  # rows of the trees below them
CONTEXT = 150  # tokens before the rows of the padding sweep
MOST_ROWS = 64
REFERENCE = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Weights:
    config: ModelConfig
    tensors: dict[str, torch.Tensor]  # bfloat16, on the CPU

    @staticmethod
    def of(given: Given) -> Weights:
        """The given model's, or random ones of a small shape."""
        if given.model is None:
            config = config_of(SMALL if given.full else TINY)
            return Weights(config, random_tensors(decoder_shapes(config), torch.bfloat16, REFERENCE))
        loaded = load_tensors(given.model)
        return Weights(ModelConfig.from_folder(given.model),
                       {name: t.to(torch.bfloat16) for name, t in loaded.items() if t.is_floating_point()})

    def subject(self, dtype: torch.dtype, device: torch.device, slots: int) -> Subject:
        ops = operations_for("auto", self.config, dtype, device)
        return Subject.of(Decoder.from_tensors(self.config, self.tensors, dtype, device, ops), slots)


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


def logits_stage(given: Given) -> Iterator[Finding]:
    weights = Weights.of(given)
    slots = 2 * (sum(LENGTHS) + sum(TREES))
    reference = weights.subject(torch.float64, REFERENCE, slots)
    expected = [(kind, builder, reference.logits(builder))
                for kind, builder in scripted(weights.config.vocab_size, slots)]
    for name, dtype in DTYPES.items():
        subject = weights.subject(dtype, given.device, slots)
        for kind, builder, right in expected:
            found = subject.logits(builder)
            error = relative(found, right)
            same = float((found.argmax(1) == right.argmax(1)).double().mean())
            yield Finding(f"{name} {kind}: largest error", float(error.max()), "rms", f"<= {LIMITS[name]:g}")
            yield Finding(f"{name} {kind}: mean error", float(error.mean()), "rms")
            yield Finding(f"{name} {kind}: rows with the same best token", same, "share")
        free()


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


def padding_stage(given: Given) -> Iterator[Finding]:
    weights = Weights.of(given)
    sizes = range(1, MOST_ROWS + 1) if given.full else (1, 2, 5, 8)
    for name, dtype in DTYPES.items():
        for kind in ("sessions", "nodes"):
            subject = weights.subject(dtype, given.device, (CONTEXT + 1) * MOST_ROWS)
            rows = list(sweep(subject, kind, sizes))
            alone = rows[0][0]
            errors = [float(relative(row, alone).max()) for row, _ in rows]
            worst = int(np.argmax(errors))
            yield Finding(f"{name}, with other {kind}: largest change of a row", errors[worst], "rms",
                          f"<= {LIMITS[name]:g}")
            yield Finding(f"{name}, with other {kind}: the row count of it", sizes[worst], "rows")
            yield Finding(f"{name}, with other {kind}: bit for bit as alone", sum(e == 0 for e in errors),
                          f"of {len(sizes)}")
            yield Finding(f"{name}, with other {kind}: same best token as alone",
                          sum(int(row.argmax()) == int(alone.argmax()) for row, _ in rows), f"of {len(sizes)}",
                          f"{len(sizes)}")
            yield Finding(f"{name}, with other {kind}: same bits when run again", sum(again for _, again in rows),
                          f"of {len(sizes)}", f"{len(sizes)}")
            free()
