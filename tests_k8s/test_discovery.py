"""Discovery against a real API server: pods come and go, watches break, versions are forgotten, the server dies."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from slipstream.base.address import ServiceAddress, service_address
from slipstream.base.errors import Unavailable
from slipstream.wire.cluster import ApiServer, Change, api_server
from slipstream.wire.discovery import Directory, WatchRules, watch_services
from tests.api_server import endpoint
from tests_k8s.cluster import Cluster, Door, Slices
from tests_k8s.own_server import OwnServer

pytestmark = pytest.mark.timeout(900)
QUICK = WatchRules(resync_s=600.0, repeat_s=0.2, backoff_min_s=0.05, backoff_max_s=0.5)
A, B, C = "10.0.0.1:50051", "10.0.0.2:50051", "10.0.0.3:50051"
WITHIN_S = 120.0  # not how long it takes, but how long a busy machine may


class Told:
    """What a directory told, and a way to wait for it."""

    def __init__(self) -> None:
        self.told: list[set[str]] = []
        self.directory: Directory
        self._news = asyncio.Event()

    def seen(self, ready: Mapping[str, str]) -> None:
        self.told.append(set(ready))
        self._news.set()

    async def ready(self, *addresses: str) -> None:
        """Wait until it tells exactly these."""
        async with asyncio.timeout(WITHIN_S):
            while not self.told or self.told[-1] != set(addresses):
                self._news.clear()
                await self._news.wait()

    async def stale(self) -> None:
        """Wait until it knows that nobody tells it anything."""
        async with asyncio.timeout(WITHIN_S):
            while self.directory.in_sync:
                await asyncio.sleep(0.02)


@asynccontextmanager
async def telling(kubeconfig: str | Path, namespace: str) -> AsyncIterator[Told]:
    found = Told()
    address = f"kubernetes:///target.{namespace}:50051"
    async with watch_services((address,), str(kubeconfig), found.seen, QUICK) as found.directory:
        yield found


async def test_pods_appear_become_unready_and_vanish(cluster: Cluster, namespace: str) -> None:
    slices = Slices(cluster, namespace)
    async with telling(cluster.kubeconfig, namespace) as f:
        await f.ready()
        await asyncio.to_thread(slices.put, "s1", endpoint("10.0.0.1", ready=False))
        await asyncio.to_thread(slices.put, "other", endpoint("10.0.0.9"), service="another")
        await asyncio.to_thread(slices.put, "s1", endpoint("10.0.0.1"), endpoint("10.0.0.2"))
        await f.ready(A, B)
        await asyncio.to_thread(slices.put, "s2", endpoint("10.0.0.3"))
        await f.ready(A, B, C)
        await asyncio.to_thread(slices.put, "s1", endpoint("10.0.0.1", ready=False), endpoint("10.0.0.2"))
        await f.ready(B, C)
        assert f.directory.num_listed == 3, "who is not ready is still there"
        await asyncio.to_thread(slices.delete, "s2")
        await f.ready(B)
        await asyncio.to_thread(slices.delete, "s1")
        await f.ready()


async def test_a_dropped_watch_forgets_nobody(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    slices, door = Slices(cluster, namespace), Door(cluster.kubeconfig)
    await asyncio.to_thread(door.open)
    try:
        async with telling(door.kubeconfig_through(tmp_path / "kubeconfig"), namespace) as f:
            await asyncio.to_thread(slices.put, "s1", endpoint("10.0.0.1"))
            await f.ready(A)
            door.shut()
            await f.stale()
            await asyncio.to_thread(slices.put, "s1", endpoint("10.0.0.1"), endpoint("10.0.0.2"))
            known = len(f.told)
            await asyncio.to_thread(door.open)
            await f.ready(A, B)
            assert all(A in told for told in f.told[known - 1:]), "nobody was forgotten"
    finally:
        door.shut()


class Forgotten:
    """The real API server, whose first watch is asked to go on from a version that it no longer has."""

    def __init__(self, server: ApiServer) -> None:
        self._server = server
        self.api_version, self.list, self.aclose = server.api_version, server.list, server.aclose
        self.refused = 0

    async def watch(self, version: str, service: ServiceAddress, since: str) -> AsyncGenerator[Change, None]:
        try:
            async with contextlib.aclosing(self._server.watch(version, service, since if self.refused else "1")) as it:
                async for change in it:
                    yield change
        except Unavailable as error:
            self.refused += "has forgotten" in str(error)
            raise


async def test_a_forgotten_version_leads_to_another_list(cluster: Cluster, namespace: str) -> None:
    if cluster.own is not None:  # others are older than their memory
        await asyncio.to_thread(cluster.own.compact)
        await asyncio.to_thread(cluster.own.kill_api)
        await asyncio.to_thread(cluster.own.start_api)
    slices, f = Slices(cluster, namespace), Told()
    await asyncio.to_thread(slices.put, "s1", endpoint("10.0.0.1"))
    server = Forgotten(await api_server(str(cluster.kubeconfig)))
    f.directory = Directory((f"kubernetes:///target.{namespace}:50051",), server, f.seen, QUICK)
    following = asyncio.create_task(f.directory.run())
    try:
        await f.ready(A)
        await asyncio.to_thread(slices.put, "s1", endpoint("10.0.0.2"))
        await f.ready(B)
        assert server.refused == 1, "410 Gone came from the server itself"
        assert set() not in f.told[f.told.index({A}):]
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await server.aclose()


async def test_the_server_dies_and_comes_back(cluster: Cluster, namespace: str, own: OwnServer) -> None:
    slices = Slices(cluster, namespace)
    await asyncio.to_thread(slices.put, "s1", endpoint("10.0.0.1"), endpoint("10.0.0.2"))
    async with telling(cluster.kubeconfig, namespace) as f:
        await f.ready(A, B)
        own.kill_api()
        await f.stale()
        told = len(f.told)
        await asyncio.sleep(5 * QUICK.repeat_s)
        assert len(f.told) == told, "what may have changed is not repeated"
        await asyncio.to_thread(own.start_api)
        await asyncio.to_thread(slices.put, "s1", endpoint("10.0.0.2"), endpoint("10.0.0.3"))
        await f.ready(B, C)
        assert all(B in told for told in f.told[told - 1:]), "who lived all along was never forgotten"


async def test_a_stranger_may_not_list(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    """Whose token is wrong hears so in a sentence, and does not take that for an empty list."""
    text = await asyncio.to_thread(cluster.kubeconfig.read_text)
    if cluster.own is None or "token: " not in text:
        pytest.skip("needs a server whose administrator has a token")
    head, _, rest = text.partition("token: ")
    file = tmp_path / "kubeconfig"
    file.write_text(f"{head}token: wrong{rest[rest.index('}'):]}")
    server = await api_server(str(file))
    service = service_address(f"kubernetes:///target.{namespace}:50051")
    assert service is not None
    with pytest.raises(Unavailable, match="401"):
        await server.list(cluster.slice_version, service)
    await server.aclose()
