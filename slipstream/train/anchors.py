"""The loss of a DSpark head: blocks at random anchors.

Rules:
1. An anchor is a token of a conversation. Its block is (anchor, mask, …) at the positions from the anchor's on; slot k
   learns the target's distribution after token anchor + k, given the true tokens in between.
2. A block attends to all of the target's states before its anchor, and to its own slots in both directions. No state is
   missing, as a draft has all of them when it drafts.
3. The loss of slot k is 0.1 · cross-entropy with the token that followed + 0.9 · the L1 distance to the target's
   distribution over the draft vocabulary + the binary cross-entropy of its confidence with 1 - L1 / 2, all weighted by
   e^(-k / 4). If the token that followed is outside the draft vocabulary, there is no cross-entropy, and the confidence
   to learn is 0; in the agreement the slot is a miss.
4. Each process draws its own anchors, new ones for each step.

It knows nothing about files or optimisers. Shapes: R rows of all conversations of a step, A anchors, S slots of
a block.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from slipstream.engine.model import ModelConfig
from slipstream.engine.ops.layer import Rope, rms_norm
from slipstream.train.block_head import BLOCK
from slipstream.train.distil import used_tokens
from slipstream.train.head import Head, Tensors
from slipstream.train.shards import Conversation
from slipstream.train.unroll import LossResult, after_attention, rotate

TOKENS_PER_ANCHOR = 8  # a conversation has one anchor for each so many tokens
DECAY = 4.0
CE, L1, CONFIDENCE = 0.1, 0.9, 1.0


@dataclass(frozen=True, slots=True)
class Blocks:
    """Anchors of some conversations, whose rows are joined."""

    states: torch.Tensor  # bfloat16 [R, taps * H] target states
    positions: torch.Tensor  # int64 [R]
    row_bounds: tuple[int, ...]  # rows of conversation i: row_bounds[i] : row_bounds[i + 1]
    anchor_bounds: tuple[int, ...]  # anchors of conversation i: anchor_bounds[i] : anchor_bounds[i + 1]
    anchor_positions: torch.Tensor  # int64 [A]; a block sees the states of the positions below
    tokens: torch.Tensor  # int64 [A, S] tokens from the anchor on
    next_ids: torch.Tensor  # int64 [A, S] the draft id of the token after each; -1: none
    greedy_ids: torch.Tensor  # int64 [A, S] the target's likeliest token there, as a draft id; -1: none
    final_states: torch.Tensor  # bfloat16 [A, S, H] the target's final states from which those tokens came
    has_loss: torch.Tensor  # bool [A, S] slots that learn

    @property
    def num_rows(self) -> int:
        return self.row_bounds[-1]

    @property
    def num_loss_rows(self) -> int:
        return int(self.has_loss.sum())


def blocks_of(conversations: Sequence[Conversation], head: Head, roles: Sequence[int], rng: random.Random) -> Blocks:
    """Random anchors of ``conversations``. roles: roles of tokens that are learnt."""
    hidden, device, draft_ids = head.config.hidden_size, head.vocabulary.device, head.draft_ids()
    found: dict[str, list[np.ndarray]] = {
        name: [] for name in ("anchors", "tokens", "next_ids", "greedy_ids", "has_loss")}
    states, final_states, positions, row_bounds, anchor_bounds = [], [], list[np.ndarray](), [0], [0]
    for c in conversations:
        count = len(c.tokens) - 1
        learnt = np.flatnonzero(np.isin(c.roles[2 : count + 1], roles)) + 1  # the token after these is learnt
        if not len(learnt):
            continue
        anchors = np.array(sorted(rng.sample(learnt.tolist(), min(len(learnt), 1 + count // TOKENS_PER_ANCHOR))))
        slots = anchors[:, None] + np.arange(BLOCK)  # [a, S]
        inside = np.minimum(slots, count - 1)
        bits = torch.from_numpy(np.array(c.states[:count])).view(torch.bfloat16)
        found["anchors"].append(anchors)
        found["tokens"].append(np.asarray(c.tokens[inside], np.int64))
        found["next_ids"].append(draft_ids[c.tokens[inside + 1]])
        found["greedy_ids"].append(draft_ids[c.greedy[inside]])
        found["has_loss"].append((slots < count) & np.isin(c.roles[inside + 1], roles) & (c.greedy[inside] >= 0))
        states.append(bits)
        final_states.append(bits[torch.from_numpy(inside)][..., -hidden:])
        positions.append(np.arange(count))
        row_bounds.append(row_bounds[-1] + count)
        anchor_bounds.append(anchor_bounds[-1] + len(anchors))

    def on_device(arrays: list[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(arrays) if arrays else np.zeros((0, BLOCK), np.int64)).to(device)

    none = torch.zeros(0, len(head.taps) * hidden, dtype=torch.bfloat16)
    return Blocks(torch.cat(states or [none]).to(device), on_device(positions), tuple(row_bounds), tuple(anchor_bounds),
                  on_device(found["anchors"]), on_device(found["tokens"]), on_device(found["next_ids"]),
                  on_device(found["greedy_ids"]), torch.cat(final_states or [none[:, None, :hidden]]).to(device),
                  on_device(found["has_loss"]).bool())


def block_loss(head: Head, blocks: Blocks, dtype: torch.dtype = torch.float32, num_sampled: int = 0) -> LossResult:
    """The loss of all slots, and for each slot k the share of blocks whose best draft token is the target's. dtype: of
    the products; num_sampled: how many other tokens the loss samples besides the certain ones (rule 3 of ``distil``);
    0: it uses all tokens."""
    weight, head_dtype = head.tensors, head.embedding.dtype
    with torch.autocast(blocks.states.device.type, dtype, enabled=dtype is not head_dtype):
        target_probs = F.linear(blocks.final_states.to(head_dtype), head.teacher).to(head_dtype).softmax(-1)
        labels = torch.stack((blocks.next_ids, blocks.greedy_ids)).clamp(min=0)
        used = used_tokens(target_probs.flatten(0, 1), labels.flatten(), num_sampled)
        target_probs = target_probs[..., used.tokens] * used.counts
        next_index, greedy_index = used.greedy_index.view_as(labels)
        states = states_of(head, blocks)
        markov = F.embedding(blocks.tokens, weight["markov_head.markov_w1.weight"])
        lm_head, bias = (weight[name][used.tokens] for name in ("lm_head.weight", "markov_head.markov_w2.weight"))
        logits = (F.linear(states, lm_head) + F.linear(markov, bias)).to(head_dtype)
        confidence = F.linear(torch.cat((states, markov), -1), weight["confidence_head.proj.weight"],
                              weight["confidence_head.proj.bias"])[..., 0].to(head_dtype)
    log_probs = (logits + used.counts.log()).log_softmax(-1)
    slots = torch.arange(log_probs.shape[1], device=log_probs.device)
    has_loss = blocks.has_loss.to(head_dtype)
    slot_weights = torch.exp(-slots / DECAY) * has_loss
    slot_weights = slot_weights / slot_weights.sum().clamp(min=1e-9)
    in_vocabulary = blocks.next_ids >= 0
    cross_entropy = -(log_probs - used.counts.log()).gather(-1, next_index[..., None])[..., 0] * in_vocabulary
    l1 = (log_probs.exp() - target_probs).abs().sum(-1)
    acceptance = (1 - l1.detach() / 2) * in_vocabulary
    confidence_loss = F.binary_cross_entropy_with_logits(confidence, acceptance, reduction="none")
    loss = (slot_weights * (CE * cross_entropy + L1 * l1 + CONFIDENCE * confidence_loss)).sum()
    agrees = (logits.argmax(-1) == greedy_index) & (blocks.greedy_ids >= 0) & blocks.has_loss
    return LossResult(loss, tuple((agrees.sum(0) / blocks.has_loss.sum(0).clamp(min=1)).tolist()))


def states_of(head: Head, blocks: Blocks) -> torch.Tensor:
    """The states of all slots after the final norm, [A, S, H]."""
    assert head.mask_token is not None
    weight, config, kind = head.tensors, head.config, head.embedding.dtype
    rope = Rope(config, kind, blocks.states.device)
    c = rms_norm(F.linear(blocks.states.to(kind), weight["fc.weight"]).to(kind), weight["hidden_norm.weight"],
                 config.norm_eps)
    tokens = torch.full_like(blocks.tokens, head.mask_token)
    tokens[:, 0] = blocks.tokens[:, 0]
    x = F.embedding(tokens, head.embedding).flatten(0, 1)  # [A * S, H]
    positions = (blocks.anchor_positions[:, None] + torch.arange(BLOCK, device=x.device)).flatten()
    rotations = rope.rows(positions), rope.rows(blocks.positions)
    for layer in range(config.num_layers):
        x = _layer(config, head.layer(layer), x, c, rotations, blocks)
    return rms_norm(x, weight["norm.weight"], config.norm_eps).view(*blocks.tokens.shape, -1)


Pair = tuple[torch.Tensor, torch.Tensor]


def _layer(config: ModelConfig, weight: Tensors, x: torch.Tensor, c: torch.Tensor, rotations: tuple[Pair, Pair],
           blocks: Blocks) -> torch.Tensor:
    def heads(name: str, rows: torch.Tensor, rotation: Pair) -> torch.Tensor:
        out = F.linear(rows, weight[f"self_attn.{name}_proj.weight"]).to(x.dtype).view(len(rows), -1, config.head_dim)
        if name == "v":
            return out
        return rotate(rms_norm(out, weight[f"self_attn.{name}_norm.weight"], config.norm_eps), *rotation)

    of_blocks, of_context = rotations
    read = rms_norm(x, weight["input_layernorm.weight"], config.norm_eps)
    q, k, v = (heads(name, read, of_blocks) for name in "qkv")
    mixed = _attend(q * config.head_dim**-0.5, (k, v), (heads("k", c, of_context), heads("v", c, of_context)), blocks)
    return after_attention(config, weight, x, mixed)


def _attend(q: torch.Tensor, own: Pair, context: Pair, blocks: Blocks) -> torch.Tensor:
    """q [A * S, Q, D], own keys and values [A * S, G, D], those of the context [R, G, D] -> [A * S, Q * D]."""
    anchors, size = blocks.tokens.shape
    groups, width = own[0].shape[1:]
    q = q.view(anchors, size, groups, -1, width)
    keys, values = (part.view(anchors, size, groups, width) for part in own)
    own_scores = torch.einsum("asghd,atgd->asght", q, keys)  # [A, S, G, Q/G, S]
    mixed = []
    for number in range(len(blocks.row_bounds) - 1):
        rows = slice(blocks.row_bounds[number], blocks.row_bounds[number + 1])
        anchors_here = slice(blocks.anchor_bounds[number], blocks.anchor_bounds[number + 1])
        context_scores = torch.einsum("asghd,tgd->asght", q[anchors_here], context[0][rows]).float()
        anchor_positions = blocks.anchor_positions[anchors_here, None]
        unseen = torch.arange(context_scores.shape[-1], device=q.device) >= anchor_positions  # [a, T]
        context_scores = context_scores.masked_fill(unseen[:, None, None, None], float("-inf"))
        weights = torch.cat((context_scores, own_scores[anchors_here].float()), -1).softmax(-1)
        length = context_scores.shape[-1]
        mixed.append(torch.einsum("asght,tgd->asghd", weights[..., :length], context[1][rows].float())
                     + torch.einsum("asght,atgd->asghd", weights[..., length:], values[anchors_here].float()))
    return torch.cat(mixed).reshape(anchors * size, -1).to(q.dtype)
