"""What the next step of the target does: a pure function of plain facts, without doing it.

Rules:
1. First come, first served: answers are admitted, prefilled and kept in order of arrival. The oldest always advances,
   so nobody starves; when slots run out, the youngest is put back and computed again later.
2. Rows go first to answers that decode, then to prompts, chunk by chunk, so long prompts do not stop running answers.
3. Trees shrink before anyone is put back: draft nodes are a bet, answers are a promise.
4. An answer that waits for its drafter is left out until growth comes or its deadline passes. The step itself is held
   for it where one step of all is sooner over than two.

It knows nothing about tokens, devices or drafters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Facts:
    """One answer as the scheduler sees it. ``key`` is the caller's."""

    key: int
    held: int  # slots of its own that would come free if it were put back
    prefill: int  # committed tokens whose KV is missing, root not counted
    nodes: int  # rows that it would verify now, root included
    waits: bool  # for its drafter


# Rows of one step. Half of them may be a prompt's, so that answers which run do not wait for a long one. A GPU computes
# some 300 rows while it reads its weights, a CPU fewer than 20: it gains nothing by more, and waits longer for each.
STEP_ROWS = {"cpu": 512, "cuda": 1024}


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


def schedule(running: Sequence[Facts], waiting: Sequence[Facts], free_slots: int, limits: Limits) -> Schedule:
    """The next step. ``running`` and ``waiting`` stand in order of arrival; ``free_slots`` counts those that the prefix
    cache would give up too. An answer in ``waiting`` needs ``prefill + 1`` slots to begin."""
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
    verify = _share(ready, min(room, limits.max_step_rows))
    room -= sum(rows for _, rows in verify)
    rows_left = limits.max_step_rows - sum(rows for _, rows in verify)
    prefill: list[tuple[int, int]] = []
    for facts in kept:
        rows = min(facts.prefill, limits.prefill_chunk, rows_left, room)
        if rows > 0:
            prefill.append((facts.key, rows))
            rows_left, room = rows_left - rows, room - rows
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


def _share(ready: Sequence[Facts], rows: int) -> list[tuple[int, int]]:
    # One row each first; what is left goes to trees, oldest first.
    served = ready[:rows]
    spare = rows - len(served)
    shares = []
    for facts in served:
        extra = min(facts.nodes - 1, spare)
        spare -= extra
        shares.append((facts.key, 1 + extra))
    return shares


def _admit(waiting: Sequence[Facts], num_running: int, room: int, limits: Limits) -> tuple[int, ...]:
    admitted: list[int] = []
    for facts in waiting:
        # In order, or a long prompt would wait for ever behind short ones.
        if num_running + len(admitted) >= limits.max_running or facts.prefill + 1 > room:
            break
        room -= facts.prefill + 1
        admitted.append(facts.key)
    return tuple(admitted)
