"""Tool calls, as each model family writes them: read piece by piece, and passed on as soon as they are known.

Arguments come out as the model wrote them where it wrote JSON, else as JSON made of names and values, each typed by
the tool's schema. Eight forms are known: JSON in ``<tool_call>`` (Hermes, Qwen, Granite), ``<function=`` in it (Qwen's
coders, Seed), ``<arg_key>`` in it (GLM), ``<invoke name=`` (MiniMax), ``[TOOL_CALLS]`` (Mistral), sections of calls
(DeepSeek, Kimi), headers that name a function (GPT-OSS), bare JSON (Llama 3).
"""

from __future__ import annotations

import ast
import json
import re
import secrets
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import NoneType
from typing import Any

import orjson

from router_service.text.marks import CLOSERS, HERMES, MINIMAX, SECTIONS, Section
from router_service.text.scanner import NoCall, Scanner, Step, Words

CALL_ID = 9  # characters: Mistral's templates take no other number
MAX_REOPENED = 8
PYTHON_LENGTH, PYTHON_BRACKETS = 8192, 128  # of a value that is read as Python: some 10 ms, and no deeper than it nests
ARGUMENTS = ("arguments", "parameters")
INVOKE, NAME = '<invoke name="', re.compile(r"[\w.:-]{1,128}")
Referred = dict[str, set[str]]  # types of parts of a schema, by how it refers to them
NONE = ("", "null", '""')  # how a model writes that there are no arguments
# From Python 3.12 on its parser tells stderr of each odd escape or number in a text: thousands of lines for one value.
warnings.filterwarnings("ignore", module="<unknown>")


@dataclass(slots=True)
class Call:
    """A piece of one call; the first one of each has its ``name``."""

    index: int
    name: str = ""
    arguments: str = ""


class Calls:
    """The calls in one answer's ``text``. ``tools``: names of callable functions -> their schemas; ``most``: how many
    calls to pass on; ``tell``: called with each piece."""

    def __init__(self, text: Scanner, tools: Mapping[str, Any], most: int | None, tell: Callable[[Call], None]) -> None:
        self._text = text
        self._tools = tools
        self._referred = dict[str, Referred]()  # of the tools whose arguments were typed
        self._most = most
        self._tell = tell
        self._latest: list[str] = []  # the arguments of the latest call that is told
        self._reopened = 0  # values that were left open, and what follows them read twice
        self.count = 0

    @property
    def complete(self) -> bool:
        """Whether there are calls, and the latest did not break off."""
        return is_object(self._latest)

    def read(self, opener: str) -> Step:
        """What ``opener`` began. Raises NoCall."""
        if opener == "[TOOL_CALLS]":
            yield from self._mistral()
        elif opener == "<function=":
            yield from self._function(CLOSERS[HERMES], known=True)
        elif section := next((section for section in SECTIONS if section.begin == opener), None):
            yield from self._section(section)
        elif opener == MINIMAX:
            yield from self._invoked()
        else:
            yield from self._tool_call(CLOSERS.get(opener, CLOSERS[HERMES]))

    def read_bare(self) -> Step:
        """JSON that nothing began, of tools that there are. Raises NoCall."""
        yield from self._objects(known=True)

    def read_of(self, name: str) -> Step:
        """Arguments of a call of ``name``, which its header said. Raises NoCall."""
        yield from self._arguments(name)

    def read_bound(self) -> Step:
        """One call as a grammar has it written: its name, then its arguments. Raises NoCall at the first character of
        anything else."""
        if self._text.rest[0] != "{":
            raise NoCall
        yield from self._object(known=True, ordered=True)

    def _tool_call(self, closer: str) -> Step:
        yield from self._text.skip()
        if (yield from self._text.starts("<function=")):
            self._text.eat(10)
            yield from self._function(closer)
            return
        if self._text.rest[:1] in ("{", "["):
            yield from self._objects()
            yield from self._text.close(closer)
        else:
            yield from self._pairs(Words(("<arg_key>", closer)), "<arg_key>", "</arg_key>", "</arg_value>", closer)

    def _function(self, closer: str, known: bool = False) -> Step:
        yield from self._pairs(Words((">", "</function>")), "<parameter=", ">", "</parameter>", "</function>", "\n",
                               known)
        yield from self._text.close(closer)

    def _invoked(self) -> Step:
        """One call or several, as MiniMax's models write them."""
        begun = self.count
        yield from self._text.skip()
        while (yield from self._text.starts(INVOKE)):
            self._text.eat(len(INVOKE))
            yield from self._pairs(Words(('">', "</invoke>")), '<parameter name="', '">', "</parameter>", "</invoke>")
            self._text.taken = []
            yield from self._text.skip()
        if self.count == begun:
            raise NoCall
        yield from self._text.close(CLOSERS[MINIMAX])

    def _pairs(self, after_name: Words, key_mark: str, key_end: str, value_end: str, end: str,
               around: str = "", known: bool = False) -> Step:
        """A name, and arguments between marks; ``around``: what stands around a value and is none of it; ``known``: it
        has to be of a tool that there is, as one without arguments has to, too."""
        name, mark = yield from self._text.before(after_name)
        name = name.strip()
        if name not in self._tools and (known or mark not in (key_mark, key_end) or not NAME.fullmatch(name)):
            raise NoCall
        schema = self._tools.get(name)
        types = schema.get("properties") if isinstance(schema, dict) else None
        if name not in self._referred:
            self._referred[name] = _referred_by(schema)
        index = self._begin(name, "{")
        first = True
        keys, ends = Words((key_mark, end, *CLOSERS.values())), Words((key_end,))
        # Some forget to close a value, and some values speak of marks.
        behind = {value_end: keys, around + end: Words((*CLOSERS, "<function=", INVOKE, *CLOSERS.values())),
                  **({around + key_mark: None} if around else {})}
        if mark == key_end:
            _, mark = yield from self._text.before(keys)
        while mark == key_mark:
            key, _ = yield from self._text.before(ends)
            if key_mark == "<arg_key>":
                yield from self._text.before(Words(("<arg_value>",)))
            value, mark = yield from self._value(behind, Words((value_end, end, *CLOSERS.values())), end)
            if not mark:
                return
            value = value.removeprefix(around).removesuffix(around)
            text = ("" if first else ", ") + f"{json.dumps(key.strip(), ensure_ascii=False)}: "
            part = types.get(key.strip()) if isinstance(types, dict) else None
            self._more(index, text + _typed(value, _kinds(part, self._referred[name])))
            first = False
            mark = mark.removeprefix(around)
            if mark == value_end:
                _, mark = yield from self._text.before(keys)
        if mark:
            self._more(index, "}")

    def _value(self, behind: Mapping[str, Words | None], ends: Words, end: str) -> Step:
        """(a value, the mark that ends it): the first one with what may stand ``behind`` it; None: anything. Where the
        answer is over without: the first of ``ends``, as if it were ``end``, and what follows is read anew."""
        marks, pieces = Words(tuple(behind)), list[str]()
        while True:
            text, mark = yield from self._text.before(marks)
            pieces.append(text)
            words = behind.get(mark)
            if not mark:
                return self._left_open("".join(pieces), ends, end)
            if words is None or (yield from self._text.followed(words)):
                return "".join(pieces), mark
            pieces.append(mark)

    def _left_open(self, value: str, ends: Words, end: str) -> tuple[str, str]:
        found = ends.first(value)
        if found is None or self._text.cut or self._reopened == MAX_REOPENED:
            return value, ""
        self._reopened += 1
        start, mark = found
        self._text.rest = value[start + len(mark):]
        return value[:start], end

    def _mistral(self) -> Step:
        yield from self._text.skip()
        if self._text.rest[:1] in ("{", "[") and self._text.rest:
            yield from self._objects()
            return
        name, mark = yield from self._text.before(Words(("[ARGS]", "[CALL_ID]", "{")))
        if mark == "[CALL_ID]":
            _, mark = yield from self._text.before(Words(("[ARGS]", "{")))
        if mark == "{":
            self._text.rest = "{" + self._text.rest
        if not mark or not name.strip():
            raise NoCall
        yield from self._arguments(name.strip())

    def _section(self, marks: Section) -> Step:
        calls = Words((marks.call, marks.end))
        while True:
            _, mark = yield from self._text.before(calls)
            if mark != marks.call:
                return
            head, mark = yield from self._text.before(Words((marks.arguments, marks.end_call)))
            if not mark:
                raise NoCall
            between, mark = yield from self._text.before(Words(("{", marks.end_call)))
            if mark != "{" and (not mark or between.strip()):
                raise NoCall
            self._text.rest = ("{" if mark == "{" else "{}" + mark) + self._text.rest  # some write no arguments
            name = between.partition("\n")[0] if "```" in between else head
            yield from self._arguments(re.sub(r"^functions\.|:\d+\s*$", "", name.strip()).strip())
            _, mark = yield from self._text.before(Words((marks.end_call, marks.end)))
            self._text.taken = []
            if mark == marks.end:  # some forget to end a call
                return

    def _objects(self, known: bool = False) -> Step:
        """Calls as JSON, or a list of them. ``known``: they have to be of tools that there are."""
        listed = self._text.rest[0] == "["
        if listed:
            self._text.eat(1)
        while True:
            yield from self._text.skip(",;" if listed or known else "")
            if self._text.rest[:1] != "{":
                if listed and self._text.rest[:1] == "]":
                    self._text.eat(1)
                    return
                if known and self.count and not self._text.rest:
                    return
                raise NoCall
            yield from self._object(known)
            if not (listed or known):
                yield from self._text.skip()
                if self._text.rest[:1] != "{":
                    return
            self._text.taken = []

    def _object(self, known: bool, ordered: bool = False) -> Step:
        name, arguments, index = "", "", -1
        self._text.eat(1)
        while True:
            yield from self._text.skip(",")
            if self._text.rest[:1] == "}":
                self._text.eat(1)
                break
            key = loaded((yield from self._text.value()))
            if ordered and index < 0 and key != (ARGUMENTS[0] if name else "name"):
                raise NoCall
            yield from self._text.skip()
            if not isinstance(key, str) or self._text.rest[:1] != ":":
                raise NoCall
            self._text.eat(1)
            yield from self._text.skip()
            if key in ARGUMENTS and name and self._text.rest[:1] == "{" and index < 0:
                index = self._begin(name, "")
                yield from self._text.value(partial(self._more, index))
                continue
            if ordered and index < 0 and name:
                raise NoCall
            raw = yield from self._text.value()
            if key in ARGUMENTS:
                arguments = raw
            elif key == "name":
                found = loaded(raw)
                if not isinstance(found, str) or not found or (known and found not in self._tools):
                    raise NoCall
                name = found
        if index < 0:
            if not name or ordered:
                raise NoCall
            within = loaded(arguments)
            whole = within if isinstance(within, str) and within.startswith("{") else arguments
            self._begin(name, "{}" if arguments in NONE else whole)

    def _arguments(self, name: str) -> Step:
        yield from self._text.skip()
        if not name or self._text.rest[:1] != "{":
            raise NoCall
        index = self._begin(name, "")
        yield from self._text.value(partial(self._more, index))

    def _begin(self, name: str, arguments: str) -> int:
        self._text.taken = None
        index = self.count
        if self._most is not None and index >= self._most:
            return -2  # one too many
        self.count += 1
        self._latest = [arguments]
        self._tell(Call(index, name, arguments))
        return index

    def _more(self, index: int, arguments: str) -> None:
        if index >= 0:
            self._latest.append(arguments)
            self._tell(Call(index, "", arguments))


def call_id() -> str:
    """A new one."""
    return secrets.token_hex(CALL_ID)[:CALL_ID]


def _typed(value: str, kinds: set[str]) -> str:
    """A value as JSON: a text, unless it is JSON of one of the types that its schema lets through. One that lets no
    text through, or does not say, takes all of them."""
    bare = value.strip()
    found = loaded(bare)
    if (found is not None and not isinstance(found, str)) or bare == "null":
        if "string" not in kinds or kinds & _kinds_of(found):
            return bare
    elif "boolean" in kinds and bare.lower() in ("true", "false"):
        return bare.lower()
    elif bare == "None" and "null" in kinds and "string" not in kinds:
        return "null"
    elif "string" not in kinds and (written := _of_python(bare)) and kinds & _kinds_of(loaded(written)):
        return written
    return json.dumps(value, ensure_ascii=False)


def _of_python(value: str) -> str:
    """JSON of a dict or list that a model wrote as Python does (``{'a': None}``); "" for anything else."""
    if not value.startswith(("{", "[")) or len(value) > PYTHON_LENGTH or (
            sum(map(value.count, "([{")) > PYTHON_BRACKETS):
        return ""
    try:
        written = json.dumps(ast.literal_eval(value), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return ""
    return written if loaded(written) is not None else ""


def _referred_by(schema: Any) -> Referred:
    """The types that those parts of ``schema`` let through to which it refers."""
    parts = {place: schema.get(place) for place in ("$defs", "definitions")} if isinstance(schema, dict) else {}
    return {f"#/{place}/{name}": _kinds(part, {}) for place, named in parts.items() if isinstance(named, dict)
            for name, part in named.items()}


def _kinds(schema: Any, parts: Referred) -> set[str]:
    """The types that ``schema`` lets through; none: it does not say. ``parts``: of what it may refer to."""
    if not isinstance(schema, dict):
        return set()
    kinds, ref = schema.get("type"), schema.get("$ref")
    if isinstance(ref, str) and ref in parts:
        return parts[ref]
    if isinstance(kinds, str | list):
        return {kind for kind in ([kinds] if isinstance(kinds, str) else kinds) if isinstance(kind, str)}
    if isinstance(listed := schema.get("enum"), list):
        return set[str]().union(*map(_kinds_of, listed))
    others = schema.get("anyOf") or schema.get("oneOf")
    found = [_kinds(other, parts) for other in others] if isinstance(others, list) else []
    return set[str]().union(*found) if all(found) else set()


def _kinds_of(found: Any) -> set[str]:
    """The types of what JSON said."""
    if isinstance(found, int | float) and not isinstance(found, bool):
        return {"number", "integer"} if isinstance(found, int) or found.is_integer() else {"number"}
    return {{NoneType: "null", bool: "boolean", dict: "object", list: "array"}.get(type(found), "string")}


def is_object(arguments: list[str]) -> bool:
    """Whether the pieces are an object."""
    return isinstance(loaded("".join(arguments)), dict)


def loaded(text: str) -> Any:
    """None for what is no JSON."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
