"""Shared: what the sessions of one target share: the drafts, what was learned of them, and where changes are told."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.base.config import PolicySection
from slipstream.decision.beliefs import Beliefs
from slipstream.decision.record import Transition, Why
from slipstream.following.pool import DraftPool
from slipstream.observe.log import logger
from slipstream.observe.metrics import TargetMetrics


@dataclass(frozen=True, slots=True)
class Shared:
    pool: DraftPool
    policy: PolicySection
    beliefs: Beliefs
    metrics: TargetMetrics
    lookup: bool  # in the text itself

    def changed(self, session: int, change: Transition, why: Why) -> None:
        """Another mode from now on. ``why``: of the decision that stood then."""
        self.metrics.mode.changed(change.before.value, change.after.value, change.reason)
        logger("target").info("mode changed", scope="session", session=session, before=change.before.value,
                              after=change.after.value, reason=change.reason, gain=round(change.gain, 3), why=why)
