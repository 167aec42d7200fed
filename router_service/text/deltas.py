"""The pieces of an answer's text: tokens, and deltas (what one commit added); and the merged deltas of several answers.

Tokens and deltas are named tuples: one of each is made for every token, and a frozen dataclass takes four times as
long. It knows nothing about how tokens become text.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterable, Iterator
from typing import NamedTuple

from slipstream.protocol.requests import Finish, PromptScores, TokenLogprob

TOGETHER = 512  # deltas whose texts are joined
PENDING = 4  # deltas of one answer that may wait for a slow reader


class PackedLogprob:
    """A TokenLogprob that is kept for long, in a tenth of its memory."""

    __slots__ = ("_top", "logprob")

    def __init__(self, scored: TokenLogprob) -> None:
        self.logprob = scored.logprob
        count = len(scored.top)
        self._top = struct.pack(f"={count}i{count}d", *[i for i, _ in scored.top], *[value for _, value in scored.top])

    @property
    def top(self) -> tuple[tuple[int, float], ...]:
        count = len(self._top) // 12
        found = struct.unpack(f"={count}i{count}d", self._top)
        return tuple(zip(found[:count], found[count:], strict=True))


class AnswerToken(NamedTuple):
    """One token; ``drafted`` when a drafter had proposed it."""

    id: int
    text: str
    drafted: bool = False
    logprob: TokenLogprob | PackedLogprob | None = None

    def __repr__(self) -> str:
        return f"AnswerToken(id={self.id})"


class TextDelta(NamedTuple):
    """What one commit added. ``num_tokens`` counts all its tokens, also those that are held back or have no text."""

    text: str = ""
    tokens: tuple[AnswerToken, ...] = ()
    finish: Finish = ""
    num_tokens: int = 0
    prompt: tuple[PromptScores, ...] = ()  # of all of the prompt, where it is scored; in the first delta
    stop: str | int | None = None  # the stop string or token that came, in the last one

    def ended_by(self, ids: Collection[int]) -> str | int | None:
        """The stop that ended the answer, a stop string or one of these ``ids``; None where the model ended it by
        itself."""
        return self.stop if isinstance(self.stop, str) or self.stop in ids else None

    def __repr__(self) -> str:
        return f"TextDelta(num_tokens={self.num_tokens}, finish={self.finish!r})"


NumberedDelta = tuple[int, TextDelta]


class CollectedAnswer:
    """What is kept of an answer that is told as a whole: it may have a million tokens or scores. ``detailed``: more
    than its text is told."""

    def __init__(self, detailed: bool) -> None:
        self.deltas: list[TextDelta] = []
        self._detailed = detailed
        self._loose = 0  # of them, the last ones

    def add(self, delta: TextDelta) -> None:
        if self._detailed:
            self.deltas.append(delta._replace(tokens=tuple([
                token._replace(logprob=PackedLogprob(token.logprob)) if isinstance(token.logprob, TokenLogprob)
                else token for token in delta.tokens])))
            return
        self.deltas.append(delta._replace(tokens=()))
        self._loose += 1
        if self._loose == TOGETHER:
            texts = "".join([loose.text for loose in self.deltas[-TOGETHER:]])
            count = sum([loose.num_tokens for loose in self.deltas[-TOGETHER:]])
            self.deltas[-TOGETHER:] = [delta._replace(text=texts, tokens=(), num_tokens=count)]
            self._loose = 0


async def merged(answers: Iterable[AsyncIterator[TextDelta]], at_once: int) -> AsyncGenerator[NumberedDelta, None]:
    """(number, delta) of all ``answers``, of which so many run at once. The first error of any ends the stream with
    it."""
    queue: asyncio.Queue[NumberedDelta | BaseException | None] = asyncio.Queue(PENDING * at_once)
    numbered = enumerate(answers)
    tasks = [asyncio.create_task(_pump(numbered, queue)) for _ in range(at_once)]
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


async def _pump(answers: Iterator[tuple[int, AsyncIterator[TextDelta]]],
                queue: asyncio.Queue[NumberedDelta | BaseException | None]) -> None:
    """One answer after the other, of those that nobody else has taken."""
    try:
        for number, answer in answers:
            async for delta in answer:
                await queue.put((number, delta))
    except Exception as error:
        await queue.put(error)
    else:
        await queue.put(None)
