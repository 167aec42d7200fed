"""Foresight: what the text of an answer foretells by itself, at the cost of looking it up.

Rules:
1. What followed the newest tokens when they stood in this prompt or answer before is a chain of draft tokens. It is
   there at once: nobody is asked and nothing is waited for.
2. A match of n tokens is right with a chance of n / (n + doubt). The doubt is the text's own: at every commit what a
   match foretold is compared with what came, whether it was verified or not.
3. The doubt solves: sum of n over all that were wrong = doubt * number of all that were right. Both sides expect the
   same, as doubt / (n + doubt) * n = n / (n + doubt) * doubt. Older ones fade.

It knows nothing about drafters, models or whether verifying pays.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.base.suffixes import DOUBT, SuffixIndex

ORDERS = (1, 4)  # suffixes that are looked up; the shorter one is the shortest match
LONGEST = 32  # tokens of a match that are counted
KEEP = 1 << 15  # tokens of a text
PRIOR = 6.0  # right tokens that a beginning is worth
FADE = 0.97  # of what was seen, for each token more


class Foresight:
    """Of one answer."""

    __slots__ = ("_index", "_match", "_right", "_wrong")

    def __init__(self, tokens: Sequence[int]) -> None:
        """tokens: prompt and answer so far."""
        self._index = SuffixIndex(ORDERS, LONGEST, KEEP)
        self._right, self._wrong = PRIOR, PRIOR * DOUBT
        self._index.extend(tokens)
        self._match = self._index.longest(ORDERS[0])

    @property
    def doubt(self) -> float:
        return self._wrong / self._right

    def commit(self, tokens: Sequence[int]) -> None:
        """``tokens`` came."""
        match = self._match
        if match is not None:
            for ahead, token in enumerate(tokens):
                right = self._index.following(match.end, ahead) == token
                self._right = FADE * self._right + right
                self._wrong = FADE * self._wrong + (not right) * (match.length + ahead)
                if not right:
                    break
        self._index.extend(tokens)
        self._match = self._index.longest(ORDERS[0])

    def chain(self, most: int) -> tuple[list[int], list[float]]:
        """What should come next: at most ``most`` tokens, and for each the chance that all up to it come."""
        match = self._match
        if match is None:
            return [], []
        doubt, chance, chances = self.doubt, 1.0, []
        for length in range(match.length, match.length + most):
            chance *= length / (length + doubt)
            chances.append(chance)
        return [self._index.following(match.end, ahead) for ahead in range(most)], chances
