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

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Protocol

from slipstream.protocol.grammar import Grammar
from slipstream.protocol.identity import Identity
from slipstream.protocol.messages import Sampling

Finish = Literal["", "stop", "length"]
State = Literal["speculate", "shadow", "plain"]
# keyed_sampling: a seed does not fix an answer; trees: chains are verified; resumed_samples: a sampled answer that
# another target began is refused.
Without = Literal["keyed_sampling", "trees", "resumed_samples"]


@dataclass(frozen=True, slots=True)
class Request:
    """One answer wanted. ``top_logprobs``: None for none, 0 for the chosen token's alone, n for n alternatives too.

    ``answered``: the last so many of ``tokens`` are the answer's beginning already, from a target that could not finish
    it. They count into ``max_tokens``, and the answer goes on as if it had never stopped.

    ``namespace``: only answers of one namespace share what is cached of their prompts. A tag that tells nothing of its
    owner; "" is shared by all who have none.

    ``identity``: whose answer it is to be; a target of another one refuses it with ModelChanged. None: anybody's."""

    request_id: str
    tokens: tuple[int, ...] = field(repr=False)
    sampling: Sampling
    max_tokens: int
    top_logprobs: int | None = None
    speculate: bool = True
    answered: int = 0
    trace: str = ""  # the traceparent of whoever asks; "": nobody follows
    namespace: str = ""
    identity: Identity | None = None
    grammar: Grammar | None = None  # what the answer is bound to

    def after(self, tokens: Sequence[int]) -> Request:
        """What is left to ask when ``tokens`` of the answer are there."""
        if not tokens:
            return self
        return replace(self, tokens=(*self.tokens, *tokens), answered=self.answered + len(tokens))


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probabilities before temperature and filters."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), best first


class Piece(NamedTuple):
    """The tokens of one commit: the first ``accepted`` came from drafts. A named tuple, as one is made for every token
    at each end of a wire."""

    tokens: tuple[int, ...]
    accepted: int = 0
    drafted: int = 0  # draft nodes that this round verified, root not counted
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: Finish = ""
    verify_s: float = 0.0  # the target's step
    wait_s: float = 0.0  # what this session waited for its drafter before the step
    state: State = "speculate"
    cached_tokens: int = 0  # of the prompt; in the first piece
    queue_s: float = 0.0  # arrival to first step; in the first piece
    lossy: bool = False  # accept thresholds below 1 were applied to it
    plain_s: float = 0.0  # what the step would have taken without anybody's draft nodes; 0: unknown


@dataclass(frozen=True, slots=True)
class DraftStatus:
    address: str
    connected: bool
    drafter: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class TargetInfo:
    model_id: str
    vocab_size: int
    max_context: int
    tokenizer_hash: str
    sessions_running: int
    sessions_waiting: int
    slots_total: int
    slots_free: int
    draining: bool
    drafts: tuple[DraftStatus, ...] = ()
    lossy: bool = False  # accept thresholds below 1: sampled answers are not the model's own
    engine: str = ""  # whose engine answers, with its version; "": the target's own
    without: tuple[Without, ...] = ()  # what an answer does without here
    identity: Identity | None = None  # None: it does not say
    grammars: bool = False  # answers may be bound to one


class Answer(Protocol):
    """One running answer. Iterate once; errors of slipstream.base.errors come out of the iteration."""

    def __aiter__(self) -> AsyncIterator[Piece]: ...

    def set_speculation(self, allowed: bool) -> None:
        """Switch in mid-answer: False makes it plain, True leaves it to the target's policy again."""
        ...

    async def aclose(self) -> None:
        """Stop and free everything; idempotent, also fine after the end."""
        ...


class Backend(Protocol):
    """A target. ``submit`` raises InvalidRequest, ModelChanged, CapacityError, Draining or Unavailable (maybe only on
    iteration)."""

    def submit(self, request: Request) -> Answer: ...

    async def info(self) -> TargetInfo: ...
