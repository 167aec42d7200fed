"""Routers and targets over peers that an API server lists: found, left, dead, back; with and without that server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from slipstream_vllm.links import Links
from slipstream_vllm.options import Options

from router_service.balance import Balancer, BalanceRules, Targets
from slipstream.base.config import TargetSection, TlsSection, WireSection
from slipstream.base.errors import ConfigError, SlipstreamError, Unavailable
from slipstream.decision.beliefs import StepCosts
from slipstream.following.following import Following
from slipstream.observe.metrics import RouterMetrics, TargetMetrics
from slipstream.protocol.messages import PROTOCOL_VERSION, DraftBound, DraftHello, Drop, Link
from slipstream.protocol.requests import LEFT_ALONE, REFUSED, DraftStatus, Request, Sampling
from slipstream.wire.channel import ConnectionRules
from slipstream.wire.discovery import WatchRules, watch_services
from slipstream.wire.drafts import Drafts
from slipstream.wire.link import DraftLink
from slipstream.wire.roster import RosterRules
from slipstream.wire.server import GrpcServer
from slipstream.wire.servicer import DraftServicer
from slipstream.wire.target import TargetClient, TargetServicer
from slipstream.wire.tls import TlsFiles, with_server_name
from tests.api_server import StandIn, endpoint
from tests.certificates import authority, issue, laid, needs_openssl
from tests.echo import EchoTarget
from tests.loop import eventually
from tests.test_discovery import kubeconfig
from tests.test_wire import HELLO, Echo, Target

pytestmark = pytest.mark.usefixtures("servers_end")

WIRE = WireSection()
RULES = ConnectionRules(backoff_max_s=0.1)
QUICK = WatchRules(repeat_s=0.05, backoff_min_s=0.01, backoff_max_s=0.05)
ROSTER = RosterRules()
LEFT_S, SILENT_S = ROSTER.forget_after_s + 1.0, ROSTER.silent_s + 1.0
ADDRESSES = ("kubernetes:///target.ns:grpc",)


@dataclass
class Clock:
    """Rosters know no other time."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Pods:
    """Servers on loopback ports, each in a slice of its own (a pod's address is its port here)."""

    api: StandIn
    tls: TlsFiles | None = None
    servers: dict[str, GrpcServer] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)

    async def start(self, name: str, servicer: TargetServicer | DraftServicer) -> str:
        server = GrpcServer("127.0.0.1:0", WIRE, [servicer], tls=self.tls)
        self.servers[name], self.ports[name] = server, await server.start()
        await self.list(name)
        return f"127.0.0.1:{self.ports[name]}"

    async def list(self, name: str, ready: bool = True, terminating: bool | None = None) -> None:
        await self.api.put(name, endpoint("127.0.0.1", ready, terminating, pod=name), port=self.ports[name])

    async def kill(self, name: str) -> None:
        await self.servers.pop(name).drain(0)

    async def end(self) -> None:
        for name in list(self.servers):
            await self.kill(name)


@dataclass
class Routed:
    api: StandIn
    pods: Pods
    targets: Targets
    balancer: Balancer
    clock: Clock
    polls: int = 0

    async def poll(self) -> None:
        """Until cancelled."""
        while True:
            await self.balancer.poll()
            self.polls += 1
            await asyncio.sleep(0.02)

    async def passes(self, seconds: float) -> None:
        """So much later, and all are polled again."""
        self.clock.now_s += seconds
        before = self.polls
        await eventually(lambda: self.polls >= before + 2)

    @property
    def known(self) -> set[str]:
        return {target.name for target in self.targets}

    async def ask(self, max_tokens: int = 8) -> int:
        request = Request("r", (1, 2), Sampling(), max_tokens)
        return sum([len(piece.tokens) async for piece in self.balancer.submit(request)])

    async def settled(self, *addresses: str) -> None:
        """Wait until it has these targets, and all of them are ready."""
        await eventually(lambda: self.known == set(addresses) and all(t.ready and not t.delisted for t in self.targets))


@asynccontextmanager
async def routed(folder: Path, tls: TlsFiles | None = None, client: TlsFiles | None = None) -> AsyncIterator[Routed]:
    api = StandIn()
    await api.start()

    def connect(address: str, name: str) -> TargetClient:
        return TargetClient(address, tls=with_server_name(client, name), connect_s=20.0)

    clock = Clock()
    targets = Targets({}, connect, clock, ROSTER)
    balancer = Balancer(targets, RouterMetrics("tiny"), rules=BalanceRules(poll_timeout_s=20.0))
    found = Routed(api, Pods(api, tls), targets, balancer, clock)
    async with watch_services(ADDRESSES, kubeconfig(folder, api), targets.update, QUICK):
        polling = asyncio.create_task(found.poll())
        try:
            yield found
        finally:
            polling.cancel()
            await asyncio.gather(polling, return_exceptions=True)
            await targets.aclose()
            await found.pods.end()
            await api.stop()


async def test_requests_follow_the_targets(tmp_path: Path) -> None:
    async with routed(tmp_path) as r:
        echoes = [EchoTarget() for _ in range(3)]
        a = await r.pods.start("a", TargetServicer(echoes[0]))
        await r.settled(a)
        assert await r.ask() == 8
        b = await r.pods.start("b", TargetServicer(echoes[1]))
        c = await r.pods.start("c", TargetServicer(echoes[2]))
        await r.settled(a, b, c)
        await r.pods.list("a", ready=False, terminating=True)
        await eventually(lambda: any(t.delisted for t in r.targets))
        before = len(echoes[0].requests)
        assert await asyncio.gather(*(r.ask() for _ in range(12))) == [8] * 12
        assert len(echoes[0].requests) == before, "who ends gets no new answer"
        await r.pods.kill("a")
        await r.api.delete("a")
        await r.passes(LEFT_S)
        await r.settled(b, c)


async def test_what_runs_on_a_target_that_left_finishes(tmp_path: Path) -> None:
    async with routed(tmp_path) as r:
        slow = EchoTarget(end=1000)
        slow.go.clear()
        a = await r.pods.start("a", TargetServicer(slow))
        await r.settled(a)
        running = asyncio.create_task(r.ask(max_tokens=200))
        await eventually(lambda: len(slow.running) == 1)
        await r.pods.list("a", ready=False)
        b = await r.pods.start("b", TargetServicer(EchoTarget()))
        await eventually(lambda: b in r.known and any(t.delisted for t in r.targets))
        await r.passes(LEFT_S)
        assert not running.done() and a in r.known, "it is long over, but it works"
        slow.go.set()
        assert await running == 200
        await r.settled(b)


async def test_a_target_that_is_unready_for_a_moment_stays(tmp_path: Path) -> None:
    async with routed(tmp_path) as r:
        a = await r.pods.start("a", TargetServicer(EchoTarget()))
        await r.settled(a)
        (before,) = r.targets
        await r.pods.list("a", ready=False)
        await eventually(lambda: before.delisted)
        assert await r.ask() == 8, "when no other is there, it is used all the same"
        await r.pods.list("a")
        await r.settled(a)
        assert list(r.targets) == [before]


async def test_without_the_api_server_live_targets_stay_and_dead_ones_go(tmp_path: Path) -> None:
    async with routed(tmp_path) as r:
        a = await r.pods.start("a", TargetServicer(EchoTarget()))
        b = await r.pods.start("b", TargetServicer(EchoTarget()))
        await r.settled(a, b)
        await r.api.stop()
        await r.pods.kill("b")
        assert await asyncio.gather(*(r.ask() for _ in range(10))) == [8] * 10
        await r.passes(SILENT_S)
        await r.settled(a)
        await r.passes(SILENT_S)
        assert r.known == {a}
        await r.pods.kill("a")
        await r.passes(SILENT_S)
        assert r.known == {a}, "the last one is never forgotten: it may be us"
        c = await r.pods.start("c", TargetServicer(EchoTarget()))  # the slices know, but nobody can be asked
        await r.api.delete("a")
        await r.api.delete("b")
        await r.api.start()
        await eventually(lambda: c in r.known)
        await r.passes(LEFT_S)
        await r.settled(c)
        assert await r.ask() == 8


async def test_a_dead_target_that_is_still_listed_gets_nothing(tmp_path: Path) -> None:
    async with routed(tmp_path) as r:
        a = await r.pods.start("a", TargetServicer(EchoTarget()))
        b = await r.pods.start("b", TargetServicer(EchoTarget()))
        await r.settled(a, b)
        await r.pods.kill("a")
        assert await asyncio.gather(*(r.ask() for _ in range(10))) == [8] * 10
        await eventually(lambda: not any(t.ready for t in r.targets if t.name == a))
        await r.passes(SILENT_S)
        assert await r.ask() == 8


class Closing(EchoTarget):
    """A target elsewhere, which takes its time to be closed."""

    def __init__(self, gone: asyncio.Event) -> None:
        super().__init__()
        self.closed = False
        self._gone = gone

    async def aclose(self) -> None:
        self.closed = True
        await self._gone.wait()


async def test_a_target_that_is_being_forgotten_gets_no_request() -> None:
    """While another one is closed, either."""
    clock, gone, opened = Clock(), asyncio.Event(), dict[str, Closing]()
    targets = Targets({}, lambda address, _: opened.setdefault(address, Closing(gone)), clock, ROSTER)
    balancer = Balancer(targets, RouterMetrics("tiny"))
    targets.update({"a:1": "", "b:1": ""})
    await balancer.poll()
    targets.update({})
    clock.now_s = LEFT_S
    sweeping = asyncio.create_task(targets.sweep())
    await asyncio.sleep(0)
    with pytest.raises(Unavailable):
        await anext(balancer.submit(Request("r", (1, 2), Sampling(), 8)))
    gone.set()
    assert len(await sweeping) == 2 and all(target.closed for target in opened.values())


async def test_a_target_that_could_not_be_opened_is_when_it_is_listed_again() -> None:
    """As while certificates are replaced."""
    problems = [ConfigError("no certificate")]

    def connect(*_: str) -> Closing:
        if problems:
            raise problems.pop()
        return Closing(asyncio.Event())

    targets = Targets({}, connect)
    for ready, known in (({"a:1": ""}, 0), ({}, 0), ({"a:1": ""}, 1)):
        targets.update(ready)
        assert len(list(targets)) == known


async def test_a_target_that_is_found_while_others_are_closed_hinders_no_end() -> None:
    """Discovery goes on while a router drains."""
    gone, opened = asyncio.Event(), dict[str, Closing]()
    targets = Targets({}, lambda address, _: opened.setdefault(address, Closing(gone)))
    targets.update({"a:1": "", "b:1": ""})
    closing = asyncio.create_task(targets.aclose())
    await asyncio.sleep(0)
    targets.update({"a:1": "", "b:1": "", "c:1": ""})
    gone.set()
    await closing
    assert opened["a:1"].closed and opened["b:1"].closed


async def test_a_target_that_is_forgotten_has_no_series_again() -> None:
    """An answer may have waited for room elsewhere for longer than its target was known: each pod left a series."""
    clock, closed, metrics = Clock(), asyncio.Event(), RouterMetrics("tiny")
    closed.set()
    targets = Targets({}, lambda address, _: Closing(closed), clock, ROSTER)
    balancer = Balancer(targets, metrics)
    targets.update({"a:1": ""})
    await balancer.poll()
    (target,) = targets
    assert 'peer="a:1"' in metrics.registry.page("")[1].decode()
    targets.update({})
    clock.now_s = LEFT_S
    await balancer.poll()
    balancer.count_move(target)
    assert 'peer="a:1"' not in metrics.registry.page("")[1].decode()


@needs_openssl
async def test_pods_are_known_by_their_services_name(tmp_path: Path) -> None:
    ca = authority(tmp_path / "ca")
    server, client = issue(ca, "target", "DNS:target.ns.svc"), issue(ca, "router", "DNS:router.ns.svc")
    async with routed(tmp_path, server, client) as r:
        a = await r.pods.start("a", TargetServicer(EchoTarget()))
        await r.settled(a)
        assert await r.ask() == 8
        r.pods.tls = issue(ca, "other", "DNS:other.ns.svc")
        b = await r.pods.start("b", TargetServicer(EchoTarget()))
        await eventually(lambda: b in r.known)
        await r.passes(0.0)
        assert [t.name for t in r.targets if t.ready] == [a], "another service's pod is not taken for a target"


async def test_nobody_there_is_unavailable_at_once(tmp_path: Path) -> None:
    async with routed(tmp_path) as r:
        try:
            await r.ask()
        except SlipstreamError as error:
            assert isinstance(error, Unavailable)
        else:
            raise AssertionError("it answered")


@dataclass
class Told(Target):
    """A target's worker that remembers which links leave."""

    leaving: dict[str, bool] = field(default_factory=dict)

    def link_leaving(self, link: Link, leaving: bool) -> None:
        self.leaving[link.address] = leaving


async def test_links_follow_the_drafts(tmp_path: Path) -> None:
    api, told = StandIn(), Told()
    await api.start()
    pods, echo = Pods(api), Echo()

    def connect(address: str, name: str) -> DraftLink:
        return DraftLink(address, HELLO, told, rules=RULES)

    clock = Clock()
    drafts = Drafts(connect, told, clock, ROSTER)
    drafts.dial_fixed(("127.0.0.1:9",))
    sweeping = asyncio.create_task(drafts.run(sweep_s=0.02))

    def up() -> set[str]:
        return {status.address for status in drafts.statuses() if status.connected}

    async with watch_services(ADDRESSES, kubeconfig(tmp_path, api), drafts.update, QUICK) as directory:
        a = await pods.start("a", DraftServicer(echo))
        b = await pods.start("b", DraftServicer(echo))
        await eventually(lambda: up() == {a, b})
        assert len(drafts.statuses()) == 3 and directory.num_listed == 2
        await pods.list("a", ready=False)
        await eventually(lambda: told.leaving == {a: True})
        assert up() == {a, b}, "its sessions may end"
        await pods.list("a")
        await eventually(lambda: told.leaving == {a: False})
        await pods.list("b", ready=False, terminating=True)
        await eventually(lambda: told.leaving.get(b) is True)
        echo.up[-1].send([Drop(1, "draining")])
        await pods.kill("b")
        await eventually(lambda: {s.address for s in drafts.statuses()} == {a, "127.0.0.1:9"})
        assert directory.num_listed == 1
        await api.delete("a")
        await eventually(lambda: told.leaving[a])
        clock.now_s += LEFT_S
        await eventually(lambda: {s.address for s in drafts.statuses()} == {"127.0.0.1:9"})
        assert told.downs, "a link that stays too long is closed"
        await api.delete("b")
        await eventually(lambda: directory.num_listed == 0)
    sweeping.cancel()
    await asyncio.gather(sweeping, return_exceptions=True)
    await drafts.aclose()
    await pods.end()
    await api.stop()


@dataclass(eq=False)
class Flapping:
    """A link that is up whenever somebody looks."""

    address: str

    def send(self, items: Sequence[DraftBound]) -> None:
        """Nobody hears it."""

    def refuse(self, field: str) -> None:
        """It has said nothing."""

    def status(self) -> DraftStatus:
        return DraftStatus(self.address, True)

    async def run(self) -> None:
        await asyncio.get_running_loop().create_future()


async def test_a_draft_that_left_gets_no_session_though_its_link_comes_back_at_once() -> None:
    target = Following(TargetSection(drafts=()), StepCosts({1: 0.02}), TargetMetrics("tiny"))
    link, hello = Flapping("a:1"), DraftHello(PROTOCOL_VERSION, 0, "ngram", 0, "", None, 0, 64, 16, 8)
    drafts = Drafts(lambda address, name: link, target, Clock(), ROSTER)
    drafts.update({"a:1": ""})
    target.link_up(link, hello)
    target.inbox.drain()
    assert target.pool.has_room(0.0)
    drafts.update({})
    target.link_down(link, "unavailable")
    target.link_up(link, hello)
    drafts.sweep()
    target.inbox.drain()
    assert not target.pool.has_room(0.0)
    drafts.update({"a:1": ""})
    target.inbox.drain()
    assert target.pool.has_room(0.0)
    await drafts.aclose()


@dataclass(eq=False)
class Away(Flapping):
    """One that is not up."""

    problem: str

    def status(self) -> DraftStatus:
        return DraftStatus(self.address, False, problem=self.problem)


@pytest.mark.parametrize("why", [REFUSED, LEFT_ALONE])
async def test_a_draft_that_is_gone_without_is_not_forgotten_while_it_answers(why: str) -> None:
    """It would be found again and told of anew each minute, and one that broke the protocol forgiven."""
    away = Away("b:1", f"{why}vocab_size: draft 9, target 10")
    links = {"a:1": Flapping("a:1"), "b:1": away}
    clock = Clock()
    drafts = Drafts(lambda address, name: links[address], Told(), clock, ROSTER)
    drafts.update(dict.fromkeys(links, ""))
    clock.now_s += SILENT_S
    drafts.sweep()
    assert [status.address for status in drafts.statuses()] == ["a:1", "b:1"]
    away.problem = "unavailable"
    clock.now_s += SILENT_S
    drafts.sweep()
    assert [status.address for status in drafts.statuses()] == ["a:1"]
    await drafts.aclose()


async def test_a_draft_that_is_listed_and_cut_off_is_not_forgotten() -> None:
    """A network policy that cuts off a ready pod: it was found again, and told of anew, each minute."""
    links = {"a:1": Flapping("a:1"), "b:1": Away("b:1", "unavailable")}
    clock, dialled = Clock(), list[str]()

    def connect(address: str, name: str) -> Flapping:
        dialled.append(address)
        return links[address]

    drafts = Drafts(connect, Told(), clock, ROSTER)
    for _ in range(20):  # discovery repeats its list every 15 s
        drafts.update(dict.fromkeys(links, ""))
        drafts.sweep()
        clock.now_s += 15.0
        drafts.sweep()
    assert dialled == ["a:1", "b:1"]
    clock.now_s += SILENT_S  # the API server is away: the list is old
    drafts.sweep()
    assert [status.address for status in drafts.statuses()] == ["a:1"]
    await drafts.aclose()


class Ending(TargetMetrics):
    """Whoever tells it of bytes, once it is over, dies of it."""

    over = False

    def wire_bytes(self, direction: str, count: int) -> None:
        if self.over:
            raise RuntimeError("over")


@needs_openssl
async def test_in_vllm_links_find_pods_and_know_them_by_their_services_name(tmp_path: Path) -> None:
    ca = authority(tmp_path / "ca")
    server, client = issue(ca, "draft", "DNS:target.ns.svc"), issue(ca, "target", "DNS:x.ns.svc")
    api, metrics = StandIn(), Ending("tiny")
    await api.start()
    pods = Pods(api, server)
    session = Following(TargetSection(), StepCosts({1: 0.02, 64: 0.03}), metrics)
    shown = TlsSection(folder=str(laid(client, tmp_path / "client")))
    options = Options(ADDRESSES, tls=shown, kubeconfig=kubeconfig(tmp_path, api))
    links = await asyncio.to_thread(Links, options, HELLO, session, metrics)
    a = await pods.start("a", DraftServicer(Echo()))
    await eventually(lambda: [s.address for s in links.statuses() if s.connected] == [a])
    assert links.expected == 1
    await pods.list("a", ready=False, terminating=True)
    await pods.kill("a")
    await eventually(lambda: not links.statuses() and not links.expected)
    metrics.over = True
    await eventually(lambda: not links.alive)
    await api.stop()


def test_in_vllm_what_no_link_can_be_made_with_is_told_at_once(tmp_path: Path) -> None:
    metrics = TargetMetrics("tiny")
    session = Following(TargetSection(), StepCosts({1: 0.02, 64: 0.03}), metrics)
    with pytest.raises(ConfigError, match=r"tls: cannot read .*tls\.crt"):
        Links(Options(("127.0.0.1:1",), tls=TlsSection(folder=str(tmp_path))), HELLO, session, metrics)
    with pytest.raises(ConfigError, match="kubernetes:///"):
        Links(Options(ADDRESSES, kubeconfig=str(tmp_path / "none")), HELLO, session, metrics)
