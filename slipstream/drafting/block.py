"""BlockPass: what one pass over a block says of the next tokens of several sessions, and the children that follow.

Rules:
1. A block predicts ``reach`` tokens below the newest one at once. Slot k says what stands k tokens below it, whatever
   stands between: its marginal. A head may also say how what stands right before changes that (``Conditional``), and
   then siblings have children of their own, all from the one pass.
2. Of a slot only its ``CANDIDATES`` best tokens can become nodes; a bias is computed for those alone. What the others
   weigh is kept as one number, so that scores stay shares of the whole vocabulary.
3. Candidates of sampled sessions are ranked with the shared keyed noise. It depends on the position alone, so a bias is
   added to what has the noise in it already. Penalties count what is committed, not the path within a block.

It knows nothing about layers, slots of KV or who asks. Dimension key: R sessions, N nodes, C candidates, W numbers of a
slot's state, r of a conditional's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch

from slipstream.choosing.sampling import Children

CANDIDATES = 64


class Conditional(Protocol):
    """How the token before a slot changes what the slot says."""

    def begin(self, states: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor | None:
        """What the nodes of R new blocks begin with, [R, r], given all slots' states [R, S, W]; None: nothing is
        carried from slot to slot."""
        ...

    def step(self, tokens: torch.Tensor, states: torch.Tensor,
             carried: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Of N nodes, their tokens int64 [N], their slots' states [N, W] and what their parents handed on [N, r]: a
        row whose product with ``rows`` is the bias [N, r], what they hand on, and the log chance that the target takes
        a child of theirs at all [N]; None for what the head does not say."""
        ...

    def rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """[C, r] of candidates int64 [C]."""
        ...


@dataclass(frozen=True, slots=True)
class BlockStates:
    """What a network says beside its logits, which are those of ``reach`` slots of each row."""

    reach: int
    states: torch.Tensor | None = None  # [R, S, W] of all slots, the newest ``reach`` of which predict
    conditional: Conditional | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """A node whose children are wanted."""

    row: int  # its session's in the pass
    depth: int  # 0: the newest committed token; below ``reach``
    token: int
    carried: torch.Tensor | None  # [r] what its parent handed on


class BlockPass:
    """Slots of R sessions. What a head computes stays where it is; what trees need is on the host."""

    __slots__ = ("_conditional", "_found", "_heat", "_kept", "_left", "_scores", "_states", "_tokens", "begun", "reach")

    def __init__(self, block: BlockStates, found: Sequence[Children], heat: Sequence[float],
                 anchors: Sequence[int]) -> None:
        """found: of R * reach slots their best tokens and log scores; heat: [R] temperatures, 0 for greedy sessions;
        anchors: [R] the newest committed tokens."""
        self.reach, self._found, self._heat = block.reach, found, heat
        self._conditional = block.conditional
        self.begun: torch.Tensor | None = None  # [R, r] what roots are handed on
        if self._conditional is None:
            return
        assert block.states is not None
        self._states = block.states[:, block.states.shape[1] - self.reach :]
        self.begun = self._conditional.begin(block.states, torch.tensor(anchors, device=block.states.device))
        shape = (len(heat), self.reach, len(found[0][0]))
        self._tokens = torch.tensor([tokens for tokens, _ in found]).view(shape)
        self._scores = torch.tensor([scores for _, scores in found], dtype=torch.float64).view(shape)
        greedy = torch.tensor(heat)[:, None] == 0
        # What a sampled session's other tokens weigh is not known: its scores are shares of the best alone.
        self._left = torch.where(greedy, (1 - self._scores.exp().sum(-1)).clamp(min=0), 0.0)  # [R, reach]
        self._kept: dict[tuple[int, int], torch.Tensor] = {}  # of a slot its candidates' rows

    def children(self, asked: Sequence[Asked], topk: int) -> tuple[list[Children], torch.Tensor | None]:
        """The ``topk`` best children of each node, best first, and what the nodes hand on [N, r]."""
        if self._conditional is not None:
            return self._ranked(self._conditional, asked, topk)
        slots = (self._found[node.row * self.reach + node.depth] for node in asked)
        return [(tokens[:topk], scores[:topk]) for tokens, scores in slots], None

    @torch.inference_mode()
    def _ranked(self, conditional: Conditional, asked: Sequence[Asked],
                topk: int) -> tuple[list[Children], torch.Tensor | None]:
        device, rows = self._states.device, torch.tensor([node.row for node in asked])
        depths = torch.tensor([node.depth for node in asked])
        carried = [node.carried for node in asked if node.carried is not None]
        bias, handed_on, chance = conditional.step(
            torch.tensor([node.token for node in asked], device=device),
            self._states[rows.to(device), depths.to(device)], torch.stack(carried) if carried else None)
        tokens, scores, left = self._tokens[rows, depths], self._scores[rows, depths], self._left[rows, depths]
        if bias is not None:
            heat = torch.tensor([max(self._heat[node.row], 1e-3) if self._heat[node.row] else 1.0 for node in asked])
            scores = scores + self._biases(conditional, asked, bias).to("cpu", torch.float64) / heat[:, None]
        scores = scores - torch.logaddexp(scores.logsumexp(-1), left.log())[:, None]
        if chance is not None:
            scores = scores + chance.to("cpu", torch.float64)[:, None]
        best, where = scores.topk(min(topk, scores.shape[1]), 1)
        return list(zip(tokens.gather(1, where).tolist(), best.tolist(), strict=True)), handed_on

    def _biases(self, conditional: Conditional, asked: Sequence[Asked], bias: torch.Tensor) -> torch.Tensor:
        parts, first = list[torch.Tensor](), 0
        for slot, nodes in groupby((node.row, node.depth) for node in asked):
            count = len(list(nodes))
            if slot not in self._kept:
                self._kept[slot] = conditional.rows(self._tokens[slot].to(bias.device))
            parts.append(bias[first : first + count] @ self._kept[slot].T)
            first += count
        return torch.cat(parts)
