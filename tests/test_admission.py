"""Who is let in, who waits and who is refused, on counted time: answers take seconds, the tests do not."""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from unittest.mock import patch

import pytest

from router_service.admission import MAX_WAITING_PER_PLACE, Admission
from router_service.tenants import ANYONE, Tenant
from slipstream.base.errors import CapacityError, Draining, QuotaExceeded
from slipstream.observe.metrics import RouterMetrics
from tests.counted import counted
from tests.loop import settled
from tests.opcodes import opcodes

PLACES, ANSWER_S, MAX_WAIT_S = 16, 2.0, 3.0
CAPACITY = PLACES / ANSWER_S  # answers a second
A, B = (Tenant(name, name) for name in "ab")


@dataclass
class Office:
    """Places, each of which serves one answer in a random time, and what became of all who asked."""

    places: int = PLACES
    max_wait_s: float = MAX_WAIT_S
    metrics: RouterMetrics = field(default_factory=lambda: RouterMetrics("tiny"))
    waits: dict[str, list[float]] = field(default_factory=dict)  # of those who were let in
    totals: dict[str, list[float]] = field(default_factory=dict)
    refusals: dict[str, list[float]] = field(default_factory=dict)  # when each is told to come back
    running: Counter[str] = field(default_factory=Counter)
    most: Counter[str] = field(default_factory=Counter)  # that ran at once
    held_s: Counter[str] = field(default_factory=Counter)  # places, and for how long
    ended: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.now = asyncio.get_running_loop().time
        self.admission = Admission(self.places, self.max_wait_s, self.metrics, self.now)

    async def ask(self, tenant: Tenant, answer_s: float, answers: int = 1) -> None:
        name, came_s = tenant.name, self.now()
        try:
            place = await self.admission.enter(tenant, answers)
        except CapacityError as error:
            self.refusals.setdefault(name, []).append(error.retry_after_s)
            return
        self.waits.setdefault(name, []).append(self.now() - came_s)
        answers = place.num_answers
        self.held_s[name] += answers * answer_s
        self.running[name] += answers
        self.most[name] = max(self.most[name], self.running[name])
        assert self.running.total() <= self.places
        await asyncio.sleep(answer_s)
        self.running[name] -= answers
        self.totals.setdefault(name, []).append(self.now() - came_s)
        self.ended.append(self.now())
        self.admission.leave(place)

    async def load(self, tenant: Tenant, a_second: float, seconds: float, mean_s: float = ANSWER_S) -> None:
        """An open loop: whatever becomes of them, others come."""
        chance = random.Random(f"{tenant.name} {a_second}")
        asked = []
        until_s = self.now() + seconds
        while self.now() < until_s:
            asked.append(asyncio.create_task(self.ask(tenant, mean_s * chance.uniform(0.5, 1.5))))
            await asyncio.sleep(chance.expovariate(a_second))
        await asyncio.gather(*asked)

    def goodput(self, from_s: float, to_s: float) -> float:
        return sum(from_s <= at_s < to_s for at_s in self.ended) / (to_s - from_s)

    def refused(self, tenant: str, reason: str) -> float:
        page = self.metrics.registry.page("")[1].decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in page if line.startswith(
            "slipstream_requests_refused_total{") and f'reason="{reason}"' in line and f'tenant="{tenant}"' in line)


def p99(seconds: list[float]) -> float:
    return sorted(seconds)[int(0.99 * (len(seconds) - 1))]


def test_overload_costs_no_goodput_and_waits_are_bounded() -> None:
    async def overloaded(times: float) -> Office:
        office = Office()
        await office.load(ANYONE, times * CAPACITY, 150.0)
        return office

    seen = {times: counted(overloaded(times)) for times in (1.0, 1.5, 2.0, 5.0, 10.0)}
    goodputs = {times: office.goodput(30.0, 150.0) for times, office in seen.items()}
    assert min(goodputs[times] for times in (2.0, 5.0, 10.0)) >= 0.95 * max(goodputs.values()), goodputs
    for times, office in seen.items():
        waits, told = office.waits["anyone"], office.refusals.get("anyone", [])
        assert p99(waits) <= MAX_WAIT_S and max(waits) <= MAX_WAIT_S + 0.001, (times, p99(waits))
        assert office.refused("anyone", "queue") + office.refused("anyone", "late") == len(told)
        assert office.admission.queue_wait_s() == 0.0, "nobody waits any more"
        if times >= 2.0:
            late = sorted(told[len(told) // 2 :])
            wait_s = sorted(waits)[len(waits) // 2]
            assert wait_s / 2 < late[0] and late[-1] < 2 * wait_s, "they are told how long others wait"


def test_a_tenant_that_asks_for_ten_times_its_share_does_not_slow_another() -> None:
    async def beside(times: float) -> Office:
        office = Office()
        await asyncio.gather(office.load(B, 0.25 * CAPACITY, 300.0), office.load(A, times * 0.5 * CAPACITY, 300.0))
        return office

    modest, greedy = (counted(beside(times)) for times in (1.0, 10.0))
    assert p99(greedy.totals["b"]) <= 1.5 * p99(modest.totals["b"]), (p99(greedy.totals["b"]), p99(modest.totals["b"]))
    assert not greedy.refusals.get("b"), "its share is its own"
    assert len(greedy.refusals["a"]) > len(greedy.totals["a"])
    assert greedy.goodput(30.0, 300.0) >= 0.95 * CAPACITY, "what one leaves the other has"


def test_shares_are_of_places_and_by_weight_however_long_the_answers() -> None:
    async def both() -> Office:
        office = Office()
        heavy = replace(A, weight=3.0)
        await asyncio.gather(office.load(heavy, 2 * CAPACITY, 300.0), office.load(B, 2 * CAPACITY, 300.0, ANSWER_S / 4))
        return office

    office = counted(both())
    # Three quarters of the places for answers that take four times as long: 6 and 8 a second of 8 and 32.
    a, b = (len(office.totals[name]) / 300.0 for name in "ab")
    assert 5.4 < a < 6.6 and 7.2 < b < 8.8, (a, b)


@pytest.mark.parametrize("answers", [1, PLACES // 2, PLACES, 8 * PLACES])
def test_who_asks_for_many_answers_at_once_gets_its_share_and_empties_no_places(answers: int) -> None:
    """Requests for half of the places had half of them, of eight tenants; those for all kept them empty meanwhile."""
    async def crowd() -> Office:
        office = Office(max_wait_s=30.0)

        async def busy(tenant: Tenant, count: int) -> None:
            while office.now() < 200.0:
                await office.ask(tenant, ANSWER_S, count)
                await asyncio.sleep(0.01)

        modest = (busy(Tenant(str(i), str(i)), 1) for i in range(7) for _ in range(4))
        await asyncio.gather(*(busy(A, answers) for _ in range(4)), *modest)
        return office

    held = counted(crowd()).held_s
    assert sum(held.values()) >= 0.95 * 200.0 * PLACES
    assert min(held.values()) >= 0.9 * 200.0 * PLACES / 8, held


def test_a_quota_of_answers_at_once_lets_further_ones_wait_and_nobody_else() -> None:
    async def narrow() -> Office:
        office = Office()
        await asyncio.gather(office.load(replace(A, requests=2), CAPACITY, 60.0), office.load(B, CAPACITY / 2, 60.0))
        return office

    office = counted(narrow())
    assert office.most["a"] == 2 and not office.refusals.get("b")
    assert max(office.waits["a"]) > 1.0 and max(office.waits["b"]) < 0.5
    assert max(office.waits["a"]) <= MAX_WAIT_S + 0.001


def test_a_quota_of_tokens_is_kept_and_who_comes_back_in_time_is_let_in() -> None:
    async def spending() -> tuple[int, list[float]]:
        office, told, spent = Office(), list[float](), 0
        while office.now() < 600.0:
            try:
                place = await office.admission.enter(replace(A, tokens_per_minute=600), 1)
            except QuotaExceeded as error:
                told.append(error.retry_after_s)
                await asyncio.sleep(error.retry_after_s)
                place = await office.admission.enter(replace(A, tokens_per_minute=600), 1)
            place.account.spend(50)
            await asyncio.sleep(0.5)
            place.account.spend(150)
            office.admission.leave(place)
            spent += 200
        assert office.refused("a", "tokens") == len(told)
        return spent, told

    spent, told = counted(spending())
    assert 6000 <= spent <= 6000 + 600 + 200, "ten minutes of 600 tokens, those of a minute at once, and one request"
    assert told and 15 < max(told) < 25, "200 tokens are there after 20 s"


def test_whoever_was_away_for_long_has_the_tokens_of_one_minute() -> None:
    async def back() -> None:
        admission, limited = Office().admission, replace(A, tokens_per_minute=600)
        for away_s in (3600.0, 0.0):
            place = await admission.enter(limited, 1)
            admission.leave(place)
            await asyncio.sleep(away_s)
        place.account.spend(600)
        with pytest.raises(QuotaExceeded):
            await admission.enter(limited, 1)

    counted(back())


def test_a_limit_that_comes_to_a_busy_tenant_is_of_what_it_takes_from_then_on() -> None:
    async def reloaded() -> None:
        admission, limited = Office().admission, replace(A, tokens_per_minute=600)
        before = await admission.enter(A, 1)
        before.account.spend(1_000_000)
        await asyncio.sleep(100.0)
        place = await admission.enter(limited, 1)
        before.account.spend(100)
        place.account.spend(600)
        with pytest.raises(QuotaExceeded) as caught:
            await admission.enter(limited, 1)
        assert 10 < caught.value.retry_after_s < 11, "700 of 600 are spent"
        freed = await admission.enter(A, 1)  # and the limit goes again
        for held in (before, place, freed):
            held.account.spend(1000)
            admission.leave(held)
        assert await admission.enter(limited, 1)

    counted(reloaded())


def test_who_waits_where_nobody_leaves_is_refused_in_time_and_told_what_is_known() -> None:
    async def stalled() -> list[tuple[float, float]]:
        office = Office(places=2)
        running = [asyncio.create_task(office.ask(ANYONE, 100.0)) for _ in range(2)]
        waiting = [asyncio.create_task(office.ask(ANYONE, 1.0)) for _ in range(2)]
        await asyncio.wait(waiting)
        seen = []
        for _ in range(5):
            began_s = office.now()
            asked = asyncio.create_task(office.ask(ANYONE, 1.0))
            await asyncio.sleep(2.0)
            assert office.admission.queue_wait_s() > 0.9, "one for two places, and none came free in two seconds"
            await asked
            seen.append((began_s, office.refusals["anyone"][-1]))
            await asyncio.sleep(5.0)
        assert office.refused("anyone", "late") >= 2 and office.admission.queued == 0
        for task in running:
            task.cancel()
        return seen

    seen = counted(stalled())
    assert round(seen[0][0]) == MAX_WAIT_S, "those who waited were refused then"
    assert all(told > 0 for _, told in seen)


def test_a_refusal_says_what_is_there_which_settings_bound_it_and_when_to_come_back() -> None:
    async def told() -> list[str]:
        office, found = Office(places=2), list[str]()
        admission, own = office.admission, replace(A, requests=1, tokens_per_minute=600)

        async def refused(tenant: Tenant) -> None:
            with pytest.raises(CapacityError) as caught:
                await admission.enter(tenant, 1)
            found.append(str(caught.value))

        place = await admission.enter(own, 1)
        await refused(own)  # in time, as nobody leaves
        place.account.spend(660)
        await refused(own)
        inside = await admission.enter(B, 1)
        waiting = [asyncio.create_task(office.ask(ANYONE, 1.0)) for _ in range(4)]
        await asyncio.sleep(2.0)
        await refused(ANYONE)
        for held in (place, inside):
            admission.leave(held)
        await asyncio.gather(*waiting)
        return found

    key, tokens, all_ = counted(told())
    assert key == ("answers of this key: 1 run and 1 wait, of 1 and 4, for at most 3 s (router.max_wait_s); "
                   "try again in 6 s")
    assert tokens == "this key's 600 tokens a minute are used up; try again in 4 s"
    assert all_ == ("answers here: 2 run and 4 wait, of 2 and 4 (router.max_in_flight), for at most 3 s "
                    "(router.max_wait_s); try again in 5 s")


async def test_who_gives_up_takes_nothing_and_several_answers_are_not_overtaken() -> None:
    metrics = RouterMetrics("tiny")
    admission = Admission(4, 30.0, metrics)
    inside = [await admission.enter(A, 1) for _ in range(4)]
    order: list[str] = []

    async def enter(name: str, tenant: Tenant, answers: int) -> None:
        place = await admission.enter(tenant, answers)
        order.append(name)
        admission.leave(place)

    tasks = {name: asyncio.create_task(enter(name, tenant, answers))
             for name, tenant, answers in (("three", A, 3), ("one", A, 1), ("gone", A, 1), ("other", B, 1))}
    await asyncio.sleep(0)
    assert admission.queued == 6
    tasks["gone"].cancel()
    await asyncio.sleep(0)
    for place in inside:
        admission.leave(place)
        await asyncio.sleep(0)
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    assert order == ["other", "three", "one"], "who has nothing goes first; within a tenant in order"
    assert admission.in_flight == admission.queued == 0
    assert [(await admission.enter(tenant, answers)).num_answers for tenant, answers in (
        (A, 5), (replace(B, requests=1), 3))] == [2, 1], "more than may run have half of the places that may"


async def test_when_who_waits_for_several_places_gives_up_the_next_one_is_let_in() -> None:
    admission = Admission(4, 30.0, RouterMetrics("tiny"))
    await admission.enter(A, 2)
    several, one = [asyncio.create_task(admission.enter(A, answers)) for answers in (3, 1)]
    await settled()
    assert admission.queued == 4
    several.cancel()
    await settled()
    assert one.done() and (admission.in_flight, admission.queued) == (3, 0)


async def test_before_any_answer_has_ended_no_more_wait_than_at_another_time() -> None:
    admission = Admission(2, 30.0, RouterMetrics("tiny"), lambda: 0.0)
    inside = await admission.enter(replace(A, tokens_per_minute=60), 2)
    waiting = [asyncio.create_task(admission.enter(B, 1)) for _ in range(10)]
    await settled()
    assert admission.queued == 2 * MAX_WAITING_PER_PLACE
    inside.account.spend(1_000_000)
    with pytest.raises(QuotaExceeded) as caught:
        await admission.enter(inside.tenant, 1)
    assert caught.value.retry_after_s == 60.0, "many clients take no longer time for one"
    admission.close()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_whoever_waits_for_more_than_its_limit_is_by_now_gets_what_that_leaves() -> None:
    """Keys are read again while requests wait: it waited in vain, and all of its tenant behind it."""
    admission = Admission(4, 30.0, RouterMetrics("tiny"))
    inside = await admission.enter(A, 4)
    first, second = [asyncio.create_task(admission.enter(tenant, answers))
                     for tenant, answers in ((A, 3), (replace(A, requests=1), 1))]
    await settled()
    admission.leave(inside)
    await settled()
    assert first.result().num_answers == 1 and not second.done()
    admission.leave(first.result())
    assert (await second).num_answers == 1


async def test_who_has_had_its_share_is_told_at_once_that_others_come_before() -> None:
    now = [0.0]
    admission = Admission(2, 5.0, RouterMetrics("tiny"), lambda: now[0])
    for place in [await admission.enter(A, 1) for _ in range(2)]:
        now[0] += 2.0
        admission.leave(place)  # after two seconds, and after four
    running = [await admission.enter(A, 1) for _ in range(2)]
    waiting = [asyncio.create_task(admission.enter(B, 1)) for _ in range(2)]
    await asyncio.sleep(0)
    assert admission.queued == 2
    with pytest.raises(CapacityError) as refused:
        await asyncio.wait_for(admission.enter(A, 2), 60)
    assert refused.value.retry_after_s == pytest.approx(6.0, rel=0.1), "two of its own, behind two"
    for place in running:
        admission.leave(place)
    assert [(await task).tenant for task in waiting] == [B, B]


async def test_who_is_let_in_and_gives_up_in_the_same_moment_gives_its_place_back() -> None:
    """A client that leaves just then would hold a place until the router begins anew."""
    admission = Admission(1, 30.0, RouterMetrics("tiny"))
    place = await admission.enter(A, 1)
    leaving = asyncio.create_task(admission.enter(A, 1))
    await asyncio.sleep(0)
    admission.leave(place)
    leaving.cancel()
    await asyncio.wait([leaving])
    assert leaving.cancelled() and (admission.in_flight, admission.queued) == (0, 0)
    admission.leave(await admission.enter(B, 1))


async def test_who_waits_as_the_router_leaves_is_told_at_once_and_keeps_it_from_nothing() -> None:
    admission = Admission(1, 100.0, RouterMetrics("tiny"))
    place = await admission.enter(A, 1)
    waiting = [asyncio.ensure_future(admission.enter(tenant, 1)) for tenant in (A, A, B)]
    await asyncio.sleep(0)
    assert admission.queued == 3
    admission.close()
    assert [type(told) for told in await asyncio.gather(*waiting, return_exceptions=True)] == [Draining] * 3
    assert (admission.in_flight, admission.queued) == (1, 0)
    admission.leave(place)
    assert admission.in_flight == 0, "or it would not be seen to be idle"


async def test_of_a_tenant_whose_last_answer_has_ended_nothing_is_kept() -> None:
    """Keys may be made and withdrawn every hour, in a file that is read again."""
    admission, tenant = Admission(2, 30.0, RouterMetrics("tiny")), Tenant("key of an hour")
    known = sys.getrefcount(tenant)
    places = [await admission.enter(tenant, 1) for _ in range(2)]
    assert sys.getrefcount(tenant) > known
    for place in places:
        admission.leave(place)
    del place, places
    assert sys.getrefcount(tenant) == known


def test_who_comes_is_not_compared_with_all_who_wait() -> None:
    """Two thousand tenants that wait cost each newcomer 1.5 ms of the event loop, and each answer's end 1.2."""
    async def costs(waiting: int) -> tuple[int, int]:
        office, names = Office(places=1, max_wait_s=1e6), iter(range(10_000))

        def comes() -> asyncio.Task[None]:
            return asyncio.create_task(office.ask(Tenant(f"t{next(names)}"), ANSWER_S))

        tasks = [comes() for _ in range(waiting)]
        await asyncio.sleep(ANSWER_S / 2)
        entering = office.admission.enter(Tenant("new"), 1)
        enters = opcodes(lambda: entering.send(None))
        queued = office.admission.queued
        with patch.object(Admission, "_next_account", autospec=True, side_effect=Admission._next_account) as looks:
            await asyncio.sleep(ANSWER_S)
        entering.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert queued == waiting
        return enters, looks.call_count

    few, many = counted(costs(5)), counted(costs(100))
    assert many == few and few[1] == 1, "who is next is looked for once for each place"
