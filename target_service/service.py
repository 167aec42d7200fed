"""TargetService: the asyncio face of the engine thread. Implements ``requests.Backend``.

Rules:
1. An answer that its reader leaves (``aclose``, cancellation) is cancelled within one step.
2. While draining, new requests are refused and running ones finish, or are handed back (Draining) when time is up.
   Begun answers are still taken, because no other target may have their model.

It knows nothing about gRPC or HTTP; ``wire.target`` serves it to the network.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress

from slipstream.base.errors import CapacityError, Draining, InvalidRequest, Unavailable
from slipstream.choosing.permitted import Permitted
from slipstream.grammar.matcher import Matcher
from slipstream.grammar.trial import Grammars
from slipstream.observe.log import logger
from slipstream.protocol.requests import MAX_WAITING, NEEDS, DraftStatus, Piece, Request, ServedModel, TargetInfo
from slipstream.protocol.tree import MAX_NODES
from target_service.drain import drain
from target_service.loop import TargetWorker, handed_back_error
from target_service.sequence import Rule, Sink
from target_service.step import CALM_S

Pieces = list[tuple[Sink, Piece | Exception]]  # each with who takes it


class TargetAnswer:
    """One running answer as its reader sees it. Implements ``requests.CallbackAnswer``."""

    def __init__(self, worker: TargetWorker, number: int, request: Request,
                 compiled: asyncio.Future[Matcher] | None = None, rule: Rule | None = None) -> None:
        """compiled: its grammar; the answer begins when that is compiled. rule: its rule if it has no grammar."""
        self._worker = worker
        self._number = number
        self._request = request
        self._pieces: asyncio.Queue[Piece | Exception] = asyncio.Queue()
        self._take_directly: Callable[[Piece], bool] = _take_nothing
        self._ended, self._submitted, self._may_speculate = False, False, request.speculate
        self._compiled = compiled
        if compiled is None:
            self._submit(rule)
        else:
            compiled.add_done_callback(self._begin)

    def _begin(self, compiled: asyncio.Future[Matcher]) -> None:
        if self._ended or compiled.cancelled():
            return
        error = compiled.exception()
        if isinstance(error, Exception):
            self._pieces.put_nowait(error)
        else:
            self._submit(compiled.result())

    def _submit(self, rule: Rule | None) -> None:
        self._submitted = True
        self._worker.add_request(self._number, self._request, self._receive, rule)
        if self._may_speculate is not self._request.speculate:
            self._worker.set_speculation(self._number, self._may_speculate)

    def _receive(self, piece: Piece | Exception) -> None:
        if isinstance(piece, Exception) or piece.finish or not self._pieces.empty() or not self._take_directly(piece):
            self._pieces.put_nowait(piece)

    def offer(self, take: Callable[[Piece], bool]) -> None:
        self._take_directly = take

    def set_speculation(self, allowed: bool) -> None:
        if not self._submitted:
            self._may_speculate = allowed
        elif not self._ended:
            self._worker.set_speculation(self._number, allowed)

    async def aclose(self) -> None:
        if not self._ended:
            self._ended = True
            if self._compiled is not None:
                self._compiled.cancel()  # unless it is done
            self._worker.cancel(self._number)

    async def __aiter__(self) -> AsyncIterator[Piece]:
        try:
            while not self._ended:
                piece = await self._pieces.get()
                if isinstance(piece, Exception):
                    self._ended = True
                    raise piece
                if piece.finish:
                    self._ended = True
                yield piece
        finally:
            await self.aclose()


class TargetService:
    """Takes requests for one target."""

    def __init__(self, worker: TargetWorker, served: ServedModel, grammars: Grammars | None = None) -> None:
        """grammars: None refuses requests with a grammar."""
        self.drafts: Callable[[], Sequence[DraftStatus]] = tuple  # states of the links; set by the code that makes them
        self._grammars = grammars
        self._worker = worker
        self._served = served
        self._numbers = itertools.count(1)
        self._draining = False
        self._compiling = set[asyncio.Future[Matcher]]()  # grammars of answers that wait for them

    @property
    def num_waiting(self) -> int:
        """Answers that wait: for a turn, for their grammar, or because they were put back."""
        return self._worker.num_waiting + len(self._compiling)

    def submit(self, request: Request) -> TargetAnswer:
        """Begin an answer. Raises InvalidRequest, CapacityError, Draining, or Unavailable after the engine thread has
        ended."""
        if self._draining and not request.answered:
            raise Draining("the target is shutting down; another one will take the request")
        if not self._worker.alive:
            raise Unavailable("the engine thread has ended; the service has to be restarted")
        self._served.check(request, min(self._served.max_context, self._served.num_slots - MAX_NODES))
        if self.num_waiting > MAX_WAITING:
            raise CapacityError(f"{self.num_waiting} requests are waiting already")
        if self._worker.shedding.refuses_new:
            raise CapacityError("the device's memory is short: running answers go on, new ones have to wait", CALM_S)
        compiled: asyncio.Future[Matcher] | None = None
        if request.grammar is not None:
            if self._grammars is None:
                raise InvalidRequest("grammar", "this target binds no answer to one", "unsupported_parameter")
            compiled = self._grammars.compile(request)
            self._compiling.add(compiled)
            compiled.add_done_callback(self._compiling.discard)
        bound = request.allowed_token_ids or request.bad_words
        return TargetAnswer(self._worker, next(self._numbers), request, compiled,
                            Permitted.of(request, self._served.vocab_size) if bound else None)

    async def warm(self) -> None:
        """Load what the first grammar would otherwise wait for."""
        if self._grammars is not None:
            await self._grammars.warm()

    async def info(self) -> TargetInfo:
        served, worker = self._served, self._worker
        return TargetInfo(served.model_id, served.vocab_size, served.max_context, served.tokenizer_hash,
                          worker.num_running, self.num_waiting, self._draining,
                          tuple(map(worker.following.pool.with_problem, self.drafts())), served.lossy,
                          identity=served.identity,
                          takes=tuple(need for need in NEEDS if need != "grammar" or self._grammars is not None))

    async def drain(self, grace_s: float) -> bool:
        """Refuse new requests and wait for the running ones; those that do not finish in time are handed back, and run
        to their end if they return. Returns whether all finished in time."""
        self._draining = True
        return await drain(lambda: self._worker.num_open + len(self._compiling), self._hand_back, grace_s,
                           time.monotonic)

    def _hand_back(self) -> None:
        logger("target").info("answers handed back", running=self._worker.num_running,
                              waiting=self.num_waiting)
        for compiled in self._compiling:
            if not compiled.done():
                compiled.set_exception(handed_back_error())
        # After the answers whose grammar was compiled just now have been posted.
        asyncio.get_running_loop().call_soon(self._worker.post, self._worker.hand_back)


def _take_nothing(_: Piece) -> bool:
    """Before ``offer``: no piece is taken directly."""
    return False


def deliver_on_loop(loop: asyncio.AbstractEventLoop, pieces: Pieces) -> None:
    """Bring pieces from the engine thread to their readers on ``loop``, in one call a step. Nothing happens once that
    is closed."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(deliver, pieces)


def deliver(pieces: Pieces) -> None:
    """Give each piece to its sink."""
    for sink, piece in pieces:
        sink(piece)
