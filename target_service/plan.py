"""Plan: the next step of the target, decided from what its answers are at; and whether it is held for some of them.

It turns answers into the plain facts that ``scheduler`` decides over. It knows nothing about devices or links.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from slipstream.decision.policy import StepCosts
from target_service.answers import Answers
from target_service.running import Running
from target_service.scheduler import Decision, Facts, decide, holds
from target_service.shedding import Shedding


class Plan:
    __slots__ = ("_answers", "_costs", "_shedding")

    def __init__(self, answers: Answers, costs: StepCosts, shedding: Shedding) -> None:
        self._answers = answers
        self._costs = costs
        self._shedding = shedding

    def decide(self, running: Sequence[Running], waiting: Iterable[Running], free_slots: int, now_s: float) -> Decision:
        """The next step, both in order of arrival. Who waits for its drafter is noted to have stood."""
        # What the others cost depends here on how many they are, not on the nodes they will get: one look is enough.
        others = max(0, sum(not one.prefilling for one in running) - 1)
        facts = [self._facts(one, others, now_s) for one in running]
        # Nobody behind the first that could be admitted matters, and the queue may be long.
        limits = self._shedding.limits()
        first = islice(waiting, max(0, limits.max_running - len(running)))
        return decide(facts, [Facts(one.number, 0, one.side.base - 1, 1, False) for one in first], free_slots,
                      limits)

    def hold_s(self, decision: Decision, running: Sequence[Running], now_s: float) -> float | None:
        """Seconds to hold the step for answers whose growth should be here soon; 0: go. With nothing to do: until the
        first of them gives up waiting; None: until something comes."""
        waiting = [one for one in running if one.waits(now_s)]
        if decision.empty:
            return max(1e-4, min(one.wait_until_s for one in waiting) - now_s) if waiting else None
        if not waiting or decision.prefill or decision.admit or decision.put_back:
            return 0.0
        due_s, coming = self._answers.coming(waiting)
        missing_s, ready = due_s - now_s, sum(rows for _, rows in decision.verify)
        return missing_s if missing_s > 0.0 and holds(ready, coming, missing_s, self._costs.cost) else 0.0

    def _facts(self, running: Running, others: int, now_s: float) -> Facts:
        held = running.computed - running.borrowed
        if running.prefilling:
            return Facts(running.number, held, running.num_prefill, 1, False)
        if running.waits(now_s):
            running.stood = True
            return Facts(running.number, held, 0, 1, True)
        nodes = self._shedding.nodes(self._answers.nodes(running, others, now_s))
        return Facts(running.number, held, 0, nodes, False)
