"""Stages ``logits``, ``padding``, ``kernel``, ``graphs`` and ``ranks`` of ``make gpu``: does a device compute what is
right, whatever the company?

Rules:
1. The reference is the same model in float64 on the CPU, its weights rounded to bfloat16 as in all that is compared, so
   that a difference is arithmetic alone. A graph's is the same step without, and that of two devices is one.
2. Differences are divided by the root mean square of the reference row: near zero any other ratio would be huge.
3. KV slots that nothing wrote hold NaN, and static buffers are spoilt before each replay: what reads foreign memory
   shows.
4. Without FlashInfer on a GPU its stages fail, and say why; in a rehearsal torch's pages stand in its place, and the
   function itself in a graph's. One GPU skips ``ranks``, and says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from bench.gpu.pace import CONTEXT as BEHIND
from bench.gpu.pace import Stepper, decoder, steps_of
from bench.gpu.shapes import LLAMA_8B, SMALL, TINY, Fields, config_of, decoder_shapes, random_tensors, write_folder
from bench.gpu.stage import Finding, Given, capture_of, free, paged, seconds
from slipstream.base.config import ModelSection
from slipstream.engine.backend import TorchAttention
from slipstream.engine.batch import BatchBuilder, ForwardBatch
from slipstream.engine.decoder import Decoder
from slipstream.engine.graphs import GraphedDecoder
from slipstream.engine.kv import KVPool
from slipstream.engine.loading import graphed, load_model
from slipstream.engine.model import CausalModel, ModelConfig
from slipstream.engine.ops.fused import operations_for
from slipstream.engine.ranks import ranked_model
from slipstream.engine.weights import load_tensors

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LIMITS = {"float32": 1e-4, "bfloat16": 1e-1}
LENGTHS = (7, 33, 120, 258)  # of the sequences that are prefilled
TREES = (2, 9, 33, 64)  # rows of the trees below them
CONTEXT = 150  # tokens before the rows of the padding sweep
MOST_ROWS = 64
REFERENCE = torch.device("cpu")
HEADS = ((8, 8), (9, 3), (32, 8), (16, 2))  # query and KV heads: groups of 1, 3, 4 and 8
HEAD_DIMS = (64, 128)
LONGEST = 8192  # context of the kernel's rows
KERNEL_LIMIT = 1e-2
RANKS, RANK_ROWS = 2, (1, 16, 64)
SLOTS, PADDING = 2000, 128  # of ranks; rows that fill up a graph take the last ones


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
                          _kernel_error(given, fields, longest), "rms", f"<= {KERNEL_LIMIT:g}")
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


def ranks_stage(given: Given) -> Iterator[Finding]:
    devices = torch.cuda.device_count() if given.device.type == "cuda" else RANKS
    if devices < RANKS:
        yield Finding("skipped", f"{RANKS} GPUs are needed, and {devices} can be seen")
        return
    with TemporaryDirectory() as made:
        folder = given.model or write_folder(Path(made), SMALL if given.full else TINY)
        for dtype in DTYPES:
            yield from _compared(given, folder, dtype)
    free()


def _compared(given: Given, folder: Path, dtype: str) -> Iterator[Finding]:
    kind = given.device.type
    one = graphed(load_model(folder, ModelSection(dtype=dtype, device=kind)))
    two = ranked_model(folder, ModelSection(dtype=dtype, device=kind, tensor_parallel=RANKS))
    try:
        pairs = zip(_logits(two), _logits(one), strict=True)
        worst = max(float(relative(found, right).max()) for found, right in pairs)
        yield Finding(f"{dtype}: largest error of a row", worst, "rms", f"<= {LIMITS[dtype]:g}")
        steppers = [Stepper(model, BEHIND + max(RANK_ROWS) + PADDING) for model in (one, two)]
        for rows in RANK_ROWS:
            alone_s, shared_s = (seconds(of.tree(rows, BEHIND), given.device, given.repeats) for of in steppers)
            yield Finding(f"{dtype}: a step of {rows} rows by one device's", shared_s / alone_s, "ratio")
    finally:
        two.close()


def _logits(model: CausalModel) -> list[torch.Tensor]:
    subject = Subject.of(model, SLOTS + PADDING)
    return [subject.logits(batch) for _, batch in scripted(model.config.vocab_size, SLOTS)]
