"""What is asked of the fleet and what befalls it, drawn from a seed; and whether all that came back is right.

Rules:
1. A history follows from its seed alone. When things happen is as exact as the machine, so a seed finds a fault again
   often, not always.
2. Each answer is wholly the text of one set of weights, or an exact beginning of it with an error of the API. A client
   whose own connection was broken has an exact beginning and needs no error. Nothing else is right: no other token, no
   answer that never ends, no error that nobody foresaw, no word after the end.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Literal

import httpx
from tokenizers import Tokenizer

from slipstream.base.errors import (
    CapacityError,
    DeadlineExceeded,
    Draining,
    ModelChanged,
    RemoteProtocolError,
    SlipstreamError,
    Unavailable,
)
from slipstream.models.folder import resolve
from slipstream.simulate.timed import STREAMS, SYMBOLS, Law, Timing
from slipstream.wire.client import AsyncClient
from tests_chaos.fleet import DRAFTS, ROUTERS, TARGETS, Fleet

FIRST = 36  # stream of a timed target: from here on the default tokenizer has whole characters for its tokens
WITHIN_S = 60.0  # an answer that takes longer never ends
FORESEEN = (Unavailable, CapacityError, Draining, DeadlineExceeded, ModelChanged)
STATUSES = (429, 502, 503, 504)

Way = Literal["http", "grpc"]
Kind = Literal["kill", "freeze", "hole", "slow", "corrupt", "cut", "drain", "rollout", "flood", "clock", "disk"]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    number: int
    at_s: float
    router: int
    way: Way
    stream: int
    tokens: int
    speculate: bool
    leaves_after: int  # pieces; 0: never


@dataclass(frozen=True, slots=True)
class Fault:
    at_s: float
    kind: Kind
    victim: tuple[str, str]  # who dials and who listens of a relay, or a piece and nobody
    seconds: float
    seed: int


@dataclass(frozen=True, slots=True)
class History:
    seed: int
    asks: tuple[Ask, ...]
    faults: tuple[Fault, ...]


def drawn(seed: int) -> History:
    """Seven to sixteen requests within half a second, and one to three faults among them."""
    random = Random(seed)
    asks = tuple(Ask(number, random.uniform(0.0, 0.5), random.randrange(ROUTERS), random.choice(("http", "grpc")),
                     random.choice(streams()), random.choice((5, 40, 120, 300)), random.random() < 0.8,
                     random.choice((0, 0, 0, 0, 0, 1, 8))) for number in range(random.randint(7, 16)))
    return History(seed, asks, tuple(_fault(random) for _ in range(random.randint(1, 3))))


def _fault(random: Random) -> Fault:
    kind: Kind = random.choice(("kill", "kill", "freeze", "hole", "slow", "corrupt", "cut", "drain", "rollout",
                                "rollout", "flood", "clock", "disk"))
    draft, target = f"draft-{random.randrange(DRAFTS)}", f"target-{random.randrange(TARGETS)}"
    router = f"router-{random.randrange(ROUTERS)}"
    pair = random.choice(((target, draft), (router, target)))
    victims: dict[Kind, tuple[str, str]] = {
        "kill": (random.choice((draft, draft, target, target, router)), ""),
        "freeze": (random.choice((draft, target)), ""), "hole": pair, "slow": pair, "cut": pair,
        "corrupt": (target, draft), "drain": (target, ""), "rollout": (target, ""),
        "flood": (draft, ""), "clock": ("", ""), "disk": ("", "")}
    return Fault(random.uniform(0.0, 0.5), kind, victims[kind], random.uniform(0.05, 1.0), random.randrange(1 << 30))


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(resolve("smollm2-135m") / "tokenizer.json"))


@cache
def streams() -> tuple[int, ...]:
    """Those that a word of one token begins."""
    return tuple(stream for stream in range(FIRST, STREAMS) if word(stream))


@cache
def word(stream: int) -> str:
    """A text whose only token is of this stream; "" if none is."""
    for token in range(stream * SYMBOLS, (stream + 1) * SYMBOLS):
        text = tokenizer().decode([token])
        if text.strip() and tokenizer().encode(text, add_special_tokens=False).ids == [token]:
            return text
    return ""


@cache
def _reference(seed: int, stream: int, tokens: int) -> tuple[int, ...]:
    """What the weights of ``seed`` answer."""
    law, newest, whole = Law(Timing(seed=seed)), tokenizer().encode(word(stream), add_special_tokens=False).ids[0], []
    for position in range(tokens):
        newest = int(law.following([newest], [position])[0])
        whole.append(newest)
    return tuple(whole)


@dataclass(slots=True)
class Answer:
    """What a client saw."""

    ask: Ask
    text: str = ""
    tokens: list[int] = field(default_factory=list)  # over gRPC
    finish: str = ""
    error: str = ""  # of the API, as it came
    foreseen: bool = True
    broken: bool = False  # the connection, and not by us
    left: bool = False  # the client, before the end
    over: bool = False

    async def read(self, fleet: Fleet) -> None:
        """Ask, and read to the end."""
        await asyncio.sleep(self.ask.at_s)
        address = fleet.between[self.ask.way, f"router-{self.ask.router}"].address
        await (self._over_http(address) if self.ask.way == "http" else self._over_grpc(address))
        self.over = True

    async def _over_grpc(self, address: str) -> None:
        ask, pieces = self.ask, 0
        async with AsyncClient(address) as client:
            try:
                async for delta in client.complete(word(ask.stream), model="timed", max_tokens=ask.tokens,
                                                   temperature=0.0, ignore_eos=True, speculate=ask.speculate):
                    self._say(delta.text, [token.id for token in delta.tokens])
                    self.finish, pieces = delta.finish or self.finish, pieces + 1
                    if pieces == ask.leaves_after:
                        self.left = True
                        return
            except SlipstreamError as error:
                # A client of ours calls a broken connection Unavailable, and bytes that are no message by their name.
                self.error = f"{type(error).__name__}: {error}"
                self.foreseen = isinstance(error, (*FORESEEN, RemoteProtocolError))

    async def _over_http(self, address: str) -> None:
        ask, pieces, done = self.ask, 0, False
        body = {"model": "timed", "prompt": word(ask.stream), "max_tokens": ask.tokens, "temperature": 0.0,
                "stream": True, "ignore_eos": True, "speculate": ask.speculate}
        try:
            async with (httpx.AsyncClient(timeout=2 * WITHIN_S) as client,
                        client.stream("POST", f"http://{address}/v1/completions", json=body) as response):
                if response.status_code != 200:
                    self._refused(response.status_code, await response.aread())
                    return
                async for line in response.aiter_lines():
                    if not line.startswith("data: "):
                        assert not line, f"no event: {line!r}"
                        continue
                    assert not done, "a word after the end"
                    if line == "data: [DONE]":
                        done = True
                        continue
                    self._event(json.loads(line.removeprefix("data: ")))
                    pieces += 1
                    if pieces == ask.leaves_after:
                        self.left = True
                        return
        except httpx.TransportError as error:
            self.broken, self.error = True, repr(error)
            return
        assert done, "the stream ended without [DONE]"

    def _refused(self, status: int, body: bytes) -> None:
        self.error, self.foreseen = f"{status}: {body[:200]!r}", status in STATUSES and "error" in json.loads(body)

    def _event(self, event: dict[str, object]) -> None:
        if "error" in event:
            self.error = json.dumps(event["error"])
            self.foreseen = "internal" not in self.error
            return
        choices = event["choices"]
        assert isinstance(choices, list)
        for choice in choices:
            self._say(choice["text"], [])
            self.finish = choice["finish_reason"] or self.finish

    def _say(self, text: str, tokens: Sequence[int]) -> None:
        assert not self.finish and not self.error, "a word after the end"
        self.text += text
        self.tokens += tokens

    def fault(self, weights: frozenset[int]) -> str:
        """What is wrong with it, "" for nothing. ``weights``: seeds of those that served while it ran."""
        if not self.over:
            return "it never ended"
        if not self.foreseen:
            return f"an error that nobody foresaw: {self.error}"
        if not (self.finish or self.error or self.left):
            return "it ended without a word"
        if not any(self._is_of(seed) for seed in weights):
            return "no set of weights says this"
        return ""

    def _is_of(self, seed: int) -> bool:
        whole = _reference(seed, self.ask.stream, self.ask.tokens)
        if self.ask.way == "grpc" and tuple(self.tokens) != whole[: len(self.tokens)]:
            return False
        text = tokenizer().decode(list(whole), skip_special_tokens=False)
        if self.finish:
            return self.text == text and self.finish == "length"
        return text.startswith(self.text)
