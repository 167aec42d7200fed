"""The loss of a head: cross-entropy with the target's distribution over the draft vocabulary, gradient included.

Rules:
1. Logits of a whole batch never exist: rows go through in chunks that a cache holds, and each chunk's gradient is made
   while its softmax is there. That is what autograd would compute, in a third of the time.
2. The teacher's distribution of a row is computed once for all unrolled steps.

It knows nothing about layers, conversations or optimisers. Shapes: K unrolled steps, M rows, V' draft tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

CHUNK = 512  # rows of all steps together


@dataclass(frozen=True, slots=True)
class Lesson:
    """What the rows are to learn, and how much each of them counts."""

    finals: torch.Tensor  # [M, H] the target's final states
    teacher: torch.Tensor  # [V', H] the target's lm_head over the draft vocabulary
    best: torch.Tensor  # int64 [M] the target's likeliest token, as a draft id
    weights: torch.Tensor  # float32 [K, M] of the loss
    dtype: torch.dtype  # of the products


class Distilled(torch.autograd.Function):
    """states [K, M, H] and lm_head [V', H] -> the weighted sum of all rows' losses, and whether the best token is
    the target's [K, M]; only the first has a gradient."""

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
        size = max(1, CHUNK // steps)
        for first in range(0, count, size):
            rows = slice(first, first + size)
            x = states[:, rows].to(kind)
            truth = F.linear(lesson.finals[rows].to(kind), teacher).to(lm_head.dtype).softmax(-1)
            logits = F.linear(x, weight).to(lm_head.dtype)  # [K, m, V']
            best = logits.gather(-1, lesson.best[rows].expand(steps, -1)[..., None])[..., 0]
            agreed[:, rows] = best >= logits.amax(-1)
            logs = torch.log_softmax(logits, -1)
            losses[:, rows] = -torch.einsum("kmv,mv->km", logs, truth)
            if to_states is None or to_weight is None:
                continue
            slope = logs.exp_().sub_(truth).mul_(lesson.weights[:, rows, None]).to(kind)
            to_states[:, rows] = (slope @ weight).to(states.dtype)
            to_weight += slope.flatten(0, 1).T @ x.flatten(0, 1)
        ctx.save_for_backward(to_states, to_weight)
        ctx.mark_non_differentiable(agreed)
        return (losses * lesson.weights).sum(), agreed

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        to_states, to_weight = ctx.saved_tensors
        return to_states * slopes[0], to_weight * slopes[0], None
