"""Drafted: all that the draft service holds of one session, and whether growing on pays while its target verifies.

Rules:
1. What the target holds is known from the tree, which is re-rooted on every commit as the target's is: what is left
   then can be verified without waiting.
2. A target that holds nothing, or little, waits or goes on without drafts: its next growth is a whole tree, sent at
   once. One that holds more gets further levels as they are made, if it allows that.
3. Growth stops at ``extra`` nodes beyond what the target would verify, where nothing likely is left, or where the
   drafter has nothing more to say; a commit begins it anew.

It knows nothing about drafters, frames or time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log
from typing import Protocol

from slipstream.drafting.tree import GrowingTree
from slipstream.observe.spans import Span, Unfollowed
from slipstream.protocol.messages import Commit, Growth, Open, TargetBound
from slipstream.protocol.session import DraftSide
from slipstream.protocol.tree import MAX_HELD

THIN = 0.5  # share of a whole tree's promise
PIECE = 16  # nodes sent for one further level
LEAST = log(1 / 256)  # the score below which a node is not worth a level of the drafter's time


class Peer(Protocol):
    """One connected target."""

    @property
    def name(self) -> str: ...

    def send(self, items: Sequence[TargetBound]) -> None:
        """From any thread; never blocks."""
        ...


@dataclass(slots=True, eq=False)
class Drafted:
    """``number`` is ours: peers count their sessions on their own and may collide."""

    number: int
    peer: Peer
    side: DraftSide
    span: Span = field(default_factory=Unfollowed)
    tree: GrowingTree = field(default_factory=lambda: GrowingTree(0))  # the drafter's, once it has opened the session
    wanted: int = 0  # nodes that the target would verify next; 0: none are to be grown
    stale: bool = False  # committed since the last growth
    extra: int = 0  # nodes grown beyond those; 0: one growth a commit, until the target allows more
    usual: float = 0.0  # what a whole tree promises
    barren: int = 0  # growths in a row without a likely node

    def told(self, message: Open | Commit, run_ahead: int) -> None:
        """The target said what is committed and what it wants."""
        self.wanted, self.stale, self.barren = message.wanted, message.wanted > 0, 0
        self.extra = run_ahead if message.ahead else 0

    def grew(self, growth: Growth) -> bool:
        """``growth`` is the drafter's. Whether there is anything to say: a target may wait to hear of its newest
        commit, be it that there is nothing."""
        answer, self.stale = self.stale or len(growth.ids) > 0, False
        if not self.extra:
            return answer
        if 0 < len(growth.ids) == self.tree.num_sent:
            promise = self.tree.promise(self.tree.num_sent)
            self.usual += 0.2 * (promise - self.usual) if self.usual else promise
        likely = len(growth.scores) and float(growth.scores.max()) >= LEAST
        self.barren = 0 if likely else self.barren + 1
        return answer

    @property
    def room(self) -> int:
        """Further nodes that the target is to hold."""
        return max(0, min(MAX_HELD - 1, self.wanted + self.extra) - self.tree.num_sent)

    @property
    def starving(self) -> bool:
        """Whether the target waits for a whole tree, or should."""
        return not self.extra or self.tree.promise(self.wanted) <= THIN * self.usual

    @property
    def hungry(self) -> bool:
        """Whether to grow on. A drafter that began anew after a commit says nothing new until it is below what the
        target holds, so it may be silent for as many levels as the tree has."""
        if not self.extra or self.wanted < 1 or not self.room:
            return False
        return not self.barren or self.barren <= self.tree.sent_depth()

    @property
    def budget(self) -> int:
        """Nodes of its next growth at most. A level's best are sent, and not all that it found: better ones may come
        from the levels below, and the tree has an end."""
        return min(self.wanted if self.starving else PIECE, self.room) if self.extra else self.wanted
