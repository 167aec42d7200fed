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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from slipstream.choosing.sampling import ChoiceRows, adjusted_rows, log_probabilities
from slipstream.choosing.transfer import to_device
from slipstream.protocol.requests import LogprobsMode, PromptScores, TokenLogprob

ROWS_AT_ONCE_CPU, ROWS_AT_ONCE = 16, 64


def chosen_logprobs(logits: torch.Tensor, session: ChoiceRows, nodes: Sequence[int], chosen: Sequence[int], top: int,
                    mode: LogprobsMode) -> list[TokenLogprob]:
    """The log probabilities of ``chosen`` and of the ``top`` best tokens at some ``nodes`` (numbers of the session's
    rows, from 0) of ``logits`` [R, V]. mode: see rule 1."""
    rows = logits[[session.rows.start + node for node in nodes]]
    if mode == "raw":
        return _token_logprobs(torch.log_softmax(rows.to(torch.float64), 1), chosen, top)
    own = replace(session, rows=range(len(nodes)), positions=[session.positions[node] for node in nodes],
                  num_output=[session.num_output[node] for node in nodes],
                  paths=[session.paths[node] for node in nodes],
                  allowed=None if session.allowed is None else session.allowed[list(nodes)])
    if mode == "processed" and not own.sampling.greedy:
        return _token_logprobs(log_probabilities(rows, own), chosen, top)
    temperature = 1.0 if own.sampling.greedy else own.sampling.temperature
    return _token_logprobs(torch.log_softmax(adjusted_rows(rows, own) / max(temperature, 1e-300), 1), chosen, top)


def prompt_scores(states: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor], tokens: Sequence[int], start: int,
                  top: int) -> PromptScores:
    """Log probabilities and ranks of a prompt's ``tokens``, the first of which is at position ``start``, and the
    ``top`` best tokens at each. states: [R, H], for each token the state before it; head: [r, H] -> logits [r, V]."""
    logged, ranks, ids, best = zip(*_parts(states, head, tokens, top), strict=True)
    return PromptScores(start, *(tuple(torch.cat(part).tolist()) for part in (logged, ranks, ids, best)))


def _parts(states: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor], tokens: Sequence[int],
           top: int) -> Iterator[tuple[torch.Tensor, ...]]:
    step = ROWS_AT_ONCE_CPU if states.device.type == "cpu" else ROWS_AT_ONCE
    for first in range(0, len(tokens), step):
        logits = head(states[first : first + step])
        scores = torch.log_softmax(logits.to(torch.float64), 1)
        own = scores.gather(1, to_device(tokens[first : first + step], states.device)[:, None])
        best = scores.topk(min(top, scores.shape[1]), 1)
        yield own[:, 0], (scores > own).sum(1) + 1, best.indices.flatten(), best.values.flatten()


def _token_logprobs(scores: torch.Tensor, chosen: Sequence[int], top: int) -> list[TokenLogprob]:
    """scores: log probabilities, float64 [R, V]; tokens of -inf cannot be chosen, so they are no alternatives."""
    own = scores.gather(1, to_device(chosen, scores.device)[:, None])[:, 0].tolist()
    if top == 0:
        return [TokenLogprob(value) for value in own]
    best, ids = scores.topk(min(top, scores.shape[1]), 1)
    return [TokenLogprob(value, tuple((token, logged) for token, logged in zip(row_ids, row_best, strict=True)
                                      if logged > -math.inf))
            for value, row_ids, row_best in zip(own, ids.tolist(), best.tolist(), strict=True)]
