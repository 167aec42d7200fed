"""The target service over gRPC, both ends: a servicer around any Backend, and a Backend that is a client of one.

Rules:
1. Errors cross the wire as the class that was raised; no gRPC error leaves the client.
2. A client that goes away frees its answer: ending the call closes it.
3. Nothing waits without an end: a target that does not take a call within ``connect_s`` is Unavailable, and keepalive
   ends the calls to one that falls silent.

It knows nothing about engines or text. Format: ``proto/slipstream/v1/target.proto``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import structlog
from grpc import aio

from slipstream.base.errors import Draining, InvalidRequest, RemoteProtocolError, Unavailable
from slipstream.observe.spans import HEADER, well_formed
from slipstream.protocol.requests import Answer, Backend, Piece, Request, TargetInfo
from slipstream.wire.answer_call import AnswerCall
from slipstream.wire.answer_stream import AnswerStream, SharedAnswer, check_size
from slipstream.wire.answers import (
    decode_control,
    decode_info,
    decode_many,
    decode_piece,
    decode_start,
    encode_control,
    encode_info,
    encode_piece,
    encode_start,
)
from slipstream.wire.channel import RULES, TARGET_SERVICE, ConnectionRules
from slipstream.wire.connection import Connection
from slipstream.wire.status import abort, error_of
from slipstream.wire.tls import TlsFiles

MAX_BYTES = 1 << 20  # of a frame, unless a single item is longer
CONNECT_S = 5.0
FIRST_S = 5.0  # from the beginning of a call to its request

Context = aio.ServicerContext[bytes, bytes]


class TargetServicer:
    """TargetService: requests come in, ``backend`` answers."""

    service = TARGET_SERVICE

    def __init__(self, backend: Backend, *, first_s: float = FIRST_S, max_bytes: int = MAX_BYTES) -> None:
        self._backend = backend
        self._first_s = first_s
        self._max_bytes = max_bytes
        self._calls: set[AnswerCall] = set()
        self._info: TargetInfo | None = None
        self._draining = False
        self._log = structlog.get_logger(part="wire")

    def handler(self) -> grpc.GenericRpcHandler:
        generate: Any = grpc.stream_stream_rpc_method_handler(self._generate)
        many: Any = grpc.stream_stream_rpc_method_handler(self._generate_many)
        info: Any = grpc.unary_unary_rpc_method_handler(self._get_info)
        return grpc.method_handlers_generic_handler(
            TARGET_SERVICE, {"Generate": generate, "GenerateMany": many, "GetInfo": info})

    def drain(self) -> None:
        """Refuse new requests; running answers go on."""
        self._draining = True
        for call in self._calls:
            call.drain()

    async def _get_info(self, _request: bytes, context: Context) -> bytes:
        try:
            return encode_info(await self._backend.info(), many=True)
        except Exception as error:
            await abort(context, error)
            raise

    async def _generate(self, _requests: object, context: Context) -> None:
        try:
            # Tells the client at once that somebody is here; the first piece may be a long prompt away.
            await context.send_initial_metadata(())
            request = await self._first(context)
            if request is not None:
                await self._answer(self._backend.submit(request), context)
        except asyncio.InvalidStateError:
            return  # the call ended under our hands: nobody is left to tell
        except Exception as error:
            await abort(context, error)

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

    async def _first(self, context: Context) -> Request | None:
        info = await self._taking()
        try:
            async with asyncio.timeout(self._first_s):
                data = await context.read()
        except TimeoutError as error:
            raise InvalidRequest("request", f"none within {self._first_s:g} s") from error
        if not isinstance(data, bytes):
            return None
        shown = [value for name, value in context.invocation_metadata() or () if name == HEADER]
        request = decode_start(data, info.vocab_size, info.max_context)
        return replace(request, trace=well_formed(str(shown[0]))) if shown else request

    async def _answer(self, answer: Answer, context: Context) -> None:
        controls = asyncio.ensure_future(self._control(answer, context))
        try:
            async for piece in answer:
                await context.write(encode_piece(piece))
        finally:
            controls.cancel()
            await answer.aclose()

    async def _control(self, answer: Answer, context: Context) -> None:
        try:
            while isinstance(data := await context.read(), bytes):
                answer.set_speculation(decode_control(data))
        except RemoteProtocolError as error:
            self._log.warning("bad control message; the answer goes on as it is", problem=str(error))
        except asyncio.InvalidStateError:
            return  # the call has ended


class TargetClient:
    """A Backend elsewhere. Make it on the event loop that uses it; ``aclose`` when done."""

    def __init__(self, address: str, *, tls: TlsFiles | None = None, connect_s: float = CONNECT_S,
                 rules: ConnectionRules = RULES) -> None:
        self.address = address
        self._connect_s = connect_s
        self._max_bytes = rules.message_bytes
        self._connection = Connection(address, tls, rules)
        self._many = False  # whether the target lets many answers share a call
        self._stream: AnswerStream | None = None

    def submit(self, request: Request) -> Answer:
        """The answer, not begun: the call starts with its iteration. InvalidRequest, here or there, if it is too large
        to send."""
        if self._many:
            return SharedAnswer(self._join, request, self._connect_s)
        start = encode_start(request)
        check_size(start, self._max_bytes)
        return RemoteAnswer(self._connection, start, self.address, self._connect_s, request.trace)

    async def info(self) -> TargetInfo:
        """Raises Unavailable within ``connect_s`` seconds."""
        line = self._connection.begin()
        try:
            method: Any = line.channel.unary_unary(f"/{TARGET_SERVICE}/GetInfo")
            data = await method(b"", timeout=self._connect_s)
            self._many = decode_many(data)
            if self._stream is not None and not self._stream.takes:
                self._stream = None
            return decode_info(data)
        except aio.AioRpcError as error:
            raise error_of(error, self.address) from error
        except RemoteProtocolError as error:
            raise Unavailable(f"{self.address}: not a target of this release ({error})") from error
        finally:
            self._connection.end(line)

    async def aclose(self) -> None:
        if self._stream is not None:
            await self._stream.aclose()
        await self._connection.aclose()

    def _join(self) -> AnswerStream:
        if self._stream is None or not self._stream.takes:
            self._stream = AnswerStream(self._connection, self.address, MAX_BYTES, self._max_bytes)
        return self._stream


class RemoteAnswer:
    """An Answer over one Generate call."""

    def __init__(self, connection: Connection, start: bytes, address: str, connect_s: float, trace: str = "") -> None:
        self._connection = connection
        self._address = address
        self._connect_s = connect_s
        self._metadata = ((HEADER, trace),) if trace else ()
        self._outgoing: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._outgoing.put_nowait(start)
        self._call: Any = None
        self._closed = False

    def set_speculation(self, allowed: bool) -> None:
        self._outgoing.put_nowait(encode_control(allowed))

    async def aclose(self) -> None:
        self._closed = True
        self._outgoing.put_nowait(None)
        if self._call is not None:
            self._call.cancel()

    async def __aiter__(self) -> AsyncIterator[Piece]:
        if self._closed:
            return
        line = self._connection.begin()
        method: Any = line.channel.stream_stream(f"/{TARGET_SERVICE}/Generate")
        self._call = method(self._requests(), metadata=self._metadata)
        try:
            await self._taken()
            while isinstance(data := await self._call.read(), bytes):
                yield decode_piece(data)
        except aio.AioRpcError as error:
            if not self._closed:
                raise error_of(error, self._address) from error
        except asyncio.CancelledError:
            # grpc says so, too, when the call was cancelled by aclose; a cancelled task must stay cancelled.
            if not self._closed or _being_cancelled():
                raise
        except RemoteProtocolError as error:
            raise Unavailable(f"{self._address}: not a target of this release ({error})") from error
        finally:
            self._connection.end(line)
            await self.aclose()

    async def _requests(self) -> AsyncIterator[bytes]:
        while (message := await self._outgoing.get()) is not None:
            yield message

    async def _taken(self) -> None:
        # An initial metadata of a call that failed is empty; the read that follows then tells why.
        try:
            async with asyncio.timeout(self._connect_s):
                with contextlib.suppress(aio.AioRpcError):
                    await self._call.initial_metadata()
        except TimeoutError as error:
            raise Unavailable(f"{self._address}: the call was not taken within {self._connect_s:g} s") from error


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
