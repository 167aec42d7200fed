"""Connections are not requests: many that ask for nothing, or only half of it, take nobody's place."""

from __future__ import annotations

import asyncio
import json
import random
import resource
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio
from starlette.types import ASGIApp, Receive, Scope, Send

from router_service import connection
from router_service.connection import ConnectionLimits
from router_service.listener import HttpListener
from slipstream.base.clients import ClientTracker, network_of
from slipstream.base.config import RouterSection, WireSection
from slipstream.base.errors import CapacityError, InvalidRequest, Unavailable
from slipstream.observe.metrics import RouterMetrics
from slipstream.protocol.chat import ChatOptions, Delta, Message
from slipstream.wire.bodies import Bodies
from slipstream.wire.channel import RULES
from slipstream.wire.client import AsyncClient
from slipstream.wire.inference import Front, InferenceServicer, decode_delta, encode_chat
from slipstream.wire.server import GrpcServer
from tests.echo import EchoTarget
from tests.loop import eventually
from tests.routing import COMPLETIONS, routing

pytestmark = pytest.mark.usefixtures("servers_end")
GET = b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n"
PROBE = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n"
MANY = 2000


@dataclass
class Closed:
    """The clients that were closed, and why."""

    clients: list[tuple[int, str]] = field(default_factory=list)

    def close(self, client: int, reason: str) -> None:
        self.clients.append((client, reason))


def test_who_has_been_idle_longest_goes() -> None:
    closed = Closed()
    clients = ClientTracker(3, 3, closed.close)
    for client in range(3):
        clients.add(client, "1.1.1.1")
    clients.mark_busy(0)
    clients.mark_idle(1)
    clients.add(3, "2.2.2.2")
    assert closed.clients == [(2, "full")]
    clients.mark_idle(0)
    clients.add(4, "2.2.2.2")
    assert closed.clients[1:] == [(1, "full")]


def test_an_address_that_has_its_share_loses_its_own() -> None:
    closed = Closed()
    clients = ClientTracker(10, 2, closed.close)
    clients.add(0, "1.1.1.1")
    for client, host in ((1, "2001:db8::1"), (2, "2001:db8::2"), (3, "2001:db8:0:0:ff::3")):
        clients.add(client, host)
    assert closed.clients == [(1, "address")]
    clients.mark_busy(2)
    clients.mark_busy(3)
    clients.add(4, "2001:db8::4")
    assert closed.clients[1:] == [(4, "address")], "busy clients stay"
    assert (clients.num_idle, clients.num_busy) == (1, 2)


@pytest.mark.parametrize(("host", "network"), [
    ("10.0.0.1", "10.0.0.1"), ("::ffff:10.0.0.1", "10.0.0.1"), ("fe80::1%eth0", "fe80::/64"), ("", ""),
    ("2001:db8:1:2:3::4", "2001:db8:1:2::/64")])
def test_what_counts_as_one_address(host: str, network: str) -> None:
    assert network_of(host) == network


def test_a_population_of_clients_is_bounded_and_no_busy_one_is_closed() -> None:
    rng, closed = random.Random(7), Closed()
    most, each = 12, 5
    clients, here, busy = ClientTracker(most, each, closed.close), dict[int, str](), set[int]()
    for client in range(4000):
        host = f"10.0.0.{rng.randrange(6)}"
        clients.add(client, host)
        here[client] = host
        for left, _ in closed.clients:
            assert left not in busy
            del here[left]
        closed.clients.clear()
        assert len(here) <= most and all(list(here.values()).count(host) <= each for host in here.values())
        for other in rng.sample(sorted(here), min(2, len(here))):
            match rng.randrange(3):
                case 0:
                    clients.mark_busy(other)
                    busy.add(other)
                case 1:
                    clients.mark_idle(other)
                    busy.discard(other)
                case _:
                    clients.remove(other)
                    del here[other]
                    busy.discard(other)
        assert (clients.num_idle, clients.num_busy) == (len(here) - len(busy), len(busy))


class Slow:
    """Answers when it may; probes at once."""

    def __init__(self) -> None:
        self.go, self.asked = asyncio.Event(), asyncio.Semaphore(0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        if scope["path"] != "/live":
            self.asked.release()
            await self.go.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


Socket = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Door:
    """A listener with room for 7 requests, and for 22 connections, 11 of them of one address."""

    def __init__(self, app: ASGIApp) -> None:
        self.metrics = RouterMetrics("tiny")
        self.listener = HttpListener(app, RouterSection(listen="127.0.0.1:0", max_in_flight=1), WireSection(),
                                     self.metrics, [b"/live"], lambda: 11.5)
        self.open: list[asyncio.StreamWriter] = []

    async def knock(self, sent: bytes = b"") -> Socket:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.listener.port)
        self.open.append(writer)
        writer.write(sent)
        return reader, writer

    def counted(self, name: str, value: str) -> float:
        return counted(self.metrics.registry.page("")[1].decode(), name, value)


def counted(page: str, name: str, value: str) -> float:
    (found,) = [line for line in page.splitlines() if line.startswith(f"slipstream_http_{name}{{") and value in line]
    return float(found.split()[-1])


@asynccontextmanager
async def door(monkeypatch: pytest.MonkeyPatch, app: ASGIApp) -> AsyncIterator[Door]:
    monkeypatch.setattr(connection, "SPARE", 4)
    found = Door(app)
    await found.listener.start()
    yield found
    for writer in found.open:
        writer.close()
    await found.listener.close()


async def answer(reader: asyncio.StreamReader) -> int:
    """The status of one answer; a refusal has the API's shape."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    body = await reader.readexactly(length)
    status = int(head.split(b" ", 2)[1])
    if status != 200:
        back = b"retry-after: 12" if status == 429 else b"retry-after: 1\r"
        assert json.loads(body)["error"]["message"] and back in head and b"connection: close" in head
    return status


@pytest.mark.parametrize("host", ["::1", "127.0.0.1"])
async def test_all_interfaces_are_those_of_both_kinds(host: str) -> None:
    """As gRPC takes the same address, and as it is in pods that have addresses of both."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    app = Slow()
    app.go.set()
    listener = HttpListener(app, RouterSection(listen="[::]:0"), WireSection(insecure_allow_plaintext=True),
                            RouterMetrics("tiny"))
    await listener.start()
    reader, writer = await asyncio.open_connection(host, listener.port)
    writer.write(GET)
    assert await answer(reader) == 200
    writer.close()
    await listener.close()


async def test_the_oldest_that_is_idle_goes_and_the_newest_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    app = Slow()
    app.go.set()
    async with door(monkeypatch, app) as found:
        first, writer = await found.knock(GET)
        assert await answer(first) == 200
        idle = [(await found.knock())[0] for _ in range(30)]
        assert await first.read() == b"" and await idle[0].read() == b""
        reader, _ = await found.knock(GET)
        assert await answer(reader) == 200
        assert found.counted("connections_refused_total", "address") == 21
        assert found.counted("connections", "idle") == 11
        last, writer = idle[-1], found.open[-2]
        writer.write(GET)
        assert await answer(last) == 200, "the youngest stay"


@pytest.mark.parametrize("begun", [GET[:-2], POST + b"ab"], ids=["head", "body"])
async def test_half_a_request_makes_room_and_is_told(monkeypatch: pytest.MonkeyPatch, begun: bytes) -> None:
    app = Slow()
    app.go.set()
    async with door(monkeypatch, app) as found:
        half, writer = await found.knock()
        writer.write(begun)
        if begun.startswith(b"POST"):
            reader, _ = await found.knock(PROBE)  # when it is answered, the body's beginning has been read
            assert await answer(reader) == 200
        for _ in range(12):
            reader, _ = await found.knock(PROBE)
            assert await answer(reader) == 200
        assert await answer(half) == 503
        assert await half.read() == b""


async def test_who_asked_at_once_is_told_and_not_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy takes a router that resets its connections for broken, and sends it nothing for a while."""
    app = Slow()
    app.go.set()
    async with door(monkeypatch, app) as found:
        sockets = [socket.create_connection(("127.0.0.1", found.listener.port)) for _ in range(14)]
        for one in sockets:  # all is sent before the server accepts the first
            one.sendall(GET)
        answers = list[int]()
        for one in sockets:
            reader, writer = await asyncio.open_connection(sock=one)
            found.open.append(writer)
            answers.append(await answer(reader))
        # Those whose answer was out when they had to go were told nothing more.
        assert answers.count(503) <= found.counted("connections_refused_total", "address") == 3
        assert answers.count(200) >= 7 and set(answers) <= {200, 429, 503}


async def test_whose_request_nobody_has_read_is_told_and_not_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    app = Slow()
    app.go.set()
    async with door(monkeypatch, app) as found:
        oldest, writer = await found.knock(PROBE)
        assert await answer(oldest) == 200
        (unread,) = found.listener._server.server_state.connections
        unread.transport.pause_reading()
        writer.write(GET)
        await writer.drain()
        for _ in range(11):
            reader, _ = await found.knock(PROBE)
            assert await answer(reader) == 200
        assert await answer(oldest) == 503
        assert await oldest.read() == b"", "not reset"


async def test_who_was_refused_makes_room_and_is_not_told_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: wrong.append(context))
    app = Slow()
    async with door(monkeypatch, app) as found:
        for _ in range(7):
            await found.knock(GET)
            await app.asked.acquire()
        refused, _ = await found.knock(GET)
        assert await answer(refused) == 429
        for _ in range(4):
            reader, _ = await found.knock(PROBE)
            assert await answer(reader) == 200
        assert await refused.read() == b"" and found.counted("connections_refused_total", "address") == 1
        app.go.set()
    assert not wrong


async def test_bodies_have_so_many_bytes_together_and_the_oldest_that_is_not_whole_goes(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_BODIES_BYTES", 2500)
    head, app = b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n", Slow()
    async with door(monkeypatch, app) as found:

        async def comes(sent: bytes) -> Socket:
            socket = await found.knock(sent)
            reader, _ = await found.knock(PROBE)  # when it is answered, those bytes have been read
            assert await answer(reader) == 200
            return socket

        whole, _ = await comes(head + bytes(1000))
        half, _ = await comes(head + bytes(900))
        other, rest = await comes(head + bytes(900))
        assert await answer(half) == 503 and await half.read() == b""
        rest.write(bytes(100))
        app.go.set()
        assert await answer(whole) == await answer(other) == 200
        assert found.counted("connections_refused_total", "bodies") == 1
        for _ in range(6):  # what is answered is not kept
            reader, _ = await comes(head + bytes(1000))
            assert await answer(reader) == 200


async def test_who_says_little_is_heard_beside_large_bodies_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_BODIES_BYTES", 2500)
    app = Slow()
    async with door(monkeypatch, app) as found:
        large = [await found.knock(b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 1200\r\n\r\n" + bytes(1200))
                 for _ in range(2)]
        for _ in large:
            await app.asked.acquire()
        little, _ = await found.knock(b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 110\r\n\r\n" + bytes(110))
        await app.asked.acquire()
        app.go.set()
        assert [await answer(reader) for reader in (little, *(reader for reader, _ in large))] == [200] * 3


async def test_large_bodies_of_one_tenant_keep_no_other_s_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred and thirty of 2 MiB, as one may have running and waiting, closed each of others beyond 146 KiB."""
    class Theirs(Slow):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            connection.connection_of(scope).set_tenant(scope["path"])
            await super().__call__(scope, receive, send)

    def asks(path: str, length: int) -> bytes:
        return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode()

    monkeypatch.setattr(connection, "MAX_BODIES_BYTES", 2500)
    app = Theirs()
    async with door(monkeypatch, app) as found:

        async def comes(path: str) -> asyncio.StreamReader:
            reader, writer = await found.knock(asks(path, 300) + bytes(200))
            probe, _ = await found.knock(PROBE)
            assert await answer(probe) == 200
            writer.write(bytes(100))
            return reader

        large = [(await found.knock(asks("/a", 1200) + bytes(1200)))[0] for _ in range(2)]
        for _ in large:
            await app.asked.acquire()
        assert await answer(await comes("/a")) == 503
        other = await comes("/b")
        await app.asked.acquire()
        assert await answer(await comes("/b")) == 503, "nor is it without a bound"
        app.go.set()
        assert [await answer(reader) for reader in (other, *large)] == [200] * 3


async def test_a_request_that_is_here_whole_is_not_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    app = Slow()
    async with door(monkeypatch, app) as found:
        asked = [(await found.knock(POST + b"abcd"))[0] for _ in range(3)]
        for _ in asked:
            await app.asked.acquire()
        for _ in range(40):
            await found.knock()
        reader, _ = await found.knock(PROBE)
        assert await answer(reader) == 200
        assert found.counted("connections", "at_work") == 3
        app.go.set()
        assert [await answer(reader) for reader in asked] == [200] * 3


async def test_requests_beyond_the_room_are_refused_and_probes_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    app = Slow()
    async with door(monkeypatch, app) as found:
        asked = [(await found.knock(GET))[0] for _ in range(7)]
        for _ in asked:
            await app.asked.acquire()
        more, _ = await found.knock(GET)
        assert await answer(more) == 429
        probe, _ = await found.knock(PROBE)
        assert await answer(probe) == 200
        assert found.counted("connections_refused_total", "requests") == 1
        app.go.set()
        assert [await answer(reader) for reader in asked] == [200] * 7
        again, _ = await found.knock(GET)
        assert await answer(again) == 200


class Lists:
    """A Front that lists models, and nothing else."""

    async def models(self) -> list[str]:
        return ["tiny"]

    def chat(self, model: str, messages: tuple[Message, ...], options: ChatOptions) -> AsyncGenerator[Delta, None]:
        raise NotImplementedError

    def complete(self, model: str, prompt: str, options: ChatOptions) -> AsyncGenerator[Delta, None]:
        raise NotImplementedError


async def test_sockets_that_say_nothing_leave_grpc_to_those_that_do() -> None:
    rules = replace(RULES, connections=4, handshake_s=0.3)
    server = GrpcServer("127.0.0.1:0", WireSection(), [InferenceServicer(lambda *_: Lists())], rules=rules)
    await server.start()
    async with AsyncClient(f"127.0.0.1:{server.port}") as client:
        crowd = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(40)]
        assert await asyncio.gather(*[reader.read() for reader, _ in crowd[4:]]), "beyond the room they end at once"
        models: list[str] = []
        while not models:
            with suppress(Unavailable):
                models = await client.models()
            await asyncio.sleep(0.05)
        assert models == ["tiny"]
    for _, writer in crowd:
        writer.close()
    await server.drain(0)


async def test_a_client_may_ping_ten_times_as_often_as_ours() -> None:
    """Our clients ping every ten seconds; grpc-js and .NET are told to do it each second. gRPC's server counts pings
    that come too soon, and closes the connection with the third."""
    rules = replace(RULES, keepalive_s=2.0)
    server = GrpcServer("127.0.0.1:0", WireSection(), [InferenceServicer(lambda *_: Lists())], rules=rules)
    reader, writer = await asyncio.open_connection("127.0.0.1", await server.start())
    settings, ping = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]), bytes([0, 0, 8, 6, 0, 0, 0, 0, 0])
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings)
    for n in range(5):
        writer.write(ping + n.to_bytes(8))
        answer = ping[:4] + b"\1" + ping[5:] + n.to_bytes(8)
        await asyncio.wait_for(reader.readuntil(answer), 5.0)
        await asyncio.sleep(0.12)
    writer.close()
    await server.drain(0)


async def drained_again_and_again() -> None:
    """One drain has an hour; others have no time, and begin in each turn of the loop until all is closed."""
    server = GrpcServer("127.0.0.1:0", WireSection(), [InferenceServicer(lambda *_: Lists())])
    async with aio.insecure_channel(f"127.0.0.1:{await server.start()}") as channel:
        call = begun(channel)
        await asyncio.sleep(0.1)
        first = asyncio.create_task(server.drain(3600))
        await asyncio.sleep(0.1)
        assert not first.done() and not call.done()
        others = list[asyncio.Task[None]]()
        while not first.done():
            others.append(asyncio.create_task(server.drain(0)))
            await asyncio.sleep(0)
        await asyncio.gather(first, *others)
        assert await call.code() is grpc.StatusCode.UNAVAILABLE


async def sent_away(code: int) -> None:
    """Asks a server that closes each connection with a GOAWAY of this code."""
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(24)  # the client's preface
        settings, goaway = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]), bytes([0, 0, 8, 7, 0, 0, 0, 0, 0])
        writer.write(settings)
        await reader.read(1 << 16)
        await asyncio.sleep(0.1)  # the connection is in use
        writer.write(goaway + bytes(4) + code.to_bytes(4))
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, AsyncClient(f"127.0.0.1:{server.sockets[0].getsockname()[1]}") as client:
        for _ in range(3):
            with pytest.raises(Unavailable):
                await client.models()


@pytest.mark.parametrize("run", ["drained_again_and_again()", "sent_away(1)", "sent_away(13)", "sent_away(70007)"])
def test_no_way_to_end_a_connection_ends_the_process(run: str) -> None:
    """13 is HTTP_1_1_REQUIRED, 70007 Apache's; gRPC 1.84 and 1.85 end the process for both."""
    code = f"import asyncio, tests.test_connections as own; asyncio.run(own.{run})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)  # may crash
    assert done.returncode == 0, done.stderr


@asynccontextmanager
async def grpc_door(front: Front, room: int, body_s: float = 60.0,
                    **rules: float) -> AsyncIterator[tuple[AsyncClient, aio.Channel]]:
    """A gRPC server with room for so many bytes, of messages of a hundred, and two ways to it."""
    bodies = Bodies(room, 100, **{"slow_s": 0.1} | rules)
    servicer = InferenceServicer(lambda *_: front, body_s=body_s, bodies=bodies)
    server = GrpcServer("127.0.0.1:0", WireSection(), [servicer])
    address = f"127.0.0.1:{await server.start()}"
    async with AsyncClient(address) as client, aio.insecure_channel(address) as channel:
        yield client, channel
    await server.drain(0)


def begun(channel: aio.Channel) -> Any:
    """A call that says nothing."""
    return channel.stream_stream("/slipstream.v1.InferenceService/Chat")()


async def test_requests_over_grpc_have_so_many_bytes_together_and_the_slowest_goes() -> None:
    async with grpc_door(Lists(), 250, body_s=1.0) as (client, channel):
        first = begun(channel)
        await asyncio.sleep(0.05)
        second = begun(channel)
        await asyncio.sleep(0.05)
        assert await client.models() == ["tiny"], "who says nothing keeps others out"
        assert await first.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not second.done()
        for _ in range(6):  # what is answered is not kept
            assert await client.models() == ["tiny"]
        assert await second.code() is grpc.StatusCode.INVALID_ARGUMENT and "arrive" in await second.details()


async def test_requests_over_grpc_that_are_here_count_until_they_are_answered() -> None:
    class Slow(Lists):
        go = asyncio.Event()

        async def chat(self, model: str, messages: tuple[Message, ...], options: ChatOptions
                       ) -> AsyncGenerator[Delta, None]:
            yield Delta("a")
            await self.go.wait()
            yield Delta("b", finish="stop")

    slow = Slow()
    async with grpc_door(slow, 150, body_s=1.0) as (client, _):
        answer = client.chat("x" * 60)
        assert (await anext(answer)).text == "a"
        with pytest.raises(CapacityError, match="as many requests as it can"):
            await client.models()
        slow.go.set()
        assert [delta.text async for delta in answer] == ["b"]
        assert await client.models() == ["tiny"]


async def test_who_says_little_over_grpc_is_heard_beside_large_requests_that_are_here() -> None:
    class Waits(Lists):
        def __init__(self) -> None:
            self.here, self.go = 0, asyncio.Event()

        async def chat(self, model: str, messages: tuple[Message, ...], options: ChatOptions
                       ) -> AsyncGenerator[Delta, None]:
            self.here += 1
            await self.go.wait()
            yield Delta("b", finish="stop")

    waits = Waits()
    large = encode_chat("", (Message("user", "x" * 80),), ChatOptions())
    async with grpc_door(waits, 1000) as (client, channel):
        asked = [begun(channel) for _ in range(10)]
        for call in asked:
            await call.write(large)
        await eventually(lambda: waits.here == 10)
        assert await asyncio.gather(*(client.models() for _ in range(20))) == [["tiny"]] * 20
        refused = begun(channel)
        await refused.write(large)
        assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        waits.go.set()
        assert [decode_delta(await call.read()).text for call in asked] == ["b"] * 10


async def test_many_requests_over_grpc_at_once_take_turns() -> None:
    async with grpc_door(Lists(), 100, slow_s=60.0) as (client, _):
        assert await asyncio.gather(*(client.models() for _ in range(200))) == [["tiny"]] * 200


async def test_so_many_requests_over_grpc_wait_for_room_and_the_newest_goes_on_first() -> None:
    async with grpc_door(Lists(), 100, max_waiting=2, slow_s=60.0) as (client, channel):
        held = begun(channel)
        await asyncio.sleep(0.05)
        waiting = []
        for _ in range(2):
            waiting.append(asyncio.create_task(client.models()))
            await asyncio.sleep(0.05)
        with pytest.raises(CapacityError):
            await client.models()
        held.cancel()
        assert await asyncio.gather(*waiting) == [["tiny"]] * 2


async def test_who_comes_while_a_request_over_grpc_runs_out_of_time_waits_for_its_room() -> None:
    """He got an error of ours, and the room that he had waited for was nobody's for ever."""
    bodies = Bodies(100, 100, slow_s=0.0)

    async def silent() -> bytes:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.1)  # to be cancelled takes a moment
        return b""

    async def hello() -> bytes:
        return b"hello"

    async def size(read: Callable[[], Awaitable[bytes]], within_s: float) -> int:
        async with bodies.held(read, within_s, len) as length:
            return length

    late = asyncio.create_task(size(silent, 0.05))
    await asyncio.sleep(0.1)
    assert await size(hello, 10.0) == 5
    with pytest.raises(InvalidRequest, match="did not arrive"):
        await late
    assert await size(hello, 0.1) == 5


def test_few_open_files_leave_room_for_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "max_open_files", lambda: 256)
    limits = ConnectionLimits(128, (), RouterMetrics("tiny"), lambda: 1.0)
    assert limits.max_requests == 48


async def test_two_thousand_idle_connections_without_a_key_take_no_place(tiny_folder: Path, tmp_path: Path) -> None:
    """On the router as it is configured by default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * MANY + 2000  # both ends are here, and what else this process has open
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"{MANY} connections need {wanted} open files; this system allows {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    try:
        async with routing(tiny_folder, EchoTarget(), api_keys_file=str(keys)) as router:
            port = router.service.http_port
            crowd = [await asyncio.open_connection("127.0.0.1", port) for _ in range(MANY)]
            for path in ("/live", "/health"):
                assert (await router.http.get(path)).status_code == 200
            asked = await asyncio.gather(*[
                router.http.post(COMPLETIONS, json={"model": "tiny", "prompt": "hello", "max_tokens": 4},
                                 headers={"Authorization": "Bearer secret"}) for _ in range(16)])
            assert [response.status_code for response in asked] == [200] * 16
            page = await router.metrics()
            assert counted(page, "connections_refused_total", "address") > 1000
            for _, writer in crowd:
                writer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
