"""The draft service as a process: ``python -m draft_service --config slipstream.yaml``. A composition root."""

from __future__ import annotations

if __name__ == "__main__":  # first: it names a package that the imports below lack
    from slipstream.__main__ import main

    main("draft_service")

import asyncio
from collections.abc import Callable

from draft_service.assembly import build
from draft_service.worker import DraftWorker
from slipstream.base.config import Config
from slipstream.base.errors import SlipstreamError
from slipstream.cli.process import require_own
from slipstream.observe.log import logger
from slipstream.observe.scrape import MetricsServer
from slipstream.observe.vitals import background_tasks, wait_until_stopped
from slipstream.wire.link import export_bytes
from slipstream.wire.server import GrpcServer, bind_guard
from slipstream.wire.servicer import DraftServicer
from slipstream.wire.tls import export_expiry, tls_files

DRAIN_S = 2.0  # time to stop: short, as a target goes on without a draft at once


async def serve(config: Config, stop: asyncio.Event, ready: Callable[[], None]) -> None:
    """Serve until ``stop`` is set, then give all sessions up, so that targets go on alone. Raises ConfigError or
    ModelError when it cannot begin, PartLost when it cannot go on."""
    bind_guard(config.draft.listen, config.wire, tls_files(config.wire.tls), "draft.listen")
    require_own(config, "draft")
    await host(config, await asyncio.to_thread(build, config), stop, ready)


async def host(config: Config, worker: DraftWorker, stop: asyncio.Event, ready: Callable[[], None]) -> None:
    """As ``serve``, for the worker of a draft that was built already."""
    tls = tls_files(config.wire.tls)
    servicer = DraftServicer(worker, on_connected=worker.metrics.targets_connected)
    server = GrpcServer(config.draft.listen, config.wire, [servicer], tls=tls, setting="draft.listen")
    up = asyncio.Event()
    vitals = worker.vitals
    metrics = MetricsServer(config.draft.metrics_listen, worker.metrics.registry, up.is_set, vitals)
    await server.start()
    metrics.start()
    worker.start()
    try:
        async with background_tasks(export_bytes(servicer.counts, worker.metrics.wire_bytes),
                                    export_expiry(tls, worker.metrics.registry.certificate_ends), vitals=vitals):
            await server.set_ready(True)
            up.set()
            logger("draft").info("ready", listen=config.draft.listen)
            ready()
            await wait_until_stopped(stop, vitals, show=server.set_ready)
            up.clear()
            logger("draft").info("draining")
            worker.drain()
            await server.drain(DRAIN_S)
    except SlipstreamError:
        await server.drain(0.0)
        raise
    finally:
        await asyncio.to_thread(worker.stop)
        await asyncio.to_thread(metrics.close)
    logger("draft").info("stopped")
