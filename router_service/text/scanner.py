"""A text that comes piece by piece, read as if it were whole: a reader is a generator that waits where it needs more.

Rule: what a character costs does not grow with the text before it. It knows nothing about families or calls.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import Any

from router_service.text.words import Words

Step = Generator[None, None, Any]
MAX_BLANKS = 256  # between marks
JSON_CHAR, SIMPLE_END = re.compile(r'["\\{}\[\]]'), re.compile(r"[,:}\]\s]")


class NoCall(Exception):
    """What was read is none."""


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
        """The JSON value that comes next, as it is written; ``tell`` hears of it piece by piece."""
        depth, quoted, pieces = 0, False, list[str]()
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
                elif not quoted:
                    depth += 1 if char in "{[" else -1
                    done = depth == 0
            piece = self.eat(at)
            if tell is None:
                pieces.append(piece)
            elif piece:
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
