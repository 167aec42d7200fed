"""Artificial inputs for benchmarks: logits that fall off like a model's (Zipf's law in random order, one draw a row),
rows that choose from them, and batches of rows after contexts.

It knows nothing about time.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.choosing.sampling import ChoiceRows
from slipstream.engine.batch import BatchBuilder
from slipstream.engine.kv import RUN
from slipstream.protocol.requests import Sampling

STEEPNESS = 1.3  # exponent of Zipf's law
FIRST = 256  # position of the first row
SAMPLINGS = {"greedy": Sampling(), "T = 1": Sampling(temperature=1.0, seed=7),
             "T = 0.7, top-p 0.9": Sampling(temperature=0.7, top_p=0.9, seed=7)}


def zipf_logits(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    """Random logits, float32 [rows, vocab]."""
    dice = torch.Generator().manual_seed(seed)
    ranks = torch.stack([torch.randperm(vocab, generator=dice) for _ in range(rows)])
    return -STEEPNESS * torch.log1p(ranks.float()) + 0.1 * torch.randn(rows, vocab, generator=dice)


def choice_rows(sampling: Sampling, rows: int, sessions: int = 1) -> list[ChoiceRows]:
    """``rows`` rows of each of ``sessions`` sessions, one session after the other."""
    return [ChoiceRows(sampling, range(first, first + rows), range(FIRST, FIRST + rows), range(rows), None,
                       [()] * rows) for first in range(0, sessions * rows, rows)]


def answer_slots(answers: int, rows: int, context: int) -> NDArray[np.int64]:
    """Slots int64 [answers, context + rows]. Their runs alternate in memory, as for answers that decode together."""
    runs = -(-(context + rows) // RUN)
    slots = np.arange(runs * answers * RUN).reshape(runs, answers, RUN).swapaxes(0, 1).reshape(answers, -1)
    return slots[:, : context + rows]


def chains(places: Iterable[NDArray[np.int64]], rows: int) -> BatchBuilder:
    """A batch with a chain of ``rows`` rows for each of ``places``: slots of a context, then those of its rows. One row
    is a plain step."""
    builder, words = BatchBuilder(), [(2 << i) - 1 for i in range(rows)] if rows > 1 else None
    for place in places:
        context = len(place) - rows
        builder.add([1] * rows, range(context, len(place)), place[context:].tolist(), place[:context], words,
                    rows if words else 0)
    return builder
