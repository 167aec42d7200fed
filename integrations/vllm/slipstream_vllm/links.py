"""Links: the streams to all drafts, on a thread of their own beside the engine's. Where it ends, drafting ends: that is
told once, and the engine decodes plain.

It knows nothing about what they carry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from slipstream.following.following import Following
from slipstream.observe.metrics import TargetMetrics
from slipstream.observe.vitals import Vitals
from slipstream.protocol.messages import DraftHello, TargetHello
from slipstream.protocol.pairing import check_pair
from slipstream.protocol.requests import DraftStatus
from slipstream.wire.link import DraftLink, export_bytes


class Links:
    """They run until the process ends."""

    def __init__(self, drafts: Sequence[str], hello: TargetHello, following: Following, metrics: TargetMetrics,
                 check: Callable[[TargetHello, DraftHello], str] = check_pair) -> None:
        self._loop = asyncio.new_event_loop()
        self._links = [DraftLink(address, hello, following, check) for address in drafts]
        self._metrics = metrics
        metrics.drafts_expected(len(drafts))
        self._following = following
        self._vitals = Vitals("vllm")
        self._vitals.thread("slipstream-links", self._run).start()

    @property
    def alive(self) -> bool:
        """From any thread."""
        return self._vitals.ready

    def statuses(self) -> list[DraftStatus]:
        """From any thread."""
        return [link.status() for link in self._links]

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._all())
        finally:
            for link in self._links:
                self._following.link_down(link, "failed")

    async def _all(self) -> None:
        counts = [link.counts for link in self._links]
        await asyncio.gather(*(link.run() for link in self._links), export_bytes(counts, self._metrics.wire_bytes))
