"""Sequence: one answer in the making: what was asked, its slots, and what is followed of it.

Rules:
1. ``slots[:computed]`` are the KV slots of committed tokens 0 … computed - 1, one each. While decoding, ``computed`` is
   ``base - 1``: the newest committed token is the root of the tree and has no KV yet.
2. The first ``borrowed`` of them belong to the prefix cache, the rest to this answer.
3. It is made on the engine thread, and only that thread touches it.

It knows nothing about the schedule, the links or the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from slipstream.engine.prefix import Match
from slipstream.engine.sampling import TokenHistory
from slipstream.following.followed import Followed
from slipstream.following.following import Following
from slipstream.observe.spans import Span, Spans
from slipstream.protocol.requests import Finish, Piece, Request

Sink = Callable[[Piece | Exception], None]


@dataclass(slots=True, eq=False)
class Sequence:
    """``sink`` takes its pieces, or the error that ends it."""

    number: int
    request: Request
    sink: Sink
    arrived_s: float
    followed: Followed  # its tokens, tree, drafter and decisions
    history: TokenHistory | None
    span: Span
    slots: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    computed: int = 0
    borrowed: int = 0
    match: Match | None = None
    cached_tokens: int = 0
    first_step_s: float | None = None
    told: bool = False  # its reader has had a piece

    @staticmethod
    def begin(number: int, request: Request, sink: Sink, arrived_s: float, following: Following,
              spans: Spans) -> Sequence:
        """An answer that waits for its turn."""
        prompt = len(request.tokens) - request.answered
        span = spans.begin("target.answer", request.trace, prompt=prompt, answered=request.answered)
        history = TokenHistory.of(request.sampling, request.tokens[:prompt])
        if history is not None:
            history.append(request.tokens[prompt:])
        followed = following.open(number, request.tokens, prompt, request.sampling, prompt + request.max_tokens,
                                  request.speculate, span.parent)
        return Sequence(number, request, sink, arrived_s, followed, history, span)

    @property
    def tokens(self) -> list[int]:
        return self.followed.side.tokens

    @property
    def base(self) -> int:
        return len(self.followed.side.tokens)

    @property
    def prefilling(self) -> bool:
        return self.computed < self.base - 1

    @property
    def num_prefill(self) -> int:
        """Committed tokens whose KV is missing, the root not counted."""
        return self.base - 1 - self.computed

    def cut(self, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], Finish]:
        """What of ``tokens`` becomes part of the answer, and whether it ends there."""
        room, stops = self.followed.left, self.request.sampling.stop_token_ids
        for count, token in enumerate(tokens[:room] if stops else (), start=1):
            if token in stops:
                return tokens[:count], "stop"
        return (tokens[:room], "length") if len(tokens) >= room else (tokens, "")

    def take_slots(self, slots: NDArray[np.int64] | Iterable[int]) -> None:
        """``slots`` hold the KV of the committed tokens that follow."""
        new = np.asarray(slots, np.int64)
        self.slots[self.computed : self.computed + len(new)] = new
        self.computed += len(new)

    def untake_slots(self, count: int) -> NDArray[np.int64]:
        """The newest ``count`` slots, which hold nothing after all."""
        self.computed -= count
        return self.slots[self.computed : self.computed + count].copy()
