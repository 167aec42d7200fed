"""Target, draft and router in one process: ``slipstream serve --colocated``. A composition root.

Rules:
1. It runs the same code without network: target and draft use their protocol over ``wire.local``, and the router calls
   the target directly.
2. The drafter shares the cores with the target; each keeps its own thread, queue and metrics page.

It knows nothing about flags or terminals.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from draft_service.assembly import build as build_draft
from draft_service.worker import DraftWorker
from router_service.service import RouterService
from router_service.tenants import ApiKeys
from slipstream.base.config import Config
from slipstream.cli.process import require_own
from slipstream.observe.log import logger
from slipstream.observe.scrape import MetricsServer
from slipstream.observe.vitals import wait_until_stopped
from slipstream.wire.local import LocalLink
from slipstream.wire.server import bind_guard
from target_service.assembly import Target
from target_service.assembly import build as build_target


async def serve(config: Config, stop: asyncio.Event, ready: Callable[[], None]) -> None:
    """Serve until ``stop`` is set, then drain: running answers finish, new ones are refused. ``ready`` is called once
    requests are taken. Raises ConfigError or ModelError when it cannot begin, PartLost when it cannot go on."""
    config = config.on_one_machine()
    _check_settings(config)
    target = await asyncio.to_thread(build_target, config, asyncio.get_running_loop())
    draft = await asyncio.to_thread(build_draft, config)
    link = LocalLink(target.hello, target.worker.following, draft)
    target.service.drafts = lambda: [link.status()]
    serving = asyncio.Event()
    pages = [MetricsServer(config.target.metrics_listen, target.metrics.registry, serving.is_set, target.vitals),
             MetricsServer(config.draft.metrics_listen, draft.metrics.registry, serving.is_set, draft.vitals)]
    router = RouterService(config, {"local": target.service})
    await asyncio.gather(router.gateway.warm(), target.service.warm())
    for page in pages:
        page.start()
    draft.start()
    target.worker.start()
    link.restore()
    target.metrics.drafts_expected(1)
    draft.metrics.targets_connected(int(link.status().connected))
    await router.start()
    serving.set()
    _log_ready(link, config)
    ready()
    try:
        await wait_until_stopped(stop, target.vitals, draft.vitals, router.vitals)
    finally:
        serving.clear()
        await router.drain(config.router.drain_s if stop.is_set() else 0.0)
        await target.service.drain(config.target.drain_s if stop.is_set() else 0.0)
        await _stop_all(target, draft, link, pages)


def _check_settings(config: Config) -> None:
    """Raises ConfigError for a setting that would stop the router later: loading models first takes minutes."""
    for name in ("listen", "grpc_listen"):
        bind_guard(getattr(config.router, name), config.wire, setting=f"router.{name}")
    require_own(config, "router", "target.metrics_listen", "draft.metrics_listen")
    if config.router.api_keys_file:
        ApiKeys(Path(config.router.api_keys_file))


def _log_ready(link: LocalLink, config: Config) -> None:
    status = link.status()
    log = logger("colocated")
    if status.connected:
        log.info("ready", drafter=status.drafter, http=config.router.listen, grpc=config.router.grpc_listen)
    else:
        log.warning("ready without drafts: the drafter does not fit the target", problem=status.problem)


async def _stop_all(target: Target, draft: DraftWorker, link: LocalLink, pages: list[MetricsServer]) -> None:
    link.cut("stopped")
    await asyncio.to_thread(target.end)
    await asyncio.to_thread(draft.stop)
    for page in pages:
        await asyncio.to_thread(page.close)
    logger("colocated").info("stopped")
