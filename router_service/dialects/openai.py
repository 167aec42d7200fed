"""The OpenAI API's requests: what may be asked, checked to the last field.

Rules:
1. What becomes of a field says the table (``fields``): honoured, inert, refused with 400 and its name.
2. Whole numbers may be written as 1.0; an empty stop string is none.
3. Counts come first: what is too much is not looked at. Both surfaces, HTTP and gRPC, come through here, so that limits
   and messages are the same.

Format: the OpenAI API, with vLLM's extensions and ``speculate``. It knows nothing about models, routes or the network.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SkipValidation,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from router_service.dialects.fields import MAX_CONTAINERS, OF_MESSAGE, REFUSED, Unknown, known
from router_service.dialects.formats import READERS, grammar_of
from router_service.dialects.tools import ToolUse, calls_of, num_written, use_of
from router_service.text.files import NAMED_TOKENS
from router_service.text.marks import Style
from slipstream.base.errors import InvalidRequest
from slipstream.protocol.chat import MAX_BIASES, MAX_ITEMS, MAX_STOP_IDS, MAX_STOPS, MAX_WORD, MAX_WORDS
from slipstream.protocol.grammar import Grammar
from slipstream.protocol.requests import MAX_ALLOWED, MAX_TOP_LOGPROBS, LogprobsMode, Need, Sampling

MAX_STOP_CHARS = 1024
MAX_NAMES = 64  # for the chat template
MAX_NAMED = 64 << 10  # bytes of JSON of all that they name
MAX_SALT = 1024
COMPLETION_MAX_TOKENS = 16  # what the OpenAI API gives to a completion that names no limit
SEEDS = 1 << 64
SAMPLED = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens")
RESERVED = frozenset({*NAMED_TOKENS, "messages", "tools", "documents", "add_generation_prompt",
                      "continue_final_message", "chat_template", "tokenize"})  # names that a template has from us
OTHERS = MappingProxyType({"messages": ("prompt", "/v1/completions"), "prompt": ("messages", "/v1/chat/completions")})
DECENT_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

MODES: Mapping[str, LogprobsMode] = MappingProxyType({
    "raw_logprobs": "raw", "tempered_logprobs": "tempered", "processed_logprobs": "processed"})

# The names that pydantic gives to mistakes -> our words, with its context filled in. None shows what was sent.
TOLD: Mapping[str, str] = MappingProxyType({
    "string_type": "must be a string", "list_type": "must be a list", "dict_type": "must be an object",
    "model_type": "must be an object",
    "int_type": "must be a whole number", "float_type": "must be a number", "bool_type": "must be true or false",
    "too_short": "must have at least {min_length} item(s)", "too_long": "must have at most {max_length} items",
    "string_too_long": "must have at most {max_length} characters", "literal_error": "must be {expected}",
    "greater_than_equal": "must be at least {ge}", "less_than_equal": "must be at most {le}",
    "less_than": "must be below {lt}",
})


@dataclass(frozen=True, slots=True)
class Options:
    """How answers are wanted, the prompt apart. ``sampling`` lacks the model's stop tokens and each choice's own seed.

    ``truncate``: tokens of a prompt that count, the last ones; -1: as many as fit. ``token_ids``: they are told."""

    sampling: Sampling
    max_tokens: int | None = None  # None: what the context leaves
    n: int = 1
    stop: tuple[str, ...] = field(default=(), repr=False)
    keep_stop: bool = False  # in the text
    show_specials: bool = False  # in the text
    parsed: bool = False  # calls and reasoning are told apart
    use: ToolUse | None = None
    mixed: bool = False  # reasoning stays in the content
    tell_reasoning: bool = True
    top_logprobs: int | None = None
    token_ids: bool = False
    ignore_eos: bool = False
    truncate: int | None = None
    salt: str = field(default="", repr=False)
    answer_id: str = ""  # "": a random one
    speculate: bool = True
    echo: bool = False  # the text begins with the prompt's
    prompt_logprobs: int | None = None  # told as vLLM writes them
    logprobs_mode: LogprobsMode = "raw"
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = field(default=(), repr=False)
    grammar: Grammar | None = None  # what the answers are bound to
    looser: Grammar | None = None  # where nothing can be made of that
    bound_by: str = ""  # the field that says so

    @property
    def scored(self) -> int | None:
        """Alternatives with which a prompt's tokens are scored; None: they are not."""
        echoed = self.top_logprobs if self.echo else None
        return max((count for count in (echoed, self.prompt_logprobs) if count is not None), default=None)

    @property
    def tells_prompt(self) -> bool:
        """Whether a prompt is told with its answers."""
        return self.echo or self.prompt_logprobs is not None

    def told_apart(self, style: Style) -> bool:
        """Whether calls and reasoning are told apart from the other words of an answer. Where a grammar binds it from
        its first character on, only calls that it forces or lets through are."""
        if self.grammar is not None:
            return self.parsed and self.calls_bound
        reasons = style.thoughts is not None and not self.mixed
        return self.parsed and (reasons or (self.use is not None and self.use.offered))

    @property
    def calls_bound(self) -> bool:
        """Whether a grammar says how calls are written: as JSON that nothing begins."""
        return self.grammar is not None and self.grammar.kind == "json_schema" and (
            self.use is not None and self.use.offered)

    def ends(self, own: Sequence[int], vocab_size: int) -> tuple[int, ...]:
        """What ends an answer of a model that names its ``own``: one that was cut out of a larger one may have some of
        them no more."""
        kept = () if self.ignore_eos else [token for token in own if token < vocab_size]
        return tuple(dict.fromkeys((*kept, *self.sampling.stop_token_ids)))

    @property
    def asked_by(self) -> dict[Need, str]:
        """What a target must know how to honour, and the field that asks for it."""
        scored = "prompt_logprobs" if self.prompt_logprobs is not None else "echo"
        asked: dict[Need, tuple[bool, str]] = {
            "grammar": (self.grammar is not None, self.bound_by), "prompt_logprobs": (self.scored is not None, scored),
            "logprobs_mode": (self.logprobs_mode != "raw", "logprobs_mode"),
            "allowed_token_ids": (bool(self.allowed_token_ids), "allowed_token_ids"),
            "bad_words": (bool(self.bad_words), "bad_words"), "no_tokens": (self.max_tokens == 0, "max_tokens")}
        return {need: name for need, (holds, name) in asked.items() if holds}


class Strict(BaseModel):
    """JSON types as they are: no string becomes a number, no key goes unnoticed."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)


def _whole(value: Any) -> Any:
    return int(value) if type(value) is float and value.is_integer() and abs(value) < SEEDS else value


Whole = Annotated[int, BeforeValidator(_whole)]
Ids = Annotated[list[Whole], Field(max_length=MAX_STOP_IDS)]


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # chunks of equal lengths: ours are one event for many tokens anyway


class Generation(Strict):
    """The fields that both surfaces share. An absent field and null are the same."""

    model: str | None = Field(None, max_length=256)
    max_tokens: Whole | None = Field(None, ge=0)
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = Field(None, ge=-1)
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = Field(None, max_length=MAX_BIASES)
    min_tokens: Whole | None = None
    seed: Whole | None = Field(None, ge=-(1 << 63), lt=1 << 64)
    stop: list[str] | None = Field(None, max_length=MAX_STOPS)
    include_stop_str_in_output: bool | None = None
    stop_token_ids: Ids | None = None
    n: Whole | None = Field(None, ge=1)
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    truncate_prompt_tokens: Whole | None = None
    request_id: str | None = None
    cache_salt: str | None = Field(None, max_length=MAX_SALT)
    prompt_logprobs: Whole | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    logprobs_mode: Literal["raw_logprobs", "tempered_logprobs", "processed_logprobs"] | None = None
    allowed_token_ids: Annotated[list[Whole], Field(max_length=MAX_ALLOWED)] | None = None
    bad_words: Annotated[list[Annotated[str, Field(max_length=MAX_WORD)]], Field(max_length=MAX_WORDS)] | None = None
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
            if isinstance(stop, str) and len(stop) > MAX_STOP_CHARS:
                raise InvalidRequest(f"stop[{i}]", f"must have at most {MAX_STOP_CHARS} characters")
        return stops

    @field_validator("stream_options", mode="before")
    @classmethod
    def _options_known(cls, value: Any, info: ValidationInfo) -> Any:
        fields = StreamOptions.model_fields
        return known(value, fields, {}, _unknown(info), "stream_options.") if isinstance(value, dict) else value

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _some(cls, value: int | None) -> int | None:
        if value is not None and (value < -1 or value == 0):
            raise InvalidRequest("truncate_prompt_tokens", "must be -1 or at least 1")
        return value

    @field_validator("request_id")
    @classmethod
    def _decent(cls, value: str | None) -> str | None:
        if value is not None and not DECENT_ID.fullmatch(value):
            raise InvalidRequest("request_id", "must be 1 to 128 letters, digits, '.', '_', ':' or '-'")
        return value

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.include_usage and self.stream_options and self.stream_options.continuous_usage_stats)

    def wanted(self, max_tokens: int | None, top_logprobs: int | None, use: ToolUse | None = None) -> Options:
        """Raises InvalidRequest naming a value out of range."""
        given = {name: value for name in SAMPLED if (value := getattr(self, name)) is not None}
        sampling = Sampling(**{"temperature": 1.0, **given}, top_k=max(self.top_k or 0, 0),
                            logit_bias=_biases(self.logit_bias or {}),
                            stop_token_ids=tuple(dict.fromkeys(self.stop_token_ids or ())),
                            seed=secrets.randbits(64) if self.seed is None else self.seed % SEEDS)
        binding = {name: value for name in READERS if (value := getattr(self, name)) is not None}
        bound_by, grammar = (grammar_of(binding) if binding else None) or ("", None)
        looser: Grammar | None = None
        if use is not None and use.forced:
            if grammar is not None and grammar.kind != "json_schema":  # that is of the text, and there will be none
                raise InvalidRequest("tool_choice", f"cannot force a call beside {bound_by}; leave out one of them")
            bound_by, grammar = "tool_choice", use.grammar()
        elif use is not None and use.offered and grammar is not None and grammar.kind == "json_schema":
            grammar, looser = use.beside(bound_by, grammar)
        return Options(
            sampling, max_tokens, self.n or 1, tuple(filter(None, self.stop or ())), use=use,
            keep_stop=bool(self.include_stop_str_in_output), show_specials=self.skip_special_tokens is False,
            top_logprobs=top_logprobs, token_ids=bool(self.return_token_ids), ignore_eos=bool(self.ignore_eos),
            truncate=self.truncate_prompt_tokens, salt=self.cache_salt or "", answer_id=self.request_id or "",
            speculate=self.speculate is not False, grammar=grammar, looser=looser, bound_by=bound_by,
            prompt_logprobs=self.prompt_logprobs, logprobs_mode=MODES[self.logprobs_mode or "raw_logprobs"],
            allowed_token_ids=tuple(dict.fromkeys(self.allowed_token_ids or ())),
            bad_words=tuple(dict.fromkeys(filter(None, self.bad_words or ()))))


class Message(Strict):
    role: Literal["system", "user", "assistant", "tool"]
    content: str
    name: str | None = None
    tool_calls: SkipValidation[list[dict[str, Any]]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    def given(self) -> dict[str, Any]:
        """For a template: what is there."""
        extra = {name: value for name in ("name", "tool_calls", "tool_call_id", "reasoning_content")
                 if (value := getattr(self, name))}
        return {"role": self.role, "content": self.content, **extra}


class ChatBody(Generation):
    messages: list[Message] = Field(min_length=1, max_length=MAX_ITEMS)
    max_completion_tokens: Whole | None = Field(None, ge=0)
    echo: Literal[False] | None = None
    logprobs: bool | None = None
    top_logprobs: Whole | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    add_special_tokens: Literal[False] | None = None  # the template writes them
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: SkipValidation[dict[str, Any]] | None = None
    reasoning_effort: str | None = Field(None, max_length=64)
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    tools: SkipValidation[Any] = None  # see ``tools``
    tool_choice: SkipValidation[Any] = None
    parallel_tool_calls: bool | None = None

    @field_validator("messages", mode="before")
    @classmethod
    def _plain_messages(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, list):
            return value
        _at_most("messages", len(value), "items")
        _at_most("messages", sum(_num_parts(message) for message in value), "text parts in all")
        called = [message for message in value if isinstance(message, dict) and message.get("tool_calls")]
        if called and num_written(called) > MAX_CONTAINERS:
            raise InvalidRequest("messages", f"hold more than {MAX_CONTAINERS} lists and objects in the arguments of "
                                 "their calls")
        return [_plain_message(f"messages[{i}]", message, _unknown(info)) for i, message in enumerate(value)]

    @field_validator("chat_template_kwargs", mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        if value is None:
            return value
        if not isinstance(value, dict):
            raise InvalidRequest("chat_template_kwargs", "must be an object")
        if len(value) > MAX_NAMES:
            raise InvalidRequest("chat_template_kwargs", f"must have at most {MAX_NAMES} names")
        if len(orjson.dumps(value)) > MAX_NAMED:
            raise InvalidRequest("chat_template_kwargs", f"are larger than {MAX_NAMED} bytes")
        for name in value:
            if name in RESERVED or not name.isidentifier():
                raise InvalidRequest(f"chat_template_kwargs.{name[:64]}", "is not a name that a request may give")
        return value

    def options(self) -> Options:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs", "needs logprobs to be true")
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest("add_generation_prompt", "must be false where the final message is continued")
        use = None
        if self.tools is not None or self.tool_choice is not None:
            use = use_of(self.tools, self.tool_choice, self.parallel_tool_calls)
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        wanted = self.wanted(most, (self.top_logprobs or 0) if self.logprobs else None, use)
        return replace(wanted, parsed=True, mixed=self.separate_reasoning is False,
                       tell_reasoning=self.include_reasoning is not False)

    def names(self) -> dict[str, Any]:
        """What the template is given besides messages and tools."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        quiet = {"enable_thinking": False} if self.reasoning_effort == "none" else {}
        return {**effort, **quiet, **(self.chat_template_kwargs or {})}


class CompletionBody(Generation):
    prompt: SkipValidation[list[str | list[int]]]  # a million ids are looked at once
    logprobs: Whole | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool | None = None
    add_special_tokens: bool | None = None

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
        most = COMPLETION_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        return replace(self.wanted(most, self.logprobs), echo=bool(self.echo))


Body = TypeVar("Body", ChatBody, CompletionBody)


def parse(kind: type[Body], raw: object, unknown: Unknown | None = None) -> Body:
    """``raw`` (what the JSON said) as a ``kind``. ``unknown`` takes the fields that nobody knows; None: they are
    refused. Raises InvalidRequest naming the first field that is wrong."""
    if not isinstance(raw, dict):
        raise InvalidRequest("body", "must be a JSON object")
    unknown = Unknown(strict=True) if unknown is None else unknown
    try:
        return kind.model_validate(known(raw, kind.model_fields, REFUSED, unknown), context=unknown)
    except ValidationError as error:
        raise _refusal(error, raw) from None


def _unknown(info: ValidationInfo) -> Unknown:
    assert isinstance(info.context, Unknown)
    return info.context


def _at_most(field: str, count: int, items: str) -> None:
    if count > MAX_ITEMS:
        raise InvalidRequest(field, f"must have at most {MAX_ITEMS} {items}")


def _num_parts(message: Any) -> int:
    content = message.get("content") if isinstance(message, dict) else None
    return len(content) if isinstance(content, list) else 0


def _plain_message(at: str, message: Any, unknown: Unknown) -> Any:
    """One message with text parts joined and the name that newer clients use for the system role replaced."""
    if not isinstance(message, dict):
        return message
    plain = known(message, Message.model_fields, OF_MESSAGE, unknown, f"{at}.")
    if plain.get("role") == "function":
        raise InvalidRequest(f"{at}.role", "is not served here; use tools and the role 'tool'", "unsupported_parameter")
    if plain.get("tool_calls") is not None:
        plain["tool_calls"] = calls_of(f"{at}.tool_calls", plain["tool_calls"])
    if plain.get("content", "") is None and plain.get("role") == "assistant":
        plain["content"] = ""
    if plain.get("tool_calls"):
        plain.setdefault("content", "")
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


def _refusal(error: ValidationError, raw: Mapping[str, Any]) -> InvalidRequest:
    problem = error.errors(include_url=False, include_input=False)[0]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"]).lstrip(".")
    where = where[:200] or "body"
    if problem["type"] == "missing":
        other = OTHERS.get(where, ("", ""))
        hint = f"; {other[0]} is for {other[1]}" if other[0] in raw else ""
        return InvalidRequest(where, f"is required{hint}", "missing_required_parameter")
    words = TOLD.get(problem["type"])
    told = problem["msg"][:1].lower() + problem["msg"][1:] if words is None else words.format(**problem.get("ctx", {}))
    return InvalidRequest(where, told)
