"""The OpenAI API's format: what may be asked, checked to the last field; answers, whole and in chunks; errors.

Rules:
1. A field is either honoured or refused with 400 and its name; nothing that would change the answer is ignored.
2. A field that is refused is accepted with the value that asks for nothing (``best_of: 1``, ``tools: []``, null),
   because clients send their defaults.
3. An unknown key is refused and the nearest known one named. The first one ends the check: there may be any number.
4. Counts come first: what is too much is not looked at. Both surfaces, HTTP and gRPC, come through here, so that limits
   and messages are the same.
5. ``usage.completion_tokens_details`` says what speculation did, in the fields that the API has for predicted tokens.
   The object ``slipstream`` is an extension of whole answers and of the usage chunk; other clients skip it.
6. A chunk that would say nothing is not made (None).
7. A client's mistake is explained; a mistake of ours is not (its text may hold anything). What may be tried again says
   when.

Format: the OpenAI API, with the extensions ``speculate``, ``top_k``, ``min_p``, ``repetition_penalty``,
``ignore_eos`` and ``min_tokens``. It knows nothing about models, routes or the network.
"""

from __future__ import annotations

import difflib
import math
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, SkipValidation, ValidationError, field_validator

from router_service.tokens import AnswerToken, TextCodec, TextDelta
from slipstream.base.errors import (
    CapacityError,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    ModelChanged,
    QuotaExceeded,
    SlipstreamError,
    Unavailable,
    status_of,
)
from slipstream.protocol.chat import MAX_BIASES, MAX_ITEMS, MAX_STOPS, Usage
from slipstream.protocol.messages import Sampling

MAX_STOP_CHARS = 64
MAX_TOP_LOGPROBS = 20
COMPLETION_MAX_TOKENS = 16  # what the OpenAI API gives to a completion that names no limit
SEEDS = 1 << 64
SAMPLED = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens")

# Fields of the API that are not supported, and the values besides null that ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (), "best_of": (1,), "echo": (False,), "function_call": ("none",), "functions": ([],),
    "logit_processors": (), "modalities": (["text"],), "moderation": (), "parallel_tool_calls": (False, True),
    "prediction": (), "prompt_cache_options": (), "reasoning_effort": ("none",), "response_format": ({"type": "text"},),
    "suffix": ("",), "tool_choice": ("none", "auto"), "tools": ([],), "use_beam_search": (False,), "verbosity": (),
    "web_search_options": (),
}
# Fields that say nothing about the answer: who asks, and how to bill and keep it.
INERT = frozenset({"metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier",
                   "store", "user"})
MESSAGE_UNSUPPORTED = {"name": (), "refusal": ("",), "audio": (), "tool_calls": ([],), "function_call": (),
                       "tool_call_id": (), "annotations": ([],)}

# The names that pydantic gives to mistakes -> our words, with its context filled in. None shows what was sent.
TOLD: Mapping[str, str] = MappingProxyType({
    "string_type": "must be a string", "list_type": "must be a list", "dict_type": "must be an object",
    "int_type": "must be a whole number", "float_type": "must be a number", "bool_type": "must be true or false",
    "too_short": "must have at least {min_length} item(s)", "too_long": "must have at most {max_length} items",
    "string_too_long": "must have at most {max_length} characters", "literal_error": "must be {expected}",
    "greater_than_equal": "must be at least {ge}", "less_than_equal": "must be at most {le}",
    "less_than": "must be below {lt}",
})
Json = dict[str, Any]
PLACE = "\x00text\x00"
LOWEST = -9999.0  # the API's way to say "never"; JSON has no infinity
CODES = {401: "invalid_api_key", 404: "not_found", 405: "method_not_allowed"}


@dataclass(frozen=True, slots=True)
class Options:
    """How answers are wanted, the prompt apart. ``sampling`` lacks the stop tokens and each choice's own seed."""

    sampling: Sampling
    max_tokens: int | None = None  # None: what the context leaves
    n: int = 1
    stop: tuple[str, ...] = field(default=(), repr=False)
    top_logprobs: int | None = None
    ignore_eos: bool = False
    speculate: bool = True


class Strict(BaseModel):
    """JSON types as they are: no string becomes a number, no key goes unnoticed."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class Generation(Strict):
    """The fields that both surfaces share. An absent field and null are the same."""

    model: str = Field(max_length=256)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = Field(None, max_length=MAX_BIASES)
    min_tokens: int | None = None
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 64)
    stop: list[str] | None = Field(None, max_length=MAX_STOPS)
    n: int | None = Field(None, ge=1)
    ignore_eos: bool | None = None
    speculate: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _stops(cls, value: Any) -> Any:
        stops = [value] if isinstance(value, str) else value
        for i, stop in enumerate(stops[:MAX_STOPS] if isinstance(stops, list) else ()):
            if isinstance(stop, str) and not 1 <= len(stop) <= MAX_STOP_CHARS:
                raise InvalidRequest(f"stop[{i}]", f"must have 1 to {MAX_STOP_CHARS} characters")
        return stops

    @field_validator("stream_options", mode="before")
    @classmethod
    def _options_known(cls, value: Any) -> Any:
        known = StreamOptions.model_fields
        return _known(value, {}, known, "stream_options.") if isinstance(value, dict) else value

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def wanted(self, max_tokens: int | None, top_logprobs: int | None) -> Options:
        """Raises InvalidRequest naming a value out of range."""
        given = {name: value for name in SAMPLED if (value := getattr(self, name)) is not None}
        sampling = Sampling(**{"temperature": 1.0, **given}, top_k=max(self.top_k or 0, 0),
                            logit_bias=_biases(self.logit_bias or {}),
                            seed=secrets.randbits(64) if self.seed is None else self.seed % SEEDS)
        return Options(sampling, max_tokens, self.n or 1, tuple(self.stop or ()), top_logprobs, bool(self.ignore_eos),
                       self.speculate is not False)


class Message(Strict):
    role: Literal["system", "user", "assistant"]
    content: str


class ChatBody(Generation):
    messages: list[Message] = Field(min_length=1, max_length=MAX_ITEMS)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    @field_validator("messages", mode="before")
    @classmethod
    def _plain_messages(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        _at_most("messages", len(value), "items")
        _at_most("messages", sum(_num_parts(message) for message in value), "text parts in all")
        return [_plain_message(f"messages[{i}]", message) for i, message in enumerate(value)]

    def options(self) -> Options:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs", "needs logprobs to be true")
        return self.wanted(self.max_completion_tokens or self.max_tokens,
                           (self.top_logprobs or 0) if self.logprobs else None)


class CompletionBody(Generation):
    prompt: SkipValidation[list[str | list[int]]]  # a million ids are looked at once
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    @field_validator("prompt", mode="before")
    @classmethod
    def _prompts(cls, value: Any) -> Any:
        """A string, a list of strings, a list of token ids or a list of those: always a list of prompts."""
        if isinstance(value, str) or (isinstance(value, list) and value and type(value[0]) is int):
            value = [value]
        kinds = set(map(type, value)) if isinstance(value, list) else set()
        if kinds:
            _at_most("prompt", len(value), "prompts")
        if kinds != {str} and (kinds != {list} or not all(set(map(type, prompt)) <= {int} for prompt in value)):
            raise InvalidRequest("prompt", "must be a string, token ids, or a list of either")
        return value

    def options(self) -> Options:
        return self.wanted(self.max_tokens or COMPLETION_MAX_TOKENS, self.logprobs)


Body = TypeVar("Body", ChatBody, CompletionBody)


def parse(kind: type[Body], raw: object) -> Body:
    """``raw`` (what the JSON said) as a ``kind``. Raises InvalidRequest naming the first field that is wrong."""
    if not isinstance(raw, dict):
        raise InvalidRequest("body", "must be a JSON object")
    asked = _known(raw, UNSUPPORTED, kind.model_fields, "")
    try:
        return kind.model_validate(asked)
    except ValidationError as error:
        raise _refusal(error) from None


def _known(raw: Mapping[str, Any], unsupported: Mapping[str, tuple[Any, ...]], known: Collection[str],
           at: str) -> dict[str, Any]:
    """``raw`` less what asks for nothing (rule 2). Raises InvalidRequest for the first field that is not ``known``."""
    kept = {}
    for key, value in raw.items():
        if key in known:
            kept[key] = value
        elif key in unsupported:
            if value is not None and not any(type(value) is type(v) and value == v for v in unsupported[key]):
                raise InvalidRequest(at + key, "is not supported by this server; leave it out", "unsupported_parameter")
        elif at or key not in INERT:
            near = difflib.get_close_matches(key[:64], known, n=1, cutoff=0.6)
            hint = f"; did you mean '{at}{near[0]}'?" if near else ""
            raise InvalidRequest((at + key)[:200] or "body", f"is not a known field{hint}", "unknown_parameter")
    return kept


def _at_most(field: str, count: int, items: str) -> None:
    if count > MAX_ITEMS:
        raise InvalidRequest(field, f"must have at most {MAX_ITEMS} {items}")


def _num_parts(message: Any) -> int:
    content = message.get("content") if isinstance(message, dict) else None
    return len(content) if isinstance(content, list) else 0


def _plain_message(at: str, message: Any) -> Any:
    """One message with text parts joined and the name that newer clients use for the system role replaced."""
    if not isinstance(message, dict):
        return message
    plain = _known(message, MESSAGE_UNSUPPORTED, Message.model_fields, f"{at}.")
    if plain.get("role") in ("tool", "function"):
        raise InvalidRequest(f"{at}.role", "tools are not supported by this server", "unsupported_parameter")
    if plain.get("role") == "developer":
        plain["role"] = "system"
    if isinstance(plain.get("content"), list):
        plain["content"] = "\n".join(_part(f"{at}.content[{i}]", part) for i, part in enumerate(plain["content"]))
    return plain


def _part(at: str, part: Any) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise InvalidRequest(at, "only parts of type 'text' are supported by this server", "unsupported_parameter")


def _biases(raw: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    for key in raw:
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise InvalidRequest("logit_bias", "keys must be token ids")
    biases = {int(key): float(bias) for key, bias in raw.items()}
    return tuple(sorted(biases.items()))


def _refusal(error: ValidationError) -> InvalidRequest:
    problem = error.errors(include_url=False, include_input=False)[0]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"]).lstrip(".")
    where = where[:200] or "body"
    if problem["type"] == "missing":
        return InvalidRequest(where, "is required", "missing_required_parameter")
    words = TOLD.get(problem["type"])
    told = problem["msg"][:1].lower() + problem["msg"][1:] if words is None else words.format(**problem.get("ctx", {}))
    return InvalidRequest(where, told)


class Reply(Protocol):
    """How one endpoint writes its answers. ``logprobs``: whether they are asked for."""

    logprobs: bool

    def opening(self, number: int) -> Json | None: ...

    def chunk(self, number: int, delta: TextDelta) -> Json | None: ...

    def usage_chunk(self, usage: Usage) -> Json: ...

    def whole(self, answers: Sequence[Sequence[TextDelta]], usage: Usage) -> Json: ...


class ChatReply:
    """``chat.completion`` and its chunks."""

    def __init__(self, run_id: str, created: int, model: str, codec: TextCodec, logprobs: bool) -> None:
        self._head: Json = {"id": f"chatcmpl-{run_id}", "created": created, "model": model}
        self._codec = codec
        self.logprobs = logprobs

    def opening(self, number: int) -> Json | None:
        return self._chunk([_choice(number, {"role": "assistant", "content": ""})])

    def chunk(self, number: int, delta: TextDelta) -> Json | None:
        logprobs = self._logprobs_of(delta.tokens)
        if not (delta.text or delta.finish or (logprobs and logprobs["content"])):
            return None
        return self._chunk([_choice(number, {"content": delta.text} if delta.text else {}, delta.finish, logprobs)])

    def usage_chunk(self, usage: Usage) -> Json:
        return self._chunk([]) | _usage(usage)

    def whole(self, answers: Sequence[Sequence[TextDelta]], usage: Usage) -> Json:
        choices = []
        for number, deltas in enumerate(answers):
            message = {"role": "assistant", "content": "".join(delta.text for delta in deltas), "refusal": None}
            choices.append({"index": number, "message": message, "finish_reason": deltas[-1].finish,
                            "logprobs": self._logprobs_of([token for delta in deltas for token in delta.tokens])})
        return {**self._head, "object": "chat.completion", "choices": choices, **_usage(usage)}

    def _chunk(self, choices: list[Json]) -> Json:
        return {**self._head, "object": "chat.completion.chunk", "choices": choices}

    def _logprobs_of(self, tokens: Sequence[AnswerToken]) -> Json | None:
        if not self.logprobs:
            return None
        content = []
        for token in tokens:
            if token.logprob is not None:
                top = [self._entry(t, logprob) for t, logprob in token.logprob.top]
                content.append({**self._entry(token.id, token.logprob.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> Json:
        return {"token": self._codec.token_text(token), "logprob": max(logprob, LOWEST),
                "bytes": list(self._codec.token_bytes(token))}


class TextReply:
    """``text_completion``, which has one form for whole answers and chunks."""

    def __init__(self, run_id: str, created: int, model: str, codec: TextCodec, logprobs: bool) -> None:
        self._head: Json = {"id": f"cmpl-{run_id}", "object": "text_completion", "created": created, "model": model}
        self._codec = codec
        self.logprobs = logprobs
        self._lengths: dict[int, int] = {}  # of each answer's text so far: offsets of logprobs count from its start

    def opening(self, number: int) -> Json | None:
        return None

    def chunk(self, number: int, delta: TextDelta) -> Json | None:
        choice = self._choice(number, [delta])
        if not (delta.text or delta.finish or (choice["logprobs"] and choice["logprobs"]["tokens"])):
            return None
        return {**self._head, "choices": [choice]}

    def usage_chunk(self, usage: Usage) -> Json:
        return {**self._head, "choices": [], **_usage(usage)}

    def whole(self, answers: Sequence[Sequence[TextDelta]], usage: Usage) -> Json:
        choices = [self._choice(number, deltas) for number, deltas in enumerate(answers)]
        return {**self._head, "choices": choices, **_usage(usage)}

    def _choice(self, number: int, deltas: Sequence[TextDelta]) -> Json:
        tokens = [token for delta in deltas for token in delta.tokens]
        logprobs = self._logprobs_of(tokens, self._lengths.get(number, 0)) if self.logprobs else None
        text = "".join(delta.text for delta in deltas)
        self._lengths[number] = self._lengths.get(number, 0) + len(text)
        return {"index": number, "text": text, "logprobs": logprobs, "finish_reason": deltas[-1].finish or None}

    def _logprobs_of(self, tokens: Sequence[AnswerToken], offset: int) -> Json:
        columns: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token in tokens:
            if token.logprob is not None:
                columns["tokens"].append(self._codec.token_text(token.id))
                columns["token_logprobs"].append(max(token.logprob.logprob, LOWEST))
                columns["top_logprobs"].append({self._codec.token_text(t): max(logprob, LOWEST)
                                                for t, logprob in token.logprob.top})
                columns["text_offset"].append(offset)
            offset += len(token.text)
        return columns


class Chunks:
    """The chunks of a stream as JSON. Those that say a text and nothing else are written once, then again around every
    text."""

    __slots__ = ("_around", "_reply")

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def written(self, number: int, delta: TextDelta) -> bytes:
        """b"" for a chunk that is not made."""
        if self._reply.logprobs or delta.finish:
            chunk = self._reply.chunk(number, delta)
            return b"" if chunk is None else orjson.dumps(chunk)
        if not delta.text:
            return b""
        around = self._around.get(number)
        if around is None:
            head, _, tail = orjson.dumps(self._reply.chunk(number, TextDelta(PLACE))).rpartition(orjson.dumps(PLACE))
            around = self._around[number] = head, tail
        return around[0] + orjson.dumps(delta.text) + around[1]


def _choice(number: int, delta: Json, finish: str = "", logprobs: Json | None = None) -> Json:
    return {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": finish or None}


def _usage(usage: Usage) -> Json:
    drafted = usage.accepted_prediction_tokens + usage.rejected_prediction_tokens
    return {
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
            "completion_tokens_details": {
                "accepted_prediction_tokens": usage.accepted_prediction_tokens,
                "rejected_prediction_tokens": usage.rejected_prediction_tokens,
            },
        },
        "slipstream": {"rounds": usage.rounds, "acceptance_length": round(usage.acceptance_length, 4),
                       "drafted_tokens": drafted, "lossy": usage.lossy},
    }


@dataclass(frozen=True, slots=True)
class Problem:
    """An error that is ready to be sent."""

    status: int
    message: str
    kind: str
    param: str | None = None
    code: str | None = None
    headers: tuple[tuple[str, str], ...] = ()

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def problem_of(error: BaseException) -> Problem:
    """What a client is told about ``error``."""
    _, status, kind = status_of(error)
    if not isinstance(error, SlipstreamError) or status == 500:
        return Problem(500, "internal error; the server's log has it under this request's id", "server_error")
    if isinstance(error, InvalidRequest):
        return Problem(status, str(error), kind, error.field, error.code)
    headers: tuple[tuple[str, str], ...] = ()
    code = kind
    if isinstance(error, CapacityError):
        headers, code = (("retry-after", str(max(1, math.ceil(error.retry_after_s)))),), "server_overloaded"
        if isinstance(error, QuotaExceeded):
            code = "rate_limit_exceeded"
    elif isinstance(error, Draining | ModelChanged | Unavailable):
        headers = (("retry-after", "1"),)
    elif isinstance(error, DeadlineExceeded):
        headers, code = (("x-should-retry", "false"),), "request_timeout"
    return Problem(status, str(error), kind, None, code, headers)


def http_problem(status: int, message: str) -> Problem:
    """A refusal that has no error of ours behind it: no key, no such page, no such method."""
    kind = "authentication_error" if status == 401 else "invalid_request_error"
    return Problem(status, message, kind, None, CODES.get(status))
