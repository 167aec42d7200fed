"""Round: what one pass over the inbox collects, for the drafter and for each peer.

It knows nothing about sessions or drafters.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from slipstream.messages import Commit, Features, Open, TargetBound
from slipstream.wire.peers import Peer


@dataclass(slots=True)
class Round:
    """What one pass over the inbox collected for the drafter."""

    opens: list[Open] = field(default_factory=list)
    features: list[Features] = field(default_factory=list)
    commits: list[Commit] = field(default_factory=list)
    closes: list[int] = field(default_factory=list)
    answers: dict[Peer, list[TargetBound]] = field(default_factory=lambda: defaultdict(list))

    def unsay(self, number: int) -> None:
        """What was to be told of a session is void."""
        self.opens = [o for o in self.opens if o.session != number]
        self.features = [f for f in self.features if f.session != number]
        self.commits = [c for c in self.commits if c.session != number]
