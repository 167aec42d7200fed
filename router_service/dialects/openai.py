"""The OpenAI API, as far as chats and completions share it: bodies, checked to the last field; chunks.

Rules:
1. The table (``fields``) decides about each field: honoured, inert, or refused with 400 and its name. Other fields are
   unknown: ignored and named in a header, or refused where the router is strict. Their names are limited in length and
   number.
2. Whole numbers may be written as 1.0; an empty stop string is none.
3. Counts are checked first: a list that is too long is not read. HTTP and gRPC both use this module, so limits and
   messages are the same.
4. Lists and objects are counted before JSON is parsed: each takes two bytes of text but a hundred of memory, and a
   million of them would block the event loop. They may be nested ``MAX_DEPTH`` deep, because code that walks them is
   recursive.
5. An empty chunk is not made (None).
6. An ``Asked`` is a request after all cheap checks; a ``Job`` is ready to run.

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
from router_service.dialects.formats import READERS, grammar_of
from router_service.dialects.problems import refusal_of
from router_service.dialects.prompts import Prompts
from router_service.dialects.tools import Json, ToolUse
from router_service.dialects.usage import usage_told
from router_service.text.deltas import TextDelta
from router_service.text.marks import BARE, Style
from router_service.text.markup import Markup, Named
from router_service.text.tokens import ASSISTANT, TextCodec, Turn
from slipstream.base.errors import InvalidRequest
from slipstream.protocol.chat import MAX_BIASES, MAX_ITEMS, MAX_STOP_IDS, MAX_STOPS, MAX_WORD, MAX_WORDS, Begun, Usage
from slipstream.protocol.grammar import Grammar
from slipstream.protocol.identity import Identity
from slipstream.protocol.requests import MAX_ALLOWED, MAX_TOP_LOGPROBS, LogprobsMode, Need, Sampling, needs_of

MAX_ANSWER_SCORES = 1 << 20  # log probabilities of its answers: 32k tokens with 20 alternatives, or 128k of 8 answers
MESSAGE = 32  # characters that one costs a template besides its own
MAX_STOP_CHARS = 1024
MAX_SALT = 1024
SEEDS = 1 << 64
SAMPLED = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens")
DECENT_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

MODES: Mapping[str, LogprobsMode] = MappingProxyType({
    "raw_logprobs": "raw", "tempered_logprobs": "tempered", "processed_logprobs": "processed"})
MAX_CONTAINERS = 4 * MAX_ITEMS  # lists and objects of one body: messages, their contents and parts, and some more
MAX_DEPTH = 128
OPENING, CLOSING = b"[{", b"]}"
OTHERS = bytes(set(range(256)) - set(OPENING + CLOSING + b'"'))
MAX_UNKNOWN = 64  # names of one request
TOLD_NAMES, NAME_CHARS = 8, 64
PLACE = "\x00text\x00"


@dataclass(frozen=True, slots=True)
class Options:
    """How answers are wanted, the prompt apart. ``sampling`` lacks the model's stop tokens and each choice's own seed.

    ``truncate``: tokens of a prompt that count, the last ones; -1: as many as fit. ``token_ids``: they are told;
    ``by_ids``: log probabilities name tokens by them."""

    sampling: Sampling
    max_tokens: int | None = None  # None: what the context leaves
    limited_by: str = "max_tokens"  # the field that says so
    seeded: bool = True  # by the client: the same prompt has the same answers
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
    by_ids: bool = False
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

    @property
    def tells_all(self) -> bool:
        """Whether each token that was said is told, those that end an answer too: who scores counts them, and who
        trains on what was said learns when to end."""
        return self.echo or self.token_ids or self.by_ids

    def names(self, codec: TextCodec) -> Callable[[int], str]:
        """How log probabilities name a token: by text, or by id, since several tokens may have the same text."""
        return "token_id:{}".format if self.by_ids else codec.token_text

    def told_apart(self, style: Style) -> bool:
        """Whether calls and reasoning are told apart from the other words of an answer. Where a grammar binds it from
        its first character on, only calls that it forces or lets through are."""
        if self.grammar is not None:
            return self.parsed and self.calls_bound
        reasons = style.thoughts is not None and (style.channels or not self.mixed)
        return self.parsed and (reasons or self.use is not None)

    @property
    def calls_bound(self) -> bool:
        """Whether a grammar says how calls are written: as JSON that nothing begins."""
        return self.use is not None and self.grammar is not None and self.grammar.kind == "json_schema"

    def ends(self, own: Sequence[int], vocab_size: int) -> tuple[int, ...]:
        """The stop tokens of an answer, from the model's ``own``: a model with a reduced vocabulary may lack some of
        them."""
        kept = () if self.ignore_eos else [token for token in own if token < vocab_size]
        return tuple(dict.fromkeys((*kept, *self.sampling.stop_token_ids)))

    @property
    def asked_by(self) -> dict[Need, str]:
        """What a target must know how to honour, and the field that asks for it."""
        fields: dict[Need, str] = {
            "grammar": self.bound_by, "no_tokens": self.limited_by,
            "prompt_logprobs": "prompt_logprobs" if self.prompt_logprobs is not None else "echo"}
        return {need: fields.get(need, need) for need in needs_of(
            self.grammar, self.scored, self.logprobs_mode, self.allowed_token_ids, self.bad_words, self.max_tokens)}


class Strict(BaseModel):
    """JSON types as they are: no string becomes a number, no key goes unnoticed."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)


def _whole(value: Any) -> Any:
    if type(value) is not float or not value.is_integer():
        return value
    if abs(value) >= SEEDS:  # the reader of JSON makes a float of it
        raise PydanticCustomError("too_large", "must be a whole number of at most 64 bits")
    return int(value)


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
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: Whole | None = None
    request_id: str | None = None
    cache_salt: str | None = Field(None, max_length=MAX_SALT)
    prompt_logprobs: Whole | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    logprobs_mode: Literal["raw_logprobs", "tempered_logprobs", "processed_logprobs"] | None = None
    allowed_token_ids: Annotated[list[Whole], Field(min_length=1, max_length=MAX_ALLOWED)] | None = None
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
        return known(value, fields, {}, unknown_of(info), "stream_options.") if isinstance(value, dict) else value

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

    def wanted(self, max_tokens: int | None, top_logprobs: int | None) -> Options:
        """Raises InvalidRequest naming a value out of range."""
        given = {name: value for name in SAMPLED if (value := getattr(self, name)) is not None}
        if given.get("top_p") == 0:  # of what is likeliest, the first
            given |= {"temperature": 0.0, "top_p": 1.0}
        seed = None if self.seed == -1 else self.seed  # -1: a random one, as for vLLM and llama.cpp
        sampling = Sampling(**{"temperature": 1.0, **given}, top_k=max(self.top_k or 0, 0),
                            logit_bias=_biases(self.logit_bias or {}),
                            stop_token_ids=tuple(dict.fromkeys(self.stop_token_ids or ())),
                            seed=secrets.randbits(64) if seed is None else seed % SEEDS)
        binding = {name: value for name in READERS if (value := getattr(self, name)) is not None}
        bound_by, grammar = (grammar_of(binding) if binding else None) or ("", None)
        return Options(
            sampling, max_tokens, seeded=seed is not None, n=self.n or 1,
            stop=tuple(filter(None, self.stop or ())), keep_stop=bool(self.include_stop_str_in_output),
            show_specials=self.skip_special_tokens is False, top_logprobs=top_logprobs,
            token_ids=bool(self.return_token_ids), by_ids=bool(self.return_tokens_as_token_ids),
            ignore_eos=bool(self.ignore_eos),
            truncate=self.truncate_prompt_tokens, salt=self.cache_salt or "", answer_id=self.request_id or "",
            speculate=self.speculate is not False, grammar=grammar, bound_by=bound_by,
            prompt_logprobs=self.prompt_logprobs, logprobs_mode=MODES[self.logprobs_mode or "raw_logprobs"],
            allowed_token_ids=tuple(dict.fromkeys(self.allowed_token_ids or ())),
            bad_words=tuple(dict.fromkeys(filter(None, self.bad_words or ()))))


Body = TypeVar("Body", bound=Generation)


def parse(kind: type[Body], raw: Mapping[str, Any], unknown: Unknown | None = None) -> Body:
    """``raw`` (what the JSON said) as a ``kind``. ``unknown`` takes the fields that nobody knows; None: they are
    refused. Raises InvalidRequest naming the first field that is wrong."""
    unknown = Unknown(strict=True) if unknown is None else unknown
    try:
        return kind.model_validate(known(raw, kind.model_fields, REFUSED, unknown), context=unknown)
    except ValidationError as error:
        raise refusal_of(error, raw) from None


def unknown_of(info: ValidationInfo) -> Unknown:
    assert isinstance(info.context, Unknown)
    return info.context


def at_most(field: str, count: int, items: str) -> None:
    if count > MAX_ITEMS:
        raise InvalidRequest(field, f"must have at most {MAX_ITEMS} {items}")


def _biases(raw: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    for key in raw:
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise InvalidRequest("logit_bias", "keys must be token ids")
    return tuple(sorted({int(key): float(bias) for key, bias in raw.items()}.items()))


class Unknown:
    """The fields of one request that nobody knows: refused by name where it is ``strict``, else left out and kept by
    name."""

    __slots__ = ("_at", "_names", "_place", "_strict")

    def __init__(self, strict: bool) -> None:
        self._strict = strict
        self._names: set[str] = set()
        self._at = self._place = ""  # the latest, and how it is told: once for all fields of an object

    def __iter__(self) -> Iterator[str]:
        """The first few names, fit for a header and a log."""
        return iter(sorted({re.sub(r"[^\w.\[\]-]", "?", name[:NAME_CHARS], flags=re.ASCII)
                            for name in self._names})[:TOLD_NAMES])

    def __bool__(self) -> bool:
        return bool(self._names)

    def met(self, name: str, at: str, known: Collection[str]) -> None:
        """``name`` is not ``known`` at the place ``at``. Raises InvalidRequest."""
        if self._strict:
            near = difflib.get_close_matches(name[:NAME_CHARS], known, n=1, cutoff=0.6)
            hint = f"; did you mean '{at}{near[0]}'?" if near else ""
            raise InvalidRequest((at + name)[:200] or "body", f"is not a known field{hint}", "unknown_parameter")
        if at != self._at:
            self._at, self._place = at, re.sub(r"\[\d+\]", "[]", at)
        self._names.add(self._place + name[:NAME_CHARS])
        if len(self._names) > MAX_UNKNOWN:
            raise InvalidRequest((at + name)[:200] or "body", f"is one of more than {MAX_UNKNOWN} unknown fields",
                                 "unknown_parameter")


def known(raw: Mapping[str, Any], honoured: Collection[str], refused: Mapping[str, Refused], unknown: Unknown,
          at: str = "") -> dict[str, Any]:
    """What of ``raw``, an object at the place ``at``, is ``honoured``. Raises InvalidRequest for the first field that
    is ``refused``."""
    kept = {}
    for name, value in raw.items():
        if name in honoured:
            kept[name] = value
        elif name in refused:
            if refused[name].asks(value):
                raise InvalidRequest(at + name, f"is not served here; {refused[name].advice}", "unsupported_parameter")
        elif at or name not in INERT:
            unknown.met(name, at, honoured)
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
    if _count(data) > MAX_DEPTH and _deeper(_outside_strings(data)):
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
    marks = data.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, OTHERS)
    return b"".join(marks.replace(b'""', b"").split(b'"')[::2])  # most strings hold none, and two quotes change nothing


def _deeper(outside: bytes) -> bool:
    """Than ``MAX_DEPTH``."""
    left = outside.replace(b"{", b"[").replace(b"}", b"]")  # alike, so that each turn takes one level away
    for _ in range(MAX_DEPTH):
        if not left:
            return False
        left = left.replace(b"[]", b"")
    return left != b""


class Reply(Protocol):
    """How one endpoint writes its answers. ``detailed``: whether more than texts is told of tokens."""

    detailed: bool

    def opening(self, number: int) -> Json | None: ...

    def chunk(self, number: int, delta: TextDelta) -> Json | None: ...

    def usage_chunk(self, usage: Usage) -> Json: ...

    def whole(self, answers: Sequence[Sequence[TextDelta]], usage: Usage) -> Json: ...


class Chunks:
    """The chunks of a stream as JSON. Those that say a text and nothing else are written once, then again around every
    text. ``usage``: what each of them tells besides of its answer, as in vLLM; None: nothing."""

    __slots__ = ("_around", "_reply", "_usage")

    def __init__(self, reply: Reply, usage: Callable[[int], Usage] | None = None) -> None:
        self._reply = reply
        self._usage = usage
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def opening(self, number: int, prompt_tokens: int) -> Json | None:
        """Before any token."""
        chunk = self._reply.opening(number)
        return chunk if chunk is None or self._usage is None else chunk | usage_told(Usage(prompt_tokens, 0))

    def written(self, number: int, delta: TextDelta) -> bytes:
        """b"" for a chunk that is not made."""
        if self._reply.detailed or delta.finish or self._usage is not None:
            chunk = self._reply.chunk(number, delta)
            if chunk is not None and self._usage is not None:
                chunk |= usage_told(self._usage(number))
            return b"" if chunk is None else orjson.dumps(chunk)
        if not delta.text:
            return b""
        around = self._around.get(number)
        if around is None:
            head, _, tail = orjson.dumps(self._reply.chunk(number, TextDelta(PLACE))).rpartition(orjson.dumps(PLACE))
            around = self._around[number] = head, tail
        return around[0] + orjson.dumps(delta.text) + around[1]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as far as it could be checked at no cost. Of ``messages`` and ``prompts`` one is empty."""

    endpoint: str
    model: str
    options: Options
    messages: Any = field(default=(), repr=False)  # objects, or these as JSON
    prompts: Sequence[str | bytes | Sequence[int]] = field(default=(), repr=False)  # texts, too, may be UTF-8
    begun: Begun | None = None  # of its only answer
    turn: Turn = ASSISTANT
    add_special_tokens: bool = True  # to prompts that are texts
    num_chars: int | None = None  # ``size``, where it is known

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
        begun, names = 0 if self.begun is None else len(self.begun.tokens), _num_bytes(self.turn.names)
        words = sum(MESSAGE + len(word) for word in self.options.bad_words)  # each is spelt by itself
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
    begun: Sequence[int] = field(default=(), repr=False)  # tokens of the only answer that its client has
    identity: Identity | None = None  # whose answer it is to be; None: anybody's
    shown: tuple[str, ...] = field(default=(), repr=False)  # the prompts as texts, where they are echoed
    bad_words: tuple[tuple[int, ...], ...] = field(default=(), repr=False)

    def told(self, codec: TextCodec) -> Prompts | None:
        """The prompts to return with the answers; None: none."""
        options = self.options
        if not options.tells_prompt:
            return None
        echoed = options.top_logprobs if options.echo else None
        return Prompts(codec, options.names(codec), self.prompts, options.n, self.shown, echoed,
                       options.prompt_logprobs)

    def markups(self, codec: TextCodec) -> list[Markup | Named]:
        """A parser of calls and reasoning for each answer to the only prompt; [] if not asked for."""
        options, count = self.options, self.num_answers
        if not options.told_apart(codec.style):
            return []
        use = options.use
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
    return MESSAGE + sum(len(part) if isinstance(part, str) else _num_bytes(part) for part in message.values())


def _num_bytes(part: Any) -> int:
    return len(orjson.dumps(part)) if part else 0
