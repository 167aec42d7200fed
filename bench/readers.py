"""Readers: streams that are answered side by side, and what came between two tokens of each.

Windows are counted in tokens and not in seconds, so that every schedule is measured on the same text.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field

from slipstream.protocol.messages import Sampling
from slipstream.protocol.requests import Piece, Request
from slipstream.simulate.timed import STREAMS, SYMBOLS
from slipstream.wire.target_client import TargetClient


@dataclass(slots=True)
class Reader:
    """One stream. What it reads after token ``begin`` and up to token ``end`` counts; it reads on, so that the others
    are not alone."""

    number: int
    begin: int
    end: int
    tokens: int = 0
    pieces: list[tuple[float, Piece]] = field(default_factory=list)  # counted ones, and the one before; when they came

    @property
    def began(self) -> bool:
        return self.tokens >= self.begin

    @property
    def ended(self) -> bool:
        return self.tokens >= self.end

    def take(self, now_s: float, piece: Piece) -> None:
        self.tokens += len(piece.tokens)
        if self.began and self.tokens - len(piece.tokens) < self.end:
            self.pieces.append((now_s, piece))

    @property
    def counted(self) -> list[Piece]:
        return [piece for _, piece in self.pieces[1:]]

    @property
    def tokens_per_s(self) -> float:
        if len(self.pieces) < 2:
            return 0.0
        return sum(len(piece.tokens) for piece in self.counted) / (self.pieces[-1][0] - self.pieces[0][0])

    @property
    def hits_ms(self) -> list[float]:
        """What rounds took whose tree was there and for which nobody waited."""
        return [1e3 * (now_s - before_s) for (before_s, _), (now_s, piece) in itertools.pairwise(self.pieces)
                if piece.drafted and not piece.wait_s]

    async def read(self, client: TargetClient, speculate: bool) -> None:
        """An answer after the other, each of another text, until cancelled."""
        for turn in itertools.count():
            async for piece in client.submit(asked(self.number, turn, speculate)):
                self.take(time.perf_counter(), piece)


def asked(number: int, turn: int, speculate: bool) -> Request:
    """What stream ``number`` asks in its turn: each time another text."""
    first = (number + 37 * turn) % STREAMS * SYMBOLS
    return Request(f"{number}-{turn}", (first, first), Sampling(), 4000, None, speculate)
