"""schedule against its promises, over random populations that are played to the end."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest

from target_service.step import Limits, Schedule, SequenceInfo, schedule

LIMITS = Limits(max_running=6, max_step_rows=40, prefill_chunk=16)
SLOTS = 120


@dataclass
class Player:
    """An answer reduced to numbers: it must compute its prompt, then emit tokens."""

    key: int
    prompt: int
    output: int
    computed: int = 0
    emitted: int = 0
    waits: bool = False

    @property
    def prefill(self) -> int:
        return self.prompt + self.emitted - 1 - self.computed

    def facts(self, nodes: int) -> SequenceInfo:
        return SequenceInfo(self.key, self.computed, self.prefill, nodes, self.waits and not self.prefill)


def play(seed: int) -> tuple[list[Player], list[int]]:
    """Run a random population to the end; returns it and the order in which its members finished."""
    rng = np.random.default_rng(seed)
    everyone = [Player(k, int(rng.integers(1, 60)), int(rng.integers(1, 30))) for k in range(15)]
    waiting, running, finished = list(everyone), [], []
    for _ in range(3000):
        if not waiting and not running:
            return everyone, finished
        for player in running:
            player.waits = bool(rng.random() < 0.3)
        facts = [player.facts(int(rng.integers(1, 17))) for player in running]
        free = SLOTS - sum(player.computed for player in running)
        queue = [player.facts(1) for player in waiting]
        plan = schedule(facts, queue, free, LIMITS)
        check(plan, facts, queue, free, seed)
        apply(plan, waiting, running, finished, rng)
    raise AssertionError(f"seed {seed}: {len(waiting)} wait and {len(running)} run for ever")


def check(plan: Schedule, running: list[SequenceInfo], waiting: list[SequenceInfo], free: int, seed: int) -> None:
    by_key = {facts.key: facts for facts in running}
    room = free + sum(by_key[key].freed_slots for key in plan.put_back)
    rows = sum(rows for _, rows in (*plan.prefill, *plan.verify))
    assert rows <= min(room, LIMITS.max_step_rows), f"seed {seed}: rows without slots"
    kept = [facts for facts in running if facts.key not in plan.put_back]
    assert list(plan.put_back) == [f.key for f in running[::-1][: len(plan.put_back)]], "the youngest go first"
    assert len(kept) + len(plan.admit) <= LIMITS.max_running
    assert list(plan.admit) == [f.key for f in waiting[: len(plan.admit)]], "admission is in order"
    chunks = dict(plan.prefill)
    for key, count in plan.verify:
        assert not by_key[key].waits and 1 <= count <= (1 if key in chunks else by_key[key].num_nodes)
    for key, count in plan.prefill:
        assert 1 <= count <= min(by_key[key].num_prefill, LIMITS.prefill_chunk)
    ready = {facts.key for facts in kept if not facts.num_prefill and not facts.waits}
    ending = {key for key, count in chunks.items() if count == by_key[key].num_prefill}
    chosen = {key for key, _ in plan.verify}
    assert ready <= chosen <= ready | ending, "whoever can advance does"
    assert chosen == ready | ending or rows == min(room, LIMITS.max_step_rows), "a prompt that ends has its first token"


def apply(plan: Schedule, waiting: list[Player], running: list[Player], finished: list[int],
          rng: np.random.Generator) -> None:
    for key in plan.put_back:
        player = next(p for p in running if p.key == key)
        running.remove(player)
        player.computed = 0
        waiting.insert(0, player)
    for key in plan.admit:
        player = next(p for p in waiting if p.key == key)
        waiting.remove(player)
        running.append(player)
    running.sort(key=lambda p: p.key)
    for key, rows in plan.prefill:
        next(p for p in running if p.key == key).computed += rows
    for key, rows in plan.verify:
        player = next(p for p in running if p.key == key)
        accepted = int(rng.integers(rows))
        player.computed += accepted + 1
        player.emitted += accepted + 1
        if player.emitted >= player.output:
            running.remove(player)
            finished.append(key)


@pytest.mark.parametrize("seed", range(25))
def test_everyone_finishes_and_no_step_takes_more_than_there_is(seed: int) -> None:
    everyone, finished = play(seed)
    assert sorted(finished) == [player.key for player in everyone]


def test_plain_rows_come_before_prompts_and_both_before_trees() -> None:
    running = [SequenceInfo(1, 10, 0, 17, False), SequenceInfo(2, 10, 0, 1, False), SequenceInfo(3, 5, 50, 1, False)]
    plan = schedule(running, [], 20, LIMITS)
    assert dict(plan.verify) == {1: 3, 2: 1} and dict(plan.prefill) == {3: 16}, "a chunk of it"
    plan = schedule(running, [], 3, LIMITS)
    assert dict(plan.verify) == {1: 1, 2: 1} and dict(plan.prefill) == {3: 1}


def test_the_step_that_ends_a_prompt_chooses_the_first_token() -> None:
    running = [SequenceInfo(1, 0, 10, 1, False), SequenceInfo(2, 0, 20, 1, False), SequenceInfo(3, 0, 5, 0, False)]
    plan = schedule(running, [], 100, LIMITS)
    assert dict(plan.prefill) == {1: 10, 2: 16, 3: 5} and dict(plan.verify) == {1: 1}
    plan = schedule(running[:1], [], 10, LIMITS)
    assert dict(plan.prefill) == {1: 10} and not plan.verify, "no slot is left for it"


def test_trees_leave_a_prompt_its_rows_and_slots() -> None:
    running = [SequenceInfo(1, 0, 5000, 1, False), *(SequenceInfo(key, 0, 0, 64, False) for key in range(2, 10))]
    full = schedule(running, [], 20_000, Limits(64, 512, 256))
    assert full.prefill == ((1, 256),) and sum(rows for _, rows in full.verify) == 256
    short_prompt = [SequenceInfo(1, 0, 3, 0, False), SequenceInfo(2, 0, 0, 64, False)]
    assert schedule(short_prompt, [], 100, LIMITS).verify == ((2, 37),), "no more than it has left"
    short = schedule(running, [], 136, Limits(64, 512, 256))
    assert short.prefill == ((1, 128),) and {rows for _, rows in short.verify} == {1}


def test_trees_that_are_too_many_for_a_step_share_its_rows() -> None:
    """The oldest had whole trees, the others nothing of theirs, in every step."""
    running = [SequenceInfo(key, 10, 0, 3 if key == 5 else 17, False) for key in range(1, 10)]
    verify = dict(schedule(running, [], 1000, LIMITS).verify)
    assert sum(verify.values()) == LIMITS.max_step_rows and verify.pop(5) == 3
    assert set(verify.values()) == {4, 5} and verify[1] == 5 and verify[9] == 4, "the older ones have what is left over"
    many = [SequenceInfo(key, 10, 0, 17, False) for key in range(1, 31)]
    assert [rows for _, rows in schedule(many, [], 1000, LIMITS).verify] == [2] * 10 + [1] * 20


def test_trees_shrink_before_anyone_is_put_back() -> None:
    running = [SequenceInfo(1, 10, 0, 17, False), SequenceInfo(2, 10, 0, 17, False)]
    plan = schedule(running, [], 2, LIMITS)
    assert dict(plan.verify) == {1: 1, 2: 1} and not plan.put_back


def test_with_no_slot_left_the_youngest_makes_place_for_the_oldest() -> None:
    running = [SequenceInfo(1, 10, 0, 4, False), SequenceInfo(2, 10, 0, 4, False)]
    plan = schedule(running, [SequenceInfo(3, 0, 4, 1, False)], 0, LIMITS)
    assert plan.put_back == (2,) and dict(plan.verify) == {1: 4} and not plan.admit
    plan = schedule([SequenceInfo(1, 10, 0, 64, False), SequenceInfo(2, 90, 50, 1, False)], [], 0, LIMITS)
    assert plan.put_back == (2,) and plan.verify == ((1, 40),), "whose prompt needs no rows now"
    alike = [SequenceInfo(1, 10, 0, 1, False), *(SequenceInfo(key, 0, 0, 1, False) for key in (2, 3))]
    plan = schedule(alike, [], 0, LIMITS)
    assert plan.put_back == (3, 2) and plan.verify == ((1, 1),), "what they share is counted for neither, and is free"


def test_of_prompts_that_hold_all_slots_the_youngest_makes_place() -> None:
    running = [SequenceInfo(1, 10, 8, 1, False), SequenceInfo(2, 10, 8, 1, False)]
    assert schedule(running, [], 0, LIMITS).put_back == (2,)
    assert schedule([*running, SequenceInfo(3, 10, 0, 1, True)], [], 0, LIMITS).empty, "one that decodes may end soon"


def test_whoever_is_admitted_leaves_others_room_to_grow() -> None:
    """Else it is put back soon, and computes its prompt again."""
    long, short = SequenceInfo(1, 0, 50, 1, False), [SequenceInfo(key, 0, 10, 1, False) for key in (2, 3)]
    assert schedule([long], short[:1], 60, LIMITS).admit == (), "34 more are the running prompt's"
    assert schedule([long], short[:1], 61, LIMITS).admit == (2,)
    assert schedule([], short[:1], 26, LIMITS, growth=16).admit == ()
    assert schedule([], short[:1], 27, LIMITS, growth=16).admit == (2,)
    assert schedule([], short, 37, LIMITS).admit == (2,)
    assert schedule([], short, 38, LIMITS).admit == (2, 3)


def test_a_row_that_is_scored_takes_the_place_of_two() -> None:
    prompts = [SequenceInfo(key, 0, 50, 1, False, needs_scoring=True) for key in (1, 2, 3)]
    assert schedule(prompts, [], 20, LIMITS).prefill == ((1, 8), (2, 8), (3, 4)), "rows, not slots"


def test_a_prompt_that_is_scored_ends_beside_trees_that_would_fill_each_step() -> None:
    """They leave as many rows as it has left: of its last row half, and it stood still until they were gone."""
    trees, left = [SequenceInfo(key, 10, 0, 17, False) for key in range(1, 10)], 11
    for _ in range(5):
        plan = schedule([*trees, SequenceInfo(10, 0, left, 1, False, needs_scoring=True)], [], 1000, LIMITS)
        assert sum(rows for _, rows in (*plan.prefill, *plan.verify)) <= LIMITS.max_step_rows
        left -= sum(rows for _, rows in plan.prefill)
    assert left == 0


def test_a_session_that_waits_for_its_drafter_is_left_out() -> None:
    plan = schedule([SequenceInfo(1, 10, 0, 1, True)], [], 50, LIMITS)
    assert plan.empty


@pytest.mark.parametrize("prompt", [0, 1000])
def test_answers_beyond_the_rows_of_a_step_take_turns(prompt: int) -> None:
    """The youngest stood still until older ones ended; and a prompt beside them, too."""
    missed, served, read = dict.fromkeys(range(1, 11), 0), Counter[int](), 0
    for _ in range(40):
        running = [SequenceInfo(key, 10, 0, 4, False, num_missed=count) for key, count in missed.items()]
        if prompt:
            running.append(SequenceInfo(11, 0, prompt - read, 1, False))
        plan = schedule(running, [], 1000, Limits(64, 4, 4))
        chosen = dict(plan.verify)
        assert sum(chosen.values()) == (2 if prompt else 4)
        read += dict(plan.prefill).get(11, 0)
        served.update(chosen)
        missed = {key: 0 if key in chosen else count + 1 for key, count in missed.items()}
        assert max(missed.values()) <= (4 if prompt else 2)
    assert len(served) == 10 and read == (80 if prompt else 0)
