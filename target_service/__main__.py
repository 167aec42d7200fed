"""The target service as a process: ``python -m target_service --config slipstream.yaml``.

A composition root: it joins the worker to drafts (``wire.link``) and to routers (``wire.target``).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from slipstream.config import Config
from slipstream.log import logger
from slipstream.pairing import check_pair
from slipstream.process import main
from slipstream.scrape import MetricsServer
from slipstream.wire.channel import export_bytes
from slipstream.wire.link import DraftLink
from slipstream.wire.server import GrpcServer, bind_guard
from slipstream.wire.target import TargetServicer
from target_service.assembly import Target, build

DRAIN_S = 45.0


async def serve(config: Config, stop: asyncio.Event, ready: Callable[[], None] | None = None) -> None:
    """Serve until ``stop`` is set, then drain: running answers finish, new ones are refused. ``ready`` is called once
    requests are taken. Raises ConfigError or ModelError when it cannot begin."""
    bind_guard(config.target.listen, config.wire)
    links: list[DraftLink] = []
    loop = asyncio.get_running_loop()
    target = await asyncio.to_thread(build, config, loop, lambda: [link.status() for link in links])
    await host(config, target, links, stop, ready)


async def host(config: Config, target: Target, links: list[DraftLink], stop: asyncio.Event,
               ready: Callable[[], None] | None = None) -> None:
    """The same for a target that is put together already; ``links`` is filled with those to its drafts."""
    links += [DraftLink(address, target.hello, target.worker, config.wire, check_pair)
              for address in config.target.drafts]
    server = GrpcServer(config.target.listen, config.wire, [TargetServicer(target.service)],
                        reflect=config.wire.reflection)
    await server.start()
    up = asyncio.Event()
    metrics = MetricsServer(config.target.metrics_listen, target.metrics.registry, up.is_set)
    metrics.start()
    target.worker.start()
    running = [asyncio.create_task(link.run()) for link in links]
    running.append(asyncio.create_task(export_bytes([link.counts for link in links], target.metrics.wire_bytes)))
    await server.set_ready(True)
    up.set()
    logger("target").info("ready", listen=config.target.listen, drafts=list(config.target.drafts))
    if ready is not None:
        ready()
    await stop.wait()
    up.clear()
    logger("target").info("draining")
    await server.set_ready(False)
    await target.service.drain(DRAIN_S)
    await server.drain(1.0)
    for task in running:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*running)
    await asyncio.to_thread(target.worker.stop)
    metrics.close()
    logger("target").info("stopped")


if __name__ == "__main__":
    main("target_service", serve)
