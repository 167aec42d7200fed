"""Probe: one try at speculation while it is off, and what it may lose.

It knows nothing about when tries begin or what follows from them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.decision.beliefs import Ledger
from slipstream.decision.record import Round


@dataclass(slots=True)
class Probe:
    began_s: float
    granted_s: float  # what it may lose
    ledger: Ledger = field(default_factory=Ledger)  # since the drafter first spoke
    answered_s: float | None = None  # when it did
    restart_s: float = 0.0  # what was lost until then: the price of the restart, not of the rounds

    @property
    def lost_s(self) -> float:
        return max(0.0, self.restart_s + self.ledger.loss_s)

    @property
    def left_s(self) -> float:
        return self.granted_s - self.restart_s - self.ledger.loss_s

    def add(self, now_s: float, earned_s: float, spent_s: float, round_: Round, answered: bool) -> None:
        """Count a round."""
        if answered and self.answered_s is None:
            self.answered_s = now_s
            self.restart_s = self.ledger.loss_s + round_.wait_s
            self.ledger = Ledger()
            self.ledger.add(earned_s, spent_s - round_.wait_s, 0.0, round_.drafted > 0)
        else:
            self.ledger.add(earned_s, spent_s, round_.wait_s, round_.drafted > 0)
