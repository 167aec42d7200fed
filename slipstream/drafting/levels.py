"""Which trees are grown whole, from pending rows to leaves, in one call; and how they become trees of their sessions.

Rules:
1. Level by level on torch (``neural.NeuralDrafter``) is the specification. What grows whole trees (``Levels``: CPU
   kernels of our own in one call, a captured graph on a GPU) is for sessions that begin a tree and rank its tokens as
   they are, with few pending rows. All others grow level by level, and nothing is different but time.
2. The host chooses each level's rows again from the numbers that came back: its rules (``tree.GrowingTree``) stay the
   only ones. Where others were chosen, the tree ends there, and goes on level by level.
3. A session for which there are no slots is left out: it may find room for one level.

What a drafter with weights runs: a small model or a head, behind one forward.

Rules:
1. A network is stateless between forwards but for its KV slots; sessions are the drafter's.
2. ``lag`` 0: a row needs its token alone. ``lag`` 1: the row of the token at position p also needs the target's state
   at p - 1, the one from which that token was chosen; below the newest token the network's own states take its place.

It knows nothing about networks' kinds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from slipstream.base.errors import CapacityError
from slipstream.drafting.tree import ROOT, DraftContext, GrowingTree
from slipstream.engine.batch import ForwardBatch, rows_batch
from slipstream.engine.kv import Slots
from slipstream.engine.model import dtype_of
from slipstream.engine.native.draft import MOST_BITS, Grown, Seed
from slipstream.protocol.messages import FEATURE_DTYPES, Features, FeatureSpec
from slipstream.protocol.tree import MAX_HELD


@dataclass(frozen=True, slots=True)
class Output:
    """The rows of a forward whose logits were wanted."""

    logits: torch.Tensor  # [R, V] float32, float64 for a float64 network; V of the draft vocabulary
    states: torch.Tensor | None  # [R, W] the input of a child's row; None with lag 0


class Network(Protocol):
    """A draft model or head on one device."""

    lag: int
    vocab_size: int  # of the target
    hidden_size: int  # of the target; 0: any
    features: FeatureSpec | None  # None with lag 0
    vocabulary: torch.Tensor | None  # int64 [V] token ids of the logits' columns; None: the columns are the ids
    max_context: int  # tokens it was trained for
    slots: Slots
    device: torch.device

    def read(self, features: Sequence[Features]) -> list[torch.Tensor]:
        """Target states as rows of this network's input, [M, W] for each. Only with lag 1."""
        ...

    def forward(self, batch: ForwardBatch) -> Output:
        """Run a batch; ``batch.features`` [T, W] with lag 1. KV is written at the batch's slots."""
        ...


def wire_rows(features: Sequence[Features], spec: FeatureSpec, device: torch.device,
              dtype: torch.dtype) -> torch.Tensor:
    """The rows of ``features``, already checked against ``spec``, one below the other: [sum of M, width], in a
    network's own dtype and place. This is the edge at which a target's dtype becomes a drafter's."""
    content = bytearray(features[0].rows) if len(features) == 1 else bytearray().join(f.rows for f in features)
    rows = torch.frombuffer(content, dtype=dtype_of(spec.dtype)).view(-1, spec.width)
    return rows.to(device, dtype, non_blocking=True)


def run_network(network: Network, num_rows: int) -> None:
    """One forward of so many rows of token 0, whose slots are free again afterwards."""
    states, spec = None, network.features
    if spec is not None:
        content = bytes(num_rows * spec.width * FEATURE_DTYPES[spec.dtype])
        (states,) = network.read([Features(0, 0, content, num_rows, spec.dtype)])
    slots = network.slots.alloc(num_rows)
    try:
        network.forward(rows_batch(slots, network.device, states))
    finally:
        network.slots.free(slots)


def apart(rows: torch.Tensor, features: Sequence[Features]) -> list[torch.Tensor]:
    """[sum of M, W] -> [M, W] for each of ``features``."""
    if len(features) == 1:
        return [rows]
    return list(torch.split_with_sizes(rows, [f.num_rows for f in features]))


MOST_SESSIONS = 8  # of a call


class Levels(Protocol):
    """Grows greedy trees of one network, all their levels at once."""

    @property
    def most_rows(self) -> int:
        """Pending rows of one session."""
        ...

    def takes(self, levels: int, topk: int) -> bool:
        """Whether it grows trees of so many levels beyond the root's children."""
        ...

    def trees(self, seeds: Sequence[Seed], topk: int) -> list[Grown]:
        """The trees of at most ``MOST_SESSIONS`` seeds; KV is written at their slots. Fewer levels where it
        cannot go on."""
        ...


def grow_whole(backend: Levels, slots: Slots, contexts: Sequence[DraftContext], wanted: Mapping[int, int],
               topk: int) -> dict[int, int]:
    """Grow what can be grown so, of so many levels (the root's children are one) as sessions want; windows have room
    for them. Returns how many each session got."""
    fitting = [c for c in contexts if _fits(backend, c, wanted[c.session], topk)]
    done: dict[int, int] = {}
    for first in range(0, len(fitting), MOST_SESSIONS):
        taken: list[tuple[DraftContext, Seed]] = []
        for context in fitting[first : first + MOST_SESSIONS]:
            levels, row = wanted[context.session] - 1, context.done
            try:
                room = slots.alloc(len(context.tokens) - row + levels * topk)
            except CapacityError:
                break
            taken.append((context, context.seed(row, room, levels)))
        if not taken:
            break
        left = {context.session: seed.slots for context, seed in taken}
        try:
            found = backend.trees([seed for _, seed in taken], topk)
            for (context, seed), grown in zip(taken, found, strict=True):
                done[context.session] = levels = _adopt(context, seed, grown, topk)
                left[context.session] = seed.slots[len(seed.tokens) + (levels - 1) * topk :]
        finally:
            for unused in left.values():
                if len(unused):
                    slots.free(unused)
    return done


def _fits(backend: Levels, context: DraftContext, levels: int, topk: int) -> bool:
    rows, done = context.num_pending, context.done
    return (levels > 0 and topk * (levels - 1) <= MOST_BITS and backend.takes(levels - 1, topk)
            and context.plain and not context.tree.begun and context.tree.num_sent < MAX_HELD - 1
            and 0 < rows <= backend.most_rows and done + rows == len(context.tokens))


def _adopt(context: DraftContext, seed: Seed, grown: Grown, topk: int) -> int:
    """Make a backend's tree the session's. Returns how many of its levels the host would have chosen, too."""
    rows, tree = len(seed.tokens), context.tree
    context.computed(seed.slots[:rows])
    levels = adopted(tree, grown, seed.levels, topk)
    tree.slots = seed.slots[rows : rows + (levels - 1) * topk]
    context.states[ROOT] = (grown.states, 0)
    for place, node in enumerate(tree.computed, start=1):
        context.states[node] = (grown.states, place)
    return levels


def adopted(tree: GrowingTree, grown: Grown, levels: int, topk: int) -> int:
    """The levels of ``grown``, the root's children the first of them, that ``tree`` chooses, too."""
    tree.width = topk
    tree.expand([(grown.tokens[0], grown.scores[0])])
    for level in range(levels):
        if level == len(grown.picks) or tree.picks != grown.picks[level]:
            return 1 + level
        first = 1 + level * topk
        tree.expand([*zip(grown.tokens[first : first + topk], grown.scores[first : first + topk], strict=True)])
    return 1 + levels
