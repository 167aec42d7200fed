"""DraftContext: one session of a drafter with weights: its committed tokens, and what of them was computed.

Rules:
1. Rows are tokens by position. ``slots`` holds the KV of rows ``start, start + 1, …``; what comes after is pending.
2. The window: rows from ``start`` on are at most ``window``, the tree included. When they would be more, the older half
   goes. Without features the kept half is computed again from position 0 on, as if the session had begun there: a
   model's states depend on all that it saw. With features it is kept as it is: a head has one layer, so its KV depends
   on a row's own input alone, and rotary positions matter by their distances only.
3. With features (lag 1) a row can be computed only when the target's state before it is here. States that leave a gap
   begin the context anew behind the gap; states that are known already are passed over.
4. A commit keeps the KV of drafted tokens that became true (lag 0), and none with features: those rows were computed
   from guessed states and are pending again, with the target's. The newest token stays pending, because its row gives
   the logits to grow from; unless it was drafted and grown on ``ahead``: then the tree below it goes on. With features
   it goes on from the states that were guessed, once the rows above it have the true ones.

It knows nothing about networks, batches or other sessions. Slots that it gives up are returned, for the owner to free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.drafting.grow import ROOT, TreeGrowth
from slipstream.drafting.sent import SentTree
from slipstream.engine.sampling import TokenHistory
from slipstream.protocol.messages import Sampling

Indices = NDArray[np.int64]
State = tuple[torch.Tensor, int]  # rows [_, W], and which of them: cut out where it is read
NO_SLOTS: Indices = np.zeros(0, np.int64)


@dataclass(slots=True)
class DraftContext:
    session: int
    sampling: Sampling
    prompt_len: int
    tokens: list[int]
    sent: SentTree
    history: TokenHistory | None
    window: int
    lag: int
    keeps: bool = True  # what stands below a commit, when it is grown on ahead
    start: int = 0  # position of the oldest row
    origin: int = 0  # taken from positions before they are rotated
    slots: Indices = field(default_factory=lambda: NO_SLOTS)  # [C] KV of rows start .. start + C - 1
    inputs: list[torch.Tensor] = field(default_factory=list)  # [_, W] states for the first pending rows; lag 1 only
    num_inputs: int = 0  # rows in them
    tree: TreeGrowth | None = None  # None: the newest token's row was not computed yet
    tree_slots: Indices = field(default_factory=lambda: NO_SLOTS)  # KV of tree.computed
    ahead: bool = False  # it is grown on while the target verifies: what stands below a commit is kept
    states: dict[int, State] = field(default_factory=dict)  # candidate -> its output state; lag 1 only

    def __post_init__(self) -> None:
        # The token at 0 has no state before it, so a head's first row is the token at 1.
        self.start = self.origin = self.lag

    @property
    def base(self) -> int:
        return len(self.tokens)

    @property
    def done(self) -> int:
        """Position of the first row that is not computed."""
        return self.start + len(self.slots)

    @property
    def behind(self) -> bool:
        """Whether rows above the tree are missing, or there is no tree."""
        return self.tree is None or self.done < self.base

    @property
    def num_pending(self) -> int:
        """Rows that can be computed now."""
        known = self.base - self.done
        if self.lag:
            known = min(known, self.num_inputs)
        return max(0, known)

    @property
    def complete(self) -> bool:
        """Whether computing the pending rows reaches the newest token."""
        return self.done + self.num_pending == self.base and self.num_pending > 0

    def slide(self, reach: int) -> Indices:
        """Make room for ``reach`` levels below the newest token. Returns slots to free."""
        if self.base + reach - self.start <= self.window:
            return NO_SLOTS
        start = self.base - self.window // 2
        if self.lag:
            return self._drop_oldest(start - self.start)
        freed = self.close()
        self.start = self.origin = start
        return freed

    def _drop_oldest(self, count: int) -> Indices:
        freed, self.slots = self.slots[:count], self.slots[count:]
        self.pull(min(count - len(freed), self.num_inputs))
        self.start += count
        return freed

    def pull(self, count: int) -> torch.Tensor | None:
        """Take the states of the first ``count`` pending rows, [count, W]; None when there are none to take."""
        if count == 0 or not self.inputs:
            return None
        rows = self.inputs[0] if len(self.inputs) == 1 else torch.cat(self.inputs)
        self.num_inputs -= count
        if not self.num_inputs:
            self.inputs = []
            return rows
        # A view would keep the memory of all that it was cut from.
        self.inputs = [rows[count:].clone()]
        return rows[:count]

    def take(self, start: int, rows: torch.Tensor) -> Indices:
        """Target states of positions ``start, …`` [M, W]. Returns slots to free (when a gap begins it anew)."""
        if start + len(rows) > self.base:
            rows = rows[:max(0, self.base - start)]
        expected = self.done - 1 + self.num_inputs
        if len(rows) == 0 or start + len(rows) <= expected:
            return NO_SLOTS
        if start <= expected:
            self.inputs.append(rows[expected - start:] if start < expected else rows)
            self.num_inputs += start + len(rows) - expected
            return NO_SLOTS
        freed = self.close()
        self.inputs, self.num_inputs, self.start = [rows], len(rows), start + 1
        return freed

    def computed(self, slots: Indices) -> None:
        """The next ``len(slots)`` pending rows have their KV in ``slots``."""
        self.slots = np.concatenate([self.slots, slots])

    def commit(self, tokens: list[int]) -> Indices:
        """Append committed tokens. Returns slots to free."""
        freed = self.prune() if self.tree is None else self._follow(self.tree, tokens)
        base = self.base
        self.tokens.extend(tokens)
        self.sent.commit(base, tokens)
        if self.history is not None:
            self.history.append(tokens)
        return freed

    def _follow(self, tree: TreeGrowth, tokens: list[int]) -> Indices:
        # The KV of drafted tokens that became true is kept, and of those below them if the tree goes on there.
        before = tree.computed
        rerooted = tree.reroot(tokens) if self.ahead and self.keeps else None
        if rerooted is None:
            places = [] if self.lag else tree.follow(tokens[:-1])
            if places:
                self.slots = np.concatenate([self.slots, self.tree_slots[places]])
                self.tree_slots = np.delete(self.tree_slots, places)
            return self.prune()
        path, kept = rerooted
        true = [] if self.lag else path
        self.slots = np.concatenate([self.slots, self.tree_slots[true]])
        freed, self.tree_slots = np.delete(self.tree_slots, [*true, *kept]), self.tree_slots[kept]
        if self.lag:
            self.states = {ROOT: self.states[before[path[-1]]],
                           **{now: self.states[before[was]] for now, was in zip(tree.computed, kept, strict=True)}}
        return freed

    def states_of(self, nodes: Sequence[int]) -> torch.Tensor:
        """[N, W] of candidates that were computed."""
        return torch.stack([rows[place] for rows, place in (self.states[node] for node in nodes)])

    def prune(self) -> Indices:
        """Forget the tree. Returns the slots of its nodes."""
        freed, self.tree_slots = self.tree_slots, NO_SLOTS
        self.tree = None
        self.states.clear()
        return freed

    def close(self) -> Indices:
        """Give up all that was computed or waits to be. Returns every slot that the session holds."""
        freed = np.concatenate([self.slots, self.prune()])
        self.slots, self.inputs, self.num_inputs = NO_SLOTS, [], 0
        return freed
