"""What a client may send on a connection, and what it hears when it sends something else: over raw sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from router_service.connection import HEAD_S, MAX_HEADER_BYTES, MAX_WAITING, connection_of
from router_service.listener import HttpListener
from slipstream.base.config import RouterSection, WireSection
from slipstream.observe.metrics import RouterMetrics
from tests.loop import hurried, settled, still

HOST = b"Host: x\r\n"
GET = b"GET /a HTTP/1.1\r\n" + HOST
POST = b"POST /a HTTP/1.1\r\n" + HOST
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n"
LAST = b"GET /last HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n"
LINE = b"X-A: " + b"y" * 93 + b"\r\n"

REFUSED = {
    "no host": (GET.replace(HOST, b"") + b"\r\n", 400),
    "two hosts": (GET + HOST + b"\r\n", 400),
    "two hosts, 1.0": (b"GET /a HTTP/1.0\r\n" + HOST * 2 + b"\r\n", 400),
    "HTTP/0.9": (b"GET /a\r\n\r\n", 505),
    "HTTP/1.2": (GET.replace(b"1.1", b"1.2") + b"\r\n", 400),
    "HTTP/2.0": (GET.replace(b"1.1", b"2.0") + b"\r\n", 505),
    "HTTP/2's preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    "no method": (b"\x01\x02\r\n\r\n", 400),
    "another method": (GET.replace(b"GET", b"FETCH") + b"\r\n", 400),
    "a lower one": (GET.replace(b"GET", b"get") + b"\r\n", 400),
    "CONNECT": (b"CONNECT x:443 HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "no path": (b"GET a HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "a host for a path": (b"GET http://x HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "bytes in a path": (b"GET /\xc3\xa4 HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "length and chunks": (CHUNKED + b"Content-Length: 4\r\n\r\n2\r\nab\r\n0\r\n\r\n", 400),
    "chunks and length": (POST + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n", 400),
    "two lengths": (POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\nabc", 400),
    "a list of lengths": (POST + b"Content-Length: 2, 3\r\n\r\nabc", 400),
    "a length with a sign": (POST + b"Content-Length: +2\r\n\r\nab", 400),
    "a negative length": (POST + b"Content-Length: -2\r\n\r\nab", 400),
    "a length without end": (POST + b"Content-Length: 99999999999999999999999\r\n\r\nab", 400),
    "two codings": (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n", 501),
    "two codings in two lines": (CHUNKED + b"Transfer-Encoding: gzip\r\n\r\n2\r\nab\r\n0\r\n\r\n", 400),
    "chunks not last": (POST + b"Transfer-Encoding: chunked, gzip\r\n\r\n2\r\nab\r\n0\r\n\r\n", 400),
    "like chunks": (POST + b"Transfer-Encoding: xchunked\r\n\r\n2\r\nab\r\n0\r\n\r\n", 501),
    "a space before a colon": (POST + b"Transfer-Encoding : chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n", 400),
    "a folded coding": (POST + b"Transfer-Encoding:\r\n chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n", 400),
    "a folded header": (GET + b"X-A: b\r\n c\r\n\r\n", 400),
    "a space before a header": (b"GET /a HTTP/1.1\r\n X-A: b\r\n" + HOST + b"\r\n", 400),
    "bare line feeds": (b"GET /a HTTP/1.1\nHost: x\n\n", 400),
    "a bare return": (GET + b"X-A: b\rc\r\n\r\n", 400),
    "a zero byte": (GET + b"X-A: b\0c\r\n\r\n", 400),
    "a control character": (GET + b"X-A: b\x01c\r\n\r\n", 400),
    "a name with a space": (GET + b"X A: b\r\n\r\n", 400),
    "no colon": (GET + b"XA\r\n\r\n", 400),
    "no name": (GET + b": b\r\n\r\n", 400),
    "a chunk's size": (CHUNKED + b"\r\nzz\r\nab\r\n0\r\n\r\n", 400),
    "a size as in C": (CHUNKED + b"\r\n0x2\r\nab\r\n0\r\n\r\n", 400),
    "a size without end": (CHUNKED + b"\r\nfffffffffffffffff\r\nab\r\n0\r\n\r\n", 400),
    "a chunk that goes on": (CHUNKED + b"\r\n2\r\nabcd\r\n0\r\n\r\n", 400),
    "chunks by line feeds": (CHUNKED + b"\r\n2\nab\n0\n\n", 400),
    "a head of many lines": (GET + LINE * 400 + b"\r\n", 431),
    "a long line": (GET + b"X-A: " + b"y" * MAX_HEADER_BYTES + b"\r\n\r\n", 431),
    "a long target": (b"GET /" + b"y" * MAX_HEADER_BYTES + b" HTTP/1.1\r\n" + HOST + b"\r\n", 431),
    "many small headers": (GET + b"a:\r\n" * 8000 + b"\r\n", 431),
}

HEARD = {
    "plain": (GET + b"\r\n", "GET /a 1.1 b''"),
    "a query": (b"GET /a%2fb?c=%20d HTTP/1.1\r\n" + HOST + b"\r\n", "GET /a/b 1.1 b''"),
    "an absolute target": (b"GET http://x/a HTTP/1.1\r\n" + HOST + b"\r\n", "GET /a 1.1 b''"),
    "the server itself": (b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n", "OPTIONS * 1.1 b''"),
    "empty lines before": (b"\r\n\r\n" + GET + b"\r\n", "GET /a 1.1 b''"),
    "a length": (POST + b"Content-Length: 2\r\n\r\nab", "POST /a 1.1 b'ab'"),
    "chunks": (CHUNKED + b"\r\n2;x=y\r\nab\r\n1\r\nc\r\n0\r\n\r\n", "POST /a 1.1 b'abc'"),
    "trailers": (CHUNKED + b"\r\n2\r\nab\r\n0\r\nX-Seen: smuggled\r\n\r\n", "POST /a 1.1 b'ab'"),
    "chunks, upper case": (CHUNKED.replace(b"chunked", b"Chunked") + b"\r\n2\r\nab\r\n0\r\n\r\n", "POST /a 1.1 b'ab'"),
    "a header": (GET + b"X-Seen: \t a b \t\r\n\r\n", "GET /a 1.1 b'' a b"),
    "a websocket": (GET + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n", "GET /a 1.1 b''"),
    "HTTP/2 over a length": (POST + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: x\r\n"
                             b"X-Seen: once\r\nContent-Length: 2\r\n\r\nab", "POST /a 1.1 b'ab' once"),
    "HTTP/2 over chunks": (CHUNKED + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n2\r\nab\r\n0\r\n\r\n",
                           "POST /a 1.1 b'ab'"),
    "almost too large": (GET + LINE * 310 + b"\r\n", "GET /a 1.1 b''"),
}


class App:
    """Answers with what it heard, on /early before the body. ``go``: answers wait for it. ``left``: a client went away
    before its body's end."""

    def __init__(self) -> None:
        self.go, self.left, self.asked = asyncio.Event(), asyncio.Event(), 0
        self.go.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.asked += 1
        body, more = b"", scope["method"] == "POST" and scope["path"] != "/early"
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left.set()
                return
            body, more = body + message["body"], message["more_body"]
        await self.go.wait()
        seen = [value.decode() for name, value in scope["headers"] if name == b"x-seen"]
        told = " ".join([scope["method"], scope["path"], scope["http_version"], repr(body), *seen]).encode()
        # As the router's own answers to HTTP/1.0 are: with a length, but for event streams.
        length = [(b"content-length", b"%d" % len(told))] if scope["http_version"] == "1.0" else []
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-told", told), *length]})
        await send({"type": "http.response.body", "body": told, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class Listener:
    """Reads a request, and waits for its client to go."""

    def __init__(self) -> None:
        self.heard, self.left = asyncio.Event(), asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["more_body"]:
            pass
        self.heard.set()
        connection_of(scope).watch(self.left.set)
        await self.left.wait()


@asynccontextmanager
async def served(app: ASGIApp) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to ``app``."""
    listener = HttpListener(app, RouterSection(listen="127.0.0.1:0"), WireSection(), RouterMetrics("tiny"))
    await listener.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
    yield reader, writer
    writer.close()
    await hurried(listener.close())


async def refusal(reader: asyncio.StreamReader) -> int:
    """The status of a typed error that ends the connection."""
    head, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
    assert b"connection: close" in head and b"x-request-id: " in head and json.loads(body)["error"]["message"]
    return int(head.split(b" ", 2)[1])


def told(answers: bytes) -> list[str]:
    return [line[8:].decode() for line in answers.split(b"\r\n") if line.startswith(b"x-told: ")]


@pytest.mark.parametrize("sent, status", REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.parametrize("before", [b"", GET + b"\r\n"], ids=["first", "later"])
async def test_what_is_no_request_is_refused(before: bytes, sent: bytes, status: int) -> None:
    async with served(App()) as (reader, writer):
        if before:
            writer.write(before)
            await reader.readuntil(b"0\r\n\r\n")
        writer.write(sent)
        assert await refusal(reader) == status


@pytest.mark.parametrize("sent, heard", HEARD.values(), ids=HEARD.keys())
@pytest.mark.parametrize("step", [1 << 20, 7], ids=["at once", "in pieces"])
async def test_what_is_a_request_is_heard(sent: bytes, heard: str, step: int) -> None:
    async with served(App()) as (reader, writer):
        for start in range(0, len(sent + LAST), step):
            writer.write((sent + LAST)[start:start + step])
            if len(sent) < 1 << 10:
                await asyncio.sleep(0)
        assert told(await reader.read(-1)) == [heard, "GET /last 1.1 b''"]


@pytest.mark.parametrize("endless, status", [
    (b"GET /", 431), (GET + b"X-A: ", 431), (GET + b"X-", 431), (b"\r\n", 431),
    (CHUNKED + b"\r\n2;", 400), (CHUNKED + b"\r\n2\r\nab\r\n0\r\nX-A: ", 400)])
async def test_what_has_no_end_is_refused(endless: bytes, status: int) -> None:
    async with served(App()) as (reader, writer):
        writer.write(endless)
        piece = b"\r\n" * 512 if endless == b"\r\n" else b"y" * 1024
        for _ in range(2 * MAX_HEADER_BYTES // len(piece)):
            writer.write(piece)
            await asyncio.sleep(0.0005)
        assert await refusal(reader) == status


async def test_trailers_line_by_line_are_bounded() -> None:
    async with served(App()) as (reader, writer):
        writer.write(CHUNKED + b"\r\n2\r\nab\r\n0\r\n")
        for _ in range(2 * MAX_HEADER_BYTES // len(LINE)):
            writer.write(LINE)
            await asyncio.sleep(0)
        assert await refusal(reader) == 400


async def test_a_client_that_is_refused_while_it_sends_hears_why() -> None:
    async with served(App()) as (reader, writer):
        writer.write(GET + LINE * 20_000)
        assert await refusal(reader) == 431


@pytest.mark.parametrize("head, status", [(GET, 408), (b"", None)])
async def test_a_slow_head_is_refused(head: bytes, status: int | None) -> None:
    async with served(App()) as (reader, writer):
        with still() as passes:
            writer.write(GET + b"\r\n")
            await reader.readuntil(b"0\r\n\r\n")
            writer.write(head)
            if status is None:
                reader, _ = await asyncio.open_connection(*writer.get_extra_info("peername"))
            await settled()
            passes(HEAD_S)
            if status is None:
                assert await reader.read(-1) == b"", "who says nothing is told nothing"
            else:
                assert await refusal(reader) == status


async def test_a_slow_answer_is_not_a_slow_head() -> None:
    app = App()
    app.go.clear()
    async with served(app) as (reader, writer):
        with still() as passes:
            for sent in (POST + b"Content-Length: 2\r\n\r\na", b"b"):
                writer.write(sent)
                await settled()
                passes(2 * HEAD_S)
                await settled()
        app.go.set()
        assert told(await reader.readuntil(b"0\r\n\r\n")) == ["POST /a 1.1 b'ab'"]


async def test_a_head_behind_a_body_that_nobody_waited_for_has_its_own_time() -> None:
    async with served(App()) as (reader, writer):
        with still() as passes:
            writer.write(POST.replace(b"/a", b"/early") + b"Content-Length: 3\r\n\r\na")
            await reader.readuntil(b"0\r\n\r\n")
            for sent in (b"b", b"c" + GET):
                writer.write(sent)
                await settled()
                passes(0.7 * HEAD_S)
                await settled()
        writer.write(b"\r\n")
        assert told(await reader.readuntil(b"0\r\n\r\n")) == ["GET /a 1.1 b''"]


@pytest.mark.parametrize("num_bytes", [2, 100_000])
async def test_a_client_that_leaves_after_its_body_is_noticed(num_bytes: int) -> None:
    app = Listener()
    async with served(app) as (_, writer), asyncio.timeout(60):
        writer.write(POST + b"Content-Length: %d\r\n\r\n" % num_bytes)
        await settled()
        writer.write(b"y" * num_bytes)
        await app.heard.wait()
        writer.transport.abort()
        await app.left.wait()


async def test_requests_that_wait_are_answered_in_turn_up_to_a_bound() -> None:
    app = App()
    app.go.clear()
    async with served(app) as (reader, writer):
        writer.write(b"".join(b"GET /%d HTTP/1.1\r\n" % i + HOST + b"\r\n" for i in range(4 * MAX_WAITING)))
        await settled()
        assert app.asked == 1
        app.go.set()
        answers = await reader.read(-1)
        assert told(answers) == [f"GET /{i} 1.1 b''" for i in range(MAX_WAITING + 1)]
        assert answers.count(b"connection: close") == 1


@pytest.mark.parametrize("behind", [b"\x01garbage\r\n\r\n", GET + LINE * 1000, CHUNKED.replace(HOST, b"") + b"\r\n"])
async def test_what_comes_behind_a_request_does_not_break_its_answer(behind: bytes) -> None:
    app = App()
    app.go.clear()
    async with served(app) as (reader, writer):
        writer.write(GET + b"\r\n" + behind)
        await settled()
        app.go.set()
        answers = await reader.read(-1)
        assert answers.startswith(b"HTTP/1.1 200") and answers.endswith(b"\r\n0\r\n\r\n")
        assert told(answers) == ["GET /a 1.1 b''"]


@pytest.mark.parametrize("num_before", [1, 2, 5])
async def test_a_broken_body_behind_requests_does_not_break_their_answers(num_before: int) -> None:
    app = App()
    app.go.clear()
    async with served(app) as (reader, writer):
        before = b"".join(b"GET /%d HTTP/1.1\r\n" % i + HOST + b"\r\n" for i in range(num_before))
        writer.write(before + CHUNKED + b"\r\n2\r\nab\r\nzz\r\n" + LAST)
        await settled()
        assert app.asked == 1
        app.go.set()
        answers = await reader.read(-1)
        assert told(answers) == [f"GET /{i} 1.1 b''" for i in range(num_before)]
        assert answers.count(b"HTTP/1.1 ") == num_before and answers.endswith(b"\r\n0\r\n\r\n")


async def test_a_body_that_breaks_off_frees_who_waits_for_it() -> None:
    app = App()
    async with served(app) as (reader, writer):
        writer.write(CHUNKED + b"\r\n2\r\nab\r\n")
        await settled()
        writer.write(b"zz\r\n")
        assert await refusal(reader) == 400
        await app.left.wait()


async def test_who_asks_whether_to_go_on_is_told() -> None:
    async with served(App()) as (reader, writer):
        writer.write(POST + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"ab")
        assert told(await reader.readuntil(b"0\r\n\r\n")) == ["POST /a 1.1 b'ab'"]


async def test_who_is_refused_is_not_told_to_go_on(caplog: pytest.LogCaptureFixture) -> None:
    app = App()
    async with served(app) as (reader, writer), asyncio.timeout(60):
        writer.write(CHUNKED + b"Expect: 100-continue\r\n\r\nzz\r\n")
        assert await refusal(reader) == 400
        await app.left.wait()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_an_old_client_is_answered_as_it_knows_it() -> None:
    async with served(App()) as (reader, writer):
        writer.write(b"POST /a HTTP/1.0\r\nExpect: 100-continue\r\nConnection: keep-alive\r\n"
                     b"Content-Length: 2\r\n\r\nab")
        head, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200") and b"transfer-encoding" not in head and b"connection: close" in head
        assert body == b"POST /a 1.0 b'ab'"


async def test_a_head_is_asked_for_without_its_body() -> None:
    async with served(App()) as (reader, writer):
        writer.write(b"HEAD /a HTTP/1.1\r\n" + HOST + b"\r\n" + LAST)
        head, _, rest = (await reader.read(-1)).partition(b"\r\n\r\n")
        assert told(head) == ["HEAD /a 1.1 b''"] and rest.startswith(b"HTTP/1.1 200")
