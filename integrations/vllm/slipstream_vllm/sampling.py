"""Keyed sampling in vLLM: a seed fixes a sampled answer, whatever is drafted, and drafts are ranked with its noise.

Rules:
1. vLLM itself applies grammar, allowed tokens, bad words, min_tokens and penalties to the logits, along the draft
   tokens too. Temperature, top-k, top-p and noise are those of our engine (``choosing``).
2. The choice at a position is the same in a plain step and in verification. So a draft token is verified as for greedy
   requests: it must equal the choice. vLLM's rejection sampling and its generators are not used.
3. Greedy requests are chosen by vLLM alone, and so are all requests outside of a ``step``.
4. Without a seed, one is derived from the engine's seed and the request's id, so it is the same in all ranks.
5. With logprobs_mode ``processed_logprobs`` log probabilities are behind the filters that a token was chosen with, so
   it never has one of -inf.

It wraps objects of vLLM (its sampler and its rejection sampler) and imports none. It knows nothing about drafts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from slipstream.choosing.logits import is_filtered, survivors
from slipstream.choosing.sampling import ChoiceRows, choices, rows_at_once
from slipstream.choosing.transfer import to_device
from slipstream.protocol.requests import MAX_STOP_TOKEN_IDS, Sampling

SEEDS = 1 << 64
HOTTEST = 100.0  # largest temperature and repetition penalty of ``Sampling``; vLLM has no limit
MOST = 1 << 30  # largest top_k and min_tokens


def refusal(vllm_config: Any) -> str:
    """Why keyed sampling cannot replace vLLM's own; "": it can."""
    if vllm_config.model_config.logprobs_mode == "processed_logits":
        return "logprobs_mode is processed_logits, which reads what rejection sampling makes"
    if (method := vllm_config.speculative_config.rejection_sample_method) != "standard":
        return f"rejection_sample_method is {method}"
    return ""


def sampling_of(params: Any, request: str, engine_seed: int | None, vocab_size: int) -> Sampling:
    """``params`` (vLLM's ``SamplingParams``) as our Sampling. vLLM allows any number as a stop token; those outside the
    vocabulary are left out, because a draft refuses them."""
    seed = params.seed
    if seed is None:
        seed = int.from_bytes(hashlib.blake2b(f"{engine_seed} {request}".encode(), digest_size=8).digest(), "little")
    stop_ids = params.stop_token_ids if params.ignore_eos else params.all_stop_token_ids
    stops = sorted(stop for stop in stop_ids or () if 0 <= stop < vocab_size)
    return Sampling(
        temperature=min(float(params.temperature), HOTTEST), top_k=min(max(0, params.top_k), MOST), top_p=params.top_p,
        min_p=params.min_p, presence_penalty=params.presence_penalty, frequency_penalty=params.frequency_penalty,
        repetition_penalty=min(params.repetition_penalty, HOTTEST), min_tokens=min(params.min_tokens, MOST),
        stop_token_ids=tuple(stops[:MAX_STOP_TOKEN_IDS]), seed=seed % SEEDS)


def filters(sampling: Sampling) -> Sampling:
    """``sampling`` without penalties and min_tokens, for logits to which they were applied already."""
    return replace(sampling, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0, min_tokens=0)


@dataclass(frozen=True, slots=True)
class ChoiceRequest:
    """One request of a batch for which tokens are chosen."""

    sampling: Sampling  # only its filters, see ``filters``
    base: int  # tokens of its text
    drafted: int  # its draft tokens that are verified

    def rows(self, first: int, count: int, skip: int) -> ChoiceRows:
        """``count`` rows from row ``first`` of the logits on; ``skip``: draft tokens before the first of these rows."""
        positions = range(self.base + skip, self.base + skip + count)
        return ChoiceRows(self.sampling, range(first, first + count), positions, [0] * count, None, [()] * count)


class SamplingCache:
    """The Sampling of each request, made once."""

    def __init__(self, engine_seed: int | None, vocab_size: int) -> None:
        self._seed, self._vocab_size = engine_seed, vocab_size
        self._of: dict[str, tuple[Any, Sampling, Sampling]] = {}

    def of(self, request: str, params: Any) -> tuple[Sampling, Sampling]:
        """The whole Sampling of a request, and only its filters."""
        cached = self._of.get(request)
        if cached is None or cached[0] is not params:
            sampling = sampling_of(params, request, self._seed, self._vocab_size)
            cached = self._of[request] = (params, sampling, filters(sampling))
        return cached[1], cached[2]

    def keep(self, requests: Iterable[str]) -> None:
        """Forget other requests from time to time: they may have ended."""
        current = list(requests)
        if len(self._of) > 2 * len(current) + 64:
            self._of = {request: self._of[request] for request in current if request in self._of}


def with_named_tokens(verify: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's verification with the log probabilities of tokens that requests name (``logprob_token_ids``), as its plain
    steps have them. Its own has none, and raises beside a request that wants the likeliest, which ends the engine."""
    def forward(verifier: Any, spec: Any, draft_probs: Any, logits: torch.Tensor, metadata: Any) -> Any:
        named: dict[int, list[int]] | None = getattr(metadata, "logprob_token_ids", None)
        if not named:
            return verify(verifier, spec, draft_probs, logits, metadata)

        def gather_logprobs(logprobs: torch.Tensor, _num_top: int, token_ids: torch.Tensor) -> Any:
            rows = len(token_ids) // len(spec.num_draft_tokens)  # of each request
            by_row = {row: tokens for place, tokens in named.items() for row in range(place * rows, (place + 1) * rows)}
            return sampler.gather_specific_token_logprobs(logprobs, by_row, token_ids)

        sampler = verifier.sampler
        sampler.gather_logprobs = gather_logprobs
        try:
            return verify(verifier, spec, draft_probs, logits,
                          replace(metadata, logprob_token_ids=None, max_num_logprobs=metadata.max_num_logprobs or 0))
        finally:
            del sampler.gather_logprobs

    return forward


def processed_rows(logits: torch.Tensor, sessions: Sequence[ChoiceRows]) -> torch.Tensor:
    """float32 [R, V]: ``logits`` behind the temperature and the filters of the ``sessions``, which have all rows in
    order; up to a constant of each row."""
    samplings = [session.sampling for session in sessions for _ in session.rows]
    temperatures = to_device([1.0 if sampling.greedy else sampling.temperature for sampling in samplings],
                             logits.device, torch.float64)
    rows = logits / temperatures[:, None].to(torch.float32)
    filtered = [row for row, sampling in enumerate(samplings) if not sampling.greedy and is_filtered(sampling)]
    most = rows_at_once(logits)
    for some in (filtered[first : first + most] for first in range(0, len(filtered), most)):
        where = to_device(some, logits.device)
        values, columns = survivors(logits.index_select(0, where), temperatures[where],
                                    [samplings[row] for row in some])
        left = rows.new_full((len(some), rows.shape[1]), -torch.inf)
        rows.index_copy_(0, where, left.scatter_(1, columns, values.to(rows.dtype)))
    return rows


def sampled_alone(sessions: Iterable[ChoiceRows]) -> tuple[list[int], list[ChoiceRows]]:
    """The rows of those that are not greedy, and these sessions as if no others had rows."""
    rows, alone = list[int](), list[ChoiceRows]()
    for session in sessions:
        if session.rows and not session.sampling.greedy:
            alone.append(replace(session, rows=range(len(rows), len(rows) + len(session.rows))))
            rows += session.rows
    return rows, alone


class KeyedSampling:
    """Replaces methods of a sampler and a rejection sampler of vLLM; it chooses tokens only inside a ``step``."""

    def __init__(self, sampler: Any, verifier: Any, engine_seed: int | None, vocab_size: int) -> None:
        self.cache = SamplingCache(engine_seed, vocab_size)
        self._sampler = sampler
        self._sample, self._process, self._verify = sampler.sample, verifier.apply_logits_processors, verifier.forward
        self._requests: Sequence[ChoiceRequest] = ()
        sampler.sample, verifier.apply_logits_processors, verifier.forward = self.sample, self.process, self.verify
        self._processed = sampler.logprobs_mode == "processed_logprobs"
        self._told = torch.empty(0)  # what the rows of draft tokens are behind temperature and filters
        if self._processed:
            self._tell, verifier._get_logprobs_tensors = verifier._get_logprobs_tensors, self.tell

    @contextmanager
    def step(self, requests: Sequence[ChoiceRequest]) -> Iterator[None]:
        """A context in which tokens are chosen for ``requests``, those of the batch in its order."""
        self._requests = requests
        try:
            yield
        finally:
            self._requests, self._told = (), torch.empty(0)

    def sample(self, logits: torch.Tensor, metadata: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        """A token int64 [B] for each request: the only one, or the one after its draft tokens. And the log
        probabilities [B, V] of the mode ``processed_logprobs``, if they are told."""
        if not self._requests:
            drawn: tuple[torch.Tensor, Any] = self._sample(logits, metadata, *args, **kwargs)
            return drawn
        sessions = [request.rows(row, 1, request.drafted) for row, request in enumerate(self._requests)]
        told = self._sampler.compute_logprobs(processed_rows(logits, sessions)) if self._tells(metadata) else None
        rows, alone = sampled_alone(sessions)
        if len(rows) == len(sessions):
            return choices(logits, sessions), told
        chosen, where = self._sampler.greedy_sample(logits).to(torch.int64), to_device(rows, logits.device)
        return chosen.index_copy_(0, where, choices(logits.index_select(0, where), alone)), told

    def process(self, logits: torch.Tensor, metadata: Any, spec: Any) -> torch.Tensor:
        """vLLM's logits for verification, request after request, with the logit of our choice in each row set to
        infinity."""
        rows: torch.Tensor = self._process(logits, metadata, spec)
        sessions, first = list[ChoiceRows](), 0
        for request, count in zip(self._requests, spec.num_draft_tokens, strict=False):
            sessions.append(request.rows(first, count, 0))
            first += count
        if sessions and self._tells(metadata):
            self._told = processed_rows(rows, sessions)
        sampled, alone = sampled_alone(sessions)
        if not sampled:
            return rows
        where = to_device(sampled, rows.device)
        rows[where, choices(rows if len(sampled) == len(rows) else rows.index_select(0, where), alone)] = torch.inf
        return rows

    def verify(self, spec: Any, draft_probs: Any, logits: torch.Tensor, metadata: Any) -> Any:
        """vLLM's verification; inside a ``step`` it treats all requests as greedy, so draft tokens must equal the
        choices."""
        if self._requests:
            draft_probs, metadata = None, replace(metadata, all_greedy=True, all_random=False)
        return self._verify(spec, draft_probs, logits, metadata)

    def tell(self, num_top: int, spec: Any, logits: torch.Tensor, verified: torch.Tensor, *args: Any) -> Any:
        """The log probabilities of a verified step: not those of the rows with infinities."""
        return self._tell(num_top, spec, logits, self._told if self._requests else verified, *args)

    def _tells(self, metadata: Any) -> bool:
        """Whether log probabilities of the mode ``processed_logprobs`` are told."""
        return self._processed and (metadata.max_num_logprobs is not None or bool(metadata.logprob_token_ids))
