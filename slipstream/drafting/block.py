"""BlockPass: the predictions of one pass over the blocks of several sessions, and the children that they give to nodes.

Rules:
1. A block predicts ``reach`` tokens after the newest one at once. Slot k predicts the token k places after it, whatever
   the tokens between are: a marginal distribution. A head may also have a bias that depends on the token right before
   (``MarkovHead``); then each sibling has children of its own, all from the one pass.
2. Only the ``CANDIDATES`` best tokens of a slot can become nodes; a bias is computed only for those. The probability of
   all other tokens is kept as one number, so that scores stay shares of the whole vocabulary.
3. Candidates of sampled sessions are ranked with the shared keyed noise. The noise depends only on the position, so a
   bias is added to scores that contain it already. Penalties count committed tokens, not the path within a block.
4. A markov head adds ``W2 · l`` to a slot's logits. x is a slot's state after the final norm, e = W1[token before].
   vanilla: l = e. gated: l = σ(G · [x; e]) e. rnn, with a state s that is zero at first: [g, c, o] = J · [s; e; x],
   s' = σ(g) s + (1 - σ(g)) tanh(c), l = tanh(o); where slot 0 does not predict it is a step of it too, as in training.
5. A confidence head predicts the chance that the target accepts any child of a node: σ(w · [x; e]). It lowers the
   scores of the children.

It knows nothing about layers, KV slots or sessions. Dimension key: R sessions, S slots of a block, N nodes,
C candidates, W width of a slot's state, r width of a markov head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F

from slipstream.choosing.sampling import Children
from slipstream.drafting.heads.block_checkpoint import BlockHead
from slipstream.engine.model import Tensors
from slipstream.engine.ops.layer import Linear

CANDIDATES = 64


class MarkovHead:
    """The parts of a head that depend on the token before a slot: a markov head, a confidence head, or both."""

    __slots__ = ("_confidence", "_from_anchor", "_gate", "_joint", "_kind", "_places", "_w1", "_w2", "_with_markov")

    def __init__(self, head: BlockHead, tensors: Tensors, vocabulary: torch.Tensor | None) -> None:
        """vocabulary: int64 [V'] target ids of the draft's tokens; None: draft ids are target ids."""
        def product(name: str) -> Linear:
            return Linear(tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

        self._kind, self._from_anchor, self._with_markov = head.markov, head.from_anchor, head.confidence_with_markov
        self._w1, self._w2 = (tensors.get(f"markov_head.markov_w{i}.weight") for i in (1, 2))
        self._gate = product("markov_head.gate_proj") if head.markov == "gated" else None
        self._joint = product("markov_head.joint_proj") if head.markov == "rnn" else None
        self._confidence = product("confidence_head.proj") if head.confidence else None
        self._places = None  # int64 [V] a token's row of W2
        if vocabulary is not None:
            self._places = torch.zeros(head.config.vocab_size, dtype=torch.int64, device=vocabulary.device)
            self._places[vocabulary] = torch.arange(len(vocabulary), device=vocabulary.device)

    @torch.inference_mode()
    def begin(self, states: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor | None:
        """The rnn state s of the roots of R new blocks, [R, r]. states [R, S, W]: of all slots; anchors int64 [R]: the
        newest tokens. None: not an rnn head."""
        if self._joint is None or self._w1 is None:
            return None
        before = F.embedding(anchors, self._w1)
        carried = torch.zeros_like(before)
        return carried if self._from_anchor else self._turned(before, states[:, 0], carried)[1]

    def step(self, tokens: torch.Tensor, states: torch.Tensor,
             carried: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """For N nodes with tokens int64 [N], states of their slots [N, W] and the rnn states of their parents [N, r].
        Returns l of rule 4 [N, r], whose product with ``rows`` is the bias; the nodes' rnn states [N, r]; and the log
        chance that the target accepts any child [N]. Each is None if the head lacks that part."""
        before = None if self._w1 is None else F.embedding(tokens, self._w1)
        chance = None
        if self._confidence is not None:
            read = torch.cat((states, before), -1) if self._with_markov and before is not None else states
            chance = F.logsigmoid(self._confidence(read)[:, 0])
        if before is None or self._kind == "vanilla":
            return before, None, chance
        if self._gate is not None:
            return torch.sigmoid(self._gate(torch.cat((states, before), -1))) * before, None, chance
        assert carried is not None
        return *self._turned(before, states, carried), chance

    def rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """The rows of W2 for candidates int64 [C]: [C, r]."""
        assert self._w2 is not None
        return self._w2.index_select(0, tokens if self._places is None else self._places[tokens])

    def _turned(self, before: torch.Tensor, states: torch.Tensor,
                carried: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._joint is not None
        gate, candidate, out = self._joint(torch.cat((carried, before, states), -1)).chunk(3, -1)
        gate = torch.sigmoid(gate)
        return torch.tanh(out), gate * carried + (1 - gate) * torch.tanh(candidate)


@dataclass(frozen=True, slots=True)
class BlockStates:
    """What a network returns with its logits, which are those of ``reach`` slots of each row."""

    reach: int
    states: torch.Tensor | None = None  # [R, S, W] of all slots; the last ``reach`` of them predict
    conditional: MarkovHead | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """A node whose children are wanted."""

    row: int  # of its session in the pass
    depth: int  # 0: the newest committed token; less than ``reach``
    token: int
    carried: torch.Tensor | None  # [r] rnn state of its parent


class BlockPass:
    """The block slots of R sessions. A head's tensors stay on its device; candidates and scores are on the host."""

    __slots__ = ("_conditional", "_found", "_heat", "_kept", "_left", "_scores", "_states", "_tokens", "begun", "reach")

    def __init__(self, block: BlockStates, found: Sequence[Children], heat: Sequence[float],
                 anchors: Sequence[int]) -> None:
        """found: the best tokens and log scores of each of R * reach slots; heat: [R] temperatures, 0 for greedy
        sessions; anchors: [R] the newest committed tokens."""
        self.reach, self._found, self._heat = block.reach, found, heat
        self._conditional = block.conditional
        self.begun: torch.Tensor | None = None  # [R, r] rnn states of the roots
        if self._conditional is None:
            return
        assert block.states is not None
        self._states = block.states[:, block.states.shape[1] - self.reach :]
        self.begun = self._conditional.begin(block.states, torch.tensor(anchors, device=block.states.device))
        shape = (len(heat), self.reach, len(found[0][0]))
        self._tokens = torch.tensor([tokens for tokens, _ in found]).view(shape)
        self._scores = torch.tensor([scores for _, scores in found], dtype=torch.float64).view(shape)
        greedy = torch.tensor(heat)[:, None] == 0
        # With noise the probability of the other tokens is unknown: scores are then shares of the candidates only.
        self._left = torch.where(greedy, (1 - self._scores.exp().sum(-1)).clamp(min=0), 0.0)  # [R, reach]
        self._kept: dict[tuple[int, int], torch.Tensor] = {}  # (row, depth) -> W2 rows of that slot's candidates

    def children(self, asked: Sequence[Asked], topk: int) -> tuple[list[Children], torch.Tensor | None]:
        """The ``topk`` best children of each node, best first, and the nodes' rnn states [N, r] (None: no rnn head)."""
        if self._conditional is not None:
            return self._ranked(self._conditional, asked, topk)
        slots = (self._found[node.row * self.reach + node.depth] for node in asked)
        return [(tokens[:topk], scores[:topk]) for tokens, scores in slots], None

    @torch.inference_mode()
    def _ranked(self, conditional: MarkovHead, asked: Sequence[Asked],
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

    def _biases(self, conditional: MarkovHead, asked: Sequence[Asked], bias: torch.Tensor) -> torch.Tensor:
        parts, first = list[torch.Tensor](), 0
        for slot, nodes in groupby((node.row, node.depth) for node in asked):
            count = len(list(nodes))
            if slot not in self._kept:
                self._kept[slot] = conditional.rows(self._tokens[slot].to(bias.device))
            parts.append(bias[first : first + count] @ self._kept[slot].T)
            first += count
        return torch.cat(parts)
