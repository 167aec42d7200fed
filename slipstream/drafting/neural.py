"""NeuralDrafter: a drafter over any ``Network``: it keeps sessions, computes their committed tokens and grows trees.

Rules:
1. ``grow`` first computes pending rows of all its sessions in one forward of about ``PREFILL_ROWS`` rows, the session
   with the fewest first; each gets at least ``ROUND_ROWS``. A session that still has pending rows then grows nothing;
   its other rows are computed by the next ``grow`` or ``read``.
2. Then trees grow one level at a time, ONE forward a level for all sessions (see ``tree.GrowingTree``). That is the
   specification. A ``TreeBackend`` (our CPU kernels in one call, or a captured graph on a GPU) grows a whole new tree
   for sessions with few pending rows. What is sent of them is the same, except that a graph ranks without filters
   (``graph.is_narrow``).
3. The host chooses each level's rows again from the scores that the backend returns, so ``tree.GrowingTree`` alone
   decides. Where the backend chose other rows, the tree is cut there and grows on level by level.
4. A session without its target states or without free slots grows nothing; that is no error. Before slots run out, the
   sessions with most rows give up their older halves, else none could go on.
5. Children are ranked as the target will choose: sampling parameters, path-dependent penalties, the shared keyed noise.

It knows nothing about the network's kind, links or verification.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from heapq import heapify, heapreplace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.base.config import GrowthSection
from slipstream.base.errors import CapacityError, ConfigError, DeviceFull
from slipstream.choosing.logits import TokenHistory
from slipstream.choosing.sampling import ChoiceRows, ranked
from slipstream.choosing.transfer import to_device
from slipstream.drafting.block import CANDIDATES, BlockNode, BlockPass, BlockStates
from slipstream.drafting.fresh import MIN_ARRAY_TREES, FreshTrees
from slipstream.drafting.network import Network, Output
from slipstream.drafting.tree import NO_SLOTS, ROOT, SENT_PER_ROW, DraftContext, GrowingTree
from slipstream.engine.batch import BatchBuilder
from slipstream.engine.kv import Indices, Slots
from slipstream.engine.native.draft import Grown, Seed
from slipstream.protocol.messages import FEATURE_DTYPES, Commit, Features, FeatureSpec, Growth, Open
from slipstream.protocol.requests import Sampling
from slipstream.protocol.tree import MAX_NODES


class TreeBackend(Protocol):
    """Grows trees of one network, all their levels at once."""

    @property
    def max_batch(self) -> int:
        """The most sessions of one call of ``grow_trees``."""
        ...

    @property
    def prunes(self) -> bool:
        """Whether it leaves rows out as ``Seed.wanted`` says. Else all trees of its drafter have all rows."""
        ...

    def reshape(self, topk: int, levels: int) -> None:
        """From now on trees have ``levels`` levels below the root's children, each of ``topk`` rows."""
        ...

    def supports(self, rows: int, levels: int, topk: int, sampling: Sampling | None) -> bool:
        """Whether it can grow such a tree for a session with ``rows`` pending rows. levels: below the root's children.
        sampling: how children are ranked; None: greedily, by the logits as they are."""
        ...

    def grow_trees(self, seeds: Sequence[Seed], topk: int, alone: bool = False) -> Grown:
        """Grow the trees of at most ``max_batch`` seeds; KV is written at their slots. A tree may get fewer levels.
        alone: the drafter has no other session."""
        ...


def grow_whole_trees(backend: TreeBackend, slots: Slots, contexts: Sequence[DraftContext], wanted: Mapping[int, int],
                     topk: int, alone: bool = False) -> dict[int, int]:
    """Grow whole trees for the sessions that ``backend`` supports. wanted: levels of each session, the root's children
    counted; windows have room for them. alone: the drafter has no other session. Returns the levels that each session
    got."""
    supported = [c for c in contexts if _can_grow_whole(backend, c, wanted[c.session], topk)]
    levels: dict[int, int] = {}
    for first in range(0, len(supported), backend.max_batch):
        unowned: dict[int, Indices] = {}  # slots that no session owns yet
        try:
            seeded = _allocate_seeds(slots, supported[first : first + backend.max_batch], wanted, topk, unowned)
            if not seeded:
                return levels
            grown = backend.grow_trees([seed for _, seed in seeded], topk, alone)
            seeded, grown = _drop_unknown(seeded, grown)
            counts = adopt_levels([context.tree for context, _ in seeded], grown,
                                  (grown.known_levels - 1).tolist(), topk)
            for (context, seed), states, picks, count in zip(seeded, grown.states.unbind(), grown.picks, counts,
                                                             strict=True):
                levels[context.session] = count
                unowned[context.session] = _mark_computed(context, seed, states, picks[: count - 1])
        finally:
            for unused in unowned.values():
                if len(unused):
                    slots.free(unused)
    return levels


def _allocate_seeds(slots: Slots, contexts: Sequence[DraftContext], wanted: Mapping[int, int], topk: int,
                    unowned: dict[int, Indices]) -> list[tuple[DraftContext, Seed]]:
    """The first of ``contexts``, as many as there are slots for, each with its seed. Their slots are added to
    ``unowned``."""
    seeded: list[tuple[DraftContext, Seed]] = []
    for context in contexts:
        levels, row = wanted[context.session] - 1, context.first_pending
        try:
            allocated = slots.alloc(len(context.tokens) - row + levels * topk)
        except CapacityError:
            break
        unowned[context.session] = allocated
        seeded.append((context, context.seed(row, allocated, levels)))
    return seeded


def _drop_unknown(seeded: list[tuple[DraftContext, Seed]],
                  grown: Grown) -> tuple[list[tuple[DraftContext, Seed]], Grown]:
    """Keep the trees with at least one known level. The others' rows become pending again."""
    known: list[int] = grown.known_levels.tolist()
    if all(known):
        return seeded, grown
    for (context, seed), num_known in zip(seeded, known, strict=True):
        if not num_known:
            context.restore_inputs(seed)
    usable: list[int] = grown.known_levels.nonzero()[0].tolist()
    return [seeded[index] for index in usable], grown.select(usable)


def _can_grow_whole(backend: TreeBackend, context: DraftContext, levels: int, topk: int) -> bool:
    rows = context.num_pending
    return (levels > 0 and not context.tree.begun and rows > 0
            and context.first_pending + rows == len(context.tokens)
            and backend.supports(rows, levels - 1, topk, context.ranking))


def _mark_computed(context: DraftContext, seed: Seed, states: torch.Tensor, picks: Indices) -> Indices:
    """Record that a session's pending rows and nodes of its tree are computed: those of ``picks`` [l, K]. states
    [R, W]: see ``Grown``. Returns the slots that are left."""
    rows, tree = len(seed.tokens), context.tree
    places = [rows + place for place, pick in enumerate(picks.ravel().tolist()) if pick >= 0]
    context.add_computed(seed.slots[:rows])
    tree.slots = seed.slots[places]
    for place, node in zip((rows - 1, *places), (ROOT, *tree.computed), strict=True):
        context.states[node] = (states, 1 + place - rows)
    return seed.slots[sorted({*range(rows, len(seed.slots))}.difference(places))]


def adopt_levels(trees: Sequence[GrowingTree], grown: Grown, levels: Sequence[int], topk: int) -> list[int]:
    """Put the ``grown`` levels into ``trees``, as far as the trees choose the same rows. Returns the levels of each
    tree: the root's children, and at most ``levels`` below them."""
    if len(trees) >= MIN_ARRAY_TREES and all(tree.is_fresh and not tree.wanted for tree in trees):
        adopted = _adopt_as_arrays(trees, grown, levels, topk)
        if adopted is not None:
            return adopted
    parts = (grown.tokens.tolist(), grown.scores.tolist(), grown.picks.tolist())
    return [_adopt_tree(tree, tokens, scores, picks, count, topk)
            for tree, tokens, scores, picks, count in zip(trees, *parts, levels, strict=True)]


def _adopt_tree(tree: GrowingTree, tokens: list[list[int]], scores: list[list[float]], picks: list[list[int]],
             levels: int, topk: int) -> int:
    tree.width = topk
    tree.expand([(tokens[0], scores[0])])
    for level in range(levels):
        if level == len(picks):
            return 1 + level
        count = picks[level].index(-1) if picks[level][-1] < 0 else topk
        if tree.picks != picks[level][:count]:
            return 1 + level
        rows = slice(1 + level * topk, 1 + level * topk + count)
        tree.expand([*zip(tokens[rows], scores[rows], strict=True)])
    return 1 + levels


def _adopt_as_arrays(trees: Sequence[GrowingTree], grown: Grown, levels: Sequence[int], topk: int) -> list[int] | None:
    """The same with arrays; None: a score is not finite, which arrays cannot express."""
    fresh, wanted, adopted = FreshTrees(len(trees), topk), np.array(levels), np.ones(len(trees), np.int64)
    same, finite = np.ones(len(trees), bool), fresh.expand(grown.tokens[:, :1], grown.scores[:, :1])
    for level in range(min(max(levels), grown.picks.shape[1])):
        if not finite[same].all():
            return None
        same &= (level < wanted) & (fresh.picks == grown.picks[:, level]).all(1)
        if not same.any():
            break
        rows = slice(1 + level * topk, 1 + (level + 1) * topk)
        adopted, finite = adopted + same, fresh.expand(grown.tokens[:, rows], grown.scores[:, rows])
    if not finite[same].all():
        return None
    counts: list[int] = adopted.tolist()
    fresh.write_to(trees, counts)
    return counts


PREFILL_ROWS = 512  # rows of one forward of pending rows: it bounds how long other sessions wait
ROUND_ROWS = 16  # of each session in any case: about as many as a round commits
MIN_ROWS = 32  # a session with no more gives none up


class NeuralDrafter:
    """A ``drafting.Drafter`` with weights. ``max_context`` 0: the network's own."""

    max_nodes = MAX_NODES - 1

    def __init__(self, name: str, network: Network, growth: GrowthSection, max_sessions: int,
                 max_context: int = 0, backend: TreeBackend | None = None) -> None:
        """backend: grows whole trees; None: trees grow level by level only."""
        window = min(max_context or network.max_context, network.max_context)
        self.name = name
        self.features: FeatureSpec | None = network.features
        self.vocab_size = network.vocab_size
        self.hidden_size = network.hidden_size
        self.max_context = window
        self.max_sessions = max_sessions
        self.network = network
        self.slots = network.slots  # all of them are free when no session is open
        self._backend: TreeBackend | None = None
        self.reshape(growth)
        self._backend = backend  # made for this shape already, so not reshaped above
        self._prunes = backend is None or backend.prunes
        self._contexts: dict[int, DraftContext] = {}

    def reshape(self, growth: GrowthSection) -> None:
        """Trees that begin from now on have this shape. Raises ConfigError for one that is too deep."""
        if self.max_context < 2 * (growth.num_steps + 1):
            raise ConfigError(f"draft.growth.num_steps: {self.max_context} tokens are too few for trees of depth "
                              f"{growth.num_steps}; raise it or lower draft.growth.num_steps")
        self._growth = growth
        if self._backend is not None:
            self._backend.reshape(growth.topk, growth.num_steps - 1)

    def open(self, opens: Sequence[Open]) -> list[int]:
        """Begin sessions (again); returns the ids beyond ``max_sessions``. Nothing is computed yet."""
        refused = []
        for message in opens:
            known = self._contexts.get(message.session)
            if known is None and len(self._contexts) >= self.max_sessions:
                refused.append(message.session)
                continue
            tokens = self._embeddable(message.tokens)
            history = TokenHistory.of(message.sampling, tokens, message.prompt_len)
            if known is not None:
                self.slots.free(known.close())
            tree = GrowingTree(len(tokens), next_id=1 if known is None else known.tree.next_id)
            self._contexts[message.session] = DraftContext(
                message.session, message.sampling, message.prompt_len, tokens, tree, history, self.max_context,
                0 if self.features is None else 1, self.network.zero_fill)
        return refused

    def absorb(self, features: Sequence[Features]) -> None:
        """Take target states. Those that do not fit the spec are ignored: their session grows nothing."""
        spec = self.features
        if spec is None:
            return
        known = [f for f in features if f.session in self._contexts and _fits_spec(f, spec)]
        if not known:
            return
        for message, rows in zip(known, self.network.read(known), strict=True):
            context = self._contexts[message.session]
            if not context.zero_fill and message.start > context.next_state:
                self._catch_up_fully(context)
            freed = context.add_states(message.start, rows)
            if len(freed):
                self.slots.free(freed)
            if context.num_rows + self._growth.num_steps > context.window:  # also where the session never grows
                self._slide([context])

    def _catch_up_fully(self, context: DraftContext) -> None:
        """Compute the pending rows, as far as there are slots: after a gap they could not be computed any more."""
        before = 0
        while before != context.num_pending:
            before = context.num_pending
            self._catch_up([context])

    def commit(self, commits: Sequence[Commit]) -> None:
        """Append committed tokens; the next tree begins at the new base."""
        for message in commits:
            context = self._contexts.get(message.session)
            if context is not None:
                self.slots.free(context.commit(self._embeddable(message.tokens)))

    def close(self, ids: Sequence[int]) -> None:
        """Forget sessions and free their slots."""
        for session in ids:
            context = self._contexts.pop(session, None)
            if context is not None:
                self.slots.free(context.close())

    def grow(self, ids: Sequence[int], budgets: Sequence[int], steps: int = 0) -> list[Growth]:
        """Up to ``budgets[i]`` further nodes for each known session, at most ``steps`` levels deeper; 0: ``num_steps``
        levels, and no more than ``num_draft_tokens`` nodes. Raises DeviceFull where memory runs out."""
        max_nodes = max(budgets, default=0) if steps else self._growth.num_draft_tokens
        wanted = [(self._contexts[session], min(budget, max_nodes))
                  for session, budget in zip(ids, budgets, strict=True) if session in self._contexts]
        self._deepen(wanted, steps)
        return [context.tree.next_growth(context.session, budget) for context, budget in wanted]

    def read(self, ids: Sequence[int]) -> list[int]:
        """Compute pending rows, as many as one ``grow`` would. Returns the sessions that have more of them, if this
        call computed any. Raises DeviceFull."""
        reading = [self._contexts[session] for session in ids if session in self._contexts]
        self._slide(reading)
        self._make_room(reading, 0)
        before = sum([context.num_pending for context in reading])
        if before:
            self._catch_up(reading)
            if self.network.device.type == "cuda":  # else all parts queue on the device, and a new commit waits for all
                torch.cuda.current_stream(self.network.device).synchronize()
        unfinished = [context for context in reading if context.num_pending]
        return [context.session for context in unfinished] if sum([c.num_pending for c in unfinished]) < before else []

    def tree(self, session: int) -> GrowingTree:
        return self._contexts[session].tree

    def _embeddable(self, tokens: NDArray[np.int32]) -> list[int]:
        """The tokens as a list. A target with more padding may send an id beyond our embedding: it becomes our last."""
        ids: list[int] = np.minimum(tokens, self.vocab_size - 1).tolist()
        return ids

    def _deepen(self, wanted: Sequence[tuple[DraftContext, int]], steps: int) -> None:
        for context, budget in wanted:
            context.tree.wanted = budget if self._prunes and context.tree.is_fresh else 0
            if steps:
                context.tree.grow_ahead(budget // SENT_PER_ROW)
        # A tree of n nodes is at most n levels deep, and the root's children cost no forward of their own.
        max_levels = steps or self._growth.num_steps
        levels_left = {context.session: min(max_levels, budget) for context, budget in wanted}
        new = [context for context, _ in wanted if not context.tree.begun]
        if new:
            self._slide(new)
            self._make_room(new, self._growth.topk * sum([levels_left[context.session] for context in new]))
        if new and self._backend is not None:
            grown = grow_whole_trees(self._backend, self.slots, new, levels_left, self._growth.topk,
                                     len(self._contexts) == 1)
            for session, levels in grown.items():
                levels_left[session] -= levels
            new = [context for context in new if not context.tree.begun]
        for session in self._catch_up(new) if new else ():
            levels_left[session] -= 1
        while any(levels > 0 for levels in levels_left.values()):
            growing = [context for context, _ in wanted
                       if levels_left[context.session] > 0 and self._can_deepen(context)]
            if not growing:
                break
            self._grow_level(growing)
            for session in levels_left:
                levels_left[session] -= 1

    def _catch_up(self, contexts: Sequence[DraftContext]) -> set[int]:
        """Compute pending rows. Returns the sessions that reached their newest token and have a new tree."""
        builder, added, rows_left = BatchBuilder(), list[tuple[DraftContext, Indices, bool]](), PREFILL_ROWS
        inputs: list[torch.Tensor] = []
        try:
            for context in sorted(contexts, key=lambda c: c.num_pending):
                count = min(context.num_pending, max(rows_left, ROUND_ROWS))
                slots = self._alloc(count)
                if slots is None:
                    continue
                rows = range(context.first_pending, context.first_pending + count)
                builder.add(context.tokens[rows.start:rows.stop], [row - context.origin for row in rows],
                            slots.tolist(), context.slots, logits="last")
                added.append((context, slots, context.first_pending + count == context.base))
                states = context.take_inputs(count)
                if states is not None:
                    inputs.append(states)
                rows_left -= count
            if not added:
                return set()
            output = self._forward(builder, inputs)
        except torch.OutOfMemoryError as error:
            raise self._device_full([slots for _, slots, _ in added]) from error
        ready = list[tuple[DraftContext, range, Indices]]()
        for row, (context, slots, reached_newest) in enumerate(added):
            context.add_computed(slots)
            if reached_newest:
                context.tree.width = self._growth.topk
                ready.append((context, range(row, row + 1), NO_SLOTS))
        self._expand(output, ready)
        return {context.session for context, _, _ in ready}

    def _slide(self, contexts: Sequence[DraftContext]) -> None:
        for context in contexts:
            if len(freed := context.slide(self._growth.num_steps)):
                self.slots.free(freed)

    def _make_room(self, contexts: Sequence[DraftContext], num_nodes: int) -> None:
        """Rule 4. ``num_nodes``: that will be computed below the newest tokens of ``contexts``, at most."""
        most = PREFILL_ROWS + ROUND_ROWS * len(contexts)
        if self.slots.num_free - num_nodes >= most:
            return
        wanted = sum([context.num_pending for context in contexts])
        reading, largest_first = {context.session for context in contexts}, list[tuple[int, int]]()
        while self.slots.num_free - num_nodes < min(most, wanted):
            if not largest_first:  # ordered once: there may be hundreds, and as many of them give some up
                largest_first = [(-context.num_rows, session) for session, context in self._contexts.items()]
                heapify(largest_first)
            negative_rows, session = largest_first[0]
            if -negative_rows <= MIN_ROWS:
                break
            largest = self._contexts[session]
            pending = largest.num_pending
            self.slots.free(largest.drop_oldest(-negative_rows // 2))
            heapreplace(largest_first, (-largest.num_rows, session))
            if session in reading:
                wanted += largest.num_pending - pending

    def _can_deepen(self, context: DraftContext) -> bool:
        tree = context.tree
        if not tree.begun or not tree.frontier:
            return False
        if context.block is not None:
            return any(_depth(tree, node) < context.block[0].reach for node in tree.frontier)
        # A frontier at depth d stands at base - 1 + d and must fit the window too.
        return context.base + tree.depth() - context.start <= self.max_context

    def _grow_level(self, contexts: Sequence[DraftContext]) -> None:
        """Compute the frontier of each tree, as far as there are slots, and give its nodes children."""
        if any(context.block is not None for context in contexts):  # then all of them
            self._grow_blocks(contexts)
            return
        builder, added = BatchBuilder(), list[tuple[DraftContext, range, Indices]]()
        inputs: list[torch.Tensor] = []
        try:
            for context in contexts:
                slots = self._alloc(len(context.tree.frontier))
                if slots is None:
                    continue
                added.append((context, _add_frontier(builder, context, slots), slots))
                if context.lag:
                    inputs.append(context.states_of([context.tree.parents[node] for node in context.tree.frontier]))
            if added:
                self._expand(self._forward(builder, inputs), added)
        except torch.OutOfMemoryError as error:  # once the first tree has taken its slots, nothing allocates any more
            raise self._device_full([slots for _, _, slots in added]) from error

    def _expand(self, output: Output, frontiers: Sequence[tuple[DraftContext, range, Indices]]) -> None:
        """Rank the children of frontiers. frontiers: contexts, each with the rows of ``output`` and the KV slots of its
        frontier."""
        if not frontiers:
            return
        if output.block is not None:
            self._begin_blocks(output, output.block, [(context, rows.start) for context, rows, _ in frontiers])
            return
        choices = [_choice_rows(context, rows) for context, rows, _ in frontiers]
        best = ranked(output.logits, choices, self._growth.topk, self.network.vocabulary, self.network.race)
        for context, rows, slots in frontiers:
            tree, children, best = context.tree, best[: len(rows)], best[len(rows) :]
            if output.states is not None:
                context.states.update((node, (output.states, row))
                                      for node, row in zip(tree.frontier, rows, strict=True))
            tree.expand(children, slots)

    def _begin_blocks(self, output: Output, block: BlockStates, roots: Sequence[tuple[DraftContext, int]]) -> None:
        """Rank the predictions of each session's block (one row of ``output``), and give the roots children."""
        reach, rows = block.reach, [row for _, row in roots]
        choices = [_block_choice_rows(context, range(row * reach, (row + 1) * reach)) for context, row in roots]
        count = self._growth.topk if block.markov is None else min(CANDIDATES, output.logits.shape[1])
        candidates = ranked(output.logits, choices, count, self.network.vocabulary, self.network.race)
        states = None if block.states is None else block.states.index_select(0, to_device(rows, block.states.device))
        temperatures = [context.sampling.temperature for context, _ in roots]
        block_pass = BlockPass(replace(block, states=states), candidates, temperatures,
                               [context.tokens[-1] for context, _ in roots])
        for row, (context, _) in enumerate(roots):
            context.block = (block_pass, row)
        self._grow_blocks([context for context, _ in roots])

    def _grow_blocks(self, contexts: Sequence[DraftContext]) -> None:
        """Give the frontiers' nodes children from the block passes of their sessions."""
        passes = {id(context.block[0]): context.block[0] for context in contexts if context.block is not None}
        for block_pass in passes.values():
            sharing = [context for context in contexts if context.block is not None and context.block[0] is block_pass]
            inside = [[node for node in context.tree.frontier if _depth(context.tree, node) < block_pass.reach]
                      for context in sharing]
            nodes = [_block_node(context, node) for context, numbers in zip(sharing, inside, strict=True)
                     for node in numbers]
            children, rnn_states = block_pass.children(nodes, self._growth.topk)
            first = 0
            for context, numbers in zip(sharing, inside, strict=True):
                own = dict(zip(numbers, children[first : first + len(numbers)], strict=True))
                if rnn_states is not None:
                    context.states.update((node, (rnn_states, first + i)) for i, node in enumerate(numbers))
                first += len(numbers)
                context.tree.expand([own.get(node, ((), ())) for node in context.tree.frontier])

    def _forward(self, builder: BatchBuilder, inputs: Sequence[torch.Tensor]) -> Output:
        return self.network.forward(builder.build(self.network.device, torch.cat(list(inputs)) if inputs else None))

    def _device_full(self, unowned: Sequence[Indices]) -> DeviceFull:
        """The error to raise when memory ran out. unowned: slots that no session owns yet; they are freed."""
        for slots in unowned:
            self.slots.free(slots)
        return DeviceFull("the draft's device has no memory for this step; lower draft.max_sessions")

    def _alloc(self, count: int) -> Indices | None:
        try:
            return self.slots.alloc(count) if count else None
        except CapacityError:
            return None


def _choice_rows(context: DraftContext, rows: range) -> ChoiceRows:
    paths = [context.tree.path(node) for node in context.tree.frontier]
    return ChoiceRows(context.sampling, rows, [context.base + len(path) for path in paths],
                      [context.base - context.prompt_len + len(path) for path in paths], context.history, paths)


def _block_choice_rows(context: DraftContext, rows: range) -> ChoiceRows:
    """How to choose in a block's slots: penalties count committed tokens only, as the path to a slot is not known."""
    base, count = context.base, len(rows)
    return ChoiceRows(context.sampling, rows, range(base, base + count),
                      range(base - context.prompt_len, base - context.prompt_len + count), context.history,
                      [()] * count)


def _depth(tree: GrowingTree, node: int) -> int:
    return 0 if node == ROOT else tree.depths[node]


def _block_node(context: DraftContext, node: int) -> BlockNode:
    assert context.block is not None
    (block_pass, row), tree = context.block, context.tree
    if node == ROOT:
        return BlockNode(row, 0, context.tokens[-1],
                         None if block_pass.root_states is None else block_pass.root_states[row])
    state = context.states.get(tree.parents[node])
    return BlockNode(row, tree.depths[node], tree.tokens[node], None if state is None else state[0][state[1]])


def _add_frontier(builder: BatchBuilder, context: DraftContext, slots: Indices) -> range:
    tree = context.tree
    tokens = [tree.tokens[node] for node in tree.frontier]
    positions = [context.base - 1 - context.origin + tree.depths[node] for node in tree.frontier]
    mask_len = len(tree.computed) + len(tree.frontier)
    if mask_len <= MAX_NODES:
        return builder.add(tokens, positions, slots.tolist(), np.concatenate([context.slots, tree.slots]),
                           tree.ancestor_words(), mask_len)
    # An ancestor word has too few bits: each node becomes a tree of its own with its ancestors. No causal sequence: it
    # would have no depth, by which a head may choose its layer.
    first = len(builder.tokens)
    for node, token, position, slot in zip(tree.frontier, tokens, positions, slots.tolist(), strict=True):
        above = tree.ancestor_indices(node)
        mask_len = min(MAX_NODES, len(above) + 1)
        builder.add([token], [position], [slot], np.concatenate([context.slots, tree.slots[above]]),
                    [(1 << mask_len) - 1], mask_len)
    return range(first, len(builder.tokens))


def _fits_spec(features: Features, spec: FeatureSpec) -> bool:
    size = features.num_rows * spec.width * FEATURE_DTYPES[spec.dtype]
    return (features.dtype == spec.dtype and features.num_rows >= 1 and features.start >= 0
            and len(features.rows) == size)
