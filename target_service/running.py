"""Running: all that the target holds for one answer while it is being made.

Rules:
1. ``slots[:computed]`` are the KV slots of committed tokens 0 … computed - 1, one each. While decoding, ``computed`` is
   ``base - 1``: the newest committed token is the root of the tree and has no KV yet.
2. The first ``borrowed`` of them belong to the prefix cache, the rest to this answer.
3. Only the engine thread touches it.

It knows nothing about the schedule, the links or the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import log

import numpy as np
from numpy.typing import NDArray

from slipstream.decision.foresight import Foresight
from slipstream.decision.policy import SpeculationPolicy
from slipstream.engine.prefix import Match
from slipstream.engine.sampling import TokenHistory
from slipstream.observe.spans import Span, Unfollowed
from slipstream.protocol.requests import Piece, Request
from slipstream.protocol.session import TargetSide
from slipstream.wire.link import Link

PENDING = 16  # committed tokens that a drafter takes in together with a tree
Sink = Callable[[Piece | Exception], None]


@dataclass(slots=True, eq=False)
class Running:
    """One answer in the making. ``sink`` takes its pieces, or the error that ends it."""

    number: int
    request: Request
    side: TargetSide
    policy: SpeculationPolicy
    sink: Sink
    arrived_s: float
    history: TokenHistory | None
    slots: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    computed: int = 0
    borrowed: int = 0
    match: Match | None = None
    cached_tokens: int = 0
    link: Link | None = None
    retry_at_s: float = 0.0  # no drafter is asked again before
    first_round: bool = True  # the drafter that follows has not been awaited yet, or not for long
    unasked: int = 0  # tokens that were committed since a tree was asked for
    committed_s: float = 0.0  # when the newest token was committed
    stood: bool = False  # a step was decided without it since then, because it waited for its drafter
    heard_s: float | None = None  # when the drafter answered for it
    asked: dict[int, float] = field(default_factory=dict)  # base -> when, of commits that left nothing but the root
    exchange_s: float | None = None  # what an answer to one of them took, if one came since the last round
    wait_until_s: float = 0.0  # the deadline of the drafter's answer
    enough: float = 0.0  # draft tokens that a tree must promise for it to be taken at once
    features_sent: int = 0  # positions below were handed to the drafter, or are outside its window
    first_step_s: float | None = None
    foresight: Foresight | None = None  # None: nothing is looked up
    foreseen: int = 0  # nodes of the coming round that no drafter proposed; 0: it is the drafter's, or plain
    span: Span = field(default_factory=Unfollowed)

    @property
    def prefilling(self) -> bool:
        return self.computed < self.side.base - 1

    @property
    def num_prefill(self) -> int:
        """Committed tokens whose KV is missing, the root not counted."""
        return self.side.base - 1 - self.computed

    @property
    def max_len(self) -> int:
        return len(self.request.tokens) - self.request.answered + self.request.max_tokens

    def waits(self, now_s: float) -> bool:
        """Whether the step should leave it out for a while, because growth may still come in time."""
        if self.foreseen or self.link is None or self.side.heard or now_s >= self.wait_until_s:
            return False
        if not self.policy.wants_drafts(now_s):
            return False
        tree = self.side.tree
        return len(tree) == 1 or tree.promise(self.policy.nodes) < self.enough

    def foresee(self, tokens: Sequence[int], most: int, others: int) -> tuple[list[int], list[float]]:
        """After ``tokens``, which are committed now: what its text foretells, as far as verifying it at once pays best
        beside ``others``, at most ``most`` tokens; and the scores."""
        self.foreseen = 0
        if not most or not self.policy.allowed:
            return [], []
        if self.foresight is None:
            self.foresight = Foresight([*self.side.tokens, *tokens])
        else:
            self.foresight.commit(tokens)
        left = self.request.max_tokens - self.side.num_output - len(tokens)
        chain, chances = self.foresight.chain(min(most, left - 1))
        if chain:
            self.foreseen = self.policy.foresees(chances, self.link is not None, others)
        return chain[: self.foreseen], [log(chance) for chance in chances[: self.foreseen]]

    def told(self, tokens: int, asks: bool) -> None:
        """Its drafter hears of ``tokens`` more, and whether a tree is asked for."""
        self.unasked += tokens
        if asks:  # what it has to catch up with takes time that no later exchange takes
            self.first_round, self.unasked = self.first_round or self.unasked > PENDING, 0

    def waited(self, started_s: float) -> float:
        """Seconds that it stood still for its drafter before the step that began at ``started_s``."""
        if not self.stood or self.link is None or self.side.num_output == 0:
            return 0.0
        answered_s = self.heard_s if self.heard_s is not None else min(started_s, self.wait_until_s)
        return max(0.0, answered_s - self.committed_s)

    def take_slots(self, slots: NDArray[np.int64] | Sequence[int]) -> None:
        """``slots`` hold the KV of the committed tokens that follow."""
        self.slots[self.computed : self.computed + len(slots)] = slots
        self.computed += len(slots)

    def untake_slots(self, count: int) -> NDArray[np.int64]:
        """The newest ``count`` slots, which hold nothing after all."""
        self.computed -= count
        return self.slots[self.computed : self.computed + count].copy()
