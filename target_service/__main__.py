"""The target service as a process: ``python -m target_service --config slipstream.yaml``.

A composition root: it joins the worker to drafts (``wire.link``) and to routers (``wire.target``).
"""

from __future__ import annotations

if __name__ == "__main__":  # first: it names a package that the imports below lack
    from slipstream.__main__ import main

    main("target_service")

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import TYPE_CHECKING

from slipstream.base.config import Config
from slipstream.base.errors import SlipstreamError, Unavailable
from slipstream.cli.process import require_own
from slipstream.observe.log import logger
from slipstream.observe.metrics import TargetMetrics
from slipstream.observe.scrape import MetricsServer
from slipstream.observe.vitals import Vitals, background_tasks, wait_until_stopped
from slipstream.wire.drafts import Drafts
from slipstream.wire.link import DraftLink, WireCounts, export_bytes
from slipstream.wire.server import GrpcServer, bind_guard
from slipstream.wire.target import TargetServicer
from slipstream.wire.tls import export_expiry, tls_files, with_server_name

if TYPE_CHECKING:
    from target_service.assembly import Target
    from target_service.vllm_start import VllmTarget


async def serve(config: Config, stop: asyncio.Event, ready: Callable[[], None]) -> None:
    """Serve until ``stop`` is set, then drain: running answers finish, new ones are refused. ``ready`` is called once
    requests are taken. Raises ConfigError or ModelError when it cannot begin, PartLost or RanksLost when it cannot go
    on."""
    bind_guard(config.target.listen, config.wire, tls_files(config.wire.tls), "target.listen")
    require_own(config, "target")
    if config.target.vllm is not None:
        await _serve_vllm(config, stop, ready)
        return
    # Imported here: the environment of one engine may lack the libraries of the other.
    from target_service.assembly import build

    target = await asyncio.to_thread(build, config, asyncio.get_running_loop())
    await host(config, target, stop, ready)


async def host(config: Config, target: Target, stop: asyncio.Event, ready: Callable[[], None]) -> None:
    """As ``serve``, for a target that was built already."""
    tls, counts = tls_files(config.wire.tls), WireCounts()

    def connect(address: str, name: str) -> DraftLink:
        return DraftLink(address, target.hello, target.worker.following, tls=with_server_name(tls, name),
                         counts=counts)

    drafts = Drafts(connect, target.worker.following)
    target.service.drafts = drafts.statuses
    await target.service.warm()

    @asynccontextmanager
    async def beside() -> AsyncIterator[None]:
        target.worker.start()
        async with (drafts.kept_connected(config.target.drafts, config.wire.kubeconfig, target.metrics.drafts_expected,
                                          target.vitals),
                    background_tasks(export_bytes(counts, target.metrics.wire_bytes), vitals=target.vitals)):
            yield

    await _host(config, target, beside, stop, ready)


async def _serve_vllm(config: Config, stop: asyncio.Event, ready: Callable[[], None]) -> None:
    """As ``serve``, with vLLM as the engine: its workers connect to the drafts, not this process."""
    from target_service.vllm_start import build, node_rank

    if node_rank(config):
        await _compute(config, stop, ready)
        return
    target = await asyncio.to_thread(build, config)
    await _host(config, target, lambda: background_tasks(target.service.watch(), vitals=target.vitals), stop, ready)


async def _host(config: Config, target: Target | VllmTarget, beside: Callable[[], AbstractAsyncContextManager[None]],
                stop: asyncio.Event, ready: Callable[[], None]) -> None:
    """Serve a target of any engine. ``beside``: a context that is entered once the server listens."""
    tls, vitals, up = tls_files(config.wire.tls), target.vitals, asyncio.Event()
    try:
        server = GrpcServer(config.target.listen, config.wire, [TargetServicer(target.service)], tls=tls,
                            setting="target.listen")
        metrics = MetricsServer(config.target.metrics_listen, target.metrics.registry, up.is_set, vitals)
        try:
            await server.start()
            metrics.start()
            async with beside(), background_tasks(export_expiry(tls, target.metrics.registry.certificate_ends),
                                                  vitals=vitals):
                await server.set_ready(True)
                up.set()
                logger("target").info("ready", listen=config.target.listen, drafts=list(config.target.drafts))
                ready()
                await wait_until_stopped(stop, vitals, show=server.set_ready)
                up.clear()
                logger("target").info("draining")
                await server.set_ready(False)
                await target.service.drain(config.target.drain_s)
                await server.drain(1.0)
        except SlipstreamError:
            await server.drain(0.0)
            raise
        finally:
            await asyncio.to_thread(metrics.close)
    finally:
        await asyncio.to_thread(target.end)  # also when a port is taken: its ranks are processes that must end
    logger("target").info("stopped")


async def _compute(config: Config, stop: asyncio.Event, ready: Callable[[], None]) -> None:
    """Run a machine that computes a part of vLLM's model and takes no requests: it serves only its metrics page. After
    ``stop`` it goes on until the first machine has ended, because that one may still finish answers."""
    from target_service.vllm_start import Node

    node, vitals, loop = Node(config), Vitals("target"), asyncio.get_running_loop()
    up, ended = asyncio.Event(), asyncio.Event()

    def begun() -> None:
        up.set()
        logger("target").info("ready: a part of the model", rank=(config.target.vllm or {})["node_rank"])
        ready()

    def compute() -> None:
        try:
            node.run(lambda: loop.call_soon_threadsafe(begun))
        except Unavailable:
            if not stop.is_set():
                raise
        finally:
            with suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(ended.set)

    metrics = MetricsServer(config.target.metrics_listen, TargetMetrics(config.router.model_name).registry, up.is_set,
                            vitals)
    metrics.start()
    vitals.thread("vllm-node", compute).start()
    try:
        await wait_until_stopped(stop, vitals)
        up.clear()
        logger("target").info("draining: the first machine may have answers to finish")
        await wait_until_stopped(ended, vitals)
    finally:
        await asyncio.to_thread(node.end)
        await asyncio.to_thread(metrics.close)
        vitals.disarm_exit()
    logger("target").info("stopped")
