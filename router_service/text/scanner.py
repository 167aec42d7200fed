"""A text that comes piece by piece, read as if it were whole: searched for words, ended at stop strings, and scanned by
readers, generators that wait where they need more.

Rules:
1. What a character costs does not grow with the text before it.
2. ``StopStrings`` ends a text where the first stop string is complete (the longest, if several end there), however the
   text is cut into pieces. Text from the start of the stop string on is not passed on.

It knows nothing about tokens, families or calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Sequence
from typing import Any

Step = Generator[None, None, Any]
MAX_BLANKS = 256  # between marks
JSON_CHAR, SIMPLE_END = re.compile(r'["\\{}\[\]\x00-\x1f]'), re.compile(r"[,:}\]\s]")


class Words:
    """None of ``words`` is empty.

    What a character costs grows with the number of words, not with their lengths: a place in the text at which one may
    begin is given up once, where whoever searches keeps what is unfinished and no more."""

    __slots__ = ("_firsts", "_longest", "words")

    def __init__(self, words: Sequence[str]) -> None:
        self.words = tuple(dict.fromkeys(words))
        self._firsts = frozenset(word[0] for word in self.words)
        self._longest = max(map(len, self.words), default=0)

    def first(self, text: str) -> tuple[int, str] | None:
        """Where the earliest of them begins, and the longest that begins there."""
        found = [(start, -len(word), word) for word in self.words if (start := text.find(word)) >= 0]
        if not found:
            return None
        start, _, word = min(found)
        return start, word

    def unfinished(self, text: str) -> int:
        """The length of the longest end of ``text`` that begins one of them."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._firsts:
                end = text[start:]
                if any(word.startswith(end) for word in self.words):
                    return len(end)
        return 0


class StopStrings:
    """Cuts one answer's text before the first stop string, or behind it (``keep``). ``matched`` names it once it
    came."""

    __slots__ = ("_held", "_keep", "_passed", "_stops", "matched")

    def __init__(self, stops: Sequence[str], keep: bool = False) -> None:
        """None of ``stops`` is empty."""
        self._stops = Words(stops)
        self._keep = keep
        self._held = ""
        self._passed = 0  # characters of it in which no stop string ends
        self.matched: str | None = None

    def push(self, text: str, counts: bool = True) -> str:
        """The text that may go out now: what could still become a stop string is held back. "" after a match.
        ``counts``: whether a stop string that ends in ``text`` is one."""
        if self.matched is not None:
            return ""
        text = self._held + text
        if not counts:
            self._passed = len(text)
        found = [(start + len(stop), start, stop) for stop in self._stops.words
                 if (start := text.find(stop, max(0, self._passed + 1 - len(stop)))) >= 0]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return text[:start + len(self.matched) if self._keep else start]
        kept = self._stops.unfinished(text)
        self._held = text[len(text) - kept:]
        self._passed = max(0, self._passed - (len(text) - kept))
        return text[:len(text) - kept]


class NoCall(Exception):
    """The text that was read is no call."""


class Scanner:
    """``rest``: what came and was not read; ``over``: nothing more comes, as it was ``cut`` off or not; ``taken``: what
    was read since it was set to a list (None: nobody asks)."""

    def __init__(self) -> None:
        self.rest = ""
        self.over = self.cut = False
        self.taken: list[str] | None = None

    def until(self, marks: Words, tell: Callable[[str], None]) -> Step:
        """The first of ``marks``, "" for none; ``tell`` hears of the text before it piece by piece."""
        while True:
            found = marks.first(self.rest)
            if found is not None:
                start, mark = found
                text, self.rest = self.rest[:start], self.rest[start + len(mark):]
                tell(text)
                return mark
            kept = 0 if self.over else marks.unfinished(self.rest)
            text, self.rest = self.rest[:len(self.rest) - kept], self.rest[len(self.rest) - kept:]
            tell(text)
            if self.over:
                return ""
            yield

    def before(self, marks: Words) -> Step:
        """(the text before the first of ``marks``, that one); "" for none."""
        pieces: list[str] = []
        mark = yield from self.until(marks, pieces.append)
        text = "".join(pieces)
        if self.taken is not None:
            self.taken.append(text)
        return text, mark

    def value(self, tell: Callable[[str], None] | None = None) -> Step:
        """The JSON value that comes next, as it is written, but for the ends of lines in its texts, which JSON does not
        take; ``tell`` hears of it piece by piece."""
        depth, quoted, pieces = 0, False, list[str]()
        tell = tell or pieces.append
        if not self.rest:
            raise NoCall
        simple = self.rest[0] not in '"{['
        while True:
            at, done = 0, False
            while at < len(self.rest) and not done:
                found = (SIMPLE_END if simple else JSON_CHAR).search(self.rest, at)
                if found is None:
                    at = len(self.rest)
                    break
                char, at = found[0], found.end()
                if simple:
                    at, done = found.start(), True
                elif char == "\\":
                    if at == len(self.rest) and not self.over:
                        at -= 1  # what it escapes is not here yet
                        break
                    at += quoted
                elif char == '"':
                    quoted = not quoted
                    done = not quoted and depth == 0
                elif quoted and char < " ":
                    tell(self.eat(at - 1) + json.dumps(char)[1:-1])
                    self.eat(1)
                    at = 0
                elif not quoted and char >= " ":
                    depth += 1 if char in "{[" else -1
                    done = depth == 0
            if piece := self.eat(at):
                tell(piece)
            if done:
                return "".join(pieces)
            if self.over:
                raise NoCall
            yield

    def skip(self, also: str = "") -> Step:
        """White space (and ``also``), until something else is there or all is over; returns it."""
        blanks = []
        while True:
            found = len(self.rest) - len(self.rest.lstrip(" \t\r\n" + also))
            blanks.append(self.eat(found))
            if self.rest or self.over:
                return "".join(blanks)
            yield

    def starts(self, word: str) -> Step:
        """Whether ``word`` comes next."""
        while not self.over and len(self.rest) < len(word) and word.startswith(self.rest):
            yield
        return self.rest.startswith(word)

    def followed(self, words: Words) -> Step:
        """Whether one of ``words`` comes next, behind blanks, or nothing more. Nothing is read."""
        while True:
            rest = self.rest[:MAX_BLANKS].lstrip()
            if rest.startswith(words.words):
                return True
            if len(self.rest) >= MAX_BLANKS or not any(word.startswith(rest) for word in words.words):
                return False
            if self.over:
                return True
            yield

    def close(self, mark: str) -> Step:
        """Leave ``mark`` out if it comes next, also one that the answer's end cuts."""
        yield from self.skip()
        if (yield from self.starts(mark)):
            self.rest = self.rest[len(mark):]
        elif mark.startswith(self.rest):  # cut within it
            self.rest = ""

    def eat(self, count: int) -> str:
        """The next ``count`` characters."""
        text, self.rest = self.rest[:count], self.rest[count:]
        if self.taken is not None and text:
            self.taken.append(text)
        return text
