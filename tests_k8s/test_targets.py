"""Targets in slices of a real API server, at the pace that routers have: who lives stays, who died goes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from router_service.balance import Balancer, Targets
from slipstream.base.config import WireSection
from slipstream.observe.metrics import RouterMetrics
from slipstream.protocol.requests import Request, Sampling
from slipstream.wire.discovery import watch_services
from slipstream.wire.roster import RosterRules
from slipstream.wire.server import GrpcServer
from slipstream.wire.target import TargetClient, TargetServicer
from tests.api_server import endpoint
from tests.echo import EchoTarget
from tests_k8s.cluster import Cluster, Slices
from tests_k8s.own_server import OwnServer

pytestmark = pytest.mark.timeout(900)
WIRE = WireSection()
SPARE_S = 60.0  # what a busy machine may add


async def until(holds: Callable[[], bool], within_s: float) -> float:
    """Wait; returns how long it took."""
    began_s = time.monotonic()
    async with asyncio.timeout(within_s):
        while not holds():
            await asyncio.sleep(0.05)
    return time.monotonic() - began_s


async def test_without_the_api_server_the_living_stay_and_the_dead_go(cluster: Cluster, namespace: str,
                                                                      own: OwnServer) -> None:
    slices = Slices(cluster, namespace)
    slices.need_loopback()
    targets = Targets({}, lambda address, name: TargetClient(address, connect_s=1.0))
    balancer = Balancer(targets, RouterMetrics("tiny"))

    def known() -> dict[str, bool]:
        return {target.name: target.ready for target in targets}

    async def ask() -> int:
        return sum([len(piece.tokens) async for piece in balancer.submit(Request("r", (1, 2), Sampling(), 8))])

    servers = {}
    for name in ("a", "b"):
        server = GrpcServer("127.0.0.1:0", WIRE, [TargetServicer(EchoTarget())])
        servers[name] = (server, await server.start())
        await asyncio.to_thread(slices.put, name, endpoint("127.0.0.1", pod=name), port=servers[name][1])
    a, b = (f"127.0.0.1:{port}" for _, port in servers.values())
    async with watch_services((f"kubernetes:///target.{namespace}:grpc",), str(cluster.kubeconfig), targets.update):
        polling = asyncio.create_task(balancer.run())
        try:
            await until(lambda: known() == {a: True, b: True}, SPARE_S)
            await asyncio.to_thread(own.kill_api)
            await servers["b"][0].drain(0)
            assert await asyncio.gather(*(ask() for _ in range(10))) == [8] * 10
            out_s = await until(lambda: not known()[b], 6 + SPARE_S)
            gone_s = out_s + await until(lambda: b not in known(), RosterRules().silent_s + SPARE_S)
            assert known() == {a: True} and await ask() == 8
            await asyncio.to_thread(own.start_api)
            await asyncio.to_thread(slices.delete, "b")
            assert known()[a] and await ask() == 8
            print(f"not used after {out_s:.1f} s, forgotten after {gone_s:.1f} s")
        finally:
            polling.cancel()
            await asyncio.gather(polling, return_exceptions=True)
            await targets.aclose()
            await servers["a"][0].drain(0)
