"""The loss of a head: how far it is from the target's distribution over the draft vocabulary, gradient included.

Rules:
1. Logits of a whole batch never exist: rows go through in chunks that a cache holds, and each chunk's gradient is made
   while its softmax is there. That is what autograd would compute, in a third of the time.
2. The teacher's distribution of a row is computed once for all unrolled steps.
3. With ``Lesson.drawn`` a chunk learns from some tokens alone: all that are ``LIKELY`` to follow any of its rows, the
   ``COMMON`` first ones, and so many of the others, drawn evenly, each of which counts for those that were not drawn.
   Sums over all tokens, and so the gradient, are estimated without the most of their cost (sampled softmax, arXiv
   1412.2007).
4. A small head cannot have all of a distribution. Its overlap with the target's, the sum of the lesser shares, is the
   chance of acceptance in speculative sampling; here it stands for that. The more there is, the less a row's loss is
   cross-entropy and the more it is what the overlap leaves out (after arXiv 2602.23881).

It knows nothing about layers, conversations or optimisers. Shapes: K unrolled steps, M rows, V' draft tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

CHUNK = 512  # rows of all steps together, at most
STRIDE = 32  # rows come in whole multiples of it (rule 4 of ``unroll``)
COLUMNS = 128  # as many tokens are drawn more as fill up the last so many (the same rule)
LIKELY = 1 / 512  # share of a token, from which on it is always looked at
COMMON = 1024  # low ids are those that a tokenizer's training met most
TURN = 3.0  # how soon the loss turns from cross-entropy to what is accepted


@dataclass(frozen=True, slots=True)
class Lesson:
    """What the rows are to learn, and how much each of them counts."""

    finals: torch.Tensor  # [M, H] the target's final states
    teacher: torch.Tensor  # [V', H] the target's lm_head over the draft vocabulary
    best: torch.Tensor  # int64 [M] the target's likeliest token, as a draft id
    weights: torch.Tensor  # float32 [K, M] of the loss
    dtype: torch.dtype  # of the products
    drawn: int = 0  # tokens, see rule 3; 0: all are looked at


class Distilled(torch.autograd.Function):
    """states [K, M, H] and lm_head [V', H] -> the weighted sum of all rows' losses, and whether the best token,
    of those that are looked at, is the target's [K, M]; only the first has a gradient."""

    @staticmethod
    def of(states: torch.Tensor, lm_head: torch.Tensor, lesson: Lesson) -> tuple[torch.Tensor, torch.Tensor]:
        """What the class says."""
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
    """Of a row's loss in its logits. shares [K, m, V'] of the head, truth [m, V'], turn [K, m, 1]."""
    below = (shares < truth).to(shares.dtype)
    inside = (shares * below).sum(-1, keepdim=True)
    return shares * (turn * truth.sum(-1, keepdim=True) + (1 - turn) * (inside - below)) - turn * truth


@dataclass(frozen=True, slots=True)
class Columns:
    """Some tokens, and how many each of them counts for."""

    tokens: torch.Tensor  # int64 [C] draft ids
    counts: torch.Tensor  # [C] those that were not drawn included
    best: torch.Tensor  # int64 [m] where the rows' likeliest ones stand


def columns_of(truth: torch.Tensor, best: torch.Tensor, drawn: int) -> Columns:
    """As rule 3 says. truth: [m, V'] shares of all tokens; best: int64 [m], which are there, too."""
    known = truth.amax(0) >= LIKELY
    known[:COMMON] = True
    known[best] = True
    certain, others = torch.nonzero(known)[:, 0], torch.nonzero(~known)[:, 0]
    drawn += -(len(certain) + drawn) % COLUMNS
    some = others[torch.randperm(len(others), device=truth.device)[:drawn]]
    counts = truth.new_ones(len(certain) + len(some))
    counts[len(certain):] = len(others) / max(1, len(some))
    return Columns(torch.cat((certain, some)), counts, torch.searchsorted(certain, best))
