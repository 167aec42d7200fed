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

    __slots__ = ("_confidence", "_from_anchor", "_gate", "_joint", "_kind", "_w1", "_w2", "_w2_index", "_with_markov")

    def __init__(self, head: BlockHead, tensors: Tensors, vocabulary: torch.Tensor | None) -> None:
        """vocabulary: int64 [V'] target ids of the draft's tokens; None: draft ids are target ids."""
        def product(name: str) -> Linear:
            return Linear(tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

        self._kind, self._from_anchor, self._with_markov = head.markov, head.from_anchor, head.confidence_with_markov
        self._w1, self._w2 = (tensors.get(f"markov_head.markov_w{i}.weight") for i in (1, 2))
        self._gate = product("markov_head.gate_proj") if head.markov == "gated" else None
        self._joint = product("markov_head.joint_proj") if head.markov == "rnn" else None
        self._confidence = product("confidence_head.proj") if head.confidence else None
        self._w2_index = None  # int64 [V] a token's row of W2
        if vocabulary is not None:
            self._w2_index = torch.zeros(head.config.vocab_size, dtype=torch.int64, device=vocabulary.device)
            self._w2_index[vocabulary] = torch.arange(len(vocabulary), device=vocabulary.device)

    @torch.inference_mode()
    def begin(self, states: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor | None:
        """The rnn state s of the roots of R new blocks, [R, r]. states [R, S, W]: of all slots; anchors int64 [R]: the
        newest tokens. None: not an rnn head."""
        if self._joint is None or self._w1 is None:
            return None
        embedded = F.embedding(anchors, self._w1)
        rnn_state = torch.zeros_like(embedded)
        return rnn_state if self._from_anchor else self._rnn_step(embedded, states[:, 0], rnn_state)[1]

    def step(self, tokens: torch.Tensor, states: torch.Tensor,
             rnn_states: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """For N nodes with tokens int64 [N], states of their slots [N, W] and the rnn states of their parents [N, r].
        Returns l of rule 4 [N, r], whose product with ``rows`` is the bias; the nodes' rnn states [N, r]; and the log
        chance that the target accepts any child [N]. Each is None if the head lacks that part."""
        embedded = None if self._w1 is None else F.embedding(tokens, self._w1)
        log_confidence = None
        if self._confidence is not None:
            read = torch.cat((states, embedded), -1) if self._with_markov and embedded is not None else states
            log_confidence = F.logsigmoid(self._confidence(read)[:, 0])
        if embedded is None or self._kind == "vanilla":
            return embedded, None, log_confidence
        if self._gate is not None:
            return torch.sigmoid(self._gate(torch.cat((states, embedded), -1))) * embedded, None, log_confidence
        assert rnn_states is not None
        return *self._rnn_step(embedded, states, rnn_states), log_confidence

    def rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """The rows of W2 for candidates int64 [C]: [C, r]."""
        assert self._w2 is not None
        return self._w2.index_select(0, tokens if self._w2_index is None else self._w2_index[tokens])

    def _rnn_step(self, embedded: torch.Tensor, states: torch.Tensor,
                  rnn_state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._joint is not None
        gate, candidate, out = self._joint(torch.cat((rnn_state, embedded, states), -1)).chunk(3, -1)
        gate = torch.sigmoid(gate)
        return torch.tanh(out), gate * rnn_state + (1 - gate) * torch.tanh(candidate)


@dataclass(frozen=True, slots=True)
class BlockStates:
    """What a network returns with its logits, which are those of ``reach`` slots of each row."""

    reach: int
    states: torch.Tensor | None = None  # [R, S, W] of all slots; the last ``reach`` of them predict
    markov: MarkovHead | None = None


@dataclass(frozen=True, slots=True)
class BlockNode:
    """A node whose children are wanted."""

    row: int  # of its session in the pass
    depth: int  # 0: the newest committed token; less than ``reach``
    token: int
    rnn_state: torch.Tensor | None  # [r] rnn state of its parent


class BlockPass:
    """The block slots of R sessions. A head's tensors stay on its device; candidates and scores are on the host."""

    __slots__ = ("_candidates", "_markov", "_other_mass", "_scores", "_states", "_temperatures", "_tokens", "_w2_rows",
                 "reach", "root_states")

    def __init__(self, block: BlockStates, candidates: Sequence[Children], temperatures: Sequence[float],
                 anchors: Sequence[int]) -> None:
        """candidates: the best tokens and log scores of each of R * reach slots; temperatures: [R], 0 for greedy
        sessions; anchors: [R] the newest committed tokens."""
        self.reach, self._candidates, self._temperatures = block.reach, candidates, temperatures
        self._markov = block.markov
        self.root_states: torch.Tensor | None = None  # [R, r] rnn states of the roots
        if self._markov is None:
            return
        assert block.states is not None
        self._states = block.states[:, block.states.shape[1] - self.reach :]
        self.root_states = self._markov.begin(block.states, torch.tensor(anchors, device=block.states.device))
        shape = (len(temperatures), self.reach, len(candidates[0][0]))
        self._tokens = torch.tensor([tokens for tokens, _ in candidates]).view(shape)
        self._scores = torch.tensor([scores for _, scores in candidates], dtype=torch.float64).view(shape)
        self._other_mass = (1 - self._scores.exp().sum(-1)).clamp(min=0)  # [R, reach]
        self._w2_rows: dict[tuple[int, int], torch.Tensor] = {}  # (row, depth) -> W2 rows of that slot's candidates

    def children(self, nodes: Sequence[BlockNode], topk: int) -> tuple[list[Children], torch.Tensor | None]:
        """The ``topk`` best children of each node, best first, and the nodes' rnn states [N, r] (None: no rnn head)."""
        if self._markov is not None:
            return self._ranked(self._markov, nodes, topk)
        return [self._candidates[node.row * self.reach + node.depth] for node in nodes], None

    @torch.inference_mode()
    def _ranked(self, markov: MarkovHead, nodes: Sequence[BlockNode],
                topk: int) -> tuple[list[Children], torch.Tensor | None]:
        device, rows = self._states.device, torch.tensor([node.row for node in nodes])
        depths = torch.tensor([node.depth for node in nodes])
        parents = [node.rnn_state for node in nodes if node.rnn_state is not None]
        bias, rnn_states, log_confidence = markov.step(
            torch.tensor([node.token for node in nodes], device=device),
            self._states[rows.to(device), depths.to(device)], torch.stack(parents) if parents else None)
        tokens, scores = self._tokens[rows, depths], self._scores[rows, depths]
        if bias is not None:
            by_node = [self._temperatures[node.row] or 1.0 for node in nodes]
            temperatures = torch.tensor(by_node, dtype=torch.float64)
            scores = scores + self._bias_scores(markov, nodes, bias).to("cpu", torch.float64) / temperatures[:, None]
        scores = scores - torch.logaddexp(scores.logsumexp(-1), self._other_mass[rows, depths].log())[:, None]
        if log_confidence is not None:
            scores = scores + log_confidence.to("cpu", torch.float64)[:, None]
        best, where = scores.topk(min(topk, scores.shape[1]), 1)
        return list(zip(tokens.gather(1, where).tolist(), best.tolist(), strict=True)), rnn_states

    def _bias_scores(self, markov: MarkovHead, nodes: Sequence[BlockNode], bias: torch.Tensor) -> torch.Tensor:
        parts, first = list[torch.Tensor](), 0
        for slot, group in groupby((node.row, node.depth) for node in nodes):
            count = len(list(group))
            if slot not in self._w2_rows:
                self._w2_rows[slot] = markov.rows(self._tokens[slot].to(bias.device))
            parts.append(bias[first : first + count] @ self._w2_rows[slot].T)
            first += count
        return torch.cat(parts)
