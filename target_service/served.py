"""Served: what a target serves, and what can be asked of it.

Rule: a request is checked whole before anything is taken for it; what cannot ever fit is refused at once, by field.

It knows nothing about engines.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.base.errors import InvalidRequest, ModelChanged
from slipstream.protocol.identity import Identity
from slipstream.protocol.requests import MAX_ALLOWED, MAX_BAD_WORD, MAX_BAD_WORDS, MAX_SCORES, MAX_TOP_LOGPROBS, Request

MAX_WAITING = 256  # requests that wait for room: a router with another target does better than to queue here


@dataclass(frozen=True, slots=True)
class Served:
    """Facts about the model and the room."""

    model_id: str
    vocab_size: int
    max_context: int
    tokenizer_hash: str
    num_slots: int
    identity: Identity
    lossy: bool = False

    def check(self, request: Request, room: int) -> None:
        """Raises InvalidRequest or ModelChanged. ``room``: tokens that one answer has at most, its prompt included."""
        if request.identity not in (None, self.identity):
            raise ModelChanged("this target serves another model than the one that is asked for")
        tokens = request.tokens
        whole = len(tokens) - request.answered + request.max_tokens
        bias_ids = [token for token, _ in request.sampling.logit_bias]
        checks = (
            ("prompt", len(tokens) > 0, "is empty", "invalid_value"),
            ("prompt", all(0 <= token < self.vocab_size for token in tokens),
             f"has a token outside the vocabulary of {self.vocab_size}", "invalid_value"),
            ("max_tokens", request.max_tokens >= 0, "must not be negative", "invalid_value"),
            ("prompt", len(tokens) < room, f"has {len(tokens)} tokens; at most {room - 1} fit",
             "context_length_exceeded"),
            ("answered", request.answered == 0 or 0 < request.answered < min(len(tokens), request.max_tokens),
             "must leave a prompt, and a token to answer with", "invalid_value"),
            ("max_tokens", whole <= room,
             f"{request.max_tokens} and a prompt of {len(tokens)} exceed the {room} tokens that fit",
             "context_length_exceeded"),
            ("logit_bias", all(0 <= token < self.vocab_size for token in bias_ids),
             "names a token outside the vocabulary", "invalid_value"),
            ("stop_token_ids", all(0 <= token < self.vocab_size for token in request.sampling.stop_token_ids),
             "names a token outside the vocabulary", "invalid_value"),
            ("stop_token_ids", request.grammar is None or len(request.sampling.stop_token_ids) > 0,
             "a grammar needs a token that ends the answer", "invalid_value"),
            ("grammar", request.grammar is None or not self.lossy or request.sampling.greedy,
             "is for exact answers: this target has accept thresholds below 1", "unsupported_parameter"),
            ("top_logprobs", 0 <= (request.top_logprobs or 0) <= MAX_TOP_LOGPROBS,
             f"must be between 0 and {MAX_TOP_LOGPROBS}", "invalid_value"),
            ("prompt_logprobs", 0 <= (request.prompt_logprobs or 0) <= MAX_TOP_LOGPROBS,
             f"must be between 0 and {MAX_TOP_LOGPROBS}", "invalid_value"),
            ("prompt_logprobs", request.num_scores <= MAX_SCORES,
             f"are {request.num_scores}; at most {MAX_SCORES} are told", "invalid_value"),
            ("prompt_logprobs", request.prompt_logprobs is None or request.answered == 0,
             "are told before an answer begins", "invalid_value"),
            *self._choosing(request),
        )
        for field, holds, message, code in checks:
            if not holds:
                raise InvalidRequest(field, message, code)

    def _choosing(self, request: Request) -> tuple[tuple[str, bool, str, str], ...]:
        """Of which tokens the answer may have."""
        allowed, words = request.allowed_token_ids, request.bad_words
        alone = {word[0] for word in words if len(word) == 1}
        bound = request.grammar is not None
        return (
            ("allowed_token_ids", len(allowed) <= MAX_ALLOWED, f"has more than {MAX_ALLOWED} entries", "invalid_value"),
            ("allowed_token_ids", all(0 <= token < self.vocab_size for token in allowed),
             "names a token outside the vocabulary", "invalid_value"),
            ("bad_words", len(words) <= MAX_BAD_WORDS and all(1 <= len(word) <= MAX_BAD_WORD for word in words),
             f"must be at most {MAX_BAD_WORDS} of 1 to {MAX_BAD_WORD} tokens", "invalid_value"),
            ("bad_words", all(0 <= token < self.vocab_size for word in words for token in word),
             "names a token outside the vocabulary", "invalid_value"),
            ("bad_words", not allowed or not alone.issuperset(allowed), "leave nothing of allowed_token_ids",
             "invalid_value"),
            ("allowed_token_ids", not (bound and allowed), "cannot stand beside a grammar", "invalid_value"),
            ("bad_words", not (bound and words), "cannot stand beside a grammar", "invalid_value"),
        )
