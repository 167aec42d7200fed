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
from slipstream.train.distil import columns_of
from slipstream.train.head import Head, Tensors
from slipstream.train.shards import Conversation
from slipstream.train.unroll import Unrolled, after_attention, rotated

ROWS_OF_AN_ANCHOR = 8  # a conversation has one anchor for each so many tokens
DECAY = 4.0
CE, L1, CONFIDENCE = 0.1, 0.9, 1.0


@dataclass(frozen=True, slots=True)
class Blocks:
    """Anchors of some conversations, whose rows are joined."""

    states: torch.Tensor  # bfloat16 [R, taps * H] target states
    positions: torch.Tensor  # int64 [R]
    bounds: tuple[int, ...]  # rows of conversation i: bounds[i] : bounds[i + 1]
    owners: tuple[int, ...]  # anchors of conversation i: owners[i] : owners[i + 1]
    places: torch.Tensor  # int64 [A] anchors' positions; a block sees the states of those below
    before: torch.Tensor  # int64 [A, S] tokens from the anchor on
    after: torch.Tensor  # int64 [A, S] the draft id of the token after each; -1: none
    best: torch.Tensor  # int64 [A, S] the target's likeliest token there, as a draft id; -1: none
    finals: torch.Tensor  # bfloat16 [A, S, H] the target's final states from which those tokens came
    counted: torch.Tensor  # bool [A, S] slots that learn

    @property
    def num_rows(self) -> int:
        return self.bounds[-1]

    @property
    def num_wanted(self) -> int:
        return int(self.counted.sum())


def blocks_of(conversations: Sequence[Conversation], head: Head, max_rows: int, roles: Sequence[int],
              dice: random.Random) -> Blocks:
    """Random anchors of ``conversations``, each cut after ``max_rows`` tokens. roles: roles of tokens that are
    learnt."""
    hidden, device, draft_ids = head.config.hidden_size, head.vocabulary.device, head.draft_ids()
    found: dict[str, list[np.ndarray]] = {name: [] for name in ("places", "before", "after", "best", "counted")}
    states, finals, positions, bounds, owners = [], [], list[np.ndarray](), [0], [0]
    for c in conversations:
        count = min(len(c.tokens) - 1, max_rows)
        learnt = np.flatnonzero(np.isin(c.roles[2 : count + 1], roles)) + 1  # the token after these is learnt
        if not len(learnt):
            continue
        anchors = sorted(dice.sample(learnt.tolist(), min(len(learnt), 1 + count // ROWS_OF_AN_ANCHOR)))
        places = np.array(anchors)
        slots = places[:, None] + np.arange(BLOCK)  # [a, S]
        inside = np.minimum(slots, count - 1)
        bits = torch.from_numpy(np.array(c.states[:count])).view(torch.bfloat16)
        found["places"].append(places)
        found["before"].append(np.asarray(c.tokens[inside], np.int64))
        found["after"].append(draft_ids[c.tokens[inside + 1]])
        found["best"].append(draft_ids[c.greedy[inside]])
        found["counted"].append((slots < count) & np.isin(c.roles[inside + 1], roles) & (c.greedy[inside] >= 0))
        states.append(bits)
        finals.append(bits[torch.from_numpy(inside)][..., -hidden:])
        positions.append(np.arange(count))
        bounds.append(bounds[-1] + count)
        owners.append(owners[-1] + len(anchors))

    def placed(arrays: list[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(arrays) if arrays else np.zeros((0, BLOCK), np.int64)).to(device)

    none = torch.zeros(0, len(head.taps) * hidden, dtype=torch.bfloat16)
    return Blocks(torch.cat(states or [none]).to(device), placed(positions), tuple(bounds), tuple(owners),
                  placed(found["places"]), placed(found["before"]), placed(found["after"]), placed(found["best"]),
                  torch.cat(finals or [none[:, None, :hidden]]).to(device), placed(found["counted"]).bool())


def learn(head: Head, blocks: Blocks, dtype: torch.dtype = torch.float32, drawn: int = 0) -> Unrolled:
    """The loss of all slots, and for each slot k the share of blocks whose best draft token is the target's. dtype: of
    the products; drawn: how many other tokens the loss samples besides the certain ones (rule 3 of ``distil``); 0: it
    uses all tokens."""
    weight, kind = head.tensors, head.embedding.dtype
    with torch.autocast(blocks.states.device.type, dtype, enabled=dtype is not kind):
        truth = F.linear(blocks.finals.to(kind), head.teacher).to(kind).softmax(-1)
        looked = _looked_at(blocks, truth, drawn)
        states = states_of(head, blocks)
        told = F.embedding(blocks.before, weight["markov_head.markov_w1.weight"])
        own, bias = (weight[name] if looked.tokens is None else weight[name][looked.tokens]
                     for name in ("lm_head.weight", "markov_head.markov_w2.weight"))
        logits = (F.linear(states, own) + F.linear(told, bias)).to(kind)
        sure = F.linear(torch.cat((states, told), -1), weight["confidence_head.proj.weight"],
                        weight["confidence_head.proj.bias"])[..., 0].to(kind)
    logs = (logits + looked.counts.log()).log_softmax(-1)
    slots = torch.arange(logs.shape[1], device=logs.device)
    counted = blocks.counted.to(kind)
    shares = torch.exp(-slots / DECAY) * counted
    shares = shares / shares.sum().clamp(min=1e-9)
    known = blocks.after >= 0
    entropy = -(logs - looked.counts.log()).gather(-1, looked.after[..., None])[..., 0] * known
    distance = (logs.exp() - looked.truth).abs().sum(-1)
    shared = (1 - distance.detach() / 2) * known
    unsure = F.binary_cross_entropy_with_logits(sure, shared, reduction="none")
    loss = (shares * (CE * entropy + L1 * distance + CONFIDENCE * unsure)).sum()
    agreed = (logits.argmax(-1) == looked.best) & (blocks.best >= 0) & blocks.counted
    return Unrolled(loss, tuple((agreed.sum(0) / blocks.counted.sum(0).clamp(min=1)).tolist()))


@dataclass(frozen=True, slots=True)
class Looked:
    """The draft tokens that the loss is computed from."""

    tokens: torch.Tensor | None  # int64 [C] draft ids; None: all of them
    counts: torch.Tensor  # [C] how many tokens each one represents
    truth: torch.Tensor  # [A, S, C] the target's probabilities, multiplied by ``counts``
    after: torch.Tensor  # int64 [A, S] the index in C of the token that followed
    best: torch.Tensor  # int64 [A, S] the index in C of the target's likeliest token


def _looked_at(blocks: Blocks, truth: torch.Tensor, drawn: int) -> Looked:
    """The tokens to compute the loss from. truth: the target's probabilities [A, S, V']."""
    after, best = blocks.after.clamp(min=0), blocks.best.clamp(min=0)
    if not drawn:
        return Looked(None, truth.new_ones(truth.shape[-1]), truth, after, best)
    some = columns_of(truth.flatten(0, 1), torch.cat((after, best)).flatten(), drawn)
    after, best = some.best.view(2, *after.shape)
    return Looked(some.tokens, some.counts, truth[..., some.tokens] * some.counts, after, best)


def states_of(head: Head, blocks: Blocks) -> torch.Tensor:
    """The states of all slots after the final norm, [A, S, H]."""
    assert head.mask_token is not None
    weight, config, kind = head.tensors, head.config, head.embedding.dtype
    rope = Rope(config, kind, blocks.states.device)
    c = rms_norm(F.linear(blocks.states.to(kind), weight["fc.weight"]).to(kind), weight["hidden_norm.weight"],
                 config.norm_eps)
    tokens = torch.full_like(blocks.before, head.mask_token)
    tokens[:, 0] = blocks.before[:, 0]
    x = F.embedding(tokens, head.embedding).flatten(0, 1)  # [A * S, H]
    places = (blocks.places[:, None] + torch.arange(BLOCK, device=x.device)).flatten()
    turns = rope.rows(places), rope.rows(blocks.positions)
    for layer in range(config.num_layers):
        x = _layer(config, head.layer(layer), x, c, turns, blocks)
    return rms_norm(x, weight["norm.weight"], config.norm_eps).view(*blocks.before.shape, -1)


Turn = tuple[torch.Tensor, torch.Tensor]


def _layer(config: ModelConfig, weight: Tensors, x: torch.Tensor, c: torch.Tensor, turns: tuple[Turn, Turn],
           blocks: Blocks) -> torch.Tensor:
    def heads(name: str, rows: torch.Tensor, turn: Turn) -> torch.Tensor:
        out = F.linear(rows, weight[f"self_attn.{name}_proj.weight"]).to(x.dtype).view(len(rows), -1, config.head_dim)
        if name == "v":
            return out
        return rotated(rms_norm(out, weight[f"self_attn.{name}_norm.weight"], config.norm_eps), *turn)

    of_blocks, of_context = turns
    read = rms_norm(x, weight["input_layernorm.weight"], config.norm_eps)
    q, k, v = (heads(name, read, of_blocks) for name in "qkv")
    mixed = _attend(q * config.head_dim**-0.5, (k, v), (heads("k", c, of_context), heads("v", c, of_context)), blocks)
    return after_attention(config, weight, x, mixed)


def _attend(q: torch.Tensor, own: Turn, context: Turn, blocks: Blocks) -> torch.Tensor:
    """q [A * S, Q, D], own keys and values [A * S, G, D], those of the context [R, G, D] -> [A * S, Q * D]."""
    anchors, size = blocks.before.shape
    groups, width = own[0].shape[1:]
    q = q.view(anchors, size, groups, -1, width)
    keys, values = (part.view(anchors, size, groups, width) for part in own)
    mine = torch.einsum("asghd,atgd->asght", q, keys)  # [A, S, G, Q/G, S]
    mixed = []
    for number in range(len(blocks.bounds) - 1):
        rows = slice(blocks.bounds[number], blocks.bounds[number + 1])
        some = slice(blocks.owners[number], blocks.owners[number + 1])
        theirs = torch.einsum("asghd,tgd->asght", q[some], context[0][rows]).float()
        unseen = torch.arange(theirs.shape[-1], device=q.device) >= blocks.places[some, None]  # [a, T]
        theirs = theirs.masked_fill(unseen[:, None, None, None], float("-inf"))
        shares = torch.cat((theirs, mine[some].float()), -1).softmax(-1)
        cut = theirs.shape[-1]
        mixed.append(torch.einsum("asght,tgd->asghd", shares[..., :cut], context[1][rows].float())
                     + torch.einsum("asght,atgd->asghd", shares[..., cut:], values[some].float()))
    return torch.cat(mixed).reshape(anchors * size, -1).to(q.dtype)
