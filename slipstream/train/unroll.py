"""Training-time test: the head unrolled over its own states, as it will run when it drafts (arXiv 2503.01840).

Rules:
1. Row r of a conversation reads token r + 1 and the target's state after token r, stands at rotary position r, and
   predicts token r + 2.
2. In step k (0 first) the state of row r is the head's own output of step k - 1 at row r - 1: what it would have when
   it had drafted k tokens. Rows before k have none and do not count.
3. In step k row r sees the true rows up to r - k (keys and values of step 0), then its own history: row r - k + j of
   step j, for j = 1 .. k. That is the path from the newest committed token down to it.
4. The loss of a step is the cross-entropy with the target's distribution over the draft vocabulary. Rows whose
   likeliest token is outside it are left out of the loss; in the agreement they count as misses.

It knows nothing about files or optimisers. Shapes: R rows of all conversations of a step, M of them with a loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F

from slipstream.drafting.heads.checkpoint import LAYER
from slipstream.engine.ops.layer import Rope
from slipstream.train.distil import Distilled, Lesson
from slipstream.train.head import Head
from slipstream.train.shards import ANSWER, Conversation

DECAY = 0.8  # weight of each further step's loss


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of whole conversations, side by side."""

    tokens: torch.Tensor  # int64 [R] token r + 1
    positions: torch.Tensor  # int64 [R]
    states: torch.Tensor  # bfloat16 [R, 3H] target states after token r
    bounds: tuple[int, ...]  # rows of conversation i: bounds[i] : bounds[i + 1]
    wanted: torch.Tensor  # int64 [M] rows with a loss
    best: torch.Tensor  # int64 [M] the target's likeliest token after token r + 1, as a draft id
    finals: torch.Tensor  # bfloat16 [M, H] the target's final states after token r + 1
    num_spoken: int  # rows that predict what the target said, those without a loss included

    @property
    def num_rows(self) -> int:
        return len(self.tokens)

    @property
    def num_wanted(self) -> int:
        return len(self.wanted)


@dataclass(frozen=True, slots=True)
class Unrolled:
    """What a pass over rows gave, step by step."""

    loss: torch.Tensor  # of all steps, later ones counting less; has a gradient
    agreement: tuple[float, ...]  # share of the spoken tokens whose best draft token is the target's


def rows_of(conversations: Sequence[Conversation], head: Head, max_rows: int,
            roles: Sequence[int] = (ANSWER,)) -> Rows:
    """The rows of ``conversations``, each cut after ``max_rows``. roles: of the tokens that have a loss."""
    hidden, device = head.config.hidden_size, head.vocabulary.device
    draft_ids = np.full(head.config.vocab_size, -1, np.int64)
    draft_ids[head.vocabulary.cpu().numpy()] = np.arange(len(head.vocabulary))
    tokens, positions, states, finals, wanted, bests, bounds, spoken = [], [], [], [], [], [], [0], 0
    for c in conversations:
        count = min(len(c.tokens) - 2, max_rows)
        if count < 1:
            continue
        said = np.isin(c.roles[2:count + 2], roles)
        greedy = np.asarray(c.greedy[1:count + 1])
        best = np.where(said & (greedy >= 0), draft_ids[np.maximum(greedy, 0)], -1)
        own = np.flatnonzero(best >= 0)
        bits = torch.from_numpy(np.array(c.states[:count + 1])).view(torch.bfloat16)
        tokens.append(np.asarray(c.tokens[1:count + 1], np.int64))
        positions.append(np.arange(count))
        states.append(bits[:count, :-hidden])
        finals.append(bits[1 + own, -hidden:])
        wanted.append(bounds[-1] + own)
        bests.append(best[own])
        spoken += int(said.sum())
        bounds.append(bounds[-1] + count)

    def placed(arrays: list[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(arrays)).to(device)

    return Rows(placed(tokens), placed(positions), torch.cat(states).to(device), tuple(bounds), placed(wanted),
                placed(bests), torch.cat(finals).to(device), spoken)


def unroll(head: Head, rows: Rows, steps: int, dtype: torch.dtype = torch.float32, drawn: int = 0) -> Unrolled:
    """``steps`` steps over ``rows``. dtype: of the products; what is not float32 is done under autocast; drawn: see
    ``Lesson``."""
    with torch.autocast(rows.tokens.device.type, dtype, enabled=dtype is not head.embedding.dtype):
        outs = states_of(head, rows, steps)
    config = head.config
    normed = torch.stack([norm(out[rows.wanted], head.tensors["norm.weight"], config.norm_eps) for out in outs])
    counted = torch.stack([rows.positions[rows.wanted] >= k for k in range(steps)])
    shares = counted.to(normed.dtype) / counted.sum(1, keepdim=True).clamp(min=1)
    decay = DECAY ** torch.arange(steps, dtype=normed.dtype, device=normed.device)[:, None]
    lesson = Lesson(rows.finals, head.teacher, rows.best, shares * decay / decay.sum(), dtype, drawn)
    loss, agreed = Distilled.of(normed, head.tensors["lm_head.weight"], lesson)
    return Unrolled(loss, tuple(((agreed & counted).sum(1) / max(1, rows.num_spoken)).tolist()))


def states_of(head: Head, rows: Rows, steps: int) -> list[torch.Tensor]:
    """The layer's output [R, H] in each step, before the final norm."""
    weight, config = head.tensors, head.config
    kind = head.embedding.dtype
    cos, sin = Rope(config, kind, rows.tokens.device).rows(rows.positions)
    token = norm(F.embedding(rows.tokens, head.embedding), weight[f"{LAYER}.input_layernorm.weight"], config.norm_eps)
    state = F.linear(rows.states.to(kind), weight["fc.weight"]).to(kind)
    kept: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = [([], []) for _ in range(config.num_layers)]
    outs = []
    for _ in range(steps):
        x = torch.cat((token, norm(state, weight[f"{LAYER}.hidden_norm.weight"], config.norm_eps)), -1)
        for layer, (keys, values) in enumerate(kept):
            own = f"layers.{layer}"
            if layer:
                x = norm(state, weight[f"{own}.input_layernorm.weight"], config.norm_eps)
            state = _layer(head, own, state, x, (cos, sin), rows.bounds, keys, values)
        outs.append(state)
        state = shifted(state, 1)
    return outs


def shifted(rows: torch.Tensor, by: int) -> torch.Tensor:
    """Row r takes what row r - by was; the first ones become zero. [R, …]"""
    if by == 0:
        return rows
    return torch.cat((torch.zeros_like(rows[:by]), rows[:-by]))


def _layer(head: Head, own: str, state: torch.Tensor, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor],
           bounds: tuple[int, ...], keys: list[torch.Tensor], values: list[torch.Tensor]) -> torch.Tensor:
    """One step of all rows in the layer named ``own``: x [R, ·] is read, state [R, H] is added to; keys and values join
    those of the steps before."""
    weight, config = head.tensors, head.config
    q, k, v = (F.linear(x, weight[f"{own}.self_attn.{name}_proj.weight"]).to(state.dtype)
               .view(len(x), -1, config.head_dim) for name in "qkv")
    keys.append(rotated(k, *rope))
    values.append(v)
    mixed = _attend(rotated(q, *rope) * config.head_dim**-0.5, keys, values, bounds)
    out = state + F.linear(mixed, weight[f"{own}.self_attn.o_proj.weight"]).to(state.dtype)
    y = norm(out, weight[f"{own}.post_attention_layernorm.weight"], config.norm_eps)
    inner = F.silu(F.linear(y, weight[f"{own}.mlp.gate_proj.weight"]))
    inner = inner * F.linear(y, weight[f"{own}.mlp.up_proj.weight"])
    return out + F.linear(inner, weight[f"{own}.mlp.down_proj.weight"]).to(state.dtype)


def _attend(q: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor],
            bounds: tuple[int, ...]) -> torch.Tensor:
    """q [R, Q, D], keys and values of each step [R, G, D] -> [R, Q * D], as rule 3 says."""
    step, heads = len(keys) - 1, keys[0].shape[1]
    q = q.view(len(q), heads, -1, q.shape[-1])  # [R, G, Q/G, D]
    own_keys = [shifted(keys[j], step - j)[:, :, None] for j in range(1, step + 1)]
    own_values = [shifted(values[j], step - j)[:, :, None] for j in range(1, step + 1)]
    own = torch.stack([(q * key).sum(-1) for key in own_keys], -1) if own_keys else None  # [R, G, Q/G, step]
    mixed = []
    for first, stop in pairwise(bounds):
        rows = slice(first, stop)
        query = q[rows].permute(1, 2, 0, 3)  # [G, Q/G, n, D]
        true = query @ keys[0][rows].permute(1, 2, 0)[:, None]  # [G, Q/G, n, n]
        hidden = torch.ones(true.shape[-2:], dtype=torch.bool, device=q.device).triu(1 - step)
        scores = true.float().masked_fill(hidden, float("-inf"))
        if own is not None:
            scores = torch.cat((scores, own[rows].permute(1, 2, 0, 3)), -1)
        shares = scores.softmax(-1)
        out = (shares[..., :stop - first] @ values[0][rows].permute(1, 0, 2)[:, None]).permute(2, 0, 1, 3)
        for j, value in enumerate(own_values):
            out = out + shares[..., stop - first + j].permute(2, 0, 1)[..., None] * value[rows]
        mixed.append(out)
    return torch.cat(mixed).reshape(len(q), -1)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As the engine's, of which autograd takes the slope."""
    return F.rms_norm(x, weight.shape, weight, eps)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Heads x [T, heads, D] by ``Rope.rows``."""
    # Not ``layer.rotate``: that one works in place, which a gradient does not survive.
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin
