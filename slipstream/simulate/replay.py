"""A real pair in simulated time: records of its answers (``drafting.records``) are a target's text and what a drafter
says.

All recorded answers form one text. Each target begins at its own place and reads the text in a circle. At each place
the drafter proposes what the real one proposed there; like a head it begins a new tree after each commit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.choosing.sampling import Children
from slipstream.drafting.records import Place, Record
from slipstream.engine.kv import Indices
from slipstream.simulate.timed import MAX_CONTEXT, TimedSession, Timing

PROMPT = 2  # tokens: where the text begins, and its first token


class Answers:
    """Of all questions, one behind the other."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.places: list[Place] = [place for record in records for place in record.places]
        answers = np.array([token for record in records for token in record.answer], np.int64)
        every = np.unique(np.concatenate([answers, *(place.tokens for place in self.places)]))
        self.tokens = np.searchsorted(every, answers)
        self.vocab_size = max(len(every), len(answers))  # tokens are numbered anew, as none else is ever said
        self._said = [np.searchsorted(every, place.tokens).tolist() for place in self.places]

    def __len__(self) -> int:
        return len(self.tokens)

    def children(self, at: int, path: Sequence[int], most: int) -> tuple[list[int], list[float]]:
        """What the head said behind ``path`` at a place, best first, as far as it was asked."""
        place, said, node = self.places[at], self._said[at], 0
        for token in path:
            node = next((child for child in place.children(node) if said[child] == token), -1)
            if node < 0:
                return [], []
        found = place.children(node)[:most]
        return said[found.start : found.stop], place.scores[found.start : found.stop].tolist()


@dataclass(frozen=True, slots=True)
class Reading:
    """A ``simulate.timed.Text`` that a target reads from ``begin`` on. A session's place is where it began."""

    text: Answers
    begin: int

    @property
    def vocab_size(self) -> int:
        return self.text.vocab_size

    def following(self, tokens: Sequence[int] | Indices, positions: Sequence[int] | Indices) -> Indices:
        found: Indices = self.text.tokens[(self.begin + np.asarray(positions) - PROMPT + 2) % len(self.text)]
        return found

    def place(self, prompt: NDArray[np.int32]) -> int:
        return int(prompt[0])

    def by_level(self, sessions: Sequence[TimedSession], levels: int) -> None:
        """Children depend on the path."""

    def children(self, sessions: Sequence[TimedSession]) -> Iterator[list[Children]]:
        for session in sessions:
            tree, at = session.tree, (session.place + session.tree.base - PROMPT) % len(self.text)
            yield [self.text.children(at, tree.path(node), tree.width) for node in tree.frontier]


@dataclass(frozen=True, slots=True)
class ReplayedCast:
    """Like a head a drafter begins anew behind each commit."""

    said: Answers
    answer: int = MAX_CONTEXT // 2
    keeps: bool = False

    def begin(self, stream: int) -> int:
        return stream * 97 % len(self.said)

    def text(self, timing: Timing, stream: int) -> Reading:
        return Reading(self.said, self.begin(stream))

    def prompt(self, stream: int) -> tuple[int, ...]:
        begin = self.begin(stream)
        return begin, int(self.said.tokens[begin])
