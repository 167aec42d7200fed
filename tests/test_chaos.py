"""A few histories of ``make test-chaos``, one in which every target gets other weights under load, and that its checker
sees what is wrong with an answer of any kind."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from copy import deepcopy
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from router_service.event_id import EventIds
from router_service.text.deltas import TextDelta
from slipstream.protocol.requests import Piece, Request
from tests_chaos.asks import KINDS, OVER_GRPC, Ask, drawn_ask, plain
from tests_chaos.fleet import NEW, OLD, Calm, running
from tests_chaos.heard import Heard
from tests_chaos.history import Answer, Fault, History, drawn, right_of
from tests_chaos.model import FIRST
from tests_chaos.reference import Reference, Whole
from tests_chaos.storm import befall
from tests_chaos.test_chaos import calm, suffered

EACH = 3  # requests of a kind


async def test_random_faults_under_random_traffic() -> None:
    seen = await suffered(first=1, count=5, told=lambda _: None)
    assert seen["whole"] > 5, seen


async def test_other_weights_under_load_and_every_answer_is_wholly_of_one_model() -> None:
    """One target after the other, as a rollout does; in the end all answers are of the new weights."""
    asks = tuple(plain(number, 0.02 * number, number % 2, ("http", "grpc")[number // 2 % 2], FIRST + number % 8, 120,
                       number % 3 > 0) for number in range(12))
    async with running() as fleet:
        for number in range(3):
            rollout = Fault(0.3, "rollout", (f"target-{number}", ""), 0.05, 0)
            outcome = await befall(fleet, History(number, asks, (rollout,)))
            assert not outcome.wrong, outcome.wrong
            await calm(fleet)
        last = await befall(fleet, History(3, asks, ()))
    assert {target.timing for target in fleet.targets} == {NEW}
    assert all(answer.whole for answer in last.answers) and not last.wrong, last


def test_a_history_follows_from_its_seed() -> None:
    assert drawn(5) == drawn(5) != drawn(6)


class Torn(Reference):
    """From its fourth token on an answer is of other weights; so are the scores of its prompt."""

    def __init__(self) -> None:
        super().__init__(OLD)
        self._other, self._from = Reference(NEW), 0

    def submit(self, request: Request) -> Whole:
        self._from = len(request.tokens) + 2
        return super().submit(request)

    def row(self, token: int, position: int) -> torch.Tensor:
        return super().row(token, position) if position < self._from else self._other.row(token, position)

    def scores(self, request: Request) -> Piece:
        return self._other.scores(request)


class Drop(Reference):
    """Tells one token after the other."""

    def submit(self, request: Request) -> Whole:
        return Drops(self, request)


class Drops(Whole):
    async def __aiter__(self) -> AsyncIterator[Piece]:
        async for piece in super().__aiter__():
            last = len(piece.tokens) - 1
            for at, token in enumerate(piece.tokens):
                yield Piece((token,), logprobs=piece.logprobs[at : at + 1], finish=piece.finish if at == last else "",
                            state="plain")


@pytest.fixture(scope="module")
async def addresses() -> AsyncIterator[dict[str, dict[str, str]]]:
    """Of routers that nothing befalls, by what their target does."""
    routers = {"old": Calm(Reference(OLD)), "new": Calm(Reference(NEW)), "torn": Calm(Torn()), "drop": Calm(Drop(OLD))}
    for router in routers.values():
        await router.start()
    yield {name: router.addresses for name, router in routers.items()}
    for router in routers.values():
        await router.end()


def asks(kind: str, way: str) -> list[Ask]:
    """A few streams of a kind, whose clients stay."""
    found, random = list[Ask](), Random(f"{kind} {way}")
    while len(found) < EACH:
        ask = drawn_ask(random, 0, 0.0, 0)
        if (ask.kind, ask.way, ask.streamed) == (kind, way, True):
            found.append(replace(ask, leaves_after=0, breaks=(), returns=False))
    return found


def answer(ask: Ask, heard: Heard, **seen: Any) -> Answer:
    return Answer(ask, heard, over=True, **seen)


def spoilt(right: Heard) -> Iterator[Heard]:
    """Each track with something else at its end, without its end, told twice, or with more to it; and one too many."""
    for name, said in right.tracks.items():
        other = chr(ord(said[-1]) ^ 1) if isinstance(said, str) else [None]
        for wrong in (said[:-1] + other, said[:-1], said + said, said + other):
            heard = deepcopy(right)
            heard.tracks[name] = wrong
            yield heard
    yield replace(deepcopy(right), tracks=right.tracks | {"more": "words"})
    yield replace(deepcopy(right), finish={0: "another"})


EVERY = [*((kind, "http") for kind in KINDS), *((kind, "grpc") for kind in OVER_GRPC)]


@pytest.mark.parametrize(("kind", "way"), EVERY)
async def test_the_checker_sees_what_is_wrong_with_an_answer_of_each_kind(
        kind: str, way: str, addresses: dict[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, torn = (addresses[name][way] for name in ("old", "new", "torn"))
    seen, told = 0, dict[tuple[Ask, str], Heard]()

    async def told_once(ask: Ask, address: str) -> Heard:
        if (ask, address) not in told:
            told[ask, address] = await right_of(ask, address)
        return told[ask, address]

    monkeypatch.setattr("tests_chaos.history.right_of", told_once)
    for ask in asks(kind, way):
        right = await told_once(ask, old)
        assert await answer(ask, right).fault_beside([new, old]) == ""
        for heard in spoilt(right):
            assert not heard.begins(right), heard
        begun = Heard({name: said[: len(said) // 2] for name, said in right.tracks.items()})
        assert await answer(ask, begun, error="503").fault_beside([old]) == ""
        assert answer(ask, begun).fault() == "it ended without a word"
        assert "nobody foresaw" in answer(ask, begun, error="500", foreseen=False).fault()
        assert Answer(ask, right).fault() == "it never ended"
        other = Answer(ask)
        await other.read_from([torn])
        seen += await other.fault_beside([old, new]) != ""
    assert seen, "an answer of two models passes for one"


async def test_the_checker_sees_an_answer_that_is_picked_up_wrongly(
        addresses: dict[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    there, old = addresses["drop"]["http"], addresses["old"]["http"]
    broken = [replace(ask, breaks=(2, 3)) for kind in ("text", "auto", "logprobs") for ask in asks(kind, "http")]
    broken = [ask for ask in broken if ask.body["max_tokens"] > 20]
    for ask in broken:
        picked = Answer(ask)
        await picked.read_from([there, there])
        assert await picked.fault_beside([old]) == "" and (picked.returned or ask.kind == "auto"), (ask, picked)
    split = EventIds.split

    def twice(self: EventIds, delta: TextDelta) -> tuple[TextDelta, TextDelta]:
        had, _ = split(self, delta)
        return had, delta

    monkeypatch.setattr(EventIds, "split", twice)
    seen = []
    for ask in broken:
        picked = Answer(ask)
        try:
            await picked.read_from([there, there])
            seen.append(await picked.fault_beside([old]))
        except AssertionError as error:
            seen.append(str(error))
    assert sum(map(bool, seen)) > len(seen) / 2, seen
