"""Trials before anything is served: does an attention over pages see and compute what torch's does, and does
speculation change a bit of what a model computes?

Rules:
1. An attention gets one batch of every kind of row: a chunk of a prompt, steps, and trees, behind contexts of several
   lengths, on slots in any order. KV that no row may read is NaN. It is asked both ways that serve: planned for one
   forward, and fixed as for a graph.
2. Of a model, the rows of a random tree, and of a prompt, are held against plain steps, bit for bit. What passes are
   the CPU kernels (``native``), whose sums are in one order; torch's depend on the number of rows.
3. What answers depend on must not depend on a machine that nobody has seen: what fails here does not serve.

It knows nothing about kernels, or about what takes their place.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.base.errors import ModelError
from slipstream.engine.attention import PagedAttention, PageTensors, TorchAttention, plan_pages
from slipstream.engine.batch import BatchBuilder, ForwardBatch
from slipstream.engine.kv import KVPool
from slipstream.engine.model import CausalModel, ModelConfig

SEGMENTS = (("chunk", 40, 9), ("step", 200, 1), ("tree", 130, 33), ("step", 1, 1), ("tree", 3, 2))  # context, rows
SLOTS = 500
CONTEXT, ROWS = 120, 16  # of the trial of exactness
LIMIT = 2e-2  # of a row's length: several times what 16 bits round


@torch.inference_mode()
def disagreement(attention: PagedAttention, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> str:
    """In words; empty: it computes what torch does. Raises what the attention raises."""
    batch = trial_batch().build(device)
    dice = torch.Generator().manual_seed(0)
    q, known = (torch.randn(count, heads, config.head_dim, generator=dice).to(device, dtype)
                for count, heads in ((batch.num_rows, config.num_heads), (2 * SLOTS, config.num_kv_heads)))
    kv = torch.full_like(known, torch.nan).view(SLOTS, 2, config.num_kv_heads, config.head_dim)
    kv.index_copy_(0, batch.kv_slots, known.view_as(kv).index_select(0, batch.kv_slots))
    right = TorchAttention(config, torch.float32).plan(batch)(q.float(), kv.float())
    for way, found in (("planned", attention.plan(batch)(q, kv)), ("fixed", _fixed(attention, config, batch, q, kv))):
        worst = farthest(found, right)
        if worst > LIMIT:
            return f"in a trial ({way}) a row is off by {worst:.2g} of its length, and rounding explains {LIMIT:g}"
    return ""


def farthest(found: torch.Tensor, right: torch.Tensor) -> float:
    """The greatest distance of a row of ``found`` [T, W] from the same of ``right``, by that one's length; infinite
    where something is not a number."""
    off = (found.float() - right.float()).norm(dim=1) / right.float().norm(dim=1)
    return float(off.nan_to_num_(nan=torch.inf).max())


def trial_batch() -> BatchBuilder:
    dice, builder, taken = np.random.default_rng(0), BatchBuilder(), 0
    order = dice.permutation(SLOTS).astype(np.int64)
    for kind, context, rows in SEGMENTS:
        own = order[taken + context : taken + context + rows].tolist()
        words = [1]
        for node in range(1, rows):
            words.append(words[int(dice.integers(node))] | 1 << node)
        is_tree = kind == "tree"
        builder.add([0] * rows, [0] * rows, own, order[taken : taken + context], words if is_tree else None,
                    rows if is_tree else 0)
        taken += context + rows
    return builder


def _fixed(attention: PagedAttention, config: ModelConfig, batch: ForwardBatch, q: torch.Tensor,
           kv: torch.Tensor) -> torch.Tensor:
    plan = plan_pages(batch, config.sliding_window)
    fixed = attention.fixed(PageTensors.empty(batch.num_rows, len(batch.mask_lens), 2 * SLOTS, kv.device))
    fixed.write(plan)
    return fixed(q, kv)


def check_exact(model: CausalModel) -> CausalModel:
    """The model, after its trial. Raises ModelError."""
    if not passes_trial(model):
        raise ModelError("model.kernels: native: on this machine a tree's rows differ from plain steps; serve with "
                         "model.dtype=float32 instead")
    return model


def passes_trial(model: CausalModel) -> bool:
    """Whether the rows of a random tree, and of a prompt, are bit for bit those of plain steps."""
    dice, config = np.random.default_rng(0), model.config
    parents = [-1, *(int(dice.integers(node)) for node in range(1, ROWS))]
    tokens = dice.integers(config.vocab_size, size=CONTEXT + ROWS).tolist()
    pool = KVPool(config.num_layers, CONTEXT + 2 * ROWS, config.num_kv_heads, config.head_dim, model.dtype)
    context = np.arange(CONTEXT)
    logits = _run(model, pool, tokens[:CONTEXT], list(range(CONTEXT)), context[:0])
    if not torch.equal(logits[-1:], _run(model, pool, tokens[CONTEXT - 1 : CONTEXT],
                                         [CONTEXT - 1], context[:-1])):
        return False
    nodes, words, paths = tokens[CONTEXT:], [1], [[0]]
    for node in range(1, ROWS):
        words.append(words[parents[node]] | 1 << node)
        paths.append([*paths[parents[node]], node])
    slots = list(range(CONTEXT, CONTEXT + ROWS))
    tree = _run(model, pool, nodes, slots, context, words, [len(path) - 1 for path in paths])
    longest = max(paths, key=len)
    for depth, node in enumerate(longest):
        behind = np.append(context, np.arange(depth) + slots[-1] + 1)
        alone = _run(model, pool, [nodes[node]], [slots[-1] + 1 + depth], behind)
        if not torch.equal(alone[0], tree[node]):
            return False
    return True


def _run(model: CausalModel, pool: KVPool, tokens: list[int], slots: list[int], context: NDArray[np.int64],
         words: list[int] | None = None, depths: list[int] | None = None) -> torch.Tensor:
    builder = BatchBuilder()
    positions = [len(context) + depth for depth in depths or range(len(tokens))]
    builder.add(tokens, positions, slots, context, words, 0 if words is None else len(tokens))
    return model.logits(model.forward(builder.build(), pool)[0])
