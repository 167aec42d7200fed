"""Methods that a target calls in vLLM's workers: the states of drafts, and which answers may be drafted.

``--worker-extension-cls slipstream_vllm.worker.Drafted`` adds them; ``collective_rpc`` calls them between two steps, on
the engine's thread. A worker whose proposer is not connected to drafts returns None; one without our proposer does
nothing.
"""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

from slipstream.observe.metrics import Counts
from slipstream_vllm.remote import RemoteDrafter


class Drafted:
    """Methods of a worker."""

    model_runner: Any

    def slipstream_drafts(self) -> tuple[int, list[tuple[str, bool, str, str]], Counts] | None:
        """How many drafts there should be; address, connected, drafter name and problem of each known draft; and the
        counts of metrics. None: this worker is not connected to drafts."""
        drafter = getattr(self.model_runner, "drafter", None)
        if not isinstance(drafter, RemoteDrafter) or not drafter.connects:
            return None
        drafter.chains.poll()
        return drafter.expected, [astuple(status) for status in drafter.statuses()], drafter.metrics.engine_samples()

    def slipstream_allow(self, request: str, allowed: bool) -> None:
        """Allow or forbid drafts for ``request`` from now on."""
        drafter = getattr(self.model_runner, "drafter", None)
        if isinstance(drafter, RemoteDrafter):
            drafter.chains.allow(request, allowed)
