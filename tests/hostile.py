"""A draft service that breaks every rule it can think of. It may waste time; it may not change a token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slipstream.base.errors import RemoteProtocolError
from slipstream.protocol.messages import (
    PROTOCOL_VERSION,
    Close,
    DraftBound,
    DraftHello,
    Drop,
    Growth,
    Open,
    Peer,
    TargetBound,
    TargetHello,
)


class HostileDraft:
    """Answers everything with random growth, some of it valid. Implements ``messages.PeerEvents``."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._bases: dict[int, int] = {}
        self._next_id = 1
        self.sent = 0

    def peer_up(self, peer: Peer, hello: TargetHello) -> DraftHello:
        self._vocab = hello.vocab_size
        return DraftHello(PROTOCOL_VERSION, hello.incarnation, "hostile", 0, "", None, 0, 1 << 16, 16, 1 << 16)

    def peer_down(self, peer: Peer) -> None:
        self._bases.clear()

    def inbox_full(self, peer: Peer) -> bool:
        return False

    def received(self, peer: Peer, items: Sequence[DraftBound],
                 faults: Sequence[tuple[int, RemoteProtocolError]]) -> None:
        answers: list[TargetBound] = []
        for item in items:
            if isinstance(item, Close):
                self._bases.pop(item.session, None)
                continue
            if isinstance(item, Open):
                self._bases[item.session] = len(item.tokens)
            elif item.session in self._bases:
                self._bases[item.session] += len(getattr(item, "tokens", ()))
            answers += [self._nonsense(item.session) for _ in range(int(self._rng.integers(1, 3)))]
        self.sent += len(answers)
        peer.send(answers)

    def _nonsense(self, session: int) -> Growth | Drop:
        rng, base = self._rng, self._bases.get(session, 1)
        if rng.random() < 0.05:
            return Drop(session, "failed")
        count = int(rng.integers(0, 17))
        ids = np.arange(self._next_id, self._next_id + count, dtype=np.int32)
        self._next_id += int(rng.integers(0, count + 1))  # ids come again
        parents = np.array([rng.choice([-base, -1, *ids.tolist(), 10**6]) for _ in range(count)], np.int32)
        tokens = rng.integers(0, self._vocab, count).astype(np.int32)
        scores = -rng.exponential(size=count).astype(np.float32).cumsum().astype(np.float32)
        match int(rng.integers(0, 8)):
            case 0:
                tokens = tokens + self._vocab
            case 1:
                scores = np.full(count, np.nan, np.float32)
            case 2:
                base += 5
            case 3:
                session += 1
            case 4:
                ids = -ids
        return Growth(session, base, ids, parents, tokens, scores)
