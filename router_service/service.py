"""The router put together: gateway, HTTP, public gRPC and metrics, from start to drain.

It knows nothing about signals and command lines; ``__main__`` and an all-in-one process use it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path

from router_service.admission import PoolFallback
from router_service.app import OPEN_PATHS, Gate
from router_service.balance import Balancer, Connect, Targets
from router_service.front import GatewayFront
from router_service.gateway import Gateway
from router_service.listener import HttpListener
from router_service.tenants import ANYONE, ApiKeys
from router_service.text.tokens import TextCodec
from slipstream.base.address import host_port
from slipstream.base.config import Config
from slipstream.grammar.trial import Trial, Trials
from slipstream.models.folder import folder_name, resolve, tokenizer_hash
from slipstream.observe.log import logger
from slipstream.observe.metrics import RouterMetrics
from slipstream.observe.scrape import MetricsServer
from slipstream.observe.spans import spans_of
from slipstream.observe.vitals import Vitals, background_tasks, watch_lag
from slipstream.protocol.requests import Backend
from slipstream.wire.inference import InferenceServicer
from slipstream.wire.server import GrpcServer
from slipstream.wire.tls import export_expiry, tls_files

READY_EVERY_S = 0.5
IDLE_S = 0.5  # a request that was sent when the last answer ended has arrived by then


class RouterService:
    """A router over ``targets`` (name to backend) and over discovered ones, which ``connect`` opens. Create, start and
    drain it on one event loop."""

    def __init__(self, config: Config, targets: Mapping[str, Backend], connect: Connect | None = None) -> None:
        """Raises ConfigError or ModelError when it cannot begin."""
        section = config.router
        folder = resolve(config.model.path)
        self._keys = ApiKeys(Path(section.api_keys_file)) if section.api_keys_file else None
        # One port for both, and not any that is free: what is measured is a page of the API.
        shared = section.metrics_listen == section.listen and host_port(section.listen)[1] != 0
        metrics = RouterMetrics(section.model_name or folder_name(folder), shared)
        self.targets = Targets(targets, connect)
        self._balancer = Balancer(self.targets, metrics, tokenizer_hash(folder))
        self._fallback = PoolFallback(config.target.policy, metrics)
        self.gateway = Gateway(TextCodec(folder), self._balancer, self._fallback, metrics, section,
                               spans_of(config.log, "router"), Trials(Trial(folder)))
        app = Gate(self.gateway, self._keys, metrics.registry.page if shared else None)
        self._http = HttpListener(app, section, config.wire, metrics,
                                  [path.encode() for path in OPEN_PATHS], self.gateway.admission.queue_wait_s)
        asked = InferenceServicer(self._front, on_refused=self.gateway.failed)
        self._grpc = GrpcServer(section.grpc_listen, config.wire, [asked], setting="router.grpc_listen")
        self.vitals = Vitals("router")
        self._metrics = None if shared else MetricsServer(
            section.metrics_listen, metrics.registry, lambda: self.gateway.ready, self.vitals)
        self._tls = tls_files(config.wire.tls)
        self._beside = contextlib.AsyncExitStack()  # what runs from start to drain
        self._log = logger("router")

    @property
    def http_port(self) -> int:
        return self._http.port

    @property
    def grpc_port(self) -> int:
        return self._grpc.port

    @property
    def metrics_port(self) -> int:
        return self.http_port if self._metrics is None else self._metrics.port

    def _front(self, key: str, trace: str) -> GatewayFront | None:
        tenant = ANYONE if self._keys is None else self._keys.tenant(key)
        if tenant is None:
            self.gateway.metrics.failed("authentication_error")
            return None
        return GatewayFront(self.gateway, tenant, trace)

    async def start(self) -> None:
        """Poll the targets once, then listen. The health shows whether a target is ready."""
        if self._metrics is not None:
            self._metrics.start()
        await self._balancer.poll()
        await self._grpc.start()
        self.vitals.follow(await self._http.start())
        await self._beside.enter_async_context(background_tasks(
            self._balancer.run(), self._fallback.run(), self._show_ready(),
            *([] if self._keys is None else [self._keys.reload_on_change()]), watch_lag(self.gateway.metrics.lag),
            export_expiry(self._tls, self.gateway.metrics.registry.certificate_ends), vitals=self.vitals))
        self._log.info("listening", http=self.http_port, grpc=self.grpc_port, metrics=self.metrics_port,
                       ready=self.gateway.ready)

    async def drain(self, grace_s: float) -> None:
        """Refuse new connections and move open ones away, for at most ``grace_s`` seconds; then close everything."""
        self._log.info("draining", running=self.gateway.admission.in_flight)
        self.gateway.leave()
        self._http.stop_accepting()
        calls = asyncio.create_task(self._grpc.drain(grace_s))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self.gateway.admission.wait_until_idle(IDLE_S)
        self.gateway.admission.close()
        await self._beside.aclose()
        await self.targets.aclose()
        await self._grpc.drain(1.0)
        await calls  # cancelled instead, it would take down what both wait for
        await self._http.close()
        self.gateway.close()
        if self._metrics is not None:
            await asyncio.to_thread(self._metrics.close)
        self.vitals.disarm_exit()
        self._log.info("stopped", left=self.gateway.admission.in_flight)

    async def _show_ready(self) -> None:
        shown = False
        while True:
            if self.gateway.ready != shown:
                shown = self.gateway.ready
                await self._grpc.set_ready(shown)
                self._log.info("ready" if shown else "not ready")
            await asyncio.sleep(READY_EVERY_S)
