"""GrowingTree: the one draft tree of a session, where it grows.

Rules of a growing tree:
1. Nodes are numbered in the order in which they were proposed, a parent before its children; ``ROOT`` is the newest
   committed token. A node is *computed* when its children are known (its KV, if a drafter has any, is in a slot) and
   *sent* when the target has it, under an id that is positive and never used twice.
2. The frontier is the set of nodes that get children next: first the root, then the ``width`` best of the newest level.
   Each gets up to ``width`` children; all of them stay proposed (EAGLE-2, arXiv 2406.16858). width = 1: a chain.
3. Scores are cumulative logs and never rise along a path, so the best n nodes are connected.
4. Each commit re-roots the tree, as the target re-roots its own. Sent nodes below the committed tokens stay, under the
   same ids; a drafter that grows from the new root proposes some of them again, and they are not sent twice. A tree
   that grows ahead instead keeps all nodes below the last committed token, if that one was computed.
5. Ahead of the target the frontier is the ``rows`` best nodes of any level without children: a forward of few rows
   costs the same as one row, and it is not known what the target will ask for next. A score is the log chance that the
   answer reaches a node, so nodes where a round is more likely to end are grown first.
6. Computed nodes are in the KV list in the order in which they were computed; bit j of an ancestor word is the j-th.

DraftContext: one session of a drafter with weights: its committed tokens, and the KV and states computed for them.

Rules of a context:
1. Rows are tokens by position. ``slots`` holds the KV of rows ``start, start + 1, …``; later rows are pending.
2. The window: rows from ``start`` on are at most ``window``, the tree included. When they would be more, the older half
   is dropped. Without features the kept half is computed again from position 0 on, as if the session had begun there,
   because a model's states depend on all rows before them. With features its KV is kept: rotary positions matter only
   by their distances, and the KV of a head's first layer depends only on a row's own input. Further layers keep traces
   of the dropped rows, as with any sliding window.
3. With features (lag 1) a row can be computed only when the target's state before it has arrived. States that arrive
   twice are ignored. Missing states are replaced by zeros, because a row's token alone helps (the default head without
   states of a short prompt: acceptance length 1.86, beginning anew 1.77, with all states 1.97). After a gap of more
   than ``BRIDGE`` rows the context begins anew, ``BRIDGE`` rows before the new states. A block head's rows read no
   token, so they are left out of a gap; rows before the gap stay.
4. A commit keeps the KV of accepted draft tokens with lag 0. With features it keeps none: those rows were computed from
   the head's own states, and are pending again with the target's. The newest token stays pending, because its row gives
   the logits to grow from; except where it was computed and the tree goes on below it (``GrowingTree``, rule 4).
Slots that a context gives up are returned; the caller frees them.

It knows nothing about logits, networks or peers; it is plain Python on lists of at most a few hundred nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from math import exp, isfinite

import numpy as np
import torch

from slipstream.choosing.sampling import Children, TokenHistory
from slipstream.drafting.block import BlockPass
from slipstream.engine.kv import Indices
from slipstream.engine.native.draft import Seed
from slipstream.protocol.messages import Growth
from slipstream.protocol.requests import Sampling
from slipstream.protocol.tree import MAX_HELD, MAX_NODES

AHEAD, SENT = 8, 2  # the fewest nodes expanded in one forward ahead; nodes sent for each of them
BRIDGE = 256  # rows without a state
WORST = float(np.finfo(np.float32).min)  # score that is sent
ROOT = -1  # among nodes, which are counted from 0
NO_SLOTS: Indices = np.zeros(0, np.int64)


class GrowingTree:
    __slots__ = ("_held", "ahead", "base", "begun", "computed", "depths", "frontier", "ids", "next_id", "num_sent",
                 "parents", "picks", "rows", "scores", "slots", "tokens", "width")

    def __init__(self, base: int, width: int = 1, next_id: int = 1) -> None:
        """base: committed tokens; next_id: the first free id, above 1 where a session begins again."""
        self.base, self.width, self.next_id = base, width, next_id
        self.ahead = False  # whether it grows while the target verifies
        self.rows = AHEAD  # most nodes of its frontier then
        self.begun = False  # whether the root's children are known
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.scores: list[float] = []
        self.depths: list[int] = []  # 1 below the root
        self.ids: list[int] = []  # 0: not sent
        self.num_sent = 0
        self.computed: list[int] = []  # without the root
        self.slots: Indices = NO_SLOTS  # KV of ``computed``
        self.frontier = [ROOT]
        self.picks: list[int] = []  # which children of the level above the frontier is
        self._held: dict[tuple[int, int], int] = {}  # (parent, token) -> sent node, not proposed again since the commit

    @property
    def room(self) -> int:
        """Further nodes that the target's tree may hold."""
        return MAX_HELD - 1 - self.num_sent

    def depth(self) -> int:
        """The depth of the deepest frontier node; 0 at the root, and when nothing is left to expand."""
        return max((self.depths[node] for node in self.frontier if node != ROOT), default=0)

    def path(self, node: int) -> list[int]:
        """Draft tokens from below the root to ``node``, itself included."""
        tokens = []
        while node != ROOT:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def words(self) -> list[int]:
        """Ancestor words of the frontier over the computed nodes followed by the frontier itself."""
        places = {node: place for place, node in enumerate([*self.computed, *self.frontier])}
        words = []
        for node in self.frontier:
            word = 0
            while node != ROOT:
                word |= 1 << places[node]
                node = self.parents[node]
            words.append(word)
        return words

    def above(self, node: int) -> list[int]:
        """Places in ``computed`` of the nodes between the root and ``node``, both left out."""
        places = {found: place for place, found in enumerate(self.computed)}
        found: list[int] = []
        while (node := self.parents[node]) != ROOT:
            found.append(places[node])
        return found[::-1]

    def expand(self, children: Sequence[Children], slots: Indices = NO_SLOTS) -> None:
        """Give each frontier node its children (log scores relative to the node) and move the frontier down a level.
        A child with a score that is not finite is skipped: the filters forbid its token. slots: the frontier's KV."""
        assert len(children) == len(self.frontier)
        level: list[int] = []
        totals: list[float] = []
        for node, (tokens, scores) in zip(self.frontier, children, strict=True):
            above, depth = (0.0, 1) if node == ROOT else (self.scores[node], self.depths[node] + 1)
            for token, score in zip(tokens[: self.width], scores[: self.width], strict=True):
                if not isfinite(score):
                    continue
                total = above + min(0.0, score)
                totals.append(total)
                if self._held:
                    level.append(self.propose(node, token, total))
                    continue
                level.append(len(self.tokens))
                self.tokens.append(token)
                self.parents.append(node)
                self.scores.append(total)
                self.depths.append(depth)
                self.ids.append(0)
        if self.begun:
            self.computed += self.frontier
        if len(slots):
            self.slots = np.concatenate((self.slots, slots)) if len(self.slots) else slots
        self.begun = True
        most = max(0, min(self.width, (MAX_HELD if self.ahead else MAX_NODES) - len(self.computed)))
        self.picks = sorted(sorted(range(len(level)), key=totals.__getitem__, reverse=True)[:most])
        self.frontier = [level[place] for place in self.picks]

    def propose(self, parent: int, token: int, score: float) -> int:
        """Propose a child. Returns its number: of a sent node that is proposed again, or of a new one."""
        node = self._held.pop((parent, token), None)
        if node is not None:
            self.scores[node] = score
            return node
        self.tokens.append(token)
        self.parents.append(parent)
        self.scores.append(score)
        self.depths.append(1 if parent == ROOT else self.depths[parent] + 1)
        self.ids.append(0)
        return len(self.tokens) - 1

    def holds(self, parent: int, token: int) -> bool:
        """Whether the target has this child, and it was not proposed again since the last commit."""
        return (parent, token) in self._held

    def aim(self, rows: int = AHEAD) -> None:
        """Grow ahead of the target from now on: the likeliest nodes of all levels, not only the newest level.
        ``rows``: nodes expanded in one forward, at least AHEAD."""
        self.ahead, self.rows = True, max(AHEAD, rows)
        if not self.begun or not self.tokens:
            return
        left_out = {*self.computed, *self._held.values()}
        waiting = [node for node in range(len(self.tokens)) if node not in left_out]
        most = min(self.rows, max(0, MAX_HELD - len(self.computed)))
        self.frontier = sorted(nlargest(most, waiting, key=self.scores.__getitem__))

    def growth(self, session: int, most: int) -> Growth:
        """Send the ``most`` best nodes that the target does not have, best first, so parents come first."""
        ids, parents, tokens, scores = self.ids, self.parents, self.tokens, self.scores
        order = sorted(range(len(ids)), key=scores.__getitem__, reverse=True)  # the earlier among equals
        if self.num_sent:
            order = [node for node in order if not ids[node]]
        nodes, first, root = order[: max(0, min(most, self.room))], self.next_id, -self.base
        for number, node in enumerate(nodes, first):
            ids[node] = number
        self.next_id += len(nodes)
        self.num_sent += len(nodes)
        above = [root if (parent := parents[node]) == ROOT else ids[parent] for node in nodes]
        return Growth(session, self.base, np.arange(first, self.next_id, dtype=np.int32), np.array(above, np.int32),
                      np.array([tokens[node] for node in nodes], np.int32),
                      np.array([max(scores[node], WORST) for node in nodes], np.float32))

    def promise(self, count: int) -> float:
        """Expected accepted tokens of the ``count`` best sent nodes, if scores were the true log chances of
        acceptance."""
        sent = [score for score, number in zip(self.scores, self.ids, strict=True) if number]
        return sum(map(exp, sorted(sent, reverse=True)[:count]))

    def sent_depth(self) -> int:
        """The depth of the deepest sent node; 0: none was sent."""
        return max((depth for depth, number in zip(self.depths, self.ids, strict=True) if number), default=0)

    def commit(self, tokens: Sequence[int], lasting: bool) -> tuple[Indices, Indices]:
        """Re-root below committed ``tokens``. lasting: the KV of accepted draft tokens may be kept. Returns the slots
        of kept KV, for the first of ``tokens``; and the slots to free."""
        path, node, left = list[int](), ROOT, iter(tokens)
        token = next(left, None)
        for child, (parent, own) in enumerate(zip(self.parents, self.tokens, strict=True)):
            if parent == node and own == token:  # one pass is enough: a parent comes before its children
                path.append(child)
                node, token = child, next(left, None)
        self.base += len(tokens)
        if lasting and self.ahead and token is None and node in self.computed:
            return self._go_on(path)
        true, slots = list[int](), self.slots
        for known in path[: len(tokens) - 1] if lasting and len(slots) else ():
            if known in self.computed:
                true.append(self.computed.index(known))
        self._begin_anew(node if token is None else None)
        return (slots[true], np.delete(slots, true)) if true else (NO_SLOTS, slots)

    def forget(self) -> Indices:
        """Drop all nodes except the sent ones. Returns the slots of computed nodes, for the caller to free."""
        freed = self.slots
        self._begin_anew(ROOT)
        return freed

    def _go_on(self, path: list[int]) -> tuple[Indices, Indices]:
        """Make the last of ``path`` the root and keep all nodes below it. Returns as ``commit``."""
        at, held, slots = {node: place for place, node in enumerate(self.computed)}, self._held, self.slots
        places = self._cut(path[-1], everything=True)
        del places[path[-1]]
        self.computed = [places[node] for node in at if node in places]
        self._held = {(places.get(parent, ROOT), token): places[node] for (parent, token), node in held.items()
                      if node in places}
        self.aim(self.rows)
        if not len(slots):
            return NO_SLOTS, NO_SLOTS
        true, kept = [at[node] for node in path], [place for node, place in at.items() if node in places]
        self.slots = slots[kept]
        return slots[true], np.delete(slots, [*true, *kept])

    def _begin_anew(self, root: int | None) -> None:
        """Keep only sent nodes below ``root`` (None: there are none), and begin a new tree."""
        if root is None:
            for held in (self.tokens, self.parents, self.scores, self.depths, self.ids):
                held.clear()
            self.num_sent = 0
        else:
            self._cut(root, everything=False)
        self._held = dict(zip(zip(self.parents, self.tokens, strict=True), range(len(self.tokens)), strict=True))
        self.begun, self.frontier, self.computed, self.slots = False, [ROOT], [], NO_SLOTS

    def _cut(self, root: int, everything: bool) -> dict[int, int]:
        """Keep the nodes below ``root`` (only sent ones without ``everything``). Returns old number -> new number."""
        places, nodes = {root: ROOT}, list[int]()
        for node in range(root + 1, len(self.tokens)):
            if self.parents[node] in places and (everything or self.ids[node]):
                places[node] = len(nodes)
                nodes.append(node)
        score, depth = (0.0, 0) if root == ROOT else (self.scores[root], self.depths[root])
        self.parents = [places[self.parents[node]] for node in nodes]
        self.tokens = [self.tokens[node] for node in nodes]
        # A sent node may have a better score than its parent, if the parent was proposed again with a lower one.
        self.scores = [min(0.0, self.scores[node] - score) for node in nodes]
        self.depths = [self.depths[node] - depth for node in nodes]
        self.ids = [self.ids[node] for node in nodes]
        self.num_sent = len(self.ids) - self.ids.count(0)
        return places


State = tuple[torch.Tensor, int]  # rows [_, W], and which of them: cut out where it is read


@dataclass(slots=True)
class DraftContext:
    session: int
    sampling: Sampling
    prompt_len: int
    tokens: list[int]
    tree: GrowingTree
    history: TokenHistory | None
    window: int
    lag: int
    bridged: bool = True  # whether a row without a target state is computed with zeros; lag 1 only
    plain: bool = False  # no penalties and no logit_bias: logits are ranked unchanged, with or without noise
    drawn: Sampling | None = None  # whose keyed noise ranks children; None: greedy
    start: int = 0  # position of the oldest row, if no row was left out
    origin: int = 0  # subtracted from positions before rotary embedding
    slots: Indices = field(default_factory=lambda: NO_SLOTS)  # [C] KV of rows start .. start + C - 1
    inputs: list[torch.Tensor] = field(default_factory=list)  # [_, W] states for the first pending rows; lag 1 only
    num_inputs: int = 0  # rows in them
    states: dict[int, State] = field(default_factory=dict)  # computed node -> its output state; lag 1 only
    block: tuple[BlockPass, int] | None = None  # the block pass of its tree, and its row there; see ``block``

    def __post_init__(self) -> None:
        # The token at 0 has no state before it, so a head's first row is the token at 1.
        self.start = self.origin = self.lag
        sampling = self.sampling
        self.plain = not sampling.logit_bias and not sampling.path_dependent
        self.drawn = None if sampling.greedy else sampling

    @property
    def base(self) -> int:
        return len(self.tokens)

    @property
    def done(self) -> int:
        """Position of the first row that is not computed."""
        return self.start + len(self.slots)

    @property
    def num_pending(self) -> int:
        """Rows that can be computed now."""
        known = len(self.tokens) - self.start - len(self.slots)
        return max(0, min(known, self.num_inputs) if self.lag else known)

    @property
    def awaited(self) -> int:
        """Position of the state that comes next; lag 1 only."""
        return self.done - 1 + self.num_inputs

    def slide(self, reach: int) -> Indices:
        """Make room for ``reach`` levels below the newest token. Returns slots to free."""
        if len(self.tokens) + reach - self.start <= self.window:
            return NO_SLOTS
        start = self.base - self.window // 2
        if self.lag:
            return self._drop_oldest(start - self.start)
        freed = self.close()
        self.start = self.origin = start
        return freed

    def _drop_oldest(self, count: int) -> Indices:
        self.pull(min(max(0, count - len(self.slots)), self.num_inputs))  # first: memory may run out there
        freed, self.slots = self.slots[:count], self.slots[count:]
        self.start += count
        return freed

    def pull(self, count: int) -> torch.Tensor | None:
        """Take the states of the first ``count`` pending rows, [count, W]; None when there are none to take."""
        if count == 0 or not self.inputs:
            return None
        taken, left = list[torch.Tensor](), count
        for rows in self.inputs:
            taken.append(rows[:left])
            left -= len(taken[-1])
            if not left:
                break
        found = taken[0] if len(taken) == 1 else torch.cat(taken)
        rest = self.inputs[len(taken) - 1][len(taken[-1]) :]
        # A view would keep the whole tensor in memory, so the rest is copied; later tensors stay as they are.
        self.inputs[: len(taken)] = [rest.clone()] if len(rest) else []
        self.num_inputs -= count
        return found

    def take(self, start: int, rows: torch.Tensor) -> Indices:
        """Take target states of positions ``start, …`` [M, W]. Returns slots to free (where a long gap made the context
        begin anew)."""
        end, expected = min(start + rows.shape[0], len(self.tokens)), self.awaited
        if end <= max(start, expected):
            return NO_SLOTS
        if start <= expected:
            self.inputs.append(rows[expected - start : end - start])
            self.num_inputs += end - expected
            return NO_SLOTS
        if not self.bridged:
            self.start = start + 1 - len(self.slots)  # rows before the gap keep their rotary positions
            self.inputs, self.num_inputs = [rows[: end - start]], end - start
            return NO_SLOTS
        freed, gap, most = NO_SLOTS, start - expected, min(BRIDGE, self.window // 2)
        bridge = rows.new_zeros(min(gap, most), *rows.shape[1:])  # first: memory may run out there
        if gap > most:
            freed, self.start = self.close(), start + 1 - most
        self.inputs += [bridge, rows[: end - start]]
        self.num_inputs += len(bridge) + end - start
        return freed

    def seed(self, row: int, slots: Indices, levels: int) -> Seed:
        """A seed of all pending rows, from ``row`` on; their states are taken out of ``inputs``. levels: below the
        root's children."""
        tokens = self.tokens[row:]
        states = self.pull(len(tokens))
        assert states is not None
        return Seed(tokens, states, row - self.origin, self.slots, slots, levels, len(self.tokens), self.drawn)

    def unseed(self, seed: Seed) -> None:
        """Put the seed's states back: its rows are pending again."""
        self.inputs.insert(0, seed.states)
        self.num_inputs += len(seed.states)

    def computed(self, slots: Indices) -> None:
        """The next ``len(slots)`` pending rows have their KV in ``slots``."""
        self.slots = np.concatenate([self.slots, slots])

    def commit(self, tokens: list[int]) -> Indices:
        """Append committed tokens. Returns slots to free."""
        true, freed = self.tree.commit(tokens, lasting=not self.lag and self.block is None)
        if len(true):
            self.computed(true)
        self.states.clear()
        self.block = None
        self.tokens.extend(tokens)
        if self.history is not None:
            self.history.append(tokens)
        return freed

    def states_of(self, nodes: Sequence[int]) -> torch.Tensor:
        """[N, W] of computed nodes."""
        return torch.stack([rows[place] for rows, place in (self.states[node] for node in nodes)])

    def close(self) -> Indices:
        """Drop all computed and pending rows. Returns every slot of the session, for the caller to free."""
        freed = np.concatenate([self.slots, self.tree.forget()])
        self.states.clear()
        self.block = None
        self.slots, self.inputs, self.num_inputs = NO_SLOTS, [], 0
        return freed
