"""What is asked of the fleet and what befalls it, drawn from a seed; and whether all that came back is right.

Rules:
1. A history follows from its seed alone. When things happen is as exact as the machine, so a seed finds a fault again
   often, not always.
2. Each answer is wholly that of one set of weights (``reference``), or an exact beginning of it with an error of the
   API. A client whose own connection was broken has an exact beginning and needs no error. Nothing else is right: no
   other token, number or call, no answer that never ends, no error that nobody foresaw, no word after the end.
3. Who picks an answer up at another router has one answer, of one set of weights.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Literal

import httpx

from slipstream.base.errors import (
    CapacityError,
    DeadlineExceeded,
    Draining,
    ModelChanged,
    RemoteProtocolError,
    SlipstreamError,
    Unavailable,
    status_of,
)
from slipstream.wire.client import AsyncClient
from tests.routing import READS, Reader
from tests_chaos.asks import Ask, drawn_ask
from tests_chaos.fleet import DRAFTS, ROUTERS, TARGETS, Fleet
from tests_chaos.heard import Heard

WITHIN_S = 60.0  # an answer that says nothing for longer never ends
TRIES, PAUSE_S = 6, 0.25  # of one who picks an answer up, without a word; the pause doubles
FORESEEN = (Unavailable, CapacityError, Draining, DeadlineExceeded, ModelChanged)
STATUSES = (429, 502, 503, 504)
CHANGED = "model_changed"  # nobody can go on with it
# By what the dialects say for them.
KINDS = frozenset({*(status_of(kind(""))[2] for kind in FORESEEN), "rate_limit_error", "server_overloaded",
                   "request_timeout"})

Kind = Literal["kill", "freeze", "hole", "slow", "corrupt", "cut", "drain", "rollout", "flood", "clock", "disk",
               "child"]


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
    asks = tuple(drawn_ask(random, number, random.uniform(0.0, 0.5), random.randrange(ROUTERS))
                 for number in range(random.randint(7, 16)))
    return History(seed, asks, tuple(_fault(random) for _ in range(random.randint(1, 3))))


def _fault(random: Random) -> Fault:
    kind: Kind = random.choice(("kill", "kill", "freeze", "hole", "slow", "corrupt", "cut", "drain", "rollout",
                                "rollout", "flood", "clock", "disk", "child"))
    draft, target = f"draft-{random.randrange(DRAFTS)}", f"target-{random.randrange(TARGETS)}"
    router = f"router-{random.randrange(ROUTERS)}"
    pair = random.choice(((target, draft), (router, target)))
    victims: dict[Kind, tuple[str, str]] = {
        "kill": (random.choice((draft, draft, target, target, router)), ""),
        "freeze": (random.choice((draft, target)), ""), "hole": pair, "slow": pair, "cut": pair,
        "corrupt": (target, draft), "drain": (target, ""), "rollout": (target, ""),
        "flood": (draft, ""), "clock": ("", ""), "disk": ("", ""), "child": (random.choice((router, target)), "")}
    return Fault(random.uniform(0.0, 0.5), kind, victims[kind], random.uniform(0.05, 1.0), random.randrange(1 << 30))


@dataclass(slots=True)
class Answer:
    """What a client saw."""

    ask: Ask
    heard: Heard = field(default_factory=Heard)
    error: str = ""  # of the API, as it came
    foreseen: bool = True
    broken: bool = False  # the connection, and not by us
    left: bool = False  # the client, before the end
    over: bool = False
    returned: int = 0  # how often it was picked up

    @property
    def whole(self) -> bool:
        return self.heard.over

    @property
    def size(self) -> int:
        """Grows with each word, and when it is over."""
        return sum(map(len, self.heard.tracks.values())) + self.returned + self.over

    async def read(self, fleet: Fleet) -> None:
        """Ask when it is time, and read to the end."""
        await asyncio.sleep(self.ask.at_s)
        first = self.ask.router
        await self.read_from([fleet.between[self.ask.way, f"router-{(first + i) % ROUTERS}"].address
                              for i in range(ROUTERS)])

    async def read_from(self, addresses: Sequence[str]) -> None:
        """At the first of them, and at the others where it may be picked up."""
        await (self._over_http if self.ask.way == "http" else self._over_grpc)(addresses)
        self.over = True

    async def _over_grpc(self, addresses: Sequence[str]) -> None:
        ask, pieces = self.ask, 0
        options = dict(ask.body)
        async with AsyncClient(addresses if ask.returns else addresses[0]) as client:
            said = (client.chat(options.pop("messages"), model="timed", **options) if ask.path == "chat" else
                    client.complete(options.pop("prompt"), model="timed", **options))
            try:
                async for delta in said:
                    self.heard.delta(delta)
                    pieces += 1
                    if pieces == ask.leaves_after:
                        self.left = True
                        return
            except SlipstreamError as error:
                # A client of ours calls a broken connection Unavailable, and bytes that are no message by their name.
                self.error = f"{type(error).__name__}: {error}"
                self.foreseen = isinstance(error, (*FORESEEN, RemoteProtocolError))

    async def _over_http(self, addresses: Sequence[str]) -> None:
        breaks, last, failed, at = [*self.ask.breaks], "", 0, 0
        while True:
            before = last
            self.broken, self.error, self.heard.error = False, "", ""
            last, broke_off = await self._connection(addresses[at % len(addresses)], last, breaks[:1])
            if broke_off:
                breaks.pop(0)
            elif failed == TRIES or not self._may_return(last):
                return
            else:
                await asyncio.sleep(PAUSE_S * 2 ** failed)
            failed = 0 if broke_off or last != before else failed + 1
            at, self.returned = at + 1, self.returned + 1

    def _may_return(self, last: str) -> bool:
        """Whether it would be of use to show ``last`` to another router."""
        failed = self.broken or (self.error and self.foreseen and CHANGED not in self.error)
        return bool(self.ask.returns and failed and not self.left and (last or not self.heard.tracks))

    async def _connection(self, address: str, last: str, breaks: Sequence[int]) -> tuple[str, bool]:
        """The id of the last whole event, and whether the client broke off by itself, which needs one."""
        ask, pieces, reader = self.ask, 0, Reader()
        headers = {"last-event-id": last} if last else READS
        try:
            async with (httpx.AsyncClient(timeout=2 * WITHIN_S, verify=False) as client,
                        client.stream("POST", f"http://{address}{ask.path}", json={"model": "timed", **ask.body},
                                      headers=headers) as response):
                if response.status_code != 200 or not ask.streamed:
                    self._answered(response.status_code, await response.aread())
                    return last, False
                async for line in response.aiter_lines():
                    if (event := reader.take(line)) is None:
                        continue
                    self.heard.event(ask.path, event.data)
                    if self.heard.error:
                        continue
                    last, pieces = event.id or last, pieces + 1
                    if pieces == ask.leaves_after:
                        self.left = True
                        return last, False
                    if pieces in breaks and last and not self.heard.over:
                        return last, True
        except httpx.TransportError as error:
            self.broken, self.error = True, repr(error)
            return last, False
        self.error = self.heard.error
        self.foreseen = not self.error or self.heard.kind in KINDS
        assert self.heard.over or self.error, "the stream ended without a last word"
        return last, False

    def _answered(self, status: int, body: bytes) -> None:
        if status == 200:
            self.heard.whole(json.loads(body))
            return
        self.error, self.foreseen = f"{status}: {body[:300]!r}", status in STATUSES and "error" in json.loads(body)

    def fault(self) -> str:
        """What is wrong with it, whatever it says; "" for nothing."""
        if not self.over:
            return "it never ended"
        if not self.foreseen:
            return f"an error that nobody foresaw: {self.error}"
        if not (self.heard.over or self.error or self.left):
            return "it ended without a word"
        return ""

    async def fault_beside(self, calm: Iterable[str]) -> str:
        """The same, and whether one of the ``calm`` routers says what it says: of the weights that served meanwhile."""
        if found := self.fault():
            return found
        left = self.heard.choices() if self.ask.kind == "several" else [self.heard]
        for address in calm:
            right = await right_of(self.ask, address)
            known = right.choices() if self.ask.kind == "several" else [right]
            left = [part for part in left if not any(part.begins(whole) for whole in known)]
            if not left:
                return ""
        return "no set of weights says this" if left else ""


async def right_of(ask: Ask, address: str) -> Heard:
    """What a calm router answers, to somebody who stays."""
    for _ in range(TRIES):  # a machine that is busy with others may lose connections by itself
        answer = Answer(replace(ask, at_s=0.0, leaves_after=0, breaks=(), returns=False))
        await answer.read_from([address])
        if not answer.broken:
            break
    assert answer.heard.over, answer
    return answer.heard
