"""Rules: the constants of a decision, each with its reason.

No measurement has moved them from one deployment to the next, so they are no settings. Tests and benches make others.
It knows nothing about how they are used.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from slipstream.base.config import PolicySection


@dataclass(frozen=True, slots=True)
class Rules:
    leave_gain: float = 0.98  # a little below 1: beliefs scatter, and to come back costs a probe
    enter_gain: float = 1.05  # above it by more than beliefs scatter, or the mode flaps
    lookup_gain: float = 1.02  # of a chain that costs no wait
    patience: int = 12  # plain steps' worth of time that may be lost before speculation is given up
    silent_rounds: int = 8  # in a row without growth, the first of them waited, before a drafter counts as silent
    failed_probes: int = 3  # before the drafter is not even kept informed
    min_dwell_s: float = 0.5  # a mode lasts so long
    probe_rounds: int = 8  # drafted rounds of one probe: fewer say nothing about acceptance
    probe_after_s: float = 1.0  # before the first probe; doubles after each that fails
    probe_max_s: float = 30.0  # so that a drafter that is good again is seen within half a minute
    probe_limit_s: float = 5.0  # a drafter that has not answered by then has failed the probe
    repay_s: float = 10.0  # what a drafter took to catch up must have come back by then
    overload_s: float = 0.1  # between two looks whether an overload is over
    plain_every: int = 64  # rounds: then one is plain, so that the cost of a plain step is measured, not remembered
    idle_tokens: int = 128  # committed since a tree was asked for: on shared cores, to tell of more takes time there
    few: int = 4  # sessions whose drafter grows ahead: it serves one after the other, and what it grows first is sooner
    crowd: int = 16  # sessions drafted for, above which none does: others' steps hide an exchange
    deadline_min_s: float = 0.005  # a wait is at least so long: beliefs of less are noise of the host
    deadline_max_s: float = 0.25
    whole_trees: bool = False  # are verified, whatever part of them pays

    @staticmethod
    def of(config: PolicySection) -> Rules:
        """As configured. ``always``: whole trees, whatever they cost, and each has the whole time that it may take."""
        rules = Rules(deadline_max_s=config.deadline_max_s)
        if config.always:
            return replace(rules, leave_gain=0.0, enter_gain=0.0, deadline_min_s=config.deadline_max_s,
                           whole_trees=True)
        return replace(rules, deadline_min_s=min(rules.deadline_min_s, config.deadline_max_s))
