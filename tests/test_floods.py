"""What peers may send: bounded by what was asked for and by what others need, on both sides. Work is counted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

import numpy as np
import pytest
from grpc import aio
from structlog.testing import capture_logs

from draft_service.worker import ROUND_TOKENS, DraftWorker
from slipstream.base.config import TargetSection
from slipstream.base.errors import RemoteProtocolError
from slipstream.decision.beliefs import StepCosts
from slipstream.drafting.ngram import NgramDrafter
from slipstream.following.following import MAX_PENDING_EVENTS as MOST_EVENTS
from slipstream.following.following import Following, Inbox
from slipstream.observe.metrics import TargetMetrics
from slipstream.protocol.conduct import (
    FIRST_PAUSE_S,
    FORGIVE_AFTER_S,
    FREE_ITEMS,
    MAX_FAULTS,
    MAX_GROWTHS_AHEAD,
    MAX_PAUSE_S,
    MAX_UNUSED,
    Allowance,
    Exclusion,
)
from slipstream.protocol.messages import (
    Close,
    Commit,
    DraftBound,
    DraftHello,
    Drop,
    Features,
    Growth,
    Open,
    TargetBound,
    TargetHello,
)
from slipstream.protocol.requests import Sampling
from slipstream.v1 import draft_pb2
from slipstream.wire.codec import (
    MAX_FRAME_ITEMS,
    FrameLimits,
    decode_draft_frame,
    encode_draft_frames,
    encode_target_frames,
    encode_target_hello,
)
from slipstream.wire.link import DraftLink, Outbox, Pumps, WireCounts
from slipstream.wire.server import GrpcServer
from slipstream.wire.servicer import DraftServicer
from tests.flooding import frame, growth
from tests.loop import eventually
from tests.test_draft_worker import Listener, commit
from tests.test_wire import DRAFT, HELLO, LOOPBACK, RULES, WIRE, Echo, Target, ints, raw_draft

pytestmark = pytest.mark.usefixtures("servers_end")
MANY = 100_000  # of 40 bytes


# What a gRPC message holds at most is 4 MiB, so longer ones are several frames.
FLOODS: dict[str, tuple[TargetBound, int, int]] = {  # item, times in a frame, frames
    "bad growths": (Growth.empty(1, 1 << 20), MANY, 2),
    "drops": (Drop(1, "gap"), MANY, 2),
    "unknown sessions": (growth(session=99), 3000, 21),
    "stale bases": (growth(base=1), MAX_FRAME_ITEMS, 200),
    "huge growths": (growth(nodes=20_000), 4, 50),
    "whole trees": (growth(nodes=40), 64, 1000),
    "drip": (growth(), 1, 10_000),
    "nothing": (growth(), 0, 10_000),
    "long reasons": (Drop(1, "x" * 4000), 100, 100),
}


@pytest.mark.parametrize("kind", FLOODS)
async def test_a_draft_is_heard_as_far_as_it_was_asked(kind: str) -> None:
    item, times, frames = FLOODS[kind]
    sizes: list[int] = []

    async def behave(context: aio.ServicerContext, target: TargetHello) -> None:
        await context.read()
        data = frame(target.incarnation, item, times)
        sizes.append(len(data))
        for _ in range(frames):
            await context.write(data)
        await asyncio.Event().wait()

    server, port = await raw_draft(behave)
    target = Target()
    link = DraftLink(f"127.0.0.1:{port}", HELLO, target, check_pair_never, rules=RULES)
    task = asyncio.create_task(link.run())
    with capture_logs() as lines:
        await eventually(lambda: link.status().connected)
        link.send([Open(1, ints(1, 2, 3), 3, Sampling())])
        await eventually(lambda: bool(target.downs))
        await eventually(lambda: any(line["event"] == "draft left alone" for line in lines))
    task.cancel()
    await server.stop(0)
    assert target.downs[0].startswith("protocol: ")
    assert len(target.items) + len(target.faults) + link.counts.bytes_in // sizes[0] <= FREE_ITEMS + 4 + 1
    (told,) = [line for line in lines if line["event"] == "draft left alone"]
    assert told["problem"] and "-" not in told["problem"]
    assert told["seconds"] == FIRST_PAUSE_S and told["draft"] == link.address


def check_pair_never(target: TargetHello, draft: DraftHello) -> str:
    """Any draft fits."""
    return ""


async def test_a_draft_that_was_left_alone_comes_back_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.protocol.conduct.FIRST_PAUSE_S", 0.01)
    streams = 0

    async def behave(context: aio.ServicerContext, target: TargetHello) -> None:
        nonlocal streams
        streams += 1
        if streams < 4:
            await context.write(frame(target.incarnation, Drop(1, "gap"), MANY))
        await asyncio.Event().wait()

    server, port = await raw_draft(behave)
    target = Target()
    link = DraftLink(f"127.0.0.1:{port}", HELLO, target, check_pair_never, rules=RULES)
    task = asyncio.create_task(link.run())
    with capture_logs() as lines:
        await eventually(lambda: streams == 4 and link.status().connected)
    task.cancel()
    await server.stop(0)
    assert target.downs[:3] == ["protocol: frame"] * 3
    assert [line["seconds"] for line in lines if line["event"] == "draft left alone"] == [0.01, 0.02, 0.04]


def test_the_time_alone_doubles_ends_and_is_forgotten() -> None:
    absence, now_s, pauses = Exclusion(), 1000.0, list[float]()
    for _ in range(10):
        pauses.append(absence.breach(now_s))
        now_s += pauses[-1] + 1.0
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses[-2:] == [MAX_PAUSE_S, MAX_PAUSE_S]
    assert absence.breach(now_s + FORGIVE_AFTER_S + MAX_PAUSE_S) == FIRST_PAUSE_S


def test_all_that_an_honest_draft_can_say_is_allowed() -> None:
    """Each level in a frame of its own, and a drop for each commit of a session that it has given up."""
    allowance, level = Allowance(), growth(1)
    for _ in range(1000):
        allowance.add_request([Commit(1, 5, ints(7), ahead=True)])
        for _ in range(MAX_GROWTHS_AHEAD):
            allowance.use([level])
        allowance.use([Drop(1, "gap")])
    for _ in range(1000):
        allowance.add_request([Commit(1, 5, ints(7)), Features(1, 0, b"", 1, "float32"), Close(1)])
        allowance.use([level])
        allowance.use([Drop(1, "gap")])
    for _ in range(1000):
        allowance.add_request([Commit(1, 5, ints(7), wanted=0)])
        allowance.use([Drop(1, "unknown")])


@pytest.mark.parametrize("sessions", [64, 512])
def test_all_that_an_honest_draft_can_say_of_many_sessions_is_allowed(sessions: int) -> None:
    """A target stood still for a while, and its draft ran ahead meanwhile, for each of its answers as far as it may."""
    allowance = Allowance()
    for _ in range(3):
        allowance.add_request([Commit(session, 5, ints(7), ahead=True) for session in range(sessions)])
        for _ in range(MAX_GROWTHS_AHEAD):
            allowance.use([growth(session) for session in range(sessions)])
    with pytest.raises(RemoteProtocolError, match="more was said"):
        for _ in range(1 + MAX_UNUSED // sessions):
            allowance.use([growth(session) for session in range(sessions)])


def test_a_draft_may_not_grow_for_who_wants_nothing() -> None:
    """Each growth takes the time of the target's threads, read or not."""
    allowance = Allowance()
    for _ in range(FREE_ITEMS):
        allowance.use([growth(1)])
        allowance.add_request([Commit(1, 5, ints(7), wanted=0)])
    with pytest.raises(RemoteProtocolError, match="more was said"):
        allowance.use([growth(1)])


def test_what_was_not_said_may_be_said_later_up_to_a_bound() -> None:
    allowance = Allowance()
    for _ in range(10_000):
        allowance.add_request([Commit(1, 5, ints(7))])
    with pytest.raises(RemoteProtocolError, match="more was said"):
        allowance.use([Drop(1, "gap")] * MAX_UNUSED)


def following() -> Following:
    return Following(TargetSection(), StepCosts({1: 0.02, 64: 0.03}), TargetMetrics("tiny"))


@dataclass(eq=False)
class Draft:
    """A link that remembers how it was refused."""

    address: str = "a:1"
    refused: list[str] = field(default_factory=list)

    def send(self, items: Sequence[DraftBound]) -> None:
        pass

    def refuse(self, field: str) -> None:
        self.refused.append(field)


def test_a_draft_that_is_wrong_too_often_is_refused_and_one_that_errs_is_not() -> None:
    one, often, seldom = following(), Draft("a:1"), Draft("b:1")
    for draft in (often, seldom):
        one.link_up(draft, DRAFT)
    one.inbox.drain()
    fault = 99, RemoteProtocolError("growth.ids", "is wrong")
    one.received(often, [], [fault] * (MAX_FAULTS + 1))
    one.received(seldom, [], [fault] * (MAX_FAULTS - 1))
    one.inbox.drain()
    assert often.refused == ["growth.ids"] and not seldom.refused


def test_one_draft_fills_its_own_place_and_no_others() -> None:
    one, loud, quiet = following(), Draft("a:1"), Draft("b:1")
    for draft in (loud, quiet):
        one.link_up(draft, DRAFT)
    one.inbox.drain()
    for _ in range(MOST_EVENTS + 10):
        one.received(loud, [growth(base=1)], [])
    assert one.inbox_full(loud) and not one.inbox_full(quiet)
    one.inbox.drain()
    assert not one.inbox_full(loud)


def test_a_turn_takes_a_slice_of_what_came() -> None:
    now_s = iter(count(0.0, 0.001))
    inbox, done = Inbox(lambda: next(now_s)), list[int]()
    for number in range(1000):
        inbox.post(partial(done.append, number))
    assert inbox.drain(for_s=0.005) and len(done) <= 6
    assert inbox.drain() and done == list(range(1000)), "the rest waits, in order"


async def test_a_stream_is_not_read_while_its_peer_has_no_room() -> None:
    (one,), _ = encode_draft_frames(1, [growth()], 1 << 20)
    room, heard = asyncio.Event(), list[TargetBound]()

    class Endless:
        async def read(self) -> object:
            await asyncio.sleep(0)
            return one

        async def write(self, message: bytes, /) -> None:
            pass

    def received(items: Sequence[TargetBound], faults: object) -> None:
        heard.extend(items)

    async def enough() -> None:
        await eventually(lambda: len(heard) == 3)
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(heard) == 3, "it was read on"
        room.set()
        await eventually(lambda: len(heard) > 3)

    outbox: Outbox[DraftBound] = Outbox()
    pumps = Pumps(encode_target_frames, decode_draft_frame, 1, FrameLimits.of(HELLO, DRAFT), 1 << 20, WireCounts(),
                  outbox, received, is_full=lambda: len(heard) >= 3 and not room.is_set())
    await pumps.run(Endless(), enough())


def opened(session: int, length: int, wanted: int = 8) -> Open:
    text = np.arange(length, dtype=np.int32) % 50
    return Open(session, text, length, Sampling(), wanted)


@dataclass(eq=False)
class Hearing(Listener):
    refused: list[str] = field(default_factory=list)

    def refuse(self, field: str) -> None:
        self.refused.append(field)


class Counting(NgramDrafter):
    """Takes time for what it reads, and counts it."""

    now_s = 0.0
    told = 0

    def open(self, opens: Sequence[Open]) -> list[int]:
        self.told += sum(len(one.tokens) for one in opens)
        self.now_s += 1e-4 * sum(len(one.tokens) for one in opens)
        return list(super().open(opens))


class Shared:
    """A draft with two targets."""

    def __init__(self, max_sessions: int = 64) -> None:
        self.drafter = Counting(max_sessions)
        self.worker = DraftWorker(self.drafter, "", 30.0, clock=lambda: self.drafter.now_s)
        self.hostile, self.honest = Hearing("hostile"), Hearing("honest")

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.worker.turn(block=False)


def answered(peer: Listener) -> bool:
    return any(isinstance(item, Growth) for item in peer.take())


TARGET_FLOODS: dict[str, Sequence[DraftBound]] = {
    "unknown sessions": [commit(10, 3, session=99)] * MANY,
    "openings again": [opened(1, 8000)] * 500,
    "openings": [opened(session, 8000) for session in range(500)],
    "stale commits": [opened(1, 10), *[commit(2, 3)] * MANY],
    "closes": [Close(5)] * MANY,
}


@pytest.mark.parametrize("kind", TARGET_FLOODS)
def test_a_target_that_floods_does_not_keep_a_draft_from_others(kind: str) -> None:
    draft = Shared()
    draft.worker.received(draft.hostile, TARGET_FLOODS[kind], ())
    draft.worker.received(draft.honest, [opened(1, 10)], ())
    draft.turns(1)
    assert answered(draft.honest) and draft.drafter.told <= ROUND_TOKENS + 10
    assert draft.worker.inbox_full(draft.hostile) or len(TARGET_FLOODS[kind]) < 4096
    for base in range(10, 40):
        draft.worker.received(draft.honest, [commit(base, 3)], ())
        draft.turns(2)
        assert answered(draft.honest), base


def test_texts_of_one_target_take_half_the_time_where_there_are_others() -> None:
    draft, base = Shared(), 10
    draft.worker.received(draft.honest, [opened(1, 10)], ())
    draft.worker.received(draft.hostile, [opened(1, 1000)] * 3000, ())
    while draft.drafter.now_s < 20.0:
        draft.worker.received(draft.honest, [commit(base, 3)], ())
        draft.turns(1)
        draft.drafter.now_s += 0.01  # a growth
        base += 1
    assert draft.drafter.told * 1e-4 < 0.6 * draft.drafter.now_s
    assert base > 300


def test_texts_of_one_target_leave_time_for_another_that_says_nothing_now() -> None:
    """What that one says next would wait until they were read."""
    draft = Shared()
    draft.worker.received(draft.honest, [opened(1, 10)], ())
    draft.turns(1)
    draft.worker.received(draft.hostile, [opened(1, 1000)] * 3000, ())
    while draft.drafter.now_s < 20.0:
        draft.turns(1)
        wait_s = draft.worker.wait_s
        assert wait_s is not None, "it does not sleep for longer than the pause"
        draft.drafter.now_s += wait_s
    assert draft.drafter.told * 1e-4 < 0.6 * draft.drafter.now_s


def test_a_target_with_room_in_it_waits_for_nobody() -> None:
    draft = Shared()
    draft.worker.received(draft.honest, [opened(session, 1000) for session in range(60)], ())
    draft.turns(4)
    assert draft.drafter.told == 60_000, "alone it is read at once"


@pytest.mark.parametrize("of_commits", [False, True])
def test_features_that_wait_are_bounded_in_bytes(of_commits: bool) -> None:
    draft, rows = Shared(), Features(1, 0, bytes(4 << 20), 1024, "float32")
    item = Commit(1, 1, np.array([3], np.int32), rows) if of_commits else rows
    for _ in range(15):
        draft.worker.received(draft.hostile, [item], ())
    assert not draft.worker.inbox_full(draft.hostile)
    for _ in range(2):
        draft.worker.received(draft.hostile, [item], ())
    assert draft.worker.inbox_full(draft.hostile) and not draft.worker.inbox_full(draft.honest)
    draft.turns(2)
    assert not draft.worker.inbox_full(draft.hostile)


def test_a_round_takes_as_many_rows_of_states_as_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is as much to read as a token."""
    draft, taken = Shared(), list[int]()
    monkeypatch.setattr(draft.drafter, "absorb", lambda states: taken.append(sum(one.num_rows for one in states)))
    rows = [Features(1, start, b"", 1024, "float32") for start in range(0, 20 * 1024, 1024)]
    draft.worker.received(draft.hostile, [opened(1, 1), *rows[:4]], ())
    draft.turns(1)
    draft.worker.received(draft.hostile, rows[:17], ())
    draft.turns(2)
    assert taken == [4 * 1024, ROUND_TOKENS, 1024]


def test_a_target_that_is_wrong_too_often_is_refused_and_told_once() -> None:
    draft = Shared()
    with capture_logs() as lines:
        draft.worker.received(draft.hostile, [], [(5, RemoteProtocolError("commit.base", "is wrong"))] * 1000)
        draft.turns(1)
    assert draft.hostile.refused and len([line for line in lines if line["log_level"] == "warning"]) == 1


def test_who_has_all_places_gives_one_up_for_who_has_none() -> None:
    draft = Shared(max_sessions=4)
    draft.worker.received(draft.hostile, [opened(session, 10) for session in range(9)], ())
    draft.turns(1)
    for session in range(4):
        draft.worker.received(draft.honest, [opened(session, 10)], ())
        draft.turns(1)
    told = draft.honest.take()
    assert sum(isinstance(item, Growth) for item in told) == 2, "half of them"
    assert [item.session for item in told if isinstance(item, Drop)] == [2, 3]
    assert [item.session for item in draft.hostile.take() if isinstance(item, Drop)] == [4, 5, 6, 7, 8, 0, 1]


async def test_a_target_that_broke_the_protocol_is_left_alone_and_others_are_served() -> None:
    echo = Echo()
    servicer = DraftServicer(echo)
    server = GrpcServer(LOOPBACK, WIRE, [servicer])
    port = await server.start()
    honest = Target()
    link = DraftLink(f"127.0.0.1:{port}", HELLO, honest, check_pair_never, rules=RULES)
    task = asyncio.create_task(link.run())
    await eventually(lambda: link.status().connected)
    refused = list[str]()
    for _ in range(2):
        async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.stream_stream("/slipstream.v1.DraftService/Exchange")()
            with suppress(aio.AioRpcError, asyncio.InvalidStateError):
                await call.write(encode_target_hello(replace(HELLO, incarnation=3)))
                if await call.read() is not aio.EOF:  # a write to a stream that is over would hide how it ended
                    message = draft_pb2.ExchangeRequest()
                    message.frame.incarnation = 3
                    message.frame.items.extend([draft_pb2.TargetItem(close=draft_pb2.CloseItem(session=1))] * MANY)
                    await call.write(message.SerializeToString())
                    await call.read()
            refused.append((await call.code()).name)
    assert refused == ["INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"]
    assert not echo.items and not echo.faults, "nothing of it was looked at"
    link.send([Commit(1, 5, ints(7))])
    await eventually(lambda: len(honest.items) == 1)
    task.cancel()
    await server.drain(0)
