"""Separates reasoning and tool calls from the other text of an answer, piece by piece.

Rules:
1. The joined parts do not depend on how a text is cut into pieces; a part that was passed on is never taken back.
2. No output of a model is an error. Text that looks like a call but is none becomes content, without its marks; of a
   call that breaks off, the part so far is kept.
3. The cost of a character does not grow with the text before it.
4. Which marks count is read off the model's chat template. A mark that is a special token shows in the text only here.

It knows nothing about requests or how answers are written.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from router_service.text.calls import CallDelta, CallParser, is_object
from router_service.text.deltas import TextDelta
from router_service.text.marks import (
    CHANNEL,
    CHANNEL_MARKS,
    CLOSERS,
    CODER,
    HEADER_END,
    HEADERS,
    HERMES,
    INVOKE,
    SECTIONS,
    TEXT_ENDS,
    Style,
)
from router_service.text.scanner import NoCall, Parser, Scanner, Words

TO = "to=functions."  # begins a function's name in a header
HEADER_ENDS = Words((HEADER_END, *HEADERS, *TEXT_ENDS))  # the first, or what comes next where a model forgets it
OPEN_HEADER = re.compile(r"<\|channel\|>\w+( to=[^\s<{]+)?(\s*<\|constrain\|>\w*| json(?=\s*{))?\s*")
BARE_BEGINS = ('{"name":', '{"type": "function"', '{"type":"function"')  # of calls behind words
TextKind = Literal["reasoning", "text"]


@dataclass(slots=True)
class TextPart:
    """A piece of reasoning or of content."""

    kind: TextKind
    text: str


@dataclass(slots=True)
class Parts:
    """What a piece of text adds, in order; neither two texts of one kind nor two pieces of one call in a row."""

    all: list[TextPart | CallDelta] = field(default_factory=list)

    @property
    def reasoning(self) -> str:
        return self._joined("reasoning")

    @property
    def content(self) -> str:
        return self._joined("text")

    @property
    def calls(self) -> list[CallDelta]:
        return [part for part in self.all if isinstance(part, CallDelta)]

    def add(self, kind: TextKind, text: str) -> None:
        last = self.all[-1] if self.all else None
        if isinstance(last, TextPart) and last.kind == kind:
            last.text += text
        elif text:
            self.all.append(TextPart(kind, text))

    def add_call(self, call: CallDelta) -> None:
        last = self.all[-1] if self.all else None
        if isinstance(last, CallDelta) and not call.name and last.index == call.index:
            last.arguments += call.arguments
        else:
            self.all.append(call)

    def _joined(self, kind: TextKind) -> str:
        return "".join([part.text for part in self.all if isinstance(part, TextPart) and part.kind == kind])


class NamedCall:
    """An answer that is the arguments of the one call of ``name``, and nothing else."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._arguments: list[str] = []
        self.num_calls = 0
        self.reasoning_tokens = 0

    @property
    def calls_complete(self) -> bool:
        """As ``Markup.calls_complete``."""
        return is_object(self._arguments)

    def push_delta(self, delta: TextDelta) -> Parts:
        """As ``Markup.push_delta``."""
        return self.push(delta.text)

    def push(self, text: str, final: bool = False, cut: bool = False) -> Parts:
        """As ``Markup.push``."""
        if not text:
            return Parts()
        name = "" if self.num_calls else self._name
        self.num_calls = 1
        self._arguments.append(text)
        return Parts([CallDelta(0, name, text)])


class Markup:
    """The text of one answer. ``tools``: names of those that may be called -> their schemas; ``max_calls``: how many to
    pass on; ``calls_only``: it is calls and nothing else; ``reasoning_in_content``: reasoning is content, with its
    marks; ``call_or_text``: a grammar makes it one call, or no call at all."""

    def __init__(self, style: Style, tools: Mapping[str, Any] = MappingProxyType({}), starts_in_reasoning: bool = False,
                 max_calls: int | None = None, calls_only: bool = False, reasoning_in_content: bool = False,
                 call_or_text: bool = False) -> None:
        self._tools = tools
        self._calls_only = calls_only
        self._reasoning_in_content = reasoning_in_content
        self._call_or_text = call_or_text
        self._scanner = Scanner()
        self._calls = CallParser(self._scanner, tools, max_calls, self._add_call)
        self._bare_calls = style.bare_calls and bool(tools)
        self._reasoning_marks = style.reasoning_marks
        openers = style.openers if tools and not call_or_text else ()
        function_openers = (CODER.begin,) if HERMES in openers else ()
        self._openers = HEADERS if style.has_channels else (*openers, *function_openers)
        self._has_headers = style.has_channels
        # A closing mark is no content, also where it closes nothing.
        closers = [CLOSERS[opener] for opener in openers if opener in CLOSERS]
        self._stray_marks = () if not tools else (*closers, *((CODER.end, INVOKE.end) if closers else ()), *(
            mark for s in SECTIONS if s.begin in openers for mark in (s.call, s.arguments, s.end_call, s.end)))
        if style.has_channels:
            self._stray_marks = tuple(mark for mark in CHANNEL_MARKS if mark not in HEADERS)
        reasoning_opener = style.reasoning_marks[:1] if style.reasoning_marks and not style.has_channels else ()
        bare_begins = BARE_BEGINS if self._bare_calls and not call_or_text else ()
        self._marks = Words((*self._openers, *self._stray_marks, *reasoning_opener, *bare_begins))
        self._held_blanks: list[str] = []  # dropped before a call or reasoning, else part of the content
        self._call_blanks: list[str] = []  # blanks around calls: part of the content if more of it comes
        self._in_content = False  # whether there was content since the latest call
        self._any_content = self._any_reasoning = False  # whether there was any at all
        self._in_reasoning = starts_in_reasoning and not reasoning_in_content
        self.reasoning_tokens = 0  # of pushed deltas
        self._parts = Parts()
        self._parser: Generator[None, None, None] = self._parse(starts_in_reasoning)
        next(self._parser)

    def push(self, text: str, final: bool = False, cut: bool = False) -> Parts:
        """The parts that ``text`` adds. ``final``: it is the last text; ``cut``: the answer was cut off."""
        self._read(text, final, cut)
        parts, self._parts = self._parts, Parts()
        return parts

    def push_delta(self, delta: TextDelta) -> Parts:
        """The parts that ``delta`` adds. Counts its tokens of reasoning: those before or after which it is going on."""
        num_read = 0
        for token in delta.tokens if self._reasoning_marks is not None else ():
            was_reasoning = self._in_reasoning
            self._read(token.text)
            self.reasoning_tokens += was_reasoning or self._in_reasoning
            num_read += len(token.text)
        return self.push(delta.text[num_read:], bool(delta.finish), delta.finish == "length")

    @property
    def calls_complete(self) -> bool:
        """Whether there are calls, and the latest did not break off."""
        return self._calls.complete

    @property
    def num_calls(self) -> int:
        """Calls passed on so far."""
        return self._calls.count

    def _read(self, text: str, final: bool = False, cut: bool = False) -> None:
        self._scanner.unread += text
        self._scanner.final, self._scanner.cut = final, cut
        next(self._parser, None)

    def _parse(self, starts_in_reasoning: bool) -> Generator[None, None, None]:
        if starts_in_reasoning and self._reasoning_marks is not None:
            yield
            yield from self._reasoning("")
        else:
            yield
        if self._bare_calls:
            yield from self._maybe_bare()
        if self._has_headers:
            self._held_blanks.append((yield from self._scanner.skip_blanks()))
            if (yield from self._scanner.starts_with(TO)):
                yield from self._header("")
        while not (self._scanner.final and not self._scanner.unread):
            mark = yield from self._scanner.read_until(self._marks, self._content)
            if not mark:
                break
            if self._reasoning_marks is not None and mark == self._reasoning_marks[0]:
                yield from self._reasoning(mark)
            elif self._has_headers and mark in HEADERS:
                yield from self._header(mark)
            elif mark in BARE_BEGINS:
                self._scanner.unread = mark + self._scanner.unread
                yield from self._maybe_call(self._calls.read_objects(known_only=True))
            elif mark not in self._stray_marks:
                yield from self._maybe_call(self._calls.read(mark))
        if self._held_blanks and (self._in_content or not (self.num_calls or self._any_reasoning)):
            self._parts.add("text", "".join(self._held_blanks))

    def _reasoning(self, mark: str) -> Parser:
        """The reasoning after ``mark``. A call in it counts if the reasoning never ends: some models forget its end."""
        assert self._reasoning_marks is not None
        if self._reasoning_in_content:
            self._content(mark)
            self._content((yield from self._scanner.read_until(Words(self._reasoning_marks[1:]), self._content)))
            return
        self._in_reasoning, self._any_reasoning, self._held_blanks = True, True, []
        held_blanks: list[str] = []
        started = False

        def emit(text: str) -> None:
            nonlocal held_blanks, started
            if text.strip():
                text = "".join(held_blanks) + text if started else text.lstrip()
                shown = text.rstrip()
                started, held_blanks = True, [text[len(shown):]]
                self._parts.add("reasoning", shown)
            else:
                held_blanks.append(text)

        mark = yield from self._scanner.read_until(Words((*self._reasoning_marks[1:], *self._openers)), emit)
        if mark in self._openers:
            text, closer = yield from self._scanner.read_before(Words(self._reasoning_marks[1:]))
            if closer or self._scanner.cut:
                emit(mark + text)
            else:
                self._scanner.unread = mark + text
        self._in_reasoning = False

    def _header(self, mark: str) -> Parser:
        """A header, which ``mark`` began, and the text after it unless that is content. Some models forget the mark
        between them: of such a header a final text or a call is told."""
        header, end = yield from self._scanner.read_before(HEADER_ENDS)
        header, text = mark + header, ""
        if end == CHANNEL != mark:
            rest, end = yield from self._scanner.read_before(HEADER_ENDS)
            header += CHANNEL + rest
        if end != HEADER_END:
            self._scanner.unread = end + self._scanner.unread
            found = OPEN_HEADER.search(header)
            header, text = (header[:found.end()], header[found.end():]) if found else ("", "")
        _, is_call, name = header.partition(TO)
        if is_call and self._tools:
            self._scanner.unread = text + self._scanner.unread
            yield from self._maybe_call(self._calls.read_arguments(re.split(r"[\s<]", name)[0]))
        elif text and f"{CHANNEL}final" in header:
            self._content(text)
        elif end == HEADER_END and "analysis" in header:
            yield from self._reasoning("")

    def _content(self, text: str) -> None:
        if self._calls_only:  # the beginning of a call that was cut off
            return
        if not self._in_content and not self._any_content and (self._any_reasoning or self.num_calls):
            text, self._held_blanks = text.lstrip(), []
        if not text.strip():
            self._held_blanks.append(text)
            return
        text = "".join([*self._call_blanks, *self._held_blanks]) + text
        shown = text.rstrip() if self._tools or self._reasoning_marks is not None else text
        self._in_content, self._any_content = True, True
        self._call_blanks, self._held_blanks = [], [text[len(shown):]]
        self._parts.add("text", shown)

    def _maybe_bare(self) -> Parser:
        """Llama 3 usually writes a call as its whole answer."""
        blank = yield from self._scanner.skip_blanks()
        if self._scanner.unread[:1] in ("{", "["):
            call = self._calls.read_grammar_call() if self._call_or_text else self._calls.read_objects(known_only=True)
            yield from self._maybe_call(call, blank)
        else:
            self._held_blanks.append(blank)

    def _maybe_call(self, call: Parser, *blanks: str) -> Parser:
        """The call that ``call`` parses, else content. ``blanks`` before it are dropped if it is a call."""
        self._scanner.consumed = [*blanks]
        try:
            yield from call
        except NoCall:
            if self._scanner.consumed is not None:  # nothing of it was passed on
                self._content("".join(self._scanner.consumed))
            else:
                self._held_blanks = []
        else:
            self._in_content, self._held_blanks = False, []
        self._scanner.consumed = None

    def _add_call(self, call: CallDelta) -> None:
        self._call_blanks += self._held_blanks if self._any_content else []
        self._held_blanks = []
        self._parts.add_call(call)


def finish_reason(finish: str, markup: Markup | NamedCall | None) -> str:
    """The finish reason of an answer parsed by ``markup`` (None: not parsed)."""
    return "tool_calls" if finish == "stop" and markup is not None and markup.calls_complete else finish
