"""The timed devices keep their law and their times, and the relay delays as it is told."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest

from bench.delayed import exact_loop, relay
from bench.timed import TIMING_JSON
from bench.traffic.fallback import run_fallback
from slipstream.base.config import Config, load
from slipstream.base.errors import ConfigError
from slipstream.protocol.messages import Commit, Open
from slipstream.protocol.requests import Request, Sampling
from slipstream.simulate.timed import SYMBOLS, Device, SyntheticText, TimedDrafter, TimedModel, Timing
from target_service.assembly import assemble
from tests.growth_rules import GrowthLedger
from tests.pair import drafting, local_link_to

QUICK = Timing(step_s=0.002, draft_s=0.0004, acceptance=(0.75, 0.12, 0.05), seed=3)


def text(timing: Timing, token: int, position: int, count: int) -> list[int]:
    """The law written down once more: one token after the other."""
    law, tokens = SyntheticText(timing), []
    for place in range(position, position + count):
        token = int(law.following([token], [place])[0])
        tokens.append(token)
    return tokens


def test_streams_never_meet_and_the_seed_changes_them() -> None:
    one, other = text(QUICK, 5 * SYMBOLS, 7, 50), text(QUICK, 6 * SYMBOLS, 7, 50)
    assert {token // SYMBOLS for token in one} == {5} and {token // SYMBOLS for token in other} == {6}
    assert one != text(Timing(seed=4), 5 * SYMBOLS, 7, 50)


def test_children_are_right_as_often_as_they_are_said_to_be() -> None:
    law, positions = SyntheticText(QUICK), np.arange(1, 6001)
    streams = np.full(len(positions), 2)
    truth = law.following(streams * SYMBOLS, positions)
    ranked = law.proposed(streams, positions)
    for rank, chance in enumerate(QUICK.acceptance):
        share = np.mean(ranked[:, rank] == truth)
        assert abs(share - chance) < 0.02, (rank, share)
    assert all(len(set(children)) == 3 for children in ranked.tolist())


def test_a_step_is_flat_and_then_grows_with_its_rows() -> None:
    assert QUICK.step_of(8) == pytest.approx(QUICK.step_s, rel=0.01)
    assert QUICK.step_of(2000) == pytest.approx(10 * QUICK.step_s, rel=0.01)


def test_timings_travel_as_an_argument() -> None:
    assert TIMING_JSON.validate_json(TIMING_JSON.dump_json(QUICK)) == QUICK
    with pytest.raises(ConfigError, match="acceptance"):
        Timing(acceptance=(0.9, 0.2))


@pytest.mark.parametrize("keep", [False, True])
def test_the_timed_drafter_obeys_the_rules_of_growth(keep: bool) -> None:
    """Whole trees and single levels in turn, against the law's own text."""
    drafter, rng = TimedDrafter(Timing(draft_s=0.0), Device(), keep), np.random.default_rng(5)
    tokens = [3 * SYMBOLS, 3 * SYMBOLS]
    ledger = GrowthLedger(tokens)
    drafter.open([Open(1, np.array(tokens, np.int32), 2, Sampling())])
    truth = text(Timing(), tokens[-1], 1, 200)
    done = accepted = 0
    while done < 150:
        for steps in (0, 1, 1):
            (growth,) = drafter.grow([1], [8], steps)
            ledger.take(growth, 8, 512)
        # The target may have verified less than it holds.
        count = min(len(ledger.tree.find_path(truth[done:])), int(rng.integers(0, 9)))
        accepted += count
        chunk = truth[done : done + count + 1]
        drafter.commit([Commit(1, 2 + done, np.array(chunk, np.int32))])
        ledger.commit(chunk)
        done += len(chunk)
    assert accepted > 50


async def test_a_target_around_it_answers_by_the_law() -> None:
    """Plain and with drafts: the same text, in fewer steps."""
    device, loop = Device(), asyncio.get_running_loop()
    config = load(None, ("target.slots=1024", "target.drafts=[]", "target.policy.always=true"))
    assert isinstance(config, Config)
    target = await asyncio.to_thread(assemble, config, TimedModel(QUICK, device), "timed", "", loop)
    target.worker.start()
    prompt, expected = (8, 8), text(QUICK, 8, 1, 60)
    rounds = {}
    try:
        async with drafting(TimedDrafter(QUICK, device, True), run_ahead=20) as peers:
            with local_link_to(target.hello, target.worker.following, peers):
                for speculate in (False, True):
                    pieces = [piece async for piece in target.service.submit(
                        Request("r", prompt, Sampling(), 60, None, speculate))]
                    assert [token for piece in pieces for token in piece.tokens] == expected
                    rounds[speculate] = len(pieces)
    finally:
        await asyncio.to_thread(target.worker.stop)
    assert rounds[True] < rounds[False] == 60


def test_the_relay_delays_both_ways() -> None:
    loop = exact_loop()
    try:
        loop.run_until_complete(asyncio.wait_for(converse(), 60))
    finally:
        loop.close()


async def converse() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1000):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    there = server.sockets[0].getsockname()
    middle = await relay(("127.0.0.1", 0), (there[0], there[1]), 0.02)
    reader, writer = await asyncio.open_connection(*middle.sockets[0].getsockname()[:2])
    began_s = time.perf_counter()
    for number in range(5):
        writer.write(b"%d" % number)
        assert await reader.read(1000) == b"%d" % number
    assert time.perf_counter() - began_s >= 5 * 2 * 0.02
    writer.close()
    middle.close()
    server.close()


async def test_a_drafter_that_turns_bad_and_recovers_changes_no_answer(tmp_path: Path,
                                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """``make demo-fallback``. When speculation is left and comes back depends on the machine's load, so it is held to
    that in simulated time (``test_simulation``, ``test_policy``)."""
    monkeypatch.setattr("bench.timed.LOGS", tmp_path)
    said: list[str] = []
    timeline, plain, speculated = await run_fallback(said.append, 180)
    assert speculated.tokens == plain.tokens
    assert 0.0 < timeline.bad_from_s < timeline.good_from_s < float("inf"), said
    assert speculated.accepted > 10 and timeline.changes[0][1] == "speculate", timeline.changes
