"""Separates reasoning and tool calls from the other text of an answer, while it comes.

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

from router_service.text.calls import Call, Calls, is_object
from router_service.text.deltas import TextDelta
from router_service.text.marks import CLOSERS, HEADED, HEADERS, OF_CHANNELS, SECTIONS, Style
from router_service.text.scanner import NoCall, Scanner, Step, Words

TO = "to=functions."  # begins a function's name in a header
BARE_BEGINS = ('{"name":', '{"type": "function"', '{"type":"function"')  # of calls behind words
SaidKind = Literal["reasoning", "text"]


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


class Named:
    """An answer that is the arguments of the one call of ``name``, and nothing else."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._latest: list[str] = []
        self.num_calls = 0
        self.reasoning_tokens = 0

    @property
    def called(self) -> bool:
        """As ``Markup.called``."""
        return is_object(self._latest)

    def take(self, delta: TextDelta) -> Parts:
        """As ``Markup.take``."""
        return self.push(delta.text)

    def push(self, text: str, over: bool = False, cut: bool = False) -> Parts:
        """As ``Markup.push``."""
        if not text:
            return Parts()
        name = "" if self.num_calls else self._name
        self.num_calls = 1
        self._latest.append(text)
        return Parts([Call(0, name, text)])


class Markup:
    """The text of one answer. ``tools``: names of those that may be called -> their schemas; ``thinking``: it begins in
    the midst of reasoning; ``most``: calls that are told; ``bound``: it is calls and nothing else; ``either``: a
    grammar makes it one call, or no call at all; ``mixed``: reasoning is content, with its marks."""

    def __init__(self, style: Style, tools: Mapping[str, Any] = MappingProxyType({}), thinking: bool = False,
                 most: int | None = None, bound: bool = False, mixed: bool = False, either: bool = False) -> None:
        self._tools = tools
        self._bound = bound
        self._mixed = mixed
        self._either = either
        self._text = Scanner()
        self._calls = Calls(self._text, tools, most, self._called)
        self._bare = style.bare and bool(tools)
        self._thoughts = style.thoughts
        openers = style.openers if tools and not either else ()
        begins = ("<function=",) if "<tool_call>" in openers else ()
        self._openers = HEADERS if style.channels else (*openers, *begins)
        self._headed = style.channels
        # What closes nothing is no text either.
        closers = [CLOSERS[opener] for opener in openers if opener in CLOSERS]
        self._stray = () if not tools else (*closers, *(("</function>", "</invoke>") if closers else ()), *(
            mark for s in SECTIONS if s.begin in openers for mark in (s.call, s.arguments, s.end_call, s.end)))
        if style.channels:
            self._stray = tuple(mark for mark in OF_CHANNELS if mark not in HEADERS)
        begun = style.thoughts[:1] if style.thoughts and not style.channels else ()
        self._marks = Words((*self._openers, *self._stray, *begun, *(BARE_BEGINS if self._bare and not either else ())))
        self._blank: list[str] = []  # of the content, held until more comes: it is none before a call or reasoning
        self._gap: list[str] = []  # blanks around calls: between two pieces of content they are some
        self._begun = self._thought = False  # whether there was content since the latest call, or reasoning
        self._said = False  # whether there was content at all
        self._thinks = thinking and not mixed
        self.reasoning_tokens = 0  # of deltas that were taken
        self._parts = Parts()
        self._run: Generator[None, None, None] = self._answer(thinking)
        next(self._run)

    def push(self, text: str, over: bool = False, cut: bool = False) -> Parts:
        """The parts that ``text`` adds. ``over``: it is the last text; ``cut``: the answer was cut off."""
        self._read(text, over, cut)
        parts, self._parts = self._parts, Parts()
        return parts

    def take(self, delta: TextDelta) -> Parts:
        """The parts that ``delta`` adds. Counts its tokens of reasoning: those before or after which reasoning runs."""
        read = 0
        for token in delta.tokens if self._thoughts is not None else ():
            thought = self._thinks
            self._read(token.text)
            self.reasoning_tokens += thought or self._thinks
            read += len(token.text)
        return self.push(delta.text[read:], bool(delta.finish), delta.finish == "length")

    @property
    def called(self) -> bool:
        """Whether there are calls, and the latest did not break off."""
        return self._calls.complete

    @property
    def num_calls(self) -> int:
        """Calls that are told, so far."""
        return self._calls.count

    def _read(self, text: str, over: bool = False, cut: bool = False) -> None:
        self._text.rest += text
        self._text.over, self._text.cut = over, cut
        next(self._run, None)

    def _answer(self, thinking: bool) -> Generator[None, None, None]:
        if thinking and self._thoughts is not None:
            yield
            yield from self._reasoning("")
        else:
            yield
        if self._bare:
            yield from self._maybe_bare()
        if self._headed:
            self._blank.append((yield from self._text.skip()))
            if (yield from self._text.starts(TO)):
                yield from self._header()
        while not (self._text.over and not self._text.rest):
            mark = yield from self._text.until(self._marks, self._content)
            if not mark:
                break
            if self._thoughts is not None and mark == self._thoughts[0]:
                yield from self._reasoning(mark)
            elif self._headed and mark in HEADERS:
                yield from self._header()
            elif mark in BARE_BEGINS:
                self._text.rest = mark + self._text.rest
                yield from self._maybe_call(self._calls.read_bare())
            elif mark not in self._stray:
                yield from self._maybe_call(self._calls.read(mark))
        if self._blank and (self._begun or not (self.num_calls or self._thought)):
            self._parts.add("text", "".join(self._blank))

    def _reasoning(self, mark: str) -> Step:
        """What follows ``mark``. A call in it is one where the reasoning never ends: some models forget to end it."""
        assert self._thoughts is not None
        if self._mixed:
            self._content(mark)
            self._content((yield from self._text.until(Words(self._thoughts[1:]), self._content)))
            return
        self._thinks, self._thought, self._blank = True, True, []
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

        mark = yield from self._text.until(Words((*self._thoughts[1:], *self._openers)), tell)
        if mark in self._openers:
            text, ended = yield from self._text.before(Words(self._thoughts[1:]))
            if ended or self._text.cut:
                tell(mark + text)
            else:
                self._text.rest = mark + text
        self._thinks = False

    def _header(self) -> Step:
        """What a header says of the text behind it, and that text unless it is content."""
        header, mark = yield from self._text.before(Words((HEADED,)))
        _, called, to = header.partition(TO)
        if mark and called and self._tools:
            yield from self._maybe_call(self._calls.read_of(re.split(r"[\s<]", to)[0]))
        elif mark and "analysis" in header:
            yield from self._reasoning("")

    def _content(self, text: str) -> None:
        if self._bound:  # the beginning of a call that was cut off
            return
        if not self._begun and not self._said and (self._thought or self.num_calls):
            text, self._blank = text.lstrip(), []
        if not text.strip():
            self._blank.append(text)
            return
        text = "".join([*self._gap, *self._blank]) + text
        shown = text.rstrip() if self._tools or self._thoughts is not None else text
        self._begun, self._said, self._gap, self._blank = True, True, [], [text[len(shown):]]
        self._parts.add("text", shown)

    def _maybe_bare(self) -> Step:
        """Llama 3 writes a call as the whole of its answer, as a rule."""
        blank = yield from self._text.skip()
        if self._text.rest[:1] in ("{", "[") and self._text.rest:
            yield from self._maybe_call(self._calls.read_bound() if self._either else self._calls.read_bare(), blank)
        else:
            self._blank.append(blank)

    def _maybe_call(self, read: Step, *before: str) -> Step:
        """What ``read`` reads, else content; ``before``: what stands before it, and is dropped if it is a call."""
        self._text.taken = [*before]
        try:
            yield from read
        except NoCall:
            if self._text.taken is not None:  # nothing was told of it
                self._content("".join(self._text.taken))
            else:
                self._blank = []
        else:
            self._begun, self._blank = False, []
        self._text.taken = None

    def _called(self, call: Call) -> None:
        self._gap += self._blank if self._said else []
        self._blank = []
        last = self._parts.all[-1] if self._parts.all else None
        if isinstance(last, Call) and not call.name and last.index == call.index:
            last.arguments += call.arguments
        else:
            self._parts.all.append(call)


def finish_of(finish: str, markup: Markup | Named | None) -> str:
    """The finish reason of an answer parsed by ``markup`` (None: not parsed)."""
    return "tool_calls" if finish == "stop" and markup is not None and markup.called else finish
