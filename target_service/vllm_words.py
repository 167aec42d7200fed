"""Translates a request into vLLM's parameters, and vLLM's log probabilities into our messages.

Rules:
1. Each field of a request becomes a parameter of vLLM, is handled in another way, or is refused.
2. A field that vLLM cannot honour is refused by name (``check``), before vLLM sees it. So is a request that would take
   too much of vLLM's memory or end its process. If vLLM itself refuses a parameter, the error names our field.
3. A grammar becomes vLLM's structured output of the same kind, with the meaning of our own engine: JSON has the same
   layout, with the backend that supports it (``vllm_start`` selects it), and EBNF is passed as the Lark that we read it
   as.
4. A chosen token comes with its log probability and those of the best alternatives, without tokens that could not be
   chosen.
5. Scores of a prompt come as several ``PromptScores``, each small enough for a message. vLLM's rank of a token counts
   equal ones before it; where the alternatives give a better rank, that is used.

It imports no vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from slipstream.base.errors import InvalidRequest
from slipstream.grammar.compiling import as_lark, choices_of, llguidance_schema
from slipstream.protocol.grammar import Grammar
from slipstream.protocol.requests import NEEDS, PromptScores, Request, TokenLogprob

SUPPORTED = tuple(need for need in NEEDS if need != "logprobs_mode")  # grammars only where the tokenizer allows them
OWN_SEEDS = 1 << 63  # vLLM's second model runner crashes with a larger seed; it never draws where sampling is keyed
SCORED_BYTES = 1 << 30  # most bytes of a prompt's log probabilities: vLLM makes all rows of a step at once
FIELD_OF: Mapping[str, str] = {"logprobs": "top_logprobs", "structured_outputs": "grammar"}  # vLLM's name -> our field


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits of an engine. ``bad_words``: number of token runs; ``bad_tokens``: tokens in all of them."""

    bad_words: int = 128
    bad_tokens: int = 1024
    scored: int | None = None  # tokens of a prompt that is scored; None: as many as fit

    @staticmethod
    def scores(vocab_size: int, rows: int) -> int | None:
        """The value of ``scored``. rows: prompt rows that the engine scores at once."""
        most = SCORED_BYTES // (4 * vocab_size)
        return None if rows <= most else most + 1  # the first token has no score


def field_of(parameter: str | None, request: Request) -> str:
    """Our field for vLLM's ``parameter`` in an error; None: vLLM named none, as for structured outputs."""
    if parameter is None:
        return "request" if request.grammar is None else "grammar"
    return FIELD_OF.get(parameter, parameter)


def can_resume(request: Request, keyed: bool) -> bool:
    """Whether another vLLM could go on with the answer to ``request``. ``keyed``: a seed fixes a sampled one."""
    sampling = request.sampling
    return ((sampling.greedy or keyed) and sampling.presence_penalty == sampling.frequency_penalty == 0.0
            and request.grammar is None and all(len(word) == 1 for word in request.bad_words))


def leaves_choice(request: Request) -> bool:
    """Whether at every place of its answer some allowed token may be chosen."""
    barred = {word[-1] for word in request.bad_words}
    if request.sampling.min_tokens:
        barred.update(request.sampling.stop_token_ids)
    return not request.allowed_token_ids or not barred.issuperset(request.allowed_token_ids)


def check(request: Request, drafted: bool, keyed: bool, bounds: Bounds) -> None:
    """Raises InvalidRequest for the first field that vLLM cannot honour."""
    sampling, words = request.sampling, request.bad_words
    checks: tuple[tuple[str, bool, str], ...] = (
        ("answered", not request.answered or can_resume(request, keyed),
         "an answer that another target began cannot go on in vLLM if it is sampled with vLLM's own noise, has "
         "presence or frequency penalties, bad words of several tokens, or is bound to a grammar"),
        ("min_p", not drafted or sampling.greedy or sampling.min_p == 0.0,
         "vLLM takes it only where target.drafts is empty"),
        ("logit_bias", not drafted or not sampling.logit_bias, "vLLM takes it only where target.drafts is empty"),
        # It would allow nothing at all where the grammar has ended, and the answer would end as an error.
        ("min_tokens", request.grammar is None or sampling.min_tokens == 0, "vLLM takes none beside a grammar"),
        ("logprobs_mode", request.logprobs_mode == "raw", "a target on vLLM tells raw ones"),
        ("prompt_logprobs", request.prompt_logprobs is None or bounds.scored is None
         or len(request.tokens) <= bounds.scored, f"prompts of more than {bounds.scored} tokens are not scored here: "
         "vLLM would take too much memory (max_num_batched_tokens is too large)"),
        ("bad_words", len(words) <= bounds.bad_words and sum(map(len, words)) <= bounds.bad_tokens,
         f"vLLM takes {bounds.bad_words} runs of tokens, of {bounds.bad_tokens} in all; each word is one or two runs"),
        ("allowed_token_ids", leaves_choice(request), "bad_words and min_tokens may leave none of them, and vLLM would "
         "choose another token there"),
    )
    for field, holds, message in checks:
        if not holds:
            raise InvalidRequest(field, message, "unsupported_parameter")


def parameters(request: Request, keyed: bool) -> dict[str, Any]:
    """The arguments of vLLM's ``SamplingParams`` for the rest of a checked ``request``; ``bad_words`` are runs of
    tokens. vLLM makes at least one token. A grammar that was not tried may take seconds. Raises InvalidRequest."""
    sampling, answered, left = request.sampling, request.answered, max(1, request.max_tokens - request.answered)
    return {
        "temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p,
        "min_p": 0.0 if sampling.greedy else sampling.min_p,
        "presence_penalty": sampling.presence_penalty, "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty, "logit_bias": dict(sampling.logit_bias) or None,
        # Without a stop token there is nothing to forbid before so many.
        "min_tokens": min(left, max(0, sampling.min_tokens - answered)) if sampling.stop_token_ids else 0,
        "max_tokens": left,
        "stop_token_ids": list(sampling.stop_token_ids),
        # The end-of-text tokens are among those; where a grammar ends, vLLM allows its tokenizer's own.
        "ignore_eos": request.grammar is None,
        "seed": None if sampling.greedy else sampling.seed if keyed else sampling.seed % OWN_SEEDS,
        "logprobs": request.top_logprobs,
        "structured_outputs": None if request.grammar is None else structured(request.grammar),
        "prompt_logprobs": request.prompt_logprobs, "allowed_token_ids": list(request.allowed_token_ids) or None,
        "bad_words": [list(word) for word in request.bad_words],
    }


def structured(grammar: Grammar) -> dict[str, Any]:
    """The arguments of vLLM's ``StructuredOutputsParams``. Raises InvalidRequest."""
    if grammar.kind == "regex":
        return {"regex": grammar.source}
    if grammar.kind == "choice":
        return {"choice": choices_of(grammar.source)}
    if grammar.kind == "json_schema":
        return {"json": llguidance_schema(grammar.source)}
    return {"grammar": as_lark(grammar)}  # it would tell "lark" and "ebnf" apart by how they look


def prompt(request: Request) -> dict[str, Any]:
    """The prompt as vLLM takes it; its prefix cache separates prompts of different salts."""
    salt = {"cache_salt": request.namespace} if request.namespace else {}
    return {"type": "token", "prompt_token_ids": list(request.tokens), **salt}


ENTRIES = 1 << 13  # log probabilities in one part of a prompt's scores


class FlatLogprobs(Protocol):
    """vLLM's ``FlatLogprobs`` of a prompt, token after token: none for the first; for each other token its own value,
    then those of the best."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


def chosen_logprobs(tokens: Sequence[int], entries_by_token: Sequence[Mapping[int, Any]] | None,
                    num_top: int | None) -> tuple[TokenLogprob, ...]:
    """Log probabilities of chosen tokens. entries_by_token: vLLM's, for each of ``tokens``; num_top: alternatives."""
    if num_top is None or not entries_by_token:
        return ()
    logprobs = list[TokenLogprob]()
    for token, entries in zip(tokens, entries_by_token, strict=True):
        best = sorted((entry.rank, other, entry.logprob) for other, entry in entries.items()
                      if entry.rank is not None and entry.rank <= num_top and entry.logprob > -math.inf)
        top = tuple((other, logprob) for _, other, logprob in best[:num_top])
        logprobs.append(TokenLogprob(entries[token].logprob, top))
    return tuple(logprobs)


def prompt_scores(flat: FlatLogprobs, num_top: int) -> Iterator[PromptScores]:
    """The scores of a prompt, in parts. flat: vLLM's; num_top: alternatives of each token."""
    row_width = 1 + num_top
    ids, logs = np.array(flat.token_ids).reshape(-1, row_width), np.array(flat.logprobs).reshape(-1, row_width)
    ranks = np.array(flat.ranks).reshape(-1, row_width)[:, 0]
    if num_top:
        own = logs[:, 0]
        ranks = np.where(own >= logs[:, -1], 1 + (logs[:, 1:] > own[:, None]).sum(1), ranks)
    rows = max(1, ENTRIES // row_width)
    for first in range(0, len(logs), rows):
        part = slice(first, first + rows)
        yield PromptScores(1 + first, tuple(logs[part, 0].tolist()), tuple(ranks[part].tolist()),
                           tuple(ids[part, 1:].flatten().tolist()), tuple(logs[part, 1:].flatten().tolist()))
