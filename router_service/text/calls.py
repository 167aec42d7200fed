"""Tool calls as each model family writes them, parsed piece by piece, and passed on as soon as they are known.

Arguments come out as the model wrote them where it wrote JSON, else as JSON made of names and values, each typed by
the tool's schema. Nine forms are known: JSON in ``<tool_call>`` (Hermes, Qwen, Granite), ``<TOOLCALL>`` (Nemotron) or
``<tool_calls>`` (Jamba), ``<function=`` in the first (Qwen's coders, Seed), ``<arg_key>`` (GLM) or a fence (Hunyuan) in
it, ``<invoke name=`` (MiniMax), ``[TOOL_CALLS]`` (Mistral), sections of calls (DeepSeek, Kimi), headers that name a
function (GPT-OSS), bare JSON (Llama 3).
"""

from __future__ import annotations

import ast
import json
import re
import secrets
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any

import orjson

from router_service.text.marks import CLOSERS, CODER, GLM, HERMES, HUNYUAN, INVOKE, MINIMAX, SECTIONS, Pairs, Section
from router_service.text.scanner import NoCall, Parser, Scanner, Words

CALL_ID_LENGTH = 9  # characters: Mistral's templates take no other number
MAX_UNCLOSED = 8  # values of one answer that nothing closes
# Of a value that is read as Python: some 10 ms, and no deeper than it nests.
MAX_PYTHON_LENGTH, MAX_PYTHON_BRACKETS = 8192, 128
ARGUMENTS = ("arguments", "parameters")
FENCE, NAME_END = "```", "<tool_sep>"  # behind a function's name, of Hunyuan's models
NAME = re.compile(r"[\w.:-]{1,128}")
AFTER_CALL = Words((*CLOSERS, CODER.begin, INVOKE.begin, *CLOSERS.values()))  # marks that may follow one
RefTypes = dict[str, set[str]]  # types of parts of a schema, by how it refers to them
NO_ARGUMENTS = ("", "null", '""')  # how a model writes that there are no arguments
# From Python 3.12 on its parser tells stderr of each odd escape or number in a text: thousands of lines for one value.
warnings.filterwarnings("ignore", module="<unknown>")


@dataclass(slots=True)
class CallDelta:
    """A piece of one call; the first one of each has its ``name``."""

    index: int
    name: str = ""
    arguments: str = ""


class CallParser:
    """The calls in one answer's text. ``tools``: names of callable functions -> their schemas; ``max_calls``: how
    many to pass on; ``emit``: called with each piece."""

    def __init__(self, scanner: Scanner, tools: Mapping[str, Any], max_calls: int | None,
                 emit: Callable[[CallDelta], None]) -> None:
        self._scanner = scanner
        self._tools = tools
        self._ref_types = dict[str, RefTypes]()  # of the tools whose arguments were typed
        self._max_calls = max_calls
        self._emit = emit
        self._passed_on = False  # the latest call; of the others nothing is kept
        self._latest_arguments: list[str] = []  # pieces, of the latest call that is passed on
        self._num_unclosed = 0  # values that nothing closed; what follows each was read twice
        self.count = 0

    @property
    def complete(self) -> bool:
        """Whether there are calls, and the latest did not break off."""
        return is_object(self._latest_arguments)

    def read(self, opener: str) -> Parser:
        """The calls that ``opener`` began. Raises NoCall."""
        if opener == "[TOOL_CALLS]":
            yield from self._mistral()
        elif opener == CODER.begin:
            yield from self._pairs(CODER, known_only=True)
            yield from self._scanner.skip_mark(CLOSERS[HERMES])
        elif section := next((section for section in SECTIONS if section.begin == opener), None):
            yield from self._section(section)
        elif opener == MINIMAX:
            yield from self._minimax()
        else:
            yield from self._tool_call(CLOSERS.get(opener, CLOSERS[HERMES]))

    def read_grammar_call(self) -> Parser:
        """One call as a grammar makes it: its name, then its arguments. Raises NoCall at the first character of
        anything else."""
        if self._scanner.unread[0] != "{":
            raise NoCall
        yield from self._object(known_only=True, ordered=True)

    def _tool_call(self, closer: str) -> Parser:
        yield from self._scanner.skip_blanks()
        if closer == CLOSERS[HUNYUAN] and (yield from self._scanner.starts_with(HERMES)):
            return  # each call has marks of its own, which come next
        if (yield from self._scanner.starts_with(CODER.begin)):
            self._scanner.consume(len(CODER.begin))
            yield from self._pairs(CODER)
        elif self._scanner.unread[:1] in ("{", "["):
            yield from self.read_objects()
        else:
            name, mark = yield from self._scanner.read_before(Words((FENCE, GLM.name_end, closer)))
            self._scanner.unread = mark + self._scanner.unread
            yield from self._fenced(name, closer) if mark == FENCE else self._pairs(replace(GLM, end=closer), name)
            return
        yield from self._scanner.skip_mark(closer, ",}]")  # small models close too much

    def _fenced(self, name: str, closer: str) -> Parser:
        """The arguments of a call of ``name`` as JSON in a fence."""
        fence, mark = yield from self._scanner.read_before(Words(("{", closer)))
        self._scanner.unread = mark + self._scanner.unread
        if mark != "{" or len(fence.split()) > 1 or not NAME.fullmatch(name.strip()):
            raise NoCall
        yield from self.read_arguments(name.strip())
        yield from self._scanner.skip_mark(FENCE)
        yield from self._scanner.skip_mark(closer)

    def _minimax(self) -> Parser:
        """One call or several, as MiniMax's models write them."""
        count_before = self.count
        yield from self._scanner.skip_blanks()
        while (yield from self._scanner.starts_with(INVOKE.begin)):
            self._scanner.consume(len(INVOKE.begin))
            yield from self._pairs(INVOKE)
            self._scanner.consumed = []
            yield from self._scanner.skip_blanks()
        if self.count == count_before:
            raise NoCall
        yield from self._scanner.skip_mark(CLOSERS[MINIMAX])

    def _pairs(self, marks: Pairs, begun: str = "", known_only: bool = False) -> Parser:
        """A name, of which ``begun`` was read, and arguments between marks. ``known_only``: only known tools are
        called, as always without arguments."""
        rest, mark = yield from self._scanner.read_before(Words((marks.name_end, marks.end)))
        name = (begun + rest).strip().removesuffix(NAME_END)
        if name not in self._tools and (known_only or mark != marks.name_end or not NAME.fullmatch(name)):
            raise NoCall
        schema = self._tools.get(name)
        properties = schema.get("properties") if isinstance(schema, dict) else None
        if name not in self._ref_types:
            self._ref_types[name] = _types_of_refs(schema)
        self._begin_call(name, "{")
        first = True
        keys = Words((marks.key, marks.end, *CLOSERS.values()))
        if mark == marks.key_end:
            _, mark = yield from self._scanner.read_before(keys)
        while mark == marks.key:
            key, _ = yield from self._scanner.read_before(Words((marks.key_end,)))
            if marks.value:
                yield from self._scanner.read_before(Words((marks.value,)))
            value, mark = yield from self._value(marks, keys)
            if not mark:
                return
            value = value.removeprefix(marks.padding).removesuffix(marks.padding)
            text = ("" if first else ", ") + f"{json.dumps(key.strip(), ensure_ascii=False)}: "
            property_schema = properties.get(key.strip()) if isinstance(properties, dict) else None
            self._add_arguments(text + _as_json(value, _schema_types(property_schema, self._ref_types[name])))
            first = False
            mark = mark.removeprefix(marks.padding)
            if mark == marks.value_end:
                _, mark = yield from self._scanner.read_before(keys)
        if mark or not self._scanner.cut:  # some answers end here, as where a stop string is the mark
            self._add_arguments("}")

    def _value(self, marks: Pairs, keys: Words) -> Parser:
        """(a value, the mark that ends it). Some models forget to close a value, and some values contain marks: it ends
        at the first mark that one of its followers follows."""
        followers: dict[str, Words | None] = {marks.value_end: keys, marks.padding + marks.end: AFTER_CALL}
        if marks.padding:
            followers[marks.padding + marks.key] = None  # any text may follow
        ends, pieces = Words(tuple(followers)), list[str]()
        while True:
            text, mark = yield from self._scanner.read_before(ends)
            pieces.append(text)
            words = followers.get(mark)
            if not mark:
                return self._unclosed_value("".join(pieces), marks)
            if words is None or (yield from self._scanner.followed_by(words)):
                return "".join(pieces), mark
            pieces.append(mark)

    def _unclosed_value(self, value: str, marks: Pairs) -> tuple[str, str]:
        """The value up to the first mark that could end it; what follows that is read again."""
        found = Words((marks.value_end, marks.end, *CLOSERS.values())).find(value)
        if found is None or self._scanner.cut or self._num_unclosed == MAX_UNCLOSED:
            return value, ""
        self._num_unclosed += 1
        start, mark = found
        self._scanner.unread = value[start + len(mark):]
        return value[:start], marks.end

    def _mistral(self) -> Parser:
        yield from self._scanner.skip_blanks()
        if self._scanner.unread[:1] in ("{", "["):
            yield from self.read_objects()
            return
        name, mark = yield from self._scanner.read_before(Words(("[ARGS]", "[CALL_ID]", "{")))
        if mark == "[CALL_ID]":
            _, mark = yield from self._scanner.read_before(Words(("[ARGS]", "{")))
        if mark == "{":
            self._scanner.unread = "{" + self._scanner.unread
        if not mark or not name.strip():
            raise NoCall
        yield from self.read_arguments(name.strip())

    def _section(self, marks: Section) -> Parser:
        calls = Words((marks.call, marks.end))
        while True:
            text, mark = yield from self._scanner.read_before(calls)
            if mark != marks.call:
                if text.strip():  # it stands in no call
                    raise NoCall
                return
            head, mark = yield from self._scanner.read_before(Words((marks.arguments, marks.end_call)))
            if not mark:
                raise NoCall
            between, mark = yield from self._scanner.read_before(Words(("{", marks.end_call)))
            if mark != "{" and (not mark or between.strip()):
                raise NoCall
            # Some models write no arguments.
            self._scanner.unread = ("{" if mark == "{" else "{}" + mark) + self._scanner.unread
            name = between.partition("\n")[0] if "```" in between else head
            yield from self.read_arguments(re.sub(r"^functions\.|:\d+\s*$", "", name.strip()).strip())
            _, mark = yield from self._scanner.read_before(Words((marks.end_call, marks.end)))
            self._scanner.consumed = []
            if mark == marks.end:  # some models forget to end a call
                return

    def read_objects(self, known_only: bool = False) -> Parser:
        """Calls as JSON, or a list of them. ``known_only``: only of known tools, as without an opener. Raises
        NoCall."""
        is_list = self._scanner.unread[0] == "["
        if is_list:
            self._scanner.consume(1)
        while True:
            yield from self._scanner.skip_blanks(",;" if is_list or known_only else "")
            if self._scanner.unread[:1] != "{":
                if is_list and self._scanner.unread[:1] == "]":
                    self._scanner.consume(1)
                    return
                if known_only and self.count and not self._scanner.unread:
                    return
                raise NoCall
            yield from self._object(known_only)
            if not (is_list or known_only):
                yield from self._scanner.skip_blanks(";")
                if self._scanner.unread[:1] != "{":
                    return
            self._scanner.consumed = []

    def _object(self, known_only: bool, ordered: bool = False) -> Parser:
        name, arguments, begun = "", "", False
        self._scanner.consume(1)
        while True:
            yield from self._scanner.skip_blanks(",")
            if self._scanner.unread[:1] == "}":
                self._scanner.consume(1)
                break
            key = parse_json((yield from self._scanner.read_value()))
            if ordered and not begun and key != (ARGUMENTS[0] if name else "name"):
                raise NoCall
            yield from self._scanner.skip_blanks()
            if not isinstance(key, str) or self._scanner.unread[:1] != ":":
                raise NoCall
            self._scanner.consume(1)
            yield from self._scanner.skip_blanks()
            if key in ARGUMENTS and name and self._scanner.unread[:1] == "{" and not begun:
                begun = True
                yield from self.read_arguments(name)
                continue
            if ordered and not begun and name:
                raise NoCall
            raw = yield from self._scanner.read_value()
            if key in ARGUMENTS:
                arguments = raw
            elif key == "name":
                value = parse_json(raw)
                if not isinstance(value, str) or not value or (known_only and value not in self._tools):
                    raise NoCall
                name = value
        if not begun:
            if not name or ordered:
                raise NoCall
            decoded = parse_json(arguments)
            encoded = decoded if isinstance(decoded, str) and decoded.startswith("{") else arguments
            self._begin_call(name, "{}" if arguments in NO_ARGUMENTS else encoded)

    def read_arguments(self, name: str) -> Parser:
        """The arguments of a call of ``name``. Raises NoCall."""
        yield from self._scanner.skip_blanks()
        if not name or self._scanner.unread[:1] != "{":
            raise NoCall
        self._begin_call(name, "")
        yield from self._scanner.read_value(self._add_arguments)

    def _begin_call(self, name: str, arguments: str) -> None:
        self._scanner.consumed = None
        self._passed_on = self._max_calls is None or self.count < self._max_calls
        if self._passed_on:
            self.count += 1
            self._latest_arguments = []
            self._add_arguments(arguments, name)

    def _add_arguments(self, arguments: str, name: str = "") -> None:
        if self._passed_on:
            self._latest_arguments.append(arguments)
            self._emit(CallDelta(self.count - 1, name, arguments))


def new_call_id() -> str:
    return secrets.token_hex(CALL_ID_LENGTH)[:CALL_ID_LENGTH]


def _as_json(value: str, types: set[str]) -> str:
    """``value`` as JSON: a string, unless it is JSON of one of the schema's ``types``. A schema without "string", or
    without types, takes any JSON."""
    bare = value.strip()
    parsed = parse_json(bare)
    if (parsed is not None and not isinstance(parsed, str)) or bare == "null":
        if "string" not in types or types & _value_types(parsed):
            return bare
    elif "boolean" in types and bare.lower() in ("true", "false"):
        return bare.lower()
    elif bare == "None" and "null" in types and "string" not in types:
        return "null"
    elif "string" not in types:
        for written in (_python_as_json(bare), _unquoted_json(bare)):
            if written and types & _value_types(parse_json(written)):
                return written
    return json.dumps(value, ensure_ascii=False)


def _python_as_json(value: str) -> str:
    """JSON of a dict or list that a model wrote in Python (``{'a': None}``); "" for anything else."""
    if not value.startswith(("{", "[")) or len(value) > MAX_PYTHON_LENGTH or (
            sum(map(value.count, "([{")) > MAX_PYTHON_BRACKETS):
        return ""
    try:
        written = json.dumps(ast.literal_eval(value), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return ""
    return written if parse_json(written) is not None else ""


def _unquoted_json(value: str) -> str:
    """JSON that a model wrote as within a JSON string, in quotes or not (``{\\"a\\": 1}``); "" for anything else."""
    text = parse_json(value if value.startswith('"') else f'"{value}"')
    return text if isinstance(text, str) and parse_json(text) is not None else ""


def _types_of_refs(schema: Any) -> RefTypes:
    """The types of the parts of ``schema`` that it may refer to."""
    parts = {place: schema.get(place) for place in ("$defs", "definitions")} if isinstance(schema, dict) else {}
    return {f"#/{place}/{name}": _schema_types(part, {}) for place, named in parts.items() if isinstance(named, dict)
            for name, part in named.items()}


def _schema_types(schema: Any, parts: RefTypes) -> set[str]:
    """The types that ``schema`` allows; none: it does not say. ``parts``: of what it may refer to."""
    if not isinstance(schema, dict):
        return set()
    types, ref = schema.get("type"), schema.get("$ref")
    if isinstance(ref, str) and ref in parts:
        return parts[ref]
    if isinstance(types, str | list):
        return {type_ for type_ in ([types] if isinstance(types, str) else types) if isinstance(type_, str)}
    if isinstance(values := [schema["const"]] if "const" in schema else schema.get("enum"), list):
        return set[str]().union(*map(_value_types, values))
    together = schema.get("allOf")  # as older Pydantic writes a reference beside a default
    for part in together if isinstance(together, list) else ():
        if allowed := _schema_types(part, parts):
            return allowed
    options = schema.get("anyOf") or schema.get("oneOf")
    found = [_schema_types(option, parts) for option in options] if isinstance(options, list) else []
    return set[str]().union(*found) if all(found) else set()


def _value_types(value: Any) -> set[str]:
    """The JSON schema types that ``value`` has."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {"number", "integer"} if isinstance(value, int) or value.is_integer() else {"number"}
    return {{NoneType: "null", bool: "boolean", dict: "object", list: "array"}.get(type(value), "string")}


def is_object(pieces: list[str]) -> bool:
    """Whether the joined ``pieces`` are a JSON object."""
    return isinstance(parse_json("".join(pieces)), dict)


def parse_json(text: str) -> Any:
    """The value; None: ``text`` is no JSON."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
