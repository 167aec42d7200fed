"""A request for tokens and the pieces of its answer: what a router asks of a target, in this process or another.

Rules:
1. Tokens in, tokens out: text, chat templates and stop strings are the router's.
2. An answer is a stream of pieces, one for each commit; the last one carries ``finish``. Closing the stream early frees
   everything that it holds.
3. ``Backend`` has two kinds of implementation, the target service itself and the wire's client of a remote one; nothing
   above can tell them apart.

It knows nothing about HTTP, gRPC or engines.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Protocol, get_args, runtime_checkable

from slipstream.base.errors import InvalidRequest, ModelChanged
from slipstream.protocol.grammar import Grammar
from slipstream.protocol.identity import Identity

Finish = Literal["", "stop", "length"]
State = Literal["speculate", "shadow", "plain"]
# keyed_sampling: a seed does not fix an answer, so a sampled one that another target began is refused.
Without = Literal["keyed_sampling"]
# Which chances log probabilities tell: the model's own; those after penalties, bias, what is forbidden, and
# temperature; or also after top-k, top-p and min-p.
LogprobsMode = Literal["raw", "tempered", "processed"]
# What of a request a target may not know how to honour. no_tokens: a max_tokens of 0.
Need = Literal["grammar", "prompt_logprobs", "logprobs_mode", "allowed_token_ids", "bad_words", "no_tokens"]
NEEDS: tuple[Need, ...] = get_args(Need)
MAX_TOP_LOGPROBS = 20
MAX_ALLOWED = 1024  # token ids
MAX_LOGIT_BIASES, MAX_STOP_TOKEN_IDS = 300, 64  # the latter with those of the model
MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS = 512, 32  # runs of tokens, and tokens of one
MAX_WAITING = 256  # that wait for room at a target: a router with another one does better than to queue there
NAMESPACE_SEPARATOR = "-"  # between the owner's tag and that of a part
MAX_SCORES = 1 << 18  # entries, so many as ``Request.num_scores`` counts


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens of one answer are chosen. Defaults are greedy decoding without limits.

    The same values reach the drafter, which ranks its children by them (keyed noise shared through ``seed``).
    ``stop_token_ids`` end the answer and include the end-of-text tokens of the model unless they are to be ignored.
    """

    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0  # uint64

    def __post_init__(self) -> None:
        checks = (
            ("temperature", 0.0 <= self.temperature <= 100.0, "must be between 0 and 100"),
            ("top_k", 0 <= self.top_k <= 1 << 30, "must be between 0 (off) and 1073741824"),
            ("top_p", 0.0 < self.top_p <= 1.0, "must be between 0 and 1"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "must be between 0 and 1"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "must be between -2 and 2"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "must be between -2 and 2"),
            ("repetition_penalty", 0.0 < self.repetition_penalty <= 100.0, "must be above 0 and at most 100"),
            ("logit_bias", len(self.logit_bias) <= MAX_LOGIT_BIASES, f"has more than {MAX_LOGIT_BIASES} entries"),
            ("logit_bias", all(-100.0 <= b <= 100.0 for _, b in self.logit_bias), "must be between -100 and 100"),
            ("min_tokens", 0 <= self.min_tokens <= 1 << 30, "must be between 0 and 1073741824"),
            ("stop_token_ids", len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS,
             f"has more than {MAX_STOP_TOKEN_IDS} entries"),
            ("seed", 0 <= self.seed < 1 << 64, "must fit 64 bits without a sign"),
        )
        for name, holds, message in checks:
            if not holds:
                raise InvalidRequest(name, message)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def adjusts(self) -> bool:
        """Whether it changes logits before they are filtered and drawn from."""
        return self.penalised or self.min_tokens > 0 or bool(self.logit_bias)

    @property
    def penalised(self) -> bool:
        """Whether tokens that occurred before are made less likely, or more."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


@dataclass(frozen=True, slots=True)
class Request:
    """One answer wanted. ``top_logprobs``: None for none, 0 for the chosen token's alone, n for n alternatives too.

    ``answered``: how many of the last ``tokens`` are already part of the answer, from a target that could not finish
    it. They count into ``max_tokens``, and the answer goes on as if it had never stopped.

    ``namespace``: only answers of one namespace share cached prompts. An opaque tag; "" is one namespace for all
    requests without one. The part before ``NAMESPACE_SEPARATOR`` is the owner, who may have many namespaces.

    ``prompt_logprobs``: the prompt's tokens are scored, as ``top_logprobs`` has it. ``logprobs_mode`` is of the
    answer's tokens; the prompt's are always raw. ``allowed_token_ids``: the answer has no others; () allows all.
    ``bad_words``: runs of tokens that the answer must not contain. ``identity``: the identity that must answer; another
    target refuses with ModelChanged. None: any target may."""

    request_id: str
    tokens: Sequence[int] = field(repr=False)
    sampling: Sampling
    max_tokens: int
    top_logprobs: int | None = None
    speculate: bool = True
    answered: int = 0
    trace: str = ""  # the traceparent of whoever asks; "": nobody follows
    namespace: str = ""
    identity: Identity | None = None
    grammar: Grammar | None = None  # what the answer is bound to
    prompt_logprobs: int | None = None
    logprobs_mode: LogprobsMode = "raw"
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()

    @property
    def needs(self) -> tuple[Need, ...]:
        """The features that a target must support to answer this request."""
        return needs_of(self.grammar, self.prompt_logprobs, self.logprobs_mode, self.allowed_token_ids, self.bad_words,
                        self.max_tokens)

    @property
    def owner(self) -> str:
        """The owner of the namespace: owners take turns."""
        return self.namespace.partition(NAMESPACE_SEPARATOR)[0]

    @property
    def num_scores(self) -> int:
        """How many log probabilities of prompt tokens the answer will hold."""
        return 0 if self.prompt_logprobs is None else len(self.tokens) * (1 + self.prompt_logprobs)

    def after(self, tokens: Sequence[int]) -> Request:
        """The request for the rest of the answer, after its first ``tokens``."""
        if not tokens:
            return self
        joined: Sequence[int] = (*self.tokens, *tokens)
        if isinstance(self.tokens, array):
            joined = array("i", joined)
        return replace(self, tokens=joined, answered=self.answered + len(tokens), prompt_logprobs=None)


def needs_of(grammar: Grammar | None, prompt_logprobs: int | None, logprobs_mode: LogprobsMode,
             allowed_token_ids: Sequence[int], bad_words: Sequence[object], max_tokens: int | None) -> tuple[Need, ...]:
    """The needs of a request with these fields."""
    needed: dict[Need, bool] = {
        "grammar": grammar is not None, "prompt_logprobs": prompt_logprobs is not None,
        "logprobs_mode": logprobs_mode != "raw", "allowed_token_ids": bool(allowed_token_ids),
        "bad_words": bool(bad_words), "no_tokens": max_tokens == 0}
    return tuple(need for need, is_needed in needed.items() if is_needed)


def _require(holds: bool, field: str, message: str, code: str = "invalid_value") -> None:
    if not holds:
        raise InvalidRequest(field, message, code)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A target's model, limits and supported features. A request is checked whole before any memory is taken for it;
    one that can never fit is refused at once, and the error names the field."""

    model_id: str
    vocab_size: int
    max_context: int
    tokenizer_hash: str
    num_slots: int
    identity: Identity
    lossy: bool = False

    def check(self, request: Request, max_length: int) -> None:
        """Raises InvalidRequest or ModelChanged. ``max_length``: tokens of one answer and its prompt, at
        most."""
        if request.identity not in (None, self.identity):
            raise ModelChanged("this target serves another model than the one that is asked for")
        tokens, sampling = request.tokens, request.sampling
        length = len(tokens) - request.answered + request.max_tokens
        _require(len(tokens) > 0, "prompt", "is empty")
        _require(len(tokens) < max_length, "prompt", f"has {len(tokens)} tokens; at most {max_length - 1} fit",
                 "context_length_exceeded")
        self._check_in_vocabulary("prompt", tokens)
        _require(request.max_tokens >= 0, "max_tokens", "must not be negative")
        _require(request.answered == 0 or 0 < request.answered < min(len(tokens), request.max_tokens), "answered",
                 "must leave a prompt, and a token to answer with")
        _require(length <= max_length, "max_tokens", f"{request.max_tokens} and a prompt of {len(tokens)} exceed the "
                 f"{max_length} tokens that fit", "context_length_exceeded")
        self._check_in_vocabulary("logit_bias", [token for token, _ in sampling.logit_bias])
        self._check_in_vocabulary("stop_token_ids", sampling.stop_token_ids)
        _require(request.grammar is None or len(sampling.stop_token_ids) > 0, "stop_token_ids",
                 "a grammar needs a token that ends the answer")
        _require(request.grammar is None or not self.lossy or sampling.greedy, "grammar",
                 "is for exact answers: this target has accept thresholds below 1", "unsupported_parameter")
        for name, most in (("top_logprobs", request.top_logprobs), ("prompt_logprobs", request.prompt_logprobs)):
            _require(0 <= (most or 0) <= MAX_TOP_LOGPROBS, name, f"must be between 0 and {MAX_TOP_LOGPROBS}")
        _require(request.num_scores <= MAX_SCORES, "prompt_logprobs",
                 f"are {request.num_scores}; at most {MAX_SCORES} are told")
        _require(request.prompt_logprobs is None or request.answered == 0, "prompt_logprobs",
                 "are told before an answer begins")
        self._check_restrictions(request)

    def _check_restrictions(self, request: Request) -> None:
        """Check which tokens the answer may have."""
        allowed, words = request.allowed_token_ids, request.bad_words
        forbidden = {word[0] for word in words if len(word) == 1}
        _require(len(allowed) <= MAX_ALLOWED, "allowed_token_ids", f"has more than {MAX_ALLOWED} entries")
        self._check_in_vocabulary("allowed_token_ids", allowed)
        _require(len(words) <= MAX_BAD_WORDS and all(1 <= len(word) <= MAX_BAD_WORD_TOKENS for word in words),
                 "bad_words", f"must be at most {MAX_BAD_WORDS} of 1 to {MAX_BAD_WORD_TOKENS} tokens")
        self._check_in_vocabulary("bad_words", [token for word in words for token in word])
        _require(not allowed or not forbidden.issuperset(allowed), "bad_words", "leave nothing of allowed_token_ids")
        for name, given in (("allowed_token_ids", allowed), ("bad_words", words)):
            _require(request.grammar is None or not given, name, "cannot stand beside a grammar")

    def _check_in_vocabulary(self, field: str, tokens: Sequence[int]) -> None:
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocab_size:
            raise InvalidRequest(field, f"has a token outside the vocabulary of {self.vocab_size}")


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probabilities, of the request's ``logprobs_mode``."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), best first


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Natural-log probabilities of the prompt's tokens from ``start`` on, each behind all that stand before it. The
    first token of a prompt has none. ``ranks``: 1 for the likeliest token of its place, and so on. ``top_ids`` and
    ``top_logprobs``: equally many a token, one token behind the other, the likeliest first."""

    start: int
    logprobs: Sequence[float]
    ranks: Sequence[int]
    top_ids: Sequence[int] = ()
    top_logprobs: Sequence[float] = ()

    @property
    def width(self) -> int:
        """Alternatives a token."""
        return len(self.top_ids) // max(1, len(self.logprobs))

    def part(self, first: int, end: int) -> PromptScores:
        """Of the tokens at positions ``first`` to before ``end``."""
        rows, width = slice(first - self.start, end - self.start), self.width
        tops = slice(width * rows.start, width * rows.stop)
        return PromptScores(first, self.logprobs[rows], self.ranks[rows], self.top_ids[tops], self.top_logprobs[tops])

    def tops(self, most: int) -> list[list[tuple[int, float]]]:
        """At most so many alternatives of each token: id and natural log, the likeliest first."""
        width, count = self.width, min(most, self.width)
        return [[*zip(self.top_ids[at : at + count], self.top_logprobs[at : at + count], strict=True)]
                for at in range(0, width * len(self.logprobs), width)] if count else [[] for _ in self.logprobs]


class Piece(NamedTuple):
    """The tokens of one commit: the first ``accepted`` came from drafts. Before the first of them may come pieces that
    hold nothing but scores of the prompt. A named tuple, as one is made for every token at each end of a wire."""

    tokens: tuple[int, ...]
    accepted: int = 0
    drafted: int = 0  # draft nodes that this round verified, root not counted
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: Finish = ""
    verify_s: float = 0.0  # the target's step
    wait_s: float = 0.0  # what this session waited for its drafter before the step
    state: State = "speculate"
    cached_tokens: int = 0  # of the prompt; in the first piece
    lossy: bool = False  # accept thresholds below 1 were applied to it
    plain_s: float = 0.0  # what the step would have taken without anybody's drafter; 0: unknown, or looked up
    prompt: PromptScores | None = None
    late: bool = False  # the wait was in vain: the drafter had not answered when the step began


REFUSED, LEFT_ALONE = "refused: ", "left alone: "  # how the problem begins of a draft that was there


@dataclass(frozen=True, slots=True)
class DraftStatus:
    address: str
    connected: bool
    drafter: str = ""
    problem: str = ""

    @property
    def given_up(self) -> bool:
        """Whether the target knows this draft but does not use it for now (``problem`` says why); it tries again
        later."""
        return not self.connected and self.problem.startswith((REFUSED, LEFT_ALONE))


@dataclass(frozen=True, slots=True)
class TargetInfo:
    model_id: str
    vocab_size: int
    max_context: int
    tokenizer_hash: str
    sessions_running: int
    sessions_waiting: int
    draining: bool
    drafts: tuple[DraftStatus, ...] = ()
    lossy: bool = False  # accept thresholds below 1: sampled answers are not the model's own
    without: tuple[Without, ...] = ()  # what an answer does without here
    identity: Identity | None = None  # None: it does not say
    takes: tuple[str, ...] = ()  # of ``NEEDS``: what it honours


class Answer(Protocol):
    """One running answer. Iterate once; errors of slipstream.base.errors come out of the iteration."""

    def __aiter__(self) -> AsyncIterator[Piece]: ...

    def set_speculation(self, allowed: bool) -> None:
        """Switch drafts during the answer: False stops them, True lets the target's policy decide again."""
        ...

    async def aclose(self) -> None:
        """Stop and free everything; idempotent, also fine after the end."""
        ...


@runtime_checkable
class CallbackAnswer(Answer, Protocol):
    """An Answer that first offers each piece, except the last, to a callback; a piece that the callback takes wakes no
    task. Order is kept: no piece is offered while an earlier one waits for the iteration."""

    def offer(self, take: Callable[[Piece], bool]) -> None:
        """take: whether it has taken a piece. Called on the event loop."""
        ...


class Backend(Protocol):
    """A target. ``submit`` raises InvalidRequest, ModelChanged, CapacityError, Draining or Unavailable (maybe only on
    iteration)."""

    def submit(self, request: Request) -> Answer: ...

    async def info(self) -> TargetInfo: ...
