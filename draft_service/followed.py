"""Followed: a session that a peer opened here.

It knows nothing about drafters or rounds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from draft_service.ahead import Ahead
from slipstream.observe.spans import Span, Unfollowed
from slipstream.protocol.messages import Commit, Open
from slipstream.protocol.session import DraftSide
from slipstream.wire.peers import Peer


@dataclass(slots=True, eq=False)
class Followed:
    """A session that a peer opened here. ``number`` is ours: peers count on their own and may collide."""

    number: int
    peer: Peer
    side: DraftSide
    wanted: int = 0  # nodes to grow next; 0: none
    stale: bool = False  # committed since the last growth
    ahead: Ahead | None = None  # None: one growth a commit, until the target allows more
    span: Span = field(default_factory=Unfollowed)

    def told(self, message: Open | Commit, extra: int) -> None:
        """The target said what is committed and what it wants. ``extra``: see ``Ahead``; 0: never ahead."""
        self.wanted, self.stale = message.wanted, True
        if not (message.ahead and extra):
            self.ahead = None
        elif self.ahead is not None and isinstance(message, Commit):
            self.ahead.committed(message)
        else:
            self.ahead = self.ahead or Ahead(extra)
            self.ahead.begin(self.side.base, int(message.tokens[-1]))

    @property
    def hungry(self) -> bool:
        return self.ahead is not None and self.ahead.hungry(self.wanted)

    @property
    def budget(self) -> int:
        """Nodes of its next growth at most."""
        return self.wanted if self.ahead is None else self.ahead.budget(self.wanted)

    @property
    def starving(self) -> bool:
        """Whether its target waits for a whole tree, or should."""
        return self.ahead is None or self.ahead.starving(self.wanted)
