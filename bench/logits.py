"""Logits that fall off as a model's do, and rows that choose from them.

Zipf's law in random order, one draw a row. It knows nothing about time.
"""

from __future__ import annotations

import torch

from slipstream.choosing.sampling import ChoiceRows
from slipstream.protocol.messages import Sampling

STEEPNESS = 1.3  # of the fall from the likeliest token to the next
FIRST = 256  # position of the first row
SAMPLINGS = {"greedy": Sampling(), "T = 1": Sampling(temperature=1.0, seed=7),
             "T = 0.7, top-p 0.9": Sampling(temperature=0.7, top_p=0.9, seed=7)}


def zipf_logits(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    """float32 [rows, vocab]"""
    dice = torch.Generator().manual_seed(seed)
    ranks = torch.stack([torch.randperm(vocab, generator=dice) for _ in range(rows)])
    return -STEEPNESS * torch.log1p(ranks.float()) + 0.1 * torch.randn(rows, vocab, generator=dice)


def choice_rows(sampling: Sampling, rows: int) -> ChoiceRows:
    return ChoiceRows(sampling, range(rows), range(FIRST, FIRST + rows), range(rows), None, [()] * rows)
