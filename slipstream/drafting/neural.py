"""NeuralDrafter: sessions, catching up and tree growth over any ``Network``, batch-first.

Rules:
1. One ``grow`` first computes pending rows of all its sessions in one forward of at most ``PREFILL_ROWS`` rows, the
   shortest first; a session that is still behind afterwards grows nothing this time and goes on the next.
2. Then trees grow one level at a time, ONE forward a level for all sessions (see ``tree.GrowingTree``); or whole
   where ``levels`` can.
3. A session for which there are no slots, or no target states, grows nothing: late is never an error.
4. Children are ranked as the target will choose: sampling parameters, path-dependent penalties, the shared keyed noise.

It knows nothing about the network's kind, links or verification.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import numpy as np
import torch

from slipstream.base.config import GrowthSection
from slipstream.base.errors import CapacityError, ConfigError, DeviceFull
from slipstream.drafting.levels import Levels, Network, Output, grow_whole
from slipstream.drafting.tree import NO_SLOTS, DraftContext, GrowingTree, Indices
from slipstream.engine.batch import BatchBuilder
from slipstream.engine.sampling import ChoiceRows, TokenHistory, rank
from slipstream.protocol.messages import FEATURE_DTYPES, Commit, Features, FeatureSpec, Growth, Open
from slipstream.protocol.tree import MAX_NODES

PREFILL_ROWS = 512  # rows of one catching-up forward: what other sessions wait for at most


class NeuralDrafter:
    """A ``drafting.base.Drafter`` with weights. ``max_context`` 0: what the network was trained for."""

    max_nodes = MAX_NODES - 1

    def __init__(self, name: str, network: Network, growth: GrowthSection, max_sessions: int,
                 max_context: int = 0, levels: Levels | None = None) -> None:
        """levels: what grows the network's trees whole."""
        window = min(max_context or network.max_context, network.max_context)
        self.name = name
        self.features: FeatureSpec | None = network.features
        self.vocab_size = network.vocab_size
        self.hidden_size = network.hidden_size
        self.max_context = window
        self.max_sessions = max_sessions
        self._network = network
        self.slots = network.slots  # all of them are free when no session is open
        self._levels = levels
        self.reshape(growth)
        self._contexts: dict[int, DraftContext] = {}

    def reshape(self, growth: GrowthSection) -> None:
        """Trees that begin from now on have this shape. Raises ConfigError for one that is too deep."""
        if self.max_context < 2 * (growth.num_steps + 1):
            raise ConfigError(f"draft.growth.num_steps: {self.max_context} tokens are too few for trees of depth "
                              f"{growth.num_steps}; raise it or lower draft.growth.num_steps")
        self._growth = growth

    def open(self, opens: Sequence[Open]) -> list[int]:
        """Begin sessions (again); returns the ids beyond ``max_sessions``. Nothing is computed yet."""
        refused = []
        for message in opens:
            known = self._contexts.get(message.session)
            if known is None and len(self._contexts) >= self.max_sessions:
                refused.append(message.session)
                continue
            tokens = message.tokens.tolist()
            history = TokenHistory.of(message.sampling, tokens[:message.prompt_len])
            if history is not None:
                history.append(tokens[message.prompt_len:])
            if known is not None:
                self.slots.free(known.close())
            tree = GrowingTree(len(tokens), next_id=1 if known is None else known.tree.next_id)
            self._contexts[message.session] = DraftContext(
                message.session, message.sampling, message.prompt_len, tokens, tree, history, self.max_context,
                self._network.lag)
        return refused

    def absorb(self, features: Sequence[Features]) -> None:
        """Take target states of the prompt. What does not fit the spec is passed over: its session grows nothing."""
        spec = self.features
        if spec is None:
            return
        known = [f for f in features if f.session in self._contexts and _fits(f, spec)]
        if not known:
            return
        for message, rows in zip(known, self._network.read(known), strict=True):
            freed = self._contexts[message.session].take(message.start, rows)
            if len(freed):
                self.slots.free(freed)

    def commit(self, commits: Sequence[Commit]) -> None:
        """Append committed tokens and their states; the next tree begins at the new base."""
        features, contexts = list[Features](), list[DraftContext]()
        for message in commits:
            context = self._contexts.get(message.session)
            if context is None:
                continue
            self.slots.free(context.commit(message.tokens.tolist()))
            contexts.append(context)
            if message.features is not None:
                features.append(message.features)
        if features:
            self.absorb(features)
        # Here too, so that a session that is followed without growing holds no more than a window of states.
        self._slide(contexts)

    def close(self, ids: Sequence[int]) -> None:
        """Forget sessions and free their slots."""
        for session in ids:
            context = self._contexts.pop(session, None)
            if context is not None:
                self.slots.free(context.close())

    def grow(self, ids: Sequence[int], budgets: Sequence[int], steps: int = 0) -> list[Growth]:
        """Up to ``min(budgets[i], num_draft_tokens)`` further nodes for each known session, ``steps`` levels deeper at
        most (0: ``num_steps``)."""
        began_s, most = perf_counter(), self._growth.num_draft_tokens
        wanted = [(self._contexts[session], min(budget, most))
                  for session, budget in zip(ids, budgets, strict=True) if session in self._contexts]
        self._deepen(wanted, steps)
        return [context.tree.growth(context.session, budget, began_s) for context, budget in wanted]

    def tree(self, session: int) -> GrowingTree:
        return self._contexts[session].tree

    def _deepen(self, wanted: Sequence[tuple[DraftContext, int]], steps: int) -> None:
        if steps:
            for context, _ in wanted:
                context.tree.aim()
        # A tree of n nodes is at most n levels deep, and the root's children cost no forward of their own.
        most = min(self._growth.num_steps, steps or self._growth.num_steps)
        left = {context.session: min(most, budget) for context, budget in wanted}
        behind = [context for context, _ in wanted if not context.tree.begun]
        if behind:
            self._slide(behind)
        if behind and self._levels is not None:
            for session, levels in grow_whole(self._levels, self.slots, behind, left, self._growth.topk).items():
                left[session] -= levels
            behind = [context for context in behind if not context.tree.begun]
        for session in self._catch_up(behind) if behind else ():
            left[session] -= 1
        while any(levels > 0 for levels in left.values()):
            level = [context for context, _ in wanted if left[context.session] > 0 and self._can_deepen(context)]
            if not level or not self._grow_level(level):
                break
            for session in left:
                left[session] -= 1

    def _catch_up(self, contexts: Sequence[DraftContext]) -> set[int]:
        """Compute pending rows. Returns the sessions that reached their newest token and have a new tree."""
        builder, taken, rows_left = BatchBuilder(), list[tuple[DraftContext, Indices, bool]](), PREFILL_ROWS
        inputs: list[torch.Tensor] = []
        for context in sorted(contexts, key=lambda c: c.num_pending):
            count = min(context.num_pending, rows_left)
            slots = self._alloc(count)
            if slots is None:
                continue
            rows = range(context.done, context.done + count)
            builder.add(context.tokens[rows.start:rows.stop], [row - context.origin for row in rows], slots.tolist(),
                        context.slots, logits="last")
            taken.append((context, slots, context.done + count == context.base))
            states = context.pull(count)
            if states is not None:
                inputs.append(states)
            rows_left -= count
        if not taken:
            return set()
        try:
            output = self._forward(builder, inputs)
        except DeviceFull:
            for _, slots, _ in taken:  # nobody's yet
                self.slots.free(slots)
            raise
        fresh = set()
        for place, (context, slots, finished) in enumerate(taken):
            context.computed(slots)
            if finished:
                context.tree.width = self._growth.topk
                self._expand(context, output, range(place, place + 1), NO_SLOTS)
                fresh.add(context.session)
        return fresh

    def _slide(self, contexts: Sequence[DraftContext]) -> None:
        for context in contexts:
            if len(freed := context.slide(self._growth.num_steps)):
                self.slots.free(freed)

    def _can_deepen(self, context: DraftContext) -> bool:
        tree = context.tree
        if not tree.begun or not tree.frontier or tree.room <= 0:
            return False
        # A frontier at depth d stands at base - 1 + d and must fit the window too.
        return context.base + tree.depth() - context.start <= self.max_context

    def _grow_level(self, contexts: Sequence[DraftContext]) -> bool:
        """Compute the frontier of each tree and give its nodes children. False when nothing could be computed."""
        builder, taken = BatchBuilder(), list[tuple[DraftContext, range, Indices]]()
        inputs: list[torch.Tensor] = []
        for context in contexts:
            slots = self._alloc(len(context.tree.frontier))
            if slots is None:
                continue
            rows = _add_frontier(builder, context, slots)
            if context.lag:
                inputs.append(context.states_of([context.tree.parents[node] for node in context.tree.frontier]))
            taken.append((context, rows, slots))
        if not taken:
            return False
        try:
            output = self._forward(builder, inputs)
        except DeviceFull:
            for _, _, slots in taken:  # nobody's yet
                self.slots.free(slots)
            raise
        for context, rows, slots in taken:
            self._expand(context, output, rows, slots)
        return True

    def _expand(self, context: DraftContext, output: Output, rows: range, slots: Indices) -> None:
        """Rank the children of the frontier, whose outputs are ``rows``."""
        tree = context.tree
        paths = [tree.path(node) for node in tree.frontier]
        choice = ChoiceRows(context.sampling, rows, [context.base + len(path) for path in paths],
                            [context.base - context.prompt_len + len(path) for path in paths], context.history, paths)
        tokens, scores = rank(output.logits, choice, self._growth.topk, self._network.vocabulary)
        if output.states is not None:
            context.states.update((node, (output.states, row)) for node, row in zip(tree.frontier, rows, strict=True))
        tree.expand([*zip(tokens.tolist(), scores.tolist(), strict=True)], slots)

    def _forward(self, builder: BatchBuilder, inputs: Sequence[torch.Tensor]) -> Output:
        device = self._network.device
        try:
            return self._network.forward(builder.build(device, torch.cat(list(inputs)) if inputs else None))
        except torch.OutOfMemoryError as error:
            raise DeviceFull("the draft's device has no memory for this step; lower draft.max_sessions") from error

    def _alloc(self, count: int) -> Indices | None:
        try:
            return self.slots.alloc(count) if count else None
        except CapacityError:
            return None


def _add_frontier(builder: BatchBuilder, context: DraftContext, slots: Indices) -> range:
    tree = context.tree
    tokens = [tree.tokens[node] for node in tree.frontier]
    positions = [context.base - 1 - context.origin + tree.depths[node] for node in tree.frontier]
    mask_len = len(tree.computed) + len(tree.frontier)
    if mask_len <= MAX_NODES:
        return builder.add(tokens, positions, slots.tolist(), np.concatenate([context.slots, tree.slots]),
                           tree.words(), mask_len)
    # No word has so many bits: each node is a sequence of its own, with its ancestors before it.
    first = len(builder.tokens)
    for node, token, position, slot in zip(tree.frontier, tokens, positions, slots.tolist(), strict=True):
        builder.add([token], [position], [slot],
                    np.concatenate([context.slots, tree.slots[tree.above(node)]]))
    return range(first, len(builder.tokens))


def _fits(features: Features, spec: FeatureSpec) -> bool:
    size = features.num_rows * spec.width * FEATURE_DTYPES[spec.dtype]
    return (features.dtype == spec.dtype and features.num_rows >= 1 and features.start >= 0
            and len(features.rows) == size)
