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

import numpy as np
import torch
import torch.nn.functional as F

from slipstream.drafters.checkpoint import LAYER
from slipstream.engine.layers import Rope
from train.head import Head
from train.shards import ANSWER, Conversation

DECAY = 0.8  # weight of each further step's loss


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of whole conversations, side by side."""

    tokens: torch.Tensor  # int64 [R] token r + 1
    positions: torch.Tensor  # int64 [R]
    states: torch.Tensor  # bfloat16 [R, 3H] target states after token r
    bounds: tuple[int, ...]  # rows of conversation i: bounds[i] : bounds[i + 1]
    wanted: torch.Tensor  # int64 [M] rows with a loss
    finals: torch.Tensor  # bfloat16 [M, H] the target's final states after token r + 1
    num_answers: int  # rows that predict an answer's token, those without a loss included


@dataclass(frozen=True, slots=True)
class StepResult:
    loss: torch.Tensor
    agreed: torch.Tensor  # int64: rows whose best token is the target's


def rows_of(conversations: Sequence[Conversation], head: Head, max_rows: int) -> Rows:
    """The rows of ``conversations``, each cut after ``max_rows``."""
    hidden, device = head.config.hidden_size, head.vocabulary.device
    inside = torch.zeros(head.config.vocab_size, dtype=torch.bool)
    inside[head.vocabulary.cpu()] = True
    tokens, positions, states, finals, wanted, bounds, answers = [], [], [], [], [], [0], 0
    for c in conversations:
        count = min(len(c.tokens) - 2, max_rows)
        if count < 1:
            continue
        answer = np.asarray(c.roles[2:count + 2]) == ANSWER
        best = np.asarray(c.greedy[1:count + 1])
        own = np.flatnonzero(answer & (best >= 0) & inside.numpy()[np.maximum(best, 0)])
        bits = torch.from_numpy(np.array(c.states[:count + 1])).view(torch.bfloat16)
        tokens.append(np.asarray(c.tokens[1:count + 1], np.int64))
        positions.append(np.arange(count))
        states.append(bits[:count, :-hidden])
        finals.append(bits[1 + own, -hidden:])
        wanted.append(bounds[-1] + own)
        answers += int(answer.sum())
        bounds.append(bounds[-1] + count)

    def placed(arrays: list[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(arrays)).to(device)

    return Rows(placed(tokens), placed(positions), torch.cat(states).to(device), tuple(bounds), placed(wanted),
                torch.cat(finals).to(device), answers)


def unroll(head: Head, rows: Rows, steps: int) -> list[StepResult]:
    """The results of ``steps`` steps. Run it under autocast for bfloat16."""
    weight, config = head.tensors, head.config
    with torch.no_grad():
        wanted = F.linear(rows.finals.float(), head.teacher).float().softmax(-1)
        best = wanted.argmax(-1)
    cos, sin = Rope(config, torch.float32, rows.tokens.device).rows(rows.positions)
    token = _norm(F.embedding(rows.tokens, head.embedding), weight[f"{LAYER}.input_layernorm.weight"], config.norm_eps)
    state = F.linear(rows.states.float(), weight["fc.weight"]).float()
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    results = []
    for k in range(steps):
        out = _layer(head, state, token, (cos, sin), rows.bounds, keys, values)
        logits = F.linear(_norm(out[rows.wanted], weight["norm.weight"], config.norm_eps), weight["lm_head.weight"])
        counted = (rows.positions[rows.wanted] >= k).float()
        each = F.cross_entropy(logits.float(), wanted, reduction="none")
        loss = (each * counted).sum() / counted.sum().clamp(min=1)
        results.append(StepResult(loss, ((logits.argmax(-1) == best) * counted).sum().long()))
        state = shifted(out, 1)
    return results


def total_loss(results: Sequence[StepResult]) -> torch.Tensor:
    """The steps' losses, later ones counting less."""
    weights = [DECAY**k for k in range(len(results))]
    return torch.stack([w * r.loss for w, r in zip(weights, results, strict=True)]).sum() / sum(weights)


def shifted(rows: torch.Tensor, by: int) -> torch.Tensor:
    """Row r takes what row r - by was; the first ones become zero. [R, …]"""
    if by == 0:
        return rows
    return torch.cat((torch.zeros_like(rows[:by]), rows[:-by]))


def _layer(head: Head, state: torch.Tensor, token: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor],
           bounds: tuple[int, ...], keys: list[torch.Tensor], values: list[torch.Tensor]) -> torch.Tensor:
    """One step of all rows [R, H]; its keys and values join those of the steps before."""
    weight, config = head.tensors, head.config
    x = torch.cat((token, _norm(state, weight[f"{LAYER}.hidden_norm.weight"], config.norm_eps)), -1)
    q, k, v = (F.linear(x, weight[f"{LAYER}.self_attn.{name}_proj.weight"]).float()
               .view(len(x), -1, config.head_dim) for name in "qkv")
    keys.append(_rotated(k, *rope))
    values.append(v)
    mixed = _attend(_rotated(q, *rope) * config.head_dim**-0.5, keys, values, bounds)
    out = state + F.linear(mixed, weight[f"{LAYER}.self_attn.o_proj.weight"]).float()
    y = _norm(out, weight[f"{LAYER}.post_attention_layernorm.weight"], config.norm_eps)
    inner = F.silu(F.linear(y, weight[f"{LAYER}.mlp.gate_proj.weight"]))
    inner = inner * F.linear(y, weight[f"{LAYER}.mlp.up_proj.weight"])
    return out + F.linear(inner, weight[f"{LAYER}.mlp.down_proj.weight"]).float()


def _attend(q: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor],
            bounds: tuple[int, ...]) -> torch.Tensor:
    """q [R, Q, D], keys and values of each step [R, G, D] -> [R, Q * D], as rule 3 says."""
    step, heads = len(keys) - 1, keys[0].shape[1]
    q = q.view(len(q), heads, -1, q.shape[-1])  # [R, G, Q/G, D]
    own_keys = [shifted(keys[j], step - j)[:, :, None] for j in range(1, step + 1)]
    own_values = [shifted(values[j], step - j)[:, :, None] for j in range(1, step + 1)]
    own = torch.stack([(q * key).sum(-1) for key in own_keys], -1) if own_keys else None  # [R, G, Q/G, step]
    mixed = []
    for first, stop in zip(bounds[:-1], bounds[1:], strict=True):
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


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x.float(), weight.shape, weight, eps)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    # Not ``layers.rotate``: that one works in place, which a gradient does not survive.
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin
