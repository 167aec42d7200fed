"""Many answers on one call: each as if it were alone, whatever the others and their readers do."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import grpc
import pytest
from grpc import aio

from slipstream.base.config import WireSection
from slipstream.base.errors import (
    CapacityError,
    DeadlineExceeded,
    DeviceFull,
    Draining,
    InvalidRequest,
    RanksLost,
    RemoteProtocolError,
    SlipstreamError,
    TooLarge,
    Unavailable,
)
from slipstream.protocol.requests import Finish, Piece, Request, Sampling, TargetInfo, TokenLogprob
from slipstream.wire.answers import (
    MAX_ANSWER_ITEMS,
    TAKEN,
    Flow,
    decode_answer_requests,
    decode_answer_responses,
    encode_answer_request,
    encode_answer_response,
    encode_info,
    joined_frames,
)
from slipstream.wire.channel import Connection, Lane, open_channel
from slipstream.wire.server import GrpcServer
from slipstream.wire.status import ErrorReport
from slipstream.wire.target import HOLD_AT, AnswerCall, TargetClient, TargetServicer
from target_service.loop import TargetWorker
from target_service.sequence import Rule, Sink
from target_service.service import TargetAnswer
from tests.echo import EchoTarget
from tests.loop import eventually, settled

pytestmark = pytest.mark.usefixtures("servers_end")
WIRE = WireSection()
INFO = TargetInfo("tiny", 1000, 4096, "abc", 1, 2, False)
SPAN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@dataclass
class Steps:
    """A Backend whose answers advance together, as a scheduler's do; a prompt's first token says how an answer goes."""

    requests: list[Request] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)
    closed: list[str] = field(default_factory=list)
    go: asyncio.Event = field(default_factory=asyncio.Event)

    def submit(self, request: Request) -> OneOfThem:
        if request.tokens[0] == 13:
            raise CapacityError("full", 3.5)
        self.requests.append(request)
        return OneOfThem(self, request)


@dataclass
class OneOfThem:
    """Counts up from its prompt's first token. After two pieces, a prompt that begins with 66 fails, and one with 77
    ends without an end."""

    steps: Steps
    request: Request

    async def __aiter__(self) -> AsyncIterator[Piece]:
        await self.steps.go.wait()
        for n in range(self.request.max_tokens):
            await asyncio.sleep(0)
            if n == 2 and self.request.tokens[0] == 66:
                raise InvalidRequest("tokens", "sixty-six", "odd")
            if n == 2 and self.request.tokens[0] == 77:
                return
            self.steps.sent[self.request.request_id] = n + 1
            last = n + 1 == self.request.max_tokens
            yield Piece((self.request.tokens[0] + n,), finish="length" if last else "")

    def set_speculation(self, allowed: bool) -> None:
        pass

    async def aclose(self) -> None:
        self.steps.closed.append(self.request.request_id)


def asked(number: int, max_tokens: int = 20) -> Request:
    return Request(f"r{number}", (number,), Sampling(), max_tokens)


@asynccontextmanager
async def served(steps: Steps) -> AsyncIterator[tuple[GrpcServer, TargetClient]]:
    """``steps`` behind a client whose answers share a call."""
    server = GrpcServer("127.0.0.1:0", WIRE, [TargetServicer(steps)])
    client = TargetClient(f"127.0.0.1:{await server.start()}")
    try:
        yield server, client
    finally:
        await client.aclose()
        await server.drain(0)


async def tokens_of(client: TargetClient, request: Request) -> list[int]:
    return [token async for piece in client.submit(request) for token in piece.tokens]


async def test_each_gets_its_own_and_all_is_freed() -> None:
    steps = Steps()
    steps.go.set()
    async with served(steps) as (_, client):
        numbers = [*range(100, 140)]
        assert await asyncio.gather(*(tokens_of(client, asked(n)) for n in numbers)) == [
            [*range(n, n + 20)] for n in numbers]
        assert sorted(steps.closed) == sorted(f"r{n}" for n in numbers)


async def test_what_one_meets_is_its_own_affair() -> None:
    steps = Steps()
    steps.go.set()
    async with served(steps) as (_, client):
        requests = [asked(100), asked(13), asked(66), replace(asked(20), namespace="a b"), asked(101), asked(77)]
        results = await asyncio.gather(*(tokens_of(client, one) for one in requests), return_exceptions=True)
        assert results[0] == [*range(100, 120)] and results[4] == [*range(101, 121)]
        full, odd, unreadable = results[1:4]
        assert isinstance(results[5], Unavailable), "an answer that was cut does not look finished, nor go on for ever"
        assert isinstance(full, CapacityError) and full.retry_after_s == 3.5
        assert isinstance(odd, InvalidRequest) and (odd.field, odd.code) == ("tokens", "odd")
        assert isinstance(unreadable, InvalidRequest) and unreadable.field == "namespace"
        assert all(request.tokens != (20,) for request in steps.requests)


async def test_a_slow_reader_holds_up_nobody_and_loses_nothing() -> None:
    steps, long = Steps(), 40 * HOLD_AT
    steps.go.set()
    async with served(steps) as (_, client):
        slow = aiter(client.submit(asked(100, long)))
        first = await anext(slow)
        for n in range(101, 104):
            assert await tokens_of(client, asked(n, 500)) == [*range(n, n + 500)]
        told = 0
        while told < steps.sent["r100"]:  # until nothing more is sent
            told = steps.sent["r100"]
            await asyncio.sleep(0.1)
        assert told < long, f"nobody reads, and the target has sent {told} of {long}"
        rest = [token async for piece in slow for token in piece.tokens]
        assert [*first.tokens, *rest] == [*range(100, 100 + long)]


async def test_a_span_reaches_the_target_if_it_is_one() -> None:
    steps = Steps()
    steps.go.set()
    async with served(steps) as (_, client):
        for trace in (SPAN, "", "nonsense"):
            await tokens_of(client, replace(asked(100), trace=trace))
    assert [request.trace for request in steps.requests] == [SPAN, "", ""]


async def test_an_idle_call_ends_with_its_target() -> None:
    steps = Steps()
    steps.go.set()
    async with served(steps) as (server, client):
        await tokens_of(client, asked(100))
        async with asyncio.timeout(60):
            await server.drain(3600)  # does not wait for a call that nothing runs on
        with pytest.raises((Draining, Unavailable)):
            await tokens_of(client, asked(101))


async def test_an_answer_ends_with_a_client_that_is_closed_as_soon_as_it_begins() -> None:
    """Its call had not begun either, so nobody told it: it waited until the target was late."""
    async with served(Steps()) as (_, client):
        answer = asyncio.create_task(tokens_of(client, asked(1)))
        await asyncio.sleep(0)
        await client.aclose()
        with pytest.raises(Unavailable, match="closed"):
            await answer


async def test_answers_end_with_a_call_that_breaks_and_the_next_one_begins_another() -> None:
    steps = Steps()
    async with served(steps) as (server, client):
        lost = [asyncio.create_task(tokens_of(client, asked(n))) for n in (100, 101)]
        await eventually(lambda: len(steps.requests) == 2)
        await server.drain(0)
        assert all(isinstance(error, Unavailable | Draining)
                   for error in await asyncio.gather(*lost, return_exceptions=True))
        await eventually(lambda: sorted(steps.closed) == ["r100", "r101"])
        steps.go.set()
        again = GrpcServer(client.address, WIRE, [TargetServicer(steps)])
        await again.start()
        async with asyncio.timeout(60):
            while True:
                try:
                    assert await tokens_of(client, asked(102)) == [*range(102, 122)]
                    break
                except Unavailable:
                    await asyncio.sleep(0.05)
        await again.drain(0)


@pytest.mark.parametrize("busy", [False, True])
async def test_a_call_on_a_connection_that_was_replaced_ends_with_its_last_answer(busy: bool) -> None:
    steps = Steps()
    async with served(steps) as (_, client):
        connection = client._connection
        connection.end(old := connection.begin())
        running = [asyncio.create_task(tokens_of(client, asked(100)))]
        await eventually(lambda: len(steps.requests) == 1)
        if not busy:
            steps.go.set()
            await running[0]
        connection.use(Lane(open_channel(client.address, None)))
        running.append(asyncio.create_task(tokens_of(client, asked(101))))
        await eventually(lambda: len(steps.requests) == 2)
        steps.go.set()
        assert [len(tokens) for tokens in await asyncio.gather(*running)] == [20, 20]
        await eventually(lambda: old.channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN)


async def test_a_target_without_a_successor_is_asked_without_leaving_connections_behind(
        monkeypatch: pytest.MonkeyPatch) -> None:
    opened, open_lane = list[Lane](), Connection.open_lane

    def recorded(connection: Connection) -> Lane | None:
        lane = open_lane(connection)
        assert lane is not None
        opened.append(lane)
        return lane

    monkeypatch.setattr(Connection, "open_lane", recorded)
    target = EchoTarget()
    target.draining = True
    server = GrpcServer("127.0.0.1:0", WIRE, [TargetServicer(target)])
    client = TargetClient(f"localhost:{await server.start()}")
    assert (await client.info()).draining
    assert [lane.channel.get_state() for lane in opened] == [grpc.ChannelConnectivity.SHUTDOWN]
    await client.aclose()
    await server.drain(0)


@asynccontextmanager
async def raw_target(many: Callable[[Any], Awaitable[None]], connect_s: float) -> AsyncIterator[TargetClient]:
    """A server that does ``many`` with a call, and a client of it."""
    async def info(_data: bytes, _context: Any) -> bytes:
        return encode_info(INFO)

    async def call(_requests: object, context: Any) -> None:
        await many(context)

    service: dict[str, Any] = {"GetInfo": grpc.unary_unary_rpc_method_handler(info),
                               "GenerateMany": grpc.stream_stream_rpc_method_handler(call)}
    server = aio.server()
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("slipstream.v1.TargetService", service)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = TargetClient(f"127.0.0.1:{port}", connect_s=connect_s)
    try:
        yield client
    finally:
        await client.aclose()
        await server.stop(0)


async def test_a_target_that_does_not_take_a_request_or_talks_nonsense_is_unavailable() -> None:
    async def silent(_context: Any) -> None:
        await asyncio.Event().wait()

    async def garbled(context: Any) -> None:
        try:  # the client may be gone before the write returns
            await context.write(b"\xff\xff\xff")
            await asyncio.Event().wait()
        finally:
            left.append(True)

    async def strange(context: Any) -> None:
        await context.write(encode_answer_response(1, Piece((1,), accepted=2)))
        await asyncio.Event().wait()

    left = list[bool]()
    for many, connect_s, why in ((silent, 0.3, "not taken"), (garbled, 60.0, "not a service"),
                                 (strange, 60.0, "accepted")):
        async with raw_target(many, connect_s) as client:
            with pytest.raises(Unavailable, match=why):
                await tokens_of(client, asked(1))
            if many is garbled:
                await eventually(lambda: left == [True])


async def test_a_number_used_twice_or_bytes_that_are_no_frame_end_the_call() -> None:
    steps = Steps()
    server = GrpcServer("127.0.0.1:0", WIRE, [TargetServicer(steps)])
    async with aio.insecure_channel(f"127.0.0.1:{await server.start()}") as channel:
        for frames in ([encode_answer_request(1, asked(100))] * 2, [b"\xff\xff\xff"]):
            call: Any = channel.stream_stream("/slipstream.v1.TargetService/GenerateMany")()
            for frame in frames:
                await call.write(frame)
            with pytest.raises(aio.AioRpcError) as refused:
                while await call.read() is not aio.EOF:
                    pass
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await eventually(lambda: steps.closed == ["r100"])
    await server.drain(0)


def test_items_cross_and_join() -> None:
    piece = Piece((1, 2), 1, 4, (TokenLogprob(-0.5, ((3, -1.0),)), TokenLogprob(-1.5)), "stop", 0.25, 0.125, "plain", 7,
                  True, 0.5)
    told = [TAKEN, piece, ErrorReport.of(CapacityError("full", 2.0)), ErrorReport.of(ValueError("secret"))]
    data = b"".join(encode_answer_response(n, content) for n, content in enumerate(told))
    assert decode_answer_responses(data) == list(enumerate(told)) and b"secret" not in data
    request = Request("r", (1, 2, 3), Sampling(0.5, seed=3), 8, 2, False, 1, SPAN)
    contents: list[Request | bool | Flow] = [request, True, False, *Flow]
    data = b"".join(encode_answer_request(n, content) for n, content in enumerate(contents))
    assert [*decode_answer_requests(data)] == list(enumerate(contents))
    assert isinstance(decode_answer_responses(b"\n\x02\x08\x05")[0][1], RemoteProtocolError)


@pytest.mark.parametrize("error", [InvalidRequest("top_p", "no", "big"), Draining("going"), Unavailable("not now"),
                                   RemoteProtocolError("frame", "none"), CapacityError("full", 7.5),
                                   TooLarge("request", "no", "big"), DeadlineExceeded("late")])
def test_an_error_keeps_its_class(error: SlipstreamError) -> None:
    again = ErrorReport.of(error).to_error()
    assert type(again) is type(error) and str(again) == str(error)


def test_an_error_that_no_caller_knows_is_of_the_class_above_it() -> None:
    """A full device is no target that is gone: nobody is to be kept from it for that."""
    for error, kind in ((DeviceFull("full", 2.5), CapacityError), (RanksLost("gone"), Unavailable)):
        again = ErrorReport.of(error).to_error()
        assert type(again) is kind and str(again) == str(error)


def test_frames_are_as_few_as_fit() -> None:
    items = [b"a" * size for size in (3, 3, 3, 9, 1)]
    assert [*joined_frames(items, 6)] == [b"a" * 6, b"a" * 3, b"a" * 9, b"a"]
    assert [len(frame) for frame in joined_frames([b"a"] * (MAX_ANSWER_ITEMS + 1), 1 << 20)] == [MAX_ANSWER_ITEMS, 1]
    assert [*joined_frames([], 6)] == [] and [*joined_frames(items, 100)] == [b"a" * 19]


class Spoken:
    """A worker whose answers say what they are told to; each counts up from 0."""

    def __init__(self) -> None:
        self.sink: Sink | None = None
        self.count = 0
        self.left: list[int] = []
        self.numbers = itertools.count(1)

    def add_request(self, number: int, request: Request, sink: Sink, rule: Rule | None = None) -> None:
        self.sink = sink

    def cancel(self, number: int) -> None:
        self.left.append(number)

    def say(self, pieces: int, finish: Finish = "") -> None:
        assert self.sink is not None
        for _ in range(pieces):
            self.sink(Piece((self.count,), finish=finish))
            self.count += 1

    def submit(self, request: Request) -> TargetAnswer:
        return TargetAnswer(cast(TargetWorker, self), next(self.numbers), request)


class Written:
    """The line of a call: what a caller says, and which tokens and failures it reads."""

    def __init__(self) -> None:
        self.said: asyncio.Queue[bytes] = asyncio.Queue()
        self.tokens: list[int] = []
        self.failed: list[int] = []

    async def read(self) -> bytes:
        return await self.said.get()

    async def write(self, message: bytes, /) -> None:
        for number, content in decode_answer_responses(message):
            self.tokens += content.tokens if isinstance(content, Piece) else ()
            self.failed += [number] if isinstance(content, ErrorReport) else []


@pytest.mark.parametrize("held", [1, 3])
async def test_offered_pieces_keep_their_order_and_wait_where_they_come_from(held: int) -> None:
    """held: pieces that wait. A lone one is in the hands of the answer's task."""
    worker, line = Spoken(), Written()
    call = asyncio.create_task(AnswerCall(worker).run(line))
    line.said.put_nowait(encode_answer_request(1, asked(100)))
    await eventually(lambda: worker.sink is not None)
    worker.say(3)
    await eventually(lambda: line.tokens == [0, 1, 2])
    line.said.put_nowait(encode_answer_request(1, Flow.HOLD))
    await settled()
    worker.say(held)
    await settled()
    assert line.tokens == [0, 1, 2]
    line.said.put_nowait(encode_answer_request(1, Flow.RESUME))
    await asyncio.sleep(0)
    for _ in range(5):  # wherever the answer's own task is by then
        worker.say(1)
        await asyncio.sleep(0)
    worker.say(1, "length")
    await eventually(lambda: len(line.tokens) == 9 + held)
    assert line.tokens == [*range(9 + held)]
    call.cancel()


class Unread(Written):
    """A line whose other end reads nothing before ``reads`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = asyncio.Event()

    async def write(self, message: bytes, /) -> None:
        await self.reads.wait()
        await super().write(message)


async def test_of_a_caller_that_reads_nothing_no_more_is_taken_until_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.wire.target.MAX_WAITING_BYTES", 200)
    steps, line = Steps(), Unread()
    steps.go.set()
    call = AnswerCall(steps)
    running = asyncio.create_task(call.run(line))
    for number in range(1, 121):
        line.said.put_nowait(encode_answer_request(number, asked(100 + number, 100)))
    for _ in range(500):
        await asyncio.sleep(0)
    assert line.said.qsize() > 60 and max(steps.sent.values()) < 50
    line.reads.set()
    await eventually(lambda: len(steps.closed) == 120)
    line.reads.clear()
    line.said.put_nowait(encode_answer_request(121, asked(300, 1)))
    await settled()
    call.drain()
    line.reads.set()
    await running
    assert len(line.tokens) == 120 * 100 + 1 and not line.failed, "all that had waited to be sent"


@pytest.mark.parametrize("left", [False, True])
async def test_a_call_that_drains_refuses_new_answers_and_ends_after_the_last_one(left: bool) -> None:
    steps, line = Steps(), Written()
    call = AnswerCall(steps)
    running = asyncio.create_task(call.run(line))
    line.said.put_nowait(encode_answer_request(1, asked(100, 3)))
    await settled()
    call.drain()
    line.said.put_nowait(encode_answer_request(2, asked(101, 3)))
    await settled()
    assert line.failed == [2] and len(steps.requests) == 1 and not running.done()
    if left:
        line.said.put_nowait(encode_answer_request(1, Flow.CLOSE))
    else:
        steps.go.set()
    await running
    assert line.tokens == ([] if left else [100, 101, 102]) and steps.closed == ["r100"]


async def test_an_answer_that_is_left_in_the_frame_that_asks_for_it_is_freed() -> None:
    worker, line = Spoken(), Written()
    call = asyncio.create_task(AnswerCall(worker).run(line))
    line.said.put_nowait(b"".join((encode_answer_request(1, asked(100)), encode_answer_request(2, asked(100)),
                                   encode_answer_request(1, Flow.CLOSE))))
    await eventually(lambda: worker.left == [1])
    call.cancel()


async def test_an_offered_piece_that_cannot_be_written_ends_its_own_answer_alone() -> None:
    worker, line = Spoken(), Written()
    call = asyncio.create_task(AnswerCall(worker).run(line))
    line.said.put_nowait(encode_answer_request(1, asked(100)))
    await eventually(lambda: worker.sink is not None)
    assert worker.sink is not None
    worker.sink(Piece((1 << 40,)))  # would keep what is behind it from others if it raised
    await eventually(lambda: worker.left == [1] and line.failed == [1])
    call.cancel()


@dataclass
class Lingering:
    """A Backend of one answer, which has one piece and takes its time to be closed."""

    go: asyncio.Event = field(default_factory=asyncio.Event)
    closed: list[bool] = field(default_factory=list)

    def submit(self, request: Request) -> Lingering:
        return self

    async def __aiter__(self) -> AsyncIterator[Piece]:
        await self.go.wait()
        yield Piece((1,), finish="length")

    def set_speculation(self, allowed: bool) -> None:
        pass

    async def aclose(self) -> None:
        await asyncio.sleep(0)
        self.closed.append(True)


async def test_an_answer_that_is_left_at_its_end_is_closed_to_the_end() -> None:
    backend, line = Lingering(), Written()
    call = asyncio.create_task(AnswerCall(backend).run(line))
    line.said.put_nowait(encode_answer_request(1, asked(100)))
    await settled()
    line.said.put_nowait(encode_answer_request(1, Flow.CLOSE))
    backend.go.set()  # its last piece and the word of its reader meet
    await eventually(lambda: line.tokens == [1])
    await settled()
    assert backend.closed == [True]
    call.cancel()
