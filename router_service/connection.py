"""A connection: uvicorn's protocol with an intake of ours before it, and an outlet beside it.

The intake is llhttp's parser, and bounds what it and uvicorn leave unbounded.

Rules:
1. Nothing that a client sends grows without a bound: a head, trailers, what stands between chunks
   (``MAX_HEADER_BYTES`` each), requests that wait for their turn (``MAX_WAITING``), and the time for all of a head
   (``HEAD_S``).
2. What is no request gets a typed answer and the end of the connection. Answers that run or wait are not touched: they
   go out first, and nothing is said about what came behind them.
3. Of two readings of a request none is taken: it has one host, at most one length, and no coding but chunked.
4. Trailers are dropped, for nobody looks at them where headers are checked. Nobody offers another protocol here, so an
   upgrade that is asked for is not heard, and its request is answered like any other.

Format: HTTP/1.1, RFC 9112. It knows nothing about routes, nor how answers go out.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import httptools
import orjson
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from router_service.outlet import STATE, Outlet, Unchunked
from router_service.problems import Problem, http_problem

MAX_HEADER_BYTES = 32 << 10
MAX_WAITING = 16
HEAD_S = 30.0
LINGER_S = 2.0  # what a refused client still sends is read and dropped for so long
LINE_BYTES = 4  # of a header's line beside its name and value
FRAMING = frozenset({b"content-length", b"transfer-encoding"})


class Refused(Exception):
    """A request that this server does not take."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.problem = http_problem(status, message)


class Intake:
    """Of one connection: for ``http`` a parser, for the parser what ``http`` is to uvicorn's own."""

    def __init__(self, http: HttpToolsProtocol) -> None:
        self._http = http
        self._parser = httptools.HttpRequestParser(self)
        self._in_head = False
        self._in_body = False
        self._again = False  # a head is being read that has been heard already
        self._over = False  # nothing more is taken from this client
        self._head_bytes = 0  # of the head that is being read, as far as it is understood
        self._version = ""  # of the head that was read last
        self._unheard = 0  # bytes since the last that a request was furthered by
        self._timer: asyncio.TimerHandle | None = None

    def feed_data(self, data: bytes) -> None:
        """Raises nothing, unlike the parser whose place it takes."""
        if self._over:
            return
        self._unheard += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            self._refuse(_problem(error))
            return
        if self._unheard > MAX_HEADER_BYTES:
            self._refuse(http_problem(400, "trailers or chunks' extensions are too large") if self._in_body else
                         http_problem(431, "the headers are too large"))
        elif self._timer is None and not self._answering():
            self.wait()

    def wait(self) -> None:
        """From now on a head may take ``HEAD_S``."""
        self._timer = asyncio.get_running_loop().call_later(HEAD_S, self._late)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def get_method(self) -> bytes:
        return self._parser.get_method()

    def get_http_version(self) -> str:
        return self._version

    def should_keep_alive(self) -> bool:
        return self._parser.should_keep_alive()

    def should_upgrade(self) -> bool:
        return False

    def on_message_begin(self) -> None:
        if self._again:
            return
        if self._timer is not None and self._http.cycle is not None:
            self.close()  # it ran for the rest of a body that was answered early; this head has a time of its own
        if len(self._http.pipeline) >= MAX_WAITING:
            raise Refused(400, f"more than {MAX_WAITING} requests wait on this connection")
        self._in_head, self._head_bytes = True, 0
        self._http.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self._in_head:
            self._count(len(url))
            self._http.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            self._count(len(name) + len(value) + LINE_BYTES)
            self._http.on_header(name, value.rstrip(b" \t"))

    def on_headers_complete(self) -> None:
        self._unheard = 0
        if self._again:
            self._again = False
            return
        self._check()
        self.close()
        self._http.on_headers_complete()
        self._in_head, self._in_body = False, True
        if self._version == "1.0":
            cycle = self._http.cycle
            cycle.waiting_for_100_continue = False
            cycle.transport = Unchunked(self._http.transport)  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        self._unheard = 0
        self._http.on_body(body)

    def on_message_complete(self) -> None:
        self._unheard = 0
        if not self._parser.should_upgrade():  # then the parser has not looked for a body
            self._in_body = False
            self._http.on_message_complete()
            if not self._http.pipeline:  # a large body has paused reading, and who does not read hears of no end
                self._http.flow.resume_reading()

    def _feed(self, data: bytes) -> None:
        while data:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0]:]
            # The parser takes what follows for another protocol. Another parser reads the same head without the wish.
            self._parser = httptools.HttpRequestParser(self)
            self._again = True
            framing = [b"%b: %b\r\n" % header for header in self._http.headers if header[0] in FRAMING]
            self._parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(framing))

    def _count(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > MAX_HEADER_BYTES:
            raise Refused(431, "the headers are too large")

    def _check(self) -> None:
        self._version = version = self._parser.get_http_version()
        if version not in ("1.0", "1.1"):
            raise Refused(505, "only HTTP/1.0 and HTTP/1.1 are spoken here")
        hosts = 0
        for name, value in self._http.headers:
            if name == b"host":
                hosts += 1
            elif name == b"transfer-encoding" and value.lower() != b"chunked":
                raise Refused(501, "of transfer codings only chunked is understood here")
        if hosts > 1 or (not hosts and version == "1.1"):
            raise Refused(400, "a request names its host once")

    def _answering(self) -> bool:
        cycle = self._http.cycle
        return cycle is not None and not cycle.response_complete

    def _refuse(self, problem: Problem) -> None:
        """Take nothing more, and say why if that can be told from an answer to another request."""
        self._over = True
        self.close()
        cycle = self._http.cycle
        if self._answering() and not self._in_body:
            cycle.keep_alive = False
        elif self._in_body and self._http.pipeline:
            cycle.disconnected = True
            self._http.pipeline[0] = (cycle, self._end)  # the newest stands first; those before it are answered
        elif self._in_body and cycle.response_started:
            self._http.transport.close()
        else:
            if self._in_body:
                cycle.disconnected = True
                cycle.waiting_for_100_continue = False
                cycle.message_event.set()
            self._tell(problem)

    async def _end(self, scope: object, receive: object, send: object) -> None:
        """What a refused request gets in its turn."""
        self._http.transport.close()

    def _tell(self, problem: Problem) -> None:
        # Closed at once, with bytes unread, the connection would be reset, and the client might never see why.
        transport = self._http.transport
        self._http.flow.resume_reading()
        transport.write(_refusal(problem))
        transport.write_eof()
        self._timer = asyncio.get_running_loop().call_later(LINGER_S, transport.close)

    def _late(self) -> None:
        self._timer = None
        if self._in_head:
            self._refuse(http_problem(408, f"the headers did not arrive within {HEAD_S:g} s"))
        else:
            self._http.transport.close()


def _problem(error: httptools.HttpParserError) -> Problem:
    cause = error.__context__
    if isinstance(cause, Refused):
        return cause.problem
    # The one thing that uvicorn reads in a request is its target.
    heard = isinstance(error, httptools.HttpParserCallbackError)
    return http_problem(400, "no HTTP/1.1: " + ("the request's target is not understood" if heard else str(error)))


def _refusal(problem: Problem) -> bytes:
    """A whole answer, the last of its connection."""
    body = orjson.dumps(problem.body())
    return (b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nx-request-id: %b\r\n"
            b"connection: close\r\n\r\n%b" % (problem.status, HTTPStatus(problem.status).phrase.encode(), len(body),
                                             secrets.token_hex(16).encode(), body))


class TappedProtocol(asyncio.Protocol):
    """uvicorn's HTTP, with an intake and an outlet of ours on the same connection."""

    def __init__(self, config: Config, server_state: ServerState, app_state: Mapping[str, Any],
                 _loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._outlet = Outlet()
        self._http = HttpToolsProtocol(config, server_state, {**app_state, STATE: self._outlet}, _loop)
        self._intake = Intake(self._http)
        self._http.parser = self._intake  # type: ignore[assignment]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._outlet.opened(transport)
        self._http.connection_made(transport)
        self._intake.wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._outlet.lost()
        self._intake.close()
        self._http.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._http.data_received(data)

    def eof_received(self) -> None:
        self._http.eof_received()

    def pause_writing(self) -> None:
        self._outlet.fill(True)
        self._http.pause_writing()

    def resume_writing(self) -> None:
        self._outlet.fill(False)
        self._http.resume_writing()
