"""The router as a process: ``python -m router_service --config slipstream.yaml``.

A composition root: it joins the router to targets over the wire.
"""

from __future__ import annotations

if __name__ == "__main__":  # first: it names a package that the imports below lack
    from slipstream.__main__ import main

    main("router_service")

import asyncio
from collections.abc import Callable

from router_service.service import RouterService
from slipstream.base.config import Config
from slipstream.cli.process import require_own
from slipstream.observe.vitals import wait_until_stopped
from slipstream.wire.discovery import fixed_addresses, watch_services
from slipstream.wire.target import TargetClient
from slipstream.wire.tls import tls_files, with_server_name


async def serve(config: Config, stop: asyncio.Event, ready: Callable[[], None]) -> None:
    """Serve until ``stop`` is set, then drain. ``ready`` is called once the ports listen."""
    require_own(config, "router")
    tls, addresses = tls_files(config.wire.tls), config.router.targets
    clients = {address: TargetClient(address, tls=tls) for address in fixed_addresses(addresses)}

    def connect(address: str, name: str) -> TargetClient:
        return TargetClient(address, tls=with_server_name(tls, name))

    try:
        service = RouterService(config, clients, connect)
        async with watch_services(addresses, config.wire.kubeconfig, service.targets.update, vitals=service.vitals):
            await service.gateway.warm()
            await service.start()
            ready()
            try:
                await wait_until_stopped(stop, service.vitals)
            finally:
                await service.drain(config.router.drain_s if stop.is_set() else 0.0)
    finally:
        for client in clients.values():
            await client.aclose()
