"""Connections: uvicorn's HTTP on our own sockets, with limits on input and a short path for output.

In: what uvicorn and its parser, llhttp, leave unbounded. Out: server-sent events go straight to the socket. Between a
handler and the socket lie calls, messages and a state machine for each piece, and an answer has hundreds. A body's head
and end go that way; what comes between is framed here.

Rules:
1. Nothing that a client sends grows without a bound: a head, trailers, what stands between chunks
   (``MAX_HEADER_BYTES`` each), requests that wait for their turn (``MAX_WAITING``), and the time for all of a head
   (``HEAD_S``). The application bounds bodies and answers.
2. Input that is no request gets an error answer, and the connection ends. Answers that run or wait are finished first;
   then the connection ends without an error for the input after them.
3. An ambiguous request is refused: it must have one host, at most one length, and no transfer coding but chunked.
4. Trailers are dropped, because headers are checked before they come. A request to upgrade to another protocol is
   ignored and answered like any other.
5. Events take the short path where their body is chunked (HTTP/1.1). ``Connection.write`` does not wait: the writer
   must check ``flow`` and wait while it is paused. Writes to a connection that has ended are dropped; its watcher is
   called at the end.
6. When a client goes away, its work ends at once, also before its first byte. A client that reads nothing of its
   waiting output for ``STALL_S`` counts as gone, and its connection ends, also when all requests are answered.
7. Connections and requests have separate limits. There may be more than twice as many connections as requests, half of
   them from one address; beyond that, the connection that has kept the server waiting longest is closed, whether before
   a request, in a head or in a body. A request that has arrived whole is never cut off. Beyond ``requests`` whole ones,
   further requests get 429, except probes. Bodies of unanswered requests have ``MOST_BODIES`` bytes together; beyond
   that, of the bodies larger than a connection's share the one that has been arriving for longest is closed, if its
   tenant holds more than its part; an eighth more is kept for other tenants. So large waiting bodies keep no small
   request out.

Formats: HTTP/1.1, RFC 9112; WHATWG server-sent events. It knows nothing about routes.
"""

from __future__ import annotations

import asyncio
import resource
import secrets
import weakref
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Container, Iterator, Mapping
from http import HTTPStatus
from typing import Any

import httptools
import orjson
import uvicorn
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from router_service.admission import MAX_WAITING_PER_PLACE, Limit
from router_service.dialects.problems import Problem, http_problem, problem_of
from slipstream.base.errors import CapacityError, Unavailable
from slipstream.base.guests import Guests
from slipstream.observe.log import logger
from slipstream.observe.metrics import RouterMetrics
from slipstream.protocol.chat import MOST_BODIES, STALL_S

MAX_HEADER_BYTES = 32 << 10
MAX_WAITING = 16
HEAD_S = 30.0
LINGER_S = 2.0  # what a refused client still sends is read and dropped for so long
LINE_BYTES = 4  # of a header's line beside its name and value
FRAMING = frozenset({b"content-length", b"transfer-encoding"})
STATE = "connection"  # its name in the state of its scopes
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"  # how uvicorn ends the head of a body in chunks
DONE = b"data: [DONE]\n\n"
COMMENT = b":\n"  # a line that says nothing: no end of an event, which some clients take for an event without data
LINE_ENDS = tuple((end.encode(), b"\\u%04x" % ord(end)) for end in "\x85\u2028\u2029")  # JSON writes others so anyway
HEADERS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"),
           (b"x-accel-buffering", b"no"))
SPARE = 256  # requests beside those that run and wait, as refusals and lists; connections beside requests
MANY = 1 << 20  # descriptors, where the system sets no limit


class Refused(Exception):
    """A request that this server does not take."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


class Room:
    """All connections of a listener, and what they may ask for at the same time. ``probes``: paths that are always
    answered; ``back_s``: in how many seconds who finds no room should come back."""

    def __init__(self, max_in_flight: int, probes: Container[bytes], metrics: RouterMetrics,
                 back_s: Callable[[], float]) -> None:
        wanted = (1 + MAX_WAITING_PER_PLACE) * max_in_flight + SPARE
        most = min(2 * (wanted + SPARE), max(4, descriptors() * 3 // 4))
        per_address = most // 2  # all that run and wait, if all of them come through one proxy
        self.requests = min(wanted, max(per_address - SPARE, per_address // 2))
        if self.requests < wanted:
            logger("http").warning("the limit of open files leaves room for fewer requests", room=self.requests,
                                   wanted=wanted, connections=most)
        self.guests: Guests[Connection] = Guests(most, per_address, self._end)
        self._probes = probes
        self._metrics = metrics
        self._back_s = back_s
        self._bodies: dict[Connection, int] = {}  # bytes that came, of requests that are not answered
        self._coming: dict[Connection, None] = {}  # those beyond their share that are not whole, the oldest first
        self._share = MOST_BODIES // most
        self._held = Counter[str]()  # bytes, by whose they are; together:
        self._num_bytes = 0
        metrics.connections(lambda: self.guests.num_idle, lambda: self.guests.num_at_work)

    def ask(self, path: bytes) -> None:
        """A request begins. Raises Refused where there is no room for it."""
        if self.guests.num_at_work >= self.requests and path not in self._probes:
            self._metrics.connection_refused("requests")
            raise Refused(problem_of(CapacityError("this server answers as many requests as it can; try again later",
                                                   self._back_s())))

    def comes(self, connection: Connection, num_bytes: int, alone: bool) -> None:
        """More of a body; ``alone``: no request before it waits for its answer on this connection."""
        self._bodies[connection] = self._bodies.get(connection, 0) + num_bytes
        self._count(connection.whose, num_bytes)
        if alone and self._bodies[connection] > self._share:
            self._coming[connection] = None
        while self._num_bytes > MOST_BODIES and (goes := self._goes()) is not None:
            self.lets_go(goes)
            self._end(goes, "bodies")

    def belongs(self, connection: Connection, whose: str) -> None:
        """What comes there is a tenant's."""
        if whose != connection.whose:
            kept = self._bodies.get(connection, 0)
            self._count(connection.whose, -kept)
            connection.whose = whose
            self._count(whose, kept)

    def _goes(self) -> Connection | None:
        part = MOST_BODIES // max(1, len(self._held))
        goes = next((one for one in self._coming if self._held[one.whose] > part), None)
        return goes or (next(iter(self._coming), None) if self._num_bytes > MOST_BODIES * 9 // 8 else None)

    def _count(self, whose: str, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._held[whose] += num_bytes
        if not self._held[whose]:
            del self._held[whose]

    def whole(self, connection: Connection) -> None:
        """The request's body has arrived whole."""
        self._coming.pop(connection, None)

    def lets_go(self, connection: Connection) -> None:
        """The request's body is no longer kept."""
        self.whole(connection)
        self._count(connection.whose, -self._bodies.pop(connection, 0))

    def _end(self, connection: Connection, why: str) -> None:
        self._metrics.connection_refused(why)
        connection.give_way()


def descriptors() -> int:
    """How many files and sockets this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MANY if soft == resource.RLIM_INFINITY else soft


class Connection(HttpToolsProtocol):
    """uvicorn's HTTP, with bounds on what is taken in. Requests find it in their scope: it is the outlet of their
    answers."""

    def __init__(self, room: Room, config: uvicorn.Config, server_state: ServerState, app_state: dict[str, Any],
                 _loop: asyncio.AbstractEventLoop | None = None) -> None:
        # Weak: one that is over is freed at once, with all that it holds.
        super().__init__(config, server_state, {**app_state, STATE: weakref.ref(self)}, _loop)
        self.parser = httptools.HttpRequestParser(self)  # without the leniency of uvicorn's
        self._room = room
        self.whose = ""
        self._at_work = False
        self._in_head = False
        self._in_body = False
        self._again = False  # a head is being read that has been heard already
        self._refused = False  # nothing more is taken from this client
        self._head_bytes = 0  # of the head that is being read, as far as it is understood
        self._unheard = 0  # bytes since the last that a request was furthered by
        self._timer: asyncio.TimerHandle | None = None
        self._lost = False
        self._watcher: Callable[[], None] | None = None

    def belongs(self, whose: str) -> None:
        """Its request is a tenant's."""
        self._room.belongs(self, whose)

    def watch(self, watcher: Callable[[], None] | None) -> None:
        """Call ``watcher`` when the connection is over, which it may be already; None: nobody any more."""
        self._watcher = watcher
        if self._lost and watcher is not None:
            watcher()

    def write(self, data: bytes) -> None:
        """Send ``data``, which is not empty, as one chunk of the body that runs. Who writes looks at ``flow``."""
        if not self.transport.is_closing():
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()
        self._room.guests.enter(self, self.client[0] if self.client else "")

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._room.guests.leave(self)
        self._room.lets_go(self)
        self._stop_timer()
        self._unset_keepalive_if_required()  # uvicorn forgets it where the connection was reset
        super().connection_lost(exc)
        if self._watcher is not None:
            self._watcher()

    def give_way(self) -> None:
        """Close the connection at once to make room; a client in the middle of a request gets an error answer."""
        self._refused = True
        self._stop_timer()
        if self._in_head or (self._in_body and not self.cycle.response_started):
            self.transport.write(_refusal(problem_of(Unavailable(
                "others needed this connection's place before the whole request was here; send it again"))))
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # closed, it would wait for the client to read
        else:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        """Replaces uvicorn's method, which does not say what was wrong and cuts off running answers."""
        self._unset_keepalive_if_required()
        if self._refused:
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
            self._await_head()

    def on_message_begin(self) -> None:
        if self._again:
            return
        if self._timer is not None and self.cycle is not None:
            self._stop_timer()  # it ran for the rest of a body that was answered early; this head has its own time
        if len(self.pipeline) >= MAX_WAITING:
            raise _refused(400, f"more than {MAX_WAITING} requests wait on this connection")
        self._in_head, self._head_bytes = True, 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self._in_head:
            self._count(len(url))
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            self._count(len(name) + len(value) + LINE_BYTES)
            super().on_header(name, value.rstrip(b" \t"))

    def on_headers_complete(self) -> None:
        self._unheard = 0
        if self._again:
            self._again = False
            return
        version = self.parser.get_http_version()
        self._check(version)
        self._stop_timer()
        super().on_headers_complete()
        self._in_head, self._in_body = False, True
        if not self._at_work:
            self._room.guests.idle(self)  # it has just been heard of
        if version == "1.0":
            self.cycle.waiting_for_100_continue = False
            self.cycle.transport = Unchunked(self.transport)  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        self._unheard = 0
        if not self.cycle.response_complete:  # else it is dropped
            self._room.comes(self, len(body), not self._at_work)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unheard = 0
        if not self.parser.should_upgrade():  # then the parser has not looked for a body
            self._in_body = False
            self._room.whole(self)
            super().on_message_complete()
            self._settle()
            if not self.pipeline:  # a large body has paused reading, and who does not read hears of no end
                self.flow.resume_reading()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._settle()

    def _settle(self) -> None:
        """At work is a connection while a request that is here whole is answered."""
        at_work = bool(self.pipeline) or (self._answering() and not self.cycle.more_body)
        if not self._answering():
            self._room.lets_go(self)
        if at_work != self._at_work:
            self._at_work = at_work
            (self._room.guests.at_work if at_work else self._room.guests.idle)(self)

    def _feed(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0]:]
            # The parser takes what follows for another protocol. Another parser reads the same head without the wish.
            self.parser = httptools.HttpRequestParser(self)
            self._again = True
            framing = [b"%b: %b\r\n" % header for header in self.headers if header[0] in FRAMING]
            self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(framing))

    def _count(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > MAX_HEADER_BYTES:
            raise _refused(431, "the headers are too large")

    def _check(self, version: str) -> None:
        if version not in ("1.0", "1.1"):
            raise _refused(505, "only HTTP/1.0 and HTTP/1.1 are spoken here")
        hosts = 0
        for name, value in self.headers:
            if name == b"host":
                hosts += 1
            elif name == b"transfer-encoding" and value.lower() != b"chunked":
                raise _refused(501, "of transfer codings only chunked is understood here")
        if hosts > 1 or (not hosts and version == "1.1"):
            raise _refused(400, "a request names its host once")
        self._room.ask(self.url.partition(b"?")[0])

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, problem: Problem) -> None:
        """Take nothing more, and say why if that can be told from an answer to another request."""
        self._refused = True
        self._stop_timer()
        cycle = self.cycle
        if self._answering() and not self._in_body:
            cycle.keep_alive = False
        elif self._in_body and self.pipeline:
            cycle.disconnected = True
            self.pipeline[0] = (cycle, self._end)  # the newest stands first; those before it are answered
        elif self._in_body and cycle.response_started:
            self.transport.close()
        else:
            if self._in_body:
                cycle.disconnected = True
                cycle.waiting_for_100_continue = False
                cycle.message_event.set()
            self._tell(problem)

    async def _end(self, scope: object, receive: object, send: object) -> None:
        """What a refused request gets in its turn."""
        self.transport.close()

    def _tell(self, problem: Problem) -> None:
        # Closed at once, with bytes unread, the connection would be reset, and the client might never see why.
        self.flow.resume_reading()
        self.transport.write(_refusal(problem))
        self.transport.write_eof()
        self._timer = self.loop.call_later(LINGER_S, self.transport.close)

    def _await_head(self) -> None:
        """From now on a head may take ``HEAD_S``."""
        self._timer = self.loop.call_later(HEAD_S, self._late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        if self._in_head:
            self._refuse(http_problem(408, f"the headers did not arrive within {HEAD_S:g} s"))
        else:
            self.transport.close()


def _refused(status: int, message: str) -> Refused:
    return Refused(http_problem(status, message))


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
    headers = "".join(f"{name}: {value}\r\n" for name, value in problem.headers).encode()
    return (b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nx-request-id: %b\r\n%b"
            b"connection: close\r\n\r\n%b" % (problem.status, HTTPStatus(problem.status).phrase.encode(), len(body),
                                             secrets.token_hex(16).encode(), headers, body))


def connection_of(scope: Scope) -> Connection | None:
    """The one that a request came on; None behind another server."""
    found: Callable[[], Connection | None] | None = scope.get("state", {}).get(STATE)
    return None if found is None else found()


class Unchunked:
    """``transport`` for an answer to a client of HTTP/1.0, which knows no chunks: the body ends with the connection."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._begun = False
        self._chunked = False

    def write(self, data: bytes) -> None:
        """A whole head, later any number of whole chunks."""
        if not self._begun:
            self._begun, self._chunked = True, data.endswith(CHUNKED)
            data = data.removesuffix(CHUNKED) + b"\r\n" if self._chunked else data
        elif self._chunked:
            data = b"".join(_bodies(data))
        self._transport.write(data)

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self._transport.close()


def _bodies(chunks: bytes) -> Iterator[bytes]:
    start = 0
    while start < len(chunks):
        body = chunks.index(b"\r\n", start) + 2
        end = body + int(chunks[start:body], 16)
        yield chunks[body:end]
        start = end + 2


def event(content: Mapping[str, Any], number: str = "") -> bytes:
    return framed(orjson.dumps(content), number)


def framed(data: bytes, number: str = "") -> bytes:
    """An event of JSON that is written already. ``number``: its id, if it has one."""
    return b"id: %b\ndata: %b\n\n" % (number.encode(), data) if number else b"data: " + data + b"\n\n"


def _in_lines(events: bytes) -> bytes:
    """``events`` for those, too, who end a line wherever Unicode does, as ``iter_lines`` of httpx: these stand in texts
    alone."""
    for end, written in LINE_ENDS:
        events = events.replace(end, written)
    return events


class Presence(Limit):
    """The client of one request: ``with presence: await …`` raises ClientDisconnect when the client goes away. Create
    it after the body has been read, and ``close`` it."""

    __slots__ = ("connection",)

    def __init__(self, connection: Connection | None) -> None:
        super().__init__(ClientDisconnect)
        self.connection = connection
        if connection is not None:
            connection.watch(self.fire)

    def close(self) -> None:
        if self.connection is not None:
            self.connection.watch(None)


class EventStream(Response):
    """Sends ``events`` until they end or ``client`` goes away, and closes ``client``; ``close`` is awaited in any
    case."""

    def __init__(self, events: AsyncGenerator[bytes, None], client: Presence, close: Callable[[], Awaitable[None]],
                 headers: Mapping[str, str], stall_s: float = STALL_S) -> None:
        self.status_code = 200
        self.background = None
        self.raw_headers = [*HEADERS, *((name.encode(), value.encode()) for name, value in headers.items())]
        self._events = events
        self._client = client
        self._close = close
        self._stall_s = stall_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = self._client.connection
        try:
            with self._client:
                await self._pump(connection if scope["http_version"] == "1.1" else None, send)
        except ClientDisconnect:
            return
        except TimeoutError:
            if connection is not None:  # closed, it would wait for the client to read
                connection.transport.abort()
        finally:
            self._client.close()
            await self._events.aclose()
            await self._close()

    async def _pump(self, outlet: Connection | None, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for events in self._events:
            chunk = _in_lines(events)
            if outlet is None:
                async with asyncio.timeout(self._stall_s):
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                continue
            outlet.write(chunk)
            if outlet.flow.write_paused:
                async with asyncio.timeout(self._stall_s):
                    await outlet.flow.drain()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
