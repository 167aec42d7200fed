"""Which trees grow all of their levels at once (see ``levels``), and how they become trees of their sessions.

Rules:
1. A tree that has its root's children and nothing else, of a session that ranks its tokens as they are, and that wants
   as many levels as a loop has. All others grow level by level, and nothing is different but time.
2. The host chooses each level's rows again from the numbers that came back. Where the device chose others, the tree
   ends there, and goes on level by level.
3. What cannot be captured is left to the usual way for good, with a warning.

It knows nothing about networks' kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from slipstream.base.errors import CapacityError
from slipstream.drafting.context import DraftContext, Indices
from slipstream.drafting.grow import ROOT
from slipstream.drafting.levels import MOST_BITS, Grown, LevelLoop, LevelNetwork, Seed, Shape
from slipstream.engine.backend import PagedAttention
from slipstream.engine.graphs import Capture
from slipstream.engine.kv import Slots
from slipstream.observe.log import logger

SESSIONS = (1, 2, 4, 8)


class AtOnce:
    """Loops for a few numbers of sessions."""

    def __init__(self, network: LevelNetwork, attention: PagedAttention, topk: int, levels: int, capture: Capture,
                 slots: Slots, max_context: int) -> None:
        self._shapes = [Shape(count, topk, levels) for count in SESSIONS]
        self._make: Callable[[Shape], LevelLoop] = lambda shape: LevelLoop(network, attention, shape, capture)
        self._slots, self._max_context = slots, max_context
        self._loops: dict[Shape, LevelLoop] = {}
        self._failed = False

    def warm(self) -> int:
        """Make all loops now, the largest first. Returns how many there are."""
        for shape in reversed(self._shapes):
            self._loop(shape.sessions)
        return len(self._loops)

    def loops(self) -> list[LevelLoop]:
        """Those that were made."""
        return list(self._loops.values())

    def deepen(self, wanted: Mapping[int, int], contexts: Mapping[int, DraftContext]) -> dict[int, int]:
        """Grow what can be grown so, of the levels that sessions want. Returns how many each session got."""
        fitting = [contexts[session] for session, levels in wanted.items() if self._fits(contexts[session], levels)]
        done: dict[int, int] = {}
        most = self._shapes[-1].sessions
        for first in range(0, len(fitting), most):
            done |= self._grow(fitting[first : first + most])
        return done

    def _fits(self, context: DraftContext, levels: int) -> bool:
        tree, shape, sampling = context.tree, self._shapes[0], context.sampling
        if tree is None or context.behind or tree.computed or context.sent.full or levels != shape.levels:
            return False
        return (sampling.greedy and not sampling.logit_bias and not sampling.path_dependent
                and tree.topk == shape.topk == len(tree.frontier) and tree.depth() == 1
                and tree.most >= shape.topk * shape.levels
                and context.base + shape.levels - context.start <= self._max_context)

    def _grow(self, contexts: Sequence[DraftContext]) -> dict[int, int]:
        each, taken = self._shapes[0].spare, list[tuple[DraftContext, Seed]]()
        loop = self._loop(len(contexts))
        if loop is None:
            return {}
        for context in contexts:
            try:
                taken.append((context, _seed(context, self._slots.alloc(each))))
            except CapacityError:  # it may find room for one level
                break
        kept: dict[int, int] = {}
        try:
            found = loop([seed for _, seed in taken]) if taken else None
            for (context, seed), grown in zip(taken, found or [], strict=bool(found)):
                kept[context.session] = _adopt(context, seed, grown)
        finally:
            for context, seed in taken:
                self._slots.free(seed.slots[kept.get(context.session, 0) * self._shapes[0].topk :])
        return kept

    def _loop(self, count: int) -> LevelLoop | None:
        shape = next(shape for shape in self._shapes if shape.sessions >= count)
        if shape not in self._loops and not self._failed:
            try:
                self._loops[shape] = self._make(shape)
            except RuntimeError as error:
                self._failed = True
                logger("draft").warning("no graphs: trees grow level by level", sessions=shape.sessions,
                                        reason=str(error).strip().partition("\n")[0][:300])
        return self._loops.get(shape)


def spare_slots(topk: int, levels: int) -> int:
    """Slots at the end of a pool that the loops want for themselves; 0: no loop holds such a tree."""
    return Shape(SESSIONS[-1], topk, levels).spare if 0 < topk * levels <= MOST_BITS else 0


def _seed(context: DraftContext, slots: Indices) -> Seed:
    tree = context.tree
    assert tree is not None
    rows, place = context.states[ROOT]
    return Seed(context.slots, context.base - context.origin, [tree.tokens[node] for node in tree.frontier],
                [tree.scores[node] for node in tree.frontier], rows[place], slots)


def _adopt(context: DraftContext, seed: Seed, grown: Grown) -> int:
    """Make the device's tree the session's. Returns how many of its levels the host would have chosen, too."""
    tree = context.tree
    assert tree is not None
    k, first = tree.topk, 0
    for level, (tokens, scores) in enumerate(zip(grown.tokens.tolist(), grown.scores.tolist(), strict=True)):
        if level and [node - first for node in tree.frontier] != grown.picks[level - 1].tolist():
            return level
        first = len(tree.tokens)
        context.tree_slots = np.concatenate([context.tree_slots, seed.slots[level * k : (level + 1) * k]])
        context.states.update((node, (grown.states[level], row)) for row, node in enumerate(tree.frontier))
        tree.expand(list(zip(tokens, scores, strict=True)))
    return len(grown.tokens)
