"""The target service over gRPC, both its ends: many answers share one call.

The target's end, where a Backend answers whoever calls:
1. Errors cross the wire as the class that was raised. An answer's errors are its own; only bytes that are no frame, and
   a number used twice, end the call.
2. All items that wait at one moment leave as one frame.
3. The pieces of an answer on hold, and of all answers while more than MAX_WAITING_BYTES wait to be sent, stay in the
   backend.
4. When a call ends, all its answers are closed. After ``drain`` a call refuses new answers and ends by itself after the
   last one.

The caller's end, a Backend that is a target elsewhere:
1. Errors cross the wire as the class that was raised; no gRPC error leaves the client.
2. A slow reader delays no others: beyond HOLD_AT unread pieces its answer's sender must wait.
3. Nothing waits without an end: an answer that the target has not taken within ``connect_s`` is Unavailable (it alone,
   unless the call has failed), and keepalive ends the calls to a silent target.
4. Closing an answer frees it at the target; what still arrives for it is dropped.
5. When a call ends, so do its answers; the next answer begins a new call.
6. When the target drains, new answers go to another target to which its name resolves by now, if there is one; running
   answers stay. While there are some, the other must have the same identity. A target that cannot be reached is
   replaced by the one to which the name resolves now, on a new channel: a gRPC channel looks up a name without an
   address ever more rarely, at last every two minutes.

It knows nothing about engines or text. Format: ``GenerateMany`` in ``proto/slipstream/v1/target.proto``.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import grpc

from slipstream.base.errors import Draining, InvalidRequest, RemoteProtocolError, SlipstreamError, Unavailable
from slipstream.observe.log import logger
from slipstream.protocol.requests import Answer, Backend, CallbackAnswer, Piece, Request, TargetInfo
from slipstream.wire.answers import (
    TAKEN,
    Flow,
    RequestContent,
    ResponseContent,
    decode_answer_requests,
    decode_answer_responses,
    decode_info,
    encode_answer_request,
    encode_answer_response,
    encode_info,
    joined_frames,
)
from slipstream.wire.channel import RULES, TARGET_SERVICE, Connection, Lane
from slipstream.wire.link import ByteStream, first_completed
from slipstream.wire.status import Context, ErrorReport, abort, log_bug, translated_errors
from slipstream.wire.tls import TlsFiles

MAX_FRAME_BYTES = 1 << 20  # unless a single item is longer
MAX_WAITING_BYTES = 1 << 20
HOLD_AT, RESUME_AT = 256, 64  # unread pieces of one answer
CONNECT_S = 5.0
SUCCESSOR_TIMEOUT_S = 1.0  # for GetInfo of a possible successor of a target that drains or is unreachable


class TargetServicer:
    """TargetService: requests come in, ``backend`` answers."""

    service = TARGET_SERVICE

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._calls: set[AnswerCall] = set()
        self._draining = False

    def handler(self) -> grpc.GenericRpcHandler:
        many: Any = grpc.stream_stream_rpc_method_handler(self._generate_many)
        info: Any = grpc.unary_unary_rpc_method_handler(self._get_info)
        return grpc.method_handlers_generic_handler(TARGET_SERVICE, {"GenerateMany": many, "GetInfo": info})

    def drain(self) -> None:
        """Refuse new requests; running answers go on."""
        self._draining = True
        for call in self._calls:
            call.drain()

    async def _get_info(self, _request: bytes, context: Context) -> bytes:
        try:
            return encode_info(await self._backend.info())
        except Exception as error:
            await abort(context, error)
            raise

    async def _generate_many(self, _requests: object, context: Context) -> None:
        try:
            await context.send_initial_metadata(())
            if self._draining:
                raise Draining("this target is shutting down")
            call = AnswerCall(self._backend)
            self._calls.add(call)
            try:
                await call.run(context)
            finally:
                self._calls.discard(call)
        except asyncio.InvalidStateError:
            return  # the call ended meanwhile
        except Exception as error:
            await abort(context, error)


class Sender:
    """One answer that is being sent."""

    __slots__ = ("answer", "may_send", "piece_waits", "task")

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.piece_waits = False  # its task has a piece that may not be sent yet
        self.may_send = asyncio.Event()
        self.may_send.set()
        self.task: asyncio.Task[None] | None = None


class AnswerCall:
    """The target's end of one call. Make it on the event loop that runs it."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._senders: dict[int, Sender] = {}
        self._outgoing: list[bytes] = []
        self._outgoing_bytes = 0
        self._filled = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._draining = False
        self._log = logger("wire")

    def drain(self) -> None:
        self._draining = True
        self._filled.set()

    async def run(self, stream: ByteStream) -> None:
        """Run until the caller ends the call or, in a drain, all answers are sent. Raises RemoteProtocolError."""
        try:
            await first_completed(self._read(stream), self._write(stream))
        finally:
            tasks = [sender.task for sender in self._senders.values() if sender.task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, stream: ByteStream) -> None:
        while isinstance(data := await stream.read(), bytes):
            for number, content in decode_answer_requests(data):
                self._handle(number, content)
            await self._has_room.wait()  # from a caller that does not read, nothing more is read

    def _handle(self, number: int, content: RequestContent) -> None:
        sender = self._senders.get(number)
        if isinstance(content, Request):
            if sender is not None:
                raise RemoteProtocolError("answer", f"number {number} is in use")
            self._start(number, content)
        elif sender is None:  # the answer has ended meanwhile
            if isinstance(content, SlipstreamError):
                self._enqueue(number, ErrorReport.of(content))
        elif isinstance(content, SlipstreamError):
            self._log.warning("bad control message; the answer goes on as it is", problem=str(content))
        elif isinstance(content, bool):
            sender.answer.set_speculation(content)
        elif content is Flow.HOLD:
            sender.may_send.clear()
        elif content is Flow.RESUME:
            sender.may_send.set()
        else:  # later, so that its task has begun: cancelled before, it would not close the answer
            asyncio.get_running_loop().call_soon(self._cancel, number, sender)

    def _cancel(self, number: int, sender: Sender) -> None:
        """Nobody reads the answer any more. If it has ended meanwhile, it closes by itself."""
        if sender.task is not None and self._senders.get(number) is sender:
            sender.task.cancel()

    def _start(self, number: int, request: Request) -> None:
        try:
            if self._draining:
                raise Draining("this target is shutting down")
            sender = Sender(self._backend.submit(request))
            self._enqueue(number, TAKEN)
        except Exception as error:
            log_bug(error)
            self._enqueue(number, ErrorReport.of(error))
            return
        self._senders[number] = sender
        if isinstance(sender.answer, CallbackAnswer):
            sender.answer.offer(partial(self._try_send, number, sender))
        sender.task = asyncio.get_running_loop().create_task(self._send(number, sender))

    async def _send(self, number: int, sender: Sender) -> None:
        finished = False
        try:
            async for piece in sender.answer:
                sender.piece_waits = True
                await sender.may_send.wait()
                await self._has_room.wait()
                sender.piece_waits = False
                self._enqueue(number, piece)
                finished = piece.finish != ""
            if not finished:
                raise Unavailable("the target ended the answer before its end")
        except Exception as error:
            log_bug(error)
            self._enqueue(number, ErrorReport.of(error))
        finally:
            del self._senders[number]
            self._filled.set()  # it may have been the last one of a drain
            await sender.answer.aclose()

    def _try_send(self, number: int, sender: Sender, piece: Piece) -> bool:
        """Send a piece at once if nothing waits. Returns whether it was sent."""
        if sender.piece_waits or not (sender.may_send.is_set() and self._has_room.is_set()):
            return False
        try:
            self._enqueue(number, piece)
        except Exception:  # its own task gets the same error and reports it; here other answers' pieces follow
            return False
        return True

    def _enqueue(self, number: int, content: ResponseContent) -> None:
        item = encode_answer_response(number, content)
        self._outgoing.append(item)
        self._outgoing_bytes += len(item)
        if self._outgoing_bytes > MAX_WAITING_BYTES:
            self._has_room.clear()
        self._filled.set()

    async def _write(self, stream: ByteStream) -> None:
        while self._outgoing or self._senders or not self._draining:
            await self._filled.wait()
            self._filled.clear()
            items, self._outgoing, self._outgoing_bytes = self._outgoing, [], 0
            for frame in joined_frames(items, MAX_FRAME_BYTES):
                await stream.write(frame)
            self._has_room.set()


class TargetClient:
    """A Backend in another process. Make it on the event loop that uses it; ``aclose`` when done."""

    def __init__(self, address: str, *, tls: TlsFiles | None = None, connect_s: float = CONNECT_S) -> None:
        self.address = address
        self._connect_s = connect_s
        self._connection = Connection(address, tls)
        self._stream: AnswerStream | None = None

    def submit(self, request: Request) -> Answer:
        """The answer. It begins when it is iterated; that raises InvalidRequest if the request is too large to send."""
        return SharedAnswer(self._open_stream, request, self._connect_s)

    async def info(self) -> TargetInfo:
        """Raises Unavailable within ``connect_s`` seconds."""
        lane = self._connection.begin()
        try:
            info = await self._info_or_successor(lane)
            if self._stream is not None and not self._stream.accepts_answers:
                self._stream = None
            return info
        finally:
            self._connection.end(lane)

    async def _info_or_successor(self, lane: Lane) -> TargetInfo:
        try:
            info = await self._get_info(lane, self._connect_s)
        except Unavailable:
            if (successor := await self._find_successor(lambda _: True)) is None:
                raise
            return successor
        if info.draining:  # a successor must be able to continue answers that the target may hand back
            busy = self._stream is not None and self._stream.busy
            return await self._find_successor(lambda candidate: not candidate.draining and (
                not busy or candidate.identity == info.identity)) or info
        return info

    async def _get_info(self, lane: Lane, within_s: float) -> TargetInfo:
        method: Any = lane.channel.unary_unary(f"/{TARGET_SERVICE}/GetInfo")
        with translated_errors(self.address):
            return decode_info(await method(b"", timeout=within_s))

    async def _find_successor(self, is_successor: Callable[[TargetInfo], bool]) -> TargetInfo | None:
        """The target to which the name resolves now, if it ``is_successor``: new answers begin there. None: there is
        none."""
        lane = self._connection.open_lane()
        if lane is None:
            return None
        adopted = False
        try:
            with suppress(SlipstreamError):
                info = await self._get_info(lane, SUCCESSOR_TIMEOUT_S)
                if adopted := is_successor(info):
                    self._connection.use(lane)
                    return info
            return None
        finally:
            if not adopted:
                await lane.channel.close()

    async def aclose(self) -> None:
        if self._stream is not None:
            await self._stream.aclose()
        await self._connection.aclose()

    def _open_stream(self) -> AnswerStream:
        if self._stream is None or not self._stream.accepts_answers:
            self._stream = AnswerStream(self._connection, self.address)
        return self._stream


class AnswerStream:
    """The caller's end of one call. Make it on the event loop that uses it; it ends by ``retire`` (after its last
    answer) or ``aclose``."""

    def __init__(self, connection: Connection, address: str) -> None:
        self.address = address
        self._connection = connection
        self._lane = connection.begin()
        method: Any = self._lane.channel.stream_stream(f"/{TARGET_SERVICE}/GenerateMany")
        self._call = method()
        self._numbers = itertools.count(1)
        self._answers: dict[int, SharedAnswer] = {}
        self._outgoing: list[tuple[int, bytes]] = []
        self._filled = asyncio.Event()
        self._retired = False
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(self._on_end)  # also of one that is cancelled before it begins

    @property
    def accepts_answers(self) -> bool:
        """Whether an answer may begin here: the call runs, on the connection that new calls use."""
        if not self._connection.is_current(self._lane):
            self.retire()
        return not self._retired and not self._task.done()

    @property
    def busy(self) -> bool:
        """Whether it has running answers."""
        return bool(self._answers)

    def begin(self, answer: SharedAnswer, request: Request) -> int:
        """Send ``request``. Returns ``answer``'s number from now on; InvalidRequest if the request is too large."""
        number = next(self._numbers)
        data = encode_answer_request(number, request)
        if len(data) > RULES.message_bytes:
            raise InvalidRequest("tokens", f"the request takes {len(data)} bytes, more than {RULES.message_bytes}")
        self._answers[number] = answer
        self._enqueue(number, data)
        return number

    def send_control(self, number: int, content: bool | Flow) -> None:
        self._enqueue(number, encode_answer_request(number, content))

    def _enqueue(self, number: int, item: bytes) -> None:
        self._outgoing.append((number, item))
        self._filled.set()

    def forget(self, number: int) -> None:
        """The answer has ended on both sides."""
        self._answers.pop(number, None)
        if self._retired and not self._answers:
            self._task.cancel()

    def cancel(self, number: int) -> None:
        """Nobody reads the answer any more."""
        self._outgoing = [item for item in self._outgoing if item[0] != number]
        self.send_control(number, Flow.CLOSE)
        self.forget(number)

    def retire(self) -> None:
        """Take no new answer, and end after the last one."""
        self._retired = True
        if not self._answers:
            self._task.cancel()

    async def aclose(self) -> None:
        self._retired = True
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        """Raises SlipstreamError."""
        with translated_errors(self.address):
            await first_completed(self._read(), self._write())
        raise Draining(f"{self.address} is shutting down")  # no other reason ends a call in order

    def _on_end(self, task: asyncio.Task[None]) -> None:
        error: SlipstreamError = Unavailable(f"{self.address}: the connection was closed")
        task_error = None if task.cancelled() else task.exception()
        if isinstance(task_error, SlipstreamError):
            error = task_error
        elif isinstance(task_error, Exception):
            log_bug(task_error)
        self._call.cancel()
        self._connection.end(self._lane)
        for answer in list(self._answers.values()):
            answer.receive(error)

    async def _read(self) -> None:
        answers = self._answers
        while isinstance(data := await self._call.read(), bytes):
            for number, content in decode_answer_responses(data):
                answer = answers.get(number)
                if answer is not None:
                    answer.receive(content)

    async def _write(self) -> None:
        try:
            while True:
                await self._filled.wait()
                self._filled.clear()
                outgoing, self._outgoing = self._outgoing, []
                for frame in joined_frames([item for _, item in outgoing], MAX_FRAME_BYTES):
                    await self._call.write(frame)
        except asyncio.InvalidStateError:
            await asyncio.get_running_loop().create_future()  # the call has ended: the reader gets the reason


class SharedAnswer:
    """An Answer of an AnswerStream. ``open_stream`` gives the stream when the answer begins, with its iteration."""

    __slots__ = ("_arrived", "_connect_s", "_loop", "_number", "_on_hold", "_open_stream", "_request", "_speculate",
                 "_start_timer", "_started", "_stream", "_waiter")

    def __init__(self, open_stream: Callable[[], AnswerStream], request: Request, connect_s: float) -> None:
        self._open_stream = open_stream
        self._request = request
        self._connect_s = connect_s
        self._speculate: bool | None = None
        self._stream: AnswerStream | None = None  # while it runs
        self._number = 0
        self._started = self._on_hold = False
        self._arrived: deque[Piece | SlipstreamError] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._start_timer: asyncio.TimerHandle | None = None

    def __aiter__(self) -> SharedAnswer:
        return self

    async def __anext__(self) -> Piece:
        if not self._started:
            self._start()
        while not self._arrived:
            if self._stream is None:
                raise StopAsyncIteration
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:
                await self.aclose()
                raise
            finally:
                self._waiter = None
        if self._on_hold and len(self._arrived) <= RESUME_AT and self._stream is not None:
            self._on_hold = False
            self._stream.send_control(self._number, Flow.RESUME)
        content = self._arrived.popleft()
        if isinstance(content, Piece):
            return content
        raise content

    def set_speculation(self, allowed: bool) -> None:
        if self._stream is not None:
            self._stream.send_control(self._number, allowed)
        self._speculate = allowed

    async def aclose(self) -> None:
        self._started = True
        self._arrived.clear()
        if self._stream is not None:
            self._stream.cancel(self._number)
            self._end()

    def receive(self, content: ResponseContent | SlipstreamError) -> None:
        """Take an item for this answer; an error ends it, as does a piece with a finish."""
        assert self._stream is not None
        if self._start_timer is not None:
            self._start_timer.cancel()
            self._start_timer = None
        if content is TAKEN:
            return
        ended = True
        if isinstance(content, Piece):
            ended = content.finish != ""
            self._arrived.append(content)
        else:
            self._arrived.append(self._error(content))
        if ended:
            self._stream.forget(self._number)
            self._end()
        elif len(self._arrived) >= HOLD_AT and not self._on_hold:
            self._on_hold = True
            self._stream.send_control(self._number, Flow.HOLD)
        self._wake()

    def _start(self) -> None:
        self._started = True
        self._loop = asyncio.get_running_loop()
        stream = self._open_stream()
        self._number = stream.begin(self, self._request)
        self._stream = stream
        if self._speculate is not None:
            stream.send_control(self._number, self._speculate)
        self._start_timer = self._loop.call_later(self._connect_s, self._on_start_timeout)

    def _on_start_timeout(self) -> None:
        assert self._stream is not None
        address = self._stream.address
        self._stream.cancel(self._number)
        self.receive(Unavailable(f"{address}: the request was not taken within {self._connect_s:g} s"))

    def _end(self) -> None:
        self._stream = None
        if self._start_timer is not None:
            self._start_timer.cancel()
            self._start_timer = None
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _error(self, content: object) -> SlipstreamError:
        assert self._stream is not None
        address = self._stream.address
        if isinstance(content, ErrorReport):
            return content.to_error() or Unavailable(f"{address}: INTERNAL {content.message}")
        if isinstance(content, RemoteProtocolError):
            return Unavailable(f"{address}: not a service of this release ({content})")
        assert isinstance(content, SlipstreamError)
        return content
