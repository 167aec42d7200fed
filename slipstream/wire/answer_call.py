"""The target's side of one GenerateMany call: many answers of a Backend, told in one stream.

Rules:
1. What all answers have to say at one moment leaves as one frame.
2. An answer's errors are its own; only bytes that are no frame, and a number used twice, end the call.
3. An answer on hold, and all of them while more than MAX_WAITING bytes wait to be sent, keep their pieces where they
   come from.
4. When the call ends, all its answers are closed. A call that is told to ``drain`` refuses new answers and ends by
   itself after the last one.

It knows nothing about engines or text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Protocol

import structlog

from slipstream.base.errors import Draining, RemoteProtocolError, SlipstreamError, Unavailable
from slipstream.protocol.requests import Answer, Backend, Request, TargetInfo
from slipstream.wire.answer_frames import TAKEN, Asked, Flow, Told, decode_asked, encode_told
from slipstream.wire.frames import joined
from slipstream.wire.status import Reported, log_bug
from slipstream.wire.stream import first_end

MAX_WAITING = 1 << 20


class Line(Protocol):
    """What is used of a call's context."""

    def read(self) -> Awaitable[object]: ...

    def write(self, message: bytes) -> Awaitable[None]: ...


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
