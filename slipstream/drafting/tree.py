"""GrowingTree: the one draft tree of a session, where it grows.

Rules of a growing tree:
1. Nodes are numbered in the order in which they were proposed, a parent before its children; ``ROOT`` is the newest
   committed token. A node is *computed* when its children are known (its KV, if a drafter has any, is in a slot) and
   *sent* when the target has it, under an id that is positive and never used twice.
2. The frontier is the set of nodes that get children next: first the root, then the ``width`` best of the newest level.
   Each gets up to ``width`` children; all of them stay proposed (EAGLE-2, arXiv 2406.16858). width = 1: a chain.
   Where the next growth sends ``wanted`` nodes of a tree, those that are not among the best ``wanted`` - 1 get none: as
   scores never rise, no child of theirs would be sent.
3. Scores are cumulative logs and never rise along a path, so the best n nodes are connected.
4. Each commit re-roots the tree, as the target re-roots its own. Sent nodes below the committed tokens stay, under the
   same ids; a drafter that grows from the new root proposes some of them again, and they are not sent twice. A tree
   that grows ahead instead keeps all nodes below the last committed token, if that one was computed.
5. Ahead of the target the frontier is the ``max_frontier`` best nodes of any level without children: a forward of few
   rows costs the same as one row, and it is not known what the target will ask for next. A score is the log chance that
   the answer reaches a node, so nodes where a round is more likely to end are grown first.
6. Computed nodes are in the KV list in the order in which they were computed; bit j of an ancestor word is the j-th.

DraftContext: one session of a drafter with weights: its committed tokens, and the KV and states computed for them.

Rules of a context:
1. Rows are tokens by position. ``slots`` holds the KV of rows ``start, start + 1, …``; later rows are pending.
2. The window: rows from ``start`` on are at most ``window``, the tree included. When they would be more, or slots run
   out, the older half is dropped. Without features the kept half is computed again from position 0 on, as if the
   session had begun there, because a model's states depend on all rows before them. With features its KV is kept:
   rotary positions matter only by their distances, and the KV of a head's first layer depends only on a row's own
   input. Further layers keep traces of the dropped rows, as with any sliding window.
3. With features (lag 1) a row can be computed only when the target's state before it has arrived. States that arrive
   twice are ignored. Missing states are replaced by zeros, because a row's token alone helps (the default head without
   states of a short prompt: acceptance length 1.86, beginning anew 1.77, with all states 1.97). After a gap of more
   than ``MAX_ZERO_ROWS`` rows the context begins anew, that many rows before the new states. A block head's rows read
   no token, so rows without a state are left out; rows before the gap stay.
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
from math import isfinite

import numpy as np
import torch

from slipstream.choosing.logits import TokenHistory
from slipstream.choosing.sampling import Children
from slipstream.drafting.block import BlockPass
from slipstream.engine.kv import Indices
from slipstream.engine.native.draft import Seed
from slipstream.protocol.messages import Growth
from slipstream.protocol.requests import Sampling
from slipstream.protocol.tree import MAX_HELD, MAX_NODES

MIN_FRONTIER_AHEAD, SENT_PER_ROW = 8, 2  # the fewest nodes expanded in one forward ahead; nodes sent for each of them
MAX_ZERO_ROWS = 256  # consecutive rows that are computed without their state
LOWEST_SCORE = float(np.finfo(np.float32).min)  # that is sent
ROOT = -1  # among nodes, which are counted from 0
NO_SLOTS: Indices = np.zeros(0, np.int64)


class GrowingTree:
    __slots__ = ("_sent_children", "ahead", "base", "begun", "computed", "depths", "frontier", "ids", "max_frontier",
                 "next_id", "num_sent", "parents", "picks", "scores", "slots", "tokens", "wanted", "width")

    def __init__(self, base: int, width: int = 1, next_id: int = 1) -> None:
        """base: committed tokens; next_id: the first free id, above 1 where a session begins again."""
        self.base, self.width, self.next_id = base, width, next_id
        self.wanted = 0  # nodes that the next growth sends of a tree of which the target has none; 0: more are of use
        self.ahead = False  # whether it grows while the target verifies
        self.max_frontier = MIN_FRONTIER_AHEAD  # nodes, when it grows ahead
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
        self.picks: list[int] = []  # which candidates of the level above, ``width`` of each node, the frontier is
        # (parent, token) -> sent node that was not proposed again since the last commit
        self._sent_children: dict[tuple[int, int], int] = {}

    @property
    def free_nodes(self) -> int:
        """Further nodes that the target's tree may hold."""
        return MAX_HELD - 1 - self.num_sent

    @property
    def is_fresh(self) -> bool:
        """Whether nothing of it is grown, and the target has none of its nodes."""
        return not (self.ahead or self.tokens)

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

    def ancestor_words(self) -> list[int]:
        """Ancestor words of the frontier over the computed nodes followed by the frontier itself."""
        bits = {node: bit for bit, node in enumerate([*self.computed, *self.frontier])}
        words = []
        for node in self.frontier:
            word = 0
            while node != ROOT:
                word |= 1 << bits[node]
                node = self.parents[node]
            words.append(word)
        return words

    def ancestor_indices(self, node: int) -> list[int]:
        """Indices in ``computed`` of the nodes between the root and ``node``, both left out."""
        indices = {computed: index for index, computed in enumerate(self.computed)}
        above: list[int] = []
        while (node := self.parents[node]) != ROOT:
            above.append(indices[node])
        return above[::-1]

    def expand(self, children: Sequence[Children], slots: Indices = NO_SLOTS) -> None:
        """Give each frontier node its children (log scores relative to the node) and move the frontier down a level.
        A child with a score that is not finite is skipped: the filters forbid its token. slots: the frontier's KV."""
        assert len(children) == len(self.frontier)
        level: list[int] = []
        totals: list[float] = []
        candidates: list[int] = []  # which one each node of the level is
        for place, (node, (tokens, scores)) in enumerate(zip(self.frontier, children, strict=True)):
            node_score, depth = (0.0, 1) if node == ROOT else (self.scores[node], self.depths[node] + 1)
            ranked = zip(tokens[: self.width], scores[: self.width], strict=True)
            for candidate, (token, score) in enumerate(ranked, place * self.width):
                if not isfinite(score):
                    continue
                total = node_score + min(0.0, score)
                totals.append(total)
                candidates.append(candidate)
                if self._sent_children:
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
        picks = sorted(range(len(level)), key=totals.__getitem__, reverse=True)[:most]
        if self.wanted:
            parents = set(nlargest(self.wanted - 1, range(len(self.scores)), key=self.scores.__getitem__))
            while picks and level[picks[-1]] not in parents:
                picks.pop()
        picks.sort()
        self.picks, self.frontier = [candidates[pick] for pick in picks], [level[pick] for pick in picks]

    def propose(self, parent: int, token: int, score: float) -> int:
        """Propose a child. Returns its number: of a sent node that is proposed again, or of a new one."""
        node = self._sent_children.pop((parent, token), None)
        if node is not None:
            self.scores[node] = score
            return node
        self.tokens.append(token)
        self.parents.append(parent)
        self.scores.append(score)
        self.depths.append(1 if parent == ROOT else self.depths[parent] + 1)
        self.ids.append(0)
        return len(self.tokens) - 1

    def grow_ahead(self, max_frontier: int = MIN_FRONTIER_AHEAD) -> None:
        """Grow ahead of the target from now on: the likeliest nodes of all levels, not only the newest level.
        ``max_frontier``: nodes expanded in one forward, at least MIN_FRONTIER_AHEAD."""
        self.ahead, self.max_frontier = True, max(MIN_FRONTIER_AHEAD, max_frontier)
        if not self.begun:
            return
        left_out = {*self.computed, *self._sent_children.values()}
        candidates = [node for node in range(len(self.tokens)) if node not in left_out]
        count = min(self.max_frontier, max(0, MAX_HELD - len(self.computed)))
        self.frontier = sorted(nlargest(count, candidates, key=self.scores.__getitem__))

    def next_growth(self, session: int, max_nodes: int) -> Growth:
        """The best nodes that the target does not have, at most ``max_nodes``, best first, so parents come first. They
        count as sent from now on."""
        ids, parents, tokens, scores = self.ids, self.parents, self.tokens, self.scores
        order = sorted(range(len(ids)), key=scores.__getitem__, reverse=True)  # the earlier among equals
        if self.num_sent:
            order = [node for node in order if not ids[node]]
        nodes, first_id, root_id = order[: max(0, min(max_nodes, self.free_nodes))], self.next_id, -self.base
        for node_id, node in enumerate(nodes, first_id):
            ids[node] = node_id
        self.next_id += len(nodes)
        self.num_sent += len(nodes)
        self.wanted = 0  # how many the one after it sends is not known yet
        parent_ids = [root_id if (parent := parents[node]) == ROOT else ids[parent] for node in nodes]
        return Growth(session, self.base, np.arange(first_id, self.next_id, dtype=np.int32),
                      np.array(parent_ids, np.int32), np.array([tokens[node] for node in nodes], np.int32),
                      np.array([max(scores[node], LOWEST_SCORE) for node in nodes], np.float32))

    def sent_depth(self) -> int:
        """The depth of the deepest sent node; 0: none was sent."""
        return max((depth for depth, node_id in zip(self.depths, self.ids, strict=True) if node_id), default=0)

    def commit(self, tokens: Sequence[int], keep_kv: bool) -> tuple[Indices, Indices]:
        """Re-root below committed ``tokens``. keep_kv: the KV of accepted draft tokens may be kept. Returns the slots
        of kept KV, for the first of ``tokens``; and the slots to free."""
        path, node, remaining = list[int](), ROOT, iter(tokens)
        token = next(remaining, None)
        for child, (parent, child_token) in enumerate(zip(self.parents, self.tokens, strict=True)):
            if parent == node and child_token == token:  # one pass is enough: a parent comes before its children
                path.append(child)
                node, token = child, next(remaining, None)
        self.base += len(tokens)
        if keep_kv and self.ahead and token is None and node in self.computed:
            return self._keep_below(path)
        kept, slots = list[int](), self.slots
        for accepted in path[: len(tokens) - 1] if keep_kv and len(slots) else ():
            if accepted in self.computed:
                kept.append(self.computed.index(accepted))
        self._restart(node if token is None else None)
        return (slots[kept], np.delete(slots, kept)) if kept else (NO_SLOTS, slots)

    def drop_unsent(self) -> Indices:
        """Drop all nodes except the sent ones. Returns the slots of computed nodes, for the caller to free."""
        freed = self.slots
        self._restart(ROOT)
        return freed

    def _keep_below(self, path: list[int]) -> tuple[Indices, Indices]:
        """Make the last of ``path`` the root and keep all nodes below it. Returns as ``commit``."""
        indices = {node: index for index, node in enumerate(self.computed)}
        sent_children, slots = self._sent_children, self.slots
        renumbered = self._keep_subtree(path[-1], sent_only=False)
        del renumbered[path[-1]]
        self.computed = [renumbered[node] for node in indices if node in renumbered]
        self._sent_children = {(renumbered.get(parent, ROOT), token): renumbered[node]
                               for (parent, token), node in sent_children.items() if node in renumbered}
        self.grow_ahead(self.max_frontier)
        if not len(slots):
            return NO_SLOTS, NO_SLOTS
        accepted, below = [indices[node] for node in path], [i for node, i in indices.items() if node in renumbered]
        self.slots = slots[below]
        return slots[accepted], np.delete(slots, [*accepted, *below])

    def _restart(self, root: int | None) -> None:
        """Keep only sent nodes below ``root`` (None: there are none), and begin a new tree."""
        if root is None:
            for column in (self.tokens, self.parents, self.scores, self.depths, self.ids):
                column.clear()
            self.num_sent = 0
        else:
            self._keep_subtree(root, sent_only=True)
        children = zip(self.parents, self.tokens, strict=True)
        self._sent_children = dict(zip(children, range(len(self.tokens)), strict=True))
        self.begun, self.frontier, self.computed, self.slots = False, [ROOT], [], NO_SLOTS

    def _keep_subtree(self, root: int, sent_only: bool) -> dict[int, int]:
        """Keep the nodes below ``root``, all or only the sent ones. Returns old number -> new number."""
        renumbered, nodes = {root: ROOT}, list[int]()
        for node in range(root + 1, len(self.tokens)):
            if self.parents[node] in renumbered and (self.ids[node] or not sent_only):
                renumbered[node] = len(nodes)
                nodes.append(node)
        score, depth = (0.0, 0) if root == ROOT else (self.scores[root], self.depths[root])
        self.parents = [renumbered[self.parents[node]] for node in nodes]
        self.tokens = [self.tokens[node] for node in nodes]
        # A sent node may have a better score than its parent, if the parent was proposed again with a lower one.
        self.scores = [min(0.0, self.scores[node] - score) for node in nodes]
        self.depths = [self.depths[node] - depth for node in nodes]
        self.ids = [self.ids[node] for node in nodes]
        self.num_sent = len(self.ids) - self.ids.count(0)
        return renumbered


State = tuple[torch.Tensor, int]  # rows [_, W], and which of them it is: cut out only where it is read


@dataclass(slots=True)
class DraftContext:
    session: int
    sampling: Sampling
    prompt_len: int
    tokens: list[int]
    tree: GrowingTree
    history: TokenHistory | None
    window: int
    lag: int  # of the states that rows read: 1, or 0 for a network that reads none
    zero_fill: bool = True  # whether a row without a target state is computed with zeros; lag 1 only
    ranking: Sampling | None = None  # how children are ranked; None: greedily, by the logits as they are
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
        self.ranking = None if self.sampling.greedy and not self.sampling.adjusts else self.sampling

    @property
    def base(self) -> int:
        return len(self.tokens)

    @property
    def first_pending(self) -> int:
        """Position of the first row that is not computed."""
        return self.start + len(self.slots)

    @property
    def num_pending(self) -> int:
        """Rows that can be computed now."""
        known = len(self.tokens) - self.start - len(self.slots)
        return max(0, min(known, self.num_inputs) if self.lag else known)

    @property
    def num_rows(self) -> int:
        """Rows that are computed or can be computed now."""
        return len(self.slots) + self.num_pending

    @property
    def next_state(self) -> int:
        """Position of the state that must arrive next; lag 1 only."""
        return self.first_pending - 1 + self.num_inputs

    def slide(self, levels: int) -> Indices:
        """Make room in the window for ``levels`` below the newest token. Returns slots to free."""
        if len(self.tokens) + levels - self.start <= self.window:
            return NO_SLOTS
        return self.drop_oldest(self.base - self.window // 2 - self.start)

    def drop_oldest(self, count: int) -> Indices:
        """Drop the ``count`` oldest rows. Returns slots to free."""
        if not self.lag:
            freed = self.close()
            self.start = self.origin = self.start + count
            return freed
        self.take_inputs(min(max(0, count - len(self.slots)), self.num_inputs))  # first: memory may run out there
        freed, self.slots = self.slots[:count], self.slots[count:]
        self.start += count
        return freed

    def take_inputs(self, count: int) -> torch.Tensor | None:
        """Take the states of the first ``count`` pending rows, [count, W]; None when there are none to take."""
        if count == 0 or not self.inputs:
            return None
        parts, missing = list[torch.Tensor](), count
        for rows in self.inputs:
            parts.append(rows[:missing])
            missing -= len(parts[-1])
            if not missing:
                break
        taken = parts[0] if len(parts) == 1 else torch.cat(parts)
        rest = self.inputs[len(parts) - 1][len(parts[-1]) :]
        # A view would keep the whole tensor in memory, so the rest is copied; later tensors stay as they are.
        self.inputs[: len(parts)] = [rest.clone()] if len(rest) else []
        self.num_inputs -= count
        return taken

    def add_states(self, start: int, rows: torch.Tensor) -> Indices:
        """Keep target states of positions ``start, …`` [M, W] for the pending rows. Returns slots to free (where a long
        gap made the context begin anew)."""
        end, expected = min(start + rows.shape[0], len(self.tokens)), self.next_state
        if end <= max(start, expected):
            return NO_SLOTS
        if start <= expected:
            self.inputs.append(rows[expected - start : end - start])
            self.num_inputs += end - expected
            return NO_SLOTS
        if not self.zero_fill:
            self.start = start + 1 - len(self.slots)  # rows before the gap keep their rotary positions
            self.inputs, self.num_inputs = [rows[: end - start]], end - start
            return NO_SLOTS
        freed, gap, max_zeros = NO_SLOTS, start - expected, min(MAX_ZERO_ROWS, self.window // 2)
        zeros = rows.new_zeros(min(gap, max_zeros), *rows.shape[1:])  # first: memory may run out there
        if gap > max_zeros:
            freed, self.start = self.close(), start + 1 - max_zeros
        self.inputs += [zeros, rows[: end - start]]
        self.num_inputs += len(zeros) + end - start
        return freed

    def seed(self, row: int, slots: Indices, levels: int) -> Seed:
        """A seed of all pending rows, from ``row`` on; their states are taken out of ``inputs``. levels: below the
        root's children."""
        tokens = self.tokens[row:]
        states = self.take_inputs(len(tokens))
        assert states is not None
        return Seed(tokens, states, row - self.origin, self.slots, slots, levels, self.base, self.ranking,
                    self.base - self.prompt_len, self.history, self.tree.wanted)

    def restore_inputs(self, seed: Seed) -> None:
        """Put the seed's states back: its rows are pending again."""
        self.inputs.insert(0, seed.states)
        self.num_inputs += len(seed.states)

    def add_computed(self, slots: Indices) -> None:
        """The next ``len(slots)`` pending rows have their KV in ``slots``."""
        self.slots = np.concatenate([self.slots, slots])

    def commit(self, tokens: list[int]) -> Indices:
        """Append committed tokens. Returns slots to free."""
        kept, freed = self.tree.commit(tokens, keep_kv=not self.lag and self.block is None)
        if len(kept):
            self.add_computed(kept)
        self.states.clear()
        self.block = None
        self.tokens.extend(tokens)
        if self.history is not None:
            self.history.append(tokens)
        return freed

    def states_of(self, nodes: Sequence[int]) -> torch.Tensor:
        """[N, W] of computed nodes."""
        return torch.stack([rows[row] for rows, row in (self.states[node] for node in nodes)])

    def close(self) -> Indices:
        """Drop all computed and pending rows. Returns every slot of the session, for the caller to free."""
        freed = np.concatenate([self.slots, self.tree.drop_unsent()])
        self.states.clear()
        self.block = None
        self.slots, self.inputs, self.num_inputs = NO_SLOTS, [], 0
        return freed
