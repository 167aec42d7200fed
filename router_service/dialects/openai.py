"""The OpenAI API, as far as chats and completions share it: bodies, checked to the last field; chunks.

Rules:
1. The table (``fields``) decides about each field: honoured, inert, or refused with 400 and its name. Other fields are
   unknown: ignored and named in a header, or refused where the router is strict. Their names are limited in length and
   number.
2. WholeNumber numbers may be written as 1.0; an empty stop string is none.
3. Counts are checked first: a list that is too long is not read. HTTP and gRPC both use this module, so limits and
   messages are the same.
4. Lists and objects are counted before JSON is parsed: each takes two bytes of text but a hundred of memory, and a
   million of them would block the event loop. They may be nested ``MAX_DEPTH`` deep, because code that walks them is
   recursive.
5. An empty chunk is not made (None).
6. A ``Plan`` is a request after all cheap checks; a ``Job`` is ready to run.

Format: the OpenAI API, with vLLM's extensions and ``speculate``. It knows nothing about models, routes or the network.
"""

from __future__ import annotations

import difflib
import re
import secrets
from codecs import BOM_UTF8
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Annotated, Any, Literal, Protocol, TypeVar

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
from pydantic_core import PydanticCustomError

from router_service.dialects.fields import INERT, REFUSED, Refused
from router_service.dialects.formats import FIELD_READERS, grammar_of
from router_service.dialects.problems import refusal_of
from router_service.dialects.prompts import Prompts
from router_service.dialects.tools import Json, ToolUse
from router_service.dialects.usage import usage_fields
from router_service.text.deltas import TextDelta
from router_service.text.marks import BARE, Style
from router_service.text.markup import Markup, NamedCall
from router_service.text.tokens import ASSISTANT, TextCodec, Turn
from slipstream.base.errors import InvalidRequest
from slipstream.protocol.chat import (
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORD_STRINGS,
    MAX_ITEMS,
    MAX_REQUESTED_STOP_TOKEN_IDS,
    MAX_STOPS,
    PartialAnswer,
    Usage,
)
from slipstream.protocol.grammar import Grammar
from slipstream.protocol.identity import Identity
from slipstream.protocol.requests import (
    MAX_ALLOWED,
    MAX_LOGIT_BIASES,
    MAX_TOP_LOGPROBS,
    LogprobsMode,
    Need,
    Sampling,
    needs_of,
)

MAX_ANSWER_SCORES = 1 << 20  # log probabilities of its answers: 32k tokens with 20 alternatives, or 128k of 8 answers
MESSAGE_CHARS = 32  # what a message costs a template besides its own characters
MAX_STOP_CHARS = 1024
MAX_SALT = 1024
SEEDS = 1 << 64
SAMPLING_FIELDS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
                   "min_tokens")
VALID_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

LOGPROBS_MODES: Mapping[str, LogprobsMode] = MappingProxyType({
    "raw_logprobs": "raw", "tempered_logprobs": "tempered", "processed_logprobs": "processed"})
MAX_CONTAINERS = 4 * MAX_ITEMS  # lists and objects of one body: messages, their contents and parts, and some more
MAX_DEPTH = 128
OPENING, CLOSING = b"[{", b"]}"
NOT_STRUCTURAL = bytes(set(range(256)) - set(OPENING + CLOSING + b'"'))
MAX_UNKNOWN = 64  # names of one request
SHOWN_NAMES, NAME_CHARS = 8, 64
PLACEHOLDER = "\x00text\x00"


@dataclass(frozen=True, slots=True)
class Options:
    """How answers are wanted, the prompt apart. ``sampling`` lacks the model's stop tokens and each choice's own seed.

    ``truncate``: how many of a prompt's last tokens are used; -1: as many as fit. ``tokens_as_ids``: log probabilities
    name tokens by their ids."""

    sampling: Sampling
    max_tokens: int | None = None  # None: what the context leaves
    max_tokens_field: str = "max_tokens"  # as the client called it
    seeded: bool = True  # the client gave the seed: the same prompt has the same answers
    n: int = 1
    stop: tuple[str, ...] = field(default=(), repr=False)
    keep_stop: bool = False  # in the text
    show_specials: bool = False  # in the text
    parse_markup: bool = False  # calls and reasoning are separated from the content
    tool_use: ToolUse | None = None
    reasoning_in_content: bool = False
    return_reasoning: bool = True
    top_logprobs: int | None = None
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    ignore_eos: bool = False
    truncate: int | None = None
    cache_salt: str = field(default="", repr=False)
    answer_id: str = ""  # "": a random one
    speculate: bool = True
    echo: bool = False  # the text begins with the prompt's
    prompt_logprobs: int | None = None  # returned as vLLM writes them
    logprobs_mode: LogprobsMode = "raw"
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = field(default=(), repr=False)
    grammar: Grammar | None = None  # what the answers are bound to
    fallback_grammar: Grammar | None = None  # if that one cannot be compiled
    grammar_field: str = ""  # the field that asks for it

    @property
    def prompt_top_logprobs(self) -> int | None:
        """Alternatives with which a prompt's tokens are scored; None: they are not."""
        echoed = self.top_logprobs if self.echo else None
        return max((count for count in (echoed, self.prompt_logprobs) if count is not None), default=None)

    @property
    def returns_prompt(self) -> bool:
        """Whether a prompt is returned with its answers."""
        return self.echo or self.prompt_logprobs is not None

    @property
    def returns_all_tokens(self) -> bool:
        """Whether every token is returned, those that end an answer too: scorers count them, and who trains on answers
        learns when to end."""
        return self.echo or self.return_token_ids or self.tokens_as_ids

    def token_namer(self, codec: TextCodec) -> Callable[[int], str]:
        """How log probabilities name a token: by text, or by id, since several tokens may have the same text."""
        return "token_id:{}".format if self.tokens_as_ids else codec.token_text

    def separates_markup(self, style: Style) -> bool:
        """Whether calls and reasoning are separated from the other text of an answer. If a grammar binds it from its
        first character on, only calls that the grammar forces or allows are."""
        if self.grammar is not None:
            return self.parse_markup and self.grammar_binds_calls
        reasoning = style.reasoning_marks is not None and (style.has_channels or not self.reasoning_in_content)
        return self.parse_markup and (reasoning or self.tool_use is not None)

    @property
    def grammar_binds_calls(self) -> bool:
        """Whether a grammar says how calls are written: as JSON without a mark before it."""
        return self.tool_use is not None and self.grammar is not None and self.grammar.kind == "json_schema"

    def stop_tokens(self, of_model: Sequence[int], vocab_size: int) -> tuple[int, ...]:
        """The stop tokens of an answer. A model with a reduced vocabulary may lack some of its own."""
        own = () if self.ignore_eos else [token for token in of_model if token < vocab_size]
        return tuple(dict.fromkeys((*own, *self.sampling.stop_token_ids)))

    @property
    def fields_by_need(self) -> dict[Need, str]:
        """What a target must support, and the field that asks for it."""
        fields: dict[Need, str] = {
            "grammar": self.grammar_field, "no_tokens": self.max_tokens_field,
            "prompt_logprobs": "prompt_logprobs" if self.prompt_logprobs is not None else "echo"}
        return {need: fields.get(need, need) for need in needs_of(
            self.grammar, self.prompt_top_logprobs, self.logprobs_mode, self.allowed_token_ids, self.bad_words,
            self.max_tokens)}


class StrictModel(BaseModel):
    """JSON types are kept: no string becomes a number, no unknown key is dropped."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)


def _whole_number(value: Any) -> Any:
    if type(value) is not float or not value.is_integer():
        return value
    if abs(value) >= SEEDS:  # the reader of JSON makes a float of it
        raise PydanticCustomError("too_large", "must be a whole number of at most 64 bits")
    return int(value)


WholeNumber = Annotated[int, BeforeValidator(_whole_number)]
Ids = Annotated[list[WholeNumber], Field(max_length=MAX_REQUESTED_STOP_TOKEN_IDS)]


class StreamOptions(StrictModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # chunks of equal lengths: ours are one event for many tokens anyway


class Generation(StrictModel):
    """The fields that both surfaces share. An absent field and null are the same."""

    model: str | None = Field(None, max_length=256)
    max_tokens: WholeNumber | None = Field(None, ge=0)
    temperature: float | None = None
    top_p: float | None = None
    top_k: WholeNumber | None = Field(None, ge=-1)
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = Field(None, max_length=MAX_LOGIT_BIASES)
    min_tokens: WholeNumber | None = None
    seed: WholeNumber | None = Field(None, ge=-(1 << 63), lt=1 << 64)
    stop: Annotated[list[Annotated[str, Field(max_length=MAX_STOP_CHARS)]], Field(max_length=MAX_STOPS)] | None = None
    include_stop_str_in_output: bool | None = None
    stop_token_ids: Ids | None = None
    n: WholeNumber | None = Field(None, ge=1)
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: WholeNumber | None = None
    request_id: str | None = None
    cache_salt: str | None = Field(None, max_length=MAX_SALT)
    prompt_logprobs: WholeNumber | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    logprobs_mode: Literal["raw_logprobs", "tempered_logprobs", "processed_logprobs"] | None = None
    allowed_token_ids: Annotated[list[WholeNumber], Field(min_length=1, max_length=MAX_ALLOWED)] | None = None
    bad_words: Annotated[list[Annotated[str, Field(max_length=MAX_BAD_WORD_CHARS)]],
                         Field(max_length=MAX_BAD_WORD_STRINGS)] | None = None
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
        return [value] if isinstance(value, str) else value

    @field_validator("stream_options", mode="before")
    @classmethod
    def _options_known(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, dict):
            return value
        return known_fields(value, StreamOptions.model_fields, {}, unknown_of(info), "stream_options.")

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _positive_or_all(cls, value: int | None) -> int | None:
        if value is not None and (value < -1 or value == 0):
            raise InvalidRequest("truncate_prompt_tokens", "must be -1 or at least 1")
        return value

    @field_validator("request_id")
    @classmethod
    def _valid_id(cls, value: str | None) -> str | None:
        if value is not None and not VALID_ID.fullmatch(value):
            raise InvalidRequest("request_id", "must be 1 to 128 letters, digits, '.', '_', ':' or '-'")
        return value

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.include_usage and self.stream_options and self.stream_options.continuous_usage_stats)

    def _options(self, max_tokens: int | None, top_logprobs: int | None) -> Options:
        """Raises InvalidRequest naming a value out of range."""
        given = {name: value for name in SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        if given.get("top_p") == 0:  # the likeliest token
            given |= {"temperature": 0.0, "top_p": 1.0}
        seed = None if self.seed == -1 else self.seed  # -1: a random one, as for vLLM and llama.cpp
        sampling = Sampling(**{"temperature": 1.0, **given}, top_k=max(self.top_k or 0, 0),
                            logit_bias=_biases(self.logit_bias or {}),
                            stop_token_ids=tuple(dict.fromkeys(self.stop_token_ids or ())),
                            seed=secrets.randbits(64) if seed is None else seed % SEEDS)
        binding = {name: value for name in FIELD_READERS if (value := getattr(self, name)) is not None}
        grammar_field, grammar = (grammar_of(binding) if binding else None) or ("", None)
        return Options(
            sampling, max_tokens, seeded=seed is not None, n=self.n or 1,
            stop=tuple(filter(None, self.stop or ())), keep_stop=bool(self.include_stop_str_in_output),
            show_specials=self.skip_special_tokens is False, top_logprobs=top_logprobs,
            return_token_ids=bool(self.return_token_ids), tokens_as_ids=bool(self.return_tokens_as_token_ids),
            ignore_eos=bool(self.ignore_eos),
            truncate=self.truncate_prompt_tokens, cache_salt=self.cache_salt or "", answer_id=self.request_id or "",
            speculate=self.speculate is not False, grammar=grammar, grammar_field=grammar_field,
            prompt_logprobs=self.prompt_logprobs, logprobs_mode=LOGPROBS_MODES[self.logprobs_mode or "raw_logprobs"],
            allowed_token_ids=tuple(dict.fromkeys(self.allowed_token_ids or ())),
            bad_words=tuple(dict.fromkeys(filter(None, self.bad_words or ()))))


Body = TypeVar("Body", bound=Generation)


def parse(kind: type[Body], raw: Mapping[str, Any], unknown: UnknownFields | None = None) -> Body:
    """``raw`` (what the JSON said) as a ``kind``. ``unknown`` takes the fields that nobody knows; None: they are
    refused. Raises InvalidRequest naming the first field that is wrong."""
    unknown = UnknownFields(strict=True) if unknown is None else unknown
    try:
        return kind.model_validate(known_fields(raw, kind.model_fields, REFUSED, unknown), context=unknown)
    except ValidationError as error:
        raise refusal_of(error, raw) from None


def unknown_of(info: ValidationInfo) -> UnknownFields:
    assert isinstance(info.context, UnknownFields)
    return info.context


def at_most(field: str, count: int, items: str) -> None:
    if count > MAX_ITEMS:
        raise InvalidRequest(field, f"must have at most {MAX_ITEMS} {items}")


def _biases(raw: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    for key in raw:
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise InvalidRequest("logit_bias", "keys must be token ids")
    return tuple(sorted({int(key): float(bias) for key, bias in raw.items()}.items()))


class UnknownFields:
    """The unknown fields of one request: refused by name if ``strict``, else ignored, and their names collected."""

    __slots__ = ("_at", "_names", "_pattern", "_strict")

    def __init__(self, strict: bool) -> None:
        self._strict = strict
        self._names: set[str] = set()
        self._at = self._pattern = ""  # the latest place, and the same without its numbers

    def __iter__(self) -> Iterator[str]:
        """The first few names, fit for a header and a log."""
        return iter(sorted({re.sub(r"[^\w.\[\]-]", "?", name[:NAME_CHARS], flags=re.ASCII)
                            for name in self._names})[:SHOWN_NAMES])

    def __bool__(self) -> bool:
        return bool(self._names)

    def add(self, name: str, at: str, known: Collection[str]) -> None:
        """``name`` is not among the ``known`` fields at the place ``at``. Raises InvalidRequest."""
        if self._strict:
            near = difflib.get_close_matches(name[:NAME_CHARS], known, n=1, cutoff=0.6)
            hint = f"; did you mean '{at}{near[0]}'?" if near else ""
            raise InvalidRequest((at + name)[:200] or "body", f"is not a known field{hint}", "unknown_parameter")
        if at != self._at:
            self._at, self._pattern = at, re.sub(r"\[\d+\]", "[]", at)
        self._names.add(self._pattern + name[:NAME_CHARS])
        if len(self._names) > MAX_UNKNOWN:
            raise InvalidRequest((at + name)[:200] or "body", f"is one of more than {MAX_UNKNOWN} unknown fields",
                                 "unknown_parameter")


def known_fields(raw: Mapping[str, Any], honoured: Collection[str], refused: Mapping[str, Refused],
                 unknown: UnknownFields, at: str = "") -> dict[str, Any]:
    """The ``honoured`` fields of ``raw``, an object at the place ``at``. Raises InvalidRequest for a ``refused``
    one."""
    kept = {}
    for name, value in raw.items():
        if name in honoured:
            kept[name] = value
        elif name in refused:
            if refused[name].refuses(value):
                raise InvalidRequest(at + name, f"is not served here; {refused[name].advice}", "unsupported_parameter")
        elif at or name not in INERT:
            unknown.add(name, at, honoured)
    return kept


def read_body(data: bytes | bytearray) -> Json:
    """The object that a request is. Raises InvalidRequest."""
    raw = read_json("body", data.removeprefix(BOM_UTF8))  # which editors and shells of Windows write before a text
    if not isinstance(raw, dict):
        raise InvalidRequest("body", "must be a JSON object")
    return raw


def read_json(field: str, data: bytes | bytearray) -> Any:
    """What ``data`` says. Raises InvalidRequest for ``field``."""
    if num_containers(data) > MAX_CONTAINERS:
        raise InvalidRequest(field, f"holds more than {MAX_CONTAINERS} lists and objects")
    try:
        found = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(field, f"is not JSON: {error.msg} at byte {error.pos}", "invalid_json") from None
    if _count(data) > MAX_DEPTH and _too_deep(_outside_strings(data)):
        raise InvalidRequest(field, f"has lists and objects in one another more than {MAX_DEPTH} deep")
    return found


def num_containers(data: bytes | bytearray) -> int:
    """The lists and objects of a JSON text, or enough of them; those in its strings count only where there are few."""
    num = _count(data)
    if num <= MAX_CONTAINERS:
        return num
    early = _count(_outside_strings(data[:len(data) // 4]))
    return early if early > MAX_CONTAINERS else _count(_outside_strings(data))


def _count(data: bytes | bytearray) -> int:
    return data.count(b"[") + data.count(b"{")


def _outside_strings(data: bytes | bytearray) -> bytes:
    """What opens and closes lists and objects, outside of strings."""
    marks = data.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, NOT_STRUCTURAL)
    return b"".join(marks.replace(b'""', b"").split(b'"')[::2])  # most strings hold none, and two quotes change nothing


def _too_deep(outside: bytes) -> bool:
    """Than ``MAX_DEPTH``."""
    left = outside.replace(b"{", b"[").replace(b"}", b"]")  # alike, so that each turn takes one level away
    for _ in range(MAX_DEPTH):
        if not left:
            return False
        left = left.replace(b"[]", b"")
    return left != b""


class Reply(Protocol):
    """How one endpoint writes its answers. ``detailed``: whether more of tokens is returned than their texts."""

    detailed: bool

    def opening(self, number: int) -> Json | None: ...

    def chunk(self, number: int, delta: TextDelta) -> Json | None: ...

    def usage_chunk(self, usage: Usage) -> Json: ...

    def body(self, answers: Sequence[Sequence[TextDelta]], usage: Usage) -> Json: ...


class Chunks:
    """The chunks of a stream as JSON. A chunk with nothing but text is serialized once; then each text is put into it.
    ``usage``: of one answer, for every chunk, as in vLLM; None: no usage in chunks."""

    __slots__ = ("_head_and_tail", "_reply", "_usage")

    def __init__(self, reply: Reply, usage: Callable[[int], Usage] | None = None) -> None:
        self._reply = reply
        self._usage = usage
        self._head_and_tail: dict[int, tuple[bytes, bytes]] = {}

    def opening(self, number: int, prompt_tokens: int) -> Json | None:
        """Before any token."""
        chunk = self._reply.opening(number)
        return chunk if chunk is None or self._usage is None else chunk | usage_fields(Usage(prompt_tokens, 0))

    def chunk(self, number: int, delta: TextDelta) -> bytes:
        """b"" for an empty chunk."""
        if self._reply.detailed or delta.finish or self._usage is not None:
            chunk = self._reply.chunk(number, delta)
            if chunk is not None and self._usage is not None:
                chunk |= usage_fields(self._usage(number))
            return b"" if chunk is None else orjson.dumps(chunk)
        if not delta.text:
            return b""
        head_and_tail = self._head_and_tail.get(number)
        if head_and_tail is None:
            template = orjson.dumps(self._reply.chunk(number, TextDelta(PLACEHOLDER)))
            head, _, tail = template.rpartition(orjson.dumps(PLACEHOLDER))
            head_and_tail = self._head_and_tail[number] = head, tail
        return head_and_tail[0] + orjson.dumps(delta.text) + head_and_tail[1]


@dataclass(frozen=True, slots=True)
class Plan:
    """A request after all cheap checks. Of ``messages`` and ``prompts`` one is empty."""

    endpoint: str
    model: str
    options: Options
    messages: Any = field(default=(), repr=False)  # objects, or these as JSON
    prompts: Sequence[str | bytes | Sequence[int]] = field(default=(), repr=False)  # texts, too, may be UTF-8
    begun: PartialAnswer | None = None  # of its only answer
    turn: Turn = ASSISTANT
    add_special_tokens: bool = True  # to prompts that are texts
    num_chars: int | None = None  # ``size``, where it is known

    def repeated(self, seed: int, identity: str) -> Plan:
        """For the same answer again: of this seed, and of the model whose tag ``identity`` is."""
        options = replace(self.options, sampling=replace(self.options.sampling, seed=seed))
        return replace(self, options=options, begun=PartialAnswer(identity, ()))

    @property
    def num_answers(self) -> int:
        return max(1, len(self.prompts)) * self.options.n

    @property
    def max_scored_tokens(self) -> int | None:
        """Tokens that each answer may have with its log probabilities; None: no limit."""
        top = self.options.top_logprobs
        return None if top is None else MAX_ANSWER_SCORES // (self.num_answers * (1 + top))

    @property
    def size(self) -> int:
        """Characters and token ids."""
        begun, names = 0 if self.begun is None else len(self.begun.tokens), _num_bytes(self.turn.variables)
        words = sum(MESSAGE_CHARS + len(word) for word in self.options.bad_words)  # each is spelt by itself
        return self.num_chars or sum(map(_size, self.messages)) + sum(map(len, self.prompts)) + names + begun + words


@dataclass(frozen=True, slots=True)
class Job:
    """A request that can be run: prompts as tokens, and what each answer may take."""

    endpoint: str
    model: str
    prompts: tuple[Sequence[int], ...] = field(repr=False)
    max_tokens: tuple[int, ...]  # one a prompt
    options: Options
    vocab_size: int
    continues: bool = False  # the answers go on from the prompts, not a turn of their own
    resumed_tokens: Sequence[int] = field(default=(), repr=False)  # of the only answer, that its client already has
    identity: Identity | None = None  # of the model that must answer; None: any
    echoed_texts: tuple[str, ...] = field(default=(), repr=False)  # of the prompts, where they are echoed
    bad_words: tuple[tuple[int, ...], ...] = field(default=(), repr=False)

    def returned_prompts(self, codec: TextCodec) -> Prompts | None:
        """The prompts to return with the answers; None: they are not."""
        options = self.options
        if not options.returns_prompt:
            return None
        echoed = options.top_logprobs if options.echo else None
        return Prompts(codec, self.prompts, options.n, self.echoed_texts, echoed, options.prompt_logprobs)

    def markups(self, codec: TextCodec) -> list[Markup | NamedCall]:
        """A parser of calls and reasoning for each answer to the only prompt; [] if not asked for."""
        options, count = self.options, self.num_answers
        if not options.separates_markup(codec.style):
            return []
        tool_use = options.tool_use
        if tool_use is not None and tool_use.named:
            return [NamedCall(tool_use.choice) for _ in range(count)]
        if tool_use is not None and tool_use.forced:
            return [Markup(BARE, tool_use.schemas, calls_only=True) for _ in range(count)]
        schemas, max_calls = ({}, None) if tool_use is None else (tool_use.schemas, None if tool_use.parallel else 1)
        if options.grammar_binds_calls:
            return [Markup(BARE, schemas, call_or_text=True) for _ in range(count)]
        starts_in_reasoning = codec.starts_in_reasoning(self.prompts[0], self.continues)
        return [Markup(codec.style, schemas, starts_in_reasoning, max_calls,
                       reasoning_in_content=options.reasoning_in_content) for _ in range(count)]

    @property
    def num_scored(self) -> int:
        """How many choices of each prompt return its log probabilities. A chat returns them once."""
        if self.options.prompt_top_logprobs is None:
            return 0
        return 1 if self.endpoint == "chat" else self.options.n

    @property
    def num_prompt_tokens_charged(self) -> int:
        """Tokens that its tenant pays before any is answered."""
        # The head is as much work for a scored token as for an answered one; a token that the client already has is
        # computed like a prompt's.
        return sum(map(len, self.prompts)) * (1 + self.num_scored) + len(self.resumed_tokens)

    @property
    def num_scores(self) -> int:
        """Log probabilities of the prompts' tokens that are returned."""
        return sum(map(len, self.prompts)) * self.num_scored * (1 + (self.options.prompt_top_logprobs or 0))

    @property
    def num_answers(self) -> int:
        return len(self.prompts) * self.options.n


def _size(message: Mapping[str, Any]) -> int:
    """Characters of all that a template may write of it."""
    return MESSAGE_CHARS + sum(len(part) if isinstance(part, str) else _num_bytes(part) for part in message.values())


def _num_bytes(part: Any) -> int:
    return len(orjson.dumps(part)) if part else 0
