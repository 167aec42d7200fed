"""Following beside an engine that is not ours: a function of the text, on a thread without an event loop."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from random import Random

import numpy as np
import pytest

from draft_service.worker import DraftWorker
from slipstream.base.config import PolicySection, TargetSection
from slipstream.base.errors import RemoteProtocolError
from slipstream.decision.beliefs import StepCosts
from slipstream.decision.decide import Mode
from slipstream.drafting.ngram import ORDERS, NgramDrafter
from slipstream.following.followed import LOOKED_UP, MAX_CATCH_UP, DraftWait, Followed, Step, Verified
from slipstream.following.following import Following, Inbox
from slipstream.following.pool import no_feature_rows
from slipstream.observe.metrics import TargetMetrics
from slipstream.protocol.messages import (
    PROTOCOL_VERSION,
    Close,
    Commit,
    DraftBound,
    DraftHello,
    Drop,
    Features,
    FeatureSpec,
    Growth,
    Open,
    TargetHello,
)
from slipstream.protocol.requests import Sampling
from slipstream.protocol.session import PromptLookup, TargetState
from slipstream.protocol.tree import DraftTree, walk
from slipstream.wire.link import MAX_BYTES
from tests.pair import STUBBORN, local_link_to

PROMPT = list(b"one two three one two three")
HELLO = TargetHello(PROTOCOL_VERSION, 0, "function", 260, "", 4, 2, 4096)
SILENT = DraftHello(PROTOCOL_VERSION, 0, "silent", 0, "", None, 0, 4096, 16, 8)
SPEC = FeatureSpec((1,), 2, "float32")
STEP_S = 0.002
PATIENT = PolicySection(always=True, deadline_max_s=30.0)  # with a draft in a thread, on a machine that has work


def chosen(tokens: Sequence[int]) -> int:
    """The engine: it says its prompt again and again, and every seventh token is another one."""
    token = PROMPT[len(tokens) % len(PROMPT)]
    return 250 - token if len(tokens) % 7 == 0 else token


def plain(count: int) -> list[int]:
    tokens = list(PROMPT)
    for _ in range(count):
        tokens.append(chosen(tokens))
    return tokens[len(PROMPT) :]


def by_tree(one: Followed, tree: DraftTree) -> Verified:
    tokens = one.side.tokens
    choices = [chosen([*tokens, *[tree.tokens[at] for at in tree.path(node)[1:]]]) for node in range(len(tree))]
    verdict = walk(tree, choices)
    return Verified(one.session, verdict.tokens, len(tree) - 1, verdict.num_accepted,
                    ranks=None if tree.is_chain else verdict.path[1:])


def by_chain(one: Followed, tree: DraftTree) -> Verified:
    tokens, chain, taken = one.side.tokens, one.chain(4), list[int]()
    while len(taken) < len(chain) and chosen([*tokens, *taken]) == chain[len(taken)]:
        taken.append(chain[len(taken)])
    return Verified(one.session, (*taken, chosen([*tokens, *taken])), len(chain), len(taken))


@dataclass(eq=False)
class Heard:
    """A link to a drafter that never answers."""

    address: str = "heard"
    items: list[DraftBound] = field(default_factory=list)

    def send(self, items: Sequence[DraftBound]) -> None:
        self.items += items


class Waits(SimpleQueue[Callable[[], None] | None]):
    """An inbox's queue and its clock: who waits for what is not there lets that time pass."""

    now_s = 0.0

    def get(self, block: bool = True, timeout: float | None = None) -> Callable[[], None] | None:
        if block and self.empty():
            self.now_s += timeout or 0.0
        return super().get(block=False)


def following(gives: Callable[[FeatureSpec], bool] | None = None, lookup: bool = False,
              world: Waits | None = None) -> Following:
    policy = STUBBORN if world is not None else PATIENT
    section = TargetSection(policy=policy, drafts=(), prompt_lookup=lookup)
    costs, metrics = StepCosts({1: STEP_S, 64: 2 * STEP_S}), TargetMetrics("function")
    if world is not None:
        return Following(section, costs, metrics, gives or no_feature_rows, clock=lambda: world.now_s,
                         inbox=Inbox(lambda: world.now_s, world))
    return Following(section, costs, metrics, gives or no_feature_rows)


def followed_session() -> tuple[Waits, Heard, Following, Followed]:
    """A session that a silent drafter follows, and the clock, the link and the target's side of it."""
    world, link = Waits(), Heard()
    target = following(world=world)
    target.link_up(link, SILENT)
    target.inbox.drain()
    one = target.open(1, PROMPT, len(PROMPT), Sampling(), 100)
    target.begin([one], 0.0)
    return world, link, target, one


@contextmanager
def drafted(target: Following) -> Iterator[None]:
    worker = DraftWorker(NgramDrafter(8, orders=(1, *ORDERS)), "", 30.0)
    worker.start()
    try:
        with local_link_to(HELLO, target, worker):
            target.inbox.drain()
            yield
    finally:
        worker.stop()


def answer(target: Following, sessions: Sequence[Followed], count: int,
           verify: Callable[[Followed, DraftTree], Verified]) -> int:
    """Play the engine until each has so many tokens more. Returns how many of them were drafted."""
    accepted, left = 0, list(sessions)
    target.begin(sessions, time.monotonic())
    target.flush()
    while left:
        trees = target.take(left, within_s=PATIENT.deadline_max_s)
        began_s = time.monotonic()
        batch = [verify(one, tree) for one, tree in zip(left, trees, strict=True)]
        rows = len(batch) + sum(one.drafted for one in batch)
        target.committed(batch, Step(began_s, STEP_S, rows, len(batch), rows - len(batch)))
        target.flush()
        accepted += sum(one.accepted for one in batch)
        left = [one for one in left if one.side.num_output < count]
    for one in sessions:
        target.close(one)
    target.flush()
    return accepted


@pytest.mark.parametrize("lookup", [False, True])
@pytest.mark.parametrize("verify", [by_tree, by_chain])
def test_answers_are_the_engines_own_and_drafts_are_used(verify: Callable[[Followed, DraftTree], Verified],
                                                         lookup: bool) -> None:
    target = following(lookup=lookup)
    with drafted(target):
        sessions = [target.open(number, PROMPT, len(PROMPT), Sampling(), len(PROMPT) + 200) for number in range(1, 4)]
        accepted = answer(target, sessions, 60, verify)
    assert accepted > 60, "hardly any draft token was used"
    for one in sessions:
        assert one.side.tokens[len(PROMPT) :][:60] == plain(60)


def test_a_text_foretells_from_all_of_it_while_drafts_are_off() -> None:
    target, foretold = following(lookup=True), 0
    one = target.open(1, PROMPT, len(PROMPT), Sampling(), limit=400)
    target.begin([one], 0.0)
    for number in range(60):
        if number in (10, 15, 40, 45):
            one.allow(number in (15, 45), number * STEP_S)
        (tree,) = target.take([one])
        target.committed([by_tree(one, tree)], Step(number * STEP_S, STEP_S, len(tree), 1, len(tree) - 1))
        chain = one.chain(4)
        assert chain == PromptLookup(one.side.tokens).chain(4)[0][: len(chain)]
        assert one.policy.allowed is not (10 <= number < 15 or 40 <= number < 45)
        foretold += bool(chain) and not one.policy.allowed
    assert foretold >= 6, "of ten rounds without drafts"


def test_who_wants_plain_decoding_is_not_looked_up_for() -> None:
    target = following(lookup=True)
    one = target.open(1, PROMPT, len(PROMPT), Sampling(), limit=400, speculate=False)
    target.begin([one], 0.0)
    for number in range(60):
        (tree,) = target.take([one])
        assert len(tree) == 1
        target.committed([by_tree(one, tree)], Step(number * STEP_S, STEP_S, 1, 1))


def test_who_wants_plain_decoding_has_no_drafter_that_reads_its_text() -> None:
    target, link = following(), Heard()
    target.link_up(link, SILENT)
    target.inbox.drain()
    one = target.open(1, PROMPT, len(PROMPT), Sampling(), 100, speculate=False)
    target.begin([one], 0.0)
    for number in range(3):
        target.committed([Verified(1, (5,), 0, 0)], Step(number * 10.0, STEP_S, 1, 1))
    assert one.link is None and not target.flush()


def test_what_a_former_drafter_says_is_not_the_new_ones() -> None:
    world, former, new = Waits(), Heard("former"), Heard("new")
    target = following(world=world)
    target.link_up(former, SILENT)
    target.inbox.drain()
    one = target.open(1, PROMPT, len(PROMPT), Sampling(), 100)
    target.begin([one], 0.0)
    target.link_up(new, SILENT)
    target.inbox.drain()
    target.received(former, [Drop(1, "draining", len(PROMPT))], [])
    target.inbox.drain()
    target.committed([Verified(1, (5,), 0, 0)], Step(0.0, STEP_S, 1, 1))
    assert one.link is new
    target.received(former, [chain_of(one, [6, 7])], [(1, RemoteProtocolError("growth.ids", "not positive"))])
    target.received(former, [Drop(1, "failed", one.side.base)], [])
    target.inbox.drain()
    assert one.link is new and one.should_wait(STEP_S) and len(one.side.tree) == 1


def test_nobody_waits_longer_than_told_and_never_where_nobody_drafts() -> None:
    world = Waits()
    target = following(world=world)
    (alone,) = [target.open(1, PROMPT, len(PROMPT), Sampling(), 100)]
    target.begin([alone], world.now_s)
    assert len(target.take([alone], within_s=60.0)[0]) == 1
    assert world.now_s == 0.0, "nobody drafts, and it waited"
    target.link_up(Heard(), SILENT)
    target.inbox.drain()
    one = target.open(2, PROMPT, len(PROMPT), Sampling(), 100)
    target.begin([one], world.now_s)
    assert one.should_wait(world.now_s) and one.wait.deadline_s - world.now_s == STUBBORN.deadline_max_s
    assert len(target.take([one], within_s=0.0)[0]) == 1
    assert world.now_s == 0.0, "it waited though it was told not to"
    target.take([one], within_s=0.05)
    assert world.now_s == pytest.approx(0.05), "it waited until the deadline of the policy"


def chain_of(one: Followed, tokens: Sequence[int]) -> Growth:
    """What a drafter says that expects ``tokens`` next."""
    ids, base = np.arange(1, len(tokens) + 1, dtype=np.int32), one.side.base
    return Growth(one.session, base, ids, np.array([-base, *ids[:-1]], np.int32), np.array(tokens, np.int32),
                  np.zeros(len(tokens), np.float32))


def test_nothing_is_verified_behind_the_last_token() -> None:
    """A model may have no position for it."""
    world, link = Waits(), Heard()
    target = following(world=world)
    target.link_up(link, SILENT)
    target.inbox.drain()
    one = target.open(1, PROMPT, len(PROMPT), Sampling(), len(PROMPT) + 3)
    target.begin([one], 0.0)
    target.received(link, [chain_of(one, [5, 6, 7, 8])], [])
    assert target.take([one])[0].tokens == [PROMPT[-1], 5, 6] and one.chain(9) == [5, 6]


def test_who_may_not_draft_any_more_neither_waits_nor_verifies() -> None:
    _, link, target, one = followed_session()
    assert one.should_wait(0.0)
    one.allow(False, 0.0)
    assert one.link is None and not one.should_wait(0.0) and one.decision.why == "forbidden"
    target.flush()
    assert [type(item) for item in link.items] == [Open, Close]


def test_what_a_text_foretells_counts_as_that_where_drafts_are_forbidden_meanwhile() -> None:
    target, outcomes = following(lookup=True), list[str]()
    one = target.open(1, PROMPT, len(PROMPT), Sampling(), limit=400, speculate=False)
    target.begin([one], 0.0)
    one.allow(True, 0.0)
    for number in range(40):
        (tree,) = target.take([one])
        one.allow(len(tree) == 1, number * STEP_S)  # its chain is in the engine
        (record,) = target.committed([by_tree(one, tree)], Step(number * STEP_S, STEP_S, len(tree), 1, len(tree) - 1))
        outcomes += [record.outcome] * record.drafted
    assert outcomes and set(outcomes) == {LOOKED_UP}


def test_no_draft_is_wanted_for_a_last_token() -> None:
    world, link = Waits(), Heard()
    target = following(world=world)
    target.link_up(link, SILENT)
    target.inbox.drain()
    one, two = (target.open(number, PROMPT, len(PROMPT), Sampling(), len(PROMPT) + number) for number in (1, 2))
    target.begin([one, two], 0.0)
    target.flush()
    assert one.link is None and [item.session for item in link.items] == [2], "nobody reads a prompt for nothing"
    assert two.should_wait(0.0)
    target.committed([Verified(2, (5,), 0, 0)], Step(0.0, STEP_S, 1, 1))
    target.flush()
    assert [type(item) for item in link.items] == [Open, Commit, Close] and not two.should_wait(STEP_S)


def test_rows_are_asked_for_and_sent_in_order() -> None:
    asked = list[FeatureSpec]()

    def gives(spec: FeatureSpec) -> bool:
        asked.append(spec)
        return True

    target, link = following(gives), Heard()
    target.link_up(link, DraftHello(PROTOCOL_VERSION, 0, "head", 0, "", SPEC, 0, 4096, 16, 8))
    target.inbox.drain()
    one = target.open(1, PROMPT, len(PROMPT), Sampling(), 100)
    assert asked == [SPEC] and one.missing_rows_from(8) is None
    target.begin([one], 0.0)
    assert one.missing_rows_from(8) == 0
    states = np.arange(2 * 600, dtype=np.float32).reshape(600, 2)
    count = len(PROMPT) - 1
    one.send_rows(0, count, states[:count].tobytes())
    assert one.missing_rows_from(count) is None and one.missing_rows_from(count + 1) == count
    newest = states[count : count + 1].tobytes()
    target.committed([Verified(1, (5,), 0, 0, rows=newest)], Step(0.0, STEP_S, 1, 1))
    target.close(one)
    target.flush()
    kinds = [type(item) for item in link.items]
    assert kinds == [Open, Features, Commit, Close]
    features, commit = link.items[1], link.items[2]
    assert isinstance(features, Features) and (features.start, features.num_rows) == (0, count)
    assert features.rows == states[:count].tobytes()
    assert isinstance(commit, Commit) and commit.features is not None
    assert (commit.features.start, commit.features.rows) == (commit.base - 1, newest)


def test_rows_of_all_texts_at_once_do_not_end_the_stream() -> None:
    """A draft that comes back to a full house is told all texts in one frame: of what is too much the newest
    rows of each are told."""
    target, link, wide = following(lambda _: True), Heard(), FeatureSpec((1,), 1 << 18, "float32")
    target.link_up(link, DraftHello(PROTOCOL_VERSION, 0, "head", 0, "", wide, 0, 4096, 16, 64))
    target.inbox.drain()
    ones = [target.open(number, PROMPT, len(PROMPT), Sampling(), 100) for number in range(16)]
    target.begin(ones, 0.0)
    count = len(PROMPT) - 1
    for one in ones:
        if (start := one.missing_rows_from(count)) is not None:
            one.send_rows(start, count - start, bytes(count - start << 20))
        assert one.missing_rows_from(count) is None, "they are not asked for again"
    target.flush()
    told = [(item.start + item.num_rows, len(item.rows)) for item in link.items if isinstance(item, Features)]
    assert {end for end, _ in told} == {count}
    assert MAX_BYTES / 4 < sum(size for _, size in told) <= MAX_BYTES / 2
    assert sum(isinstance(item, Open) for item in link.items) == len(told) == len(ones)
    assert len({size for _, size in told}) == 1, "the first had nearly all of it, the others nothing"
    assert ones[0].missing_rows_from(count + 20) == count, "the next frame has room again"


def test_of_a_long_text_the_newest_rows_are_told() -> None:
    target, link, wide = following(lambda _: True), Heard(), FeatureSpec((1,), 1 << 18, "float32")
    target.link_up(link, DraftHello(PROTOCOL_VERSION, 0, "head", 0, "", wide, 0, 4096, 16, 8))
    target.inbox.drain()
    one = target.open(1, [5] * 1000, 1000, Sampling(), 1100)
    target.begin([one], 0.0)
    wanted = one.missing_rows_from(1000)
    assert wanted is not None and 1000 - (MAX_BYTES >> 20) / 2 <= wanted < 1000 - (MAX_BYTES >> 20) / 4


def test_rows_are_told_of_what_a_drafter_looks_at() -> None:
    target = following(lambda _: True)
    target.link_up(Heard(), DraftHello(PROTOCOL_VERSION, 0, "head", 0, "", SPEC, 0, 100, 16, 8))
    target.inbox.drain()
    one = target.open(1, [5] * 1000, 1000, Sampling(), 1100)
    target.begin([one], 0.0)
    assert one.missing_rows_from(999) == 900


def test_a_draft_that_others_have_filled_is_not_told_every_text() -> None:
    """Each new answer sent it its whole text, to be refused."""
    world, link = Waits(), Heard()
    target = following(world=world)
    target.link_up(link, DraftHello(PROTOCOL_VERSION, 0, "ngram", 0, "", None, 0, 4096, 16, 64))
    target.inbox.drain()

    def opened(session: int) -> bool:
        target.begin([target.open(session, PROMPT, len(PROMPT), Sampling(), 100)], world.now_s)
        target.flush()
        return any(isinstance(item, Open) and item.session == session for item in link.items)

    def refuse(session: int) -> None:
        target.received(link, [Drop(session, "capacity", len(PROMPT))], [])
        target.inbox.drain()

    assert opened(1) and opened(2)
    refuse(2)
    assert not opened(3) and not opened(4)
    world.now_s += 1.01
    assert opened(5) and opened(6), "others may have left it meanwhile"
    refuse(6)
    assert not opened(7)
    target.close(target.sessions[1])
    assert opened(8), "where one of ours has left there is room"


@pytest.mark.parametrize("tokens", [0, 3])
def test_whom_a_full_draft_gives_up_another_takes_at_the_next_token(tokens: int) -> None:
    """It decoded plainly for a second and more, beside a draft that had room, and then asked the full one again."""
    world, full, free = Waits(), Heard("full"), Heard("free")
    target = following(world=world)

    def link_up(link: Heard) -> None:
        target.link_up(link, DraftHello(PROTOCOL_VERSION, 0, "ngram", 0, "", None, 0, 4096, 16, 64))
        target.inbox.drain()

    def commit() -> None:
        target.committed([Verified(1, (5,), 0, 0)], Step(world.now_s, STEP_S, 1, 1))
        world.now_s += STEP_S

    link_up(full)
    one = target.open(1, PROMPT, len(PROMPT), Sampling(), 100)
    target.begin([one], world.now_s)
    for _ in range(tokens):
        commit()
    link_up(free)
    target.received(full, [Drop(1, "capacity", one.side.base)], [])
    target.inbox.drain()
    assert one.link is None and one.policy.mode is Mode.SPECULATE
    commit()
    assert one.link is free


def test_an_engine_without_rows_refuses_a_drafter_that_reads_them() -> None:
    target, link = following(), Heard()
    target.link_up(link, DraftHello(PROTOCOL_VERSION, 0, "head", 0, "", SPEC, 0, 4096, 16, 8))
    target.inbox.drain()
    one = target.open(1, PROMPT, len(PROMPT), Sampling(), 100)
    target.begin([one], 0.0)
    assert one.link is None and not target.flush() and not target.pool.has_room(0.0)


def test_a_draft_that_comes_and_goes_while_nobody_looks_is_taken_once_and_holds_no_memory() -> None:
    """An engine with nothing to do looks at nothing, be it for days."""
    asked = list[FeatureSpec]()

    def gives(spec: FeatureSpec) -> bool:
        asked.append(spec)
        return True

    world, link = Waits(), Heard()
    target = following(gives, world=world)
    hello = DraftHello(PROTOCOL_VERSION, 0, "head", 0, "", SPEC, 0, 4096, 16, 8)
    held = sys.getrefcount(hello)
    for _ in range(50):
        target.link_up(link, hello)
        target.received(link, [Drop(1, "gap")], [])  # it is asked nothing, and may say a little
        target.link_leaving(link, True)
        target.link_leaving(link, False)
        target.link_down(link, "unavailable")
    assert sys.getrefcount(hello) == held, "its hello may have all weights of a projection"
    assert world.qsize() == 1
    target.link_up(link, hello)
    target.inbox.drain()
    assert asked == [SPEC] and target.pool.is_usable(link)
    one = target.open(1, PROMPT, len(PROMPT), Sampling(), 100)
    target.begin([one], 0.0)
    assert one.link is link
    target.link_down(link, "unavailable")
    target.link_up(link, hello)  # before anybody looks: its sessions are lost all the same
    target.inbox.drain()
    assert one.link is None and target.pool.is_usable(link)
    target.link_down(link, "unavailable")
    target.inbox.drain()
    assert not target.pool.is_usable(link)


def test_drafts_are_counted_before_an_idle_engine_looks() -> None:
    """Inside vLLM nothing looks before the first request: for as long the page said that no draft was connected. Those
    that stand aside are left out as soon as it does look."""
    metrics, hello = TargetMetrics("function"), DraftHello(PROTOCOL_VERSION, 0, "head", 0, "", SPEC, 0, 4096, 16, 8)
    target = Following(TargetSection(drafts=()), StepCosts({1: STEP_S}), metrics, lambda _: True)

    def connected() -> float:
        page = metrics.registry.page("")[1].decode()
        return float(next(line for line in page.splitlines() if line.startswith("slipstream_drafts_con")).split()[-1])

    links = [Heard(str(number)) for number in range(3)]
    for number, link in enumerate(links, 1):
        target.link_up(link, hello if number < 3 else replace(hello, features=replace(SPEC, layers=(0,))))
        assert connected() == number
    target.inbox.drain()
    assert connected() == 2, "one stands aside"
    target.link_down(links[2], "unavailable")
    target.inbox.drain()
    assert connected() == 2
    for number, link in enumerate(links[:2]):
        target.link_down(link, "unavailable")
        assert connected() == 1 - number


def test_nonsense_parts_the_drafter_and_a_lost_one_costs_nothing() -> None:
    target, link = following(), Heard()
    target.link_up(link, SILENT)
    target.inbox.drain()
    one, other = (target.open(number, PROMPT, len(PROMPT), Sampling(), 100) for number in (1, 2))
    target.begin([one, other], 0.0)
    ahead = Growth.empty(1, len(PROMPT) + 3)
    target.received(link, [ahead], [(2, RemoteProtocolError("growth.ids", "not positive"))])
    target.inbox.drain()
    assert one.link is None and other.link is None
    target.flush()
    assert [type(item) for item in link.items] == [Open, Open, Close, Close]
    again = target.open(3, PROMPT, len(PROMPT), Sampling(), 100)
    target.begin([again], 0.0)
    assert again.link is link
    target.link_down(link, "cut")
    target.inbox.drain()
    assert again.side.state is TargetState.ALONE and not target.flush()
    assert again.link is None and not again.should_wait(0.0) and len(again.take(again.num_rows)) == 1


@pytest.mark.parametrize("gone", ["put back", "to be moved"])
def test_who_has_no_drafter_keeps_nobody_else_from_being_grown_ahead(gone: str) -> None:
    target, links = following(), [Heard(), Heard()]
    for link, room in zip(links, (2, 6), strict=True):
        target.link_up(link, replace(SILENT, run_ahead=16, max_sessions=room))
        target.inbox.drain()
        ones = [target.open(room + number, PROMPT, len(PROMPT), Sampling(), 100) for number in range(room)]
        target.begin(ones, 0.0)
    target.flush()
    kept = [one for one in target.sessions.values() if one.link is links[0]]
    assert len(kept) == 2
    if gone == "put back":
        for one in ones:
            one.pause()
    else:
        target.link_up(Heard(), SILENT)
        target.link_down(links[1], "cut")
        target.inbox.drain()
    target.committed([Verified(one.session, (5,), 0, 0) for one in kept], Step(1.0, STEP_S, 2, 2))
    target.flush()
    assert [item.ahead for item in links[0].items if isinstance(item, Commit)] == [True, True]


def test_a_draft_that_went_often_is_tried_as_soon_as_it_is_back() -> None:
    """Each time that it goes it is looked for later; that it is there again is known."""
    world, link = Waits(), Heard()
    target = following(world=world)
    one = target.open(1, PROMPT, len(PROMPT), Sampling(), 100)
    target.begin([one], 0.0)

    def follows(at_s: float) -> bool:
        world.now_s = at_s
        target.committed([Verified(1, (5,), 0, 0)], Step(at_s - STEP_S, STEP_S, 1, 1))
        return one.link is link

    for gone_s in (40.0, 80.0, 120.0, 160.0):
        target.link_up(link, SILENT)
        target.inbox.drain()
        assert follows(gone_s)
        target.link_down(link, "cut")
        target.inbox.drain()
        assert one.policy.mode is Mode.PLAIN, "nobody else is there"
    target.link_up(link, SILENT)
    target.inbox.drain()
    assert not follows(161.0) and follows(163.0), "it would be looked for after eight seconds"


def test_who_drops_what_it_was_just_given_has_no_text_again_for_a_second() -> None:
    world, link, target, one = followed_session()

    def follows(at_s: float) -> bool:
        world.now_s = at_s
        target.committed([Verified(1, (5,), 0, 0)], Step(at_s - STEP_S, STEP_S, 1, 1))
        return one.link is link

    def drops(at_s: float) -> None:
        world.now_s = at_s
        target.received(link, [Drop(1, "gap", one.side.base)], [])
        target.inbox.drain()
        assert one.link is None

    drops(0.1)
    assert not follows(0.5) and not follows(0.9) and follows(1.2)
    drops(40.0)
    assert follows(41.0), "it had it for long"


def test_a_lease_that_ends_in_a_long_prompt_costs_no_speculation() -> None:
    target, link = following(), Heard()
    target.link_up(link, SILENT)
    target.inbox.drain()
    one = target.open(1, PROMPT, len(PROMPT), Sampling(), 100)
    target.begin([one], 0.0)
    target.received(link, [Drop(1, "expired")], [])
    target.inbox.drain()
    assert one.link is None and one.policy.mode is Mode.SPECULATE
    target.committed([Verified(1, (5,), 0, 0)], Step(60.0, STEP_S, 1, 1))
    target.flush()
    assert one.link is link and [type(item) for item in link.items] == [Open, Open]
    target.received(link, [Drop(1, "expired")], [])
    target.inbox.drain()
    assert one.link is None and one.policy.mode is Mode.PLAIN, "behind its first token it is spoken of all the time"


def test_a_drop_that_crossed_a_new_opening_leaves_it_open() -> None:
    """The draft holds that one, and would hold it for a lease, with nobody who speaks of it."""
    target, link = following(), Heard()
    target.link_up(link, SILENT)
    target.inbox.drain()
    one = target.open(1, PROMPT, len(PROMPT), Sampling(), 100)
    target.begin([one], 0.0)
    one.pause()
    target.committed([Verified(1, (5,), 0, 0)], Step(1.0, STEP_S, 1, 1))  # it is opened again
    target.flush()
    assert [type(item) for item in link.items] == [Open, Close, Open]
    target.received(link, [Drop(1, "failed", len(PROMPT))], [])
    target.inbox.drain()
    assert one.link is link
    target.received(link, [Drop(1, "failed", len(PROMPT) + 1)], [])
    target.inbox.drain()
    assert one.link is None


@pytest.mark.parametrize(("reason", "room"), [("failed", True), ("draining", False)])
def test_who_drops_a_session_has_its_place_again_unless_it_drains(reason: str, room: bool) -> None:
    target, link = following(), Heard()
    target.link_up(link, replace(SILENT, max_sessions=1))
    target.inbox.drain()
    one, two = (target.open(number, PROMPT, len(PROMPT), Sampling(), 100) for number in (1, 2))
    target.begin([one], 0.0)
    assert not target.pool.has_room(0.0)
    target.received(link, [Drop(1, reason, len(PROMPT))], [])
    target.inbox.drain()
    target.begin([two], 0.0)
    assert one.link is None and (two.link is link) is room


def test_the_time_that_an_answer_was_put_back_is_no_latency_of_its_drafter() -> None:
    world, link = Waits(), Heard()
    target = following(world=world)
    target.link_up(link, SILENT)
    target.inbox.drain()
    one = target.open(1, PROMPT, len(PROMPT), Sampling(), 100)

    def growth_of(base: int, at_s: float) -> float | None:
        world.now_s = at_s
        target.received(link, [Growth.empty(1, base)], [])
        target.inbox.drain()
        return one.wait.take_latency_s()

    target.begin([one], 0.0)
    for number in range(3):
        target.committed([Verified(1, (5,), 0, 0)], Step(float(number), STEP_S, 1, 1))
    base = one.side.base
    one.pause()
    target.begin([one], 60.0)
    target.committed([Verified(1, (5,), 0, 0)], Step(60.0, STEP_S, 1, 1))
    assert growth_of(base, 61.0) is None, "it was asked at 2 s, of who was left since"
    target.committed([Verified(1, (5,), 0, 0)], Step(61.0, STEP_S, 1, 1))
    assert growth_of(base + 2, 61.5) == pytest.approx(0.5 - STEP_S)


def test_a_wait_lasts_from_the_commit_to_the_first_answer_or_the_deadline() -> None:
    wait = DraftWait()
    wait.committed(1.0, 0.5, None)
    for at_s in (1.2, 1.4):
        wait.received(at_s, 7, 7, joined=True, answered=True)
    assert wait.waited_s(2.0) == pytest.approx(0.2)
    wait.committed(3.0, 0.5, None)
    assert wait.waited_s(3.3) == pytest.approx(0.3) and wait.waited_s(9.0) == pytest.approx(0.5)


def test_before_the_first_token_a_wait_lasts_from_the_first_step_that_left_it_out() -> None:
    wait = DraftWait()
    for at_s in (5.0, 6.0):
        wait.skip(at_s, at_prompt=True)
    assert wait.committed_s == 5.0
    wait.committed(7.0, 0.5, None)
    wait.skip(7.1, at_prompt=False)
    assert wait.committed_s == 7.0


def test_what_tells_a_latency_is_an_answer_to_a_commit_of_late_that_left_nothing() -> None:
    wait = DraftWait()
    wait.first_exchange = False
    wait.committed(1.0, 0.5, 10)
    wait.committed(2.0, 0.5, 11)
    wait.received(2.1, 10, 11, joined=True, answered=False)
    assert wait.take_latency_s() == pytest.approx(1.1)
    wait.received(2.2, 11, 11, joined=True, answered=True)
    assert wait.take_latency_s() is None, "its drafter had a tree there: one more level is not a whole one"
    for base in range(12, 22):
        wait.committed(float(base), 0.5, base)
    wait.received(22.0, 12, 21, joined=False, answered=False)
    assert wait.take_latency_s() is None, "long ago"
    wait.received(22.0, 21, 21, joined=True, answered=True)
    assert wait.take_latency_s() == pytest.approx(1.0)


@pytest.mark.parametrize(("tokens", "much"), [(MAX_CATCH_UP, False), (MAX_CATCH_UP + 1, True)])
def test_who_has_much_to_catch_up_with_is_timed_as_at_its_first_exchange(tokens: int, much: bool) -> None:
    wait = DraftWait()
    wait.first_exchange, wait.num_since_request = False, tokens
    wait.requested(1.0, 4)
    assert (wait.first_exchange, wait.num_since_request) == (much, 0)


READER = replace(SILENT, drafter="head", vocab_size=260)


class Reading:
    """One answer after another beside ``link``, a drafter that has each text to read."""

    def __init__(self, hello: DraftHello = READER, lookup: bool = False) -> None:
        self.world, self.link, self._numbers = Waits(), Heard(), 0
        self.target = Following(TargetSection(drafts=(), prompt_lookup=lookup), StepCosts({1: STEP_S, 64: 2 * STEP_S}),
                                TargetMetrics("function"), clock=lambda: self.world.now_s,
                                inbox=Inbox(lambda: self.world.now_s, self.world))
        self.target.link_up(self.link, hello)
        self.target.inbox.drain()

    @property
    def latency_s(self) -> float | None:
        return self.target._beliefs.latency.mean_s

    def opened(self) -> Followed:
        self._numbers += 1
        one = self.target.open(self._numbers, [*PROMPT, 5], len(PROMPT), Sampling(), 4096)
        self.target.begin([one], self.world.now_s)
        return one

    def step(self, one: Followed) -> bool:
        """A step without drafts. Returns whether the session waits behind it."""
        began_s, self.world.now_s = self.world.now_s, self.world.now_s + STEP_S
        self.target.committed([Verified(one.session, (5,), 0, 0)], Step(began_s, STEP_S, 1, 1))
        self.target.flush()
        return one.should_wait(self.world.now_s)

    def says(self, one: Followed, tokens: Sequence[int]) -> None:
        count, base = len(tokens), one.side.base
        ids = np.arange(1000 * base, 1000 * base + count, dtype=np.int32)
        self.target.received(self.link, [Growth(one.session, base, ids, np.full(count, -base, np.int32),
                                                np.array(tokens, np.int32), np.zeros(count, np.float32))], [])
        self.target.inbox.drain()


def test_nobody_waits_for_a_drafter_that_still_reads_and_its_reading_is_no_latency() -> None:
    """Each answer waited once in vain, and what others believed of exchanges was the time for reading."""
    beside = Reading()
    one = beside.opened()
    for _ in range(100):
        assert not beside.step(one), "plain steps make tokens meanwhile"
        beside.says(one, [])  # of a long text it has read a part
    assert not beside.step(one)
    beside.says(one, [7])
    assert beside.latency_s is None
    assert beside.step(one) and one.wait.deadline_s > beside.world.now_s
    beside.world.now_s += 0.001
    beside.says(one, [7])
    beside.step(one)
    assert beside.latency_s == pytest.approx(0.001)
    two = beside.opened()
    assert not any(beside.step(two) for _ in range(90)), "others have read for 0.2 s"
    assert any(beside.step(two) for _ in range(12)), "its first words are due"


def test_what_was_read_while_the_engine_computed_the_prompt_tells_nothing_of_reading_behind_it() -> None:
    """It came in the step that ended the prompt, and counted as less than no time: the next answer waited in vain."""
    beside = Reading()
    one = beside.opened()
    beside.world.now_s = 0.5
    beside.target.received(beside.link, [chain_of(one, [5])], [])
    beside.world.now_s = 1.0
    assert not beside.step(one)
    beside.target.inbox.drain()
    two = beside.opened()
    assert not any(beside.step(two) for _ in range(20)), "nobody knows how long it reads"
    beside.says(two, [7])
    assert beside.target._beliefs.reading.mean_s == pytest.approx(19 * STEP_S)


def test_what_a_target_computes_again_before_a_token_is_no_reading_of_its_drafter() -> None:
    """An answer that was put back, or begun elsewhere: its drafter was overdue, or waited for in vain, at once."""
    beside = Reading()
    for back in (True, False):
        if back:
            one = beside.opened()
            beside.step(one)
            one.pause()
        else:
            one = beside.target.open(9, [*PROMPT, 5, 5, 5], len(PROMPT), Sampling(), 4096)
        beside.target.begin([one], beside.world.now_s)
        beside.world.now_s += 2.0
        assert not beside.step(one)
        waits = [beside.step(one) for _ in range(20)]
        assert not back or not any(waits), "nobody knows how long it reads"
        assert not one.policy._state.num_silent and one.policy.mode is Mode.SPECULATE
        beside.says(one, [7])
        assert beside.target._beliefs.reading.mean_s == pytest.approx(20 * STEP_S)
        beside.target.close(one)


@pytest.mark.parametrize(("steps", "slow"), [(50, False), (150, True)])
def test_an_answer_that_ends_before_a_text_can_be_read_tells_nothing_of_its_drafter(steps: int, slow: bool) -> None:
    """Answers that drafted well left it for another, to have their texts read there."""
    beside, other = Reading(), Heard("other")
    one, short = beside.opened(), beside.opened()
    for _ in range(100):
        beside.step(one)
    beside.says(one, [7])  # 0.2 s
    short.pause()
    beside.target.begin([short], beside.world.now_s)
    for _ in range(steps):
        beside.step(short)
    beside.target.link_up(other, READER)
    beside.target.inbox.drain()
    beside.target.pool.observe_latency(other, 0.005, beside.world.now_s)
    beside.target.close(short)
    assert beside.target.pool.is_slow(beside.link, False, beside.world.now_s) is slow


def test_a_drafter_that_is_asked_for_nothing_is_not_judged_by_it() -> None:
    """While the text's own chain is verified, it is told of the text, and has nothing to say."""
    beside, text, asked = Reading(lookup=True), list(range(60)) * 200, list[int]()
    told = list[int]()
    one = beside.target.open(1, text[:120], 120, Sampling(), len(text))
    beside.target.begin([one], beside.world.now_s)
    for _ in range(700):
        (tree,), began_s = beside.target.take([one]), beside.world.now_s
        at, count = len(one.side.tokens), len(tree) - 1
        assert tree.tokens[1:] == text[at : at + count]
        beside.world.now_s += STEP_S
        verified = Verified(one.session, tuple(text[at : at + count + 1]), count, count)
        beside.target.committed([verified], Step(began_s, STEP_S, len(tree), 1, count))
        beside.target.flush()
        asked.append(one.decision.num_wanted)
        told.append(len(beside.link.items))
    assert not any(asked) and beside.world.now_s > 1.0
    assert told[600] > 590, "it is told of a few commits at once"
    beside.target.close(one)
    assert beside.target.pool._members[beside.link].latency_s == 0 and beside.target._beliefs.reading.mean_s is None


def test_an_n_gram_drafter_has_nothing_to_read() -> None:
    beside = Reading(SILENT)
    one = beside.opened()
    assert not one.should_wait(beside.world.now_s)
    assert beside.step(one)


def test_a_drafter_that_never_says_a_word_is_waited_for_by_nobody_and_given_up() -> None:
    beside = Reading()
    one = beside.opened()
    assert not any(beside.step(one) for _ in range(490)) and one.policy.mode is Mode.SPECULATE
    assert not any(beside.step(one) for _ in range(150)) and one.policy.mode is Mode.SHADOW


def test_a_drafter_that_stands_still_for_a_moment_is_kept_and_for_longer_is_left_for_another() -> None:
    """How long it took before said that it was quick, and answers stayed with a drafter that hung."""
    beside, other = Reading(), Heard("other")
    one = beside.opened()
    for _ in range(300):
        beside.says(one, [7])
        beside.step(one)
    beside.target.link_up(other, READER)
    beside.target.inbox.drain()
    beside.target.pool.observe_latency(other, 0.008, beside.world.now_s)
    one.skip_step(beside.world.now_s)
    beside.world.now_s = one.wait.deadline_s
    for _ in range(110):
        beside.step(one)
    assert one.link is beside.link and one.policy.mode is Mode.SPECULATE, "0.22 s, as where a packet was lost"
    for _ in range(30):
        beside.step(one)
    assert one.link is None and one.policy.mode is Mode.SHADOW
    for _ in range(200):
        beside.step(one)
    assert one.link is other, "as soon as it tries again"


def test_answers_go_to_another_drafter_than_the_one_that_never_said_a_word() -> None:
    beside, other = Reading(), Heard("other")
    beside.target.link_up(other, READER)
    beside.target.inbox.drain()
    beside.target.pool._random = Random(1)
    links = list[bool]()
    for _ in range(40):
        one = beside.opened()
        beside.step(one)
        links.append(one.link is other)
        for _ in range(5):
            beside.world.now_s += 0.001
            if one.link is beside.link:
                beside.says(one, [7])
            beside.step(one)
        beside.target.close(one)
    assert 0 < sum(links) < 6, "nobody waits for it, so that only its silence tells"


def test_it_needs_neither_torch_nor_grpc() -> None:
    code = ("import sys, slipstream.following.following; "
            "print([name for name in ('torch', 'grpc', 'transformers', 'google.protobuf') if name in sys.modules])")
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("shared", [False, True])
def test_a_draft_that_nobody_asked_for_is_neither_missing_nor_late(shared: bool) -> None:
    """Where rows are dear drafts do not pay: rounds without them were told as the drafter's fault."""
    metrics = TargetMetrics("function")
    target = Following(TargetSection(drafts=(), prompt_lookup=False, shared_cores=shared),
                       StepCosts({1: STEP_S, 2: 50 * STEP_S, 64: 100 * STEP_S}), metrics)

    def outcomes() -> dict[str, float]:
        page = metrics.registry.page("")[1].decode()
        return {outcome: float(times) for outcome, times in re.findall(r'rounds_total{.*outcome="(\w+)".*} (\S+)', page)
                if float(times)}

    with drafted(target):
        answer(target, [target.open(1, PROMPT, len(PROMPT), Sampling(), 4096)], 40, by_tree)
        assert set(outcomes()) == {"plain"}
    target.inbox.drain()
    answer(target, [target.open(2, PROMPT, len(PROMPT), Sampling(), 4096)], 40, by_tree)
    assert outcomes()["draft_missing"] > 0, "nobody is there"
