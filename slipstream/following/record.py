"""What a step gave each session that is followed, and what became of each round. Values that travel."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.decision.record import Why
from slipstream.following.link import Link
from slipstream.protocol.requests import Finish


@dataclass(frozen=True, slots=True)
class Step:
    """A forward that is done. ``rows``: of all sessions; ``nodes``: draft tokens among them."""

    began_s: float
    seconds: float
    rows: int
    sessions: int  # that it verified a tree for
    nodes: int = 0
    prefill: bool = False  # it computed prompts too

    @property
    def ended_s(self) -> float:
        return self.began_s + self.seconds


@dataclass(frozen=True, slots=True)
class Verified:
    """What one session got out of a step: ``tokens`` to commit, the first ``accepted`` of them draft tokens."""

    session: int
    tokens: tuple[int, ...]
    drafted: int  # draft tokens that were verified
    accepted: int
    depth: int  # of the deepest of them
    finish: Finish = ""  # why the answer ends here; "": it goes on
    rows: bytes | None = None  # feature rows of the positions before each of ``tokens``, if its drafter reads them


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """What became of a round, and why it was as it was."""

    drafted: int
    accepted: int
    tokens: int
    waited_s: float  # it stood still for its drafter
    outcome: str  # one of the metric's
    why: Why
    link: Link | None  # who drafted, if anybody did
