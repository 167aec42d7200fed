"""Streams and calls over real loopback gRPC: handshakes, losses, floods, bad peers, cancelled answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2
from structlog.testing import capture_logs

from router_service.service import RouterService
from slipstream.base.config import Config, ModelSection, RouterSection, WireSection
from slipstream.base.errors import (
    CapacityError,
    ConfigError,
    Draining,
    InvalidRequest,
    NotFound,
    PairingError,
    QuotaExceeded,
    SlipstreamError,
    Unavailable,
)
from slipstream.protocol.chat import ChatOptions, Delta, Message, TextToken, Usage
from slipstream.protocol.messages import (
    Close,
    Commit,
    DraftHello,
    Drop,
    Features,
    FeatureSpec,
    Growth,
    Open,
    TargetHello,
)
from slipstream.protocol.requests import LEFT_ALONE, DraftStatus, Piece, Request, Sampling, TargetInfo
from slipstream.wire.channel import ConnectionRules
from slipstream.wire.client import AsyncClient, Client
from slipstream.wire.codec import decode_target_hello, encode_draft_frames, encode_draft_hello, encode_target_hello
from slipstream.wire.inference import InferenceServicer, encode_complete
from slipstream.wire.link import DraftLink, Outbox
from slipstream.wire.local import LocalLink
from slipstream.wire.server import MAX_ASKING, MAX_WATCHING_EACH, SERVING, GrpcServer, bind_guard
from slipstream.wire.servicer import DraftServicer
from slipstream.wire.target import TargetClient, TargetServicer
from tests.counted import counted
from tests.loop import eventually, settled

pytestmark = pytest.mark.usefixtures("servers_end")
WIRE = WireSection()
RULES = ConnectionRules(backoff_max_s=0.2)
HIDDEN = 64
HELLO = TargetHello(1, 0, "tiny", 1000, "abc", HIDDEN, 2, 4096)
DRAFT = DraftHello(1, 0, "echo", 1000, "abc", FeatureSpec((1,), HIDDEN, "float32"), HIDDEN, 256, 63, 16)
LOOPBACK = "127.0.0.1:0"


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def commit(base: int = 5, session: int = 1) -> Commit:
    return Commit(session, base, ints(7, 8))


@dataclass
class Target:
    """LinkEvents that remember."""

    ups: list[DraftHello] = field(default_factory=list)
    downs: list[str] = field(default_factory=list)
    items: list[Growth | Drop] = field(default_factory=list)
    faults: list[tuple[int, str]] = field(default_factory=list)

    def link_up(self, link: object, hello: DraftHello) -> None:
        self.ups.append(hello)

    def link_down(self, link: object, reason: str) -> None:
        self.downs.append(reason)

    def inbox_full(self, link: object) -> bool:
        return False

    def received(self, link: object, items: list, faults: list) -> None:
        self.items += items
        self.faults += [(session, fault.field) for session, fault in faults]


@dataclass
class Echo:
    """PeerEvents that answer every commit with one node below it."""

    hello: DraftHello = DRAFT
    refusal: PairingError | None = None
    up: list = field(default_factory=list)
    down: list = field(default_factory=list)
    items: list = field(default_factory=list)
    faults: list = field(default_factory=list)
    refused: int = 0

    def peer_up(self, peer: object, hello: TargetHello) -> DraftHello:
        if self.refusal:
            self.refused += 1
            raise self.refusal
        self.up.append(peer)
        return self.hello

    def peer_down(self, peer: object) -> None:
        self.down.append(peer)

    def inbox_full(self, peer: object) -> bool:
        return False

    def received(self, peer, items: list, faults: list) -> None:
        self.items += items
        self.faults += [(session, fault.field) for session, fault in faults]
        peer.send([self.node(item) for item in items if isinstance(item, Commit)])

    @staticmethod
    def node(item: Commit) -> Growth:
        base = item.base + len(item.tokens)
        return Growth(item.session, base, ints(1), ints(-base), ints(9), np.zeros(1, np.float32))


@dataclass
class Rig:
    """Both ends of a draft stream; ``run`` keeps the link going."""

    target: Target
    echo: Echo
    servicer: DraftServicer
    server: GrpcServer
    link: DraftLink
    task: asyncio.Task

    @staticmethod
    async def start(echo: Echo | None = None, listen: str = LOOPBACK, rules: ConnectionRules = RULES) -> Rig:
        echo, target = echo or Echo(), Target()
        servicer = DraftServicer(echo, rules=rules)
        server = GrpcServer(listen, WIRE, [servicer], rules=rules)
        port = await server.start()
        link = DraftLink(f"127.0.0.1:{port}", HELLO, target, rules=rules)
        return Rig(target, echo, servicer, server, link, asyncio.create_task(link.run()))

    async def up(self) -> Rig:
        await eventually(lambda: self.link.status().connected)
        return self

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.server.drain(0)


async def test_items_cross_both_ways_and_the_end_is_told() -> None:
    rig = await (await Rig.start()).up()
    rig.link.send([Open(1, ints(1, 2, 3), 3, Sampling(seed=9)), commit(3)])
    await asyncio.to_thread(rig.link.send, [Close(1)])
    await eventually(lambda: len(rig.echo.items) == 3 and len(rig.target.items) == 1)
    assert [type(item) for item in rig.echo.items] == [Open, Commit, Close]
    assert rig.target.items[0].base == 5 and rig.target.ups[0].drafter == "echo"
    assert rig.link.status().drafter == "echo"
    await rig.stop()
    await eventually(lambda: rig.echo.down == rig.echo.up)
    assert rig.target.downs == ["stopped"] and not rig.link.status().connected


async def test_order_is_kept_over_many_sends_from_threads() -> None:
    rig = await (await Rig.start()).up()

    def burst(session: int) -> None:
        for base in range(1, 301):
            rig.link.send([commit(base, session)])

    await asyncio.gather(*(asyncio.to_thread(burst, session) for session in (1, 2, 3)))
    await eventually(lambda: len(rig.target.items) == 900)
    for session in (1, 2, 3):
        assert [item.base for item in rig.target.items if item.session == session] == list(range(3, 303))
    await rig.stop()


async def test_a_version_the_draft_does_not_speak_is_refused_by_name() -> None:
    rig = await Rig.start()
    old = DraftLink(rig.link.address, replace(HELLO, protocol_version=99), Target(), rules=RULES)
    task = asyncio.create_task(old.run())
    await eventually(lambda: "protocol_version" in old.status().problem)
    task.cancel()
    await rig.stop()


async def test_another_vocabulary_is_refused_by_name_and_the_draft_hears_of_it() -> None:
    rig = await Rig.start(Echo(replace(DRAFT, vocab_size=2000)))
    await eventually(lambda: "vocab_size" in rig.link.status().problem)
    await eventually(lambda: len(rig.echo.down) == 1)
    assert rig.target.ups == [] and rig.target.downs == []
    await rig.stop()


async def test_a_draft_may_refuse_and_is_asked_again() -> None:
    echo = Echo(refusal=PairingError("hidden_size", "made for 128"))
    rig = await Rig.start(echo, rules=replace(RULES, refused_retry_s=0.02))
    await eventually(lambda: rig.link.status().problem == "refused: hidden_size: made for 128")
    assert rig.link.status().given_up
    echo.refusal = None
    await rig.up()
    assert rig.link.status().problem == ""
    await rig.stop()


async def test_a_target_that_is_refused_again_and_again_is_logged_once() -> None:
    """It asks every ten seconds, for as long as an upgrade or a mistake lasts."""
    echo = Echo(refusal=PairingError("hidden_size", "made for 128"))
    with capture_logs() as lines:
        rig = await Rig.start(echo, rules=replace(RULES, refused_retry_s=0.02))
        await eventually(lambda: echo.refused > 3)
        echo.refusal = PairingError("hidden_size", "made for 256")
        await eventually(lambda: echo.refused > 6)
        echo.refusal = None
        await rig.up()
        await rig.stop()
    told = [line["problem"] for line in lines if line["event"] == "target stream ended"
            and line["log_level"] == "warning"]
    assert told == ["hidden_size: made for 128", "hidden_size: made for 256"]


async def test_reconnects_after_the_draft_restarts() -> None:
    rig = await (await Rig.start()).up()
    await rig.server.drain(0)
    await eventually(lambda: len(rig.target.downs) == 1)
    rig.link.send([commit()])  # down: nothing happens
    rig.server = GrpcServer(f"127.0.0.1:{rig.server.port}", WIRE, [DraftServicer(rig.echo)])
    await rig.server.start()
    await rig.up()
    rig.link.send([commit(9)])
    await eventually(lambda: len(rig.target.items) == 1)
    assert rig.target.items[0].base == 11 and len(rig.target.ups) == 2
    await rig.stop()


async def test_drain_of_the_draft_ends_the_stream_without_waiting() -> None:
    rig = await (await Rig.start()).up()
    await asyncio.wait_for(rig.server.drain(3600), 60)
    await eventually(lambda: len(rig.target.downs) == 1)
    assert rig.echo.down == rig.echo.up
    await rig.stop()


async def test_a_bad_item_costs_its_session_only() -> None:
    rig = await (await Rig.start()).up()
    rig.link.send([Commit(3, 5, ints(5000)), commit(5, 4)])
    await eventually(lambda: len(rig.target.items) == 1)
    assert rig.echo.faults == [(3, "commit.tokens")]
    rig.echo.up[0].send([Growth(6, 5, ints(1), ints(-5), ints(5000), np.zeros(1, np.float32)), Drop(7, "capacity")])
    await eventually(lambda: rig.target.items[-1] == Drop(7, "capacity"))
    assert rig.target.faults == [(6, "growth.tokens")]
    assert rig.target.downs == []
    await rig.stop()


async def test_oversized_features_are_split_and_an_oversized_item_costs_its_session() -> None:
    small = ConnectionRules(message_bytes=64 << 10)
    rig = await (await Rig.start(rules=small)).up()
    rows = np.arange(1000 * HIDDEN, dtype="<f4").tobytes()
    rig.link.send([Features(1, 0, rows, 1000, "float32"), Open(2, ints(*[1] * 20_000), 1, Sampling()), commit()])
    await eventually(lambda: len(rig.target.items) == 2)
    chunks = [item for item in rig.echo.items if isinstance(item, Features)]
    assert len(chunks) >= 4 and b"".join(chunk.rows for chunk in chunks) == rows
    assert Drop(2, "capacity") in rig.target.items
    assert rig.target.downs == []
    await rig.stop()


async def raw_draft(behave: Callable[[aio.ServicerContext, TargetHello], object],
                    other: int = 0) -> tuple[aio.Server, int]:
    """A draft service that shakes hands and then does what ``behave`` does. ``other``: bits of the stream's incarnation
    that it has wrong."""
    async def exchange(_requests: object, context: aio.ServicerContext) -> None:
        target = decode_target_hello(await context.read())
        await context.write(encode_draft_hello(replace(DRAFT, incarnation=target.incarnation ^ other)))
        await behave(context, target)

    server = aio.server()
    handler = grpc.stream_stream_rpc_method_handler(exchange)
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("slipstream.v1.DraftService", {"Exchange": handler})])
    port = server.add_insecure_port(LOOPBACK)
    await server.start()
    return server, port


async def test_a_stale_frame_is_dropped() -> None:
    async def behave(context: aio.ServicerContext, target: TargetHello) -> None:
        for incarnation, session in ((target.incarnation ^ 1, 1), (target.incarnation, 2)):
            await context.write(encode_draft_frames(incarnation, [Drop(session, "gap")], 1000)[0][0])
        await asyncio.Event().wait()

    server, port = await raw_draft(behave)
    target = Target()
    link = DraftLink(f"127.0.0.1:{port}", HELLO, target, rules=RULES)
    task = asyncio.create_task(link.run())
    await eventually(lambda: target.items == [Drop(2, "gap")])
    assert target.downs == []
    task.cancel()
    await server.stop(0)


async def test_a_draft_that_answers_another_stream_is_left_alone() -> None:
    async def behave(context: aio.ServicerContext, target: TargetHello) -> None:
        await asyncio.Event().wait()

    server, port = await raw_draft(behave, other=1)
    target = Target()
    link = DraftLink(f"127.0.0.1:{port}", HELLO, target, rules=RULES)
    task = asyncio.create_task(link.run())
    await eventually(lambda: "incarnation" in link.status().problem)
    assert link.status().given_up and target.ups == []
    task.cancel()
    await server.stop(0)


async def test_a_frame_that_is_none_resets_the_stream() -> None:
    async def behave(context: aio.ServicerContext, _target: TargetHello) -> None:
        await context.write(b"\xff\xff\xff")
        await asyncio.Event().wait()

    server, port = await raw_draft(behave)
    target = Target()
    task = asyncio.create_task(DraftLink(f"127.0.0.1:{port}", HELLO, target, rules=RULES).run())
    await eventually(lambda: len(target.downs) >= 1)
    assert target.downs[0] == "protocol: frame"
    task.cancel()
    await server.stop(0)


async def test_a_draft_that_does_not_read_makes_the_outbox_overflow() -> None:
    async def behave(_context: aio.ServicerContext, _target: TargetHello) -> None:
        await asyncio.Event().wait()

    server, port = await raw_draft(behave)
    target = Target()
    link = DraftLink(f"127.0.0.1:{port}", HELLO, target, rules=replace(RULES, waiting_batches=8))
    task = asyncio.create_task(link.run())
    await eventually(lambda: link.status().connected)
    rows = bytes(1000 * HIDDEN * 4)
    async with asyncio.timeout(60):
        while not target.downs:
            link.send([Features(1, 0, rows, 1000, "float32")])
            await asyncio.sleep(0.001)
    assert target.downs[0] == "overflow"
    task.cancel()
    await server.stop(0)


async def test_a_target_that_does_not_read_is_ended() -> None:
    echo = Echo()
    servicer = DraftServicer(echo, rules=replace(RULES, waiting_batches=4))
    server = GrpcServer(LOOPBACK, WIRE, [servicer])
    port = await server.start()
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.stream_stream("/slipstream.v1.DraftService/Exchange")()
        await call.write(encode_target_hello(HELLO))
        await eventually(lambda: len(echo.up) == 1)
        async with asyncio.timeout(60):
            while not echo.down:
                echo.up[0].send([Drop(session, "x" * 200) for session in range(500)])
                await asyncio.sleep(0.001)
        assert echo.down == echo.up
    await server.drain(0)


async def test_a_peer_that_says_nothing_is_refused_within_the_deadline() -> None:
    echo = Echo()
    server = GrpcServer(LOOPBACK, WIRE, [DraftServicer(echo, rules=replace(RULES, handshake_s=0.05))])
    port = await server.start()
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.stream_stream("/slipstream.v1.DraftService/Exchange")()
        with pytest.raises(aio.AioRpcError) as refused:
            await call.read()
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT and echo.up == []
    await server.drain(0)


async def test_more_targets_than_allowed_are_refused() -> None:
    echo, connected = Echo(), []
    server = GrpcServer(LOOPBACK, WIRE, [DraftServicer(echo, max_peers=1, on_connected=connected.append)])
    address = f"127.0.0.1:{await server.start()}"
    links = [DraftLink(address, HELLO, Target(), rules=RULES) for _ in range(2)]
    tasks = [asyncio.create_task(link.run()) for link in links]
    await eventually(lambda: any("1 targets" in link.status().problem for link in links)
                     and any(link.status().connected for link in links))  # who is refused may hear of it first
    assert sum(link.status().connected for link in links) == 1 and connected == [1], "who is refused is not counted"
    for task in tasks:
        task.cancel()
    await eventually(lambda: connected == [1, 0])
    await server.drain(0)


@dataclass
class BlackHole:
    """A TCP proxy that can stop passing bytes without closing anything."""

    port: int
    source: str = "127.0.0.1"  # where its connections come from
    silent: bool = False
    server: asyncio.Server | None = None
    port_out: int = 0

    async def start(self) -> BlackHole:
        self.server = await asyncio.start_server(self.join, "127.0.0.1", 0)
        self.port_out = self.server.sockets[0].getsockname()[1]
        return self

    async def join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.port,
                                                                local_addr=(self.source, 0))
        await asyncio.gather(self.copy(reader, far_writer), self.copy(far_reader, writer), return_exceptions=True)

    async def copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            if not self.silent:
                writer.write(data)
        writer.close()


async def test_one_host_does_not_take_all_places_of_a_draft() -> None:
    server = GrpcServer(LOOPBACK, WIRE, [DraftServicer(Echo(), max_peers=4)])
    port = await server.start()
    other = await BlackHole(port, "127.0.0.2").start()
    link = DraftLink(f"127.0.0.1:{other.port_out}", HELLO, Target(), rules=RULES)
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        begin = channel.stream_stream("/slipstream.v1.DraftService/Exchange")
        calls = [begin() for _ in range(4)]
        for call in calls:  # they say hello, and nothing more
            await call.write(encode_target_hello(HELLO))
            await call.read()
        assert await begin().code() == grpc.StatusCode.RESOURCE_EXHAUSTED, "it has all places"
        running = asyncio.create_task(link.run())
        await eventually(lambda: link.status().connected)
        await eventually(lambda: any(call.done() for call in calls))
        assert [await call.code() for call in calls if call.done()] == [grpc.StatusCode.RESOURCE_EXHAUSTED]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    await server.drain(0)


async def test_a_black_hole_is_noticed_on_both_sides() -> None:
    rules = ConnectionRules(keepalive_s=0.4, backoff_max_s=0.2, handshake_s=1.0)
    rig = await Rig.start(rules=rules)
    rig.task.cancel()
    hole = await BlackHole(rig.server.port).start()
    rig.link = DraftLink(f"127.0.0.1:{hole.port_out}", HELLO, rig.target, rules=rules)
    await eventually(lambda: rig.echo.down == rig.echo.up)
    rig.task = asyncio.create_task(rig.link.run())
    await rig.up()
    hole.silent = True
    await eventually(lambda: rig.target.downs[-1:] == ["unavailable"] and rig.echo.down == rig.echo.up)
    hole.silent = False
    await rig.up()
    await rig.stop()
    hole.server.close()


def local(echo: Echo, target: Target) -> LocalLink:
    return LocalLink(HELLO, target, echo)


def test_local_link_speaks_the_same_protocol() -> None:
    echo, target = Echo(), Target()
    link = local(echo, target)
    link.send([commit()])
    assert echo.items == [] and not link.status().connected
    link.restore()
    link.send([commit(5, 4), Commit(3, 5, ints(5000))])
    assert [item.session for item in target.items] == [4] and echo.faults == [(3, "commit.tokens")]
    old = echo.up[0]
    link.cut("test")
    old.send([Drop(1, "gap")])
    link.restore()
    old.send([Drop(2, "gap")])
    echo.up[1].send([Drop(3, "gap")])
    assert target.items[1:] == [Drop(3, "gap")] and target.downs == ["test"] and echo.down == [old]
    assert len(target.ups) == 2


def test_local_link_refuses_a_draft_that_does_not_fit() -> None:
    echo, target = Echo(replace(DRAFT, vocab_size=9)), Target()
    link = local(echo, target)
    link.restore()
    assert not link.status().connected and "vocab_size" in link.status().problem
    assert echo.down == echo.up and target.ups == []
    echo.hello = replace(DRAFT, max_nodes=0)
    link.restore()
    assert not link.status().connected and "max_nodes" in link.status().problem


def test_a_draft_that_is_away_is_dialled_ever_more_rarely_until_a_stream_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    lasting, bounds = iter([*[0.0] * 7, 5.0, 0.0]), list[float]()

    class Cut(DraftLink):
        async def _stream(self) -> None:
            await asyncio.sleep(next(lasting, 3600.0))
            raise Unavailable("gone")

    def longest(_low: float, high: float) -> float:
        if threading.current_thread() is threading.main_thread():  # others may still dial elsewhere
            bounds.append(high)
        return high

    async def dialled() -> None:
        dialling = asyncio.create_task(Cut("here:1", HELLO, Target()).run())
        await asyncio.sleep(60.0)
        dialling.cancel()

    monkeypatch.setattr("random.uniform", longest)
    counted(dialled())
    assert bounds == [0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0, 0.1, 0.2]


def test_a_bug_of_ours_costs_a_link_pauses_and_not_its_life() -> None:
    began_s = list[float]()

    class Broken(DraftLink):
        async def _stream(self) -> None:
            began_s.append(asyncio.get_running_loop().time())
            raise KeyError("bug")

    async def dialled() -> DraftStatus:
        dialling = asyncio.create_task((link := Broken("here:1", HELLO, Target())).run())
        await asyncio.sleep(10.0)
        dialling.cancel()
        return link.status()

    assert counted(dialled()).problem.startswith(LEFT_ALONE) and began_s == pytest.approx([0.0, 1.0, 3.0, 7.0])


async def test_an_outbox_takes_by_weight_and_forgets_after_overflow() -> None:
    box: Outbox[Commit] = Outbox(max_batches=100, max_bytes=1000)
    chunks = [Commit(1, n, np.array([5], np.int32), Features(1, n, bytes(300), 1, "float32")) for n in range(3)]
    for chunk in chunks:
        box.send([chunk])
    await settled()
    assert box.take(600) == chunks[:2] and box.filled.is_set(), "more waits, and nobody wakes its writer again"
    assert box.take(600) == chunks[2:] and not box.filled.is_set()
    for chunk in chunks * 2:
        box.send([chunk])
    box.refuse("later")
    with pytest.raises(CapacityError):
        await box.wait_failed()
    box.send(chunks[:1])
    assert box.take(600) == []


# The target's calls.

INFO = TargetInfo("tiny", 1000, 4096, "abc", 1, 2, False)
REQUEST = Request("r", (1, 2, 3), Sampling(), 8)


@dataclass
class Counting:
    """An Answer: counts up, one token a piece; goes on for ever if ``endless``."""

    num_tokens: int
    error: SlipstreamError | None = None
    modes: list[bool] = field(default_factory=list)
    closed: int = 0
    pause_s: float = 0.0

    async def __aiter__(self) -> AsyncIterator[Piece]:
        for n in range(self.num_tokens):
            await asyncio.sleep(self.pause_s)
            last = n + 1 == self.num_tokens and self.error is None
            yield Piece((n,), finish="length" if last else "", state="speculate" if all(self.modes) else "plain")
        if self.error:
            raise self.error

    def set_speculation(self, allowed: bool) -> None:
        self.modes.append(allowed)

    async def aclose(self) -> None:
        self.closed += 1


@dataclass
class Machine:
    """A Backend that gives the answer it was made with."""

    answer: Counting
    refusal: Exception | None = None
    requests: list[Request] = field(default_factory=list)

    def submit(self, request: Request) -> Counting:
        if self.refusal:
            raise self.refusal
        self.requests.append(request)
        return self.answer

    async def info(self) -> TargetInfo:
        return INFO


async def serve_target(machine: Machine) -> tuple[GrpcServer, TargetClient]:
    server = GrpcServer(LOOPBACK, WIRE, [TargetServicer(machine)])
    client = TargetClient(f"127.0.0.1:{await server.start()}")
    return server, client


async def test_an_answer_comes_through_and_is_closed() -> None:
    machine = Machine(Counting(5))
    server, client = await serve_target(machine)
    request = replace(REQUEST, sampling=Sampling(0.5, seed=3), top_logprobs=2, speculate=False)
    pieces = [piece async for piece in client.submit(request)]
    assert [piece.tokens for piece in pieces] == [(n,) for n in range(5)] and pieces[-1].finish == "length"
    assert machine.requests == [request] and machine.answer.closed == 1
    assert await client.info() == INFO
    await client.aclose()
    await server.drain(0)


@pytest.mark.parametrize("error", [
    InvalidRequest("top_p", "must be at most 1", "too_large"), NotFound("model", "no such model ünï"),
    CapacityError("full", 7.5), QuotaExceeded("used up", 7.5), Draining("going"), Unavailable("not now")])
@pytest.mark.parametrize("late", [False, True])
async def test_errors_keep_their_class(error: SlipstreamError, late: bool) -> None:
    machine = Machine(Counting(2, error), None if late else error)
    server, client = await serve_target(machine)
    got = []
    with pytest.raises(type(error)) as raised:
        async for piece in client.submit(REQUEST):
            got.append(piece)
    assert type(raised.value) is type(error) and str(raised.value) == str(error) and len(got) == (2 if late else 0)
    if isinstance(error, InvalidRequest):
        assert (raised.value.field, raised.value.code) == (error.field, error.code)
    if isinstance(error, CapacityError):
        assert raised.value.retry_after_s == 7.5
    await client.aclose()
    await server.drain(0)


async def test_a_bug_in_the_backend_is_unavailable_and_its_text_stays_there() -> None:
    server, client = await serve_target(Machine(Counting(1), ValueError("secret")))
    with pytest.raises(Unavailable) as raised:
        async for _ in client.submit(REQUEST):
            pass
    assert "INTERNAL" in str(raised.value) and "secret" not in str(raised.value)
    await client.aclose()
    await server.drain(0)


@pytest.mark.parametrize("how", ["break", "aclose", "cancel"])
async def test_leaving_an_answer_frees_it(how: str) -> None:
    machine = Machine(Counting(1 << 30, pause_s=0.001))
    server, client = await serve_target(machine)
    answer, seen = client.submit(REQUEST), asyncio.Event()

    async def read() -> None:
        async for _ in answer:
            seen.set()
            if how == "break":
                await answer.aclose()
                break

    task = asyncio.create_task(read())
    await asyncio.wait_for(seen.wait(), 60)
    if how == "aclose":
        await answer.aclose()
    elif how == "cancel":
        task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled() == (how == "cancel")
    await eventually(lambda: machine.answer.closed == 1)
    await answer.aclose()
    await client.aclose()
    await server.drain(0)


async def test_speculation_is_switched_in_mid_answer() -> None:
    machine = Machine(Counting(1 << 30, pause_s=0.001))
    server, client = await serve_target(machine)
    answer = client.submit(REQUEST)
    async with asyncio.timeout(60):
        async for piece in answer:
            if piece.tokens == (2,):
                answer.set_speculation(False)
            if piece.state == "plain":
                break
    assert machine.answer.modes == [False]
    await answer.aclose()
    await client.aclose()
    await server.drain(0)


async def test_a_target_that_is_not_there_or_says_nothing_is_unavailable() -> None:
    async def say_nothing(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    silent = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    for port in (1, silent.sockets[0].getsockname()[1]):
        client = TargetClient(f"127.0.0.1:{port}", connect_s=0.3)
        with pytest.raises(Unavailable):
            async for _ in client.submit(REQUEST):
                pass
        with pytest.raises(Unavailable):
            await client.info()
        await client.aclose()
    silent.close()


async def test_a_draining_target_refuses_and_finishes_what_runs() -> None:
    machine = Machine(Counting(50, pause_s=0.002))
    server, client = await serve_target(machine)
    running = client.submit(REQUEST)
    pieces = []
    async for piece in running:
        pieces.append(piece)
        if len(pieces) == 3:
            drain = asyncio.create_task(server.drain(60))
            await asyncio.sleep(0)
    await drain
    assert len(pieces) == 50
    with pytest.raises((Draining, Unavailable)):
        async for _ in client.submit(REQUEST):
            pass
    await client.aclose()


# Hosting.

@pytest.mark.parametrize(("listen", "fine"), [
    ("127.0.0.1:1", True), ("localhost:1", True), ("[::1]:1", True), ("0.0.0.0:1", False), ("[::]:1", False),
    ("10.0.0.1:1", False), ("some-host:1", False)])
def test_plain_text_stays_on_loopback(listen: str, fine: bool) -> None:
    if fine:
        bind_guard(listen, WIRE)
    else:
        with pytest.raises(ConfigError):
            bind_guard(listen, WIRE)


def test_plain_text_beyond_loopback_needs_leave() -> None:
    bind_guard("0.0.0.0:1", WireSection(insecure_allow_plaintext=True))


def test_what_is_refused_in_plain_text_is_told_what_that_port_can_do(tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"set wire\.tls\.folder"):
        bind_guard("0.0.0.0:1", WIRE)
    for key in ("listen", "grpc_listen"):  # clients speak no TLS of ours
        config = Config(model=ModelSection(path=str(tiny_folder)), router=RouterSection(**{key: "0.0.0.0:0"}))
        with pytest.raises(ConfigError, match=rf"router\.{key}: 0\.0\.0\.0:0 .*a proxy with TLS"):
            RouterService(config, {})


def test_keys_do_not_go_over_a_network_in_plain_text_without_leave(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("open-sesame\n")
    router = RouterSection(listen="0.0.0.0:0", api_keys_file=str(tmp_path / "keys"))
    with pytest.raises(ConfigError, match=r"router\.listen: .*plain text"):
        RouterService(Config(model=ModelSection(path=str(tiny_folder)), router=router), {})


async def test_health_follows_readiness() -> None:
    server = GrpcServer(LOOPBACK, WIRE, [TargetServicer(Machine(Counting(1)))])
    port = await server.start()
    serving = health_pb2.HealthCheckResponse.SERVING
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check",
                                    request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
                                    response_deserializer=health_pb2.HealthCheckResponse.FromString)

        async def healthy() -> list[bool]:
            names = ("", "liveness", "readiness", "slipstream.v1.TargetService")
            return [(await check(health_pb2.HealthCheckRequest(service=name))).status == serving for name in names]

        assert await healthy() == [True, True, False, False]
        await server.set_ready(True)
        assert await healthy() == [True, True, True, True]
    await server.drain(0)


async def test_questions_about_the_health_that_never_come_whole_are_few() -> None:
    server = GrpcServer(LOOPBACK, WIRE, [])
    async with aio.insecure_channel(f"127.0.0.1:{await server.start()}") as channel:
        begin = channel.stream_stream("/grpc.health.v1.Health/Check")
        calls = [begin() for _ in range(MAX_ASKING + 6)]
        await eventually(lambda: sum(call.done() for call in calls) == 6)
        assert {await call.code() for call in calls if call.done()} == {grpc.StatusCode.DEADLINE_EXCEEDED}
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert health_pb2.HealthCheckResponse.FromString(await check(b"")).status == SERVING
        name = health_pb2.HealthCheckRequest(service="x" * 1000).SerializeToString()
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch")(name)
        assert await asyncio.wait_for(watch.code(), 4.0) == grpc.StatusCode.INVALID_ARGUMENT
    await server.drain(0)


async def test_who_watches_the_health_are_few_and_the_oldest_of_an_address_goes() -> None:
    """Nobody needs a key for it, and each took 20 kB of the server's memory for as long as it pleased."""
    server = GrpcServer(LOOPBACK, WIRE, [])
    async with aio.insecure_channel(f"127.0.0.1:{await server.start()}") as channel:
        begin, calls = channel.unary_stream("/grpc.health.v1.Health/Watch"), []

        async def watch() -> None:
            calls.append(begin(b""))
            assert health_pb2.HealthCheckResponse.FromString(await calls[-1].read()).status == SERVING

        for _ in range(MAX_WATCHING_EACH + 2):
            await watch()
        assert {await call.code() for call in calls[:2]} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert not any(call.done() for call in calls[2:])
        calls[2].cancel()
        await watch()
        await watch()
        assert await calls[3].code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not any(call.done() for call in calls[4:]), "who had left made room for one"
    await server.drain(0)


async def test_a_taken_port_is_a_configuration_error() -> None:
    first = GrpcServer(LOOPBACK, WIRE, [])
    port = await first.start()
    with pytest.raises(ConfigError):
        await GrpcServer(f"127.0.0.1:{port}", WIRE, []).start()
    await first.drain(0)


# The public service.

@dataclass
class Parrot:
    """A Front that says back what it was told."""

    asked: list = field(default_factory=list)
    closed: int = 0

    async def chat(self, model: str, messages: tuple[Message, ...],
                   options: ChatOptions) -> AsyncGenerator[Delta, None]:
        self.asked.append((model, messages, options))
        try:
            for n, word in enumerate(messages[-1].content.split() * (options.max_tokens or 1)):
                await asyncio.sleep(0.001)
                yield Delta(word, (TextToken(n, word, n % 2 == 1),))
            yield Delta("", (), "stop", Usage(1, 2, 1, 0, 0, 1, reached=(3, 0, 1)))
        finally:
            self.closed += 1

    async def complete(self, model: str, prompt: str, options: ChatOptions) -> AsyncGenerator[Delta, None]:
        if model:
            raise NotFound("model", f"no model {model}", "model_not_found")
        yield Delta(prompt.upper(), (), "length", Usage(1, 1))

    async def models(self) -> list[str]:
        return ["parrot"]


async def serve_parrot(key: str = "") -> tuple[GrpcServer, Parrot, str]:
    parrot = Parrot()
    servicer = InferenceServicer(lambda shown, _: parrot if not key or shown == key else None)
    server = GrpcServer(LOOPBACK, WIRE, [servicer])
    return server, parrot, f"127.0.0.1:{await server.start()}"


async def test_async_client() -> None:
    server, parrot, address = await serve_parrot()
    async with AsyncClient(address) as client:
        deltas = [delta async for delta in client.chat("a b", temperature=0.5, stop="x", logit_bias={3: 1.0})]
        assert "".join(delta.text for delta in deltas) == "ab"
        assert deltas[-1].usage == Usage(1, 2, 1, 0, 0, 1, reached=(3, 0, 1))
        assert [token.drafted for delta in deltas for token in delta.tokens] == [False, True]
        (model, messages, options), = parrot.asked
        assert (model, messages) == ("", (Message("user", "a b"),)) and options.seed is not None
        assert replace(options, seed=None) == ChatOptions(temperature=0.5, stop=("x",), logit_bias=((3, 1.0),))
        assert await client.models() == ["parrot"]
        with pytest.raises(NotFound) as raised:
            [delta async for delta in client.complete("hi", model="other")]
        assert (raised.value.field, raised.value.code) == ("model", "model_not_found")
        async for _ in (stream := client.chat("a", max_tokens=1 << 20)):
            break
        await stream.aclose()
        await eventually(lambda: parrot.closed == 2)
    await server.drain(0)


async def test_a_client_that_reads_nothing_keeps_no_answer() -> None:
    class Endless(Parrot):
        begun = 0

        async def chat(self, model: str, messages: tuple[Message, ...], options: ChatOptions
                       ) -> AsyncGenerator[Delta, None]:
            self.begun += 1
            try:
                while True:
                    yield Delta("x" * 100_000, (TextToken(5, "x", False, None),), identity="ab" * 16)
            finally:
                self.closed += 1

    endless = Endless()
    server = GrpcServer("127.0.0.1:0", WireSection(), [InferenceServicer(lambda *_: endless, stall_s=0.2)])
    async with AsyncClient(f"127.0.0.1:{await server.start()}") as client:
        stream = client.chat("a")
        await anext(stream)
        await eventually(lambda: endless.closed == 1)
        while endless.begun == 1:
            await anext(stream)  # who reads on sees a pause
        await stream.aclose()
    await server.drain(0)


async def test_sync_client() -> None:
    server, parrot, address = await serve_parrot()

    def use() -> None:
        with Client(address) as client:
            turns = [{"role": "system", "content": "s"}, Message("user", "a b")]
            assert "".join(delta.text for delta in client.chat(turns, seed=4)) == "ab"
            assert [delta.text for delta in client.complete("hi")] == ["HI"]
            assert client.models() == ["parrot"]
            with pytest.raises(InvalidRequest):
                client.chat("hi", temprature=1)
            stream = client.chat("a", max_tokens=1 << 20)
            next(stream)
            stream.close()

    await asyncio.to_thread(use)
    assert parrot.asked[0][1] == (Message("system", "s"), Message("user", "a b"))
    await eventually(lambda: parrot.closed == 2)
    await server.drain(0)


@pytest.mark.parametrize("method", ["Chat", "Complete", "ListModels"])
async def test_nothing_is_read_without_a_key_and_nothing_is_waited_for_for_ever(method: str) -> None:
    servicer = InferenceServicer(lambda shown, _: Parrot() if shown == "sesame" else None, body_s=0.1)
    server = GrpcServer(LOOPBACK, WIRE, [servicer])
    async with aio.insecure_channel(f"127.0.0.1:{await server.start()}") as channel:
        begin = channel.stream_stream(f"/slipstream.v1.InferenceService/{method}")
        for key, code in (("wrong", grpc.StatusCode.UNAUTHENTICATED), ("sesame", grpc.StatusCode.INVALID_ARGUMENT)):
            call = begin(metadata=(("authorization", f"Bearer {key}"),))  # and not a byte more
            assert await asyncio.wait_for(call.code(), 4.0) == code
        for shown in ("Bearer sesame", "bearer sesame", "BEARER  sesame ", "sesame"):  # as over HTTP, or the key alone
            call = begin(metadata=(("authorization", shown),))
            await call.done_writing()
            assert await asyncio.wait_for(call.details(), 4.0) == "request: is missing"
    await server.drain(0)


async def test_a_client_of_another_language_reads_in_the_details_which_field_is_wrong() -> None:
    server, _, address = await serve_parrot()
    async with aio.insecure_channel(address) as channel, AsyncClient(address) as client:
        complete = channel.unary_stream("/slipstream.v1.InferenceService/Complete")
        call = complete(encode_complete("x", "a", ChatOptions()))
        assert await call.details() == "model: no model x"
        with pytest.raises(NotFound) as raised:
            await anext(client.complete("a", model="x"))
        assert (raised.value.field, raised.value.message) == ("model", "no model x"), "the field is said once"
    await server.drain(0)


async def test_keys_guard_every_public_call() -> None:
    server, _, address = await serve_parrot("sesame")
    for key in ("", "wrong"):
        async with AsyncClient(address, api_key=key) as client:
            for ask in (lambda c: anext(c.chat("a")), lambda c: anext(c.complete("a")), lambda c: c.models()):
                with pytest.raises(InvalidRequest) as raised:
                    await ask(client)
                assert raised.value.field == "api_key"
    async with AsyncClient(address, api_key="sesame") as client:
        assert await client.models() == ["parrot"]
    await server.drain(0)
