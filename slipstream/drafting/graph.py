"""GraphBackend: the trees of a head on a GPU (pending rows, root and all levels) as one captured graph.

Rules:
1. It grows level by level as ``tree.GrowingTree`` does on the host: the ``topk`` best candidates of a level, the
   earlier first among equals, are the rows of the next. Sums are float64 here too, so both choose the same.
2. The host makes two plans before a replay: of the pending rows, and of all levels, whose rows list the whole tree. The
   ancestors of each row are only known during the replay: the device computes them as words. Rows do not see slots
   outside their words, and these hold zeros until they are written.
3. Missing sessions are filled up with dummies, which have rows and slots of their own; tensors are not padded in
   another way. One call writes every static buffer.
4. No level waits for the host, so one graph holds the whole tree; one copy brings the result back.
5. Greedy and sampled sessions have separate graphs; sampled ones are ranked with noise but without filters
   (``is_narrow``), and none with penalties or bias. For a session that wants fewer levels all are computed, and only
   its own are returned.
6. A graph has room for the pending rows that one round leaves; a forward before it computes older ones. Where no graph
   can be replayed, no level of a tree is known. If capturing fails for a number of sessions, graphs for that many and
   more are given up with a warning; those for fewer stay.

It knows nothing about sessions or the owners of slots. The way to capture a graph is passed in (see ``engine.graphs``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from slipstream.base.errors import first_line
from slipstream.drafting.heads.eagle import EagleNetwork
from slipstream.drafting.network import Output
from slipstream.drafting.neural import PREFILL_ROWS
from slipstream.engine.attention import (
    PagedAttention,
    PagePlan,
    PageTensors,
    packed,
    packed_size,
    write_indices,
)
from slipstream.engine.batch import BatchBuilder
from slipstream.engine.graphs import Capture
from slipstream.engine.kv import Indices
from slipstream.engine.native.draft import MOST_BITS, Grown, Seed
from slipstream.engine.ops.races import ROW_PARAMS, pack_row_params
from slipstream.observe.log import logger
from slipstream.protocol.requests import Sampling

SESSIONS = (1, 2, 4, 8, 16, 32, 64)
MAX_PENDING_ROWS = 64  # of a session
NARROW_TOP_K, NARROW_TOP_P, NARROW_MIN_P = 8, 0.5, 0.1  # filters beyond which they are narrow (``is_narrow``)


@dataclass(frozen=True, slots=True)
class Shape:
    sessions: int  # B
    topk: int  # K: rows of a session in each level
    levels: int  # L: beyond the root's children

    @property
    def rows(self) -> int:
        """Rows of one level, all sessions together."""
        return self.sessions * self.topk

    @property
    def most_pending(self) -> int:
        """Most pending rows of a session in a graph: an accepted path and the bonus token."""
        return 2 + self.levels

    @property
    def pending(self) -> int:
        """Pending rows of all sessions, and one row of a dummy after them."""
        return self.sessions * self.most_pending + 1

    @property
    def spare(self) -> int:
        """How many slots the dummies need."""
        return self.pending + self.rows * self.levels


class GraphBackend:
    """A ``neural.TreeBackend`` of one shape of trees at a time, with graphs for a few numbers of sessions."""

    def __init__(self, network: EagleNetwork, attention: PagedAttention, topk: int, levels: int,
                 capture: Capture, sessions: int = SESSIONS[-1]) -> None:
        """levels: below the root's children. sessions: the most that a call may have."""
        self._network, self._attention, self._capture = network, attention, capture
        self._largest, self._sessions = Shape(1, topk, levels), sessions
        self._graphs: dict[tuple[Shape, bool], TreeGraph] = {}
        self.reshape(topk, levels)

    def reshape(self, topk: int, levels: int) -> None:
        """See ``neural.TreeBackend``. Captured graphs stay. A shape with more rows or levels than the first one gets
        none."""
        self._shape, largest = Shape(1, topk, levels), self._largest
        enough = next((count for count in SESSIONS if count >= self._sessions), SESSIONS[-1])
        fits = 0 < levels <= largest.levels and topk <= largest.topk
        self._shapes = [replace(self._shape, sessions=count) for count in SESSIONS if count <= enough and fits]
        self._supports_sampling = topk <= self._network.most_drawn

    prunes = False  # a graph has as many rows whatever is wanted

    @property
    def max_batch(self) -> int:
        """See ``neural.TreeBackend``."""
        return self._shapes[-1].sessions if self._shapes else 1

    def warm(self) -> int:
        """Capture all graphs now, the largest first. Returns how many there are."""
        for shape in reversed(self._shapes):
            for sampled in (False, True) if self._supports_sampling else (False,):
                self._graph(shape.sessions, sampled)
        return len(self._graphs)

    def graphs(self) -> list[TreeGraph]:
        """The captured graphs."""
        return list(self._graphs.values())

    def supports(self, rows: int, levels: int, topk: int, sampling: Sampling | None) -> bool:
        """See ``neural.TreeBackend``."""
        fits = rows <= MAX_PENDING_ROWS and levels <= self._shape.levels and topk == self._shape.topk
        return fits and bool(self._shapes) and (sampling is None or (
            self._supports_sampling and not sampling.adjusts and not is_narrow(sampling)))

    def grow_trees(self, seeds: Sequence[Seed], topk: int, _alone: bool = False) -> Grown:
        """See ``neural.TreeBackend``."""
        seeds, orders, parts = self._compute_older_rows(seeds), list[Indices](), list[Grown]()
        is_sampled = np.array([seed.sampling is not None for seed in seeds])
        for places, sampled in ((np.flatnonzero(~is_sampled), False), (np.flatnonzero(is_sampled), True)):
            if len(places):
                group = [seeds[place] for place in places]
                graph = self._graph(len(group), sampled)
                orders.append(places)
                parts.append((graph(group) if graph is not None else None) or self._unknown_trees(len(group)))
        if len(parts) == 1:
            return parts[0]
        tokens, scores, picks, known_levels = (np.concatenate(arrays) for arrays in zip(
            *((part.tokens, part.scores, part.picks, part.known_levels) for part in parts), strict=True))
        return Grown(tokens, scores, picks, torch.cat([part.states for part in parts]), known_levels).select(
            np.concatenate(orders).argsort().tolist())

    @torch.inference_mode()
    def _compute_older_rows(self, seeds: Sequence[Seed]) -> list[Seed]:
        """Compute the pending rows for which a graph has no room, the oldest ones. Returns seeds of the others."""
        most, remaining = self._shape.most_pending, list[Seed]()
        builder, states = BatchBuilder(), list[torch.Tensor]()

        def compute() -> None:
            self._network.forward(builder.build(self._network.device, torch.cat(states)))

        for seed in seeds:
            cut = max(0, len(seed.tokens) - most)
            if cut:
                if len(builder.tokens) + cut > PREFILL_ROWS:
                    compute()
                    builder, states = BatchBuilder(), []
                builder.add(seed.tokens[:cut], range(seed.position, seed.position + cut), seed.slots[:cut].tolist(),
                            seed.context, logits="last")
                states.append(seed.states[:cut])
                seed = replace(seed, tokens=seed.tokens[cut:], states=seed.states[cut:], position=seed.position + cut,
                               context=np.concatenate((seed.context, seed.slots[:cut])), slots=seed.slots[cut:])
            remaining.append(seed)
        if states:
            compute()
        return remaining

    def _unknown_trees(self, count: int) -> Grown:
        """``count`` trees without a known level: the drafter grows them level by level."""
        (width, dtype), topk, levels = self._network.state_type, self._shape.topk, self._shape.levels
        rows = 1 + levels * topk
        return Grown(np.zeros((count, rows, topk), np.int64), np.zeros((count, rows, topk)),
                     np.zeros((count, levels, topk), np.int64),
                     torch.zeros(count, rows, width, dtype=dtype, device=self._network.device),
                     np.zeros(count, np.int64))

    def _graph(self, count: int, sampled: bool) -> TreeGraph | None:
        shape = next((shape for shape in self._shapes if shape.sessions >= count), None)
        if shape is not None and (shape, sampled) not in self._graphs:
            try:
                self._graphs[shape, sampled] = TreeGraph(self._network, self._attention, shape, sampled, self._capture)
            except RuntimeError as error:
                self._shapes = [other for other in self._shapes if other.sessions < shape.sessions]
                self._graphs = {kind: graph for kind, graph in self._graphs.items() if kind[0] in self._shapes}
                logger("draft").warning("no graphs for so many trees at once", sessions=shape.sessions,
                                        reason=first_line(error))
        return None if shape is None else self._graphs.get((shape, sampled))


def is_narrow(sampling: Sampling) -> bool:
    """Whether filters (top-k, top-p, min-p) leave so few tokens that ranks without them are a bad guess. If they leave
    more, ranks are nearly the same, and the target filters anyway."""
    return 0 < sampling.top_k < NARROW_TOP_K or sampling.top_p < NARROW_TOP_P or sampling.min_p > NARROW_MIN_P


def noise_keys(seeds: Sequence[Seed], shape: Shape) -> Indices:
    """[M, ROW_PARAMS]: the values of ``races.pack_row_params`` for B roots, then for the K rows of each in every
    level; rows of sessions beyond ``seeds`` hold arbitrary values."""
    wanted = [(seed.sampling or Sampling(), seed.base) for seed in seeds]
    wanted += [(Sampling(temperature=1.0), 0)] * (shape.sessions - len(seeds))
    depths, count = range(1 + shape.levels), shape.sessions * (1 + shape.levels)
    params = pack_row_params([sampling for sampling, _ in wanted] * len(depths), [1] * count,
                             [base + depth for depth in depths for _, base in wanted], range(count))
    rows = np.concatenate((params[: shape.sessions], params[shape.sessions :].repeat(shape.topk, 0)))
    rows[:, 1] = np.concatenate((np.arange(shape.sessions), *[np.arange(shape.rows)] * shape.levels))
    return rows


def spare_slots(topk: int, levels: int) -> int:
    """Slots at the end of a pool that the graphs need for dummies; 0: such a tree is too large for a graph."""
    return Shape(SESSIONS[-1], topk, levels).spare if 0 < topk * levels <= MOST_BITS else 0


@dataclass(frozen=True, slots=True)
class TreeSlots:
    """The slots that a call reads and writes, dummies included; lists of B sessions."""

    contexts: list[Indices]  # [C] of computed rows
    pending: list[Indices]  # [M] of pending rows
    trees: Indices  # [B, L * K] level by level
    padding: Indices  # of the last dummy: it takes all pending rows that are left over

    def pending_plan(self) -> PagePlan:
        """The plan of the pending rows: each sees all rows before it."""
        rows = np.array([*map(len, self.pending), len(self.padding)])
        known = np.array([*map(len, self.contexts), 0])
        limits = np.arange(1, rows.sum() + 1) + np.repeat(known - np.cumsum(rows) + rows, rows)
        listed = [part for both in zip(self.contexts, self.pending, strict=True) for part in both]
        return _plan(rows, known + rows, [*listed, self.padding], limits)

    def level_plan(self, topk: int) -> PagePlan:
        """The plan of all levels: each row sees all rows before the tree. Words are written during the replay."""
        before = np.array([len(a) + len(b) for a, b in zip(self.contexts, self.pending, strict=True)])
        listed = [part for all_of in zip(self.contexts, self.pending, self.trees, strict=True) for part in all_of]
        return _plan(np.full(len(before), topk), before + self.trees.shape[1], listed, np.repeat(before, topk))


def _plan(rows: Indices, entries: Indices, listed: Sequence[Indices], limits: Indices) -> PagePlan:
    """rows, entries: rows and KV entries of each segment; limits: entries that each row sees."""
    q_indptr, kv_indptr = (np.concatenate((np.zeros(1, np.int64), np.cumsum(of))).astype(np.int32)
                           for of in (rows, entries))
    return PagePlan(q_indptr, kv_indptr, kv_indptr[:-1], np.concatenate(listed).astype(np.int32),
                    np.zeros(len(limits), np.int32), limits.astype(np.int32), np.zeros(len(limits), np.int64))


class TreeGraph:
    """The captured graph of one shape, for greedy or for sampled sessions."""

    __slots__ = ("_attends", "_bits", "_children", "_inputs", "_network", "_pages", "_parts", "_picks", "_replay",
                 "_sampled", "_shape", "_start", "_states")

    def __init__(self, network: EagleNetwork, attention: PagedAttention, shape: Shape, sampled: bool,
                 capture: Capture) -> None:
        assert shape.topk * shape.levels <= MOST_BITS
        device, (width, dtype) = network.device, network.state_type
        b, k, levels = shape.sessions, shape.topk, shape.levels
        self._network, self._shape, self._sampled = network, shape, sampled
        bits = np.uint64(1) << np.arange(k * levels, dtype=np.uint64)
        self._bits = torch.from_numpy(bits.view(np.int64)).to(device).view(levels, k)
        sizes = (shape.pending, shape.pending, shape.pending, b, shape.rows, levels * shape.rows,
                 ROW_PARAMS * (b + levels * shape.rows) if sampled else 0,
                 packed_size(shape.pending, b + 1), packed_size(shape.rows, b))
        self._start = torch.zeros(sum(sizes), dtype=torch.int64, device=device)  # see ``_write``
        *self._parts, pending, level = self._start.split_with_sizes(sizes)
        self._pages = [PageTensors.within(part, torch.zeros(network.pool_slots, dtype=torch.int32, device=device), rows)
                       for part, rows in ((pending, shape.pending), (level, shape.rows))]
        self._attends = [attention.fixed(pages, own_plan=True) for pages in self._pages]
        self._inputs = torch.zeros(shape.pending, width, dtype=dtype, device=device)
        # Tokens and scores (float64, stored as int64 bits) of all rows' children; and which rows were picked.
        self._children = torch.zeros(2, b, 1 + levels * k, k, dtype=torch.int64, device=device)
        self._picks = torch.zeros(b, levels, k, dtype=torch.int64, device=device)
        self._states = torch.zeros(b, 1 + levels * k, width, dtype=dtype, device=device)
        self._write([])
        with torch.inference_mode():
            self._replay = capture(self._run)

    @torch.inference_mode()
    def __call__(self, seeds: Sequence[Seed]) -> Grown | None:
        """The trees of at most ``sessions`` seeds. None: these lengths need another launch than the captured one."""
        if not self._write(seeds):
            return None
        self._replay()
        count, states = len(seeds), self._states[: len(seeds)].clone()
        numbers = torch.cat((self._children[:, :count].flatten(), self._picks[:count].flatten())).cpu().numpy()
        found, picks = np.split(numbers, [2 * count * self._children[0, 0].numel()])
        tokens, scores = found.reshape(2, count, -1, self._shape.topk)
        chosen = picks.reshape(count, -1, self._shape.topk)
        chosen[:, 0] = np.arange(self._shape.topk)
        return Grown(tokens, scores.view(np.float64), chosen, states, np.array([1 + seed.levels for seed in seeds]))

    def buffers(self) -> Iterator[torch.Tensor]:
        """All buffers that are written before or during a replay; tests fill them with wrong values."""
        yield from (self._start, self._inputs, self._children, self._picks, self._states)
        for pages in self._pages:
            yield pages.indices

    def _write(self, seeds: Sequence[Seed]) -> bool:
        """Write the static buffers: tokens, positions and slots of pending rows, which of them are roots, positions of
        the first level, slots of the trees, keys of the noise, and both plans. Returns False where the plans need
        another launch than the captured one."""
        shape, places = self._shape, self._tree_slots(seeds)
        own = [(seed.tokens, np.arange(seed.position, seed.position + len(seed.tokens))) for seed in seeds]
        left = shape.pending - sum(len(seed.tokens) for seed in seeds)
        nothing = np.zeros(left, np.int64)
        rows = np.array([len(part) for part in places.pending])
        first = [seed.position + len(seed.tokens) for seed in seeds] + [0] * (shape.sessions - len(seeds))
        by_level = places.trees.reshape(shape.sessions, shape.levels, shape.topk).swapaxes(0, 1)
        plans = places.pending_plan(), places.level_plan(shape.topk)
        start = np.concatenate((*(tokens for tokens, _ in own), nothing, *(at for _, at in own), nothing,
                                *places.pending, places.padding, rows.cumsum() - 1, np.repeat(first, shape.topk),
                                by_level.ravel(), *([noise_keys(seeds, shape).ravel()] if self._sampled else []),
                                *map(packed, plans)))
        self._start.copy_(torch.from_numpy(start), non_blocking=True)
        if seeds:
            self._inputs[: len(self._inputs) - left] = torch.cat([seed.states for seed in seeds])
        self._inputs[len(self._inputs) - left :].zero_()
        for pages, plan in zip(self._pages, plans, strict=True):
            write_indices(pages, plan)
        return all(attend.replan(plan) for attend, plan in zip(self._attends, plans, strict=True))

    def _tree_slots(self, seeds: Sequence[Seed]) -> TreeSlots:
        shape, first = self._shape, self._network.pool_slots - self._shape.spare
        each, used = shape.topk * shape.levels, sum(len(seed.tokens) for seed in seeds)
        spare = np.arange(first, first + shape.pending - used)  # for dummies' pending rows; slots of their trees follow
        dummies = range(shape.sessions - len(seeds))
        begin = first + shape.pending
        trees = begin + np.arange(shape.sessions * each).reshape(shape.sessions, each)
        for tree, seed in zip(trees, seeds, strict=False):  # levels that were not asked for use dummy slots
            tree[: len(seed.slots) - len(seed.tokens)] = seed.slots[len(seed.tokens) :]
        return TreeSlots([*(seed.context for seed in seeds), *(spare[:0] for _ in dummies)],
                      [*(seed.slots[: len(seed.tokens)] for seed in seeds), *(spare[i : i + 1] for i in dummies)],
                      trees, spare[len(dummies) :])

    def _run(self) -> None:
        network, shape = self._network, self._shape
        b, k, levels = shape.sessions, shape.topk, shape.levels
        tokens, positions, slots, roots, tree_positions, tree_slots, keys = self._parts
        keys_by_level = keys.view(-1, ROW_PARAMS).split_with_sizes((b, *[shape.rows] * levels)) if self._sampled else ()
        network.clear(tree_slots)
        out = network.level(tokens, positions, slots, self._inputs, self._attends[0], roots)
        ids, above = self._store(0, 1, out, keys_by_level)
        tokens, words = ids.view(-1), self._bits[0].expand(b, k)
        states = self._states[:, 0].repeat_interleave(k, 0)
        first, by_level = k * torch.arange(b, device=states.device)[:, None], tree_slots.view(levels, -1)
        for level in range(levels):
            self._pages[1].words.copy_(words.reshape(-1))
            out = network.level(tokens, tree_positions + level, by_level[level], states, self._attends[1])
            ids, scores = self._store(1 + level * k, k, out, keys_by_level[1 + level :])
            if level + 1 == levels:
                break
            totals = (above.view(b, k, 1) + scores).view(b, -1)
            picks = totals.sort(dim=1, descending=True, stable=True).indices[:, :k].sort(1).values
            self._picks[:, level + 1].copy_(picks)
            parents = picks // k
            tokens, above = ids.view(b, -1).gather(1, picks).view(-1), totals.gather(1, picks)
            words = words.gather(1, parents) | self._bits[level + 1]
            assert out.states is not None
            states = out.states.index_select(0, (parents + first).view(-1))

    def _store(self, first: int, count: int, out: Output,
               keys: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the results of rows ``first`` … ``first + count - 1`` of each tree. Returns tokens and scores of their
        children, [B, count, K] each. keys: of the noise; the first are those of these rows."""
        b, k, network = self._shape.sessions, self._shape.topk, self._network
        ids, scores = network.drawn(out.logits, keys[0], k) if keys else network.children(out.logits, k)
        ids, scores = ids.view(b, count, k), scores.view(b, count, k)
        rows = slice(first, first + count)
        self._children[0, :, rows].copy_(ids)
        self._children[1, :, rows].copy_(scores.view(torch.int64))
        assert out.states is not None
        self._states[:, rows].copy_(out.states.view(b, count, -1))
        return ids, scores
