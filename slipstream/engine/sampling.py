"""Choosing tokens from logits, exactly and keyed: which token stands at a position is a function of the logits there,
the tokens before it, and the request's ``Sampling``; of nothing else.

Rules:
1. The order is: penalties, logit bias, min_tokens (``penalties.py``), temperature, top-k, top-p, min-p, keyed noise,
   argmax. Filters look at the tempered distribution; top-p counts the mass that top-k left.
2. Every filter is a threshold on probability, so tokens of equal probability live or die together: no filter depends
   on the order in which a sort happens to leave them.
3. Noise is Gumbel noise, a pure function of (seed, absolute position, token id), so argmax(logits / T + noise) over the
   survivors is a sample of the filtered softmax, and a drafter that knows the seed ranks with the very same noise
   (Daliri, Musco, Suresh, arXiv 2408.07978).
4. A row's choice does not depend on the other rows of the call: no sum runs over a shape that they could change.
5. Equal scores: the lowest token id wins.

Arithmetic is float64 wherever a row is sampled or adjusted. The integer half of the noise is the same on every device;
the two logarithms after it may differ in the last unit. It knows nothing about trees, sessions or models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from slipstream.engine.penalties import Columns, TokenHistory, bias, forbid_stops, penalise
from slipstream.messages import Sampling
from slipstream.requests import TokenLogprob

__all__ = ["ChoiceRows", "TokenHistory", "adjusted", "choose", "coins", "logprobs", "noise", "probabilities", "rank"]

COINS = 0x5851F42D4C957F2D  # apart from the seed of the noise, which decides the choice
GOLDEN = 0x9E3779B97F4A7C15
STRIDE = 0xD1342543DE82EF95
FIRST_WIDTH = 64  # candidates looked at before the search for survivors widens
ROWS_AT_ONCE_CPU, ROWS_AT_ONCE = 4, 64  # a CPU works in its cache, a GPU likes few launches; both bound float64 copies


def noise(seed: int, positions: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Gumbel noise, float64 [R, K], for tokens ``token_ids`` (int64 [R, K] or [1, K]) at ``positions`` (int64 [R]).

    ``seed`` is an unsigned 64-bit number. The hash is two keyed rounds of SplitMix64's finaliser (Steele, Lea, Flood,
    2014); its top 52 bits become a uniform number strictly between 0 and 1.
    """
    keys = _mix(_mix(torch.tensor([_signed(seed + GOLDEN)], device=positions.device)) + positions * _signed(GOLDEN))
    return _gumbel(keys, token_ids)


def _gumbel(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    bits = _mix(token_ids * _signed(STRIDE) + keys[:, None]).bitwise_right_shift_(12).bitwise_and_((1 << 52) - 1)
    uniform = bits.mul_(2).add_(1).to(torch.float64).mul_(2.0**-53)
    return uniform.log_().neg_().log_().neg_()


def _mix(words: torch.Tensor) -> torch.Tensor:
    """The finaliser, in place."""
    # torch shifts int64 arithmetically; the mask makes the shift logical.
    words.bitwise_xor_((words >> 30).bitwise_and_((1 << 34) - 1)).mul_(_signed(0xBF58476D1CE4E5B9))
    words.bitwise_xor_((words >> 27).bitwise_and_((1 << 37) - 1)).mul_(_signed(0x94D049BB133111EB))
    return words.bitwise_xor_((words >> 31).bitwise_and_((1 << 33) - 1))


def _signed(word: int) -> int:
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word


@dataclass(frozen=True, slots=True)
class ChoiceRows:
    """One session's rows of the logits. All sequences have one entry a row."""

    sampling: Sampling
    rows: range  # of the logits
    positions: Sequence[int]  # absolute, of the token to be chosen
    num_output: Sequence[int]  # answer tokens that stand before it
    history: TokenHistory | None  # of what is committed; needed with penalties
    paths: Sequence[Sequence[int]]  # draft tokens below the root down to this row; the root's is empty

    @property
    def plain_greedy(self) -> bool:
        """Whether the choice is the argmax of the logits as they are."""
        return self.sampling.greedy and not self.sampling.logit_bias and not self.sampling.path_dependent

    def split(self, most: int) -> list[ChoiceRows]:
        """The same rows in parts of at most ``most``."""
        if len(self.rows) <= most:
            return [self]
        cuts = [slice(first, first + most) for first in range(0, len(self.rows), most)]
        return [replace(self, rows=self.rows[cut], positions=self.positions[cut], num_output=self.num_output[cut],
                        paths=self.paths[cut]) for cut in cuts]


def choose(logits: torch.Tensor, sessions: Sequence[ChoiceRows]) -> list[int]:
    """The chosen token of every row of ``logits`` [R, V]; the sessions' rows tile 0 .. R."""
    chosen = torch.zeros(len(logits), dtype=torch.int64)
    plain = [row for s in sessions if s.plain_greedy for row in s.rows]
    if plain:
        chosen[plain] = _argmax(logits if len(plain) == len(logits) else logits[plain])
    sampled: dict[bool, list[ChoiceRows]] = {True: [], False: []}
    for session in sessions:
        if not session.sampling.greedy:
            sampled[_filtered(session.sampling)].append(session)
        elif not session.plain_greedy:
            chosen[list(session.rows)] = _argmax(_penalised(logits, session, None))
    for filtered, group in sampled.items():
        for few in _packs(group, ROWS_AT_ONCE_CPU if logits.device.type == "cpu" else ROWS_AT_ONCE):
            rows = [row for s in few for row in s.rows]
            columns, scores = _survivors(torch.cat([_penalised(logits, s, None) for s in few]), few, None, filtered)
            winners = _lowest_winner(columns, scores) if filtered else _argmax(scores)
            chosen[rows] = winners.cpu()
    return [int(token) for token in chosen.tolist()]


def adjusted(logits: torch.Tensor, session: ChoiceRows, vocabulary: torch.Tensor | None = None) -> torch.Tensor:
    """Scores float64 [r, V] of one session's rows of ``logits`` [R, V], noise included, -inf for what cannot be chosen.

    The choice is their argmax. ``vocabulary`` (int64 [V]) gives the target's token id of each column; None: its own.
    """
    penalised = _penalised(logits, session, vocabulary)
    if session.sampling.greedy:
        return penalised
    columns, scores = _survivors(penalised, [session], vocabulary, _filtered(session.sampling))
    return torch.full_like(penalised, -math.inf).scatter_(1, columns.expand_as(scores), scores)


def probabilities(logits: torch.Tensor, session: ChoiceRows) -> torch.Tensor:
    """float64 [r, V]: what one sampled session's rows of ``logits`` [R, V] are chosen by, after penalties, bias,
    temperature and filters."""
    assert not session.sampling.greedy
    scaled = _penalised(logits, session, None).div_(max(session.sampling.temperature, 1e-300))
    if not _filtered(session.sampling):
        return torch.softmax(scaled, 1)
    values, columns = _filter(torch.log_softmax(scaled, 1), [session.sampling] * len(scaled), 1)
    return torch.zeros_like(scaled).scatter_(1, columns, torch.softmax(values, 1))


def coins(session: ChoiceRows) -> list[float]:
    """Uniform numbers in (0, 1), one a row: a function of seed and position, independent of the noise."""
    positions = torch.tensor(list(session.positions), dtype=torch.int64)
    gumbel = noise((session.sampling.seed + COINS) % (1 << 64), positions, torch.zeros(1, 1, dtype=torch.int64))
    values: list[float] = torch.exp(-torch.exp(-gumbel))[:, 0].tolist()
    return values


def rank(logits: torch.Tensor, session: ChoiceRows, k: int,
         vocabulary: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``k`` best tokens of one session's rows and their log scores: target ids int64 [r, k], float32 [r, k].

    Greedy: log_softmax of the adjusted logits. Sampled: log_softmax of logits / T + noise over the survivors, so that
    the first one is what this model would choose; ranks without a survivor score -inf. ``k`` is at most V.
    """
    if session.sampling.greedy:
        # A draft's greedy ranking is its hot path: float32 unless something must be adjusted.
        scores = (logits[session.rows.start:session.rows.stop].to(torch.promote_types(logits.dtype, torch.float32))
                  if session.plain_greedy else _penalised(logits, session, vocabulary))
        columns = torch.arange(scores.shape[1], device=logits.device)[None]
    else:
        penalised = _penalised(logits, session, vocabulary)
        columns, scores = _survivors(penalised, [session], vocabulary, _filtered(session.sampling), k)
    # A few more than k, so that equal scores at the edge are put in order of their ids, as the target's choice is.
    best, where = torch.log_softmax(scores, 1).topk(min(k + 8, scores.shape[1]), 1)
    columns = columns.expand_as(scores).gather(1, where)
    ids = columns if vocabulary is None else vocabulary[columns]
    by_id = ids.argsort(1)
    order = by_id.gather(1, best.gather(1, by_id).sort(dim=1, descending=True, stable=True).indices)[:, :k]
    return ids.gather(1, order), best.gather(1, order).to(torch.float32)


def logprobs(logits: torch.Tensor, chosen: Sequence[int], top: int) -> list[TokenLogprob]:
    """Natural-log probabilities of ``chosen`` (one a row of ``logits`` [R, V]) and of the ``top`` best tokens, before
    penalties, temperature and filters."""
    scores = torch.log_softmax(logits.to(torch.float64), 1)
    own = scores.gather(1, torch.tensor(chosen, device=logits.device)[:, None])[:, 0].tolist()
    if top == 0:
        return [TokenLogprob(value) for value in own]
    best, ids = scores.topk(min(top, scores.shape[1]), 1)
    return [TokenLogprob(value, tuple(zip(row_ids, row_best, strict=True)))
            for value, row_ids, row_best in zip(own, ids.tolist(), best.tolist(), strict=True)]


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    if logits.device.type != "cpu":
        return logits.argmax(1).cpu()
    # numpy's argmax is vectorised, torch's is not: ten times faster on a CPU. Both take the first of equals.
    wide = logits if logits.dtype in (torch.float32, torch.float64) else logits.to(torch.float32)
    return torch.from_numpy(wide.detach().numpy().argmax(1))


def _filtered(sampling: Sampling) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0


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


def _penalised(logits: torch.Tensor, session: ChoiceRows, vocabulary: torch.Tensor | None) -> torch.Tensor:
    """float64 [r, V]: the session's rows after penalties, logit bias and min_tokens; a copy."""
    sampling = session.sampling
    rows = logits[session.rows.start:session.rows.stop].to(torch.float64, copy=True)
    if not sampling.path_dependent and not sampling.logit_bias:
        return rows
    columns = Columns(rows.shape[1], vocabulary, rows.device)
    if TokenHistory.of(sampling) is not None:
        assert session.history is not None, "penalties need a TokenHistory"
        penalise(rows, columns, sampling, session.history, session.paths)
    if sampling.logit_bias:
        bias(rows, columns, sampling.logit_bias)
    forbid_stops(rows, columns, sampling, session.num_output)
    return rows


def _survivors(penalised: torch.Tensor, sessions: Sequence[ChoiceRows], vocabulary: torch.Tensor | None, filtered: bool,
               at_least: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns int64 [R, K] (or [1, V]) and scores float64 [R, K] = logits / T + noise; -inf for what was filtered."""
    device = penalised.device
    samplings = [s.sampling for s in sessions for _ in s.rows]
    temperature = torch.tensor([max(s.temperature, 1e-300) for s in samplings], dtype=torch.float64, device=device)
    scaled = penalised.div_(temperature[:, None])
    if filtered:
        scaled, columns = _filter(torch.log_softmax(scaled, 1), samplings, at_least)
    else:
        columns = torch.arange(scaled.shape[1], device=device)[None]
    ids = columns if vocabulary is None else vocabulary[columns]
    parts, first = [], 0
    for session in sessions:
        rows = slice(first, first + len(session.rows))
        first = rows.stop
        parts.append(noise(session.sampling.seed, torch.tensor(list(session.positions), device=device),
                           ids if len(ids) == 1 else ids[rows]))
    return columns, torch.cat(parts).add_(scaled)


def _filter(log_probs: torch.Tensor, samplings: Sequence[Sampling], at_least: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The best log_probs (float64 [R, V]) of each row, -inf where filtered, and their columns: both [R, K].

    Survivors are a prefix of the descending order, so the search looks at ever more candidates until every row's
    prefix ends inside them; a whole sort is the last resort.
    """
    vocab = log_probs.shape[1]

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=log_probs.device)[:, None]

    limits = [min(s.top_k or vocab, vocab) for s in samplings]
    top_k = column(limits).to(torch.int64)
    top_p = column([s.top_p if s.top_p < 1.0 else math.inf for s in samplings])
    min_p = column([math.log(s.min_p) if s.min_p > 0 else -math.inf for s in samplings])
    width = max(FIRST_WIDTH, at_least, *(limit + 1 for limit in limits if limit < vocab))
    while True:
        values, columns = log_probs.topk(min(width, vocab), 1)
        inside_k = (values > -math.inf) & (values >= _at(values, top_k - 1))
        keep = inside_k & _nucleus(values, inside_k, top_p, top_k < vocab) & (values >= values[:, :1] + min_p)
        # With top-k, all that it leaves must be in view: it is the mass that top-p counts.
        cut = keep[:, -1:] | (inside_k[:, -1:] & (top_k < vocab))
        if width >= vocab or not bool(cut.any()):
            return values.masked_fill(~keep, -math.inf), columns
        width = width * 8 if width < 4096 else vocab


def _at(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """[R, 1]: ``values`` [R, K] at ``index`` [R, 1]; -inf where that is not among the K."""
    seen = values.shape[1]
    return values.gather(1, index.clamp(max=seen - 1)).masked_fill(index >= seen, -math.inf)


def _nucleus(values: torch.Tensor, inside_k: torch.Tensor, top_p: torch.Tensor, limited: torch.Tensor) -> torch.Tensor:
    """bool [R, K]: the smallest prefix of descending log probs whose mass reaches ``top_p``, and what equals its last.

    The mass is that of what top-k left; where it did not look (not ``limited``) the softmax has made it one.
    """
    probs = values.exp().masked_fill_(~inside_k, 0.0)
    total = probs.cumsum(1)
    needed = (total - probs) < top_p * torch.where(limited, total[:, -1:], 1.0)
    return values >= values.masked_fill(~(needed & inside_k), math.inf).amin(1, keepdim=True)


def _lowest_winner(columns: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """int64 [R]: the column of each row's best score, the lowest of equals, though the columns are in any order."""
    beaten = scores < scores.amax(1, keepdim=True)
    return columns.masked_fill(beaten, torch.iinfo(torch.int64).max).amin(1)
