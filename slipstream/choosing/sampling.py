"""Choosing tokens from logits, exactly and keyed: which token stands at a position is a function of the logits there,
the tokens before it, and the request's ``Sampling``; of nothing else.

Rules:
1. The order is: penalties, logit bias, min_tokens, grammar, temperature, top-k, top-p, min-p, keyed noise,
   argmax. Filters look at the tempered distribution.
2. Tokens of equal probability survive the filters (``logits.py``, as all before the noise) together, or not at all.
3. Noise (``noise.py``) is a pure function of (seed, absolute position, token id), so argmax(logits / T + noise) over
   the survivors is a sample of the filtered softmax, and a drafter that knows the seed ranks with the very same noise
   (Daliri, Musco, Suresh, arXiv 2408.07978).
4. A row's choice does not depend on the other rows of the call: no sum runs over a shape that they could change.
5. Equal scores: the lowest token id wins. A sampled row of which nothing can be chosen, or no number, gives token 0.

Arithmetic is float64 wherever a row is sampled or adjusted. It knows nothing about trees, sessions or models.
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
from slipstream.choosing.noise import leaders, noise, row_keys
from slipstream.choosing.transfer import sent
from slipstream.protocol.requests import Sampling

__all__ = ["GREEDY", "Children", "ChoiceRows", "Draws", "Race", "TokenHistory", "Winners", "adjusted_rows", "choices",
           "choose", "coins", "greatest", "rank", "ranked", "shares"]

COINS = 0x5851F42D4C957F2D  # apart from the seed of the noise, which decides the choice
CELLS_AT_ONCE_CPU, ROWS_AT_ONCE = 200_000, 64  # a CPU works in its cache, a GPU likes few launches; both bound copies
RUNNERS_UP = 8  # ranked beyond what is asked for, so that equal scores at the edge come in the order of their ids


@dataclass(frozen=True, slots=True)
class ChoiceRows:
    """One session's rows of the logits. Its lists have one entry a row; for plain greedy rows they are not read."""

    sampling: Sampling
    rows: range  # of the logits
    positions: Sequence[int]  # absolute, of the token to be chosen
    num_output: Sequence[int]  # answer tokens that stand before it
    history: TokenHistory | None  # of what is committed; needed with penalties
    paths: Sequence[Sequence[int]]  # draft tokens below the root down to this row; the root's is empty
    # What a grammar allows, uint32 [r, W], bit i of word w is token 32 * w + i. It has min_tokens in it: a grammar that
    # has ended ends the answer.
    allowed: NDArray[np.uint32] | None = None

    @property
    def plain_greedy(self) -> bool:
        """Whether the choice is the argmax of the logits as they are."""
        return self.sampling.greedy and not self.adjusted

    @property
    def adjusted(self) -> bool:
        """Whether anything changes the logits before they are filtered and drawn from."""
        sampling = self.sampling
        return sampling.path_dependent or bool(sampling.logit_bias) or self.allowed is not None

    @property
    def penalised(self) -> bool:
        """Whether penalties change the logits."""
        return self.sampling.path_dependent and TokenHistory.of(self.sampling) is not None

    def part(self, cut: slice) -> ChoiceRows:
        """Some of its rows."""
        return replace(self, rows=self.rows[cut], positions=self.positions[cut], num_output=self.num_output[cut],
                       paths=self.paths[cut], allowed=None if self.allowed is None else self.allowed[cut])

    def split(self, most: int) -> list[ChoiceRows]:
        """The same rows in parts of at most ``most``."""
        if len(self.rows) <= most:
            return [self]
        return [self.part(slice(first, first + most)) for first in range(0, len(self.rows), most)]


@dataclass(frozen=True, slots=True)
class Draws:
    """How rows are chosen from whose logits nothing changes and no filter takes from, where nothing else is asked of
    these: R of each, or none at all, which are greedy rows."""

    heats: Sequence[float] = ()  # temperatures; 0: the greatest
    seeds: Sequence[int] = ()
    positions: Sequence[int] = ()  # of the tokens to be chosen


GREEDY = Draws()


@dataclass(frozen=True, slots=True)
class Winners:
    """Of R rows, one behind the other, the K best survivors under their noise, best first, the lowest id among equals;
    of greedy rows the best logit. Where a row has fewer, the rest of it are ids 0 that score -inf."""

    tokens: Sequence[int]  # [R * K] target ids
    scores: Sequence[float]  # [R * K] logarithms of their shares among the K
    sure: Sequence[int]  # [R] 0: only the arithmetic of this module can tell


class Race(Protocol):
    """A faster way to find what this module would choose, made for the columns of one model's logits. It reports rows
    that it cannot decide, and the module then chooses for these."""

    def __call__(self, logits: torch.Tensor, sessions: Sequence[ChoiceRows], most: int) -> Winners | None:
        """The ``most`` best of the sessions' rows of ``logits`` [R, V]; None: such logits it does not take."""
        ...


def choose(logits: torch.Tensor, sessions: Sequence[ChoiceRows], best: list[int] | None = None,
           race: Race | None = None) -> list[int]:
    """The chosen token of every row of ``logits`` [R, V]; the sessions' rows tile 0 .. R. From a device all choices
    come back in one copy, those that a race is not sure of in another. best: the argmax of each row, where it is
    known."""
    plain = sum(session.plain_greedy for session in sessions)
    if best is None and plain and (race is not None or plain == len(sessions)):
        best = greatest(logits)  # no race: of such rows nothing else may be known
    if best is not None and plain == len(sessions):
        return best
    if race is not None:
        left = sessions if best is None else [session for session in sessions if not session.plain_greedy]
        won = race(logits, left, 1)
        if won is not None:
            return _told(logits, left, won, best)
    return _written([0] * len(logits), _parts(logits, sessions, best))


def _written(chosen: list[int], parts: Sequence[tuple[Sequence[int], torch.Tensor]]) -> list[int]:
    """``chosen``, with what ``_parts`` gave."""
    values: list[int] = torch.cat([tokens for _, tokens in parts]).cpu().tolist() if parts else []
    for row, token in zip((row for rows, _ in parts for row in rows), values, strict=True):
        chosen[row] = token
    return chosen


def _told(logits: torch.Tensor, sessions: Sequence[ChoiceRows], won: Winners, best: list[int] | None) -> list[int]:
    chosen, first = [0] * len(logits) if best is None else best.copy(), 0
    for session in sessions:
        rows = session.rows
        chosen[rows.start : rows.stop] = won.tokens[first : first + len(rows)]
        first += len(rows)
    return _written(chosen, _parts(logits, _unsure(sessions, won), best))


def _unsure(sessions: Sequence[ChoiceRows], won: Winners) -> list[ChoiceRows]:
    """What a race could not decide: whole sessions, and single rows of others."""
    if all(won.sure):
        return []
    left, first = list[ChoiceRows](), 0
    for session in sessions:
        sure = won.sure[first : first + len(session.rows)]
        first += len(session.rows)
        left += ([session.part(slice(place, place + 1)) for place, known in enumerate(sure) if not known] if any(sure)
                 else [session])
    return left


def choices(logits: torch.Tensor, sessions: Sequence[ChoiceRows]) -> torch.Tensor:
    """int64 [R]: what ``choose`` gives, left where ``logits`` are."""
    parts = _parts(logits, sessions, None)
    chosen = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    if not parts:
        return chosen
    rows = sent([row for rows, _ in parts for row in rows], logits.device)
    return chosen.index_copy_(0, rows, torch.cat([tokens for _, tokens in parts]))


def _parts(logits: torch.Tensor, sessions: Sequence[ChoiceRows],
           best: list[int] | None) -> list[tuple[Sequence[int], torch.Tensor]]:
    """Rows, and their choices where they were made."""
    parts: list[tuple[Sequence[int], torch.Tensor]] = []
    plain = [row for s in sessions if s.plain_greedy for row in s.rows]
    if plain and best is not None:
        parts.append((plain, sent([best[row] for row in plain], logits.device)))
    elif plain:
        parts.append((plain, _argmax(_picked(logits, plain))))
    for session in sessions:
        if session.sampling.greedy and not session.plain_greedy:
            parts.append((session.rows, _argmax(adjusted_rows(logits, session))))
    for few in _alike([session for session in sessions if not session.sampling.greedy], logits):
        found = _survivors(_gathered(logits, few), few, None) if is_filtered(few[0].sampling) else _race(logits, few)
        parts.append((_rows_of(few), _lowest_winner(*found)))
    return parts


def _alike(sessions: Sequence[ChoiceRows], logits: torch.Tensor, spread: bool = False) -> list[list[ChoiceRows]]:
    """The sessions in groups that are computed at once: all greedy or none, adjusted (these are summed in another type)
    and filtered likewise; of as many rows as are good together, where whole rows are copied. spread: sampled rows are,
    to wider ones (``_spread``)."""
    kinds: dict[tuple[bool, bool, bool], list[ChoiceRows]] = {}
    for session in sessions:
        kind = session.sampling.greedy, session.adjusted, is_filtered(session.sampling)
        kinds.setdefault(kind, []).append(session)
    on_cpu = logits.device.type == "cpu"
    most = max(4, CELLS_AT_ONCE_CPU // logits.shape[1]) if on_cpu else ROWS_AT_ONCE
    return [few for (greedy, is_adjusted, filtered), alike in kinds.items()
            for few in ([alike] if not is_adjusted and (greedy or (on_cpu and not filtered and not spread))
                        else _packs(alike, most))]


def _picked(logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    return logits if rows == list(range(len(logits))) else logits.index_select(0, sent(rows, logits.device))


def shares(logits: torch.Tensor, session: ChoiceRows) -> torch.Tensor:
    """float64 [r, V]: natural logarithms of what one sampled session's rows of ``logits`` [R, V] are chosen by, after
    penalties, bias, temperature and filters; -inf for what was filtered."""
    assert not session.sampling.greedy
    rows, heat = _own_rows(logits, session, None), _heat([session], logits.device)
    if not is_filtered(session.sampling):
        return torch.log_softmax(rows.to(torch.float64) / heat[:, None], 1)
    values, columns = survivors(rows, heat, [session.sampling] * len(rows))
    whole = torch.full_like(rows, -math.inf, dtype=torch.float64)
    return whole.scatter_(1, columns, torch.log_softmax(values, 1))


def coins(session: ChoiceRows) -> list[float]:
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
    """The same of sessions that are alike (``_alike``)."""
    sampling, rows = sessions[0].sampling, _gathered(logits, sessions, vocabulary)
    if sampling.greedy:
        # A draft's greedy ranking is its hot path: float32 unless something must be adjusted.
        scores, columns = rows.to(torch.promote_types(rows.dtype, torch.float32)), None
    elif is_filtered(sampling):
        columns, scores = _survivors(rows, sessions, vocabulary, k)
    else:
        spread = _spread(rows, vocabulary)
        columns, scores = leaders(spread, _heat(sessions, rows.device), _keys(sessions, rows.device),
                                  min(k + RUNNERS_UP, spread.shape[1]))
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
        return ids[:, :k], best[:, :k].to(torch.float32)  # no equals: their order needs no care
    by_id = ids.argsort(1)
    order = by_id.gather(1, best.gather(1, by_id).sort(dim=1, descending=True, stable=True).indices)[:, :k]
    return ids.gather(1, order), best.gather(1, order).to(torch.float32)


Children = tuple[Sequence[int], Sequence[float]]  # tokens of one row, best first, and their log scores


def ranked(logits: torch.Tensor, sessions: Sequence[ChoiceRows], k: int, vocabulary: torch.Tensor | None = None,
           race: Race | None = None) -> list[Children]:
    """The results of ``rank`` for each row of all ``sessions``, concatenated. race: made for ``vocabulary``."""
    told: dict[int, Children] = {}
    sampled = [session for session in sessions if not session.sampling.greedy]
    won = race(logits, sampled, k + RUNNERS_UP) if race is not None and sampled else None
    left = [session for session in sessions if won is None or session.sampling.greedy]
    if won is not None:
        begins = range(0, len(won.tokens), k + RUNNERS_UP)
        told |= {row: (won.tokens[begin : begin + k], won.scores[begin : begin + k])
                 for row, begin in zip(_rows_of(sampled), begins, strict=True)}
        left += _unsure(sampled, won)
    for few in _alike(left, logits, vocabulary is not None):
        tokens, scores = _rank(logits, few, k, vocabulary)
        told |= zip(_rows_of(few), zip(tokens.tolist(), scores.tolist(), strict=True), strict=True)
    return [told[row] for session in sessions for row in session.rows]


def greatest(logits: torch.Tensor) -> list[int]:
    """The column of the greatest number of each row of ``logits`` [R, V], the first of equals; of one that is none, its
    own."""
    columns: list[int] = _argmax(logits).cpu().tolist()
    return columns


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    if logits.device.type != "cpu":
        return logits.argmax(1)
    # numpy's argmax is vectorised, torch's is not: ten times faster on a CPU. Both take the first of equals.
    wide = logits if logits.dtype in (torch.float32, torch.float64) else logits.to(torch.float32)
    return torch.from_numpy(wide.detach().numpy().argmax(1))


def _race(logits: torch.Tensor, sessions: Sequence[ChoiceRows]) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``_survivors`` gives, of sampled sessions without a filter: of those that could be best."""
    rows = _gathered(logits, sessions)
    return leaders(rows, _heat(sessions, rows.device), _keys(sessions, rows.device), 1)


def _own_rows(logits: torch.Tensor, session: ChoiceRows, vocabulary: torch.Tensor | None) -> torch.Tensor:
    """[r, V]: a session's rows after penalties: float64 where there are any, else a view of ``logits``."""
    if session.adjusted:
        return adjusted_rows(logits, session, vocabulary)
    return logits[session.rows.start:session.rows.stop]


def _gathered(logits: torch.Tensor, sessions: Sequence[ChoiceRows],
              vocabulary: torch.Tensor | None = None) -> torch.Tensor:
    """[r, V]: the rows of sessions that are all adjusted or all not (see ``_own_rows``)."""
    if len(sessions) == 1:
        return _own_rows(logits, sessions[0], vocabulary)
    if sessions[0].adjusted:
        return torch.cat([adjusted_rows(logits, s, vocabulary) for s in sessions])
    return _picked(logits, _rows_of(sessions))


def _rows_of(sessions: Sequence[ChoiceRows]) -> list[int]:
    return [row for s in sessions for row in s.rows]


def _spread(rows: torch.Tensor, vocabulary: torch.Tensor | None) -> torch.Tensor:
    """``rows`` [r, V'] over the target's ids up to the greatest of ``vocabulary``, -inf where it has none."""
    if vocabulary is None:
        return rows
    whole = rows.new_full((len(rows), int(vocabulary.max()) + 1), -math.inf)
    return whole.index_copy_(1, vocabulary, rows)


def _heat(sessions: Sequence[ChoiceRows], device: torch.device) -> torch.Tensor:
    """float64 [r]: the temperature of each row."""
    return sent([max(s.sampling.temperature, 1e-300) for s in sessions for _ in s.rows], device, torch.float64)


def _keys(sessions: Sequence[ChoiceRows], device: torch.device) -> torch.Tensor:
    """int64 [r]: what each row's noise is made from."""
    return row_keys([s.sampling.seed for s in sessions for _ in s.rows],
                    [position for s in sessions for position in s.positions], device)


def _packs(sessions: Sequence[ChoiceRows], most: int) -> list[list[ChoiceRows]]:
    """The sessions in groups of at most ``most`` rows; one with more rows is split."""
    packs: list[list[ChoiceRows]] = []
    room = 0
    for session in sessions:
        for part in session.split(most):
            if len(part.rows) > room:
                packs.append([])
                room = most
            packs[-1].append(part)
            room -= len(part.rows)
    return packs


def adjusted_rows(logits: torch.Tensor, session: ChoiceRows, vocabulary: torch.Tensor | None = None) -> torch.Tensor:
    """float64 [r, V]: one session's rows of ``logits`` [R, V] after penalties, bias, min_tokens and what is allowed; a
    copy. ``vocabulary``: int64 [V] the target's token id of each column; None: its own."""
    sampling = session.sampling
    rows = logits[session.rows.start:session.rows.stop].to(torch.float64, copy=True)
    if not session.adjusted:
        return rows
    columns = Columns(rows.shape[1], vocabulary, rows.device)
    if session.penalised:
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
    scaled, columns = survivors(rows, _heat(sessions, rows.device), samplings, at_least)
    ids = columns if vocabulary is None else vocabulary[columns]
    return columns, noise(_keys(sessions, rows.device), ids).add_(scaled)


def _lowest_winner(columns: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """int64 [R]: the column of each row's best score, the lowest of equals; 0: none is above -inf."""
    best = scores.amax(1, keepdim=True)
    return columns.masked_fill(scores < best, torch.iinfo(torch.int64).max).masked_fill_(~(best > -math.inf), 0).amin(1)
