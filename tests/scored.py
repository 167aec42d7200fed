"""What a choice is the argmax of, written out: scores of a session's rows with their noise."""

from __future__ import annotations

import math

import torch

from slipstream.choosing.logits import is_filtered, survivors
from slipstream.choosing.noise import noise, row_keys
from slipstream.choosing.sampling import ChoiceRows, adjusted_rows


def adjusted(logits: torch.Tensor, session: ChoiceRows) -> torch.Tensor:
    """float64 [r, V] of one session's rows of ``logits`` [R, V], -inf for what cannot be chosen."""
    rows, sampling = adjusted_rows(logits, session), session.sampling
    if sampling.greedy:
        return rows
    count, device = len(rows), rows.device
    heat = torch.full((count,), max(sampling.temperature, 1e-300), dtype=torch.float64, device=device)
    keys = row_keys([sampling.seed] * count, session.positions, device)
    if not is_filtered(sampling):
        return noise(keys, torch.arange(rows.shape[1], device=device)[None]) + rows / heat[:, None]
    own = rows if session.adjusted else logits[session.rows.start:session.rows.stop]
    values, columns = survivors(own, heat, [sampling] * count)
    return torch.full_like(rows, -math.inf).scatter_(1, columns, noise(keys, columns) + values)
