"""Shared: what the sessions of one target share: the drafts, what was learned of them, and where changes are told."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.base.config import PolicySection
from slipstream.decision.exchanges import ExchangeByLoad, ExchangeTimes
from slipstream.decision.leads import Leads
from slipstream.decision.record import Transition, Why
from slipstream.following.pool import DraftPool
from slipstream.observe.log import logger
from slipstream.observe.metrics import TargetMetrics


@dataclass(frozen=True, slots=True)
class Shared:
    pool: DraftPool
    policy: PolicySection
    exchange: ExchangeTimes | ExchangeByLoad
    leads: Leads
    metrics: TargetMetrics
    lookup: bool  # in the text itself

    def changed(self, session: int, change: Transition, why: Why) -> None:
        """Another mode from now on. ``why``: of the decision that stood then."""
        self.metrics.mode.changed(change.before.value, change.after.value, change.reason)
        logger("target").info("mode", session=session, before=change.before.value, after=change.after.value,
                              reason=change.reason, gain=round(change.gain, 3), why=why)

    def led(self, tokens: int, seconds: float) -> None:
        """A round whose drafter may grow ahead gave ``tokens``, ``seconds`` after the commit before."""
        change = self.leads.observe(tokens, seconds)
        if change is not None:
            logger("target").info("ahead", before=min(change.before, change.sessions),
                                  after=min(change.after, change.sessions), sessions=change.sessions,
                                  gain=round(change.gain, 3))
