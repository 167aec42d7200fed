"""Choosing tokens from logits, exactly and keyed: the token at a position is a function of the logits there, the tokens
before it, and the request's ``Sampling``; of nothing else.

Rules:
1. The order is: penalties, logit bias, min_tokens, grammar, temperature, top-k, top-p, min-p, keyed noise,
   argmax. Filters look at the tempered distribution.
2. Tokens of equal probability survive the filters together, or not at all. Filters and all changes before them are in
   ``logits.py``.
3. Noise (``noise.py``) is a pure function of (seed, absolute position, token id), so argmax(logits / T + noise) over
   the survivors is a sample of the filtered softmax, and a drafter that knows the seed ranks with the same noise
   (Daliri, Musco, Suresh, arXiv 2408.07978).
4. A row's choice does not depend on the other rows of the call: they change the shape and order of none of its sums.
5. Equal scores: the lowest token id wins. A sampled row whose logits are all -inf, or are NaN, gives token 0.

Sampled and adjusted rows are computed in float64 (but rule 5 of ``logits``). It knows nothing about trees, sessions or
models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.choosing.logits import (
    Columns,
    TokenHistory,
    allow,
    bias,
    forbid_stops,
    is_filtered,
    penalise,
    survivors,
)
from slipstream.choosing.noise import best_under_noise, noise, row_keys
from slipstream.choosing.transfer import to_device
from slipstream.protocol.requests import Sampling

COINS = 0x5851F42D4C957F2D  # added to the seed, so that coins are independent of the noise
CELLS_AT_ONCE_CPU, ROWS_AT_ONCE = 200_000, 64  # bounds of a copy: a CPU's fits its cache, a GPU's needs few launches
RUNNERS_UP = 8  # ranked beyond the k that are asked for, so that equal scores around rank k are ordered by id


@dataclass(frozen=True, slots=True)
class ChoiceRows:
    """One session's rows of the logits. All sequences have one entry a row; those of plain greedy rows are not read."""

    sampling: Sampling
    rows: range  # of the logits
    positions: Sequence[int]  # absolute, of the token to be chosen
    num_output: Sequence[int]  # answer tokens that stand before it
    history: TokenHistory | None  # of the committed tokens; needed with penalties
    paths: Sequence[Sequence[int]]  # draft tokens from below the root down to this row; the root's path is empty
    # The tokens that a grammar allows, uint32 [r, W], bit i of word w is token 32 * w + i. min_tokens is applied in it:
    # once a grammar has ended, the answer must be able to end.
    allowed: NDArray[np.uint32] | None = None
    # Parents and tokens of a tree's nodes, one a row: choices are wanted in those rows only that a walk from the first
    # one along the choices reaches. Others may get any token.
    tree: tuple[Sequence[int], Sequence[int]] | None = None

    @property
    def plain_greedy(self) -> bool:
        """Whether the choice is the argmax of the unchanged logits."""
        return self.sampling.greedy and not self.adjusted

    @property
    def adjusted(self) -> bool:
        """Whether anything changes the logits before they are filtered and drawn from."""
        return self.sampling.adjusts or self.allowed is not None

    def part(self, cut: slice) -> ChoiceRows:
        """Some of its rows."""
        return replace(self, rows=self.rows[cut], positions=self.positions[cut], num_output=self.num_output[cut],
                       paths=self.paths[cut], allowed=None if self.allowed is None else self.allowed[cut], tree=None)

    def split(self, most: int) -> list[ChoiceRows]:
        """The same rows in parts of at most ``most``."""
        if len(self.rows) <= most:
            return [self]
        return [self.part(slice(first, first + most)) for first in range(0, len(self.rows), most)]


@dataclass(frozen=True, slots=True)
class Draws:
    """How tokens are chosen in a call that wants only these, of sessions without penalties, bias or grammar. An entry
    for each session; all empty: every row is greedy. In a tree, choices are wanted as far as a walk along them reaches;
    others may get any token."""

    samplings: Sequence[Sampling] = ()
    positions: Sequence[int] = ()  # of the token to be chosen in its first row
    counts: Sequence[int] = ()  # its rows: a tree's nodes


GREEDY = Draws()


@dataclass(frozen=True, slots=True)
class Winners:
    """The K best survivors of R rows under their noise, row by row, best first, the lowest id first among equals. Of
    greedy rows it is the best logit. A row with fewer survivors is filled up with ids 0 and scores -inf."""

    tokens: Sequence[int]  # [R * K] target ids
    scores: Sequence[float]  # [R * K] log_softmax of their scores, over the K of a row
    sure: Sequence[int]  # [R] 0: not certain; this module must choose instead


class Race(Protocol):
    """A faster way to the choices of this module, for the logits of one model. Rows that it does not support are marked
    as not sure."""

    def __call__(self, logits: torch.Tensor, sessions: Sequence[ChoiceRows], most: int) -> Winners | None:
        """The ``most`` best tokens of each of the sessions' rows of ``logits`` [R, V]; None: it does not support such
        logits."""
        ...


def choose(logits: torch.Tensor, sessions: Sequence[ChoiceRows], best: list[int] | None = None,
           race: Race | None = None) -> list[int]:
    """The chosen token of every row of ``logits`` [R, V]; the sessions' rows tile 0 .. R. best: the argmax of each row,
    if it is known; race: see ``Race``. From a GPU the choices come in one copy; those that a race is not sure of come
    in a second one."""
    plain = sum(session.plain_greedy for session in sessions)
    if best is None and plain and (race is not None or plain == len(sessions)):
        best = greatest(logits)  # a race is not needed for plain greedy rows
    if best is not None and plain == len(sessions):
        return best
    if race is not None:
        remaining = sessions if best is None else [session for session in sessions if not session.plain_greedy]
        winners = race(logits, remaining, 1)
        if winners is not None:
            return _merge_winners(logits, remaining, winners, best)
    return _fill_in([0] * len(logits), _choices_by_rows(logits, sessions, best))


def _fill_in(chosen: list[int], parts: Sequence[tuple[Sequence[int], torch.Tensor]]) -> list[int]:
    """``chosen``, after the choices of ``parts`` (see ``_choices_by_rows``) were written to it."""
    values: list[int] = torch.cat([tokens for _, tokens in parts]).cpu().tolist() if parts else []
    for row, token in zip((row for rows, _ in parts for row in rows), values, strict=True):
        chosen[row] = token
    return chosen


def _merge_winners(logits: torch.Tensor, sessions: Sequence[ChoiceRows], winners: Winners,
                   best: list[int] | None) -> list[int]:
    chosen, first = [0] * len(logits) if best is None else best.copy(), 0
    for session in sessions:
        rows = session.rows
        chosen[rows.start : rows.stop] = winners.tokens[first : first + len(rows)]
        first += len(rows)
    return _fill_in(chosen, _choices_by_rows(logits, _unsure(sessions, winners), best))


def _unsure(sessions: Sequence[ChoiceRows], winners: Winners) -> list[ChoiceRows]:
    """The rows that a race was not sure of: whole sessions, or single rows of a session."""
    if all(winners.sure):
        return []
    remaining, first = list[ChoiceRows](), 0
    for session in sessions:
        sure = winners.sure[first : first + len(session.rows)]
        first += len(session.rows)
        remaining += ([session.part(slice(place, place + 1)) for place, known in enumerate(sure) if not known]
                      if any(sure) else [session])
    return remaining


def choices(logits: torch.Tensor, sessions: Sequence[ChoiceRows]) -> torch.Tensor:
    """int64 [R]: what ``choose`` returns, as a tensor on the device of ``logits``."""
    parts = _choices_by_rows(logits, sessions, None)
    chosen = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    if not parts:
        return chosen
    rows = to_device([row for rows, _ in parts for row in rows], logits.device)
    return chosen.index_copy_(0, rows, torch.cat([tokens for _, tokens in parts]))


def _choices_by_rows(logits: torch.Tensor, sessions: Sequence[ChoiceRows],
                     best: list[int] | None) -> list[tuple[Sequence[int], torch.Tensor]]:
    """Pairs of rows and their choices, int64, on the device."""
    parts: list[tuple[Sequence[int], torch.Tensor]] = []
    plain = [row for s in sessions if s.plain_greedy for row in s.rows]
    if plain and best is not None:
        parts.append((plain, to_device([best[row] for row in plain], logits.device)))
    elif plain:
        parts.append((plain, _argmax(_select_rows(logits, plain))))
    for session in sessions:
        if session.sampling.greedy and not session.plain_greedy:
            parts.append((session.rows, _argmax(adjusted_rows(logits, session))))
    for group in _groups([session for session in sessions if not session.sampling.greedy], logits):
        found = (_survivors(_group_rows(logits, group), group, None) if is_filtered(group[0].sampling)
                 else _leading(logits, group))
        parts.append((_rows_of(group), _lowest_winner(*found)))
    return parts


def _groups(sessions: Sequence[ChoiceRows], logits: torch.Tensor, scattered: bool = False) -> list[list[ChoiceRows]]:
    """The sessions in groups that are computed at once. A group is all greedy or all sampled, all adjusted (in float64)
    or none, all filtered or none. Groups that copy whole rows have a bounded number of rows. spread: sampled rows are
    copied to wider ones (``_scattered``)."""
    kinds: dict[tuple[bool, bool, bool], list[ChoiceRows]] = {}
    for session in sessions:
        kind = session.sampling.greedy, session.adjusted, is_filtered(session.sampling)
        kinds.setdefault(kind, []).append(session)
    on_cpu, most = logits.device.type == "cpu", rows_at_once(logits)
    return [group for (greedy, is_adjusted, filtered), alike in kinds.items()
            for group in ([alike] if not is_adjusted and (greedy or (on_cpu and not filtered and not scattered))
                          else _bounded_groups(alike, most))]


def rows_at_once(logits: torch.Tensor) -> int:
    """How many rows of ``logits`` [R, V] are copied at once, at most."""
    return max(4, CELLS_AT_ONCE_CPU // logits.shape[1]) if logits.device.type == "cpu" else ROWS_AT_ONCE


def _select_rows(logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    return logits if rows == list(range(len(logits))) else logits.index_select(0, to_device(rows, logits.device))


def log_probabilities(logits: torch.Tensor, session: ChoiceRows) -> torch.Tensor:
    """float64 [r, V]: the log probabilities with which tokens are drawn in the rows of one sampled session, after
    penalties, bias, temperature and filters; -inf for filtered tokens. logits: [R, V]."""
    assert not session.sampling.greedy
    rows, temperature = _session_rows(logits, session, None), _temperatures([session], logits.device)
    if not is_filtered(session.sampling):
        return torch.log_softmax(rows.to(torch.float64) / temperature[:, None], 1)
    values, columns = survivors(rows, temperature, [session.sampling] * len(rows))
    whole = torch.full_like(rows, -math.inf, dtype=torch.float64)
    return whole.scatter_(1, columns, torch.log_softmax(values, 1))


def uniform_draws(session: ChoiceRows) -> list[float]:
    """Uniform numbers in (0, 1), one a row: a function of seed and position, independent of the noise."""
    seeds = [(session.sampling.seed + COINS) % (1 << 64)] * len(session.rows)
    keys = row_keys(seeds, session.positions, torch.device("cpu"))
    gumbel = noise(keys, torch.zeros(1, 1, dtype=torch.int64))
    values: list[float] = torch.exp(-torch.exp(-gumbel))[:, 0].tolist()
    return values


def rank(logits: torch.Tensor, session: ChoiceRows, k: int,
         vocabulary: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``k`` best tokens of one session's rows and their log scores: target ids int64 [r, k], float32 [r, k].

    Greedy: log_softmax of the adjusted logits. Sampled: log_softmax of logits / T + noise over the ``k + RUNNERS_UP``
    best survivors, so that the first one is what this model would choose; ranks without a survivor score -inf. ``k`` is
    at most V.
    """
    return _rank(logits, [session], k, vocabulary)


def _rank(logits: torch.Tensor, sessions: Sequence[ChoiceRows], k: int,
          vocabulary: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``rank``, for all sessions of one group (``_groups``)."""
    sampling, rows = sessions[0].sampling, _group_rows(logits, sessions, vocabulary)
    if sampling.greedy:
        # A draft ranks greedy rows most often, so they stay float32 unless they are adjusted.
        scores, columns = rows.to(torch.promote_types(rows.dtype, torch.float32)), None
    elif is_filtered(sampling):
        columns, scores = _survivors(rows, sessions, vocabulary, k)
    else:
        scattered = _scattered(rows, vocabulary)
        columns, scores = best_under_noise(scattered, _temperatures(sessions, rows.device),
                                           _keys(sessions, rows.device), min(k + RUNNERS_UP, scattered.shape[1]))
        vocabulary = None
    most = min(k + RUNNERS_UP, scores.shape[1])
    if sampling.greedy:
        best, where = torch.log_softmax(scores, 1).topk(most, 1)
    else:
        best, where = scores.topk(most, 1)
        best = torch.log_softmax(best, 1)
    ids = where if columns is None else columns.expand_as(scores).gather(1, where)
    if vocabulary is not None:
        ids = vocabulary.take(ids)
    if best.device.type == "cpu" and bool((best[:, 1:] < best[:, :-1]).all()):
        return ids[:, :k], best[:, :k].to(torch.float32)  # no equal scores, so no order by id is needed
    by_id = ids.argsort(1)
    order = by_id.gather(1, best.gather(1, by_id).sort(dim=1, descending=True, stable=True).indices)[:, :k]
    return ids.gather(1, order), best.gather(1, order).to(torch.float32)


Children = tuple[Sequence[int], Sequence[float]]  # tokens of one row, best first, and their log scores


def ranked(logits: torch.Tensor, sessions: Sequence[ChoiceRows], k: int, vocabulary: torch.Tensor | None = None,
           race: Race | None = None) -> list[Children]:
    """``rank`` for every row of all ``sessions``, in their order. race: made for ``vocabulary``."""
    children: dict[int, Children] = {}
    sampled = [session for session in sessions if not session.sampling.greedy]
    winners = race(logits, sampled, k + RUNNERS_UP) if race is not None and sampled else None
    remaining = [session for session in sessions if winners is None or session.sampling.greedy]
    if winners is not None:
        begins = range(0, len(winners.tokens), k + RUNNERS_UP)
        children |= {row: (winners.tokens[begin : begin + k], winners.scores[begin : begin + k])
                     for row, begin in zip(_rows_of(sampled), begins, strict=True)}
        remaining += _unsure(sampled, winners)
    for group in _groups(remaining, logits, vocabulary is not None):
        tokens, scores = _rank(logits, group, k, vocabulary)
        children |= zip(_rows_of(group), zip(tokens.tolist(), scores.tolist(), strict=True), strict=True)
    return [children[row] for session in sessions for row in session.rows]


def greatest(logits: torch.Tensor) -> list[int]:
    """The column of the greatest logit of each row of ``logits`` [R, V], the first among equals; if a row has a NaN,
    the first NaN's column."""
    columns: list[int] = _argmax(logits).cpu().tolist()
    return columns


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    if logits.device.type != "cpu":
        return logits.argmax(1)
    # numpy's argmax is vectorised, torch's is not: ten times faster on a CPU. Both take the first of equals.
    wide = logits if logits.dtype in (torch.float32, torch.float64) else logits.to(torch.float32)
    return torch.from_numpy(wide.detach().numpy().argmax(1))


def _leading(logits: torch.Tensor, sessions: Sequence[ChoiceRows]) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``_survivors``, for sampled sessions without filters: columns and scores of the tokens that could win."""
    rows = _group_rows(logits, sessions)
    return best_under_noise(rows, _temperatures(sessions, rows.device), _keys(sessions, rows.device), 1)


def _session_rows(logits: torch.Tensor, session: ChoiceRows, vocabulary: torch.Tensor | None) -> torch.Tensor:
    """[r, V]: a session's rows, adjusted: a float64 copy if anything changes them, else a view of ``logits``."""
    if session.adjusted:
        return adjusted_rows(logits, session, vocabulary)
    return logits[session.rows.start:session.rows.stop]


def _group_rows(logits: torch.Tensor, sessions: Sequence[ChoiceRows],
                vocabulary: torch.Tensor | None = None) -> torch.Tensor:
    """[r, V]: the rows of sessions that are all adjusted or all not (see ``_session_rows``)."""
    if len(sessions) == 1:
        return _session_rows(logits, sessions[0], vocabulary)
    if sessions[0].adjusted:
        return torch.cat([adjusted_rows(logits, s, vocabulary) for s in sessions])
    return _select_rows(logits, _rows_of(sessions))


def _rows_of(sessions: Sequence[ChoiceRows]) -> list[int]:
    return [row for s in sessions for row in s.rows]


def _scattered(rows: torch.Tensor, vocabulary: torch.Tensor | None) -> torch.Tensor:
    """``rows`` [r, V'] over the target's ids up to the greatest of ``vocabulary``, -inf where it has none."""
    if vocabulary is None:
        return rows
    whole = rows.new_full((len(rows), int(vocabulary.max()) + 1), -math.inf)
    return whole.index_copy_(1, vocabulary, rows)


def _temperatures(sessions: Sequence[ChoiceRows], device: torch.device) -> torch.Tensor:
    """float64 [r]: the temperature of each row."""
    return to_device([max(s.sampling.temperature, 1e-300) for s in sessions for _ in s.rows], device, torch.float64)


def _keys(sessions: Sequence[ChoiceRows], device: torch.device) -> torch.Tensor:
    """int64 [r]: what each row's noise is made from."""
    return row_keys([s.sampling.seed for s in sessions for _ in s.rows],
                    [position for s in sessions for position in s.positions], device)


def _bounded_groups(sessions: Sequence[ChoiceRows], most: int) -> list[list[ChoiceRows]]:
    """The sessions in groups of at most ``most`` rows; one with more rows is split."""
    groups: list[list[ChoiceRows]] = []
    free_rows = 0
    for session in sessions:
        for part in session.split(most):
            if len(part.rows) > free_rows:
                groups.append([])
                free_rows = most
            groups[-1].append(part)
            free_rows -= len(part.rows)
    return groups


def adjusted_rows(logits: torch.Tensor, session: ChoiceRows, vocabulary: torch.Tensor | None = None) -> torch.Tensor:
    """float64 [r, V]: a copy of one session's rows of ``logits`` [R, V] after penalties, bias, and min_tokens or a
    grammar. vocabulary: int64 [V], the target's token id of each column; None: the column's number."""
    sampling = session.sampling
    rows = logits[session.rows.start:session.rows.stop].to(torch.float64, copy=True)
    if not session.adjusted:
        return rows
    columns = Columns(rows.shape[1], vocabulary, rows.device)
    if sampling.penalised:
        assert session.history is not None, "penalties need a TokenHistory"
        penalise(rows, columns, sampling, session.history, session.paths)
    if sampling.logit_bias:
        bias(rows, columns, sampling.logit_bias)
    if session.allowed is not None:
        allow(rows, session.allowed)
    else:
        forbid_stops(rows, columns, sampling, session.num_output)
    return rows


def _survivors(rows: torch.Tensor, sessions: Sequence[ChoiceRows], vocabulary: torch.Tensor | None,
               at_least: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns int64 [R, K] and scores float64 [R, K] = logits / T + noise of filtered sessions; -inf for what was
    filtered. rows: [R, V], penalties done."""
    samplings = [s.sampling for s in sessions for _ in s.rows]
    scaled, columns = survivors(rows, _temperatures(sessions, rows.device), samplings, at_least)
    ids = columns if vocabulary is None else vocabulary[columns]
    return columns, noise(_keys(sessions, rows.device), ids).add_(scaled)


def _lowest_winner(columns: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """int64 [R]: the column of each row's best score, the lowest of equals; 0: none is above -inf."""
    best = scores.amax(1, keepdim=True)
    return columns.masked_fill(scores < best, torch.iinfo(torch.int64).max).masked_fill_(~(best > -math.inf), 0).amin(1)
