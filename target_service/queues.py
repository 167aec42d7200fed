"""Queues: who is computed and who waits for room, in order of arrival; and the next step for them.

It turns sequences into the plain facts that ``scheduler`` decides over. It knows nothing about devices or drafts.
"""

from __future__ import annotations

from collections import deque
from itertools import islice

from target_service.scheduler import Facts, Schedule, schedule
from target_service.sequence import Sequence
from target_service.shedding import Shedding


class Queues:
    __slots__ = ("running", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def everyone(self) -> list[Sequence]:
        return [*self.running, *self.waiting]

    def find(self, number: int) -> Sequence | None:
        return next((one for one in self.everyone() if one.number == number), None)

    def put_back(self, number: int) -> Sequence:
        """It waits again, before all others."""
        one = next(one for one in self.running if one.number == number)
        self.running.remove(one)
        self.waiting.appendleft(one)
        return one

    def admit(self, number: int) -> Sequence:
        """It runs from now on."""
        one = next(one for one in self.waiting if one.number == number)
        self.waiting.remove(one)
        self.running.append(one)
        self.running.sort(key=lambda one: one.number)
        return one

    def remove(self, one: Sequence) -> None:
        """It is over."""
        (self.running if one in self.running else self.waiting).remove(one)

    def schedule(self, now_s: float, free_slots: int, shedding: Shedding) -> tuple[Schedule, list[Sequence]]:
        """The next step, and who is left out of it because it waits for its drafter."""
        facts, standing = [], []
        for one in self.running:
            held = one.computed - one.borrowed
            if one.prefilling:
                facts.append(Facts(one.number, held, one.num_prefill, 1, False))
            elif one.followed.waits(now_s):
                one.followed.waiting.stood = True
                standing.append(one)
                facts.append(Facts(one.number, held, 0, 1, True))
            else:
                facts.append(Facts(one.number, held, 0, shedding.nodes(one.followed.nodes), False))
        # Nobody behind the first that could be admitted matters, and the queue may be long.
        limits = shedding.limits()
        first = islice(self.waiting, max(0, limits.max_running - len(self.running)))
        queued = [Facts(one.number, 0, one.base - 1, 1, False) for one in first]
        return schedule(facts, queued, free_slots, limits), standing
