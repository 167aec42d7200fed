"""What is asked: a request as far as it could be checked at no cost, and then as a job that can be run.

It knows nothing about HTTP, gRPC, targets or how answers are written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from router_service.dialects.openai import Options
from router_service.dialects.prompts import Prompts
from router_service.text.marks import BARE
from router_service.text.markup import Markup, Named
from router_service.text.tokens import ASSISTANT, TextCodec, Turn
from slipstream.protocol.chat import Begun
from slipstream.protocol.identity import Identity

MAX_ANSWER_SCORES = 1 << 20  # log probabilities of its answers: 32k tokens with 20 alternatives, or 128k of 8 answers
MESSAGE = 32  # characters that one costs a template besides its own


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as far as it could be checked at no cost. Of ``messages`` and ``prompts`` one is empty."""

    endpoint: str
    model: str
    options: Options
    messages: Sequence[Mapping[str, Any]] = field(default=(), repr=False)
    prompts: Sequence[str | Sequence[int]] = field(default=(), repr=False)
    begun: Begun | None = None  # of its only answer
    turn: Turn = ASSISTANT
    add_special_tokens: bool = True  # to prompts that are texts

    def again(self, seed: int, identity: str) -> Asked:
        """For the very answer that this seed gave, by whose tag that is."""
        options = replace(self.options, sampling=replace(self.options.sampling, seed=seed))
        return replace(self, options=options, begun=Begun(identity, ()))

    @property
    def num_answers(self) -> int:
        return max(1, len(self.prompts)) * self.options.n

    @property
    def most_tokens(self) -> int | None:
        """Tokens that each answer may have for what is told of them; None: as many as it likes."""
        told = self.options.top_logprobs
        return None if told is None else MAX_ANSWER_SCORES // (self.num_answers * (1 + told))

    @property
    def size(self) -> int:
        """Characters and token ids."""
        begun = 0 if self.begun is None else len(self.begun.tokens)
        words = sum(MESSAGE + len(word) for word in self.options.bad_words)  # each is spelt by itself
        return sum(map(_size, self.messages)) + sum(map(len, self.prompts)) + _written(self.turn.names) + begun + words


@dataclass(frozen=True, slots=True)
class Job:
    """A request that can be run: prompts as tokens, and what each answer may take."""

    endpoint: str
    model: str
    prompts: tuple[tuple[int, ...], ...] = field(repr=False)
    max_tokens: tuple[int, ...]  # one a prompt
    options: Options
    vocab_size: int
    begun: tuple[int, ...] = field(default=(), repr=False)  # tokens of the only answer that its client has
    identity: Identity | None = None  # whose answer it is to be; None: anybody's
    shown: tuple[str, ...] = field(default=(), repr=False)  # the prompts as texts, where they are echoed
    bad_words: tuple[tuple[int, ...], ...] = field(default=(), repr=False)

    def told(self, codec: TextCodec) -> Prompts | None:
        """What is told of the prompts with the answers; None: nothing."""
        options = self.options
        if not options.tells_prompt:
            return None
        echoed = options.top_logprobs if options.echo else None
        return Prompts(codec, self.prompts, options.n, self.shown, echoed, options.prompt_logprobs)

    def markups(self, codec: TextCodec) -> list[Markup | Named]:
        """What tells calls and reasoning apart, one an answer to the only prompt; [] where nobody asks for it."""
        options, count = self.options, self.num_answers
        if not options.told_apart(codec.style):
            return []
        use = options.use if options.use is not None and options.use.offered else None
        if use is not None and use.named:
            return [Named(use.choice) for _ in range(count)]
        if use is not None and use.forced:
            return [Markup(BARE, use.schemas, bound=True) for _ in range(count)]
        schemas, most = ({}, None) if use is None else (use.schemas, None if use.parallel else 1)
        if options.calls_bound:
            return [Markup(BARE, schemas, either=True) for _ in range(count)]
        thinks = codec.thinks(self.prompts[0])
        return [Markup(codec.style, schemas, thinks, most, mixed=options.mixed) for _ in range(count)]

    @property
    def num_asked(self) -> int:
        """Tokens that it takes of its tenant's before any is answered."""
        # The head is as much work for a token that is scored as for one that is answered; one that the client has is
        # computed like a prompt's.
        times = 1 if self.options.scored is None else 1 + self.options.n
        return sum(map(len, self.prompts)) * times + len(self.begun)

    @property
    def num_scores(self) -> int:
        """Log probabilities of the prompts' tokens that are told."""
        scored = self.options.scored
        return 0 if scored is None else sum(map(len, self.prompts)) * self.options.n * (1 + scored)

    @property
    def num_answers(self) -> int:
        return len(self.prompts) * self.options.n


def _size(message: Mapping[str, Any]) -> int:
    """Characters of all that a template may write of it."""
    return MESSAGE + sum(len(part) if isinstance(part, str) else _written(part) for part in message.values())


def _written(part: Any) -> int:
    return len(orjson.dumps(part)) if part else 0
