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
from slipstream.wire.tls import tls_files
from target_service.assembly import build


async def serve(config: Config, stop: asyncio.Event, ready: Callable[[], None] | None = None) -> None:
    """Serve until ``stop`` is set, then drain: running answers finish, new ones are refused. ``ready`` is called once
    requests are taken. Raises ConfigError or ModelError when it cannot begin."""
    tls = tls_files(config.wire.tls)
    bind_guard(config.target.listen, config.wire, tls)
    links: list[DraftLink] = []
    loop = asyncio.get_running_loop()
    target = await asyncio.to_thread(build, config, loop, lambda: [link.status() for link in links])
    links += [DraftLink(address, target.hello, target.worker, config.wire, check_pair, tls=tls)
              for address in config.target.drafts]
    server = GrpcServer(config.target.listen, config.wire, [TargetServicer(target.service)], tls=tls,
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
    await target.service.drain(config.target.drain_s)
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
