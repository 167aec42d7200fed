"""The OpenAI API's requests: what may be asked, checked to the last field.

Rules:
1. A field is either honoured or refused with 400 and its name; nothing that would change the answer is ignored.
2. A field that is refused is accepted with the value that asks for nothing (``best_of: 1``, ``tools: []``, null),
   because clients send their defaults.
3. An unknown key is refused and the nearest known one named. The first one ends the check: there may be any number.
4. Counts come first: what is too much is not looked at. Both surfaces, HTTP and gRPC, come through here, so that limits
   and messages are the same.

Format: the OpenAI API, with the extensions ``speculate``, ``top_k``, ``min_p``, ``repetition_penalty``,
``ignore_eos`` and ``min_tokens``. It knows nothing about models, routes or the network.
"""

from __future__ import annotations

import difflib
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, SkipValidation, ValidationError, field_validator

from router_service.dialects.formats import READERS, grammar_of
from slipstream.base.errors import InvalidRequest
from slipstream.protocol.chat import MAX_BIASES, MAX_ITEMS, MAX_STOPS
from slipstream.protocol.grammar import Grammar
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
    "prediction": (), "prompt_cache_options": (), "reasoning_effort": ("none",), "suffix": ("",),
    "tool_choice": ("none", "auto"), "tools": ([],), "use_beam_search": (False,), "verbosity": (),
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
    grammar: Grammar | None = None  # what the answers are bound to
    bound_by: str = ""  # the field that says so


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
    response_format: SkipValidation[Any] = None  # what binds to a grammar: see ``formats``
    structured_outputs: SkipValidation[Any] = None
    guided_json: SkipValidation[Any] = None
    guided_regex: SkipValidation[Any] = None
    guided_choice: SkipValidation[Any] = None
    guided_grammar: SkipValidation[Any] = None

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
        bound_by, grammar = grammar_of({name: getattr(self, name) for name in READERS}) or ("", None)
        return Options(sampling, max_tokens, self.n or 1, tuple(self.stop or ()), top_logprobs, bool(self.ignore_eos),
                       self.speculate is not False, grammar, bound_by)


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
