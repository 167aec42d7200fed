"""What bad drafts cost an engine of others: answers stay, a proposal ends with its deadline, drafts are used again."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import pytest
from structlog.testing import capture_logs

from slipstream.decision.beliefs import PLAIN_EVERY
from tests.clocked import Engine, World, right
from tests.test_following import chosen

DEADLINE_S, SLACK_S = 0.05, 0.010
BACK_S = 5.0


def wrong(tokens: Sequence[int]) -> int:
    return (chosen(tokens) + 1) % 256


def engine(requests: int = 2) -> Engine:
    return Engine(World(), requests, deadline_s=DEADLINE_S)


def check(one: Engine) -> None:
    assert one.longest_s <= DEADLINE_S + SLACK_S
    assert one.right()


def test_a_good_draft_is_used() -> None:
    one = engine()
    one.draft()
    assert one.runs(5.0) > one.steps
    check(one)


def test_absent_then_there() -> None:
    one = engine()
    assert one.runs(5.0) == 0
    assert one.longest_s < 0.002, "it waited for nobody"
    one.draft()
    one.runs(BACK_S)
    assert one.runs(1.0) > 20
    check(one)


def test_killed_and_back() -> None:
    one = engine()
    draft = one.draft()
    one.runs(3.0)
    draft.down()
    assert one.runs(10.0) <= 8, "what was there"
    draft.up()
    one.runs(BACK_S)
    assert one.runs(1.0) > 20
    check(one)


def test_good_for_long_gone_for_a_moment_and_back_in_the_same_answers() -> None:
    """The plain steps that measure what one costs are made whatever the budget has: they leave no debt in it."""
    one = Engine(World(), requests=2, step_s=0.1, row_s=0.0, length=5000, deadline_s=DEADLINE_S)
    draft = one.draft()
    one.runs(240.0)
    draft.down()
    one.runs(1.0)
    draft.up()
    one.runs(4 * BACK_S)
    assert one.runs(5.0) > 200
    check(one)


def test_of_so_many_steps_one_is_plain() -> None:
    one = Engine(World(), requests=2, length=5000, deadline_s=DEADLINE_S)
    one.draft()
    one.runs(3.0)
    plain = 0
    for _ in range(20 * PLAIN_EVERY):
        drafted = one.drafted.total()
        one.step()
        plain += one.drafted.total() == drafted
    assert 15 <= plain <= 25
    check(one)


@pytest.mark.parametrize("silent_s", [3.0, 15.0])
def test_stopped_or_swallowed_and_back(silent_s: float) -> None:
    """The same from here: nothing comes, and keepalive ends the stream after 15 s."""
    one = engine()
    draft = one.draft()
    one.runs(3.0)
    draft.lives = False
    steps, began_s = one.steps, one.world.now_s
    one.runs(silent_s)
    stood_s = one.world.now_s - began_s - (one.steps - steps) * 0.0204
    assert stood_s < 0.05 * silent_s + 2 * DEADLINE_S, "silence cost more than the waits that it takes to see it"
    if silent_s >= 15.0:
        draft.down()
        one.runs(1.0)
        draft.up()
    else:
        draft.texts.clear()
        draft.lives = True
    one.runs(BACK_S)
    assert one.runs(1.0) > 20
    check(one)


def test_slow_and_fast_again() -> None:
    one = engine()
    draft = one.draft()
    one.runs(3.0)
    draft.delay_s = 1.0
    steps, began_s = one.steps, one.world.now_s
    one.runs(20.0)
    assert one.world.now_s - began_s < 1.06 * (one.steps - steps) * 0.0205
    draft.delay_s = 0.002
    one.runs(BACK_S)
    assert one.runs(1.0) > 20
    check(one)


def test_lying_and_honest_again() -> None:
    one = engine()
    draft = one.draft(says=wrong)
    one.runs(20.0)
    one.drafted.clear()
    steps = one.steps
    one.runs(10.0)
    assert one.drafted.total() < 0.5 * (one.steps - steps), "little is verified of who lies"
    draft.says = chosen
    one.runs(40.0)  # probes are at most half a minute apart
    assert one.runs(1.0) > 20
    check(one)


def test_a_flood_is_not_waited_for() -> None:
    one = engine()
    draft = one.draft()
    one.runs(3.0)
    session = next(iter(draft.texts))

    def more() -> None:
        if session in draft.texts:
            one.chains.following.received(draft, [draft.growth(session, draft.texts[session], 1)], [])
        else:
            one.chains.following.received(draft, [draft.growth(session, [1, 2, 3], 1)], [])

    one.world.flood = more
    one.runs(10.0)
    check(one)
    one.world.flood = None
    one.runs(BACK_S)
    assert one.runs(1.0) > 20
    check(one)


def test_what_came_while_nobody_looked_is_bounded() -> None:
    one = engine()
    draft = one.draft()
    one.runs(1.0)
    session, text = next(iter(draft.texts.items()))
    for _ in range(50_000):
        one.chains.following.received(draft, [draft.growth(session, text, 1)], [])
    assert one.world.qsize() < 2000
    one.runs(3.0)
    one.chains.following.received(draft, [draft.growth(session, text, 1)] * 4000, [])
    assert one.world.qsize() > 50, "a frame is looked at in parts"
    one.runs(3.0)
    check(one)
    assert one.runs(1.0) > 20


def test_of_two_drafts_one_dies() -> None:
    one = engine(requests=6)
    drafts = [one.draft("a:1"), one.draft("b:1")]
    one.runs(3.0)
    assert all(draft.texts for draft in drafts)
    drafts[0].down()
    assert one.runs(1.0) > 60
    check(one)


def test_a_chain_has_the_length_that_pays_for_its_request() -> None:
    one = Engine(World(), 2, row_s=0.002, length=3000, deadline_s=DEADLINE_S)
    one.says["1"] = lambda tokens: (7 * len(tokens) + tokens[-1]) % 256  # what its draft never foretells
    one.draft()
    one.runs(30.0)
    one.drafted.clear()
    one.steps = 0
    one.runs(10.0)
    assert one.drafted["0"] > 3 * one.steps
    assert one.drafted["1"] < 0.3 * one.steps
    check(one)


@pytest.mark.parametrize(("row_s", "least", "most"), [(0.00002, 1.5, 4.0), (0.01, 0.0, 0.3)])
def test_a_step_costs_what_it_took_whatever_was_guessed(row_s: float, least: float, most: float) -> None:
    """Rows that cost more than a step are not worth a chance of two in three; rows that cost nothing are."""
    one = Engine(World(), 1, step_s=0.002, row_s=row_s, deadline_s=DEADLINE_S)
    one.draft(says=lambda tokens: chosen(tokens) if len(tokens) % 3 else wrong(tokens), delay_s=0.0005)
    one.runs(10.0)
    one.drafted.clear()
    one.steps = 0
    one.runs(2.0)
    assert least <= one.drafted["0"] / one.steps <= most
    check(one)


def test_an_engine_that_stood_still_learns_nothing_from_it() -> None:
    one = Engine(World(), 1, step_s=0.002, row_s=0.00002, length=40, deadline_s=DEADLINE_S)
    one.draft(delay_s=0.0005)
    for _ in range(30):
        one.rests(60.0)
        one.runs(0.05)
    one.drafted.clear()
    one.steps = 0
    one.runs(0.5)
    assert one.drafted["0"] > 2 * one.steps
    check(one)


def test_a_line_for_each_draft_that_begins_or_ceases_to_be_used_and_none_for_requests() -> None:
    with capture_logs() as lines:
        one = engine(requests=6)
        draft = one.draft()
        one.runs(3.0)
        draft.lives = False
        one.runs(10.0)
        draft.texts.clear()
        draft.lives = True
        one.runs(10.0)
    told = [(line["event"], line.get("draft"), line.get("reason")) for line in lines if line["log_level"] == "info"]
    assert told[:2] == [("speculation begins", "a:1", None), ("speculation ends", "a:1", "draft_timeout")]
    assert ("speculation begins", "a:1", None) in told[2:] and len(told) < 10


@pytest.mark.parametrize("delay_s", [0.002, 0.010, 0.018])
def test_whoever_cannot_be_drafted_for_is_not_held_for_less_than_that_costs(delay_s: float) -> None:
    """One of eight is drafted for, and a wait holds all."""
    tokens_per_s = list[float]()
    for drafts in (False, True):
        one = engine(requests=8)
        one.able.add("0")
        if drafts:
            one.draft(delay_s=delay_s)
        one.runs(20.0)
        accepted, steps, began_s = one.accepted, one.steps, one.world.now_s
        one.runs(20.0)
        tokens = one.accepted - accepted + 8 * (one.steps - steps)
        tokens_per_s.append(tokens / (one.world.now_s - began_s))
        check(one)
    assert tokens_per_s[1] > 0.98 * tokens_per_s[0]


SHORT = ((4, 0.05, 0.012, 0.06),  # what vLLM's benchmark met
         (1, 0.05, 0.012, 0.02), (1, 0.3, 0.012, 0.06), (1, 0.7, 0.04, 0.02),
         (4, 0.05, 0.001, 0.02), (4, 0.3, 0.012, 0.02), (4, 0.3, 0.04, 0.06), (4, 0.7, 0.001, 0.06),
         (4, 0.7, 0.04, 0.02),
         (16, 0.05, 0.04, 0.02), (16, 0.3, 0.001, 0.06), (16, 0.7, 0.012, 0.02), (16, 0.7, 0.012, 0.06))


@pytest.mark.parametrize(("requests", "chance", "delay_s", "step_s", "matches"), [
    pytest.param(*case, matches, marks=pytest.mark.long if (place + odd) % 2 else ())  # each in one of the two ways
    for place, case in enumerate(SHORT) for odd, matches in enumerate((1.0, 0.3))])
def test_short_answers_are_as_fast_as_the_better_of_none_and_all(requests: int, chance: float, delay_s: float,
                                                                step_s: float, matches: float) -> None:
    """All begin with what the answers before them have taught, and hold each other while they wait."""
    tokens_per_s = list[float]()
    for drafts, always in ((False, False), (True, True), (True, False)):
        one = Engine(World(), requests, step_s, row_s=0.002, length=90, deadline_s=0.25, always=always)
        if drafts:
            one.draft(says=right(chance), delay_s=delay_s, matches=matches)
            one.runs(20.0)
        tokens_per_s.append(one.tokens_per_s(20.0))
        assert one.right()
    assert tokens_per_s[2] > 0.95 * max(tokens_per_s)


def test_trees_that_come_steps_too_late_are_not_read_for_ever() -> None:
    """The host reads each of them, and all requests stand still meanwhile."""
    tokens_per_s = list[float]()
    for drafts in (False, True):
        one = engine(requests=24)
        if drafts:
            one.draft(says=right(0.6), delay_s=0.045)
            one.runs(10.0)
        tokens_per_s.append(one.tokens_per_s(10.0))
        check(one)
    assert tokens_per_s[1] > 0.93 * tokens_per_s[0]


def test_nonsense_is_told_once() -> None:
    with capture_logs() as lines:
        one = engine(requests=4)
        draft = one.draft()
        one.runs(1.0)
        for session, text in list(draft.texts.items()):
            one.chains.following.received(draft, [draft.growth(session, [*text, *range(9)], 1)], [])
        one.runs(1.0)
    check(one)
    assert [line["draft"] for line in lines if line["log_level"] == "warning"] == ["a:1"]


def test_lines_go_where_vllms_go() -> None:
    code = ("import logging, sys; logging.basicConfig(stream=sys.stdout, format='%(name)s %(levelname)s %(message)s', "
            "level=logging.INFO); from slipstream_vllm.lines import configure_logging; configure_logging(); "
            "from slipstream.observe.log import logger; "
            "logger('following').info('speculation ends', draft='a:1', prompt='secret'); logger('x').debug('unseen')")
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300,
                           env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
    said, = found.stdout.splitlines()
    assert said.startswith("vllm.slipstream INFO") and 'event="speculation ends"' in said and "draft=a:1" in said
    assert "secret" not in said
