"""What a session sees, what it decides once a round and why, and what it reports when the round is over.

Rules:
1. A decision is a value: whoever made it, it holds until the next commit.
2. ``why`` is one word for people: it goes to traces, spans and logs.

It knows nothing about how decisions are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple

Why = Literal["drafts pay", "prompt lookup", "a probe", "tries a wait", "measures plain", "too slow",
              "drafts do not pay", "no drafter", "forbidden"]


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
    spends_s: float = 0.0  # of the purse: what this round is expected to lose for what it tells


class Round(NamedTuple):
    """One commit as a decision saw it. Plain rounds count too: they have nothing drafted. A named tuple, as a router
    makes one for every piece of every answer."""

    drafted: int  # draft nodes that were verified
    accepted: int
    depth: int  # of the deepest node that was verified
    verify_s: float  # the step
    wait_s: float  # the session stood still for its drafter
    rows: int = 0  # of the whole step, the session's included; 0: unknown
    late: bool = False  # growth was asked for and had not come when the step began
    plain_s: float | None = None  # what the step would have taken without drafts; None: ask StepCosts
    exchange_s: float | None = None  # commit to growth, when one came; None: the wait tells
    first: bool = False  # of this drafter in this answer: it had the prompt to read, which no later exchange has
    lookup: bool = False  # the text's own chain was verified: it says nothing about a drafter


@dataclass(frozen=True, slots=True)
class Transition:
    """A change of mode, with the gain that was believed then."""

    at_s: float
    before: Mode
    after: Mode
    reason: Reason
    gain: float
