"""What a session decides once a round, from what it sees; and why.

Rules:
1. A decision is a value: whoever made it, it holds until the next commit.
2. ``why`` is one word for people: it goes to traces, spans and logs.

It knows nothing about how decisions are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

Why = Literal["drafts pay", "prompt lookup", "a probe", "measures plain", "too slow", "drafts do not pay", "no drafter",
              "forbidden"]


Reason = Literal["acceptance_low", "draft_unavailable", "draft_timeout", "overload", "incompatible", "probe_ok",
                 "probe_failed", "operator", "drafter_ready"]


class Mode(StrEnum):
    SPECULATE = "speculate"
    SHADOW = "shadow"
    PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Seen:
    """What is there when a session decides."""

    others: int = 0  # rows that others bring to the coming step
    followed: bool = False  # a drafter follows
    chances: Sequence[float] = ()  # of the chain that the text foretells: that all tokens up to each come
    unasked: int = 0  # tokens committed since a tree was asked for
    grows_ahead: bool = False  # the drafter would grow on while the target verifies


@dataclass(frozen=True, slots=True)
class Decision:
    """All that a round needs to know."""

    mode: Mode
    verify: int  # draft nodes to verify at most, root not counted; 0: plain
    lookup: int  # tokens of the text's own chain that are verified at once instead of waiting; 0: none
    want: int  # nodes that the drafter is asked for; 0: it is told, and asked for nothing
    follow: bool  # a drafter should follow: attach one, or keep it
    ahead: bool  # the drafter may grow on until the next commit
    wait_s: float  # seconds after the commit that its growth may be awaited
    enough: float  # draft tokens that a tree must promise for the step to begin at once
    why: Why


@dataclass(frozen=True, slots=True)
class Transition:
    """A change of mode, with the gain that was believed then."""

    at_s: float
    before: Mode
    after: Mode
    reason: Reason
    gain: float
