"""A target whose engine is vLLM, and a draft that turns bad in mid-answer and recovers: speculation stops, comes back.

What is shown is the policy inside vLLM's worker, and that a client hears of it; the draft knows the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from bench.fleet import free_port
from router_service.text.tokens import TextCodec
from slipstream.base.config import Config
from slipstream.base.errors import RemoteProtocolError
from slipstream.models.folder import resolve
from slipstream.protocol.messages import (
    PROTOCOL_VERSION,
    Close,
    Commit,
    DraftBound,
    DraftHello,
    Growth,
    Open,
    Peer,
    TargetBound,
    TargetHello,
)
from slipstream.protocol.requests import Piece, Request, Sampling
from slipstream.wire.server import GrpcServer
from slipstream.wire.servicer import DraftServicer
from slipstream.wire.target import TargetClient
from tests_vllm.running import MODEL, Server, quiet

CHAIN, TOKENS = 4, 900  # a probe may wait as long as it took to pay for it: ten seconds of plain steps
BAD_FROM, GOOD_FROM = 60, 180
SLOW_S = 0.2  # a draft that is wrong costs a CPU next to nothing, one that is late costs what it is waited for
pytestmark = pytest.mark.timeout(900)


class Knowing:
    """A draft that knows the text; while it ``lies`` it is late and says what does not follow. Implements
    ``messages.PeerEvents``."""

    def __init__(self) -> None:
        self.text: Sequence[int] = ()
        self.lies = False
        self._bases: dict[int, int] = {}
        self._next_id = 1

    def peer_up(self, peer: Peer, hello: TargetHello) -> DraftHello:
        return DraftHello(PROTOCOL_VERSION, hello.incarnation, "knowing", 0, "", None, 0, 1 << 16, 16, 1 << 16)

    def peer_down(self, peer: Peer) -> None:
        self._bases.clear()

    def inbox_full(self, peer: Peer) -> bool:
        return False

    def received(self, peer: Peer, items: Sequence[DraftBound],
                 faults: Sequence[tuple[int, RemoteProtocolError]]) -> None:
        answers = list[TargetBound]()
        for item in items:
            if isinstance(item, Close):
                self._bases.pop(item.session, None)
            elif isinstance(item, Open | Commit):
                self._bases[item.session] = len(item.tokens) + (item.base if isinstance(item, Commit) else 0)
                if item.wanted:
                    answers.append(self._growth(item.session, item.wanted))
        if self.lies:
            asyncio.get_running_loop().call_later(SLOW_S, peer.send, answers)
        else:
            peer.send(answers)

    def _growth(self, session: int, wanted: int) -> Growth:
        base = self._bases[session]
        tokens = [token ^ self.lies for token in self.text[base : base + min(CHAIN, wanted)]]
        ids = np.arange(self._next_id, self._next_id + len(tokens), dtype=np.int32)
        self._next_id += len(tokens)
        parents = np.array([-base, *ids[:-1]], np.int32)[: len(tokens)]
        scores = -0.1 * np.arange(1, len(tokens) + 1, dtype=np.float32)
        return Growth(session, base, ids, parents, np.array(tokens, np.int32), scores)


@pytest.fixture
async def client(vllm_python: Path, tmp_path: Path) -> AsyncIterator[tuple[TargetClient, Knowing]]:
    knowing, listen, page = Knowing(), f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    drafts = GrpcServer("127.0.0.1:0", Config().wire, [DraftServicer(knowing)])
    settings = ("model.dtype=float32", f"target.listen={listen}", f"target.metrics_listen={page}",
                f"target.drafts=[127.0.0.1:{await drafts.start()}]", "target.max_sessions=4",
                f"target.policy.max_nodes={CHAIN}", "target.prompt_lookup=false",
                "target.engine={vllm: {enforce_eager: true, max_model_len: 1024}}")
    server = Server([vllm_python, "-m", "target_service", *(word for one in settings for word in ("--set", one))],
                    tmp_path / "target.log", page, "/ready", quiet(), tmp_path)
    found = TargetClient(listen)
    try:
        await drafts.set_ready(True)
        await asyncio.to_thread(server.wait)
        yield found, knowing
    finally:
        await found.aclose()
        server.end()
        await drafts.drain(0.0)


async def test_speculation_stops_while_a_draft_is_bad_and_comes_back(client: tuple[TargetClient, Knowing]) -> None:
    target, knowing = client
    prompt = tuple(TextCodec(resolve(MODEL)).chat([{"role": "user", "content": "Write a long story about a bicycle."}]))
    plain = [token async for piece in target.submit(Request("plain", prompt, Sampling(), TOKENS, speculate=False))
             for token in piece.tokens]
    assert len(plain) == TOKENS
    knowing.text = (*prompt, *plain)
    pieces, said = list[Piece](), list[int]()
    states: dict[str, set[str]] = {"good": set(), "bad": set(), "again": set()}
    phase = "good"
    async for piece in target.submit(Request("drafted", prompt, Sampling(), TOKENS)):
        pieces.append(piece)
        said += piece.tokens
        # It recovers once it is left: probes come by the clock, and on a fast machine an answer is soon over.
        phase = "again" if phase == "again" or len(said) >= GOOD_FROM or states["bad"] > {"speculate"} else (
            "bad" if len(said) >= BAD_FROM else "good")
        knowing.lies = phase == "bad"
        states[phase].add(piece.state)
    assert said == plain
    assert states["good"] == {"speculate"} and states["bad"] > {"speculate"} and "speculate" in states["again"]
    bad = [piece for piece in pieces if piece.drafted and not piece.accepted]
    # None at all where every wrong draft came too late to be verified.
    assert len(bad) < GOOD_FROM - BAD_FROM, "a bad draft was verified to the end"
    assert sum(piece.accepted for piece in pieces) > BAD_FROM / 2
    assert sum(piece.plain_s > 0.0 for piece in pieces) > 0.9 * len(pieces), "what steps took was not told"
