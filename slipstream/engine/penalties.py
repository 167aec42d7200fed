"""What a request changes in the logits before a token is drawn: penalties, logit bias, min_tokens.

Rules:
1. The order is: repetition penalty, frequency penalty, presence penalty, logit bias, min_tokens.
2. Penalties look along each row's own path: the answer so far and the draft tokens between the root and the row. The
   repetition penalty counts the prompt too; frequency and presence count the answer alone.
3. A token that has no column (a draft's smaller vocabulary) cannot be chosen there, so it is left out.

It knows nothing about noise, temperature or trees.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.engine.sending import sent
from slipstream.protocol.messages import Sampling


class TokenHistory:
    """How often each token stands in the answer so far; prompt tokens are present with count 0."""

    __slots__ = ("counts",)

    def __init__(self, prompt_tokens: Iterable[int] = ()) -> None:
        self.counts: dict[int, int] = dict.fromkeys((int(token) for token in prompt_tokens), 0)

    @staticmethod
    def of(sampling: Sampling, prompt_tokens: Iterable[int] = ()) -> TokenHistory | None:
        """The history that ``sampling`` needs: none without penalties, no prompt without a repetition penalty."""
        if sampling.repetition_penalty != 1.0:
            return TokenHistory(prompt_tokens)
        if sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0:
            return TokenHistory()
        return None

    def append(self, tokens: Iterable[int]) -> None:
        """Add committed answer tokens."""
        for token in tokens:
            self.counts[int(token)] = self.counts.get(int(token), 0) + 1


class Columns:
    """Where target token ids stand among the columns of some logits: ``vocabulary`` int64 [V], None: id is column."""

    __slots__ = ("_is_plain", "column_of", "device")

    def __init__(self, width: int, vocabulary: torch.Tensor | None, device: torch.device) -> None:
        self.device = device
        self._is_plain = vocabulary is None
        columns = torch.arange(width, device=device)
        if vocabulary is None:
            self.column_of = columns
        else:
            self.column_of = torch.full((int(vocabulary.max()) + 1,), -1, dtype=torch.int64, device=device)
            self.column_of[vocabulary] = columns

    def find(self, ids: Sequence[int] | NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [F]: the columns of those ids that have one, and int64 [F]: which of ``ids`` they were."""
        if self._is_plain:  # nothing to look up: the host knows, and does not wait for a device to say so
            given = np.asarray(ids, np.int64)
            inside = np.flatnonzero((given >= 0) & (given < len(self.column_of)))
            return sent(given[inside], self.device), sent(inside, self.device)
        wanted = sent(np.asarray(ids, np.int64), self.device)
        known = ((wanted >= 0) & (wanted < len(self.column_of))).nonzero()[:, 0]
        columns = self.column_of[wanted[known]]
        return columns[columns >= 0], known[columns >= 0]


def penalise(rows: torch.Tensor, columns: Columns, sampling: Sampling, history: TokenHistory,
             paths: Sequence[Sequence[int]]) -> None:
    """Apply repetition, frequency and presence penalties to ``rows`` (float64 [r, V]) in place; one path a row."""
    counts = history.counts
    cells: list[tuple[int, int, int]] = []  # row, token, its count once the row's path is part of the answer
    for row, path in enumerate(paths):
        cells += [(row, token, counts.get(token, 0) + path.count(token)) for token in dict.fromkeys(path)]
    table = np.array(cells, np.int64).reshape(-1, 3)
    where, known = columns.find(table[:, 1])
    row_of = sent(table[:, 0], rows.device)[known]
    # Taken before the committed history changes them: each cell is penalised once, with its full count.
    before = rows[row_of, where]
    seen, known_history = columns.find(np.fromiter(counts.keys(), np.int64, len(counts)))
    committed = np.fromiter(counts.values(), np.int64, len(counts))
    rows[:, seen] = _lowered(rows[:, seen], committed, known_history, sampling)
    rows[row_of, where] = _lowered(before, table[:, 2], known, sampling)


def _lowered(values: torch.Tensor, counts: NDArray[np.int64], known: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    count = sent(np.ascontiguousarray(counts), values.device)[known]
    repetition = sampling.repetition_penalty
    if repetition != 1.0:
        values = torch.where(values > 0, values / repetition, values * repetition)
    return values - sampling.frequency_penalty * count - sampling.presence_penalty * (count > 0)


def bias(rows: torch.Tensor, columns: Columns, logit_bias: Sequence[tuple[int, float]]) -> None:
    """Add ``logit_bias`` to ``rows`` (float64 [r, V]) in place."""
    where, known = columns.find([token for token, _ in logit_bias])
    amounts = sent([amount for _, amount in logit_bias], rows.device, torch.float64)
    rows.index_add_(1, where, amounts[known].expand(len(rows), -1))


def forbid_stops(rows: torch.Tensor, columns: Columns, sampling: Sampling, num_output: Sequence[int]) -> None:
    """Make stop tokens impossible in the rows before which fewer than min_tokens answer tokens stand, in place."""
    early = [row for row, count in enumerate(num_output) if count < sampling.min_tokens]
    if early and sampling.stop_token_ids:
        where, _ = columns.find(sampling.stop_token_ids)
        rows[sent(early, rows.device)[:, None], where] = -math.inf
