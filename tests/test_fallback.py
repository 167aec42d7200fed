"""The router's fallback: a draft pool that stops paying is left, probed by few, and come back to."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from structlog.testing import capture_logs

from router_service.admission import FollowedAnswer, PoolFallback
from slipstream.base.config import PolicySection
from slipstream.decision.decide import Mode
from slipstream.decision.policy import PROBE_MAX_S
from slipstream.observe.metrics import RouterMetrics
from slipstream.protocol.requests import Answer, Piece

PLAIN_S = 0.010


@dataclass
class Pool:
    """A draft pool and the clock of its world: what a speculating step takes and gives."""

    now_s: float = 1000.0
    accepted: int = 3
    verify_s: float = 0.012
    wait_s: float = 0.001
    plain_s: float = PLAIN_S  # as the target says with each piece
    looks_up: bool = False  # all texts copy: no target asks for drafts
    stumbles: bool = False  # the next answer that drafts waits in vain, once
    hangs: bool = False  # the drafts are connected and never answer: a first wait of each answer is in vain
    patience_s: float = 0.25  # of that wait

    def clock(self) -> float:
        return self.now_s


class PoolAnswer:
    """An endless answer on the pool; plain steps while it may not speculate."""

    def __init__(self, pool: Pool, speculate: bool) -> None:
        self.pool = pool
        self.speculate = speculate
        self.closed = self.waited = False
        self.shadow = False  # its own target drafts for it no more
        self.copies = False  # its text is looked up

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self

    async def __anext__(self) -> Piece:
        if not self.speculate:
            return Piece((1,), verify_s=PLAIN_S, state="plain", plain_s=PLAIN_S)
        pool = self.pool
        if self.shadow:
            return Piece((1,), verify_s=PLAIN_S, state="shadow", plain_s=PLAIN_S)
        if pool.stumbles:
            pool.stumbles = False
            return Piece((1,), verify_s=PLAIN_S, wait_s=0.005, plain_s=PLAIN_S, late=True)
        if pool.hangs:
            wait_s, self.waited = (0.0 if self.waited else pool.patience_s), True
            return Piece((1,), 0, 0, verify_s=PLAIN_S, wait_s=wait_s, plain_s=PLAIN_S, late=wait_s > 0.0)
        if pool.looks_up or self.copies:
            return Piece((1,) * 4, 3, 4, verify_s=PLAIN_S, state="lookup")
        return Piece((1,) * (1 + pool.accepted), pool.accepted, 4, verify_s=pool.verify_s, wait_s=pool.wait_s,
                     plain_s=pool.plain_s)

    def set_speculation(self, allowed: bool) -> None:
        self.speculate, self.waited = allowed, False

    async def aclose(self) -> None:
        self.closed = True


class World:
    """Answers that run side by side, stepped by hand."""

    def __init__(self, answers: int, wanted: bool = True) -> None:
        self.pool = Pool()
        self.metrics = RouterMetrics("tiny")
        self.fallback = PoolFallback(PolicySection(), self.metrics, clock=self.pool.clock)
        self.inner: list[PoolAnswer] = []
        self.answers: list[Answer] = []
        self.tokens, self.spent_s = 0, 0.0
        for _ in range(answers):
            self.begin(wanted)

    def begin(self, wanted: bool = True) -> PoolAnswer:
        inner = PoolAnswer(self.pool, wanted)
        self.inner.append(inner)
        self.answers.append(self.fallback.follow(inner, wanted))
        return inner

    async def step(self) -> None:
        before_s = self.pool.now_s
        longest = 0.0
        for answer in self.answers:
            piece = await anext(aiter(answer))
            longest = max(longest, piece.verify_s + piece.wait_s)
            self.tokens += len(piece.tokens)
        self.pool.now_s = before_s + longest
        self.spent_s += longest
        self.fallback.tick()

    async def run(self, seconds: float) -> None:
        until_s = self.pool.now_s + seconds
        while self.pool.now_s < until_s:
            await self.step()

    def page(self) -> str:
        return self.metrics.registry.page("")[1].decode()


async def prepared(answers: int) -> World:
    """A world whose fallback has seen plain steps."""
    world = World(answers)
    world.begin(wanted=False)
    await world.run(1.0)
    return world


async def test_stays_while_it_pays() -> None:
    world = await prepared(4)
    await world.run(20.0)
    assert world.fallback.mode is Mode.SPECULATE
    assert [a.speculate for a in world.inner] == [True] * 4 + [False], "who asked for plain stays plain"


async def test_leaves_switches_running_answers_and_new_ones_begin_plain() -> None:
    world = await prepared(6)
    world.pool.accepted, world.pool.wait_s = 0, 0.010
    await world.run(2.0)
    assert world.fallback.mode is not Mode.SPECULATE
    assert sum(a.speculate for a in world.inner) <= 1, "but for a probe"
    assert sum(world.begin().speculate for _ in range(5)) <= 1
    page = world.page()
    assert 'slipstream_mode_transitions_total{from="speculate",model="tiny",reason="' in page
    assert 'slipstream_mode{mode="speculate",model="tiny",scope="pool",service="router"} 0.0' in page
    assert 'slipstream_fallback_requests_total{model="tiny",reason="' in page


async def test_probes_are_few_and_it_comes_back() -> None:
    world = await prepared(40)
    world.pool.accepted, world.pool.wait_s = 0, 0.010
    await world.run(20.0)
    most = 0
    for _ in range(500):
        await world.step()
        if world.fallback.mode is not Mode.SPECULATE:
            most = max(most, sum(a.speculate for a in world.inner))
    assert most <= 2, most
    world.pool.accepted, world.pool.wait_s = 3, 0.001
    await world.run(PROBE_MAX_S + 5.0)
    assert world.fallback.mode is Mode.SPECULATE
    assert sum(a.speculate for a in world.inner) == 40


async def left_for(world: World) -> None:
    """The pool of ``world`` turns bad and is left, and gets well again before anybody has tried it."""
    world.pool.accepted, world.pool.wait_s = 0, 0.010
    while world.fallback.mode is Mode.SPECULATE or world.fallback.probing:
        await world.step()
    world.pool.accepted, world.pool.wait_s = 3, 0.001


async def test_a_log_says_when_a_pool_was_left_and_come_back_to_and_why() -> None:
    with capture_logs() as lines:
        world = await prepared(4)
        assert not lines, "nothing changed yet"
        await left_for(world)
        await world.run(PROBE_MAX_S + 5.0)
    begun, ended = (line for line in lines if line["part"] == "fallback" and line["event"] == "mode changed")
    assert (begun["before"], begun["after"], ended["before"], ended["after"]) == (
        "speculate", "shadow", "shadow", "speculate")
    assert (begun["reason"], ended["reason"]) == ("acceptance_low", "probe_ok"), f"{begun}, {ended}"
    for line in (begun, ended):
        assert (line["scope"], line["answers"], round(line["plain_ms"])) == ("pool", 5, 10)
    assert begun["gain"] < ended["gain"]


async def test_a_time_without_answers_fails_no_probe() -> None:
    world = await prepared(4)
    await left_for(world)
    for answer in world.answers:
        await answer.aclose()
    world.answers.clear()
    for _ in range(1000):
        world.pool.now_s += 1.0
        world.fallback.tick()
    assert world.fallback.mode is Mode.SHADOW
    world.begin()
    await world.run(2.0)
    assert world.fallback.mode is Mode.SPECULATE


async def test_texts_that_are_looked_up_fail_no_probe_and_pay_for_it() -> None:
    world = await prepared(4)
    await left_for(world)
    world.pool.looks_up = True
    await world.run(60.0)
    assert world.fallback.mode is Mode.SHADOW and world.fallback.probing
    assert world.fallback._beliefs.budget.left_s > 0.1, "time passed, whatever it was spent on"
    world.pool.looks_up = False
    await world.run(2.0)
    assert world.fallback.mode is Mode.SPECULATE


async def probed(world: World) -> None:
    """The pool of ``world`` is left, and a probe has just begun."""
    await left_for(world)
    while not world.fallback.probing:
        await world.step()


@pytest.mark.parametrize("why", ["copies", "shadow"])
async def test_answers_that_tell_nothing_of_the_drafts_make_way_for_others(why: str) -> None:
    """A long text that is looked up, or whose target has no draft, was all of the probe until it ended."""
    world = await prepared(4)
    await left_for(world)
    for inner in world.inner[:3]:
        setattr(inner, why, True)
    while world.fallback.mode is not Mode.SPECULATE:
        await world.step()
        assert sum(inner.speculate for inner in world.inner) <= 1 or world.fallback.mode is Mode.SPECULATE
        assert world.pool.now_s < 1000.0 + 60.0


async def test_a_hundredth_of_the_answers_probes() -> None:
    world = await prepared(150)
    await probed(world)
    assert sum(inner.speculate for inner in world.inner) == 2


async def test_another_takes_the_place_of_an_answer_that_probed() -> None:
    world = await prepared(4)
    await probed(world)
    (probing,) = (number for number, inner in enumerate(world.inner) if inner.speculate)
    await world.answers.pop(probing).aclose()
    del world.inner[probing]
    assert not any(inner.speculate for inner in world.inner)
    world.fallback.tick()
    assert sum(inner.speculate for inner in world.inner) == 1


async def test_new_answers_probe_where_none_does() -> None:
    world = await prepared(1)
    await probed(world)
    for answer in world.answers:
        await answer.aclose()
    assert [world.begin().speculate for _ in range(3)] == [True, False, False]


async def test_an_answer_for_which_its_target_does_not_draft_passes_no_probe() -> None:
    world = await prepared(1)
    await probed(world)
    world.inner[0].shadow = True
    await world.run(60.0)
    assert world.fallback.mode is Mode.PLAIN, "three probes failed"


async def test_a_piece_is_judged_while_all_others_are_quiet() -> None:
    world = World(20)
    for _ in range(2):
        await anext(aiter(world.answers[0]))
    world.fallback.tick()
    assert world.fallback._beliefs.budget.left_s > 0.0


async def test_plain_answers_are_no_reason_to_stay() -> None:
    """What may be lost before a pool is left is shared by those who draft."""
    world = World(1)
    for _ in range(60):
        world.begin(wanted=False)
    await world.run(1.0)
    world.pool.accepted, world.pool.wait_s = 0, 0.010
    await world.run(1.0)
    assert world.fallback.mode is not Mode.SPECULATE


async def test_a_pool_that_never_answers_is_left_and_passes_no_probe() -> None:
    world = await prepared(8)
    world.pool.hangs = True
    returns = 0
    for _ in range(6000):
        before = world.fallback.mode
        await world.step()
        returns += before is not Mode.SPECULATE and world.fallback.mode is Mode.SPECULATE
    assert world.fallback.mode is not Mode.SPECULATE and not returns
    assert 'reason="draft_timeout"' in world.page()


async def brief(world: World, seconds: float) -> None:
    """One answer of three pieces after the other."""
    until_s = world.pool.now_s + seconds
    while world.pool.now_s < until_s:
        for answer in world.answers:
            await answer.aclose()
        world.answers.clear()
        inner = world.begin()
        inner.waited = True  # its prompt's step waits for nobody
        await world.step()
        inner.waited = False
        for _ in range(2):
            await world.step()


async def test_a_pool_that_hung_is_come_back_to_by_brief_answers() -> None:
    """Each of them waits in vain once. A probe in which many did lost what hours of such traffic earn for another."""
    world = await prepared(1)
    world.pool.hangs = True
    await brief(world, 100.0)
    assert world.fallback.mode is not Mode.SPECULATE
    world.pool.hangs = False
    await brief(world, 120.0)
    assert world.fallback.mode is Mode.SPECULATE


@pytest.mark.parametrize("answers", [1, 8])
async def test_a_bad_pool_costs_little(answers: int) -> None:
    world = await prepared(answers)
    world.pool.accepted, world.pool.wait_s = 0, 0.010
    await world.run(5.0)
    tokens, spent_s = world.tokens, world.spent_s
    await world.run(60.0)
    plain_s = (world.tokens - tokens) / len(world.answers) * PLAIN_S
    assert (world.spent_s - spent_s) / plain_s <= 1.05


async def test_does_not_flap_at_the_threshold() -> None:
    world = await prepared(4)
    changes = 0
    mode = world.fallback.mode
    for step in range(6000):
        # gain hovers around 1: two tokens a step that costs two plain steps, give or take
        world.pool.accepted, world.pool.verify_s, world.pool.wait_s = 1, 0.0195 + 0.001 * (step % 2), 0.0
        await world.step()
        changes += world.fallback.mode is not mode
        mode = world.fallback.mode
    assert changes <= 12, changes


async def test_closing_leaves() -> None:
    world = await prepared(2)
    first = world.answers[0]
    assert isinstance(first, FollowedAnswer)
    await first.aclose()
    assert world.inner[0].closed
    world.answers.remove(first)
    world.pool.accepted, world.pool.wait_s = 0, 0.010
    await world.run(2.0)
    assert world.inner[0].speculate, "nobody switches an answer that is over"
    assert not world.inner[1].speculate or world.fallback.probing


async def test_the_prompt_s_step_is_no_round() -> None:
    world = World(0)
    world.begin(wanted=False)
    world.begin()
    for _ in range(200):  # many short answers, whose first step is long
        world.pool.verify_s, world.pool.accepted = 0.5, 0
        short = world.fallback.follow(PoolAnswer(world.pool, True), True)
        await anext(aiter(short))
        await short.aclose()
        world.pool.verify_s, world.pool.accepted = 0.012, 3
        await world.step()
    assert world.fallback.mode is Mode.SPECULATE


async def test_what_texts_foretell_is_no_reason_to_leave_the_pool() -> None:
    """A target says what a step would have taken without drafts, but for rounds that verified the text's own chain."""
    world = await prepared(4)
    world.pool.accepted, world.pool.verify_s, world.pool.plain_s = 0, 0.030, 0.0
    await world.run(5.0)
    assert world.fallback.mode is Mode.SPECULATE
    world.pool.plain_s = PLAIN_S
    await world.run(5.0)
    assert world.fallback.mode is not Mode.SPECULATE


async def test_switched_off_is_plain_from_the_start() -> None:
    fallback, answer = PoolFallback(PolicySection(max_nodes=0), RouterMetrics("tiny")), PoolAnswer(Pool(), True)
    fallback.follow(answer, True)
    assert not answer.speculate


async def test_more_answers_in_a_step_are_no_reason_to_leave() -> None:
    """Steps become three times as long as they were with fewer answers; plain ones would, too."""
    world = await prepared(4)
    world.pool.verify_s, world.pool.plain_s = 0.036, 0.030
    await world.run(5.0)
    assert world.fallback.mode is Mode.SPECULATE
    world.pool.accepted = 0
    await world.run(5.0)
    assert world.fallback.mode is not Mode.SPECULATE


async def test_answers_that_their_targets_draft_no_more_for_are_not_a_pool_s_silence() -> None:
    """A draft is late once, and then come the pieces of many for whom nobody drafts."""
    world = await prepared(20)
    for inner in world.inner[1:]:
        inner.shadow = True
    for _ in range(20):
        world.pool.stumbles = True
        await world.run(1.0)
        assert world.fallback.mode is Mode.SPECULATE and world.inner[0].speculate


@pytest.mark.parametrize("seconds", [0.03, 0.3])
async def test_a_pool_that_stands_still_for_a_moment_is_not_left(seconds: float) -> None:
    """Many answers are late at once. Eight late ones were a silent pool, and all were plain for a second and more."""
    world = await prepared(16)
    world.pool.patience_s = 0.03
    for _ in range(10):
        world.pool.hangs = True
        await world.run(seconds)
        world.pool.hangs = False
        for inner in world.inner:
            inner.waited = False
        await world.run(1.0)
        assert world.fallback.mode is Mode.SPECULATE and all(inner.speculate for inner in world.inner[:16])
    world.pool.hangs = True
    await world.run(2.0)
    assert world.fallback.mode is not Mode.SPECULATE
