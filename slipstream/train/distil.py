"""The loss of an EAGLE-3 head and its gradient: the distance to the target's distribution over the draft vocabulary.

Rules:
1. The logits of a whole batch are never in memory: rows are processed in chunks that fit a cache, and the gradient of a
   chunk is computed while its softmax is there. The result is that of autograd, in a third of the time.
2. The target's distribution of a row is computed once for all unrolled steps.
3. With ``Lesson.drawn`` the loss of a chunk uses some tokens only: those with a probability of at least ``LIKELY`` in
   any of its rows, the first ``COMMON`` ids, the rows' likeliest, and a uniform sample of the others, each of which
   represents many. So sums over all tokens, and the gradient, are estimated at a small part of the cost (sampled
   softmax, arXiv 1412.2007).
4. A small head cannot learn a whole distribution. Its overlap with the target's, the sum of the lesser of both
   probabilities, is the acceptance probability of speculative sampling, which it estimates here. The greater it is,
   the more a row's loss turns from cross-entropy to 1 - overlap (after arXiv 2602.23881).

It knows nothing about layers, conversations or optimisers. Shapes: K unrolled steps, M rows, V' draft tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

CHUNK = 512  # rows of all steps together, at most
STRIDE = 32  # numbers of rows are multiples of it (rule 4 of ``unroll``)
COLUMNS = 128  # the sample is enlarged until the number of tokens is a multiple of it (for the same reason)
LIKELY = 1 / 512  # probability from which on a token is always used
COMMON = 1024  # low ids are the most frequent tokens of the tokenizer's training
TURN = 3.0  # how fast the loss turns from cross-entropy to 1 - overlap: its weight is e^(-TURN * overlap)


@dataclass(frozen=True, slots=True)
class Lesson:
    """What the rows learn, and the weight of each."""

    finals: torch.Tensor  # [M, H] the target's final states
    teacher: torch.Tensor  # [V', H] the target's lm_head over the draft vocabulary
    best: torch.Tensor  # int64 [M] the target's likeliest token, as a draft id
    weights: torch.Tensor  # float32 [K, M] of the loss
    dtype: torch.dtype  # of the products
    drawn: int = 0  # size of the sample of rule 3; 0: all tokens are used


class Distilled(torch.autograd.Function):
    """states [K, M, H] and lm_head [V', H] -> the weighted sum of all rows' losses; and bool [K, M]: whether the best
    of the used tokens is the target's likeliest. Only the first has a gradient."""

    @staticmethod
    def of(states: torch.Tensor, lm_head: torch.Tensor, lesson: Lesson) -> tuple[torch.Tensor, torch.Tensor]:
        """Apply the function; see the class."""
        found: tuple[torch.Tensor, torch.Tensor] = Distilled.apply(  # type: ignore[no-untyped-call]
            states, lm_head, lesson)
        return found

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, lm_head: torch.Tensor,
                lesson: Lesson) -> tuple[torch.Tensor, torch.Tensor]:
        steps, count, _ = states.shape
        kind = lesson.dtype
        weight, teacher = lm_head.to(kind), lesson.teacher.to(kind)
        losses = torch.zeros(steps, count, dtype=lm_head.dtype, device=states.device)
        agreed = torch.zeros(steps, count, dtype=torch.bool, device=states.device)
        wanted = ctx.needs_input_grad[0]
        to_states = torch.zeros_like(states) if wanted else None
        to_weight = torch.zeros_like(lm_head) if wanted else None
        size = max(1, CHUNK // steps // STRIDE) * STRIDE
        for first in range(0, count, size):
            rows = slice(first, first + size)
            x = states[:, rows].to(kind)
            truth = F.linear(lesson.finals[rows].to(kind), teacher).to(lm_head.dtype).softmax(-1)
            best, own, counts = lesson.best[rows], weight, None
            if wanted and lesson.drawn:
                some = columns_of(truth, best, lesson.drawn)
                best, own, counts = some.best, weight[some.tokens], some.counts.log()
                truth = truth[:, some.tokens] * some.counts
            logits = F.linear(x, own).to(lm_head.dtype)  # [K, m, V' or some of them]
            agreed[:, rows] = logits.gather(-1, best.expand(steps, -1)[..., None])[..., 0] >= logits.amax(-1)
            logs = torch.log_softmax(logits if counts is None else logits + counts, -1)
            entropy = -torch.einsum("kmv,mv->km", logs if counts is None else logs - counts, truth)
            shares = logs.exp_()
            overlap = torch.minimum(shares, truth).sum(-1)
            turn = torch.exp(-TURN * overlap)  # has no gradient
            losses[:, rows] = turn * entropy + (1 - turn) * (1 - overlap)
            if to_states is None or to_weight is None:
                continue
            slope = _slope(shares, truth, turn[..., None]).mul_(lesson.weights[:, rows, None]).to(kind)
            to_states[:, rows] = (slope @ own).to(states.dtype)
            to_own = slope.flatten(0, 1).T @ x.flatten(0, 1)
            if counts is None:
                to_weight += to_own
            else:
                to_weight.index_add_(0, some.tokens, to_own.to(to_weight.dtype))
        ctx.save_for_backward(to_states, to_weight)
        ctx.mark_non_differentiable(agreed)
        return (losses * lesson.weights).sum(), agreed

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        to_states, to_weight = ctx.saved_tensors
        return to_states * slopes[0], to_weight * slopes[0], None


def _slope(shares: torch.Tensor, truth: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """The gradient of the rows' losses by the logits, [K, m, V']. shares: the head's probabilities [K, m, V']; truth:
    the target's [m, V']; turn: the weight of cross-entropy [K, m, 1]."""
    below = (shares < truth).to(shares.dtype)
    inside = (shares * below).sum(-1, keepdim=True)
    return shares * (turn * truth.sum(-1, keepdim=True) + (1 - turn) * (inside - below)) - turn * truth


@dataclass(frozen=True, slots=True)
class Columns:
    """The tokens that a chunk uses (rule 3)."""

    tokens: torch.Tensor  # int64 [C] draft ids
    counts: torch.Tensor  # [C] how many tokens each one represents
    best: torch.Tensor  # int64 [m] the indices of the rows' likeliest tokens in ``tokens``


def columns_of(truth: torch.Tensor, best: torch.Tensor, drawn: int) -> Columns:
    """The tokens of rule 3. truth: the target's probabilities [m, V']; best: int64 [m], the rows' likeliest, which are
    always used; drawn: size of the sample, at least."""
    known = truth.amax(0) >= LIKELY
    known[:COMMON] = True
    known[best] = True
    certain, others = torch.nonzero(known)[:, 0], torch.nonzero(~known)[:, 0]
    drawn += -(len(certain) + drawn) % COLUMNS
    some = others[torch.randperm(len(others), device=truth.device)[:drawn]]
    counts = truth.new_ones(len(certain) + len(some))
    counts[len(certain):] = len(others) / max(1, len(some))
    return Columns(torch.cat((certain, some)), counts, torch.searchsorted(certain, best))
