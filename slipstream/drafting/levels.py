"""Which trees are grown whole, from pending rows to leaves, in one call; and how they become trees of their sessions.

Rules:
1. Level by level on torch (``neural.NeuralDrafter``) is the specification. What grows whole trees (``Levels``: CPU
   kernels of our own in one call, a captured graph on a GPU) is for sessions that begin a tree and rank its tokens as
   they are, with few pending rows. All others grow level by level, and nothing is different but time.
2. The host chooses each level's rows again from the numbers that came back: its rules (``tree.GrowingTree``) stay the
   only ones. Where others were chosen, the tree ends there, and goes on level by level.
3. A session for which there are no slots is left out: it may find room for one level.

It knows nothing about networks' kinds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from slipstream.base.errors import CapacityError
from slipstream.drafting.context import DraftContext
from slipstream.drafting.tree import ROOT, GrowingTree
from slipstream.engine.kv import Slots
from slipstream.engine.native.draft import MOST_BITS, Grown, Seed
from slipstream.protocol.tree import MAX_HELD

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
