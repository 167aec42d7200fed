"""A release whose pods run: deployments, the scheduler and slices are Kubernetes' own, the node runs processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

import httpx
import pytest
import yaml
from openai import AsyncOpenAI

from tests.eagle_folder import eagle_config, write_eagle_folder
from tests.kube import CHART
from tests.test_crash_families import INPUTS
from tests.tiny import write_tiny_model
from tests_k8s.cluster import Cluster
from tests_k8s.fleet import STUBBORN, asking
from tests_k8s.node import on_node
from tests_k8s.test_release import CPU
from tests_k8s.view import ACCOUNT

pytestmark = pytest.mark.timeout(3000)
ROLES = ("router", "target", "draft-main")
QUESTION = "abcabcabcabcabcabc abcabcabc"
WITHIN = "--timeout=600s"


class AnyNode(Protocol):
    """A node, as a release needs it."""

    async def service(self, name: str, namespace: str) -> str: ...

    def logs(self) -> str: ...


class Release:
    """A release ``r`` in ``namespace``, and the commands of docs/ that are given to it."""

    def __init__(self, cluster: Cluster, node: AnyNode, namespace: str) -> None:
        self.cluster = cluster
        self.node = node
        self.namespace = namespace

    async def run(self, name: str, *arguments: object) -> str:
        done = await asyncio.to_thread(self.cluster.run, name, "-n", self.namespace, *map(str, arguments))
        assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{self.node.logs()}"
        return done.stdout

    async def rolled_out(self, *roles: str) -> None:
        for role in roles:
            await self.run("kubectl", "rollout", "status", f"deployment/r-slipstream-{role}", WITHIN)

    async def pods(self, role: str) -> set[str]:
        found = await asyncio.to_thread(self.cluster.get, f"/api/v1/namespaces/{self.namespace}/pods?labelSelector="
                                        f"app.kubernetes.io/component={role}")
        return {pod["metadata"]["name"] for pod in found["items"]}

    async def until(self, holds: Callable[[set[str]], bool], role: str) -> None:
        async with asyncio.timeout(300):
            while not holds(await self.pods(role)):
                await asyncio.sleep(0.3)

    async def client(self) -> AsyncOpenAI:
        address = await self.node.service("r-slipstream-router", self.namespace)
        return AsyncOpenAI(base_url=f"http://{address}:8000/v1", api_key="none", max_retries=0, timeout=300)

    async def objects(self) -> set[str]:
        return await asyncio.to_thread(self.cluster.objects, self.namespace)

    async def only(self, expected: set[str]) -> None:
        """Wait until nothing else is left: what a deployment made goes after it."""
        async with asyncio.timeout(300):
            while (found := await self.objects()) != expected:
                assert expected <= found, expected - found
                await asyncio.sleep(0.5)


@asynccontextmanager
async def release(cluster: Cluster, namespace: str, folder: Path) -> AsyncIterator[tuple[Release, set[str]]]:
    """A node, and what was in the namespace before anything is installed."""
    async with on_node(cluster, folder / "node") as node:
        found = Release(cluster, node, namespace)
        async with asyncio.timeout(120):  # what the controllers put into each namespace
            while not {"serviceaccounts/default", "configmaps/kube-root-ca.crt"} <= await found.objects():
                await asyncio.sleep(0.3)
        yield found, await found.objects()


def values(folder: Path) -> Path:
    """Two drafts and a target of the tiny model, found by discovery with the rights of their service accounts."""
    settings = dict(one.split("=", 1) for one in STUBBORN)
    config: dict[str, object] = {}
    for name, value in {**settings, "router.model_name": "tiny", "draft.drafter": "ngram",
                        "wire.kubeconfig": f"{ACCOUNT}/kubeconfig"}.items():
        place = config
        *path, last = name.split(".")
        for part in path:
            place = place.setdefault(part, {})  # type: ignore[assignment]
        place[last] = yaml.safe_load(value)
    file = folder / "values.yaml"
    file.write_text(yaml.safe_dump({
        "config": config, "discovery": {"enabled": True}, "draft": {"replicas": 2},
        "model": {"path": "tiny", "prepare": False, "claim": {"existing": "models"}}}))
    return file


def claim(cluster: Cluster, namespace: str, folder: Path) -> str:
    """A claim named ``models`` on a folder of this machine. Returns the volume's path."""
    shared = {"accessModes": ["ReadWriteMany"], "storageClassName": "", "volumeName": namespace}
    cluster.post("/api/v1/persistentvolumes", {"metadata": {"name": namespace}, "spec": {
        "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteMany"], "hostPath": {"path": str(folder)}}})
    cluster.post(f"/api/v1/namespaces/{namespace}/persistentvolumeclaims", {
        "metadata": {"name": "models"}, "spec": {**shared, "resources": {"requests": {"storage": "1Gi"}}}})
    return f"/api/v1/persistentvolumes/{namespace}"


async def drafted_by(r: Release) -> set[str]:
    """The drafters whose tokens were verified, as the targets' metrics have it. Pods come and go meanwhile."""
    found = set()
    for pod in list(r.node.pods.values()):
        if "-target-" in pod.found["metadata"]["name"]:
            try:
                async with httpx.AsyncClient() as http:
                    page = (await http.get(f"http://{pod.address}:9101/metrics")).text
            except httpx.TransportError:  # it has ended
                continue
            found |= {line.split('drafter="')[1].split('"')[0] for line in page.splitlines()
                      if line.startswith("slipstream_drafter_tokens_total{") and 'kind="drafted"' in line
                      and not line.endswith(" 0.0")}
    return found


async def test_a_release_is_scaled_restarted_and_upgraded_under_load(controlled: Cluster, namespace: str,
                                                                     tmp_path: Path) -> None:
    models = tmp_path / "models"
    write_tiny_model(models / "tiny")
    write_eagle_folder(models / "head-2", eagle_config(eagle_config=INPUTS))
    volume = claim(controlled, namespace, models)
    chart = (CHART, *CPU, "-f", values(tmp_path))
    async with release(controlled, namespace, tmp_path) as (r, before):
        await r.run("helm", "install", "r", *chart)
        await r.rolled_out(*ROLES)
        async with asking(await r.client(), QUESTION) as load:
            await load.until(drafted=True)
            await r.run("kubectl", "scale", "deployment/r-slipstream-draft-main", "--replicas=0")
            await r.until(lambda pods: not pods, "draft")
            await load.until(drafted=False)
            await r.run("kubectl", "scale", "deployment/r-slipstream-draft-main", "--replicas=2")
            await r.rolled_out("draft-main")
            await load.until(drafted=True)
            print(f"2 drafts, none, 2 again: {len(load.answered)} answers, {len(load.failures)} failed")
            for role in ROLES:
                old, begun = await r.pods(role.partition("-")[0]), len(load.answered)
                await r.run("kubectl", "rollout", "restart", f"deployment/r-slipstream-{role}")
                await r.rolled_out(role)
                await r.until(lambda pods, old=old: not pods & old, role.partition("-")[0])
                await load.until(drafted=True)
                print(f"{role} restarted: {len(load.answered) - begun} answers, {len(load.failures)} failed")
            canary = {"name": "canary", "model": "head-2", "share": 50, "config": {"drafter": "eagle3"}}
            pools = json.dumps([{"name": "main"}, canary])
            await r.run("helm", "upgrade", "r", *chart, "--set-json", f"draft.pools={pools}")
            await r.rolled_out("draft-canary", *ROLES)
            begun = len(load.answered)
            async with asyncio.timeout(240):
                while len(await drafted_by(r)) < 2:
                    await asyncio.sleep(0.5)
            print(f"canary: {len(load.answered) - begun} answers, drafted by {sorted(await drafted_by(r))}")
            await r.run("helm", "test", "r", "--timeout=300s")
            assert not load.failures, load.failures
            assert len({answer.text for answer in load.answered}) == 1, "no answer is another"
        await r.run("helm", "uninstall", "r")
        await r.only(before)
    await asyncio.to_thread(controlled.delete, volume)
