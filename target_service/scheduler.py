"""What the next step of the target does: a pure function of plain facts, without doing it.

Rules of a schedule:
1. First come, first served: answers are admitted, prefilled and kept in order of arrival, where namespaces take turns:
   the first of each, then the second of each. The oldest always advances, so nobody starves; when slots run out, the
   last in that order is put back and computed again later.
2. Rows go first to answers that decode, one each, then to prompts, chunk by chunk, so long prompts do not stop running
   answers. A row that is scored counts as ``SCORED``. The step that ends a prompt chooses the first token, too.
3. Trees have what is left, and shrink before anyone is put back: draft nodes are a bet, answers are a promise.
4. An answer that waits for its drafter is left out until growth comes or its deadline passes; for its first token it
   waits for nobody, as drafters read its prompt meanwhile. The step itself is held for it where one step of all is
   sooner over than two.

``Queues`` (who is computed and who waits, in order of arrival) become the plain facts that ``schedule`` reads. Who
would compute what another computes just now stays where it is until the prefix cache has it, and holds nobody up.

Shedding: what the target asks of a device whose memory ran out, until it has been calm for a while.

Rules of shedding:
1. A step that did not fit loses nothing: nothing of it was committed, and the next turn asks for less.
2. Each time a step may have half the rows of the one that did not fit. Drafts go first, as they are a bet; new answers
   are refused last, and running ones go on.
3. With no draft, nothing admitted and ``FEWEST_ROWS``, a step that still does not fit ends its answers.
4. Each level is left when no step has failed for ``CALM_S``.

It knows nothing about tokens, devices or drafters.
"""

from __future__ import annotations

from collections import Counter, abc, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import NamedTuple

from slipstream.observe.log import logger
from slipstream.observe.metrics import TargetMetrics
from target_service.sequence import KV, Sequence


class Facts(NamedTuple):
    """One answer as the scheduler sees it. ``key`` is the caller's. A named tuple: one is made of each every step."""

    key: int
    held: int  # slots that would come free if it were put back; of nobody while there are enough
    prefill: int  # committed tokens whose KV is missing, root not counted; what others use costs nothing
    nodes: int  # rows that it would verify now, root included; 0: nothing is wanted but its prompt
    waits: bool  # for its drafter
    scored: bool = False  # rows of its prompt go through the head, too


# Rows of one step. Half of them may be a prompt's, so that answers which run do not wait for a long one. A GPU computes
# some 300 rows while it reads its weights, a CPU fewer than 20: it gains nothing by more, and waits longer for each.
STEP_ROWS = {"cpu": 512, "cuda": 1024}


EXAMINED = 256  # answers that wait, for whom a step looks whether somebody computes their prompt
SCORED = 2  # rows that a row counts for which is scored: the head may cost as much as all layers before it


@dataclass(frozen=True, slots=True)
class Limits:
    max_running: int
    max_step_rows: int
    prefill_chunk: int

    @staticmethod
    def on(device: str, max_running: int) -> Limits:
        """device: its type."""
        rows = STEP_ROWS.get(device, STEP_ROWS["cpu"])
        return Limits(max_running, rows, rows // 2)


@dataclass(frozen=True, slots=True)
class Schedule:
    """What to do, in this order. Keys are those of the facts."""

    put_back: tuple[int, ...] = ()
    admit: tuple[int, ...] = ()
    prefill: tuple[tuple[int, int], ...] = ()  # (key, rows)
    verify: tuple[tuple[int, int], ...] = ()  # (key, rows)

    @property
    def empty(self) -> bool:
        return not (self.put_back or self.admit or self.prefill or self.verify)


def schedule(running: abc.Sequence[Facts], waiting: abc.Sequence[Facts], free_slots: int, limits: Limits) -> Schedule:
    """The next step. ``running`` and ``waiting`` stand in the order of rule 1; ``free_slots`` counts those that the
    prefix cache would give up too. An answer in ``waiting`` needs ``prefill + 1`` slots to begin."""
    ready = [facts for facts in running if not facts.prefill and not facts.waits]
    room = free_slots
    kept = list(running)
    put_back: list[int] = []
    # Each answer that is ready needs one slot for its root, or it cannot advance at all.
    while len(ready) > room and len(kept) > 1:
        youngest = kept.pop()
        put_back.append(youngest.key)
        room += youngest.held
        ready = [facts for facts in ready if facts.key != youngest.key]
    rows = min(room, limits.max_step_rows)
    verify = _share(ready, rows, rows - min(sum([facts.prefill for facts in kept]), limits.prefill_chunk))
    room -= sum(rows for _, rows in verify)
    rows_left = limits.max_step_rows - sum(rows for _, rows in verify)
    prefill: list[tuple[int, int]] = []
    for facts in kept:
        each = SCORED if facts.scored else 1
        rows = min(facts.prefill, limits.prefill_chunk // each, rows_left // each, room)
        if rows > 0:
            prefill.append((facts.key, rows))
            rows_left, room = rows_left - each * rows, room - rows
            if rows == facts.prefill and min(facts.nodes, rows_left, room) > 0:
                verify.append((facts.key, 1))
                rows_left, room = rows_left - 1, room - 1
    # The oldest is stuck in its prompt with nothing free: the youngest makes place.
    if kept and not verify and not prefill and not any(facts.waits for facts in kept) and len(kept) > 1:
        put_back.append(kept.pop().key)
        return Schedule(tuple(put_back))
    # What running prompts still need is spoken for.
    promised = sum(facts.prefill for facts in kept) - sum(rows for _, rows in prefill)
    admit = () if put_back else _admit(waiting, len(kept), room - promised, limits)
    return Schedule(tuple(put_back), admit, tuple(prefill), tuple(verify))


def holds(ready: int, coming: int, missing_s: float, cost: Callable[[int], float]) -> bool:
    """Whether a step of ``ready`` rows should be held for ``missing_s``, until ``coming`` further rows are there: one
    step of all, later, against two steps one after the other. A device that reads its weights once for all wins so."""
    return missing_s + cost(ready + coming) < cost(ready) + cost(coming)


def _share(ready: abc.Sequence[Facts], rows: int, most: int) -> list[tuple[int, int]]:
    # One row each first; what is left of the first ``most`` goes to trees, oldest first.
    served = ready[:rows]
    spare = max(0, most - len(served))
    shares = []
    for facts in served:
        extra = min(facts.nodes - 1, spare)
        spare -= extra
        shares.append((facts.key, 1 + extra))
    return shares


def _admit(waiting: abc.Sequence[Facts], num_running: int, room: int, limits: Limits) -> tuple[int, ...]:
    admitted: list[int] = []
    for facts in waiting:
        # In order, or a long prompt would wait for ever behind short ones.
        if num_running + len(admitted) >= limits.max_running or facts.prefill + 1 > room:
            break
        room -= facts.prefill + 1
        admitted.append(facts.key)
    return tuple(admitted)


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

    def schedule(self, now_s: float, kv: KV, shedding: Shedding) -> tuple[Schedule, list[Sequence]]:
        """The next step, and who is left out of it because it waits for its drafter."""
        standing = [one for one in self.running
                    if not one.prefilling and one.followed.side.num_output and one.followed.waits(now_s)]
        for one in standing:
            one.followed.stands(now_s)
        # Between two rounds it is nearly always so. With nobody running, shedding still ends by ``limits``.
        if standing and len(standing) == len(self.running) and not self.waiting:
            return Schedule(), standing
        facts, waits, have = list[Facts](), {one.number for one in standing}, Counter[str]()
        free_slots = kv.num_free
        scarce = free_slots < len(self.running)
        for one in in_turn(self.running, have):
            held = kv.held(one) if scarce else 0
            if one.prefilling:
                facts.append(Facts(one.number, held, one.num_prefill, min(1, one.followed.left), False, one.scores))
            elif one.number in waits:
                facts.append(Facts(one.number, held, 0, 1, True))
            else:
                facts.append(Facts(one.number, held, 0, shedding.nodes(one.followed.nodes), False))
        limits = shedding.limits()
        room = max(0, limits.max_running - len(self.running))
        queued = self._queued(in_turn(self.waiting, have), room, kv) if room and self.waiting else []
        return schedule(facts, queued, free_slots, limits), standing

    def _queued(self, ones: abc.Sequence[Sequence], room: int, kv: KV) -> list[Facts]:
        """The first ``room`` of ``ones`` whose next tokens nobody is computing. Behind one that finds no slots nobody
        matters, and the queue may be long."""
        coming = {one.beginning(one.computed) for one in self.running if one.prefilling} if kv.caches else set()
        queued, free_slots = list[Facts](), kv.num_free
        for one in ones[:EXAMINED]:
            known, used = kv.known(one)
            beginning = one.beginning(known) if kv.caches else None
            if beginning is not None and beginning in coming:
                continue
            missing = one.base - 1 - used
            queued.append(Facts(one.number, 0, missing, 1, False))
            if len(queued) == room or missing >= free_slots:
                break
            coming.add(beginning)
        return queued


def in_turn(ones: abc.Iterable[Sequence], have: Counter[str]) -> list[Sequence]:
    """``ones``, in order of arrival, by how many of its namespace stand before each. ``have``: those that are elsewhere
    already; counts ``ones`` too."""
    turns = list[int]()
    for one in ones:
        turns.append(have[one.request.namespace])
        have[one.request.namespace] += 1
    if len(have) < 2:
        return list(ones)
    return [one for _, one in sorted(zip(turns, ones, strict=True), key=itemgetter(0))]


CALM_S = 30.0
LEVELS = ("normal", "smaller trees", "plain", "no new answers")
FEWEST_ROWS = 16


class Shedding:
    __slots__ = ("_changed_s", "_clock", "_level", "_limits", "_log", "_metrics", "_most_rows")

    def __init__(self, limits: Limits, clock: Callable[[], float], metrics: TargetMetrics) -> None:
        self._limits, self._clock = limits, clock
        self._level, self._changed_s, self._most_rows = 0, 0.0, limits.max_step_rows
        self._metrics, self._log = metrics, logger("target")

    @property
    def level(self) -> int:
        """0: nothing is shed; else the index in ``LEVELS``."""
        return self._level

    @property
    def refuses(self) -> bool:
        """Whether new answers are refused."""
        return self._level == len(LEVELS) - 1

    def failed(self, rows: int) -> bool:
        """The device had no room for a step of so many rows. Returns whether less can be asked for."""
        self._changed_s = self._clock()
        hopeless = self.refuses and rows <= FEWEST_ROWS
        self._level = min(self._level + 1, len(LEVELS) - 1)
        self._metrics.shedding(self._level, full=True)
        if hopeless:
            return False
        self._most_rows = max(FEWEST_ROWS, rows // 2)
        self._log.warning("the device's memory ran out: less is asked of it; lower target.slots if "
                          "this comes again", rows=rows, now=LEVELS[self._level])
        return True

    def limits(self) -> Limits:
        """Those of the next step."""
        if self._level and self._clock() - self._changed_s >= CALM_S:
            self._level, self._changed_s = self._level - 1, self._clock()
            self._metrics.shedding(self._level)
            self._most_rows = min(2 * self._most_rows, self._limits.max_step_rows)
            self._log.info("the device's memory lasts again", now=LEVELS[self._level])
        given = self._limits
        if self._level == 0:
            return given
        return replace(given, max_running=1 if self.refuses else given.max_running,
                       max_step_rows=self._most_rows, prefill_chunk=min(given.prefill_chunk, self._most_rows))

    def nodes(self, wanted: int) -> int:
        """Rows of a tree of so many nodes, root included, that are verified."""
        return wanted if self._level == 0 else 1 + (wanted - 1) // 2 if self._level == 1 else 1
