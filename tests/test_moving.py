"""Answers that move: what becomes of begun answers when their target dies, drains or gives way to another model.

Timed devices behind the real wire and the real balancer; and targets without a model where faults are the point.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import pytest

from bench.fleet import free_port
from router_service.balance import Balancer, BalanceRules, Targets
from slipstream.base.config import WireSection
from slipstream.base.errors import CallLost, CapacityError, Draining, InvalidRequest, SlipstreamError, Unavailable
from slipstream.observe.metrics import RouterMetrics
from slipstream.protocol.identity import Identity
from slipstream.protocol.requests import Answer, Request, Sampling
from slipstream.simulate.timed import SYMBOLS
from slipstream.wire import channel
from slipstream.wire.server import GrpcServer
from slipstream.wire.target import TargetClient, TargetServicer
from target_service.assembly import Target
from tests.echo import EchoTarget, answer_bytes
from tests.held import Held, HeldModels
from tests.loop import eventually, settled
from tests.names import Names
from tests.test_fleet import QUICK, timed_target
from tests.test_timed import text
from tests_chaos.relay import Relay

pytestmark = pytest.mark.usefixtures("servers_end")

TOKENS = 200


@dataclass
class Served:
    """A timed target behind its own server."""

    model: Held
    target: Target
    server: GrpcServer
    client: TargetClient

    async def kill(self) -> None:
        """All calls end at once, and nobody listens any more."""
        await self.server.drain(0.0)


@asynccontextmanager
async def served(*settings: str) -> AsyncIterator[Served]:
    models = HeldModels()
    async with timed_target("target.policy.max_nodes=0", *settings, around=models) as target:
        server = GrpcServer("127.0.0.1:0", WireSection(), [TargetServicer(target.service)])
        client = TargetClient(f"127.0.0.1:{await server.start()}")
        try:
            yield Served(models[0], target, server, client)
        finally:
            models[0].let_go()
            await client.aclose()
            await server.drain(0.0)


async def balanced(*targets: TargetClient | EchoTarget, **rules: float) -> Balancer:
    """A balancer that has asked each of ``t0``, ``t1``, … once."""
    balancer = Balancer(Targets({f"t{i}": target for i, target in enumerate(targets)}), RouterMetrics("tiny"),
                        rules=BalanceRules(**rules))  # type: ignore[arg-type]
    await balancer.poll()
    return balancer


async def read(answer: Answer, seen: Callable[[], None] = lambda: None) -> list[int]:
    tokens: list[int] = []
    async for piece in answer:
        tokens += piece.tokens
        seen()
    return tokens


def echo_request(max_tokens: int = 30) -> Request:
    return Request("r", (1, 2), Sampling(), max_tokens)


@pytest.mark.parametrize("room", [64, 40])
async def test_a_killed_target_loses_none_of_64_streams(room: int) -> None:
    """Neither where the other has room for all, nor where some have to wait for it."""
    count = 0

    def seen() -> None:
        nonlocal count
        count += 1

    async with AsyncExitStack() as stack:
        both = [await stack.enter_async_context(served(f"target.max_sessions={room}")) for _ in range(2)]
        balancer = await balanced(*(one.client for one in both))
        answers = []
        for one in both:
            one.model.hold()
        for stream in range(64):
            token = stream * SYMBOLS
            answer = balancer.submit(Request(str(stream), (token, token), Sampling(), TOKENS))
            answers.append(asyncio.create_task(read(answer, seen)))

        def all_have_begun() -> bool:
            for one in both:
                one.model.step()
            return count >= 320

        await eventually(all_have_begun)
        assert both[0].target.worker.num_running >= 24, "nothing is at stake"
        both[1].model.let_go()
        await both[0].kill()
        found = await asyncio.gather(*answers, return_exceptions=True)
        lost = [tokens for tokens in found if isinstance(tokens, BaseException)]
        assert not lost, f"{len(lost)} of 64 were lost, as in {lost[0]!r}"
        assert found == [text(QUICK, stream * SYMBOLS, 1, TOKENS) for stream in range(64)]


async def test_a_begun_answer_waits_for_room_in_the_targets_that_are_left() -> None:
    """One whose target dies is not refused because the other is full for a while."""
    dying, full = EchoTarget(fail_after=3, error=Unavailable("gone")), EchoTarget()
    full.waiting = 10  # so that it begins at the other
    balancer = await balanced(dying, full)
    full.fail_after, full.error = 0, CapacityError("full")
    reading = asyncio.create_task(read(balancer.submit(echo_request())))
    await eventually(lambda: len(full.requests) >= 1)
    await asyncio.sleep(0)
    assert not reading.done()
    await balancer.poll()
    await eventually(lambda: len(full.requests) >= 2)
    assert not reading.done(), "asked again, and still full"
    full.fail_after = None
    await balancer.poll()
    assert await reading == answer_bytes(echo_request())[:30]


async def test_who_waits_for_room_goes_on_when_another_answer_leaves() -> None:
    dying, full = EchoTarget(fail_after=3, error=Unavailable("gone")), EchoTarget(stall_after=1)
    dying.waiting = 10
    balancer = await balanced(dying, full)
    holder = balancer.submit(echo_request())
    await anext(aiter(holder))
    dying.waiting, full.waiting = 0, 10
    await balancer.poll()
    full.fail_after, full.error = 0, CapacityError("full")
    reading = asyncio.create_task(read(balancer.submit(echo_request())))
    await eventually(lambda: len(full.requests) >= 2)
    full.fail_after, full.stall_after = None, -1
    await holder.aclose()
    assert await reading == answer_bytes(echo_request())[:30]


async def test_while_others_are_full_a_target_that_is_back_gets_its_answers_again() -> None:
    """They waited for room elsewhere, and new requests had all of it."""
    whole = await read((await balanced(EchoTarget())).submit(echo_request()))
    back, full = EchoTarget(fail_after=3, error=CallLost("reset")), EchoTarget(fail_after=0)
    full.waiting = 10
    b = await balanced(back, full)
    reading = asyncio.ensure_future(read(b.submit(echo_request())))
    await settled()
    back.fail_after = None
    for _ in range(3):
        assert len(await read(b.submit(echo_request(8)))) == 8
        await settled()
        assert not any(asked.answered for asked in back.requests), "no poll says yet that it has not died"
    await b.poll()
    await settled()
    assert reading.done() and await reading == whole
    assert len(full.requests) > 1


async def test_who_was_full_is_asked_again_after_a_piece() -> None:
    short, full, other = EchoTarget(fail_after=1, error=Unavailable("gone")), EchoTarget(fail_after=0), EchoTarget()
    full.waiting, other.waiting, other.fail_after, other.error = 10, 20, 1, short.error
    b = await balanced(short, full, other)
    answer = b.submit(echo_request())
    begun = [*(await anext(answer)).tokens, *(await anext(answer)).tokens]
    assert len(full.requests) == len(other.requests) == 1
    full.fail_after = None
    assert len([*begun, *await read(answer)]) == 30 and len(full.requests) == 2


async def test_who_left_while_it_waited_for_room_keeps_no_other_waiting() -> None:
    b = await balanced(EchoTarget())
    gone, waiting = [asyncio.ensure_future(b.wait_for_capacity(echo_request(), {"t0"})) for _ in range(2)]
    await settled()
    gone.cancel()
    await settled()
    assert len(await read(b.submit(echo_request()))) == 30 and await waiting


async def test_an_answer_that_fells_whatever_takes_it_does_not_fell_all() -> None:
    """Begun once, it then fails at each target before it gets on: three are asked, not all."""
    targets = [EchoTarget(fail_after=0, error=Unavailable("down")) for _ in range(8)]
    first = EchoTarget(fail_after=3, error=Unavailable("down"))
    balancer = await balanced(first, *targets)
    for target in targets:
        target.waiting = 5
    await balancer.poll()
    with pytest.raises(SlipstreamError):
        await read(balancer.submit(echo_request()))
    assert len(first.requests) == 1 and sum(len(target.requests) for target in targets) == 2


async def test_what_no_other_target_can_go_on_with_is_lost_and_not_the_client_s_fault() -> None:
    """As vLLM refuses sampled answers that another began, whose noise is its own."""
    dying, other = EchoTarget(fail_after=3, error=Unavailable("gone")), EchoTarget()
    other.waiting, other.fail_after, other.error = 10, 0, InvalidRequest("answered", "cannot go on in vLLM")
    balancer = await balanced(dying, other)
    with pytest.raises(Unavailable, match="lost before the answer's end"):
        await read(balancer.submit(echo_request()))
    assert len(other.requests) == 1


@pytest.mark.parametrize(("host", "again"), [("target.ns.svc", True), ("127.0.0.1", False)])
async def test_a_name_that_led_nowhere_is_looked_up_at_the_next_poll(host: str, again: bool,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """A channel of gRPC's looks up a name that is not there ever more rarely, at last every two minutes: without
    discovery a router came up so much later than its target."""
    server = GrpcServer("127.0.0.1:0", WireSection(), [TargetServicer(EchoTarget())])
    nobody, found = free_port(), await server.start()
    ends, dial = iter((nobody, nobody, found)), channel.open_channel
    monkeypatch.setattr(channel, "open_channel", lambda address, tls: dial(f"127.0.0.1:{next(ends)}", tls))
    client = TargetClient(f"{host}:1")
    with pytest.raises(Unavailable):
        await client.info()
    if again:
        assert (await client.info()).max_context
    assert len(list(ends)) == (0 if again else 2)
    await client.aclose()
    await server.drain(0.0)


async def test_a_target_that_drains_is_left_for_another_behind_its_name() -> None:
    """Without discovery a name stands for the one pod of a service: while an old one drains, the new one is there. One
    of another identity is waited for: begun answers may have to come back to the old one. Those of other routers will
    not come to this one."""
    old, new = EchoTarget(end=30), EchoTarget(end=30)
    whole = answer_bytes(echo_request())[:30]
    new.identity = Identity("other", "float32", "none", "echo")
    old.go.clear()
    servers = [GrpcServer("127.0.0.1:0", WireSection(), [TargetServicer(one)]) for one in (old, new)]
    ports, relay = [await server.start() for server in servers], Relay(free_port())
    relay.to = ports[0]
    await relay.start()
    client = TargetClient(f"localhost:{relay.port}")
    balancer = await balanced(client)
    begun = asyncio.create_task(read(balancer.submit(echo_request())))
    await eventually(lambda: bool(old.running))
    old.draining = True
    for port in ports:
        relay.to = port
        await balancer.poll()
        with pytest.raises(Draining):
            await read(balancer.submit(echo_request()))
    new.identity = old.identity
    await balancer.poll()
    assert await read(balancer.submit(echo_request())) == whole and len(new.requests) == 1
    old.go.set()
    assert await begun == whole and len(new.requests) == 1
    new.identity, relay.to = Identity("other", "float32", "none", "echo"), ports[0]
    idle = TargetClient(f"localhost:{relay.port}")
    beside = await balanced(idle)
    relay.to = ports[1]
    await beside.poll()
    assert await read(beside.submit(echo_request())) == whole and len(new.requests) == 2
    for one in (client, idle):
        await one.aclose()
    await relay.close()
    for server in servers:
        await server.drain(0.0)


@pytest.mark.parametrize("before", ["127.0.0.2", ""], ids=["another-address", "no-address"])
async def test_a_target_that_has_another_address_is_found_behind_its_name(before: str) -> None:
    """As a pod has that is started again. gRPC by itself asks for a name's address ever more rarely, where it had none
    for some minutes, as while a pod loads its model, once in two."""
    names = await Names.serving(before)
    server = GrpcServer("127.0.0.1:0", WireSection(), [TargetServicer(EchoTarget(end=30))])
    client = TargetClient(names.behind(await server.start()))
    balancer = await balanced(client)
    for _ in range(4):
        asked = names.asked
        await balancer.poll()
        assert names.asked > asked and not balancer.ready
    names.host = "127.0.0.1"
    async with asyncio.timeout(15):
        while not balancer.ready:
            await balancer.poll()
    assert await read(balancer.submit(echo_request())) == answer_bytes(echo_request())[:30]
    await client.aclose()
    await server.drain(0.0)
    names.transport.close()


@pytest.mark.parametrize("comes_back", [True, False])
async def test_answers_of_an_only_target_go_on_when_their_connection_breaks(comes_back: bool) -> None:
    """As a mesh ends one that is old, or a firewall forgets one. Where nobody answers any more they end with an error,
    before long."""
    target = EchoTarget(end=30, pause_s=0.02)
    server, relay = GrpcServer("127.0.0.1:0", WireSection(), [TargetServicer(target)]), Relay(free_port())
    relay.to = await server.start()
    await relay.start()
    client = TargetClient(relay.address)
    balancer = await balanced(client, poll_every_s=0.05)
    polling = asyncio.create_task(balancer.run())
    answers = [balancer.submit(echo_request()) for _ in range(4)]
    begun = [list(piece.tokens) for piece in await asyncio.gather(*map(anext, answers))]
    target.go.clear()
    relay.cut(relay.to if comes_back else None)
    reading = asyncio.gather(*map(read, answers), return_exceptions=True)
    await eventually(lambda: not target.running)
    target.go.set()
    found = await reading
    if comes_back:
        whole = [first + rest for first, rest in zip(begun, found, strict=True) if isinstance(rest, list)]
        assert whole == [answer_bytes(echo_request())[:30]] * 4 and len(target.requests) == 8
    else:
        assert all(isinstance(one, Unavailable) and "lost before" in str(one) for one in found), found
    polling.cancel()
    await client.aclose()
    await relay.close()
    await server.drain(0.0)
