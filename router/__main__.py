"""The router as a process: ``python -m router --config slipstream.yaml``.

A composition root: it joins the router to targets over the wire, or to backends of its own process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from router.service import RouterService
from slipstream.config import Config
from slipstream.process import main
from slipstream.requests import Backend
from slipstream.wire.target import TargetClient
from slipstream.wire.tls import tls_files


async def serve(config: Config, stop: asyncio.Event, ready: Callable[[], None] | None = None,
                backends: Mapping[str, Backend] | None = None) -> None:
    """Serve until ``stop`` is set, then drain. ``backends`` (name to backend) take the place of
    ``router.targets``; they stay the caller's. ``ready`` is called once the ports listen."""
    tls = tls_files(config.wire.tls)
    clients = {} if backends is not None else {
        address: TargetClient(address, config.wire, tls=tls) for address in config.router.targets}
    try:
        service = RouterService(config, clients if backends is None else backends)
        await service.start()
        if ready is not None:
            ready()
        await stop.wait()
        await service.drain(config.router.drain_s)
    finally:
        for client in clients.values():
            await client.aclose()


if __name__ == "__main__":
    main("router", serve)
