"""GraphLevels: greedy trees of a head on a GPU, all levels below the root's children as one captured graph.

Rules:
1. Level by level as ``tree.GrowingTree`` does it with a host between: the ``topk`` best candidates of a level, the
   earlier first among equals, are the rows of the next. Sums are float64 here too, so both choose the same.
2. What the host knows beforehand is planned beforehand, for each level: who sees how many KV entries. What it cannot
   know, the ancestors of each row, is computed where it is needed, as words.
3. Sessions are padded, never tensors: a dummy has rows and slots of its own. One call writes every static buffer.
4. Nothing of a level waits for the host, so that a graph may hold all of them; one copy brings them back.
5. Pending rows, whose number nobody knows beforehand, and the root's children are a forward of their own. Where no
   graph can follow it, that is all that was grown. What cannot be captured is left out for good, with a warning.

It knows nothing about sessions or who owns slots. How a graph is captured is given, as in ``engine.graphs``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.base.errors import in_a_line
from slipstream.drafting.heads.eagle import EagleNetwork
from slipstream.drafting.neural import MOST_SESSIONS
from slipstream.engine.attention import PagedAttention, PagePlan, PageTensors
from slipstream.engine.batch import BatchBuilder
from slipstream.engine.graphs import Capture
from slipstream.engine.native.draft import MOST_BITS, Grown, Seed
from slipstream.observe.log import logger

Indices = NDArray[np.int64]
SESSIONS = (1, 2, 4, MOST_SESSIONS)
FEW_ROWS = 64  # pending rows of a session


@dataclass(frozen=True, slots=True)
class Shape:
    sessions: int  # B
    topk: int  # K: rows of a session in each level
    levels: int  # L: beyond the root's own row

    @property
    def rows(self) -> int:
        return self.sessions * self.topk

    @property
    def spare(self) -> int:
        """Slots of dummies."""
        return self.rows * self.levels


@dataclass(frozen=True, slots=True)
class Root:
    """A root whose children are known."""

    context: Indices  # [C] slots of the KV before the tree
    position: int  # of the root's children
    tokens: torch.Tensor  # int64 [K] the children
    scores: torch.Tensor  # float64 [K] theirs
    state: torch.Tensor  # [W] the root's
    slots: Indices  # [L * K] for the tree's rows, level by level


class GraphLevels:
    """A ``neural.Levels`` of one shape of trees, with loops for a few numbers of sessions."""

    def __init__(self, network: EagleNetwork, attention: PagedAttention, topk: int, levels: int,
                 capture: Capture) -> None:
        """levels: beyond the root's children."""
        self._network, self._attention, self._capture = network, attention, capture
        self._shapes = [Shape(count, topk, levels) for count in SESSIONS]
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

    def takes(self, rows: int, levels: int, topk: int, drawn: bool) -> bool:
        """See ``neural.Levels``."""
        fits = rows <= FEW_ROWS and (levels, topk) == (self._shapes[0].levels, self._shapes[0].topk)
        return fits and not drawn and not self._failed

    def trees(self, seeds: Sequence[Seed], topk: int, _alone: bool = False) -> Grown:
        """See ``neural.Levels``."""
        roots = self._roots(seeds, topk)
        loop = self._loop(len(seeds))
        found = loop(roots) if loop is not None else None
        tokens, scores = (np.stack([part.numpy() for part in parts])[:, None]
                          for parts in (([root.tokens for root in roots]), [root.scores for root in roots]))
        states = torch.stack([root.state for root in roots])[:, None]
        known = np.array([1 + seed.levels for seed in seeds])
        if found is None:
            return Grown(tokens, scores, np.zeros((len(roots), 0, topk), np.int64), states, known)
        first = np.broadcast_to(np.arange(topk), (len(roots), 1, topk))
        return Grown(np.concatenate((tokens, found.tokens), 1), np.concatenate((scores, found.scores), 1),
                     np.concatenate((first, found.picks), 1), torch.cat((states, found.states), 1), known)

    @torch.inference_mode()
    def _roots(self, seeds: Sequence[Seed], topk: int) -> list[Root]:
        builder = BatchBuilder()
        for seed in seeds:
            count = len(seed.tokens)
            builder.add(seed.tokens, range(seed.position, seed.position + count), seed.slots[:count].tolist(),
                        seed.context, logits="last")
        network = self._network
        out = network.forward(builder.build(network.device, torch.cat([seed.states for seed in seeds])))
        assert out.states is not None
        tokens, scores = (found.cpu() for found in network.children(out.logits, topk))
        return [Root(np.concatenate((seed.context, seed.slots[: len(seed.tokens)])), seed.position + len(seed.tokens),
                     tokens[place], scores[place], out.states[place], seed.slots[len(seed.tokens) :])
                for place, seed in enumerate(seeds)]

    def _loop(self, count: int) -> LevelLoop | None:
        shape = next(shape for shape in self._shapes if shape.sessions >= count)
        if shape not in self._loops and not self._failed:
            try:
                self._loops[shape] = LevelLoop(self._network, self._attention, shape, self._capture)
            except RuntimeError as error:
                self._failed = True
                logger("draft").warning("no graphs: trees grow level by level", sessions=shape.sessions,
                                        reason=in_a_line(error))
        return self._loops.get(shape)


def spare_slots(topk: int, levels: int) -> int:
    """Slots at the end of a pool that the loops want for themselves; 0: no loop holds such a tree."""
    return Shape(SESSIONS[-1], topk, levels).spare if 0 < topk * levels <= MOST_BITS else 0


class LevelLoop:
    """For one shape."""

    __slots__ = ("_attends", "_bits", "_found", "_network", "_pages", "_replay", "_scores", "_shape", "_start",
                 "_state", "_states")

    def __init__(self, network: EagleNetwork, attention: PagedAttention, shape: Shape, capture: Capture) -> None:
        assert shape.topk * shape.levels <= MOST_BITS
        device, (width, dtype) = network.device, network.state_type
        b, k, levels = shape.sessions, shape.topk, shape.levels
        self._network, self._shape = network, shape
        self._pages = [PageTensors.empty(shape.rows, b, network.pool_slots, device) for _ in range(levels)]
        self._attends = [attention.fixed(pages, apart=True) for pages in self._pages]
        bits = np.uint64(1) << np.arange(k * levels, dtype=np.uint64)
        self._bits = torch.from_numpy(bits.view(np.int64)).to(device).view(levels, k)
        self._start = torch.zeros((2 + levels) * shape.rows, dtype=torch.int64, device=device)  # see ``_write``
        self._scores = torch.zeros(b, k, dtype=torch.float64, device=device)
        self._state = torch.zeros(b, width, dtype=dtype, device=device)
        # tokens, scores and picks, in one piece: float64 as its bits
        self._found = torch.zeros(3, levels, b, k * k, dtype=torch.int64, device=device)
        self._states = torch.zeros(levels, shape.rows, width, dtype=dtype, device=device)
        self._write([])
        with torch.inference_mode():
            self._replay = capture(self._run)

    @torch.inference_mode()
    def __call__(self, roots: Sequence[Root]) -> Grown | None:
        """What stands below the children of at most ``sessions`` roots, L * K rows of each. None: these lengths would
        need another launch than the captured."""
        if not self._write(roots):
            return None
        self._replay()
        k, levels, count = self._shape.topk, self._shape.levels, len(roots)
        found, states = self._found[:, :, :count].cpu().numpy().swapaxes(1, 2), self._states.clone()  # [3, B, L, K * K]
        by_session = states.view(levels, self._shape.sessions, k, -1)[:, :count].transpose(0, 1).flatten(1, 2)
        scores = np.ascontiguousarray(found[1]).view(np.float64)
        return Grown(found[0].reshape(count, levels * k, k), scores.reshape(count, levels * k, k),
                     found[2, :, : levels - 1, :k], by_session, np.full(count, 1 + levels))

    def buffers(self) -> Iterator[torch.Tensor]:
        """All that is written before a replay or by it, for tests that spoil it."""
        yield from (self._start, self._scores, self._state, self._found, self._states)
        for attend in self._attends:
            yield from attend.buffers()

    def _write(self, roots: Sequence[Root]) -> bool:
        shape = self._shape
        k, each = shape.topk, shape.topk * shape.levels
        first = self._network.pool_slots - shape.spare
        nothing = np.zeros(0, np.int64)
        contexts = [*(root.context for root in roots), *[nothing] * (shape.sessions - len(roots))]
        dummies = range(len(roots), shape.sessions)
        slots = np.stack([*(root.slots for root in roots),
                          *(np.arange(first + i * each, first + (i + 1) * each) for i in dummies)])  # [B, L * K]
        tokens, positions = np.zeros((2, shape.sessions, k), np.int64)
        scores = np.zeros((shape.sessions, k))
        for i, root in enumerate(roots):
            tokens[i], positions[i], scores[i] = root.tokens, root.position, root.scores
        by_level = slots.reshape(shape.sessions, shape.levels, k).swapaxes(0, 1)
        start = np.concatenate((tokens.ravel(), positions.ravel(), by_level.ravel()))
        self._start.copy_(torch.from_numpy(start), non_blocking=True)
        self._scores.copy_(torch.from_numpy(scores), non_blocking=True)
        self._state.zero_()
        if roots:
            self._state[: len(roots)] = torch.stack([root.state for root in roots])
        return all(attend.write(_plan(contexts, slots, k, level)) for level, attend in enumerate(self._attends))

    def _run(self) -> None:
        b, k, levels = self._shape.sessions, self._shape.topk, self._shape.levels
        tokens, positions, *slots = self._start.view(2 + levels, -1)
        above, words = self._scores, self._bits[0].expand(b, k)
        states = self._state.repeat_interleave(k, 0)
        for level in range(levels):
            self._pages[level].words.copy_(words.reshape(-1))
            out = self._network.level(tokens, positions + level, slots[level], states, self._attends[level])
            assert out.states is not None
            ids, scores = self._network.children(out.logits, k)
            self._found[0, level].copy_(ids.view(b, -1))
            self._found[1, level].copy_(scores.view(torch.int64).view(b, -1))
            self._states[level].copy_(out.states)
            if level + 1 == levels:
                break
            totals = (above[:, :, None] + scores.view(b, k, k)).view(b, -1)
            picks = totals.sort(dim=1, descending=True, stable=True).indices[:, :k].sort(1).values
            self._found[2, level, :, :k].copy_(picks)
            parents = picks // k
            tokens, above = ids.view(b, -1).gather(1, picks).view(-1), totals.gather(1, picks)
            words = words.gather(1, parents) | self._bits[level + 1]
            rows = parents + k * torch.arange(b, device=parents.device)[:, None]
            states = out.states.index_select(0, rows.view(-1))


def _plan(contexts: Sequence[Indices], slots: Indices, k: int, level: int) -> PagePlan:
    """Of one level: each session's context and the rows of its tree so far. slots [B, L * K]. Words come later."""
    own = k * (level + 1)
    lengths = np.array([len(context) for context in contexts])
    indices = np.concatenate([part for context, tree in zip(contexts, slots, strict=True)
                              for part in (context, tree[:own])])
    rows, starts = len(contexts) * k, np.zeros(1, np.int64)
    return PagePlan(np.arange(0, rows + 1, k, dtype=np.int32),
                    np.concatenate((starts, np.cumsum(lengths + own))).astype(np.int32), indices.astype(np.int32),
                    np.zeros(rows, np.int32), np.repeat(lengths, k).astype(np.int32), np.zeros(rows, np.int64))
