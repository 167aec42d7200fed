"""Batch-invariant bfloat16 on a CPU: a row's logits are the same bits, however many rows share the forward.

Rules:
1. Products run with row counts that give a row the same bits, each of which was tried when the model was loaded; fewer
   rows are filled up, more are cut.
2. Attention takes each row by itself, over its own path in the order of positions, whatever order the nodes of a tree
   have. The path is filled up to a multiple of ``BLOCK`` entries and always masked, so that sums are cut alike.
3. A decoder that fails its own trial, tree rows against plain steps, is not served.

It knows nothing about sessions or about who wants exactness.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.engine.attention import AttentionPlan, Part, attend
from slipstream.engine.backend import Attend
from slipstream.engine.batch import BatchBuilder, ForwardBatch
from slipstream.engine.decoder import Decoder
from slipstream.engine.kv import KVPool
from slipstream.engine.layers import MOST_ROWS, Linear, Tensors
from slipstream.engine.model import ModelConfig
from slipstream.errors import ModelError
from slipstream.log import logger

Indices = NDArray[np.int64]

BLOCK = 64  # KV entries
ENTRIES = 32_768  # KV entries that are gathered at a time, about
FIXED_ROWS = 16  # of a product where row counts do not agree
TRIAL_CONTEXT, TRIAL_ROWS = 120, 16  # paths of the trial end on both sides of a block's end


class ExactAttention:
    """See rule 2. Implements ``backend.Attention``."""

    __slots__ = ("_config",)

    def __init__(self, config: ModelConfig) -> None:
        self._config = config

    def plan(self, batch: ForwardBatch) -> Attend:
        config = self._config
        single, parts = [], []
        for segment in range(len(batch.mask_lens)):
            rows = _paths(batch, segment)
            if len(rows) > 1 and not config.sliding_window and _in_order(batch, segment):
                parts.append(_shared(rows, config.group))
            else:
                single += rows
        parts += _gathered(single, config.group, config.sliding_window)
        return partial(attend, plan=AttentionPlan(tuple(parts), config.group), scale=config.head_dim**-0.5)


Path = tuple[int, Indices]  # a row of the batch, the slots that it sees in the order of positions


def _paths(batch: ForwardBatch, segment: int) -> list[Path]:
    first, end = batch.q_indptr[segment : segment + 2]
    slots = batch.kv_slots[batch.kv_indptr[segment] : batch.kv_indptr[segment + 1]].numpy()
    mask_len = batch.mask_lens[segment]
    if mask_len == 0:
        return [(row, slots[: len(slots) - end + row + 1]) for row in range(first, end)]
    context, tree = slots[: len(slots) - mask_len], slots[len(slots) - mask_len :]
    words = batch.words[first:end].numpy().view(np.uint64)
    seen = (words[:, None] >> np.arange(mask_len, dtype=np.uint64)) & np.uint64(1)
    # A parent stands before its children, so ascending nodes are ascending depths.
    return [(first + i, np.concatenate((context, tree[seen[i].astype(bool)]))) for i in range(end - first)]


def _in_order(batch: ForwardBatch, segment: int) -> bool:
    """Whether each row sees just what stands before it: a prompt, or a chain."""
    first, end = batch.q_indptr[segment : segment + 2]
    before = batch.mask_lens[segment] - (end - first)  # entries of the mask that are no rows
    if batch.mask_lens[segment] == 0:
        return True
    words = batch.words[first:end].numpy().view(np.uint64).tolist()
    return bool(words == [(2 << before + row) - 1 for row in range(end - first)])


def _filled(length: int) -> int:
    return -(-length // BLOCK) * BLOCK


def _shared(rows: list[Path], group: int) -> Part:
    """Rows of which each sees the beginning of what the last one sees."""
    longest = rows[-1][1]
    slots = np.full(_filled(len(longest)), longest[-1])
    slots[: len(longest)] = longest
    first = rows[0][0]
    whole = slice(first, first + len(rows))
    mask = _mask([(0, len(seen)) for _, seen in rows], len(slots), group)
    return Part((len(rows), 1, len(slots)), whole, whole, torch.from_numpy(slots), mask)


def _gathered(rows: list[Path], group: int, window: int) -> Iterator[Part]:
    """Rows of which each has KV of its own, so many at a time as ``ENTRIES`` allow."""
    while rows:
        count = max(1, ENTRIES // _filled(max(len(seen) for _, seen in rows)))
        some, rows = rows[:count], rows[count:]
        # What lies before a window is left out in whole blocks, so that where blocks begin depends on nothing else.
        begins = [max(0, len(seen) - window) if window else 0 for _, seen in some]
        kept = [seen[begin // BLOCK * BLOCK :] for begin, (_, seen) in zip(begins, some, strict=True)]
        n = _filled(max(map(len, kept)))
        slots = np.stack([np.concatenate((seen, np.full(n - len(seen), seen[-1]))) for seen in kept])
        index = torch.tensor([row for row, _ in some])
        visible = [(begin % BLOCK, len(seen)) for begin, seen in zip(begins, kept, strict=True)]
        yield Part((len(some), 1, n), index, index, torch.from_numpy(slots.ravel()), _mask(visible, n, group))


def _mask(visible: list[tuple[int, int]], n: int, group: int) -> torch.Tensor:
    # [b, 1, group, n], added to the scores
    mask = torch.full((len(visible), 1, 1, n), float("-inf"), dtype=torch.bfloat16)
    for row, (begin, end) in zip(mask, visible, strict=True):
        row[..., begin:end] = 0
    return mask.expand(-1, 1, group, -1)


def agreeing_rows(product: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> tuple[int, int]:
    """The least and the most rows of one call between which a row's bits depend neither on how many there are
    nor on its place. product: bfloat16 [T, I] -> [T, O]; rows: [MOST_ROWS, I]. Raises ModelError if there are none."""
    whole = product(rows)
    if not torch.equal(_on_one_thread(product, rows), whole):
        raise ModelError("model.exact: this machine's products depend on the number of threads; set model.threads=1")
    least = next((count + 1 for count in range(MOST_ROWS - 1, 0, -1)
                  if not torch.equal(product(rows[:count]), whole[:count])), 1)
    if least <= FIXED_ROWS and _same_everywhere(product, rows):
        return least, MOST_ROWS
    if _same_everywhere(product, rows[:FIXED_ROWS]):
        return FIXED_ROWS, FIXED_ROWS
    raise ModelError("model.exact: this machine's products give a row other bits in another place; serve with "
                     "model.dtype=float32 instead")


def cancelling(in_features: int, out_features: int) -> tuple[Linear, torch.Tensor]:
    """A product of such a size, and rows for it [MOST_ROWS, in_features], of which each result is zero but for what
    rounding leaves: there another order of a sum cannot hide."""
    dice, half = torch.Generator().manual_seed(0), in_features // 2
    order = torch.randperm(half, generator=dice)
    weight = torch.zeros(out_features, in_features, dtype=torch.bfloat16)
    rows = torch.zeros(MOST_ROWS, in_features, dtype=torch.bfloat16)
    weight[:, :half] = torch.randn(out_features, half, generator=dice)
    rows[:, :half] = torch.randn(MOST_ROWS, half, generator=dice)
    weight[:, half : 2 * half] = weight[:, :half][:, order]
    rows[:, half : 2 * half] = -rows[:, :half][:, order]
    return Linear(weight), rows


def _on_one_thread(product: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return product(rows)
    finally:
        torch.set_num_threads(threads)


def _same_everywhere(product: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> bool:
    whole = product(rows)
    return all(torch.equal(product(rows.roll(by, 0)), whole.roll(by, 0)) for by in (1, 2, 5, len(rows) // 2))


def exact_decoder(config: ModelConfig, tensors: Tensors) -> Decoder:
    """A decoder in bfloat16 on the CPU whose rows do not depend on their company. Raises ModelError when this machine's
    kernels do not allow it."""
    decoder = Decoder.from_tensors(config, tensors, torch.bfloat16, torch.device("cpu"),
                                   attention=ExactAttention(config))
    known: dict[tuple[int, int], tuple[int, int]] = {}  # which code runs depends on the size alone
    with torch.inference_mode():
        for linear in decoder.linears():
            size = (linear.in_features, linear.out_features)
            if size not in known:
                known[size] = agreeing_rows(*cancelling(*size))
            linear.rows = known[size]
    logger("engine").info("exact", rows={f"{inner} x {outer}": rows for (inner, outer), rows in known.items()})
    if not passes_trial(decoder):
        raise ModelError("model.exact: on this machine a tree's rows differ from plain steps; serve with "
                         "model.dtype=float32 instead")
    return decoder


def passes_trial(decoder: Decoder) -> bool:
    """Whether the rows of a random tree, and of a prompt, are bit for bit those of plain steps."""
    dice, config = np.random.default_rng(0), decoder.config
    parents = [-1, *(int(dice.integers(node)) for node in range(1, TRIAL_ROWS))]
    tokens = dice.integers(config.vocab_size, size=TRIAL_CONTEXT + TRIAL_ROWS).tolist()
    pool = KVPool(config.num_layers, TRIAL_CONTEXT + 2 * TRIAL_ROWS, config.num_kv_heads, config.head_dim,
                  decoder.dtype)
    context = np.arange(TRIAL_CONTEXT)
    logits = _run(decoder, pool, tokens[:TRIAL_CONTEXT], list(range(TRIAL_CONTEXT)), context[:0])
    if not torch.equal(logits[-1:], _run(decoder, pool, tokens[TRIAL_CONTEXT - 1 : TRIAL_CONTEXT],
                                         [TRIAL_CONTEXT - 1], context[:-1])):
        return False
    nodes, words, paths = tokens[TRIAL_CONTEXT:], [1], [[0]]
    for node in range(1, TRIAL_ROWS):
        words.append(words[parents[node]] | 1 << node)
        paths.append([*paths[parents[node]], node])
    slots = list(range(TRIAL_CONTEXT, TRIAL_CONTEXT + TRIAL_ROWS))
    tree = _run(decoder, pool, nodes, slots, context, words, [len(path) - 1 for path in paths])
    longest = max(paths, key=len)
    for depth, node in enumerate(longest):
        behind = np.append(context, np.arange(depth) + slots[-1] + 1)
        alone = _run(decoder, pool, [nodes[node]], [slots[-1] + 1 + depth], behind)
        if not torch.equal(alone[0], tree[node]):
            return False
    return True


def _run(decoder: Decoder, pool: KVPool, tokens: list[int], slots: list[int], context: Indices,
         words: list[int] | None = None, depths: list[int] | None = None) -> torch.Tensor:
    builder = BatchBuilder()
    positions = [len(context) + depth for depth in depths or range(len(tokens))]
    builder.add(tokens, positions, slots, context, words, 0 if words is None else len(tokens))
    return decoder.logits(decoder.forward(builder.build(), pool)[0])
