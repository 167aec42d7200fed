"""Log probabilities: of tokens that were chosen, and of a prompt's tokens. torch, no model.

Rules:
1. Mode "raw": of the model's own logits. "tempered": after penalties, bias, forbidden tokens and the temperature.
   "processed": also after top-k, top-p and min-p, so the probability with which the token was drawn. Greedy tokens
   have no temperature and no filters.
2. They are natural logarithms in float64, and do not depend on the other rows.
3. Logits of a prompt are computed a few rows at a time, so memory is bounded, however long the prompt is.

R rows · V vocabulary
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from slipstream.choosing.logits import best_of_rows, is_filtered, survivors
from slipstream.choosing.sampling import ChoiceRows, adjusted_rows, log_probabilities, rows_at_once
from slipstream.choosing.transfer import to_device
from slipstream.protocol.requests import LogprobsMode, PromptScores, Sampling, TokenLogprob

PROMPT_ROWS_CPU, PROMPT_ROWS = 16, 64  # computed at once


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """Some of a session's rows, and the tokens that were chosen there."""

    session: ChoiceRows
    nodes: Sequence[int]  # numbers of the session's rows, from 0
    tokens: Sequence[int]
    top: int  # of the best tokens, told with each
    mode: LogprobsMode

    @property
    def has_filters(self) -> bool:
        """Whether its log probabilities are behind filters."""
        sampling = self.session.sampling
        return self.mode == "processed" and not sampling.greedy and is_filtered(sampling)

    @property
    def temperature(self) -> float | None:
        """What its logits are divided by, where nothing else changes them; None: something does."""
        sampling = self.session.sampling
        if self.mode == "raw":
            return 1.0
        if self.session.adjusted or self.has_filters:
            return None
        return 1.0 if sampling.greedy else max(sampling.temperature, 1e-300)

    @property
    def filtered_alone(self) -> bool:
        """Whether its tokens alone are told, behind filters, and nothing else changes its logits. Not with the best
        tokens: the order of equal ones would depend on how many candidates the rows beside it have."""
        return self.has_filters and self.top == 0 and not self.session.adjusted

    def own_scores(self, logits: torch.Tensor) -> torch.Tensor:
        """float64 [r, V]: the log probabilities in its rows, for themselves."""
        rows, session, nodes = logits[self.rows()], self.session, self.nodes
        own = replace(session, rows=range(len(nodes)), positions=[session.positions[node] for node in nodes],
                      num_output=[session.num_output[node] for node in nodes],
                      paths=[session.paths[node] for node in nodes],
                      allowed=None if session.allowed is None else session.allowed[list(nodes)])
        if self.mode == "processed" and not own.sampling.greedy:
            return log_probabilities(rows, own)
        temperature = 1.0 if own.sampling.greedy else own.sampling.temperature
        return torch.log_softmax(adjusted_rows(rows, own) / max(temperature, 1e-300), 1)

    def rows(self) -> list[int]:
        """Of the logits."""
        return [self.session.rows.start + node for node in self.nodes]


def chosen_logprobs(logits: torch.Tensor, sessions: Sequence[ScoredRows]) -> list[list[TokenLogprob]]:
    """What each session is told of its tokens. logits: [R, V]. Rows that no penalty, mask or filter changes are
    computed together, a bounded number at once; so are rows that filters alone change."""
    told: list[list[TokenLogprob]] = [[] for _ in sessions]
    filtered = list[tuple[int, int, Sampling, int]]()  # session, row, sampling, token
    together = defaultdict[int, list[tuple[int, int, float, int]]](list)  # by top: session, row, temperature, token
    for place, session in enumerate(sessions):
        if session.filtered_alone:
            filtered += [(place, row, session.session.sampling, token)
                         for row, token in zip(session.rows(), session.tokens, strict=True)]
        elif (temperature := session.temperature) is None:
            told[place] = _token_logprobs(session.own_scores(logits), session.tokens, session.top)
        else:
            together[session.top] += [(place, row, temperature, token)
                                      for row, token in zip(session.rows(), session.tokens, strict=True)]
    most, device = rows_at_once(logits), logits.device
    for top, asked in together.items():
        for first in range(0, len(asked), most):
            places, rows, temperatures, tokens = zip(*asked[first : first + most], strict=True)
            scaled = logits.index_select(0, to_device(rows, device)).to(torch.float64)
            if any(temperature != 1.0 for temperature in temperatures):
                scaled /= to_device(temperatures, device, torch.float64)[:, None]
            for place, token in zip(places, _token_logprobs(torch.log_softmax(scaled, 1), tokens, top), strict=True):
                told[place].append(token)
    for first in range(0, len(filtered), most):
        places, rows, samplings, tokens = zip(*filtered[first : first + most], strict=True)
        logged = _filtered_logprobs(logits.index_select(0, to_device(rows, device)), samplings, tokens)
        for place, value in zip(places, logged, strict=True):
            told[place].append(TokenLogprob(value))
    return told


def _filtered_logprobs(rows: torch.Tensor, samplings: Sequence[Sampling], tokens: Sequence[int]) -> list[float]:
    """Of each row's token, among those that its filters left. rows: [R, V]."""
    temperatures = to_device([max(sampling.temperature, 1e-300) for sampling in samplings], rows.device, torch.float64)
    values, columns = survivors(rows, temperatures, samplings)
    others = columns != to_device(tokens, rows.device)[:, None]
    logged: list[float] = torch.log_softmax(values, 1).masked_fill_(others, -math.inf).amax(1).tolist()
    return logged


def prompt_scores(states: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor], tokens: Sequence[int], start: int,
                  top: int) -> PromptScores:
    """Log probabilities and ranks of a prompt's ``tokens``, the first of which is at position ``start``, and the
    ``top`` best tokens at each. states: [R, H], for each token the state before it; head: [r, H] -> logits [r, V]."""
    logged, ranks, ids, best = zip(*_parts(states, head, tokens, top), strict=True)
    return PromptScores(start, *(tuple(torch.cat(part).tolist()) for part in (logged, ranks, ids, best)))


def _parts(states: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor], tokens: Sequence[int],
           top: int) -> Iterator[tuple[torch.Tensor, ...]]:
    step = PROMPT_ROWS_CPU if states.device.type == "cpu" else PROMPT_ROWS
    for first in range(0, len(tokens), step):
        logits = head(states[first : first + step])
        scores = torch.log_softmax(logits.to(torch.float64), 1)
        own = scores.gather(1, to_device(tokens[first : first + step], states.device)[:, None])
        best, ids = best_of_rows(scores, min(top, scores.shape[1]))
        yield own[:, 0], (scores > own).sum(1) + 1, ids.flatten(), best.flatten()


def _token_logprobs(scores: torch.Tensor, chosen: Sequence[int], top: int) -> list[TokenLogprob]:
    """scores: log probabilities, float64 [R, V]; tokens of -inf cannot be chosen, so they are no alternatives."""
    own = scores.gather(1, to_device(chosen, scores.device)[:, None])
    if top == 0:
        return [TokenLogprob(value) for value in own[:, 0].tolist()]
    values, ids = best_of_rows(scores, min(top, scores.shape[1]))
    told: list[list[float]] = torch.cat([own, values, ids], 1).tolist()  # one copy; ids are exact in float64
    width = values.shape[1]
    return [TokenLogprob(row[0], tuple((int(token), logged) for token, logged
                                       in zip(row[1 + width :], row[1 : 1 + width], strict=True)
                                       if logged > -math.inf)) for row in told]
