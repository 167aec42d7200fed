"""What a target asks of vLLM's workers: how the drafts are, and whose answers may be drafted for.

``--worker-extension-cls slipstream_vllm.worker.Drafted`` adds it; ``collective_rpc`` calls it between two steps, on the
thread of the engine. Where a worker has no proposer of ours that speaks with drafts, it says nothing; where it has none
at all, it does nothing.
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
        """How many drafts there should be. Of each that is known: address, whether it is connected, its drafter, and
        what is wrong. What is counted of them."""
        drafter = getattr(self.model_runner, "drafter", None)
        if not isinstance(drafter, RemoteDrafter) or not drafter.speaks:
            return None
        drafter.chains.look()
        return drafter.expected, [astuple(status) for status in drafter.statuses()], drafter.metrics.tell()

    def slipstream_allow(self, request: str, allowed: bool) -> None:
        """``request`` may be drafted for from now on, or may not."""
        drafter = getattr(self.model_runner, "drafter", None)
        if isinstance(drafter, RemoteDrafter):
            drafter.chains.allow(request, allowed)
