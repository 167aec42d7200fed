"""One answer as text: tokens in commits become deltas, whoever reads them (HTTP, a stream or not, gRPC).

Rules:
1. The text, the tokens and the usage of an answer do not depend on how its tokens came in commits: tokens are taken one
   by one, and what a commit holds beyond a stop string is no part of the answer.
2. The texts of the tokens joined are the text; only an unfinished character at the very end has no token. While a stop
   string may be growing, tokens are held back; where it is complete, the last token is cut.
3. ``StopStrings`` ends a text where the first stop string is complete, however the text was cut into pieces; the
   longest one if several end there. Nothing from its start on comes out.
4. An answer ends with a finish or with an error, never without either. Ending early frees the target at once.

Tokens and deltas are named tuples: one of each is made for every token, and a frozen dataclass takes four times as
long. It knows nothing about the OpenAI format, targets or who asked.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from router_service.tokens import Detokenizer, TextCodec
from slipstream.base.errors import InvalidRequest, Unavailable
from slipstream.protocol.chat import Usage
from slipstream.protocol.requests import Answer, Finish, Piece, Request, State, TokenLogprob


class AnswerToken(NamedTuple):
    """One token; ``drafted`` when a drafter had proposed it."""

    id: int
    text: str
    drafted: bool = False
    logprob: TokenLogprob | None = None

    def __repr__(self) -> str:
        return f"AnswerToken(id={self.id})"


class TextDelta(NamedTuple):
    """What one commit added. ``num_tokens`` counts all its tokens, also those that are held back or have no text."""

    text: str = ""
    tokens: tuple[AnswerToken, ...] = ()
    finish: Finish = ""
    num_tokens: int = 0

    def __repr__(self) -> str:
        return f"TextDelta(num_tokens={self.num_tokens}, finish={self.finish!r})"


Numbered = tuple[int, TextDelta]
PENDING = 4  # deltas of one completion that may wait for a slow reader
MAX_STOPS = 16
MAX_STOP_LENGTH = 256  # characters


@dataclass(slots=True)
class Tally:
    """What an answer took: tokens, rounds of the target, draft nodes verified and accepted."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    cached_tokens: int = 0
    lossy: bool = False
    first_state: State | None = None

    def usage(self) -> Usage:
        return Usage(self.prompt_tokens, self.completion_tokens, self.accepted, max(self.drafted - self.accepted, 0),
                     self.cached_tokens, self.rounds, self.lossy)


class Completion:
    """The text of ``answer`` to ``request``. Iterate once; errors of the answer come out of the iteration."""

    def __init__(self, request: Request, answer: Answer, codec: TextCodec, stops: Sequence[str],
                 vocab_size: int) -> None:
        self.tally = Tally(prompt_tokens=len(request.tokens))
        self.finished = False
        self._answer = answer
        self._pieces = aiter(answer)
        self._silent = frozenset(request.sampling.stop_token_ids)
        self._vocab_size = vocab_size
        self._detokenizer = Detokenizer(codec)
        self._stops = StopStrings(stops) if stops else None
        self._held: deque[tuple[int, AnswerToken]] = deque()  # each with the length of the text up to its end
        self._length = 0  # of the text so far
        self._clear = 0  # of the text that may go out

    def __aiter__(self) -> Completion:
        return self

    async def __anext__(self) -> TextDelta:
        if self.finished:
            raise StopAsyncIteration
        try:
            piece = await anext(self._pieces)
        except StopAsyncIteration:
            raise Unavailable("the target ended the answer before its end") from None
        delta = self._take(piece)
        if delta.finish:
            self.finished = True
            await self._answer.aclose()
        return delta

    async def aclose(self) -> None:
        await self._answer.aclose()

    def _take(self, piece: Piece) -> TextDelta:
        tally = self.tally
        tally.first_state = tally.first_state or piece.state
        tally.rounds += 1
        tally.lossy = tally.lossy or piece.lossy
        tally.drafted += piece.drafted
        tally.cached_tokens = max(tally.cached_tokens, piece.cached_tokens)
        for i, token in enumerate(piece.tokens):
            last = piece.finish == "stop" and i == len(piece.tokens) - 1
            tally.completion_tokens += 1
            tally.accepted += i < piece.accepted
            if last and token in self._silent:
                break
            logprob = piece.logprobs[i] if i < len(piece.logprobs) else None
            if self._push(token, i < piece.accepted, logprob):
                return self._end("stop", i + 1)
        if piece.finish:
            return self._end(piece.finish, len(piece.tokens))
        return self._delta(self._released(), num_tokens=len(piece.tokens))

    def _push(self, token: int, drafted: bool, logprob: TokenLogprob | None) -> bool:
        """Take one token; returns whether a stop string is complete."""
        if not 0 <= token < self._vocab_size:
            raise Unavailable("the target sent a token outside its vocabulary")
        text = self._detokenizer.push(token)
        self._length += len(text)
        self._held.append((self._length, AnswerToken(token, text, drafted, logprob)))
        if self._stops is None:  # nothing is ever held back
            return False
        self._clear += len(self._stops.push(text))
        return self._stops.matched is not None

    def _released(self) -> list[AnswerToken]:
        if self._stops is None:
            tokens = [token for _, token in self._held]
            self._held.clear()
            return tokens
        tokens = []
        while self._held and self._held[0][0] <= self._clear:
            tokens.append(self._held.popleft()[1])
        return tokens

    def _end(self, finish: Finish, num_tokens: int) -> TextDelta:
        cut = self._stops is not None and self._stops.matched is not None
        if not cut:
            self._clear = self._length
        tokens = self._released()
        if self._held and self._clear > self._held[0][0] - len(self._held[0][1].text):
            end, token = self._held[0]
            tokens.append(token._replace(text=token.text[: len(token.text) - (end - self._clear)]))
        self._held.clear()
        return self._delta(tokens, "" if cut else self._detokenizer.flush(), finish, num_tokens)

    def _delta(self, tokens: list[AnswerToken], tail: str = "", finish: Finish = "", num_tokens: int = 0) -> TextDelta:
        text = tokens[0].text if len(tokens) == 1 else "".join([token.text for token in tokens])
        return TextDelta(text + tail, tuple(tokens), finish, num_tokens)


class StopStrings:
    """Cuts one answer's text before the first stop string. ``matched`` names it once it came."""

    __slots__ = ("_held", "_stops", "matched")

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises InvalidRequest("stop") for an empty string, too many of them, or one that is too long."""
        if len(stops) > MAX_STOPS:
            raise InvalidRequest("stop", f"has {len(stops)} strings, at most {MAX_STOPS} are allowed")
        if not all(0 < len(stop) <= MAX_STOP_LENGTH for stop in stops):
            raise InvalidRequest("stop", f"each string must have 1 to {MAX_STOP_LENGTH} characters")
        self._stops = tuple(dict.fromkeys(stops))
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that may go out now: what could still become a stop string is held back. "" after a match."""
        if self.matched is not None:
            return ""
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return text[:start]
        kept = self._unfinished(text)
        self._held = text[len(text) - kept:]
        return text[:len(text) - kept]

    def flush(self) -> str:
        """What was held back and did not become a stop string after all."""
        text, self._held = self._held, ""
        return text

    def _unfinished(self, text: str) -> int:
        """The length of the longest end of ``text`` that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


async def merged(completions: Sequence[Completion]) -> AsyncGenerator[Numbered, None]:
    """(number, delta) of all ``completions``. The first error of any ends the stream with it."""
    queue: asyncio.Queue[Numbered | BaseException | None] = asyncio.Queue(PENDING * len(completions))
    tasks = [asyncio.create_task(_pump(i, c, queue)) for i, c in enumerate(completions)]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(number: int, completion: Completion, queue: asyncio.Queue[Numbered | BaseException | None]) -> None:
    try:
        async for delta in completion:
            await queue.put((number, delta))
    except Exception as error:
        await queue.put(error)
    else:
        await queue.put(None)
