"""A trial of exactness: does speculation change a bit of what a model computes?

Rules:
1. The rows of a random tree, and of a prompt, are held against plain steps, bit for bit. A model that fails is not
   served when exactness was asked for.
2. What passes are the CPU kernels (``native``), whose sums are in one order; torch's depend on the number of rows.

It knows nothing about sessions or about who wants exactness.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.base.errors import ModelError
from slipstream.engine.batch import BatchBuilder
from slipstream.engine.kv import KVPool
from slipstream.engine.model import CausalModel

Indices = NDArray[np.int64]

TRIAL_CONTEXT, TRIAL_ROWS = 120, 16


def check_exact(model: CausalModel) -> CausalModel:
    """The model, after its trial. Raises ModelError."""
    if not passes_trial(model):
        raise ModelError("model.kernels: native: on this machine a tree's rows differ from plain steps; serve with "
                         "model.dtype=float32 instead")
    return model


def passes_trial(model: CausalModel) -> bool:
    """Whether the rows of a random tree, and of a prompt, are bit for bit those of plain steps."""
    dice, config = np.random.default_rng(0), model.config
    parents = [-1, *(int(dice.integers(node)) for node in range(1, TRIAL_ROWS))]
    tokens = dice.integers(config.vocab_size, size=TRIAL_CONTEXT + TRIAL_ROWS).tolist()
    pool = KVPool(config.num_layers, TRIAL_CONTEXT + 2 * TRIAL_ROWS, config.num_kv_heads, config.head_dim,
                  model.dtype)
    context = np.arange(TRIAL_CONTEXT)
    logits = _run(model, pool, tokens[:TRIAL_CONTEXT], list(range(TRIAL_CONTEXT)), context[:0])
    if not torch.equal(logits[-1:], _run(model, pool, tokens[TRIAL_CONTEXT - 1 : TRIAL_CONTEXT],
                                         [TRIAL_CONTEXT - 1], context[:-1])):
        return False
    nodes, words, paths = tokens[TRIAL_CONTEXT:], [1], [[0]]
    for node in range(1, TRIAL_ROWS):
        words.append(words[parents[node]] | 1 << node)
        paths.append([*paths[parents[node]], node])
    slots = list(range(TRIAL_CONTEXT, TRIAL_CONTEXT + TRIAL_ROWS))
    tree = _run(model, pool, nodes, slots, context, words, [len(path) - 1 for path in paths])
    longest = max(paths, key=len)
    for depth, node in enumerate(longest):
        behind = np.append(context, np.arange(depth) + slots[-1] + 1)
        alone = _run(model, pool, [nodes[node]], [slots[-1] + 1 + depth], behind)
        if not torch.equal(alone[0], tree[node]):
            return False
    return True


def _run(model: CausalModel, pool: KVPool, tokens: list[int], slots: list[int], context: Indices,
         words: list[int] | None = None, depths: list[int] | None = None) -> torch.Tensor:
    builder = BatchBuilder()
    positions = [len(context) + depth for depth in depths or range(len(tokens))]
    builder.add(tokens, positions, slots, context, words, 0 if words is None else len(tokens))
    return model.logits(model.forward(builder.build(), pool)[0])
