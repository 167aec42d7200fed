"""Training-time test: the head is unrolled over its own states, as when it drafts (arXiv 2503.01840).

Rules:
1. Row r of a conversation reads token r + 1 and the target's state at token r, has rotary position r, and predicts
   token r + 2.
2. In step k > 0 the state of row r is the head's own output of step k - 1 at row r - 1: the state that it has after
   drafting k tokens. Rows r < k have no such state and do not count.
3. In step k row r sees the true rows up to r - k (keys and values of step 0), then its own history: row r - k + j of
   step j, for j = 1 .. k. That is the path from the newest committed token to it.
4. The number of rows of a conversation, and of rows with a loss, is rounded up to a multiple of ``ROW_MULTIPLE`` with
   padding rows that have no effect: on a CPU each new shape of a product costs time (oneDNN makes a kernel for it).
5. The loss of a step is the distance to the target's distribution over the draft vocabulary (``distil``). Rows whose
   likeliest token is outside it have no loss; in the agreement they count as misses.

It knows nothing about files or optimisers. Shapes: R rows of all conversations of a step, M of them with a loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F

from slipstream.engine.model import ModelConfig
from slipstream.engine.ops.layer import Rope, rms_norm
from slipstream.train.distil import ROW_MULTIPLE, DistillationLoss, LossInputs
from slipstream.train.head import Head, Tensors
from slipstream.train.shards import ANSWER, Conversation

DECAY = 0.8  # weight of each further step's loss


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of conversations, joined, each padded (rule 4)."""

    tokens: torch.Tensor  # int64 [R] token r + 1
    positions: torch.Tensor  # int64 [R]
    states: torch.Tensor  # bfloat16 [R, 3H] target states after token r
    bounds: tuple[int, ...]  # rows of conversation i: bounds[i] : bounds[i + 1]
    loss_rows: torch.Tensor  # int64 [M] rows with a loss
    greedy_ids: torch.Tensor  # int64 [M] the target's likeliest token after token r + 1, as a draft id
    final_states: torch.Tensor  # bfloat16 [M, H] the target's final states after token r + 1
    num_rows: int  # without padding
    num_loss_rows: int  # rows with a loss, without padding
    num_learnt: int  # rows that predict a token of the learnt roles, those without a loss included


@dataclass(frozen=True, slots=True)
class LossResult:
    """The result of a pass over rows."""

    loss: torch.Tensor  # the weighted mean over all steps, later ones with less weight; has a gradient
    agreement: tuple[float, ...]  # by step: share of the ``num_learnt`` rows whose best draft token is the target's


def rows_of(conversations: Sequence[Conversation], head: Head, roles: Sequence[int] = (ANSWER,)) -> Rows:
    """The rows of ``conversations`` of three tokens at least. roles: roles of tokens that are learnt."""
    hidden, device, draft_ids = head.config.hidden_size, head.vocabulary.device, head.draft_ids()
    tokens, positions, states, final_states, loss_rows, greedy = [], [], [], [], [], []
    bounds, num_rows, num_learnt = [0], 0, 0
    for c in conversations:
        count = len(c.tokens) - 2
        is_learnt = np.isin(c.roles[2:count + 2], roles)
        greedy_ids = np.where(is_learnt, draft_ids[c.greedy[1:count + 1]], -1)
        own, width = np.flatnonzero(greedy_ids >= 0), padded_size(count)
        bits = torch.from_numpy(np.array(c.states[:count + 1])).view(torch.bfloat16)
        tokens.append(padded(torch.from_numpy(c.tokens[1:count + 1].astype(np.int64)), width))
        positions.append(torch.arange(width))
        states.append(padded(bits[:count, :-hidden], width))
        final_states.append(bits[1 + own, -hidden:])
        loss_rows.append(torch.from_numpy(bounds[-1] + own))
        greedy.append(torch.from_numpy(greedy_ids[own]))
        num_rows, num_learnt = num_rows + count, num_learnt + int(is_learnt.sum())
        bounds.append(bounds[-1] + width)
    num_loss_rows = sum(map(len, loss_rows))

    def on_device(parts: list[torch.Tensor]) -> torch.Tensor:
        return padded(torch.cat(parts), padded_size(num_loss_rows)).to(device)

    return Rows(torch.cat(tokens).to(device), torch.cat(positions).to(device), torch.cat(states).to(device),
                tuple(bounds), on_device(loss_rows), on_device(greedy), on_device(final_states), num_rows,
                num_loss_rows, num_learnt)


def padded_size(count: int) -> int:
    """``count``, rounded up to a multiple of ROW_MULTIPLE."""
    return -(-count // ROW_MULTIPLE) * ROW_MULTIPLE


def padded(rows: torch.Tensor, size: int) -> torch.Tensor:
    """``rows`` [R, …] and zeros behind them, [size, …]."""
    return torch.cat((rows, rows.new_zeros(size - len(rows), *rows.shape[1:])))


def unroll(head: Head, rows: Rows, steps: int, dtype: torch.dtype = torch.float32, num_sampled: int = 0) -> LossResult:
    """Loss and agreement of ``steps`` unrolled steps over ``rows``. dtype: of the products (under autocast if it is not
    the head's own); num_sampled: see ``LossInputs``."""
    with torch.autocast(rows.tokens.device.type, dtype, enabled=dtype is not head.embedding.dtype):
        outs = states_of(head, rows, steps)
    config = head.config
    normed = torch.stack([rms_norm(out[rows.loss_rows], head.tensors["norm.weight"], config.norm_eps) for out in outs])
    is_real = torch.arange(len(rows.loss_rows), device=rows.loss_rows.device) < rows.num_loss_rows
    has_loss = torch.stack([(rows.positions[rows.loss_rows] >= k) & is_real for k in range(steps)])
    shares = has_loss.to(normed.dtype) / has_loss.sum(1, keepdim=True).clamp(min=1)
    decay = DECAY ** torch.arange(steps, dtype=normed.dtype, device=normed.device)[:, None]
    weights = shares * decay / decay.sum()
    inputs = LossInputs(rows.final_states, head.teacher, rows.greedy_ids, weights, dtype, num_sampled)
    loss, agrees = DistillationLoss.of(normed, head.tensors["lm_head.weight"], inputs)
    return LossResult(loss, tuple(((agrees & has_loss).sum(1) / max(1, rows.num_learnt)).tolist()))


def states_of(head: Head, rows: Rows, steps: int) -> list[torch.Tensor]:
    """The last layer's output [R, H] in each step, before the final norm."""
    config, kind = head.config, head.embedding.dtype
    rope = Rope(config, kind, rows.tokens.device).rows(rows.positions)
    layers = [head.layer(number) for number in range(config.num_layers)]
    of_tokens, of_states = (layers[0][f"{name}.weight"] for name in ("input_layernorm", "hidden_norm"))
    token = rms_norm(F.embedding(rows.tokens, head.embedding), of_tokens, config.norm_eps)
    state = F.linear(rows.states.to(kind), head.tensors["fc.weight"]).to(kind)
    cache: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = [([], []) for _ in layers]
    outs = []
    for _ in range(steps):
        x = torch.cat((token, rms_norm(state, of_states, config.norm_eps)), -1)
        for number, (weight, (keys, values)) in enumerate(zip(layers, cache, strict=True)):
            if number:
                x = rms_norm(state, weight["input_layernorm.weight"], config.norm_eps)
            state = _layer(config, weight, state, x, rope, rows.bounds, keys, values)
        outs.append(state)
        state = shifted(state, 1)
    return outs


def shifted(rows: torch.Tensor, by: int) -> torch.Tensor:
    """``rows`` [R, …], shifted: row r gets the value of row r - by; the first ``by`` rows become zero."""
    if by == 0:
        return rows
    return torch.cat((torch.zeros_like(rows[:by]), rows[:-by]))


def _layer(config: ModelConfig, weight: Tensors, state: torch.Tensor, x: torch.Tensor,
           rope: tuple[torch.Tensor, torch.Tensor], bounds: tuple[int, ...], keys: list[torch.Tensor],
           values: list[torch.Tensor]) -> torch.Tensor:
    """One step of all rows in a layer: x [R, ·] is read, state [R, H] is added to; keys and values join those of the
    steps before."""
    q, k, v = (F.linear(x, weight[f"self_attn.{name}_proj.weight"]).to(state.dtype)
               .view(len(x), -1, config.head_dim) for name in "qkv")
    keys.append(rotate(k, *rope))
    values.append(v)
    mixed = _attend(rotate(q, *rope) * config.head_dim**-0.5, keys, values, bounds)
    return after_attention(config, weight, state, mixed)


def after_attention(config: ModelConfig, weight: Tensors, state: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
    """The rest of a layer: residual stream [R, H] and attention's output [R, Q * D] -> [R, H]."""
    out = state + F.linear(mixed, weight["self_attn.o_proj.weight"]).to(state.dtype)
    y = rms_norm(out, weight["post_attention_layernorm.weight"], config.norm_eps)
    inner = F.silu(F.linear(y, weight["mlp.gate_proj.weight"])) * F.linear(y, weight["mlp.up_proj.weight"])
    return out + F.linear(inner, weight["mlp.down_proj.weight"]).to(state.dtype)


def _attend(q: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor],
            bounds: tuple[int, ...]) -> torch.Tensor:
    """q [R, Q, D], keys and values of each step [R, G, D] -> [R, Q * D], as rule 3 says."""
    step, groups, width = len(keys) - 1, *keys[0].shape[1:]
    q = q.view(len(q), groups, -1, width)  # [R, G, Q/G, D]
    history_keys = [shifted(keys[j], step - j)[:, :, None] for j in range(1, step + 1)]
    history_values = [shifted(values[j], step - j)[:, :, None] for j in range(1, step + 1)]
    # [R, G, Q/G, step]
    history = None if not history_keys else torch.stack([(q * key).sum(-1) for key in history_keys], -1)
    sizes = [stop - first for first, stop in pairwise(bounds)]
    parts = zip(*(torch.split(t, sizes) for t in (q, keys[0], values[0])), strict=True)
    history_parts = torch.split(history, sizes) if history is not None else [None] * len(sizes)
    mixed, weights = [], []
    for (query, key, value), history_scores in zip(parts, history_parts, strict=True):
        n = len(query)
        flat = query.permute(1, 2, 0, 3).reshape(groups, -1, width)  # [G, Q/G * n, D]
        products = (flat @ key.permute(1, 2, 0)).view(groups, -1, n, n)
        hidden = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1 - step)
        scores = products.float().masked_fill(hidden, float("-inf"))
        if history_scores is not None:
            scores = torch.cat((scores, history_scores.permute(1, 2, 0, 3)), -1)
        shares = scores.softmax(-1)
        out = shares[..., :n].reshape(groups, -1, n) @ value.permute(1, 0, 2)
        mixed.append(out.view(groups, -1, n, width).permute(2, 0, 1, 3))
        weights.append(shares[..., n:].permute(2, 0, 1, 3))
    out = torch.cat(mixed)
    if history_values:
        share = torch.cat(weights)
        for j, value in enumerate(history_values):
            out = out + share[..., j, None] * value
    return out.reshape(len(q), -1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Heads x [T, heads, D] by ``Rope.rows``."""
    # Not ``layer.rotate``: that one works in place, which a gradient does not survive.
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin
