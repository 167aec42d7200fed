"""A node of the test's own: it takes the pods that the scheduler gives it and runs them as processes (``pod``).

Every service gets a loopback address, from which each connection goes to one of the ready endpoints in its slices, as
kube-proxy and a cluster's DNS would see to. It knows nothing about what runs in the pods.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from slipstream.observe.vitals import background_tasks
from tests_k8s.cluster import Cluster
from tests_k8s.kubelet import kubelet
from tests_k8s.pod import Pod, now

NAME = "processes"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
ROOM = {"cpu": "64", "memory": "256Gi", "pods": "64", "ephemeral-storage": "1Ti"}  # whatever is asked, it fits
LOOK_S = 0.3
BEAT_S = 5.0
PATIENCE_S = 60.0


class Node:
    """Made by ``on_node``."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.folder = folder
        self.pods: dict[str, Pod] = {}  # by UID
        self._cluster = cluster
        self._api = httpx.AsyncClient(base_url=cluster.door.url, timeout=PATIENCE_S)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        place = random.randrange(20, 250)  # so that two runs at a time do not meet
        self._addresses: Iterator[str] = (f"127.{place}.{n // 250}.{n % 250 + 1}" for n in itertools.count())
        self._services: dict[tuple[str, str], str] = {}
        self._listening: list[asyncio.Server] = []
        self._naming = asyncio.Lock()

    async def service(self, name: str, namespace: str) -> str:
        """The address of a service; its ports are those of the service. The name itself if there is none such."""
        key = (namespace, name)
        async with self._naming:
            if key not in self._services:
                try:
                    found = await self.read(f"/api/v1/namespaces/{namespace}/services/{name}")
                except httpx.HTTPStatusError:
                    return f"{name}.{namespace}.svc"
                self._services[key] = next(self._addresses)
                for port in found["spec"]["ports"]:
                    await self._listen(key, port["name"], port["port"])
            return self._services[key]

    async def read(self, path: str) -> dict[str, Any]:
        found: dict[str, Any] = (await self._api.get(path)).raise_for_status().json()
        return found

    async def kubeconfig(self, namespace: str, account: str) -> str:
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 7200}}
        token = (await self._api.post(path, json=asked)).raise_for_status().json()["status"]["token"]
        mine = yaml.safe_load(self._cluster.kubeconfig.read_text())
        mine["users"][0]["user"] = {"token": token}
        return yaml.safe_dump(mine)

    def logs(self) -> str:
        """The ends of all containers' logs, for whoever asks why."""
        files = sorted(self.folder.glob("*/*.log"))
        return "\n".join(f"--- {file.relative_to(self.folder)}\n{file.read_text()[-1500:]}" for file in files)

    def _log(self, namespace: str, name: str, container: str) -> Path:
        return self._pod(namespace, name).folder / f"{container}.log"

    async def _begin(self, namespace: str, name: str, container: str,
                     command: Sequence[str]) -> asyncio.subprocess.Process:
        return await self._pod(namespace, name).execute(container, command)

    def _pod(self, namespace: str, name: str) -> Pod:
        return next(pod for pod in self.pods.values() if pod.namespace == namespace and pod.name == name)

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        """Registered, heard of, and taking pods while the block lasts."""
        async with kubelet(self.folder, self._log, self._begin) as port:
            await self.register()
            try:
                async with background_tasks(self.beat(port), self.work()):
                    yield
            finally:
                await self.aclose()

    async def register(self) -> None:
        await self._api.post("/api/v1/nodes", json={"metadata": {"name": NAME, "labels": {
            "kubernetes.io/hostname": NAME}}, "status": {"capacity": ROOM, "allocatable": ROOM}})
        await self._api.post(LEASES, json={"metadata": {"name": NAME}, "spec": {"holderIdentity": NAME}})

    async def beat(self, port: int) -> None:
        """Say that the node is well and where its kubelet is, until cancelled."""
        while True:
            with contextlib.suppress(httpx.HTTPError):
                await self._patch(f"/api/v1/nodes/{NAME}/status", {"status": {
                    "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
                    "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
                    "capacity": ROOM, "allocatable": ROOM, "conditions": [
                        {"type": "Ready", "status": "True", "reason": "KubeletReady", "lastHeartbeatTime": now()}]}})
                await self._patch(f"{LEASES}/{NAME}", {"spec": {
                    "renewTime": now().replace("Z", ".000000Z"), "leaseDurationSeconds": 300}})
            await asyncio.sleep(BEAT_S)

    async def work(self) -> None:
        """Begin and end pods as the API server says, until cancelled."""
        while True:
            with contextlib.suppress(httpx.HTTPError):
                found = (await self.read(f"/api/v1/pods?fieldSelector=spec.nodeName={NAME}"))["items"]
                for pod in found:
                    uid = pod["metadata"]["uid"]
                    if uid not in self._tasks:
                        self._tasks[uid] = asyncio.create_task(self._care(pod))
                    elif "deletionTimestamp" in pod["metadata"] and uid in self.pods:
                        self._begin_end(uid, pod)
                for uid in self.pods.keys() - {pod["metadata"]["uid"] for pod in found}:
                    self._begin_end(uid, {"metadata": {}})  # deleted by force
            await asyncio.sleep(LOOK_S)

    async def aclose(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await asyncio.gather(*(pod.end(1) for pod in self.pods.values()))
        for server in self._listening:
            server.close()
        with contextlib.suppress(httpx.HTTPError):
            await self._api.delete(f"/api/v1/nodes/{NAME}")
        await self._api.aclose()

    async def _care(self, found: dict[str, Any]) -> None:
        uid = found["metadata"]["uid"]
        pod = self.pods[uid] = Pod(found, self.folder / f"{found['metadata']['name']}-{uid[:4]}", next(self._addresses),
                                   self)
        running = asyncio.create_task(pod.run())
        path = _path(found) + "/status"
        try:
            while True:
                pod.reports.clear()
                with contextlib.suppress(httpx.HTTPError):
                    await self._patch(path, {"status": pod.status()})
                news = asyncio.create_task(pod.reports.wait())
                await asyncio.wait({news, running}, return_when=asyncio.FIRST_COMPLETED)
                if running.done():
                    running.result()
                    await self._patch(path, {"status": pod.status()})
                    return
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    def _begin_end(self, uid: str, found: dict[str, Any]) -> None:
        pod, caring = self.pods.pop(uid), self._tasks[uid]
        self._tasks[uid] = asyncio.create_task(self._end(pod, caring, found["metadata"]))

    async def _end(self, pod: Pod, caring: asyncio.Task[None], metadata: dict[str, Any]) -> None:
        caring.cancel()
        await asyncio.gather(caring, return_exceptions=True)
        await pod.end(metadata.get("deletionGracePeriodSeconds", 0))
        await self._api.request("DELETE", _path(pod.found), json={
            "gracePeriodSeconds": 0, "preconditions": {"uid": pod.found["metadata"]["uid"]}})

    async def _patch(self, path: str, body: dict[str, Any]) -> None:
        done = await self._api.patch(path, json=body, headers={"Content-Type": "application/merge-patch+json"})
        done.raise_for_status()

    async def _listen(self, service: tuple[str, str], port_name: str, port: int) -> None:
        async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError, httpx.HTTPError), contextlib.closing(writer):
                ends = await self._ends(service, port_name)
                if ends:
                    far_reader, far_writer = await asyncio.open_connection(*random.choice(ends))
                    with contextlib.closing(far_writer):
                        await asyncio.gather(_carry(reader, far_writer), _carry(far_reader, writer))

        self._listening.append(await asyncio.start_server(connect, self._services[service], port))

    async def _ends(self, service: tuple[str, str], port_name: str) -> list[tuple[str, int]]:
        """Ready endpoints, as slices tell them now."""
        found = await self.read(f"/apis/discovery.k8s.io/{self._cluster.slice_version}/namespaces/{service[0]}/"
                                f"endpointslices?labelSelector=kubernetes.io/service-name={service[1]}")
        return [(endpoint["addresses"][0], port["port"]) for one in found["items"] for port in one["ports"] or ()
                if port["name"] == port_name for endpoint in one["endpoints"] or ()
                if endpoint["conditions"].get("ready")]


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """All bytes, and then the end; a break is passed on too."""
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
    except OSError:
        writer.transport.abort()


def _path(pod: dict[str, Any] | Any) -> str:
    return f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"


@asynccontextmanager
async def on_node(cluster: Cluster, folder: Path) -> AsyncIterator[Node]:
    """A node that takes pods while the block lasts."""
    found = Node(cluster, folder)
    async with found.at_work():
        yield found
