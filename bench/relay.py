"""``python -m bench.relay TARGET LISTEN``: the least that a Python process between client and target costs over gRPC.

It answers the public service's completions with what a target says, a piece for a piece: no tokenizer, no checks, no
balance, no metrics. What a router takes beyond it is the router's own work; what it takes is gRPC's, from both sides. A
composition root.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncGenerator

from slipstream.base.config import WireSection
from slipstream.protocol.chat import ChatOptions, Delta, Message
from slipstream.protocol.messages import Sampling
from slipstream.protocol.requests import Request
from slipstream.simulate.timed import SYMBOLS
from slipstream.wire.inference import InferenceServicer
from slipstream.wire.server import GrpcServer
from slipstream.wire.target_client import TargetClient

SAID = Delta(" to")


class RelayFront:
    """Implements the wire's ``Front``. A prompt is the number of a stream of the timed target."""

    def __init__(self, client: TargetClient) -> None:
        self._client = client
        self._asked = 0

    async def chat(self, model: str, messages: tuple[Message, ...],
                   options: ChatOptions) -> AsyncGenerator[Delta, None]:
        async for delta in self.complete(model, messages[-1].content, options):
            yield delta

    async def complete(self, model: str, prompt: str, options: ChatOptions) -> AsyncGenerator[Delta, None]:
        self._asked += 1
        first = int(prompt) * SYMBOLS
        request = Request(f"relay-{self._asked}", (first, first), Sampling(), options.max_tokens or 1)
        answer = self._client.submit(request)
        try:
            async for _ in answer:
                yield SAID
        finally:
            await answer.aclose()

    async def models(self) -> list[str]:
        return ["relay"]


async def relay(target: str, listen: str) -> None:
    client = TargetClient(target)
    await client.info()  # which tells it that answers may share a call
    server = GrpcServer(listen, WireSection(), [InferenceServicer(RelayFront(client))])
    await server.start()
    print(server.port, flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("listen")
    arguments = parser.parse_args()
    asyncio.run(relay(arguments.target, arguments.listen))


if __name__ == "__main__":
    main()
