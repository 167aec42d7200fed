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
5. Events of HTTP/1.1 are chunks; those of HTTP/1.0, which knows none, end with the connection. ``Connection.write``
   does not wait: the writer must check ``flow`` and wait while it is paused. Writes to a connection that has ended are
   dropped; its watcher is called at the end.
6. When a client goes away, its work ends at once, also before its first byte. A client that reads nothing of its
   waiting output for ``STALL_S`` counts as gone, and its connection ends, also when all requests are answered.
7. Connections and requests have separate limits. There may be more than twice as many connections as requests, half of
   them from one address; beyond that, the connection that has kept the server waiting longest is closed, whether before
   a request, in a head or in a body. A request that has arrived whole is never cut off. Beyond ``requests`` whole ones,
   further requests get 429, except probes. Bodies of unanswered requests have ``MAX_BODIES_BYTES`` together; beyond
   that, of the bodies larger than a connection's share the one that has been arriving for longest is closed, if its
   tenant holds more than its part; an eighth more is kept for other tenants. So large waiting bodies keep no small
   request out.

Formats: HTTP/1.1, RFC 9112; WHATWG server-sent events. It knows nothing about routes.
"""

from __future__ import annotations

import asyncio
import os
import resource
import secrets
import weakref
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Container, Mapping
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
from slipstream.base.clients import ClientTracker
from slipstream.base.errors import CapacityError, Unavailable
from slipstream.observe.log import logger
from slipstream.observe.metrics import RouterMetrics
from slipstream.protocol.chat import MAX_BODIES_BYTES, STALL_S

MAX_HEADER_BYTES = 32 << 10
MAX_WAITING = 16
HEAD_S = 30.0
QUIET_S = 15.0  # twice that is half of what proxies wait for the next byte
LINGER_S = 2.0  # a refused client may send on, and a closed one read its last answer, for so long
LINE_BYTES = 4  # of a header's line beside its name and value
FRAMING = frozenset({b"content-length", b"transfer-encoding"})
STATE_KEY = "connection"  # of a connection, in the state of its scopes
DONE = b"data: [DONE]\n\n"
COMMENT = b":\n"  # a line that says nothing: no end of an event, which some clients take for an event without data
LINE_ENDS = tuple((end.encode(), b"\\u%04x" % ord(end)) for end in "\x85\u2028\u2029")  # JSON writes others so anyway
STREAM_HEADERS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"),
                  (b"x-accel-buffering", b"no"))
SPARE = 256  # requests beside those that run and wait, as refusals and lists; connections beside requests
UNLIMITED_FILES = 1 << 20  # open files where the system sets no limit


class RefusedRequest(Exception):
    """A request that this server does not take."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


class ConnectionLimits:
    """All connections of a listener, and the limits on them and their requests. ``probes``: paths that are always
    answered; ``retry_after_s``: when a client that is refused should try again."""

    def __init__(self, max_in_flight: int, probes: Container[bytes], metrics: RouterMetrics,
                 retry_after_s: Callable[[], float]) -> None:
        wanted = (1 + MAX_WAITING_PER_PLACE) * max_in_flight + SPARE
        max_connections = min(2 * (wanted + SPARE), max(4, max_open_files() * 3 // 4))
        per_address = max_connections // 2  # all that run and wait, if all of them come through one proxy
        self.max_requests = min(wanted, max(per_address - SPARE, per_address // 2))
        if self.max_requests < wanted:
            logger("http").warning("the limit of open files leaves room for fewer requests", room=self.max_requests,
                                   wanted=wanted, connections=max_connections)
        self.clients: ClientTracker[Connection] = ClientTracker(max_connections, per_address, self._evict)
        self._probes = probes
        self._metrics = metrics
        self._retry_after_s = retry_after_s
        self._body_bytes: dict[Connection, int] = {}  # received, of requests that are not answered
        self._large_uploads: dict[Connection, None] = {}  # bodies beyond their share, incomplete, the oldest first
        self._share_bytes = MAX_BODIES_BYTES // max_connections
        self._tenant_bytes = Counter[str]()
        self._total_bytes = 0
        metrics.connections(lambda: self.clients.num_idle, lambda: self.clients.num_busy)

    def check_request(self, path: bytes) -> None:
        """A request begins. Raises RefusedRequest if there are too many."""
        if self.clients.num_busy >= self.max_requests and path not in self._probes:
            self._metrics.connection_refused("requests")
            raise RefusedRequest(problem_of(CapacityError(
                "this server answers as many requests as it can; try again later", self._retry_after_s())))

    def body_received(self, connection: Connection, num_bytes: int, evictable: bool) -> None:
        """More of a body; ``evictable``: no request before it waits for its answer on this connection."""
        self._body_bytes[connection] = self._body_bytes.get(connection, 0) + num_bytes
        self._count_bytes(connection.tenant_id, num_bytes)
        if evictable and self._body_bytes[connection] > self._share_bytes:
            self._large_uploads[connection] = None
        while self._total_bytes > MAX_BODIES_BYTES and (evicted := self._upload_to_evict()) is not None:
            self.release_body(evicted)
            self._evict(evicted, "bodies")

    def set_tenant(self, connection: Connection, tenant_id: str) -> None:
        if tenant_id != connection.tenant_id:
            num_bytes = self._body_bytes.get(connection, 0)
            self._count_bytes(connection.tenant_id, -num_bytes)
            connection.tenant_id = tenant_id
            self._count_bytes(tenant_id, num_bytes)

    def _upload_to_evict(self) -> Connection | None:
        per_tenant = MAX_BODIES_BYTES // max(1, len(self._tenant_bytes))
        uploads = self._large_uploads
        oldest = next((upload for upload in uploads if self._tenant_bytes[upload.tenant_id] > per_tenant), None)
        return oldest or (next(iter(uploads), None) if self._total_bytes > MAX_BODIES_BYTES * 9 // 8 else None)

    def _count_bytes(self, tenant_id: str, num_bytes: int) -> None:
        self._total_bytes += num_bytes
        self._tenant_bytes[tenant_id] += num_bytes
        if not self._tenant_bytes[tenant_id]:
            del self._tenant_bytes[tenant_id]

    def body_complete(self, connection: Connection) -> None:
        self._large_uploads.pop(connection, None)

    def release_body(self, connection: Connection) -> None:
        """The request's body is no longer kept."""
        self.body_complete(connection)
        self._count_bytes(connection.tenant_id, -self._body_bytes.pop(connection, 0))

    def _evict(self, connection: Connection, reason: str) -> None:
        self._metrics.connection_refused(reason)
        connection.evict()


def max_open_files() -> int:
    """How many files and sockets this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return UNLIMITED_FILES if soft == resource.RLIM_INFINITY else soft


class Connection(HttpToolsProtocol):
    """uvicorn's HTTP, with bounds on what is taken in. Requests find it in their scope and write their answers to
    it."""

    def __init__(self, limits: ConnectionLimits, config: uvicorn.Config, server_state: ServerState,
                 app_state: dict[str, Any], _loop: asyncio.AbstractEventLoop | None = None) -> None:
        # Weak: one that is over is freed at once, with all that it holds.
        super().__init__(config, server_state, {**app_state, STATE_KEY: weakref.ref(self)}, _loop)
        self.parser = httptools.HttpRequestParser(self)  # without the leniency of uvicorn's
        self._limits = limits
        self.tenant_id = ""
        self._busy = False
        self._in_head = False
        self._in_body = False
        self._rereading_head = False  # the present head has been handled already
        self._refused = False  # nothing more is taken from this client
        self._head_bytes = 0  # of the present head, as far as it is parsed
        self._idle_bytes = 0  # received since a request last got on
        self._timer: asyncio.TimerHandle | None = None
        self._lost = False
        self._watcher: Callable[[], None] | None = None

    def set_tenant(self, tenant_id: str) -> None:
        """The tenant of its request."""
        self._limits.set_tenant(self, tenant_id)

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call ``watcher``, instead of the one before it, when the connection has ended; at once if it has already."""
        if self._lost:
            watcher()
        else:
            self._watcher = watcher

    def write(self, data: bytes) -> None:
        """Send a part of the running body. The writer looks at ``flow``."""
        if not self.transport.is_closing():
            self.transport.write(data)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()
        self._limits.clients.add(self, self.client[0] if self.client else "")

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._limits.clients.remove(self)
        self._limits.release_body(self)
        self._stop_timer()
        self._unset_keepalive_if_required()  # uvicorn forgets it where the connection was reset
        super().connection_lost(exc)
        if self._watcher is not None:
            self._watcher()
            self._watcher = None  # it may refer to this connection

    def evict(self) -> None:
        """Close the connection at once to make room; a client in the middle of a request gets an error answer."""
        told, self._refused = self._refused, True
        self._stop_timer()
        arrived = self._discard_arrived()
        if not told and (self._in_head or (not self.cycle.response_started if self._in_body else arrived)):
            self.transport.write(_error_answer(problem_of(Unavailable(
                "others needed this connection's place before the whole request was read; send it again"))))
        self.transport.close()  # behind what is written, but it does not wait for a client that reads nothing
        self.loop.call_later(LINGER_S, self.transport.abort)

    def _discard_arrived(self) -> bool:
        """Whether bytes have arrived that nobody has read. Closed on top of them, the connection would be reset."""
        try:
            return os.read(self.transport.get_extra_info("socket").fileno(), MAX_HEADER_BYTES) != b""
        except OSError:
            return False

    def data_received(self, data: bytes) -> None:
        """Replaces uvicorn's method, which does not say what was wrong and cuts off running answers."""
        self._unset_keepalive_if_required()
        if self._refused:
            return
        self._idle_bytes += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            self._refuse(_problem(error))
            return
        if self._idle_bytes > MAX_HEADER_BYTES:
            self._refuse(http_problem(400, "trailers or chunks' extensions are too large") if self._in_body else
                         http_problem(431, "the headers are too large"))
        elif self._timer is None and not self._is_answering():
            self._await_head()

    def on_message_begin(self) -> None:
        if self._rereading_head:
            return
        if self._timer is not None and self.cycle is not None:
            self._stop_timer()  # it ran for the rest of a body that was answered early; this head has its own time
        if len(self.pipeline) >= MAX_WAITING:
            raise _refused(400, f"more than {MAX_WAITING} requests wait on this connection")
        self._in_head, self._head_bytes = True, 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self._in_head:
            self._count_head(len(url))
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            self._count_head(len(name) + len(value) + LINE_BYTES)
            super().on_header(name, value.rstrip(b" \t"))

    def on_headers_complete(self) -> None:
        self._idle_bytes = 0
        if self._rereading_head:
            self._rereading_head = False
            return
        version = self.parser.get_http_version()
        self._check_head(version)
        self._stop_timer()
        super().on_headers_complete()
        self._in_head, self._in_body = False, True
        if not self._busy:
            self._limits.clients.mark_idle(self)  # idle from now on: it has just sent something
        if version == "1.0":
            self.cycle.waiting_for_100_continue = False

    def on_body(self, body: bytes) -> None:
        self._idle_bytes = 0
        if not self.cycle.response_complete:  # else it is dropped
            self._limits.body_received(self, len(body), not self._busy)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._idle_bytes = 0
        if not self.parser.should_upgrade():  # then the parser has not looked for a body
            self._in_body = False
            self._limits.body_complete(self)
            super().on_message_complete()
            self._update_busy()
            if not self.pipeline:  # a large body has paused reading, and without reading no end is noticed
                self.flow.resume_reading()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update_busy()

    def _update_busy(self) -> None:
        """A connection is busy while a complete request is answered."""
        answering = self._is_answering()
        busy = bool(self.pipeline) or (answering and not self.cycle.more_body)
        if not answering:
            self._limits.release_body(self)
        if busy != self._busy:
            self._busy = busy
            (self._limits.clients.mark_busy if busy else self._limits.clients.mark_idle)(self)

    def _feed(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0]:]
            # The parser takes what follows for another protocol. A new parser reads the same head without "upgrade".
            self.parser = httptools.HttpRequestParser(self)
            self._rereading_head = True
            framing = [b"%b: %b\r\n" % header for header in self.headers if header[0] in FRAMING]
            self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(framing))

    def _count_head(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > MAX_HEADER_BYTES:
            raise _refused(431, "the headers are too large")

    def _check_head(self, version: str) -> None:
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
        self._limits.check_request(self.url.partition(b"?")[0])

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, problem: Problem) -> None:
        """Take nothing more, and say why if that can be told from an answer to another request."""
        self._refused = True
        self._stop_timer()
        cycle = self.cycle
        if self._is_answering() and not self._in_body:
            cycle.keep_alive = False
        elif self._in_body and self.pipeline:
            cycle.disconnected = True
            self.pipeline[0] = (cycle, self._close_in_turn)  # the newest request; those before it are answered
        elif self._in_body and cycle.response_started:
            self.transport.close()
        else:
            if self._in_body:
                cycle.disconnected = True
                cycle.waiting_for_100_continue = False
                cycle.message_event.set()
            self._answer_and_close(problem)

    async def _close_in_turn(self, scope: object, receive: object, send: object) -> None:
        """What a refused request gets in its turn."""
        self.transport.close()

    def _answer_and_close(self, problem: Problem) -> None:
        # Closed at once, with bytes unread, the connection would be reset, and the client might never see why.
        self.flow.resume_reading()
        self.transport.write(_error_answer(problem))
        self.transport.write_eof()
        self._timer = self.loop.call_later(LINGER_S, self.transport.close)

    def _await_head(self) -> None:
        """From now on a head may take ``HEAD_S``."""
        self._timer = self.loop.call_later(HEAD_S, self._head_timed_out)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _head_timed_out(self) -> None:
        self._timer = None
        if self._in_head:
            self._refuse(http_problem(408, f"the headers did not arrive within {HEAD_S:g} s"))
        else:
            self.transport.close()


def _refused(status: int, message: str) -> RefusedRequest:
    return RefusedRequest(http_problem(status, message))


def _problem(error: httptools.HttpParserError) -> Problem:
    cause = error.__context__
    if isinstance(cause, RefusedRequest):
        return cause.problem
    # The one thing that uvicorn's callbacks parse is a request's target.
    bad_target = isinstance(error, httptools.HttpParserCallbackError)
    return http_problem(400, "no HTTP/1.1: " + (
        "the request's target is not understood" if bad_target else str(error)))


def _error_answer(problem: Problem) -> bytes:
    """A whole answer, the last of its connection."""
    body = orjson.dumps(problem.body())
    headers = "".join(f"{name}: {value}\r\n" for name, value in problem.headers).encode()
    return (b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nx-request-id: %b\r\n%b"
            b"connection: close\r\n\r\n%b" % (problem.status, HTTPStatus(problem.status).phrase.encode(), len(body),
                                             secrets.token_hex(16).encode(), headers, body))


def connection_of(scope: Scope) -> Connection:
    """The connection of a request that is not answered yet."""
    found: Connection = scope["state"][STATE_KEY]()
    return found


def event(content: Mapping[str, Any], event_id: str = "") -> bytes:
    return framed(orjson.dumps(content), event_id)


def framed(data: bytes, event_id: str = "") -> bytes:
    """An event of JSON that is written already."""
    return b"id: %b\ndata: %b\n\n" % (event_id.encode(), data) if event_id else b"data: " + data + b"\n\n"


def _escape_line_ends(events: bytes) -> bytes:
    """``events`` for clients that end a line wherever Unicode does, as httpx's ``iter_lines``. These characters are
    only in texts."""
    for end, escaped in LINE_ENDS:
        events = events.replace(end, escaped)
    return events


def presence(connection: Connection) -> Limit:
    """``with presence(connection): await …`` raises ClientDisconnect when the client goes away. Call it after the body
    has been read."""
    limit = Limit(ClientDisconnect)
    connection.watch(limit.fire)
    return limit


class EventStream(Response):
    """Sends ``events`` until they end or the client goes away; ``close`` is awaited in any case. Where none comes for
    ``quiet_s``, a comment is sent: proxies end what says nothing, as while a long argument of a call is read."""

    def __init__(self, events: AsyncGenerator[bytes, None], close: Callable[[], Awaitable[None]],
                 headers: Mapping[str, str], stall_s: float = STALL_S, quiet_s: float = QUIET_S) -> None:
        self.status_code = 200
        self.background = None
        self.raw_headers = [*STREAM_HEADERS, *((name.encode(), value.encode()) for name, value in headers.items())]
        self._events = events
        self._close = close
        self._stall_s, self._quiet_s = stall_s, quiet_s
        self._is_quiet = False  # nothing was sent since the timer's latest turn
        self._timer: asyncio.TimerHandle | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = connection_of(scope)
        try:
            with presence(connection):
                await self._send_events(connection, scope, send)
        except ClientDisconnect:
            return
        except TimeoutError:
            connection.transport.abort()  # closed, it would wait for the client to read
        finally:
            if self._timer is not None:
                self._timer.cancel()
            await self._events.aclose()
            await self._close()

    async def _send_events(self, connection: Connection, scope: Scope, send: Send) -> None:
        in_chunks = scope["http_version"] == "1.1"
        if not in_chunks:  # the body ends with the connection
            scope["method"] = "HEAD"  # so uvicorn writes nothing of a body, neither a header of chunks nor their end
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._break_silence(connection, in_chunks)
        async for events in self._events:
            self._is_quiet = False
            connection.write(_chunk(_escape_line_ends(events), in_chunks))
            if connection.flow.write_paused:
                async with asyncio.timeout(self._stall_s):
                    await connection.flow.drain()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _break_silence(self, connection: Connection, in_chunks: bool) -> None:
        if self._is_quiet and not connection.flow.write_paused:
            connection.write(_chunk(COMMENT, in_chunks))
        self._is_quiet = True
        self._timer = asyncio.get_running_loop().call_later(
            self._quiet_s, self._break_silence, connection, in_chunks)


def _chunk(data: bytes, in_chunks: bool) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data) if in_chunks else data
