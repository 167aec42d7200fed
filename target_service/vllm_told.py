"""What vLLM tells of tokens, in our words.

Rules:
1. Of a token that was chosen: its log probability and those of the best, without what could not be chosen.
2. Of a prompt: ``PromptScores`` of so many tokens that a message of them is small, one behind the other. vLLM counts a
   token's equals before it in its rank; where the alternatives tell better, they do.

It imports no vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from slipstream.protocol.requests import PromptScores, TokenLogprob

ENTRIES = 1 << 13  # log probabilities that one part of a prompt's scores holds


class Flat(Protocol):
    """vLLM's ``FlatLogprobs`` of a prompt: none of its first token; of each other one its own, then those of the best,
    one token behind the other."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


def chosen(tokens: Sequence[int], told: Sequence[Mapping[int, Any]] | None,
           wanted: int | None) -> tuple[TokenLogprob, ...]:
    """told: vLLM's entries of each of ``tokens``."""
    if wanted is None or not told:
        return ()
    found = list[TokenLogprob]()
    for token, place in zip(tokens, told, strict=True):
        best = sorted((entry.rank, other, entry.logprob) for other, entry in place.items()
                      if entry.rank is not None and entry.rank <= wanted and entry.logprob > -math.inf)
        found.append(TokenLogprob(place[token].logprob, tuple((other, logprob) for _, other, logprob in best[:wanted])))
    return tuple(found)


def scores(told: Flat, wanted: int) -> Iterator[PromptScores]:
    """wanted: alternatives of each token."""
    each = 1 + wanted
    ids, logs = np.array(told.token_ids).reshape(-1, each), np.array(told.logprobs).reshape(-1, each)
    ranks = np.array(told.ranks).reshape(-1, each)[:, 0]
    if wanted:
        own = logs[:, 0]
        ranks = np.where(own >= logs[:, -1], 1 + (logs[:, 1:] > own[:, None]).sum(1), ranks)
    rows = max(1, ENTRIES // each)
    for first in range(0, len(logs), rows):
        some = slice(first, first + rows)
        yield PromptScores(1 + first, tuple(logs[some, 0].tolist()), tuple(ranks[some].tolist()),
                           tuple(ids[some, 1:].flatten().tolist()), tuple(logs[some, 1:].flatten().tolist()))
