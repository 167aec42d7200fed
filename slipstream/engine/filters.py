"""Filters: what top-k, top-p and min-p leave of a row of logits.

Rules:
1. The order is top-k, top-p, min-p; top-p counts the mass that top-k left.
2. Every filter is a threshold on probability, so tokens of equal probability live or die together: no filter depends on
   the order in which a sort happens to leave them.
3. Survivors are a prefix of the descending order, so the search looks at ever more candidates until every row's prefix
   ends inside them; a whole sort is the last resort.
4. The mass of a whole vocabulary, which top-p without top-k needs, is summed in the logits' own type (float32 at
   least), block by block in an order that does not depend on how many rows there are.

It knows nothing about noise, penalties or sessions. Shapes: R rows, V columns, K candidates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from slipstream.engine.sending import sent
from slipstream.protocol.messages import Sampling

FIRST_WIDTH_CPU, FIRST_WIDTH = 64, 1024  # candidates looked at before the search widens; a device's host waits to hear
BLOCK = 64  # columns that are summed, or searched, as one
COLDEST = 1e-30  # temperature that float32 can divide by


def is_filtered(sampling: Sampling) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0


def survivors(logits: torch.Tensor, heat: torch.Tensor, samplings: Sequence[Sampling],
              at_least: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """The best of each row and their columns, both [R, K]: float64 logs of their chances up to a constant of the row,
    -inf where filtered.

    logits: [R, V]. heat: temperatures, float64 [R]. samplings: one a row. at_least: candidates, where V has as many.
    """
    vocab = logits.shape[1]
    limits = [min(s.top_k or vocab, vocab) for s in samplings]
    top_k = _column(limits, logits).to(torch.int64)
    top_p = _column([s.top_p if s.top_p < 1.0 else math.inf for s in samplings], logits)
    min_p = _column([math.log(s.min_p) if s.min_p > 0 else -math.inf for s in samplings], logits)
    whole = (top_p < 1.0) & (top_k == vocab)
    highest, heat = logits.amax(1, keepdim=True), heat[:, None]
    log_mass = torch.zeros_like(heat)
    # The host knows whether there are any. A row that does not need it is not shifted, whatever its company needs.
    if any(s.top_p < 1.0 and limit == vocab for s, limit in zip(samplings, limits, strict=True)):
        log_mass = torch.where(whole, _log_mass(logits - highest, heat), log_mass)
    first = FIRST_WIDTH_CPU if logits.device.type == "cpu" else FIRST_WIDTH
    width = max(first, at_least, *(limit + 1 for limit in limits if limit < vocab))
    while True:
        values, columns = _best(logits, min(width, vocab))
        values = (values.to(torch.float64) - highest).div_(heat).sub_(log_mass)
        inside_k = (values > -math.inf) & (values >= _at(values, top_k - 1))
        keep = inside_k & _nucleus(values, inside_k, top_p, top_k < vocab) & (values >= values[:, :1] + min_p)
        # With top-k, all that it leaves must be in view: it is the mass that top-p counts.
        cut = keep[:, -1:] | (inside_k[:, -1:] & (top_k < vocab))
        if width >= vocab or not bool(cut.any()):
            return values.masked_fill(~keep, -math.inf), columns
        width = width * 8 if width < 4096 else vocab


def _best(logits: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``width`` best of each row in descending order, and their columns."""
    rows, vocab = logits.shape
    blocks = vocab // BLOCK
    if vocab % BLOCK or 4 * width > blocks:
        best = logits.topk(width, 1)
        return best.values, best.indices
    grid = logits.view(rows, blocks, BLOCK)
    chosen = grid.amax(-1).topk(width, 1).indices  # the best tokens are in the blocks with the best tokens
    found = grid.gather(1, chosen[..., None].expand(-1, -1, BLOCK)).flatten(1).topk(width, 1)
    places = found.indices
    return found.values, chosen.gather(1, places // BLOCK) * BLOCK + places % BLOCK


def _log_mass(below: torch.Tensor, heat: torch.Tensor) -> torch.Tensor:
    """float64 [R, 1]: log of the sum of exp(below / heat). below: [R, V], at most 0."""
    kind = torch.promote_types(below.dtype, torch.float32)
    shares = below.to(kind).div(heat.clamp(min=COLDEST).to(kind)).exp_()
    shares = F.pad(shares, (0, -shares.shape[1] % BLOCK))
    return shares.view(len(shares), -1, BLOCK).sum(-1).to(torch.float64).sum(1, keepdim=True).log_()


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return sent(values, like.device, torch.float64)[:, None]


def _at(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """[R, 1]: ``values`` [R, K] at ``index`` [R, 1]; -inf where that is not among the K."""
    seen = values.shape[1]
    return values.gather(1, index.clamp(max=seen - 1)).masked_fill(index >= seen, -math.inf)


def _nucleus(values: torch.Tensor, inside_k: torch.Tensor, top_p: torch.Tensor, limited: torch.Tensor) -> torch.Tensor:
    """bool [R, K]: the smallest prefix of descending logs whose mass reaches ``top_p``, and what equals its last.

    The mass is that of what top-k left; where it did not look (not ``limited``) it is one.
    """
    probs = values.exp().masked_fill_(~inside_k, 0.0)
    total = probs.cumsum(1)
    needed = (total - probs) < top_p * torch.where(limited, total[:, -1:], 1.0)
    return values >= values.masked_fill(~(needed & inside_k), math.inf).amin(1, keepdim=True)
