"""The modes of speculation as series: which one new work gets, and how it came to that.

``scope`` tells who decides: pool, a router for all answers of a model's drafts; session, a target for one answer.
It knows nothing about how that is decided.
"""

from __future__ import annotations

from typing import Literal

from slipstream.observe.series import Registry

MODES = ("speculate", "shadow", "plain")
# Values that labels begin with; what else comes is counted all the same.
CHANGES = (("speculate", "shadow", "acceptance_low"), ("speculate", "shadow", "draft_timeout"),
           ("speculate", "plain", "draft_unavailable"), ("speculate", "plain", "overload"),
           ("shadow", "plain", "probe_failed"), ("shadow", "speculate", "probe_ok"),
           ("plain", "speculate", "probe_ok"), ("plain", "speculate", "drafter_ready"))


class ModeMetrics:
    """Of one scope."""

    def __init__(self, registry: Registry, scope: Literal["pool", "session"]) -> None:
        self._scope = scope
        self._mode = registry.gauge("mode", "1 for the mode that new work gets, 0 for the others.", "scope", "mode")
        self._transitions = registry.counter("mode_transitions_total", "Changes of mode.", "scope", "from", "to",
                                             "reason").begin(*((scope, *change) for change in CHANGES))

    def now(self, mode: str) -> None:
        for known in MODES:
            self._mode.of(self._scope, known).set(1 if known == mode else 0)

    def changed(self, before: str, after: str, reason: str) -> None:
        self._transitions.of(self._scope, before, after, reason).inc()
