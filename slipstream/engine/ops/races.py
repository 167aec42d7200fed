"""Finds the best columns of rows of logits with our own Triton kernels, on GPUs that have Triton; ``choosing`` does it
with torch elsewhere.

Rules:
1. ``choosing`` is the specification: a race gives its results. The integers of the noise are equal; logarithms may
   differ in the last digit, so two scores that are that close could change places.
2. A race supports rows of sampled sessions whose logits are not adjusted. Filtered rows it supports for one winner
   only, and not if top-p follows a top-k above ``GREATEST``, nor at temperatures below ``COLD``, where noise is lost
   beside a logit. It marks all other rows as not sure. Whether a row is supported depends on its session, the number of
   winners and the model, never on the other rows.
3. Also not sure are rows without a possible token, rows with NaN, and filtered rows where none of the ``CANDIDATES``
   best scores survives, or one survives by so little that the order of a sum could decide.
4. Numbers go to the device in one copy and come back in one; the host does not wait in between.
5. Whether these kernels serve is decided as for a layer's (``fused``): once, by a trial in another process and one in
   this process, which compile all kernels that are launched later.

It knows nothing about models, trees or where logits come from.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.choosing.logits import is_filtered
from slipstream.choosing.noise import row_keys
from slipstream.choosing.sampling import RUNNERS_UP, ChoiceRows, Winners, choose, rank, ranked
from slipstream.choosing.transfer import to_device
from slipstream.engine.model import ModelConfig
from slipstream.engine.ops.fused import block, kernels_serve, triton_unsupported_reason
from slipstream.engine.proof import Proof, rejection_reason
from slipstream.protocol.requests import Sampling

PART = 1024  # columns of one program
MOST = 32  # tokens of a row that can be found
MOST_DRAWN = MOST - RUNNERS_UP
ROW_PARAMS = 6  # numbers that describe a row, see ``pack_row_params``
CANDIDATES = 16  # best scores to which filters are applied
GREATEST = 64  # logits that are sorted for top-k with top-p
EVERY = 1 << 62  # a top-k that leaves all tokens
FILTERS: tuple[dict[str, Any], ...] = (
    {"top_p": 0.9}, {"top_k": 1000}, {"min_p": 1e-4}, {"top_p": 0.95, "min_p": 1e-5},
    {"top_k": 50, "top_p": 0.9})  # filters of the trial, which leave many tokens
COLD = 1e-4  # the lowest temperature of filtered rows
COLDEST = 1e-300  # the lowest divisor, as in ``choosing``
TRIAL_ROWS, TRIAL_CHILDREN = (1, 5), 8
NEAR = 1e-5  # allowed difference of logarithms whose sums were float32
CPU = torch.device("cpu")


def race_for(choice: str, config: ModelConfig, device: torch.device, vocabulary: torch.Tensor | None = None,
             proof: Proof = rejection_reason) -> DeviceRace | None:
    """The race for a model's or a head's logits; None: torch chooses. choice: as in ``ModelSection.kernels``;
    vocabulary: int64 [V], the token ids of the columns; None: a column for each of ``config``'s tokens."""
    width = config.vocab_size if vocabulary is None else len(vocabulary)

    def run_trial() -> str:
        race, sized = DeviceRace(race_kernels(), width, vocabulary), replace(config, vocab_size=width)
        return proof("choosing", sized, torch.float32, device) or difference(race, device)

    serve = kernels_serve(choice, device, "choice of tokens", triton_unsupported_reason(device), run_trial)
    return DeviceRace(race_kernels(), width, vocabulary) if serve else None


def race_kernels() -> Any:
    """The module with the kernels. Raises ImportError if Triton is not installed."""
    return importlib.import_module("slipstream.engine.ops.race_kernels")


def supports(session: ChoiceRows, filtered: bool, width: int) -> bool:
    """Whether a race of ``width`` columns supports a session's rows (rule 2). filtered: whether it supports filtered
    rows in this call."""
    sampling = session.sampling
    if sampling.greedy or session.adjusted:
        return False
    fits = sampling.top_k <= GREATEST or not has_joint_filters(sampling, width)
    return not is_filtered(sampling) or (filtered and fits and sampling.temperature >= COLD)


def has_joint_filters(sampling: Sampling, width: int) -> bool:
    """Whether top-p counts only the mass that top-k left."""
    return 0 < sampling.top_k < width and sampling.top_p < 1.0


class DeviceRace:
    """A ``sampling.Race`` of float32 logits; and the best children of rows without noise."""

    __slots__ = ("_kernels", "_parts", "vocabulary", "width")

    def __init__(self, kernels: Any, width: int, vocabulary: torch.Tensor | None = None) -> None:
        """kernels: an object with the functions of ``race_kernels``. width: columns. vocabulary: int64 [width], the
        columns' token ids; None: column numbers are ids. Raises ValueError if they do not ascend."""
        if vocabulary is not None and bool((vocabulary[1:] <= vocabulary[:-1]).any()):
            raise ValueError("the tokens of these columns do not ascend")
        self._kernels, self.width, self.vocabulary = kernels, width, vocabulary
        self._parts = -(-width // PART)

    def __call__(self, logits: torch.Tensor, sessions: Sequence[ChoiceRows], most: int) -> Winners | None:
        """See ``sampling.Race``."""
        supported = [supports(session, most == 1 and self.vocabulary is None, self.width) for session in sessions]
        taken = [session for session, is_taken in zip(sessions, supported, strict=True) if is_taken]
        count = sum(len(session.rows) for session in taken)
        if not count or most > MOST or logits.dtype != torch.float32 or logits.shape[1] != self.width:
            return None
        logits, row_params = logits.contiguous(), to_device(_pack_sessions(taken), logits.device)
        samplings = [session.sampling for session in taken]
        top_k = max((sampling.top_k for sampling in samplings if has_joint_filters(sampling, self.width)), default=0)
        found = (self._survivors(logits, row_params, count, top_k) if any(map(is_filtered, samplings)) else
                 self._best(logits, row_params, None, count, most, most))
        results: NDArray[np.int64] = found.cpu().numpy()
        known = np.repeat(supported, [len(session.rows) for session in sessions])
        tokens, scores = np.zeros((len(known), most), np.int64), np.zeros((len(known), most))
        tokens[known], scores[known] = results[0], results[1].view(np.float64)
        known &= ~np.isnan(scores[:, 0])
        return Winners(tokens.ravel().tolist(), scores.ravel().tolist(), known.tolist())

    def children(self, logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As the function ``children``, for the race's own vocabulary."""
        if k + RUNNERS_UP > MOST or k > self.width or logits.dtype != torch.float32:
            return children(logits, k, self.vocabulary)
        sums = logits.new_empty(len(logits), self._parts, 2)
        found = self._best(logits.contiguous(), None, sums, len(logits), min(k + RUNNERS_UP, self.width), k, False)
        return found[0], found[1].view(torch.float64)

    def drawn(self, logits: torch.Tensor, row_params: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``children``, under noise, without filters. row_params: int64 [R, ROW_PARAMS], see ``pack_row_params``; k:
        at most ``MOST_DRAWN`` and ``width``."""
        found = self._best(logits.contiguous(), row_params, None, len(row_params), min(k + RUNNERS_UP, self.width), k)
        return found[0], found[1].view(torch.float64)

    def _best(self, logits: torch.Tensor, row_params: torch.Tensor | None, sums: torch.Tensor | None, rows: int,
              most: int, wanted: int, noised: bool = True, capacity: int = MOST) -> torch.Tensor:
        """int64 [2, R, wanted]: tokens, and the bits of their log shares (float64). row_params: see
        ``pack_row_params``; sums: see ``part_winners``; capacity: at least ``most``; each value is a compilation of its
        own."""
        assert logits.shape[1] == self.width and most <= capacity
        parts, places = self._parts, block(self._parts * capacity)
        keys = logits.new_empty(rows, parts, most, dtype=torch.int64)
        columns = logits.new_empty(rows, parts, most, dtype=torch.int32)
        found = logits.new_empty(2, rows, wanted, dtype=torch.int64)
        self._kernels.part_winners[(rows, parts)](logits, row_params, self.vocabulary, keys, columns, sums, most,
                                                  noised, self.width, parts, PART, num_warps=8)
        self._kernels.winners[(rows,)](keys, columns, None if noised else sums, self.vocabulary, found[0],
                                       found[1].view(torch.float64), most, wanted, parts, block(parts), places,
                                       capacity, num_warps=8 if places > 1024 else 4)
        return found

    def _survivors(self, logits: torch.Tensor, row_params: torch.Tensor, rows: int, top_k: int) -> torch.Tensor:
        """As ``_best`` with one winner, among the survivors of the filters. top_k: the largest top-k that has a top-p
        beside it; 0: there is none."""
        parts, most = self._parts, CANDIDATES
        sums = logits.new_empty(rows, parts, 2)
        masses = logits.new_empty(rows, parts, most + 2, dtype=torch.float64)
        counts = logits.new_empty(rows, parts, most + 2, dtype=torch.int64)
        greatest = None
        if top_k:
            greatest = self._best(logits, row_params, torch.empty_like(sums), rows, top_k, top_k, False, GREATEST)[0]
        tokens, shares = self._best(logits, row_params, sums, rows, most, most)
        found = logits.new_empty(2, rows, 1, dtype=torch.int64)
        self._kernels.part_masses[(rows, parts)](logits, row_params, sums, tokens, greatest, masses, counts, most,
                                                 top_k, self.width, parts, block(parts), PART, num_warps=8)
        self._kernels.first_survivor[(rows,)](logits, row_params, sums, tokens, shares.view(torch.float64), masses,
                                              counts, found[0], found[1].view(torch.float64), most, top_k > 0,
                                              self.width, parts, block(parts), CANDIDATES, num_warps=8)
        return found


def _pack_sessions(sessions: Sequence[ChoiceRows]) -> NDArray[np.int64]:
    return pack_row_params([session.sampling for session in sessions], [len(session.rows) for session in sessions],
                           [position for s in sessions for position in s.positions],
                           [row for session in sessions for row in session.rows])


def pack_row_params(samplings: Sequence[Sampling], counts: Sequence[int], positions: Sequence[int],
                    rows: Sequence[int]) -> NDArray[np.int64]:
    """int64 [R, ROW_PARAMS], for each row: the key of its noise, its row in the logits, its temperature, top-k, top-p
    and the logarithm of min-p; floats as their bits. A survivor of top-k has fewer than top-k likelier tokens, one of
    top-p less than that mass above it. counts: the number of rows of each sampling."""
    keys = row_keys([s.seed for s, count in zip(samplings, counts, strict=True) for _ in range(count)], positions, CPU)
    temperatures, top_p, min_p = np.repeat(np.array([*map(_floats, samplings)]), counts, 0).view(np.int64).T
    top_k = np.repeat([sampling.top_k or EVERY for sampling in samplings], counts)
    return np.stack((keys.numpy(), np.array(rows), temperatures, top_k, top_p, min_p), 1)


def _floats(sampling: Sampling) -> tuple[float, float, float]:
    return (max(sampling.temperature, COLDEST), sampling.top_p if sampling.top_p < 1.0 else math.inf,
            math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf)


def children(logits: torch.Tensor, k: int, vocabulary: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The k best tokens of each plain greedy row: ids int64 [R, k], and log scores float64 [R, k], at most 0. The host
    does not wait, so a graph can capture it."""
    ids, scores = rank(logits, plain_rows(len(logits)), k, vocabulary)
    return ids.contiguous(), scores.double().clamp(max=0.0).contiguous()


def plain_rows(count: int) -> ChoiceRows:
    """``count`` greedy rows without penalties, bias or grammar."""
    return ChoiceRows(Sampling(), range(count), [0] * count, [0] * count, None, [()] * count)


def trial(width: int, device: torch.device) -> str:
    """``difference`` of two races of ``width`` columns: one of a whole vocabulary, one of a part of a larger one."""
    return (difference(DeviceRace(race_kernels(), width), device)
            or difference(DeviceRace(race_kernels(), width, 2 * torch.arange(width, device=device)), device))


@torch.inference_mode()
def difference(race: DeviceRace, device: torch.device) -> str:
    """How a race differs from torch's operations on random rows, in words; empty: it does not."""
    for rows in TRIAL_ROWS:
        for what, found, expected in compared(race, device, rows):
            if not bool(((found - expected).abs() <= NEAR).all()):
                return f"{what} of {rows} rows are not what torch's operations say"
    return ""


def compared(race: DeviceRace, device: torch.device, rows: int) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """For each result on ``rows`` random rows, many of whose logits are equal: its name, the race's value and torch's,
    float64."""
    rng, vocabulary = torch.Generator().manual_seed(rows), race.vocabulary
    logits = (32 * torch.randn(rows, race.width, generator=rng)).round().div(8).to(device)
    cuts, k = (range(rows // 2), range(rows // 2, rows)), min(TRIAL_CHILDREN, race.width)
    sessions = [ChoiceRows(Sampling(temperature=temperature, seed=rows), cut, cut, cut, None, [()] * len(cut))
                for temperature, cut in zip((0.6, 1.0), cuts, strict=True) if cut]
    expected = choose(logits, sessions) if vocabulary is None else [
        tokens[0] for tokens, _ in ranked(logits, sessions, 1, vocabulary)]
    yield "choices", _chosen(race, logits, sessions), torch.tensor(expected).double()
    if vocabulary is None:
        for filters in FILTERS:
            narrow = [replace(session, sampling=replace(session.sampling, **filters)) for session in sessions]
            expected = choose(logits, narrow)
            yield f"choices under {filters}", _chosen(race, logits, narrow), torch.tensor(expected).double()
    drawn = [ranked(logits, sessions, k, vocabulary, some) for some in (race, None)]
    ids, scores = rank(logits, plain_rows(rows), k, vocabulary)
    plain = race.children(logits, k)
    for place, what in enumerate(("tokens", "scores")):
        ours, theirs = (torch.tensor([row[place] for row in those]).double() for those in drawn)
        yield f"{what} under noise", ours, theirs
        yield what, plain[place].double().cpu(), (ids, scores)[place].double().cpu()


def _chosen(race: DeviceRace, logits: torch.Tensor, sessions: Sequence[ChoiceRows]) -> torch.Tensor:
    """float64 [R]: the race's choices, -1 where it is not sure."""
    won = race(logits, sessions, 1)
    assert won is not None
    return torch.tensor([token if sure else -1 for token, sure in zip(won.tokens, won.sure, strict=True)]).double()
