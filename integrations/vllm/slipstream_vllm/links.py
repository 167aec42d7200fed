"""Links: the streams to all drafts, on a thread beside the engine's, and a metrics page if one is configured. If that
thread ends, it is logged once, and the engine decodes without drafts.

It knows nothing about the messages on the streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future

from slipstream.following.following import Following
from slipstream.observe.metrics import TargetMetrics
from slipstream.observe.scrape import MetricsServer
from slipstream.observe.vitals import Vitals
from slipstream.protocol.messages import DraftHello, TargetHello
from slipstream.protocol.pairing import check_pair
from slipstream.protocol.requests import DraftStatus
from slipstream.wire.drafts import Drafts
from slipstream.wire.link import DraftLink, WireCounts, export_bytes
from slipstream.wire.tls import tls_files, with_server_name
from slipstream_vllm.options import Options


class Links:
    """They run until the process ends."""

    def __init__(self, options: Options, hello: TargetHello, following: Following, metrics: TargetMetrics,
                 check: Callable[[TargetHello, DraftHello], str] = check_pair) -> None:
        """Raises ConfigError for unreadable certificates, a taken port of the page, or the address of a Kubernetes
        service without a cluster."""
        self._addresses, self._kubeconfig = options.drafts, options.kubeconfig
        self._hello, self._following, self._metrics, self._check = hello, following, metrics, check
        self.expected = 0  # number of drafts that there should be
        self._tls = tls_files(options.tls)
        if self._tls is not None:
            self._tls.read()
        self._counts, started = WireCounts(), Future[Drafts]()
        self._vitals = Vitals("vllm")
        self._vitals.thread("slipstream-links", lambda: asyncio.run(self._run(started))).start()
        self._drafts = started.result()
        if options.metrics_listen is not None:
            self.page = MetricsServer(options.metrics_listen, metrics.registry, lambda: self.ready)
            self.page.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs. From any thread."""
        return self._vitals.ready

    @property
    def ready(self) -> bool:
        """Whether a draft is connected. From any thread."""
        return self.alive and any(status.connected for status in self.statuses())

    def statuses(self) -> list[DraftStatus]:
        """The states of all known drafts. From any thread."""
        return self._drafts.statuses()

    def _expect(self, drafts: int) -> None:
        self.expected = drafts
        self._metrics.drafts_expected(drafts)

    async def _run(self, started: Future[Drafts]) -> None:
        try:
            drafts = Drafts(self._connect, self._following)
            async with drafts.kept_connected(self._addresses, self._kubeconfig, self._expect, self._vitals):
                started.set_result(drafts)
                await export_bytes(self._counts, self._metrics.wire_bytes)
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    def _connect(self, address: str, name: str) -> DraftLink:
        return DraftLink(address, self._hello, self._following, self._check, tls=with_server_name(self._tls, name),
                         counts=self._counts)
