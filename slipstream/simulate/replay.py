"""A real pair of target and drafter in simulated time, from records of its answers (``drafting.records``).

All recorded answers, joined, are one text. A target reads it from a place of its own on, again and again. At each place
the drafter proposes what the real one did there; like a draft head it starts a new tree after each commit.
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


class RecordedText:
    """The recorded answers to all questions, joined. Tokens are numbered anew: only those that occur."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.places: list[Place] = [place for record in records for place in record.places]
        answers = np.array([token for record in records for token in record.answer], np.int64)
        every = np.unique(np.concatenate([answers, *(place.tokens for place in self.places)]))
        self.tokens = np.searchsorted(every, answers)
        self.vocab_size = max(len(every), len(answers))  # a place in the text is sent as a token, too (PROMPT)
        self._node_tokens = [np.searchsorted(every, place.tokens).tolist() for place in self.places]

    def __len__(self) -> int:
        return len(self.tokens)

    def children(self, at: int, path: Sequence[int], max_children: int) -> tuple[list[int], list[float]]:
        """Tokens and log scores of the recorded children after ``path`` at the place ``at``, best first, at most
        ``max_children``; none if the record does not reach there."""
        place, tokens, node = self.places[at], self._node_tokens[at], 0
        for token in path:
            node = next((child for child in place.children(node) if tokens[child] == token), -1)
            if node < 0:
                return [], []
        found = place.children(node)[:max_children]
        return tokens[found.start : found.stop], place.scores[found.start : found.stop].tolist()


@dataclass(frozen=True, slots=True)
class ReplayedText:
    """A ``simulate.timed.Text`` that a target reads from ``begin`` on. A session's place is where its text begins."""

    text: RecordedText
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
        """None: children depend on the path."""

    def children(self, sessions: Sequence[TimedSession]) -> Iterator[list[Children]]:
        for session in sessions:
            tree, at = session.tree, (session.place + session.tree.base - PROMPT) % len(self.text)
            yield [self.text.children(at, tree.path(node), tree.width) for node in tree.frontier]


@dataclass(frozen=True, slots=True)
class ReplayedWorkload:
    """A ``simulation.Workload`` of recorded answers; its drafter starts a new tree after each commit, like a head."""

    recorded: RecordedText
    answer: int = MAX_CONTEXT // 2
    keeps_subtree: bool = False

    def begin(self, stream: int) -> int:
        return stream * 97 % len(self.recorded)

    def text(self, timing: Timing, stream: int) -> ReplayedText:
        return ReplayedText(self.recorded, self.begin(stream))

    def prompt(self, stream: int) -> tuple[int, ...]:
        begin = self.begin(stream)
        return begin, int(self.recorded.tokens[begin])
