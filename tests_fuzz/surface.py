"""A router without sockets: whole requests in, whole answers out, over HTTP's routes or the public gRPC service's.

Behind it is a target that says what it is told to (``says``), so what a model writes is searched as well. Templates,
grammars' trials (of some), admission and the event loop are the real ones. It knows nothing about who makes requests
up.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

from uvicorn.protocols.http.flow_control import FlowControl

from router_service.admission import PoolFallback
from router_service.app import REQUEST_ID, TENANT, Surface
from router_service.balance import Balancer, Targets
from router_service.connection import STATE_KEY
from router_service.front import GatewayFront
from router_service.gateway import Gateway
from router_service.tenants import ANYONE
from router_service.text.tokens import TextCodec
from slipstream.base.config import Config
from slipstream.grammar.trial import Trial, Trials
from slipstream.observe.log import configure
from slipstream.observe.metrics import RouterMetrics
from slipstream.observe.spans import spans_of
from slipstream.protocol.chat import Delta
from slipstream.protocol.grammar import Grammar
from tests.echo import EchoTarget

OURS = "internal error"  # what a client is told of an error that nobody foresaw
TRIED = 16  # one grammar of so many is tried


class SomeTrials(Trial):
    """A fork takes as long as twenty requests, and another door tries every grammar."""

    def check(self, grammar: Grammar, namespace: str = "") -> None:
        if crc32(grammar.source.encode()) % TRIED == 0:
            super().check(grammar, namespace)


class Sink:
    """The connection of a request that came over none: what is written to it."""

    def __init__(self) -> None:
        self.body = bytearray()
        self.flow = FlowControl(asyncio.Transport())

    def watch(self, watcher: Callable[[], None]) -> None:
        """Its client stays."""

    def write(self, data: bytes) -> None:
        self.body += data


class Router:
    """One router and its target, for the model of ``folder``."""

    def __init__(self, folder: Path) -> None:
        config = Config.model_validate({"model": {"path": str(folder)}, "log": {"level": "error"}})
        configure(config.log)
        metrics = RouterMetrics("tiny")
        self._loop = asyncio.new_event_loop()
        self._target = EchoTarget()
        self._target.takes = ("grammar",)
        balancer = Balancer(Targets({"t0": self._target}), metrics, "")
        self._loop.run_until_complete(balancer.poll())
        gateway = Gateway(TextCodec(folder), balancer, PoolFallback(config.target.policy, metrics), metrics,
                          config.router, spans_of(config.log, "router"), Trials(SomeTrials(folder)))
        self._surface = Surface(gateway)
        self.front = GatewayFront(gateway, ANYONE)

    def post(self, path: str, body: bytes, headers: Mapping[str, str], says: str = "") -> tuple[int, bytes]:
        """The status and the body of an answer. Raises what the router does not refuse by name."""
        self._target.says = says
        self._target.requests.clear()
        return self._loop.run_until_complete(self._posted(path, body, headers))

    async def _posted(self, path: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, bytes]:
        sink = Sink()
        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
                 "http_version": "1.0", "scheme": "http", "server": ("tiny", 80), "root_path": "", TENANT: ANYONE,
                 "state": {STATE_KEY: lambda: sink},
                 "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
                 REQUEST_ID: "one"}
        heard: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]
        told: list[Any] = []

        async def receive() -> dict[str, Any]:
            if not heard:
                await asyncio.Event().wait()
            return heard.pop()

        async def send(message: Any) -> None:
            told.append(message)

        await self._surface(scope, receive, send)
        whole = bytes(sink.body) + b"".join(message.get("body", b"") for message in told)
        assert told[0]["status"] != 500 and OURS.encode() not in whole, (told[0]["status"], whole)
        return told[0]["status"], whole

    def told(self, deltas: AsyncGenerator[Delta, None]) -> list[Delta]:
        """An answer over gRPC. Raises what it raises."""
        self._target.says = ""
        self._target.requests.clear()

        async def read() -> list[Delta]:
            return [delta async for delta in deltas]

        return self._loop.run_until_complete(read())


def events(body: bytes) -> list[tuple[str, Any]]:
    """(id, what it says) of each event of a stream, comments left out; "" for no id, None for the end. Asserts its
    form."""
    found = []
    *blocks, rest = body.decode().split("\n\n")
    assert not rest, "a stream that ends in the midst of an event"
    for block in blocks:
        lines = dict(line.split(": ", 1) for line in block.split("\n") if not line.startswith(":"))
        assert set(lines) <= {"id", "event", "data"}, block
        if "data" in lines:
            found.append((lines.get("id", ""), None if lines["data"] == "[DONE]" else json.loads(lines["data"])))
    return found
