"""Probe: one try at speculation while it is off, and what it may lose.

It knows nothing about when tries begin or what follows from them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.decision.estimates import Ledger
from slipstream.decision.goodput import Round


@dataclass(slots=True)
class Probe:
    """A try at speculation while it is off."""

    began_s: float
    allowance_s: float  # what it may lose
    ledger: Ledger = field(default_factory=Ledger)
    answered_s: float | None = None  # when the drafter first spoke

    def add(self, now_s: float, earned_s: float, spent_s: float, round_: Round, answered: bool) -> None:
        """Count a round. What was waited for the first answer is the price of the restart, not of the rounds."""
        if answered and self.answered_s is None:
            self.answered_s = now_s
            self.allowance_s -= self.ledger.loss_s + round_.wait_s
            self.ledger = Ledger()
            self.ledger.add(earned_s, spent_s - round_.wait_s, 0.0, round_.drafted > 0)
        else:
            self.ledger.add(earned_s, spent_s, round_.wait_s, round_.drafted > 0)
