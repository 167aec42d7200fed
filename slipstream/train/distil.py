"""The loss of an EAGLE-3 head and its gradient: the distance to the target's distribution over the draft vocabulary.

Rules:
1. The logits of a whole batch are never in memory: rows are processed in chunks that fit a cache, and the gradient of a
   chunk is computed while its softmax is there. The result is that of autograd, in a third of the time.
2. The target's distribution of a row is computed once for all unrolled steps.
3. With ``LossInputs.num_sampled`` the loss of a chunk uses some tokens only: those with a probability of at least
   ``CERTAIN_PROBABILITY`` in any of its rows, the first ``NUM_COMMON`` ids, the rows' likeliest, and a uniform sample
   of the others, each of which represents many. So sums over all tokens, and the gradient, are estimated at a small
   part of the cost (sampled softmax, arXiv 1412.2007).
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

CHUNK_ROWS = 512  # rows of all steps together, at most
ROW_MULTIPLE = 32  # numbers of rows are multiples of it (rule 4 of ``unroll``)
SAMPLE_MULTIPLE = 128  # the sample is enlarged until the number of tokens is a multiple of it (for the same reason)
CERTAIN_PROBABILITY = 1 / 512  # probability from which on a token is always used
NUM_COMMON = 1024  # low ids are the most frequent tokens of the tokenizer's training
CE_DECAY = 3.0  # how fast the loss turns from cross-entropy to 1 - overlap: its weight is e^(-CE_DECAY * overlap)


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What the rows learn, and the weight of each."""

    final_states: torch.Tensor  # [M, H] the target's final states
    teacher: torch.Tensor  # [V', H] the target's lm_head over the draft vocabulary
    greedy_ids: torch.Tensor  # int64 [M] the target's likeliest token, as a draft id
    weights: torch.Tensor  # float32 [K, M] of the loss
    dtype: torch.dtype  # of the products
    num_sampled: int = 0  # size of the sample of rule 3; 0: all tokens are used


class DistillationLoss(torch.autograd.Function):
    """states [K, M, H] and lm_head [V', H] -> the weighted sum of all rows' losses; and bool [K, M]: whether the best
    of the used tokens is the target's likeliest. Only the first has a gradient."""

    @staticmethod
    def of(states: torch.Tensor, lm_head: torch.Tensor, inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Apply the function; see the class."""
        result: tuple[torch.Tensor, torch.Tensor] = DistillationLoss.apply(  # type: ignore[no-untyped-call]
            states, lm_head, inputs)
        return result

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, lm_head: torch.Tensor,
                inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor]:
        steps, count, _ = states.shape
        dtype = inputs.dtype
        weight, teacher = lm_head.to(dtype), inputs.teacher.to(dtype)
        losses = torch.zeros(steps, count, dtype=lm_head.dtype, device=states.device)
        agrees = torch.zeros(steps, count, dtype=torch.bool, device=states.device)
        states_grad, weight_grad = torch.zeros_like(states), torch.zeros_like(lm_head)
        chunk = max(1, CHUNK_ROWS // steps // ROW_MULTIPLE) * ROW_MULTIPLE
        for first in range(0, count, chunk):
            rows = slice(first, first + chunk)
            x = states[:, rows].to(dtype)
            target_probs = F.linear(inputs.final_states[rows].to(dtype), teacher).to(lm_head.dtype).softmax(-1)
            used = used_tokens(target_probs, inputs.greedy_ids[rows], inputs.num_sampled)
            used_weight, log_counts = weight[used.tokens], used.counts.log()
            target_probs = target_probs[:, used.tokens] * used.counts
            logits = F.linear(x, used_weight).to(lm_head.dtype)  # [K, m, C]
            greedy_logits = logits.gather(-1, used.greedy_index.expand(steps, -1)[..., None])[..., 0]
            agrees[:, rows] = greedy_logits >= logits.amax(-1)
            log_probs = (logits + log_counts).log_softmax(-1)
            cross_entropy = -torch.einsum("kmv,mv->km", log_probs - log_counts, target_probs)
            probs = log_probs.exp_()
            overlap = torch.minimum(probs, target_probs).sum(-1)
            ce_weight = torch.exp(-CE_DECAY * overlap)  # has no gradient
            losses[:, rows] = ce_weight * cross_entropy + (1 - ce_weight) * (1 - overlap)
            if not ctx.needs_input_grad[0]:
                continue
            logits_grad = _logits_grad(probs, target_probs, ce_weight[..., None])
            logits_grad = logits_grad.mul_(inputs.weights[:, rows, None]).to(dtype)
            states_grad[:, rows] = (logits_grad @ used_weight).to(states.dtype)
            used_grad = logits_grad.flatten(0, 1).T @ x.flatten(0, 1)
            weight_grad.index_add_(0, used.tokens, used_grad.to(weight_grad.dtype))
        ctx.save_for_backward(states_grad, weight_grad)
        ctx.mark_non_differentiable(agrees)
        return (losses * inputs.weights).sum(), agrees

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        states_grad, weight_grad = ctx.saved_tensors
        return states_grad * grads[0], weight_grad * grads[0], None


def _logits_grad(probs: torch.Tensor, target_probs: torch.Tensor, ce_weight: torch.Tensor) -> torch.Tensor:
    """The gradient of the rows' losses by the logits, [K, m, C]. probs: the head's probabilities [K, m, C];
    target_probs: the target's [m, C]; ce_weight: the weight of cross-entropy [K, m, 1]."""
    below = (probs < target_probs).to(probs.dtype)
    mass_below = (probs * below).sum(-1, keepdim=True)
    target_mass = target_probs.sum(-1, keepdim=True)
    return probs * (ce_weight * target_mass + (1 - ce_weight) * (mass_below - below)) - ce_weight * target_probs


@dataclass(frozen=True, slots=True)
class UsedTokens:
    """The tokens that the loss of some rows uses (rule 3)."""

    tokens: torch.Tensor  # int64 [C] draft ids
    counts: torch.Tensor  # [C] how many tokens each one represents
    greedy_index: torch.Tensor  # int64 [m] the indices of the rows' likeliest tokens in ``tokens``


def used_tokens(target_probs: torch.Tensor, greedy_ids: torch.Tensor, num_sampled: int) -> UsedTokens:
    """The tokens of rule 3. target_probs: the target's probabilities [m, V']; greedy_ids: int64 [m], the rows'
    likeliest, which are always used; num_sampled: size of the sample, at least; 0: all tokens are used."""
    if not num_sampled:
        every = torch.arange(target_probs.shape[-1], device=target_probs.device)
        return UsedTokens(every, target_probs.new_ones(len(every)), greedy_ids)
    is_certain = target_probs.amax(0) >= CERTAIN_PROBABILITY
    is_certain[:NUM_COMMON] = True
    is_certain[greedy_ids] = True
    certain, others = torch.nonzero(is_certain)[:, 0], torch.nonzero(~is_certain)[:, 0]
    num_sampled += -(len(certain) + num_sampled) % SAMPLE_MULTIPLE
    sample = others[torch.randperm(len(others), device=target_probs.device)[:num_sampled]]
    counts = target_probs.new_ones(len(certain) + len(sample))
    counts[len(certain):] = len(others) / max(1, len(sample))
    return UsedTokens(torch.cat((certain, sample)), counts, torch.searchsorted(certain, greedy_ids))
