"""What a model writes between its words: reasoning and calls of tools, told apart as the text comes.

Rules:
1. However a text is cut into pieces, the parts joined are the same; what is told is never taken back.
2. Nothing that a model writes is an error. What looks like a call and is none becomes content, without its marks; a
   call that breaks off stays what it was until then.
3. What a character costs does not grow with the text before it.
4. Which marks count is read off the model's chat template. A mark that is a special token shows in the text only here.
5. Arguments come out as the model wrote them where it wrote JSON, else as JSON made of names and values, each typed by
   the tool's schema.

Six forms are known: JSON in ``<tool_call>`` (Hermes, Qwen, SmolLM), ``<function=`` in it (Qwen's coders), ``<arg_key>``
in it (GLM), ``[TOOL_CALLS]`` (Mistral), sections of calls (DeepSeek, Kimi), bare JSON (Llama 3). It knows nothing about
requests or how answers are written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

from router_service.text.words import Words

Step = Generator[None, None, Any]
SaidKind = Literal["reasoning", "text"]
ARGUMENTS = ("arguments", "parameters")
JSON_CHAR, SIMPLE_END = re.compile(r'["\\{}\[\]]'), re.compile(r"[,:}\]\s]")
LLAMA = "<|python_tag|>"


@dataclass(frozen=True, slots=True)
class Section:
    """Marks of a family that writes calls in sections."""

    begin: str
    call: str
    arguments: str
    end_call: str
    end: str


SECTIONS = (
    Section("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁end｜>"),
    Section("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
            "<|tool_calls_section_end|>"),
)
THOUGHTS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
OPENERS = ("<tool_call>", "[TOOL_CALLS]", LLAMA, *(section.begin for section in SECTIONS))
MARKS = (*OPENERS, "</tool_call>", "[ARGS]", "[CALL_ID]", *(mark for pair in THOUGHTS for mark in pair),
         *(mark for s in SECTIONS for mark in (s.call, s.arguments, s.end_call, s.end)))


@dataclass(frozen=True, slots=True)
class Style:
    """How a model writes: the marks that begin calls, those around its reasoning, and whether its template is given
    tools at all (else what it is told of them has to stand in a message)."""

    openers: tuple[str, ...] = ("<tool_call>",)
    thoughts: tuple[str, str] | None = None
    takes_tools: bool = False

    @staticmethod
    def of(template: str) -> Style:
        """Of a chat template's source."""
        takes_tools = bool(re.search(r"\btools\b", template))
        openers = tuple(mark for mark in OPENERS if mark in template)
        if takes_tools and not openers:
            openers = (LLAMA,)
        thoughts = next((pair for pair in THOUGHTS if pair[1] in template), None)
        return Style(openers if takes_tools else ("<tool_call>",), thoughts, takes_tools)

    @property
    def bare(self) -> bool:
        """Whether a text that begins with JSON may be a call."""
        return LLAMA in self.openers


BARE = Style((LLAMA,))


@dataclass(slots=True)
class Call:
    """A piece of one call; the first one of each has its ``name``."""

    index: int
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Said:
    """A piece of what is no call."""

    kind: SaidKind
    text: str


@dataclass(slots=True)
class Parts:
    """What a piece of text adds, in the order in which it came."""

    all: list[Said | Call] = field(default_factory=list)

    @property
    def reasoning(self) -> str:
        return self._joined("reasoning")

    @property
    def content(self) -> str:
        return self._joined("text")

    @property
    def calls(self) -> list[Call]:
        return [part for part in self.all if isinstance(part, Call)]

    def add(self, kind: SaidKind, text: str) -> None:
        if text:
            self.all.append(Said(kind, text))

    def _joined(self, kind: SaidKind) -> str:
        return "".join([part.text for part in self.all if isinstance(part, Said) and part.kind == kind])


class _NoCall(Exception):
    """What was read is none."""


class Named:
    """An answer that is the arguments of the one call of ``name``, and nothing else."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._latest: list[str] = []
        self.num_calls = 0

    @property
    def called(self) -> bool:
        """As ``Markup.called``."""
        return _whole(self._latest)

    def push(self, text: str, over: bool = False) -> Parts:
        """As ``Markup.push``."""
        if not text:
            return Parts()
        name = "" if self.num_calls else self._name
        self.num_calls = 1
        self._latest.append(text)
        return Parts([Call(0, name, text)])


class Markup:
    """The text of one answer. ``tools``: names of those that may be called -> their schemas; ``thinking``: it begins in
    the midst of reasoning; ``most``: calls that are told."""

    def __init__(self, style: Style, tools: Mapping[str, Any] = MappingProxyType({}), thinking: bool = False,
                 most: int | None = None) -> None:
        self._tools = tools
        self._most = most
        self._bare = style.bare and bool(tools)
        self._thoughts = style.thoughts
        self._sections = {section.begin: section for section in SECTIONS}
        openers = style.openers if tools else ()
        begins = ("<function=",) if "<tool_call>" in openers else ()
        # What closes nothing is no text either.
        self._stray = () if not tools else (*(("</tool_call>", "</function>") if begins else ()), *(
            mark for s in SECTIONS if s.begin in openers for mark in (s.call, s.arguments, s.end_call, s.end)))
        self._marks = Words((*openers, *begins, *self._stray, *(style.thoughts[:1] if style.thoughts else ())))
        self._buffer = ""
        self._over = False
        self._blank: list[str] = []  # of the content, held until more comes: it is none before a call
        self._begun = self._thought = False  # whether there was content, or reasoning
        self._taken: list[str] | None = None  # what a call has read so far; None: it is told of
        self._parts = Parts()
        self._latest: list[str] = []  # the arguments of the latest call that is told
        self.num_calls = 0
        self._run: Generator[None, None, None] = self._answer(thinking)
        next(self._run)

    def push(self, text: str, over: bool = False) -> Parts:
        """What ``text`` adds. ``over``: it is the last."""
        self._buffer += text
        self._over = over
        next(self._run, None)
        parts, self._parts = self._parts, Parts()
        return parts

    @property
    def called(self) -> bool:
        """Whether there are calls, and the latest did not break off."""
        return _whole(self._latest)

    def _answer(self, thinking: bool) -> Generator[None, None, None]:
        if thinking and self._thoughts is not None:
            yield
            yield from self._reasoning()
        else:
            yield
        if self._bare:
            yield from self._maybe_bare()
        while not (self._over and not self._buffer):
            mark = yield from self._until(self._marks, self._content)
            if not mark:
                break
            if self._thoughts is not None and mark == self._thoughts[0]:
                yield from self._reasoning()
            elif mark not in self._stray:
                yield from self._calls(mark)
        if self._blank and (self._begun or not (self.num_calls or self._thought)):
            self._parts.add("text", "".join(self._blank))

    def _reasoning(self) -> Step:
        assert self._thoughts is not None
        self._thought, self._blank = True, []
        held: list[str] = []
        begun = False

        def tell(text: str) -> None:
            nonlocal held, begun
            if text.strip():
                text = "".join(held) + text if begun else text.lstrip()
                shown = text.rstrip()
                begun, held = True, [text[len(shown):]]
                self._parts.add("reasoning", shown)
            elif begun:
                held.append(text)

        yield from self._until(Words(self._thoughts[1:]), tell)

    def _content(self, text: str) -> None:
        if not self._begun and (self._thought or self.num_calls):
            text, self._blank = text.lstrip(), []
        if not text.strip():
            self._blank.append(text)
            return
        text = "".join(self._blank) + text
        shown = text.rstrip() if self._tools else text
        self._begun, self._blank = True, [text[len(shown):]]
        self._parts.add("text", shown)

    def _calls(self, mark: str) -> Step:
        self._taken = []
        try:
            if mark == "[TOOL_CALLS]":
                yield from self._mistral()
            elif mark in self._sections:
                yield from self._section(self._sections[mark])
            elif mark == "<function=":
                yield from self._function()
            else:
                yield from self._tool_call()
        except _NoCall:
            if self._taken is not None:  # nothing was told of it
                self._content("".join(self._taken))
        else:
            self._begun, self._blank = False, []
        self._taken = None

    def _maybe_bare(self) -> Step:
        """Llama 3 writes a call as the whole of its answer."""
        blank = yield from self._skip()
        if self._buffer[:1] not in ("{", "[") or not self._buffer:
            self._blank.append(blank)
            return
        self._taken = [blank]
        try:
            yield from self._objects(known=True)
        except _NoCall:
            if self._taken is not None:
                self._content("".join(self._taken))
        self._taken = None

    def _tool_call(self) -> Step:
        yield from self._skip()
        while not self._over and "<function=".startswith(self._buffer[:10]) and len(self._buffer) < 10:
            yield
        if self._buffer.startswith("<function="):
            self._eat(10)
            yield from self._function()
        elif self._buffer[:1] in ("{", "["):
            yield from self._objects()
        else:
            yield from self._pairs(Words(("<arg_key>", "</tool_call>")), "<arg_key>", "</arg_key>", "</arg_value>",
                                   "</tool_call>")
            return
        yield from self._close("</tool_call>")

    def _function(self) -> Step:
        yield from self._pairs(Words((">", "</function>")), "<parameter=", ">", "</parameter>", "</function>", "\n")
        yield from self._close("</tool_call>")

    def _pairs(self, after_name: Words, key_mark: str, key_end: str, value_end: str, end: str,
               around: str = "") -> Step:
        """A name, and arguments between marks; ``around``: what stands around a value and is none of it."""
        name, mark = yield from self._text(after_name)
        name = name.strip()
        if name not in self._tools:
            raise _NoCall
        types = self._tools[name].get("properties") if isinstance(self._tools[name], dict) else None
        index = self._tell(name, "{")
        first = True
        keys, ends = Words((key_mark, end)), Words((key_end,))
        # Some forget to close a value.
        value_ends = Words((value_end, around + end, *((around + key_mark,) if around else ())))
        if mark == ">":
            _, mark = yield from self._text(keys)
        while mark == key_mark:
            key, _ = yield from self._text(ends)
            if key_mark == "<arg_key>":
                yield from self._text(Words(("<arg_value>",)))
            value, mark = yield from self._text(value_ends)
            if not mark:
                return
            value = value.removeprefix(around).removesuffix(around)
            text = ("" if first else ", ") + f"{json.dumps(key.strip(), ensure_ascii=False)}: "
            self._tell_more(index, text + _typed(value, types.get(key.strip()) if isinstance(types, dict) else None))
            first = False
            mark = mark.removeprefix(around)
            if mark == value_end:
                _, mark = yield from self._text(keys)
        if mark:
            self._tell_more(index, "}")

    def _mistral(self) -> Step:
        yield from self._skip()
        if self._buffer[:1] in ("{", "[") and self._buffer:
            yield from self._objects()
            return
        name, mark = yield from self._text(Words(("[ARGS]", "[CALL_ID]", "{")))
        if mark == "[CALL_ID]":
            _, mark = yield from self._text(Words(("[ARGS]", "{")))
        if mark == "{":
            self._buffer = "{" + self._buffer
        if not mark or not name.strip():
            raise _NoCall
        yield from self._arguments(name.strip())

    def _section(self, marks: Section) -> Step:
        calls = Words((marks.call, marks.end))
        while True:
            _, mark = yield from self._text(calls)
            if mark != marks.call:
                return
            head, mark = yield from self._text(Words((marks.arguments, marks.end_call)))
            if not mark:
                raise _NoCall
            between, mark = yield from self._text(Words(("{", marks.end_call)))
            if mark != "{":
                raise _NoCall
            self._buffer = "{" + self._buffer
            name = between.partition("\n")[0] if "```" in between else head
            yield from self._arguments(re.sub(r"^functions\.|:\d+\s*$", "", name.strip()).strip())
            yield from self._text(Words((marks.end_call, marks.end)))
            self._taken = []

    def _objects(self, known: bool = False) -> Step:
        """One call as JSON, or a list of them. ``known``: it has to be of a tool that there is."""
        listed = self._buffer[0] == "["
        if listed:
            self._eat(1)
        while True:
            yield from self._skip(",;" if listed or known else "")
            if self._buffer[:1] != "{":
                if listed and self._buffer[:1] == "]":
                    self._eat(1)
                    return
                if known and self.num_calls and not self._buffer:
                    return
                raise _NoCall
            yield from self._object(known)
            if not (listed or known):
                return
            self._taken = []

    def _object(self, known: bool) -> Step:
        name, arguments, index = "", "", -1
        self._eat(1)
        while True:
            yield from self._skip(",")
            if self._buffer[:1] == "}":
                self._eat(1)
                break
            key = _loaded((yield from self._value()))
            yield from self._skip()
            if not isinstance(key, str) or self._buffer[:1] != ":":
                raise _NoCall
            self._eat(1)
            yield from self._skip()
            if key in ARGUMENTS and name and self._buffer[:1] == "{" and index < 0:
                index = self._tell(name, "")
                yield from self._value(partial(self._tell_more, index))
                continue
            raw = yield from self._value()
            if key in ARGUMENTS:
                arguments = raw
            elif key == "name":
                found = _loaded(raw)
                if not isinstance(found, str) or not found or (known and found not in self._tools):
                    raise _NoCall
                name = found
        if index < 0:
            if not name:
                raise _NoCall
            within = _loaded(arguments)
            self._tell(name, within if isinstance(within, str) and within.startswith("{") else arguments or "{}")

    def _arguments(self, name: str) -> Step:
        yield from self._skip()
        if self._buffer[:1] != "{":
            raise _NoCall
        index = self._tell(name, "")
        yield from self._value(partial(self._tell_more, index))

    def _value(self, tell: Callable[[str], None] | None = None) -> Step:
        """The JSON value that comes next, as it is written; ``tell`` hears of it piece by piece."""
        depth, quoted, pieces = 0, False, list[str]()
        if not self._buffer:
            raise _NoCall
        simple = self._buffer[0] not in '"{['
        while True:
            at, done = 0, False
            while at < len(self._buffer) and not done:
                found = (SIMPLE_END if simple else JSON_CHAR).search(self._buffer, at)
                if found is None:
                    at = len(self._buffer)
                    break
                char, at = found[0], found.end()
                if simple:
                    at, done = found.start(), True
                elif char == "\\":
                    if at == len(self._buffer) and not self._over:
                        at -= 1  # what it escapes is not here yet
                        break
                    at += quoted
                elif char == '"':
                    quoted = not quoted
                    done = not quoted and depth == 0
                elif not quoted:
                    depth += 1 if char in "{[" else -1
                    done = depth == 0
            piece = self._eat(at)
            if tell is None:
                pieces.append(piece)
            elif piece:
                tell(piece)
            if done:
                return "".join(pieces)
            if self._over:
                raise _NoCall
            yield

    def _skip(self, also: str = "") -> Step:
        """White space (and ``also``), until something else is there or all is over; returns it."""
        blanks = []
        while True:
            found = len(self._buffer) - len(self._buffer.lstrip(" \t\r\n" + also))
            blanks.append(self._eat(found))
            if self._buffer or self._over:
                return "".join(blanks)
            yield

    def _close(self, mark: str) -> Step:
        """Leave ``mark`` out if it comes next, also one that the answer's end cuts."""
        yield from self._skip()
        while not self._over and len(self._buffer) < len(mark) and mark.startswith(self._buffer):
            yield
        if self._buffer.startswith(mark):
            self._buffer = self._buffer[len(mark):]
        elif mark.startswith(self._buffer):  # cut within it
            self._buffer = ""

    def _text(self, marks: Words) -> Step:
        """(the text before the first of ``marks``, that one); "" for none."""
        pieces: list[str] = []
        mark = yield from self._until(marks, pieces.append)
        text = "".join(pieces)
        if self._taken is not None:
            self._taken.append(text)
        return text, mark

    def _until(self, marks: Words, tell: Callable[[str], None]) -> Step:
        while True:
            found = marks.first(self._buffer)
            if found is not None:
                start, mark = found
                text, self._buffer = self._buffer[:start], self._buffer[start + len(mark):]
                tell(text)
                return mark
            kept = 0 if self._over else marks.unfinished(self._buffer)
            text, self._buffer = self._buffer[:len(self._buffer) - kept], self._buffer[len(self._buffer) - kept:]
            tell(text)
            if self._over:
                return ""
            yield

    def _eat(self, count: int) -> str:
        text, self._buffer = self._buffer[:count], self._buffer[count:]
        if self._taken is not None and text:
            self._taken.append(text)
        return text

    def _tell(self, name: str, arguments: str) -> int:
        self._taken = None
        self._blank = []
        index = self.num_calls
        if self._most is None or index < self._most:
            self._parts.all.append(Call(index, name, arguments))
            self._latest = [arguments]
            self.num_calls += 1
            return index
        return -2  # one too many

    def _tell_more(self, index: int, arguments: str) -> None:
        if index >= 0:
            self._parts.all.append(Call(index, "", arguments))
            self._latest.append(arguments)


def _typed(value: str, schema: Any) -> str:
    """A value as JSON: a text, unless the schema says otherwise and it is JSON."""
    kinds = schema.get("type") if isinstance(schema, dict) else None
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if kinds != ["string"]:
        found = _loaded(value.strip())
        if (found is not None and not isinstance(found, str)) or value.strip() == "null":
            return value.strip()
        if "boolean" in kinds and value.strip().lower() in ("true", "false"):
            return value.strip().lower()
    return json.dumps(value, ensure_ascii=False)


def _whole(arguments: list[str]) -> bool:
    """Whether the pieces are an object."""
    return isinstance(_loaded("".join(arguments)), dict)


def _loaded(text: str) -> Any:
    """None for what is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def marks(specials: Mapping[int, str]) -> frozenset[int]:
    """Which special tokens are marks."""
    return frozenset(token for token, text in specials.items() if text in MARKS)
