"""The target service over gRPC, both its ends: many answers share one call.

The target's end, where a Backend answers whoever calls:
1. Errors cross the wire as the class that was raised. An answer's errors are its own; only bytes that are no frame, and
   a number used twice, end the call.
2. All items that wait at one moment leave as one frame.
3. The pieces of an answer on hold, and of all answers while more than MAX_WAITING bytes wait to be sent, stay in the
   backend.
4. When a call ends, all its answers are closed. One that is told to ``drain`` refuses new answers and ends by itself
   after the last one.

The caller's end, a Backend that is a target elsewhere:
1. Errors cross the wire as the class that was raised; no gRPC error leaves the client.
2. A slow reader delays no others: beyond HOLD_AT pieces its answer's sender is told to wait.
3. Nothing waits without an end: an answer that the target has not taken within ``connect_s`` is Unavailable (it alone,
   unless the call has failed), and keepalive ends the calls to one that falls silent.
4. Leaving an answer frees it there; what still comes for it is dropped.
5. A call that ended takes its answers with it; the next answer begins a new call.
6. When the target drains, new answers go to another target that its name means by now, if one is there; running answers
   stay. While there are some, the other must have the same identity. A target that cannot be reached is replaced by
   whichever the name means now, on a new channel: a gRPC channel looks up a name without an address ever more rarely,
   at last every two minutes.

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
from slipstream.protocol.requests import Answer, Backend, Offering, Piece, Request, TargetInfo
from slipstream.wire.answers import (
    TAKEN,
    Asked,
    Flow,
    Told,
    decode_asked,
    decode_info,
    decode_told,
    encode_asked,
    encode_info,
    encode_told,
    joined,
)
from slipstream.wire.channel import RULES, TARGET_SERVICE, Connection, Lane
from slipstream.wire.link import ByteStream, first_completed
from slipstream.wire.status import Context, Reported, abort, log_bug, translated
from slipstream.wire.tls import TlsFiles

MAX_BYTES = 1 << 20  # of a frame, unless a single item is longer
MAX_WAITING = 1 << 20
HOLD_AT, RESUME_AT = 256, 64  # pieces of one answer that nobody has read
CONNECT_S = 5.0
LOOK_S = 1.0  # for who may stand behind the name of a target that drains or is gone


class TargetServicer:
    """TargetService: requests come in, ``backend`` answers."""

    service = TARGET_SERVICE

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._calls: set[AnswerCall] = set()
        self._info: TargetInfo | None = None
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
            call = AnswerCall(self._backend, await self._taking())
            self._calls.add(call)
            try:
                await call.run(context)
            finally:
                self._calls.discard(call)
        except asyncio.InvalidStateError:
            return  # the call ended under our hands
        except Exception as error:
            await abort(context, error)

    async def _taking(self) -> TargetInfo:
        """What is served. Raises Draining."""
        if self._info is None:
            self._info = await self._backend.info()
        if self._draining:
            raise Draining("this target is shutting down")
        return self._info


class Sender:
    """One answer on its way."""

    __slots__ = ("answer", "behind", "flows", "task")

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.behind = False  # a piece of it waits here
        self.flows = asyncio.Event()
        self.flows.set()
        self.task: asyncio.Task[None] | None = None


class AnswerCall:
    """Make it on the event loop that runs it. ``info`` bounds what may be asked."""

    def __init__(self, backend: Backend, info: TargetInfo) -> None:
        self._backend = backend
        self._info = info
        self._senders: dict[int, Sender] = {}
        self._waiting: list[bytes] = []
        self._size = 0
        self._filled = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._draining = False
        self._log = logger("wire")

    def drain(self) -> None:
        self._draining = True
        self._filled.set()

    async def run(self, line: ByteStream) -> None:
        """Until the caller ends the call, or the last answer of a drain has been told. Raises RemoteProtocolError."""
        try:
            await first_completed(self._read(line), self._write(line))
        finally:
            tasks = [sender.task for sender in self._senders.values() if sender.task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, line: ByteStream) -> None:
        while isinstance(data := await line.read(), bytes):
            for number, content in decode_asked(data, self._info.vocab_size, self._info.max_context):
                self._heed(number, content)
            await self._room.wait()  # who does not read what he is told is not read either

    def _heed(self, number: int, content: Asked) -> None:
        sender = self._senders.get(number)
        if isinstance(content, Request):
            if sender is not None:
                raise RemoteProtocolError("answer", f"number {number} is in use")
            self._begin(number, content)
        elif sender is None:  # it has ended, and they did not know
            if isinstance(content, SlipstreamError):
                self._put(number, Reported.of(content))
        elif isinstance(content, SlipstreamError):
            self._log.warning("bad control message; the answer goes on as it is", problem=str(content))
        elif isinstance(content, bool):
            sender.answer.set_speculation(content)
        elif content is Flow.HOLD:
            sender.flows.clear()
        elif content is Flow.RESUME:
            sender.flows.set()
        else:  # after its first step: one that has not begun would end nothing
            asyncio.get_running_loop().call_soon(self._leave, number, sender)

    def _leave(self, number: int, sender: Sender) -> None:
        """Nobody reads it any more. One that has come to its end meanwhile is being closed, to the end."""
        if sender.task is not None and self._senders.get(number) is sender:
            sender.task.cancel()

    def _begin(self, number: int, request: Request) -> None:
        try:
            if self._draining:
                raise Draining("this target is shutting down")
            sender = Sender(self._backend.submit(request))
            self._put(number, TAKEN)
        except Exception as error:
            log_bug(error)
            self._put(number, Reported.of(error))
            return
        self._senders[number] = sender
        if isinstance(sender.answer, Offering):
            sender.answer.offer(partial(self._take, number, sender))
        sender.task = asyncio.get_running_loop().create_task(self._send(number, sender))

    async def _send(self, number: int, sender: Sender) -> None:
        finished = False
        try:
            async for piece in sender.answer:
                sender.behind = True
                await sender.flows.wait()
                await self._room.wait()
                sender.behind = False
                self._put(number, piece)
                finished = piece.finish != ""
            if not finished:
                raise Unavailable("the target ended the answer before its end")
        except Exception as error:
            log_bug(error)
            self._put(number, Reported.of(error))
        finally:
            del self._senders[number]
            self._filled.set()  # it may have been the last one of a drain
            await sender.answer.aclose()

    def _take(self, number: int, sender: Sender, piece: Piece) -> bool:
        """Of a step's pieces, one that may leave at once."""
        if sender.behind or not (sender.flows.is_set() and self._room.is_set()):
            return False
        try:
            self._put(number, piece)
        except Exception:  # its own task meets it again, and tells: other answers' pieces come behind it
            return False
        return True

    def _put(self, number: int, content: Told) -> None:
        item = encode_told(number, content)
        self._waiting.append(item)
        self._size += len(item)
        if self._size > MAX_WAITING:
            self._room.clear()
        self._filled.set()

    async def _write(self, line: ByteStream) -> None:
        while self._waiting or self._senders or not self._draining:
            await self._filled.wait()
            self._filled.clear()
            items, self._waiting, self._size = self._waiting, [], 0
            for frame in joined(items, MAX_BYTES):
                await line.write(frame)
            self._room.set()


class TargetClient:
    """A Backend elsewhere. Make it on the event loop that uses it; ``aclose`` when done."""

    def __init__(self, address: str, *, tls: TlsFiles | None = None, connect_s: float = CONNECT_S) -> None:
        self.address = address
        self._connect_s = connect_s
        self._connection = Connection(address, tls)
        self._stream: AnswerStream | None = None

    def submit(self, request: Request) -> Answer:
        """The answer, which begins with its iteration. InvalidRequest there if it is too large to send."""
        return SharedAnswer(self._join, request, self._connect_s)

    async def info(self) -> TargetInfo:
        """Raises Unavailable within ``connect_s`` seconds."""
        lane = self._connection.begin()
        try:
            found = await self._found(lane)
            if self._stream is not None and not self._stream.takes:
                self._stream = None
            return found
        finally:
            self._connection.end(lane)

    async def _found(self, lane: Lane) -> TargetInfo:
        try:
            found = await self._asked(lane, self._connect_s)
        except Unavailable:
            if (other := await self._behind(lambda _: True)) is None:
                raise
            return other
        if found.draining:  # who could not go on with what it may have to hand back is no successor
            busy = self._stream is not None and self._stream.busy
            return await self._behind(lambda one: not one.draining and (
                not busy or one.identity == found.identity)) or found
        return found

    async def _asked(self, lane: Lane, within_s: float) -> TargetInfo:
        method: Any = lane.channel.unary_unary(f"/{TARGET_SERVICE}/GetInfo")
        with translated(self.address):
            return decode_info(await method(b"", timeout=within_s))

    async def _behind(self, fits: Callable[[TargetInfo], bool]) -> TargetInfo | None:
        """Who stands behind the name by now, if he ``fits``: answers begin there from now on. None: nobody does."""
        fresh = self._connection.fresh()
        if fresh is None:
            return None
        taken = False
        try:
            with suppress(SlipstreamError):
                found = await self._asked(fresh, LOOK_S)
                if taken := fits(found):
                    self._connection.take(fresh)
                    return found
            return None
        finally:
            if not taken:
                await fresh.channel.close()

    async def aclose(self) -> None:
        if self._stream is not None:
            await self._stream.aclose()
        await self._connection.aclose()

    def _join(self) -> AnswerStream:
        if self._stream is None or not self._stream.takes:
            self._stream = AnswerStream(self._connection, self.address)
        return self._stream


class AnswerStream:
    """One call. Make it on the event loop that uses it; it ends by ``retire`` (after its last answer) or
    ``aclose``."""

    def __init__(self, connection: Connection, address: str) -> None:
        self.address = address
        self.over = False
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
        self._task.add_done_callback(self._ended)  # also of one that is cancelled before it begins

    @property
    def takes(self) -> bool:
        """Whether an answer may begin here: the call lives, on the connection that new calls take."""
        if not self.over and not self._connection.is_current(self._lane):
            self.retire()
        return not self.over and not self._retired

    @property
    def busy(self) -> bool:
        """Whether answers run on it."""
        return bool(self._answers)

    def begin(self, answer: SharedAnswer, request: Request) -> int:
        """Send ``request``. Returns ``answer``'s number from now on; InvalidRequest if the request is too large."""
        number = next(self._numbers)
        start = encode_asked(number, request)
        if len(start) > RULES.message_bytes:
            raise InvalidRequest("tokens", f"the request takes {len(start)} bytes, more than {RULES.message_bytes}")
        self._answers[number] = answer
        self._put(number, start)
        return number

    def say(self, number: int, content: bool | Flow) -> None:
        self._put(number, encode_asked(number, content))

    def _put(self, number: int, item: bytes) -> None:
        self._outgoing.append((number, item))
        self._filled.set()

    def forget(self, number: int) -> None:
        """The answer is over, as both sides know."""
        self._answers.pop(number, None)
        if self._retired and not self._answers:
            self._task.cancel()

    def leave(self, number: int) -> None:
        """Nobody reads the answer any more."""
        self._outgoing = [item for item in self._outgoing if item[0] != number]
        self.say(number, Flow.CLOSE)
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
        with translated(self.address):
            await first_completed(self._read(), self._write())
        raise Draining(f"{self.address} is shutting down")  # no other reason ends a call in order

    def _ended(self, task: asyncio.Task[None]) -> None:
        error: SlipstreamError = Unavailable(f"{self.address}: the connection was closed")
        failed = None if task.cancelled() else task.exception()
        if isinstance(failed, SlipstreamError):
            error = failed
        elif isinstance(failed, Exception):
            log_bug(failed)
        self.over = True
        self._call.cancel()
        self._connection.end(self._lane)
        for answer in list(self._answers.values()):
            answer.take(error)

    async def _read(self) -> None:
        answers = self._answers
        while isinstance(data := await self._call.read(), bytes):
            for number, content in decode_told(data):
                answer = answers.get(number)
                if answer is not None:
                    answer.take(content)

    async def _write(self) -> None:
        try:
            while True:
                await self._filled.wait()
                self._filled.clear()
                outgoing, self._outgoing = self._outgoing, []
                for frame in joined([item for _, item in outgoing], MAX_BYTES):
                    await self._call.write(frame)
        except asyncio.InvalidStateError:
            await asyncio.get_running_loop().create_future()  # the call has ended: the reader hears why


class SharedAnswer:
    """An Answer of an AnswerStream. ``join`` gives the stream when the answer begins, with its iteration."""

    __slots__ = ("_address", "_arrived", "_begun", "_connect_s", "_held", "_join", "_late", "_loop", "_number",
                 "_request", "_speculate", "_stream", "_waiter")

    def __init__(self, join: Callable[[], AnswerStream], request: Request, connect_s: float) -> None:
        self._join = join
        self._request = request
        self._connect_s = connect_s
        self._speculate: bool | None = None
        self._stream: AnswerStream | None = None  # while it runs
        self._number = 0
        self._begun = self._held = False
        self._arrived: deque[Piece | SlipstreamError] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._late: asyncio.TimerHandle | None = None

    def __aiter__(self) -> SharedAnswer:
        return self

    async def __anext__(self) -> Piece:
        if not self._begun:
            self._begin()
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
        if self._held and len(self._arrived) <= RESUME_AT and self._stream is not None:
            self._held = False
            self._stream.say(self._number, Flow.RESUME)
        content = self._arrived.popleft()
        if isinstance(content, Piece):
            return content
        raise content

    def set_speculation(self, allowed: bool) -> None:
        if self._stream is not None:
            self._stream.say(self._number, allowed)
        self._speculate = allowed

    async def aclose(self) -> None:
        self._begun = True
        self._arrived.clear()
        if self._stream is not None:
            self._stream.leave(self._number)
            self._end()

    def take(self, content: Told | SlipstreamError) -> None:
        """Take what came for this answer; an error ends it, as does a piece with a finish."""
        assert self._stream is not None
        if self._late is not None:
            self._late.cancel()
            self._late = None
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
        elif len(self._arrived) >= HOLD_AT and not self._held:
            self._held = True
            self._stream.say(self._number, Flow.HOLD)
        self._wake()

    def _begin(self) -> None:
        self._begun = True
        self._loop = asyncio.get_running_loop()
        stream = self._join()
        self._number = stream.begin(self, self._request)
        self._stream = stream
        if self._speculate is not None:
            stream.say(self._number, self._speculate)
        self._late = self._loop.call_later(self._connect_s, self._not_taken)

    def _not_taken(self) -> None:
        assert self._stream is not None
        address, self._late = self._stream.address, None
        self._stream.leave(self._number)
        self._arrived.append(Unavailable(f"{address}: the request was not taken within {self._connect_s:g} s"))
        self._end()

    def _end(self) -> None:
        self._stream = None
        if self._late is not None:
            self._late.cancel()
            self._late = None
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _error(self, content: object) -> SlipstreamError:
        assert self._stream is not None
        address = self._stream.address
        if isinstance(content, Reported):
            return content.error() or Unavailable(f"{address}: INTERNAL {content.message}")
        if isinstance(content, RemoteProtocolError):
            return Unavailable(f"{address}: not a service of this release ({content})")
        assert isinstance(content, SlipstreamError)
        return content
