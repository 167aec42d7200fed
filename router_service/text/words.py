"""Words that a text which comes in pieces is searched for."""

from __future__ import annotations

from collections.abc import Sequence


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
