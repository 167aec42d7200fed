"""A text that arrives piece by piece: searched for words, ended at stop strings, and scanned by parsers, generators
that wait where they need more text.

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

Parser = Generator[None, None, Any]
MAX_BLANKS = 256  # between two marks
JSON_CHAR, SIMPLE_END = re.compile(r'["\\{}\[\]\x00-\x1f]'), re.compile(r"[,:}\]\s]")


class Words:
    """Words to search for; none of them is empty.

    What a character costs grows with the number of words, not with their lengths, if the caller keeps of the searched
    text only ``partial_length``."""

    __slots__ = ("_firsts", "_longest", "_pattern", "words")

    def __init__(self, words: Sequence[str]) -> None:
        self._pattern: re.Pattern[str] | None = None  # of ``find``: stop strings, which may be long, need none
        self.words = tuple(dict.fromkeys(words))
        self._firsts = frozenset(word[0] for word in self.words)
        self._longest = max(map(len, self.words), default=0)

    def find(self, text: str) -> tuple[int, str] | None:
        """Where the earliest of the words begins, and the longest that begins there."""
        if self._pattern is None:
            longest_first = sorted(self.words, key=len, reverse=True)
            self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        found = self._pattern.search(text)
        return None if found is None else (found.start(), found[0])

    def partial_length(self, text: str) -> int:
        """The length of the longest end of ``text`` that begins one of the words."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._firsts:
                end = text[start:]
                if any(word.startswith(end) for word in self.words):
                    return len(end)
        return 0


class StopStrings:
    """Cuts one answer's text before the first stop string, or behind it (``keep``). ``matched`` is that string."""

    __slots__ = ("_held", "_keep", "_num_exempt", "_stops", "matched")

    def __init__(self, stops: Sequence[str], keep: bool = False) -> None:
        """None of ``stops`` is empty."""
        self._stops = Words(stops)
        self._keep = keep
        self._held = ""
        self._num_exempt = 0  # characters of the held text in which no stop string may end
        self.matched: str | None = None

    def push(self, text: str, may_match: bool = True) -> str:
        """The text that may go out now: what could still become a stop string is held back. "" after a match.
        ``may_match``: whether a stop string may end in ``text``."""
        if self.matched is not None:
            return ""
        text = self._held + text
        if not may_match:
            self._num_exempt = len(text)
        found = [(start + len(stop), start, stop) for stop in self._stops.words
                 if (start := text.find(stop, max(0, self._num_exempt + 1 - len(stop)))) >= 0]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return text[:start + len(self.matched) if self._keep else start]
        num_held = self._stops.partial_length(text)
        self._held = text[len(text) - num_held:]
        self._num_exempt = max(0, self._num_exempt - (len(text) - num_held))
        return text[:len(text) - num_held]


class NoCall(Exception):
    """The text that was read is no call."""


class Scanner:
    """``unread``: text that arrived and was not read; ``final``: no more text comes; ``cut``: it broke off;
    ``consumed``: what was read since this was set to a list (None: not recorded)."""

    def __init__(self) -> None:
        self.unread = ""
        self.final = self.cut = False
        self.consumed: list[str] | None = None

    def read_until(self, marks: Words, emit: Callable[[str], None]) -> Parser:
        """The first of ``marks``, "" for none; ``emit`` gets the text before it piece by piece."""
        while True:
            found = marks.find(self.unread)
            if found is not None:
                start, mark = found
                text, self.unread = self.unread[:start], self.unread[start + len(mark):]
                emit(text)
                return mark
            num_held = 0 if self.final else marks.partial_length(self.unread)
            text, self.unread = self.unread[:len(self.unread) - num_held], self.unread[len(self.unread) - num_held:]
            emit(text)
            if self.final:
                return ""
            yield

    def read_before(self, marks: Words) -> Parser:
        """(the text before the first of ``marks``, that mark); "" for none."""
        pieces: list[str] = []
        mark = yield from self.read_until(marks, pieces.append)
        text = "".join(pieces)
        if self.consumed is not None:
            self.consumed.append(text)
        return text, mark

    def read_value(self, emit: Callable[[str], None] | None = None) -> Parser:
        """The JSON value that comes next, as it is written, with control characters in its strings escaped, as JSON
        wants them; ``emit`` gets it piece by piece."""
        depth, in_string, pieces = 0, False, list[str]()
        emit = emit or pieces.append
        if not self.unread:
            raise NoCall
        simple = self.unread[0] not in '"{['
        while True:
            at, done = 0, False
            while at < len(self.unread) and not done:
                found = (SIMPLE_END if simple else JSON_CHAR).search(self.unread, at)
                if found is None:
                    at = len(self.unread)
                    break
                char, at = found[0], found.end()
                if simple:
                    at, done = found.start(), True
                elif char == "\\":
                    if at == len(self.unread) and not self.final:
                        at -= 1  # the escaped character is not here yet
                        break
                    at += in_string
                elif char == '"':
                    in_string = not in_string
                    done = not in_string and depth == 0
                elif in_string and char < " ":
                    emit(self.consume(at - 1) + json.dumps(char)[1:-1])
                    self.consume(1)
                    at = 0
                elif not in_string and char >= " ":
                    depth += 1 if char in "{[" else -1
                    done = depth == 0
            if piece := self.consume(at):
                emit(piece)
            if done:
                return "".join(pieces)
            if self.final:
                raise NoCall
            yield

    def skip_blanks(self, also: str = "") -> Parser:
        """Skip white space (and ``also``) up to other text or the end; returns what was skipped."""
        blanks = []
        while True:
            found = len(self.unread) - len(self.unread.lstrip(" \t\r\n" + also))
            blanks.append(self.consume(found))
            if self.unread or self.final:
                return "".join(blanks)
            yield

    def starts_with(self, word: str) -> Parser:
        """Whether ``word`` comes next."""
        while not self.final and len(self.unread) < len(word) and word.startswith(self.unread):
            yield
        return self.unread.startswith(word)

    def followed_by(self, words: Words) -> Parser:
        """Whether one of ``words`` comes next, behind blanks, or the end. Nothing is read."""
        while True:
            unread = self.unread[:MAX_BLANKS].lstrip()
            if unread.startswith(words.words):
                return True
            if len(self.unread) >= MAX_BLANKS or not any(word.startswith(unread) for word in words.words):
                return False
            if self.final:
                return True
            yield

    def skip_mark(self, mark: str, also: str = "") -> Parser:
        """Skip blanks (and ``also``), and ``mark`` if it comes next, also one that the answer's end cuts."""
        yield from self.skip_blanks(also)
        if (yield from self.starts_with(mark)):
            self.unread = self.unread[len(mark):]
        elif mark.startswith(self.unread):  # cut within it
            self.unread = ""

    def consume(self, count: int) -> str:
        """The next ``count`` characters."""
        text, self.unread = self.unread[:count], self.unread[count:]
        if self.consumed is not None and text:
            self.consumed.append(text)
        return text
