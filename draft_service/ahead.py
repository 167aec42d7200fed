"""Ahead: what of one session's tree the target holds, and whether growing on pays while the target verifies.

Rules:
1. It re-roots on every commit, as the target does: what is left then is what the target can verify without waiting.
2. A target that holds nothing, or little, waits or goes on without drafts: its next growth is a whole tree, sent at
   once. One that holds more gets further levels as they are made.
3. Growth stops at ``extra`` nodes beyond what the target would verify, where nothing likely is left, or where the
   drafter has nothing more to say; a commit begins it anew.

It knows nothing about drafters, peers or time.
"""

from __future__ import annotations

from math import log

from slipstream.protocol.messages import Commit, Growth
from slipstream.protocol.tree import MAX_HELD, DraftTree

THIN = 0.5  # share of a whole tree's promise
PIECE = 16  # nodes sent for one further level
LEAST = log(1 / 256)  # the score below which a node is not worth a level of the drafter's time


class Ahead:
    __slots__ = ("_barren", "_usual", "extra", "tree")

    def __init__(self, extra: int) -> None:
        self.extra = extra
        self._barren = 0  # growths in a row without a likely node
        self._usual = 0.0  # what a whole tree promises
        self.tree = DraftTree.root_only(1, 0)

    def begin(self, base: int, token: int) -> None:
        """What the target holds is not known, or nothing: the root, ``token`` at ``base - 1``."""
        self.tree = DraftTree.root_only(base, token)
        self._barren = 0

    def committed(self, message: Commit) -> None:
        self.tree = self.tree.reroot(message.tokens)
        self._barren = 0

    def grew(self, growth: Growth) -> None:
        """``growth`` was sent."""
        whole = len(self.tree) == 1
        self.tree = self.tree.append(growth.ids.tolist(), growth.parents.tolist(), growth.tokens.tolist(),
                                     growth.scores.tolist())
        if whole and len(growth.ids):
            promise = self.tree.promise(len(growth.ids))
            self._usual += 0.2 * (promise - self._usual) if self._usual else promise
        likely = len(growth.scores) and float(growth.scores.max()) >= LEAST
        self._barren = 0 if likely else self._barren + 1

    def starving(self, wanted: int) -> bool:
        """Whether the target holds so little that it waits, or should."""
        return self.tree.promise(wanted) <= THIN * self._usual

    def room(self, wanted: int) -> int:
        """Further nodes that it is to hold, when it would verify ``wanted``."""
        return max(0, min(MAX_HELD - 1, wanted + self.extra) - (len(self.tree) - 1))

    def budget(self, wanted: int) -> int:
        """Nodes of the next growth at most. A level's best are sent, and not all that it found: better ones may come
        from the levels below, and the tree has an end."""
        return min(wanted if self.starving(wanted) else PIECE, self.room(wanted))

    def hungry(self, wanted: int) -> bool:
        """Whether to grow on. A drafter that began anew after a commit says nothing new until it is below what the
        target holds, so it may be silent for as many levels as the tree has."""
        if wanted < 1 or not self.room(wanted):
            return False
        return not self._barren or self._barren <= int(self.tree.depths().max())
