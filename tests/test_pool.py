"""Which of its drafts a target gives a session to."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from unittest.mock import patch

import pytest

from slipstream.following.pool import FORGET_S, SLOW_FACTOR, DraftPool, Member
from slipstream.observe.metrics import TargetMetrics
from slipstream.protocol.messages import Link
from tests.test_following import SILENT
from tests.test_majority import Heard


class Pool(DraftPool):
    """Of two drafts, whose links it names."""

    def __init__(self, most: int = 100) -> None:
        super().__init__(TargetMetrics("function"))
        self.one, self.two = Heard("one"), Heard("two")
        for link in (self.one, self.two):
            self.link_up(link, replace(SILENT, max_sessions=most))

    def joined(self, count: int, now_s: float) -> Counter[Link | None]:
        return Counter(self.assign(now_s) for _ in range(count))


def test_sessions_are_shared_by_drafts_that_take_about_the_same() -> None:
    pool = Pool()
    for link, seconds in ((pool.one, 0.01), (pool.two, 0.9 * SLOW_FACTOR * 0.01)):
        pool.observe_latency(link, seconds, 1.0)
    assert pool.joined(8, 1.0) == {pool.one: 4, pool.two: 4}
    assert not pool.is_slow(pool.two, False, 1.0) and not pool.is_slow(pool.two, True, 1.0)


def test_a_slow_draft_gets_sessions_where_no_other_has_room_and_when_that_is_long_ago() -> None:
    pool = Pool(most=3)
    for link, seconds in ((pool.one, 0.01), (pool.two, 1.1 * SLOW_FACTOR * 0.01)):
        pool.observe_latency(link, seconds, 1.0)
    assert pool.is_slow(pool.two, False, 1.0) and not pool.is_slow(pool.one, True, 1.0)
    assert pool.joined(4, 1.0) == {pool.one: 3, pool.two: 1}
    assert not pool.is_slow(pool.two, True, 1.0), "there is no room"
    for _ in range(3):
        pool.release(pool.one)
    assert pool.assign(1.0) is pool.one and pool.is_slow(pool.two, False, 1.0 + 0.9 * FORGET_S)
    later_s = 1.0 + FORGET_S
    assert not pool.is_slow(pool.two, False, later_s) and pool.joined(2, later_s)[pool.two] == 1


@pytest.mark.parametrize(("gave_up", "moves"), [(False, False), (True, True)])
def test_only_who_gave_its_drafts_up_goes_where_nobody_knows_what_it_takes(gave_up: bool, moves: bool) -> None:
    pool = Pool()
    pool.observe_latency(pool.one, 5.0, 1.0)
    assert pool.is_slow(pool.one, gave_up, 1.0) is moves


def test_who_left_a_draft_gets_another_where_one_has_room() -> None:
    """Drawn at random, it was the same one again: its answer decoded plain to its end."""
    pool = Pool(most=4)
    pool.observe_latency(pool.one, 5.0, 1.0)
    assert [pool.assign(1.0, left=pool.one) for _ in range(5)] == [pool.two] * 4 + [pool.one]


def test_a_draft_that_has_room_for_more_gets_more() -> None:
    pool = Pool()
    for link, most in ((pool.one, 2), (pool.two, 6)):
        pool.link_up(link, replace(SILENT, max_sessions=most))
    assert pool.joined(4, 1.0) == {pool.one: 1, pool.two: 3}


def test_what_a_draft_took_long_ago_says_nothing() -> None:
    pool = Pool()
    pool.observe_latency(pool.one, 5.0, 1.0)
    for link in (pool.one, pool.two):
        pool.observe_latency(link, 0.01, 2.0 + FORGET_S)
    assert not pool.is_slow(pool.one, False, 2.0 + FORGET_S)


def test_who_gave_up_a_draft_that_never_answered_goes_to_one_that_does() -> None:
    pool = Pool()
    pool.observe_latency(pool.two, 0.01, 1.0)
    assert pool.is_slow(pool.one, True, 1.0) and not pool.is_slow(pool.one, False, 1.0)


def test_one_odd_exchange_makes_nobody_slow() -> None:
    pool = Pool()
    for link in (pool.one, pool.two):
        pool.observe_latency(link, 0.01, 1.0)
    pool.observe_latency(pool.two, 0.05, 1.0)
    assert not pool.is_slow(pool.two, False, 1.0)
    for _ in range(3):
        pool.observe_latency(pool.two, 0.05, 1.0)
    assert pool.is_slow(pool.two, False, 1.0)


def test_who_has_waited_is_not_compared_with_all_drafts_where_none_is_faster() -> None:
    """With 50 of them 256 sessions took 2.7 ms of each step for that."""
    pool = Pool()
    many = [Heard(f"more {i}") for i in range(50)]
    for link in many:
        pool.link_up(link, SILENT)
        pool.observe_latency(link, 0.01, 1.0)
    with patch.object(Member, "recent_latency_s", autospec=True, side_effect=Member.recent_latency_s) as looks:
        assert not any(pool.is_slow(link, False, 1.0) for link in many)
        assert looks.call_count <= 2 * len(many)
    for _ in range(9):
        for link in many[1:]:
            pool.observe_latency(link, 0.05, 1.0)
    assert [pool.is_slow(link, False, 1.0) for link in many] == [False] + [True] * 49
    for _ in range(30):
        pool.observe_latency(many[0], 0.05, 1.0)
    assert not any(pool.is_slow(link, False, 1.0) for link in many)
