"""The target service over gRPC: whoever calls, a Backend answers, and many answers share one call.

Rules:
1. Errors cross the wire as the class that was raised. An answer's errors are its own; only bytes that are no frame, and
   a number used twice, end the call.
2. What all answers have to say at one moment leaves as one frame.
3. An answer on hold, and all of them while more than MAX_WAITING bytes wait to be sent, keep their pieces where they
   come from.
4. When a call ends, all its answers are closed. One that is told to ``drain`` refuses new answers and ends by itself
   after the last one.

It knows nothing about engines or text. Format: ``GenerateMany`` in ``proto/slipstream/v1/target.proto``.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import structlog

from slipstream.base.errors import Draining, RemoteProtocolError, SlipstreamError, Unavailable
from slipstream.protocol.requests import Answer, Backend, Request, TargetInfo
from slipstream.wire.answers import TAKEN, Asked, Flow, Told, decode_asked, encode_info, encode_told, joined
from slipstream.wire.channel import TARGET_SERVICE
from slipstream.wire.link import Line, first_end
from slipstream.wire.status import Context, Reported, abort, log_bug

MAX_BYTES = 1 << 20  # of a frame, unless a single item is longer
MAX_WAITING = 1 << 20


class TargetServicer:
    """TargetService: requests come in, ``backend`` answers."""

    service = TARGET_SERVICE

    def __init__(self, backend: Backend, *, max_bytes: int = MAX_BYTES) -> None:
        self._backend = backend
        self._max_bytes = max_bytes
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
            call = AnswerCall(self._backend, await self._taking(), self._max_bytes)
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

    __slots__ = ("answer", "flows", "task")

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.flows = asyncio.Event()
        self.flows.set()
        self.task: asyncio.Task[None] | None = None


class AnswerCall:
    """Make it on the event loop that runs it. ``info`` bounds what may be asked; ``max_bytes``: of a frame."""

    def __init__(self, backend: Backend, info: TargetInfo, max_bytes: int) -> None:
        self._backend = backend
        self._info = info
        self._max_bytes = max_bytes
        self._senders: dict[int, Sender] = {}
        self._waiting: list[bytes] = []
        self._size = 0
        self._filled = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._draining = False
        self._log = structlog.get_logger(part="wire")

    def drain(self) -> None:
        self._draining = True
        self._filled.set()

    async def run(self, line: Line) -> None:
        """Until the caller ends the call, or the last answer of a drain has been told. Raises RemoteProtocolError."""
        try:
            await first_end(self._read(line), self._write(line))
        finally:
            tasks = [sender.task for sender in self._senders.values() if sender.task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, line: Line) -> None:
        while isinstance(data := await line.read(), bytes):
            for number, content in decode_asked(data, self._info.vocab_size, self._info.max_context):
                self._heed(number, content)

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
        elif sender.task is not None:
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
        sender.task = asyncio.get_running_loop().create_task(self._send(number, sender))

    async def _send(self, number: int, sender: Sender) -> None:
        finished = False
        try:
            async for piece in sender.answer:
                if not sender.flows.is_set():
                    await sender.flows.wait()
                if not self._room.is_set():
                    await self._room.wait()
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

    def _put(self, number: int, content: Told) -> None:
        item = encode_told(number, content)
        self._waiting.append(item)
        self._size += len(item)
        if self._size > MAX_WAITING:
            self._room.clear()
        self._filled.set()

    async def _write(self, line: Line) -> None:
        while self._waiting or self._senders or not self._draining:
            await self._filled.wait()
            self._filled.clear()
            items, self._waiting, self._size = self._waiting, [], 0
            for frame in joined(items, self._max_bytes):
                await line.write(frame)
            self._room.set()
