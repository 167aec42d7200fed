"""Running token sequences and trees on a ModelRunner, as plainly as possible; for tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from slipstream.engine.batch import BatchBuilder
from slipstream.engine.runner import ModelRunner
from slipstream.protocol.tree import DraftTree

NOTHING = np.zeros(0, np.int64)


def run(runner: ModelRunner, tokens: Sequence[int], context: np.ndarray = NOTHING) -> tuple[torch.Tensor, np.ndarray]:
    """Compute ``tokens`` behind ``context`` in one segment: logits [len, V] and all slots so far."""
    slots = runner.slots.alloc(len(tokens))
    start = len(context)
    builder = BatchBuilder()
    builder.add(list(tokens), range(start, start + len(tokens)), slots.tolist(), context)
    return runner.forward(builder.build()), np.concatenate([context, slots])


def run_tree(runner: ModelRunner, tree: DraftTree, context: np.ndarray) -> tuple[torch.Tensor, np.ndarray]:
    """Verify a whole tree: logits [N, V] and the slots of its nodes. ``context`` ends before the root."""
    slots = runner.slots.alloc(len(tree))
    builder = BatchBuilder()
    builder.add(tree.tokens, [tree.base - 1 + level for level in tree.levels()], slots.tolist(), context,
                tree.ancestors(), len(tree))
    return runner.forward(builder.build()), slots
