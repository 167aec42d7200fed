"""The changes that a request makes to a row of logits before a token is drawn: penalties, bias, min_tokens, a grammar;
and the filters top-k, top-p and min-p.

Rules:
1. The order is: repetition penalty, frequency penalty, presence penalty, logit bias, min_tokens or a grammar; top-k,
   top-p, min-p. top-p is a share of the mass that top-k left.
2. Penalties follow each row's own path: the answer so far, and the draft tokens between the root and the row. The
   repetition penalty counts the prompt too; frequency and presence penalties count the answer only. A token without a
   column (a draft's smaller vocabulary) cannot be chosen there, so it is ignored.
3. Every filter is a threshold on probability, so tokens of equal probability stay or go together: no filter depends on
   the order in which a sort leaves them.
4. Survivors are the first tokens in descending order. So the search looks at more and more candidates until the
   survivors of every row end within them; only in the worst case it sorts all.
5. top-p without top-k needs the mass of a whole vocabulary. It is summed in the logits' own dtype (at least float32)
   within blocks and in float64 over them, in an order that does not depend on the number of rows.

It knows nothing about noise, trees or sessions. Shapes: R rows, V columns, K candidates.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from slipstream.choosing.transfer import to_device
from slipstream.protocol.requests import Sampling

FIRST_WIDTH_CPU, FIRST_WIDTH = 64, 1024  # first candidates; more on a GPU, as the host waits to learn if it needs more
BLOCK = 64  # columns that are summed, or searched, together


class TokenHistory:
    """The tokens that occurred, ascending, and how often each occurs in the answer so far; those of the prompt alone
    have count 0. Kept in order, as kernels read it for every row of every step, and a prompt may have thousands."""

    __slots__ = ("counts", "tokens")

    def __init__(self, prompt_tokens: Iterable[int] = ()) -> None:
        self.tokens = array("q", sorted({int(token) for token in prompt_tokens}))
        self.counts = array("q", bytes(8 * len(self.tokens)))

    @staticmethod
    def of(sampling: Sampling, tokens: Sequence[int] = (), prompt: int | None = None) -> TokenHistory | None:
        """The history of a text for ``sampling``; None if it has no penalties. prompt: how many of the first ``tokens``
        are the prompt (None: all); they count only with a repetition penalty."""
        if not sampling.penalised:
            return None
        prompt = len(tokens) if prompt is None else prompt
        history = TokenHistory(tokens[:prompt] if sampling.repetition_penalty != 1.0 else ())
        history.append(tokens[prompt:])
        return history

    def append(self, tokens: Iterable[int]) -> None:
        """Add committed answer tokens."""
        for token in tokens:
            place = bisect_left(self.tokens, token)
            if place == len(self.tokens) or self.tokens[place] != token:
                self.tokens.insert(place, int(token))
                self.counts.insert(place, 0)
            self.counts[place] += 1

    def count(self, token: int) -> int:
        """How often ``token`` occurs in the answer."""
        place = bisect_left(self.tokens, token)
        return self.counts[place] if place < len(self.tokens) and self.tokens[place] == token else 0


class Columns:
    """Finds the columns of target token ids in some logits. vocabulary: int64 [V], each column's token id; None: column
    and id are the same."""

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
        """The columns of those ``ids`` that have one, int64 [F], and the places of these ids in ``ids``, int64 [F]."""
        if self._is_plain:  # computed on the host, without waiting for the device
            given = np.asarray(ids, np.int64)
            inside = np.flatnonzero((given >= 0) & (given < len(self.column_of)))
            return to_device(given[inside], self.device), to_device(inside, self.device)
        wanted = to_device(np.asarray(ids, np.int64), self.device)
        known = ((wanted >= 0) & (wanted < len(self.column_of))).nonzero()[:, 0]
        columns = self.column_of[wanted[known]]
        return columns[columns >= 0], known[columns >= 0]


def penalise(rows: torch.Tensor, columns: Columns, sampling: Sampling, history: TokenHistory,
             paths: Sequence[Sequence[int]]) -> None:
    """Apply repetition, frequency and presence penalties to ``rows`` (float64 [r, V]) in place. paths: the draft tokens
    of each row."""
    cells: list[tuple[int, int, int]] = []  # row, token, its count once the row's path is part of the answer
    for row, path in enumerate(paths):
        cells += [(row, token, history.count(token) + path.count(token)) for token in dict.fromkeys(path)]
    table = np.array(cells, np.int64).reshape(-1, 3)
    where, known = columns.find(table[:, 1])
    row_of = to_device(table[:, 0], rows.device)[known]
    # Read before the history's penalties are applied: a token on a path is penalised once, with its full count.
    before = rows[row_of, where]
    seen, known_history = columns.find(np.array(history.tokens))
    rows[:, seen] = _penalised(rows[:, seen], np.array(history.counts), known_history, sampling)
    rows[row_of, where] = _penalised(before, table[:, 2], known, sampling)


def _penalised(values: torch.Tensor, counts: NDArray[np.int64], known: torch.Tensor,
               sampling: Sampling) -> torch.Tensor:
    count = to_device(np.ascontiguousarray(counts), values.device, torch.float64)[known]
    repetition = sampling.repetition_penalty
    if repetition != 1.0:
        values = torch.where(values > 0, values / repetition, values * repetition)
    return values - sampling.frequency_penalty * count - sampling.presence_penalty * count.clamp(max=1.0)


def bias(rows: torch.Tensor, columns: Columns, logit_bias: Sequence[tuple[int, float]]) -> None:
    """Add ``logit_bias`` to ``rows`` (float64 [r, V]) in place."""
    where, known = columns.find([token for token, _ in logit_bias])
    amounts = to_device([amount for _, amount in logit_bias], rows.device, torch.float64)
    rows.index_add_(1, where, amounts[known].expand(len(rows), -1))


def forbid_stops(rows: torch.Tensor, columns: Columns, sampling: Sampling, num_output: Sequence[int]) -> None:
    """Make stop tokens impossible, in place, in rows with fewer than min_tokens answer tokens before them. num_output:
    these, a number for each row."""
    early = [row for row, count in enumerate(num_output) if count < sampling.min_tokens]
    if early and sampling.stop_token_ids:
        where, _ = columns.find(sampling.stop_token_ids)
        rows[to_device(early, rows.device)[:, None], where] = -math.inf


def allow(rows: torch.Tensor, allowed: NDArray[np.uint32]) -> None:
    """Make all tokens impossible, in place, that are not allowed. rows: float64 [r, V]; allowed: uint32 [r, W], bit i
    of word w is token 32 * w + i."""
    octets = to_device(allowed.view(np.uint8), rows.device)
    bits = (octets[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=rows.device)) & 1
    rows.masked_fill_(bits.flatten(1)[:, : rows.shape[1]] == 0, -math.inf)


def is_filtered(sampling: Sampling) -> bool:
    """Whether it has a top-k, top-p or min-p."""
    return sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0


def survivors(logits: torch.Tensor, temperature: torch.Tensor, samplings: Sequence[Sampling],
              at_least: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """The best tokens of each row: their log probabilities plus a constant of the row, float64 [R, K], -inf where
    filtered; and their columns, int64 [R, K].

    logits: [R, V]. temperature: float64 [R]. samplings: one a row. at_least: the smallest K, if V is as large.
    """
    vocab = logits.shape[1]
    limits = [min(s.top_k or vocab, vocab) for s in samplings]
    top_k = _column(limits, logits).to(torch.int64)
    top_p = _column([s.top_p if s.top_p < 1.0 else math.inf for s in samplings], logits)
    min_p = _column([math.log(s.min_p) if s.min_p > 0 else -math.inf for s in samplings], logits)
    whole = (top_p < 1.0) & (top_k == vocab)
    highest, temperature = logits.amax(1, keepdim=True), temperature[:, None]
    log_mass = torch.zeros_like(temperature)
    # The host knows whether any row needs it, without a copy. Rows that do not need it are not shifted.
    if any(s.top_p < 1.0 and limit == vocab for s, limit in zip(samplings, limits, strict=True)):
        log_mass = torch.where(whole, _log_mass(logits, highest, temperature), log_mass)
    first = FIRST_WIDTH_CPU if logits.device.type == "cpu" else FIRST_WIDTH
    width = max(first, at_least, *(limit + 1 for limit in limits if limit < vocab))
    while True:
        values, columns = best_of_rows(logits, min(width, vocab))
        values = (values.to(torch.float64) - highest).div_(temperature).sub_(log_mass)
        inside_k = (values > -math.inf) & (values >= _value_at(values, top_k - 1))
        keep = inside_k & _nucleus(values, inside_k, top_p, top_k < vocab) & (values >= values[:, :1] + min_p)
        # All that top-k leaves must be among the candidates: top-p needs their mass.
        cut = keep[:, -1:] | (inside_k[:, -1:] & (top_k < vocab))
        if width >= vocab or not bool(cut.any()):
            return values.masked_fill(~keep, -math.inf), columns
        width = width * 8 if width < 4096 else vocab


def best_of_rows(logits: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
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


def _log_mass(logits: torch.Tensor, highest: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """float64 [R, 1]: log of the sum of exp((logits - highest) / temperature). highest, temperature: [R, 1]."""
    shares = logits.to(torch.float64, copy=True).sub_(highest).div_(temperature).exp_()
    shares = F.pad(shares, (0, -shares.shape[1] % BLOCK))  # sums of blocks do not depend on the number of rows
    return shares.view(len(shares), -1, BLOCK).sum(-1).sum(1, keepdim=True).log_()


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return to_device(values, like.device, torch.float64)[:, None]


def _value_at(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """[R, 1]: ``values`` [R, K] at ``index`` [R, 1]; -inf where that is not among the K."""
    seen = values.shape[1]
    return values.gather(1, index.clamp(max=seen - 1)).masked_fill(index >= seen, -math.inf)


def _nucleus(values: torch.Tensor, inside_k: torch.Tensor, top_p: torch.Tensor, limited: torch.Tensor) -> torch.Tensor:
    """bool [R, K]: the shortest prefix of ``values`` (descending) whose mass reaches ``top_p``, and equals of its last.

    The whole mass is that of ``inside_k``, or 1 in rows without top-k (not ``limited``).
    """
    probs = values.exp().masked_fill_(~inside_k, 0.0)
    total = probs.cumsum(1)
    needed = (total - probs) < top_p * torch.where(limited, total[:, -1:], 1.0)
    return values >= values.masked_fill(~(needed & inside_k), math.inf).amin(1, keepdim=True)
