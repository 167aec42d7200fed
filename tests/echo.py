"""A target without a model: its answer is a function of prompt and seed, its speed and its faults are knobs.

The answer to a prompt is counted words that begin with the prompt's length and the seed; ``accepted`` tokens of
each commit count as drafted while the answer may speculate: a plain answer has the same tokens in other commits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from slipstream.base.errors import CapacityError, Draining, InvalidRequest, ModelChanged, SlipstreamError
from slipstream.protocol.identity import Identity
from slipstream.protocol.requests import DraftStatus, Finish, Need, Piece, Request, TargetInfo, TokenLogprob

VOCAB, EOS, CONTEXT = 260, 257, 512


def answer_bytes(request: Request) -> list[int]:
    """The whole answer, without end."""
    prompt = len(request.tokens) - request.answered
    words = [f"{prompt}", f"s{request.sampling.seed}", *(f"w{i}" for i in range(CONTEXT))]
    return list(" ".join(words).encode())


class EchoTarget:
    """A Backend. ``end`` tokens end an answer by EOS; ``fail_after`` pieces raise ``error``; ``hang`` never answers."""

    def __init__(self, model: str = "tiny", accepted: int = 3, end: int = 40, pause_s: float = 0.0, hang: bool = False,
                 fail_after: int | None = None, error: SlipstreamError | None = None, stall_after: int = -1) -> None:
        self.model = model
        self.accepted = accepted
        self.end = end
        self.pause_s = pause_s
        self.hang = hang
        self.fail_after = fail_after
        self.error = error
        self.stall_after = stall_after
        self.stalled = 0  # answers so far
        self.draining = False
        self.deaf = False
        self.says = ""  # the whole answer, instead
        self.context = CONTEXT
        self.lossy = False
        self.takes: tuple[Need, ...] = ()
        self.identity: Identity | None = Identity(model, "float32", "none", "echo")
        self.requests: list[Request] = []
        self.running: set[EchoAnswer] = set()
        self.go = asyncio.Event()  # answers stand still while it is not set
        self.go.set()
        self.waiting = 0
        self.verify_s = {True: 0.011, False: 0.010}  # by whether drafts were verified

    @property
    def prompt(self) -> str:
        """The newest, whose tokens are bytes, without the special ones."""
        return bytes(token for token in self.requests[-1].tokens if token < 256).decode()

    def submit(self, request: Request) -> EchoAnswer:
        self.requests.append(request)
        return EchoAnswer(self, request)

    async def info(self) -> TargetInfo:
        if self.deaf:
            await asyncio.Event().wait()
        return TargetInfo(self.model, VOCAB, self.context, "", len(self.running), self.waiting, self.draining,
                          (DraftStatus("draft:1", True, "echo"),), self.lossy, identity=self.identity,
                          takes=self.takes)


class EchoAnswer:
    """One answer of it."""

    def __init__(self, target: EchoTarget, request: Request) -> None:
        self.target = target
        self.request = request
        self.speculate = request.speculate
        self.switches: list[bool] = []
        self.closed = asyncio.Event()

    def set_speculation(self, allowed: bool) -> None:
        self.speculate = allowed
        self.switches.append(allowed)

    async def aclose(self) -> None:
        self.closed.set()
        self.target.running.discard(self)

    async def __aiter__(self) -> AsyncIterator[Piece]:
        target, request = self.target, self.request
        if request.identity not in (None, target.identity):
            raise ModelChanged("another model")
        if target.draining:
            raise Draining("going away")
        if len(request.tokens) >= target.context:
            raise InvalidRequest("tokens", "too long")
        target.running.add(self)
        whole = list(target.says.encode()) or answer_bytes(request)
        end = len(whole) if target.says else target.end
        tokens = [*whole[:end], *([EOS] if EOS in request.sampling.stop_token_ids else whole)]
        assert list(request.tokens[len(request.tokens) - request.answered:]) == tokens[: request.answered]
        sent, pieces = request.answered, 0
        while sent < min(len(tokens), request.max_tokens):
            if target.hang or pieces == target.stall_after:
                target.stalled += 1
                await self.closed.wait()
                return
            if pieces == target.fail_after:
                raise target.error or CapacityError("full")
            await asyncio.sleep(target.pause_s)
            await target.go.wait()
            speculates = self.speculate and pieces > 0
            size = 1 + target.accepted if speculates else 1
            chunk = tokens[sent: min(sent + size, request.max_tokens)]
            sent += len(chunk)
            over: Finish = "stop" if chunk[-1] == EOS else "length" if sent >= request.max_tokens else ""
            yield Piece(
                tuple(chunk), min(target.accepted, len(chunk)) if speculates else 0, 4 if speculates else 0,
                tuple(self._logprob(token) for token in chunk) if request.top_logprobs is not None else (), over,
                target.verify_s[speculates], 0.0, "speculate" if self.speculate else "plain",
                len(request.tokens) // 2 if pieces == 0 else 0, lossy=target.lossy and speculates)
            pieces += 1

    def _logprob(self, token: int) -> TokenLogprob:
        top = tuple((token + i, -0.5 - i) for i in range(self.request.top_logprobs or 0))
        return TokenLogprob(-0.5, top)
