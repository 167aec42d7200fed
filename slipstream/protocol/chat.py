"""What a user asks of the public service and what comes back, as frozen values: shared by router and client.

Rules:
1. An option that is None takes the server's default.
2. An answer is a stream of deltas; the last one carries ``finish`` and ``usage``. Tokens and deltas are named tuples:
   one of each is made for every token.
3. What one request may hold is bounded by the constants here, the same on both surfaces, before anything is made of it.

It knows nothing about HTTP, gRPC, tokenizers or engines.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from slipstream.protocol.grammar import Grammar
from slipstream.protocol.requests import LogprobsMode

MAX_BODY_BYTES = 2 << 20  # the longest context is a few hundred thousand tokens of text
MAX_ITEMS = 4096  # messages, all text parts of them, prompts
MAX_STOPS = 32
MAX_BIASES = 300
MAX_BEGUN = 1 << 18  # tokens
MAX_WORDS, MAX_WORD = 128, 64  # bad words, and characters of one


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    content: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Begun:
    """What came of an answer that broke off: ``tokens``, and whose it was, as its first delta said. Without tokens it
    is computed from its start."""

    identity: str
    tokens: tuple[int, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How an answer is made. ``stop`` and ``logit_bias`` (token id, bias) are empty by default. ``begun``: it goes on
    from there, and deltas are of what is new. Its seed has to be said again."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = field(default=(), repr=False)
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    top_logprobs: int | None = None
    speculate: bool | None = None  # False: plain decoding for this request
    begun: Begun | None = None
    grammar: Grammar | None = None  # what the answer is bound to
    echo: bool | None = None  # of completions: the text begins with the prompt's
    prompt_logprobs: int | None = None  # the prompt's tokens are scored, with so many alternatives each
    logprobs_mode: LogprobsMode | None = None  # of the answer's tokens
    allowed_token_ids: tuple[int, ...] = ()  # the answer has no others
    bad_words: tuple[str, ...] = field(default=(), repr=False)  # the answer holds none of them


class PromptToken(NamedTuple):
    """One token of a prompt that is scored, behind all before it: ``logprob`` is None for the first. ``rank``: 1 for
    the likeliest of its place. ``top``: id, text and natural log, the likeliest first."""

    id: int
    text: str
    logprob: float | None = None
    rank: int = 0
    top: tuple[tuple[int, str, float], ...] = ()

    def __repr__(self) -> str:
        return f"PromptToken(id={self.id})"


class TextToken(NamedTuple):
    """One token of the answer; ``drafted`` when a drafter had proposed it. logprob: natural log, if asked for."""

    id: int
    text: str
    drafted: bool = False
    logprob: float | None = None

    def __repr__(self) -> str:
        return f"TextToken(id={self.id})"


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, found in the prefix cache
    rounds: int = 0  # steps of the target
    lossy: bool = False  # accept thresholds below 1 were applied: not the model's own answer
    reached: tuple[int, ...] = ()  # rounds that verified draft tokens, by how many of them were accepted: 0, 1, …

    @property
    def acceptance_length(self) -> float:
        """Tokens for each step of the target: 1 is plain decoding."""
        return self.completion_tokens / self.rounds if self.rounds else 0.0


class Delta(NamedTuple):
    """A piece of the answer. ``finish``: "" while it goes on, else why it ended ("stop" or "length"). ``identity``: in
    the first one, what ``Begun`` needs; "" where it cannot be picked up. ``prompt``: the next of the prompt's tokens,
    where they are scored."""

    text: str = ""
    tokens: tuple[TextToken, ...] = ()
    finish: str = ""
    usage: Usage | None = None
    identity: str = ""
    prompt: tuple[PromptToken, ...] = ()

    def __repr__(self) -> str:
        return f"Delta(tokens={len(self.tokens)}, finish={self.finish!r}, usage={self.usage})"
