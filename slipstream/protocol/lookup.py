"""PromptLookup: what an answer's own text and grammar foretell, at the cost of looking it up.

Rules:
1. What followed the newest tokens when they stood in this prompt or answer before is a chain of draft tokens. It is
   there at once: nobody is asked and nothing is waited for.
2. A match of n tokens is right with a chance of n / (n + doubt). The doubt is the text's own: at every commit what a
   match foretold is compared with what came, whether it was verified or not.
3. The doubt solves: sum of n over all that were wrong = doubt * number of all that were right. Both sides expect the
   same, as doubt / (n + doubt) * n = n / (n + doubt) * doubt. Older ones fade.
4. What a grammar forces comes before what the text foretells, which goes on behind it where both say the same. Other
   tokens may spell it: how often the same ones do is counted, too.

``SuffixIndex`` knows where the newest tokens stood before. It holds, for a few suffix lengths, a chain from each
position to the one before it with an equal suffix: one dictionary entry a token and length, where a trie would hold a
node for each length.

It knows nothing about drafters, models or whether verifying pays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

CHAIN = 24  # occurrences looked at for one suffix length, the newest first
FEW = 4  # and where only the longest match is wanted
MEMBERS = 48  # occurrences that are told of
DOUBT = 2.0  # a match of n tokens is trusted n / (n + DOUBT); measured: 0.48 at 2, 0.66 at 4, 0.82 at 8, 0.94 at 14


class Match(NamedTuple):
    """``length`` tokens before ``end`` equal the newest ones, so what stands at ``end`` may come next."""

    length: int
    end: int


class SuffixIndex:
    """The tokens of one session and, for some suffix lengths, where an equal suffix ended before."""

    __slots__ = ("_before", "_keep", "_longest", "_newest", "_orders", "tokens")

    def __init__(self, orders: Sequence[int], longest: int, keep: int) -> None:
        """orders: the suffix lengths that are looked up, ascending; longest: of a match; keep: tokens remembered."""
        self._orders, self._longest, self._keep = tuple(orders), longest, keep
        self._clear()

    def _clear(self) -> None:
        self.tokens: list[int] = []
        # newest: hash of a suffix -> where it ended last; a collision is found out when the tokens are compared.
        self._newest: tuple[dict[int, int], ...] = tuple({} for _ in self._orders)
        self._before: tuple[list[int], ...] = tuple([-1] for _ in self._orders)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens. Once there are twice as many as are kept, the older half is forgotten."""
        if len(self.tokens) + len(tokens) > 2 * self._keep:  # a long prompt is not looked at whole: others wait for it
            tokens = [*self.tokens, *tokens][-self._keep:]
            self._clear()
        text, chains = self.tokens, [*zip(self._orders, self._newest, self._before, strict=True)]
        for token in tokens:
            text.append(token)
            end = len(text)
            for order, newest, before in chains:
                if order > end:
                    before.append(-1)
                    continue
                key = hash(tuple(text[end - order:]))
                before.append(newest.get(key, -1))
                newest[key] = end

    def matches(self) -> list[Match]:
        """Earlier occurrences of the newest tokens, the longest first and the newest first among equals."""
        found: dict[int, int] = {}
        for before in reversed(self._before):
            end = before[-1]
            for _ in range(CHAIN):
                if end < 0:
                    break
                if end not in found:
                    length = self._common(end)
                    if length >= self._orders[0]:
                        found[end] = length
                end = before[end]
            if len(found) >= MEMBERS:
                break
        ranked = sorted(((length, end) for end, length in found.items()), reverse=True)
        return [Match(length, end) for length, end in ranked[:MEMBERS]]

    def _common(self, end: int) -> int:
        text, last, length = self.tokens, len(self.tokens), 0
        most = min(self._longest, end)
        while length < most and text[end - 1 - length] == text[last - 1 - length]:
            length += 1
        return length

    def following(self, end: int, ahead: int) -> int:
        """The token ``ahead`` places after ``end``, the text repeating itself from ``end`` on."""
        return self.tokens[end + ahead % (len(self.tokens) - end)]

    def continuation(self, end: int, count: int) -> list[int]:
        """The ``count`` tokens from ``end`` on, as ``following`` has them one by one."""
        text = self.tokens[end : end + count]
        return text if len(text) == count else [text[ahead % len(text)] for ahead in range(count)]

    def longest(self, least: int) -> Match | None:
        """The longest of a few newest matches, if it has ``least`` tokens. Quick where there is none."""
        best: Match | None = None
        for order, before in zip(reversed(self._orders), reversed(self._before), strict=True):
            end = before[-1]
            for _ in range(FEW):
                if end < 0:
                    break
                length = self._common(end)
                if length >= (best.length + 1 if best else least):
                    best = Match(length, end)
                end = before[end]
            if best is not None and best.length >= order:
                break
        return best


ORDERS = (1, 4)  # suffixes that are looked up; the shorter one is the shortest match
LONGEST = 32  # tokens of a match that are counted
KEEP = 1 << 15  # tokens of a text
PRIOR = 6.0  # right tokens that a beginning is worth
ALL_PRIOR = 20.0  # and that of all texts
MOST_DOUBT = 16.0  # to begin with, so that a text that does repeat itself is soon seen to
FADE = 0.97  # of what was seen, for each token more
FADE_ALL = 0.999  # and of what all texts have shown
KEPT, BROKEN = 19.0, 1.0  # forced chains that a beginning is worth: those that came, and others


@dataclass(slots=True)
class Doubt:
    """Of all texts of a kind: rule 3's sums. Sampled ones repeat themselves less than greedy ones."""

    right: float = ALL_PRIOR
    wrong: float = ALL_PRIOR * DOUBT


class PromptLookup:
    """Of one answer."""

    __slots__ = ("_broken", "_forced", "_index", "_kept", "_known", "_match", "_right", "_wrong")

    def __init__(self, tokens: Sequence[int], known: Doubt | None = None) -> None:
        """tokens: prompt and answer so far. known: of texts of its kind, which it adds to; None: it is the
        only one."""
        self._index = SuffixIndex(ORDERS, LONGEST, KEEP)
        self._known = known = known or Doubt()
        self._right, self._wrong = PRIOR, PRIOR * known.wrong / max(known.right, known.wrong / MOST_DOUBT)
        self._kept, self._broken = KEPT, BROKEN
        self._forced: Sequence[int] = ()
        self._index.extend(tokens)
        self._match = self._index.longest(ORDERS[0])

    @property
    def doubt(self) -> float:
        return self._wrong / self._right

    def commit(self, tokens: Sequence[int]) -> None:
        """``tokens`` came."""
        match, known = self._match, self._known
        if self._forced:
            came = all(token == forced for token, forced in zip(tokens, self._forced, strict=False))
            self._kept, self._broken = FADE * self._kept + came, FADE * self._broken + (not came)
        if match is not None:
            foretold = self._index.continuation(match.end, len(tokens))
            for ahead, (token, told) in enumerate(zip(tokens, foretold, strict=True)):
                right = told == token
                wrong = (not right) * (match.length + ahead)
                self._right, self._wrong = FADE * self._right + right, FADE * self._wrong + wrong
                known.right, known.wrong = FADE_ALL * known.right + right, FADE_ALL * known.wrong + wrong
                if not right:
                    break
        self._index.extend(tokens)
        self._match = self._index.longest(ORDERS[0])

    def chain(self, most: int, forced: Sequence[int] = ()) -> tuple[list[int], list[float]]:
        """What should come next: at most ``most`` tokens, and for each the chance that all up to it come. ``forced``:
        by a grammar."""
        most = max(0, most)
        self._forced = forced = forced[:most]
        match, trust = self._match, self._kept / (self._kept + self._broken) if forced else 1.0
        count = len(forced)
        foretold = [] if match is None else self._index.continuation(match.end, most)
        if match is None or foretold[:count] != [*forced]:
            return [*forced], [trust] * count
        doubt, chance, chances = self.doubt, trust, [trust] * count
        for length in range(match.length + count, match.length + most):
            chance *= length / (length + doubt)
            chances.append(chance)
        return foretold, chances
