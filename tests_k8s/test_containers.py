"""A release whose pods are containers: the images that `make image` builds, on a node of Kubernetes' own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from slipstream import __version__
from tests.kube import CHART, program
from tests_k8s.cluster import Cluster, own_cluster
from tests_k8s.containers import bridge, missing, on_containers
from tests_k8s.fleet import asking
from tests_k8s.test_nodes import ROLES, Release
from tests_k8s.test_release import CPU

pytestmark = pytest.mark.timeout(3000)
IMAGES = tuple(f"slipstream:{__version__}-{variant}" for variant in ("router", "cpu"))
# All fits on two cores while a deployment is rolled out, and the policy does not give drafts up.
VALUES = ("discovery.enabled=true", "target.resources.requests.cpu=200m", "draft.resources.requests.cpu=200m",
          "router.resources.requests.cpu=100m", "config.target.policy.always=true", "config.router.model_name=tiny")
QUESTION = "Copy this: the quick brown fox jumps over the lazy dog, and the lazy dog sleeps."
WRITES = "import os; print(os.getuid(), os.access('/', os.W_OK), os.access('/tmp', os.W_OK))"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """An API server that containers reach, with its controllers."""
    if lacking := missing(IMAGES):
        pytest.skip(f"pods in containers need {lacking}")
    with own_cluster(tmp_path / "own", bridge()) as found:
        assert found.own is not None
        found.own.start_controllers()
        yield found


async def pods(r: Release, role: str) -> list[dict[str, Any]]:
    return json.loads(await r.run("kubectl", "get", "pods", "-o", "json", "-l",
                                  f"app.kubernetes.io/component={role}"))["items"]


async def restarts(r: Release, role: str) -> int:
    return sum(status["restartCount"] for pod in await pods(r, role) for status in pod["status"]["containerStatuses"])


@asynccontextmanager
async def forwarded(r: Release, service: str, port: int) -> AsyncIterator[str]:
    """The address of `kubectl port-forward` while the block lasts."""
    process = await asyncio.create_subprocess_exec(
        program("kubectl"), f"--kubeconfig={r.cluster.kubeconfig}", "-n", r.namespace, "port-forward",
        f"service/{service}", f":{port}", stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        said = await asyncio.wait_for(process.stdout.readline(), 60)
        yield f"http://127.0.0.1:{said.decode().split(':')[1].split()[0]}"
    finally:
        process.terminate()
        await process.wait()


async def test_a_release_of_containers(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    chart = (CHART, *CPU, *(word for value in VALUES for word in ("--set", value)))
    async with on_containers(cluster, tmp_path / "node") as node:
        r = Release(cluster, node, namespace)
        before = await r.objects()
        await r.run("helm", "install", "r", *chart)
        await r.rolled_out(*ROLES)
        await r.run("helm", "test", "r", "--timeout=300s")
        for role in ROLES:
            said = await r.run("kubectl", "exec", f"deployment/r-slipstream-{role}", "--", "python3", "-c", WRITES)
            assert said.split() == ["65532", "False", "True"], role
        async with asking(await r.client(), QUESTION) as load:
            await load.until(drafted=True)
            node.kill(namespace, "draft")
            await asyncio.wait_for(_restarted(r, "draft"), 300)
            await load.until(drafted=True)
            print(f"the draft killed: {len(load.answered)} answers, {len(load.failures)} failed")
            for role in ROLES:
                begun = len(load.answered)
                await r.run("kubectl", "rollout", "restart", f"deployment/r-slipstream-{role}")
                await r.rolled_out(role)
                await load.until(drafted=True)
                print(f"{role} restarted: {len(load.answered) - begun} answers, {len(load.failures)} failed")
            assert not load.failures, load.failures
            assert len({answer.text for answer in load.answered}) == 1, "no answer is another"
        async with forwarded(r, "r-slipstream-router", 8000) as address, httpx.AsyncClient(timeout=60) as http:
            assert (await http.get(f"{address}/v1/models")).json()["data"][0]["id"] == "tiny"
        await r.run("helm", "upgrade", "r", *chart, "--set", "discovery.enabled=false")  # names in its place
        await r.rolled_out(*ROLES)
        await r.run("helm", "test", "r", "--timeout=300s")
        await r.run("helm", "uninstall", "r")
        await r.only(before)


async def _restarted(r: Release, role: str) -> None:
    while not await restarts(r, role):
        await asyncio.sleep(1)
