"""Histories of random faults and traffic: every answer is right, or an exact beginning with an error that says why."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from slipstream.observe.log import configure
from tests_chaos.asks import plain
from tests_chaos.fleet import Fleet, running, settings
from tests_chaos.history import Answer, drawn
from tests_chaos.model import FIRST
from tests_chaos.storm import befall

CALM_EVERY = 10  # histories; in between a fleet may limp


@pytest.mark.timeout(0)
async def test_every_answer_is_right(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> None:
    count, first = request.config.getoption("--histories"), request.config.getoption("--seed")

    def told(text: str) -> None:
        with capsys.disabled():
            print(text, end="", file=sys.stderr, flush=True)

    seen = await suffered(first, count, told)
    told(f"\n{count} histories from seed {first}: {dict(sorted(seen.items()))}\n")
    assert seen["whole"] > sum(seen[what] for what in ("client left", "beginning", "refused"))


async def suffered(first: int, count: int, told: Callable[[str], None]) -> Counter[str]:
    """What became of the answers of ``count`` histories, and what befell them. Raises AssertionError at the first that
    is wrong."""
    configure(settings().log)
    torch.set_num_threads(1)  # a step has few rows, and the fleet a thread for each engine
    seen: Counter[str] = Counter()
    async with running() as fleet:
        for number, seed in enumerate(range(first, first + count), 1):
            history = drawn(seed)
            outcome = await befall(fleet, history)
            assert not outcome.wrong, f"seed {seed}: {outcome.wrong}\n{history.faults}"
            seen += Counter(kind(answer) for answer in outcome.answers)
            seen += Counter(f"fault: {fault.kind}" for fault in history.faults)
            seen += Counter(f"whole: {answer.ask.kind}" for answer in outcome.answers if answer.whole)
            seen["picked up"] += sum(answer.whole and answer.returned > 0 for answer in outcome.answers)
            if number % CALM_EVERY == 0:
                await calm(fleet)
                told(f"\r{number} of {count} histories, {seen['whole']} whole answers")
        await calm(fleet)
    return seen


async def calm(fleet: Fleet) -> None:
    """After a storm each router answers again by itself, and nothing is left behind."""
    for router in range(len(fleet.routers)):
        for _ in range(600):
            answer = Answer(plain(0, 0.0, router, "grpc", FIRST, 40))
            await answer.read(fleet)
            if answer.whole:
                break
            await asyncio.sleep(0.1)
        assert answer.whole, f"router {router} does not come back: {answer.error}"
    for target in fleet.targets:
        assert target.made is not None
        for _ in range(600):
            info = await target.made.service.info()
            if not info.sessions_running + info.sessions_waiting:
                break
            await asyncio.sleep(0.1)
        assert not info.sessions_running + info.sessions_waiting, f"{target.name}: answers that nobody reads"


def kind(answer: Answer) -> str:
    if answer.whole:
        return "whole"
    return "client left" if answer.left else "beginning" if answer.heard.tracks else "refused"
