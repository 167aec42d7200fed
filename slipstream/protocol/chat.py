"""What a user asks of the public service and what comes back, as frozen values: shared by router and client.

Rules:
1. An option that is None takes the server's default.
2. An answer is a stream of deltas; the last one carries ``finish`` and ``usage``. Tokens and deltas are named tuples:
   one of each is made for every token.
3. The constants here bound one request, all requests together, and the time a client may take. They hold for HTTP and
   gRPC, and are checked before anything is made of a request.

It knows nothing about HTTP, gRPC, tokenizers or engines.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from slipstream.protocol.grammar import Grammar
from slipstream.protocol.requests import LogprobsMode

MAX_BODY_BYTES = 2 << 20  # the longest context is a few hundred thousand tokens of text
MAX_BODIES_BYTES = 256 << 20  # of all that are not answered
BODY_TIMEOUT_S = 30.0  # a request that takes longer to come is refused
STALL_S = 60.0  # a client that takes nothing of its answer for so long counts as gone
MAX_ITEMS = 4096  # messages, all text parts of them, prompts
MAX_STOPS = 32  # texts
MAX_REQUESTED_STOP_TOKEN_IDS = 48  # beside those of the model
MAX_TOOLS = 128
MAX_CALLS = 128  # in one message
MAX_BEGUN = 1 << 18  # tokens
MAX_PROMPT_IDS = 1 << 20  # as many as fit a body of JSON
MAX_BAD_WORD_STRINGS, MAX_BAD_WORD_CHARS = 128, 64


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function, or a piece of one: the first piece of each has its ``id`` and ``name``. ``arguments``: an
    object in JSON. ``index``: which one of an answer's."""

    name: str
    arguments: str = field(repr=False)
    id: str = ""
    index: int = 0


@dataclass(frozen=True, slots=True)
class Function:
    """What may be called. ``parameters``: the schema of its arguments in JSON; "" takes any."""

    name: str
    description: str = field(default="", repr=False)
    parameters: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Message:
    """``tool_calls``: what the assistant called. ``tool_call_id``: the call that a tool's message answers."""

    role: str
    content: str = field(repr=False)
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    reasoning_content: str = field(default="", repr=False)
    name: str = ""


@dataclass(frozen=True, slots=True)
class PartialAnswer:
    """An answer that broke off: its ``tokens`` so far, and the ``identity`` of its first delta. Without tokens it is
    computed from its start."""

    identity: str
    tokens: Sequence[int] = field(repr=False)


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How an answer is made. ``stop`` and ``logit_bias`` (token id, bias) are empty by default. ``begun``: go on from
    there; deltas then hold only what is new, and the request needs the same seed. ``function``: the one of ``tools``
    that the answer must call, in place of ``tool_choice``."""

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
    begun: PartialAnswer | None = None
    grammar: Grammar | None = None  # what the answer is bound to
    echo: bool | None = None  # of completions: the text begins with the prompt's
    prompt_logprobs: int | None = None  # the prompt's tokens are scored, with so many alternatives each
    logprobs_mode: LogprobsMode | None = None  # of the answer's tokens
    allowed_token_ids: tuple[int, ...] = ()  # the answer has no others
    bad_words: tuple[str, ...] = field(default=(), repr=False)  # the answer holds none of them
    include_stop_str_in_output: bool | None = None
    stop_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None  # the last ones that count; -1: as many as fit
    cache_salt: str | None = field(default=None, repr=False)
    add_special_tokens: bool | None = None  # of completions
    add_generation_prompt: bool | None = None  # this and all that follow: of chats
    continue_final_message: bool | None = None
    chat_template_kwargs: str | None = field(default=None, repr=False)  # an object in JSON
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    tools: tuple[Function, ...] = ()
    tool_choice: str | None = None  # "auto", "none", "required"
    function: str | None = None
    parallel_tool_calls: bool | None = None


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
    """One token of the answer; ``drafted`` when a drafter had proposed it. logprob: natural log, if asked for; ``top``:
    id, text and natural log of as many as were asked for, the likeliest first."""

    id: int
    text: str
    drafted: bool = False
    logprob: float | None = None
    top: tuple[tuple[int, str, float], ...] = ()

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
    """A piece of the answer. ``finish``: "" while it goes on, else why it ended ("stop", "length" or "tool_calls").
    ``identity``: in the first delta, what ``PartialAnswer`` needs; "" where the answer cannot be resumed. ``prompt``:
    the next scored tokens of the prompt. ``text`` has no reasoning and calls where these are separated; ``tokens`` has
    the tokens of all three."""

    text: str = ""
    tokens: tuple[TextToken, ...] = ()
    finish: str = ""
    usage: Usage | None = None
    identity: str = ""
    prompt: tuple[PromptToken, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def __repr__(self) -> str:
        return f"Delta(tokens={len(self.tokens)}, finish={self.finish!r}, usage={self.usage})"


@dataclass(frozen=True, slots=True)
class CompleteAnswer:
    """All deltas of an answer, joined. ``message`` is what to append to the conversation."""

    message: Message
    finish: str = ""
    usage: Usage | None = None


def whole(deltas: Iterable[Delta]) -> CompleteAnswer:
    """Raises what ``deltas`` raise."""
    texts, thoughts, finish, usage = list[str](), list[str](), "", None
    calls: dict[int, list[ToolCall]] = {}
    for delta in deltas:
        texts.append(delta.text)
        thoughts.append(delta.reasoning)
        finish, usage = delta.finish or finish, delta.usage or usage
        for piece in delta.tool_calls:
            calls.setdefault(piece.index, []).append(piece)
    made = tuple(replace(pieces[0], arguments="".join([piece.arguments for piece in pieces]))
                 for pieces in calls.values())
    message = Message("assistant", "".join(texts), made, reasoning_content="".join(thoughts))
    return CompleteAnswer(message, finish, usage)
