"""What an exchange takes: a commit to a draft and its growth back, over gRPC on loopback, between two processes.

``Echo`` is the draft's end: it grows nothing and answers every commit with the same tree, so that what is measured is
encoding, both sockets and both event loops. It knows nothing about drafters.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.fleet import free_port
from slipstream.base.config import WireSection
from slipstream.base.errors import Unavailable
from slipstream.protocol.messages import (
    PROTOCOL_VERSION,
    Commit,
    DraftBound,
    DraftHello,
    Faults,
    FeatureSpec,
    Growth,
    Link,
    Peer,
    TargetBound,
    TargetHello,
)
from slipstream.protocol.pairing import check_pair
from slipstream.wire.link import DraftLink, DraftServicer
from slipstream.wire.server import GrpcServer

WAIT_S = 20.0


@dataclass(slots=True)
class Echo:
    """The draft's end. ``growth``: what it answers."""

    growth: Growth
    features: FeatureSpec

    def peer_up(self, peer: Peer, hello: TargetHello) -> DraftHello:
        return DraftHello(PROTOCOL_VERSION, hello.incarnation, "echo", hello.vocab_size, "", self.features,
                          hello.hidden_size, hello.max_context, len(self.growth.tokens), 8)

    def peer_down(self, peer: Peer) -> None:
        """Nothing is kept for it."""

    def received(self, peer: Peer, items: Sequence[DraftBound], faults: Faults) -> None:
        peer.send([replace(self.growth, base=item.base) for item in items if isinstance(item, Commit)])


class Caller:
    """The target's end: it waits for what comes."""

    def __init__(self) -> None:
        self.up = asyncio.Event()
        self.came = asyncio.Event()

    def link_up(self, link: Link, hello: DraftHello) -> None:
        self.up.set()

    def link_down(self, link: Link, reason: str) -> None:
        self.up.clear()

    def received(self, link: Link, items: Sequence[TargetBound], faults: Faults) -> None:
        self.came.set()


async def serve(port: int, echo: Echo) -> None:
    """Until it is ended."""
    server = GrpcServer(f"127.0.0.1:{port}", WireSection(), [DraftServicer(echo)])
    await server.start()
    await asyncio.Event().wait()


async def exchanges(commit: Commit, hello: TargetHello, repeats: int, serving: Sequence[str]) -> list[float]:
    """Microseconds of ``repeats`` exchanges, after a tenth that does not count. ``serving``: what starts an Echo on the
    port that follows. Raises Unavailable."""
    port, caller = free_port(), Caller()
    other = await asyncio.create_subprocess_exec(*serving, str(port), stdin=subprocess.DEVNULL)
    link = DraftLink(f"127.0.0.1:{port}", hello, caller, check_pair)
    running = asyncio.create_task(link.run())
    times = []
    try:
        async with asyncio.timeout(WAIT_S):
            await caller.up.wait()
        for run in range(-(repeats // 10) - 1, repeats):
            caller.came.clear()
            began_s = time.perf_counter()
            link.send([commit])
            async with asyncio.timeout(WAIT_S):
                await caller.came.wait()
            if run >= 0:
                times.append(1e6 * (time.perf_counter() - began_s))
    except TimeoutError as error:
        raise Unavailable("the draft's end of the exchange does not answer") from error
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        other.terminate()
        await other.wait()
    return times
