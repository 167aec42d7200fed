"""Which trees are grown whole, from pending rows to leaves, in one call on the network; and how they become trees of
their sessions.

Rules:
1. A tree that is to begin, of a session that ranks its tokens as they are and does not run ahead, with few pending
   rows. All others grow level by level, and nothing is different but time.
2. The host chooses each level's rows again from the numbers that came back: its rules (``grow.TreeGrowth``) stay the
   only ones. Where the network chose others, the tree ends there, and goes on level by level.
3. A session for which there are no slots is left out: it may find room for one level.

It knows nothing about networks' kinds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from slipstream.base.errors import CapacityError
from slipstream.drafting.context import DraftContext
from slipstream.drafting.grow import ROOT, TreeGrowth
from slipstream.engine.kv import Slots
from slipstream.engine.native.draft import MOST_BITS, Grown, Seed

FEW_ROWS, MOST_SESSIONS = 16, 8  # pending rows of a session, and sessions of a call: more are no small forward


class TreeNetwork(Protocol):
    """A ``network.Network`` that grows trees."""

    @property
    def slots(self) -> Slots: ...

    def trees(self, seeds: Sequence[Seed], topk: int) -> list[Grown]:
        """The trees of all seeds; KV is written at their slots."""
        ...


class WholeTrees:
    __slots__ = ("_network",)

    def __init__(self, network: TreeNetwork) -> None:
        self._network = network

    def grow(self, contexts: Sequence[DraftContext], wanted: Mapping[int, int], topk: int) -> dict[int, int]:
        """Grow what can be grown so, of so many levels (the root's children are one) as sessions want; windows have
        room for them. Returns how many each session got."""
        fitting = [c for c in contexts if _fits(c, wanted[c.session], topk)]
        done: dict[int, int] = {}
        for first in range(0, len(fitting), MOST_SESSIONS):
            done |= self._grow(fitting[first : first + MOST_SESSIONS], wanted, topk)
        return done

    def _grow(self, contexts: Sequence[DraftContext], wanted: Mapping[int, int], topk: int) -> dict[int, int]:
        taken: list[tuple[DraftContext, Seed]] = []
        for context in contexts:
            levels = wanted[context.session] - 1
            try:
                slots = self._network.slots.alloc(context.num_pending + levels * topk)
            except CapacityError:
                break
            tokens, position = context.tokens[context.done :], context.done - context.origin
            states = context.pull(len(tokens))
            assert states is not None
            taken.append((context, Seed(tokens, states, position, context.slots, slots, levels)))
        if not taken:
            return {}
        done: dict[int, int] = {}
        for (context, seed), grown in zip(taken, self._network.trees([seed for _, seed in taken], topk), strict=True):
            levels = _adopt(context, seed, grown, topk)
            self._network.slots.free(seed.slots[len(seed.tokens) + (levels - 1) * topk :])
            done[context.session] = levels
        return done


def _fits(context: DraftContext, levels: int, topk: int) -> bool:
    sampling, rows = context.sampling, context.num_pending
    return (levels > 0 and topk * (levels - 1) <= MOST_BITS and context.tree is None and not context.ahead
            and context.complete and rows <= FEW_ROWS and sampling.greedy and not sampling.logit_bias
            and not sampling.path_dependent and not context.sent.full)


def _adopt(context: DraftContext, seed: Seed, grown: Grown, topk: int) -> int:
    """Make a network's tree the session's. Returns how many of its levels the host would have chosen, too."""
    rows, states = len(seed.tokens), grown.states
    context.computed(seed.slots[:rows])
    tree = context.tree = TreeGrowth(topk)
    context.states[ROOT] = (states, 0)
    tree.expand([(grown.tokens[0], grown.scores[0])])
    first, place = 0, 1  # the newest level's first candidate, and its first row
    for level in range(seed.levels):
        if [node - first for node in tree.frontier] != grown.picks[level]:
            break
        first = len(tree.tokens)
        context.states.update((node, (states, place + row)) for row, node in enumerate(tree.frontier))
        tree.expand(list(zip(grown.tokens[place : place + topk], grown.scores[place : place + topk], strict=True)))
        place += topk
    context.tree_slots = seed.slots[rows : rows + place - 1]
    return 1 + (place - 1) // topk
