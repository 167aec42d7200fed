"""Round: what one pass over the inbox collects, for the drafter and for each peer.

It knows nothing about drafters.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from draft_service.drafted import Drafted, Peer
from slipstream.protocol.messages import Commit, Features, Growth, Open, TargetBound


@dataclass(frozen=True, slots=True)
class Grown:
    """One growth of all sessions that wanted one."""

    name: str  # of the span
    began_s: float
    ended_s: float
    sessions: int


@dataclass(slots=True)
class Round:
    """What one pass over the inbox collected for the drafter."""

    opens: list[Open] = field(default_factory=list)
    features: list[Features] = field(default_factory=list)
    commits: list[Commit] = field(default_factory=list)
    closes: list[int] = field(default_factory=list)
    answers: dict[Peer, list[TargetBound]] = field(default_factory=lambda: defaultdict(list))
    came: list[tuple[int, int, float]] = field(default_factory=list)  # commits: a target's session, base, and when
    grown: Grown | None = None
    sent: list[tuple[Drafted, Growth]] = field(default_factory=list)

    def send(self) -> None:
        for peer, items in self.answers.items():
            peer.send(items)

    def unsay(self, number: int) -> None:
        """What was to be told of a session is void."""
        self.opens = [o for o in self.opens if o.session != number]
        self.features = [f for f in self.features if f.session != number]
        self.commits = [c for c in self.commits if c.session != number]


def commit_of(item: Commit, number: int) -> Commit:
    """``item`` of our session ``number``. Written out: ``dataclasses.replace`` takes several times as long."""
    states = item.features
    if states is not None:
        states = Features(number, states.start, states.rows, states.num_rows, states.dtype)
    return Commit(number, item.base, item.tokens, states, item.drafted, item.wanted, item.ahead)


def growth_of(growth: Growth, session: int, draft_s: float) -> Growth:
    """``growth`` of the target's ``session``."""
    return Growth(session, growth.base, growth.ids, growth.parents, growth.tokens, growth.scores, draft_s)
