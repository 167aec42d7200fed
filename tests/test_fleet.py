"""Several targets and several drafts: sessions spread, move and stay right; a draft that says nothing costs little.

Timed devices, so that nothing is computed; workers, sessions, policies and wire are the real ones. What is said of
seconds is said in simulated time.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager

import pytest

from slipstream.base.config import Config, load
from slipstream.decision.beliefs import SHARE
from slipstream.decision.decide import Rules
from slipstream.engine.model import CausalModel
from slipstream.protocol.messages import PROTOCOL_VERSION, DraftBound, DraftHello
from slipstream.protocol.requests import Piece, Request, Sampling
from slipstream.simulate.simulation import Accelerator, Deployment, World
from slipstream.simulate.simulation import Target as Simulated
from slipstream.simulate.timed import STREAMS, SYMBOLS, Device, TimedDrafter, TimedModel, Timing
from slipstream.wire.link import DraftLink
from target_service.assembly import Target, assemble
from tests.pair import drafting, local_link_to
from tests.test_timed import text

QUICK = Timing(step_s=0.002, draft_s=0.0004, seed=3)
STUBBORN = ("target.policy.always=true",)
TOKENS = 90


@asynccontextmanager
async def timed_target(*settings: str,
                       around: Callable[[CausalModel], CausalModel] = lambda model: model) -> AsyncIterator[Target]:
    config = load(None, ("target.slots=8192", "target.drafts=[]", *settings))
    assert isinstance(config, Config)
    target = await asyncio.to_thread(assemble, config, around(TimedModel(QUICK, Device())), "timed", "",
                                     asyncio.get_running_loop())
    target.worker.start()
    try:
        yield target
    finally:
        await asyncio.to_thread(target.worker.stop)


async def answer(target: Target, stream: int, seen: Callable[[], None] = lambda: None) -> list[Piece]:
    token, pieces = stream % STREAMS * SYMBOLS, []
    async for piece in target.service.submit(Request(str(stream), (token, token), Sampling(), TOKENS)):
        pieces.append(piece)
        seen()
    assert [t for piece in pieces for t in piece.tokens] == text(QUICK, token, 1, TOKENS), stream
    return pieces


def series(target: Target, name: str) -> dict[str, float]:
    """Of one metric as a scrape would read it: labels -> value."""
    lines = target.metrics.registry.page("")[1].decode().splitlines()
    return {line.split("{")[1].split("}")[0]: float(line.rsplit(" ", 1)[1]) for line in lines
            if line.startswith(f"slipstream_{name}{{")}


async def test_drafts_die_drain_and_join_while_two_targets_answer_32_streams() -> None:
    count = 0

    def seen() -> None:
        nonlocal count
        count += 1

    async def until(pieces: int) -> None:
        while count < pieces:
            await asyncio.sleep(0.001)

    async with AsyncExitStack() as stack:
        targets = [await stack.enter_async_context(timed_target(*STUBBORN)) for _ in range(2)]
        drafts = [await stack.enter_async_context(drafting(TimedDrafter(QUICK, Device(), True, name=f"timed-{number}"),
                                                           run_ahead=40)) for number in range(4)]
        links = stack.enter_context(ExitStack())
        joined = {number: [links.enter_context(local_link_to(target.hello, target.worker.following, drafts[number]))
                           for target in targets] for number in range(3)}
        answers = [asyncio.create_task(answer(targets[stream % 2], stream, seen)) for stream in range(32)]
        await until(64)
        for link in joined[0]:
            link.cut("killed")
        await until(192)
        for target in targets:
            links.enter_context(local_link_to(target.hello, target.worker.following, drafts[3]))
        await until(256)
        drafts[1].drain()
        assert len(await asyncio.gather(*answers)) == 32
        for target in targets:
            moved = sum(series(target, "drafter_moves_total").values())
            assert moved > 0, "nothing moved"
            by_drafter = series(target, "drafter_tokens_total")
            for number in range(4):
                drafted = sum(v for labels, v in by_drafter.items() if f'"timed-{number}"' in labels)
                assert drafted > 0, f"draft {number} was of no use: {by_drafter}"
            changes = series(target, "mode_transitions_total")
            assert changes and not any(count for labels, count in changes.items() if "draft_unavailable" in labels)
            await asyncio.wrap_future(target.worker.check_slots())


async def test_a_small_draft_gets_no_more_than_it_takes() -> None:
    async with (timed_target(*STUBBORN) as target,
                drafting(TimedDrafter(QUICK, Device(), max_sessions=2, name="small")) as small,
                drafting(TimedDrafter(QUICK, Device(), name="large")) as large):
        events = target.worker.following
        with local_link_to(target.hello, events, small), local_link_to(target.hello, events, large):
            await asyncio.gather(*(answer(target, stream) for stream in range(12)))
        drafted = series(target, "drafter_tokens_total")
        assert all(any(f'"{name}"' in labels for labels in drafted) for name in ("small", "large")), drafted
        changes = series(target, "mode_transitions_total")
        assert not any(count for labels, count in changes.items() if "draft_unavailable" in labels), "one had to refuse"


class Mute:
    """A draft that shook hands and says nothing from then on."""

    address = "mute"

    def send(self, items: Sequence[DraftBound]) -> None:
        """It says nothing to that."""


@pytest.mark.parametrize(("step_s", "readers"), [(0.002, 2), (0.020, 1)])
def test_a_draft_that_says_nothing_costs_a_request_one_deadline_at_most(step_s: float, readers: int) -> None:
    """From its first token on, and then the share of its time that probes may lose. In simulated time: each answer has
    2000 tokens."""
    world, deadline_s = World(), load(None, ()).target.policy.deadline_max_s
    target = Simulated(world, Accelerator(), Deployment(Timing(step_s), batch=readers, host_s=0.0), 0)
    target.worker.following.link_up(Mute(), DraftHello(PROTOCOL_VERSION, 1, "mute", 0, "", None, 0, 4096, 63, 64))
    target.actor.wake(0.0)
    world.run(4500 * step_s)
    waits = defaultdict[int, list[float]](list)  # by stream: each answer has its own
    for now_s, piece in target.pieces:
        waits[piece.tokens[0] // SYMBOLS] += [piece.wait_s] if piece.wait_s else []
        probes_s = sum(sum(of_one[1:]) for of_one in waits.values())
        # The last wait of what was saved up is as long as any is at least.
        assert probes_s <= readers * (SHARE * now_s + Rules().deadline_min_s), (now_s, waits)
    assert len(waits) >= 2 * readers
    assert all(wait <= deadline_s + 1e-9 for of_one in waits.values() for wait in of_one[:1]), waits
    assert sum(map(bool, waits.values())) >= readers, "nobody has waited for it"
    asked = all(one.followed.decision.num_wanted for one in target.worker._queues.running)
    assert probes_s > 0.0 or asked, "nobody looks whether it speaks again"


async def test_an_address_that_takes_connections_and_says_nothing_costs_nothing() -> None:
    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1000):
            pass

    server = await asyncio.start_server(swallow, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with timed_target() as target:
        link = DraftLink(f"127.0.0.1:{port}", target.hello, target.worker.following)
        dialling = asyncio.create_task(link.run())
        for stream in range(2):
            assert not any(piece.wait_s for piece in await answer(target, stream))
        assert not link.status().connected
        dialling.cancel()
        await asyncio.gather(dialling, return_exceptions=True)
    server.close()
