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
   the logits to grow from; unless it was drafted, and the tree goes on below it (``tree.GrowingTree``).

It knows nothing about networks, batches or other sessions. Slots that it gives up are returned, for the owner to free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from slipstream.drafting.tree import NO_SLOTS, GrowingTree, Indices
from slipstream.engine.native.draft import Seed
from slipstream.engine.sampling import TokenHistory
from slipstream.protocol.messages import Sampling

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
    plain: bool = False  # its tokens are ranked as they are
    start: int = 0  # position of the oldest row
    origin: int = 0  # taken from positions before they are rotated
    slots: Indices = field(default_factory=lambda: NO_SLOTS)  # [C] KV of rows start .. start + C - 1
    inputs: list[torch.Tensor] = field(default_factory=list)  # [_, W] states for the first pending rows; lag 1 only
    num_inputs: int = 0  # rows in them
    states: dict[int, State] = field(default_factory=dict)  # computed node -> its output state; lag 1 only

    def __post_init__(self) -> None:
        # The token at 0 has no state before it, so a head's first row is the token at 1.
        self.start = self.origin = self.lag
        sampling = self.sampling
        self.plain = sampling.greedy and not sampling.logit_bias and not sampling.path_dependent

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
        end, expected = min(start + rows.shape[0], len(self.tokens)), self.done - 1 + self.num_inputs
        if end <= max(start, expected):
            return NO_SLOTS
        if start <= expected:
            self.inputs.append(rows[expected - start : end - start])
            self.num_inputs += end - expected
            return NO_SLOTS
        freed = self.close()
        self.inputs, self.num_inputs, self.start = [rows[: end - start]], end - start, start + 1
        return freed

    def seed(self, row: int, slots: Indices, levels: int) -> Seed:
        """All pending rows, from ``row`` on, whose states are taken; and so many levels beyond the root's children."""
        tokens = self.tokens[row:]
        states = self.pull(len(tokens))
        assert states is not None
        return Seed(tokens, states, row - self.origin, self.slots, slots, levels)

    def computed(self, slots: Indices) -> None:
        """The next ``len(slots)`` pending rows have their KV in ``slots``."""
        self.slots = np.concatenate([self.slots, slots])

    def commit(self, tokens: list[int]) -> Indices:
        """Append committed tokens. Returns slots to free."""
        true, freed = self.tree.commit(tokens, lasting=not self.lag)
        if len(true):
            self.computed(true)
        self.states.clear()
        self.tokens.extend(tokens)
        if self.history is not None:
            self.history.append(tokens)
        return freed

    def states_of(self, nodes: Sequence[int]) -> torch.Tensor:
        """[N, W] of computed nodes."""
        return torch.stack([rows[place] for rows, place in (self.states[node] for node in nodes)])

    def close(self) -> Indices:
        """Give up all that was computed or waits to be. Returns every slot that the session holds."""
        freed = np.concatenate([self.slots, self.tree.forget()])
        self.states.clear()
        self.slots, self.inputs, self.num_inputs = NO_SLOTS, [], 0
        return freed
