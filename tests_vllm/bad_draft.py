"""A draft service that is up and no good: ``python -m tests_vllm.bad_draft PORT lying|slow|flooding``.

lying: valid tokens that are wrong, at once. slow: the same, a second late. flooding: without end, asked or not.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from slipstream.base.config import WireSection
from slipstream.base.errors import RemoteProtocolError
from slipstream.protocol.messages import (
    PROTOCOL_VERSION,
    Close,
    Commit,
    DraftBound,
    DraftHello,
    Growth,
    Open,
    Peer,
    TargetHello,
)
from slipstream.wire.channel import RULES
from slipstream.wire.server import GrpcServer
from slipstream.wire.servicer import DraftServicer

SLOW_S = 1.0
TOGETHER, PAUSE_S = 200, 0.002  # growths of a flood: 100,000 a second


class BadDraft:
    """Implements ``messages.PeerEvents``."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._bases: dict[int, int] = {}
        self._ids = 0

    def peer_up(self, peer: Peer, hello: TargetHello) -> DraftHello:
        self._bases.clear()
        self._vocab = hello.vocab_size
        if self._kind == "flooding":
            threading.Thread(target=self._flood, args=(peer,), daemon=True).start()
        return DraftHello(PROTOCOL_VERSION, hello.incarnation, self._kind, 0, "", None, 0, 1 << 16, 16, 1 << 16)

    def peer_down(self, peer: Peer) -> None:
        self._bases.clear()

    def inbox_full(self, peer: Peer) -> bool:
        return False

    def received(self, peer: Peer, items: Sequence[DraftBound],
                 faults: Sequence[tuple[int, RemoteProtocolError]]) -> None:
        for item in items:
            if isinstance(item, Close):
                self._bases.pop(item.session, None)
            elif isinstance(item, Open):
                self._bases[item.session] = len(item.tokens)
            elif isinstance(item, Commit):
                self._bases[item.session] = item.base + len(item.tokens)
            if isinstance(item, Open | Commit) and item.wanted and self._kind != "flooding":
                growth = self._growth(item.session, min(4, item.wanted))
                delay_s = SLOW_S if self._kind == "slow" else 0.0
                asyncio.get_running_loop().call_later(delay_s, peer.send, [growth])

    def _growth(self, session: int, count: int) -> Growth:
        base = self._bases.get(session, 1)
        ids = np.arange(self._ids + 1, self._ids + 1 + count, dtype=np.int32)
        self._ids = (self._ids + count) % (1 << 30)
        tokens = np.full(count, 7 + base % (self._vocab - 7), np.int32)
        return Growth(session, base, ids, np.array([-base, *ids[:-1]], np.int32), tokens,
                      -0.1 * np.arange(1, count + 1, dtype=np.float32))

    def _flood(self, peer: Peer) -> None:
        while True:
            sessions = [*self._bases, 1 << 20][:4]
            peer.send([self._growth(session, 1) for session in sessions for _ in range(TOGETHER // 4)])
            time.sleep(PAUSE_S)


async def serve(port: int, kind: str) -> None:
    servicer = DraftServicer(BadDraft(kind), rules=replace(RULES, waiting_batches=1 << 30))
    server = GrpcServer(f"127.0.0.1:{port}", WireSection(), [servicer])
    await server.start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), sys.argv[2]))
